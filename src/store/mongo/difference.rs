//! The update that turns one document into another.

use mongodb::{
    bson::{Bson, Document, doc},
    options::UpdateModifications,
};

use crate::{
    error::BoxError,
    store::{StoredDocument, Value, mongo::codec::document_of},
};

/// The update that turns the stored document `before` into `after`, field by field. `None` if they are the same.
///
/// # Errors
/// If one of the two is not BSON.
pub(super) fn update(
    before: &StoredDocument,
    after: &StoredDocument,
) -> Result<Option<UpdateModifications>, BoxError> {
    let (before, after) = (document_of(before)?, document_of(after)?);
    let mut fields = Fields::default();
    if !fields.of("", &before, &after) {
        let replaced = doc! { "$replaceWith": { "$literal": after } };
        return Ok(Some(vec![replaced].into()));
    }
    let mut update = Document::new();
    for (operator, fields) in [("$set", fields.set), ("$unset", fields.unset)] {
        if !fields.is_empty() {
            update.insert(operator, fields);
        }
    }
    Ok((!update.is_empty()).then(|| update.into()))
}

/// Changed fields, by their dotted paths.
#[derive(Default)]
struct Fields {
    set: Document,
    unset: Document,
}

impl Fields {
    /// Adds the differences between two versions of a document. `prefix` is its path with a final dot, or empty for
    /// the whole document. False if the name of a changed member cannot stand in a path; then nothing is added.
    fn of(&mut self, prefix: &str, before: &Document, after: &Document) -> bool {
        let is_changed = |(name, value): &(&String, &Bson)| {
            before.get(name).is_none_or(|old| !old.is_same(value))
        };
        let changed: Vec<_> = after.iter().filter(is_changed).collect();
        let gone: Vec<_> = before.keys().filter(|name| !after.contains_key(name)).collect();
        let is_addressable =
            |name: &String| !(name.is_empty() || name.starts_with('$') || name.contains('.'));
        let mut names = changed.iter().map(|(name, _)| *name).chain(gone.iter().copied());
        if !names.all(is_addressable) {
            return false;
        }
        for (name, value) in changed {
            let path = format!("{prefix}{name}");
            let both = before.get(name).and_then(Bson::as_document).zip(value.as_document());
            if !both.is_some_and(|(before, after)| self.of(&format!("{path}."), before, after)) {
                self.set.insert(path, value.clone());
            }
        }
        self.unset.extend(gone.into_iter().map(|name| (format!("{prefix}{name}"), "".into())));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Encoded;

    fn stored(document: &Document) -> StoredDocument {
        Bson::Document(document.clone()).encoded().unwrap()
    }

    fn between(before: &Document, after: &Document) -> Option<UpdateModifications> {
        update(&stored(before), &stored(after)).unwrap()
    }

    #[test]
    fn only_what_differs_is_sent() {
        let before = doc! { "_id": 1, "a": { "b": 1, "c": [1] }, "n": f64::NAN, "gone": 1 };
        let after = doc! { "_id": 1, "a": { "b": 2, "c": [1] }, "n": f64::NAN, "new": {} };
        let Some(UpdateModifications::Document(update)) = between(&before, &after) else {
            panic!("by paths")
        };
        let set = doc! { "a.b": 2, "new": {} };
        assert_eq!(update, doc! { "$set": set, "$unset": { "gone": "" } });
        assert!(between(&before, &before).is_none());
    }

    #[test]
    fn what_no_path_can_name_is_sent_with_the_document_around_it() {
        for name in ["", "$a", "a.b"] {
            let nested = |value: i32| doc! { "a": { name: value, "c": 1 }, "d": 1 };
            let Some(UpdateModifications::Document(update)) = between(&nested(1), &nested(2))
            else {
                panic!("{name}")
            };
            assert_eq!(update, doc! { "$set": { "a": { name: 2, "c": 1 } } });
            let flat = |value: i32| doc! { name: value };
            let update = between(&flat(1), &flat(2));
            assert!(matches!(update, Some(UpdateModifications::Pipeline(_))), "{name}");
        }
    }
}
