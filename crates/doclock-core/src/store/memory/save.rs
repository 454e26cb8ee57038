//! The content of a guarded save.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::{
    error::{StoreError, StoreErrorKind},
    key::{LockId, LockKey},
    store::{Content, Edit, Format, Saved, StoreResult, StoredDocument},
};

/// # Errors
/// If the document may not be stored in this form. Then nothing was written.
pub(super) fn write(
    edit: &Edit,
    key: &LockKey,
    documents: &mut BTreeMap<LockKey, StoredDocument>,
) -> StoreResult<Saved> {
    let fields = |document: &StoredDocument| {
        let fields = document.decode::<Map<String, Value>>();
        fields.map_err(|e| unwritable(key, "is no JSON object").because(e))
    };
    if documents.get(key).is_some_and(|now| !edit.fits(now)) {
        return Ok(Saved::ChangedMeanwhile(String::new()));
    }
    let (new, id) = match (&edit.content, documents.get(key)) {
        (Content::Creation(_), Some(_)) => {
            return Err(unwritable(key, "has the `_id` of another document"));
        }
        (Content::Creation(document), None) => {
            if !fields(document)?.get("_id").is_some_and(|id| is_id(id, key.id())) {
                return Err(unwritable(key, "has another `_id` than the locked one"));
            }
            (document.clone(), None)
        }
        (_, None) => return Ok(Saved::DocumentGone),
        (Content::Deletion, Some(_)) => {
            documents.remove(key);
            return Ok(Saved::Saved);
        }
        (Content::Changes(changes), Some(now)) => match changes.apply(now) {
            Ok(changed) => (changed, fields(now)?.remove("_id")),
            Err(field) => return Ok(Saved::ChangedMeanwhile(field)),
        },
        (Content::Replacement(document), Some(now)) => {
            (document.clone(), fields(now)?.remove("_id"))
        }
    };
    // As in MongoDB: the id cannot change, and may be omitted.
    let new = match id {
        None => new,
        Some(id) => {
            let mut all = fields(&new)?;
            match all.get("_id") {
                Some(new_id) if *new_id == id => new,
                Some(_) => {
                    let why = "has changed its `_id`; a document keeps its `_id`";
                    return Err(unwritable(key, why));
                }
                None => {
                    all.insert("_id".to_owned(), id);
                    let encoded = StoredDocument::encode(Format::Json, &all);
                    encoded.map_err(|e| unwritable(key, "is no JSON").because(e))?
                }
            }
        }
    };
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
