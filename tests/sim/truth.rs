//! What really is on record, step by step, and whom the listeners have yet to hear of.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::time::Duration;

use actix_doclock::{Aid, LockKey, LockToken, SessionEnded, store::OnRecord};

/// Why a grant may have gone in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Why<'a> {
    /// Given back, broken, handed over, or gone with its session, which was ended.
    Removed,
    /// This session was granted a lock.
    Granted(&'a Aid),
    /// It had expired.
    Swept,
    /// A transaction has committed that touched it some time ago, and kept everybody else from it.
    Committed,
}

/// Part of what the primary has: a fail-over takes it back with the rest.
#[derive(Debug, Clone, Default)]
pub(crate) struct Truth {
    grants: Vec<OnRecord>,
    /// Locks that expired and are off the record, with nobody told of it: by session.
    untold: BTreeMap<Aid, BTreeMap<LockKey, Expired>>,
    /// The same of sessions that lived on by another lock. A sweep that sees them only when that lock
    /// has gone, too, announces them.
    lived_on: BTreeMap<Aid, BTreeSet<LockKey>>,
    /// Sessions that have logged out. What a late duplicate of a request locks for them later is not
    /// announced again.
    ended: BTreeSet<Aid>,
}

/// A lock that lived until then.
#[derive(Debug, Clone, Copy)]
struct Expired {
    until: Duration,
    token: LockToken,
}

impl From<&OnRecord> for Expired {
    fn from(grant: &OnRecord) -> Self {
        Self { until: grant.until, token: grant.token }
    }
}

/// What a fail-over does not take back: who has been heard of, and who may be.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    /// Sessions that were idle at a sweep, since they were announced last.
    idle: BTreeSet<Aid>,
    /// The documents that their sessions lost by expiry, ever.
    expired: BTreeSet<(Aid, LockKey)>,
    events: BTreeMap<uuid::Uuid, usize>,
    ended: BTreeSet<Aid>,
}

impl Truth {
    /// The record is like this after a step. What is wrong with that, if anything is.
    pub(crate) fn now_is(
        &mut self,
        grants: Vec<OnRecord>,
        why: Why<'_>,
        clock: Duration,
    ) -> Option<String> {
        let revived = grants.iter().filter(|new| new.until > clock).find_map(|new| {
            let same = self.grants.iter().find(|it| (&it.key, it.token) == (&new.key, new.token));
            let before = same.filter(|it| it.until <= clock && why != Why::Committed)?;
            let (key, token) = (&new.key, new.token);
            Some(format!(
                "{key:?}: at {clock:?} {token} has come back to life, until {:?} instead of {:?}: {why:?}",
                new.until, before.until,
            ))
        });
        let is_there =
            |it: &&OnRecord| grants.iter().any(|new| (&new.key, new.token) == (&it.key, it.token));
        for gone in self.grants.iter().filter(|it| !is_there(it)) {
            let by_own_session = why == Why::Granted(&gone.aid);
            let is_silence = gone.until <= clock && !gone.at_max_hold;
            let has_ended = self.ended.contains(&gone.aid);
            if is_silence && why != Why::Removed && !by_own_session && !has_ended {
                let of_session = self.untold.entry(gone.aid.clone()).or_default();
                of_session.insert(gone.key.clone(), gone.into());
            }
        }
        self.grants = grants;
        if !self.untold.is_empty() {
            // Who is back may fall silent again, and is announced then.
            let live: BTreeSet<_> =
                self.grants.iter().filter(|it| it.until > clock).map(|it| &it.aid).collect();
            let (lived_on, untold) =
                take(&mut self.untold).into_iter().partition(|(aid, _)| live.contains(aid));
            self.untold = untold;
            let lived_on: BTreeMap<_, BTreeMap<_, _>> = lived_on;
            for (aid, keys) in lived_on {
                self.lived_on.entry(aid).or_default().extend(keys.into_keys());
            }
        }
        revived
    }

    pub(crate) fn live(&self, clock: Duration) -> impl Iterator<Item = &OnRecord> {
        self.grants.iter().filter(move |it| it.until > clock)
    }

    /// What has expired, on record or not: by session, without those that have a live lock.
    fn silences(&self, clock: Duration) -> BTreeMap<&Aid, BTreeMap<&LockKey, Expired>> {
        let mut all: BTreeMap<&Aid, BTreeMap<&LockKey, Expired>> = BTreeMap::new();
        for (aid, keys) in &self.untold {
            all.entry(aid).or_default().extend(keys.iter().map(|(key, it)| (key, *it)));
        }
        for it in self.grants.iter().filter(|it| it.until <= clock && !it.at_max_hold) {
            all.entry(&it.aid).or_default().insert(&it.key, it.into());
        }
        all.retain(|aid, _| {
            !self.ended.contains(aid) && !self.live(clock).any(|it| it.aid == **aid)
        });
        all
    }

    /// Who must be announced, with the document that expired last: idle by the store's clock since
    /// then. A grant to a late duplicate of a request, of which nobody heard, obliges nobody.
    pub(crate) fn owed(
        &self,
        clock: Duration,
        was_heard_of: impl Fn(LockToken) -> bool,
    ) -> Vec<(Aid, LockKey, Duration)> {
        let silences = self.silences(clock);
        let last = silences.into_iter().filter_map(|(aid, keys)| {
            let heard_of = keys.into_iter().filter(|(_, it)| was_heard_of(it.token));
            let (key, last) = heard_of.max_by_key(|(_, it)| it.until)?;
            Some((aid.clone(), key.clone(), clock.saturating_sub(last.until)))
        });
        last.collect()
    }

    /// A listener was called.
    pub(crate) fn told(&mut self, ended: &SessionEnded) {
        self.lived_on.remove(&ended.aid);
        let Some(keys) = self.untold.get_mut(&ended.aid) else { return };
        // What expired before is of the same silence, or was forgotten with its ttl.
        let told = keys.iter().filter(|(key, _)| ended.locks.contains(key));
        let told = told.map(|(_, it)| it.until).max();
        keys.retain(|_, it| !ended.for_good && told.is_none_or(|told| it.until > told));
        if keys.is_empty() {
            self.untold.remove(&ended.aid);
        }
    }

    /// Its own logout names it.
    pub(crate) fn ended(&mut self, aid: &Aid) {
        self.untold.remove(aid);
        self.ended.insert(aid.clone());
    }
}

impl Heard {
    /// A sweep sees this.
    pub(crate) fn swept(&mut self, truth: &Truth, clock: Duration) {
        for it in truth.grants.iter().filter(|it| it.until <= clock) {
            self.expired.insert((it.aid.clone(), it.key.clone()));
        }
        for (aid, keys) in truth.silences(clock) {
            self.expired.extend(keys.into_keys().map(|key| (aid.clone(), key.clone())));
            self.idle.insert(aid.clone());
        }
        for (aid, keys) in &truth.lived_on {
            if !truth.live(clock).any(|it| it.aid == *aid) {
                self.expired.extend(keys.iter().map(|key| (aid.clone(), key.clone())));
                self.idle.insert(aid.clone());
            }
        }
    }

    /// What is wrong with this announcement.
    pub(crate) fn of(&mut self, ended: &SessionEnded) -> Option<String> {
        let times = self.events.entry(ended.event).or_default();
        *times += 1;
        if ended.for_good {
            self.ended.insert(ended.aid.clone());
            return None;
        }
        if *times > 1 {
            return None;
        }
        if !self.idle.remove(&ended.aid) {
            return Some(format!("{:?} was announced as idle, and was not", ended.aid));
        }
        let wrong = ended.locks.iter().find(|key| {
            let it = (ended.aid.clone(), (*key).clone());
            !self.expired.contains(&it)
        })?;
        Some(format!("{:?} was announced with {wrong}, which it did not lose", ended.aid))
    }

    pub(crate) fn has_ended(&self, aid: &Aid) -> bool {
        self.ended.contains(aid)
    }
}
