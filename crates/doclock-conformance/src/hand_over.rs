//! Handover: a release that grants the lock to the next holder.

use super::*;

async fn handed(store: &impl Store, (aid, token): (&Aid, LockToken), to: &Claim) -> Option<Lock> {
    store.hand_over(&Acquisition::exclusive(&key("a"), aid, token), to, NONE).await.unwrap().lock()
}

cases! {
    needs [HandOver];

    async fn a_handover_gives_the_lock_to_the_next_holder_with_its_own_lease<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), 40 * SECOND).await;
        let to = Claim { holder: Holder::new("bob"), ..claim(&bob) };
        let lock = handed(store, (&alice, token), &to).await.expect("a handover");
        assert_eq!((lock.aid.clone(), lock.token, lock.mode), (bob, Some(to.token), Mode::Exclusive));
        assert!(lock.expires_in() > 30 * SECOND);
        let seen = held(store, &key("a"), &alice).await;
        assert_eq!((seen.token, seen.holder.unwrap().label), (Some(to.token), "bob".to_owned()));
        let late = store.release(&key("a"), &alice, token, Mode::Exclusive).await.unwrap();
        assert_eq!(late, Released::AlreadyGone);
    }

    async fn a_repeated_handover_is_the_same_grant<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        for mode in [Mode::Exclusive, Mode::Shared] {
            let token = granted(store, &key("a"), &alice).await;
            let to = Claim { mode, ..claim(&Aid::new()) };
            let since = handed(store, (&alice, token), &to).await.expect("handed over").since;
            let again = handed(store, (&alice, token), &to).await.expect("the same handover");
            assert_eq!((again.token, again.since, again.mode), (Some(to.token), since, mode));
            assert_eq!(store.list(COLLECTION, None, 10).await.unwrap().len(), 1);
            // Only one request was told of the lock, so the lock can be given back.
            let taken = store.retract(&key("a"), &to.aid, &[to.token], mode).await.unwrap();
            assert_eq!(taken, Released::Released);
        }
    }

    async fn a_repeated_handover_revives_nothing<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        let to = claim(&Aid::new());
        handed(store, (&alice, token), &to).await.expect("handed over");
        subject.age(&key("a"), TTL + SECOND).await;
        let again = handed(store, (&alice, token), &to).await;
        assert!(again.is_none_or(|lock| lock.expires_in().is_zero()));
        assert!(store.inspect(&key("a"), None).await.unwrap().is_none(), "it has expired");
    }

    async fn a_lock_that_is_gone_is_not_handed_over<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let to = claim(&Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        store.release(&key("a"), &alice, token, Mode::Exclusive).await.unwrap();
        assert!(handed(store, (&alice, token), &to).await.is_none());
        assert!(store.inspect(&key("a"), None).await.unwrap().is_none(), "nothing is granted");
        let newer = granted(store, &key("a"), &bob).await;
        assert!(handed(store, (&alice, token), &to).await.is_none());
        assert_eq!(token_on(store, &key("a")).await, Some(newer), "the newer lock stays");
    }

    async fn a_lock_that_is_handed_over_to_a_reader_is_shared<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        let to = Claim { mode: Mode::Shared, ..claim(&bob) };
        let lock = handed(store, (&alice, token), &to).await.expect("it is handed over");
        assert_eq!((lock.mode, lock.token), (Mode::Shared, Some(to.token)));
        let joins = Claim { mode: Mode::Shared, ..claim(&Aid::new()) };
        let joined = store.try_acquire(&key("a"), &joins, NONE).await.unwrap();
        assert!(matches!(joined, TryAcquire::Granted(_)), "{joined:?}");
        held(store, &key("a"), &alice).await;
    }
}
