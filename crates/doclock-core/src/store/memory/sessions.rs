//! The ends of sessions and the outbox of the embedded store.

use std::time::Duration;

use uuid::Uuid;

use crate::{
    ended::EndReason,
    lock::Aid,
    store::{
        Acquisition, Deadline, Ended, LastEnd, News, NewsId, Outbox, Sessions, Settled,
        StoreResult, Swept,
        memory::{MemoryStore, ends::Names},
    },
    takeover::Takeover,
};

impl Sessions for MemoryStore {
    async fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        _worker: Uuid,
        _until: Deadline,
    ) -> StoreResult<Ended> {
        let mut state = self.state.lock();
        let now = state.now();
        let holder = state.holder_of(collections, aid);
        let mut locks = state.expired_of(collections, aid, now);
        locks.extend(state.remove_all(collections, aid, now));
        locks.sort();
        locks.dedup();
        let locks = state.ends.for_good(aid, reason, Names { locks, holder }, now);
        Ok(Ended { locks, more: 0 })
    }

    async fn end_page(&self, page: &Aid, _until: Deadline) -> StoreResult<()> {
        let mut state = self.state.lock();
        let now = state.now();
        state.ends.page(page, now);
        Ok(())
    }

    async fn last_ends(&self, aids: &[Aid], _until: Deadline) -> StoreResult<Vec<Option<LastEnd>>> {
        let state = self.state.lock();
        let now = state.now();
        Ok(aids.iter().map(|aid| state.ends.last(aid, now)).collect())
    }

    async fn has_expired(&self, held: &Acquisition, _until: Deadline) -> StoreResult<bool> {
        Ok(self.state.lock().has_expired(held))
    }

    async fn sweep(
        &self,
        collections: &[&str],
        _worker: Uuid,
        limit: usize,
        _until: Deadline,
    ) -> StoreResult<Swept> {
        Ok(self.state.lock().sweep(collections, limit))
    }

    async fn put_news(
        &self,
        takeover: &Takeover,
        lease: Duration,
        _until: Deadline,
    ) -> StoreResult<()> {
        let mut state = self.state.lock();
        let now = state.now();
        state.takeovers.begin(takeover, lease, now);
        Ok(())
    }

    async fn take_news(
        &self,
        what: Outbox<'_>,
        worker: Uuid,
        lease: Duration,
        limit: usize,
        _until: Deadline,
    ) -> StoreResult<Vec<News>> {
        let mut state = self.state.lock();
        let now = state.now();
        Ok(match what {
            Outbox::Ends => {
                let ends = state.ends.take(worker, lease, limit, now);
                ends.into_iter().map(News::Ended).collect()
            }
            Outbox::Takeovers(of) => {
                let mut all = std::mem::take(&mut state.takeovers);
                let taken = all.take(of, worker, lease, limit, now, |it| state.still_has(it));
                state.takeovers = all;
                taken.into_iter().map(News::Takeover).collect()
            }
        })
    }

    async fn settle_news(
        &self,
        news: &[NewsId],
        worker: Uuid,
        settled: Settled,
        _until: Deadline,
    ) -> StoreResult<()> {
        let mut state = self.state.lock();
        for id in news {
            match id {
                NewsId::Ended(aid, event) => state.ends.settle(aid, *event, worker, settled),
                NewsId::Takeover(event) => state.takeovers.settle(*event, worker, settled),
            }
        }
        Ok(())
    }
}
