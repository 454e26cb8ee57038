//! The steps of the cases: what sessions and servers do with the store.

use std::{
    collections::BTreeSet,
    ops::Deref,
    slice,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use tokio::{runtime::Handle, task::block_in_place};
use uuid::Uuid;

use doclock_core::{
    Aid, EndReason, Holder, Lock, LockKey, LockToken,
    Mode::{Exclusive, Shared},
    Released, SessionEnded, StoreError, StoreErrorKind, TryAcquire,
    store::{
        Ability, Acquisition, Claim, Deadline, Documents, Edit, HandedOver, Locks, PageId, Removal,
        Saved, Sessions, StoredDocument, Swept, TakenBy, TakeoverKind,
    },
};

use crate::{COLLECTION, Page, Shorthand, Subject, TTL};

/// A sixtieth of the [`TTL`]: far more than a step takes on a busy machine.
pub(crate) const TICK: Duration = Duration::from_secs(10);

pub(crate) const NONE: Deadline = Deadline::NONE;

pub(crate) fn key(id: &str) -> LockKey {
    LockKey::new(COLLECTION, id).unwrap()
}

pub(crate) fn taken() -> TakenBy {
    TakenBy { kind: TakeoverKind::Broken, by: "root".to_owned(), reason: "on holiday".to_owned() }
}

pub(crate) fn claim(aid: &Aid) -> Claim {
    Claim {
        aid: aid.clone(),
        token: LockToken::new(),
        holder: Holder::new("alice"),
        mode: Exclusive,
        ttl: TTL,
        tab: None,
        page: None,
        taken: None,
        max_hold: None,
        turn: None,
        upgrades: None,
    }
}

pub(crate) fn reading(aid: &Aid) -> Claim {
    Claim { mode: Shared, ..claim(aid) }
}

pub(crate) fn acquisition(lock: &Lock) -> Acquisition {
    Acquisition::of(lock).expect("a token")
}

/// True if the lock was granted or renewed a short time ago.
pub(crate) fn is_full(lock: &Lock) -> bool {
    lock.expires_in() > TTL - 30 * TICK
}

pub(crate) fn keys<const N: usize>(ids: [&str; N]) -> [LockKey; N] {
    ids.map(key)
}

pub(crate) fn sorted(mut keys: Vec<LockKey>) -> Vec<LockKey> {
    keys.sort();
    keys
}

/// Begins `count` pieces of work at the same moment, each in a thread of its own, because a verb of a store may contain
/// no `.await`.
pub(crate) fn at_once<T: Send, F: Future<Output = T>>(
    count: usize,
    work: impl Fn(usize) -> F + Sync,
) -> Vec<T> {
    let (runtime, all_are_there) = (&Handle::current(), &Barrier::new(count));
    let run = |n| {
        all_are_there.wait();
        runtime.block_on(work(n))
    };
    block_in_place(|| {
        thread::scope(|scope| {
            let threads: Vec<_> = (0..count).map(|n| scope.spawn(move || run(n))).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        })
    })
}

/// Does the same for each of many, some of them at the same moment: a store may share what they cost.
pub(crate) fn for_each<T: Sync>(all: &[T], work: impl AsyncFn(&T) + Sync) {
    const AT_ONCE: usize = 25;
    at_once(AT_ONCE, async |n| {
        for one in all.iter().skip(n).step_by(AT_ONCE) {
            work(one).await;
        }
    });
}

/// Repeats an attempt while the store does not answer, for [`TTL`] at most.
pub(crate) async fn known<T>(attempt: impl AsyncFn() -> Result<T, StoreError>) -> T {
    let began = Instant::now();
    loop {
        match attempt().await {
            Ok(outcome) => return outcome,
            Err(e) if e.kind() == StoreErrorKind::Unavailable && began.elapsed() < TTL => {}
            Err(e) => panic!("{e}"),
        }
    }
}

/// The store of a case. Each step panics if the store fails.
pub(crate) struct Steps<S>(S);

/// Makes a claim: a session makes an ordinary one.
pub(crate) trait Asks {
    fn as_claim(&self) -> Claim;
}

impl Asks for Aid {
    fn as_claim(&self) -> Claim {
        claim(self)
    }
}

impl Asks for Claim {
    fn as_claim(&self) -> Claim {
        self.clone()
    }
}

impl<S: Subject> Deref for Steps<S> {
    type Target = S::Store;

    fn deref(&self) -> &S::Store {
        self.0.store()
    }
}

impl<S: Subject> Steps<S> {
    /// An empty store, if it has these abilities. Otherwise the case is left out, and says so.
    pub(crate) async fn of(case: &str, needed: &[Ability]) -> Option<Self> {
        let store = Self(S::fresh().await);
        let missing = needed.iter().find(|ability| !store.can(**ability));
        if let Some(missing) = missing {
            println!("{case} is left out: the store does not say that it can do {missing:?}");
        }
        missing.is_none().then_some(store)
    }

    /// Another empty store.
    pub(crate) async fn another(&self) -> Self {
        Self(S::fresh().await)
    }
}

/// Documents.
impl<S: Subject> Steps<S> {
    pub(crate) async fn put(&self, id: &str, text: &str) {
        self.0.put(&Page { id: id.to_owned(), text: text.to_owned() }).await;
    }

    pub(crate) async fn delete(&self, id: &str) {
        self.0.delete(&key(id)).await;
    }

    pub(crate) fn encoded(&self, id: &str, text: &str) -> StoredDocument {
        let page = Page { id: id.to_owned(), text: text.to_owned() };
        StoredDocument::encode(self.format(), &page).unwrap()
    }

    pub(crate) async fn text_of(&self, id: &str) -> Option<String> {
        let document = self.load(&key(id), NONE).await.unwrap()?;
        Some(document.decode::<Page>().unwrap().text)
    }

    pub(crate) async fn edits(&self, held: &Lock, edit: Edit) -> Result<Saved, StoreError> {
        self.save(&acquisition(held), &edit, Deadline::at(Instant::now() + TTL)).await
    }

    /// Saves this text as the locked document.
    pub(crate) async fn saves(&self, held: &Lock, text: &str) -> Saved {
        let document = self.encoded(&held.key.id().to_string(), text);
        self.edits(held, document.into()).await.unwrap()
    }
}

/// Locks.
impl<S: Subject> Steps<S> {
    pub(crate) async fn age(&self, id: &str, by: Duration) {
        self.0.age(&key(id), by).await;
    }

    pub(crate) async fn age_all(&self, ids: &[&str], by: Duration) {
        for id in ids {
            self.age(id, by).await;
        }
    }

    /// The claim is granted, and the lock is aged by [`TTL`].
    pub(crate) async fn expired(&self, id: &str, who: &impl Asks) -> Lock {
        let lock = self.granted(id, who).await;
        self.age(id, TTL).await;
        lock
    }

    /// These sessions become readers.
    pub(crate) async fn read(&self, id: &str, aids: &[&Aid]) {
        for aid in aids {
            self.granted(id, &reading(aid)).await;
        }
    }

    pub(crate) async fn asks(&self, id: &str, who: &impl Asks) -> TryAcquire {
        let claim = who.as_claim();
        known(async || self.try_acquire(&key(id), &claim, NONE).await).await
    }

    /// The claim is granted, under its own token.
    pub(crate) async fn granted(&self, id: &str, who: &impl Asks) -> Lock {
        let claim = who.as_claim();
        match self.asks(id, &claim).await {
            TryAcquire::Granted(lock) => {
                assert_eq!((&lock.key, &lock.aid), (&key(id), &claim.aid));
                assert_eq!((lock.token, lock.mode), (Some(claim.token), claim.mode), "{lock:?}");
                lock
            }
            other => panic!("{id} is not granted: {other:?}"),
        }
    }

    /// The session has the lock already.
    pub(crate) async fn reenters(&self, id: &str, who: &impl Asks) -> Lock {
        match self.asks(id, who).await {
            TryAcquire::AlreadyMine(lock) => lock,
            other => panic!("the session does not hold {id}: {other:?}"),
        }
    }

    /// The claim is refused, because of this lock.
    pub(crate) async fn held(&self, id: &str, who: &impl Asks) -> Lock {
        match self.asks(id, who).await {
            TryAcquire::Held(lock) => lock,
            other => panic!("{id} is not held: {other:?}"),
        }
    }

    /// The claim is refused, because the lock that it upgrades is gone.
    pub(crate) async fn has_lost(&self, id: &str, who: &impl Asks) {
        match self.asks(id, who).await {
            TryAcquire::Lost(lost) => assert_eq!(lost, key(id)),
            other => panic!("{id} is not lost: {other:?}"),
        }
    }

    pub(crate) async fn lock_on(&self, id: &str) -> Option<Lock> {
        self.inspect(&key(id), None).await.unwrap()
    }

    /// The session's own lock on the document, if it has one.
    pub(crate) async fn lock_of(&self, id: &str, aid: &Aid) -> Option<Lock> {
        self.inspect(&key(id), Some(aid)).await.unwrap().filter(|lock| lock.aid == *aid)
    }

    pub(crate) async fn token_on(&self, id: &str) -> Option<LockToken> {
        self.lock_on(id).await.and_then(|lock| lock.token)
    }

    /// How long the lock on the document lasts.
    pub(crate) async fn left(&self, id: &str) -> Duration {
        self.lock_on(id).await.expect("a lock").expires_in()
    }

    /// All locks on the document.
    pub(crate) async fn holders(&self, id: &str) -> Vec<Lock> {
        self.locks_on(COLLECTION, &[key(id)]).await.unwrap()
    }

    pub(crate) async fn all(&self) -> Vec<Lock> {
        self.list(COLLECTION, None, 10_000).await.unwrap()
    }

    pub(crate) async fn all_of(&self, aids: &[&Aid]) -> Vec<Lock> {
        let aids: Vec<_> = aids.iter().map(|aid| (*aid).clone()).collect();
        self.list(COLLECTION, Some(&aids), 10).await.unwrap()
    }

    /// This session gets locks of all kinds, and another one gets two. Returns the live ones of the first, and those
    /// of the other.
    pub(crate) async fn holds_many(&self, aid: &Aid, other: &Aid) -> ([LockKey; 4], [Lock; 2]) {
        self.expired("expired", aid).await;
        self.granted("a", aid).await;
        self.granted("b", aid).await;
        self.read("read", &[aid]).await;
        self.read("shared", &[aid]).await;
        let of_other = self.granted("of another", other).await;
        let shared = self.granted("shared", &reading(other)).await;
        (keys(["a", "b", "read", "shared"]), [of_other, shared])
    }

    /// Of many locks only these are left.
    pub(crate) async fn has_left(&self, left: [Lock; 2]) {
        let named = |it: Lock| (it.key, it.aid, it.token.map(|token| token.to_string()));
        let all: BTreeSet<_> = self.all().await.into_iter().map(named).collect();
        assert_eq!(all, left.map(named).into());
        for id in ["a", "b", "expired", "read"] {
            self.granted(id, &Aid::new()).await;
        }
    }

    /// Returns on how many documents a lock was renewed.
    pub(crate) async fn renews(&self, aids: &[&Aid]) -> u64 {
        let aids: Vec<_> = aids.iter().map(|aid| (*aid).clone()).collect();
        self.renew_all(COLLECTION, &aids).await.unwrap()
    }

    pub(crate) async fn releases(&self, held: &Lock) -> Released {
        self.remove_lock(Removal::Release(&acquisition(held)), NONE).await.unwrap()
    }

    pub(crate) async fn retracts(&self, held: &Lock) -> Released {
        let attempt = acquisition(held);
        self.remove_lock(Removal::Retract(slice::from_ref(&attempt)), NONE).await.unwrap()
    }

    pub(crate) async fn breaks(&self, seen: &Lock) -> Released {
        self.break_lock(seen, &taken()).await.unwrap()
    }

    /// Names the released locks in order.
    pub(crate) async fn releases_all(&self, aid: &Aid) -> Vec<LockKey> {
        sorted(self.release_all(COLLECTION, aid, NONE).await.unwrap())
    }

    /// The page has gone.
    pub(crate) async fn closes(
        &self,
        held: &Lock,
        page: Option<PageId>,
        grace: Duration,
    ) -> Released {
        self.expire_in(&acquisition(held), page, grace, NONE).await.unwrap()
    }

    pub(crate) async fn hands_over(&self, held: &Lock, to: &impl Asks) -> HandedOver {
        self.hand_over(&acquisition(held), &to.as_claim(), NONE).await.unwrap()
    }
}

/// The ways in which a lock ends.
pub(crate) const WAYS: [&str; 6] =
    ["released", "retracted", "broken", "released with all", "ended", "swept"];

/// Ends of sessions.
impl<S: Subject> Steps<S> {
    /// Names the removed locks in order.
    pub(crate) async fn ends(&self, aid: &Aid, reason: EndReason) -> Vec<LockKey> {
        let worker = Uuid::new_v4();
        let ended = self.end_session(aid, reason, &[COLLECTION], worker, NONE).await.unwrap();
        self.ready(aid, worker).await.unwrap();
        assert_eq!(ended.more, 0, "all are named");
        sorted(ended.locks)
    }

    pub(crate) async fn logs_out(&self, aid: &Aid) -> Vec<LockKey> {
        self.ends(aid, EndReason::LoggedOut).await
    }

    /// The lock ends in one of the [`WAYS`].
    pub(crate) async fn loses(&self, held: &Lock, id: &str, how: &str) {
        match how {
            "released" => drop(self.releases(held).await),
            "retracted" => drop(self.retracts(held).await),
            "broken" => drop(self.breaks(held).await),
            "released with all" => drop(self.releases_all(&held.aid).await),
            "ended" => drop(self.logs_out(&held.aid).await),
            _ => {
                self.age(id, TTL).await;
                self.sweeps().await;
            }
        }
        assert!(self.lock_on(id).await.is_none(), "{how}");
    }

    pub(crate) async fn sweeps(&self) -> Swept {
        self.sweep(&[COLLECTION], Uuid::new_v4(), 100, NONE).await.unwrap()
    }

    /// A sweep finds as many idle sessions.
    pub(crate) async fn finds_idle(&self, sessions: usize) -> Swept {
        let swept = self.sweeps().await;
        assert_eq!(swept.sessions, sessions, "idle sessions: {swept:?}");
        swept
    }

    /// A sweep finds no idle session, and there is nothing to announce.
    pub(crate) async fn finds_nobody_idle(&self) {
        let swept = self.finds_idle(0).await;
        assert_eq!((swept.announcements, swept.more), (false, false), "{swept:?}");
        assert_eq!(self.announced().await, []);
    }

    /// Takes all pending announcements, with their locks in order, and settles them.
    pub(crate) async fn announced(&self) -> Vec<SessionEnded> {
        let worker = Uuid::new_v4();
        let mut ended = self.take_ends(worker, 60 * TICK, 1_000).await.unwrap();
        self.told(worker, &ended).await.unwrap();
        ended.iter_mut().for_each(|it| it.locks.sort());
        ended
    }

    /// The only pending announcement: the end of this session, with these locks.
    pub(crate) async fn announces(&self, aid: &Aid, ids: &[&str]) -> SessionEnded {
        let mut ended = self.announced().await;
        assert_eq!(ended.len(), 1, "one end: {ended:?}");
        let ended = ended.remove(0);
        let locks: Vec<_> = ids.iter().map(|id| key(id)).collect();
        assert_eq!((&ended.aid, &ended.locks), (aid, &locks), "{ended:?}");
        ended
    }
}
