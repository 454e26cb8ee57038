//! How sessions end, and the announcements of their ends.

use doclock_core::{SessionEnded, limits::MAX_NAMED_LOCKS};

use super::{
    shared::{readers, set},
    *,
};

const LEASE: Duration = TTL;

cases! {
    tests ends($);
    needs [Sessions];

    async fn the_end_of_a_session_is_remembered_from_its_first_moment(store, alice) {
        assert_eq!(store.session_ended(alice).await.unwrap(), None);
        store.logs_out(alice).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        store.logs_out(alice).await;
        let ago = store.session_ended(alice).await.unwrap().unwrap();
        assert!(ago >= Duration::from_millis(4) && ago < 60 * TICK, "{ago:?}");
        assert_eq!(store.session_ended(&Aid::new()).await.unwrap(), None);
    }

    async fn an_ended_session_has_no_locks_and_is_announced_once_with_their_names(
        store,
        alice,
        bob,
    ) {
        let (_, left) = store.holds_many(alice, bob).await;
        // The expired one, too: no sweep has seen it, so this is the end that it belongs to.
        let all = keys(["a", "b", "expired", "read", "shared"]);
        assert_eq!(store.ends(alice, EndReason::Revoked).await, all);
        assert_eq!(store.logs_out(alice).await, []);
        store.has_left(left).await;
        let ended = store.announces(alice, &["a", "b", "expired", "read", "shared"]).await;
        assert_eq!((ended.reason, ended.repeated), (EndReason::Revoked, false), "the first reason");
        let off = SystemTime::now().duration_since(ended.at).unwrap_or_default();
        assert!(off < 60 * TICK, "expected an end now, not {off:?} ago");
        store.logs_out(alice).await;
        assert_eq!(store.announced().await, []);
    }

    async fn an_end_is_final_and_unique_whatever_its_reason(store) {
        for reason in [EndReason::LoggedOut, EndReason::Revoked, EndReason::Expired] {
            let alice = &Aid::new();
            store.ends(alice, reason).await;
            assert!(store.session_ended(alice).await.unwrap().is_some(), "{reason:?}");
            store.ends(alice, reason).await;
            assert_eq!(store.announces(alice, &[]).await.reason, reason);
            store.ends(alice, reason).await;
            assert_eq!(store.announced().await, [], "{reason:?}");
        }
    }

    async fn an_idle_session_is_announced_with_its_locks_and_may_come_back(store, alice, bob) {
        let of_bob = store.granted("of bob", bob).await;
        let mut events = BTreeSet::new();
        for ids in [["a", "b"], ["b", "c"]] {
            let mut mine = Vec::new();
            for id in ids {
                mine.push((key(id), store.expired(id, alice).await.token.unwrap()));
            }
            let mut swept = store.finds_idle(1).await;
            assert!(swept.announcements, "{swept:?}");
            swept.expired.sort_by(|(a, _), (b, _)| a.cmp(b));
            assert_eq!(swept.expired, mine);
            let ended = store.announces(alice, &ids).await;
            assert_eq!(ended.reason, EndReason::Expired);
            assert!(events.insert(ended.event), "another end");
            assert_eq!(store.session_ended(alice).await.unwrap(), None, "it may come back");
            store.finds_nobody_idle().await;
        }
        assert_eq!(store.token_on("of bob").await, of_bob.token);
    }

    async fn the_end_of_a_session_tells_whose_it_was(store, idle, reads, over, later, without) {
        let holder = Holder::new("Alice $x").of_user("id.1");
        for (aid, id, mode) in [
            (idle, "a", Exclusive),
            (reads, "b", Shared),
            (over, "c", Shared),
            (later, "d", Shared),
        ] {
            store.granted(id, &Claim { holder: holder.clone(), mode, ..claim(aid) }).await;
        }
        store.age_all(&["a", "b", "d"], TTL).await;
        store.finds_idle(3).await;
        // One of them is an idle session that is logged out before anybody was told.
        for aid in [over, later, without] {
            store.logs_out(aid).await;
        }
        let ended = store.announced().await;
        assert_eq!(ended.len(), 5, "{ended:?}");
        for end in ended {
            let whose = (end.aid != *without).then(|| holder.clone());
            assert_eq!(end.holder, whose, "{end:?}");
        }
    }

    async fn a_session_that_is_still_active_is_not_idle(store, alice) {
        store.expired("a", alice).await;
        let live = store.granted("b", alice).await;
        store.finds_nobody_idle().await;
        assert_eq!(store.token_on("b").await, live.token, "it has a live lock");
        for claim in [claim(alice), reading(alice)] {
            store.releases_all(alice).await;
            store.expired("a", &claim).await;
            store.granted("a", alice).await;
            store.finds_nobody_idle().await;
            store.releases_all(alice).await;
            store.expired("a", &claim).await;
            assert_eq!(store.releases_all(alice).await, []);
            store.finds_nobody_idle().await;
        }
    }

    async fn a_lock_that_expired_a_little_earlier_than_the_rest_is_named_too(store, alice, bob) {
        store.expired("of alice", alice).await;
        store.expired("of bob", bob).await;
        store.read("read", &[alice, bob]).await;
        store.age("read", TTL - 20 * TICK).await;
        store.finds_nobody_idle().await;
        assert_eq!(store.logs_out(bob).await, keys(["of bob", "read"]));
        assert!(store.announces(bob, &["of bob", "read"]).await.for_good);
        store.age("read", 20 * TICK).await;
        store.finds_idle(1).await;
        assert!(!store.announces(alice, &["of alice", "read"]).await.for_good);
    }

    async fn a_takeover_of_an_expired_lock_leaves_its_holder_to_the_sweep(store, alice, bob) {
        // Otherwise an idle session would never be noticed on a document that is in use all the time.
        for (id, mode, next) in [
            ("a", Exclusive, Exclusive),
            ("b", Exclusive, Shared),
            ("c", Shared, Exclusive),
            ("d", Shared, Shared),
        ] {
            store.expired(id, &Claim { mode, ..claim(alice) }).await;
            let claim = Claim { mode: next, ..claim(bob) };
            // A repetition, as after a lost reply, is not a second takeover.
            store.granted(id, &claim).await;
            let lock = store.granted(id, &claim).await;
            // The trace of the takeover outlives a renewal and a release.
            store.renews(&[bob]).await;
            store.releases(&lock).await;
        }
        assert!(store.finds_idle(1).await.announcements);
        let ended = store.announces(alice, &["a", "b", "c", "d"]).await;
        assert_eq!(ended.reason, EndReason::Expired);
        store.finds_nobody_idle().await;
    }

    async fn a_holder_that_lost_an_expired_lock_and_has_others_is_not_idle(store, alice, bob) {
        store.granted("a", alice).await;
        store.granted("other", alice).await;
        store.age("a", TTL).await;
        store.granted("a", bob).await;
        store.finds_nobody_idle().await;
        store.age("other", TTL).await;
        store.finds_idle(1).await;
        // Both, because they expired close together.
        store.announces(alice, &["a", "other"]).await;
    }

    async fn a_holder_that_logs_out_after_a_takeover_is_announced_once(store, alice, bob) {
        store.expired("a", alice).await;
        store.granted("a", bob).await;
        store.logs_out(alice).await;
        let ended = store.announced().await;
        assert_eq!((ended.len(), &ended[0].aid, ended[0].for_good), (1, alice, true));
        store.sweeps().await;
        store.finds_nobody_idle().await;
    }

    async fn a_logout_names_the_locks_that_expired_before_it_and_that_no_sweep_has_seen(store, bob) {
        for reason in [EndReason::LoggedOut, EndReason::Revoked] {
            for mode in [Exclusive, Shared] {
                let alice = &Aid::new();
                let of_alice = || Claim { mode, ..claim(alice) };
                store.granted("live", &of_alice()).await;
                // On record; taken over by a writer who stays; taken over, and free again.
                store.expired("on record", &of_alice()).await;
                store.expired("held", &of_alice()).await;
                let held = store.granted("held", bob).await;
                store.expired("free", &of_alice()).await;
                let freed = store.granted("free", bob).await;
                store.releases(&freed).await;
                // Seen by a sweep while the session lived on.
                store.expired("noted", &of_alice()).await;
                store.finds_nobody_idle().await;
                store.expired("late", &of_alice()).await;
                // A lock that reached its `max_hold` was not lost.
                store.expired("capped", &Claim { max_hold: Some(TTL), ..of_alice() }).await;
                let all = ["free", "held", "late", "live", "noted", "on record"];
                assert_eq!(store.ends(alice, reason).await, keys(all), "{mode:?}");
                let ended = store.announces(alice, &all).await;
                assert!(ended.for_good && ended.reason == reason, "{ended:?}");
                // They belong to that end, and to no other one.
                store.sweeps().await;
                store.finds_nobody_idle().await;
                assert_eq!(store.token_on("held").await, held.token);
                assert_eq!(store.logs_out(alice).await, []);
                store.releases_all(bob).await;
            }
        }
    }

    async fn a_logout_does_not_name_what_the_idle_end_before_it_has_told(store, alice, bob) {
        store.expired("a", alice).await;
        store.expired("b", alice).await;
        store.granted("b", bob).await;
        store.finds_idle(1).await;
        store.announces(alice, &["a", "b"]).await;
        // The session comes back, and its next locks belong to its next end.
        store.expired("c", alice).await;
        store.granted("d", alice).await;
        assert_eq!(store.logs_out(alice).await, keys(["c", "d"]));
        store.announces(alice, &["c", "d"]).await;
        store.finds_nobody_idle().await;
    }

    async fn one_idle_session_is_one_end_whenever_its_locks_expire_or_are_taken_over(store, bob) {
        // Which lock is taken over, and before which sweep: the first one sees a session that is still active.
        for (taken, before_first) in
            [("a", true), ("a", false), ("b", false), ("read", true), ("read", false)]
        {
            let alice = &Aid::new();
            store.granted("a", alice).await;
            store.granted("b", alice).await;
            store.read("read", &[alice]).await;
            store.age_all(&["a", "read"], TTL).await;
            if before_first {
                store.granted(taken, bob).await;
            }
            store.finds_nobody_idle().await;
            store.age("b", TTL).await;
            if !before_first {
                store.granted(taken, bob).await;
            }
            store.finds_idle(1).await;
            let first = store.announced().await;
            assert_eq!(first.len(), 1, "{taken}, {before_first}: {first:?}");
            assert_eq!(first[0].locks, keys(["a", "b", "read"]), "{taken}, {before_first}");
            store.releases_all(bob).await;
            store.finds_nobody_idle().await;
        }
    }

    async fn many_locks_of_one_session_are_named_or_counted(store, idle, ends) {
        let many = MAX_NAMED_LOCKS + 5;
        let names: Vec<_> = (0..many).map(|n| format!("{n:05}")).collect();
        for_each(&names, async |name| {
            store.granted(name, idle).await;
            store.granted(&format!("{name}'"), ends).await;
        });
        let worker = Uuid::new_v4();
        for attempt in 0..2 {
            // The same call once more, as after a lost reply.
            let reason = EndReason::LoggedOut;
            let ended =
                store.end_session(ends, reason, &[COLLECTION], worker, NONE).await.unwrap();
            let named: BTreeSet<_> = ended.locks.iter().collect();
            assert_eq!(named.len(), ended.locks.len(), "each once");
            let all = ended.locks.len() + ended.more;
            if attempt == 0 {
                assert_eq!(all, many);
                // A late duplicate of a request: one more lock.
                store.granted("late", ends).await;
            } else {
                // Those that this call has found, or all of the end.
                assert!(all == 1 || all == many + 1, "{all}");
            }
        }
        store.ready(ends, worker).await.unwrap();
        let counts = |end: &SessionEnded| (end.locks.len(), end.more);
        let ended = store.announced().await;
        let more = many + 1 - MAX_NAMED_LOCKS;
        assert_eq!((ended.len(), counts(&ended[0])), (1, (MAX_NAMED_LOCKS, more)));
        for_each(&names, async |name| store.age(name, TTL).await);
        loop {
            if !store.sweeps().await.more {
                break;
            }
        }
        let ended = store.announced().await;
        assert_eq!((ended.len(), counts(&ended[0])), (1, (MAX_NAMED_LOCKS, many - MAX_NAMED_LOCKS)));
    }

    async fn a_logout_counts_the_locks_that_an_untold_idle_end_has_counted(store, alice) {
        let many = MAX_NAMED_LOCKS + 5;
        let names: Vec<_> = (0..many).map(|n| format!("{n:05}")).collect();
        for_each(&names, async |name| _ = store.expired(name, alice).await);
        while store.sweeps().await.more {}
        let worker = Uuid::new_v4();
        let reason = EndReason::LoggedOut;
        let ended = store.end_session(alice, reason, &[COLLECTION], worker, NONE).await.unwrap();
        assert_eq!(ended.locks.len() + ended.more, many);
        store.ready(alice, worker).await.unwrap();
        let ended = store.announced().await;
        let counts: Vec<_> =
            ended.iter().map(|it| (it.reason, it.locks.len(), it.more)).collect();
        assert_eq!(counts, [(reason, MAX_NAMED_LOCKS, many - MAX_NAMED_LOCKS)]);
    }

    async fn locks_that_expire_before_others_of_their_session_are_counted_with_its_end(store, alice) {
        // Longer than the test takes on any machine.
        const HOUR: Duration = Duration::from_secs(3600);
        let for_an_hour = || Claim { ttl: HOUR, ..claim(alice) };
        let many = MAX_NAMED_LOCKS + 205;
        let names: Vec<_> = (0..many).map(|n| format!("{n:05}")).collect();
        for_each(&names, async |name| _ = store.granted(name, &for_an_hour()).await);
        store.granted("last", &for_an_hour()).await;
        for_each(&names, async |name| store.age(name, HOUR).await);
        while store.sweeps().await.more {}
        store.age("last", HOUR).await;
        while store.sweeps().await.more {}
        let ended = store.announced().await;
        let counts: Vec<_> = ended.iter().map(|it| (it.locks.len(), it.more)).collect();
        assert_eq!(counts, [(MAX_NAMED_LOCKS, many + 1 - MAX_NAMED_LOCKS)]);
    }

    async fn a_sweep_takes_no_more_readers_of_one_document_than_its_limit(store) {
        const READERS: usize = 25;
        const LIMIT: usize = 10;
        for _ in 0..READERS {
            store.granted("a", &reading(&Aid::new())).await;
        }
        store.age("a", TTL).await;
        let mut sessions = 0;
        loop {
            let swept = store.sweep(&[COLLECTION], Uuid::new_v4(), LIMIT, NONE).await.unwrap();
            assert!(swept.sessions <= LIMIT, "{swept:?}");
            sessions += swept.sessions;
            if !swept.more {
                break;
            }
        }
        assert_eq!(sessions, READERS);
    }

    async fn a_lock_that_reached_max_hold_says_nothing_about_its_session(store, alice, bob) {
        for is_taken_over in [false, true] {
            store.expired("a", &Claim { max_hold: Some(TTL), ..claim(alice) }).await;
            if is_taken_over {
                store.granted("a", bob).await;
            }
            store.finds_nobody_idle().await;
            store.releases_all(bob).await;
        }
        // But a lock that expired before its `max_hold` does end its session.
        store.expired("a", &Claim { max_hold: Some(3 * TTL), ..claim(alice) }).await;
        store.finds_idle(1).await;
    }

    async fn a_break_of_an_expired_lock_leaves_its_idle_session_to_the_sweep(store) {
        for mode in [Exclusive, Shared] {
            let alice = &Aid::new();
            store.granted("a", &Claim { mode, ..claim(alice) }).await;
            let seen = store.lock_of("a", alice).await.unwrap();
            store.age("a", TTL).await;
            assert_eq!(store.breaks(&seen).await, Released::AlreadyGone);
            store.finds_idle(1).await;
            store.announces(alice, &["a"]).await;
        }
    }

    async fn a_logout_replaces_an_unannounced_expiry(store, alice) {
        store.expired("a", alice).await;
        store.finds_idle(1).await;
        store.granted("b", alice).await;
        store.logs_out(alice).await;
        assert!(store.session_ended(alice).await.unwrap().is_some());
        let ended = store.announces(alice, &["a", "b"]).await;
        assert_eq!(ended.reason, EndReason::LoggedOut);
    }

    async fn a_lock_of_an_ended_session_is_swept_without_another_announcement(store) {
        for mode in [Exclusive, Shared] {
            let alice = &Aid::new();
            store.logs_out(alice).await;
            store.announces(alice, &[]).await;
            // As if its caller had died before it could ask whether the session has ended.
            store.expired("a", &Claim { mode, ..claim(alice) }).await;
            store.sweeps().await;
            store.finds_nobody_idle().await;
            assert!(store.session_ended(alice).await.unwrap().is_some(), "{mode:?}");
        }
    }

    async fn a_sweep_is_bounded_and_reports_that_more_is_left(store) {
        for n in 0..10 {
            let id = n.to_string();
            store.expired(&id, &Aid::new()).await;
        }
        let mut sessions = 0;
        loop {
            let swept = store.sweep(&[COLLECTION], Uuid::new_v4(), 4, NONE).await.unwrap();
            assert!(swept.sessions <= 4, "{swept:?}");
            sessions += swept.sessions;
            assert!(swept.more || sessions == 10, "{swept:?} after {sessions}");
            if !swept.more {
                break;
            }
        }
        assert_eq!(sessions, 10);
        assert_eq!(store.announced().await.len(), 10);
    }

    async fn many_sweeps_at_the_same_moment_end_each_session_once(store) {
        const SESSIONS: usize = 30;
        for n in 0..SESSIONS {
            let alice = Aid::new();
            for id in [format!("{n} a"), format!("{n} b")] {
                store.expired(&id, &alice).await;
            }
        }
        let sweep_all = async |_| {
            let (worker, mut sessions) = (Uuid::new_v4(), 0);
            loop {
                let swept = store.sweep(&[COLLECTION], worker, 8, NONE).await.unwrap();
                sessions += swept.sessions;
                if !swept.more {
                    return sessions;
                }
            }
        };
        let swept: usize = at_once(4, sweep_all).into_iter().sum();
        // When two workers met, one of them left the session to the other.
        let left = store.sweeps().await.sessions;
        assert_eq!(swept + left, SESSIONS);
        let ended = store.announced().await;
        let aids: BTreeSet<_> = ended.iter().map(|ended| &ended.aid).collect();
        assert_eq!((ended.len(), aids.len()), (SESSIONS, SESSIONS));
        assert!(ended.iter().all(|ended| ended.locks.len() == 2), "{ended:?}");
    }

    async fn an_announcement_belongs_to_one_worker_until_its_lease_has_passed(store, alice) {
        let (dies, lives) = (Uuid::new_v4(), Uuid::new_v4());
        let takes = async |worker, lease| store.take_ends(worker, lease, 10).await.unwrap();
        store.logs_out(alice).await;
        let first = takes(dies, LEASE).await;
        assert_eq!((first.len(), first[0].repeated), (1, false));
        assert_eq!(takes(lives, LEASE).await, []);
        // It repeats the call because the first answer was lost, and gets a shorter lease.
        let again = takes(dies, Duration::from_millis(1)).await;
        assert_eq!((again[0].event, again[0].repeated), (first[0].event, false));
        tokio::time::sleep(Duration::from_millis(20)).await;
        let second = takes(lives, LEASE).await;
        assert_eq!((second[0].event, second[0].repeated), (first[0].event, true));
        // The first worker wakes up. The end no longer belongs to it.
        store.told(dies, &first).await.unwrap();
        assert_eq!(takes(lives, LEASE).await.len(), 1);
        store.told(lives, &second).await.unwrap();
        assert_eq!(takes(lives, LEASE).await, []);
    }

    async fn announcements_are_given_out_a_few_at_a_time(store) {
        for _ in 0..5 {
            store.logs_out(&Aid::new()).await;
        }
        let taken = store.take_ends(Uuid::new_v4(), LEASE, 2).await.unwrap();
        assert_eq!(taken.len(), 2);
        assert_eq!(store.announced().await.len(), 3);
    }

    #[needs(Documents)]
    async fn max_hold_ends_a_lock_however_often_it_is_renewed(store, alice, bob) {
        store.put("a", "old").await;
        for mode in [Exclusive, Shared] {
            let bounded = |aid| Claim { mode, max_hold: Some(TTL + TTL / 2), ..claim(aid) };
            let mine = store.granted("a", &bounded(alice)).await;
            assert!(is_full(&mine), "the whole ttl at first: {mine:?}");
            if mode == Shared {
                store.read("a", &[bob]).await;
            }
            store.age("a", TTL - 10 * TICK).await;
            let ends = async |why: &str| {
                let left = store.lock_of("a", alice).await.expect("a lock").expires_in();
                assert!(left <= TTL / 2 + 10 * TICK, "{mode:?}, {why}: {left:?}");
            };
            assert_eq!(store.renews(&[alice, bob]).await, 1);
            ends("renewed").await;
            let next = store.sweeps().await.next.unwrap();
            assert!(next <= TTL / 2 + 10 * TICK, "the next sweep is in time: {next:?}");
            store.reenters("a", &bounded(alice)).await;
            ends("re-entered").await;
            if mode == Exclusive {
                assert_eq!(store.saves(&mine, "new").await, Saved::Saved);
                ends("saved").await;
            }
            store.age("a", TTL / 2 + 10 * TICK).await;
            assert_eq!(store.renews(&[alice]).await, 0);
            assert!(store.lock_of("a", alice).await.is_none());
            assert_eq!(store.lock_on("a").await.is_some(), mode == Shared, "no other is affected");
            store.finds_nobody_idle().await;
        }
    }

    async fn each_reader_has_its_own_ttl(store, alice, bob, carol) {
        store.granted("a", &reading(alice)).await;
        store.granted("a", &Claim { ttl: 20 * TICK, ..reading(bob) }).await;
        let seen = store.held("a", &Aid::new()).await;
        assert_eq!(seen.aid, *alice, "the reader that expires last is named");
        store.granted("a", &Claim { ttl: 10 * TICK, ..reading(carol) }).await;
        store.age("a", 10 * TICK).await;
        let swept = store.finds_idle(1).await;
        assert!(swept.next.unwrap() <= 10 * TICK, "{swept:?}");
        store.age("a", 10 * TICK).await;
        assert_eq!(readers(store).await, set([alice]));
    }

    async fn an_idle_reader_is_swept_although_another_renews(store, alice, bob) {
        store.read("a", &[alice, bob]).await;
        store.age("a", TTL - 10 * TICK).await;
        store.renews(&[bob]).await;
        let swept = store.finds_idle(0).await;
        assert!(swept.next.unwrap() <= 10 * TICK, "{swept:?}");
        store.age("a", 10 * TICK).await;
        let swept = store.finds_idle(1).await;
        assert!(swept.announcements, "{swept:?}");
        let next = swept.next.unwrap();
        assert!(next <= TTL - 10 * TICK && next > 10 * TICK, "of the other reader: {next:?}");
        store.announces(alice, &["a"]).await;
        assert_eq!(readers(store).await, set([bob]));
        store.finds_idle(0).await;
        store.age("a", TTL).await;
        store.finds_idle(1).await;
        store.announces(bob, &["a"]).await;
        store.read("b", &[alice, bob]).await;
        store.age("b", TTL).await;
        store.finds_idle(2).await;
        assert!(store.announced().await.iter().all(|ended| ended.locks == [key("b")]));
        assert_eq!(store.sweeps().await.next, None, "nothing is left");
    }

    async fn a_sweep_says_how_soon_the_next_lock_can_expire(store, alice, bob) {
        assert_eq!(store.sweeps().await.next, None);
        let short = |aid| Claim { ttl: TTL / 2, ..claim(aid) };
        let sweeps_in_time = async |why: &str| {
            let next = store.sweeps().await.next.unwrap();
            assert!(next <= TTL / 2, "{why}: {next:?}");
        };
        store.granted("a", &short(alice)).await;
        store.granted("b", bob).await;
        sweeps_in_time("a short ttl").await;
        store.age("a", 20 * TICK).await;
        store.renews(&[alice]).await;
        store.age("a", 20 * TICK).await;
        store.finds_idle(0).await;
        store.age("a", 10 * TICK).await;
        store.finds_idle(1).await;
        store.announces(alice, &["a"]).await;
        store.granted("a", &Claim { max_hold: Some(TTL / 2), ..claim(alice) }).await;
        sweeps_in_time("a short `max_hold`").await;
        store.granted("c", &short(alice)).await;
        store.reenters("c", alice).await;
        store.age("c", TTL / 2 + TICK).await;
        store.sweeps().await;
        assert!(store.token_on("c").await.is_some(), "it was taken again for longer");
        store.age_all(&["a", "c"], TTL).await;
        store.finds_idle(1).await;
        store.granted("d", alice).await;
        store.reenters("d", &short(alice)).await;
        sweeps_in_time("taken again for a shorter time").await;
        store.releases_all(alice).await;
        store.age("b", TTL / 2).await;
        sweeps_in_time("half of the time has passed").await;
    }
}
