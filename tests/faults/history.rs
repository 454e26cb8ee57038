//! The observations of application servers, one line of JSON each, in a file that survives a kill.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actix_doclock::{Lock, LockKey, Mode};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Nanoseconds on the clock that cannot be set and that all processes of the machine share.
pub(crate) type Moment = u64;

pub(crate) fn now() -> Moment {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Never later than the instant itself. The instant may lie in the past.
pub(crate) fn moment(instant: Instant) -> Moment {
    let (now, as_instant) = (now(), Instant::now());
    let to_come = instant.saturating_duration_since(as_instant);
    (now + nanos(to_come)).saturating_sub(nanos(as_instant.saturating_duration_since(instant)))
}

pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("a duration of our time")
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) at: Moment,
    pub(crate) process: String,
    /// Connects the beginning of an operation with its outcome.
    pub(crate) op: u64,
    pub(crate) event: Event,
}

/// All events of one grant carry its token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Event {
    AcquireBegan {
        key: String,
    },
    Granted {
        key: String,
        aid: String,
        token: String,
        shared: bool,
        fence: Option<u64>,
        /// When the holder stops believing in the lock, unless it is renewed.
        until: Moment,
    },
    Held,
    /// At that moment the holder still takes the lock for live, whatever `until` said.
    Believed {
        token: String,
    },
    Renewed {
        token: String,
        until: Moment,
    },
    /// The holder was told of the loss, and stops believing.
    Lost {
        token: String,
    },
    SaveBegan {
        key: String,
        token: String,
        id: String,
        value: u64,
    },
    Saved,
    NotSaved,
    ReleaseBegan {
        token: String,
    },
    Released,
    AlreadyGone,
    /// The outcome of the operation is unknown to its caller.
    Unknown {
        why: String,
    },
    /// The listener was told that this session is idle and held these locks.
    Idle {
        aid: String,
        keys: Vec<String>,
    },
    Said(String),
}

/// The name of a key in a history.
pub(crate) fn name(key: &LockKey) -> String {
    format!("{}/{}", key.collection(), key.id())
}

impl Event {
    pub(crate) fn granted(lock: &Lock) -> Self {
        Self::Granted {
            key: name(&lock.key),
            aid: lock.aid.as_str().to_owned(),
            token: lock.token.expect("our own").to_string(),
            shared: lock.mode == Mode::Shared,
            fence: lock.fence.map(|fence| fence.get()),
            until: moment(lock.expires_at),
        }
    }
}

/// The file that one process writes.
#[derive(Debug)]
pub(crate) struct History {
    process: String,
    file: Mutex<File>,
    ops: AtomicU64,
}

impl History {
    pub(crate) fn create(path: &Path, process: &str) -> Self {
        let file = OpenOptions::new().create(true).append(true).open(path).expect("a file");
        Self { process: process.to_owned(), file: Mutex::new(file), ops: AtomicU64::new(0) }
    }

    pub(crate) fn next_op(&self) -> u64 {
        self.ops.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn write(&self, op: u64, event: Event) {
        self.write_at(now(), op, event);
    }

    /// In a single write, which a kill cannot tear apart.
    pub(crate) fn write_at(&self, at: Moment, op: u64, event: Event) {
        let line = Line { at, process: self.process.clone(), op, event };
        let mut line = serde_json::to_vec(&line).expect("plain data");
        line.push(b'\n');
        self.file.lock().expect("no panic while locked").write_all(&line).expect("disk space");
    }

    pub(crate) fn say(&self, text: impl Into<String>) {
        self.write(self.next_op(), Event::Said(text.into()));
    }
}

/// The lines of all files in a directory, sorted by their moments.
pub(crate) fn read_all(dir: &Path) -> Vec<Line> {
    let mut lines = Vec::new();
    for file in fs::read_dir(dir).expect("a directory").flatten() {
        if file.path().extension().is_some_and(|extension| extension == "jsonl") {
            lines.extend(read(&file.path()));
        }
    }
    lines.sort_by_key(|line| line.at);
    lines
}

/// The complete lines of one file.
pub(crate) fn read(path: &Path) -> Vec<Line> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| serde_json::from_str(line).expect("a line of a history")).collect()
}

#[cfg(test)]
#[test]
fn a_moment_that_has_passed_is_in_the_past() {
    let second = Duration::from_secs(1);
    let passed = Instant::now().checked_sub(second).expect("the machine runs for longer");
    assert!(moment(passed) <= now() - nanos(second));
}
