//! A store that pauses before and after everything it does.

use std::time::Duration;

use actix_doclock::freeze::{Freeze, NewFreeze, Scope};
use actix_doclock::store::PageId;
use actix_doclock::{
    Aid, Answer, Ask, EndReason, Lock, LockKey, MemoryStore, Released, StoreError, TryAcquire,
    store::{
        Ability, Acquisition, Active, Answered, Asked, Claim, Confirmed, Deadline, Documents, Edit,
        Ended, Frozen, HandedOver, LastEnd, Locks, News, NewsId, Outbox, Query, Removal, Renewed,
        Rules, Saved, Servers, Sessions, Settled, StoreStatus, StoredDocument, Swept, Ticket,
        Waiters, Watch,
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

impl<P: Fn() -> BoxFuture<'static, ()> + Send + Sync + 'static> Locks for Paused<P> {
    fn can(&self, ability: Ability) -> bool {
        self.store.can(ability)
    }
    async fn prepare(
        &self,
        collection: &str,
        rules: &Rules,
        until: Deadline,
    ) -> Result<(), StoreError> {
        self.store.prepare(collection, rules, until).await
    }
    async fn try_acquire(
        &self,
        key: &LockKey,
        claim: &Claim,
        until: Deadline,
    ) -> Result<TryAcquire, StoreError> {
        self.paused(self.store.try_acquire(key, claim, until)).await
    }
    async fn renew(
        &self,
        collection: &str,
        active: &[Active],
        ttl: Duration,
        until: Deadline,
    ) -> Result<Renewed, StoreError> {
        self.paused(self.store.renew(collection, active, ttl, until)).await
    }
    async fn remove_lock(
        &self,
        removal: Removal<'_>,
        until: Deadline,
    ) -> Result<Released, StoreError> {
        self.paused(self.store.remove_lock(removal, until)).await
    }
    async fn hand_over(
        &self,
        from: &Acquisition,
        claim: &Claim,
        until: Deadline,
    ) -> Result<HandedOver, StoreError> {
        self.paused(self.store.hand_over(from, claim, until)).await
    }
    async fn locks(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
        until: Deadline,
    ) -> Result<Vec<Lock>, StoreError> {
        self.paused(self.store.locks(collection, query, limit, until)).await
    }
    async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
        until: Deadline,
    ) -> Result<Option<Confirmed>, StoreError> {
        self.paused(self.store.confirm(key, aid, load, until)).await
    }
    async fn status(&self, names: &[&str], until: Deadline) -> Result<StoreStatus, StoreError> {
        self.store.status(names, until).await
    }
    async fn release_all(
        &self,
        collection: &str,
        aid: &Aid,
        until: Deadline,
    ) -> Result<Vec<LockKey>, StoreError> {
        self.paused(self.store.release_all(collection, aid, until)).await
    }
    async fn ask(
        &self,
        key: &LockKey,
        ask: &Ask,
        again: bool,
        until: Deadline,
    ) -> Result<Asked, StoreError> {
        self.paused(self.store.ask(key, ask, again, until)).await
    }
    async fn answer(
        &self,
        held: &Acquisition,
        ask: Uuid,
        answer: &Answer,
        until: Deadline,
    ) -> Result<Answered, StoreError> {
        self.paused(self.store.answer(held, ask, answer, until)).await
    }
    async fn withdraw(
        &self,
        key: &LockKey,
        aid: &Aid,
        user: Option<&str>,
        until: Deadline,
    ) -> Result<(), StoreError> {
        self.paused(self.store.withdraw(key, aid, user, until)).await
    }
    async fn set_place(
        &self,
        key: &LockKey,
        waiters: &Waiters,
        until: Deadline,
    ) -> Result<Option<Ticket>, StoreError> {
        self.paused(self.store.set_place(key, waiters, until)).await
    }
    async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
        until: Deadline,
    ) -> Result<Released, StoreError> {
        self.paused(self.store.expire_in(held, page, grace, until)).await
    }
    async fn watch(&self, collection: &str, until: Deadline) -> Result<Option<Watch>, StoreError> {
        self.store.watch(collection, until).await
    }
}

impl<P: Fn() -> BoxFuture<'static, ()> + Send + Sync + 'static> Documents for Paused<P> {
    async fn load(
        &self,
        key: &LockKey,
        until: Deadline,
    ) -> Result<Option<StoredDocument>, StoreError> {
        self.paused(self.store.load(key, until)).await
    }
    async fn save(
        &self,
        held: &Acquisition,
        edit: &Edit,
        until: Deadline,
    ) -> Result<Saved, StoreError> {
        self.paused(self.store.save(held, edit, until)).await
    }
}

impl<P: Fn() -> BoxFuture<'static, ()> + Send + Sync + 'static> Sessions for Paused<P> {
    async fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        worker: Uuid,
        until: Deadline,
    ) -> Result<Ended, StoreError> {
        self.paused(self.store.end_session(aid, reason, collections, worker, until)).await
    }
    async fn end_page(&self, page: &Aid, until: Deadline) -> Result<(), StoreError> {
        self.paused(self.store.end_page(page, until)).await
    }
    async fn last_ends(
        &self,
        aids: &[Aid],
        until: Deadline,
    ) -> Result<Vec<Option<LastEnd>>, StoreError> {
        self.paused(self.store.last_ends(aids, until)).await
    }
    async fn has_expired(&self, held: &Acquisition, until: Deadline) -> Result<bool, StoreError> {
        self.paused(self.store.has_expired(held, until)).await
    }
    async fn sweep(
        &self,
        names: &[&str],
        worker: Uuid,
        limit: usize,
        until: Deadline,
    ) -> Result<Swept, StoreError> {
        self.paused(self.store.sweep(names, worker, limit, until)).await
    }
    async fn take_news(
        &self,
        what: Outbox<'_>,
        worker: Uuid,
        lease: Duration,
        limit: usize,
        until: Deadline,
    ) -> Result<Vec<News>, StoreError> {
        self.paused(self.store.take_news(what, worker, lease, limit, until)).await
    }
    async fn settle_news(
        &self,
        news: &[NewsId],
        worker: Uuid,
        settled: Settled,
        until: Deadline,
    ) -> Result<(), StoreError> {
        self.paused(self.store.settle_news(news, worker, settled, until)).await
    }
}

/// Not paused: a test freezes and thaws while other verbs are.
impl<P: Fn() -> BoxFuture<'static, ()> + Send + Sync + 'static> Servers for Paused<P> {
    async fn set_freeze(
        &self,
        scope: &Scope,
        freeze: Option<&NewFreeze>,
        until: Deadline,
    ) -> Result<Vec<Freeze>, StoreError> {
        self.store.set_freeze(scope, freeze, until).await
    }
    async fn freezes(&self, until: Deadline) -> Result<Frozen, StoreError> {
        self.store.freezes(until).await
    }
}
