//! Looks for a record or a document by its id.

use mongodb::{
    action,
    bson::{Bson, Document, doc},
    options::Collation,
};

use crate::key::LockId;

/// The record with this `_id`. The filter of an upsert must contain nothing else: the server refuses
/// `$expr` there, and retries a duplicate key only for plain equality on `_id`.
///
/// Written without `$eq`: with `$eq` the server would plan the query, at a tenth of the cost of an
/// acquire. A [`LockId`] is a number, a string or bytes, and never a document or a pattern with a
/// special meaning.
pub(super) fn by_id(id: &LockId) -> Document {
    doc! { "_id": Bson::from(id) }
}

/// A command that looks for a document or a record by its id.
pub(super) trait Exactly<'i> {
    /// Compares string ids as they are, whatever default collation the collection has got since it was registered; a
    /// collation compares nothing but strings. Most collections have none. There the server uses the same plans with and
    /// without this.
    #[must_use]
    fn exactly(self, ids: impl IntoIterator<Item = &'i LockId>) -> Self;
}

macro_rules! exactly {
    ($($action:ident $(<$($t:ident),*>)?),*) => {$(
        impl<'i, $($($t: Send + Sync),*)?> Exactly<'i> for action::$action<'_, $($($t),*)?> {
            fn exactly(self, ids: impl IntoIterator<Item = &'i LockId>) -> Self {
                match ids.into_iter().any(|id| matches!(id, LockId::String(_))) {
                    true => self.collation(simple()),
                    false => self,
                }
            }
        }
    )*};
}

exactly!(Aggregate<S, T>, Delete, Find<T>, FindOne<T>, FindOneAndUpdate<T>, ReplaceOne, Update);

/// Compares strings as they are.
pub(super) fn simple() -> Collation {
    Collation::builder().locale("simple").build()
}

/// True if the filter looks for ids of which one is a string.
pub(super) fn has_text_ids(filter: &Document) -> bool {
    match filter.get("_id") {
        Some(Bson::Document(ids)) => {
            let mut ids = ids.get_array("$in").into_iter().flatten();
            ids.any(|id| id.as_str().is_some())
        }
        id => id.is_some_and(|id| id.as_str().is_some()),
    }
}

/// A raw command, or one of its statements, with the collation for the ids in its `filter`. See [`Exactly`].
pub(super) fn exactly(mut statement: Document, filter: &str) -> Document {
    if statement.get_document(filter).is_ok_and(has_text_ids) {
        statement.insert("collation", doc! { "locale": simple().locale });
    }
    statement
}
