//! Readers, and the writers behind them.

use super::*;
use doclock_core::{limits::MAX_READERS, store::Rules};

/// The sessions that read; nobody writes.
pub(super) async fn readers<S: Subject>(store: &Steps<S>) -> BTreeSet<Aid> {
    let locks = store.all().await;
    assert!(locks.iter().all(|lock| lock.mode == Shared), "{locks:?}");
    let aids: BTreeSet<_> = locks.iter().map(|lock| lock.aid.clone()).collect();
    assert_eq!(aids.len(), locks.len(), "each reader has one lock");
    aids
}

pub(super) fn set<const N: usize>(aids: [&Aid; N]) -> BTreeSet<Aid> {
    aids.map(Aid::clone).into()
}

/// How many readers come at the same moment, where it need not be one after the other.
const AT_ONCE: usize = 33;

/// The claim that makes this shared lock exclusive.
fn upgrade_of(read: &Lock) -> Claim {
    Claim { upgrades: read.token, ..claim(&read.aid) }
}

cases! {
    tests shared($);
    needs [];

    async fn readers_share_and_keep_a_writer_out(store, alice, bob, carol) {
        let of_alice = store.granted("a", &reading(alice)).await;
        store.age("a", 10 * TICK).await;
        let of_bob = store.granted("a", &reading(bob)).await;
        let seen = store.held("a", carol).await;
        assert_eq!((seen.mode, &seen.aid, seen.token), (Shared, bob, of_bob.token));
        assert_eq!(seen.holder.unwrap().label, "alice");
        assert_eq!(readers(store).await, set([alice, bob]));
        store.releases(&of_bob).await;
        assert_eq!(store.held("a", carol).await.aid, *alice);
        store.releases(&of_alice).await;
        store.granted("a", carol).await;
    }

    async fn a_writer_keeps_readers_out(store, alice, bob) {
        let mine = store.granted("a", alice).await;
        let seen = store.held("a", &reading(bob)).await;
        assert_eq!((seen.mode, seen.token), (Exclusive, mine.token));
        store.age("a", TTL).await;
        store.granted("a", &reading(bob)).await;
        assert!(store.lock_of("a", alice).await.is_none());
    }

    async fn the_only_reader_is_upgraded_and_others_are_refused_without_harm(store, alice, bob) {
        store.expired("a", &reading(&Aid::new())).await;
        let of_alice = store.granted("a", &reading(alice)).await;
        let of_bob = store.granted("a", &reading(bob)).await;
        let seen = store.held("a", alice).await;
        assert_eq!((&seen.aid, seen.token), (bob, of_bob.token), "it names the other reader");
        assert_eq!(readers(store).await.len(), 2, "nothing has changed");
        assert_eq!(store.lock_of("a", alice).await.unwrap().token, of_alice.token);

        store.releases(&of_bob).await;
        store.age("a", 20 * TICK).await;
        let before = store.lock_of("a", alice).await.unwrap().since;
        let upgraded = store.granted("a", alice).await;
        assert_eq!(store.releases(&of_alice).await, Released::AlreadyGone);
        let lock = store.lock_on("a").await.unwrap();
        assert_eq!((lock.mode, lock.token), (Exclusive, upgraded.token));
        assert!(lock.since >= before, "an upgrade is a new grant");
        store.held("a", &reading(bob)).await;
    }

    async fn an_upgrade_that_names_its_shared_lock_replaces_only_that_lock(store, alice, bob) {
        let read = store.granted("a", &reading(alice)).await;
        let of_bob = store.granted("a", &reading(bob)).await;
        let upgrade = upgrade_of(&read);
        assert_eq!(store.held("a", &upgrade).await.token, of_bob.token, "not lost");
        store.releases(&of_bob).await;
        let upgraded = store.granted("a", &upgrade).await;
        assert_eq!(store.holders("a").await.len(), 1);
        // The reply was lost, and the claim is repeated: it recognises its own grant.
        let again = Claim { token: upgrade.token.next_attempt(), ..upgrade.clone() };
        for attempt in [&upgrade, &again] {
            match store.asks("a", attempt).await {
                TryAcquire::Granted(lock) => assert_eq!(lock.token, upgraded.token),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(store.retracts(&upgraded).await, Released::Released, "nobody else was told");
        // A late duplicate brings nothing back.
        store.has_lost("a", &again).await;
        assert!(store.lock_on("a").await.is_none());
    }

    async fn an_upgrade_of_a_lock_that_is_gone_is_lost_whoever_came_in_between(store, bob) {
        for how in ["expired", "broken", "released", "re-acquired", "exclusive"] {
            for next in [None, Some(Exclusive), Some(Shared)] {
                for stays in [false, true] {
                    let alice = &Aid::new();
                    let read = store.granted("a", &reading(alice)).await;
                    match how {
                        "expired" => store.age("a", TTL).await,
                        "broken" => drop(store.breaks(&read).await),
                        _ => drop(store.releases(&read).await),
                    }
                    if let Some(mode) = next {
                        let between = store.granted("a", &Claim { mode, ..claim(bob) }).await;
                        if !stays {
                            store.releases(&between).await;
                        }
                    }
                    let is_free = next.is_none() || !stays;
                    // The session has another lock by now, which somebody else of the session believes in.
                    let mut own = None;
                    if is_free && how == "re-acquired" {
                        own = Some(store.granted("a", &reading(alice)).await);
                    } else if is_free && how == "exclusive" {
                        own = Some(store.granted("a", alice).await);
                    }
                    let before = store.holders("a").await.len();
                    let why = format!("{how}, {next:?}, {stays}");
                    store.has_lost("a", &upgrade_of(&read)).await;
                    assert_eq!(store.holders("a").await.len(), before, "changed: {why}");
                    if let Some(own) = own {
                        assert_eq!(store.token_on("a").await, own.token, "{why}");
                    }
                    store.releases_all(alice).await;
                    store.releases_all(bob).await;
                }
            }
        }
    }

    async fn an_ordinary_claim_of_a_former_reader_is_granted_anew(store, alice, bob) {
        store.expired("a", &reading(alice)).await;
        let between = store.granted("a", bob).await;
        store.releases(&between).await;
        store.granted("a", alice).await;
    }

    async fn an_upgrade_names_the_lock_of_its_own_session_and_document(store, alice, bob) {
        let of_bob = store.granted("a", &reading(bob)).await;
        store.has_lost("a", &Claim { aid: alice.clone(), ..upgrade_of(&of_bob) }).await;
        store.has_lost("b", &upgrade_of(&of_bob)).await;
        assert_eq!(readers(store).await, set([bob]));
        let exclusive = store.granted("c", alice).await;
        store.has_lost("c", &upgrade_of(&exclusive)).await;
        assert_eq!(store.token_on("c").await, exclusive.token);
    }

    #[needs(Fair)]
    async fn a_lost_upgrade_is_told_so_in_a_fair_collection_too(store, alice, bob) {
        store.prepare(COLLECTION, &Rules::new(TTL).fair(), NONE).await.unwrap();
        let read = store.granted("a", &reading(alice)).await;
        store.releases(&read).await;
        store.has_lost("a", &upgrade_of(&read)).await;
        let of_bob = store.granted("a", bob).await;
        store.has_lost("a", &upgrade_of(&read)).await;
        assert_eq!(store.token_on("a").await, of_bob.token);
    }

    async fn an_idle_reader_expires_alone(store, alice, bob) {
        let old = store.granted("a", &reading(alice)).await;
        store.age("a", TTL / 2).await;
        store.granted("a", &reading(bob)).await;
        assert_eq!(store.lock_on("a").await.unwrap().aid, *bob, "the last reader");
        store.age("a", TTL / 2).await;
        assert_eq!(readers(store).await, set([bob]));
        assert_eq!(store.renews(&[alice]).await, 0);
        assert_eq!(store.renews(&[alice, bob]).await, 1);
        assert_eq!(readers(store).await, set([bob]), "an expired reader is not revived");
        assert_eq!(store.all_of(&[alice]).await.len(), 0);
        let new = store.granted("a", &reading(alice)).await;
        assert_ne!(new.token, old.token, "a new acquisition");
        assert_eq!(readers(store).await, set([alice, bob]));
    }

    async fn each_reader_has_its_own_token_and_releases_only_itself(store, alice, bob) {
        let of_alice = store.granted("a", &reading(alice)).await;
        let of_bob = store.granted("a", &reading(bob)).await;
        assert_ne!(of_alice.token, of_bob.token);
        for (lock, token) in [(&of_alice, of_bob.token), (&of_bob, of_alice.token)] {
            let wrong = Lock { token, ..lock.clone() };
            assert_eq!(store.releases(&wrong).await, Released::AlreadyGone);
        }
        assert_eq!(store.releases(&of_alice).await, Released::Released);
        assert_eq!(readers(store).await, set([bob]));
        let newer = store.granted("a", &reading(alice)).await;
        for (lock, released) in [
            (of_alice, Released::AlreadyGone),
            (of_bob, Released::Released),
            (newer, Released::Released),
        ] {
            assert_eq!(store.releases(&lock).await, released);
        }
        store.granted("a", &Aid::new()).await;
    }

    async fn renewal_and_reentry_extend_only_the_sessions_own_reader(store, alice, bob) {
        let mine = store.granted("a", &reading(alice)).await;
        store.granted("a", &reading(bob)).await;
        store.granted("b", alice).await;
        store.age_all(&["a", "b"], 50 * TICK).await;
        assert_eq!(store.renews(&[alice]).await, 2);
        let renewed = store.lock_of("a", alice).await.unwrap();
        assert_eq!(renewed.token, mine.token);
        assert!(is_full(&renewed), "{renewed:?}");
        store.reenters("a", &reading(alice)).await;
        let of_bob = async || store.lock_of("a", bob).await.unwrap();
        assert!(
            of_bob().await.expires_in() <= TTL - 50 * TICK,
            "re-entry renews no other reader"
        );
        assert_eq!(store.renews(&[alice, bob]).await, 2, "documents");
        assert!(is_full(&of_bob().await));
        store.age("a", 50 * TICK).await;
        assert_eq!(store.all_of(&[alice, bob]).await.len(), 3);
    }

    async fn readers_are_listed_by_session_and_documents_are_counted(store, alice, bob) {
        for (id, aid) in [("a", alice), ("a", bob), ("b", alice), ("b", bob)] {
            store.granted(id, &reading(aid)).await;
        }
        let of_bob = store.all_of(&[bob]).await;
        assert_eq!(of_bob.len(), 2);
        assert!(of_bob.iter().all(|lock| lock.aid == *bob && lock.mode == Shared));
        assert_eq!(store.list(COLLECTION, None, 10).await.unwrap().len(), 4);
        assert_eq!(store.list(COLLECTION, None, 1).await.unwrap().len(), 2, "one document");
    }

    async fn the_number_of_readers_is_limited(store, first) {
        // The first lock must not expire before all readers are in, however long that takes.
        let ttl = 60 * TTL;
        store.prepare(COLLECTION, &Rules::new(ttl), NONE).await.unwrap();
        let reader = |aid: &Aid| Claim { ttl, ..reading(aid) };
        let another = || reader(&Aid::new());
        store.granted("a", &reader(first)).await;
        store.age("a", TICK).await;
        for _ in 0..(MAX_READERS - 1) / AT_ONCE {
            at_once(AT_ONCE, async |_| store.granted("a", &another()).await);
        }
        for _ in 0..(MAX_READERS - 1) % AT_ONCE {
            store.granted("a", &another()).await;
        }
        store.held("a", &another()).await;
        store.reenters("a", &reader(first)).await;
        store.releases_all(first).await;
        store.granted("a", &another()).await;
        store.held("a", &another()).await;
        // Expired readers make room for others, swept or not.
        store.age("a", ttl).await;
        for _ in 0..2 {
            store.granted("a", &another()).await;
        }
    }

    async fn of_simultaneous_readers_and_writers_only_one_kind_gets_in(store) {
        const CONTENDERS: usize = 16;
        for round in 0..20 {
            let id = round.to_string();
            let mode_of = |n: usize| if n.is_multiple_of(3) { Exclusive } else { Shared };
            let answers = at_once(CONTENDERS, async |n| {
                let claim = Claim { mode: mode_of(n), ..claim(&Aid::new()) };
                match store.asks(&id, &claim).await {
                    TryAcquire::Granted(lock) => Some(lock.mode),
                    _ => None,
                }
            });
            let count = |mode| answers.iter().filter(|it| **it == Some(mode)).count();
            let readers = (0..CONTENDERS).filter(|n| mode_of(*n) == Shared).count();
            let counted = (count(Exclusive), count(Shared));
            assert!(counted == (1, 0) || counted == (0, readers), "round {round}: {counted:?}");
        }
    }

    async fn readers_that_leave_at_the_same_moment_leave_nothing_behind(store) {
        for round in 0..20 {
            let id = round.to_string();
            let mut all = Vec::new();
            for _ in 0..4 {
                all.push(store.granted(&id, &reading(&Aid::new())).await);
            }
            let answers = at_once(all.len(), async |n| store.releases(&all[n]).await);
            assert_eq!(answers, [Released::Released; 4]);
            store.granted(&id, &Aid::new()).await;
        }
    }
}
