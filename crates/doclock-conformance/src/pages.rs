//! Features for pages: tabs, the grace period of a reload, takeovers, and the reports of all these
//! events.

use super::*;
use actix_doclock::store::{Change, Confirmed, LastEnd, Watch};

async fn locks_on(store: &impl Store, id: &str) -> Vec<Lock> {
    store.locks_on(COLLECTION, &[key(id)]).await.unwrap()
}

/// Waits for the change that `is_it` accepts.
async fn told(watch: &mut Watch, what: &str, is_it: impl Fn(&Change) -> bool) {
    let told = async {
        loop {
            match watch.next().await {
                Some(Ok(change)) if is_it(&change) => return,
                Some(Ok(_)) => {}
                other => panic!("{what}: the watch ended: {other:?}"),
            }
        }
    };
    tokio::time::timeout(30 * SECOND, told).await.unwrap_or_else(|_| panic!("{what}: not told"));
}

cases! {
    needs [Pages];

    #[needs(Documents, Confirm)]
    async fn a_lock_is_confirmed_together_with_its_document<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "written").await;
        let page = PageId::new();
        let first = Claim { page: Some(page), tab: Some(TabId::new()), ..claim(&alice) };
        let _ = store.try_acquire(&key("a"), &first, NONE).await.unwrap();
        let confirmed = store.confirm(&key("a"), &alice, true, NONE).await.unwrap().unwrap();
        let Confirmed { lock, document, is_known, is_leaving, .. } = confirmed;
        assert_eq!((lock.token, lock.tab), (Some(first.token), first.tab));
        assert_eq!(lock.holder, Some(first.holder.clone()));
        assert_eq!((confirmed.page, is_known, is_leaving), (Some(page), false, false));
        assert_eq!(document.unwrap().decode::<Page>().unwrap().text, "written");
        let _ = store.try_acquire(&key("a"), &claim(&alice), NONE).await.unwrap();
        let again = store.confirm(&key("a"), &alice, false, NONE).await.unwrap().unwrap();
        assert!(again.is_known, "a second request was told");
        assert!(again.document.is_none(), "nobody asked for it");
        subject.delete(&key("a")).await;
        let confirmed = store.confirm(&key("a"), &alice, true, NONE).await.unwrap().unwrap();
        assert!(confirmed.document.is_none());
    }

    #[needs(Documents, Confirm)]
    async fn a_read_confirms_no_lock_that_the_session_does_not_hold<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        put(subject, "a", "written").await;
        let confirms = async |aid| store.confirm(&key("a"), aid, true, NONE).await.unwrap();
        assert!(confirms(&alice).await.is_none(), "free");
        let token = granted(store, &key("a"), &alice).await;
        assert!(confirms(&bob).await.is_none(), "of another session");
        let held = Acquisition::exclusive(&key("a"), &alice, token);
        store.expire_in(&held, None, 20 * SECOND, NONE).await.unwrap();
        assert!(confirms(&alice).await.unwrap().is_leaving);
        subject.age(&key("a"), 20 * SECOND).await;
        assert!(confirms(&alice).await.is_none(), "expired");
    }

    #[needs(Confirm)]
    async fn a_reader_is_confirmed_among_others<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let shared = |aid| Claim { mode: Mode::Shared, ..claim(aid) };
        let (of_alice, of_bob) = (shared(&alice), shared(&bob));
        for (aid, mine) in [(&alice, &of_alice), (&bob, &of_bob)] {
            let _ = store.try_acquire(&key("a"), mine, NONE).await.unwrap();
            let confirmed = store.confirm(&key("a"), aid, false, NONE).await.unwrap().unwrap();
            assert_eq!((confirmed.lock.mode, confirmed.lock.token), (Mode::Shared, Some(mine.token)));
            assert!(!confirmed.is_known);
        }
        let _ = store.try_acquire(&key("a"), &shared(&alice), NONE).await.unwrap();
        assert!(store.confirm(&key("a"), &alice, false, NONE).await.unwrap().unwrap().is_known);
        assert!(!store.confirm(&key("a"), &bob, false, NONE).await.unwrap().unwrap().is_known);
        assert!(store.confirm(&key("a"), &Aid::new(), false, NONE).await.unwrap().is_none());
    }

    async fn a_lock_says_for_which_tab_and_which_user_it_was_granted<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let tab = TabId::new();
        // A string that the database could mistake for an operator.
        let holder = Holder::new("$alice").of_user("$$ROOT");
        let first = Claim { tab: Some(tab), holder: holder.clone(), ..claim(&alice) };
        let answer = store.try_acquire(&key("a"), &first, NONE).await.unwrap();
        assert!(matches!(answer, TryAcquire::Granted(lock) if lock.tab == Some(tab)));
        // Another tab of the session learns which tab holds the lock, and does not take it.
        let second = Claim { tab: Some(TabId::new()), holder: holder.clone(), ..claim(&alice) };
        let answer = store.try_acquire(&key("a"), &second, NONE).await.unwrap();
        assert!(matches!(answer, TryAcquire::AlreadyMine(lock) if lock.tab == Some(tab)));
        let seen = held(store, &key("a"), &Aid::new()).await;
        assert_eq!((seen.tab, seen.holder), (Some(tab), Some(holder)));
        granted(store, &key("b"), &alice).await;
        assert_eq!(locks_on(store, "b").await[0].tab, None);
    }

    #[needs(Sessions)]
    async fn a_leaving_lock_expires_however_often_it_is_renewed<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        for again in [20 * SECOND, 5 * SECOND, 40 * SECOND] {
            let shortened = store.expire_in(&Acquisition::exclusive(&key("a"), &alice, token), None, again, NONE).await.unwrap();
            assert_eq!(shortened, Released::Released);
        }
        let left = || async { locks_on(store, "a").await[0].expires_in() };
        assert!(left().await <= 5 * SECOND, "the shortest period counts");
        store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap();
        assert!(left().await <= 5 * SECOND);
        assert_eq!(token_on(store, &key("a")).await, Some(token), "until then it is held");
        held(store, &key("a"), &Aid::new()).await;
        subject.age(&key("a"), 5 * SECOND).await;
        assert_eq!(store.expire_in(&Acquisition::exclusive(&key("a"), &alice, token), None, TTL, NONE).await.unwrap(), Released::AlreadyGone);
        assert!(locks_on(store, "a").await.is_empty());
        // The session has closed one page, but it may have others.
        sweep(store, 100).await;
        assert!(announce_all(store).await.is_empty());
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn only_the_named_acquisition_expires_sooner<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let stale = granted(store, &key("a"), &alice).await;
        store.release(&key("a"), &alice, stale, Mode::Exclusive).await.unwrap();
        assert_eq!(store.expire_in(&Acquisition::exclusive(&key("a"), &alice, stale), None, SECOND, NONE).await.unwrap(), Released::AlreadyGone);
        let token = granted(store, &key("a"), &alice).await;
        for (aid, token) in [(&alice, stale), (&Aid::new(), token)] {
            let shortened = store.expire_in(&Acquisition::exclusive(&key("a"), aid, token), None, SECOND, NONE).await.unwrap();
            assert_eq!(shortened, Released::AlreadyGone);
        }
        assert!(locks_on(store, "a").await[0].expires_in() > 30 * SECOND);
    }

    async fn a_reloaded_page_gets_its_lock_back_in_full<S: Subject>(subject: &S) {
        let (store, alice, tab) = (subject.store(), Aid::new(), TabId::new());
        let [old, new] = [PageId::new(), PageId::new()];
        let max_hold = Some(TTL + 30 * SECOND);
        let of = |tab, page| Claim { tab: Some(tab), page: Some(page), max_hold, ..claim(&alice) };
        let first = of(tab, old);
        let _ = store.try_acquire(&key("a"), &first, NONE).await.unwrap();
        let since = locks_on(store, "a").await[0].since;
        let goes = async |page| {
            store.expire_in(&Acquisition::exclusive(&key("a"), &alice, first.token), Some(page), 5 * SECOND, NONE).await.unwrap()
        };
        assert_eq!(goes(new).await, Released::AlreadyGone, "the other page does not hold it");
        assert_eq!(goes(old).await, Released::Released);
        subject.age(&key("a"), 4 * SECOND).await;
        let lock = match store.try_acquire(&key("a"), &of(tab, new), NONE).await.unwrap() {
            TryAcquire::AlreadyMine(lock) => lock,
            other => panic!("not already mine: {other:?}"),
        };
        assert_eq!((lock.token, lock.tab, lock.since), (Some(first.token), Some(tab), since));
        assert!(lock.expires_in() > 50 * SECOND);
        // A late, repeated request of the old page changes nothing.
        assert_eq!(goes(old).await, Released::AlreadyGone);
        assert!(locks_on(store, "a").await[0].expires_in() > 50 * SECOND);
        // A form without a tab id gets the lock back, too.
        assert_eq!(goes(new).await, Released::Released);
        let _ = store.try_acquire(&key("a"), &Claim { max_hold, ..claim(&alice) }, NONE).await.unwrap();
        assert!(locks_on(store, "a").await[0].expires_in() > 50 * SECOND);
        // But never for longer than its `max_hold`.
        subject.age(&key("a"), 50 * SECOND).await;
        let _ = store.try_acquire(&key("a"), &of(tab, new), NONE).await.unwrap();
        let left = locks_on(store, "a").await[0].expires_in();
        assert!(left <= 36 * SECOND, "{left:?}");
    }

    #[needs(Documents, Sessions)]
    async fn a_page_that_came_back_in_time_may_renew_and_save_as_before<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        let left = || async { locks_on(store, "a").await[0].expires_in() };
        for _ in 0..2 {
            store.expire_in(&Acquisition::exclusive(&key("a"), &alice, token), None, 5 * SECOND, NONE).await.unwrap();
            assert!(left().await <= 5 * SECOND);
            let back = store.try_acquire(&key("a"), &claim(&alice), NONE).await.unwrap();
            assert!(matches!(back, TryAcquire::AlreadyMine(_)), "{back:?}");
            store.renew_all(COLLECTION, std::slice::from_ref(&alice)).await.unwrap();
            assert!(left().await > 50 * SECOND, "renewed");
            let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
            assert_eq!(saved, Saved::Saved);
            assert!(left().await > 50 * SECOND, "saved");
            let _ = store.try_acquire(&key("a"), &claim(&alice), NONE).await.unwrap();
            assert!(left().await > 50 * SECOND, "the lock was asked for again");
        }
        // If the lock then is not renewed, its session is announced too.
        subject.age(&key("a"), TTL).await;
        sweep(store, 100).await;
        assert_eq!(announce_all(store).await.len(), 1);
    }

    async fn a_claim_of_another_tab_leaves_the_lock_as_it_is<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        for mode in [Mode::Exclusive, Mode::Shared] {
            let first = Claim { tab: Some(TabId::new()), ..claim(&alice) };
            let _ = store.try_acquire(&key("a"), &first, NONE).await.unwrap();
            subject.age(&key("a"), 30 * SECOND).await;
            let other = Claim { tab: Some(TabId::new()), mode, ..claim(&alice) };
            let answer = store.try_acquire(&key("a"), &other, NONE).await.unwrap();
            assert!(matches!(answer, TryAcquire::AlreadyMine(lock) if lock.tab == first.tab));
            assert!(locks_on(store, "a").await[0].expires_in() <= 30 * SECOND, "not renewed");
            // No other request was told that the session has the lock.
            let back = store.retract(&key("a"), &alice, &[first.token], Mode::Exclusive).await.unwrap();
            assert_eq!(back, Released::Released);
        }
    }

    #[needs(HandOver)]
    async fn a_session_that_moves_its_lock_to_another_tab_keeps_it<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let max_hold = Some(TTL + 30 * SECOND);
        let first = Claim { tab: Some(TabId::new()), max_hold, ..claim(&alice) };
        let _ = store.try_acquire(&key("a"), &first, NONE).await.unwrap();
        let since = locks_on(store, "a").await[0].since;
        subject.age(&key("a"), 50 * SECOND).await;
        let aged = locks_on(store, "a").await[0].since;
        let second = Claim { tab: Some(TabId::new()), max_hold, ..claim(&alice) };
        let lock = store.hand_over(&Acquisition::exclusive(&key("a"), &alice, first.token), &second, NONE).await.unwrap();
        let lock = lock.lock().expect("it was there");
        assert_eq!((lock.token, lock.tab), (Some(second.token), second.tab));
        assert!(lock.since == since || lock.since == aged, "the lock keeps its start");
        assert!(lock.expires_in() <= 40 * SECOND, "and its end");
        let late = store.release(&key("a"), &alice, first.token, Mode::Exclusive).await.unwrap();
        assert_eq!(late, Released::AlreadyGone);
        assert_eq!(token_on(store, &key("a")).await, Some(second.token));
    }

    async fn all_holders_of_a_document_are_named<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        assert!(locks_on(store, "a").await.is_empty());
        let token = granted(store, &key("a"), &alice).await;
        let [lock] = &locks_on(store, "a").await[..] else { panic!("one") };
        assert_eq!((&lock.aid, lock.token), (&alice, Some(token)));
        for aid in [&alice, &bob] {
            let reads = Claim { mode: Mode::Shared, ..claim(aid) };
            let _ = store.try_acquire(&key("r"), &reads, NONE).await.unwrap();
        }
        let readers: BTreeSet<_> = locks_on(store, "r").await.into_iter().map(|it| it.aid).collect();
        assert_eq!(readers, BTreeSet::from([alice, bob]));
        subject.age(&key("a"), TTL).await;
        assert!(locks_on(store, "a").await.is_empty());
    }

    #[needs(Sessions)]
    async fn the_last_end_of_a_session_is_known<S: Subject>(subject: &S) {
        let store = subject.store();
        let [idle, out, alive] = [Aid::new(), Aid::new(), Aid::new()];
        granted(store, &key("a"), &idle).await;
        granted(store, &key("b"), &alive).await;
        subject.age(&key("a"), TTL).await;
        sweep(store, 100).await;
        announce_all(store).await;
        end(store, &out, EndReason::LoggedOut).await;
        let last = async |aid: &Aid| store.last_end(aid).await.unwrap();
        assert!(matches!(last(&idle).await, Some(LastEnd { reason: EndReason::Expired, .. })));
        let ended = last(&out).await.unwrap();
        assert_eq!(ended.reason, EndReason::LoggedOut);
        assert!(ended.ago < 30 * SECOND);
        assert_eq!(last(&alive).await, None);
        let all = store.last_ends(&[alive, out, idle, Aid::new()], NONE).await.unwrap();
        let reasons: Vec<_> = all.iter().map(|end| end.map(|end| end.reason)).collect();
        assert_eq!(reasons, [None, Some(EndReason::LoggedOut), Some(EndReason::Expired), None]);
    }

    #[needs(HandOver, Watch)]
    async fn a_watch_of_everything_reports_grants_and_takeovers_with_their_sessions<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let Some(mut watch) = store.watch(COLLECTION, NONE).await.unwrap() else { return };
        let is = |change: Change| move |it: &Change| *it == change;
        let (granted_to, freed) =
            (|id: &str| is(Change::Granted(key(id))), |id: &str| is(Change::Freed(key(id))));
        let taken_from = |id: &str, token: LockToken, by: TakenBy| {
            is(Change::Broken(key(id), token, by))
        };
        granted(store, &key("free"), &alice).await;
        told(&mut watch, "granted", granted_to("free")).await;
        granted(store, &key("expired"), &alice).await;
        told(&mut watch, "granted", granted_to("expired")).await;
        subject.age(&key("expired"), TTL).await;
        granted(store, &key("expired"), &bob).await;
        told(&mut watch, "granted after the last lock has expired", granted_to("expired")).await;
        for aid in [&alice, &bob] {
            let reads = Claim { mode: Mode::Shared, ..claim(aid) };
            let _ = store.try_acquire(&key("read"), &reads, NONE).await.unwrap();
            told(&mut watch, "a reader has joined", granted_to("read")).await;
        }
        let token = granted(store, &key("grace"), &alice).await;
        told(&mut watch, "granted", granted_to("grace")).await;
        store.expire_in(&Acquisition::exclusive(&key("grace"), &alice, token), None, 5 * SECOND, NONE).await.unwrap();
        told(&mut watch, "the lock expires sooner", freed("grace")).await;

        // A report of a takeover names the session that takes over, at a second takeover too.
        let mut from = (alice.clone(), granted(store, &key("taken"), &alice).await);
        for reason in ["$first", "second \"$$ROOT\""] {
            let by = TakenBy { by: "Bob".to_owned(), reason: reason.to_owned() };
            let to = Claim { taken: Some(by.clone()), ..claim(&Aid::new()) };
            let lock = store.hand_over(&Acquisition::exclusive(&key("taken"), &from.0, from.1), &to, NONE).await.unwrap();
            assert!(lock.lock().is_some());
            told(&mut watch, "taken over", taken_from("taken", from.1, by)).await;
            from = (to.aid, to.token);
        }
        let seen = locks_on(store, "taken").await.remove(0);
        let away = TakenBy { by: "$$NOW".to_owned(), reason: "broken".to_owned() };
        assert_eq!(store.break_lock(&seen, &away).await.unwrap(), Released::Released);
        told(&mut watch, "broken", taken_from("taken", from.1, away)).await;
        told(&mut watch, "and gone", freed("taken")).await;
    }
}
