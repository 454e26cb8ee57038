//! Reads a stored record as a [`Lock`].

use std::time::{Duration, Instant, SystemTime};

use mongodb::bson::{Bson, DateTime, Document};

use crate::{
    key::LockKey,
    lock::{Aid, Holder, Lock, LockToken, Mode},
    store::{
        Claim, TryAcquire,
        mongo::{
            codec::number,
            pipeline::{self, millis},
        },
    },
};

/// A record that was fetched together with `now`, and the values that are needed to read it.
pub(super) struct Fetched<'a> {
    pub(super) key: LockKey,
    pub(super) record: &'a Document,
    pub(super) foreign_ttl: Duration,
    /// A moment before the request was sent.
    pub(super) asked: Instant,
}

impl Fetched<'_> {
    /// The lock: the exclusive one, or the one of the requested reader.
    pub(super) fn lock(self) -> Option<Lock> {
        match (self.record.get("reader"), self.record.get("readers")) {
            (Some(Bson::Document(reader)), _) => Some(self.reader(reader)),
            // There are readers, but none that was asked for.
            (Some(_), _) | (_, Some(Bson::Array(_))) => None,
            (None, _) => Some(self.lock_of(self.record, Mode::Exclusive)),
        }
    }

    /// All locks in the record.
    pub(super) fn locks(&self) -> impl Iterator<Item = Lock> {
        self.grants().map(|(grant, mode)| self.lock_of(grant, mode))
    }

    /// The locks that had not expired when the server read the record. Until the answer is here, they may have.
    pub(super) fn live_locks(&self) -> impl Iterator<Item = Lock> {
        let is_live = |grant: &Document| {
            !self.remaining(grant, grant.get_datetime("ts").ok().copied()).is_zero()
        };
        let live = self.grants().filter(move |(grant, _)| is_live(grant));
        live.map(|(grant, mode)| self.lock_of(grant, mode))
    }

    fn grants(&self) -> impl Iterator<Item = (&Document, Mode)> {
        let readers = self.record.get_array("readers").ok();
        let exclusive = readers.is_none().then_some((self.record, Mode::Exclusive));
        let readers = readers.into_iter().flatten().filter_map(Bson::as_document);
        readers.map(|reader| (reader, Mode::Shared)).chain(exclusive)
    }

    /// The answer to a claim: the session's own lock, or the lock or place that is in its way.
    pub(super) fn answer(self, claim: &Claim) -> Option<TryAcquire> {
        let place = self.record.get_document("place").ok().map(|place| self.place(place));
        let is_of = |lock: &Lock| lock.token.is_some_and(|it| it.is_of_same_claim(claim.token));
        let holds = |lock: &Lock| lock.aid == claim.aid && lock.mode.covers(claim.mode);
        // If there is a place, the lock ahead of it may have expired.
        let lock = self.lock().filter(|lock| place.is_none() || !lock.expires_in().is_zero());
        Some(match (lock, place) {
            (Some(lock), _) if holds(&lock) && is_of(&lock) => TryAcquire::Granted(lock),
            (Some(lock), _) if holds(&lock) => TryAcquire::AlreadyMine(lock),
            // Readers do not exclude each other.
            (Some(lock), Some(place)) if lock.mode == claim.mode && claim.mode == Mode::Shared => {
                TryAcquire::Held(place)
            }
            (Some(lock), _) => TryAcquire::Held(lock),
            (None, place) => TryAcquire::Held(place?),
        })
    }

    fn reader(&self, reader: &Document) -> Lock {
        self.lock_of(reader, Mode::Shared)
    }

    /// Accepts records of foreign programs, in which any field may be missing or have another type.
    fn lock_of(&self, grant: &Document, mode: Mode) -> Lock {
        let ts = grant.get_datetime("ts").ok().copied();
        let token = token_of(grant);
        // A foreign lock is recognised by its `ts`, whatever else its program writes.
        let since = grant.get_datetime("since").ok().copied().filter(|_| token.is_some()).or(ts);
        Lock {
            key: self.key.clone(),
            description: None,
            mode,
            aid: aid_of(grant),
            token,
            tab: grant.get_str("tab").ok().and_then(|tab| tab.parse().ok()),
            fence: (grant.get("fence").and_then(Bson::as_i64))
                .and_then(|fence| u64::try_from(fence).ok())
                .map(Into::into),
            holder: holder_of(grant),
            since: presentable(since),
            expires_at: self.asked + self.remaining(grant, ts),
        }
    }

    /// A waiter, shown as the next holder of the document.
    fn place(&self, place: &Document) -> Lock {
        let until = place.get_datetime("until").ok().copied();
        let now = self.record.get_datetime("now").ok().copied();
        let left = until.zip(now).map_or(0, |(until, now)| {
            until.timestamp_millis().saturating_sub(now.timestamp_millis())
        });
        let is_shared = place.get_str("mode").is_ok_and(|mode| mode == "shared");
        Lock {
            key: self.key.clone(),
            description: None,
            mode: if is_shared { Mode::Shared } else { Mode::Exclusive },
            aid: aid_of(place),
            token: None,
            tab: None,
            fence: None,
            holder: holder_of(place),
            // A ticket is about the time at which it was drawn.
            since: presentable(place.get_i64("first").ok().map(DateTime::from_millis)),
            expires_at: self.asked + in_our_time(left),
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

/// The record that was read together with the server's time, and that time in it.
pub(super) fn whole_record(mut found: Document) -> Option<Document> {
    let Bson::Document(mut record) = found.remove(pipeline::RECORD)? else { return None };
    record.insert("now", found.remove("now")?);
    Some(record)
}

fn aid_of(grant: &Document) -> Aid {
    Aid::from(grant.get_str("aid").unwrap_or_default().to_owned())
}

fn token_of(grant: &Document) -> Option<LockToken> {
    grant.get_str("token").ok().and_then(|token| token.parse().ok())
}

/// The `holder` of a grant or of an end.
pub(super) fn holder_of(grant: &Document) -> Option<Holder> {
    let holder = grant.get_document("holder").ok()?;
    let named = Holder::new(holder.get_str("label").ok()?);
    Some(match holder.get_str("user") {
        Ok(user) => named.of_user(user),
        Err(_) => named,
    })
}

fn in_our_time(millis: i64) -> Duration {
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
    use mongodb::bson::doc;

    const MINUTE: Duration = Duration::from_secs(60);

    fn fetched(record: &Document) -> Fetched<'_> {
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
