//! The parts from which a simulation builds a replica set out of embedded stores: one store for the
//! state of the primary, one for the majority-committed state, and one for the view of a transaction.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    key::LockKey,
    lock::{Aid, LockToken, Mode},
    store::{
        StoredDocument,
        lock_rules::Record,
        memory::{MemoryStore, changes::Changes, ends::Ends, state::State},
    },
};

/// One grant in a [`MemoryStore`], expired or not.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OnRecord {
    /// The document.
    pub key: LockKey,
    /// The session.
    pub aid: Aid,
    /// The acquisition.
    pub token: LockToken,
    /// How much it excludes.
    pub mode: Mode,
    /// When it expires or expired, by the [clock](MemoryStore::clock) of the store.
    pub until: Duration,
    /// True if the grant expires because it reached its `max_hold`, which does not mean that its session is idle.
    pub at_max_hold: bool,
}

impl MemoryStore {
    /// The current time of the store's clock.
    #[must_use]
    pub fn clock(&self) -> Duration {
        self.state.lock().now()
    }

    /// Turns the store's clock back, as a failover to a server with a slower clock does: records may be
    /// newer than the clock. The clock does not go back beyond its start.
    pub fn turn_back(&self, by: Duration) {
        let mut state = self.state.lock();
        state.turned_on = state.turned_on.saturating_sub(by);
    }

    /// An independent store with the same content and the same clock. It has no watchers.
    #[must_use]
    pub fn fork(&self) -> Self {
        let state = self.state.lock();
        let (locks, documents) = (state.locks.clone(), state.documents.clone());
        state.fork_with(locks, documents, state.ends.clone())
    }

    /// As [`fork`](Self::fork), with only this document and its locks.
    #[must_use]
    pub fn fork_of(&self, key: &LockKey) -> Self {
        let state = self.state.lock();
        let record = state.locks.get(key).map(|record| (key.clone(), record.clone()));
        let document = state.documents.get(key).map(|it| (key.clone(), it.clone()));
        let (locks, documents) = (record.into_iter().collect(), document.into_iter().collect());
        state.fork_with(locks, documents, Ends::default())
    }

    /// Replaces the content with that of another store, but keeps the clock. Watchers are not told.
    pub fn take_all_from(&self, other: &Self) {
        let theirs = other.state.lock();
        let (locks, documents) = (theirs.locks.clone(), theirs.documents.clone());
        let (ends, former) = (theirs.ends.clone(), theirs.former.clone());
        drop(theirs);
        let mut state = self.state.lock();
        (state.locks, state.documents) = (locks, documents);
        (state.ends, state.former) = (ends, former);
    }

    /// Copies the document from another store, if it exists there.
    pub fn take_document_from(&self, other: &Self, key: &LockKey) {
        let document = other.state.lock().documents.get(key).cloned();
        self.state.lock().documents.extend(document.map(|document| (key.clone(), document)));
    }

    /// Copies the lock record of a document from another store.
    pub fn take_record_from(&self, other: &Self, key: &LockKey) {
        let record = other.state.lock().locks.get(key).cloned();
        self.state.lock().locks.extend(record.map(|record| (key.clone(), record)));
    }

    /// True if both stores have the same lock record for a document.
    #[must_use]
    pub fn has_same_record(&self, other: &Self, key: &LockKey) -> bool {
        let theirs: Option<Record> = other.state.lock().locks.get(key).cloned();
        self.state.lock().locks.get(key) == theirs.as_ref()
    }

    /// All grants, including expired ones.
    #[must_use]
    pub fn on_record(&self) -> Vec<OnRecord> {
        let state = self.state.lock();
        let grants = state.locks.iter().flat_map(|(key, record)| {
            record.grants.iter().filter_map(|grant| {
                Some(OnRecord {
                    key: key.clone(),
                    aid: grant.aid.clone(),
                    token: grant.token?,
                    mode: grant.mode,
                    until: grant.expires(),
                    at_max_hold: grant.has_reached_max_hold(),
                })
            })
        });
        grants.collect()
    }
}

impl State {
    /// A store with this content, and the same rules and clock.
    fn fork_with(
        &self,
        locks: BTreeMap<LockKey, Record>,
        documents: BTreeMap<LockKey, StoredDocument>,
        ends: Ends,
    ) -> MemoryStore {
        let (started, turned_on, rules) = (self.started, self.turned_on, self.rules.clone());
        let changes = Changes::keeping(1);
        let (former, freezes) = (self.former.clone(), self.freezes.clone());
        let takeovers = self.takeovers.clone();
        let state = Self {
            started,
            turned_on,
            rules,
            locks,
            ends,
            former,
            changes,
            documents,
            freezes,
            takeovers,
            servers: Vec::new(),
        };
        MemoryStore { state: Arc::new(state.into()) }
    }
}
