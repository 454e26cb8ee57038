//! Locks, and the status of the store.

use std::collections::BTreeMap;

use super::*;
use doclock_core::{LockId, store::Rules};

cases! {
    tests locks($);
    needs [];

    async fn a_free_document_is_granted_with_the_token_of_the_claim(store, alice) {
        let lock = store.granted("a", alice).await;
        assert_eq!(lock.holder.as_ref(), Some(&claim(alice).holder));
        assert!(lock.expires_in() <= TTL && is_full(&lock), "{lock:?}");
        let off = SystemTime::now().duration_since(lock.since).unwrap_or_default();
        assert!(off < 60 * TICK, "taken now, not {off:?} ago");
    }

    async fn a_refusal_names_the_holder_and_changes_nothing(store, alice, bob) {
        let mine = store.granted("a", alice).await;
        store.age("a", 20 * TICK).await;
        for _ in 0..2 {
            let lock = store.held("a", bob).await;
            assert_eq!((&lock.aid, lock.token), (alice, mine.token));
            assert_eq!(lock.holder.as_ref().unwrap().label, "alice");
            assert!(lock.expires_in() <= TTL - 20 * TICK, "a refusal does not renew: {lock:?}");
        }
        assert_eq!(store.token_on("a").await, mine.token);
    }

    async fn reentry_renews_and_keeps_the_token(store, alice) {
        // The holder of an exclusive lock may read, too.
        for (mode, again) in [(Exclusive, Exclusive), (Exclusive, Shared), (Shared, Shared)] {
            let mine = store.granted("a", &Claim { mode, ..claim(alice) }).await;
            store.age("a", 50 * TICK).await;
            let lock = store.reenters("a", &Claim { mode: again, ..claim(alice) }).await;
            assert_eq!((lock.mode, lock.token), (mode, mine.token));
            assert!(is_full(&lock), "renewed: {lock:?}");
            assert_eq!(store.retracts(&mine).await, Released::AlreadyGone, "two requests know it");
            store.releases(&mine).await;
        }
    }

    async fn an_expired_lock_is_taken_over_at_once(store, alice, bob) {
        let old = store.expired("a", alice).await;
        let new = store.granted("a", bob).await;
        assert_ne!(new.token, old.token);
        let lock = store.lock_on("a").await.unwrap();
        assert_eq!((&lock.aid, lock.token), (bob, new.token));
    }

    async fn after_expiry_the_same_session_gets_a_new_token(store, alice) {
        let old = store.expired("a", alice).await;
        let new = store.granted("a", alice).await;
        assert_ne!(new.token, old.token);
        assert_eq!(store.token_on("a").await, new.token);
    }

    async fn the_ttl_of_the_holder_counts_and_not_the_contenders(store, alice, bob) {
        store.granted("a", alice).await;
        store.age("a", 30 * TICK).await;
        store.held("a", &Claim { ttl: TICK, ..claim(bob) }).await;

        store.granted("b", &Claim { ttl: TICK, ..claim(alice) }).await;
        store.age("b", 2 * TICK).await;
        store.granted("b", bob).await;
    }

    async fn renewal_extends_all_live_locks_of_the_session_and_no_others(store, alice, bob) {
        for (id, aid) in [("a", alice), ("b", alice), ("of bob", bob)] {
            store.granted(id, aid).await;
            store.age(id, 50 * TICK).await;
        }
        let tokens = async || -> BTreeMap<_, _> {
            store.all().await.into_iter().map(|lock| (lock.key, lock.token)).collect()
        };
        let before = tokens().await;
        assert_eq!(store.renews(&[alice]).await, 2);
        for lock in store.all().await {
            assert_eq!(is_full(&lock), lock.aid == *alice, "{lock:?}");
        }
        assert_eq!(tokens().await, before, "tokens stay the same");
        assert_eq!(store.renews(&[&Aid::new()]).await, 0);
        store.age_all(&["a", "b"], TTL).await;
        assert_eq!(store.renews(&[alice]).await, 0, "an expired lock is not revived");
        assert_eq!(store.token_on("a").await, None);
    }

    async fn a_renewal_leaves_the_locks_of_tabs_that_it_does_not_name(store, alice, bob) {
        let [one, two, other] = [TabId::new(), TabId::new(), TabId::new()];
        let ttl = 20 * TTL;
        let in_tab = |tab, claim| Claim { tab, ttl, ..claim };
        let token = in_tab(Some(two), claim(alice));
        for (id, claim) in [
            ("no tab", in_tab(None, claim(alice))),
            ("one", in_tab(Some(one), claim(alice))),
            ("two", in_tab(Some(two), claim(alice))),
            ("token", token.clone()),
            ("shared", in_tab(Some(two), reading(alice))),
            ("of bob", in_tab(Some(other), claim(bob))),
        ] {
            store.granted(id, &claim).await;
        }
        let ids = ["no tab", "one", "two", "token", "shared", "of bob"];
        let renewed = async |active: &[Active]| {
            store.age_all(&ids, 2 * TTL).await;
            let answer = store.renew(COLLECTION, active, TTL, NONE).await.unwrap();
            let mut renewed = Vec::new();
            for id in ids {
                renewed.extend((store.left(id).await > ttl - TTL).then_some(id));
            }
            assert_eq!(answer, Renewed { documents: renewed.len() as u64, late: Vec::new() });
            renewed
        };
        let named = |named: &[NamedBy]| Active { aid: alice.clone(), named: Some(named.to_vec()) };
        let (tab, token) = (NamedBy::Tab(one), NamedBy::Token(token.token));
        assert_eq!(renewed(&[named(&[])]).await, ["no tab", "shared"]);
        assert_eq!(renewed(&[named(&[tab])]).await, ["no tab", "one", "shared"]);
        assert_eq!(renewed(&[named(&[token])]).await, ["no tab", "token", "shared"]);
        assert_eq!(renewed(&[named(&[tab, token])]).await, ["no tab", "one", "token", "shared"]);
        let both = [named(&[tab]), Active::all_of(bob)];
        assert_eq!(renewed(&both).await, ["no tab", "one", "shared", "of bob"]);
        let whole = [Active::all_of(alice)];
        assert_eq!(renewed(&whole).await, ["no tab", "one", "two", "token", "shared"]);
    }

    #[needs(Sessions)]
    async fn renewal_raises_a_shorter_ttl_keeps_a_longer_one_and_respects_max_hold(store) {
        for mode in [Exclusive, Shared] {
            let claims = [
                ("short", TTL / 4, None, TTL / 2),
                ("long", TTL, None, TTL),
                ("ends", TTL / 4, Some(TTL / 3), TTL / 3),
            ];
            let aids = [Aid::new(), Aid::new(), Aid::new()];
            for ((id, ttl, max_hold, _), aid) in claims.iter().zip(&aids) {
                let claim = Claim { mode, ttl: *ttl, max_hold: *max_hold, ..claim(aid) };
                store.granted(id, &claim).await;
            }
            let active: Vec<_> = aids.iter().map(Active::all_of).collect();
            let renewed = store.renew(COLLECTION, &active, TTL / 2, NONE).await.unwrap();
            assert_eq!(renewed, Renewed { documents: 3, late: Vec::new() });
            for (id, _, _, at_most) in claims {
                let left = store.left(id).await;
                assert!(left <= at_most && left > at_most - 5 * TICK, "{id}: {left:?}");
            }
            // The sweep knows of the longer ttl, too.
            store.age("short", TTL / 2 - 5 * TICK).await;
            store.finds_idle(0).await;
            store.age("short", 5 * TICK).await;
            store.finds_idle(1).await;
            for aid in &aids {
                store.releases_all(aid).await;
            }
        }
    }

    async fn a_release_removes_exactly_its_acquisition(store, alice, bob) {
        // A caller that does not know the mode says that it is shared.
        for (held, mode) in [(Exclusive, Exclusive), (Exclusive, Shared), (Shared, Shared)] {
            let mine = store.granted("a", &Claim { mode: held, ..claim(alice) }).await;
            let mine = Lock { mode, ..mine };
            let of_nobody = Lock { token: Some(LockToken::new()), ..mine.clone() };
            let of_another = Lock { aid: bob.clone(), ..mine.clone() };
            for other in [of_nobody, of_another] {
                assert_eq!(store.releases(&other).await, Released::AlreadyGone);
            }
            assert_eq!(store.token_on("a").await, mine.token, "{mode:?}");
            assert_eq!(store.releases(&mine).await, Released::Released, "{mode:?}");
            assert_eq!(store.releases(&mine).await, Released::AlreadyGone, "{mode:?}");
            let other = store.granted("a", bob).await;
            store.releases(&other).await;
        }
    }

    async fn a_late_release_does_not_remove_a_newer_lock_of_the_same_session(store, alice) {
        let old = store.granted("a", alice).await;
        store.releases(&old).await;
        let new = store.granted("a", alice).await;
        assert_eq!(store.releases(&old).await, Released::AlreadyGone);
        assert_eq!(store.token_on("a").await, new.token);
    }

    async fn the_next_attempt_of_a_claim_recognises_an_earlier_grant(store, alice) {
        for mode in [Exclusive, Shared] {
            let first = Claim { mode, ..claim(alice) };
            let next = Claim { token: first.token.next_attempt(), ..first.clone() };
            for attempt in [&first, &next, &first] {
                let answer = store.asks("a", attempt).await;
                let TryAcquire::Granted(lock) = answer else { panic!("{mode:?}: {answer:?}") };
                assert_eq!(lock.token, Some(first.token), "{mode:?}");
                assert_eq!(store.all().await.len(), 1, "{mode:?}");
            }
            let retract = async |tokens: &[LockToken]| {
                store.retract(&key("a"), alice, tokens, mode).await.unwrap()
            };
            assert_eq!(retract(&[next.token]).await, Released::AlreadyGone, "{mode:?}");
            assert_eq!(retract(&[]).await, Released::AlreadyGone, "{mode:?}");
            // None of the attempts counts as another request.
            let both = [next.token, first.token];
            assert_eq!(retract(&both).await, Released::Released, "{mode:?}");
            assert_eq!(store.token_on("a").await, None, "{mode:?}");
        }
    }

    async fn releasing_a_session_removes_and_names_its_locks_only(store, alice, bob) {
        let (live, left) = store.holds_many(alice, bob).await;
        assert_eq!(store.releases_all(alice).await, live);
        store.has_left(left).await;
        assert_eq!(store.releases_all(alice).await, []);
    }

    async fn an_expired_lock_is_neither_inspected_nor_listed(store, alice, bob) {
        for (id, aid) in [("a", alice), ("b", alice), ("c", bob)] {
            store.granted(id, aid).await;
        }
        store.age("a", TTL).await;
        assert!(store.lock_on("a").await.is_none());
        let named = |locks: Vec<Lock>| sorted(locks.into_iter().map(|lock| lock.key).collect());
        assert_eq!(named(store.all().await), keys(["b", "c"]));
        assert_eq!(named(store.all_of(&[bob]).await), keys(["c"]));
        assert_eq!(store.list(COLLECTION, None, 1).await.unwrap().len(), 1);
    }

    async fn a_break_removes_the_lock_that_was_seen_and_no_later_one(store, alice, bob, carol) {
        for mode in [Exclusive, Shared] {
            let claim = |aid| Claim { mode, ..claim(aid) };
            store.granted("a", &claim(alice)).await;
            let seen = store.lock_on("a").await.unwrap();
            assert_eq!(store.breaks(&seen).await, Released::Released);
            for later in [alice, bob] {
                let newer = store.granted("a", &claim(later)).await;
                assert_eq!(store.breaks(&seen).await, Released::AlreadyGone);
                assert_eq!(store.token_on("a").await, newer.token);
                store.releases(&newer).await;
            }
        }
        store.read("a", &[alice, bob, carol]).await;
        let seen = store.lock_of("a", alice).await.unwrap();
        assert_eq!(store.breaks(&seen).await, Released::Released);
        assert_eq!(store.breaks(&seen).await, Released::AlreadyGone);
        let left: BTreeSet<_> = store.all().await.into_iter().map(|lock| lock.aid).collect();
        assert_eq!(left, [bob, carol].map(Aid::clone).into(), "the other readers stay");
    }

    async fn ids_of_different_types_name_different_documents(store, alice) {
        let uuid = Uuid::from_u128(5);
        let ids: [LockId; 6] = [
            LockId::ObjectId([5; 12]),
            LockId::ObjectId([5; 12]).to_string().into(),
            5_i32.into(),
            "5".into(),
            uuid.into(),
            uuid.to_string().into(),
        ];
        let acquire = async |id: LockId| {
            let key = LockKey::new(COLLECTION, id).unwrap();
            store.try_acquire(&key, &claim(alice), NONE).await.unwrap()
        };
        for id in &ids {
            let answer = acquire(id.clone()).await;
            assert!(matches!(answer, TryAcquire::Granted(_)), "{answer:?}");
        }
        let shown = |id: &LockId| format!("{id:?}");
        let listed: BTreeSet<_> =
            store.all_of(&[alice]).await.iter().map(|lock| shown(lock.key.id())).collect();
        assert_eq!(listed, ids.iter().map(shown).collect(), "with their types");
        // As in MongoDB, a 32-bit and a 64-bit integer of the same value are one id.
        let answer = acquire(5_i64.into()).await;
        assert!(matches!(answer, TryAcquire::AlreadyMine(_)), "{answer:?}");
        let answer = acquire(i64::MAX.into()).await;
        assert!(matches!(answer, TryAcquire::Granted(_)), "{answer:?}");
    }

    #[needs(Documents, Sessions)]
    async fn text_that_looks_like_an_operator_stays_text(store) {
        let other = store.granted("other", &Aid::new()).await;
        for hostile in ["$where", "$$ROOT", "$_id", "{\"$gt\": \"\"}", "/.*/", "../..", "a\0b", ""]
        {
            let alice = &Aid::from(hostile.to_owned());
            store.put(hostile, "text").await;
            let claim = Claim { holder: Holder::new(hostile), ..claim(alice) };
            let mine = store.granted(hostile, &claim).await;
            assert_eq!(mine.holder.as_ref().unwrap().label, hostile);
            assert_eq!(store.held(hostile, &Aid::new()).await.aid, *alice);
            assert_eq!(store.renews(&[alice]).await, 1, "{hostile}");
            assert_eq!(store.saves(&mine, hostile).await, Saved::Saved, "{hostile}");
            assert_eq!(store.text_of(hostile).await.unwrap(), hostile);
            assert_eq!(store.session_ended(alice).await.unwrap(), None);
            assert_eq!(store.releases_all(alice).await, keys([hostile]));
            store.expired(hostile, alice).await;
            store.finds_idle(1).await;
            store.granted("of hostile", alice).await;
            assert_eq!(store.logs_out(alice).await.len(), 2, "{hostile}");
            let mut ids = [hostile, "of hostile"];
            ids.sort();
            store.announces(alice, &ids).await;
        }
        assert_eq!(store.token_on("other").await, other.token);
    }

    async fn of_many_simultaneous_claims_exactly_one_wins(store) {
        const CONTENDERS: usize = 32;
        for round in 0..20 {
            let id = format!("round {}", round / 2);
            if round % 2 == 1 {
                store.age(&id, TTL).await;
            }
            let answers = at_once(CONTENDERS, async |_| {
                matches!(store.asks(&id, &Aid::new()).await, TryAcquire::Granted(_))
            });
            assert_eq!(answers.into_iter().filter(|won| *won).count(), 1, "round {round}");
        }
    }

    #[needs(Fenced)]
    async fn a_prepared_store_takes_writes_and_lacks_no_index(store, alice) {
        let other = "another_page";
        store.prepare(other, &Rules::new(TTL).fenced(), NONE).await.unwrap();
        store.granted("held", alice).await;
        let status = store.status(&[COLLECTION, other], NONE).await.unwrap();
        assert!(status.writable, "{status:?}");
        assert!(status.missing_indexes.is_empty(), "{status:?}");
    }

    #[needs(Collections)]
    async fn a_pattern_finds_the_collections_that_it_covers_and_no_others(store) {
        for name in ["a.c_page", "ab c_page", "x_page", "a.c_pages"] {
            store.prepare(name, &Rules::new(TTL), NONE).await.unwrap();
        }
        let found = async |pattern: &str, limit| {
            let pattern = pattern.parse().unwrap();
            let mut found = store.collections(&pattern, limit, NONE).await.unwrap();
            found.sort();
            found
        };
        if found("x_page.lock", 100).await.is_empty() {
            return; // A store that does not tell.
        }
        let all = ["a.c_page.lock", "ab c_page.lock", "x_page.lock"];
        assert_eq!(found("*_page.lock", 100).await, all);
        assert_eq!(found("a.*_page.lock", 100).await, ["a.c_page.lock"], "a point is no wildcard");
        assert_eq!(found("*_missing.lock", 100).await, [""; 0]);
        assert_eq!(found("*.lock", 2).await.len(), 2);
    }
}
