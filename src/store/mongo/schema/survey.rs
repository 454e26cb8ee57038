//! Compares a database with the needs of the store.

use std::collections::BTreeSet;

use futures_util::future::{try_join_all, try_join3};
use mongodb::{
    Database,
    bson::{Bson, Document, doc},
    error::Result as MongoResult,
};

use crate::store::{
    StoreResult,
    mongo::{
        MongoStore,
        concerns::primary,
        error::{Doing, code, is_denied, store_error},
        schema::{
            create_indexes,
            danger::{self, Danger},
            index::Index,
            owner,
            requirements::Needs,
        },
        time_limits::answered,
    },
};

/// The answer to [`MongoStore::survey`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Survey {
    /// The name of the database user, and the database that keeps the user. `None` if nobody is authenticated, or if
    /// the server does not say.
    pub user: Option<(String, String)>,
    /// The collections, in the order of the needs.
    pub collections: Vec<Surveyed>,
}

/// A collection, compared with the needs of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Surveyed {
    /// The needs.
    pub needs: Needs,
    /// The needed actions that the database user has not been granted. Empty if the server does not say.
    pub lacks: Vec<&'static str>,
    /// The indexes; none if there is no such collection. `None` if the collection has no records of the store, or if
    /// the user may not look.
    pub indexes: Option<Vec<Index>>,
    /// What the records cannot live with, as far as the user may look.
    pub dangers: Vec<Danger>,
}

impl Surveyed {
    /// True if the user may not look at the indexes.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        self.indexes.is_none() && !self.needs.indexes.is_empty()
    }
}

impl MongoStore {
    /// The records in the lock collection of `collection`, if they are documents of somebody else: it has records, and
    /// none of a few is a lock.
    ///
    /// # Errors
    /// If the database is not reached, or its user may not read the locks.
    pub async fn others_records(&self, collection: &str) -> StoreResult<Option<Danger>> {
        let locks = format!("{collection}.lock");
        let found = owner::others_records(&primary(self.database(), &locks)).await;
        found.doing(|| format!("looking at the records of {locks}"))
    }

    /// Compares the database with these [needs](Self::needs). It only reads.
    ///
    /// # Errors
    /// If the database is not reached.
    pub async fn survey(&self, needs: Vec<Needs>) -> StoreResult<Survey> {
        let database = self.database();
        let listed = needs.iter().map(async |Needs { collection, indexes, dates, .. }| {
            if indexes.is_empty() && dates.is_empty() {
                return Ok(None);
            }
            match create_indexes::list(database, collection).await {
                Err(e) if is_denied(&e) => Ok(None),
                Err(e) => Err(store_error(format!("looking at the indexes of {collection}"), e)),
                listed => Ok(listed.ok()),
            }
        });
        let user = async {
            let user = User::ask(database).await;
            user.map_err(|e| store_error("looking at the privileges of the database user", e))
        };
        let options = async {
            let options = self.dangerous_options(&needs).await;
            options.map_err(|e| store_error("looking at the options of the collections", e))
        };
        let (listed, user, options) = try_join3(try_join_all(listed), user, options).await?;
        let with_indexes = needs.into_iter().zip(listed);
        let collections = with_indexes.map(|(needs, indexes)| {
            let mut dangers = danger::of_indexes(&needs, indexes.as_deref().unwrap_or_default());
            dangers.extend(options.iter().filter(|it| it.collection == needs.collection).cloned());
            Surveyed { needs, lacks: Vec::new(), indexes, dangers }
        });
        let mut collections: Vec<_> = collections.collect();
        // An empty list has two causes: the server lists no privileges, or the user has none. If the server also refused to
        // list indexes, the user has none.
        if user.lists_privileges() || collections.iter().any(Surveyed::is_hidden) {
            for it in &mut collections {
                it.lacks = user.lacks(database.name(), &it.needs);
            }
        }
        Ok(Survey { user: user.name, collections })
    }
}

impl MongoStore {
    /// The dangers in the options of these collections; none if the user may not look.
    async fn dangerous_options(&self, needs: &[Needs]) -> MongoResult<Vec<Danger>> {
        let names: Vec<_> = needs.iter().map(|it| &*it.collection).collect();
        let found = match danger::options(self.database(), &names).await {
            Err(e) if is_denied(&e) => return Ok(Vec::new()),
            found => found?,
        };
        let mut dangers = Vec::new();
        for found in found {
            let name = &found.name;
            let has_records = needs.iter().any(|it| it.collection == *name && !it.dates.is_empty());
            let documents = name.strip_suffix(".lock").unwrap_or(name);
            let is_locked = !has_records || name != documents;
            let may_be_text = found.options.collation.is_some()
                && is_locked
                && match self.rules_of(documents) {
                    Some(rules) => rules.text_ids,
                    // Nobody has told this program the type of the ids.
                    None => self.has_text_ids(documents).await?,
                };
            dangers.extend(danger::of_options(&found, has_records, may_be_text));
        }
        Ok(dangers)
    }

    /// True if a document or a lock has a string as its `_id`.
    async fn has_text_ids(&self, documents: &str) -> MongoResult<bool> {
        for name in [documents, &format!("{documents}.lock")] {
            let collection = primary::<Document>(self.database(), name);
            let found = collection.find_one(danger::has_text_id());
            match answered(found.projection(doc! { "_id": 1 })).await {
                Ok(None) => {}
                Err(e) if is_denied(&e) => {}
                found => return found.map(|found| found.is_some()),
            }
        }
        Ok(false)
    }
}

const API_STRICT: i32 = 323;

/// The authenticated user, from the answer to `connectionStatus`.
#[derive(Debug)]
struct User {
    name: Option<(String, String)>,
    privileges: Vec<Document>,
}

impl User {
    /// Asks the server which user is authenticated. The strict Stable API lacks this command. A missing privilege then
    /// shows where it is needed.
    async fn ask(database: &Database) -> MongoResult<Self> {
        let status = doc! { "connectionStatus": 1, "showPrivileges": true };
        match answered(database.run_command(status)).await {
            Err(e) if code(&e) == Some(API_STRICT) => Ok(Self::of(&doc! {})),
            status => Ok(Self::of(&status?)),
        }
    }

    fn of(status: &Document) -> Self {
        let info = status.get_document("authInfo").ok();
        let listed = |field| {
            let values = info.and_then(|info| info.get_array(field).ok());
            values.into_iter().flatten().filter_map(Bson::as_document)
        };
        let name = listed("authenticatedUsers").next().and_then(|user| {
            Some((user.get_str("user").ok()?.to_owned(), user.get_str("db").ok()?.to_owned()))
        });
        Self { name, privileges: listed("authenticatedUserPrivileges").cloned().collect() }
    }

    /// True if the server lists privileges. False for a server that lists none, and for a user without any.
    fn lists_privileges(&self) -> bool {
        !self.privileges.is_empty()
    }

    fn lacks(&self, database: &str, needs: &Needs) -> Vec<&'static str> {
        if self.name.is_none() {
            return Vec::new();
        }
        let applies = |privilege: &&Document| {
            let resource = privilege.get_document("resource");
            resource.is_ok_and(|it| covers(it, database, &needs.collection))
        };
        let granted = self.privileges.iter().filter(applies);
        let granted = granted.filter_map(|privilege| privilege.get_array("actions").ok());
        let granted: BTreeSet<_> = granted.flatten().filter_map(Bson::as_str).collect();
        needs.actions.iter().copied().filter(|action| !granted.contains(action)).collect()
    }
}

/// An empty name in a resource stands for all names except those of the system.
fn covers(resource: &Document, database: &str, collection: &str) -> bool {
    let matches = |field, name: &str| {
        resource.get_str(field).is_ok_and(|named| named.is_empty() || named == name)
    };
    resource.get_bool("anyResource").unwrap_or_default()
        || matches("db", database) && matches("collection", collection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Rules;

    fn on(db: &str, collection: &str, actions: &[&str]) -> Document {
        doc! { "resource": { "db": db, "collection": collection }, "actions": actions }
    }

    /// The missing actions on `shop.item.lock` of a user with these privileges.
    fn lacks(privileges: Vec<Document>) -> Vec<&'static str> {
        let user = User::of(&doc! { "authInfo": {
            "authenticatedUsers": [{ "user": "app", "db": "admin" }],
            "authenticatedUserPrivileges": privileges,
        } });
        user.lacks("shop", &needs())
    }

    fn needs() -> Needs {
        Needs::of_locks("item", &Rules::new(std::time::Duration::from_secs(150)))
    }

    #[test]
    fn privileges_are_looked_for_in_every_form_in_which_they_are_granted() {
        let all = &needs().actions[..];
        for sufficient in [
            vec![on("shop", "", all)],
            vec![on("", "", all)],
            vec![doc! { "resource": { "anyResource": true }, "actions": all }],
            vec![
                on("shop", "item.lock", &all[..4]),
                on("", "item.lock", &all[4..]),
                doc! { "resource": { "cluster": true }, "actions": ["hostInfo"] },
            ],
        ] {
            assert_eq!(lacks(sufficient), [""; 0]);
        }
        for elsewhere in [on("shop2", "", all), on("shop", "item", all), on("", "other.lock", all)]
        {
            assert_eq!(lacks(vec![elsewhere]), all);
        }
        let stranger = User::of(&doc! {});
        assert_eq!(stranger.lacks("shop", &needs()), [""; 0]);
    }

    #[test]
    fn each_action_that_is_missing_is_named() {
        let all = needs().actions;
        for action in &all {
            let others: Vec<_> = all.iter().copied().filter(|it| it != action).collect();
            assert_eq!(lacks(vec![on("shop", "item.lock", &others)]), [*action]);
        }
    }
}
