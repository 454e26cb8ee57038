//! The differences between two versions of a document, in any format.

/// A JSON or BSON value of a document.
pub(super) trait Value: Clone {
    /// The fields, if the value is a document.
    fn fields(&self) -> Option<impl Iterator<Item = (&String, &Self)>>;

    /// A field, if the value is a document that has it.
    fn field(&self, name: &str) -> Option<&Self>;

    /// Whether replacing one value with the other would change nothing. The order of fields does not
    /// count: a map may encode its entries in a different order each time.
    fn is_same(&self, other: &Self) -> bool;
}

/// The fields of a document that differ, by name.
pub(super) type Changes<V> = Vec<(String, Change<V>)>;

/// How a field changed.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change<V> {
    /// The field has this value now. Arrays also change as a whole, because only the application knows
    /// what the position of an element means.
    Set(V),
    /// The field was removed.
    Removed,
    /// The field is still a document, in which these fields differ.
    Within(Changes<V>),
}

/// How deep fields are compared one by one. A deeper difference replaces the whole value.
const DEPTH: usize = 50;

/// The fields in which `after` differs. A field that neither version has is left alone.
pub(super) fn between<V: Value>(before: &V, after: &V) -> Changes<V> {
    within(before, after, DEPTH)
}

fn within<V: Value>(before: &V, after: &V, depth: usize) -> Changes<V> {
    let mut changes = Vec::new();
    for (name, value) in after.fields().into_iter().flatten() {
        let change = match before.field(name) {
            Some(old) if old.is_same(value) => continue,
            Some(old) if depth > 0 && old.fields().is_some() && value.fields().is_some() => {
                Change::Within(within(old, value, depth - 1))
            }
            _ => Change::Set(value.clone()),
        };
        changes.push((name.clone(), change));
    }
    let gone =
        before.fields().into_iter().flatten().filter(|(name, _)| after.field(name).is_none());
    changes.extend(gone.map(|(name, _)| (name.clone(), Change::Removed)));
    changes
}

impl Value for serde_json::Value {
    fn fields(&self) -> Option<impl Iterator<Item = (&String, &Self)>> {
        self.as_object().map(|fields| fields.iter())
    }

    fn field(&self, name: &str) -> Option<&Self> {
        self.as_object()?.get(name)
    }

    fn is_same(&self, other: &Self) -> bool {
        self == other
    }
}

/// Applies the changes to a stored document.
pub(super) fn apply(changes: Changes<serde_json::Value>, stored: &mut serde_json::Value) {
    let Some(fields) = stored.as_object_mut() else { return };
    for (name, change) in changes {
        match change {
            Change::Set(value) => drop(fields.insert(name, value)),
            Change::Removed => drop(fields.remove(&name)),
            Change::Within(changes) => {
                apply(changes, fields.entry(name).or_insert_with(|| serde_json::json!({})));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_change_one_by_one_and_arrays_as_a_whole() {
        let before = json!({ "a": 1, "b": { "c": [1, 2], "d": { "e": 1, "f": 2 } }, "g": 1 });
        let after = json!({ "a": 1, "b": { "c": [1, 3], "d": { "e": 1 } }, "h": null });
        let changes = between(&before, &after);
        let d = Change::Within(vec![("f".to_owned(), Change::Removed)]);
        let b = vec![("c".to_owned(), Change::Set(json!([1, 3]))), ("d".to_owned(), d)];
        let expected = vec![
            ("b".to_owned(), Change::Within(b)),
            ("h".to_owned(), Change::Set(json!(null))),
            ("g".to_owned(), Change::Removed),
        ];
        assert_eq!(changes, expected);
        assert_eq!(between(&after, &after), []);

        let mut stored = json!({ "a": 9, "b": { "d": { "f": 2, "mine": 3 } }, "mine": 4 });
        apply(changes, &mut stored);
        let expected = json!({
            "a": 9, "b": { "c": [1, 3], "d": { "mine": 3 } }, "h": null, "mine": 4,
        });
        assert_eq!(stored, expected);
    }

    #[test]
    fn what_is_nested_too_deep_changes_as_a_whole() {
        let nested = |leaf: i64| (0..100).fold(json!(leaf), |inner, _| json!({ "a": inner }));
        let mut changes = between(&nested(1), &nested(2));
        let mut depth = 0;
        while let [(_, Change::Within(inner))] = &changes[..] {
            (changes, depth) = (inner.clone(), depth + 1);
        }
        assert_eq!(depth, DEPTH);
        assert!(matches!(&changes[..], [(_, Change::Set(_))]));
    }
}
