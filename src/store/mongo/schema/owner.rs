//! Whose collection it is. Whatever creates indexes looks first: a TTL index must never come to documents of others.

use std::time::Duration;

use mongodb::{
    Collection,
    bson::{Bson, Document, doc},
};

use crate::{
    error::StoreErrorKind,
    key::{Lockable, Named},
    store::mongo::{
        ENDED, FROZEN, MongoStore, SERVERS,
        error::{Result, failure},
        schema::danger::Danger,
        send::rows,
    },
};

/// How many records are looked at.
const SAMPLE: i64 = 20;
const LOOK_WITHIN: Duration = Duration::from_secs(5);
/// The collection of web sessions, and the collections that a store has of its own.
const KINDS: [&str; 4] = [ENDED, FROZEN, SERVERS, "session"];
/// The fields of lock records, also of those that hold only a fence or a queue.
const FIELDS: &[&str] = &[
    "_id", "ts", "ttl", "aid", "token", "since", "holder", "tab", "page", "leaving", "until",
    "taken", "again", "due", "fence", "queue", "readers", "saved", "asks",
];

/// Why no documents can be locked in a collection of this name.
pub(in crate::store::mongo) fn of_name(collection: &str) -> Option<String> {
    if collection == Named::COLLECTION {
        return None;
    }
    if let Some(documents) = collection.strip_suffix(".lock") {
        return Some(format!(
            "`{collection}` is the name of a lock collection: name the collection of the documents, `{documents}`"
        ));
    }
    let (_, kind) =
        collection.strip_prefix("doclock.").map(|it| it.rsplit_once('.').unwrap_or(("", it)))?;
    KINDS.contains(&kind).then(|| {
        format!(
            "`{collection}` is a collection of this crate, whose records are not locked: name the collection of your \
             documents"
        )
    })
}

/// Fails if the collection has records, and none of a few is a lock record.
pub(super) async fn refuse_others(locks: &Collection<Document>) -> Result<()> {
    match others_records(locks).await? {
        Some(danger) => Err(failure(StoreErrorKind::Other, danger.to_string())),
        None => Ok(()),
    }
}

pub(super) async fn others_records(locks: &Collection<Document>) -> Result<Option<Danger>> {
    // By the index on `_id`: with `notablescan` the server reads no whole collection without one. Only the names of
    // the fields, because documents of others may be large.
    let all = doc! { "$match": { "_id": { "$gte": Bson::MinKey } } };
    let fields = doc! { "$objectToArray": "$$ROOT" };
    let names = doc! { "$map": { "input": fields, "in": "$$this.k" } };
    let pipeline =
        [all, doc! { "$limit": SAMPLE }, doc! { "$project": { "_id": 0, "names": names } }];
    let sample = locks.aggregate(pipeline).max_time(LOOK_WITHIN);
    let sample: Vec<Document> = rows(sample).await?;
    // One lock record shows whose collection it is: among locks there may be records that somebody has written by hand.
    if sample.is_empty() || sample.iter().any(is_lock) {
        return Ok(None);
    }
    Ok(Some(Danger {
        kind: "others_records",
        collection: locks.name().to_owned(),
        index: None,
        problem: "contains documents that are no locks, and the TTL index of a lock collection would remove those with \
                  a date in `ts`"
            .to_owned(),
        remedy: "move these documents to a collection whose name does not end in `.lock`, or give the type another \
                 collection"
            .to_owned(),
        is_refused: true,
    }))
}

/// True if the record has no fields but those of a lock record, and shows by one of them that it is a lock, a fence or a
/// queue; or if it has nothing but a date; or the two fields by which other programs lock, and fields of their own.
fn is_lock(names: &Document) -> bool {
    let names: Vec<_> =
        names.get_array("names").into_iter().flatten().filter_map(Bson::as_str).collect();
    let has = |name| names.contains(name);
    let only = |fields: &[&str]| names.iter().all(|name| fields.contains(name));
    let is_told = ["aid", "readers", "fence", "queue"].iter().any(has);
    only(FIELDS) && is_told || only(&["_id", "ts"]) || has(&"ts") && has(&"aid")
}

impl MongoStore {
    /// Why no documents can be locked in a collection of this name: it is a lock collection, or another one of this
    /// crate.
    #[must_use]
    pub fn no_documents(collection: &str) -> Option<String> {
        of_name(collection)
    }
}
