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

/// A place that keeps locks beside the documents they guard.
///
/// [`MemoryStore`] is the reference: what it does is what every store must do. A store of your own
/// proves itself with the suite of the feature `test-util` ([`conformance`](crate::conformance)).
///
/// # The contract
/// 1. **One verb is one atomic step**, and the store's own clock decides it. Two verbs at the same
///    moment have an order; no caller's clock is read, ever.
/// 2. **A lock is live while `ts + ttl > now`**, with the ttl that its *holder* wrote. A record that
///    has run out counts as absent in every verb, also for the one who wrote it, whether or not it
///    has been removed yet.
/// 3. **Contention is an answer, outage is an error.** `Err` says only that the store could not
///    tell. [`Unavailable`](crate::StoreErrorKind::Unavailable) means that the verb may have been
///    carried out; the manager then calls it again with the same arguments, but for the token of a claim,
///    which is that of its [next attempt](LockToken::next_attempt).
/// 4. **Every verb is idempotent.** [`try_acquire`](Store::try_acquire) is, because its token was
///    chosen before the first call: a second one finds what an attempt of the
///    [same claim](LockToken::is_of_same_claim) was granted, and says [`Granted`](TryAcquire::Granted) again. Only [`save`](Store::save) is not, should the lock be
///    lost in between; where its outcome is in doubt it says
///    [`OutcomeUnknown`](crate::StoreErrorKind::OutcomeUnknown) and is not repeated.
/// 5. **A removal names the acquisition.** A late or repeated [`release`](Store::release) never
///    removes a newer lock, not even one of the same session.
/// 6. **What a verb has answered is durable**: no crash or fail-over that the store is built to
///    survive takes it back.
/// 7. **Futures run to their end.** The manager never drops one half-way, so a store need not be
///    cancel safe.
/// 8. **Locking does not touch the document.** Only [`save`](Store::save) changes it.
///
/// Two verbs are more than one step, [`end_session`](Store::end_session) and [`sweep`](Store::sweep).
/// Both may stop after any step, and be gone on with by the same call of any worker:
///
/// - The end of a session is remembered *before* its locks are removed. Who acquires locks first and
///   asks [`session_ended`](Store::session_ended) second. So whichever comes first, no lock of an
///   ended session stays.
/// - An end is claimed by one worker, and the names of the locks are kept with it *before* they are
///   removed. So it is announced once, and at least once if the worker dies, with all its locks.
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

    /// Takes the lock, renews it if the session already holds it, or says who does.
    ///
    /// What an earlier attempt of the [same claim](LockToken::is_of_same_claim) was granted is `Granted`
    /// again, under that attempt's token.
    ///
    /// An exclusive lock excludes everybody else; shared ones exclude exclusive ones. So a claim of
    /// the mode [`Shared`](Mode::Shared) joins the readers, of whom each has its own token and runs
    /// out for itself; or is answered [`AlreadyMine`](TryAcquire::AlreadyMine) with the exclusive lock
    /// if the session holds that. At most [`MAX_READERS`] are in at the same time, the next one is
    /// answered [`Held`](TryAcquire::Held). An exclusive claim of the only reader is an upgrade: a new
    /// grant with the claim's token, and the shared lock is gone with it. Beside other readers it is
    /// `Held` and changes nothing.
    ///
    /// An exclusive lock that was granted to one [tab](Claim::tab) is left as it is by a claim from
    /// another tab of its session, which is answered `AlreadyMine` and sees the tab in it.
    ///
    /// `Held` names somebody who is in the way: of several readers the one who runs out last.
    ///
    /// In a [fair](Rules::fair) collection nobody is granted what others wait for: while places are
    /// kept in the queue, only the first of them is let in, or several if they are readers. A claim
    /// with [`place`](Claim::place) that is not granted has a place from then on, by its
    /// [name](LockToken::of_place), in the order of the first attempts; a repetition keeps it. It lasts for that duration, or longer
    /// by [`keep_places`](Store::keep_places). With a grant it is gone. Where nobody holds the lock
    /// but others are before the claim, `Held` names the first of them, without a token, and as
    /// running out when the place does. Re-entry and upgrades do not queue.
    fn try_acquire(
        &self,
        key: &LockKey,
        claim: &Claim,
    ) -> impl Future<Output = Result<TryAcquire, StoreError>> + Send;

    /// Starts the lease of all live locks of these sessions anew, and counts the documents.
    ///
    /// Tokens stay. What has run out is not revived.
    fn renew(
        &self,
        collection: &str,
        aids: &[Aid],
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Keeps the [places](LockToken::of_place) of these names in the queue of a fair collection for so long
    /// from now, and counts those that were still there. It is one of one document that is waited for.
    fn keep_places(
        &self,
        key: &LockKey,
        tokens: &[LockToken],
        lease: Duration,
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Gives the [place](LockToken::of_place) of this name in the queue of a fair collection up.
    fn leave(
        &self,
        key: &LockKey,
        token: LockToken,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Removes this acquisition of the lock, and nothing else.
    ///
    /// `mode` is the one in which it was granted, or [`Shared`](Mode::Shared) if that is not known.
    fn release(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        mode: Mode,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send;

    /// Releases this acquisition of an exclusive lock by granting the claim in the same step. `None`, and
    /// nothing is changed, if the acquisition is not on record any more.
    ///
    /// A lock that is [taken over](Claim::taken) must be live: an expired one is acquired instead, which leaves
    /// its holder to the [sweep](Self::sweep).
    ///
    /// Only for a claim that nobody has come before: not in a [fair](Rules::fair) collection, unless it
    /// takes the lock over. A claim of the same session goes on with the lock: `since` stays.
    fn hand_over(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        claim: &Claim,
    ) -> impl Future<Output = Result<Option<Lock>, StoreError>> + Send;

    /// Has this acquisition of an exclusive lock run out after `grace`, however often it is renewed,
    /// unless its session takes it again before. For a page that was closed, or is loading anew: if
    /// `page` is given, only while the lock is that one's.
    ///
    /// As with `max_hold`, that says nothing about its session.
    fn run_out_in(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        page: Option<PageId>,
        grace: Duration,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send;

    /// Removes the acquisition of the lock by any of these attempts of a claim, if nobody but that claim was
    /// told that it is held.
    ///
    /// For a grant that its request does not want after all. Another request of the same session may
    /// have been answered [`AlreadyMine`](TryAcquire::AlreadyMine) in the meantime, or have saved:
    /// then the lock is that one's, and stays.
    fn retract(
        &self,
        key: &LockKey,
        aid: &Aid,
        tokens: &[LockToken],
        mode: Mode,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send;

    /// Removes all locks of the session in this collection, and names those that were live. The
    /// session goes on.
    fn release_session(
        &self,
        collection: &str,
        aid: &Aid,
    ) -> impl Future<Output = Result<Vec<LockKey>, StoreError>> + Send;

    /// Ends the session for good: remembers that for a day, removes all its locks in these
    /// collections, and keeps an announcement of it. Names what it held, with what it lost by a
    /// silence that was not announced yet.
    ///
    /// Only the first call makes an end; its moment and reason stay. Later ones remove what they
    /// still find. `worker` names this call, and is the same in its repetitions.
    fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        worker: Uuid,
    ) -> impl Future<Output = Result<Vec<LockKey>, StoreError>> + Send;

    /// How long ago the session was [ended](Self::end_session), if it was.
    fn session_ended(
        &self,
        aid: &Aid,
    ) -> impl Future<Output = Result<Option<Duration>, StoreError>> + Send;

    /// Removes locks that have run out, oldest first, of about `limit` sessions.
    ///
    /// A session that has no live lock left in these collections has fallen silent: of that an
    /// announcement is kept, with the reason [`Expired`](EndReason::Expired) and the names of the
    /// locks. It is not ended for good: should it come back, it may lock again, and fall silent again.
    /// A lock that ran into its `max_hold` says nothing about its session; nor does one that was
    /// written by a foreign program, which stays.
    ///
    /// A session whose expired lock somebody else has taken over counts as if the lock were still there.
    ///
    /// Also brings to its end what another worker left half-done.
    fn sweep(
        &self,
        collections: &[&str],
        worker: Uuid,
        limit: usize,
    ) -> impl Future<Output = Result<Swept, StoreError>> + Send;

    /// At most `limit` ends that nobody has announced. For the time of `lease` no other worker gets
    /// them; after that they count as [repeated](SessionEnded::repeated).
    fn take_announcements(
        &self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<SessionEnded>, StoreError>> + Send;

    /// These ends have been announced, if this worker still has them.
    fn announced(
        &self,
        worker: Uuid,
        ended: &[SessionEnded],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The live lock on this document, if there is one: of several readers that of `aid`, else of the
    /// one who runs out last. As what can be relied upon: a lock or a lease that a fail-over may undo is
    /// [unavailable](crate::StoreErrorKind::Unavailable), neither live nor gone.
    fn inspect(
        &self,
        key: &LockKey,
        aid: Option<&Aid>,
    ) -> impl Future<Output = Result<Option<Lock>, StoreError>> + Send;

    /// The live locks on at most `limit` documents of the collection, only those of these sessions if
    /// `aids` are given; those as what can be relied upon, too. Each reader's is one.
    fn list(
        &self,
        collection: &str,
        aids: Option<&[Aid]>,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<Lock>, StoreError>> + Send;

    /// All live locks on these documents of a collection: of each document the exclusive one, or those of
    /// its readers.
    fn locks_on(
        &self,
        collection: &str,
        keys: &[LockKey],
    ) -> impl Future<Output = Result<Vec<Lock>, StoreError>> + Send;

    /// How the session last ended, or fell silent, as far as that is remembered.
    fn last_end(
        &self,
        aid: &Aid,
    ) -> impl Future<Output = Result<Option<LastEnd>, StoreError>> + Send;

    /// Tells of changes from now on, of documents that become free above all. `None` if this store
    /// cannot: then one must ask again and again.
    ///
    /// What happens after this has returned is told, or [`Missed`](Change::Missed) is. It need not be
    /// told that a lock has run out. Other changes may be told as well: whoever hears of one looks.
    fn watch(
        &self,
        collection: &str,
        interest: Interest,
    ) -> impl Future<Output = Result<Option<Watch>, StoreError>> + Send;

    /// How it is doing at the moment, with the indexes of these collections, which are prepared. Changes
    /// nothing. That it takes no writes is an answer; `Err` if nobody says anything.
    fn status(
        &self,
        collections: &[&str],
    ) -> impl Future<Output = Result<StoreStatus, StoreError>> + Send;

    /// Removes exactly this lock for somebody who is not its holder, foreign locks included. Whoever
    /// watches is told by whom, unless it is a foreign or a shared one.
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
    /// After `until` the caller has been told that the outcome is unknown, and may have saved
    /// something newer. So a save that is held up on its way gives up by then; if it can be overtaken
    /// even later, as between the last check and the commit, it must be what fails.
    fn save(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        edit: &Edit,
        until: Instant,
    ) -> impl Future<Output = Result<Saved, StoreError>> + Send;
}

/// What somebody who wants a lock brings along.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The session that is to hold it.
    pub aid: Aid,
    /// The name of this acquisition, chosen before the first attempt. Each repetition has the
    /// [next one](LockToken::next_attempt), so that the store knows it for the same claim, and a late one
    /// from what was granted.
    pub token: LockToken,
    /// The tab of the session that wants it, to be kept with the lock.
    pub tab: Option<TabId>,
    /// Its page, kept likewise; re-entry puts the newer one there.
    pub page: Option<PageId>,
    /// Who is shown.
    pub holder: Holder,
    /// Whose lock it takes, and by whose word, in a [`hand_over`](Store::hand_over) that the holder
    /// did not ask for. Whoever watches is told.
    pub taken: Option<Taken>,
    /// How much it is to exclude.
    pub mode: Mode,
    /// How long the lock outlives the last sign of life of its session.
    pub ttl: Duration,
    /// How long after it was granted the lock runs out, however often it is renewed.
    pub max_hold: Option<Duration>,
    /// How long to keep a place in the queue of a [fair](Rules::fair) collection, if it is not
    /// granted. `None` for one who does not wait.
    pub place: Option<Duration>,
}

/// That a lock was taken from its holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// By whom: a label to be shown.
    pub by: String,
    /// Why, in their words.
    pub reason: String,
}

/// How a session last ended, as [`Store::last_end`] tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastEnd {
    /// [`Expired`](EndReason::Expired) if it only fell silent.
    pub reason: EndReason,
    /// How long ago.
    pub ago: Duration,
}

/// What of a collection's changes somebody wants to hear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// What lets somebody in.
    Freed,
    /// Grants as well, and what was [taken](Taken) from its holder. Not renewals.
    All,
}

/// How many may hold a shared lock on one document at the same time.
pub const MAX_READERS: usize = 1_000;

/// How the locks of a collection behave. All servers of a cluster must agree on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rules {
    /// How long a lock lives that does not say so itself, as that of a foreign program. The longest
    /// ttl of our own.
    pub ttl: Duration,
    /// Each grant carries a [`FencingToken`](crate::FencingToken), higher than that of any earlier
    /// grant on the same document. For that a record stays when its lock is gone.
    pub fenced: bool,
    /// Who waits is let in in the order of arrival, over all servers.
    pub fair: bool,
    /// The ids may be strings. Then a store refuses a collection that takes different strings for one.
    pub text_ids: bool,
}

impl Rules {
    /// Neither fenced nor fair, and with ids that are no strings.
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

/// The answer to [`Store::try_acquire`]. Exhaustive, as the other answers are: whoever asks must
/// have thought of each.
#[derive(Debug, Clone)]
#[must_use = "a lock may have been granted, and must then be released"]
pub enum TryAcquire {
    /// Granted anew: the document was free, or the lock on it had run out. Carries the claim's token, or
    /// that of an earlier attempt of it.
    Granted(Lock),
    /// The session holds it already; renewed, with the token it has had.
    AlreadyMine(Lock),
    /// Somebody else holds it.
    Held(Lock),
}

/// The answer to [`Store::release`], [`Store::retract`] and [`Store::break_lock`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// It was there, and is not any more.
    Released,
    /// There was nothing of that kind to remove; as good.
    AlreadyGone,
}

/// The answer to [`Store::save`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the document may not have been written"]
pub enum Saved {
    /// Written.
    Saved,
    /// This acquisition is not live any more. Nothing was written.
    Lost,
    /// The lock is live, but the document does not exist any more. Nothing was written.
    DocumentGone,
}

/// The answer to [`Store::sweep`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Swept {
    /// How many sessions were found to have fallen silent.
    pub sessions: usize,
    /// There was more than the limit allowed: sweep again.
    pub more: bool,
    /// Some ends wait to be announced.
    pub announcements: bool,
    /// How long until the oldest live lock can run out. `None` if there is no lock.
    pub next: Option<Duration>,
}
