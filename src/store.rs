//! The contract between the manager and the place where locks and documents live.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use uuid::Uuid;

use crate::{
    ended::{EndReason, SessionEnded},
    error::StoreError,
    key::LockKey,
    lock::{Aid, Holder, Lock, LockToken, Mode, PageId, TabId},
};

mod deadline;
mod diff;
mod document;
mod erased;
mod memory;
#[cfg(feature = "_mongo")]
pub(crate) mod mongo;
mod status;
mod watch;

pub(crate) use deadline::with_deadline;
pub(crate) use document::misnamed_id;
pub use document::{Edit, Format, StoredDocument};
pub(crate) use erased::{Answer, DynStore};
pub use memory::MemoryStore;
#[cfg(feature = "test-util")]
pub use memory::OnRecord;
#[cfg(all(feature = "mongo-session", feature = "_mongo"))]
pub use mongo::sessions::StoredSession;
#[cfg(feature = "_mongo")]
pub use mongo::{Finding, MongoStore, Severity};
pub use status::{StoreStatus, Topology};
pub(crate) use status::{millis, millis_if_any};
pub use watch::{Change, Watch};

/// A place that keeps locks in the same database as the documents they guard.
///
/// [`MemoryStore`] is the reference: every store must behave as it does. Test a store of your own with
/// the suite of the feature `test-util` ([`conformance`](crate::conformance)).
///
/// # The contract
/// 1. **One verb is one atomic step**, and the store's own clock decides it. Two verbs at the same
///    moment have an order; no caller's clock is ever read.
/// 2. **A lock is live while `ts + ttl > now`**, with the ttl that its *holder* wrote. Every verb
///    treats an expired record as absent, even for the session that wrote it, whether or not the record
///    has been removed.
/// 3. **Contention is an answer; an outage is an error.** `Err` means only that the store does not know
///    the answer. [`Unavailable`](crate::StoreErrorKind::Unavailable) means that the verb may have been
///    carried out. The manager then calls it again with the same arguments, except that a repeated
///    claim carries the token of its [next attempt](LockToken::next_attempt).
/// 4. **Every verb is idempotent.** The token of [`try_acquire`](Store::try_acquire) is chosen before
///    the first call. A repeated call therefore recognises the grant to an earlier attempt of the [same
///    claim](LockToken::is_of_same_claim), and answers [`Granted`](TryAcquire::Granted) again. The only
///    exception is [`save`](Store::save), if the lock is lost between two calls. When the outcome of a
///    save is in doubt, the answer is [`OutcomeUnknown`](crate::StoreErrorKind::OutcomeUnknown), and
///    the save is not repeated.
/// 5. **A removal names the acquisition.** A late or repeated [`release`](Store::release) never removes
///    a newer lock, not even a newer lock of the same session.
/// 6. **The answer of a verb is durable**: no crash or failover that the store is built to survive
///    takes it back.
/// 7. **Futures run to completion.** The manager never drops one half-way, so a store need not be
///    cancel safe.
/// 8. **Locking does not touch the document.** Only [`save`](Store::save) changes it.
///
/// Two verbs take more than one step: [`end_session`](Store::end_session) and [`sweep`](Store::sweep).
/// Either may stop after any step; the same call by any worker then continues it:
///
/// - The end of a session is recorded *before* its locks are removed. A caller acquires its lock first
///   and asks [`session_ended`](Store::session_ended) second. Whichever comes first, the end or the
///   lock, no lock of an ended session remains.
/// - One worker claims an end, and stores the names of the locks with it *before* it removes them. The
///   end is therefore announced with all its locks: once, or at least once if the worker dies.
pub trait Store: Send + Sync + 'static {
    /// How this store wants documents encoded.
    fn format(&self) -> Format;

    /// Makes the collection ready: its lock collection, indexes, and the ttl for foreign records.
    ///
    /// Called once for each collection when an application server starts, before any other verb
    /// on it; again with another ttl after a change of configuration. Live locks are not harmed by
    /// a shorter ttl.
    fn prepare(
        &self,
        collection: &str,
        rules: &Rules,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Takes the lock, renews it if the session already holds it, or names the holder.
    ///
    /// If an earlier attempt of the [same claim](LockToken::is_of_same_claim) was granted, the answer
    /// is `Granted` again, under the token of that attempt.
    ///
    /// An exclusive lock excludes every other lock; a shared lock excludes exclusive ones. A claim of
    /// the mode [`Shared`](Mode::Shared) therefore joins the readers. Each reader has its own token,
    /// and its lock expires independently. If the session already holds the exclusive lock, the answer
    /// is [`AlreadyMine`](TryAcquire::AlreadyMine) with that lock. At most [`MAX_READERS`] read at the
    /// same time; the next reader is answered [`Held`](TryAcquire::Held). An exclusive claim by the
    /// only reader is an upgrade: a new grant with the claim's token, which replaces the shared lock.
    /// While there are other readers, the claim is answered `Held` and changes nothing.
    ///
    /// If an exclusive lock was granted to one [tab](Claim::tab), a claim from another tab of the same
    /// session leaves it unchanged. The answer is `AlreadyMine`, and the lock in it names the tab that
    /// holds it.
    ///
    /// `Held` names one lock that is in the way: of several readers, the one whose lock expires last.
    ///
    /// In a [fair](Rules::fair) collection no claim overtakes a waiter: while there are places in the
    /// queue, only the first waiter is let in, or several waiters if they are readers. A claim with
    /// [`place`](Claim::place) that is not granted gets a place under its [name](LockToken::of_place),
    /// in the order of the first attempts; a repetition keeps the place. The place lasts for the
    /// duration of the claim's `place`, and [`keep_places`](Store::keep_places) extends it. A grant
    /// removes it. If nobody holds the lock but other waiters are ahead of the claim, `Held` names the
    /// first of them, without a token, and with the time at which its place expires. Re-entry and
    /// upgrades do not queue.
    fn try_acquire(
        &self,
        key: &LockKey,
        claim: &Claim,
    ) -> impl Future<Output = Result<TryAcquire, StoreError>> + Send;

    /// Renews the lease of every live lock of these sessions, and returns the number of documents.
    ///
    /// Tokens stay the same. An expired lock is not revived.
    fn renew(
        &self,
        collection: &str,
        aids: &[Aid],
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Extends the [places](LockToken::of_place) with these names in the queue of a fair collection to
    /// `lease` from now, and returns how many of them still existed. One command per awaited document.
    fn keep_places(
        &self,
        key: &LockKey,
        tokens: &[LockToken],
        lease: Duration,
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Gives up the [place](LockToken::of_place) with this name in the queue of a fair collection.
    fn leave(
        &self,
        key: &LockKey,
        token: LockToken,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Removes this acquisition of the lock, and nothing else.
    ///
    /// `mode` is the mode of the grant, or [`Shared`](Mode::Shared) if the caller does not know it.
    fn release(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        mode: Mode,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send;

    /// Releases this acquisition of an exclusive lock and grants the claim in the same step. If the
    /// acquisition is no longer on record, returns `None` and changes nothing.
    ///
    /// A lock that is [taken over](Claim::taken) must be live. An expired lock is acquired instead,
    /// which leaves its former holder to the [sweep](Self::sweep).
    ///
    /// Only for a claim that has no waiter ahead of it: not in a [fair](Rules::fair) collection, unless
    /// the claim takes the lock over. A claim of the same session continues the lock: `since` stays.
    fn hand_over(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        claim: &Claim,
    ) -> impl Future<Output = Result<Option<Lock>, StoreError>> + Send;

    /// Makes this acquisition of an exclusive lock expire after `grace`, however often it is renewed,
    /// unless its session takes the lock again before then. For a page that was closed or is being
    /// reloaded: if `page` is given, only while the lock belongs to that page.
    ///
    /// As with `max_hold`, such an expiry does not mean that the session is idle.
    fn run_out_in(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        page: Option<PageId>,
        grace: Duration,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send;

    /// Removes the lock that any of these attempts of a claim acquired, unless another request has been
    /// told that the session holds it.
    ///
    /// For a grant that its request no longer wants. In the meantime another request of the same
    /// session may have been answered [`AlreadyMine`](TryAcquire::AlreadyMine), or may have saved. The
    /// lock then belongs to that request, and stays.
    fn retract(
        &self,
        key: &LockKey,
        aid: &Aid,
        tokens: &[LockToken],
        mode: Mode,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send;

    /// Removes all locks of the session in this collection, and returns the keys of those that were
    /// live. The session continues.
    fn release_session(
        &self,
        collection: &str,
        aid: &Aid,
    ) -> impl Future<Output = Result<Vec<LockKey>, StoreError>> + Send;

    /// Ends the session permanently: remembers the end for a day, removes all its locks in these
    /// collections, and stores an announcement. Returns the locks that the session held, and the locks
    /// that it lost while it was idle, if that loss was not announced yet.
    ///
    /// Only the first call ends the session; its time and reason stay. Later calls remove the locks
    /// that they still find. `worker` identifies this call, and stays the same when the call is
    /// repeated.
    fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        worker: Uuid,
    ) -> impl Future<Output = Result<Vec<LockKey>, StoreError>> + Send;

    /// How long ago the session was [ended](Self::end_session), or `None` if it was not.
    fn session_ended(
        &self,
        aid: &Aid,
    ) -> impl Future<Output = Result<Option<Duration>, StoreError>> + Send;

    /// Removes expired locks, oldest first, of about `limit` sessions.
    ///
    /// A session without a live lock in these collections has become idle. The sweep stores an
    /// announcement of it, with the reason [`Expired`](EndReason::Expired) and the names of the locks.
    /// An idle session has not ended permanently: it may come back and lock again, and become idle
    /// again. A lock that expired at its `max_hold` does not make its session idle. The same goes for a
    /// lock that a foreign program wrote, which the sweep leaves where it is.
    ///
    /// If another session has taken over an expired lock, the former holder is treated as if the lock
    /// were still there.
    ///
    /// Also completes the work that another worker left half done.
    fn sweep(
        &self,
        collections: &[&str],
        worker: Uuid,
        limit: usize,
    ) -> impl Future<Output = Result<Swept, StoreError>> + Send;

    /// Returns at most `limit` ends that are not announced yet. For the time of `lease` no other worker
    /// gets them; after that they count as [repeated](SessionEnded::repeated).
    fn take_announcements(
        &self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<SessionEnded>, StoreError>> + Send;

    /// Marks these ends as announced, if they still belong to this worker.
    fn announced(
        &self,
        worker: Uuid,
        ended: &[SessionEnded],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The live lock on this document, if there is one. Of several readers: the lock of `aid`, or else
    /// the one that expires last. Reads only majority-committed state: if a failover could still undo
    /// the lock or its renewal, the answer is [`Unavailable`](crate::StoreErrorKind::Unavailable),
    /// neither live nor gone.
    fn inspect(
        &self,
        key: &LockKey,
        aid: Option<&Aid>,
    ) -> impl Future<Output = Result<Option<Lock>, StoreError>> + Send;

    /// The live locks on at most `limit` documents of the collection. If `aids` are given: only the
    /// locks of these sessions, and only from majority-committed state, as in
    /// [`inspect`](Self::inspect). Each reader has an entry of its own.
    fn list(
        &self,
        collection: &str,
        aids: Option<&[Aid]>,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<Lock>, StoreError>> + Send;

    /// All live locks on these documents of a collection: for each document the exclusive lock, or the
    /// locks of its readers.
    fn locks_on(
        &self,
        collection: &str,
        keys: &[LockKey],
    ) -> impl Future<Output = Result<Vec<Lock>, StoreError>> + Send;

    /// How the session last ended or became idle, if the store still remembers it.
    fn last_end(
        &self,
        aid: &Aid,
    ) -> impl Future<Output = Result<Option<LastEnd>, StoreError>> + Send;

    /// Reports changes from now on, above all documents that become free. Returns `None` if this store
    /// cannot; the caller must then poll.
    ///
    /// Every change after this call has returned is reported, or [`Missed`](Change::Missed) is. The
    /// expiry of a lock need not be reported. Other changes may be reported as well: a subscriber looks
    /// at the lock after each report.
    fn watch(
        &self,
        collection: &str,
        interest: Interest,
    ) -> impl Future<Output = Result<Option<Watch>, StoreError>> + Send;

    /// The state of the store at this moment, with the missing indexes of these collections, which must
    /// be prepared. Changes nothing. If the store takes no writes, that is an answer; `Err` means that
    /// no server answers.
    fn status(
        &self,
        collections: &[&str],
    ) -> impl Future<Output = Result<StoreStatus, StoreError>> + Send;

    /// Removes exactly this lock for somebody who is not its holder, foreign locks included. Watchers
    /// learn who broke it, unless it is a foreign or a shared lock.
    fn break_lock(
        &self,
        seen: &Lock,
        taken: &Taken,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send;

    /// Whether the document exists.
    fn exists(&self, key: &LockKey) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The document as it is now.
    fn load(
        &self,
        key: &LockKey,
    ) -> impl Future<Output = Result<Option<StoredDocument>, StoreError>> + Send;

    /// Edits the document if this acquisition of its lock is live, and renews the lock. An edit without
    /// changes only renews the lock.
    ///
    /// After `until` the caller has been told that the outcome is unknown, and may have saved something
    /// newer. A save that is delayed on its way therefore gives up by then. If a newer save can
    /// overtake it even later, as between the last check and the commit, the older save must fail.
    fn save(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        edit: &Edit,
        until: Instant,
    ) -> impl Future<Output = Result<Saved, StoreError>> + Send;
}

/// A claim on a lock, with all that the store needs to grant it.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The session that is to hold the lock.
    pub aid: Aid,
    /// The name of this acquisition, chosen before the first attempt. Each repetition carries the [next
    /// token](LockToken::next_attempt). The store can thus recognise the same claim, and can tell a
    /// late attempt from the one that was granted.
    pub token: LockToken,
    /// The tab of the session that claims the lock, stored with the lock.
    pub tab: Option<TabId>,
    /// The page that claims the lock, stored with it too. Re-entry replaces it with the newer page.
    pub page: Option<PageId>,
    /// The holder as others see it.
    pub holder: Holder,
    /// By whom and why a lock is taken over, in a [`hand_over`](Store::hand_over) that the holder did
    /// not ask for. Watchers are told.
    pub taken: Option<Taken>,
    /// Exclusive or shared.
    pub mode: Mode,
    /// How long the lock outlives the last sign of life of its session.
    pub ttl: Duration,
    /// How long after the grant the lock expires, however often it is renewed.
    pub max_hold: Option<Duration>,
    /// How long to keep a place in the queue of a [fair](Rules::fair) collection if the claim is not
    /// granted. `None` if the claim does not wait.
    pub place: Option<Duration>,
}

/// By whom and why a lock was taken from its holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// By whom: a label to show.
    pub by: String,
    /// Why, in their words.
    pub reason: String,
}

/// How a session last ended, as [`Store::last_end`] returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastEnd {
    /// [`Expired`](EndReason::Expired) if the session only became idle.
    pub reason: EndReason,
    /// How long ago.
    pub ago: Duration,
}

/// Which changes of a collection a subscriber wants to hear of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Changes that may let a waiter in.
    Freed,
    /// Also grants, and locks that were [taken](Taken) from their holders. No renewals.
    All,
}

/// How many sessions may hold a shared lock on one document at the same time.
pub const MAX_READERS: usize = 1_000;

/// How the locks of a collection behave. All servers of a cluster must agree on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rules {
    /// The ttl of a lock that has none of its own, such as the lock of a foreign program. Also the
    /// longest ttl that this crate writes.
    pub ttl: Duration,
    /// Each grant carries a [`FencingToken`](crate::FencingToken), higher than that of any earlier
    /// grant on the same document. The record therefore stays when its lock is gone.
    pub fenced: bool,
    /// Waiters are let in in the order of arrival, over all servers.
    pub fair: bool,
    /// The ids may be strings. A store then refuses a collection in which different strings are the
    /// same id.
    pub text_ids: bool,
}

impl Rules {
    /// Not fenced, not fair, and without string ids.
    #[must_use]
    pub fn new(ttl: Duration) -> Self {
        Self { ttl, fenced: false, fair: false, text_ids: false }
    }

    /// With ids that may be strings.
    #[must_use]
    pub fn with_text_ids(mut self) -> Self {
        self.text_ids = true;
        self
    }

    /// With fencing tokens.
    #[must_use]
    pub fn fenced(mut self) -> Self {
        self.fenced = true;
        self
    }

    /// First come, first served.
    #[must_use]
    pub fn fair(mut self) -> Self {
        self.fair = true;
        self
    }
}

/// The answer to [`Store::try_acquire`]. Exhaustive, as the other answers are: the caller must handle
/// each case.
#[derive(Debug, Clone)]
#[must_use = "a lock may have been granted, and must then be released"]
pub enum TryAcquire {
    /// Granted: the document was free, or the lock on it had expired. Carries the claim's token, or the
    /// token of an earlier attempt of the claim.
    Granted(Lock),
    /// The session holds it already. It was renewed, and keeps its token.
    AlreadyMine(Lock),
    /// Another session holds it, or is ahead in the queue.
    Held(Lock),
}

/// The answer to [`Store::release`], [`Store::retract`] and [`Store::break_lock`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The lock was there, and is now removed.
    Released,
    /// There was no such lock to remove. Just as good.
    AlreadyGone,
}

/// The answer to [`Store::save`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the document may not have been written"]
pub enum Saved {
    /// Written.
    Saved,
    /// This acquisition is no longer live. Nothing was written.
    Lost,
    /// The lock is live, but the document no longer exists. Nothing was written.
    DocumentGone,
}

/// The answer to [`Store::sweep`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Swept {
    /// How many sessions were found to be idle.
    pub sessions: usize,
    /// The sweep reached its limit: sweep again.
    pub more: bool,
    /// Some ends wait to be announced.
    pub announcements: bool,
    /// How long until the first live lock can expire. `None` if there is no lock.
    pub next: Option<Duration>,
}
