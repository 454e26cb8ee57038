//! Ends idle sessions, many at once.

use std::collections::{BTreeMap, BTreeSet};

use mongodb::bson::{Bson, Document as Record, doc};

use crate::{
    ended::EndReason,
    key::LockKey,
    lock::Aid,
    store::{
        Swept,
        mongo::{
            codec::{self, documents, millis},
            ends::{
                Ends, NAMES_AT_ONCE, Names, by_aid, former, has_step, is_for_good, is_noted, locks,
                name, overdue::Expired, released, with_names,
            },
            error::Result,
            grant::{
                Grant, exclusive_of, has_expired, held_by, is_live_reader, is_of, is_shared,
                of_sessions, readers_that, some_reader,
            },
            record::{aid_in, holder_in},
            release::Grants,
            send::{Write, rows},
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
        let mut swept = Swept { announcements, next, ..Swept::default() };
        for collection in &found.left_over {
            self.call(collection)?.tidy_up().await?;
        }
        if found.expired.is_empty() && found.unfinished.is_empty() {
            return Ok(swept);
        }
        let all: Vec<_> = found.expired.keys().cloned().collect();
        let active = self.active(&all).await?;
        let is_idle = |(aid, of): &OfSession| !active.contains(aid) && of.iter().any(|it| it.idle);
        let (idle, others): (Vec<_>, Vec<_>) = found.expired.into_iter().partition(is_idle);
        self.remove_expired(&others).await?;
        swept.expired.extend(others.iter().flat_map(|(_, of)| of).filter_map(Expired::lock));
        let aids = idle.iter().map(|(aid, _)| aid.clone());
        let claimed = self.claim(found.unfinished.into_iter().chain(aids).collect()).await?;
        // A worker that gets less than half of the sessions leaves the rest to the worker that has
        // them.
        let is_ahead = 2 * (claimed.len() + others.len()) > all.len();
        swept.more = found.records >= limit && is_ahead;
        if !claimed.is_empty() {
            self.release_claimed(&claimed, &idle, &mut swept).await?;
        }
        Ok(swept)
    }

    /// The sessions among these that hold a live lock in any collection.
    async fn active(&self, aids: &[Aid]) -> Result<BTreeSet<Aid>> {
        let live = readers_that(doc! { "$and": [is_of(Grant::Reader, aids), is_live_reader()] });
        let readers = doc! { "$map": { "input": live, "as": "r", "in": "$$r.aid" } };
        let holders = doc! { "$cond": [is_shared(), readers, ["$aid"]] };
        let mut active = BTreeSet::new();
        for collection in self.collections {
            let at = self.call(collection)?;
            // The command `distinct` would not do: up to MongoDB 6 it does not know `$$NOW`.
            let found = at.primary.aggregate(vec![
                doc! { "$match": held_by(aids, exclusive_of(aids), at.rules.ttl) },
                doc! { "$project": { "_id": 0, "aid": &holders } },
                doc! { "$unwind": "$aid" },
                doc! { "$group": { "_id": "$aid" } },
            ]);
            let found = rows(found.max_time(self.until.read_limit())).await?;
            active.extend(found.iter().map(|row| aid_in(row, "_id")));
        }
        Ok(active)
    }

    /// Removes expired locks of sessions that are not idle. Only these locks: others may expire
    /// meanwhile.
    async fn remove_expired(&self, of_sessions: &[OfSession]) -> Result<()> {
        let mut notes = Vec::new();
        for (aid, of) in of_sessions {
            let keys: Vec<_> = of.iter().filter(|it| it.idle).filter_map(Expired::key).collect();
            if let Some(first) = keys.first() {
                let ttl = millis(self.call(first.collection())?.rules.ttl);
                notes.push(doc! { "q": by_aid(aid), "u": [note(&keys, ttl)], "upsert": true });
            }
        }
        self.update_each(notes).await?;
        let all = || of_sessions.iter().flat_map(|(_, of)| of);
        self.looked_at(all()).await?;
        let mut records: BTreeMap<&str, (Vec<Bson>, Vec<&str>, bool)> = BTreeMap::new();
        for record in all().filter(|it| it.trace.is_none()) {
            let (ids, tokens, shared) = records.entry(&record.collection).or_default();
            ids.push(record.id.clone());
            tokens.push(&record.token);
            *shared |= record.shared;
        }
        for (collection, (ids, tokens, shared)) in records {
            let grants = Grants::Expired { ids, tokens };
            self.call(collection)?.remove_many(&grants, shared).await?;
        }
        Ok(())
    }

    /// Marks the traces of these locks as seen: everything that the traces are kept for is now
    /// recorded.
    async fn looked_at(&self, of: impl Iterator<Item = &Expired>) -> Result<()> {
        let traces: Vec<_> = of.filter_map(|record| record.trace.clone()).collect();
        if !traces.is_empty() {
            self.write(doc! { "_id": { "$in": traces } }, &former::seen()).await?;
        }
        Ok(())
    }

    /// Assigns these ends to this worker, except those that another worker has.
    async fn claim(&self, aids: Vec<Aid>) -> Result<Vec<Claimed>> {
        let updates: Vec<_> = (aids.iter())
            .map(|aid| doc! { "q": by_aid(aid), "u": [self.claimed_end()], "upsert": true })
            .collect();
        self.update_each(updates).await?;
        self.claimed(&aids).await
    }

    /// The end of a session that seems to be idle, or whose end was left half done.
    fn claimed_end(&self) -> Record {
        let mut idle = self.begin(EndReason::Expired);
        idle.insert("silent", true);
        idle.insert("locks", doc! { "$cond": [is_noted(), locks(), []] });
        let again = doc! { "$mergeObjects": [self.go_on(), { "told": true }] };
        doc! { "$replaceWith": { "$switch": {
            "branches": [
                { "case": self.someone_else_is_at_it(), "then": "$$ROOT" },
                { "case": has_step(), "then": self.go_on() },
                // Ended and announced long ago. The expired lock was acquired in spite of that end.
                { "case": is_for_good(), "then": again },
            ],
            "default": idle,
        } } }
    }

    /// The ends among these that now belong to this worker.
    async fn claimed(&self, aids: &[Aid]) -> Result<Vec<Claimed>> {
        if aids.is_empty() {
            return Ok(Vec::new());
        }
        let found = self.store.inner.ended.find(self.mine(aids.iter()));
        let found = rows(found.max_time(self.until.read_limit())).await?;
        let claimed = found.iter().map(|end| Claimed {
            aid: aid_in(end, "_id"),
            for_good: !end.get_bool("silent").unwrap_or(false),
            has_names: documents(end, "locks").next().is_some(),
        });
        Ok(claimed.collect())
    }

    fn mine<'a>(&self, aids: impl Iterator<Item = &'a Aid>) -> Record {
        let ids: Vec<_> = aids.map(Aid::as_str).collect();
        doc! { "_id": { "$in": ids }, "by": self.by(), "step": "release" }
    }

    /// The expired locks of these sessions; and whether there may be readers among them.
    async fn expired_of(&self, aids: &[Aid]) -> Result<(BTreeMap<Aid, Names>, bool)> {
        let of_readers = || {
            doc! { "$and": [is_of(Grant::Reader, aids), { "$not": [is_live_reader()] }] }
        };
        let lease = |grant: Grant| {
            let mut lease = grant.lease();
            lease.insert("holder", grant.field("holder"));
            lease
        };
        let readers = readers_that(of_readers());
        let readers = doc! { "$map": { "input": readers, "as": "r", "in": lease(Grant::Reader) } };
        let leases = doc! { "$cond": [is_shared(), readers, [lease(Grant::Exclusive)]] };
        let fields = doc! { "leases": leases, "shared": is_shared() };
        let (mut all, mut shared) = (BTreeMap::<_, Names>::new(), false);
        for collection in self.collections {
            let at = self.call(collection)?;
            let mut filter = of_sessions(aids);
            filter.insert(
                "$expr",
                doc! { "$cond": [
                    is_shared(),
                    some_reader(of_readers()),
                    has_expired(Grant::Exclusive, at.rules.ttl),
                ] },
            );
            let found = at.primary.find(filter).projection(fields.clone());
            let found = found.limit(NAMES_AT_ONCE as i64).max_time(self.until.read_limit());
            let found = rows(found).await?;
            // If the limit was reached, the records that were not read may have readers.
            shared |= found.len() >= NAMES_AT_ONCE;
            for record in &found {
                let key = codec::key_in(collection, record);
                for lease in documents(record, "leases") {
                    let names = all.entry(aid_in(lease, "aid")).or_default();
                    names.keys.extend(key.clone());
                    names.holder = names.holder.take().or_else(|| holder_in(lease, "holder"));
                    let Ok(lease) = lease.get_str("lease") else { continue };
                    names.leases.push(lease.to_owned());
                    let token = lease.split_once('/').and_then(|(token, _)| token.parse().ok());
                    names.expired.extend(key.clone().zip(token));
                }
                shared |= record.get_bool("shared").unwrap_or(false);
            }
        }
        Ok((all, shared))
    }

    /// An idle end without locks is withdrawn: another worker was quicker, or the session has come
    /// back.
    async fn release_claimed(
        &self,
        claimed: &[Claimed],
        found: &[OfSession],
        swept: &mut Swept,
    ) -> Result<()> {
        let aids_of = |ends: &[Claimed]| ends.iter().map(|end| end.aid.clone()).collect::<Vec<_>>();
        let idle: Vec<_> =
            claimed.iter().filter(|end| !end.for_good).map(|end| end.aid.clone()).collect();
        let (mut names, shared) = self.expired_of(&idle).await?;
        let taken_over: Vec<_> = (found.iter())
            .flat_map(|(aid, of)| of.iter().map(move |record| (aid, record)))
            .filter(|(_, record)| record.trace.is_some())
            .collect();
        for (aid, record) in taken_over.iter().filter(|(aid, _)| idle.contains(aid)) {
            names.entry((*aid).clone()).or_default().keys.extend(record.key());
        }
        let named = names.iter().filter(|(_, names)| !names.keys.is_empty()).map(|(aid, names)| {
            doc! { "q": { "_id": { "$eq": aid.as_str() }, "by": self.by() }, "u": [name(names)] }
        });
        self.update_each(named.collect()).await?;
        // Goes on with the sessions whose names were stored. After a long stall another worker may have the
        // other sessions, or these may have ended permanently.
        let (for_good, idle): (Vec<_>, Vec<_>) =
            self.claimed(&aids_of(claimed)).await?.into_iter().partition(|end| end.for_good);
        let is_mine = |aid: &Aid| for_good.iter().chain(&idle).any(|end| end.aid == *aid);
        let mine = || taken_over.iter().filter(|(aid, _)| is_mine(aid)).map(|(_, record)| *record);
        self.looked_at(mine()).await?;
        swept.expired.extend(mine().filter_map(Expired::lock));
        self.remove(&Grants::ExpiredOf(&aids_of(&idle)), shared).await?;
        for end in &for_good {
            self.release_ended(&end.aid, &[]).await?;
        }
        let (ended, withdrawn): (Vec<_>, Vec<_>) =
            (for_good.iter().chain(&idle)).partition(|end| end.for_good || end.has_names);
        if !withdrawn.is_empty() {
            let these = self.mine(withdrawn.iter().map(|end| &end.aid));
            self.write(these, &Write::Delete).await?;
        }
        if !ended.is_empty() {
            // These ends are left to the listener.
            self.write(self.mine(ended.iter().map(|end| &end.aid)), &released()).await?;
        }
        // The others were found idle earlier, and only waited for their announcement.
        let anew = |end: &&&Claimed| end.for_good || names.contains_key(&end.aid);
        swept.sessions = ended.iter().filter(anew).count();
        let found = idle.iter().filter_map(|end| names.get(&end.aid));
        swept.expired.extend(found.flat_map(|names| names.expired.iter().cloned()));
        swept.announcements |= !ended.is_empty();
        Ok(())
    }
}

/// Remembers for the ttl that these locks expired while their session had others. If the session turns
/// out to be idle, they were just the first to expire: its requests did not renew all locks at the same
/// moment.
fn note(keys: &[LockKey], ttl: i64) -> Record {
    let known = doc! { "$cond": [{ "$or": [has_step(), is_noted()] }, locks(), []] };
    let noted = doc! { "$mergeObjects": [
        { "ts": "$$NOW", "silent": true },
        "$$ROOT",
        { "locks": with_names(known, keys), "noted": { "$add": ["$$NOW", ttl] } },
    ] };
    doc! { "$replaceWith": { "$cond": [is_for_good(), "$$ROOT", noted] } }
}
