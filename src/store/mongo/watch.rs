//! Reports changes of locks, from a change stream.

use std::{sync::Arc, time::Duration};

use futures_util::stream;
use mongodb::{
    bson::{Bson, Document, doc},
    change_stream::ChangeStream,
    options::ReadConcern,
};
use serde_json::{Value, json};
use tokio::time::timeout;
use uuid::Uuid;

use crate::{
    error::StoreErrorKind,
    key::LockKey,
    lock::LockToken,
    store::{
        Change, TakenBy, TakeoverKind, Watch, Written,
        mongo::{
            DRIVERS_POOL, LockCollection, MongoStore, Prepared,
            codec::{self, is},
            error::{Doing, Result, failure, unavailable},
            time_limits::answered,
        },
    },
    version::Version,
};

/// How long the server keeps a request open while nothing happens.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// How long after its server-side limit a reply may still arrive. The driver has no time-out for it: on a broken
/// network it would wait forever, and so would all waiters.
const GRACE: Duration = Duration::from_secs(5);

/// How many collections are watched at once, however many connections there are.
const MOST: usize = 32;

/// How many change streams may be open if the client has so many connections. A change stream that waits for news takes
/// one of them.
pub(super) fn at_once(connections: u32) -> usize {
    (connections as usize / 2).min(MOST)
}

impl MongoStore {
    /// What to do if more collections are to be watched at once than the client has connections for; `None` if all can
    /// be.
    #[must_use]
    pub fn too_few_connections(&self, collections: usize) -> Option<String> {
        let connections = self.inner.connections;
        let most = at_once(connections);
        if collections <= most {
            return None;
        }
        let remedy = if most == MOST {
            "use a database and a manager for each part of them".to_owned()
        } else {
            let (pool, own) = (MOST.min(collections) * 2, DRIVERS_POOL);
            format!(
                "set `maxPoolSize` in the URI, or the `max_pool_size` of your own client, to {pool} or more, and tell \
                 the store of the size of your own client by `MongoStore::with_connections` (without that it assumes \
                 {own})"
            )
        };
        Some(format!(
            "{collections} collections can be watched at once, and of {connections} connections {most} are for that: in \
             the others waiters and event streams poll; {remedy}"
        ))
    }

    /// As `too_few_connections`, once it has happened.
    pub(super) fn lacks_connections(&self, collections: usize) -> Option<String> {
        let is_full = self.inner.watches.available_permits() == 0;
        self.too_few_connections(collections).filter(|_| is_full)
    }
}

impl LockCollection<'_> {
    /// Opens a change stream on the locks. A standalone server has none.
    ///
    /// # Errors
    /// Also if there are too many already: watches leave connections to requests.
    pub(super) async fn watch(&self) -> Result<Option<Watch>> {
        if !self.store.has_transactions().await? {
            return Ok(None);
        }
        let watches = Arc::clone(&self.store.inner.watches);
        let Ok(place) = watches.try_acquire_owned() else {
            let registered = self.store.inner.collections.read().len();
            let why = self.store.too_few_connections(registered);
            let why = why.unwrap_or_else(|| "other watches are just being closed".to_owned());
            return Err(failure(StoreErrorKind::Overloaded, why));
        };
        let opened = (self.primary.watch())
            .pipeline(pipeline())
            // The collection's own read concern is `local`, which a change stream does not accept.
            .read_concern(ReadConcern::majority())
            .max_await_time(ANSWER_WITHIN);
        let from = (answered(opened).await?.with_type::<Document>(), Arc::clone(&self.at), place);
        Ok(Some(Watch::new(stream::try_unfold(from, |(mut stream, at, place)| async move {
            let collection = at.documents.name();
            let change = next(&mut stream, &at).await;
            let change = change.doing(|| format!("watching the locks in {collection}"))?;
            Ok(change.map(|change| (change, (stream, at, place))))
        }))))
    }
}

async fn next(stream: &mut ChangeStream<Document>, at: &Prepared) -> Result<Option<Change>> {
    let collection = at.documents.name();
    while stream.is_alive() {
        let event = timeout(ANSWER_WITHIN + GRACE, stream.next_if_any()).await;
        let Some(event) = event.map_err(|_| unavailable("no answer in time"))?? else { continue };
        let Ok(document) = event.get_document("documentKey") else {
            // The collection was dropped or renamed.
            return Ok(Some(Change::Missed));
        };
        // Nobody waits here for a document whose id this crate cannot represent.
        let key = codec::key_in(collection, document);
        let is_gone = event.get_str("operationType").is_ok_and(|it| it == "delete");
        if let Some(key) = key.as_ref().filter(|_| is_gone) {
            // A waiter here then claims by one command, as soon as a waiter on the server that released the lock.
            at.hints.gone(key.id());
        }
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
    let matters =
        r"^(readers\.[0-9]+|queue\.[0-9]+\.(first|writer)|asks(\.[0-9]+(\.(id|answer|reply))?)?)$";
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
        doc! { update("updatedFields.saved"): { "$regex": " " } },
        doc! { "$expr": matters },
    ];
    let taken =
        doc! { "$ifNull": ["$updateDescription.updatedFields.taken", "$fullDocument.taken"] };
    let fields = doc! {
        "operationType": 1, "documentKey": 1, "taken": taken, "aid": "$fullDocument.aid", "set": names,
        "removed": "$updateDescription.removedFields",
        "saved": "$updateDescription.updatedFields.saved",
        "shortened": "$updateDescription.truncatedArrays.field",
    };
    vec![doc! { "$match": { "$or": any } }, doc! { "$project": fields }]
}

/// The change that an event reports; `None` for a renewal, or for a server that joins a queue.
fn read(key: LockKey, event: &Document) -> Option<Change> {
    if let Some((token, taken)) = event.get_str("taken").ok().and_then(read_taken) {
        return Some(Change::Broken(key, token, taken));
    }
    if let Some(save) = event.get_str("saved").ok().and_then(read_saved) {
        return Some(Change::Saved(key, save));
    }
    let names = |list| event.get_array(list).into_iter().flatten().filter_map(Bson::as_str);
    let has = |list, field| names(list).any(|name| name == field);
    // A change of one element has a name with a dot. Without a dot, the array may have become shorter.
    let shortens = |array| ["set", "removed", "shortened"].into_iter().any(|list| has(list, array));
    let is_asked = || {
        let mut changed = names("set").chain(names("removed")).chain(names("shortened"));
        changed.any(|name| name == "asks" || name.starts_with("asks."))
    };
    let is_granted =
        || has("set", "token") || names("set").any(|name| name.starts_with("readers."));
    // A server has other waiters than before: the next waiter may be another one.
    let moves_on = || names("set").any(|name| name.starts_with("queue."));
    // Without a new token, `until` makes the lock expire sooner.
    let ends_sooner = || has("set", "until") && !has("set", "token");
    // Readers behind the writer may join the readers.
    let writer_left =
        || !has("set", "token") && names("removed").any(|name| name.starts_with("queue."));
    match event.get_str("operationType") {
        Ok("insert") => Some(Change::Granted(key)),
        Ok("replace") if event.contains_key("aid") => Some(Change::Granted(key)),
        Ok("update") if has("removed", "aid") || ends_sooner() => Some(Change::Freed(key)),
        Ok("update") if shortens("readers") || writer_left() => Some(Change::Freed(key)),
        Ok("update") if is_granted() => Some(Change::Granted(key)),
        Ok("update") if shortens("queue") || moves_on() => Some(Change::Freed(key)),
        Ok("update") if is_asked() => Some(Change::Asked(key)),
        Ok("update") => None,
        _ => Some(Change::Freed(key)),
    }
}

/// How a record states that `token` was taken from its holder: as one string of JSON. If it were a
/// document, a change stream would report only its changed fields.
pub(super) fn taken_text(token: LockToken, by: &TakenBy) -> String {
    json!({ "token": token, "how": by.kind.as_str(), "by": by.by, "reason": by.reason }).to_string()
}

/// The reverse of [`taken_text`].
pub(super) fn read_taken(text: &str) -> Option<(LockToken, TakenBy)> {
    let taken: Value = serde_json::from_str(text).ok()?;
    let text = |name: &str| taken.get(name)?.as_str();
    let (by, reason) = (text("by")?.to_owned(), text("reason")?.to_owned());
    // An earlier version does not say how.
    let by = TakenBy { kind: TakeoverKind::named(text("how")), by, reason };
    Some((text("token")?.parse().ok()?, by))
}

/// How a record states that its holder has written the document: a name that is always new, the version of the document,
/// and the holder. Nobody is told of a value without a space.
pub(super) fn saved_as(version: Option<Version>) -> Bson {
    let version = version.map_or_else(|| UNKNOWN.to_owned(), |it| it.to_string());
    let by = doc! { "$cond": [is("$holder.label", "string"), "$holder.label", ""] };
    doc! { "$concat": [format!("{} {version} ", Uuid::new_v4()), by] }.into()
}

/// As `saved_as`, of a renewal that writes nothing else.
pub(super) fn renewal() -> Bson {
    Uuid::new_v4().to_string().into()
}

/// In the place of a version that the writer does not know.
const UNKNOWN: &str = "-";

fn read_saved(text: &str) -> Option<Written> {
    let (_, rest) = text.split_once(' ')?;
    let (version, by) = rest.split_once(' ')?;
    Some(Written { by: by.to_owned(), version: version.parse().ok() })
}
