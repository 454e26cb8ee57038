//! Reports documents that become free, from a change stream.

use std::time::Duration;

use futures_util::stream;
use mongodb::{
    Collection,
    bson::{Document, doc},
    change_stream::ChangeStream,
    options::ReadConcern,
};
use tokio::time::timeout;

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    store::{
        Change, Interest, Watch,
        mongo::{codec, error::store_error, pipeline::read_taken},
    },
};

/// How long the server keeps a request open while nothing happens.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// How much later the answer may come. The driver has no time-out for it: on a broken network it would
/// wait forever, and so would all waiters.
const GRACE: Duration = Duration::from_secs(5);

/// Opens a change stream on the locks of a collection. Needs a replica set.
pub(super) async fn watch(
    locks: &Collection<Document>,
    collection: &str,
    interest: Interest,
) -> Result<Watch, StoreError> {
    let opened = (locks.watch())
        .pipeline(pipeline(interest))
        // The collection's own read concern is `local`, which a change stream does not accept.
        .read_concern(ReadConcern::majority())
        .max_await_time(ANSWER_WITHIN)
        .await;
    let stream =
        opened.map_err(|e| store_error(format!("watching the locks in {collection}"), e))?;
    let from = (stream.with_type::<Document>(), collection.to_owned());
    Ok(Watch::new(stream::try_unfold(from, |(mut stream, collection)| async move {
        let change = next(&mut stream, &collection).await?;
        Ok(change.map(|change| (change, (stream, collection))))
    })))
}

async fn next(
    stream: &mut ChangeStream<Document>,
    collection: &str,
) -> Result<Option<Change>, StoreError> {
    while stream.is_alive() {
        let event = match timeout(ANSWER_WITHIN + GRACE, stream.next_if_any()).await {
            Ok(event) => {
                event.map_err(|e| store_error(format!("watching the locks in {collection}"), e))?
            }
            Err(_) => {
                let message = format!("watching the locks in {collection}: no answer in time");
                return Err(StoreError::new(StoreErrorKind::Unavailable, message));
            }
        };
        let Some(event) = event else { continue };
        let Ok(document) = event.get_document("documentKey") else {
            // The collection was dropped or renamed.
            return Ok(Some(Change::Missed));
        };
        let id = document.get("_id").and_then(codec::lock_id);
        // A foreign program may lock documents whose ids this crate cannot represent. Nobody waits for
        // them here.
        if let Some(key) = id.and_then(|id| LockKey::new(collection, id).ok()) {
            let taken = event.get_str("taken").ok().and_then(read_taken);
            return Ok(Some(match taken {
                Some((token, taken)) => Change::Taken(key, token, taken),
                None => Change::Changed(key),
            }));
        }
    }
    Ok(None)
}

/// Never reports renewals, which are the most frequent events.
fn pipeline(interest: Interest) -> Vec<Document> {
    let mut any = frees();
    let mut fields = doc! { "operationType": 1, "documentKey": 1 };
    if interest == Interest::All {
        any.extend(grants());
        let taken =
            doc! { "$ifNull": ["$updateDescription.updatedFields.taken", "$fullDocument.taken"] };
        fields.insert("taken", taken);
    }
    vec![doc! { "$match": { "$or": any } }, doc! { "$project": fields }]
}

/// Events by which a session has acquired a lock.
fn grants() -> Vec<Document> {
    let changed =
        doc! { "$objectToArray": { "$ifNull": ["$updateDescription.updatedFields", {}] } };
    let reader = doc! { "$regexMatch": { "input": "$$this.k", "regex": r"^readers\.[0-9]+$" } };
    let reader_joined =
        doc! { "$anyElementTrue": [{ "$map": { "input": changed, "in": reader } }] };
    vec![
        doc! { "operationType": { "$in": ["insert", "replace"] } },
        doc! { "updateDescription.updatedFields.token": { "$exists": true } },
        doc! { "$expr": reader_joined },
    ]
}

/// Events after which a waiter may be let in.
fn frees() -> Vec<Document> {
    let left = |field: &str| {
        vec![
            doc! { "updateDescription.removedFields": field },
            doc! { "updateDescription.truncatedArrays.field": field },
            // The whole array was rewritten. A change within the array has another name, with a dot.
            doc! { format!("updateDescription.updatedFields.{field}"): { "$exists": true } },
        ]
    };
    let mut any = vec![
        doc! { "operationType": { "$nin": ["insert", "update", "replace"] } },
        // But no handover from one holder to the next.
        doc! { "operationType": "replace", "fullDocument.aid": { "$exists": false } },
        // Released, in a collection that keeps the record.
        doc! { "updateDescription.removedFields": "aid" },
        // The lock expires sooner than before, and this is not a new grant.
        doc! {
            "updateDescription.updatedFields.until": { "$exists": true },
            "updateDescription.updatedFields.token": { "$exists": false },
        },
    ];
    any.extend(left("readers"));
    any.extend(left("queue"));
    any
}
