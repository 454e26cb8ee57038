//! The indexes of the collection, compared with those that are there by what they do: another library may have created
//! some, under any name.

use std::time::Duration;

use futures_util::TryStreamExt;
use mongodb::{
    Collection, Database, IndexModel,
    bson::{Bson, Document, doc},
    error::{Error, Result},
    options::IndexOptions,
};

use crate::{
    error::{Unfit, is_denied, is_no_such_collection, is_view},
    owner,
};

/// How long the note of an ended session stays, and a session whose end nobody has noticed.
const REMEMBERED: Duration = Duration::from_secs(24 * 60 * 60);

/// The fields of a record that contain dates.
pub const DATES: &[&str] = &["created", "seen", "until", "expires", "due"];

/// The indexes of the collection: the TTL index on `expires`, and partial indexes for the queries.
#[must_use]
pub fn indexes() -> Vec<IndexModel> {
    let index = |field: &str, options| {
        IndexModel::builder().keys(doc! { field: 1 }).options(options).build()
    };
    let partial = |field: &str| {
        let filter = doc! { field: { "$exists": true } };
        index(field, IndexOptions::builder().partial_filter_expression(filter).build())
    };
    let expires = index("expires", IndexOptions::builder().expire_after(REMEMBERED).build());
    vec![expires, partial("due"), partial("by"), partial("aid"), partial("user")]
}

/// A change to the indexes.
#[derive(Debug, PartialEq)]
enum Step {
    Create(Document),
    Change(Document),
}

/// Creates the indexes that are missing, and corrects those that do something else. A user who may not create any can
/// use a complete collection.
///
/// # Errors
/// Also if the collection has an index with which sessions would be lost or refused.
pub(crate) async fn prepare(collection: &Collection<Document>) -> Result<()> {
    let name = collection.name();
    let database = collection.client().database(&collection.namespace().db);
    let existing = list(&database, name).await?;
    let steps = steps(&existing).map_err(|why| Error::custom(Unfit(why)))?;
    // A complete collection is not looked at again: its indexes do whatever they do already.
    if !steps.is_empty()
        && let Some(why) = owner::whose(&database, name).await?
    {
        return Err(Error::custom(Unfit(why)));
    }
    for step in steps {
        let mut command = match &step {
            Step::Create(index) => doc! { "createIndexes": name, "indexes": [index] },
            Step::Change(index) => doc! { "collMod": name, "index": index },
        };
        // A command does not inherit the write concern of the collection.
        command.insert("writeConcern", doc! { "w": "majority" });
        match (database.run_command(command).await, step) {
            (Err(e), Step::Change(index)) if is_denied(&e) => {
                let index = index.get_str("name").unwrap_or_default();
                return Err(Error::custom(Unfit(format!(
                    "the index `{index}` does not do what is needed, as if another library had created it, and the \
                     database user may not change it: give it the action collMod on the collection, or drop the index"
                ))));
            }
            (done, _) => drop(done?),
        }
    }
    Ok(())
}

async fn list(database: &Database, collection: &str) -> Result<Vec<Document>> {
    match database.run_cursor_command(doc! { "listIndexes": collection }).await {
        Err(e) if is_no_such_collection(&e) || is_view(&e) => Ok(Vec::new()),
        listed => listed?.try_collect().await,
    }
}

/// The changes that make the collection complete, or why it cannot be used.
fn steps(existing: &[Document]) -> std::result::Result<Vec<Step>, String> {
    let needed: Vec<_> = indexes().into_iter().map(Needed::of).collect();
    for index in existing {
        if let Some(danger) = danger(index, &needed) {
            return Err(danger);
        }
    }
    let steps = needed.iter().flat_map(|needed| needed.steps(existing));
    Ok(steps.collect())
}

/// Why sessions would be lost or refused with this index.
fn danger(index: &Document, needed: &[Needed]) -> Option<String> {
    let (name, keys) = (name(index), index.get_document("key").ok()?);
    // The index on `_id` has the collation of the collection.
    if name == "_id_"
        && let Ok(collation) = index.get_document("collation")
    {
        let locale = collation.get_str("locale").unwrap_or_default();
        return Some(format!(
            "the collection has the collation `{locale}`, by which different users may be the same one: use a \
             collection without a collation"
        ));
    }
    if index.get_bool("unique").unwrap_or(false) && !keys.contains_key("_id") {
        return Some(format!(
            "the index `{name}` is unique, so that MongoDB refuses the second session with the same value: drop it; \
             another one without `unique` may stay"
        ));
    }
    let (field, direction) = keys.iter().next().filter(|_| keys.len() == 1)?;
    let after = seconds(index).filter(|_| number(direction).is_some())?;
    let is_date = DATES.contains(&field.as_str());
    let least = needed.iter().find(|it| it.field == *field).and_then(|it| it.after);
    let is_corrected = |it: &Needed| it.after.is_some() && it.is_like(index);
    if !is_date || needed.iter().any(is_corrected) || least.is_some_and(|least| after >= least) {
        return None;
    }
    Some(format!(
        "the TTL index `{name}` removes sessions {after} s after the date in `{field}`, before their end is announced: \
         drop it"
    ))
}

/// A needed index.
struct Needed {
    field: String,
    filter: Option<Document>,
    /// After how many seconds a record goes, for a TTL index.
    after: Option<f64>,
}

impl Needed {
    fn of(model: IndexModel) -> Self {
        let options = model.options.unwrap_or_default();
        Self {
            field: model.keys.keys().next().cloned().unwrap_or_default(),
            filter: options.partial_filter_expression,
            after: options.expire_after.map(|after| after.as_secs_f64()),
        }
    }

    /// True if the queries of this store use such an index, or would, if it were not hidden.
    fn is_like(&self, index: &Document) -> bool {
        let is_key = |keys: &Document| {
            keys.len() == 1 && keys.get(&self.field).and_then(number) == Some(1.0)
        };
        let filter = index.get_document("partialFilterExpression").ok();
        index.get_document("key").is_ok_and(is_key)
            && (filter.is_none() || filter == self.filter.as_ref())
            && !index.contains_key("collation")
    }

    fn steps(&self, existing: &[Document]) -> Vec<Step> {
        let mut like: Vec<_> = existing.iter().filter(|index| self.is_like(index)).collect();
        like.sort_by_key(|index| seconds(index).is_none());
        let Some(index) = like.first() else { return vec![Step::Create(self.index(existing))] };
        let mut steps = Vec::new();
        if let Some(after) = self.after
            && seconds(index).is_none_or(|it| it < after)
        {
            let change = doc! { "name": name(index), "expireAfterSeconds": after as i64 };
            steps.push(Step::Change(change));
        }
        if index.get_bool("hidden").unwrap_or(false) {
            steps.push(Step::Change(doc! { "name": name(index), "hidden": false }));
        }
        steps
    }

    /// An index of another kind may have the usual name already.
    fn index(&self, existing: &[Document]) -> Document {
        let usual = format!("{}_1", self.field);
        let is_taken = existing.iter().any(|index| name(index) == usual);
        let name = if is_taken { format!("doclock_{usual}") } else { usual };
        let mut index = doc! { "key": { &self.field: 1 }, "name": name };
        index.extend(self.after.map(|it| ("expireAfterSeconds".to_owned(), (it as i64).into())));
        let filter = self.filter.clone();
        index.extend(filter.map(|it| ("partialFilterExpression".to_owned(), it.into())));
        index
    }
}

fn name(index: &Document) -> &str {
    index.get_str("name").unwrap_or_default()
}

/// Some servers take an expiry that is not a number for zero.
fn seconds(index: &Document) -> Option<f64> {
    index.get("expireAfterSeconds").map(|it| number(it).unwrap_or_default().max(0.0))
}

/// The old shell wrote every number as a double.
fn number(value: &Bson) -> Option<f64> {
    match value {
        Bson::Int32(n) => Some((*n).into()),
        Bson::Int64(n) => Some(*n as f64),
        Bson::Double(n) => Some(*n),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete() -> Vec<Document> {
        let created = steps(&[]).unwrap().into_iter().map(|step| match step {
            Step::Create(index) => index,
            other => panic!("{other:?}"),
        });
        created.chain([doc! { "key": { "_id": 1 }, "name": "_id_" }]).collect()
    }

    /// The changes to a complete collection whose index on `field` is like this.
    fn with(field: &str, change: impl FnOnce(&mut Document)) -> Vec<Step> {
        let mut existing = complete();
        let index =
            existing.iter_mut().find(|it| it.get_document("key").unwrap().contains_key(field));
        change(index.unwrap());
        steps(&existing).unwrap()
    }

    const DAY: i64 = 24 * 60 * 60;

    #[test]
    fn a_complete_collection_is_left_as_it_is_whatever_the_names_of_its_indexes() {
        assert_eq!(steps(&complete()).unwrap(), []);
        for field in ["expires", "aid", "due"] {
            assert_eq!(with(field, |it| drop(it.insert("name", "mine"))), []);
            assert_eq!(with(field, |it| drop(it.insert("key", doc! { field: 1.0 }))), []);
        }
        assert_eq!(with("user", |it| drop(it.remove("partialFilterExpression"))), []);
        assert_eq!(with("expires", |it| drop(it.insert("expireAfterSeconds", 2 * DAY))), []);
    }

    #[test]
    fn an_index_that_expires_otherwise_or_is_hidden_is_corrected() {
        let raised = doc! { "name": "expires_1", "expireAfterSeconds": DAY };
        for wrong in [Bson::Int32(0), Bson::Int64(3_600), Bson::Double(f64::NAN)] {
            let steps = with("expires", |it| drop(it.insert("expireAfterSeconds", wrong)));
            assert_eq!(steps, [Step::Change(raised.clone())]);
        }
        let steps = with("expires", |it| drop(it.remove("expireAfterSeconds")));
        assert_eq!(steps, [Step::Change(raised)]);
        let steps = with("aid", |it| drop(it.insert("hidden", true)));
        assert_eq!(steps, [Step::Change(doc! { "name": "aid_1", "hidden": false })]);
    }

    #[test]
    fn an_index_that_serves_no_query_gets_another_one_beside_it() {
        let others: [fn(&mut Document); 5] = [
            |it| drop(it.insert("key", doc! { "aid": "hashed" })),
            |it| drop(it.insert("key", doc! { "aid": -1 })),
            |it| drop(it.insert("key", doc! { "aid": 1, "seen": 1 })),
            |it| drop(it.insert("collation", doc! { "locale": "en" })),
            |it| drop(it.insert("partialFilterExpression", doc! { "user": "bob" })),
        ];
        for other in others {
            let steps = with("aid", other);
            let [Step::Create(index)] = &steps[..] else { panic!("{steps:?}") };
            assert_eq!(index.get_str("name").unwrap(), "doclock_aid_1");
        }
    }

    #[test]
    fn an_index_that_loses_or_refuses_sessions_is_named() {
        let named = |index: Document| {
            let mut existing = complete();
            existing.push(index);
            steps(&existing).err()
        };
        for dangerous in [
            doc! { "key": { "user": 1 }, "name": "odd", "unique": true },
            doc! { "key": { "seen": 1 }, "name": "odd", "expireAfterSeconds": 3_600 },
            doc! { "key": { "due": -1 }, "name": "odd", "expireAfterSeconds": 10 * DAY },
            doc! { "key": { "expires": -1 }, "name": "odd", "expireAfterSeconds": 60 },
            doc! { "key": { "expires": 1 }, "name": "odd", "expireAfterSeconds": 60,
            "partialFilterExpression": { "user": "bob" } },
        ] {
            let why = named(dangerous.clone()).unwrap_or_else(|| panic!("{dangerous}"));
            assert!(why.contains("`odd`") && why.contains("drop it"), "{why}");
        }
        let mut collated = complete();
        collated[5].insert("collation", doc! { "locale": "en" });
        assert!(steps(&collated).is_err_and(|why| why.contains("collation `en`")));
        for harmless in [
            // The server ignores the expiry of an index of several fields.
            doc! { "key": { "seen": 1, "user": 1 }, "name": "odd", "expireAfterSeconds": 60 },
            doc! { "key": { "expires": -1 }, "name": "odd", "expireAfterSeconds": 2 * DAY },
            doc! { "key": { "expireAt": 1 }, "name": "odd", "expireAfterSeconds": 60 },
            doc! { "key": { "_id": 1 }, "name": "odd", "unique": true, "clustered": true },
        ] {
            assert_eq!(named(harmless), None);
        }
    }
}
