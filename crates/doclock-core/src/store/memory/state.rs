//! The content of the embedded store, behind one mutex.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, Instant, SystemTime},
};

use uuid::Uuid;

use crate::{
    clock,
    freeze::Freeze,
    key::LockKey,
    lock::{Aid, Holder, Lock},
    server::ServerNote,
    store::{
        Acquisition, Change, DEFAULT_TTL, Rules, StoredDocument,
        lock_rules::{Grant, Moment, Record},
        memory::{changes::Changes, ends::Ends, takeovers::Takeovers},
    },
    takeover::Takeover,
};

/// How many replaced expired grants are kept for the sweep.
const MAX_FORMER: usize = 10_000;
const MAX_SERVERS: usize = 200;
const NOTE_COUNTS_FOR: Duration = Duration::from_secs(3 * 60);

#[derive(Debug)]
pub(super) struct State {
    /// The clock is monotonic: it counts from here, plus the time by which a test has advanced it.
    pub(super) started: Instant,
    pub(super) turned_on: Duration,
    pub(super) rules: HashMap<String, Rules>,
    pub(super) locks: BTreeMap<LockKey, Record>,
    pub(super) ends: Ends,
    /// Expired grants that another session has replaced. The sweep reports their sessions.
    pub(super) former: Vec<(LockKey, Grant)>,
    pub(super) changes: Changes,
    pub(super) documents: BTreeMap<LockKey, StoredDocument>,
    /// The freezes, with their ends on the store's clock, and with the servers that obey them.
    pub(super) freezes: Vec<(Freeze, Duration, BTreeSet<Uuid>)>,
    pub(super) takeovers: Takeovers,
    /// The notes of the servers, with the times at which the notes cease to count.
    pub(super) servers: Vec<(ServerNote, Duration)>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            started: clock::now(),
            turned_on: Duration::ZERO,
            rules: HashMap::new(),
            locks: BTreeMap::new(),
            ends: Ends::default(),
            former: Vec::new(),
            changes: Changes::default(),
            documents: BTreeMap::new(),
            freezes: Vec::new(),
            takeovers: Takeovers::default(),
            servers: Vec::new(),
        }
    }
}

impl State {
    pub(super) fn now(&self) -> Duration {
        self.moment().now
    }

    pub(super) fn moment(&self) -> Moment {
        let read = clock::now();
        let now = read.duration_since(self.started) + self.turned_on;
        Moment { now, read, date: SystemTime::now() }
    }

    pub(super) fn rules_of(&self, collection: &str) -> Rules {
        let rules = self.rules.get(collection);
        rules.copied().unwrap_or_else(|| Rules::new(DEFAULT_TTL))
    }

    /// Applies one rule to the record of the document. A record with nothing in it is not kept.
    pub(super) fn step<T>(
        &mut self,
        key: &LockKey,
        decide: impl FnOnce(&mut Record, &Rules, Moment) -> T,
    ) -> T {
        let (moment, rules) = (self.moment(), self.rules_of(key.collection()));
        let record = self.locks.entry(key.clone()).or_default();
        let answer = decide(record, &rules, moment);
        if record.is_empty(&rules) {
            self.locks.remove(key);
        }
        answer
    }

    pub(super) fn note_server(&mut self, id: Uuid, note: Option<&ServerNote>) -> Vec<ServerNote> {
        let now = self.now();
        self.servers.retain(|(server, until)| *until > now && server.id != id);
        self.servers.truncate(MAX_SERVERS - 1);
        self.servers.extend(note.map(|note| (note.clone(), now.saturating_add(NOTE_COUNTS_FOR))));
        self.servers.iter().map(|(server, _)| server.clone()).collect()
    }

    /// Keeps expired grants that another session has just replaced.
    pub(super) fn leave_to_sweep(&mut self, key: &LockKey, expired: Vec<Grant>) {
        // Bounded, because without a sweep nobody ever removes these grants.
        let room = MAX_FORMER.saturating_sub(self.former.len());
        self.former.extend(expired.into_iter().take(room).map(|grant| (key.clone(), grant)));
    }

    /// The live locks of the collection, document by document.
    pub(super) fn live_in<'a>(
        &'a self,
        collection: &'a str,
        aids: Option<&'a [Aid]>,
        now: Duration,
    ) -> impl Iterator<Item = (&'a LockKey, Vec<&'a Grant>)> {
        let of_collection =
            self.locks.iter().filter(move |(key, _)| key.collection() == collection);
        of_collection.filter_map(move |(key, record)| {
            let is_listed = |grant: &&Grant| {
                grant.is_live(now) && aids.is_none_or(|aids| aids.contains(&grant.aid))
            };
            let live: Vec<_> = record.grants.iter().filter(is_listed).collect();
            (!live.is_empty()).then_some((key, live))
        })
    }

    /// The live locks of these sessions, or of all, on at most `most` documents. All readers of a document are listed, so
    /// there may be more locks.
    pub(super) fn locks_in(
        &mut self,
        collection: &str,
        aids: Option<&[Aid]>,
        most: usize,
    ) -> Vec<Lock> {
        let moment = self.moment();
        let documents = self.live_in(collection, aids, moment.now).take(most);
        let locks = documents.flat_map(|(key, grants)| {
            grants.into_iter().map(|grant| grant.to_lock(key, moment)).collect::<Vec<_>>()
        });
        locks.collect()
    }

    /// True if this takeover was noted but not carried out: the holder still has its lock.
    pub(super) fn still_has(&self, takeover: &Takeover) -> bool {
        let Takeover { key, aid, token, .. } = takeover;
        let (now, record) = (self.now(), self.locks.get(key));
        token.is_some_and(|token| {
            let is_it = |grant: &Grant| grant.is_live(now) && grant.is_acquisition(aid, token);
            record.is_some_and(|record| record.grants.iter().any(is_it))
        })
    }

    /// Removes all locks of the session, and returns the keys of those that were live.
    pub(super) fn remove_all(
        &mut self,
        collections: &[&str],
        aid: &Aid,
        now: Duration,
    ) -> Vec<LockKey> {
        let of_session: Vec<_> = (self.locks.iter())
            .filter(|(key, record)| {
                collections.contains(&key.collection())
                    && record.grants.iter().any(|grant| grant.aid == *aid)
            })
            .map(|(key, record)| {
                (key.clone(), record.grants.iter().any(|g| g.aid == *aid && g.is_live(now)))
            })
            .collect();
        for (key, _) in &of_session {
            self.remove_if(key, |grant| grant.aid == *aid);
        }
        of_session.into_iter().filter(|(_, live)| *live).map(|(key, _)| key).collect()
    }

    /// The locks that the session has lost because they expired, on record or replaced since, and that no sweep has
    /// seen. They are taken: the caller announces them.
    pub(super) fn expired_of(
        &mut self,
        collections: &[&str],
        aid: &Aid,
        now: Duration,
    ) -> Vec<LockKey> {
        let is_own = |key: &LockKey, grant: &Grant| {
            let counts = grant.aid == *aid && !grant.has_reached_max_hold();
            counts && collections.contains(&key.collection())
        };
        let is_lost = |key: &LockKey, grant: &Grant| is_own(key, grant) && !grant.is_live(now);
        // Another session has these, even if the clock was set back since.
        let former = self.former.extract_if(.., |(key, grant)| is_own(key, grant));
        let mut lost: Vec<_> = former.map(|(key, _)| key).collect();
        let on_record = self
            .locks
            .iter()
            .filter(|(key, record)| record.grants.iter().any(|grant| is_lost(key, grant)));
        lost.extend(on_record.map(|(key, _)| key.clone()));
        lost
    }

    pub(super) fn has_expired(&self, held: &Acquisition) -> bool {
        let is_it = |grant: &Grant| grant.is_acquisition(&held.aid, held.token);
        let record = self.locks.get(&held.key);
        match record.and_then(|record| record.grants.iter().find(|grant| is_it(grant))) {
            Some(grant) => grant.is_idle(self.now()),
            None => {
                self.former.iter().any(|(key, grant)| *key == held.key && is_it(grant))
                    || self.ends.has_expired(&held.key, held.token)
            }
        }
    }

    /// The holder whose session this is, if the session has a lock.
    pub(super) fn holder_of(&self, collections: &[&str], aid: &Aid) -> Option<Holder> {
        let ours = self.locks.iter().filter(|(key, _)| collections.contains(&key.collection()));
        let grants = ours.flat_map(|(_, record)| &record.grants);
        grants.filter(|grant| grant.aid == *aid).find_map(|grant| grant.holder.clone())
    }

    /// Removes the grants on the document for which `goes` holds, and tells watchers.
    pub(super) fn remove_if(&mut self, key: &LockKey, goes: impl Fn(&Grant) -> bool) {
        if self.step(key, |record, _, moment| record.remove_if(moment.now, goes)) {
            self.changes.tell(Change::Freed(key.clone()));
        }
    }
}
