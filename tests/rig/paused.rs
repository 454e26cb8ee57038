//! A store that pauses before and after everything it does.

use std::time::{Duration, Instant};

use actix_doclock::{
    Aid, EndReason, Lock, LockKey, MemoryStore, PageId, Released, SessionEnded, StoreError,
    TryAcquire,
    store::{
        Acquisition, Active, Claim, Edit, HandedOver, LastEnd, Query, Removal, Renewed, Rules,
        Saved, Store, StoreStatus, StoredDocument, Swept, Ticket, Waiters, Watch,
    },
};
use futures_util::future::BoxFuture;
use uuid::Uuid;

pub(crate) struct Paused<P> {
    store: MemoryStore,
    pause: P,
}

impl<P: Fn() -> BoxFuture<'static, ()>> Paused<P> {
    pub(crate) fn new(store: MemoryStore, pause: P) -> Self {
        Self { store, pause }
    }

    async fn paused<T>(&self, verb: impl Future<Output = T>) -> T {
        (self.pause)().await;
        let outcome = verb.await;
        (self.pause)().await;
        outcome
    }
}

impl<P: Fn() -> BoxFuture<'static, ()> + Send + Sync + 'static> Store for Paused<P> {
    async fn prepare(&self, collection: &str, rules: &Rules) -> Result<(), StoreError> {
        self.store.prepare(collection, rules).await
    }
    async fn try_acquire(&self, key: &LockKey, claim: &Claim) -> Result<TryAcquire, StoreError> {
        self.paused(self.store.try_acquire(key, claim)).await
    }
    async fn renew(
        &self,
        collection: &str,
        active: &[Active],
        ttl: Duration,
    ) -> Result<Renewed, StoreError> {
        self.paused(self.store.renew(collection, active, ttl)).await
    }
    async fn remove_lock(&self, removal: Removal<'_>) -> Result<Released, StoreError> {
        self.paused(self.store.remove_lock(removal)).await
    }
    async fn hand_over(&self, from: &Acquisition, claim: &Claim) -> Result<HandedOver, StoreError> {
        self.paused(self.store.hand_over(from, claim)).await
    }
    async fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        worker: Uuid,
    ) -> Result<Vec<LockKey>, StoreError> {
        self.paused(self.store.end_session(aid, reason, collections, worker)).await
    }
    async fn last_ends(&self, aids: &[Aid]) -> Result<Vec<Option<LastEnd>>, StoreError> {
        self.paused(self.store.last_ends(aids)).await
    }
    async fn sweep(&self, names: &[&str], worker: Uuid, limit: usize) -> Result<Swept, StoreError> {
        self.paused(self.store.sweep(names, worker, limit)).await
    }
    async fn locks(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
    ) -> Result<Vec<Lock>, StoreError> {
        self.paused(self.store.locks(collection, query, limit)).await
    }
    async fn load(&self, key: &LockKey) -> Result<Option<StoredDocument>, StoreError> {
        self.paused(self.store.load(key)).await
    }
    async fn save(
        &self,
        held: &Acquisition,
        edit: &Edit,
        until: Instant,
    ) -> Result<Saved, StoreError> {
        self.paused(self.store.save(held, edit, until)).await
    }
    async fn status(&self, names: &[&str]) -> Result<StoreStatus, StoreError> {
        self.store.status(names).await
    }
    async fn release_all(&self, collection: &str, aid: &Aid) -> Result<Vec<LockKey>, StoreError> {
        self.paused(self.store.release_all(collection, aid)).await
    }
    async fn set_place(
        &self,
        key: &LockKey,
        waiters: &Waiters,
    ) -> Result<Option<Ticket>, StoreError> {
        self.paused(self.store.set_place(key, waiters)).await
    }
    async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
    ) -> Result<Released, StoreError> {
        self.paused(self.store.expire_in(held, page, grace)).await
    }
    async fn take_announcements(
        &self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<SessionEnded>, StoreError> {
        self.paused(self.store.take_announcements(worker, lease, limit)).await
    }
    async fn announced(&self, worker: Uuid, ended: &[SessionEnded]) -> Result<(), StoreError> {
        self.paused(self.store.announced(worker, ended)).await
    }
    async fn watch(&self, collection: &str) -> Result<Option<Watch>, StoreError> {
        self.store.watch(collection).await
    }
}
