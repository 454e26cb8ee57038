//! A collection whose locks are ready for use.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use mongodb::{
    Collection, Database,
    bson::{Document, RawDocumentBuf, doc, oid::ObjectId},
    options::{CollectionOptions, ReadConcern, ReadPreference, SelectionCriteria, WriteConcern},
};
use uuid::Uuid;

use crate::{
    key::{LockId, LockKey},
    store::{
        Acquisition, Rules,
        mongo::{
            lanes::{self, Lanes, Shared},
            pipeline::{self, Target},
            record::Fetched,
            seen::Seen,
            together::Groups,
        },
    },
};

/// The longest wait for a majority, so that no request waits forever while replication stands still.
const WRITE_CONCERN_TIMEOUT: Duration = Duration::from_secs(10);

/// The result of `prepare`, for the other verbs.
#[derive(Debug, Clone)]
pub(super) struct Prepared {
    pub(super) locks: Collection<Document>,
    /// The same records, read from majority-committed state. A failover may undo a write that only the
    /// primary has, so such a write proves no lease, not even to the sender of the renewal.
    pub(super) leases: Collection<Document>,
    pub(super) documents: Collection<RawDocumentBuf>,
    pub(super) rules: Rules,
    pub(super) seen: Arc<Seen>,
    pub(super) lanes: Arc<Lanes>,
    pub(super) groups: Arc<Groups>,
    /// The log has said that the ids may have another type.
    has_warned: Arc<AtomicBool>,
}

impl Prepared {
    pub(super) fn new(
        database: &Database,
        collection: &str,
        locks: Collection<Document>,
        rules: Rules,
        shared: Shared,
    ) -> Self {
        Self {
            leases: with_reads(database, locks.name(), ReadConcern::majority()),
            documents: majority(database, collection),
            locks,
            rules,
            seen: Arc::new(Seen::new()),
            lanes: Arc::new(Lanes::new(shared)),
            groups: Arc::default(),
            has_warned: Arc::default(),
        }
    }

    /// Matches the record while this acquisition of its exclusive lock is live.
    pub(super) fn live(&self, held: &Acquisition) -> Document {
        pipeline::and_live(Target::exclusive(held).filter(), self.rules.ttl)
    }

    /// Renews the lock for a guarded write, and always changes its record.
    pub(super) fn touch(&self) -> Vec<Document> {
        pipeline::renew_for_save(Uuid::new_v4(), &self.rules)
    }

    /// If there is a document whose id has the same text, but another type, perhaps the Rust type of the ids
    /// is wrong, and no document would ever be found. The log says so once.
    pub(super) async fn warn_of_twin(&self, key: &LockKey) {
        let (twin, is) = match key.id() {
            LockId::ObjectId(_) => (LockId::String(key.id().to_string()), "a string"),
            LockId::String(text) => match ObjectId::parse_str(text) {
                Ok(id) => (id.into(), "an ObjectId"),
                Err(_) => return,
            },
            _ => return,
        };
        if self.has_warned.load(Relaxed) {
            return;
        }
        let found = self.documents.find_one(pipeline::by_id(&twin)).projection(doc! { "_id": 1 });
        if let Ok(Some(_)) = found.max_time(lanes::read_limit()).await
            && !self.has_warned.swap(true, Relaxed)
        {
            log::warn!(
                target: "actix_doclock::store",
                "there is no {key:?}, but a document of the same text whose `_id` is {is}: if all are \
                 like that, correct `type Id` of the Rust type",
            );
        }
    }

    pub(super) fn fetched<'a>(
        &self,
        key: &LockKey,
        record: &'a Document,
        asked: Instant,
    ) -> Fetched<'a> {
        Fetched { key: key.clone(), record, foreign_ttl: self.rules.ttl, asked }
    }
}

/// A collection with fixed read and write concerns, whatever the URI says.
pub(super) fn majority<T: Send + Sync>(database: &Database, name: &str) -> Collection<T> {
    with_reads(database, name, ReadConcern::local())
}

fn with_reads<T: Send + Sync>(
    database: &Database,
    name: &str,
    concern: ReadConcern,
) -> Collection<T> {
    let mut acknowledged = WriteConcern::majority();
    acknowledged.w_timeout = Some(WRITE_CONCERN_TIMEOUT);
    let options = CollectionOptions::builder()
        .write_concern(acknowledged)
        .read_concern(concern)
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
        .build();
    database.collection_with_options(name, options)
}

/// The same write concern, for a command.
pub(super) fn majority_acknowledges() -> Document {
    doc! { "w": "majority", "wtimeout": pipeline::millis(WRITE_CONCERN_TIMEOUT) }
}
