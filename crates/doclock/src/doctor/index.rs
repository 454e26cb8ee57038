//! Checks that a collection has its indexes, and that the TTL index of a lock collection has the right ttl.

use std::time::Duration;

use actix_doclock::{
    limits::DEFAULT_TTL,
    store::{Danger, Index, Rules},
};
use mongodb::Namespace;

use crate::doctor::finding::{Finding, Severity, database_in_shell, in_shell, quoted};

/// The server refuses an `expireAfterSeconds` beyond an `i32`.
pub(super) const LONGEST: Duration = Duration::from_secs(i32::MAX as u64);

pub(super) fn no_collections(database: &str) -> Finding {
    Severity::Info.finding(
        "no_lock_collections",
        database,
        "there is no lock collection in this database, so their indexes were not looked at",
        "if there should be one, check the name of the database; an application creates its lock \
         collections when it starts",
    )
}

/// `held` is the longest ttl of a held lock, `ttl` the intended one.
pub(super) fn of_locks(
    locks: &Namespace,
    needed: &[Index],
    existing: &[Index],
    ttl: Option<Duration>,
    held: Option<Duration>,
) -> Vec<Finding> {
    let best = with_margin(ttl.max(held).unwrap_or(DEFAULT_TTL));
    let mut needed = needed.to_vec();
    for index in needed.iter_mut().filter(|index| index.expires_after.is_some()) {
        index.expires_after = Some(best);
    }
    let mut findings = compare(locks, &needed, existing);
    // Records of a fenced collection must stay.
    let expiring = Index::of_expiry(existing).filter(|it| !it.is_of_fenced());
    let expires = expiring.and_then(|index| index.expires_after);
    findings.extend(expires.and_then(|expires| wrong_ttl(locks, expires, ttl, held)));
    findings
}

/// The indexes that are missing, as [`Index::missing`] says, or sparse.
pub(super) fn compare(namespace: &Namespace, needed: &[Index], existing: &[Index]) -> Vec<Finding> {
    let has_sessions = needed.iter().any(|index| index.field == "expires");
    if existing.is_empty() {
        return vec![no_such_collection(namespace, has_sessions)];
    }
    let advice = if has_sessions { MAKE_SESSIONS } else { REGISTER };
    let missing = Index::missing(needed, existing);
    let missing = missing.map(|index| missing_index(namespace, index, existing, advice));
    let is_sparse = |index: &&Index| {
        let mut on_field = existing.iter().filter(|it| it.serves(index)).peekable();
        on_field.peek().is_some() && on_field.all(|it| it.sparse)
    };
    let sparse = needed.iter().filter(is_sparse).map(|index| sparse_index(namespace, index));
    missing.chain(sparse).collect()
}

const REGISTER: &str =
    "restart the application, which creates it when it registers its types, or run `doclock init`";
const MAKE_SESSIONS: &str = "restart the application, which creates it when it builds its session store, or run \
     `doclock init --sessions`";

fn no_such_collection(namespace: &Namespace, has_sessions: bool) -> Finding {
    let (problem, advice) = if has_sessions {
        (
            "there is no such collection of web sessions: no application with this database has built its session store",
            MAKE_SESSIONS,
        )
    } else {
        (
            "there is no such collection: no application with this database has registered its type",
            "start the application, which registers its types, or run `doclock init`",
        )
    };
    Severity::Error.finding("missing_collection", namespace, problem, advice)
}

fn missing_index(
    namespace: &Namespace,
    index: &Index,
    existing: &[Index],
    advice: &'static str,
) -> Finding {
    let field = &index.field;
    let (problem, command) = if let Some(after) = index.expires_after {
        let what = if field == "expires" { "sessions" } else { "orphaned locks" };
        let problem = format!(
            "the TTL index on `{field}` is missing: once no application server is there to remove them, {what} stay \
             forever"
        );
        // The field may have an ordinary index, which the command then turns into a TTL index.
        let is_there = existing.iter().any(|it| it.keys == index.keys && !it.limited);
        let command = if is_there {
            change_expiry(namespace, field, after)
        } else {
            create(namespace, index)
        };
        (problem, command)
    } else {
        let serves = match &**field {
            "due" => "each search for idle sessions",
            "step" => "each search for sessions whose end is half done",
            "by" | "user" => "each revocation of sessions",
            _ => "each renewal and each logout",
        };
        let problem =
            format!("the index on `{field}` is missing: {serves} reads the whole collection");
        (problem, create(namespace, index))
    };
    let is_hidden = |it: &&Index| it.keys == index.keys && !it.limited && it.hidden;
    let (problem, command) = match existing.iter().find(is_hidden) {
        Some(hidden) => {
            let problem = problem.replace("is missing:", "is hidden, so no query uses it:");
            (problem, change(namespace, &format!("name: {}, hidden: false", quoted(&hidden.name))))
        }
        None => (problem, command),
    };
    Severity::Error.finding("missing_index", namespace, problem, advice).with_command(command)
}

/// What others have brought to a collection.
pub(super) fn danger(namespace: &Namespace, danger: &Danger, needed: &[Index]) -> Finding {
    let severity = if danger.is_refused { Severity::Error } else { Severity::Warning };
    let problem = format!("it {}", danger.problem);
    let finding = severity.finding(danger.kind, namespace, problem, &*danger.remedy);
    let expiry = needed.iter().find_map(|index| index.expires_after);
    match (danger.kind, &danger.index, expiry) {
        ("short_ttl", Some(name), Some(after)) => {
            let seconds = after.as_secs();
            let expiry = format!("name: {}, expireAfterSeconds: {seconds}", quoted(name));
            finding.with_command(change(namespace, &expiry))
        }
        (_, Some(name), _) => {
            finding.with_command(format!("{}.dropIndex({})", in_shell(namespace), quoted(name)))
        }
        ("validator", ..) => {
            finding.with_command(coll_mod(namespace, r#"validationAction: "warn""#))
        }
        _ => finding,
    }
}

/// The collection that was named for web sessions is somebody else's.
pub(super) fn others_sessions(namespace: &Namespace, problem: String) -> Finding {
    let advice = "give the sessions a collection of their own; if the collection has the TTL index already, drop that \
                  first, because it removes documents";
    Severity::Error.finding("others_records", namespace, problem, advice)
}

fn create(namespace: &Namespace, index: &Index) -> String {
    let (shell, field) = (in_shell(namespace), quoted(&index.field));
    match index.expires_after {
        Some(after) => {
            let (field, seconds) = (&index.field, after.as_secs());
            format!("{shell}.createIndex({{{field}: 1}}, {{expireAfterSeconds: {seconds}}})")
        }
        None if index.partial => format!(
            "{shell}.createIndex({{{field}: 1}}, {{partialFilterExpression: {{{field}: {{$exists: true}}}}}})"
        ),
        None => format!("{shell}.createIndex({{{field}: 1}})"),
    }
}

/// An index of an earlier version, which the server does not use for a strict client of the Stable API.
fn sparse_index(namespace: &Namespace, index: &Index) -> Finding {
    let drop = format!("{}.dropIndex({{{}: 1}})", in_shell(namespace), quoted(&index.field));
    Severity::Info.finding("sparse_index",
        namespace,
        format!(
            "the index on `{}` is sparse: with `apiStrict` the server does not use it, and reads \
             the whole collection",
            index.field
        ),
        "restart the application with the privilege dropIndex, which replaces it with a partial index, \
         or run `doclock init`",
    )
    .with_command(format!("{drop}; {}", create(namespace, index)))
}

fn wrong_ttl(
    locks: &Namespace,
    expires: Duration,
    ttl: Option<Duration>,
    held: Option<Duration>,
) -> Option<Finding> {
    // While locks with a longer ttl are held, the index must not be shorter than that.
    let longest = ttl.max(held)?;
    let full = with_margin(longest);
    let [after, wanted, best] = [expires, longest, full].map(|it| it.as_secs_f64().ceil());
    let (severity, problem, advice) = if after < wanted {
        let whose = if ttl < held { "a lock that is held has" } else { "the ttl should be" };
        let problem = format!(
            "the TTL index removes locks {after} s after they were last renewed, but {whose} \
             {wanted} s: locks are lost while they are held"
        );
        let advice = "restart the application with the ttl that it should have, which raises it, or run \
                      `doclock init` with it";
        (Severity::Error, problem, advice)
    } else if after < best {
        let problem = format!(
            "the TTL index removes locks {after} s after they were last renewed, which leaves no margin over \
             the ttl of {wanted} s: when many sessions become idle at once, some may not be announced"
        );
        let advice = "restart the application with the privilege collMod, which raises it, or run `doclock init`";
        (Severity::Info, problem, advice)
    } else if ttl.is_some() && after > best {
        let problem = format!(
            "the TTL index removes orphaned locks after {after} s, and with the ttl {wanted} s it should be {best} s: \
             this is usual after the ttl was lowered, and matters only to programs that lock without this crate, \
             for which documents stay locked for longer"
        );
        let advice = "nothing; or, once no server and no lock with a longer ttl is left, lower it yourself: no \
                      server and no command does";
        (Severity::Info, problem, advice)
    } else {
        return None;
    };
    let finding = severity.finding("wrong_ttl", locks, problem, advice);
    Some(finding.with_command(change_expiry(locks, "ts", full.min(LONGEST))))
}

/// A TTL index counts in whole seconds.
fn with_margin(ttl: Duration) -> Duration {
    Duration::from_secs_f64(Rules::new(ttl).expiry().as_secs_f64().ceil())
}

fn change_expiry(namespace: &Namespace, field: &str, after: Duration) -> String {
    let seconds = after.as_secs();
    change(namespace, &format!("keyPattern: {{{field}: 1}}, expireAfterSeconds: {seconds}"))
}

fn change(namespace: &Namespace, index: &str) -> String {
    coll_mod(namespace, &format!("index: {{{index}}}"))
}

fn coll_mod(namespace: &Namespace, change: &str) -> String {
    let (database, collection) = (database_in_shell(&namespace.db), quoted(&namespace.coll));
    format!("{database}.runCommand({{collMod: {collection}, {change}}})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use mongodb::bson::{Document, doc};

    const TTL: Duration = Duration::from_secs(150);

    fn index(field: &str) -> Document {
        doc! { "key": { field: 1 } }
    }

    fn complete(seconds: f64) -> Vec<Document> {
        let mut ttl = index("ts");
        ttl.insert("expireAfterSeconds", seconds);
        vec![index("_id"), ttl, index("aid"), index("readers.aid"), index("due")]
    }

    /// The findings on a lock collection with these indexes.
    fn look_at(
        existing: &[Document],
        ttl: Option<Duration>,
        held: Option<Duration>,
    ) -> Vec<Finding> {
        let partial = |field: &str| {
            let mut index = index(field);
            index.insert("partialFilterExpression", doc! { field: { "$exists": true } });
            index
        };
        let mut needed = complete(210.0);
        needed.truncate(3);
        needed.extend([partial("readers.aid"), partial("due")]);
        let [needed, existing] = [&needed[1..], existing]
            .map(|all| all.iter().filter_map(Index::of).collect::<Vec<_>>());
        of_locks(&locks(), &needed, &existing, ttl, held)
    }

    fn locks() -> Namespace {
        Namespace::new("shop", "it's.lock")
    }

    fn found(seconds: f64, ttl: Option<u64>, held: Option<u64>) -> Option<(Severity, String)> {
        let [ttl, held] = [ttl, held].map(|it| it.map(Duration::from_secs));
        let mut findings = look_at(&complete(seconds), ttl, held);
        let finding = findings.pop()?;
        assert_eq!((findings.len(), finding.code), (0, "wrong_ttl"));
        Some((finding.severity, finding.command.unwrap()))
    }

    #[test]
    fn each_index_that_is_missing_is_named_with_the_command_that_makes_it() {
        for (missing, made) in [
            ("aid", r#"createIndex({"aid": 1})"#),
            (
                "readers.aid",
                r#"createIndex({"readers.aid": 1}, {partialFilterExpression: {"readers.aid": {$exists: true}}})"#,
            ),
            (
                "due",
                r#"createIndex({"due": 1}, {partialFilterExpression: {"due": {$exists: true}}})"#,
            ),
            ("ts", "createIndex({ts: 1}, {expireAfterSeconds: 210})"),
        ] {
            let mut existing = complete(150.0);
            existing.retain(|index| !index.get_document("key").unwrap().contains_key(missing));
            let findings = look_at(&existing, None, None);
            let [finding] = &findings[..] else { panic!("{findings:?}") };
            assert_eq!((finding.code, finding.severity), ("missing_index", Severity::Error));
            assert!(finding.problem.contains(&format!("`{missing}`")), "{finding:?}");
            let command = format!(r#"db.getSiblingDB("shop").getCollection("it's.lock").{made}"#);
            assert_eq!(finding.command.as_ref(), Some(&command));
        }
        assert_eq!(look_at(&complete(210.0), Some(TTL), Some(TTL)), []);
    }

    #[test]
    fn an_index_that_is_sparse_or_does_not_expire_is_told_of_with_a_command() {
        let mut sparse = complete(150.0);
        sparse[4].insert("sparse", true);
        let mut ordinary = complete(0.0);
        ordinary[1].remove("expireAfterSeconds");
        for (existing, code, severity, command) in [
            (sparse, "sparse_index", Severity::Info, r#"dropIndex({"due": 1}); db."#),
            (ordinary, "missing_index", Severity::Error, "collMod"),
        ] {
            let findings = look_at(&existing, None, None);
            let [finding] = &findings[..] else { panic!("{findings:?}") };
            assert_eq!((finding.code, finding.severity), (code, severity));
            assert!(finding.command.as_ref().unwrap().contains(command), "{finding:?}");
        }
    }

    #[test]
    fn the_ttl_index_follows_the_ttl_or_the_longest_that_is_held() {
        use Severity::{Error, Info};
        let severity = |seconds, ttl, held| found(seconds, ttl, held).map(|(severity, _)| severity);
        // The intended ttl is not given.
        assert_eq!(severity(30.0, None, None), None);
        assert_eq!(severity(30.0, Some(150), None), Some(Error));
        assert_eq!(severity(300.0, Some(150), None), Some(Info), "after the ttl was lowered");
        assert_eq!(severity(210.0, Some(150), None), None);
        // An index of an earlier version, without the margin.
        assert_eq!(severity(150.0, Some(150), None), Some(Info));
        assert_eq!(severity(209.0, Some(150), None), Some(Info));
        assert_eq!(severity(150.0, None, Some(150)), Some(Info));
        // A rolling change to a shorter ttl, before and after the restart of the last server.
        assert_eq!(severity(360.0, Some(150), Some(300)), None);
        assert_eq!(severity(150.0, Some(150), Some(300)), Some(Error));
        assert_eq!(severity(150.0, None, Some(300)), Some(Error));
        assert_eq!(severity(300.0, None, Some(150)), None);
        // A fenced collection.
        assert_eq!(severity(f64::from(i32::MAX), Some(150), Some(150)), None);

        let (_, command) = found(30.0, Some(150), Some(300)).unwrap();
        assert!(command.contains("expireAfterSeconds: 360"), "{command}");
    }
}
