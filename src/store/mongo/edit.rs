//! Turns an edit of a document into an update of the server.

use mongodb::bson::{Bson, Document, RawDocumentBuf, doc};

use crate::{
    error::BoxError,
    key::LockId,
    store::{
        Edit, StoredDocument,
        diff::{self, Change, Changes, Value},
        mongo::codec,
    },
};

/// The update that is sent for an [`Edit`].
#[derive(Debug)]
pub(super) enum Update {
    /// Nothing has changed.
    Nothing,
    Fields(Document),
    Pipeline(Vec<Document>),
    Replacement(RawDocumentBuf),
    Insertion(RawDocumentBuf),
    Deletion,
}

/// # Errors
/// If a document is not BSON, or its `_id` has changed or is not `id`.
pub(super) fn update(id: &LockId, edit: &Edit) -> Result<Update, BoxError> {
    let (before, after) = match edit {
        Edit::Creation(document) => {
            let document = RawDocumentBuf::from_bytes(document.as_bytes().to_vec())?;
            let own = document.get("_id")?.and_then(|own| Bson::try_from(own).ok());
            if own.as_ref().and_then(codec::lock_id).as_ref() != Some(id) {
                return Err("it has another `_id` than the locked one".into());
            }
            return Ok(Update::Insertion(document));
        }
        Edit::Deletion => return Ok(Update::Deletion),
        Edit::Changes { before, after } => (decoded(before)?, decoded(after)?),
        Edit::Replacement(document) => {
            let bytes = document.as_bytes().to_vec();
            return Ok(Update::Replacement(RawDocumentBuf::from_bytes(bytes)?));
        }
    };
    let changes = diff::between(&before, &after);
    if changes.iter().any(|(name, _)| name == "_id") {
        return Err("its `_id` has changed; a document keeps its `_id`".into());
    }
    Ok(match &changes[..] {
        [] => Update::Nothing,
        _ if are_addressable(&changes) => Update::Fields(by_paths(changes)),
        _ => Update::Pipeline(vec![doc! { "$replaceWith": merged("$$ROOT".into(), changes) }]),
    })
}

fn decoded(document: &StoredDocument) -> Result<Bson, BoxError> {
    Ok(Bson::Document(codec::decode(document.as_bytes())?))
}

/// Whether a dotted path can name each of these fields.
fn are_addressable(changes: &Changes<Bson>) -> bool {
    changes.iter().all(|(name, change)| {
        let is_addressable = !(name.is_empty() || name.starts_with('$') || name.contains('.'));
        let within = |changes| are_addressable(changes);
        is_addressable && !matches!(change, Change::Within(changes) if !within(changes))
    })
}

fn by_paths(changes: Changes<Bson>) -> Document {
    let (mut set, mut unset) = (Document::new(), Document::new());
    let mut open = vec![(String::new(), changes)];
    while let Some((path, changes)) = open.pop() {
        for (name, change) in changes {
            let path = format!("{path}{name}");
            match change {
                Change::Set(value) => drop(set.insert(path, value)),
                Change::Removed => drop(unset.insert(path, "")),
                Change::Within(changes) => open.push((path + ".", changes)),
            }
        }
    }
    let mut update = Document::new();
    for (operator, fields) in [("$set", set), ("$unset", unset)] {
        if !fields.is_empty() {
            update.insert(operator, fields);
        }
    }
    update
}

/// The document that `of` evaluates to, with these changes. For field names with dots or dollars, which
/// no path can address (`$setField` can, but only since MongoDB 5).
///
/// Each new value occurs here only once, because it may be nearly as large as a command may be.
fn merged(of: Bson, changes: Changes<Bson>) -> Document {
    let (mut set, mut removed, mut within) = (Vec::new(), Vec::new(), Vec::new());
    for (name, change) in changes {
        match change {
            Change::Set(value) => set.push(doc! { "k": name, "v": value }),
            Change::Removed => removed.push(name),
            Change::Within(changes) => within.push(doc! {
                "case": { "$eq": ["$$field.k", { "$literal": name }] },
                "then": merged("$$field.v".into(), changes),
            }),
        }
    }
    let stays = doc! { "$not": [{ "$in": ["$$field.k", { "$literal": removed }] }] };
    let changed = match within[..] {
        [] => Bson::from("$$field.v"),
        _ => doc! { "$switch": { "branches": within, "default": "$$field.v" } }.into(),
    };
    let value = doc! { "$let": {
        "vars": { "at": { "$indexOfArray": ["$$set.k", "$$field.k"] } },
        "in": { "$cond": [
            { "$lt": ["$$at", 0] }, changed, { "$arrayElemAt": ["$$set.v", "$$at"] },
        ] },
    } };
    let kept = doc! { "$map": {
        "input": { "$filter": { "input": "$$fields", "as": "field", "cond": stays } },
        "as": "field",
        "in": { "k": "$$field.k", "v": value },
    } };
    let is_new = doc! { "$not": [{ "$in": ["$$field.k", "$$fields.k"] }] };
    let new = doc! { "$filter": { "input": "$$set", "as": "field", "cond": is_new } };
    doc! { "$let": {
        "vars": { "fields": { "$objectToArray": of }, "set": { "$literal": set } },
        "in": { "$arrayToObject": { "$concatArrays": [kept, new] } },
    } }
}

impl Value for Bson {
    fn fields(&self) -> Option<impl Iterator<Item = (&String, &Self)>> {
        self.as_document().map(Document::iter)
    }

    fn field(&self, name: &str) -> Option<&Self> {
        self.as_document()?.get(name)
    }

    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            // NaN is not equal to itself, and zero is equal to negative zero; so compare the bits.
            (Self::Double(a), Self::Double(b)) => a.to_bits() == b.to_bits(),
            (Self::Array(a), Self::Array(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.is_same(b))
            }
            (Self::Document(a), Self::Document(b)) => {
                let is_in_b =
                    |(name, a): (&String, &Self)| b.get(name).is_some_and(|b| a.is_same(b));
                a.len() == b.len() && a.iter().all(is_in_b)
            }
            _ => self == other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Format;

    fn stored(document: &Document) -> StoredDocument {
        StoredDocument::encode(Format::Bson, document).unwrap()
    }

    fn between(before: Document, after: Document) -> Result<Update, BoxError> {
        update(&LockId::from(1), &Edit::Changes { before: stored(&before), after: stored(&after) })
    }

    #[test]
    fn only_what_differs_is_sent() {
        let before = doc! { "_id": 1, "a": { "b": 1, "c": [1] }, "n": f64::NAN, "gone": 1 };
        let after = doc! { "_id": 1, "a": { "b": 2, "c": [1] }, "n": f64::NAN, "new": {} };
        let Ok(Update::Fields(update)) = between(before.clone(), after) else { panic!("by paths") };
        let set = doc! { "new": {}, "a.b": 2 };
        assert_eq!(update, doc! { "$set": set, "$unset": { "gone": "" } });
        assert!(matches!(between(before.clone(), before.clone()), Ok(Update::Nothing)));
        assert!(between(before, doc! { "_id": 2 }).is_err());
    }

    #[test]
    fn what_no_path_can_name_is_sent_as_a_pipeline() {
        for name in ["", "$a", "a.b"] {
            let nested = |value: i32| doc! { "a": { name: value } };
            assert!(matches!(between(nested(1), nested(2)), Ok(Update::Pipeline(_))), "{name}");
        }
        let nested = |value: i32| doc! { "a": { "b.c": value, "d": 1 }, "e": value };
        let Ok(Update::Pipeline(_)) = between(nested(1), nested(2)) else { panic!("a pipeline") };
    }
}
