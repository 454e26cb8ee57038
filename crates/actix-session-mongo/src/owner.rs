//! Whose collection it is. A TTL index must never come to documents of others, so this is asked before one is created.

use std::time::Duration;

use futures_util::TryStreamExt;
use mongodb::{
    Database,
    bson::{Bson, Document, doc},
    error::Result,
    options::{ReadPreference, SelectionCriteria},
    results::{CollectionSpecification, CollectionType},
};

use crate::error::{Error, is_denied};

/// How many records are looked at.
const SAMPLE: i64 = 20;
const LOOK_WITHIN: Duration = Duration::from_secs(5);
/// The collections that the locks of `actix-doclock` have of their own, as in `doclock.ended` or `doclock.shop.ended`.
const OF_LOCKS: [&str; 4] = ["ended", "frozen", "server", "named"];
const FIELDS: &[&str] =
    &["_id", "aid", "user", "state", "created", "seen", "until", "expires", "due", "by", "ended"];

/// Why the collection cannot be one of sessions, if it is somebody else's: by its name, or because it has records and
/// none of a few is a session.
///
/// # Errors
/// If the database is not reached, or its user may not read the collection.
pub async fn others_records(
    database: &Database,
    collection: &str,
) -> std::result::Result<Option<String>, Error> {
    let doing = format!("looking at the records of {}.{collection}", database.name());
    whose(database, collection).await.map_err(|e| Error::of_driver(&doing, e))
}

pub(crate) async fn whose(database: &Database, collection: &str) -> Result<Option<String>> {
    if let Some(why) = of_name(collection) {
        return Ok(Some(why));
    }
    let locks = format!("{collection}.lock");
    for found in list(database, &[collection, &locks]).await? {
        let is = match found.collection_type {
            CollectionType::View => "a view",
            CollectionType::Timeseries => "a time series",
            _ if found.name == locks => {
                return Ok(Some(format!(
                    "`{collection}` is a collection of documents that are locked in `{locks}`: name another \
                     collection for the sessions"
                )));
            }
            _ if found.options.capped == Some(true) => "capped",
            _ => continue,
        };
        let name = found.name;
        return Ok(Some(format!("`{name}` is {is}: name another collection for the sessions")));
    }
    // By the index on `_id`, for servers with `notablescan`. Only the names of the fields, because documents of others
    // may be large.
    let all = doc! { "$match": { "_id": { "$gte": Bson::MinKey } } };
    let names = doc! { "$map": { "input": { "$objectToArray": "$$ROOT" }, "in": "$$this.k" } };
    let of_id = doc! { "$type": "$_id" };
    let shown = doc! { "$project": { "_id": 0, "names": names, "of_id": of_id } };
    let primary = SelectionCriteria::ReadPreference(ReadPreference::Primary);
    let records = database.collection::<Document>(collection);
    let sample = records
        .aggregate([all, doc! { "$limit": SAMPLE }, shown])
        .selection_criteria(primary)
        .max_time(LOOK_WITHIN);
    let sample: Vec<Document> = sample.await?.try_collect().await?;
    // One session shows whose collection it is: among sessions there may be records that somebody has written by hand.
    if sample.is_empty() || sample.iter().any(is_session) {
        return Ok(None);
    }
    Ok(Some(format!(
        "`{collection}` contains documents that are no sessions of this crate, and MongoDB would remove those with a \
         date in `expires`: name another collection for the sessions"
    )))
}

fn of_name(collection: &str) -> Option<String> {
    let of_locks = || {
        let kind = collection.strip_prefix("doclock.")?.rsplit('.').next()?;
        OF_LOCKS.contains(&kind).then_some(())
    };
    if collection.ends_with(".lock") || of_locks().is_some() {
        return Some(format!(
            "`{collection}` is the name of a collection of locks: name another collection for the sessions"
        ));
    }
    None
}

/// As far as the user may look: to list collections is no action that the sessions need.
async fn list(database: &Database, names: &[&str]) -> Result<Vec<CollectionSpecification>> {
    match database.list_collections().filter(doc! { "name": { "$in": names } }).await {
        Err(e) if is_denied(&e) => Ok(Vec::new()),
        listed => listed?.try_collect().await,
    }
}

/// True for a session, whose `_id` is a hash, and for the note of a revoked one, whose `_id` is the session's id.
fn is_session(record: &Document) -> bool {
    let names = record.get_array("names").into_iter().flatten();
    let names: Vec<_> = names.filter_map(Bson::as_str).collect();
    let is_hash = record.get_str("of_id").is_ok_and(|it| it == "binData");
    names.contains(&"expires")
        && (is_hash || names.contains(&"ended"))
        && names.iter().all(|name| FIELDS.contains(name))
}
