//! The write that turns one document into another.

use mongodb::bson::{Document, RawDocumentBuf};

use crate::{
    error::BoxError,
    store::{Format, Members, Name, Node, StoredDocument, mongo::codec},
};

/// What to send. A pipeline is never sent for a document: on a document in which a name stands twice, `$replaceWith`
/// makes a server of MongoDB 6.0 abort.
#[derive(Debug, PartialEq)]
pub(super) enum Difference {
    /// The two documents are the same.
    Nothing,
    /// An update by `$set` and `$unset`.
    Fields(Document),
    /// The same, and the server chooses the order of several new members.
    Unordered(Document),
    /// The whole document: a field cannot be named in an update, or its value is no value of the driver's.
    Whole(RawDocumentBuf),
}

/// The write that turns the stored document `before` into `after`, field by field if possible. If `in_order`, the members
/// of `after` get the order that they have there.
///
/// # Errors
/// If one of the two is not BSON.
pub(super) fn between(
    before: &StoredDocument,
    after: &StoredDocument,
    in_order: bool,
) -> Result<Difference, BoxError> {
    let (old, new) = (before.node()?, after.node()?);
    let mut fields = Fields { in_order, ..Fields::default() };
    let (Some(old), Some(new)) = (old.members(), new.members()) else {
        return Err("it is not a document".into());
    };
    if !fields.of("", old, new) {
        return Ok(Difference::Whole(codec::raw(after)?));
    }
    if fields.set.is_empty() && fields.unset.is_empty() {
        return Ok(Difference::Nothing);
    }
    let set = StoredDocument::of(&Node::Document(fields.set), Format::Bson);
    let Some(set) = codec::exact(&set) else { return Ok(Difference::Whole(codec::raw(after)?)) };
    let both = [("$set", set), ("$unset", fields.unset)].into_iter();
    let update = both.filter(|(_, fields)| !fields.is_empty());
    let update = update.map(|(operator, it)| (operator.to_owned(), it.into())).collect();
    let is_unordered = fields.has_several_new;
    Ok(if is_unordered { Difference::Unordered(update) } else { Difference::Fields(update) })
}

/// Changed fields, by their dotted paths.
#[derive(Default)]
struct Fields {
    in_order: bool,
    has_several_new: bool,
    set: Members,
    unset: Document,
}

impl Fields {
    /// Adds the differences between two versions of a document. `prefix` is its path with a final dot, or empty for
    /// the whole document. False if fields cannot express them; then nothing is added.
    fn of(&mut self, prefix: &str, before: &Members, after: &Members) -> bool {
        let is_same = if self.in_order { Node::is_identical } else { Node::is_same };
        let is_changed = |(name, value): &(&Name, &Node)| {
            before.get(*name).is_none_or(|old| !is_same(old, value))
        };
        let changed: Vec<_> = after.iter().filter(is_changed).collect();
        let gone: Vec<_> = before.keys().filter(|name| !after.contains_key(*name)).collect();
        let names = changed.iter().map(|(name, _)| *name).chain(gone.iter().copied());
        let names: Option<Vec<_>> = names.map(|it| addressable(it, [before, after])).collect();
        let Some(names) = names.filter(|_| self.keeps_order(before, after)) else { return false };
        let (set, unset) = names.split_at(changed.len());
        for ((name, value), text) in changed.into_iter().zip(set) {
            let path = format!("{prefix}{text}");
            let both = before.get(name).and_then(Node::members).zip(value.members());
            if !both.is_some_and(|(before, after)| self.of(&format!("{path}."), before, after)) {
                self.set.insert(Name::from(&*path), value.clone());
            }
        }
        self.unset.extend(unset.iter().map(|text| (format!("{prefix}{text}"), "".into())));
        true
    }

    /// True if the server puts the members into this order: new ones last, and several new ones in an order of its own.
    fn keeps_order(&mut self, before: &Members, after: &Members) -> bool {
        let old = before.keys().filter(|name| after.contains_key(*name));
        let new = after.keys().filter(|name| !before.contains_key(*name)).count();
        self.has_several_new |= new > 1 && !self.in_order;
        old.eq(after.keys().take(after.len() - new)) && (new < 2 || !self.in_order)
    }
}

/// The text of a name that can stand in a path, and that stands only once in these documents.
fn addressable<'a>(name: &'a Name, documents: [&Members; 2]) -> Option<&'a str> {
    let text = name.plain()?;
    let is_odd = text.is_empty() || text.starts_with('$') || text.contains('.');
    let is_repeated = documents.iter().any(|it| it.contains_key(&name.repeated()));
    (!is_odd && !is_repeated).then_some(text)
}

#[cfg(test)]
mod tests {
    use mongodb::bson::doc;

    use super::*;

    fn stored(document: &Document) -> StoredDocument {
        let raw = RawDocumentBuf::try_from(document).unwrap();
        StoredDocument::from_bytes(Format::Bson, raw.into_bytes())
    }

    fn update(before: &Document, after: &Document, in_order: bool) -> Difference {
        between(&stored(before), &stored(after), in_order).unwrap()
    }

    fn whole(document: &Document) -> Difference {
        Difference::Whole(RawDocumentBuf::try_from(document).unwrap())
    }

    #[test]
    fn only_what_differs_is_sent() {
        let before = doc! { "_id": 1, "a": { "b": 1, "c": [1] }, "n": f64::NAN, "gone": 1 };
        let after = doc! { "_id": 1, "a": { "b": 2, "c": [1] }, "n": f64::NAN, "new": {} };
        let set = doc! { "a.b": 2, "new": {} };
        for in_order in [false, true] {
            let sent = doc! { "$set": set.clone(), "$unset": { "gone": "" } };
            assert_eq!(update(&before, &after, in_order), Difference::Fields(sent));
            assert_eq!(update(&before, &before, in_order), Difference::Nothing);
        }
    }

    #[test]
    fn what_no_path_can_name_is_sent_with_the_document_around_it() {
        for name in ["", "$a", "a.b"] {
            let nested = |value: i32| doc! { "a": { name: value, "c": 1 }, "d": 1 };
            let set = doc! { "a": { name: 2, "c": 1 } };
            let sent = Difference::Fields(doc! { "$set": set });
            assert_eq!(update(&nested(1), &nested(2), false), sent);
            let flat = |value: i32| doc! { name: value };
            assert_eq!(update(&flat(1), &flat(2), false), whole(&flat(2)), "{name}");
        }
    }

    #[test]
    fn a_new_order_is_sent_with_the_document_around_it() {
        let of = |inner: Document| doc! { "_id": 1, "a": inner, "b": 1 };
        let before = of(doc! { "x": 1, "y": 1 });
        for after in [doc! { "y": 1, "x": 1 }, doc! { "n": 1, "x": 1, "y": 1 }] {
            let sent = doc! { "$set": { "a": after.clone() } };
            assert_eq!(update(&before, &of(after), true), Difference::Fields(sent));
        }
        // The server puts several new members into an order of its own.
        let after = doc! { "x": 1, "y": 1, "n": 1, "m": 1 };
        let sent = doc! { "$set": { "a": after.clone() } };
        assert_eq!(update(&before, &of(after.clone()), true), Difference::Fields(sent));
        let sent = doc! { "$set": { "a.n": 1, "a.m": 1 } };
        assert_eq!(update(&before, &of(after), false), Difference::Unordered(sent));
        let turned = doc! { "_id": 1, "b": 1, "a": { "x": 1, "y": 1 } };
        assert_eq!(update(&before, &turned, true), whole(&turned));
    }

    #[test]
    fn a_document_with_a_name_twice_or_odd_text_is_sent_as_it_is() {
        // { "_id": 1, "x": "a", "x": "b", "n": 1 }; then with a text that is not UTF-8.
        let odd = |n: i32, inner: [&[u8]; 2]| {
            let text = |text: &[u8]| [b"\x02x\0\x02\0\0\0", text, b"\0"].concat();
            let n = [b"\x10n\0", &n.to_le_bytes()[..]].concat();
            let within =
                [b"\x10_id\0\x01\0\0\0", &*n, &*text(inner[0]), &*text(inner[1]), b"\0"].concat();
            let bytes = [&(within.len() as i32 + 4).to_le_bytes()[..], &within].concat();
            StoredDocument::from_bytes(Format::Bson, bytes)
        };
        let twice = |n| odd(n, [b"a", b"b"]);
        let fields = Difference::Fields(doc! { "$set": { "n": 2 } });
        assert_eq!(between(&twice(1), &twice(2), false).unwrap(), fields);
        let other = odd(1, [b"a", b"c"]);
        let sent = between(&twice(1), &other, false).unwrap();
        assert_eq!(sent, Difference::Whole(codec::raw(&other).unwrap()));
        let around = |n| {
            let within = odd(n, [b"\xff", b"b"]).node().unwrap();
            let members = Members::from_iter([(Name::from("a"), Node::Array(vec![within]))]);
            StoredDocument::of(&Node::Document(members), Format::Bson)
        };
        let sent = between(&around(1), &around(2), false).unwrap();
        assert_eq!(sent, Difference::Whole(codec::raw(&around(2)).unwrap()));
    }
}
