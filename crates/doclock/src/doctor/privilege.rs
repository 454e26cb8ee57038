//! Reports the privileges that the database user lacks.

use mongodb::Namespace;

use crate::doctor::finding::{Finding, Severity, database_in_shell, quoted};

/// A server that finds the indexes as they should be does not change them, and needs no such privilege.
const SCHEMA: [&str; 2] = ["createIndex", COLL_MOD];
const COLL_MOD: &str = "collMod";

pub(super) fn not_authenticated(database: &str) -> Finding {
    Severity::Error.finding(
        "not_authenticated",
        database,
        "the server asks for a user and a password, and the URI has none",
        "write them into the URI: `mongodb://USER:PASSWORD@…`, percent-encoded",
    )
}

/// The built-in roles of MongoDB cover whole databases, so they grant more than the missing actions.
pub(super) fn finding(
    user: Option<&(String, String)>,
    namespace: &Namespace,
    lacks: &[&str],
) -> Option<Finding> {
    let (user, home) = user.filter(|_| !lacks.is_empty())?;
    let (severity, comes_of_it) = if lacks.iter().all(|action| SCHEMA.contains(action)) {
        (
            Severity::Warning,
            "a first start of the application, or one with another ttl, fails, unless another user \
             has run `doclock init` before",
        )
    } else if lacks.iter().all(|action| SCHEMA.contains(action) || *action == "changeStream") {
        (Severity::Warning, "waiters and watching pages have to poll")
    } else if namespace.coll.starts_with("doclock.") && namespace.coll.ends_with(".server") {
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
    let finding = severity.finding("missing_privilege",
        namespace,
        format!("the database user `{user}` lacks {}: {comes_of_it}", lacks.join(", ")),
        format!(
            "give it {} on the database `{database}`, or exactly these actions on {namespace} by a role \
             of your own",
            roles.join(" and "),
        ),
    );
    Some(finding.with_command(format!(
        "{}.grantRolesToUser({}, [{}])",
        database_in_shell(home),
        quoted(user),
        grants.join(", "),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lacking(collection: &str, lacks: &[&str]) -> Finding {
        let user = ("app".to_owned(), "admin".to_owned());
        finding(Some(&user), &Namespace::new("shop", collection), lacks).unwrap()
    }

    #[test]
    fn what_is_missing_is_named_with_the_command_that_grants_it() {
        for (action, role, severity) in [
            ("find", "readWrite", Severity::Error),
            ("insert", "readWrite", Severity::Error),
            ("update", "readWrite", Severity::Error),
            ("remove", "readWrite", Severity::Error),
            ("listIndexes", "readWrite", Severity::Error),
            ("createIndex", "readWrite", Severity::Warning),
            ("collMod", "dbAdmin", Severity::Warning),
            ("changeStream", "readWrite", Severity::Warning),
        ] {
            let finding = lacking("item.lock", &[action]);
            assert_eq!((&*finding.about, finding.severity), ("shop.item.lock", severity));
            assert!(finding.problem.contains(&format!("`app` lacks {action}:")), "{finding:?}");
            let command = format!(
                r#"db.getSiblingDB("admin").grantRolesToUser("app", [{{role: "{role}", db: "shop"}}])"#
            );
            assert_eq!(finding.command.as_ref(), Some(&command));
        }
        let both = lacking("item.lock", &["createIndex", "collMod", "changeStream"]);
        assert_eq!(both.severity, Severity::Warning);
        assert_eq!(lacking("item.lock", &["find", "collMod"]).severity, Severity::Error);
        assert_eq!(lacking("doclock.server", &["find"]).severity, Severity::Warning);
    }

    #[test]
    fn a_user_who_lacks_nothing_and_nobody_are_no_findings() {
        let user = ("app".to_owned(), "admin".to_owned());
        let locks = Namespace::new("shop", "item.lock");
        assert_eq!(finding(Some(&user), &locks, &[]), None);
        assert_eq!(finding(None, &locks, &["find"]), None);
    }
}
