//! An index, by what it does.

use std::{fmt, time::Duration};

use mongodb::{
    IndexModel,
    bson::{Bson, Document, doc},
    options::IndexOptions,
};

use crate::store::mongo::codec::number;

/// The server refuses an `expireAfterSeconds` beyond an `i32`.
pub(super) const LONGEST_INDEX: Duration = Duration::from_secs(i32::MAX as u64);

/// An index.
///
/// An index is recognised by what it does, not by its name: a hand-written protocol may have created it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Index {
    /// The first field.
    pub field: String,
    /// The fields with their directions or kinds, as in `ts: 1` or `aid: 1, since: -1`.
    pub keys: String,
    /// The name of the index.
    pub name: String,
    /// True if the index contains only records that have the field, by a filter of its own.
    pub partial: bool,
    /// True if queries of the store do not use the index: it has another filter, or another collation than its
    /// collection.
    pub limited: bool,
    /// True if no query uses the index until it is unhidden.
    pub hidden: bool,
    /// True if the index is sparse. The server does not use such an index under the strict Stable API, so none is
    /// needed; earlier versions created some.
    pub sparse: bool,
    /// True if no two records may have the same value.
    pub unique: bool,
    /// For a TTL index, how long after the date in the field the server removes a record.
    pub expires_after: Option<Duration>,
}

impl Index {
    /// The index that `listIndexes` describes like this. `None` if this is no description of an index.
    #[must_use]
    pub fn of(description: &Document) -> Option<Self> {
        let keys = description.get_document("key").ok()?;
        let field = keys.keys().next()?;
        let is_set = |option| description.get_bool(option).unwrap_or(false);
        let filter = description.get_document("partialFilterExpression").ok();
        let partial = filter.is_some_and(|it| *it == has(field));
        let seconds = description.get("expireAfterSeconds").and_then(number);
        // Some servers take an expiry that is not a number for zero.
        let expiry = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        Some(Self {
            keys: text_of(keys),
            name: description.get_str("name").unwrap_or_default().to_owned(),
            partial,
            limited: filter.is_some() && !partial || description.contains_key("collation"),
            hidden: is_set("hidden"),
            sparse: is_set("sparse"),
            unique: is_set("unique"),
            expires_after: seconds.map(expiry),
            ..Self::on(field)
        })
    }

    pub(super) fn on(field: &str) -> Self {
        let [partial, limited, hidden, sparse, unique] = [false; 5];
        let (keys, name, expires_after) = (format!("{field}: 1"), format!("{field}_1"), None);
        let field = field.to_owned();
        Self { field, keys, name, partial, limited, hidden, sparse, unique, expires_after }
    }

    pub(super) fn partial(self) -> Self {
        Self { partial: true, ..self }
    }

    /// A TTL index counts in whole seconds, and must not be early.
    pub(super) fn expiring(self, after: Duration) -> Self {
        let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        Self { expires_after: Some(Duration::from_secs(seconds)), ..self }
    }

    pub(super) fn expires(&self) -> bool {
        self.expires_after.is_some()
    }

    /// The server ignores the expiry of an index of several fields.
    pub(super) fn is_of_one_field(&self) -> bool {
        self.keys == format!("{}: 1", self.field) || self.keys == format!("{}: -1", self.field)
    }

    /// True if this index does what the needed one does, once it is unhidden, or has another expiry.
    pub(super) fn can_serve(&self, needed: &Self) -> bool {
        self.keys == needed.keys && !self.limited
    }

    /// True if this index does what the needed one does, whatever its name is. Its expiry may be another one.
    #[must_use]
    pub fn serves(&self, needed: &Self) -> bool {
        self.can_serve(needed) && !self.hidden && (self.expires() || !needed.expires())
    }

    /// The needed indexes that are missing among the existing ones. A TTL index with another expiry is not missing.
    pub fn missing<'a>(needed: &'a [Self], existing: &[Self]) -> impl Iterator<Item = &'a Self> {
        needed.iter().filter(move |needed| !existing.iter().any(|it| it.serves(needed)))
    }

    /// The TTL index of a lock collection among these.
    pub fn of_expiry(existing: &[Self]) -> Option<&Self> {
        let needed = Self::on("ts").expiring(LONGEST_INDEX);
        existing.iter().find(|it| it.serves(&needed))
    }

    /// True for the TTL index of a fenced collection, through which no record expires.
    #[must_use]
    pub fn is_of_fenced(&self) -> bool {
        self.keys == "ts: 1" && self.expires_after >= Some(LONGEST_INDEX)
    }

    /// An index of another kind may have the usual name already.
    pub(super) fn model(&self, existing: &[Self]) -> IndexModel {
        let filter = self.partial.then(|| has(&self.field));
        let is_taken = existing.iter().any(|it| it.name == self.name);
        let name = is_taken.then(|| format!("doclock_{}", self.name));
        let options = IndexOptions::builder().name(name);
        let options = options.expire_after(self.expires_after).partial_filter_expression(filter);
        IndexModel::builder().keys(doc! { &self.field: 1 }).options(options.build()).build()
    }
}

impl From<IndexModel> for Index {
    fn from(model: IndexModel) -> Self {
        let index = Self::on(model.keys.keys().next().map_or("", String::as_str));
        let options = model.options.unwrap_or_default();
        let partial = options.partial_filter_expression.is_some();
        Self { partial, expires_after: options.expire_after, ..index }
    }
}

fn has(field: &str) -> Document {
    doc! { field: { "$exists": true } }
}

/// The old shell wrote every number as a double.
fn text_of(keys: &Document) -> String {
    let text = |(field, kind): (&String, &Bson)| match (number(kind), kind) {
        (Some(direction), _) => format!("{field}: {direction}"),
        (None, Bson::String(kind)) => format!("{field}: \"{kind}\""),
        (None, other) => format!("{field}: {other}"),
    };
    keys.iter().map(text).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.field)?;
        if self.expires_after.is_some() { f.write_str(" (TTL)") } else { Ok(()) }
    }
}
