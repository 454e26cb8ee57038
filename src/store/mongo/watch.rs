//! Reports changes of locks, from a change stream.

use std::{sync::Arc, time::Duration};

use futures_util::stream;
use mongodb::{
    Collection,
    bson::{Bson, Document, doc},
    change_stream::ChangeStream,
    options::ReadConcern,
};
use tokio::time::timeout;

use crate::{
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    store::{
        Change, Watch,
        mongo::{codec, error::store_error, pipeline::read_taken, seen::Seen},
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
    seen: Arc<Seen>,
    collection: &str,
) -> Result<Watch, StoreError> {
    let opened = (locks.watch())
        .pipeline(pipeline())
        // The collection's own read concern is `local`, which a change stream does not accept.
        .read_concern(ReadConcern::majority())
        .max_await_time(ANSWER_WITHIN)
        .await;
    let stream =
        opened.map_err(|e| store_error(format!("watching the locks in {collection}"), e))?;
    let from = (stream.with_type::<Document>(), collection.to_owned(), seen);
    Ok(Watch::new(stream::try_unfold(from, |(mut stream, collection, seen)| async move {
        let change = next(&mut stream, &collection).await?;
        if let Some(Change::Freed(key) | Change::Taken(key, ..)) = &change {
            seen.freed(key.id());
        }
        Ok(change.map(|change| (change, (stream, collection, seen))))
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
        let key = id.and_then(|id| LockKey::new(collection, id).ok());
        if let Some(change) = key.and_then(|key| read(key, &event)) {
            return Ok(Some(change));
        }
    }
    Ok(None)
}

/// Everything but renewals, which are by far the most frequent events, with the names of the changed
/// fields.
fn pipeline() -> Vec<Document> {
    let update = |change: &str| format!("updateDescription.{change}");
    let is_set = |field: &str| doc! { update("updatedFields") + "." + field: { "$exists": true } };
    let changed =
        doc! { "$objectToArray": { "$ifNull": ["$updateDescription.updatedFields", {}] } };
    let names = doc! { "$map": { "input": changed, "in": "$$this.k" } };
    let matters = r"^(readers\.[0-9]+|queue\.[0-9]+\.(first|writer))$";
    let matters = doc! { "$regexMatch": { "input": "$$this", "regex": matters } };
    let matters = doc! { "$anyElementTrue": [{ "$map": { "input": &names, "in": matters } }] };
    let any = vec![
        doc! { "operationType": { "$ne": "update" } },
        doc! { update("removedFields.0"): { "$exists": true } },
        doc! { update("truncatedArrays.0"): { "$exists": true } },
        is_set("token"),
        is_set("until"),
        is_set("readers"),
        is_set("queue"),
        doc! { "$expr": matters },
    ];
    let taken =
        doc! { "$ifNull": ["$updateDescription.updatedFields.taken", "$fullDocument.taken"] };
    let fields = doc! {
        "operationType": 1, "documentKey": 1, "taken": taken, "aid": "$fullDocument.aid", "set": names,
        "removed": "$updateDescription.removedFields",
        "shortened": "$updateDescription.truncatedArrays.field",
    };
    vec![doc! { "$match": { "$or": any } }, doc! { "$project": fields }]
}

/// What an event means; `None` for a renewal, or for a server that joins a queue.
fn read(key: LockKey, event: &Document) -> Option<Change> {
    if let Some((token, taken)) = event.get_str("taken").ok().and_then(read_taken) {
        return Some(Change::Taken(key, token, taken));
    }
    let names = |list| event.get_array(list).into_iter().flatten().filter_map(Bson::as_str);
    let has = |list, field| names(list).any(|name| name == field);
    // A change of one element has a name with a dot. Without a dot, the array may have become shorter.
    let shortens = |array| ["set", "removed", "shortened"].into_iter().any(|list| has(list, array));
    let is_granted =
        || has("set", "token") || names("set").any(|name| name.starts_with("readers."));
    // A server has other waiters than before: the next waiter may be another one.
    let moves_on = || names("set").any(|name| name.starts_with("queue."));
    // Without a new token, `until` makes the lock expire sooner.
    let ends_sooner = || has("set", "until") && !has("set", "token");
    // Readers behind it may join the readers.
    let writer_left =
        || !has("set", "token") && names("removed").any(|name| name.starts_with("queue."));
    match event.get_str("operationType") {
        Ok("insert") => Some(Change::Granted(key)),
        Ok("replace") if event.contains_key("aid") => Some(Change::Granted(key)),
        Ok("update") if has("removed", "aid") || ends_sooner() => Some(Change::Freed(key)),
        Ok("update") if shortens("readers") || writer_left() => Some(Change::Freed(key)),
        Ok("update") if is_granted() => Some(Change::Granted(key)),
        Ok("update") if shortens("queue") || moves_on() => Some(Change::Freed(key)),
        Ok("update") => None,
        _ => Some(Change::Freed(key)),
    }
}
