//! Collections by whose collation different strings are equal.

use futures_util::TryStreamExt;
use mongodb::{Database, bson::doc};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::mongo::error::{is_denied, store_error},
};

/// Refuses a collection that takes `Home` and `home` for one document: to us these are two keys, so there
/// would be two locks on it.
pub(super) async fn refuse(database: &Database, collection: &str) -> Result<(), StoreError> {
    let lock_collection = format!("{collection}.lock");
    let both = doc! { "name": { "$in": [collection, &lock_collection] } };
    let found =
        async { database.list_collections().filter(both).await?.try_collect::<Vec<_>>().await };
    let found = match found.await {
        Ok(found) => found,
        Err(e) if is_denied(&e) => {
            log::warn!(
                target: "actix_doclock::store",
                "whether {collection} has a collation is not known: give the database user the action \
                 listCollections. With a case-insensitive one, one document could get two locks",
            );
            return Ok(());
        }
        Err(e) => return Err(store_error(format!("looking at the collation of {collection}"), e)),
    };
    let Some((name, collation)) =
        found.into_iter().find_map(|it| Some((it.name, it.options.collation?)))
    else {
        return Ok(());
    };
    let message = format!(
        "{name} has the collation `{}`, by which different strings are one `_id`, and one document \
         would get several locks: copy it into a collection without a default collation, and give the \
         collation to the queries and indexes that need it",
        collation.locale,
    );
    Err(StoreError::new(StoreErrorKind::Other, message))
}
