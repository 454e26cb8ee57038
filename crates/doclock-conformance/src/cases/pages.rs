//! Features for pages: tabs, the grace period of a reload, takeovers, and the reports of all these
//! events.

use super::{watch::told, *};
use doclock_core::store::{Change, Confirmed, LastEnd};

fn in_tab(aid: &Aid) -> Claim {
    Claim { tab: Some(TabId::new()), ..claim(aid) }
}

impl<S: Subject> Steps<S> {
    async fn confirms(&self, aid: &Aid, load: bool) -> Option<Confirmed> {
        self.confirm(&key("a"), aid, load, NONE).await.unwrap()
    }
}

cases! {
    tests pages($);
    needs [Pages];

    #[needs(Documents, Confirm)]
    async fn a_lock_is_confirmed_together_with_its_document(store, alice) {
        store.put("a", "written").await;
        let page = PageId::new();
        let first = Claim { page: Some(page), ..in_tab(alice) };
        store.granted("a", &first).await;
        let confirmed = store.confirms(alice, true).await.unwrap();
        let Confirmed { lock, document, is_known, is_leaving, .. } = confirmed;
        assert_eq!((lock.token, lock.tab), (Some(first.token), first.tab));
        assert_eq!(lock.holder, Some(first.holder.clone()));
        assert_eq!((confirmed.page, is_known, is_leaving), (Some(page), false, false));
        assert_eq!(document.unwrap().decode::<Page>().unwrap().text, "written");
        store.reenters("a", alice).await;
        let again = store.confirms(alice, false).await.unwrap();
        assert!(again.is_known, "a second request was told");
        assert!(again.document.is_none(), "nobody asked for it");
        store.delete("a").await;
        assert!(store.confirms(alice, true).await.unwrap().document.is_none());
    }

    #[needs(Documents, Confirm)]
    async fn a_read_confirms_no_lock_that_the_session_does_not_hold(store, alice, bob) {
        store.put("a", "written").await;
        assert!(store.confirms(alice, true).await.is_none(), "free");
        let mine = store.granted("a", alice).await;
        assert!(store.confirms(bob, true).await.is_none(), "of another session");
        store.closes(&mine, None, 20 * TICK).await;
        assert!(store.confirms(alice, true).await.unwrap().is_leaving);
        store.age("a", 20 * TICK).await;
        assert!(store.confirms(alice, true).await.is_none(), "expired");
    }

    #[needs(Confirm)]
    async fn a_reader_is_confirmed_among_others(store, alice, bob) {
        for aid in [alice, bob] {
            let mine = store.granted("a", &reading(aid)).await;
            let confirmed = store.confirms(aid, false).await.unwrap();
            assert_eq!((confirmed.lock.mode, confirmed.lock.token), (Shared, mine.token));
            assert!(!confirmed.is_known);
        }
        store.reenters("a", &reading(alice)).await;
        assert!(store.confirms(alice, false).await.unwrap().is_known);
        assert!(!store.confirms(bob, false).await.unwrap().is_known);
        assert!(store.confirms(&Aid::new(), false).await.is_none());
    }

    async fn a_lock_says_for_which_tab_and_which_user_it_was_granted(store, alice) {
        // A string that the database could mistake for an operator.
        let holder = Holder::new("$alice").of_user("$$ROOT");
        let first = Claim { holder: holder.clone(), ..in_tab(alice) };
        assert_eq!(store.granted("a", &first).await.tab, first.tab);
        // Another tab of the session learns which tab holds the lock, and does not take it.
        let second = Claim { holder: holder.clone(), ..in_tab(alice) };
        assert_eq!(store.reenters("a", &second).await.tab, first.tab);
        let seen = store.held("a", &Aid::new()).await;
        assert_eq!((seen.tab, seen.holder), (first.tab, Some(holder)));
        store.granted("b", alice).await;
        assert_eq!(store.holders("b").await[0].tab, None);
    }

    #[needs(Sessions)]
    async fn a_leaving_lock_expires_however_often_it_is_renewed(store, alice) {
        let mine = store.granted("a", alice).await;
        for grace in [20 * TICK, 5 * TICK, 40 * TICK] {
            assert_eq!(store.closes(&mine, None, grace).await, Released::Released);
        }
        assert!(store.left("a").await <= 5 * TICK, "the shortest period counts");
        store.renews(&[alice]).await;
        assert!(store.left("a").await <= 5 * TICK);
        assert_eq!(store.token_on("a").await, mine.token, "until then it is held");
        store.held("a", &Aid::new()).await;
        store.age("a", 5 * TICK).await;
        assert_eq!(store.closes(&mine, None, TTL).await, Released::AlreadyGone);
        assert!(store.holders("a").await.is_empty());
        // The session has closed one page, but it may have others.
        store.finds_nobody_idle().await;
        store.granted("a", &Aid::new()).await;
    }

    async fn only_the_named_acquisition_expires_sooner(store, alice) {
        let stale = store.granted("a", alice).await;
        store.releases(&stale).await;
        assert_eq!(store.closes(&stale, None, TICK).await, Released::AlreadyGone);
        let mine = store.granted("a", alice).await;
        let of_another = Lock { aid: Aid::new(), ..mine };
        for wrong in [&stale, &of_another] {
            assert_eq!(store.closes(wrong, None, TICK).await, Released::AlreadyGone);
        }
        assert!(store.left("a").await > 30 * TICK);
    }

    async fn a_reloaded_page_gets_its_lock_back_in_full(store, alice) {
        let [old, new] = [PageId::new(), PageId::new()];
        let first = Claim { page: Some(old), max_hold: Some(TTL + 30 * TICK), ..in_tab(alice) };
        let reload = Claim { token: LockToken::new(), page: Some(new), ..first.clone() };
        let mine = store.granted("a", &first).await;
        let since = store.holders("a").await[0].since;
        let goes = async |page| store.closes(&mine, Some(page), 5 * TICK).await;
        assert_eq!(goes(new).await, Released::AlreadyGone, "the other page does not hold it");
        assert_eq!(goes(old).await, Released::Released);
        store.age("a", 4 * TICK).await;
        let lock = store.reenters("a", &reload).await;
        assert_eq!((lock.token, lock.tab, lock.since), (mine.token, first.tab, since));
        assert!(lock.expires_in() > 50 * TICK);
        // A late, repeated request of the old page changes nothing.
        assert_eq!(goes(old).await, Released::AlreadyGone);
        assert!(store.left("a").await > 50 * TICK);
        // A form without a tab id gets the lock back, too.
        assert_eq!(goes(new).await, Released::Released);
        let form = Claim { token: LockToken::new(), tab: None, page: None, ..first.clone() };
        store.reenters("a", &form).await;
        assert!(store.left("a").await > 50 * TICK);
        // But never for longer than its `max_hold`.
        store.age("a", 50 * TICK).await;
        store.reenters("a", &reload).await;
        let left = store.left("a").await;
        assert!(left <= 36 * TICK, "{left:?}");
    }

    #[needs(Documents, Sessions)]
    async fn a_page_that_came_back_in_time_may_renew_and_save_as_before(store, alice) {
        store.put("a", "old").await;
        let mine = store.granted("a", alice).await;
        for _ in 0..2 {
            store.closes(&mine, None, 5 * TICK).await;
            assert!(store.left("a").await <= 5 * TICK);
            store.reenters("a", alice).await;
            store.renews(&[alice]).await;
            assert!(store.left("a").await > 50 * TICK, "renewed");
            assert_eq!(store.saves(&mine, "new").await, Saved::Saved);
            assert!(store.left("a").await > 50 * TICK, "saved");
            store.reenters("a", alice).await;
            assert!(store.left("a").await > 50 * TICK, "the lock was asked for again");
        }
        // If the lock then is not renewed, its session is announced too.
        store.age("a", TTL).await;
        store.sweeps().await;
        store.announces(alice, &["a"]).await;
    }

    async fn a_claim_of_another_tab_leaves_the_lock_as_it_is(store, alice) {
        for mode in [Exclusive, Shared] {
            let mine = store.granted("a", &in_tab(alice)).await;
            store.age("a", 30 * TICK).await;
            let seen = store.reenters("a", &Claim { mode, ..in_tab(alice) }).await;
            assert_eq!(seen.tab, mine.tab);
            assert!(store.left("a").await <= 30 * TICK, "not renewed");
            // No other request was told that the session has the lock.
            assert_eq!(store.retracts(&mine).await, Released::Released);
        }
    }

    #[needs(HandOver)]
    async fn a_session_that_moves_its_lock_to_another_tab_keeps_it(store, alice) {
        let bounded = || Claim { max_hold: Some(TTL + 30 * TICK), ..in_tab(alice) };
        let first = store.granted("a", &bounded()).await;
        let since = store.holders("a").await[0].since;
        store.age("a", 50 * TICK).await;
        let aged = store.holders("a").await[0].since;
        let second = bounded();
        let lock = store.hands_over(&first, &second).await.lock().expect("it was there");
        assert_eq!((lock.token, lock.tab), (Some(second.token), second.tab));
        assert!(lock.since == since || lock.since == aged, "the lock keeps its start");
        assert!(lock.expires_in() <= 40 * TICK, "and its end");
        assert_eq!(store.releases(&first).await, Released::AlreadyGone, "late");
        assert_eq!(store.token_on("a").await, Some(second.token));
    }

    async fn all_holders_of_a_document_are_named(store, alice, bob) {
        assert!(store.holders("a").await.is_empty());
        let mine = store.granted("a", alice).await;
        let [lock] = &store.holders("a").await[..] else { panic!("one") };
        assert_eq!((&lock.aid, lock.token), (alice, mine.token));
        store.read("r", &[alice, bob]).await;
        let readers: BTreeSet<_> = store.holders("r").await.into_iter().map(|it| it.aid).collect();
        assert_eq!(readers, [alice, bob].map(Aid::clone).into());
        store.age("a", TTL).await;
        assert!(store.holders("a").await.is_empty());
    }

    #[needs(Sessions)]
    async fn the_last_end_of_a_session_is_known(store, idle, out, alive) {
        store.granted("a", idle).await;
        store.granted("b", alive).await;
        store.age("a", TTL).await;
        store.finds_idle(1).await;
        store.announces(idle, &["a"]).await;
        store.logs_out(out).await;
        let last = async |aid: &Aid| store.last_end(aid).await.unwrap();
        assert!(matches!(last(idle).await, Some(LastEnd { reason: EndReason::Expired, .. })));
        let ended = last(out).await.unwrap();
        assert_eq!(ended.reason, EndReason::LoggedOut);
        assert!(ended.ago < 30 * TICK);
        assert_eq!(last(alive).await, None);
        let aids = [alive, out, idle, &Aid::new()].map(Aid::clone);
        let all = store.last_ends(&aids, NONE).await.unwrap();
        let reasons: Vec<_> = all.iter().map(|end| end.map(|end| end.reason)).collect();
        assert_eq!(reasons, [None, Some(EndReason::LoggedOut), Some(EndReason::Expired), None]);
    }

    #[needs(Sessions)]
    async fn a_lock_that_has_expired_is_told_from_one_that_was_released_or_broken(
        store,
        idle,
        busy,
        other,
    ) {
        let expired = store.granted("a", idle).await;
        let (kept, gone) = (store.granted("b", busy).await, store.granted("c", busy).await);
        let (broken, former) = (store.granted("d", busy).await, store.granted("e", idle).await);
        let has_expired =
            async |lock: &Lock| store.has_expired(&acquisition(lock), NONE).await.unwrap();
        assert!(!has_expired(&expired).await);
        store.age_all(&["a", "c", "e"], TTL).await;
        assert!(has_expired(&expired).await, "on record");
        store.granted("e", other).await;
        assert!(has_expired(&former).await, "replaced");
        store.finds_idle(1).await;
        for lock in [&expired, &gone, &former] {
            assert!(has_expired(lock).await, "swept: {lock:?}");
        }
        let again = store.granted("a", idle).await;
        assert!(has_expired(&expired).await && !has_expired(&again).await);
        let live = store.granted("f", other).await;
        store.logs_out(other).await;
        assert!(!has_expired(&live).await, "ended with its session");
        let left = store.granted("g", busy).await;
        store.closes(&left, None, Duration::ZERO).await;
        assert!(!has_expired(&left).await, "its page was closed, and the record is still there");
        assert_eq!(store.breaks(&broken).await, Released::Released);
        assert_eq!(store.releases(&kept).await, Released::Released);
        store.sweeps().await;
        for lock in [&broken, &kept, &left] {
            assert!(!has_expired(lock).await, "taken or given up: {lock:?}");
        }
    }

    #[needs(Sessions)]
    async fn a_page_that_was_left_is_remembered_and_nobody_is_told(store, alice, bob) {
        let (left, open) = (alice.of_page(PageId::new()), alice.of_page(PageId::new()));
        store.granted("a", alice).await;
        for _ in 0..2 {
            store.end_page(&left, NONE).await.unwrap();
        }
        assert!(store.last_end(&left).await.unwrap().is_some_and(|it| it.for_good));
        for other in [alice, &open, bob] {
            assert_eq!(store.last_end(other).await.unwrap(), None);
        }
        store.finds_idle(0).await;
        assert!(store.announced().await.is_empty());
        assert_eq!(store.holders("a").await.len(), 1, "the session goes on");
    }

    #[needs(HandOver, Watch)]
    async fn a_watch_of_everything_reports_grants_and_takeovers_with_their_sessions(
        store,
        alice,
        bob,
    ) {
        let Some(mut watch) = store.watch(COLLECTION, NONE).await.unwrap() else { return };
        let mut tells = async |what: &str, change| {
            told(&mut watch, what, |it| *it == change).await;
        };
        store.granted("free", alice).await;
        tells("granted", Change::Granted(key("free"))).await;
        store.granted("expired", alice).await;
        tells("granted", Change::Granted(key("expired"))).await;
        store.age("expired", TTL).await;
        store.granted("expired", bob).await;
        tells("granted after the last lock has expired", Change::Granted(key("expired"))).await;
        for aid in [alice, bob] {
            store.granted("read", &reading(aid)).await;
            tells("a reader has joined", Change::Granted(key("read"))).await;
        }
        let mine = store.granted("grace", alice).await;
        tells("granted", Change::Granted(key("grace"))).await;
        store.closes(&mine, None, 5 * TICK).await;
        tells("the lock expires sooner", Change::Freed(key("grace"))).await;

        // A report of a takeover names the session that takes over, at a second takeover too.
        let mut from = store.granted("taken", alice).await;
        for reason in ["$first", "second \"$$ROOT\""] {
            let by = TakenBy { kind: TakeoverKind::TakenOver, by: "Bob".to_owned(), reason: reason.to_owned() };
            let to = Claim { taken: Some(by.clone()), ..claim(&Aid::new()) };
            let lock = store.hands_over(&from, &to).await.lock().expect("taken over");
            let broken = Change::Broken(key("taken"), from.token.unwrap(), by);
            tells("taken over", broken).await;
            from = lock;
        }
        let seen = store.holders("taken").await.remove(0);
        let away = TakenBy { kind: TakeoverKind::Broken, by: "$$NOW".to_owned(), reason: "broken".to_owned() };
        assert_eq!(store.break_lock(&seen, &away).await.unwrap(), Released::Released);
        tells("broken", Change::Broken(key("taken"), from.token.unwrap(), away)).await;
        tells("and gone", Change::Freed(key("taken"))).await;
    }
}
