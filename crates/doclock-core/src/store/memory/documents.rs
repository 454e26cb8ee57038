//! The documents of the embedded store.

use crate::{
    clock,
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    lock::Mode,
    store::{
        Acquisition, Change, Deadline, Documents, Edit, Saved, StoreResult, StoredDocument,
        Written,
        lock_rules::Grant,
        memory::{MemoryStore, save, state::State},
    },
};

impl Documents for MemoryStore {
    async fn load(&self, key: &LockKey, _until: Deadline) -> StoreResult<Option<StoredDocument>> {
        Ok(self.state.lock().documents.get(key).cloned())
    }

    async fn exists(&self, key: &LockKey, _until: Deadline) -> StoreResult<bool> {
        Ok(self.state.lock().documents.contains_key(key))
    }

    async fn save(&self, held: &Acquisition, edit: &Edit, until: Deadline) -> StoreResult<Saved> {
        let Acquisition { key, aid, token, .. } = held;
        let mut state = self.state.lock();
        let now = state.now();
        if until.moment().is_some_and(|until| clock::now() >= until) {
            let message = "saving: the deadline has passed; nothing was written";
            return Err(StoreError::new(StoreErrorKind::Unavailable, message));
        }
        let State { locks, documents, changes, .. } = &mut *state;
        let guards = |grant: &&mut Grant| {
            grant.is_acquisition(aid, *token) && grant.is_live(now) && grant.mode == Mode::Exclusive
        };
        let guard = locks.get_mut(key).and_then(|record| record.grants.iter_mut().find(guards));
        let Some(guard) = guard else {
            return Ok(Saved::Lost);
        };
        let saved = save::write(edit, key, documents)?;
        if saved == Saved::Saved {
            guard.renew(now, guard.ttl);
            guard.again = true;
            if !edit.is_empty() && changes.are_watched() {
                let by = guard.holder.as_ref().map_or_else(String::new, |it| it.label.clone());
                let save = Written { by, version: edit.version_after() };
                changes.tell(Change::Saved(key.clone(), save));
            }
        }
        Ok(saved)
    }
}
