//! The record of a lock: its filter, and its fields read as a [`Lock`].

use std::time::{Duration, Instant, SystemTime};

use mongodb::{
    action,
    bson::{Bson, DateTime, Document, doc},
    options::Collation,
};

use crate::{
    key::{LockId, LockKey},
    lock::{Aid, Holder, Lock, LockToken, Mode},
    store::mongo::{
        Prepared,
        codec::{documents, millis, number},
    },
};

/// The record with this `_id`. The filter of an upsert must contain nothing else: the server refuses
/// `$expr` there, and retries a duplicate key only for plain equality on `_id`.
///
/// Written without `$eq`: with `$eq` the server would plan the query, at a tenth of the cost of an
/// acquire. A [`LockId`] is a number, a string or bytes, and never a document or a pattern with a
/// special meaning.
pub(super) fn by_id(id: &LockId) -> Document {
    doc! { "_id": Bson::from(id) }
}

/// A command that looks for a document or a record by its id.
pub(super) trait Exactly<'i> {
    /// Compares string ids as they are, whatever default collation the collection has got since it was registered. With
    /// the collation of most collections, which is none, the server uses the same plans as without this.
    #[must_use]
    fn exactly(self, ids: impl IntoIterator<Item = &'i LockId>) -> Self;
}

macro_rules! exactly {
    ($($action:ident $(<$($t:ident),*>)?),*) => {$(
        impl<'i, $($($t: Send + Sync),*)?> Exactly<'i> for action::$action<'_, $($($t),*)?> {
            fn exactly(self, ids: impl IntoIterator<Item = &'i LockId>) -> Self {
                match ids.into_iter().any(|id| matches!(id, LockId::String(_))) {
                    true => self.collation(simple()),
                    false => self,
                }
            }
        }
    )*};
}

exactly!(Aggregate<S, T>, Delete, Find<T>, FindOne<T>, FindOneAndUpdate<T>, ReplaceOne, Update);

/// Compares strings as they are.
pub(super) fn simple() -> Collation {
    Collation::builder().locale("simple").build()
}

/// True if the filter looks for ids of which one is a string.
pub(super) fn has_text_ids(filter: &Document) -> bool {
    match filter.get("_id") {
        Some(Bson::Document(ids)) => {
            let mut ids = ids.get_array("$in").into_iter().flatten();
            ids.any(|id| id.as_str().is_some())
        }
        id => id.is_some_and(|id| id.as_str().is_some()),
    }
}

/// A raw command, or one of its statements, with the collation for the ids in its `filter`. See [`Exactly`].
pub(super) fn exactly(mut statement: Document, filter: &str) -> Document {
    if statement.get_document(filter).is_ok_and(has_text_ids) {
        statement.insert("collation", doc! { "locale": simple().locale });
    }
    statement
}

/// A record that was fetched together with `now`, and the values that are needed to read it.
pub(super) struct Fetched {
    pub(super) key: LockKey,
    pub(super) record: Document,
    foreign_ttl: Duration,
    /// A moment before the request was sent.
    pub(super) asked: Instant,
}

/// A lock of a session, with the name of its lease.
pub(super) struct Leased {
    pub(super) lock: Lock,
    /// `None` for the lock of a foreign program.
    pub(super) lease: Option<String>,
    pub(super) is_live: bool,
}

impl Prepared {
    pub(super) fn fetched(&self, key: &LockKey, record: Document, asked: Instant) -> Fetched {
        Fetched { key: key.clone(), record, foreign_ttl: self.rules.ttl, asked }
    }
}

impl Fetched {
    /// The lock: the exclusive one, or the one of the requested reader.
    pub(super) fn lock(self) -> Option<Lock> {
        match (self.record.get("reader"), self.record.get("readers")) {
            (Some(Bson::Document(reader)), _) => Some(self.lock_of(reader, Mode::Shared)),
            // There are readers, but none that was asked for.
            (Some(_), _) | (_, Some(Bson::Array(_))) => None,
            (None, _) => Some(self.lock_of(&self.record, Mode::Exclusive)),
        }
    }

    /// All locks in the record.
    pub(super) fn locks(&self) -> impl Iterator<Item = Lock> {
        self.grants().map(|(grant, mode)| self.lock_of(grant, mode))
    }

    /// The locks that had not expired when the server read the record. They may expire before the answer arrives.
    pub(super) fn live_locks(&self) -> impl Iterator<Item = Lock> {
        let is_live = |grant: &Document| {
            !self.remaining(grant, grant.get_datetime("ts").ok().copied()).is_zero()
        };
        let live = self.grants().filter(move |(grant, _)| is_live(grant));
        live.map(|(grant, mode)| self.lock_of(grant, mode))
    }

    /// The locks in the record that count when their session ends, each with the name of its
    /// [lease](super::grant::Grant::lease): the live locks, and those that expired before they reached their
    /// `max_hold`.
    pub(super) fn leases(&self) -> impl Iterator<Item = Leased> {
        let ms = |grant: &Document, field| {
            grant.get_datetime(field).ok().map(|date| date.timestamp_millis())
        };
        self.grants().filter_map(move |(grant, mode)| {
            let (ts, until) = (ms(grant, "ts"), ms(grant, "until"));
            let is_live = !self.remaining(grant, grant.get_datetime("ts").ok().copied()).is_zero();
            let ttl = grant.get("ttl").and_then(number).map_or(0, |ttl| ttl as i64);
            let has_reached_max_hold = until
                .is_some_and(|until| ttl >= until.max(0).saturating_sub(ts.unwrap_or(0).max(0)));
            let token = grant.get_str("token").ok();
            // A foreign lock has no token. It is not ours to announce once it has expired.
            let counts = is_live || (token.is_some() && !has_reached_max_hold);
            let ts = ts.map(|ts| ts.to_string()).unwrap_or_default();
            counts.then(|| Leased {
                lock: self.lock_of(grant, mode),
                lease: token.map(|token| format!("{token}/{ts}")),
                is_live,
            })
        })
    }

    fn grants(&self) -> impl Iterator<Item = (&Document, Mode)> {
        let is_shared = self.record.get_array("readers").is_ok();
        let exclusive = (!is_shared).then_some((&self.record, Mode::Exclusive));
        documents(&self.record, "readers").map(|reader| (reader, Mode::Shared)).chain(exclusive)
    }

    /// Accepts records of foreign programs, in which any field may be missing or have another type.
    pub(super) fn lock_of(&self, grant: &Document, mode: Mode) -> Lock {
        let ts = grant.get_datetime("ts").ok().copied();
        let token = token_in(grant);
        // A foreign lock is recognised by its `ts`, whatever else its program writes.
        let since = grant.get_datetime("since").ok().copied().filter(|_| token.is_some()).or(ts);
        Lock {
            key: self.key.clone(),
            description: None,
            mode,
            aid: aid_in(grant, "aid"),
            token,
            tab: grant.get_str("tab").ok().and_then(|tab| tab.parse().ok()),
            fence: (grant.get("fence").and_then(Bson::as_i64))
                .and_then(|fence| u64::try_from(fence).ok())
                .map(Into::into),
            holder: holder_in(grant, "holder"),
            since: presentable(since),
            expires_at: self.asked + self.remaining(grant, ts),
        }
    }

    /// `ts + ttl - now`. All values may come from a foreign program, hence the saturation.
    fn remaining(&self, grant: &Document, ts: Option<DateTime>) -> Duration {
        let (Some(ts), Ok(now)) = (ts, self.record.get_datetime("now")) else {
            return Duration::ZERO;
        };
        let ttl = match grant.get("ttl").and_then(number) {
            Some(ms) => ms as i64,
            None => millis(self.foreign_ttl),
        };
        let age = now.timestamp_millis().saturating_sub(ts.timestamp_millis());
        in_our_time(ttl.saturating_sub(age))
    }
}

/// The session in this field; empty if there is none.
pub(super) fn aid_in(record: &Document, field: &str) -> Aid {
    Aid::from(record.get_str(field).unwrap_or_default().to_owned())
}

pub(super) fn token_in(grant: &Document) -> Option<LockToken> {
    grant.get_str("token").ok().and_then(|token| token.parse().ok())
}

/// The person in this field.
pub(super) fn holder_in(record: &Document, field: &str) -> Option<Holder> {
    let stored = record.get_document(field).ok()?;
    let holder = Holder::new(stored.get_str("label").ok()?);
    Some(match stored.get_str("user") {
        Ok(user) => holder.of_user(user),
        Err(_) => holder,
    })
}

pub(super) fn in_our_time(millis: i64) -> Duration {
    /// Longer than any lock, and short enough for an `Instant`.
    const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    Duration::from_millis(millis.try_into().unwrap_or(0)).min(FOREVER)
}

/// A date that can be shown. Foreign programs write any date, but RFC 3339 has only years of four
/// digits.
pub(super) fn presentable(date: Option<DateTime>) -> SystemTime {
    const END_OF_9999: i64 = 253_402_300_799_999;
    let millis = date.map_or(0, DateTime::timestamp_millis).clamp(0, END_OF_9999);
    DateTime::from_millis(millis).to_system_time()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn fetched(record: &Document) -> Fetched {
        let record = record.clone();
        let key = LockKey::new("workitem", 1).unwrap();
        Fetched { key, record, foreign_ttl: MINUTE, asked: Instant::now() }
    }

    fn lock(record: &Document) -> Lock {
        fetched(record).lock().unwrap()
    }

    fn at(ms: i64) -> DateTime {
        DateTime::from_millis(ms)
    }

    #[test]
    fn the_time_left_is_told_by_the_ttl_of_the_record() {
        let mut record = doc! { "ts": at(1_000), "now": at(31_000), "ttl": 40_000_i64 };
        assert!(lock(&record).expires_in() <= Duration::from_secs(10));
        assert!(lock(&record).expires_in() > Duration::from_secs(9));
        record.remove("ttl");
        assert!(lock(&record).expires_in() > Duration::from_secs(29));
    }

    #[test]
    fn a_foreign_record_is_a_lock_of_an_unknown_holder_since_its_ts() {
        let lock = lock(&doc! { "ts": at(5), "aid": "my_app_my_session_id_4711", "now": at(6) });
        assert_eq!(lock.aid.as_str(), "my_app_my_session_id_4711");
        assert_eq!((lock.token, lock.holder), (None, None));
        assert_eq!(lock.since, at(5).to_system_time());
    }

    #[test]
    fn no_record_makes_reading_it_fail() {
        let absurd = [
            doc! {},
            doc! { "ts": at(i64::MIN), "now": at(i64::MAX), "ttl": i64::MAX },
            doc! { "ts": at(i64::MAX), "now": at(i64::MIN), "ttl": f64::NAN },
            doc! { "ts": at(1), "now": at(1), "ttl": f64::INFINITY, "since": at(i64::MIN) },
            doc! { "ts": "soon", "aid": [1, 2], "token": "$$ROOT", "holder": "me", "since": 3 },
            doc! { "ts": at(1), "now": at(1), "ttl": -1, "holder": { "label": Bson::Null } },
            doc! { "reader": { "ts": 5, "fence": "x" }, "fence": -1 },
            doc! { "reader": [1], "place": { "until": at(i64::MIN), "mode": 5 } },
            doc! { "readers": [1, { "ts": "soon" }, [[]]] },
        ];
        for record in absurd {
            fetched(&record).lock();
            let _ = fetched(&record).locks().count();
        }
    }
}
