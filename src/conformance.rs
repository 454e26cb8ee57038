//! What every [`Store`] must do, as tests. Feature `test-util`.
//!
//! [`MemoryStore`](crate::MemoryStore) and `MongoStore` pass it; a store of your own should. Say how
//! your store is filled and aged, and let [`store_conformance!`](crate::store_conformance) make one
//! test of each case:
//!
//! ```
//! use std::time::Duration;
//! use actix_doclock::{LockKey, MemoryStore, Store, conformance::{COLLECTION, Page, Subject, TTL}};
//!
//! struct Memory(MemoryStore);
//!
//! impl Subject for Memory {
//!     type Store = MemoryStore;
//!
//!     async fn fresh() -> Self {
//!         let store = MemoryStore::new();
//!         store.prepare(COLLECTION, TTL).await.unwrap();
//!         Self(store)
//!     }
//!     fn store(&self) -> &MemoryStore { &self.0 }
//!     async fn put(&self, page: &Page) { self.0.put(page.id.clone(), page).unwrap() }
//!     async fn delete(&self, key: &LockKey) { self.0.remove(key); }
//!     async fn age(&self, key: &LockKey, by: Duration) { self.0.age(key, by) }
//! }
//!
//! actix_doclock::store_conformance!(Memory);
//! ```

#![expect(clippy::unwrap_used, reason = "a failed case is a panic")]

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};
use tokio::sync::Barrier;
use uuid::Uuid;

use crate::{
    Aid, Claim, EndReason, Holder, Lock, LockKey, LockToken, Lockable, Mode, Released, Saved,
    SessionEnded, Store, StoredDocument, Swept, TryAcquire,
};

/// The collection that the cases lock in.
pub const COLLECTION: &str = "page";

/// The ttl with which the collection is prepared.
pub const TTL: Duration = Duration::from_secs(60);

const SECOND: Duration = Duration::from_secs(1);

/// A document of the cases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Page {
    #[serde(rename = "_id")]
    pub id: String,
    pub text: String,
}

impl Lockable for Page {
    type Id = String;
    const COLLECTION: &'static str = COLLECTION;
}

/// A store and what the cases need to do to it past its verbs.
#[expect(async_fn_in_trait, reason = "each case runs its futures itself, in one task")]
pub trait Subject: Sized {
    /// The store under test.
    type Store: Store;

    /// An empty store, prepared for [`COLLECTION`] with [`TTL`].
    async fn fresh() -> Self;

    /// The store.
    fn store(&self) -> &Self::Store;

    /// Writes a document without regard to locks.
    async fn put(&self, page: &Page);

    /// Deletes a document, not its lock.
    async fn delete(&self, key: &LockKey);

    /// Makes the lock on `key` older, and no other: sets its `ts` back.
    async fn age(&self, key: &LockKey, by: Duration);
}

fn key(id: &str) -> LockKey {
    LockKey::new(COLLECTION, id).unwrap()
}

fn claim(aid: &Aid) -> Claim {
    Claim {
        aid: aid.clone(),
        token: LockToken::new(),
        holder: Holder::new("alice"),
        ttl: TTL,
        max_hold: None,
    }
}

async fn end(store: &impl Store, aid: &Aid, reason: EndReason) -> Vec<LockKey> {
    store.end_session(aid, reason, &[COLLECTION], Uuid::new_v4()).await.unwrap()
}

async fn sweep(store: &impl Store, limit: usize) -> Swept {
    store.sweep(&[COLLECTION], Uuid::new_v4(), limit).await.unwrap()
}

/// What nobody has announced so far; now somebody has.
async fn announce_all(store: &impl Store) -> Vec<SessionEnded> {
    let worker = Uuid::new_v4();
    let ended = store.take_announcements(worker, 60 * SECOND, 1_000).await.unwrap();
    store.announced(worker, &ended).await.unwrap();
    ended
}

fn sorted(mut keys: Vec<LockKey>) -> Vec<LockKey> {
    keys.sort();
    keys
}

async fn granted(store: &impl Store, key: &LockKey, aid: &Aid) -> LockToken {
    let claim = claim(aid);
    match store.try_acquire(key, &claim).await.unwrap() {
        TryAcquire::Granted(lock) => {
            assert_eq!(lock.token, Some(claim.token));
            claim.token
        }
        other => panic!("not granted: {other:?}"),
    }
}

async fn held(store: &impl Store, key: &LockKey, aid: &Aid) -> Lock {
    match store.try_acquire(key, &claim(aid)).await.unwrap() {
        TryAcquire::Held(lock) => lock,
        other => panic!("not held: {other:?}"),
    }
}

async fn token_on(store: &impl Store, key: &LockKey) -> Option<LockToken> {
    store.inspect(key).await.unwrap().and_then(|lock| lock.token)
}

fn encoded(store: &impl Store, id: &str, text: &str) -> StoredDocument {
    StoredDocument::encode(store.format(), &Page { id: id.to_owned(), text: text.to_owned() })
        .unwrap()
}

async fn save(
    store: &impl Store,
    key: &LockKey,
    aid: &Aid,
    token: LockToken,
    document: &StoredDocument,
) -> Saved {
    store.save(key, aid, token, document, Instant::now() + TTL).await.unwrap()
}

async fn text_of(store: &impl Store, key: &LockKey) -> String {
    store.load(key).await.unwrap().unwrap().decode::<Page>().unwrap().text
}

async fn put<S: Subject>(subject: &S, id: &str, text: &str) {
    subject.put(&Page { id: id.to_owned(), text: text.to_owned() }).await;
}

/// A case: what must hold is its name.
macro_rules! cases {
    ($(async fn $case:ident<$s:ident: Subject>($subject:ident: $type:ty) $body:block)*) => {
        $(
            #[doc(hidden)]
            pub async fn $case<$s: Subject>() {
                let $subject: $type = &$s::fresh().await;
                $body
            }
        )*

        #[doc(hidden)]
        pub const CASES: &[&str] = &[$(stringify!($case)),*];
    };
}

cases! {
    async fn a_free_document_is_granted_with_the_token_of_the_claim<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let claim = claim(&alice);
        let TryAcquire::Granted(lock) = store.try_acquire(&key("a"), &claim).await.unwrap() else {
            panic!("not granted");
        };
        assert_eq!((lock.key.clone(), lock.mode, lock.aid.clone()), (key("a"), Mode::Exclusive, alice));
        assert_eq!((lock.token, lock.holder.clone()), (Some(claim.token), Some(claim.holder)));
        assert!(lock.expires_in() <= TTL && lock.expires_in() > TTL - 30 * SECOND);
        let off = SystemTime::now().duration_since(lock.since).unwrap_or_default();
        assert!(off < 60 * SECOND, "taken now, not {off:?} ago");
    }

    async fn a_refusal_says_who_holds_it_since_when_and_how_long<S: Subject>(subject: &S) {
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
        match store.try_acquire(&key("a"), &claim(&alice)).await.unwrap() {
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
            match store.try_acquire(&key("a"), &claim).await.unwrap() {
                TryAcquire::Granted(lock) => assert_eq!(lock.token, Some(claim.token)),
                other => panic!("not granted: {other:?}"),
            }
        }
        assert_eq!(store.list(COLLECTION, None, 10).await.unwrap().len(), 1);
    }

    async fn a_lock_that_has_run_out_is_taken_over_at_once<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let old = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        let new = granted(store, &key("a"), &bob).await;
        assert_ne!(old, new);
        let lock = store.inspect(&key("a")).await.unwrap().unwrap();
        assert_eq!((lock.aid, lock.token), (bob, Some(new)));
    }

    async fn the_ttl_of_the_holder_counts_not_that_of_the_contender<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), 30 * SECOND).await;
        let hasty = Claim { ttl: SECOND, ..claim(&bob) };
        let answer = store.try_acquire(&key("a"), &hasty).await.unwrap();
        assert!(matches!(answer, TryAcquire::Held(_)), "robbed by a shorter ttl: {answer:?}");

        let short = Claim { ttl: SECOND, ..claim(&alice) };
        let _ = store.try_acquire(&key("b"), &short).await.unwrap();
        subject.age(&key("b"), 2 * SECOND).await;
        granted(store, &key("b"), &bob).await;
    }

    async fn after_expiry_the_same_session_gets_a_new_token<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let old = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        assert_ne!(granted(store, &key("a"), &alice).await, old);
    }

    async fn renewal_is_of_all_live_locks_of_the_session_and_of_no_others<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for id in ["a", "b"] {
            granted(store, &key(id), &alice).await;
        }
        granted(store, &key("of bob"), &bob).await;
        for id in ["a", "b", "of bob"] {
            subject.age(&key(id), 50 * SECOND).await;
        }
        assert_eq!(store.renew(COLLECTION, &alice).await.unwrap(), 2);
        for lock in store.list(COLLECTION, None, 10).await.unwrap() {
            assert_eq!(lock.expires_in() > TTL - 30 * SECOND, lock.aid == alice, "{lock:?}");
        }
        assert_eq!(store.renew(COLLECTION, &Aid::new()).await.unwrap(), 0);
    }

    async fn renewal_keeps_the_token_and_does_not_revive<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        assert_eq!(store.renew(COLLECTION, &alice).await.unwrap(), 1);
        assert_eq!(token_on(store, &key("a")).await, Some(token));
        subject.age(&key("a"), TTL).await;
        assert_eq!(store.renew(COLLECTION, &alice).await.unwrap(), 0);
        assert_eq!(token_on(store, &key("a")).await, None);
    }

    async fn a_released_document_is_free_and_releasing_again_is_as_good<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        assert_eq!(store.release(&key("a"), &alice, token).await.unwrap(), Released::Released);
        assert_eq!(store.release(&key("a"), &alice, token).await.unwrap(), Released::AlreadyGone);
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn a_late_release_does_not_remove_a_newer_lock_of_the_same_session<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let old = granted(store, &key("a"), &alice).await;
        store.release(&key("a"), &alice, old).await.unwrap();
        let new = granted(store, &key("a"), &alice).await;
        assert_eq!(store.release(&key("a"), &alice, old).await.unwrap(), Released::AlreadyGone);
        assert_eq!(token_on(store, &key("a")).await, Some(new));
    }

    async fn nobody_releases_the_lock_of_another_session<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let token = granted(store, &key("a"), &alice).await;
        for (aid, token) in [(&Aid::new(), token), (&alice, LockToken::new())] {
            let answer = store.release(&key("a"), aid, token).await.unwrap();
            assert_eq!(answer, Released::AlreadyGone);
        }
        assert_eq!(token_on(store, &key("a")).await, Some(token));
    }

    async fn a_grant_is_taken_back_unless_another_request_was_told_of_it<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let claim = claim(&alice);
        for _ in 0..2 {
            // A repetition of the claim itself is not another request, and a renewal is none at all.
            let _ = store.try_acquire(&key("a"), &claim).await.unwrap();
        }
        store.renew(COLLECTION, &alice).await.unwrap();
        assert_eq!(store.retract(&key("a"), &alice, claim.token).await.unwrap(), Released::Released);
        assert_eq!(token_on(store, &key("a")).await, None);

        let token = granted(store, &key("a"), &alice).await;
        let _ = store.try_acquire(&key("a"), &self::claim(&alice)).await.unwrap();
        assert_eq!(store.retract(&key("a"), &alice, token).await.unwrap(), Released::AlreadyGone);
        assert_eq!(token_on(store, &key("a")).await, Some(token), "re-entered");
        store.release(&key("a"), &alice, token).await.unwrap();

        let token = granted(store, &key("a"), &alice).await;
        let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::Saved);
        assert_eq!(store.retract(&key("a"), &alice, token).await.unwrap(), Released::AlreadyGone);
        assert_eq!(token_on(store, &key("a")).await, Some(token), "saved under");
    }

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
        for id in ["a", "b", "run out"] {
            granted(store, &key(id), &alice).await;
        }
        subject.age(&key("run out"), TTL).await;
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
        assert!(off < 60 * SECOND, "ended now, not {off:?} ago");
        end(store, &alice, EndReason::LoggedOut).await;
        assert_eq!(announce_all(store).await, []);
    }

    async fn whatever_the_reason_an_end_is_for_good_and_there_is_one<S: Subject>(subject: &S) {
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

    async fn a_session_that_held_nothing_ends_with_an_announcement_too<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        end(store, &alice, EndReason::LoggedOut).await;
        let ended = announce_all(store).await;
        assert_eq!((ended.len(), ended[0].locks.len()), (1, 0));
    }

    async fn a_silent_session_is_swept_and_announced_with_its_locks<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for id in ["a", "b"] {
            granted(store, &key(id), &alice).await;
            subject.age(&key(id), TTL).await;
        }
        let of_bob = granted(store, &key("of bob"), &bob).await;
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements), (1, true), "{swept:?}");
        assert_eq!(token_on(store, &key("of bob")).await, Some(of_bob));
        let ended = announce_all(store).await;
        assert_eq!(ended.len(), 1, "{ended:?}");
        assert_eq!((&ended[0].aid, ended[0].reason), (&alice, EndReason::Expired));
        assert_eq!(sorted(ended[0].locks.clone()), [key("a"), key("b")]);
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements, swept.more), (0, false, false));
        assert_eq!(announce_all(store).await, []);
    }

    async fn a_session_with_a_live_lock_is_not_silent<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        let live = granted(store, &key("b"), &alice).await;
        assert_eq!(sweep(store, 100).await.sessions, 0);
        assert_eq!(announce_all(store).await, []);
        assert_eq!(token_on(store, &key("b")).await, Some(live));
    }

    async fn what_ran_out_a_little_earlier_than_the_rest_is_named_too<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for (aid, name) in [(&alice, "a"), (&bob, "b")] {
            for (n, age) in [(1, TTL), (2, TTL - SECOND)] {
                granted(store, &key(&format!("{name} {n}")), aid).await;
                subject.age(&key(&format!("{name} {n}")), age).await;
            }
        }
        assert_eq!(sweep(store, 100).await.sessions, 0, "the second ones are live");
        subject.age(&key("a 2"), 2 * SECOND).await;
        assert_eq!(sweep(store, 100).await.sessions, 1);
        end(store, &bob, EndReason::LoggedOut).await;
        for ended in announce_all(store).await {
            assert_eq!(ended.locks.len(), 2, "{ended:?}");
            assert_eq!(ended.for_good, ended.aid == bob);
        }
    }

    async fn a_silent_session_may_come_back_and_fall_silent_again<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let mut events = Vec::new();
        for id in ["a", "b"] {
            granted(store, &key(id), &alice).await;
            subject.age(&key(id), TTL).await;
            assert_eq!(sweep(store, 100).await.sessions, 1, "{id}");
            assert_eq!(store.session_ended(&alice).await.unwrap(), None, "not for good");
            let ended = announce_all(store).await;
            assert_eq!(ended[0].locks, [key(id)]);
            events.push(ended[0].event);
        }
        assert_ne!(events[0], events[1]);
    }

    async fn a_logout_takes_a_silence_along_that_nobody_has_heard_of<S: Subject>(subject: &S) {
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
        // Its acquirer died before it could ask whether the session has ended.
        granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        sweep(store, 100).await;
        assert_eq!(announce_all(store).await, []);
        assert!(store.session_ended(&alice).await.unwrap().is_some());
    }

    async fn a_sweep_is_bounded_and_says_that_there_is_more<S: Subject>(subject: &S) {
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

    async fn a_sweep_says_how_soon_a_lock_can_run_out<S: Subject>(subject: &S) {
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
                let swept = store.sweep(&[COLLECTION], worker, 8).await.unwrap();
                sessions += swept.sessions;
                if !swept.more {
                    return sessions;
                }
            }
        };
        let swept = tokio::join!(sweep_all(), sweep_all(), sweep_all(), sweep_all());
        let swept = swept.0 + swept.1 + swept.2 + swept.3;
        // Whoever met another one at work has left it to that one.
        let left = sweep(store, 100).await.sessions;
        assert_eq!(swept + left, SESSIONS);
        let ended = announce_all(store).await;
        let aids: BTreeSet<_> = ended.iter().map(|ended| &ended.aid).collect();
        assert_eq!((ended.len(), aids.len()), (SESSIONS, SESSIONS));
        assert!(ended.iter().all(|ended| ended.locks.len() == 2), "{ended:?}");
    }

    async fn an_announcement_is_one_workers_until_its_lease_has_passed<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let (dies, lives) = (Uuid::new_v4(), Uuid::new_v4());
        end(store, &alice, EndReason::LoggedOut).await;
        let first = store.take_announcements(dies, 60 * SECOND, 10).await.unwrap();
        assert_eq!((first.len(), first[0].repeated), (1, false));
        assert_eq!(store.take_announcements(lives, 60 * SECOND, 10).await.unwrap(), []);
        // It asks again because the first answer was lost, and gets a shorter lease.
        let again = store.take_announcements(dies, Duration::from_millis(1), 10).await.unwrap();
        assert_eq!((again[0].event, again[0].repeated), (first[0].event, false));
        tokio::time::sleep(Duration::from_millis(20)).await;
        let second = store.take_announcements(lives, 60 * SECOND, 10).await.unwrap();
        assert_eq!((second[0].event, second[0].repeated), (first[0].event, true));
        // The first one wakes up; it is not its business any more.
        store.announced(dies, &first).await.unwrap();
        assert_eq!(store.take_announcements(lives, 60 * SECOND, 10).await.unwrap().len(), 1);
        store.announced(lives, &second).await.unwrap();
        assert_eq!(store.take_announcements(lives, 60 * SECOND, 10).await.unwrap(), []);
    }

    async fn announcements_are_given_out_a_few_at_a_time<S: Subject>(subject: &S) {
        let store = subject.store();
        for _ in 0..5 {
            end(store, &Aid::new(), EndReason::LoggedOut).await;
        }
        let taken = store.take_announcements(Uuid::new_v4(), 60 * SECOND, 2).await.unwrap();
        assert_eq!(taken.len(), 2);
        assert_eq!(announce_all(store).await.len(), 3);
    }

    async fn max_hold_ends_a_lock_however_often_it_is_renewed<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let claim = Claim { max_hold: Some(TTL + TTL / 2), ..claim(&alice) };
        let _ = store.try_acquire(&key("a"), &claim).await.unwrap();
        let left = async || store.inspect(&key("a")).await.unwrap().map(|lock| lock.expires_in());
        assert!(left().await.unwrap() > TTL - 30 * SECOND, "the whole ttl at first");
        subject.age(&key("a"), TTL - SECOND).await;
        // Renewed, re-entered and saved: none of them goes beyond it.
        assert_eq!(store.renew(COLLECTION, &alice).await.unwrap(), 1);
        assert!(left().await.unwrap() <= TTL / 2 + SECOND, "{:?}", left().await);
        let again = Claim { token: LockToken::new(), ..claim.clone() };
        let answer = store.try_acquire(&key("a"), &again).await.unwrap();
        assert!(matches!(answer, TryAcquire::AlreadyMine(_)), "{answer:?}");
        assert!(left().await.unwrap() <= TTL / 2 + SECOND, "{:?}", left().await);
        subject.put(&Page { id: "a".into(), text: "old".into() }).await;
        let document = encoded(store, "a", "new");
        assert_eq!(save(store, &key("a"), &alice, claim.token, &document).await, Saved::Saved);
        assert!(left().await.unwrap() <= TTL / 2 + SECOND, "{:?}", left().await);
        subject.age(&key("a"), TTL / 2 + SECOND).await;
        assert_eq!(store.renew(COLLECTION, &alice).await.unwrap(), 0);
        assert_eq!(left().await, None);
    }

    async fn a_lock_that_reached_max_hold_says_nothing_about_its_session<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let claim = Claim { max_hold: Some(TTL), ..claim(&alice) };
        let _ = store.try_acquire(&key("a"), &claim).await.unwrap();
        subject.age(&key("a"), TTL).await;
        assert_eq!(sweep(store, 100).await.sessions, 0);
        assert_eq!(announce_all(store).await, []);
        // But one that ran out before does.
        let claim = Claim { max_hold: Some(3 * TTL), token: LockToken::new(), ..claim };
        let _ = store.try_acquire(&key("a"), &claim).await.unwrap();
        subject.age(&key("a"), TTL).await;
        assert_eq!(sweep(store, 100).await.sessions, 1);
    }

    async fn releasing_a_session_removes_and_names_its_locks_only<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for id in ["a", "b", "run out"] {
            granted(store, &key(id), &alice).await;
        }
        subject.age(&key("run out"), TTL).await;
        let of_bob = granted(store, &key("of bob"), &bob).await;
        let mut released = store.release_session(COLLECTION, &alice).await.unwrap();
        released.sort();
        assert_eq!(released, [key("a"), key("b")]);
        assert_eq!(token_on(store, &key("a")).await, None);
        assert_eq!(token_on(store, &key("of bob")).await, Some(of_bob));
        assert_eq!(store.release_session(COLLECTION, &alice).await.unwrap(), []);
    }

    async fn what_has_run_out_is_neither_inspected_nor_listed<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        for (id, aid) in [("a", &alice), ("b", &alice), ("c", &bob)] {
            granted(store, &key(id), aid).await;
        }
        subject.age(&key("a"), TTL).await;
        assert!(store.inspect(&key("a")).await.unwrap().is_none());
        let keys = |locks: Vec<Lock>| {
            let mut keys: Vec<_> = locks.into_iter().map(|lock| lock.key).collect();
            keys.sort();
            keys
        };
        assert_eq!(keys(store.list(COLLECTION, None, 10).await.unwrap()), [key("b"), key("c")]);
        assert_eq!(keys(store.list(COLLECTION, Some(&bob), 10).await.unwrap()), [key("c")]);
        assert_eq!(store.list(COLLECTION, None, 1).await.unwrap().len(), 1);
    }

    async fn a_break_removes_the_lock_that_was_seen_and_no_later_one<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        granted(store, &key("a"), &alice).await;
        let seen = store.inspect(&key("a")).await.unwrap().unwrap();
        assert_eq!(store.break_lock(&seen).await.unwrap(), Released::Released);
        let token = granted(store, &key("a"), &bob).await;
        assert_eq!(store.break_lock(&seen).await.unwrap(), Released::AlreadyGone);
        assert_eq!(token_on(store, &key("a")).await, Some(token));
    }

    async fn a_save_under_a_live_lock_writes_and_renews<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), 50 * SECOND).await;
        let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::Saved);
        assert_eq!(text_of(store, &key("a")).await, "new");
        let lock = store.inspect(&key("a")).await.unwrap().unwrap();
        assert_eq!(lock.token, Some(token));
        assert!(lock.expires_in() > TTL - 30 * SECOND, "renewed");
    }

    async fn a_save_is_refused_once_the_lock_has_run_out<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::Lost);
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

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

    async fn a_save_is_refused_after_a_takeover_a_break_or_a_release<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        put(subject, "a", "old").await;
        let new = encoded(store, "a", "new");

        let token = granted(store, &key("a"), &alice).await;
        subject.age(&key("a"), TTL).await;
        let of_bob = granted(store, &key("a"), &bob).await;
        assert_eq!(save(store, &key("a"), &alice, token, &new).await, Saved::Lost);

        store.break_lock(&store.inspect(&key("a")).await.unwrap().unwrap()).await.unwrap();
        assert_eq!(save(store, &key("a"), &bob, of_bob, &new).await, Saved::Lost);

        let token = granted(store, &key("a"), &alice).await;
        store.release(&key("a"), &alice, token).await.unwrap();
        assert_eq!(save(store, &key("a"), &alice, token, &new).await, Saved::Lost);
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

    async fn a_save_that_comes_after_its_deadline_writes_nothing<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        let document = encoded(store, "a", "new");
        let late = store.save(&key("a"), &alice, token, &document, Instant::now()).await;
        assert_eq!(late.unwrap_err().kind(), crate::StoreErrorKind::Unavailable);
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

    async fn a_save_does_not_bring_a_deleted_document_back<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        subject.delete(&key("a")).await;
        assert!(!store.exists(&key("a")).await.unwrap());
        let saved = save(store, &key("a"), &alice, token, &encoded(store, "a", "new")).await;
        assert_eq!(saved, Saved::DocumentGone);
        assert!(store.load(&key("a")).await.unwrap().is_none());
    }

    async fn a_save_does_not_give_a_document_another_id<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        put(subject, "a", "old").await;
        let token = granted(store, &key("a"), &alice).await;
        let renamed = encoded(store, "b", "new");
        let until = Instant::now() + TTL;
        assert!(store.save(&key("a"), &alice, token, &renamed, until).await.is_err());
        assert_eq!(text_of(store, &key("a")).await, "old");
    }

    async fn locking_leaves_the_document_byte_for_byte_as_it_was<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        put(subject, "a", "text").await;
        let bytes = async || store.load(&key("a")).await.unwrap().unwrap().as_bytes().to_vec();
        let before = bytes().await;
        granted(store, &key("a"), &alice).await;
        assert_eq!(bytes().await, before, "after acquiring");
        store.renew(COLLECTION, &alice).await.unwrap();
        assert_eq!(bytes().await, before, "after renewing");
        subject.age(&key("a"), TTL).await;
        let token = granted(store, &key("a"), &bob).await;
        assert_eq!(bytes().await, before, "after taking over");
        store.release(&key("a"), &bob, token).await.unwrap();
        assert_eq!(bytes().await, before, "after releasing");
    }

    async fn ids_of_every_type_name_documents_of_their_own<S: Subject>(subject: &S) {
        let (store, alice) = (subject.store(), Aid::new());
        let uuid = uuid::Uuid::from_u128(5);
        let ids: [crate::LockId; 6] = [
            crate::LockId::ObjectId([5; 12]),
            crate::LockId::ObjectId([5; 12]).to_string().into(),
            5_i32.into(),
            "5".into(),
            uuid.into(),
            uuid.to_string().into(),
        ];
        for id in &ids {
            granted(store, &LockKey::new(COLLECTION, id.clone()).unwrap(), &alice).await;
        }
        let listed = store.list(COLLECTION, Some(&alice), 10).await.unwrap();
        let shown = |id: &crate::LockId| format!("{id:?}");
        let mut listed: Vec<_> = listed.iter().map(|lock| shown(lock.key.id())).collect();
        let mut expected: Vec<_> = ids.iter().map(shown).collect();
        listed.sort();
        expected.sort();
        assert_eq!(listed, expected, "with their types");
        // As in MongoDB, the number is one in both widths.
        held(store, &LockKey::new(COLLECTION, 5_i64).unwrap(), &Aid::new()).await;
        granted(store, &LockKey::new(COLLECTION, i64::MAX).unwrap(), &alice).await;
    }

    async fn text_that_looks_like_an_operator_stays_text<S: Subject>(subject: &S) {
        let store = subject.store();
        let other = granted(store, &key("other"), &Aid::new()).await;
        for hostile in ["$where", "$$ROOT", "$_id", "{\"$gt\": \"\"}", "/.*/", "../..", "a\0b", ""] {
            let alice = Aid::from(hostile.to_owned());
            put(subject, hostile, "text").await;
            let claim = Claim { holder: Holder::new(hostile), ..claim(&alice) };
            let TryAcquire::Granted(lock) = store.try_acquire(&key(hostile), &claim).await.unwrap()
            else {
                panic!("not granted: {hostile}");
            };
            assert_eq!((lock.aid, lock.holder.unwrap().label), (alice.clone(), hostile.to_owned()));
            assert_eq!(held(store, &key(hostile), &Aid::new()).await.aid, alice);
            assert_eq!(store.renew(COLLECTION, &alice).await.unwrap(), 1, "{hostile}");
            let document = encoded(store, hostile, hostile);
            let saved = save(store, &key(hostile), &alice, claim.token, &document).await;
            assert_eq!(saved, Saved::Saved, "{hostile}");
            assert_eq!(text_of(store, &key(hostile)).await, hostile);
            assert_eq!(store.session_ended(&alice).await.unwrap(), None);
            assert_eq!(store.release_session(COLLECTION, &alice).await.unwrap(), [key(hostile)]);
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

    async fn of_many_at_the_same_moment_exactly_one_wins<S: Subject>(subject: &S) {
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
                let answer = store.try_acquire(&key(&id), &claim(&Aid::new())).await.unwrap();
                matches!(answer, TryAcquire::Granted(_))
            };
            let answers =
                futures_util::future::join_all((0..CONTENDERS).map(|_| contend())).await;
            assert_eq!(answers.into_iter().filter(|won| *won).count(), 1, "round {round}");
        }
    }
}

/// Makes one `#[tokio::test]` of each case of the [conformance suite](crate::conformance), for a
/// [`Subject`](crate::conformance::Subject). Needs `tokio` with the features `macros` and `rt`.
#[macro_export]
macro_rules! store_conformance {
    ($subject:ty) => {
        $crate::store_conformance!(@each $subject:
            a_free_document_is_granted_with_the_token_of_the_claim,
            a_refusal_says_who_holds_it_since_when_and_how_long,
            a_refusal_does_not_renew,
            reentry_renews_and_keeps_the_token,
            a_repeated_claim_recognises_its_own_grant,
            a_lock_that_has_run_out_is_taken_over_at_once,
            the_ttl_of_the_holder_counts_not_that_of_the_contender,
            after_expiry_the_same_session_gets_a_new_token,
            renewal_is_of_all_live_locks_of_the_session_and_of_no_others,
            renewal_keeps_the_token_and_does_not_revive,
            a_released_document_is_free_and_releasing_again_is_as_good,
            a_late_release_does_not_remove_a_newer_lock_of_the_same_session,
            nobody_releases_the_lock_of_another_session,
            a_grant_is_taken_back_unless_another_request_was_told_of_it,
            the_end_of_a_session_is_remembered_from_its_first_moment,
            an_ended_session_has_no_locks_and_is_announced_once_with_their_names,
            whatever_the_reason_an_end_is_for_good_and_there_is_one,
            a_session_that_held_nothing_ends_with_an_announcement_too,
            a_silent_session_is_swept_and_announced_with_its_locks,
            a_session_with_a_live_lock_is_not_silent,
            what_ran_out_a_little_earlier_than_the_rest_is_named_too,
            a_silent_session_may_come_back_and_fall_silent_again,
            a_logout_takes_a_silence_along_that_nobody_has_heard_of,
            a_lock_of_an_ended_session_is_swept_without_another_announcement,
            a_sweep_is_bounded_and_says_that_there_is_more,
            a_sweep_says_how_soon_a_lock_can_run_out,
            many_sweeps_at_the_same_moment_end_each_session_once,
            an_announcement_is_one_workers_until_its_lease_has_passed,
            announcements_are_given_out_a_few_at_a_time,
            max_hold_ends_a_lock_however_often_it_is_renewed,
            a_lock_that_reached_max_hold_says_nothing_about_its_session,
            releasing_a_session_removes_and_names_its_locks_only,
            what_has_run_out_is_neither_inspected_nor_listed,
            a_break_removes_the_lock_that_was_seen_and_no_later_one,
            a_save_under_a_live_lock_writes_and_renews,
            a_save_is_refused_once_the_lock_has_run_out,
            a_save_is_refused_under_an_earlier_lock_of_the_same_session,
            a_save_is_refused_after_a_takeover_a_break_or_a_release,
            a_save_that_comes_after_its_deadline_writes_nothing,
            a_save_does_not_bring_a_deleted_document_back,
            a_save_does_not_give_a_document_another_id,
            locking_leaves_the_document_byte_for_byte_as_it_was,
            ids_of_every_type_name_documents_of_their_own,
            text_that_looks_like_an_operator_stays_text,
            of_many_at_the_same_moment_exactly_one_wins,
        );
    };
    (@each $subject:ty: $($case:ident,)*) => {
        $(
            #[tokio::test]
            async fn $case() {
                $crate::conformance::$case::<$subject>().await;
            }
        )*

        #[test]
        fn no_case_is_left_out() {
            assert_eq!([$(stringify!($case)),*], $crate::conformance::CASES);
        }
    };
}
