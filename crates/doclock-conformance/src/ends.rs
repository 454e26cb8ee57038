//! How sessions end, and the announcements of their ends.

use super::*;

cases! {
    needs [Sessions];

    async fn the_end_of_a_session_is_remembered_from_its_first_moment<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        assert_eq!(store.session_ended(&alice).await.unwrap(), None);
        end(store, &alice, EndReason::LoggedOut).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        end(store, &alice, EndReason::LoggedOut).await;
        let ago = store.session_ended(&alice).await.unwrap().unwrap();
        assert!(ago >= Duration::from_millis(4) && ago < 60 * SECOND, "{ago:?}");
        assert_eq!(store.session_ended(&Aid::new()).await.unwrap(), None);
    }

    async fn an_ended_session_has_no_locks_and_is_announced_once_with_their_names<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for id in ["a", "b", "expired"] {
            granted(store, &key(id), &alice).await;
        }
        subject.age(&key("expired"), TTL).await;
        let of_bob = granted(store, &key("of bob"), &bob).await;
        assert_eq!(sorted(end(store, &alice, EndReason::Revoked).await), [key("a"), key("b")]);
        assert_eq!(end(store, &alice, EndReason::LoggedOut).await, []);
        assert_eq!(token_on(store, &key("a")).await, None);
        assert_eq!(token_on(store, &key("of bob")).await, Some(of_bob));
        let ended = announce_all(store).await;
        assert_eq!(ended.len(), 1, "{ended:?}");
        assert_eq!((&ended[0].aid, ended[0].reason), (&alice, EndReason::Revoked), "the first reason");
        assert_eq!(sorted(ended[0].locks.clone()), [key("a"), key("b")]);
        assert!(!ended[0].repeated);
        let off = SystemTime::now().duration_since(ended[0].at).unwrap_or_default();
        assert!(off < 60 * SECOND, "expected an end now, not {off:?} ago");
        end(store, &alice, EndReason::LoggedOut).await;
        assert_eq!(announce_all(store).await, []);
    }

    async fn an_end_is_final_and_unique_whatever_its_reason<S: Subject>(subject: &S) {
        let store = subject.store();
        for reason in [EndReason::LoggedOut, EndReason::Revoked, EndReason::Expired] {
            let alice = Aid::new();
            end(store, &alice, reason).await;
            assert!(store.session_ended(&alice).await.unwrap().is_some(), "{reason:?}");
            end(store, &alice, reason).await;
            let ended = announce_all(store).await;
            assert_eq!((ended.len(), ended[0].reason), (1, reason));
            end(store, &alice, reason).await;
            assert_eq!(announce_all(store).await, [], "{reason:?}");
        }
    }

    async fn a_session_without_locks_is_announced_too_when_it_ends<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        end(store, &alice, EndReason::LoggedOut).await;
        let ended = announce_all(store).await;
        assert_eq!((ended.len(), ended[0].locks.len()), (1, 0));
    }

    async fn an_idle_session_is_swept_and_announced_with_its_locks<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let mut tokens = Vec::new();
        for id in ["a", "b"] {
            tokens.push((key(id), granted(store, &key(id), &alice).await));
            subject.age(&key(id), TTL).await;
        }
        let of_bob = granted(store, &key("of bob"), &bob).await;
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements), (1, true), "{swept:?}");
        let mut expired = swept.expired;
        expired.sort_by(|(a, _), (b, _)| a.cmp(b));
        assert_eq!(expired, tokens);
        assert_eq!(token_on(store, &key("of bob")).await, Some(of_bob));
        let ended = announce_all(store).await;
        assert_eq!(ended.len(), 1, "{ended:?}");
        assert_eq!((&ended[0].aid, ended[0].reason), (&alice, EndReason::Expired));
        assert_eq!(sorted(ended[0].locks.clone()), [key("a"), key("b")]);
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements, swept.more), (0, false, false));
        assert_eq!(announce_all(store).await, []);
    }

    async fn sessions_are_overdue_while_their_expired_locks_are_there<S: Subject>(subject: &S) {
        let store = subject.store();
        let [idle, live, capped] = [Aid::new(), Aid::new(), Aid::new()];
        for (aid, id) in [(&idle, "a"), (&idle, "b"), (&live, "c")] {
            granted(store, &key(id), aid).await;
        }
        let max_hold = Some(TTL / 2);
        let claim = Claim { max_hold, ..claim(&capped) };
        assert!(matches!(store.try_acquire(&key("d"), &claim, NONE).await, Ok(TryAcquire::Granted(_))));
        for id in ["a", "b", "d"] {
            subject.age(&key(id), TTL).await;
        }
        let overdue = store.overdue(&[COLLECTION], 100, NONE).await.unwrap();
        if overdue.is_empty() {
            return; // The store cannot tell.
        }
        assert_eq!(overdue, std::slice::from_ref(&idle));
        sweep(store, 100).await;
        assert_eq!(store.overdue(&[COLLECTION], 100, NONE).await.unwrap(), []);
    }

    async fn the_end_of_a_session_tells_whose_it_was<S: Subject>(subject: &S) {
        let store = subject.store();
        let holder = Holder::new("Alice $x").of_user("id.1");
        let mode = Mode::Shared;
        let [idle, reads, over, later] = [Aid::new(), Aid::new(), Aid::new(), Aid::new()];
        for (aid, id, mode) in
            [(&idle, "a", Mode::Exclusive), (&reads, "b", mode), (&over, "c", mode), (&later, "d", mode)]
        {
            let claim = Claim { holder: holder.clone(), mode, ..claim(aid) };
            let answer = store.try_acquire(&key(id), &claim, NONE).await.unwrap();
            assert!(matches!(answer, TryAcquire::Granted(_)), "{answer:?}");
        }
        for id in ["a", "b", "d"] {
            subject.age(&key(id), TTL).await;
        }
        assert_eq!(sweep(store, 100).await.sessions, 3);
        end(store, &over, EndReason::LoggedOut).await;
        // An idle session that is logged out before anybody was told.
        end(store, &later, EndReason::LoggedOut).await;
        let without = Aid::new();
        end(store, &without, EndReason::LoggedOut).await;
        let ended = announce_all(store).await;
        assert_eq!(ended.len(), 5, "{ended:?}");
        for end in ended {
            let whose = (end.aid != without).then(|| holder.clone());
            assert_eq!(end.holder, whose, "{end:?}");
        }
    }

    async fn a_session_with_a_live_lock_is_not_idle<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        let live = granted(store, &key("b"), &alice).await;
        assert_eq!(sweep(store, 100).await.sessions, 0);
        assert_eq!(announce_all(store).await, []);
        assert_eq!(token_on(store, &key("b")).await, Some(live));
    }

    async fn a_lock_that_expired_a_little_earlier_than_the_rest_is_named_too<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for (aid, name) in [(&alice, "a"), (&bob, "b")] {
            for (n, age) in [(1, TTL), (2, TTL - 20 * SECOND)] {
                granted(store, &key(&format!("{name} {n}")), aid).await;
                subject.age(&key(&format!("{name} {n}")), age).await;
            }
        }
        assert_eq!(sweep(store, 100).await.sessions, 0, "the second locks are live");
        subject.age(&key("a 2"), 20 * SECOND).await;
        assert_eq!(sweep(store, 100).await.sessions, 1);
        end(store, &bob, EndReason::LoggedOut).await;
        for ended in announce_all(store).await {
            assert_eq!(ended.locks.len(), 2, "{ended:?}");
            assert_eq!(ended.for_good, ended.aid == bob);
        }
    }

    async fn an_idle_session_may_come_back_and_become_idle_again<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let mut events = Vec::new();
        for id in ["a", "b"] {
            granted(store, &key(id), &alice).await;
            subject.age(&key(id), TTL).await;
            assert_eq!(sweep(store, 100).await.sessions, 1, "{id}");
            assert_eq!(store.session_ended(&alice).await.unwrap(), None, "the session may come back");
            let ended = announce_all(store).await;
            assert_eq!(ended[0].locks, [key(id)]);
            events.push(ended[0].event);
        }
        assert_ne!(events[0], events[1]);
    }

    async fn a_takeover_of_an_expired_lock_leaves_its_holder_to_the_sweep<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for (id, mode, next) in [
            ("a", Mode::Exclusive, Mode::Exclusive),
            ("b", Mode::Exclusive, Mode::Shared),
            ("c", Mode::Shared, Mode::Exclusive),
        ] {
            let _ = store.try_acquire(&key(id), &Claim { mode, ..claim(&alice) }, NONE).await.unwrap();
            subject.age(&key(id), TTL).await;
            let claim = Claim { mode: next, ..claim(&bob) };
            for _ in 0..2 {
                // A repetition, as after a lost reply, is not a second takeover.
                let answer = store.try_acquire(&key(id), &claim, NONE).await.unwrap();
                assert!(matches!(answer, TryAcquire::Granted(_)), "{answer:?}");
            }
            // Releasing the lock does not remove the trace of the takeover.
            store.release(&key(id), &bob, claim.token, next).await.unwrap();
        }
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements), (1, true), "{swept:?}");
        let ended = announce_all(store).await;
        assert_eq!(ended.len(), 1, "{ended:?}");
        assert_eq!((&ended[0].aid, ended[0].reason), (&alice, EndReason::Expired));
        assert_eq!(sorted(ended[0].locks.clone()), [key("a"), key("b"), key("c")]);
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements, swept.more), (0, false, false));
        assert_eq!(announce_all(store).await, []);
    }

    async fn a_holder_that_lost_an_expired_lock_and_has_others_is_not_idle<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        granted(store, &key("a"), &alice).await;
        granted(store, &key("other"), &alice).await;
        subject.age(&key("a"), TTL).await;
        granted(store, &key("a"), &bob).await;
        assert_eq!(sweep(store, 100).await.sessions, 0);
        assert_eq!(announce_all(store).await, []);
        subject.age(&key("other"), TTL).await;
        assert_eq!(sweep(store, 100).await.sessions, 1);
        let ended = announce_all(store).await;
        assert_eq!((ended.len(), &ended[0].aid), (1, &alice));
        assert_eq!(sorted(ended[0].locks.clone()), [key("a"), key("other")], "both, because they expired close together");
    }

    async fn a_holder_that_logs_out_after_a_takeover_is_announced_once<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        granted(store, &key("a"), &bob).await;
        end(store, &alice, EndReason::LoggedOut).await;
        let ended = announce_all(store).await;
        assert_eq!((ended.len(), &ended[0].aid, ended[0].for_good), (1, &alice, true));
        sweep(store, 100).await;
        assert_eq!(sweep(store, 100).await.sessions, 0, "no session is left to end");
        assert_eq!(announce_all(store).await, []);
    }

    async fn a_session_that_comes_back_to_its_expired_lock_is_not_idle<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        assert_ne!(granted(store, &key("a"), &alice).await, token);
        assert_eq!(sweep(store, 100).await.sessions, 0);
        assert_eq!(announce_all(store).await, []);
    }

    async fn a_holder_whose_lock_reached_max_hold_is_not_idle_after_a_takeover<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let claim = Claim { max_hold: Some(TTL), ..claim(&alice) };
        let _ = store.try_acquire(&key("a"), &claim, NONE).await.unwrap();
        subject.age(&key("a"), TTL).await;
        granted(store, &key("a"), &bob).await;
        assert_eq!(sweep(store, 100).await.sessions, 0);
        assert_eq!(announce_all(store).await, []);
    }

    async fn a_break_of_an_expired_lock_leaves_its_idle_session_to_the_sweep<S: Subject>(subject: &S) {
        let store = subject.store();
        for mode in [Mode::Exclusive, Mode::Shared] {
            let (alice, a) = (Aid::new(), key("a"));
            let claim = Claim { mode, ..claim(&alice) };
            let _ = store.try_acquire(&a, &claim, NONE).await.unwrap();
            let seen = store.inspect(&a, Some(&alice)).await.unwrap().unwrap();
            subject.age(&a, TTL).await;
            assert_eq!(store.break_lock(&seen, &taken()).await.unwrap(), Released::AlreadyGone);
            assert_eq!(sweep(store, 100).await.sessions, 1, "{mode:?}");
            let ended = announce_all(store).await;
            assert_eq!((&ended[0].aid, &ended[0].locks[..]), (&alice, &[a][..]));
        }
    }

    async fn a_logout_replaces_an_unannounced_expiry<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        assert_eq!(sweep(store, 100).await.sessions, 1);
        granted(store, &key("b"), &alice).await;
        end(store, &alice, EndReason::LoggedOut).await;
        assert!(store.session_ended(&alice).await.unwrap().is_some());
        let ended = announce_all(store).await;
        assert_eq!((ended.len(), ended[0].reason), (1, EndReason::LoggedOut));
        assert_eq!(sorted(ended[0].locks.clone()), [key("a"), key("b")]);
    }

    async fn a_lock_of_an_ended_session_is_swept_without_another_announcement<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        end(store, &alice, EndReason::LoggedOut).await;
        announce_all(store).await;
        // As if its caller had died before it could ask whether the session has ended.
        granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        sweep(store, 100).await;
        assert_eq!(announce_all(store).await, []);
        assert!(store.session_ended(&alice).await.unwrap().is_some());
    }

    async fn a_sweep_is_bounded_and_reports_that_more_is_left<S: Subject>(subject: &S) {
        let store = subject.store();
        for n in 0..10 {
            let id = format!("{n}");
            granted(store, &key(&id), &Aid::new()).await;
            subject.age(&key(&id), TTL).await;
        }
        let mut sessions = 0;
        loop {
            let swept = sweep(store, 4).await;
            assert!(swept.sessions <= 4, "{swept:?}");
            sessions += swept.sessions;
            assert!(swept.more || sessions == 10, "{swept:?} after {sessions}");
            if !swept.more {
                break;
            }
        }
        assert_eq!(sessions, 10);
        assert_eq!(announce_all(store).await.len(), 10);
    }

    async fn a_sweep_says_how_soon_the_next_lock_can_expire<S: Subject>(subject: &S) {
        let store = subject.store();
        assert_eq!(sweep(store, 100).await.next, None);
        for id in ["a", "b"] {
            granted(store, &key(id), &Aid::new()).await;
        }
        subject.age(&key("a"), TTL / 2).await;
        let next = sweep(store, 100).await.next.unwrap();
        assert!(next <= TTL / 2 && next > TTL / 2 - 30 * SECOND, "{next:?}");
    }

    async fn many_sweeps_at_the_same_moment_end_each_session_once<S: Subject>(subject: &S) {
        const SESSIONS: usize = 30;
        let store = subject.store();
        for n in 0..SESSIONS {
            let alice = Aid::new();
            for id in [format!("{n} a"), format!("{n} b")] {
                granted(store, &key(&id), &alice).await;
                subject.age(&key(&id), TTL).await;
            }
        }
        let barrier = Barrier::new(4);
        let sweep_all = async || {
            let worker = Uuid::new_v4();
            barrier.wait().await;
            let mut sessions = 0;
            loop {
                let swept = store.sweep(&[COLLECTION], worker, 8, NONE).await.unwrap();
                sessions += swept.sessions;
                if !swept.more {
                    return sessions;
                }
            }
        };
        let swept = tokio::join!(sweep_all(), sweep_all(), sweep_all(), sweep_all());
        let swept = swept.0 + swept.1 + swept.2 + swept.3;
        // When two workers met, one of them left the session to the other.
        let left = sweep(store, 100).await.sessions;
        assert_eq!(swept + left, SESSIONS);
        let ended = announce_all(store).await;
        let aids: BTreeSet<_> = ended.iter().map(|ended| &ended.aid).collect();
        assert_eq!((ended.len(), aids.len()), (SESSIONS, SESSIONS));
        assert!(ended.iter().all(|ended| ended.locks.len() == 2), "{ended:?}");
    }

    async fn an_announcement_belongs_to_one_worker_until_its_lease_has_passed<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let (dies, lives) = (Uuid::new_v4(), Uuid::new_v4());
        end(store, &alice, EndReason::LoggedOut).await;
        let first = store.take_ends(dies, 60 * SECOND, 10).await.unwrap();
        assert_eq!((first.len(), first[0].repeated), (1, false));
        assert_eq!(store.take_ends(lives, 60 * SECOND, 10).await.unwrap(), []);
        // It repeats the call because the first answer was lost, and gets a shorter lease.
        let again = store.take_ends(dies, Duration::from_millis(1), 10).await.unwrap();
        assert_eq!((again[0].event, again[0].repeated), (first[0].event, false));
        tokio::time::sleep(Duration::from_millis(20)).await;
        let second = store.take_ends(lives, 60 * SECOND, 10).await.unwrap();
        assert_eq!((second[0].event, second[0].repeated), (first[0].event, true));
        // The first worker wakes up. The end no longer belongs to it.
        store.told(dies, &first).await.unwrap();
        assert_eq!(store.take_ends(lives, 60 * SECOND, 10).await.unwrap().len(), 1);
        store.told(lives, &second).await.unwrap();
        assert_eq!(store.take_ends(lives, 60 * SECOND, 10).await.unwrap(), []);
    }

    async fn announcements_are_given_out_a_few_at_a_time<S: Subject>(subject: &S) {
        let store = subject.store();
        for _ in 0..5 {
            end(store, &Aid::new(), EndReason::LoggedOut).await;
        }
        let taken = store.take_ends(Uuid::new_v4(), 60 * SECOND, 2).await.unwrap();
        assert_eq!(taken.len(), 2);
        assert_eq!(announce_all(store).await.len(), 3);
    }

    #[needs(Documents)]
    async fn max_hold_ends_a_lock_however_often_it_is_renewed<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let claim = Claim { max_hold: Some(TTL + TTL / 2), ..claim(&alice) };
        let _ = store.try_acquire(&key("a"), &claim, NONE).await.unwrap();
        let left = async || store.inspect(&key("a"), None).await.unwrap().map(|lock| lock.expires_in());
        assert!(left().await.unwrap() > TTL - 30 * SECOND, "the whole ttl at first");
        subject.age(&key("a"), TTL - 10 * SECOND).await;
        // Renewal, re-entry and save: none of them extends the lock beyond `max_hold`.
        assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap(), 1);
        assert!(left().await.unwrap() <= TTL / 2 + 10 * SECOND, "{:?}", left().await);
        let next = sweep(store, 100).await.next.unwrap();
        assert!(next <= TTL / 2 + 10 * SECOND, "the next sweep is in time: {next:?}");
        let again = Claim { token: LockToken::new(), ..claim.clone() };
        let answer = store.try_acquire(&key("a"), &again, NONE).await.unwrap();
        assert!(matches!(answer, TryAcquire::AlreadyMine(_)), "{answer:?}");
        assert!(left().await.unwrap() <= TTL / 2 + 10 * SECOND, "{:?}", left().await);
        subject.put(&Page { id: "a".into(), text: "old".into() }).await;
        let document = encoded(store, "a", "new");
        assert_eq!(save(store, &key("a"), &alice, claim.token, &document).await, Saved::Saved);
        assert!(left().await.unwrap() <= TTL / 2 + 10 * SECOND, "{:?}", left().await);
        subject.age(&key("a"), TTL / 2 + 10 * SECOND).await;
        assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap(), 0);
        assert_eq!(left().await, None);
    }

    async fn a_lock_that_reached_max_hold_says_nothing_about_its_session<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let claim = Claim { max_hold: Some(TTL), ..claim(&alice) };
        let _ = store.try_acquire(&key("a"), &claim, NONE).await.unwrap();
        subject.age(&key("a"), TTL).await;
        assert_eq!(sweep(store, 100).await.sessions, 0);
        assert_eq!(announce_all(store).await, []);
        // But a lock that expired before its `max_hold` does end its session.
        let claim = Claim { max_hold: Some(3 * TTL), token: LockToken::new(), ..claim };
        let _ = store.try_acquire(&key("a"), &claim, NONE).await.unwrap();
        subject.age(&key("a"), TTL).await;
        assert_eq!(sweep(store, 100).await.sessions, 1);
    }
}
