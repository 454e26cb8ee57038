//! Readers and writers in any order.

use super::*;

/// Readers and writers observe each other from the inside: a writer is always alone.
#[tokio::test(flavor = "multi_thread")]
async fn readers_and_writers_at_random_keep_to_the_rules() {
    let mut all = [0; 2];
    for rules in [Rules::new(TTL), Rules::new(TTL).fair(), Rules::new(TTL).fair().fenced()] {
        let granted = at_random(rules).await;
        all = [0, 1].map(|mode| all[mode] + granted[mode]);
    }
    assert!(all[0] > 20 && all[1] > 100, "both kinds had their turn: {all:?}");
}

/// How many exclusive and shared locks were granted.
async fn at_random(rules: Rules) -> [i32; 2] {
    const TASKS: u64 = 16;
    let turns = 5 * depth() as usize;
    let (store, database) = store(rules).await;
    // Each reader adds one, a writer adds a thousand.
    let inside: Arc<Vec<AtomicI64>> = Arc::new((0..3).map(|_| AtomicI64::new(0)).collect());
    let mut running = JoinSet::new();
    for task in 0..TASKS {
        let (store, inside) = (store.clone(), inside.clone());
        running.spawn(async move {
            let mut random = task.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut next = move |below: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % below
            };
            let mut granted = [0; 2];
            for _ in 0..turns {
                let document = next(3) as usize;
                let key = key(&format!("{document}"));
                let shared = next(3) > 0;
                let mode = if shared { Mode::Shared } else { Mode::Exclusive };
                let claim = queues(&store, &key, mode).await;
                let mut tries = 0;
                let lock = loop {
                    match store.try_acquire(&key, &claim, Deadline::NONE).await.unwrap() {
                        TryAcquire::Granted(lock) => break Some(lock),
                        TryAcquire::Held(lock) => assert_ne!(lock.aid, claim.aid),
                        other => panic!("{other:?}"),
                    }
                    tries += 1;
                    if tries > 10 {
                        break None;
                    }
                    sleep(Duration::from_millis(next(20))).await;
                };
                let Some(lock) = lock else {
                    let nobody = claim.turn.map(|turn| turn.others).unwrap();
                    store.set_place(&key, &nobody, Deadline::NONE).await.unwrap();
                    continue;
                };
                granted[usize::from(shared)] += 1;
                let weight = if shared { 1 } else { 1_000 };
                let before = inside[document].fetch_add(weight, SeqCst);
                assert!(if shared { before < 1_000 } else { before == 0 }, "{mode:?}: {before}");
                sleep(Duration::from_millis(next(4))).await;
                if next(3) == 0 {
                    store.renew_all(COLLECTION, std::slice::from_ref(&lock.aid)).await.unwrap();
                }
                // A reader becomes a writer if it is alone.
                let upgrade = Claim {
                    mode: Mode::Exclusive,
                    token: LockToken::new(),
                    upgrades: lock.token,
                    turn: None,
                    ..claim
                };
                let mut held = lock;
                if shared
                    && next(4) == 0
                    && let TryAcquire::Granted(lock) =
                        store.try_acquire(&key, &upgrade, Deadline::NONE).await.unwrap()
                {
                    let before = inside[document].fetch_add(999, SeqCst);
                    assert_eq!(before, 1, "alone");
                    held = lock;
                }
                let weight = if held.mode == Mode::Shared { 1 } else { 1_000 };
                inside[document].fetch_sub(weight, SeqCst);
                assert_eq!(release(&store, &held).await, Released::Released);
            }
            granted
        });
    }
    let granted = running.join_all().await;
    let granted = [0, 1].map(|mode| granted.iter().map(|granted| granted[mode]).sum());
    println!("{rules:?}: {granted:?} exclusive and shared");
    assert!(store.list(COLLECTION, None, 10).await.unwrap().is_empty());
    let left = lock_records(&database).count_documents(doc! { "ts": { "$exists": true } }).await;
    assert_eq!(left.unwrap(), 0);
    if !rules.fenced {
        assert_eq!(count(&database).await, 0);
    }
    granted
}
