//! Ends a session permanently.

use std::{slice, time::Instant};

use futures_util::future::{join, join_all};
use mongodb::options::ReturnDocument;

use crate::{
    ended::EndReason,
    lock::Aid,
    store::{
        Deadline, Ended,
        mongo::{
            ends::{
                Ends, Failures, NAMES_AT_ONCE,
                end::{self, by_aid},
                names::{Held, Names, locks_in, more_in, with_names},
            },
            error::Result,
            release::{Grants, Leased},
            send::{self, Timing, Write},
            time_limits::LIMIT,
        },
    },
};

impl Ends<'_> {
    /// Two writes: the tombstone with the names of the locks, and the removal of the locks. The end is then
    /// left to [`settle_news`](Self::settle_news), or to a sweep if this process dies. After
    /// each step any worker can continue: the tombstone prevents new locks, and the names keep any lock from
    /// being forgotten.
    pub(super) async fn end_session(&self, aid: &Aid, reason: EndReason) -> Result<Ended> {
        // If there is no answer soon, the tombstone comes first, and the names later.
        let soon = Self { until: Deadline::at(Instant::now() + LIMIT), ..*self };
        let before = soon.held_by(aid, &mut Failures::default()).await;
        // findAndModify, an upsert, returns: a new end; or an idle end that became permanent; or an end that
        // an earlier attempt of this worker began, with the names that it stored; or the end of another
        // worker, which only gets more names.
        let mut end = end::permanent(reason, self.worker);
        if !before.locks.is_empty() {
            end.push(with_names(&before));
        }
        let begun = (self.store.inner.ended)
            .find_one_and_update(by_aid(aid), end)
            .upsert(true)
            .return_document(ReturnDocument::After)
            .max_time(self.until.write_limit());
        let begun = send::modified(begun).await?;
        // A lock that was taken before the tombstone was there belonged to the session.
        let held = self.release_ended(aid, &before).await?;
        let (mut all, mut released): (_, Vec<_>) =
            (held.locks.len() + held.more, held.locked_keys().cloned().collect());
        let mine = begun.filter(|end| end.get_str("by").is_ok_and(|by| by == self.by()));
        if let Some(end) = &mine {
            all = all.max(locks_in(end).len() + more_in(end));
            released.extend(locks_in(end));
        } else {
            all = all.max(before.locks.len() + before.more);
            released.extend(before.locked_keys().cloned());
        }
        released.sort();
        released.dedup();
        // Nobody needs to look whether these documents are still locked.
        for key in &released {
            if let Ok(at) = self.store.prepared(key.collection(), self.until) {
                at.hints.gone(key.id());
            }
        }
        let more = all.saturating_sub(released.len());
        Ok(Ended { locks: released, more })
    }

    /// Stores the names of the locks of an ended session, then removes the locks. The names in `known` are already stored.
    /// If a collection fails, the locks in the others are still removed.
    pub(super) async fn release_ended(&self, aid: &Aid, known: &Names) -> Result<Names> {
        let mut failures = Failures::default();
        let mut held = self.held_by(aid, &mut failures).await;
        if held.more > 0 || held.locks.iter().any(|it| !known.locks.contains(it)) {
            self.write(by_aid(aid), &Write::Update(vec![with_names(&held)])).await?;
        }
        // The traces stay until their locks are named.
        let aids = slice::from_ref(aid);
        let all = Grants::Of(vec![aid.clone()]);
        let remove = self.remove(&all, held.may_read, &mut failures);
        let (replaced, ()) = join(self.replaced(aids), remove).await;
        let replaced = replaced?;
        if !replaced.is_empty() {
            replaced.into_iter().for_each(|(_, expired)| held.add(expired));
            self.write(by_aid(aid), &Write::Update(vec![with_names(&held)])).await?;
            self.looked_at(&held.traces).await?;
        }
        failures.first().map_or(Ok(held), Err)
    }

    /// The locks of the session that are on record, live or expired.
    async fn held_by(&self, aid: &Aid, failures: &mut Failures) -> Names {
        let held = join_all(self.collections.iter().map(async |collection| {
            let held = async { self.prepared(collection)?.of_session(aid, NAMES_AT_ONCE).await };
            (collection, held.await)
        }));
        let mut names = Names::default();
        for (collection, of_session) in held.await {
            let Some(of_session) = failures.note(collection, of_session) else { continue };
            names.may_read |= of_session.may_read;
            names.more += of_session.more;
            for Leased { lock, lease, .. } in of_session.locks {
                names.holder = names.holder.or(lock.holder);
                names.locks.push(Held { key: lock.key, lease });
            }
        }
        names
    }
}
