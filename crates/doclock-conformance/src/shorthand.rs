use std::{future::Future, slice, time::Duration};

use uuid::Uuid;

use doclock_core::{
    Aid, Lock, LockKey, LockToken, Mode, Released, SessionEnded, StoreError, Takeover,
    store::{
        Acquisition, Active, Deadline, LastEnd, News, NewsId, Outbox, Query, Removal, Settled,
        Store, TakenBy,
    },
};

const NONE: Deadline = Deadline::NONE;

/// The answer of a store: a future that a task may run.
pub trait Answer<T>: Future<Output = Result<T, StoreError>> + Send {}

impl<T, F: Future<Output = Result<T, StoreError>> + Send> Answer<T> for F {}

/// Shorter calls of the verbs of a store, for tests.
pub trait Shorthand: Store {
    /// [`Locks::renew`](doclock_core::store::Locks::renew) with the ttl that each lock has. Nothing may be late. Returns
    /// the number of documents.
    fn renew_all(&self, collection: &str, aids: &[Aid]) -> impl Answer<u64> {
        async move {
            let active: Vec<_> = aids.iter().map(Active::all_of).collect();
            let renewed = self.renew(collection, &active, Duration::ZERO, NONE).await?;
            assert!(renewed.late.is_empty(), "{renewed:?}");
            Ok(renewed.documents)
        }
    }

    /// [`Removal::Release`].
    fn release(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        mode: Mode,
    ) -> impl Answer<Released> {
        let it = Acquisition { key: key.clone(), aid: aid.clone(), token, mode };
        async move { self.remove_lock(Removal::Release(&it), NONE).await }
    }

    /// [`Removal::Retract`].
    fn retract(
        &self,
        key: &LockKey,
        aid: &Aid,
        tokens: &[LockToken],
        mode: Mode,
    ) -> impl Answer<Released> {
        let attempt = |&token| Acquisition { key: key.clone(), aid: aid.clone(), token, mode };
        let attempts: Vec<_> = tokens.iter().map(attempt).collect();
        async move { self.remove_lock(Removal::Retract(&attempts), NONE).await }
    }

    /// [`Removal::Break`].
    fn break_lock(&self, seen: &Lock, taken: &TakenBy) -> impl Answer<Released> {
        async move { self.remove_lock(Removal::Break { seen, taken }, NONE).await }
    }

    /// [`Query::Each`], of one document.
    fn inspect(&self, key: &LockKey, aid: Option<&Aid>) -> impl Answer<Option<Lock>> {
        async move {
            let each = Query::Each { keys: slice::from_ref(key), aid };
            Ok(self.locks(key.collection(), each, 1, NONE).await?.pop())
        }
    }

    /// [`Query::Of`], or [`Query::All`].
    fn list(&self, collection: &str, aids: Option<&[Aid]>, limit: usize) -> impl Answer<Vec<Lock>> {
        self.locks(collection, aids.map_or(Query::All, Query::Of), limit, NONE)
    }

    /// [`Query::On`].
    fn locks_on(&self, collection: &str, keys: &[LockKey]) -> impl Answer<Vec<Lock>> {
        self.locks(collection, Query::On(keys), keys.len(), NONE)
    }

    /// [`Sessions::last_ends`](doclock_core::store::Sessions::last_ends) of one session.
    fn last_end(&self, aid: &Aid) -> impl Answer<Option<LastEnd>> {
        async move { Ok(self.last_ends(slice::from_ref(aid), NONE).await?.pop().flatten()) }
    }

    /// How long ago the session ended permanently, by
    /// [`Sessions::last_ends`](doclock_core::store::Sessions::last_ends).
    fn session_ended(&self, aid: &Aid) -> impl Answer<Option<Duration>> {
        async move {
            let end = self.last_end(aid).await?;
            Ok(end.filter(|end| end.for_good).map(|end| end.ago))
        }
    }

    /// The end of this session may be told: [`Sessions::settle_news`](doclock_core::store::Sessions::settle_news).
    fn ready(&self, aid: &Aid, worker: Uuid) -> impl Answer<()> {
        let end = NewsId::Ended(aid.clone(), None);
        async move { self.settle_news(&[end], worker, Settled::Ready, NONE).await }
    }

    /// [`Sessions::take_news`](doclock_core::store::Sessions::take_news) of ends.
    fn take_ends(
        &self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> impl Answer<Vec<SessionEnded>> {
        async move {
            let news = self.take_news(Outbox::Ends, worker, lease, limit, NONE).await?;
            let ended = |it| match it {
                News::Ended(ended) => ended,
                News::Takeover(other) => panic!("not an end: {other:?}"),
            };
            Ok(news.into_iter().map(ended).collect())
        }
    }

    /// These ends were told.
    fn told(&self, worker: Uuid, ended: &[SessionEnded]) -> impl Answer<()> {
        let id = |end: &SessionEnded| NewsId::Ended(end.aid.clone(), Some(end.event));
        let ids: Vec<_> = ended.iter().map(id).collect();
        async move { self.settle_news(&ids, worker, Settled::Told, NONE).await }
    }

    /// [`Sessions::take_news`](doclock_core::store::Sessions::take_news) of takeovers.
    fn take_takeovers(
        &self,
        collections: &[&str],
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> impl Answer<Vec<Takeover>> {
        async move {
            let of = Outbox::Takeovers(collections);
            let news = self.take_news(of, worker, lease, limit, NONE).await?;
            let takeover = |it| match it {
                News::Takeover(takeover) => takeover,
                News::Ended(other) => panic!("not a takeover: {other:?}"),
            };
            Ok(news.into_iter().map(takeover).collect())
        }
    }

    /// Settles one takeover.
    fn settle(&self, event: Uuid, worker: Uuid, settled: Settled) -> impl Answer<()> {
        let id = NewsId::Takeover(event);
        async move { self.settle_news(&[id], worker, settled, NONE).await }
    }
}

impl<S: Store> Shorthand for S {}
