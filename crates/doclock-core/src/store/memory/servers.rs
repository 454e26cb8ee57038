//! Freezes and the notes of servers in the embedded store.

use uuid::Uuid;

use crate::{
    freeze::{Freeze, NewFreeze, Scope},
    server::ServerNote,
    store::{Deadline, Fleet, Frozen, Servers, StoreResult, Topology, memory::MemoryStore},
};

impl Servers for MemoryStore {
    async fn set_freeze(
        &self,
        scope: &Scope,
        freeze: Option<&NewFreeze>,
        _until: Deadline,
    ) -> StoreResult<Vec<Freeze>> {
        let mut state = self.state.lock();
        state.set_freeze(scope, freeze);
        Ok(state.freezes())
    }

    /// Without a time: a process that stands still stands still with its embedded store.
    async fn freezes(&self, _until: Deadline) -> StoreResult<Frozen> {
        Ok(Frozen { on: self.state.lock().freezes(), at: None })
    }

    async fn obey_freeze(&self, id: Uuid, server: Uuid, _until: Deadline) -> StoreResult<()> {
        self.state.lock().obey_freeze(id, server);
        Ok(())
    }

    async fn note_server(
        &self,
        id: Uuid,
        note: Option<&ServerNote>,
        _until: Deadline,
    ) -> StoreResult<Fleet> {
        Ok(Fleet::new(Topology::Embedded, self.state.lock().note_server(id, note)))
    }
}
