//! The contract between the manager and the place where locks and documents live: four traits.
//!
//! | trait | purpose | without it |
//! |---|---|---|
//! | [`Locks`] | grants, renews and releases locks | – |
//! | [`Documents`] | loads documents, and saves them under their locks | no extractors: locks only |
//! | [`Sessions`] | remembers the ends of sessions, and keeps the news for listeners | a session that ends releases its locks, and nobody is told |
//! | [`Servers`] | freezes, and notes of the servers for each other | no freezes |
//!
//! Only five verbs are required: those of [`Locks`] without a body. Every other verb has a default, which does
//! without the ability or refuses. A store says [what it can do](Locks::can), and the conformance suite checks that.

use std::{
    future::Future,
    slice,
    time::{Duration, Instant},
};

use uuid::Uuid;

use crate::{
    ended::EndReason,
    error::{StoreError, StoreErrorKind},
    freeze::{Freeze, NewFreeze, Scope},
    key::LockKey,
    lock::{Aid, Answer, Ask, Lock},
    takeover::Takeover,
};

mod answer;
mod claim;
#[doc(hidden)]
pub mod end_state;
mod fair;
#[doc(hidden)]
pub mod lock_rules;
mod memory;
mod outbox;
mod pattern;
mod settings;
mod status;
mod watch;

pub use answer::{
    Answered, Asked, Confirmed, Ended, Frozen, HandedOver, LastEnd, Released, Renewed, Saved,
    Swept, TryAcquire,
};
pub use claim::{Acquisition, Active, Claim, NamedBy, Query, Removal};
#[doc(inline)]
pub use doclock_document::{Changes, Content, Edit, Format, Original, StoredDocument};
pub use fair::{Place, Ticket, Turn, Waiters};
pub use memory::MemoryStore;
#[cfg(feature = "_simulation")]
pub use memory::OnRecord;
pub use outbox::{News, NewsId, Outbox, Settled};
pub use pattern::Pattern;
pub use settings::{DEFAULT_TTL, MAX_READERS, Rules, TTL_RANGE};
pub use status::{Fleet, StoreStatus, Topology};
pub use watch::{Change, Watch, Written};

#[cfg(feature = "_simulation")]
pub use crate::random::seed_randomness;

pub use crate::{
    lock::PageId,
    server::{Flags, ServerNote},
    takeover::{TakenBy, TakeoverKind},
};

/// Keeps locks, documents, sessions and servers for a `LockManager`. Implemented for every type
/// that has the four traits. Each of them except [`Locks`] may be empty.
///
/// [`MemoryStore`] is the reference: every store must behave as it does. Test a store of your own with
/// the suite of the crate `doclock-conformance`.
///
/// # The contract
/// 1. **One verb is one atomic step**, and the store's own clock decides it. Two verbs at the same
///    moment have an order; no caller's clock is ever read.
/// 2. **A lock is live while `ts + ttl > now`**, with the ttl that its *holder* wrote. Every verb
///    treats an expired record as absent, even for the session that wrote it, whether or not the record
///    has been removed.
/// 3. **Contention is an answer; an outage is an error.** `Err` means only that the store does not know
///    the answer. [`Unavailable`](StoreErrorKind::Unavailable) means that the verb may have been
///    carried out. The manager then calls it again with the same arguments, except that a repeated
///    claim carries the token of its [next attempt](crate::LockToken::next_attempt).
///    [`Overloaded`](StoreErrorKind::Overloaded) means that the verb was not and will not be carried out.
/// 4. **Every verb is idempotent.** The token of [`try_acquire`](Locks::try_acquire) is chosen before
///    the first call. A repeated call therefore recognises the grant to an earlier attempt of the [same
///    claim](crate::LockToken::is_of_same_claim), and answers [`Granted`](TryAcquire::Granted) again. The only
///    exception is [`save`](Documents::save), if the lock is lost between two calls. When the outcome of a
///    save is in doubt, the answer is [`OutcomeUnknown`](StoreErrorKind::OutcomeUnknown), and
///    the save is not repeated.
/// 5. **A removal names the acquisition.** A late or repeated [`remove_lock`](Locks::remove_lock) never removes
///    a newer lock, not even a newer lock of the same session.
/// 6. **The answer of a verb is durable**: no crash or failover that the store is built to survive
///    takes it back.
/// 7. **Futures run to completion.** The manager never drops one half-way, so a store need not be
///    cancel safe.
/// 8. **Locking does not touch the document.** Only [`save`](Documents::save) changes it.
/// 9. **The [deadline](Deadline)** of a verb is the moment at which its caller stops waiting for this and all
///    repeated attempts. A store passes it on to its server, so that no work is done that nobody waits for. The
///    deadline decides nothing else, except for a [save](Documents::save).
pub trait Store: Locks + Documents + Sessions + Servers {}

impl<S: Locks + Documents + Sessions + Servers> Store for S {}

/// The answer of a verb, or why the store does not know it.
pub type StoreResult<T> = Result<T, StoreError>;

/// A call of a verb: an `async fn` that returns a [`StoreResult`].
pub trait Verb<T>: Future<Output = StoreResult<T>> + Send {}

impl<T, F: Future<Output = StoreResult<T>> + Send> Verb<T> for F {}

/// The moment when the caller of a verb stops waiting for the answer, all repeated attempts included. A caller with a
/// deadline repeats an attempt that has failed; a caller without one does not.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    asked_and_at: Option<(Instant, Instant)>,
}

impl Deadline {
    /// The caller waits for the one attempt, however long it takes.
    pub const NONE: Self = Self { asked_and_at: None };

    /// The caller begins to wait now, and stops at this moment.
    #[must_use]
    pub fn at(moment: Instant) -> Self {
        Self { asked_and_at: Some((Instant::now(), moment)) }
    }

    /// The moment, if there is one.
    #[must_use]
    pub fn moment(self) -> Option<Instant> {
        self.asked_and_at.map(|(_, at)| at)
    }

    /// How long the caller has waited so far.
    #[must_use]
    pub fn waited(self) -> Duration {
        self.asked_and_at.map_or(Duration::ZERO, |(asked, _)| asked.elapsed())
    }
}

/// The four traits and the deadline, to call the verbs of a store: `use actix_doclock::store::verbs::*;`.
pub mod verbs {
    pub use super::{Deadline, Documents, Locks, Servers, Sessions};
}

/// An ability of a store beyond the required verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ability {
    /// Releases a lock and grants it to a waiter in one step: [`Locks::hand_over`].
    HandOver,
    /// Collections that are [fair](Rules::fair): [`Locks::set_place`].
    Fair,
    /// Collections that are [fenced](Rules::fenced): each grant has a higher token.
    Fenced,
    /// The locks of closed pages expire early: [`Locks::expire_in`].
    Pages,
    /// Keeps asks for locks: [`Locks::ask`].
    Asks,
    /// Confirms a lock by one read: [`Locks::confirm`].
    Confirm,
    /// Reports changes: [`Locks::watch`].
    Watch,
    /// Knows which collections exist: [`Locks::collections`].
    Collections,
    /// [`Documents`].
    Documents,
    /// [`Sessions`].
    Sessions,
    /// [`Servers`].
    Servers,
}

/// Locks, their holders and their leases.
pub trait Locks: Send + Sync + 'static {
    /// Makes the collection ready: its lock collection, indexes, and the ttl for foreign records.
    ///
    /// Called once for each collection when an application server starts, before any other verb
    /// on it; again with another ttl after a change of configuration. Live locks are not harmed by
    /// a shorter ttl.
    fn prepare(&self, collection: &str, rules: &Rules, until: Deadline) -> impl Verb<()>;

    /// Takes the lock, renews it if the session already holds it, or names the holder.
    ///
    /// If an earlier attempt of the [same claim](crate::LockToken::is_of_same_claim) was granted, the answer
    /// is `Granted` again, under the token of that attempt.
    ///
    /// An exclusive lock excludes every other lock; a shared lock excludes exclusive ones. A claim of
    /// the mode [`Shared`](crate::Mode::Shared) therefore joins the readers. Each reader has its own token,
    /// and its lock expires independently. If the session already holds the exclusive lock, the answer
    /// is [`AlreadyMine`](TryAcquire::AlreadyMine) with that lock. At most [`MAX_READERS`] read at the
    /// same time; the next reader is answered [`Held`](TryAcquire::Held). An exclusive claim by the
    /// only reader is an upgrade: a new grant with the claim's token, which replaces the shared lock.
    /// While there are other readers, the claim is answered `Held` and changes nothing. If the claim [names the shared
    /// lock](Claim::upgrades) and that lock is no longer live, the answer is [`Lost`](TryAcquire::Lost), also if the
    /// document is free or the session has another lock on it. Only a repetition of the claim finds its own grant
    /// instead.
    ///
    /// If an exclusive lock was granted to one [tab](Claim::tab), a claim from another tab of the same
    /// session leaves it unchanged. The answer is `AlreadyMine`, and the lock in it names the tab that
    /// holds it.
    ///
    /// `Held` names one lock that is in the way: of several readers, the one whose lock expires last.
    ///
    /// In a [fair](Rules::fair) collection no claim overtakes a waiter. The store refuses a claim while another
    /// server has a waiter with a lower [ticket](Ticket) in the queue; it refuses a shared claim only if that waiter
    /// is a writer. A claim without a [turn](Claim::turn) comes after all waiters, except a waiter of its own session.
    /// If nobody holds the lock but other waiters are ahead of the claim, `Held` names the first of
    /// them, without a token, and with the time at which the place of its server expires. Re-entry and
    /// upgrades do not queue. A claim that is not refused sets the place of its server to the [others](Turn::others).
    fn try_acquire(&self, key: &LockKey, claim: &Claim, until: Deadline) -> impl Verb<TryAcquire>;

    /// Renews the leases of these sessions, for at least `ttl`, and returns the number of documents. It renews every
    /// live lock that a session has taken without a tab, every shared lock, and the locks of tabs that are
    /// [named](Active::named).
    ///
    /// A lock with a longer ttl keeps it. A shorter ttl is raised to `ttl`: such a lock was granted under an older setting.
    /// No renewal extends a lock beyond the end of its [`max_hold`](Claim::max_hold) or of a
    /// [grace period](Self::expire_in). Tokens stay the same. An expired lock is not revived.
    ///
    /// If some locks cannot be renewed in time, the answer names their sessions as [late](Renewed::late), and all locks of
    /// the other sessions are renewed. If `active` is one session, all of its locks are renewed, except those that are
    /// blocked.
    fn renew(
        &self,
        collection: &str,
        active: &[Active],
        ttl: Duration,
        until: Deadline,
    ) -> impl Verb<Renewed>;

    /// Removes one lock, if the condition of the [removal](Removal) holds, and nothing else.
    fn remove_lock(&self, removal: Removal<'_>, until: Deadline) -> impl Verb<Released>;

    /// The live locks that the query asks for, on at most `limit` documents of the collection. Each reader
    /// has an entry of its own.
    ///
    /// Reads only majority-committed state. If a failover could still undo a lock or its renewal, the
    /// lock is neither live nor gone: the answer is
    /// [`Unavailable`](StoreErrorKind::Unavailable), except to [`Query::All`], which leaves such
    /// a lock out.
    fn locks(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
        until: Deadline,
    ) -> impl Verb<Vec<Lock>>;

    // What follows is optional.

    /// True if the store has this ability. By default it has none.
    fn can(&self, _ability: Ability) -> bool {
        false
    }

    /// Releases this acquisition of an exclusive lock and grants the claim in the same step.
    ///
    /// If a lock that is to be [taken over](Claim::taken) has expired, the answer is
    /// [`AlreadyGone`](HandedOver::AlreadyGone): the caller then acquires the lock, which leaves the former holder to
    /// the [sweep](Sessions::sweep). A holder may hand its own lock over even when that has expired.
    ///
    /// If the claim has a [turn](Claim::turn) and a waiter of another server is ahead of it, this verb only releases
    /// the lock. A claim that takes the lock over has no turn. A claim of the same session
    /// continues the lock: `since` stays, and so does the date from which `max_hold` counts.
    ///
    /// By default the lock is only released, and the waiter has to ask for it. Then no lock can be taken over: the
    /// answer to a claim that tries is [`AlreadyGone`](HandedOver::AlreadyGone).
    fn hand_over(
        &self,
        from: &Acquisition,
        claim: &Claim,
        until: Deadline,
    ) -> impl Verb<HandedOver> {
        async move {
            if claim.taken.is_some() {
                return Ok(HandedOver::AlreadyGone);
            }
            Ok(match self.remove_lock(Removal::Release(from), until).await? {
                Released::Released => HandedOver::Released,
                Released::AlreadyGone => HandedOver::AlreadyGone,
            })
        }
    }

    /// The live lock of this session on the document, and, if `load` is true, the document, by one read of durable
    /// state. The lock is read first, so that nobody else can have saved between the two. Changes nothing. `None` if
    /// the session has no such lock, or if one read does not tell.
    ///
    /// By default `None`: the caller then uses other verbs, which cost more.
    fn confirm(
        &self,
        _key: &LockKey,
        _aid: &Aid,
        _load: bool,
        _until: Deadline,
    ) -> impl Verb<Option<Confirmed>> {
        async { Ok(None) }
    }

    /// Removes all locks of the session in this collection, including expired ones, and returns the keys of the live
    /// ones. The session continues. By default this is one removal for each live lock. A store with [`Sessions`]
    /// implements this verb itself, so that no sweep reports a session as idle after it has given its locks back.
    fn release_all(&self, collection: &str, aid: &Aid, until: Deadline) -> impl Verb<Vec<LockKey>> {
        async move {
            let of = Query::Of(slice::from_ref(aid));
            let held = self.locks(collection, of, usize::MAX, until).await?;
            for acquisition in held.iter().filter_map(Acquisition::of) {
                self.remove_lock(Removal::Release(&acquisition), until).await?;
            }
            Ok(held.into_iter().map(|lock| lock.key).collect())
        }
    }

    /// Makes this acquisition of an exclusive lock expire after `grace`, however often it is renewed,
    /// unless its session takes the lock again before then. This serves a page that was closed or is being reloaded.
    /// If `page` is given, it happens only while the lock belongs to that page.
    ///
    /// As with `max_hold`, such an expiry does not mean that the session is idle.
    ///
    /// By default nothing happens: the lock of a closed page lives until it expires.
    fn expire_in(
        &self,
        _held: &Acquisition,
        _page: Option<PageId>,
        _grace: Duration,
        _until: Deadline,
    ) -> impl Verb<Released> {
        async { Ok(Released::AlreadyGone) }
    }

    /// Puts this ask on record with the live exclusive lock on the document, for 90 s. A session, or a
    /// [user](crate::Holder::user) in all sessions, has one ask: the same text once more keeps its name, time and answer, and
    /// another text replaces it. If it is asked `again`, the ask that stands, whatever its text, stands for another 90 s (or
    /// stays as it is, while it stands for more than 60 s), and nothing new is asked. The lock itself does not change, neither
    /// its `ts` nor its token. Asks go with the grant; a grant that [continues](Self::hand_over) keeps them. Sets
    /// [`Ask::at`]. A late attempt may bring an ask back that was withdrawn meanwhile, for 90 s.
    ///
    /// By default nobody hears an ask.
    fn ask(&self, _key: &LockKey, _ask: &Ask, _again: bool, _until: Deadline) -> impl Verb<Asked> {
        async { Ok(Asked::NobodyHears) }
    }

    /// Puts the answer of the holder on record with this ask, in the place of an earlier answer.
    fn answer(
        &self,
        _held: &Acquisition,
        _ask: Uuid,
        _answer: &Answer,
        _until: Deadline,
    ) -> impl Verb<Answered> {
        async { Ok(Answered::NoSuchAsk) }
    }

    /// Removes the ask of this session, or of another session of the same [user](crate::Holder::user), if there is one.
    fn withdraw(
        &self,
        _key: &LockKey,
        _aid: &Aid,
        _user: Option<&str>,
        _until: Deadline,
    ) -> impl Verb<()> {
        async { Ok(()) }
    }

    /// Sets the place of a server in the queue of a [fair](Rules::fair) collection, or removes it. If the
    /// [last](Place::last) of the waiters has no ticket, draws one for all waiters that have none, and
    /// returns it. A new ticket is higher than all tickets in the queue. A repeated call draws another ticket.
    /// A queue has room for [`MAX_READERS`] servers; another server gets neither a place nor a ticket.
    ///
    /// A server calls this for a document only after its own claims and earlier calls were answered, because the
    /// latest command says which waiters the server has.
    ///
    /// By default there are no queues. The manager does not register fair types then.
    fn set_place(
        &self,
        _key: &LockKey,
        _waiters: &Waiters,
        _until: Deadline,
    ) -> impl Verb<Option<Ticket>> {
        async { Ok(None) }
    }

    /// Reports locks that are acquired, freed or taken from now on, but no renewals. `None`, the default, means that
    /// this store cannot report changes: the caller must poll.
    ///
    /// Every change that happens after this call has returned is reported, or else [`Missed`](Change::Missed) is
    /// reported. The expiry of a lock need not be reported. Other changes may be reported as well: a subscriber looks
    /// at the lock after each report.
    fn watch(&self, _collection: &str, _until: Deadline) -> impl Verb<Option<Watch>> {
        async { Ok(None) }
    }

    /// The names of existing collections that the pattern covers, at most `limit` of them. A collection exists once a
    /// document or a lock was stored in it.
    ///
    /// This is for collections whose names are known at run time only. By default the list is empty.
    fn collections(
        &self,
        _like: &Pattern,
        _limit: usize,
        _until: Deadline,
    ) -> impl Verb<Vec<String>> {
        async { Ok(Vec::new()) }
    }

    /// The state of the store at this moment, with the missing indexes of these collections. The collections must be
    /// prepared. Changes nothing. If the store takes no writes, that is an answer; `Err` means that
    /// no server answers. By default an embedded store in which nothing is missing.
    fn status(&self, _collections: &[&str], _until: Deadline) -> impl Verb<StoreStatus> {
        async { Ok(StoreStatus::new(Topology::Embedded, true)) }
    }
}

/// The documents that the locks guard. By default a store keeps none, and refuses to load and to save.
pub trait Documents: Send + Sync + 'static {
    /// How this store wants documents encoded: as JSON by default.
    fn format(&self) -> Format {
        Format::Json
    }

    /// The document as it is now.
    fn load(&self, _key: &LockKey, _until: Deadline) -> impl Verb<Option<StoredDocument>> {
        async { Err(cannot("keeps no documents")) }
    }

    /// True if the document exists. By default the store loads it.
    fn exists(&self, key: &LockKey, until: Deadline) -> impl Verb<bool> {
        async move { Ok(self.load(key, until).await?.is_some()) }
    }

    /// Edits, creates or deletes the document if this acquisition of its exclusive lock is live, and renews
    /// the lock. An edit without changes only renews the lock.
    ///
    /// The store reads the stored document, [applies](Changes::apply) the [`Changes`] and writes in one atomic step:
    /// no change of another program is lost in between.
    ///
    /// After the deadline the caller has been told that the outcome is unknown, and may have saved something
    /// newer. A save that is delayed on its way therefore gives up by then. If a newer save can
    /// overtake it even later, as between the last check and the commit, the older save must fail.
    fn save(&self, _held: &Acquisition, _edit: &Edit, _until: Deadline) -> impl Verb<Saved> {
        async { Err(cannot("keeps no documents")) }
    }
}

/// The ends of sessions, and the outbox: the news that listeners are to be told.
///
/// Two verbs take more than one step: [`end_session`](Self::end_session) and [`sweep`](Self::sweep).
/// Either may stop after any step; the same call by any worker then continues it:
///
/// - The end of a session is recorded *before* its locks are removed. A caller acquires its lock first
///   and asks for the [`last_ends`](Self::last_ends) second. Whichever comes first, the end or the
///   lock, no lock of an ended session remains.
/// - One worker claims an end, and stores the names of the locks with it *before* it removes them. The
///   end is therefore announced with all its locks: once, or at least once if the worker dies.
///
/// The outbox has three verbs. [`put_news`](Self::put_news) puts takeovers into it;
/// [`end_session`](Self::end_session) and [`sweep`](Self::sweep) put ends into it.
/// [`take_news`](Self::take_news) reserves news for one worker, and [`settle_news`](Self::settle_news) says what became of them.
///
/// By default a store remembers no ends: a session that ends releases its locks, a claim that is under way at that
/// moment may leave a lock behind until it expires, and nobody is told.
pub trait Sessions: Locks {
    /// Ends the session permanently: remembers the end for a day, removes all its locks in these
    /// collections, and puts the end into the outbox, where it waits to be [settled](Self::settle_news) as
    /// [ready](Settled::Ready). Returns the locks that the session held, and the locks
    /// that it lost because they expired, if that loss was not announced yet: whether the lock is still on record, a
    /// sweep has seen it expired, or another session has taken its document. A lock that expired at its `max_hold`
    /// is not among them. The announcement has the same locks, and no other end has them.
    ///
    /// Only the first call ends the session; its time and reason stay. Later calls remove the locks
    /// that they still find. `worker` identifies this call, and stays the same when the call is
    /// repeated.
    fn end_session(
        &self,
        aid: &Aid,
        _reason: EndReason,
        collections: &[&str],
        _worker: Uuid,
        until: Deadline,
    ) -> impl Verb<Ended> {
        async move {
            let mut ended = Ended::default();
            for collection in collections {
                ended.locks.extend(self.release_all(collection, aid, until).await?);
            }
            Ok(ended)
        }
    }

    /// Remembers for a day that a page has been left, so that [`last_ends`](Self::last_ends) tells it as a permanent end.
    /// `page` is the [name](Aid::of_page) of a page of a session. Removes no lock, and nobody is told.
    ///
    /// As with the end of a session, this is recorded before the locks of the page are released, and a caller acquires
    /// first and asks second. By default nothing is remembered.
    fn end_page(&self, _page: &Aid, _until: Deadline) -> impl Verb<()> {
        async { Ok(()) }
    }

    /// How each of these sessions last ended or became idle, if the store still remembers it. A permanent end stays
    /// the last one.
    fn last_ends(&self, aids: &[Aid], _until: Deadline) -> impl Verb<Vec<Option<LastEnd>>> {
        async { Ok(vec![None; aids.len()]) }
    }

    /// True if this acquisition is known to have expired because its session was idle: it is still on record, or a
    /// [`sweep`](Self::sweep) has found it and the store still remembers that, or another session has replaced it. By default
    /// nothing is known.
    ///
    /// A lock that was released or broken, that has ended with its session, or that has reached its `max_hold`, has not
    /// expired. (One exception: a save that is committed after a sweep makes its lock live again, and the answer stays.)
    fn has_expired(&self, _held: &Acquisition, _until: Deadline) -> impl Verb<bool> {
        async { Ok(false) }
    }

    /// Removes expired locks, oldest first, of about `limit` sessions.
    ///
    /// A session without a live lock in these collections has become idle. The sweep puts that into the outbox,
    /// with the reason [`Expired`](EndReason::Expired) and the names of the locks.
    /// An idle session has not ended permanently: it may come back and lock again, and become idle
    /// again. A lock that expired at its `max_hold` does not make its session idle. A lock that a foreign program
    /// wrote does not make its session idle either, and the sweep leaves that lock where it is.
    ///
    /// If the session has a live lock too, the sweep remembers the names of the expired locks for the time of their
    /// ttl: if the session becomes idle or ends within that time, they are among its locks.
    ///
    /// If another session has acquired an expired lock, the former holder is treated as if the lock
    /// were still there. One idle session has one end, with all its locks, also if some of them are being replaced at
    /// that moment; no lock is in two ends.
    ///
    /// Also completes the work that another worker left half done, and makes the ends of that worker ready.
    fn sweep(
        &self,
        _collections: &[&str],
        _worker: Uuid,
        _limit: usize,
        _until: Deadline,
    ) -> impl Verb<Swept> {
        async { Ok(Swept::default()) }
    }

    /// Puts a takeover that is about to happen into the outbox, and reserves it for the caller for the time of
    /// `lease`. The worker is the event of the takeover. The store sets [`Takeover::at`].
    fn put_news(&self, _takeover: &Takeover, _lease: Duration, _until: Deadline) -> impl Verb<()> {
        async { Ok(()) }
    }

    /// Takes at most `limit` news that are ready and not told yet. For the time of `lease` no other worker gets them;
    /// after that they count as [repeated](crate::SessionEnded::repeated).
    ///
    /// If nobody has settled a takeover within the lease of its `put_news`, the server that put it has died. The
    /// takeover is dropped if the lock is still live, and otherwise told.
    fn take_news(
        &self,
        _what: Outbox<'_>,
        _worker: Uuid,
        _lease: Duration,
        _limit: usize,
        _until: Deadline,
    ) -> impl Verb<Vec<News>> {
        async { Ok(Vec::new()) }
    }

    /// Says what became of these news, as far as they still belong to this worker.
    ///
    /// The caller of [`end_session`](Self::end_session) settles the end as ready once that verb has answered, so that
    /// a logout need not wait for this step. If the caller does not settle the end, a [sweep](Self::sweep) does.
    fn settle_news(
        &self,
        _news: &[NewsId],
        _worker: Uuid,
        _settled: Settled,
        _until: Deadline,
    ) -> impl Verb<()> {
        async { Ok(()) }
    }
}

/// Freezes, and the notes of the servers of an application. By default a store cannot
/// keep a freeze, and the only server is the caller.
pub trait Servers: Send + Sync + 'static {
    /// Freezes this scope, or ends its freeze, in one step. Returns the freezes that are then on. A freeze whose end
    /// has passed by the store's clock changes nothing.
    fn set_freeze(
        &self,
        _scope: &Scope,
        _freeze: Option<&NewFreeze>,
        _until: Deadline,
    ) -> impl Verb<Vec<Freeze>> {
        async { Err(cannot("cannot keep a freeze")) }
    }

    /// The freezes that are on, with the store's time. The manager obeys them; the store grants locks as ever.
    ///
    /// The manager asks once a second. By the time it also learns whether its process has stood still.
    fn freezes(&self, _until: Deadline) -> impl Verb<Frozen> {
        async { Ok(Frozen::default()) }
    }

    /// Notes that a server has read this freeze and obeys it: once for each server, at most
    /// [`MAX_NOTED`](crate::freeze::MAX_NOTED) servers. Nothing happens if the freeze has ended.
    fn obey_freeze(&self, _id: Uuid, _server: Uuid, _until: Deadline) -> impl Verb<()> {
        async { Ok(()) }
    }

    /// Notes this server, or removes its note, in one step. Returns all notes that count then. A note counts for 3
    /// minutes, by the store's clock; a second note of the same server replaces the first.
    fn note_server(
        &self,
        _id: Uuid,
        note: Option<&ServerNote>,
        _until: Deadline,
    ) -> impl Verb<Fleet> {
        async move { Ok(Fleet::new(Topology::Embedded, note.cloned().into_iter().collect())) }
    }
}

fn cannot(what: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Other, format!("this store {what}"))
}
