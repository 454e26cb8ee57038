//! What the embedded store holds, behind one mutex.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant, SystemTime},
};

use serde_json::Value;

use super::{ends::Ends, freed::Freed};
use crate::{Aid, Holder, Lock, LockKey, LockToken, Mode, store::Released};

#[derive(Debug)]
pub(super) struct State {
    /// The clock is a monotonic one: it counts from here, plus what a test has turned it on.
    pub(super) started: Instant,
    pub(super) turned_on: Duration,
    pub(super) locks: BTreeMap<LockKey, Record>,
    pub(super) ends: Ends,
    pub(super) freed: Freed,
    pub(super) documents: BTreeMap<LockKey, Value>,
}

#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) ts: Duration,
    pub(super) ttl: Duration,
    pub(super) aid: Aid,
    pub(super) token: LockToken,
    pub(super) since: SystemTime,
    pub(super) holder: Holder,
    /// When it runs out at the latest.
    pub(super) until: Option<Duration>,
    /// A second request was told that the session has it.
    pub(super) again: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            turned_on: Duration::ZERO,
            locks: BTreeMap::new(),
            ends: Ends::default(),
            freed: Freed::default(),
            documents: BTreeMap::new(),
        }
    }
}

impl Record {
    pub(super) fn is_live(&self, now: Duration) -> bool {
        self.ts + self.ttl > now
    }

    /// Not beyond the end of `max_hold`.
    pub(super) fn renew(&mut self, now: Duration, ttl: Duration) {
        self.ts = now;
        self.ttl = self.until.map_or(ttl, |until| ttl.min(until.saturating_sub(now)));
    }

    pub(super) fn has_reached_max_hold(&self) -> bool {
        self.until.is_some_and(|until| self.ts + self.ttl >= until)
    }

    pub(super) fn is_acquisition(&self, aid: &Aid, token: LockToken) -> bool {
        self.aid == *aid && self.token == token
    }

    pub(super) fn to_lock(&self, key: &LockKey, now: Duration) -> Lock {
        Lock {
            key: key.clone(),
            mode: Mode::Exclusive,
            aid: self.aid.clone(),
            token: Some(self.token),
            holder: Some(self.holder.clone()),
            since: self.since,
            fence: None,
            expires_at: Instant::now() + (self.ts + self.ttl).saturating_sub(now),
        }
    }
}

impl State {
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed() + self.turned_on
    }

    pub(super) fn live(&mut self, key: &LockKey, now: Duration) -> Option<&mut Record> {
        self.locks.get_mut(key).filter(|record| record.is_live(now))
    }

    pub(super) fn live_in<'a>(
        &'a mut self,
        collection: &'a str,
        aids: Option<&'a [Aid]>,
        now: Duration,
    ) -> impl Iterator<Item = (&'a LockKey, &'a mut Record)> {
        self.locks.iter_mut().filter(move |(key, record)| {
            key.collection() == collection
                && record.is_live(now)
                && aids.is_none_or(|aids| aids.contains(&record.aid))
        })
    }

    /// Removes all records of the session, and names those that were live.
    pub(super) fn remove_all(
        &mut self,
        collections: &[&str],
        aid: &Aid,
        now: Duration,
    ) -> Vec<LockKey> {
        let mut live = Vec::new();
        self.locks.retain(|key, record| {
            let goes = collections.contains(&key.collection()) && record.aid == *aid;
            if goes && record.is_live(now) {
                live.push(key.clone());
            }
            if goes {
                self.freed.tell(key);
            }
            !goes
        });
        live
    }

    pub(super) fn remove_if(
        &mut self,
        key: &LockKey,
        matches: impl Fn(&Record) -> bool,
    ) -> Released {
        if self.locks.get(key).is_some_and(matches) {
            self.locks.remove(key);
            self.freed.tell(key);
            Released::Released
        } else {
            Released::AlreadyGone
        }
    }
}
