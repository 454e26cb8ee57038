//! Handover: a release that grants the lock to the next holder.

use super::*;

cases! {
    tests hand_over($);
    needs [HandOver];

    async fn a_handover_gives_the_lock_to_the_next_holder_with_its_own_lease(store, alice, bob) {
        let mine = store.granted("a", alice).await;
        store.age("a", 40 * TICK).await;
        let to = Claim { holder: Holder::new("bob"), ..claim(bob) };
        let lock = store.hands_over(&mine, &to).await.lock().expect("a handover");
        assert_eq!((&lock.aid, lock.token, lock.mode), (bob, Some(to.token), Exclusive));
        assert!(is_full(&lock), "{lock:?}");
        let seen = store.held("a", alice).await;
        assert_eq!((seen.token, &*seen.holder.unwrap().label), (Some(to.token), "bob"));
        assert_eq!(store.releases(&mine).await, Released::AlreadyGone, "late");
    }

    async fn a_repeated_handover_is_the_same_grant(store, alice, bob) {
        for mode in [Exclusive, Shared] {
            let mine = store.granted("a", alice).await;
            let to = Claim { mode, ..claim(&Aid::new()) };
            let since = store.hands_over(&mine, &to).await.lock().expect("handed over").since;
            let again = store.hands_over(&mine, &to).await.lock().expect("the same handover");
            assert_eq!((again.token, again.since, again.mode), (Some(to.token), since, mode));
            assert_eq!(store.all().await.len(), 1);
            store.held("a", alice).await;
            if mode == Shared {
                store.read("a", &[bob]).await;
            }
            // Only one request was told of the lock, so the lock can be given back.
            assert_eq!(store.retracts(&again).await, Released::Released);
        }
    }

    async fn a_repeated_handover_revives_nothing(store, alice, bob) {
        let mine = store.granted("a", alice).await;
        let to = claim(bob);
        store.hands_over(&mine, &to).await.lock().expect("handed over");
        store.age("a", TTL + TICK).await;
        let again = store.hands_over(&mine, &to).await.lock();
        assert!(again.is_none_or(|lock| lock.expires_in().is_zero()));
        assert!(store.lock_on("a").await.is_none(), "it has expired");
    }

    async fn a_lock_that_is_gone_is_not_handed_over(store, alice, bob, carol) {
        let mine = store.granted("a", alice).await;
        store.releases(&mine).await;
        assert!(store.hands_over(&mine, carol).await.lock().is_none());
        assert!(store.lock_on("a").await.is_none(), "nothing is granted");
        let newer = store.granted("a", bob).await;
        assert!(store.hands_over(&mine, carol).await.lock().is_none());
        assert_eq!(store.token_on("a").await, newer.token, "the newer lock stays");
    }

    #[needs(Sessions)]
    async fn an_expired_lock_is_not_taken_over_but_acquired(store, alice, bob) {
        let expired = store.expired("a", alice).await;
        let to = Claim { taken: Some(taken()), ..claim(bob) };
        let answer = store.hands_over(&expired, &to).await;
        assert!(matches!(answer, HandedOver::AlreadyGone), "{answer:?}");
        assert!(store.lock_on("a").await.is_none(), "nothing is granted");
        store.granted("a", bob).await;
        store.finds_idle(1).await;
        store.announces(alice, &["a"]).await;
    }
}
