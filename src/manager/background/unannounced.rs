//! Counts the idle sessions of which nobody is told, because their locks vanished before the reaper came to
//! them: MongoDB's TTL monitor removes expired records by itself.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use crate::{
    clock,
    error::Result,
    lock::Aid,
    manager::{Core, observe},
    store::Swept,
};
use parking_lot::Mutex;

/// How many overdue sessions are remembered.
const MOST: usize = 50_000;
/// How many of these sessions are asked for together.
const AT_ONCE: usize = 1_000;

/// An end is recorded before its locks are gone, so it may be older than the list.
const BEFORE: Duration = Duration::from_secs(60);

/// The sessions that were overdue when the reaper met more than it can end at once.
#[derive(Debug, Default)]
pub(in crate::manager) struct Unannounced(Mutex<Overdue>);

#[derive(Debug, Default)]
struct Overdue {
    overdue: Vec<Aid>,
    since: Option<Instant>,
    count: u64,
    latest: Option<Instant>,
}

impl Unannounced {
    /// How many unannounced sessions there were, and when the latest were noticed.
    pub(in crate::manager) fn so_far(&self) -> (u64, Option<Instant>) {
        let state = self.0.lock();
        (state.count, state.latest)
    }
}

impl Core {
    /// Called after each sweep. In normal operation this costs nothing. After a sweep that reached its limit, all
    /// overdue sessions are listed; once the sweeps have caught up, that list is checked.
    pub(in crate::manager) async fn watch_the_overdue(
        &self,
        collections: &[&'static str],
        swept: &Swept,
    ) -> Result<()> {
        let unannounced = &self.unannounced;
        let is_watching = !unannounced.0.lock().overdue.is_empty();
        if swept.more && !is_watching {
            let since = clock::now();
            let overdue = self.overdue(collections).await?;
            let mut state = unannounced.0.lock();
            (state.overdue, state.since) = (overdue, Some(since));
        } else if !swept.more && is_watching {
            let (overdue, since) = {
                let state = unannounced.0.lock();
                (state.overdue.clone(), state.since.map_or(Duration::MAX, clock::since))
            };
            let missed = self.missed_of(collections, overdue, since).await?;
            let mut state = unannounced.0.lock();
            state.overdue.clear();
            if missed > 0 {
                state.count += missed;
                state.latest = Some(clock::now());
                drop(state);
                observe::unannounced(missed);
                log::warn!(
                    target: "actix_doclock::background",
                    "{missed} idle sessions are not announced: their locks were removed, probably by MongoDB's TTL \
                     monitor, before the reaper came to them; see `doclock doctor`, and whether a reaper runs",
                );
            }
        }
        Ok(())
    }

    async fn overdue(&self, collections: &[&'static str]) -> Result<Vec<Aid>> {
        let args = collections.to_vec();
        self.verbs.ask("overdue", args, |store, all, until| store.overdue(all, MOST, until)).await
    }

    /// How many of these sessions, which were overdue so long ago, have had no end since and have no lock now, neither an
    /// expired one (`still`) nor a live one (`came_back`).
    async fn missed_of(
        &self,
        collections: &[&'static str],
        aids: Vec<Aid>,
        ago: Duration,
    ) -> Result<u64> {
        // Another server may still be about to end some of them.
        let still: HashSet<Aid> = self.overdue(collections).await?.into_iter().collect();
        let mut missed = 0;
        for aids in aids.chunks(AT_ONCE) {
            let aids = aids.to_vec();
            let ends = self
                .verbs
                .ask("last_ends", aids.clone(), |store, aids, until| store.last_ends(aids, until));
            let ends = ends.await?;
            let without = aids.into_iter().zip(ends).filter(|(_, end)| {
                // An older end belongs to an earlier idle time.
                end.is_none_or(|end| end.ago > ago.saturating_add(BEFORE))
            });
            let without: Vec<_> =
                without.map(|(aid, _)| aid).filter(|aid| !still.contains(aid)).collect();
            let mut came_back = HashSet::new();
            for &collection in collections.iter().filter(|_| !without.is_empty()) {
                let until = self.verbs.until();
                let live = self.verbs.locks_of(collection, without.clone(), MOST, until);
                came_back.extend(live.await?.into_iter().map(|lock| lock.aid));
            }
            missed += without.iter().filter(|aid| !came_back.contains(aid)).count() as u64;
        }
        Ok(missed)
    }
}
