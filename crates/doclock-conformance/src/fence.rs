//! Fencing tokens.

use super::*;
use actix_doclock::{FencingToken, store::Rules};

async fn fenced(store: &impl Store) {
    store.prepare(COLLECTION, &Rules::new(TTL).fenced(), NONE).await.unwrap();
}

/// The lock of a new grant.
async fn fresh(store: &impl Store, claim: &Claim) -> Lock {
    match store.try_acquire(&key("a"), claim, NONE).await.unwrap() {
        TryAcquire::Granted(lock) => lock,
        other => panic!("not granted: {other:?}"),
    }
}

async fn fence(store: &impl Store, aid: &Aid) -> FencingToken {
    fresh(store, &claim(aid)).await.fence.expect("a fence")
}

cases! {
    needs [Fenced];

    #[needs(Sessions)]
    async fn fences_rise_over_release_expiry_takeover_break_and_end<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        fenced(store).await;
        let before = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let mut last = fence(store, &alice).await;
        let hour = 60 * 60 * SECOND;
        assert!(u128::from(last.get()) + hour.as_millis() > before.as_millis(), "not below the clock");
        let mut rises = async |how: &str, aid: &Aid| {
            // The clock hardly moves: all of this happens within a few milliseconds.
            let next = fence(store, aid).await;
            assert!(next > last, "{how}: {next} after {last}");
            last = next;
        };
        let seen = async || store.inspect(&key("a"), None).await.unwrap().unwrap();
        let release = async |lock: Lock| {
            let token = lock.token.unwrap();
            store.release(&key("a"), &lock.aid, token, lock.mode).await.unwrap()
        };
        for _ in 0..20 {
            assert_eq!(release(seen().await).await, Released::Released);
            assert!(store.inspect(&key("a"), None).await.unwrap().is_none(), "free");
            assert_eq!(store.list(COLLECTION, None, 10).await.unwrap().len(), 0);
            rises("released", &alice).await;
        }
        subject.age(&key("a"), TTL).await;
        rises("taken over", &bob).await;
        subject.age(&key("a"), TTL).await;
        // Alice by the takeover, Bob by the sweep.
        assert_eq!(sweep(store, 100).await.sessions, 2);
        assert!(announce_all(store).await.iter().all(|ended| ended.locks == [key("a")]));
        assert_eq!(sweep(store, 100).await.next, None);
        rises("swept", &alice).await;
        assert_eq!(store.break_lock(&seen().await, &taken()).await.unwrap(), Released::Released);
        rises("broken", &alice).await;
        let token = seen().await.token.unwrap();
        assert_eq!(store.retract(&key("a"), &alice, &[token], Mode::Exclusive).await.unwrap(), Released::Released);
        rises("retracted", &alice).await;
        store.release_all(COLLECTION, &alice, NONE).await.unwrap();
        rises("all released", &alice).await;
        end(store, &alice, EndReason::LoggedOut).await;
        rises("ended", &bob).await;
    }

    #[needs(Documents)]
    async fn reentry_renewal_and_repetition_keep_the_fence<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        fenced(store).await;
        let claim = claim(&alice);
        let first = fresh(store, &claim).await.fence;
        assert!(first.is_some());
        assert_eq!(fresh(store, &claim).await.fence, first, "repeated");
        match store.try_acquire(&key("a"), &self::claim(&alice), NONE).await.unwrap() {
            TryAcquire::AlreadyMine(lock) => assert_eq!(lock.fence, first, "re-entered"),
            other => panic!("{other:?}"),
        }
        store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap();
        assert_eq!(held(store, &key("a"), &Aid::new()).await.fence, first, "others see it too");
        assert_eq!(store.list(COLLECTION, None, 10).await.unwrap()[0].fence, first);
        put(subject, "a", "old").await;
        let saved = save(store, &key("a"), &alice, claim.token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::Saved);
        assert_eq!(store.inspect(&key("a"), None).await.unwrap().unwrap().fence, first);
    }

    #[needs(Sessions)]
    async fn each_reader_and_each_upgrade_has_its_own_fence<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        fenced(store).await;
        let reading = |aid: &Aid| Claim { mode: Mode::Shared, ..claim(aid) };
        let of_alice = fresh(store, &reading(&alice)).await;
        let of_bob = fresh(store, &reading(&bob)).await;
        assert!(of_bob.fence > of_alice.fence);
        let seen = store.inspect(&key("a"), Some(&alice)).await.unwrap().unwrap();
        assert_eq!(seen.fence, of_alice.fence);
        match store.try_acquire(&key("a"), &reading(&alice), NONE).await.unwrap() {
            TryAcquire::AlreadyMine(lock) => assert_eq!(lock.fence, of_alice.fence),
            other => panic!("{other:?}"),
        }
        // The reader with the highest token leaves. No later grant gets that token again.
        store.release(&key("a"), &bob, of_bob.token.unwrap(), Mode::Shared).await.unwrap();
        let upgraded = fresh(store, &claim(&alice)).await;
        assert!(upgraded.fence > of_bob.fence);
        store.release(&key("a"), &alice, upgraded.token.unwrap(), Mode::Exclusive).await.unwrap();
        let read = fresh(store, &reading(&bob)).await;
        assert!(read.fence > upgraded.fence);
        subject.age(&key("a"), TTL).await;
        assert_eq!(sweep(store, 100).await.sessions, 1);
        assert!(fence(store, &alice).await > read.fence.unwrap());
    }

    async fn without_fences_a_lock_has_none<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        assert_eq!(fresh(store, &claim(&alice)).await.fence, None);
        store.release_all(COLLECTION, &alice, NONE).await.unwrap();
        fenced(store).await;
        assert!(fence(store, &alice).await.get() > 0);
        store.release_all(COLLECTION, &alice, NONE).await.unwrap();
        store.prepare(COLLECTION, &Rules::new(TTL), NONE).await.unwrap();
        assert_eq!(fresh(store, &claim(&alice)).await.fence, None, "the collection is no longer fenced");
    }
}
