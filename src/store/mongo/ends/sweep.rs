//! Ends idle sessions, many at once.

use std::collections::{BTreeMap, BTreeSet};

use mongodb::bson::{Bson, Document, doc};

use crate::{
    lock::{Aid, Mode},
    store::{
        Swept,
        lock_rules::{Moment, Record},
        mongo::{
            codec::{aid_in, documents, millis},
            ends::{
                Ends, Failures, NAMES_AT_ONCE,
                end::{self, by_aid},
                names::{Expired, Held, Names, with_names},
            },
            error::{Result, store_error},
            filters::{and_live, exclusive_of, is_live, shared_of},
            lock_record::lease,
            read::Fetched,
            release::Grants,
            send::{Timing, Write, rows},
            step::Decided,
        },
    },
};

/// An end that this worker has claimed.
struct Claimed {
    aid: Aid,
    for_good: bool,
    /// True if the end already has the names of locks: from an earlier attempt, or from an idle end not
    /// yet announced.
    has_names: bool,
}

/// The expired locks of one session.
type OfSession = (Aid, Vec<Expired>);

impl Ends<'_> {
    /// Sends one query; and if there is work, about as many commands as [`end_session`](Self::end_session)
    /// has steps, whatever the number of sessions.
    pub(super) async fn sweep(&self, limit: usize) -> Result<Swept> {
        let found = self.find(limit).await?;
        let (announcements, next) = (found.announcements, found.next);
        let has_backlog = found.records >= limit;
        let mut swept = Swept { announcements, next, has_backlog, ..Swept::default() };
        let mut failures = Failures::default();
        if !found.expired.is_empty() || !found.unfinished.is_empty() {
            let all: Vec<_> = found.expired.keys().cloned().collect();
            let active = self.active(&all).await?;
            let is_idle =
                |(aid, of): &OfSession| !active.contains(aid) && of.iter().any(|it| it.idle);
            let (idle, others): (Vec<_>, Vec<_>) = found.expired.into_iter().partition(is_idle);
            let claimed = self.claim(found.unfinished, &idle).await?;
            // A worker that gets less than half of the sessions leaves the rest to the worker that has
            // them.
            let is_ahead = 2 * (claimed.len() + others.len()) > all.len();
            swept.more = has_backlog && is_ahead;
            if !claimed.is_empty() {
                self.release_claimed(&claimed, &mut swept, &mut failures).await?;
            }
            self.remove_expired(&others, &mut failures).await?;
            let removed = others.iter().flat_map(|(_, of)| of);
            swept.expired.extend(removed.filter_map(Expired::key_and_token));
        }
        for (collection, ids) in &found.left_over {
            let tidy_up = |record: &mut Record, moment: Moment| {
                record.forget_places(moment.now);
                Decided::promise(())
            };
            let at = self.prepared(collection)?;
            failures.note(collection, at.step_each(doc! { "_id": { "$in": ids } }, tidy_up).await);
        }
        swept.failed = failures.first().map(|e| store_error("ending idle sessions", e));
        Ok(swept)
    }

    /// The sessions among these that hold a live lock in any collection.
    async fn active(&self, aids: &[Aid]) -> Result<BTreeSet<Aid>> {
        let mut active = BTreeSet::new();
        for collection in self.collections {
            let at = self.prepared(collection)?;
            // The command `distinct` would not do: up to MongoDB 6 it does not know `$$NOW`.
            let found = at.primary.aggregate(vec![
                doc! { "$match": and_live(exclusive_of(aids), at.rules.ttl) },
                doc! { "$group": { "_id": "$aid" } },
            ]);
            let found = rows(found.max_time(self.until.read_limit())).await?;
            active.extend(found.iter().map(|row| aid_in(row, "_id")));
            let found = at.fetch(&at.primary, shared_of(aids), usize::MAX).await?;
            let live = found.iter().flat_map(|it| {
                it.record.grants.iter().filter(|grant| grant.is_live(it.moment.now))
            });
            active.extend(live.map(|it| it.aid.clone()).filter(|aid| aids.contains(aid)));
        }
        Ok(active)
    }

    /// Removes expired locks of sessions that are not idle. Only these locks: others may expire
    /// meanwhile.
    async fn remove_expired(
        &self,
        of_sessions: &[OfSession],
        failures: &mut Failures,
    ) -> Result<()> {
        let mut notes = Vec::new();
        for (aid, of) in of_sessions {
            let locks: Vec<_> = of.iter().filter(|it| it.idle).filter_map(Expired::named).collect();
            if let Some(first) = locks.first() {
                let ttl = millis(self.prepared(first.key.collection())?.rules.ttl);
                let names = Names { locks, ..Names::default() };
                notes.push(doc! { "q": by_aid(aid), "u": end::noted(&names, ttl), "upsert": true });
            }
        }
        self.update_each(notes).await?;
        let all = || of_sessions.iter().flat_map(|(_, of)| of);
        let traces: Vec<_> = all().filter_map(|record| record.trace.clone()).collect();
        self.looked_at(&traces).await?;
        let mut records: BTreeMap<&str, (Vec<Bson>, Vec<String>, bool)> = BTreeMap::new();
        for record in all().filter(|it| it.trace.is_none()) {
            let (ids, tokens, shared) = records.entry(&record.collection).or_default();
            ids.push(record.id.clone());
            tokens.push(record.token.clone());
            *shared |= record.shared;
        }
        for (collection, (ids, tokens, shared)) in records {
            let grants = Grants::Expired { ids, tokens };
            let removed = self.prepared(collection)?.remove_many(&grants, shared).await;
            failures.note(collection, removed);
        }
        Ok(())
    }

    /// Assigns these ends to this worker, except those that another worker has, and except those that have named
    /// everything that was found.
    async fn claim(&self, unfinished: Vec<Aid>, idle: &[OfSession]) -> Result<Vec<Claimed>> {
        let found = |of: &[Expired]| of.iter().map(|it| it.lease.clone()).collect();
        let claims = (unfinished.iter().map(|aid| (aid, Vec::new())))
            .chain(idle.iter().map(|(aid, of)| (aid, found(of))));
        let updates: Vec<_> = claims
            .map(|(aid, found)| {
                // Another worker may have withdrawn an unfinished end meanwhile: it must not come back.
                let upsert = !found.is_empty();
                doc! { "q": by_aid(aid), "u": end::idle(found, self.worker), "upsert": upsert }
            })
            .collect();
        self.update_each(updates).await?;
        let aids: Vec<_> =
            unfinished.iter().chain(idle.iter().map(|(aid, _)| aid)).cloned().collect();
        self.claimed(&aids).await
    }

    /// The ends among these that now belong to this worker.
    async fn claimed(&self, aids: &[Aid]) -> Result<Vec<Claimed>> {
        if aids.is_empty() {
            return Ok(Vec::new());
        }
        let found = self.store.inner.ended.find(end::releasing(aids.iter(), self.worker));
        let found = rows(found.max_time(self.until.read_limit())).await?;
        let claimed = found.iter().map(|end| Claimed {
            aid: aid_in(end, "_id"),
            for_good: !end::is_idle(end),
            has_names: documents(end, "locks").next().is_some(),
        });
        Ok(claimed.collect())
    }

    /// The expired locks of these sessions, on record or replaced since; and whether there may be readers among them.
    /// `None` if there are too many for one command.
    async fn expired_of(&self, aids: &[Aid]) -> Result<Option<(BTreeMap<Aid, Names>, bool)>> {
        let (mut all, mut shared) = (BTreeMap::<_, Names>::new(), false);
        for collection in self.collections {
            let at = self.prepared(collection)?;
            let mut exclusive = exclusive_of(aids);
            exclusive.insert("$expr", doc! { "$not": [is_live(at.rules.ttl)] });
            let filter = doc! { "$or": [exclusive, shared_of(aids)] };
            let found = at.fetch(&at.primary, filter.clone(), NAMES_AT_ONCE).await?;
            if found.len() >= NAMES_AT_ONCE {
                let [aid] = aids else { return Ok(None) };
                // The records that were not read may have readers.
                shared = true;
                let names = all.entry(aid.clone()).or_default();
                names.more += at.beyond(NAMES_AT_ONCE, filter).await?;
            }
            for Fetched { key, record, moment } in &found {
                let expired = record.grants.iter().filter(|it| !it.is_live(moment.now));
                for grant in expired.filter(|it| aids.contains(&it.aid)) {
                    shared |= grant.mode == Mode::Shared;
                    if grant.is_idle(moment.now) {
                        let names = all.entry(grant.aid.clone()).or_default();
                        names.holder = names.holder.take().or_else(|| grant.holder.clone());
                        names.locks.push(Held { key: key.clone(), lease: lease(grant) });
                    }
                }
            }
        }
        for (aid, expired) in self.replaced(aids).await? {
            all.entry(aid).or_default().add(expired);
        }
        Ok(Some((all, shared)))
    }

    /// Removes the locks of the claimed sessions, and leaves their ends to the listener. An idle end without locks is
    /// withdrawn: another worker was quicker, or the session has come back.
    async fn release_claimed(
        &self,
        claimed: &[Claimed],
        swept: &mut Swept,
        failures: &mut Failures,
    ) -> Result<()> {
        let aids_of = |ends: &[Claimed]| ends.iter().map(|end| end.aid.clone()).collect::<Vec<_>>();
        let idle: Vec<_> =
            claimed.iter().filter(|end| !end.for_good).map(|end| end.aid.clone()).collect();
        let Some((names, shared)) = self.expired_of(&idle).await? else {
            let (some, others) = claimed.split_at(claimed.len() / 2);
            Box::pin(self.release_claimed(some, swept, failures)).await?;
            return Box::pin(self.release_claimed(others, swept, failures)).await;
        };
        let named = names.iter().filter(|(_, names)| !names.locks.is_empty()).map(|(aid, names)| {
            doc! { "q": { "_id": { "$eq": aid.as_str() }, "by": self.by() }, "u": [with_names(names)] }
        });
        self.update_each(named.collect()).await?;
        // Goes on with the sessions whose names were stored. After a long stall another worker may have the
        // other sessions, or these may have ended permanently.
        let (for_good, mut idle): (Vec<_>, Vec<_>) =
            self.claimed(&aids_of(claimed)).await?.into_iter().partition(|end| end.for_good);
        let found = idle.iter().filter_map(|end| names.get(&end.aid));
        let traces: Vec<_> = found.flat_map(|names| names.traces.iter().cloned()).collect();
        self.looked_at(&traces).await?;
        self.remove(&Grants::ExpiredOf(aids_of(&idle)), shared, failures).await;
        // The next sweep goes on with an end whose locks are not all removed.
        let is_removed =
            |names: &Names| !names.locks.iter().any(|it| failures.has(it.key.collection()));
        idle.retain(|end| names.get(&end.aid).is_none_or(is_removed));
        let mut ended = self.settle(idle.iter().collect()).await?;
        let mut released = Vec::new();
        for end in &for_good {
            let names = self.release_ended(&end.aid, &Names::default()).await;
            if let Some(names) = failures.note(self.store.inner.ended.name(), names) {
                swept.expired.extend(names.locks.iter().filter_map(Held::key_and_token));
                released.push(end);
            }
        }
        ended.extend(self.settle(released).await?);
        // Idle ends that an earlier sweep has counted are not counted again.
        let has_new = |aid: &Aid| names.get(aid).is_some_and(|it| !it.locks.is_empty());
        let anew = |end: &&&Claimed| end.for_good || has_new(&end.aid);
        swept.sessions += ended.iter().filter(anew).count();
        swept.announcements |= !ended.is_empty();
        let found = idle.iter().filter_map(|end| names.get(&end.aid));
        swept
            .expired
            .extend(found.flat_map(|names| names.locks.iter().filter_map(Held::key_and_token)));
        Ok(())
    }

    /// Leaves these ends, whose locks are removed, to the listener, and returns them; withdraws those without locks.
    async fn settle<'a>(&self, ends: Vec<&'a Claimed>) -> Result<Vec<&'a Claimed>> {
        let (ended, withdrawn): (Vec<_>, Vec<_>) =
            ends.into_iter().partition(|end| end.for_good || end.has_names);
        if !withdrawn.is_empty() {
            self.withdraw(self.releasing(&withdrawn)).await?;
        }
        if !ended.is_empty() {
            self.write(self.releasing(&ended), &end::ready()).await?;
        }
        Ok(ended)
    }

    fn releasing(&self, ends: &[&Claimed]) -> Document {
        end::releasing(ends.iter().map(|end| &end.aid), self.worker)
    }

    // update returns: so many are no ends any more, but keep the leases that an earlier end has named. delete
    // removes the others.
    async fn withdraw(&self, these: Document) -> Result<()> {
        let mut keep = these.clone();
        keep.insert("leases", doc! { "$type": "array" });
        self.write(keep, &end::withdrawn()).await?;
        self.write(these, &Write::Delete).await.map(drop)
    }
}
