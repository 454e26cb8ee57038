//! Waiters are let in in the order of their arrival.

use super::*;
use crate::store::Rules;

const LEASE: Duration = Duration::from_secs(20);

async fn fair(store: &impl Store) {
    store.prepare(COLLECTION, &Rules::new(TTL).fair()).await.unwrap();
}

/// The claim of a waiter.
fn waits(mode: Mode) -> Claim {
    let aid = Aid::new();
    Claim { mode, place: Some(LEASE), holder: Holder::new("waits"), ..claim(&aid) }
}

/// The result of a claim: its own lock, or the lock or the place that is in its way.
async fn tries(store: &impl Store, claim: &Claim) -> Result<Lock, Lock> {
    match store.try_acquire(&key("a"), claim).await.unwrap() {
        TryAcquire::Granted(lock) | TryAcquire::AlreadyMine(lock) => Ok(lock),
        TryAcquire::Held(lock) => Err(lock),
    }
}

async fn gets(store: &impl Store, claim: &Claim) {
    let lock = tries(store, claim).await.unwrap_or_else(|held| panic!("refused by {held:?}"));
    assert_eq!((lock.token, lock.mode), (Some(claim.token), claim.mode));
}

async fn refused(store: &impl Store, claim: &Claim) -> Lock {
    tries(store, claim).await.expect_err("let in")
}

async fn leaves(store: &impl Store, claim: &Claim) {
    let released = store.release(&key("a"), &claim.aid, claim.token, claim.mode).await.unwrap();
    assert_eq!(released, Released::Released);
}

/// A document with a holder and a queue of waiters in these modes.
async fn queue<S: Subject>(store: &S::Store, modes: &[Mode]) -> (Claim, Vec<Claim>) {
    fair(store).await;
    let holder = claim(&Aid::new());
    gets(store, &holder).await;
    let waiting: Vec<_> = modes.iter().copied().map(waits).collect();
    for claim in &waiting {
        assert_eq!(refused(store, claim).await.aid, holder.aid, "the refusal names the holder");
    }
    (holder, waiting)
}

use Mode::{Exclusive as X, Shared as R};

cases! {
    async fn waiters_are_let_in_in_the_order_of_arrival<S: Subject>(subject: &S) {
        let store = subject.store();
        let (mut holder, waiting) = queue::<S>(store, &[X, X, X]).await;
        let tokens: Vec<_> = waiting.iter().map(|claim| claim.token).collect();
        for (turn, next) in waiting.iter().enumerate() {
            leaves(store, &holder).await;
            for later in waiting[turn + 1..].iter().rev() {
                assert_eq!(refused(store, later).await.aid, next.aid);
            }
            gets(store, next).await;
            gets(store, next).await;
            let kept = store.keep_places(&key("a"), &tokens, LEASE).await.unwrap();
            assert_eq!(kept, 2 - turn as u64, "a waiter leaves the queue when it is let in");
            holder = next.clone();
        }
    }

    async fn a_reserved_document_names_the_first_waiter<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X, R]).await;
        subject.age(&key("a"), 5 * SECOND).await;
        leaves(store, &holder).await;
        assert!(store.inspect(&key("a"), None).await.unwrap().is_none(), "nobody holds it");
        assert_eq!(store.list(COLLECTION, None, 10).await.unwrap().len(), 0);
        for other in [claim(&Aid::new()), waiting[1].clone()] {
            let seen = refused(store, &other).await;
            assert_eq!((&seen.aid, seen.token, seen.mode), (&waiting[0].aid, None, X));
            assert_eq!(seen.holder.clone().unwrap().label, "waits");
            let left = seen.expires_in();
            assert!(left <= LEASE - 5 * SECOND && left > SECOND, "{left:?}");
            assert_eq!(store.break_lock(&seen, &taken()).await.unwrap(), Released::AlreadyGone);
        }
        gets(store, &waiting[0]).await;
    }

    async fn nobody_overtakes_the_queue<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X]).await;
        leaves(store, &holder).await;
        for mode in [X, R] {
            let quick = Claim { mode, ..claim(&Aid::new()) };
            assert_eq!(refused(store, &quick).await.aid, waiting[0].aid);
        }
        // The former holder does not overtake the queue, not even when the previous lock has expired.
        let again = Claim { token: LockToken::new(), ..holder };
        assert_eq!(refused(store, &again).await.aid, waiting[0].aid);
        gets(store, &waiting[0]).await;
        let late = waits(X);
        refused(store, &late).await;
        subject.age(&key("a"), TTL).await;
        let late = Claim { place: Some(LEASE), ..late };
        gets(store, &late).await;
    }

    async fn a_waiter_that_asks_again_keeps_its_place<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X, X]).await;
        for _ in 0..3 {
            subject.age(&key("a"), LEASE / 2).await;
            for claim in waiting.iter().rev() {
                refused(store, claim).await;
            }
        }
        leaves(store, &holder).await;
        assert_eq!(refused(store, &waiting[1]).await.aid, waiting[0].aid);
        gets(store, &waiting[0]).await;
    }

    async fn all_claims_of_one_waiter_share_one_place<S: Subject>(subject: &S) {
        for mode in [X, R] {
            let store = subject.store();
            let (holder, waiting) = queue::<S>(store, &[mode]).await;
            let first = &waiting[0];
            let next = Claim { token: first.token.next_attempt(), ..first.clone() };
            let later = Claim { token: next.token.next_claim(), ..first.clone() };
            assert!(!later.token.is_of_same_claim(next.token));
            for attempt in [&next, &later] {
                assert_eq!(refused(store, attempt).await.aid, holder.aid);
            }
            leaves(store, &holder).await;
            assert_eq!(refused(store, &claim(&Aid::new())).await.aid, first.aid);
            gets(store, &later).await;
            let places = store.keep_places(&key("a"), &[first.token], LEASE).await.unwrap();
            assert_eq!(places, 0, "{mode:?}");
            leaves(store, &later).await;

            // A late attempt is granted, and the waiter's next claim is told of that lock. Giving the
            // attempt back must leave the lock.
            gets(store, first).await;
            assert_eq!(tries(store, &later).await.unwrap().token, Some(first.token), "{mode:?}");
            let back = store.retract(&key("a"), &first.aid, &[first.token], mode).await.unwrap();
            assert_eq!(back, Released::AlreadyGone, "{mode:?}");
            leaves(store, first).await;
        }
    }

    async fn a_place_that_is_not_kept_is_passed_over<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X, X]).await;
        subject.age(&key("a"), LEASE / 2).await;
        let tokens = [waiting[1].token, LockToken::new()];
        assert_eq!(store.keep_places(&key("a"), &tokens, LEASE).await.unwrap(), 1);
        leaves(store, &holder).await;
        assert_eq!(refused(store, &waiting[1]).await.aid, waiting[0].aid, "the place is still kept");
        subject.age(&key("a"), LEASE / 2).await;
        assert_eq!(store.keep_places(&key("a"), &[waiting[0].token], LEASE).await.unwrap(), 0);
        gets(store, &waiting[1]).await;
        // The lost place comes back at the end of the queue.
        let third = waits(X);
        refused(store, &third).await;
        refused(store, &waiting[0]).await;
        leaves(store, &waiting[1]).await;
        assert_eq!(refused(store, &waiting[0]).await.aid, third.aid);
    }

    async fn a_place_that_is_given_up_blocks_nobody<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X, X]).await;
        store.leave(&key("a"), waiting[0].token).await.unwrap();
        store.leave(&key("a"), waiting[0].token).await.unwrap();
        store.leave(&key("a"), LockToken::new()).await.unwrap();
        assert_eq!(token_on(store, &key("a")).await, Some(holder.token), "the lock is not touched");
        leaves(store, &holder).await;
        store.leave(&key("a"), waiting[1].token).await.unwrap();
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn readers_at_the_front_of_the_queue_go_together<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[R, R, X, R]).await;
        leaves(store, &holder).await;
        gets(store, &waiting[1]).await;
        assert_eq!(refused(store, &waiting[3]).await.aid, waiting[2].aid, "it waits behind a writer");
        let seen = refused(store, &waiting[2]).await;
        assert_eq!(seen.aid, waiting[1].aid, "the reader holds the lock");
        gets(store, &waiting[0]).await;
        let newcomer = Claim { mode: R, ..claim(&Aid::new()) };
        assert_eq!(refused(store, &newcomer).await.aid, waiting[2].aid);
        leaves(store, &waiting[0]).await;
        leaves(store, &waiting[1]).await;
        assert_eq!(refused(store, &waiting[3]).await.aid, waiting[2].aid);
        gets(store, &waiting[2]).await;
        leaves(store, &waiting[2]).await;
        gets(store, &waiting[3]).await;
        gets(store, &newcomer).await;
    }

    async fn reentry_and_upgrades_do_not_queue<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[R, X]).await;
        let again = Claim { token: LockToken::new(), ..holder.clone() };
        assert_eq!(tries(store, &again).await.unwrap().token, Some(holder.token));
        leaves(store, &holder).await;
        gets(store, &waiting[0]).await;
        let again = Claim { token: LockToken::new(), ..waiting[0].clone() };
        assert_eq!(tries(store, &again).await.unwrap().token, Some(waiting[0].token));
        let upgrade = Claim { mode: X, token: LockToken::new(), ..waiting[0].clone() };
        gets(store, &upgrade).await;
        leaves(store, &upgrade).await;
        gets(store, &waiting[1]).await;
    }

    async fn the_places_of_a_session_are_not_in_its_own_way<S: Subject>(subject: &S) {
        for mode in [X, R] {
            let subject = &S::fresh().await;
            let store = subject.store();
            let (holder, waiting) = queue::<S>(store, &[mode, X]).await;
            // A claim from another tab of the first waiter: other waiters are ahead of it.
            let other_tab = Claim { token: LockToken::new(), place: None, ..waiting[0].clone() };
            leaves(store, &holder).await;
            assert_eq!(refused(store, &other_tab).await.aid, waiting[1].aid);
            store.leave(&key("a"), waiting[1].token).await.unwrap();
            gets(store, &other_tab).await;
            assert_eq!(tries(store, &waiting[0]).await.unwrap().token, Some(other_tab.token));
            let kept = store.keep_places(&key("a"), &[waiting[0].token], LEASE).await.unwrap();
            assert_eq!(kept, 0, "the holder has no place left");
        }
        let _ = subject;
    }

    async fn places_outlive_the_lock_however_it_ends<S: Subject>(subject: &S) {
        for how in ["break", "end", "release", "sweep"] {
            let subject = &S::fresh().await;
            let store = subject.store();
            let (holder, waiting) = queue::<S>(store, &[X]).await;
            match how {
                "break" => {
                    let seen = store.inspect(&key("a"), None).await.unwrap().unwrap();
                    assert_eq!(store.break_lock(&seen, &taken()).await.unwrap(), Released::Released);
                }
                "end" => drop(end(store, &holder.aid, EndReason::LoggedOut).await),
                "release" => drop(store.release_all(COLLECTION, &holder.aid).await.unwrap()),
                _ => {
                    store.keep_places(&key("a"), &[waiting[0].token], 2 * TTL).await.unwrap();
                    subject.age(&key("a"), TTL).await;
                    assert_eq!(sweep(store, 100).await.sessions, 1);
                }
            }
            let seen = refused(store, &claim(&Aid::new())).await;
            assert_eq!((seen.aid, seen.token), (waiting[0].aid.clone(), None), "{how}");
            gets(store, &waiting[0]).await;
        }
        let _ = subject;
    }

    async fn a_document_reserved_for_a_vanished_waiter_is_swept<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, _) = queue::<S>(store, &[X, R]).await;
        leaves(store, &holder).await;
        sweep(store, 100).await;
        subject.age(&key("a"), LEASE).await;
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements, swept.more), (0, false, false));
        assert_eq!(sweep(store, 100).await.next, None, "nothing is left");
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn fair_and_fenced_go_together<S: Subject>(subject: &S) {
        let store = subject.store();
        store.prepare(COLLECTION, &Rules::new(TTL).fair().fenced()).await.unwrap();
        let (holder, waiting) = (claim(&Aid::new()), waits(R));
        let first = tries(store, &holder).await.unwrap().fence;
        refused(store, &waiting).await;
        leaves(store, &holder).await;
        refused(store, &claim(&Aid::new())).await;
        let second = tries(store, &waiting).await.unwrap().fence;
        assert!(second > first);
        refused(store, &waits(X)).await;
        leaves(store, &waiting).await;
        subject.age(&key("a"), LEASE).await;
        sweep(store, 100).await;
        assert_eq!(sweep(store, 100).await.next, None);
        assert!(tries(store, &claim(&Aid::new())).await.unwrap().fence > second);
    }

    async fn without_a_fair_queue_nobody_has_a_place<S: Subject>(subject: &S) {
        let store = subject.store();
        let holder = claim(&Aid::new());
        gets(store, &holder).await;
        let waiting = waits(X);
        refused(store, &waiting).await;
        assert_eq!(store.keep_places(&key("a"), &[waiting.token], LEASE).await.unwrap(), 0);
        store.leave(&key("a"), waiting.token).await.unwrap();
        leaves(store, &holder).await;
        granted(store, &key("a"), &Aid::new()).await;
    }
}
