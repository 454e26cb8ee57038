//! Readers, and the writers behind them.

use super::*;

fn reading(aid: &Aid) -> Claim {
    Claim { mode: Mode::Shared, ..claim(aid) }
}

/// Adds a reader.
async fn reads(store: &impl Store, key: &LockKey, aid: &Aid) -> LockToken {
    let claim = reading(aid);
    match store.try_acquire(key, &claim, NONE).await.unwrap() {
        TryAcquire::Granted(lock) => {
            assert_eq!((lock.mode, lock.token), (Mode::Shared, Some(claim.token)));
            assert_eq!(lock.aid, *aid);
            claim.token
        }
        other => panic!("may not read: {other:?}"),
    }
}

/// The session's own lock on the document, if it has one.
async fn lock_of(store: &impl Store, key: &LockKey, aid: &Aid) -> Option<Lock> {
    store.inspect(key, Some(aid)).await.unwrap().filter(|lock| lock.aid == *aid)
}

async fn readers(store: &impl Store) -> BTreeSet<Aid> {
    let locks = store.list(COLLECTION, None, 10_000).await.unwrap();
    assert!(locks.iter().all(|lock| lock.mode == Mode::Shared), "{locks:?}");
    let aids: BTreeSet<_> = locks.iter().map(|lock| lock.aid.clone()).collect();
    assert_eq!(aids.len(), locks.len(), "each reader has one lock");
    aids
}

async fn release(store: &impl Store, key: &LockKey, aid: &Aid, token: LockToken) -> Released {
    store.release(key, aid, token, Mode::Shared).await.unwrap()
}

cases! {
    needs [];

    async fn readers_share_and_keep_a_writer_out<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let of_alice = reads(store, &key("a"), &alice).await;
        subject.age(&key("a"), 10 * SECOND).await;
        let of_bob = reads(store, &key("a"), &bob).await;
        let seen = held(store, &key("a"), &Aid::new()).await;
        assert_eq!((seen.mode, seen.aid, seen.token), (Mode::Shared, bob.clone(), Some(of_bob)));
        assert_eq!(seen.holder.unwrap().label, "alice");
        assert_eq!(readers(store).await, [alice.clone(), bob.clone()].into());
        release(store, &key("a"), &bob, of_bob).await;
        assert_eq!(held(store, &key("a"), &Aid::new()).await.aid, alice);
        release(store, &key("a"), &alice, of_alice).await;
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn a_writer_keeps_readers_out<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        let answer = store.try_acquire(&key("a"), &reading(&Aid::new()), NONE).await.unwrap();
        let TryAcquire::Held(lock) = answer else { panic!("not held: {answer:?}") };
        assert_eq!((lock.mode, lock.token), (Mode::Exclusive, Some(token)));
        subject.age(&key("a"), TTL).await;
        reads(store, &key("a"), &Aid::new()).await;
        assert!(lock_of(store, &key("a"), &alice).await.is_none());
    }

    async fn the_exclusive_lock_lets_its_holder_read_too<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), 50 * SECOND).await;
        let answer = store.try_acquire(&key("a"), &reading(&alice), NONE).await.unwrap();
        let TryAcquire::AlreadyMine(lock) = answer else { panic!("not mine: {answer:?}") };
        assert_eq!((lock.mode, lock.token), (Mode::Exclusive, Some(token)));
        assert!(lock.expires_in() > TTL - 30 * SECOND, "renewed");
        assert_eq!(store.retract(&key("a"), &alice, &[token], Mode::Exclusive).await.unwrap(), Released::AlreadyGone);
    }

    async fn reading_again_renews_and_keeps_the_token<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let claim = reading(&alice);
        let _ = store.try_acquire(&key("a"), &claim, NONE).await.unwrap();
        reads(store, &key("a"), &bob).await;
        subject.age(&key("a"), 50 * SECOND).await;
        let again = store.try_acquire(&key("a"), &claim, NONE).await.unwrap();
        assert!(matches!(again, TryAcquire::Granted(_)), "its own grant: {again:?}");
        let again = store.try_acquire(&key("a"), &reading(&alice), NONE).await.unwrap();
        let TryAcquire::AlreadyMine(lock) = again else { panic!("not mine: {again:?}") };
        assert_eq!((lock.token, lock.mode), (Some(claim.token), Mode::Shared));
        assert!(lock.expires_in() > TTL - 30 * SECOND, "renewed");
        let other = lock_of(store, &key("a"), &bob).await.unwrap();
        assert!(other.expires_in() <= TTL - 50 * SECOND, "no other reader is renewed");
        assert_eq!(readers(store).await.len(), 2);
    }

    async fn the_only_reader_is_upgraded_and_others_are_refused_without_harm<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let of_alice = reads(store, &key("a"), &alice).await;
        let of_bob = reads(store, &key("a"), &bob).await;
        let seen = held(store, &key("a"), &alice).await;
        assert_eq!((seen.aid, seen.token), (bob.clone(), Some(of_bob)), "the refusal names the other reader");
        assert_eq!(readers(store).await.len(), 2, "nothing has changed");
        assert_eq!(lock_of(store, &key("a"), &alice).await.unwrap().token, Some(of_alice));

        release(store, &key("a"), &bob, of_bob).await;
        subject.age(&key("a"), 20 * SECOND).await;
        let before = lock_of(store, &key("a"), &alice).await.unwrap().since;
        let upgraded = granted(store, &key("a"), &alice).await;
        assert_eq!(release(store, &key("a"), &alice, of_alice).await, Released::AlreadyGone);
        let lock = store.inspect(&key("a"), None).await.unwrap().unwrap();
        assert_eq!((lock.mode, lock.token), (Mode::Exclusive, Some(upgraded)));
        assert!(lock.since >= before, "an upgrade is a new grant");
        let answer = store.try_acquire(&key("a"), &reading(&bob), NONE).await.unwrap();
        assert!(matches!(answer, TryAcquire::Held(_)), "{answer:?}");
    }

    async fn a_reader_is_upgraded_past_an_expired_reader<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        reads(store, &key("a"), &bob).await;
        subject.age(&key("a"), TTL).await;
        reads(store, &key("a"), &alice).await;
        granted(store, &key("a"), &alice).await;
    }

    async fn an_idle_reader_expires_alone<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let old = reads(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL / 2).await;
        reads(store, &key("a"), &bob).await;
        assert_eq!(store.inspect(&key("a"), None).await.unwrap().unwrap().aid, bob, "the last reader");
        subject.age(&key("a"), TTL / 2).await;
        assert_eq!(readers(store).await, [bob.clone()].into());
        assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap(), 0);
        let both = [alice.clone(), bob.clone()];
        assert_eq!(store.renew_all(COLLECTION, &both).await.unwrap(), 1);
        assert_eq!(readers(store).await, [bob.clone()].into(), "an expired reader is not revived");
        assert_eq!(store.list(COLLECTION, Some(std::slice::from_ref(&alice)), 10).await.unwrap().len(), 0);
        assert_ne!(reads(store, &key("a"), &alice).await, old, "a new acquisition");
        assert_eq!(readers(store).await, [alice, bob].into());
    }

    #[needs(Sessions)]
    async fn each_reader_has_its_own_ttl<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        reads(store, &key("a"), &alice).await;
        let short = Claim { ttl: 20 * SECOND, ..reading(&bob) };
        let _ = store.try_acquire(&key("a"), &short, NONE).await.unwrap();
        assert_eq!(held(store, &key("a"), &Aid::new()).await.aid, alice, "the reader that expires last is named");
        let shorter = Claim { ttl: 10 * SECOND, ..reading(&Aid::new()) };
        let _ = store.try_acquire(&key("a"), &shorter, NONE).await.unwrap();
        subject.age(&key("a"), 10 * SECOND).await;
        let swept = sweep(store, 100).await;
        assert!(swept.sessions == 1 && swept.next.unwrap() <= 10 * SECOND, "{swept:?}");
        subject.age(&key("a"), 10 * SECOND).await;
        assert_eq!(readers(store).await, [alice].into());
    }

    async fn each_reader_has_its_own_token_and_releases_only_itself<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let of_alice = reads(store, &key("a"), &alice).await;
        let of_bob = reads(store, &key("a"), &bob).await;
        assert_ne!(of_alice, of_bob);
        for (aid, token) in [(&alice, of_bob), (&bob, of_alice), (&alice, LockToken::new())] {
            assert_eq!(release(store, &key("a"), aid, token).await, Released::AlreadyGone);
        }
        assert_eq!(release(store, &key("a"), &alice, of_alice).await, Released::Released);
        assert_eq!(release(store, &key("a"), &alice, of_alice).await, Released::AlreadyGone);
        assert_eq!(readers(store).await, [bob.clone()].into());
        let newer = reads(store, &key("a"), &alice).await;
        assert_eq!(release(store, &key("a"), &alice, of_alice).await, Released::AlreadyGone, "late");
        assert_eq!(release(store, &key("a"), &bob, of_bob).await, Released::Released);
        assert_eq!(release(store, &key("a"), &alice, newer).await, Released::Released);
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn a_release_without_a_mode_releases_either<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        assert_eq!(release(store, &key("a"), &alice, LockToken::new()).await, Released::AlreadyGone);
        assert_eq!(release(store, &key("a"), &alice, token).await, Released::Released);
        assert_eq!(token_on(store, &key("a")).await, None);
    }

    async fn a_reader_is_taken_back_unless_another_request_was_told_of_it<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for others in [false, true] {
            if others {
                reads(store, &key("a"), &bob).await;
            }
            let retract = async |token| store.retract(&key("a"), &alice, &[token], Mode::Shared).await.unwrap();
            let claim = reading(&alice);
            for _ in 0..2 {
                let _ = store.try_acquire(&key("a"), &claim, NONE).await.unwrap();
            }
            store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap();
            assert_eq!(retract(claim.token).await, Released::Released);
            assert!(lock_of(store, &key("a"), &alice).await.is_none());
            let token = reads(store, &key("a"), &alice).await;
            let _ = store.try_acquire(&key("a"), &reading(&alice), NONE).await.unwrap();
            assert_eq!(retract(token).await, Released::AlreadyGone, "others: {others}");
            assert_eq!(release(store, &key("a"), &alice, token).await, Released::Released);
        }
    }

    async fn renewal_extends_only_the_sessions_own_reader<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let token = reads(store, &key("a"), &alice).await;
        reads(store, &key("a"), &bob).await;
        granted(store, &key("b"), &alice).await;
        for id in ["a", "b"] {
            subject.age(&key(id), 50 * SECOND).await;
        }
        assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap(), 2);
        let renewed = lock_of(store, &key("a"), &alice).await.unwrap();
        assert_eq!(renewed.token, Some(token));
        assert!(renewed.expires_in() > TTL - 30 * SECOND);
        assert!(lock_of(store, &key("a"), &bob).await.unwrap().expires_in() <= TTL - 50 * SECOND);
        assert_eq!(store.renew_all(COLLECTION, &[alice.clone(), bob.clone()]).await.unwrap(), 2, "documents");
        assert!(lock_of(store, &key("a"), &bob).await.unwrap().expires_in() > TTL - 30 * SECOND);
        subject.age(&key("a"), 50 * SECOND).await;
        let both = [alice, bob];
        assert_eq!(store.list(COLLECTION, Some(&both), 10).await.unwrap().len(), 3);
    }

    #[needs(Documents)]
    async fn a_save_needs_more_than_a_reader<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = reads(store, &key("a"), &alice).await;
        let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::Lost);
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

    async fn readers_are_listed_by_session_and_documents_are_counted<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for id in ["a", "b"] {
            for aid in [&alice, &bob] {
                reads(store, &key(id), aid).await;
            }
        }
        let of_bob = store.list(COLLECTION, Some(std::slice::from_ref(&bob)), 10).await.unwrap();
        assert_eq!(of_bob.len(), 2);
        assert!(of_bob.iter().all(|lock| lock.aid == bob && lock.mode == Mode::Shared));
        assert_eq!(store.list(COLLECTION, None, 10).await.unwrap().len(), 4);
        assert_eq!(store.list(COLLECTION, None, 1).await.unwrap().len(), 2, "one document");
    }

    async fn a_reader_is_broken_and_the_others_stay<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for aid in [&alice, &bob] {
            reads(store, &key("a"), aid).await;
        }
        let seen = lock_of(store, &key("a"), &alice).await.unwrap();
        assert_eq!(store.break_lock(&seen, &taken()).await.unwrap(), Released::Released);
        assert_eq!(store.break_lock(&seen, &taken()).await.unwrap(), Released::AlreadyGone);
        assert_eq!(readers(store).await, [bob].into());
    }

    #[needs(Sessions)]
    async fn ending_a_session_takes_its_reader_out_and_leaves_the_others<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        reads(store, &key("alone"), &alice).await;
        granted(store, &key("exclusive"), &alice).await;
        for aid in [&alice, &bob] {
            reads(store, &key("a"), aid).await;
        }
        let named = sorted(end(store, &alice, EndReason::LoggedOut).await);
        assert_eq!(named, [key("a"), key("alone"), key("exclusive")]);
        assert_eq!(readers(store).await, [bob.clone()].into());
        assert_eq!(announce_all(store).await[0].locks.len(), 3);
        for id in ["alone", "exclusive"] {
            granted(store, &key(id), &Aid::new()).await;
        }
        assert_eq!(held(store, &key("a"), &Aid::new()).await.aid, bob);
    }

    async fn releasing_a_session_takes_its_readers_out<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        reads(store, &key("alone"), &alice).await;
        for aid in [&alice, &bob] {
            reads(store, &key("a"), aid).await;
        }
        let released = sorted(store.release_all(COLLECTION, &alice, NONE).await.unwrap());
        assert_eq!(released, [key("a"), key("alone")]);
        assert_eq!(readers(store).await, [bob].into());
    }

    #[needs(Sessions)]
    async fn expired_readers_go_with_their_session_too<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        reads(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        assert_eq!(store.release_all(COLLECTION, &alice, NONE).await.unwrap(), []);
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements), (0, false), "no session became idle: {swept:?}");

        // As if its caller had died before it could ask whether the session has ended.
        end(store, &bob, EndReason::LoggedOut).await;
        assert_eq!(announce_all(store).await.len(), 1);
        reads(store, &key("b"), &bob).await;
        subject.age(&key("b"), TTL).await;
        sweep(store, 100).await;
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements), (0, false), "the end is announced once: {swept:?}");
    }

    #[needs(Sessions)]
    async fn an_idle_reader_is_swept_although_another_renews<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for aid in [&alice, &bob] {
            reads(store, &key("a"), aid).await;
        }
        subject.age(&key("a"), TTL - 10 * SECOND).await;
        store.renew_all(COLLECTION, std::slice::from_ref(&bob)).await.unwrap();
        let swept = sweep(store, 100).await;
        assert_eq!(swept.sessions, 0);
        assert!(swept.next.unwrap() <= 10 * SECOND, "{swept:?}");
        subject.age(&key("a"), 10 * SECOND).await;
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements), (1, true), "{swept:?}");
        let next = swept.next.unwrap();
        assert!(next <= TTL - 10 * SECOND && next > 10 * SECOND, "the expiry of the remaining reader: {next:?}");
        let ended = announce_all(store).await;
        assert_eq!((ended.len(), &ended[0].aid, &ended[0].locks[..]), (1, &alice, &[key("a")][..]));
        assert_eq!(readers(store).await, [bob.clone()].into());
        assert_eq!(sweep(store, 100).await.sessions, 0);
        subject.age(&key("a"), TTL).await;
        assert_eq!(sweep(store, 100).await.sessions, 1);
        assert_eq!(announce_all(store).await[0].aid, bob);
        assert_eq!(sweep(store, 100).await.next, None, "nothing is left");
    }

    #[needs(Sessions)]
    async fn an_idle_reader_is_announced_although_others_come_and_go<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        // Otherwise an idle session would never be noticed in a collection that is read all the time.
        reads(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        let token = reads(store, &key("a"), &bob).await;
        store.renew_all(COLLECTION, std::slice::from_ref(&bob)).await.unwrap();
        release(store, &key("a"), &bob, token).await;
        assert_eq!(readers(store).await.len(), 0);
        assert_eq!(sweep(store, 100).await.sessions, 1);
        assert_eq!(announce_all(store).await[0].locks, [key("a")]);
    }

    #[needs(Sessions)]
    async fn a_session_that_still_reads_is_not_idle<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        for aid in [&bob, &alice] {
            reads(store, &key("b"), aid).await;
        }
        assert_eq!(sweep(store, 100).await.sessions, 0);
        subject.age(&key("b"), TTL).await;
        assert_eq!(sweep(store, 100).await.sessions, 2);
        for ended in announce_all(store).await {
            let named = if ended.aid == alice { vec![key("a"), key("b")] } else { vec![key("b")] };
            assert_eq!(sorted(ended.locks), named);
        }
    }

    #[needs(Sessions)]
    async fn max_hold_ends_a_reader_and_no_other<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let bounded = Claim { max_hold: Some(TTL + TTL / 2), ..reading(&alice) };
        let _ = store.try_acquire(&key("a"), &bounded, NONE).await.unwrap();
        reads(store, &key("a"), &bob).await;
        subject.age(&key("a"), TTL - 10 * SECOND).await;
        let both = [alice.clone(), bob.clone()];
        assert_eq!(store.renew_all(COLLECTION, &both).await.unwrap(), 1);
        let left = lock_of(store, &key("a"), &alice).await.unwrap().expires_in();
        assert!(left <= TTL / 2 + 10 * SECOND, "{left:?}");
        let again = Claim { token: LockToken::new(), ..bounded };
        let _ = store.try_acquire(&key("a"), &again, NONE).await.unwrap();
        let left = lock_of(store, &key("a"), &alice).await.unwrap().expires_in();
        assert!(left <= TTL / 2 + 10 * SECOND, "{left:?}");
        subject.age(&key("a"), TTL / 2 + 10 * SECOND).await;
        assert_eq!(readers(store).await, [bob].into());
        assert_eq!(sweep(store, 100).await.sessions, 0, "reaching max_hold does not end a session");
        assert_eq!(announce_all(store).await, []);
    }

    #[needs(Sessions)]
    async fn a_lock_with_a_ttl_of_its_own_is_swept_in_time<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let short = Claim { ttl: TTL / 2, ..claim(&alice) };
        let _ = store.try_acquire(&key("a"), &short, NONE).await.unwrap();
        granted(store, &key("b"), &bob).await;
        let next = sweep(store, 100).await.next.unwrap();
        assert!(next <= TTL / 2, "{next:?}");
        subject.age(&key("a"), 20 * SECOND).await;
        store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap();
        subject.age(&key("a"), 20 * SECOND).await;
        assert_eq!(sweep(store, 100).await.sessions, 0, "renewed");
        subject.age(&key("a"), 10 * SECOND).await;
        assert_eq!(sweep(store, 100).await.sessions, 1);
        assert_eq!(announce_all(store).await[0].aid, alice);
        // The same holds for a lock with a short `max_hold`,
        let short = Claim { max_hold: Some(TTL / 2), ..claim(&alice) };
        let _ = store.try_acquire(&key("a"), &short, NONE).await.unwrap();
        let next = sweep(store, 100).await.next.unwrap();
        assert!(next <= TTL / 2, "{next:?}");
        // for a lock that is taken again for longer,
        let short = Claim { ttl: TTL / 2, token: LockToken::new(), ..claim(&alice) };
        let _ = store.try_acquire(&key("c"), &short, NONE).await.unwrap();
        let _ = store.try_acquire(&key("c"), &claim(&alice), NONE).await.unwrap();
        subject.age(&key("c"), TTL / 2 + SECOND).await;
        sweep(store, 100).await;
        assert!(token_on(store, &key("c")).await.is_some());
        for id in ["a", "c"] {
            subject.age(&key(id), TTL).await;
        }
        assert_eq!(sweep(store, 100).await.sessions, 1);
        // and for a lock that is taken again for a shorter time.
        granted(store, &key("d"), &alice).await;
        let _ = store.try_acquire(&key("d"), &short, NONE).await.unwrap();
        let next = sweep(store, 100).await.next.unwrap();
        assert!(next <= TTL / 2, "{next:?}");
    }

    async fn the_number_of_readers_is_limited<S: Subject>(subject: &S) {
        let store = subject.store();
        // The first lock must not expire before all readers are in, however long that takes.
        let ttl = 60 * TTL;
        store.prepare(COLLECTION, &actix_doclock::store::Rules::new(ttl), NONE).await.unwrap();
        let reading = |aid: &Aid| Claim { ttl, ..reading(aid) };
        let read = async || store.try_acquire(&key("a"), &reading(&Aid::new()), NONE).await.unwrap();
        let first = Aid::new();
        assert!(matches!(store.try_acquire(&key("a"), &reading(&first), NONE).await.unwrap(), TryAcquire::Granted(_)));
        subject.age(&key("a"), SECOND).await;
        for _ in 1..actix_doclock::limits::MAX_READERS {
            assert!(matches!(read().await, TryAcquire::Granted(_)));
        }
        let TryAcquire::Held(_) = read().await else { panic!("one too many") };
        let again = store.try_acquire(&key("a"), &reading(&first), NONE).await.unwrap();
        assert!(matches!(again, TryAcquire::AlreadyMine(_)), "{again:?}");
        store.release_all(COLLECTION, &first, NONE).await.unwrap();
        assert!(matches!(read().await, TryAcquire::Granted(_)), "in the place of the reader that has left");
        let TryAcquire::Held(_) = read().await else { panic!("one too many") };
        // Expired readers make room for others, swept or not.
        subject.age(&key("a"), ttl).await;
        assert!(matches!(read().await, TryAcquire::Granted(_)));
        assert!(matches!(read().await, TryAcquire::Granted(_)));
    }

    async fn of_simultaneous_readers_and_writers_only_one_kind_gets_in<S: Subject>(subject: &S) {
        const CONTENDERS: usize = 16;
        let store = subject.store();
        for round in 0..20 {
            let key = key(&format!("{round}"));
            let barrier = Barrier::new(CONTENDERS);
            let writes = |n: usize| n.is_multiple_of(3);
            let contend = async |n: usize| {
                let aid = Aid::new();
                let claim = if writes(n) { claim(&aid) } else { reading(&aid) };
                barrier.wait().await;
                match store.try_acquire(&key, &claim, NONE).await.unwrap() {
                    TryAcquire::Granted(lock) => Some(lock.mode),
                    _ => None,
                }
            };
            let answers = futures_util::future::join_all((0..CONTENDERS).map(contend)).await;
            let count = |mode| answers.iter().filter(|it| **it == Some(mode)).count();
            let readers = (0..CONTENDERS).filter(|n| !writes(*n)).count();
            let counted = (count(Mode::Exclusive), count(Mode::Shared));
            assert!(counted == (1, 0) || counted == (0, readers), "round {round}: {counted:?}");
        }
    }

    async fn readers_that_leave_at_the_same_moment_leave_nothing_behind<S: Subject>(subject: &S) {
        let store = subject.store();
        for round in 0..20 {
            let key = key(&format!("{round}"));
            let mut all = Vec::new();
            for _ in 0..4 {
                let aid = Aid::new();
                all.push((reads(store, &key, &aid).await, aid));
            }
            let leave = |(token, aid): (LockToken, Aid)| {
                let key = key.clone();
                async move { release(store, &key, &aid, token).await }
            };
            let answers = futures_util::future::join_all(all.into_iter().map(leave)).await;
            assert!(answers.iter().all(|answer| *answer == Released::Released), "{answers:?}");
            granted(store, &key, &Aid::new()).await;
        }
    }
}
