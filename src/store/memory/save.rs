//! The content of a guarded save.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    error::{StoreError, StoreErrorKind},
    key::{LockId, LockKey},
    store::{Edit, Format, Saved, StoreResult, StoredDocument},
};

/// # Errors
/// The document must not be written so. Nothing was written.
pub(super) fn write(
    edit: &Edit,
    key: &LockKey,
    documents: &mut BTreeMap<LockKey, Value>,
) -> StoreResult<Saved> {
    let json = |document: &StoredDocument| {
        document.decode::<Value>().map_err(|e| unwritable(key, "is not JSON").because(e))
    };
    let (new, id) = match (edit, documents.get(key)) {
        (Edit::Creation(_), Some(_)) => {
            return Err(unwritable(key, "has the `_id` of another document"));
        }
        (Edit::Creation(document), None) => {
            let document = json(document)?;
            if !document.get("_id").is_some_and(|id| is_id(id, key.id())) {
                return Err(unwritable(key, "has another `_id` than the locked one"));
            }
            (document, None)
        }
        (_, None) => return Ok(Saved::DocumentGone),
        (Edit::Deletion, Some(_)) => {
            documents.remove(key);
            return Ok(Saved::Saved);
        }
        (Edit::Changes(changes), Some(now)) => match changes.apply(&stored(now)) {
            Ok(changed) => (json(&changed)?, now.get("_id")),
            Err(field) => return Ok(Saved::ChangedMeanwhile(field)),
        },
        (Edit::Replacement(document), Some(now)) => (json(document)?, now.get("_id")),
    };
    let mut new = new;
    // As in MongoDB: the id cannot change, and may be omitted.
    if let (Some(id), Some(fields)) = (id, new.as_object_mut())
        && *fields.entry("_id").or_insert_with(|| id.clone()) != *id
    {
        return Err(unwritable(key, "has changed its `_id`; a document keeps its `_id`"));
    }
    documents.insert(key.clone(), new);
    Ok(Saved::Saved)
}

/// True if a document with this `_id`, in JSON, has this id.
fn is_id(json: &Value, id: &LockId) -> bool {
    match json {
        Value::Number(number) => number.as_i64().is_some_and(|number| LockId::from(number) == *id),
        Value::String(text) => *text == id.to_string(),
        // An ObjectId, or a UUID of the driver.
        Value::Object(fields) => fields.values().any(|value| is_id(value, id)),
        _ => false,
    }
}

fn unwritable(key: &LockKey, why: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Rejected, format!("the document to be saved as {key} {why}"))
}

pub(super) fn stored(document: &Value) -> StoredDocument {
    StoredDocument::from_bytes(Format::Json, document.to_string().into_bytes())
}
