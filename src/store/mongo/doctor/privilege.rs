//! Compares the privileges of the database user with those that locks need.

use std::collections::BTreeSet;

use mongodb::{
    Database, Namespace,
    bson::{Bson, Document, doc},
    error::Result as MongoResult,
};

use crate::{
    key::{Lockable, Named},
    store::mongo::{
        ENDED,
        doctor::{
            finding::{Finding, Severity, database_in_shell, quoted},
            topology::Kind,
            unless_strict,
        },
        freeze::FROZEN,
        server::SERVERS,
    },
};

/// Needed on the crate's own collections.
const RECORDS: &[&str] =
    &["find", "insert", "update", "remove", "listIndexes", CREATE_INDEX, COLL_MOD];
/// Needed on web sessions.
const WEB_SESSIONS: &[&str] = &["find", "insert", "update", "listIndexes", CREATE_INDEX, COLL_MOD];
const CREATE_INDEX: &str = "createIndex";
const COLL_MOD: &str = "collMod";
/// Needed on locks, if the deployment has change streams.
const WATCH: &str = "changeStream";
/// Needed on the documents, which are loaded and saved.
const DOCUMENTS: &[&str] = &["find", "update"];

/// The authenticated user, from the answer to `connectionStatus`.
#[derive(Debug)]
pub(in crate::store::mongo) struct User {
    /// The name of the user, and the database that keeps it. `None` if nobody is authenticated.
    name: Option<(String, String)>,
    privileges: Vec<Document>,
}

impl User {
    pub(super) fn of(status: &Document) -> Self {
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

    /// Nobody is authenticated, and the server does not answer strangers.
    pub(super) fn is_unknown(&self) -> bool {
        self.name.is_none()
    }

    /// Asks who is authenticated. The strict Stable API lacks this command. Missing privileges then show where they
    /// are needed.
    pub(in crate::store::mongo) async fn ask(database: &Database) -> MongoResult<Self> {
        let status = doc! { "connectionStatus": 1, "showPrivileges": true };
        let status = unless_strict(database.run_command(status).await)?;
        Ok(Self::of(&status.unwrap_or_default()))
    }

    /// False for a server that does not list them, and for a user without any.
    pub(in crate::store::mongo) fn lists_privileges(&self) -> bool {
        !self.privileges.is_empty()
    }

    /// The missing actions, by collection.
    pub(in crate::store::mongo) fn lacks(
        &self,
        database: &str,
        collections: &[&str],
        sessions: Option<&str>,
        kind: Kind,
    ) -> impl Iterator<Item = (String, Vec<&'static str>)> {
        let one_record = vec!["find", "insert", "update"];
        let mut needs = vec![
            (ENDED.to_owned(), RECORDS.to_vec()),
            (FROZEN.to_owned(), one_record.clone()),
            (SERVERS.to_owned(), one_record),
        ];
        needs.extend(sessions.map(|name| (name.to_owned(), WEB_SESSIONS.to_vec())));
        for collection in collections {
            let mut locks = RECORDS.to_vec();
            if kind != Kind::Standalone {
                locks.push(WATCH);
            }
            needs.push((format!("{collection}.lock"), locks));
            if *collection != Named::COLLECTION {
                needs.push(((*collection).to_owned(), DOCUMENTS.to_vec()));
            }
        }
        if self.name.is_none() {
            needs.clear();
        }
        needs.into_iter().filter_map(|(collection, mut needed)| {
            let has = self.actions(database, &collection);
            needed.retain(|action| !has.contains(action));
            (!needed.is_empty()).then_some((collection, needed))
        })
    }

    /// One finding for each collection on which the user lacks a privilege.
    pub(super) fn findings(
        &self,
        database: &str,
        collections: &[&str],
        sessions: Option<&str>,
        kind: Kind,
    ) -> Vec<Finding> {
        let Some(user) = &self.name else { return Vec::new() };
        let lacks = self.lacks(database, collections, sessions, kind);
        lacks
            .map(|(collection, lacks)| lacking(user, &Namespace::new(database, collection), &lacks))
            .collect()
    }

    fn actions(&self, database: &str, collection: &str) -> BTreeSet<&str> {
        let applies = |privilege: &&Document| {
            privilege.get_document("resource").is_ok_and(|it| covers(it, database, collection))
        };
        let granted = self.privileges.iter().filter(applies);
        granted
            .filter_map(|privilege| privilege.get_array("actions").ok())
            .flatten()
            .filter_map(Bson::as_str)
            .collect()
    }
}

/// A server that finds the indexes as they should be does not change them, and needs no such privilege.
pub(in crate::store::mongo) fn is_schema(action: &str) -> bool {
    [CREATE_INDEX, COLL_MOD].contains(&action)
}

/// An empty name in a resource stands for all names except those of the system.
fn covers(resource: &Document, database: &str, collection: &str) -> bool {
    let matches = |field, name: &str| {
        resource.get_str(field).is_ok_and(|named| named.is_empty() || named == name)
    };
    resource.get_bool("anyResource").unwrap_or_default()
        || matches("db", database) && matches("collection", collection)
}

pub(super) fn not_authenticated(database: &str) -> Finding {
    Finding::new(
        Severity::Error,
        "not_authenticated",
        database,
        "the server asks for a user and a password, and the URI has none",
        "write them into the URI: `mongodb://USER:PASSWORD@…`, percent-encoded",
    )
}

/// The built-in roles of MongoDB cover whole databases, so they grant more than the missing actions.
fn lacking((user, home): &(String, String), namespace: &Namespace, lacks: &[&str]) -> Finding {
    let (severity, comes_of_it) = if lacks.iter().all(|action| is_schema(action)) {
        (
            Severity::Warning,
            "a first start of the application, or one with another ttl, fails, unless another user \
             has run `doclock init` before",
        )
    } else if lacks.iter().all(|action| is_schema(action) || *action == WATCH) {
        (Severity::Warning, "waiters and watching pages have to poll")
    } else if namespace.coll == SERVERS {
        (Severity::Warning, "servers that disagree do not notice it")
    } else {
        (Severity::Error, "commands that need it are refused")
    };
    let database = &namespace.db;
    let mut roles = Vec::new();
    if lacks != [COLL_MOD] {
        roles.push("readWrite");
    }
    if lacks.contains(&COLL_MOD) {
        roles.push("dbAdmin");
    }
    let grants: Vec<_> = roles
        .iter()
        .map(|role| format!("{{role: \"{role}\", db: {}}}", quoted(database)))
        .collect();
    Finding::new(
        severity,
        "missing_privilege",
        namespace,
        format!("the database user `{user}` lacks {}: {comes_of_it}", lacks.join(", ")),
        format!(
            "give it {} on the database `{database}`, or exactly these actions on {namespace} by a role \
             of your own",
            roles.join(" and "),
        ),
    )
    .with_command(format!(
        "{}.grantRolesToUser({}, [{}])",
        database_in_shell(home),
        quoted(user),
        grants.join(", "),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &[&str] = &[
        "find",
        "insert",
        "update",
        "remove",
        "listIndexes",
        "createIndex",
        "collMod",
        "changeStream",
    ];

    fn user(privileges: Vec<Document>) -> User {
        User::of(&doc! { "authInfo": {
            "authenticatedUsers": [{ "user": "app", "db": "admin" }],
            "authenticatedUserPrivileges": privileges,
        } })
    }

    fn on(db: &str, collection: &str, actions: &[&str]) -> Document {
        doc! { "resource": { "db": db, "collection": collection }, "actions": actions }
    }

    fn lacking(privileges: Vec<Document>, kind: Kind) -> Vec<Finding> {
        user(privileges).findings("shop", &["item"], None, kind)
    }

    #[test]
    fn privileges_are_looked_for_in_every_form_in_which_they_are_granted() {
        for sufficient in [
            vec![on("shop", "", ALL)],
            vec![on("", "", ALL)],
            vec![doc! { "resource": { "anyResource": true }, "actions": ALL }],
            vec![
                on("shop", "item.lock", &ALL[..4]),
                on("", "item.lock", &ALL[4..]),
                on("shop", "doclock.ended", ALL),
                on("shop", "doclock.frozen", &["find", "insert", "update"]),
                on("shop", "doclock.server", &["find", "insert", "update"]),
                on("shop", "item", &["find", "update"]),
                doc! { "resource": { "cluster": true }, "actions": ["hostInfo"] },
            ],
        ] {
            assert_eq!(lacking(sufficient, Kind::ReplicaSet), []);
        }
        let own =
            ["doclock.ended", "doclock.frozen", "doclock.server"].map(|it| on("shop", it, ALL));
        let elsewhere = [vec![on("shop2", "", ALL)], own.to_vec()].concat();
        let about: Vec<_> =
            lacking(elsewhere, Kind::ReplicaSet).into_iter().map(|it| it.about).collect();
        assert_eq!(about, ["shop.item.lock", "shop.item"]);
        assert_eq!(User::of(&doc! {}).findings("shop", &["item"], None, Kind::ReplicaSet), []);
    }

    #[test]
    fn what_is_missing_is_named_with_the_command_that_grants_it() {
        let without = |action: &str| {
            let some: Vec<_> = ALL.iter().copied().filter(|it| *it != action).collect();
            vec![
                on("shop", "item.lock", &some),
                on("shop", "doclock.ended", ALL),
                on("shop", "doclock.frozen", ALL),
                on("shop", "doclock.server", ALL),
                on("", "item", ALL),
            ]
        };
        for action in ALL {
            let findings = lacking(without(action), Kind::ReplicaSet);
            let [finding] = &findings[..] else { panic!("{action}: {findings:?}") };
            assert_eq!(finding.about, "shop.item.lock");
            assert!(finding.problem.contains(&format!("`app` lacks {action}:")), "{finding:?}");
            let is_needed_seldom = ["createIndex", "collMod", "changeStream"].contains(action);
            assert_eq!(finding.severity == Severity::Warning, is_needed_seldom, "{finding:?}");
            let role = if *action == "collMod" { "dbAdmin" } else { "readWrite" };
            let command = format!(
                r#"db.getSiblingDB("admin").grantRolesToUser("app", [{{role: "{role}", db: "shop"}}])"#
            );
            assert_eq!(finding.command.as_ref(), Some(&command));
        }
        assert_eq!(lacking(without("changeStream"), Kind::Standalone), []);
    }

    #[test]
    fn locks_without_a_document_need_nothing_on_documents() {
        let records = ["doclock.ended", "doclock.frozen", "doclock.server", "doclock.named.lock"]
            .map(|it| on("shop", it, ALL));
        assert_eq!(
            user(records.to_vec()).findings("shop", &["doclock.named"], None, Kind::ReplicaSet),
            []
        );
    }
}
