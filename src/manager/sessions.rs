//! The sessions that hold locks: their activity, and their ends.

use std::{
    iter,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{StreamExt, future::BoxFuture};
use tokio::sync::oneshot::Receiver;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    clock,
    ended::EndReason,
    error::{LockError, Result, StoreError},
    key::LockKey,
    lock::{Aid, PageId},
    manager::{
        collections::Collections, observe, reads::Reads, verbs, verbs::Verbs, watch::ends::Served,
        watched::Beliefs,
    },
    random,
    store::{Active, Ended, LastEnd, NamedBy, NewsId, Settled},
};

pub(super) mod pieces;
mod renewals;

use pieces::Paces;
use renewals::Renewals;

/// Renews and ends sessions.
pub(crate) struct Sessions {
    pub(super) verbs: Arc<Verbs>,
    pub(super) collections: Arc<Collections>,
    pub(super) beliefs: Arc<Beliefs>,
    pub(super) reads: Arc<Reads>,
    pub(super) renewals: Renewals,
    pub(super) paces: Paces,
    pub(super) served: Arc<Served>,
    pub(super) stop: CancellationToken,
    pub(super) ttl: Duration,
    pub(super) max_hold: Option<Duration>,
}

impl Sessions {
    /// Renews all locks of the session, and counts them.
    pub(crate) async fn renew(self: &Arc<Self>, aid: &Aid) -> Result<u64> {
        observe::in_span!("doclock.renew", None, async {
            let names = self.collections.names().into_iter();
            let due = names.map(|name| (name.to_owned(), vec![Active::all_of(aid)])).collect();
            let mut pieces = self.renew_in_pieces(due, self.ttl, self.verbs.until());
            let mut renewed = Ok(0);
            while let Some(piece) = pieces.next().await {
                renewed = renewed.and_then(|documents| Ok(documents + piece.renewed?));
            }
            observe::renewed("session", &renewed);
            renewed
        })
    }

    /// Ends the sessions whose end a session store reports.
    pub(super) fn ends<E: Into<(String, &'static str)>>(
        self: &Arc<Self>,
    ) -> impl Fn(E) -> BoxFuture<'static, Result<()>> + Clone + Send + Sync + use<E> {
        let sessions = Arc::clone(self);
        move |end| {
            let (sessions, (aid, reason)) = (Arc::clone(&sessions), end.into());
            Box::pin(async move {
                if sessions.collections.names().is_empty() {
                    // The server is just starting, and would not release the locks.
                    return Err(LockError::Misconfigured("no type is registered yet".to_owned()));
                }
                sessions.end(&Aid::from(aid), EndReason::from_name(reason)).await.map(drop)
            })
        }
    }

    pub(crate) async fn end(self: &Arc<Self>, aid: &Aid, reason: EndReason) -> Result<Ended> {
        observe::in_span!("doclock.end_session", None, async {
            // Each operation has a name of its own: two operations of one server are as independent as those
            // of two servers.
            let worker = random::uuid();
            let (asked, until) = (clock::now(), self.verbs.until());
            let (sessions, aid_of) = (Arc::clone(self), aid.clone());
            let end = async move {
                let end_in = async |names: &[&str]| {
                    let store = &sessions.verbs.store;
                    let end = |until| store.end_session(&aid_of, reason, names, worker, until);
                    verbs::retry(until, verbs::FOREGROUND, end).await
                };
                let names = sessions.collections.names();
                let mut ended = end_in(&names).await;
                // Read after the tombstone was written: a request that takes a lock in a collection that is new by then
                // meets the tombstone.
                let all = sessions.collections.all_collections(until).await;
                if ended.is_ok() && all != names {
                    ended = end_in(&all).await;
                }
                if ended.is_ok() {
                    // The caller does not wait for this.
                    let (end, until) = (NewsId::Ended(aid_of, None), sessions.verbs.until());
                    sessions.verbs.settle(end, worker, Settled::Ready, until);
                }
                ended
            };
            // The end goes on without its caller.
            let ended = self.verbs.complete("end_session", until, &TaskTracker::new(), end).await?;
            observe::session_ended(reason);
            self.beliefs.gone_all_of(aid, &ended.locks, asked);
            self.served.ended(aid);
            Ok(ended)
        })
    }

    /// Ends a session without making the caller wait.
    pub(crate) fn end_in_background(self: &Arc<Self>, aid: Aid) {
        let sessions = Arc::clone(self);
        self.verbs.runner.spawn(&TaskTracker::new(), async move {
            if let Err(e) = sessions.end(&aid, EndReason::LoggedOut).await {
                log::error!(
                    target: "actix_doclock::manager",
                    "the locks of the ended session {aid:?} were not released, and remain until they \
                     expire: {e}",
                );
            }
        });
    }

    /// Releases all locks of the session, and returns the documents.
    pub(crate) async fn release_all(&self, aid: &Aid) -> Result<Vec<LockKey>> {
        let until = self.verbs.until();
        let asked = clock::now();
        self.collections.all_collections(until).await;
        let released = self.reads.in_each(|collection| {
            let args = (collection, aid.clone());
            self.verbs.run("release_all", until, args, |store, (collection, aid), until| {
                store.release_all(collection, aid, until)
            })
        });
        let released: Vec<_> = released.await?.into_iter().flatten().collect();
        self.beliefs.gone_all_of(aid, &released, asked);
        Ok(released)
    }

    pub(super) async fn last_end(&self, aid: &Aid, until: Instant) -> Result<Option<LastEnd>> {
        Ok(self.last_ends(vec![aid.clone()], until).await?.swap_remove(0))
    }

    pub(super) async fn last_ends(
        &self,
        aids: Vec<Aid>,
        until: Instant,
    ) -> Result<Vec<Option<LastEnd>>> {
        let ends = self
            .verbs
            .run("last_ends", until, aids, |store, aids, until| store.last_ends(aids, until));
        ends.await
    }

    /// # Errors
    /// [`LockError::SessionEnded`] if the session has ended permanently, [`LockError::PageLeft`] if this page of it has
    /// been left.
    pub(crate) async fn refuse_ended(
        &self,
        aid: &Aid,
        page: Option<PageId>,
        until: Instant,
    ) -> Result<()> {
        let aids = iter::once(aid.clone()).chain(page.map(|page| aid.of_page(page))).collect();
        let ends = self.last_ends(aids, until).await?;
        match &ends[..] {
            [Some(LastEnd { for_good: true, ago, .. }), ..] => {
                Err(LockError::SessionEnded { ago: *ago })
            }
            [_, Some(_)] => Err(LockError::PageLeft),
            _ => Ok(()),
        }
    }

    /// Remembers that this page of the session has been left: from now on it is refused what it has asked for, on every
    /// server. At most 120 pages of a session are remembered in a minute.
    pub(crate) async fn end_page(&self, aid: &Aid, page: PageId, until: Instant) -> Result<()> {
        let page = aid.of_page(page);
        if self.beliefs.activity.may_leave(aid, &page) {
            let page = page.clone();
            let noted = self
                .verbs
                .run("end_page", until, page, |store, page, until| store.end_page(page, until));
            noted.await?;
        }
        self.served.ended(&page);
        Ok(())
    }

    /// Renews the locks of an active session, but of its tabs only the named ones. Renews at most once in a third of
    /// the ttl, without making the caller wait. If a renewal is due, returns a receiver of its end.
    pub(crate) fn touch(self: &Arc<Self>, aid: &Aid, named: &[NamedBy]) -> Option<Receiver<()>> {
        let is_due = self.beliefs.activity.is_due(aid, named);
        is_due.then(|| self.renew_soon(aid.clone(), named.to_vec()))
    }

    /// The session middleware of a request did not reach its store.
    pub(crate) fn failed(&self, error: &StoreError) {
        observe::failed("session", error);
    }

    /// A new session holds no locks, so none are due for renewal.
    pub(crate) fn session_begins(&self, aid: &Aid) {
        self.beliefs.activity.session_begins(aid);
    }
}
