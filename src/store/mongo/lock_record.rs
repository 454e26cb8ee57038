//! A lock record as it is stored, and as the [rules](crate::store::lock_rules) see it.

use std::{collections::HashMap, time::Duration};

use mongodb::bson::{Bson, DateTime, Document, RawDocumentBuf, doc};

use crate::{
    key::{LockId, LockKey},
    lock::{Answer, Ask, Holder, Mode},
    store::{
        Claim, Place, Rules, Ticket, TryAcquire,
        lock_rules::{Grant, LONGEST_LEASE, Moment, Queued, Record, StandingAsk},
        mongo::{
            codec::{
                self, aid_in, documents, holder_in, in_our_time, millis, number, presentable,
                token_in,
            },
            error::Result,
            ids::by_id,
            watch::{read_taken, taken_text},
        },
    },
};

/// The fields that a decision depends on: a record in which they are the same is still as it was read. The other fields
/// of a foreign record stay as they are.
pub(super) const COMPARED: [&str; 16] = [
    "ts", "ttl", "aid", "token", "since", "tab", "page", "fence", "until", "leaving", "again",
    "taken", "due", "readers", "queue", "asks",
];

/// A record that was read, with the server's time.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) fields: Document,
    pub(super) moment: Moment,
    raw: RawDocumentBuf,
}

impl Stored {
    pub(super) fn read(raw: RawDocumentBuf, moment: Moment) -> Result<Self> {
        Ok(Self { fields: codec::readable_document(&raw)?, moment, raw })
    }

    /// Matches the record while it is as it was read.
    pub(super) fn unchanged(&self, id: &LockId, is_exact: bool) -> Document {
        let mut filter = by_id(id);
        let same = if is_exact {
            let now: Document =
                COMPARED.iter().map(|it| ((*it).to_owned(), format!("${it}").into())).collect();
            let read = COMPARED
                .iter()
                .filter_map(|it| Some(((*it).to_owned(), self.fields.get(*it)?.clone())));
            doc! { "$eq": [now, { "$literal": read.collect::<Document>() }] }
        } else {
            // Whoever renews or takes the lock changes its date.
            let first = self.raw.get("ts").ok().flatten();
            let ts = first.and_then(|ts| Bson::try_from(ts).ok()).unwrap_or(Bson::Null);
            doc! { "$eq": [{ "$ifNull": ["$ts", Bson::Null] }, { "$literal": ts }] }
        };
        filter.insert("$expr", same);
        filter
    }

    /// False if a name stands twice among the compared fields, or a text there is not UTF-8: no value of the driver
    /// equals them.
    pub(super) fn is_exact(&self) -> bool {
        codec::are_exact(&self.raw, &COMPARED)
    }
}

/// The server's time as the rules see it.
pub(super) fn since_1970(date: DateTime) -> Duration {
    Duration::from_millis(u64::try_from(date.timestamp_millis()).unwrap_or(0))
}

/// A date that every server and every driver can calculate with.
pub(super) fn at(time: Duration) -> DateTime {
    const END_OF_9999: i64 = 253_402_300_799_999;
    DateTime::from_millis(millis(time).min(END_OF_9999))
}

/// Accepts records of foreign programs, in which any field may be missing or have another type.
pub(super) fn decode(stored: &Document, rules: &Rules, moment: Moment) -> Record {
    let mode = match stored.get_array("readers") {
        Ok(_) => Mode::Shared,
        Err(_) => Mode::Exclusive,
    };
    Record {
        grants: fields_of(stored).map(|it| grant(it, mode, rules)).collect(),
        fence: stored.get("fence").and_then(whole_number).unwrap_or(0),
        queue: documents(stored, "queue").filter_map(|it| queued(it, moment)).collect(),
        ..Record::default()
    }
}

/// Where the fields of each grant are: an exclusive grant stands in the record, the grants of readers in their list.
fn fields_of(stored: &Document) -> impl Iterator<Item = &Document> {
    let is_shared = stored.get_array("readers").is_ok();
    let is_held = !is_shared && (stored.contains_key("ts") || stored.contains_key("aid"));
    let is_reader = |it: &&Document| {
        let has_number = it.get("ttl").and_then(number).is_some();
        let has_texts = it.get_str("aid").is_ok() && it.get_str("token").is_ok();
        it.get_datetime("ts").is_ok() && has_number && has_texts
    };
    is_held.then_some(stored).into_iter().chain(documents(stored, "readers").filter(is_reader))
}

fn grant(stored: &Document, mode: Mode, rules: &Rules) -> Grant {
    let date = |field| stored.get_datetime(field).ok().copied();
    let ts = date("ts");
    let ttl = match stored.get("ttl").and_then(number) {
        Some(ms) => in_our_time(ms as i64),
        None => rules.ttl,
    };
    let token = token_in(stored);
    Grant {
        ts: ts.map(since_1970).unwrap_or_default(),
        // A record without a date is dead, for the TTL index, too.
        ttl: if ts.is_some() { ttl } else { Duration::ZERO },
        mode,
        aid: aid_in(stored, "aid"),
        token,
        // A foreign lock is recognised by its `ts`, whatever else its program writes.
        since: presentable(date("since").filter(|_| token.is_some()).or(ts)),
        holder: holder_in(stored, "holder"),
        tab: stored.get_str("tab").ok().and_then(|tab| tab.parse().ok()),
        page: stored.get_str("page").ok().and_then(|page| page.parse().ok()),
        fence: stored.get("fence").and_then(whole_number).map(Into::into),
        until: date("until").map(since_1970),
        leaving: (stored.get_document("leaving").ok())
            .map(|it| it.get_datetime("until").ok().map(|it| since_1970(*it))),
        again: stored.get_bool("again").unwrap_or(false),
        taken: stored.get_str("taken").ok().and_then(read_taken),
        asks: asks_in(stored),
    }
}

/// A fencing token; `None` for a number that cannot be one.
fn whole_number(value: &Bson) -> Option<u64> {
    let whole = match value {
        Bson::Int64(n) => *n,
        other => number(other)? as i64,
    };
    u64::try_from(whole).ok().filter(|it| *it < u64::MAX / 4)
}

fn queued(stored: &Document, moment: Moment) -> Option<Queued> {
    let ticket =
        |field| stored.get_i64(field).ok().and_then(|it| u64::try_from(it).ok()).map(Ticket);
    let until = since_1970(*stored.get_datetime("until").ok()?);
    let last = ticket("last")?;
    let soon = moment.now + LONGEST_LEASE;
    let is_ours = until <= soon && Duration::from_millis(last.0) <= soon;
    is_ours.then_some(Queued {
        server: stored.get_str("server").ok()?.parse().ok()?,
        until,
        place: Place {
            first: ticket("first")?,
            writer: ticket("writer"),
            last,
            aid: stored.get_str("aid").ok()?.to_owned().into(),
            holder: holder_in(stored, "holder")?,
            mode: mode(stored),
        },
    })
}

fn mode(place: &Document) -> Mode {
    match place.get_str("mode") {
        Ok(mode) if mode == Mode::Shared.as_str() => Mode::Shared,
        _ => Mode::Exclusive,
    }
}

/// The record after a decision. What continues keeps its unknown fields and the order of its fields.
///
/// An exclusive grant stands in the record itself, so that the insert of a foreign program meets it. For readers, `ts`
/// and `ttl` describe the one that expires last.
pub(super) fn encode(
    id: &LockId,
    before: Option<(&Document, &Record)>,
    after: &Record,
    rules: &Rules,
) -> Document {
    // The earlier states of the grants, and where they stood.
    let name = |grant: &Grant| (grant.token, grant.aid.clone());
    let known: HashMap<_, _> = (before.into_iter())
        .flat_map(|(stored, record)| fields_of(stored).zip(&record.grants))
        .map(|(fields, grant)| (name(grant), (fields, grant)))
        .collect();
    let patched = |grant: &Grant| {
        let known = known.get(&name(grant)).filter(|(_, known)| known.mode == grant.mode);
        let Some((fields, known)) = known else {
            let new = self::fields(grant).into_iter();
            return new.filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
        };
        let mut fields = (*fields).clone();
        if *known != grant {
            let old = self::fields(known);
            let changed = self::fields(grant).into_iter().zip(old).filter(|(new, old)| new != old);
            changed.for_each(|((name, value), _)| set(&mut fields, name, value));
        }
        fields
    };
    let mut record = by_id(id);
    let due = match &after.grants[..] {
        [grant] if grant.mode == Mode::Exclusive => {
            record.extend(patched(grant));
            // The index on `ts` tells the sweep of the others.
            let is_shorter = grant.ttl < rules.ttl || grant.leaving.is_some();
            (grant.token.is_some() && is_shorter).then(|| grant.expires())
        }
        [] => after.queue.iter().map(|it| it.until).max(),
        // Counts all readers: the sweep removes the expired ones.
        readers => {
            if let Some((stored, _)) = before.filter(|(_, it)| it.is_shared()) {
                record = stored.clone();
            }
            record.insert("readers", readers.iter().map(patched).collect::<Vec<_>>());
            readers.iter().map(Grant::expires).min()
        }
    };
    set_fence_and_queue(&mut record, after, rules);
    if after.is_shared() {
        let newest = after.grants.iter().map(|it| it.ts).max().unwrap_or_default();
        let last = after.grants.iter().map(Grant::expires).max().unwrap_or_default();
        record.extend(doc! { "ts": at(newest), "ttl": millis(last - newest) });
    }
    set(&mut record, "due", due.map(|due| at(due).into()));
    record
}

fn set_fence_and_queue(fields: &mut Document, record: &Record, rules: &Rules) {
    if rules.fenced && record.fence > 0 {
        fields.insert("fence", record.fence as i64);
    }
    if rules.fair {
        let queue: Vec<_> = record.queue.iter().map(in_queue).collect();
        set(fields, "queue", (!queue.is_empty()).then(|| queue.into()));
    }
}

fn set(fields: &mut Document, name: &str, value: Option<Bson>) {
    match value {
        Some(value) => drop(fields.insert(name, value)),
        None => drop(fields.remove(name)),
    }
}

fn fields(grant: &Grant) -> [(&'static str, Option<Bson>); 14] {
    let leaving = |until: Option<Duration>| {
        let until = until.map(|until| ("until".to_owned(), at(until).into()));
        until.into_iter().collect::<Document>().into()
    };
    let taken = grant.taken.as_ref().map(|(token, by)| taken_text(*token, by).into());
    [
        ("ts", Some(at(grant.ts).into())),
        ("ttl", Some(millis(grant.ttl).into())),
        ("aid", Some(grant.aid.as_str().into())),
        ("token", grant.token.map(|it| it.to_string().into())),
        ("since", Some(DateTime::from_system_time(grant.since).into())),
        ("holder", grant.holder.as_ref().map(holder)),
        ("tab", grant.tab.map(|it| it.to_string().into())),
        ("page", grant.page.map(|it| it.to_string().into())),
        ("until", grant.until.map(|it| at(it).into())),
        ("fence", grant.fence.map(|it| (it.get() as i64).into())),
        ("leaving", grant.leaving.map(leaving)),
        ("again", grant.again.then(|| true.into())),
        ("taken", taken),
        ("asks", asks_of(&grant.asks)),
    ]
}

pub(super) fn holder(holder: &Holder) -> Bson {
    let mut fields = doc! { "label": &holder.label };
    if let Some(user) = &holder.user {
        fields.insert("user", user);
    }
    fields.into()
}

/// The asks in this record of an exclusive lock.
fn asks_in(record: &Document) -> Vec<StandingAsk> {
    documents(record, "asks").filter_map(standing_ask).collect()
}

fn standing_ask(stored: &Document) -> Option<StandingAsk> {
    let text = |field| stored.get_str(field).ok();
    let by = Holder::new(text("label")?);
    let ask = Ask {
        id: text("id")?.parse().ok()?,
        aid: aid_in(stored, "aid"),
        by: match text("user") {
            Some(user) => by.of_user(user),
            None => by,
        },
        message: text("message")?.to_owned(),
        at: presentable(stored.get_datetime("at").ok().copied()),
        answer: text("answer")
            .and_then(|name| Answer::named(name, text("reply").unwrap_or_default())),
    };
    Some(StandingAsk { ask, until: since_1970(*stored.get_datetime("until").ok()?) })
}

/// These asks as a record has them; `None` if there are none.
fn asks_of(asks: &[StandingAsk]) -> Option<Bson> {
    let asks: Vec<_> = asks.iter().map(ask_fields).collect();
    (!asks.is_empty()).then(|| asks.into())
}

fn ask_fields(StandingAsk { ask, until }: &StandingAsk) -> Document {
    let Ask { id, aid, by, message, at: asked, answer } = ask;
    let mut fields = doc! {
        "id": id.to_string(),
        "aid": aid.as_str(),
        "label": &by.label,
        "message": message,
        "at": DateTime::from_system_time(*asked),
        "until": at(*until),
    };
    fields.extend(by.user.iter().map(|user| ("user".to_owned(), user.into())));
    if let Some(answer) = answer {
        fields.extend(doc! { "answer": answer.name(), "reply": answer.message() });
    }
    fields
}

fn in_queue(queued: &Queued) -> Document {
    let Place { first, writer, last, aid, holder, mode } = &queued.place;
    let mut fields = doc! {
        "server": queued.server.to_string(),
        "first": first.0 as i64,
        "last": last.0 as i64,
        "aid": aid.as_str(),
        "holder": { "label": &holder.label },
        "mode": mode.as_str(),
        "until": at(queued.until),
    };
    if let Some(writer) = writer {
        fields.insert("writer", writer.0 as i64);
    }
    fields
}

/// A claim of a free document.
#[derive(Debug, Clone)]
pub(super) struct New {
    pub(super) key: LockKey,
    pub(super) claim: Claim,
}

impl New {
    pub(super) fn of(key: &LockKey, claim: &Claim) -> Self {
        Self { key: key.clone(), claim: claim.clone() }
    }

    /// The record, and the answer to the claim, if it is made at this moment.
    pub(super) fn at(&self, rules: &Rules, moment: Moment) -> (Document, TryAcquire) {
        let mut record = Record::default();
        let granted = record.try_acquire(&self.key, &self.claim, rules, moment);
        (encode(self.key.id(), None, &record, rules), granted)
    }
}

/// The operators that turn one record into the other. A change of one reader or place names only the changed fields, so
/// that a change stream reports the change.
pub(super) fn difference(before: &Document, after: &Document) -> Document {
    let (mut set, mut unset) = (Document::new(), Document::new());
    collect("", before, after, &mut set, &mut unset);
    let both = [("$set", set), ("$unset", unset)].into_iter();
    both.filter(|(_, it)| !it.is_empty())
        .map(|(operator, it)| (operator.to_owned(), it.into()))
        .collect()
}

fn collect(
    prefix: &str,
    before: &Document,
    after: &Document,
    set: &mut Document,
    unset: &mut Document,
) {
    for (name, new) in after {
        let (path, old) = (format!("{prefix}{name}"), before.get(name));
        match (old.and_then(Bson::as_array), new.as_array()) {
            _ if old == Some(new) => {}
            (Some(old), Some(new)) if new.len() >= old.len() => {
                for (n, new) in new.iter().enumerate().filter(|(n, new)| old.get(*n) != Some(new)) {
                    let path = format!("{path}.{n}");
                    let old = old.get(n).and_then(Bson::as_document);
                    // Another reader or place is written as a whole, so that watchers are told.
                    let is_same = |(old, new): &(&Document, &Document)| {
                        ["token", "aid", "server"].iter().all(|it| old.get(it) == new.get(it))
                    };
                    match old.zip(new.as_document()).filter(is_same) {
                        Some((old, new)) => collect(&format!("{path}."), old, new, set, unset),
                        None => drop(set.insert(path, new.clone())),
                    }
                }
            }
            _ => drop(set.insert(path, new.clone())),
        }
    }
    let gone = before.keys().filter(|name| !after.contains_key(*name));
    unset.extend(gone.map(|name| (format!("{prefix}{name}"), "".into())));
}

/// The name of a lease: the token and the last renewal. A save that is committed late can make an expired grant live
/// again, under the same token: that is another lease. `None` for the lock of a foreign program.
pub(super) fn lease(grant: &Grant) -> Option<String> {
    let ts = if grant.ts.is_zero() { String::new() } else { millis(grant.ts).to_string() };
    Some(format!("{}/{ts}", grant.token?))
}

pub(super) fn moment(now: DateTime, read: std::time::Instant) -> Moment {
    Moment { now: since_1970(now), read, date: now.to_system_time() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A change stream leaves out what looks like a renewal.
    #[test]
    fn a_renewed_reader_is_written_by_its_fields_and_another_reader_as_a_whole() {
        let reader = |token: &str, ts: i64| doc! { "token": token, "aid": token, "ts": ts };
        let before = doc! { "readers": [reader("a", 1), reader("b", 1)], "due": 1 };
        let renewed = doc! { "readers": [reader("a", 1), reader("b", 2)], "due": 1 };
        assert_eq!(difference(&before, &renewed), doc! { "$set": { "readers.1.ts": 2_i64 } });
        let other = doc! { "readers": [reader("b", 1), reader("c", 1)] };
        let set = doc! { "readers.0": reader("b", 1), "readers.1": reader("c", 1) };
        assert_eq!(difference(&before, &other), doc! { "$set": set, "$unset": { "due": "" } });
        let fewer = doc! { "readers": [reader("b", 1)], "due": 1 };
        let set = doc! { "readers": [reader("b", 1)] };
        assert_eq!(difference(&before, &fewer), doc! { "$set": set });
    }
}
