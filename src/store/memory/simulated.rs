//! What a simulation needs to make a replica set out of embedded stores: one for what the primary has,
//! one for what a majority has, one for what a transaction sees.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde_json::Value;

use crate::{
    key::LockKey,
    lock::{Aid, LockToken, Mode},
    store::memory::{MemoryStore, changes::Changes, ends::Ends, record::Record, state::State},
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
    /// It expires because it was held for as long as it may be, which says nothing about its session.
    pub at_max_hold: bool,
}

impl MemoryStore {
    /// What the store's clock shows.
    #[must_use]
    pub fn clock(&self) -> Duration {
        self.state().now()
    }

    /// Turns the store's clock back, as a fail-over to a server with a slower clock does: records may
    /// be newer than the clock. Not to before its start.
    pub fn turn_back(&self, by: Duration) {
        let mut state = self.state();
        state.turned_on = state.turned_on.saturating_sub(by);
    }

    /// A store of its own with the same content and the same clock. Nobody watches it.
    #[must_use]
    pub fn fork(&self) -> Self {
        let state = self.state();
        let (locks, documents) = (state.locks.clone(), state.documents.clone());
        state.fork_with(locks, documents, state.ends.clone())
    }

    /// The same with this document and its locks only.
    #[must_use]
    pub fn fork_of(&self, key: &LockKey) -> Self {
        let state = self.state();
        let record = state.locks.get(key).map(|record| (key.clone(), record.clone()));
        let document = state.documents.get(key).map(|it| (key.clone(), it.clone()));
        let (locks, documents) = (record.into_iter().collect(), document.into_iter().collect());
        state.fork_with(locks, documents, Ends::default())
    }

    /// Takes the content of another store for its own, not its clock. Who watches is told of nothing.
    pub fn take_all_from(&self, other: &Self) {
        let theirs = other.state();
        let (locks, documents) = (theirs.locks.clone(), theirs.documents.clone());
        let (ends, former) = (theirs.ends.clone(), theirs.former.clone());
        drop(theirs);
        let mut state = self.state();
        (state.locks, state.documents) = (locks, documents);
        (state.ends, state.former) = (ends, former);
    }

    /// Takes the document from another store, if there is one.
    pub fn take_document_from(&self, other: &Self, key: &LockKey) {
        let document = other.state().documents.get(key).cloned();
        self.state().documents.extend(document.map(|document| (key.clone(), document)));
    }

    /// Takes what is on record of the locks on a document from another store.
    pub fn take_record_from(&self, other: &Self, key: &LockKey) {
        let record = other.state().locks.get(key).cloned();
        self.state().locks.extend(record.map(|record| (key.clone(), record)));
    }

    /// Whether the same is on record of the locks on a document.
    #[must_use]
    pub fn has_same_record(&self, other: &Self, key: &LockKey) -> bool {
        let theirs: Option<Record> = other.state().locks.get(key).cloned();
        self.state().locks.get(key) == theirs.as_ref()
    }

    /// All grants, also those that have expired.
    #[must_use]
    pub fn on_record(&self) -> Vec<OnRecord> {
        let state = self.state();
        let grants = state.locks.iter().flat_map(|(key, record)| {
            record.grants.iter().map(|grant| OnRecord {
                key: key.clone(),
                aid: grant.aid.clone(),
                token: grant.token,
                mode: grant.mode,
                until: grant.ts + grant.ttl,
                at_max_hold: grant.has_reached_max_hold(),
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
        documents: BTreeMap<LockKey, Value>,
        ends: Ends,
    ) -> MemoryStore {
        let (started, turned_on, rules) = (self.started, self.turned_on, self.rules.clone());
        let changes = Changes::keeping(1);
        let former = self.former.clone();
        let state = Self { started, turned_on, rules, locks, ends, former, changes, documents };
        MemoryStore { state: Arc::new(state.into()) }
    }
}
