//! The needs of the store in the database: collections, their indexes, and actions of the database user.

use crate::{
    key::{Lockable, Named},
    store::{
        DEFAULT_TTL, Rules, StoreResult,
        mongo::{
            ENDED, FROZEN, MongoStore, REMEMBER_ENDED, SERVERS,
            error::Doing,
            schema::index::{Index, LONGEST_INDEX},
        },
    },
};

/// The actions on records of the store's own. The last two actions prepare a collection.
const RECORDS: &[&str] =
    &["find", "insert", "update", "remove", "listIndexes", "createIndex", "collMod"];
const ONE_RECORD: &[&str] = &["find", "insert", "update"];
const DOCUMENTS: &[&str] = &["find", "update"];
const NO_INDEX: [Index; 0] = [];
/// The fields of a lock record that contain dates.
const DATES_OF_LOCKS: &[&str] =
    &["ts", "since", "until", "due", "leaving", "readers", "queue", "asks"];
const DATES_OF_ENDED: &[&str] = &["ts", "lease", "noted"];

/// The needs of a [`MongoStore`] in one collection, for programs that examine a database.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Needs {
    /// The name of the collection in the database, such as `workitem.lock`.
    pub collection: String,
    /// The actions that the database user must be granted on the collection.
    pub actions: Vec<&'static str>,
    /// The indexes. The TTL index of a lock collection that this store has not prepared is the one for the default ttl.
    pub indexes: Vec<Index>,
    /// The fields of the records that contain dates, or documents with dates: the only indexes that may remove such a
    /// record are the needed ones. Empty for a collection of documents.
    pub dates: Vec<&'static str>,
    /// False if the expiry of the TTL index is only a guess.
    pub(super) is_exact: bool,
}

impl Needs {
    /// The needs of a collection that is not the store's own, such as the collection of web sessions.
    pub fn new<I: Into<Index>>(
        collection: &str,
        actions: &[&'static str],
        indexes: impl IntoIterator<Item = I>,
    ) -> Self {
        let indexes = indexes.into_iter().map(Into::into).collect();
        let (collection, actions) = (collection.to_owned(), actions.to_vec());
        Self { collection, actions, indexes, dates: Vec::new(), is_exact: true }
    }

    /// The same needs of a collection whose records have dates in these fields.
    #[must_use]
    pub fn with_dates(self, fields: &[&'static str]) -> Self {
        Self { dates: fields.to_vec(), ..self }
    }

    /// The needs of the collection of ended sessions.
    pub(in crate::store::mongo) fn of_ended(collection: &str) -> Self {
        // Partial, because few records have unfinished steps.
        let step = Index::on("step").partial();
        let indexes = vec![Index::on("ts").expiring(REMEMBER_ENDED), step];
        Self::new(collection, RECORDS, indexes).with_dates(DATES_OF_ENDED)
    }

    pub(in crate::store::mongo) fn of_locks(collection: &str, rules: &Rules) -> Self {
        let [readers, due] = ["readers.aid", "due"].map(|field| Index::on(field).partial());
        // An expired record of a fenced collection still holds its fence, which must not be forgotten.
        let expiry = if rules.fenced { LONGEST_INDEX } else { rules.expiry() };
        let indexes = vec![Index::on("ts").expiring(expiry), Index::on("aid"), readers, due];
        Self::new(&format!("{collection}.lock"), RECORDS, indexes).with_dates(DATES_OF_LOCKS)
    }
}

impl MongoStore {
    /// The needs of this store in the database for the locks of these collections, and the
    /// [other needs](Self::also_needs).
    ///
    /// # Errors
    /// If the database is not reached.
    pub async fn needs(&self, collections: &[&str]) -> StoreResult<Vec<Needs>> {
        let has_streams =
            self.has_transactions().await.doing(|| "asking the server for its kind")?;
        let known = |collection: &str| self.rules_of(collection);
        let own = [ENDED, FROZEN, SERVERS].map(|kind| self.own_collection(kind));
        let mut needs = of(&own, collections, has_streams, known);
        let others = self.inner.other_needs.lock();
        needs.extend(others.values().cloned());
        Ok(needs)
    }

    /// Adds the needs of another collection to the needs of this store, so that health examines them: the needs of the
    /// web sessions, for example.
    pub fn also_needs(&self, needs: Needs) {
        let mut others = self.inner.other_needs.lock();
        others.insert(needs.collection.clone(), needs);
    }
}

/// All needs. `own` are the collections of ended sessions, of freezes and of notes. If the server has change streams, the
/// user also needs `changeStream` on each lock collection.
fn of(
    own: &[String; 3],
    collections: &[&str],
    has_change_streams: bool,
    known: impl Fn(&str) -> Option<Rules>,
) -> Vec<Needs> {
    let [ended, one_record @ ..] = own;
    let one_record =
        one_record.iter().map(|name| Needs::new(name, ONE_RECORD, NO_INDEX).with_dates(&["of"]));
    let mut needs = vec![Needs::of_ended(ended)];
    needs.extend(one_record);
    for collection in collections {
        let rules = known(collection);
        let mut locks = Needs::of_locks(collection, &rules.unwrap_or(Rules::new(DEFAULT_TTL)));
        locks.is_exact = rules.is_some();
        locks.actions.extend(has_change_streams.then_some("changeStream"));
        needs.push(locks);
        if *collection != Named::COLLECTION {
            needs.push(Needs::new(collection, DOCUMENTS, NO_INDEX));
        }
    }
    needs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collections(needs: &[Needs]) -> Vec<&str> {
        needs.iter().map(|it| &*it.collection).collect()
    }

    const OWN: [&str; 3] = ["doclock.ended", "doclock.frozen", "doclock.server"];

    fn needs(collection: &str, has_change_streams: bool) -> Vec<Needs> {
        of(&OWN.map(str::to_owned), &[collection], has_change_streams, |_| None)
    }

    #[test]
    fn locks_without_a_document_need_nothing_on_documents() {
        let named = needs(Named::COLLECTION, true);
        assert_eq!(collections(&named), [&OWN[..], &["doclock.named.lock"]].concat());
        let item = needs("item", true);
        assert_eq!(collections(&item), [&OWN[..], &["item.lock", "item"]].concat());
    }

    #[test]
    fn only_change_streams_need_the_right_to_them() {
        let may_watch = |has_change_streams| {
            needs("item", has_change_streams)[3].actions.contains(&"changeStream")
        };
        assert!(may_watch(true) && !may_watch(false));
    }
}
