//! Refuses collections whose collation treats different strings as equal.

use futures_util::TryStreamExt;
use mongodb::{Database, bson::doc};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::mongo::error::{is_denied, store_error},
};

/// Refuses a collection in which `Home` and `home` are the same document. To this crate they are two
/// keys, so one document could get two locks.
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
                "cannot check whether {collection} has a collation: give the database user the action \
                 listCollections. With a case-insensitive collation, one document could get two locks",
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
        "{name} has the collation `{}`, which treats different strings as the same `_id`, so that one \
         document would get several locks: copy it into a collection without a default collation, and \
         give the collation to the queries and indexes that need it",
        collation.locale,
    );
    Err(StoreError::new(StoreErrorKind::Other, message))
}
