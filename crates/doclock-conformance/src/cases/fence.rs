//! Fencing tokens.

use super::*;
use doclock_core::store::Rules;

impl<S: Subject> Steps<S> {
    async fn is_fenced(&self) {
        self.prepare(COLLECTION, &Rules::new(TTL).fenced(), NONE).await.unwrap();
    }
}

cases! {
    tests fence($);
    needs [Fenced];

    #[needs(Sessions)]
    async fn fences_rise_over_release_expiry_takeover_break_and_end(store) {
        store.is_fenced().await;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let mut mine = store.granted("a", &Aid::new()).await;
        let first = u128::from(mine.fence.expect("a fence").get());
        assert!(first + 3_600_000 > now.as_millis(), "more than an hour below the clock");
        // The clock hardly moves: all of this happens within a few milliseconds.
        for how in WAYS.into_iter().chain(["released"; 20]).chain(["taken over"]) {
            match how {
                "taken over" => store.age("a", TTL).await,
                _ => store.loses(&mine, "a", how).await,
            }
            assert_eq!(store.all().await.len(), 0, "{how}");
            let next = store.granted("a", &Aid::new()).await;
            assert!(next.fence > mine.fence, "{how}: {next:?} after {mine:?}");
            mine = next;
        }
        store.announced().await;
        store.age("a", TTL).await;
        // One session by the takeover, the other one by the sweep.
        store.finds_idle(2).await;
        assert!(store.announced().await.iter().all(|ended| ended.locks == [key("a")]));
        assert_eq!(store.sweeps().await.next, None);
    }

    #[needs(Documents)]
    async fn reentry_renewal_and_repetition_keep_the_fence(store, alice) {
        store.is_fenced().await;
        let claim = claim(alice);
        let mine = store.granted("a", &claim).await;
        let first = mine.fence;
        assert!(first.is_some());
        assert_eq!(store.granted("a", &claim).await.fence, first, "repeated");
        assert_eq!(store.reenters("a", alice).await.fence, first, "re-entered");
        store.renews(&[alice]).await;
        assert_eq!(store.held("a", &Aid::new()).await.fence, first, "others see it too");
        assert_eq!(store.all().await[0].fence, first);
        store.put("a", "old").await;
        assert_eq!(store.saves(&mine, "new").await, Saved::Saved);
        assert_eq!(store.lock_on("a").await.unwrap().fence, first);
    }

    #[needs(Sessions)]
    async fn each_reader_and_each_upgrade_has_its_own_fence(store, alice, bob) {
        store.is_fenced().await;
        let of_alice = store.granted("a", &reading(alice)).await;
        let of_bob = store.granted("a", &reading(bob)).await;
        assert!(of_alice.fence.is_some() && of_bob.fence > of_alice.fence);
        assert_eq!(store.lock_of("a", alice).await.unwrap().fence, of_alice.fence);
        assert_eq!(store.reenters("a", &reading(alice)).await.fence, of_alice.fence);
        // The reader with the highest token leaves. No later grant gets that token again.
        store.releases(&of_bob).await;
        let upgraded = store.granted("a", alice).await;
        assert!(upgraded.fence > of_bob.fence);
        store.releases(&upgraded).await;
        let read = store.granted("a", &reading(bob)).await;
        assert!(read.fence > upgraded.fence);
        store.age("a", TTL).await;
        store.finds_idle(1).await;
        assert!(store.granted("a", alice).await.fence > read.fence);
    }

    async fn without_fences_a_lock_has_none(store, alice) {
        assert_eq!(store.granted("a", alice).await.fence, None);
        store.releases_all(alice).await;
        store.is_fenced().await;
        assert!(store.granted("a", alice).await.fence.expect("a fence").get() > 0);
        store.releases_all(alice).await;
        store.prepare(COLLECTION, &Rules::new(TTL), NONE).await.unwrap();
        assert_eq!(store.granted("a", alice).await.fence, None, "no longer fenced");
    }
}
