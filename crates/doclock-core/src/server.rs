//! The notes of the servers of an application, so that servers that disagree are found.

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::Serialize;
use uuid::Uuid;

use crate::text::millis;

/// A server of the application, as it has noted itself in the store. A server writes its note a second after its
/// last registration, and once a minute. The note is removed when the server is shut down, or 3 minutes after the
/// last refresh of the note. Servers of versions without such notes are not seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ServerNote {
    /// Random, new with each start.
    pub id: Uuid,
    /// The machine and the process.
    pub name: String,
    /// The version of this crate.
    pub version: String,
    /// The ttl of its locks.
    #[serde(rename = "ttl_ms", serialize_with = "millis")]
    pub ttl: Duration,
    /// The collections that it has registered.
    pub collections: BTreeMap<String, Flags>,
    /// The fingerprint (`LockManager::note_session_key`) of its session key, if the application gives one.
    pub key: Option<String>,
}

/// How a server has registered a collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Flags {
    /// `FENCED` of the type.
    pub fenced: bool,
    /// `FAIR` of the type.
    pub fair: bool,
}

impl Flags {
    /// The flags of a type.
    #[must_use]
    pub fn new(fenced: bool, fair: bool) -> Self {
        Self { fenced, fair }
    }
}

/// What comes of two applications in one database, and what to do.
const OTHER_APPLICATION: &str = "it locks none of the same collections, so two applications share this database, and \
    each is told of the sessions of the other and obeys its freezes; give each a name by `MongoStore::named`, or a \
    database of its own";

impl ServerNote {
    /// True if the other server belongs to another application: both lock collections, but none in common.
    #[must_use]
    pub fn is_of_another_application(&self, other: &Self) -> bool {
        // All applications may share the locks of jobs.
        let types = |of: &Self| -> Vec<String> {
            of.collections.keys().filter(|name| !name.starts_with("doclock.")).cloned().collect()
        };
        let (ours, theirs) = (types(self), types(other));
        !ours.is_empty() && !theirs.is_empty() && !ours.iter().any(|name| theirs.contains(name))
    }

    /// How the other server differs from this one, in words; `None` if the two agree.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<String> {
        if self.is_of_another_application(other) {
            return Some(OTHER_APPLICATION.to_owned());
        }
        let mut differences = Vec::new();
        if self.version != other.version {
            differences.push(format!("version {} instead of {}", other.version, self.version));
        }
        if self.ttl != other.ttl {
            differences.push(format!("a ttl of {:?} instead of {:?}", other.ttl, self.ttl));
        }
        if let (Some(ours), Some(theirs)) = (&self.key, &other.key)
            && ours != theirs
        {
            differences.push("another session key".to_owned());
        }
        let all = self.collections.keys().chain(other.collections.keys());
        let mut all: Vec<_> = all.collect();
        all.sort();
        all.dedup();
        for collection in all {
            match (self.collections.get(collection), other.collections.get(collection)) {
                (Some(_), None) => differences.push(format!("no type for `{collection}`")),
                (None, Some(_)) => differences.push(format!("a type for `{collection}`")),
                (Some(ours), Some(theirs)) if ours != theirs => {
                    differences.push(format!("`{collection}` {theirs} instead of {ours}"));
                }
                _ => {}
            }
        }
        (!differences.is_empty()).then(|| differences.join(", "))
    }
}

impl fmt::Display for ServerNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "server {} (version {}, ttl {:?})", self.name, self.version, self.ttl)
    }
}

impl fmt::Display for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.fenced, self.fair) {
            (false, false) => "neither FENCED nor FAIR",
            (true, false) => "FENCED",
            (false, true) => "FAIR",
            (true, true) => "FENCED and FAIR",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_differences_are_named() {
        let of = |names: &[&str]| {
            names.iter().map(|name| ((*name).to_owned(), Flags::new(false, false))).collect()
        };
        let one = ServerNote {
            id: Uuid::nil(),
            name: "a".to_owned(),
            version: "1.0.0".to_owned(),
            ttl: Duration::from_secs(60),
            collections: of(&["page", "user"]),
            key: Some("k".to_owned()),
        };
        assert_eq!(one.difference(&ServerNote { key: None, ..one.clone() }), None);
        let mut other = ServerNote {
            version: "1.1.0".to_owned(),
            ttl: Duration::from_secs(90),
            collections: of(&["page", "news"]),
            key: Some("other".to_owned()),
            ..one.clone()
        };
        other.collections.insert("page".to_owned(), Flags::new(true, false));
        let difference = one.difference(&other).unwrap();
        assert_eq!(
            difference,
            "version 1.1.0 instead of 1.0.0, a ttl of 90s instead of 60s, another session key, a type for \
             `news`, `page` FENCED instead of neither FENCED nor FAIR, no type for `user`"
        );
    }
    #[test]
    fn servers_without_a_collection_in_common_are_two_applications() {
        let note = |names: &[&str]| ServerNote {
            id: Uuid::nil(),
            name: "a".to_owned(),
            version: "1.0.0".to_owned(),
            ttl: Duration::from_secs(60),
            collections: (names.iter())
                .map(|name| ((*name).to_owned(), Flags::new(false, false)))
                .collect(),
            key: None,
        };
        for (ours, theirs, is_another) in [
            (&["page"][..], &["order"][..], true),
            (&["page", "doclock.named"], &["order", "doclock.named"], true),
            (&["page", "user"], &["order", "user"], false),
            // Servers that only run jobs, and servers that have not registered anything yet.
            (&["page"], &["doclock.named"], false),
            (&["page"], &[], false),
        ] {
            let (ours, theirs) = (note(ours), note(theirs));
            assert_eq!(ours.is_of_another_application(&theirs), is_another, "{theirs:?}");
            let difference = ours.difference(&theirs).unwrap();
            assert_eq!(difference.contains("MongoStore::named"), is_another, "{difference}");
        }
    }
}
