//! A freeze: a time in which no new locks are granted.

use std::{
    fmt,
    time::{Duration, Instant, SystemTime},
};

use serde::{Serialize, Serializer};
use uuid::Uuid;

use crate::{
    clock,
    key::{Lockable, Named},
};

/// A year: long enough for a freeze whose end nobody will see.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The collections that a freeze covers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// All collections of documents, but not the [named locks](Named) of jobs: the job that changes the
    /// documents may need a named lock.
    All,
    /// One collection of documents, or the collection of the named locks.
    Collection(String),
}

impl Scope {
    /// True if the scope covers the locks in this collection.
    #[must_use]
    pub fn covers(&self, collection: &str) -> bool {
        match self {
            Self::All => collection != Named::COLLECTION,
            Self::Collection(name) => name == collection,
        }
    }
}

impl From<&str> for Scope {
    fn from(collection: &str) -> Self {
        Self::Collection(collection.to_owned())
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("every collection"),
            Self::Collection(name) => write!(f, "the collection `{name}`"),
        }
    }
}

/// A time in which no new locks are granted, for a migration or for an editorial deadline. Held locks
/// stay, and their holders may save.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Freeze {
    /// The frozen collections. As JSON the name of the collection, or `null` for all.
    #[serde(rename = "collection", serialize_with = "collection")]
    pub scope: Scope,
    /// The reason, for the people who cannot edit meanwhile.
    pub reason: String,
    /// The end of the freeze, by the store's clock.
    #[serde(skip)]
    pub until: SystemTime,
    /// The person who froze it: the label of the [`Actor`](crate::Actor). `None` for a freeze of an earlier version.
    #[serde(skip)]
    pub by: Option<String>,
    /// Identifies the freeze. `None` for a freeze of an earlier version.
    #[serde(skip)]
    pub id: Option<Uuid>,
    /// How many servers have noted that they obey the freeze, [at most](MAX_NOTED) 256. A server writes this
    /// note when it has read the freeze, usually within a second. Servers of earlier versions obey without a
    /// note, or know no freezes.
    #[serde(skip)]
    pub obeyed_by: usize,
    #[serde(rename = "ends_in_ms", serialize_with = "remaining")]
    ends_at: Instant,
}

impl Freeze {
    /// A freeze that a store has read: it ends at `until`, which was `ends_in` ahead of the store's clock.
    #[must_use]
    pub fn new(scope: Scope, reason: String, until: SystemTime, ends_in: Duration) -> Self {
        let ends_at = clock::now() + ends_in.min(LONGEST);
        Self { scope, reason, until, by: None, id: None, obeyed_by: 0, ends_at }
    }

    /// The remaining time; zero if the freeze has ended.
    #[must_use]
    pub fn ends_in(&self) -> Duration {
        self.ends_at.saturating_duration_since(clock::now())
    }
}

/// How many servers at most can note that they obey a freeze.
pub const MAX_NOTED: usize = 256;

/// When a freeze ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// At this time, by the store's clock.
    At(SystemTime),
    /// After this time, counted by the store's clock.
    In(Duration),
}

impl From<SystemTime> for End {
    fn from(at: SystemTime) -> Self {
        Self::At(at)
    }
}

impl From<Duration> for End {
    fn from(lasts: Duration) -> Self {
        Self::In(lasts)
    }
}

/// A freeze that is to begin, for [`Servers::set_freeze`](crate::store::Servers::set_freeze).
#[derive(Debug, Clone)]
pub struct NewFreeze {
    /// Identifies the freeze.
    pub id: Uuid,
    /// The reason, for people.
    pub reason: String,
    /// The person who froze it.
    pub by: String,
    /// When the freeze ends.
    pub end: End,
}

/// Two values are equal if they are the same freeze, whenever each was read.
impl PartialEq for Freeze {
    fn eq(&self, other: &Self) -> bool {
        (&self.scope, &self.reason, self.until, self.id)
            == (&other.scope, &other.reason, other.until, other.id)
    }
}

fn collection<S: Serializer>(scope: &Scope, to: S) -> Result<S::Ok, S::Error> {
    match scope {
        Scope::All => to.serialize_none(),
        Scope::Collection(name) => to.serialize_str(name),
    }
}

fn remaining<S: Serializer>(ends_at: &Instant, to: S) -> Result<S::Ok, S::Error> {
    let left = ends_at.saturating_duration_since(clock::now()).as_millis();
    to.serialize_u64(u64::try_from(left).unwrap_or(u64::MAX))
}
