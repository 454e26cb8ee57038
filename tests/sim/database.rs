//! The database of the simulation: the state of its primary, the majority-committed state, and the
//! faults of both.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use actix_doclock::{
    Aid, LockKey, LockToken, MemoryStore, SessionEnded, StoreError, StoreErrorKind,
    store::{Acquisition, Deadline, Documents, Saved, StoredDocument},
};
use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::rules::Rules;
use crate::truth::{Heard, Truth, Why};

/// When the server aborts an abandoned transaction.
pub(crate) const TRANSACTION_LIVES: Duration = Duration::from_secs(3);

/// The lock records that a verb writes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Touches {
    /// It only reads, so it need not wait for a majority.
    Nothing,
    /// The records of ended sessions.
    Ends,
    One(LockKey),
    Any,
}

#[derive(Debug)]
pub(crate) struct Database {
    pub(crate) rules: Rules,
    state: Mutex<State>,
    /// A transaction has ended, something is majority-committed, or there is a primary again, perhaps
    /// another one.
    news: Notify,
    /// It stands still: requests arrive, and are answered later.
    is_still: AtomicBool,
    goes_on: Notify,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) primary: MemoryStore,
    /// Replication is stopped, and this is the majority-committed state.
    behind: Option<Behind>,
    /// How often replication was stopped.
    windows: u64,
    /// The number of primaries before this one.
    pub(crate) epoch: u64,
    pub(crate) is_down: bool,
    transactions: BTreeMap<LockKey, Open>,
    next_transaction: u64,
    /// Sessions whose end has begun.
    pub(crate) tombstones: BTreeSet<Aid>,
    /// The fences that were given out where a fence is the time.
    pub(crate) fences: BTreeMap<String, u64>,
    /// Acquisitions of which a second request was told, or would have been told if it had still waited.
    pub(crate) told_again: BTreeSet<String>,
    /// Whether the start of each acquisition is recorded, because it counts.
    notes_age: bool,
    pub(crate) granted: BTreeMap<String, Duration>,
    pub(crate) truth: Truth,
    pub(crate) heard: Heard,
    /// The violations found in the record after a step.
    pub(crate) wrong: Vec<String>,
}

#[derive(Debug)]
struct Behind {
    majority: MemoryStore,
    truth: Truth,
}

/// A transaction that blocks the document, and the lock record if it has written it.
#[derive(Debug)]
struct Open {
    number: u64,
    began: Instant,
    has_record: bool,
}

/// Identifies a write, to wait until it is majority-committed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    epoch: u64,
    window: Option<u64>,
}

/// A guarded save under way.
#[derive(Debug)]
pub(crate) struct Transaction {
    key: LockKey,
    number: u64,
    epoch: u64,
    snapshot: MemoryStore,
    /// The same state with the writes of the transaction.
    view: MemoryStore,
    has_record: bool,
    /// The acquisition under which it writes.
    under: Option<LockToken>,
}

/// The answer of a verb of [`MemoryStore`], which never waits.
pub(crate) fn at_once<T>(verb: impl Future<Output = T>) -> T {
    verb.now_or_never().expect("a MemoryStore never waits")
}

pub(crate) fn unavailable(why: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, why)
}

impl Database {
    pub(crate) fn new(rules: Rules) -> Self {
        let primary = MemoryStore::new();
        // Makes room for turning the clock back.
        primary.advance(Duration::from_secs(24 * 60 * 60));
        let state = State {
            primary,
            behind: None,
            windows: 0,
            epoch: 0,
            is_down: false,
            transactions: BTreeMap::new(),
            next_transaction: 0,
            tombstones: BTreeSet::new(),
            fences: BTreeMap::new(),
            told_again: BTreeSet::new(),
            notes_age: !rules.purge_by_lease,
            granted: BTreeMap::new(),
            truth: Truth::default(),
            heard: Heard::default(),
            wrong: Vec::new(),
        };
        let (news, goes_on) = (Notify::new(), Notify::new());
        Self { rules, state: Mutex::new(state), news, is_still: AtomicBool::new(false), goes_on }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while locked")
    }

    pub(crate) fn stands_still(&self) {
        self.is_still.store(true, Relaxed);
    }

    pub(crate) fn goes_on(&self) {
        self.is_still.store(false, Relaxed);
        self.goes_on.notify_waiters();
    }

    /// Waits while it stands still.
    pub(crate) async fn listens(&self) {
        let goes_on = self.goes_on.notified();
        if self.is_still.load(Relaxed) {
            goes_on.await;
        }
    }

    /// One atomic step of the primary. Waits for transactions that have written the same records. The
    /// time of a command is the time of its beginning, however long it waits.
    pub(crate) async fn step<T>(
        &self,
        touches: &Touches,
        work: impl FnOnce(&mut State) -> T,
    ) -> Result<(T, Written), StoreError> {
        let asked = Instant::now();
        loop {
            // Registered before the check, so that no news is missed in between.
            let news = self.news.notified();
            let blocked = {
                let mut state = self.state();
                if state.is_down {
                    return Err(unavailable("there is no primary"));
                }
                match state.blocked(touches) {
                    Some(until) => until,
                    None => {
                        let waited = asked.elapsed();
                        state.primary.turn_back(waited);
                        let done = work(&mut state);
                        state.primary.advance(waited);
                        let window = state.behind.as_ref().map(|_| state.windows);
                        return Ok((done, Written { epoch: state.epoch, window }));
                    }
                }
            };
            if timeout_at(blocked, news).await.is_err() {
                self.state().give_up_transactions();
            }
        }
    }

    /// Waits until the write is majority-committed.
    pub(crate) async fn majority_has(&self, written: Written) -> Result<(), StoreError> {
        let Some(window) = written.window else { return Ok(()) };
        loop {
            let news = self.news.notified();
            {
                let state = self.state();
                if state.epoch != written.epoch {
                    return Err(unavailable("the primary has stepped down"));
                }
                if state.behind.is_none() || state.windows != window {
                    return Ok(());
                }
            }
            news.await;
        }
    }

    /// Begins a guarded save. From here on it sees this state and nothing newer, and no other
    /// transaction writes the document.
    pub(crate) fn begin(&self, key: &LockKey) -> Result<Transaction, StoreError> {
        let mut state = self.state();
        if state.is_down {
            return Err(unavailable("there is no primary"));
        }
        state.give_up_transactions();
        if state.transactions.contains_key(key) {
            return Err(unavailable("another transaction is writing the document"));
        }
        state.next_transaction += 1;
        let (number, epoch) = (state.next_transaction, state.epoch);
        let open = Open { number, began: Instant::now(), has_record: false };
        state.transactions.insert(key.clone(), open);
        let (snapshot, view) = (state.primary.fork_of(key), state.primary.fork_of(key));
        Ok(Transaction {
            key: key.clone(),
            number,
            epoch,
            snapshot,
            view,
            has_record: false,
            under: None,
        })
    }

    /// A document that a transaction is writing.
    pub(crate) fn is_being_saved(&self) -> Option<LockKey> {
        self.state().transactions.keys().next().cloned()
    }

    /// Touches the lock record as [`Documents::save`] does, and writes the document.
    pub(crate) fn touch(
        &self,
        it: &mut Transaction,
        aid: &Aid,
        token: LockToken,
        document: &StoredDocument,
    ) -> Result<Saved, StoreError> {
        let mut state = self.state();
        state.is_open(it)?;
        let far = Instant::now() + Duration::from_secs(3600);
        let saved = at_once(it.view.save(
            &Acquisition::exclusive(&it.key, aid, token),
            &document.clone().into(),
            Deadline::at(far.into_std()),
        ))?;
        if saved != Saved::Saved {
            if saved == Saved::Lost && !self.rules.guarded_save {
                force(&it.view, &it.key, document);
                return Ok(Saved::Saved);
            }
            return Ok(saved);
        }
        // An update that changes nothing writes nothing, and conflicts with nothing.
        let writes = self.rules.guarded_write_changes_the_record
            || !it.view.has_same_record(&it.snapshot, &it.key);
        if writes && !state.primary.has_same_record(&it.snapshot, &it.key) {
            return Err(unavailable("the lock record has changed since the transaction began"));
        }
        it.has_record = writes;
        it.under = Some(token);
        if let Some(open) = state.transactions.get_mut(&it.key) {
            open.has_record = writes;
        }
        Ok(saved)
    }

    pub(crate) fn commit(&self, it: &Transaction) -> Result<Written, StoreError> {
        let mut state = self.state();
        state.is_open(it)?;
        if let Some(token) = it.under
            && !state.primary.on_record().iter().any(|grant| grant.token == token)
        {
            let wrong =
                format!("{:?}: a save under {token} commits after the lock has gone", it.key);
            state.wrong.push(wrong);
        }
        state.primary.take_document_from(&it.view, &it.key);
        if it.has_record {
            state.primary.take_record_from(&it.view, &it.key);
            state.looks_at_record(Why::Committed);
        }
        state.transactions.remove(&it.key);
        let window = state.behind.as_ref().map(|_| state.windows);
        let written = Written { epoch: state.epoch, window };
        drop(state);
        self.news.notify_waiters();
        Ok(written)
    }

    pub(crate) fn abort(&self, it: &Transaction) {
        let mut state = self.state();
        if state.transactions.get(&it.key).is_some_and(|open| open.number == it.number) {
            state.transactions.remove(&it.key);
        }
        drop(state);
        self.news.notify_waiters();
    }

    /// Writes the document without regard to transactions.
    pub(crate) fn write_at_once(&self, key: &LockKey, document: &StoredDocument) {
        force(&self.state().primary, key, document);
    }

    /// From now on, no new write is majority-committed.
    pub(crate) fn replication_stops(&self) {
        let mut state = self.state();
        if state.behind.is_none() {
            state.windows += 1;
            let (majority, truth) = (state.primary.fork(), state.truth.clone());
            state.behind = Some(Behind { majority, truth });
        }
    }

    /// All writes are majority-committed.
    pub(crate) fn replicates(&self) {
        self.state().behind = None;
        self.news.notify_waiters();
    }

    pub(crate) fn goes_down(&self) {
        self.state().is_down = true;
    }

    /// Another primary with the majority-committed state, and perhaps with more. Its clock may be
    /// behind.
    pub(crate) fn comes_up(&self, rolls_back: bool, behind: Duration) {
        let mut state = self.state();
        state.is_down = false;
        state.epoch += 1;
        state.transactions.clear();
        if let Some(Behind { majority, truth }) = state.behind.take()
            && rolls_back
        {
            state.primary.take_all_from(&majority);
            state.truth = truth;
        }
        state.primary.turn_back(behind);
        drop(state);
        self.news.notify_waiters();
    }

    pub(crate) fn clock_steps_back(&self, by: Duration) {
        let state = self.state();
        state.primary.turn_back(by);
        if let Some(behind) = &state.behind {
            behind.majority.turn_back(by);
        }
    }

    pub(crate) fn clock_jumps(&self, by: Duration) {
        let state = self.state();
        state.primary.advance(by);
        if let Some(behind) = &state.behind {
            behind.majority.advance(by);
        }
    }

    /// A listener was called. Returns the violation, if there is one.
    pub(crate) fn told(&self, ended: &SessionEnded) -> Option<String> {
        let mut state = self.state();
        state.truth.told(ended);
        // A failover does not undo an announcement.
        if let Some(behind) = &mut state.behind {
            behind.truth.told(ended);
        }
        state.heard.of(ended)
    }
}

impl State {
    /// The majority-committed state.
    pub(crate) fn majority(&self) -> &MemoryStore {
        self.behind.as_ref().map_or(&self.primary, |behind| &behind.majority)
    }

    /// The record may have changed in this step.
    pub(crate) fn looks_at_record(&mut self, why: Why<'_>) {
        let (grants, clock) = (self.primary.on_record(), self.primary.clock());
        if self.notes_age {
            for it in &grants {
                self.granted.entry(it.token.to_string()).or_insert(clock);
            }
        }
        self.wrong.extend(self.truth.now_is(grants, why, clock));
    }

    /// The latest time until which these records are blocked.
    fn blocked(&self, touches: &Touches) -> Option<Instant> {
        let blocks = |open: &&Open| open.has_record && open.began.elapsed() < TRANSACTION_LIVES;
        let open = match touches {
            Touches::Nothing | Touches::Ends => None,
            Touches::One(key) => self.transactions.get(key).filter(blocks),
            Touches::Any => self.transactions.values().find(blocks),
        };
        open.map(|open| open.began + TRANSACTION_LIVES)
    }

    fn give_up_transactions(&mut self) {
        self.transactions.retain(|_, open| open.began.elapsed() < TRANSACTION_LIVES);
    }

    fn is_open(&self, it: &Transaction) -> Result<(), StoreError> {
        let open = self.transactions.get(&it.key).filter(|open| open.number == it.number);
        let lives = open.is_some_and(|open| open.began.elapsed() < TRANSACTION_LIVES);
        if lives && self.epoch == it.epoch && !self.is_down {
            return Ok(());
        }
        Err(unavailable("the transaction was aborted"))
    }
}

/// Writes like code that bypasses the crate.
fn force(store: &MemoryStore, key: &LockKey, document: &StoredDocument) {
    let page = document.decode::<crate::work::Page>().expect("one of ours");
    page.put(store, key);
}
