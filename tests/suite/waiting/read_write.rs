//! Readers and writers at random, compared with a model of the sessions that are inside.

use std::collections::HashMap;

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, Holder, Lock, LockToken, Lockable, Mode, Released, TryAcquire,
    store::{Claim, Rules, Store},
};
use doclock_conformance::Shorthand;

use mongodb::bson::doc;

use super::*;
use crate::rig::{app::lock_records, depth};

const TASKS: usize = 32;
const STEPS: usize = 1_600;
const DOCUMENTS: [&str; 3] = ["a", "b", "c"];
/// The ttl of a session that is about to become idle.
const SHORT: Duration = Duration::from_millis(200);

/// The sessions that are inside, as far as they know. An idle session is inside until its lease is
/// over.
#[derive(Default)]
struct Model(Mutex<HashMap<&'static str, HashMap<usize, In>>>);

struct In {
    mode: Mode,
    until: Option<Instant>,
}

impl Model {
    fn enters(&self, id: &'static str, task: usize, mode: Mode) {
        let mut model = self.0.lock().unwrap();
        let inside = model.entry(id).or_default();
        inside.remove(&task);
        let now = Instant::now();
        inside.retain(|_, other| other.until.is_none_or(|until| until > now));
        let is_alone = inside.is_empty();
        let only_readers = inside.values().all(|other| other.mode == Mode::Shared);
        assert!(
            if mode == Mode::Shared { only_readers } else { is_alone },
            "{task} is in as {mode:?} together with {:?}",
            inside.iter().map(|(task, other)| (task, other.mode)).collect::<Vec<_>>()
        );
        inside.insert(task, In { mode, until: None });
    }

    fn leaves(&self, id: &'static str, task: usize) {
        self.0.lock().unwrap().entry(id).or_default().remove(&task);
    }

    fn becomes_idle(&self, id: &'static str, task: usize, until: Instant) {
        if let Some(it) = self.0.lock().unwrap().entry(id).or_default().get_mut(&task) {
            it.until = Some(until);
        }
    }
}

/// Random enough for a schedule, and the same for the same seed (Marsaglia's xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

async fn task(store: Arc<impl Store>, model: Arc<Model>, task: usize, mut random: Random) {
    let mut held: Option<(&'static str, Lock)> = None;
    let mut aid = Aid::new();
    for _ in 0..STEPS * depth() as usize / TASKS {
        match &held {
            None => {
                let id = DOCUMENTS[random.below(3) as usize];
                let mode = if random.below(10) < 7 { Mode::Shared } else { Mode::Exclusive };
                let becomes_idle = random.below(40) == 0;
                let claim = claim(&aid, mode, if becomes_idle { SHORT } else { TTL });
                if let TryAcquire::Granted(lock) =
                    store.try_acquire(&key(id), &claim, Deadline::NONE).await.unwrap()
                {
                    model.enters(id, task, mode);
                    if becomes_idle {
                        // A new session goes on in this task.
                        model.becomes_idle(id, task, lock.expires_at);
                        aid = Aid::new();
                    } else {
                        held = Some((id, lock));
                    }
                }
            }
            Some((id, lock)) => match random.below(4) {
                0 if lock.mode == Mode::Shared => {
                    let claim = Claim { upgrades: lock.token, ..claim(&aid, Mode::Exclusive, TTL) };
                    match store.try_acquire(&lock.key, &claim, Deadline::NONE).await.unwrap() {
                        TryAcquire::Granted(lock) => {
                            model.enters(id, task, Mode::Exclusive);
                            held = Some((id, lock));
                        }
                        TryAcquire::Held(other) => assert_ne!(other.aid, aid),
                        other => panic!("{other:?}"),
                    }
                }
                1 => {
                    let renewed =
                        store.renew_all(WorkItem::COLLECTION, &[aid.clone()]).await.unwrap();
                    assert_eq!(renewed, 1, "the held lock is renewed");
                }
                2 => {
                    let inspected = store.inspect(&lock.key, Some(&aid)).await.unwrap().unwrap();
                    assert_eq!((inspected.token, inspected.mode), (lock.token, lock.mode));
                }
                _ => {
                    model.leaves(id, task);
                    let token = lock.token.unwrap();
                    let released = store.release(&lock.key, &aid, token, lock.mode).await.unwrap();
                    assert_eq!(released, Released::Released);
                    held = None;
                }
            },
        }
    }
    if let Some((id, lock)) = held {
        model.leaves(id, task);
        store.release(&lock.key, &aid, lock.token.unwrap(), lock.mode).await.unwrap();
    }
}

fn claim(aid: &Aid, mode: Mode, ttl: Duration) -> Claim {
    let (aid, token, holder) = (aid.clone(), LockToken::new(), Holder::new("alice"));
    Claim {
        aid,
        token,
        holder,
        mode,
        ttl,
        tab: None,
        page: None,
        taken: None,
        max_hold: None,
        turn: None,
        upgrades: None,
    }
}

async fn random_schedule(store: impl Store) {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0 | 1);
    eprintln!("SEED={seed}");
    store.prepare(WorkItem::COLLECTION, &Rules::new(TTL), Deadline::NONE).await.unwrap();
    let (store, model) = (Arc::new(store), Arc::<Model>::default());
    let mut tasks = JoinSet::new();
    for n in 0..TASKS {
        let random = Random(seed.wrapping_mul(2 * n as u64 + 1) | 1);
        tasks.spawn(task(Arc::clone(&store), Arc::clone(&model), n, random));
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_random_schedule_in_memory_a_writer_is_always_alone() {
    random_schedule(MemoryStore::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_random_schedule_on_mongodb_a_writer_is_always_alone() {
    let database = fresh_database(mongod::shared_replica_set().await.uri()).await;
    random_schedule(MongoStore::new(&database)).await;
    // The idle sessions are swept, and no others.
    sleep(SHORT).await;
    let live = MongoStore::new(&database);
    live.prepare(WorkItem::COLLECTION, &Rules::new(TTL), Deadline::NONE).await.unwrap();
    assert_eq!(live.list(WorkItem::COLLECTION, None, 100).await.unwrap().len(), 0);
    assert!(lock_records(&database).count_documents(doc! {}).await.unwrap() <= 3);
}
