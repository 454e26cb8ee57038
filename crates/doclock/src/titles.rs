//! Reads a field of documents as text, for programs that do not know their types.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use actix_doclock::{LockId, LockKey, MongoStore, StoreError};
use futures_util::TryStreamExt;
use mongodb::{
    Database,
    bson::{Bson, Document, RawDocumentBuf, doc},
};

/// How many documents one query asks for.
const MAX_IDS: usize = 1_000;
const READ_WITHIN: Duration = Duration::from_secs(30);

/// The value of this field in each of these documents, for display. `a.b` is the field `b` of the
/// embedded document `a`. Only strings and numbers count: a document with another value, or without
/// the field, is left out. One query for each collection, or for each 1 000 documents.
///
/// # Errors
/// If the database is not reached, its user may not read the collection, or the name of the field is
/// impossible.
pub async fn titles(
    store: &MongoStore,
    keys: &[LockKey],
    field: &str,
) -> Result<HashMap<LockKey, String>, StoreError> {
    let mut ids_by_collection = BTreeMap::<&str, Vec<Bson>>::new();
    for key in keys {
        ids_by_collection.entry(key.collection()).or_default().push(key.id().into());
    }
    let mut titles = HashMap::new();
    for (collection, ids) in ids_by_collection {
        for ids in ids.chunks(MAX_IDS) {
            let found = titles_in(store.database(), collection, ids, field).await;
            titles.extend(found.map_err(|e| {
                let doing = format!("reading the field {field:?} of {collection}");
                MongoStore::error(doing, e)
            })?);
        }
    }
    Ok(titles)
}

async fn titles_in(
    database: &Database,
    collection: &str,
    ids: &[Bson],
    field: &str,
) -> mongodb::error::Result<Vec<(LockKey, String)>> {
    let wanted = doc! { "_id": { "$in": ids } };
    let documents = database.collection::<RawDocumentBuf>(collection);
    let found = documents.find(wanted).projection(doc! { field: 1 }).max_time(READ_WITHIN);
    let title = |document: &Document| {
        let id = document.get("_id").and_then(LockId::from_bson)?;
        Some((LockKey::new(collection, id).ok()?, text_at(document, field)?))
    };
    let found: Vec<_> = found.await?.try_collect().await?;
    // A document that cannot be read, as with text that is not UTF-8, has no title.
    let readable = found.iter().filter_map(|raw| Document::try_from(&**raw).ok());
    Ok(readable.filter_map(|document| title(&document)).collect())
}

fn text_at(document: &Document, path: &str) -> Option<String> {
    let (outer, name) = path.rsplit_once('.').unwrap_or(("", path));
    let mut inner = document;
    for name in outer.split('.').filter(|name| !name.is_empty()) {
        inner = inner.get_document(name).ok()?;
    }
    match inner.get(name)? {
        Bson::String(text) => Some(text.clone()),
        Bson::Int32(n) => Some(n.to_string()),
        Bson::Int64(n) => Some(n.to_string()),
        Bson::Double(n) => Some(n.to_string()),
        Bson::Decimal128(n) => Some(n.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_strings_and_numbers_are_titles() {
        let document = doc! {
            "title": "Contract", "number": 5, "long": 6_i64, "double": 1.5,
            "of": { "nested": { "name": "inner" }, "many": ["a", "b"] },
            "flag": true, "none": Bson::Null,
        };
        for (path, text) in [
            ("title", Some("Contract")),
            ("number", Some("5")),
            ("long", Some("6")),
            ("double", Some("1.5")),
            ("of.nested.name", Some("inner")),
            ("of.nested", None),
            ("of.many", None),
            ("of.many.0", None),
            ("title.x", None),
            ("flag", None),
            ("none", None),
            ("missing", None),
        ] {
            assert_eq!(text_at(&document, path).as_deref(), text, "{path}");
        }
    }
}
