//! Times in the formats of the HTTP API.

use std::time::{Duration, SystemTime};

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

pub(super) fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    let time = time.replace_millisecond(time.millisecond()).unwrap_or(time);
    // Stores give dates between 1970 and 9999, which can be formatted.
    time.format(&Rfc3339).unwrap_or_default()
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
