//! Reports of documents that become free.

use super::*;
use actix_doclock::store::{Change, Rules, Watch};

/// Waits for the change that `is_it` accepts.
pub(super) async fn told(watch: &mut Watch, what: &str, is_it: impl Fn(&Change) -> bool) {
    let told = async {
        loop {
            match watch.next().await {
                Some(Ok(change)) if is_it(&change) => return,
                Some(Ok(_)) => {}
                other => panic!("{what}: the watch ended: {other:?}"),
            }
        }
    };
    tokio::time::timeout(30 * SECOND, told).await.unwrap_or_else(|_| panic!("{what}: not told"));
}

cases! {
    tests watch($);
    needs [Watch];

    #[needs(Sessions, Fair, Fenced)]
    async fn a_watch_reports_every_document_that_becomes_free(store, alice, bob) {
        let rules = Rules::new(TTL);
        for rules in [rules, rules.fenced(), rules.fair()] {
            store.prepare(COLLECTION, &rules, NONE).await.unwrap();
            let Some(mut watch) = store.watch(COLLECTION, NONE).await.unwrap() else { return };
            let mut tells = async |id: &str, how: &str| {
                let freed = Change::Freed(key(id));
                told(&mut watch, how, |it| *it == freed || *it == Change::Missed).await;
            };
            // Each way has its own document, so that no earlier change counts.
            let id = |how: &str| format!("{how}: {rules:?}");
            for how in WAYS {
                let id = id(how);
                let mine = store.granted(&id, &Aid::new()).await;
                store.loses(&mine, &id, how).await;
                tells(&id, how).await;
            }
            // When one of two readers leaves, the other may become a writer.
            let id = id("read");
            let of_alice = store.granted(&id, &reading(alice)).await;
            let of_bob = store.granted(&id, &reading(bob)).await;
            store.releases(&of_alice).await;
            tells(&id, "a reader has left").await;
            if rules.fair {
                let waiter = store.queues(&id, fair::Waits::new(Exclusive)).await;
                store.releases(&of_bob).await;
                tells(&id, "the last reader has left").await;
                let other = store.queues(&id, fair::Waits::new(Exclusive)).await;
                store.sets(&id, &waiter, Some(other.place())).await;
                tells(&id, "a place has moved on").await;
                store.sets(&id, &waiter, None).await;
                tells(&id, "a place was given up").await;
            }
            store.releases_all(bob).await;
        }
    }
}
