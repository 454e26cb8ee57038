//! The content of a guarded save.

use std::collections::{BTreeMap, btree_map::Entry};

use serde_json::Value;

use crate::{
    error::{StoreError, StoreErrorKind},
    key::{LockId, LockKey},
    store::{
        Edit, Saved, StoredDocument,
        diff::{self, Changes},
    },
};

/// An [`Edit`], decoded.
pub(super) enum Write {
    Change(Changes<Value>),
    Replace(Value),
    Create(Value),
    Delete,
}

impl Write {
    /// # Errors
    /// The edit cannot be an edit of this document.
    pub(super) fn of(key: &LockKey, edit: &Edit) -> Result<Self, StoreError> {
        let json = |document: &StoredDocument| {
            let json = serde_json::from_slice::<Value>(document.as_bytes());
            json.map_err(|e| unwritable(key, "is not JSON").because(e))
        };
        match edit {
            Edit::Changes { before, after } => {
                let changes = diff::between(&json(before)?, &json(after)?);
                if changes.iter().any(|(name, _)| name == "_id") {
                    return Err(unwritable(
                        key,
                        "has changed its `_id`; a document keeps its `_id`",
                    ));
                }
                Ok(Self::Change(changes))
            }
            Edit::Replacement(document) => Ok(Self::Replace(json(document)?)),
            Edit::Creation(document) => {
                let document = json(document)?;
                if !document.get("_id").is_some_and(|id| is_id(id, key.id())) {
                    return Err(unwritable(key, "has another `_id` than the locked one"));
                }
                Ok(Self::Create(document))
            }
            Edit::Deletion => Ok(Self::Delete),
        }
    }

    /// # Errors
    /// The document must not be written so. Nothing was written.
    pub(super) fn carry_out(
        self,
        key: &LockKey,
        documents: &mut BTreeMap<LockKey, Value>,
    ) -> Result<Saved, StoreError> {
        let mut stored = match (documents.entry(key.clone()), &self) {
            (Entry::Occupied(_), Self::Create(_)) => {
                return Err(unwritable(key, "has the `_id` of another document"));
            }
            (Entry::Vacant(_), Self::Create(_)) => Value::Null,
            (Entry::Vacant(_), _) => return Ok(Saved::DocumentGone),
            (Entry::Occupied(stored), Self::Delete) => {
                stored.remove();
                return Ok(Saved::Saved);
            }
            (Entry::Occupied(stored), _) => stored.get().clone(),
        };
        let id = stored.get("_id").cloned();
        match self {
            Self::Change(changes) => diff::apply(changes, &mut stored),
            Self::Replace(document) | Self::Create(document) => stored = document,
            Self::Delete => {}
        }
        // As in MongoDB: the id cannot change, and may be omitted.
        if let (Some(id), Some(fields)) = (id, stored.as_object_mut())
            && *fields.entry("_id").or_insert_with(|| id.clone()) != id
        {
            return Err(unwritable(key, "has another `_id` than the stored one"));
        }
        documents.insert(key.clone(), stored);
        Ok(Saved::Saved)
    }
}

/// Whether a document with this `_id`, in JSON, has this id.
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
