//! Checks that a collection has its indexes, and that its TTL index has the right ttl.

use std::time::Duration;

use mongodb::{Namespace, bson::Document};

use crate::store::{
    DEFAULT_TTL, Rules,
    mongo::{
        REMEMBER_ENDED,
        doctor::finding::{Finding, Severity, database_in_shell, in_shell, quoted},
        indexes::{
            self, LONGEST_INDEX, OF_ENDED, OF_LOCKS, OF_SESSIONS, Plain, expiry, is_of_fenced,
            is_on, whole_seconds,
        },
    },
};

pub(super) fn no_collections(database: &str) -> Finding {
    Finding::new(
        Severity::Info,
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
    existing: &[Document],
    ttl: Option<Duration>,
    held: Option<Duration>,
) -> Vec<Finding> {
    if existing.is_empty() {
        return vec![no_such_collection(locks)];
    }
    let mut findings = missing(locks, existing, OF_LOCKS);
    findings.extend(sparse(locks, existing, OF_LOCKS));
    let expires = existing.iter().filter(|index| is_on(index, "ts")).find_map(expiry);
    match expires {
        None => findings.push(no_ttl_index(
            locks,
            existing,
            with_margin(ttl.max(held).unwrap_or(DEFAULT_TTL)),
        )),
        // A fenced collection, whose records must stay.
        Some(seconds) if is_of_fenced(seconds) => {}
        Some(seconds) => findings.extend(wrong_ttl(locks, seconds, ttl, held)),
    }
    findings
}

pub(super) fn of_ended(ended: &Namespace, existing: &[Document]) -> Vec<Finding> {
    if existing.is_empty() {
        return vec![no_such_collection(ended)];
    }
    let mut findings = missing(ended, existing, OF_ENDED);
    findings.extend(sparse(ended, existing, OF_ENDED));
    if !existing.iter().any(|index| is_on(index, "ts") && expiry(index).is_some()) {
        findings.push(no_ttl_index(ended, existing, whole_seconds(REMEMBER_ENDED)));
    }
    findings
}

pub(super) fn of_sessions(sessions: &Namespace, existing: &[Document]) -> Vec<Finding> {
    if existing.is_empty() {
        return vec![no_such_sessions(sessions)];
    }
    let mut findings: Vec<_> = missing(sessions, existing, OF_SESSIONS)
        .into_iter()
        .map(|finding| Finding { advice: MAKE_SESSIONS.to_owned(), ..finding })
        .collect();
    if !existing.iter().any(|index| is_on(index, "expires") && expiry(index).is_some()) {
        let shell = in_shell(sessions);
        let seconds = whole_seconds(indexes::REMEMBER_SESSIONS);
        let finding = Finding::new(
            Severity::Error,
            "missing_index",
            sessions,
            "the TTL index on `expires` is missing: once no application server is there to remove them, sessions \
             stay forever",
            MAKE_SESSIONS,
        );
        findings.push(finding.with_command(format!(
            "{shell}.createIndex({{expires: 1}}, {{expireAfterSeconds: {seconds}}})"
        )));
    }
    findings
}

const MAKE_SESSIONS: &str = "restart the application, which creates it when it builds its session store, or run \
     `doclock init --sessions`";

fn no_such_sessions(sessions: &Namespace) -> Finding {
    Finding::new(
        Severity::Error,
        "missing_collection",
        sessions,
        "there is no such collection of web sessions: no application with this database has built its session store",
        MAKE_SESSIONS,
    )
}

fn no_such_collection(namespace: &Namespace) -> Finding {
    Finding::new(
        Severity::Error,
        "missing_collection",
        namespace,
        "there is no such collection: no application with this database has registered its type",
        "start the application, which registers its types, or run `doclock init`",
    )
}

fn missing(namespace: &Namespace, existing: &[Document], wanted: &[Plain]) -> Vec<Finding> {
    let is_missing = |index: &&Plain| !existing.iter().any(|it| is_on(it, index.field));
    let finding = |index: &Plain| {
        let Plain { field, .. } = index;
        let serves = match *field {
            "due" => "each search for idle sessions",
            "step" => "each search for sessions whose end is half done",
            "by" | "user" => "each revocation of sessions",
            _ => "each renewal and each logout",
        };
        Finding::new(
            Severity::Error,
            "missing_index",
            namespace,
            format!("the index on `{field}` is missing: {serves} reads the whole collection"),
            REGISTER,
        )
        .with_command(create(namespace, index))
    };
    wanted.iter().filter(is_missing).map(finding).collect()
}

fn create(namespace: &Namespace, index: &Plain) -> String {
    let (shell, field) = (in_shell(namespace), quoted(index.field));
    let options = if index.partial {
        format!(", {{partialFilterExpression: {{{field}: {{$exists: true}}}}}}")
    } else {
        String::new()
    };
    format!("{shell}.createIndex({{{field}: 1}}{options})")
}

/// Indexes of an earlier version, which the server does not use for a strict client of the Stable API.
fn sparse(namespace: &Namespace, existing: &[Document], wanted: &[Plain]) -> Vec<Finding> {
    let is_sparse = |index: &&Plain| {
        let mut on_field = existing.iter().filter(|it| is_on(it, index.field)).peekable();
        on_field.peek().is_some() && on_field.all(indexes::is_sparse)
    };
    let finding = |index: &Plain| {
        let field = quoted(index.field);
        let drop = format!("{}.dropIndex({{{field}: 1}})", in_shell(namespace));
        Finding::new(
            Severity::Info,
            "sparse_index",
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
    };
    wanted.iter().filter(is_sparse).map(finding).collect()
}

const REGISTER: &str =
    "restart the application, which creates it when it registers its types, or run `doclock init`";

/// The field may have an ordinary index, which the command then turns into a TTL index.
fn no_ttl_index(namespace: &Namespace, existing: &[Document], seconds: u64) -> Finding {
    let command = if existing.iter().any(|index| is_on(index, "ts")) {
        change_expiry(namespace, seconds)
    } else {
        format!("{}.createIndex({{ts: 1}}, {{expireAfterSeconds: {seconds}}})", in_shell(namespace))
    };
    Finding::new(
        Severity::Error,
        "missing_index",
        namespace,
        "the TTL index on `ts` is missing: once no application server is there to remove them, \
         orphaned locks stay forever",
        REGISTER,
    )
    .with_command(command)
}

fn wrong_ttl(
    locks: &Namespace,
    expires: f64,
    ttl: Option<Duration>,
    held: Option<Duration>,
) -> Option<Finding> {
    // While locks with a longer ttl are held, the index must not be shorter than that.
    let longest = ttl.max(held)?;
    let (wanted, full) = (whole_seconds(longest), with_margin(longest));
    let (severity, problem, advice) = if expires < wanted as f64 {
        let whose = if ttl < held { "a lock that is held has" } else { "the ttl should be" };
        let problem = format!(
            "the TTL index removes locks {expires} s after they were last renewed, but {whose} \
             {wanted} s: locks are lost while they are held"
        );
        let advice = "restart the application with the ttl that it should have, which raises it, or run \
                      `doclock init` with it";
        (Severity::Error, problem, advice)
    } else if expires < full as f64 {
        let problem = format!(
            "the TTL index removes locks {expires} s after they were last renewed, which leaves no margin over \
             the ttl of {wanted} s: when many sessions become idle at once, some may not be announced"
        );
        let advice = "restart the application with the privilege collMod, which raises it, or run `doclock init`";
        (Severity::Info, problem, advice)
    } else if ttl.is_some() && expires > full as f64 {
        let problem = format!(
            "the TTL index removes orphaned locks after {expires} s, and with the ttl {wanted} s it should be {full} s: \
             this is usual after the ttl was lowered, and matters only to programs that lock without this crate, \
             for which documents stay locked for longer"
        );
        let advice = "nothing; or, once no server and no lock with a longer ttl is left, lower it yourself: no \
                      server and no command does";
        (Severity::Info, problem, advice)
    } else {
        return None;
    };
    let finding = Finding::new(severity, "wrong_ttl", locks, problem, advice);
    Some(finding.with_command(change_expiry(locks, full.min(LONGEST_INDEX.as_secs()))))
}

fn with_margin(ttl: Duration) -> u64 {
    whole_seconds(Rules::new(ttl).expiry())
}

fn change_expiry(namespace: &Namespace, seconds: u64) -> String {
    format!(
        "{}.runCommand({{collMod: {}, index: {{keyPattern: {{ts: 1}}, expireAfterSeconds: {seconds}}}}})",
        database_in_shell(&namespace.db),
        quoted(&namespace.coll),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use mongodb::bson::doc;

    const TTL: Duration = Duration::from_secs(150);

    fn index(field: &str) -> Document {
        doc! { "key": { field: 1 } }
    }

    fn complete(seconds: f64) -> Vec<Document> {
        let mut ttl = index("ts");
        ttl.insert("expireAfterSeconds", seconds);
        vec![index("_id"), ttl, index("aid"), index("readers.aid"), index("due")]
    }

    fn locks() -> Namespace {
        Namespace::new("shop", "it's.lock")
    }

    fn found(seconds: f64, ttl: Option<u64>, held: Option<u64>) -> Option<(Severity, String)> {
        let [ttl, held] = [ttl, held].map(|it| it.map(Duration::from_secs));
        let mut findings = of_locks(&locks(), &complete(seconds), ttl, held);
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
            existing.retain(|index| !is_on(index, missing));
            let findings = of_locks(&locks(), &existing, None, None);
            let [finding] = &findings[..] else { panic!("{findings:?}") };
            assert_eq!((finding.code, finding.severity), ("missing_index", Severity::Error));
            assert!(finding.problem.contains(&format!("`{missing}`")), "{finding:?}");
            let command = format!(r#"db.getSiblingDB("shop").getCollection("it's.lock").{made}"#);
            assert_eq!(finding.command.as_ref(), Some(&command));
        }
        assert_eq!(of_locks(&locks(), &complete(210.0), Some(TTL), Some(TTL)), []);
    }

    #[test]
    fn a_sparse_index_of_an_earlier_version_is_told_of() {
        let mut existing = complete(150.0);
        existing.last_mut().unwrap().insert("sparse", true);
        let findings = of_locks(&locks(), &existing, None, None);
        let [finding] = &findings[..] else { panic!("{findings:?}") };
        assert_eq!((finding.code, finding.severity), ("sparse_index", Severity::Info));
        assert!(finding.command.as_ref().unwrap().contains(r#"dropIndex({"due": 1}); db."#));
    }

    #[test]
    fn an_ordinary_index_on_ts_is_no_ttl_index() {
        let mut existing = complete(0.0);
        existing[1].remove("expireAfterSeconds");
        let findings = of_locks(&locks(), &existing, None, None);
        assert!(findings[0].command.as_ref().unwrap().contains("collMod"), "{findings:?}");
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
