//! Why a document is not found, if the collection is to blame.

use std::time::{Duration, Instant};

use mongodb::bson::{Binary, Bson, Document, doc, oid::ObjectId, spec::BinarySubtype};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::{
    error::StoreErrorKind,
    key::{LockId, LockKey},
    store::mongo::{
        LockCollection,
        codec::number,
        error::{Result, failure, is_denied},
        schema::danger::{self, Danger},
        send::Timing,
        time_limits::answered,
    },
};

/// How often the collation of a collection is checked, however many documents are not found.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// What is known of the documents that were not found in a collection.
#[derive(Debug, Default)]
pub(in crate::store::mongo) struct Absent(Mutex<AbsenceNotes>);

#[derive(Debug, Default)]
struct AbsenceNotes {
    /// True if the log has said that the ids may have another type.
    has_warned: bool,
    /// When the collation was last checked.
    checked: Option<Instant>,
    collation: Option<Danger>,
}

impl LockCollection<'_> {
    /// Says in the log, once, that there is a document whose id has the same text but another type: perhaps the Rust
    /// type of the ids is wrong, and no document would ever be found.
    ///
    /// # Errors
    /// If the collection has got a collation, so that a document may have a similar id.
    pub(in crate::store::mongo) async fn explain_absence(&self, key: &LockKey) -> Result<()> {
        if let LockId::String(_) = key.id()
            && let Some(danger) = self.collation().await?
        {
            return Err(failure(StoreErrorKind::Other, danger.to_string()));
        }
        if !self.absent.0.lock().has_warned
            && let Ok(Some(is)) = self.twin_of(key.id()).await
            && !std::mem::replace(&mut self.absent.0.lock().has_warned, true)
        {
            log::warn!(
                target: "actix_doclock::store",
                "there is no {key:?}, but a document of the same text whose `_id` is {is}",
            );
        }
        Ok(())
    }

    /// The default collation of the documents, which nobody tells a running server.
    async fn collation(&self) -> Result<Option<Danger>> {
        {
            let mut notes = self.absent.0.lock();
            if notes.checked.is_some_and(|at| at.elapsed() < CHECK_EVERY) {
                return Ok(notes.collation.clone());
            }
            notes.checked = Some(Instant::now());
        }
        let name = self.documents.name();
        let found = match danger::options(self.store.database(), &[name]).await {
            Err(e) if is_denied(&e) => Vec::new(),
            found => found?,
        };
        let mut dangers = found.iter().flat_map(|it| danger::of_options(it, false, true));
        let collation = dangers.find(|it| it.kind == "collation");
        self.absent.0.lock().collation.clone_from(&collation);
        Ok(collation)
    }

    /// The type of an id with the same text, if there is a document with that id.
    async fn twin_of(&self, id: &LockId) -> Result<Option<&'static str>> {
        let twins = twins(id);
        if twins.is_empty() {
            return Ok(None);
        }
        let ids: Vec<_> = twins.iter().map(|(id, _)| id).collect();
        let twin = self.documents.find_one(doc! { "_id": { "$in": ids } });
        let twin = twin.projection(doc! { "_id": 1 }).max_time(self.until.read_limit());
        let twin = answered(twin).await?;
        let twin = twin.and_then(|twin| Document::try_from(twin).ok());
        let Some(id) = twin.as_ref().and_then(|twin| twin.get("_id")) else { return Ok(None) };
        // The server finds a number whatever its type is.
        let is = |(twin, _): &&(Bson, _)| {
            twin == id || number(twin).is_some_and(|it| number(id) == Some(it))
        };
        Ok(twins.iter().find(is).map(|(_, is)| *is))
    }
}

/// The ids of other types that have the same text, and what they are.
fn twins(id: &LockId) -> Vec<(Bson, &'static str)> {
    const STRING: &str = "a string: if all are like that, correct `type Id` of the Rust type";
    const OBJECT_ID: &str = "an ObjectId: if all are like that, correct `type Id` of the Rust type";
    const NUMBER: &str = "a number: if all are like that, correct `type Id` of the Rust type";
    const UUID: &str = "a UUID: if all are like that, correct `type Id` of the Rust type";
    let text = id.to_string();
    let LockId::String(_) = id else {
        let mut twins = vec![(text.into(), STRING)];
        if let LockId::Uuid(uuid) = id {
            twins.extend(legacy(*uuid));
        }
        return twins;
    };
    let mut twins = Vec::new();
    twins.extend(ObjectId::parse_str(&text).ok().map(|id| (id.into(), OBJECT_ID)));
    twins.extend(text.parse::<i64>().ok().map(|id| (id.into(), NUMBER)));
    if let Ok(uuid) = text.parse::<Uuid>() {
        twins.push((Bson::from(&LockId::from(uuid)), UUID));
        twins.extend(legacy(uuid));
    }
    twins
}

/// The same UUID as drivers of Python, .NET and Java wrote it by default for many years: each in another order of
/// bytes.
fn legacy(uuid: Uuid) -> [(Bson, &'static str); 3] {
    const LEGACY: &str = "a legacy UUID (binary subtype 3), which this crate does not read: give the documents ids of \
                          subtype 4";
    let mut java = *uuid.as_bytes();
    java[..8].reverse();
    java[8..].reverse();
    [*uuid.as_bytes(), uuid.to_bytes_le(), java].map(|bytes| {
        let (subtype, bytes) = (BinarySubtype::UuidOld, bytes.to_vec());
        (Binary { subtype, bytes }.into(), LEGACY)
    })
}
