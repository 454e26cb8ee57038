//! Compares the notes of the servers.

use actix_doclock::store::ServerNote;

use crate::doctor::finding::{Finding, Severity};

pub(super) fn findings(database: &str, servers: &[ServerNote]) -> Vec<Finding> {
    let Some((first, others)) = servers.split_first() else { return Vec::new() };
    let names: Vec<_> = servers.iter().map(ToString::to_string).collect();
    let known = Severity::Info.finding(
        "servers",
        database,
        format!("running at the moment: {}", names.join("; ")),
        "nothing; servers of versions that do not note themselves are missing here",
    );
    let differs = others.iter().filter_map(|other| Some((other, first.difference(other)?)));
    let differs = differs.map(|(other, difference)| {
        if first.is_of_another_application(other) {
            return Severity::Warning.finding(
                "two_applications",
                database,
                format!("{other} and {first} belong to two applications: {difference}"),
                "give each application a name by `MongoStore::named`, and this command the same name by \
                 `--application`, or give each a database of its own",
            );
        }
        Severity::Warning.finding("servers_disagree",
            database,
            format!("{other} differs from {first}: {difference}"),
            "complete the rolling restart, or give both servers the same version, types, ttl and session key",
        )
    });
    [known].into_iter().chain(differs).collect()
}
