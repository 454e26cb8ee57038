//! A stored record as a [`Lock`].

use std::time::{Duration, Instant, SystemTime};

use mongodb::bson::{DateTime, Document};

use super::{codec::number, pipeline::millis};
use crate::{Aid, Holder, Lock, LockKey, Mode};

/// Reads a record that was fetched with `now` beside it. `asked` is the moment before the request.
///
/// Takes what foreign programs write: anything may be missing or of another type.
pub(super) fn to_lock(
    key: LockKey,
    record: &Document,
    foreign_ttl: Duration,
    asked: Instant,
) -> Lock {
    let ts = record.get_datetime("ts").ok().copied();
    let token = record.get_str("token").ok().and_then(|token| token.parse().ok());
    // A foreign lock is told from others by its `ts`, whatever else its program writes.
    let since = record.get_datetime("since").ok().copied().filter(|_| token.is_some()).or(ts);
    Lock {
        key,
        mode: Mode::Exclusive,
        aid: Aid::from(record.get_str("aid").unwrap_or_default().to_owned()),
        token,
        fence: None,
        holder: (record.get_document("holder").ok())
            .and_then(|holder| holder.get_str("label").ok())
            .map(Holder::new),
        since: presentable(since),
        expires_at: asked + remaining(record, ts, foreign_ttl),
    }
}

/// A date that can be shown: foreign programs write any, RFC 3339 has years of four digits only.
pub(super) fn presentable(date: Option<DateTime>) -> SystemTime {
    const END_OF_9999: i64 = 253_402_300_799_999;
    let millis = date.map_or(0, DateTime::timestamp_millis).clamp(0, END_OF_9999);
    DateTime::from_millis(millis).to_system_time()
}

/// `ts + ttl - now`. Everything here may come from a foreign program, hence the saturation.
fn remaining(record: &Document, ts: Option<DateTime>, foreign_ttl: Duration) -> Duration {
    /// Nobody plans that far, and an `Instant` can hold it.
    const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    let (Some(ts), Ok(now)) = (ts, record.get_datetime("now")) else {
        return Duration::ZERO;
    };
    let ttl = match record.get("ttl").and_then(number) {
        Some(ms) => ms as i64,
        None => millis(foreign_ttl),
    };
    let age = now.timestamp_millis().saturating_sub(ts.timestamp_millis());
    let left = ttl.saturating_sub(age);
    Duration::from_millis(left.try_into().unwrap_or(0)).min(FOREVER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mongodb::bson::{Bson, doc};

    const MINUTE: Duration = Duration::from_secs(60);

    fn lock(record: &Document) -> Lock {
        to_lock(LockKey::new("workitem", 1).unwrap(), record, MINUTE, Instant::now())
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
        ];
        for record in absurd {
            lock(&record);
        }
    }
}
