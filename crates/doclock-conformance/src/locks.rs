//! Locks, and guarded saves.

use super::*;

cases! {
    needs [];

    async fn a_free_document_is_granted_with_the_token_of_the_claim<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let claim = claim(&alice);
        let TryAcquire::Granted(lock) = store.try_acquire(&key("a"), &claim, NONE).await.unwrap() else {
            panic!("not granted");
        };
        assert_eq!((lock.key.clone(), lock.mode, lock.aid.clone()), (key("a"), Mode::Exclusive, alice));
        assert_eq!((lock.token, lock.holder.clone()), (Some(claim.token), Some(claim.holder)));
        assert!(lock.expires_in() <= TTL && lock.expires_in() > TTL - 30 * SECOND);
        let off = SystemTime::now().duration_since(lock.since).unwrap_or_default();
        assert!(off < 60 * SECOND, "taken now, not {off:?} ago");
    }

    async fn a_refusal_names_the_holder_and_says_since_when_and_how_long<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), 20 * SECOND).await;
        let lock = held(store, &key("a"), &Aid::new()).await;
        assert_eq!((lock.aid.clone(), lock.token), (alice, Some(token)));
        assert_eq!(lock.holder.clone().unwrap().label, "alice");
        assert!(lock.expires_in() <= TTL - 20 * SECOND);
        assert_eq!(token_on(store, &key("a")).await, Some(token), "a refusal changes nothing");
    }

    async fn a_refusal_does_not_renew<S: Subject>(subject: &S) {
        let store = subject.store();
        granted(store, &key("a"), &Aid::new()).await;
        subject.age(&key("a"), 30 * SECOND).await;
        for _ in 0..2 {
            assert!(held(store, &key("a"), &Aid::new()).await.expires_in() <= TTL - 30 * SECOND);
        }
    }

    async fn reentry_renews_and_keeps_the_token<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), 50 * SECOND).await;
        match store.try_acquire(&key("a"), &claim(&alice), NONE).await.unwrap() {
            TryAcquire::AlreadyMine(lock) => {
                assert_eq!(lock.token, Some(token));
                assert!(lock.expires_in() > TTL - 30 * SECOND, "renewed");
            }
            other => panic!("not already mine: {other:?}"),
        }
    }

    async fn a_repeated_claim_recognises_its_own_grant<S: Subject>(subject: &S) {
        let (store, claim) = (subject.store(), claim(&Aid::new()));
        for _ in 0..3 {
            match store.try_acquire(&key("a"), &claim, NONE).await.unwrap() {
                TryAcquire::Granted(lock) => assert_eq!(lock.token, Some(claim.token)),
                other => panic!("not granted: {other:?}"),
            }
        }
        assert_eq!(store.list(COLLECTION, None, 10).await.unwrap().len(), 1);
    }

    async fn an_expired_lock_is_taken_over_at_once<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let old = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        let new = granted(store, &key("a"), &bob).await;
        assert_ne!(old, new);
        let lock = store.inspect(&key("a"), None).await.unwrap().unwrap();
        assert_eq!((lock.aid, lock.token), (bob, Some(new)));
    }

    async fn the_ttl_of_the_holder_counts_and_not_the_contenders<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), 30 * SECOND).await;
        let hasty = Claim { ttl: SECOND, ..claim(&bob) };
        let answer = store.try_acquire(&key("a"), &hasty, NONE).await.unwrap();
        assert!(matches!(answer, TryAcquire::Held(_)), "taken over by a contender with a shorter ttl: {answer:?}");

        let short = Claim { ttl: SECOND, ..claim(&alice) };
        let _ = store.try_acquire(&key("b"), &short, NONE).await.unwrap();
        subject.age(&key("b"), 2 * SECOND).await;
        granted(store, &key("b"), &bob).await;
    }

    async fn after_expiry_the_same_session_gets_a_new_token<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let old = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        assert_ne!(granted(store, &key("a"), &alice).await, old);
    }

    async fn renewal_extends_all_live_locks_of_the_session_and_no_others<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for id in ["a", "b"] {
            granted(store, &key(id), &alice).await;
        }
        granted(store, &key("of bob"), &bob).await;
        for id in ["a", "b", "of bob"] {
            subject.age(&key(id), 50 * SECOND).await;
        }
        assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap(), 2);
        for lock in store.list(COLLECTION, None, 10).await.unwrap() {
            assert_eq!(lock.expires_in() > TTL - 30 * SECOND, lock.aid == alice, "{lock:?}");
        }
        assert_eq!(store.renew_all(COLLECTION, &[Aid::new()]).await.unwrap(), 0);
    }

    async fn a_renewal_leaves_the_locks_of_tabs_that_it_does_not_name<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let (one, two) = (TabId::new(), TabId::new());
        let claims = [
            ("no tab", None, Mode::Exclusive), ("one", Some(one), Mode::Exclusive),
            ("two", Some(two), Mode::Exclusive), ("token", Some(two), Mode::Exclusive),
            ("shared", Some(two), Mode::Shared),
        ];
        let mut token = None;
        for (id, tab, mode) in claims {
            let claim = Claim { tab, mode, ..claim(&alice) };
            let _ = store.try_acquire(&key(id), &claim, NONE).await.unwrap();
            token = if id == "token" { Some(claim.token) } else { token };
        }
        let of_bob = Claim { tab: Some(TabId::new()), ..claim(&bob) };
        let _ = store.try_acquire(&key("of bob"), &of_bob, NONE).await.unwrap();
        let ids = claims.iter().map(|(id, ..)| *id).chain(["of bob"]);
        let renewed = async |active: &[Active]| {
            for id in ids.clone() {
                subject.age(&key(id), 2 * SECOND).await;
            }
            let before = store.list(COLLECTION, None, 10).await.unwrap();
            let answer = store.renew(COLLECTION, active, TTL, NONE).await.unwrap();
            let after = store.list(COLLECTION, None, 10).await.unwrap();
            let left = |locks: &[Lock], id: &str| {
                locks.iter().find(|lock| lock.key == key(id)).unwrap().expires_at
            };
            let renewed: Vec<_> =
                ids.clone().filter(|id| left(&after, id) > left(&before, id) + SECOND).collect();
            assert_eq!(answer, Renewed { documents: renewed.len() as u64, late: Vec::new() });
            renewed
        };
        let named = |named: &[Named]| Active { aid: alice.clone(), named: Some(named.to_vec()) };
        let (tab, token) = (Named::Tab(one), Named::Token(token.unwrap()));
        assert_eq!(renewed(&[named(&[])]).await, ["no tab", "shared"]);
        assert_eq!(renewed(&[named(&[tab])]).await, ["no tab", "one", "shared"]);
        assert_eq!(renewed(&[named(&[token])]).await, ["no tab", "token", "shared"]);
        assert_eq!(renewed(&[named(&[tab, token])]).await, ["no tab", "one", "token", "shared"]);
        let both = [named(&[tab]), Active::whole(&bob)];
        assert_eq!(renewed(&both).await, ["no tab", "one", "shared", "of bob"]);
        let whole = [Active::whole(&alice)];
        assert_eq!(renewed(&whole).await, ["no tab", "one", "two", "token", "shared"]);
    }

    #[needs(Sessions)]
    async fn renewal_raises_a_shorter_ttl_keeps_a_longer_one_and_respects_max_hold<S: Subject>(subject: &S) {
        let store = subject.store();
        for mode in [Mode::Exclusive, Mode::Shared] {
            let claims = [("short", TTL / 4, None), ("long", TTL, None), ("ends", TTL / 4, Some(TTL / 3))];
            let mut aids = Vec::new();
            for (id, ttl, max_hold) in claims {
                let claim = Claim { mode, ttl, max_hold, ..claim(&Aid::new()) };
                let _ = store.try_acquire(&key(id), &claim, NONE).await.unwrap();
                aids.push(claim.aid);
            }
            let active: Vec<_> = aids.iter().map(Active::whole).collect();
            let renewed = store.renew(COLLECTION, &active, TTL / 2, NONE).await.unwrap();
            assert_eq!(renewed, Renewed { documents: 3, late: Vec::new() });
            for (id, at_most) in [("short", TTL / 2), ("long", TTL), ("ends", TTL / 3)] {
                let left = store.inspect(&key(id), None).await.unwrap().unwrap().expires_in();
                assert!(left <= at_most && left > at_most - 5 * SECOND, "{id}: {left:?}");
            }
            // The sweep knows of the longer ttl, too.
            subject.age(&key("short"), TTL / 2 - 5 * SECOND).await;
            assert_eq!(sweep(store, 100).await.sessions, 0);
            subject.age(&key("short"), 5 * SECOND).await;
            assert_eq!(sweep(store, 100).await.sessions, 1);
            for aid in &aids {
                store.release_all(COLLECTION, aid, NONE).await.unwrap();
            }
        }
    }

    async fn renewal_keeps_the_token_and_does_not_revive<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap(), 1);
        assert_eq!(token_on(store, &key("a")).await, Some(token));
        subject.age(&key("a"), TTL).await;
        assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap(), 0);
        assert_eq!(token_on(store, &key("a")).await, None);
    }

    async fn a_released_document_is_free_and_a_second_release_succeeds<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        assert_eq!(store.release(&key("a"), &alice, token, Mode::Exclusive).await.unwrap(), Released::Released);
        assert_eq!(store.release(&key("a"), &alice, token, Mode::Exclusive).await.unwrap(), Released::AlreadyGone);
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn a_late_release_does_not_remove_a_newer_lock_of_the_same_session<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let old = granted(store, &key("a"), &alice).await;
        store.release(&key("a"), &alice, old, Mode::Exclusive).await.unwrap();
        let new = granted(store, &key("a"), &alice).await;
        assert_eq!(store.release(&key("a"), &alice, old, Mode::Exclusive).await.unwrap(), Released::AlreadyGone);
        assert_eq!(token_on(store, &key("a")).await, Some(new));
    }

    async fn nobody_releases_the_lock_of_another_session<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        for (aid, token) in [(&Aid::new(), token), (&alice, LockToken::new())] {
            let answer = store.release(&key("a"), aid, token, Mode::Exclusive).await.unwrap();
            assert_eq!(answer, Released::AlreadyGone);
        }
        assert_eq!(token_on(store, &key("a")).await, Some(token));
    }

    #[needs(Documents)]
    async fn a_grant_is_taken_back_unless_another_request_was_told_of_it<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let claim = claim(&alice);
        for _ in 0..2 {
            // Neither a repeated attempt of the claim nor a renewal counts as another request.
            let _ = store.try_acquire(&key("a"), &claim, NONE).await.unwrap();
        }
        store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap();
        assert_eq!(store.retract(&key("a"), &alice, &[claim.token], Mode::Exclusive).await.unwrap(), Released::Released);
        assert_eq!(token_on(store, &key("a")).await, None);

        let token = granted(store, &key("a"), &alice).await;
        let _ = store.try_acquire(&key("a"), &self::claim(&alice), NONE).await.unwrap();
        assert_eq!(store.retract(&key("a"), &alice, &[token], Mode::Exclusive).await.unwrap(), Released::AlreadyGone);
        assert_eq!(token_on(store, &key("a")).await, Some(token), "re-entered");
        store.release(&key("a"), &alice, token, Mode::Exclusive).await.unwrap();

        let token = granted(store, &key("a"), &alice).await;
        let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::Saved);
        assert_eq!(store.retract(&key("a"), &alice, &[token], Mode::Exclusive).await.unwrap(), Released::AlreadyGone);
        assert_eq!(token_on(store, &key("a")).await, Some(token), "a save used the lock");
    }

    async fn the_next_attempt_of_a_claim_recognises_an_earlier_grant<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        for mode in [Mode::Exclusive, Mode::Shared] {
            let first = Claim { mode, ..claim(&alice) };
            let next = Claim { token: first.token.next_attempt(), ..first.clone() };
            for attempt in [&first, &next, &first] {
                match store.try_acquire(&key("a"), attempt, NONE).await.unwrap() {
                    TryAcquire::Granted(lock) => assert_eq!(lock.token, Some(first.token), "{mode:?}"),
                    other => panic!("{mode:?}: {other:?}"),
                }
            }
            let retract = async |tokens: &[LockToken]| {
                store.retract(&key("a"), &alice, tokens, mode).await.unwrap()
            };
            assert_eq!(retract(&[next.token]).await, Released::AlreadyGone, "{mode:?}");
            assert_eq!(retract(&[]).await, Released::AlreadyGone, "{mode:?}");
            // None of the attempts counts as another request.
            assert_eq!(retract(&[next.token, first.token]).await, Released::Released, "{mode:?}");
            assert!(store.inspect(&key("a"), None).await.unwrap().is_none(), "{mode:?}");
        }
    }

    #[needs(Documents)]
    async fn a_late_attempt_does_not_bring_a_released_lock_back<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let late = claim(&alice);
        let answered = Claim { token: late.token.next_attempt(), ..late.clone() };
        let granted = store.try_acquire(&key("a"), &answered, NONE).await.unwrap();
        assert!(matches!(granted, TryAcquire::Granted(lock) if lock.token == Some(answered.token)));
        store.release(&key("a"), &alice, answered.token, Mode::Exclusive).await.unwrap();

        let _ = store.try_acquire(&key("a"), &late, NONE).await.unwrap();
        assert_eq!(token_on(store, &key("a")).await, Some(late.token));
        let saved = save(store, &key("a"), &alice, answered.token, &encoded(store, "a", "stale")).await;
        assert_eq!(saved, Saved::Lost);
        assert_eq!(store.retract(&key("a"), &alice, &[late.token], Mode::Exclusive).await.unwrap(), Released::Released);
    }

    async fn releasing_a_session_removes_and_names_its_locks_only<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for id in ["a", "b", "expired"] {
            granted(store, &key(id), &alice).await;
        }
        subject.age(&key("expired"), TTL).await;
        let of_bob = granted(store, &key("of bob"), &bob).await;
        let mut released = store.release_all(COLLECTION, &alice, NONE).await.unwrap();
        released.sort();
        assert_eq!(released, [key("a"), key("b")]);
        assert_eq!(token_on(store, &key("a")).await, None);
        assert_eq!(token_on(store, &key("of bob")).await, Some(of_bob));
        assert_eq!(store.release_all(COLLECTION, &alice, NONE).await.unwrap(), []);
    }

    async fn an_expired_lock_is_neither_inspected_nor_listed<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for (id, aid) in [("a", &alice), ("b", &alice), ("c", &bob)] {
            granted(store, &key(id), aid).await;
        }
        subject.age(&key("a"), TTL).await;
        assert!(store.inspect(&key("a"), None).await.unwrap().is_none());
        let keys = |locks: Vec<Lock>| {
            let mut keys: Vec<_> = locks.into_iter().map(|lock| lock.key).collect();
            keys.sort();
            keys
        };
        assert_eq!(keys(store.list(COLLECTION, None, 10).await.unwrap()), [key("b"), key("c")]);
        assert_eq!(keys(store.list(COLLECTION, Some(std::slice::from_ref(&bob)), 10).await.unwrap()), [key("c")]);
        assert_eq!(store.list(COLLECTION, None, 1).await.unwrap().len(), 1);
    }

    async fn a_break_removes_the_lock_that_was_seen_and_no_later_one<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        granted(store, &key("a"), &alice).await;
        let seen = store.inspect(&key("a"), None).await.unwrap().unwrap();
        assert_eq!(store.break_lock(&seen, &taken()).await.unwrap(), Released::Released);
        let token = granted(store, &key("a"), &bob).await;
        assert_eq!(store.break_lock(&seen, &taken()).await.unwrap(), Released::AlreadyGone);
        assert_eq!(token_on(store, &key("a")).await, Some(token));
    }

    #[needs(Documents)]
    async fn a_save_under_a_live_lock_writes_and_renews<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), 50 * SECOND).await;
        let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::Saved);
        assert_eq!(text_of(store, &key("a")).await, "new");
        let lock = store.inspect(&key("a"), None).await.unwrap().unwrap();
        assert_eq!(lock.token, Some(token));
        assert!(lock.expires_in() > TTL - 30 * SECOND, "renewed");
    }

    #[needs(Documents)]
    async fn a_save_is_refused_once_the_lock_has_expired<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::Lost);
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

    #[needs(Documents)]
    async fn a_save_is_refused_under_an_earlier_lock_of_the_same_session<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let stale = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        granted(store, &key("a"), &alice).await;
        let saved = save(store, &key("a"), &alice, stale, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::Lost);
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

    #[needs(Documents)]
    async fn a_save_is_refused_after_a_takeover_a_break_or_a_release<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        put(subject, "a", "old").await;
        let new = encoded(store, "a", "new");

        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        let of_bob = granted(store, &key("a"), &bob).await;
        assert_eq!(save(store, &key("a"), &alice, token, &new).await, Saved::Lost);

        store.break_lock(&store.inspect(&key("a"), None).await.unwrap().unwrap(), &taken()).await.unwrap();
        assert_eq!(save(store, &key("a"), &bob, of_bob, &new).await, Saved::Lost);

        let token = granted(store, &key("a"), &alice).await;
        store.release(&key("a"), &alice, token, Mode::Exclusive).await.unwrap();
        assert_eq!(save(store, &key("a"), &alice, token, &new).await, Saved::Lost);
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

    #[needs(Documents)]
    async fn a_save_that_arrives_after_its_deadline_writes_nothing<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        let document = encoded(store, "a", "new");
        let late = store.save(&Acquisition::exclusive(&key("a"), &alice, token), &document.into(), Deadline::at(Instant::now())).await;
        assert_eq!(late.unwrap_err().kind(), actix_doclock::StoreErrorKind::Unavailable);
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

    #[needs(Documents)]
    async fn a_save_does_not_bring_a_deleted_document_back<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        subject.delete(&key("a")).await;
        assert!(!store.exists(&key("a"), NONE).await.unwrap());
        let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::DocumentGone);
        assert!(store.load(&key("a"), NONE).await.unwrap().is_none());
    }

    #[needs(Documents)]
    async fn a_creation_needs_a_live_lock_and_a_free_id<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let until = Deadline::at(Instant::now() + TTL);
        let create = async |token, id: &str, text| {
            let held = Acquisition::exclusive(&key("a"), &alice, token);
            store.save(&held, &Edit::Creation(encoded(store, id, text)), until).await
        };
        assert_eq!(create(LockToken::new(), "a", "unlocked").await.unwrap(), Saved::Lost);
        assert!(!store.exists(&key("a"), NONE).await.unwrap());
        let token = granted(store, &key("a"), &alice).await;
        assert!(create(token, "b", "another id").await.is_err());
        assert_eq!(create(token, "a", "new").await.unwrap(), Saved::Saved);
        assert_eq!(text_of(store, &key("a")).await, "new");
        let again = create(token, "a", "once more").await.unwrap_err();
        assert_eq!(again.kind(), StoreErrorKind::Rejected);
        assert_eq!(text_of(store, &key("a")).await, "new");
        assert_eq!(token_on(store, &key("a")).await, Some(token), "the lock stays");
    }

    #[needs(Documents)]
    async fn a_deletion_needs_a_live_lock<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        put(subject, "a", "old").await;
        let until = Deadline::at(Instant::now() + TTL);
        let delete = async |aid: &Aid, token| {
            let held = Acquisition::exclusive(&key("a"), aid, token);
            store.save(&held, &Edit::Deletion, until).await.unwrap()
        };
        let stale = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), 2 * TTL).await;
        assert_eq!(delete(&alice, stale).await, Saved::Lost);
        let token = granted(store, &key("a"), &bob).await;
        assert_eq!(delete(&alice, stale).await, Saved::Lost);
        assert!(store.exists(&key("a"), NONE).await.unwrap());
        assert_eq!(delete(&bob, token).await, Saved::Saved);
        assert!(!store.exists(&key("a"), NONE).await.unwrap());
        assert_eq!(delete(&bob, token).await, Saved::DocumentGone);
        assert_eq!(token_on(store, &key("a")).await, Some(token), "the lock stays");
    }

    #[needs(Documents)]
    async fn a_save_does_not_give_a_document_another_id<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        let renamed = encoded(store, "b", "new");
        let until = Deadline::at(Instant::now() + TTL);
        assert!(store.save(&Acquisition::exclusive(&key("a"), &alice, token), &renamed.into(), until).await.is_err());
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

    #[needs(Documents)]
    async fn locking_leaves_the_document_byte_for_byte_as_it_was<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        put(subject, "a", "text").await;
        let bytes = async || store.load(&key("a"), NONE).await.unwrap().unwrap().as_bytes().to_vec();
        let before = bytes().await;
        granted(store, &key("a"), &alice).await;
        assert_eq!(bytes().await, before, "after acquiring");
        store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap();
        assert_eq!(bytes().await, before, "after renewing");
        subject.age(&key("a"), TTL).await;
        let token = granted(store, &key("a"), &bob).await;
        assert_eq!(bytes().await, before, "after taking over");
        store.release(&key("a"), &bob, token, Mode::Exclusive).await.unwrap();
        assert_eq!(bytes().await, before, "after releasing");
    }

    async fn ids_of_different_types_name_different_documents<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let uuid = uuid::Uuid::from_u128(5);
        let ids: [actix_doclock::LockId; 6] = [
            actix_doclock::LockId::ObjectId([5; 12]),
            actix_doclock::LockId::ObjectId([5; 12]).to_string().into(),
            5_i32.into(),
            "5".into(),
            uuid.into(),
            uuid.to_string().into(),
        ];
        for id in &ids {
            granted(store, &LockKey::new(COLLECTION, id.clone()).unwrap(), &alice).await;
        }
        let listed = store.list(COLLECTION, Some(std::slice::from_ref(&alice)), 10).await.unwrap();
        let shown = |id: &actix_doclock::LockId| format!("{id:?}");
        let mut listed: Vec<_> = listed.iter().map(|lock| shown(lock.key.id())).collect();
        let mut expected: Vec<_> = ids.iter().map(shown).collect();
        listed.sort();
        expected.sort();
        assert_eq!(listed, expected, "with their types");
        // As in MongoDB, a 32-bit and a 64-bit integer of the same value are one id.
        held(store, &LockKey::new(COLLECTION, 5_i64).unwrap(), &Aid::new()).await;
        granted(store, &LockKey::new(COLLECTION, i64::MAX).unwrap(), &alice).await;
    }

    #[needs(Documents, Sessions)]
    async fn text_that_looks_like_an_operator_stays_text<S: Subject>(subject: &S) {
        let store = subject.store();
        let other = granted(store, &key("other"), &Aid::new()).await;
        for hostile in ["$where", "$$ROOT", "$_id", "{\"$gt\": \"\"}", "/.*/", "../..", "a\0b", ""] {
            let alice = Aid::from(hostile.to_owned());
            put(subject, hostile, "text").await;
            let claim = Claim { holder: Holder::new(hostile), ..claim(&alice) };
            let TryAcquire::Granted(lock) = store.try_acquire(&key(hostile), &claim, NONE).await.unwrap()
            else {
                panic!("not granted: {hostile}");
            };
            assert_eq!((lock.aid, lock.holder.unwrap().label), (alice.clone(), hostile.to_owned()));
            assert_eq!(held(store, &key(hostile), &Aid::new()).await.aid, alice);
            assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap(), 1, "{hostile}");
            let document = encoded(store, hostile, hostile);
            let saved = save(store, &key(hostile), &alice, claim.token, &document).await;
            assert_eq!(saved, Saved::Saved, "{hostile}");
            assert_eq!(text_of(store, &key(hostile)).await, hostile);
            assert_eq!(store.session_ended(&alice).await.unwrap(), None);
            assert_eq!(store.release_all(COLLECTION, &alice, NONE).await.unwrap(), [key(hostile)]);
            granted(store, &key(hostile), &alice).await;
            subject.age(&key(hostile), TTL).await;
            assert_eq!(sweep(store, 100).await.sessions, 1, "{hostile}");
            granted(store, &key("of hostile"), &alice).await;
            assert_eq!(end(store, &alice, EndReason::LoggedOut).await.len(), 2, "{hostile}");
            let ended = announce_all(store).await;
            assert_eq!(ended.len(), 1, "{hostile}: {ended:?}");
            assert_eq!(ended[0].aid, alice);
            assert_eq!(sorted(ended[0].locks.clone()), sorted(vec![key(hostile), key("of hostile")]));
        }
        assert_eq!(token_on(store, &key("other")).await, Some(other));
    }

    async fn of_many_simultaneous_claims_exactly_one_wins<S: Subject>(subject: &S) {
        const CONTENDERS: usize = 32;
        let store = subject.store();
        for round in 0..20 {
            let id = format!("round {}", round / 2);
            if round % 2 == 1 {
                subject.age(&key(&id), TTL).await;
            }
            let barrier = Arc::new(Barrier::new(CONTENDERS));
            let contend = async || {
                barrier.wait().await;
                let answer = store.try_acquire(&key(&id), &claim(&Aid::new()), NONE).await.unwrap();
                matches!(answer, TryAcquire::Granted(_))
            };
            let answers =
                futures_util::future::join_all((0..CONTENDERS).map(|_| contend())).await;
            assert_eq!(answers.into_iter().filter(|won| *won).count(), 1, "round {round}");
        }
    }
}
