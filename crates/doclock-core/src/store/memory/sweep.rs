//! Removes expired locks.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    key::LockKey,
    lock::Aid,
    store::{
        Change, Swept,
        lock_rules::Grant,
        memory::{ends::Names, state::State},
    },
};

impl State {
    /// Removes the expired grants of at most `limit` sessions. A session without a live lock has become idle, and its end is
    /// noted; for another one, the expired locks alone are. A grant that has reached its `max_hold` is removed without a note.
    pub(super) fn sweep(&mut self, collections: &[&str], limit: usize) -> Swept {
        let now = self.now();
        self.forget_places(collections, now);
        let (live, expired_grants): (Vec<_>, Vec<_>) = (self.locks.iter())
            .filter(|(key, _)| collections.contains(&key.collection()))
            .flat_map(|(key, record)| record.grants.iter().map(move |grant| (key, grant)))
            .partition(|(_, grant)| grant.is_live(now));
        let next = live.iter().map(|(_, grant)| grant.expires() - now).min();
        let awake: BTreeSet<Aid> = live.iter().map(|(_, grant)| grant.aid.clone()).collect();
        let mut expired_of: BTreeMap<Aid, Vec<(LockKey, Grant)>> = BTreeMap::new();
        for (key, grant) in expired_grants {
            if !self.ends.is_being_announced(&grant.aid, now) {
                let of_session = expired_of.entry(grant.aid.clone()).or_default();
                of_session.push((key.clone(), grant.clone()));
            }
        }
        for (key, grant) in &self.former {
            let is_ours = collections.contains(&key.collection());
            if is_ours && !self.ends.is_being_announced(&grant.aid, now) {
                let of_session = expired_of.entry(grant.aid.clone()).or_default();
                of_session.push((key.clone(), grant.clone()));
            }
        }
        let more = expired_of.len() > limit;
        let (mut sessions, mut expired) = (0, Vec::new());
        for (aid, grants) in expired_of.into_iter().take(limit) {
            for (key, grant) in &grants {
                expired.extend(grant.token.map(|token| (key.clone(), token)));
                self.remove_if(key, |it| it.is_same(grant));
            }
            self.former.retain(|(_, former)| former.aid != aid);
            let idle: Vec<_> =
                grants.into_iter().filter(|(_, grant)| !grant.has_reached_max_hold()).collect();
            self.ends.found_expired(
                idle.iter().filter_map(|(key, grant)| Some((key.clone(), grant.token?))),
            );
            let Some(ttl) = idle.iter().map(|(_, grant)| grant.ttl).max() else { continue };
            let holder = idle.first().and_then(|(_, grant)| grant.holder.clone());
            let names = Names { locks: idle.into_iter().map(|(key, _)| key).collect(), holder };
            if awake.contains(&aid) {
                self.ends.note(&aid, names, ttl, now);
            } else {
                self.ends.became_idle(&aid, names, now);
                sessions += 1;
            }
        }
        Swept {
            sessions,
            more,
            has_backlog: more,
            announcements: self.ends.some_to_announce(now) || self.takeovers.some_to_tell(now),
            next,
            expired,
            failed: None,
        }
    }

    /// Removes the expired places of waiters that have vanished.
    fn forget_places(&mut self, collections: &[&str], now: Duration) {
        let gone: Vec<_> = (self.locks.iter())
            .filter(|(key, record)| {
                collections.contains(&key.collection())
                    && record.queue.iter().any(|place| place.until <= now)
            })
            .map(|(key, _)| key.clone())
            .collect();
        for key in gone {
            self.step(&key, |record, _, moment| record.forget_places(moment.now));
            self.changes.tell(Change::Freed(key));
        }
    }
}
