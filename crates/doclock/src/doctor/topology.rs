//! Checks the kind of deployment, and the write concern of the application's own writes.

use actix_doclock::store::Topology;
use mongodb::{
    bson::Document,
    options::{Acknowledgment, WriteConcern},
};

use crate::doctor::finding::{Finding, Severity};

/// The wire version of MongoDB 4.4.
const OLDEST_WIRE_VERSION: i32 = 9;

pub(super) fn findings(hello: &Document, topology: Topology) -> Vec<Finding> {
    let mut findings = Vec::new();
    let server = hello.get_str("me").unwrap_or("the server");
    if topology == Topology::Standalone {
        findings.push(
            Severity::Warning.finding("standalone",
                server,
                "it is a standalone server: without transactions, a guarded save checks the lock \
                 just before it writes the document, and does not notice a lock that is lost between \
                 the two; without change streams, waiters have to poll, and pages hear of the changes of \
                 other servers late, and not of short locks",
                "make it a replica set, of which one member is enough: start mongod with `--replSet \
                 rs0`, initiate the set once, and write `replicaSet=rs0` into the URI",
            )
            .with_command("rs.initiate()"),
        );
    }
    if topology == Topology::ReplicaSet && !hello.get_bool("isWritablePrimary").unwrap_or_default()
    {
        findings.push(Severity::Error.finding("not_primary",
            server,
            "the URI leads to a member of the replica set that is not the primary: no document can be \
             locked there",
            "name all members in the URI, with `replicaSet=…` and without `directConnection=true`",
        ));
    }
    if hello.get_i32("maxWireVersion").is_ok_and(|version| version < OLDEST_WIRE_VERSION) {
        findings.push(Severity::Error.finding(
            "too_old",
            server,
            "this server is older than MongoDB 4.4",
            "upgrade it: locks are taken with commands that it does not have",
        ));
    }
    findings
}

/// `concern` is the write concern of the URI.
pub(super) fn write_concern(topology: Topology, concern: Option<&WriteConcern>) -> Option<Finding> {
    let Acknowledgment::Nodes(nodes @ 0..=1) = concern?.w.as_ref()? else { return None };
    if topology == Topology::Standalone {
        // There is no other server that could acknowledge a write.
        return None;
    }
    Some(Severity::Warning.finding(
        "weak_write_concern",
        "the URI",
        format!(
            "it says `w={nodes}`: locks and guarded saves are written with `w=majority` nevertheless, \
             but a failover can undo the application's own writes by this URI, even while the \
             application holds the lock"
        ),
        "write `w=majority` into the URI, or leave `w` out",
    ))
}

/// The URI of this command is usually that of the application.
pub(super) fn connections(problem: String) -> Finding {
    Severity::Warning.finding(
        "few_connections",
        "the URI",
        problem,
        "watch fewer collections at once, or allow more connections",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use mongodb::bson::doc;

    fn codes(topology: Topology, hello: Document) -> Vec<&'static str> {
        findings(&hello, topology).into_iter().map(|finding| finding.code).collect()
    }

    #[test]
    fn a_server_is_judged_by_its_greeting() {
        let fit = doc! { "isWritablePrimary": true, "maxWireVersion": 17 };
        let with = |more: Document| {
            let mut hello = fit.clone();
            hello.extend(more);
            hello
        };
        assert_eq!(codes(Topology::Standalone, fit.clone()), ["standalone"]);
        assert_eq!(codes(Topology::ReplicaSet, fit.clone()), [""; 0]);
        assert_eq!(codes(Topology::Sharded, fit.clone()), [""; 0]);
        let secondary = with(doc! { "isWritablePrimary": false });
        assert_eq!(codes(Topology::ReplicaSet, secondary), ["not_primary"]);
        assert_eq!(codes(Topology::ReplicaSet, with(doc! { "maxWireVersion": 8 })), ["too_old"]);
    }

    #[test]
    fn a_write_concern_is_weak_if_one_server_is_enough() {
        let weak = |w: Option<Acknowledgment>| {
            let mut concern = WriteConcern::builder().build();
            concern.w = w;
            write_concern(Topology::ReplicaSet, Some(&concern)).is_some()
        };
        assert!(weak(Some(Acknowledgment::Nodes(0))));
        assert!(weak(Some(Acknowledgment::Nodes(1))));
        assert!(!weak(Some(Acknowledgment::Majority)));
        assert!(!weak(Some(Acknowledgment::Nodes(2))));
        assert!(!weak(None));
        let one = WriteConcern::nodes(1);
        assert_eq!(write_concern(Topology::Standalone, Some(&one)), None);
    }
}
