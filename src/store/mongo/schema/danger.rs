//! What others have brought to a collection, and its locks or sessions cannot live with: indexes, a collation, a
//! validator, or a collection of another kind.

use std::fmt;

use futures_util::TryStreamExt;
use mongodb::{
    Database,
    bson::{Document, doc},
    options::{ValidationAction, ValidationLevel},
    results::{CollectionSpecification, CollectionType},
};

use crate::store::mongo::{
    error::Result,
    schema::{index::Index, requirements::Needs},
    time_limits::answered,
};

/// Something in a collection that the locks or sessions in it cannot live with.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Danger {
    /// The kind, for programs: `unique_index`, `ttl_index`, `short_ttl`, `collation`, `validator`, `view`,
    /// `time_series`, `capped` or `others_records`.
    pub kind: &'static str,
    /// The collection.
    pub collection: String,
    /// The name of the index, if it is an index.
    pub index: Option<String>,
    /// What is there, and what comes of it.
    pub problem: String,
    /// What to do.
    pub remedy: String,
    /// True if a server refuses to start with it.
    pub is_refused: bool,
}

impl Danger {
    /// True if there is no collection of single records at all, so that nothing can be said of its indexes.
    #[must_use]
    pub fn is_other_kind(&self) -> bool {
        ["view", "time_series"].contains(&self.kind)
    }

    fn of_index(
        kind: &'static str,
        needs: &Needs,
        index: &Index,
        problem: String,
        remedy: impl Into<String>,
    ) -> Self {
        let (collection, index) = (needs.collection.clone(), Some(index.name.clone()));
        Self { kind, collection, index, problem, remedy: remedy.into(), is_refused: true }
    }
}

/// As one text.
impl fmt::Display for Danger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collection, problem, remedy, .. } = self;
        write!(f, "{collection} {problem}: {remedy}")
    }
}

/// The dangerous indexes among those of a collection with records of the store.
pub(super) fn of_indexes(needs: &Needs, existing: &[Index]) -> Vec<Danger> {
    if needs.dates.is_empty() {
        return Vec::new();
    }
    existing.iter().filter_map(|index| of_index(needs, index, existing)).collect()
}

fn of_index(needs: &Needs, index: &Index, existing: &[Index]) -> Option<Danger> {
    let (name, keys) = (&index.name, &index.keys);
    if index.unique && keys != "_id: 1" {
        let problem = format!(
            "has the unique index `{name}` on {{{keys}}}, with which MongoDB refuses all records but one of each value"
        );
        let remedy = "drop the index; another one without `unique` may stay";
        return Some(Danger::of_index("unique_index", needs, index, problem, remedy));
    }
    let after = index.expires_after.filter(|_| index.is_of_one_field())?;
    if !needs.dates.contains(&index.field.split('.').next()?) {
        // No record of the store has this field.
        return None;
    }
    let needed = needs.indexes.iter().find(|it| it.field == index.field && it.expires());
    let least = needed.and_then(|needed| needed.expires_after);
    let is_own = |it: &Index| needed.is_some_and(|needed| it.serves(needed));
    if is_own(index) {
        let least = least.filter(|least| after < *least && needs.is_exact)?;
        let problem = format!(
            "has the TTL index `{name}`, which removes records after {} s instead of {} s",
            after.as_secs(),
            least.as_secs(),
        );
        let remedy = "restart a server, which raises it, or run `doclock init`";
        let danger = Danger::of_index("short_ttl", needs, index, problem, remedy);
        return Some(Danger { is_refused: false, ..danger });
    }
    // The TTL index of the store may have been made for a longer ttl.
    let longest = existing.iter().filter(|it| is_own(it)).filter_map(|it| it.expires_after).max();
    if least.is_some() && after >= least.max(longest)? {
        return None;
    }
    let problem = format!(
        "has the TTL index `{name}` on {{{keys}}}, which removes records that are still needed, {} s after this date",
        after.as_secs(),
    );
    Some(Danger::of_index("ttl_index", needs, index, problem, "drop the index"))
}

/// The dangers in the kind and the options of a collection of documents or of records. `may_be_text`: the ids may be
/// strings.
pub(in crate::store::mongo) fn of_options(
    found: &CollectionSpecification,
    has_records: bool,
    may_be_text: bool,
) -> Vec<Danger> {
    let (collection, options) = (&found.name, &found.options);
    let danger = |kind, is_refused, problem, remedy: &str| Danger {
        kind,
        collection: collection.to_owned(),
        index: None,
        problem,
        remedy: remedy.to_owned(),
        is_refused,
    };
    let collation = options.collation.as_ref().filter(|_| may_be_text).map(|collation| {
        let problem = format!(
            "has the collation `{}`, which treats different strings as the same `_id`, so that one document would get \
             several locks",
            collation.locale,
        );
        let remedy = "copy it into a collection without a default collation, and give the collation to the queries \
                      and indexes that need it";
        danger("collation", true, problem, remedy)
    });
    let is_off = matches!(options.validation_level, Some(ValidationLevel::Off))
        || matches!(options.validation_action, Some(ValidationAction::Warn));
    let rules = options.validator.as_ref().filter(|it| has_records && !is_off && !it.is_empty());
    let validator = rules.map(|_| {
        let problem = "has a validator, with which MongoDB may refuse records of this crate".to_owned();
        let remedy = "set its `validationAction` to `warn`, or remove it: the collection belongs to this crate";
        danger("validator", false, problem, remedy)
    });
    let other_kind = match &found.collection_type {
        CollectionType::View => Some(("view", "is a view, in which MongoDB writes nothing")),
        CollectionType::Timeseries => {
            Some(("time_series", "is a time series, in which MongoDB changes no single document"))
        }
        _ if options.capped == Some(true) => Some((
            "capped",
            "is capped, so that MongoDB refuses each save in a transaction, and removes the oldest documents by itself",
        )),
        _ => None,
    };
    let other_kind = other_kind.map(|(kind, problem)| {
        let remedy = if has_records {
            "drop or rename it: the name belongs to this crate, which creates an ordinary collection there"
        } else {
            "copy it into an ordinary collection, and lock the documents there"
        };
        danger(kind, true, problem.to_owned(), remedy)
    });
    other_kind.into_iter().chain(collation).chain(validator).collect()
}

/// The kinds and the options of these collections, as far as they exist.
pub(in crate::store::mongo) async fn options(
    database: &Database,
    names: &[&str],
) -> Result<Vec<CollectionSpecification>> {
    let named = doc! { "name": { "$in": names } };
    let named = answered(database.list_collections().filter(named)).await?;
    answered(named.try_collect()).await
}

/// Matches documents whose `_id` is a string.
pub(super) fn has_text_id() -> Document {
    doc! { "_id": { "$type": "string" } }
}
