//! The documents that the locks guard, and the touch of a lock by a guarded write.

use mongodb::{
    ClientSession,
    bson::{Bson, Document, doc},
};

use crate::{
    key::{LockId, LockKey},
    store::{
        Acquisition, Deadline, Documents, Edit, Format, Saved, StoreResult, StoredDocument,
        mongo::{
            LockCollection, MongoStore,
            error::Result,
            filters::{Target, and_live, renewed_exclusive},
            ids::{Exactly, by_id},
            save::save_error,
            send::{Timing, Write},
            time_limits::answered,
            watch::renewal,
        },
    },
};

impl Documents for MongoStore {
    fn format(&self) -> Format {
        Format::Bson
    }

    verbs! { self, until:
        load(key: &LockKey) -> Option<StoredDocument>:
            self.prepared(key.collection(), until)?.load(key),
            "loading {key:?}";
        exists(key: &LockKey) -> bool:
            self.prepared(key.collection(), until)?.exists(key.id()),
            "looking for {key:?}";
    }

    async fn save(&self, held: &Acquisition, edit: &Edit, until: Deadline) -> StoreResult<Saved> {
        let saved = async { self.prepared(held.key.collection(), until)?.save(held, edit).await };
        saved.await.map_err(|e| save_error(format!("saving {:?}", held.key), e))
    }
}

impl LockCollection<'_> {
    async fn load(&self, key: &LockKey) -> Result<Option<StoredDocument>> {
        let found = self.documents.find_one(by_id(key.id()));
        let found = found.exactly([key.id()]);
        let found = answered(found.max_time(self.until.read_limit())).await?;
        if found.is_none() {
            self.explain_absence(key).await?;
        }
        Ok(found.map(|raw| StoredDocument::from_bytes(Format::Bson, raw.into_bytes())))
    }

    pub(super) async fn exists(&self, id: &LockId) -> Result<bool> {
        let found = self.documents.find_one(by_id(id)).projection(doc! { "_id": 1 });
        let found = found.exactly([id]);
        Ok(answered(found.max_time(self.until.read_limit())).await?.is_some())
    }

    pub(super) async fn read_in(
        &self,
        session: &mut ClientSession,
        id: &LockId,
    ) -> Result<Option<StoredDocument>> {
        let found = self.documents.find_one(by_id(id)).exactly([id]);
        let found = answered(found.max_time(self.until.read_limit()).session(session)).await?;
        Ok(found.map(|raw| StoredDocument::from_bytes(Format::Bson, raw.into_bytes())))
    }

    /// Matches the record while this acquisition of its exclusive lock is live.
    pub(super) fn live(&self, held: &Acquisition) -> Document {
        and_live(Target::exclusive(held).filter(), self.rules.ttl)
    }

    /// Renews the lock for a guarded write, and marks the lock as known to a request.
    ///
    /// `saved` names the write. The name is always new, so that the record changes even if no date does. With a `ts`
    /// ahead of the clock (after a failover from a server whose clock was ahead, or within one millisecond)
    /// all other fields may stay the same, and a transaction that writes nothing conflicts with nothing.
    fn touched(&self, saved: Bson) -> Vec<Document> {
        let mut renewed = renewed_exclusive("$ttl", &self.rules);
        renewed.insert("again", true);
        renewed.insert("saved", saved);
        vec![doc! { "$set": renewed }]
    }

    // update returns: 1 → live and renewed; 0 → expired, released or broken, or another acquisition holds the lock.
    pub(super) async fn touch(&self, held: &Acquisition) -> Result<bool> {
        let touched = Write::Update(self.touched(renewal()));
        Ok(self.write_one(held.key.id(), self.live(held), &touched).await? > 0)
    }

    // As `touch`, in a transaction: what `saved` says is told after the commit. A conflict → somebody else changes the
    // record at this moment; transient.
    pub(super) async fn touch_in(
        &self,
        session: &mut ClientSession,
        held: &Acquisition,
        saved: Bson,
    ) -> Result<bool> {
        let touched = self.primary.update_one(self.live(held), self.touched(saved));
        let touched = touched.exactly([held.key.id()]);
        Ok(answered(touched.session(session)).await?.matched_count > 0)
    }
}
