//! The verbs of the manager on the embedded store: the cost of the crate itself, without a database.

use actix_doclock::{Aid, MemoryStore};

use super::{Bench, cycle::in_turn, verbs};
use crate::{
    load::{Contender, cycle},
    ours,
    report::{Role, Row},
};

pub async fn measure(bench: &mut Bench<'_>) {
    let free = ours::manager(MemoryStore::new()).await;
    let held = ours::manager(MemoryStore::new()).await;
    let alice = Aid::new();
    verbs::hold(&held, &alice, 0..1).await;
    let renewing = (held.clone(), alice.clone());
    let renewal = cycle(move |_| {
        let (locks, aid) = renewing.clone();
        async move { locks.renew(&aid).await.unwrap() == 1 }
    });
    let mut all = vec![ours::locks("memory", free)];
    all[0].who = "acquire + release".into();
    let of = |who, cycle| Contender::new("memory", who, Role::Ours, cycle);
    all.push(of("re-entry", verbs::again(held.clone(), alice)));
    all.push(of("refusal, with the holder", verbs::refused(held)));
    all.push(of("renewal of 1 lock", renewal));
    let (time, rounds) = bench.effort.slices();
    let samples = in_turn(&all.iter().collect::<Vec<_>>(), 1, 1, time, rounds).await;
    for (it, samples) in all.iter().zip(samples) {
        bench.report.add(Row::new("embedded", it.at, &it.who, it.role).samples(&samples));
    }
}
