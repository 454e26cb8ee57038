//! The differences between the servers' clocks.
//!
//! The server that writes a lock dates it by its own clock. So only one difference matters: the step of
//! this clock when another server takes over.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use actix_doclock::store::Topology;
use futures_util::future::join_all;
use mongodb::{
    Database,
    bson::{Bson, Document, doc},
    error::{Error, Result},
    options::{SelectionCriteria, ServerAddress},
};

use crate::doctor::finding::{Finding, Severity};

/// A lock that ends this much earlier or later is not noticed.
const TOLERATED_MS: i64 = 1_000;
/// How many readings are taken of each clock. The fastest answer counts; the first one may have to open
/// the connection.
const ROUNDS: usize = 4;

/// One server's clock, relative to the clock of this machine.
#[derive(Debug, Clone)]
struct Reading {
    server: String,
    ahead_ms: i64,
    /// Half of the round trip: the server may have read its clock at any moment of it.
    give_or_take_ms: i64,
}

pub(super) async fn findings(
    database: &Database,
    hello: &Document,
    topology: Topology,
    ttl: Duration,
) -> Result<Vec<Finding>> {
    let mut servers = match topology {
        Topology::ReplicaSet => members(hello),
        _ => reachable(database).await?,
    };
    // The primary comes first: its clock is the one that counts now.
    let primary = hello.get_str("primary").ok().and_then(address);
    servers.sort_by_key(|server| Some(server) != primary.as_ref());
    let here = own_clock();
    let mut findings = Vec::new();
    let mut readings = Vec::new();
    let read = servers.iter().map(|server| read(database, server, &here));
    for (server, reading) in servers.iter().zip(join_all(read).await) {
        match reading {
            Ok(reading) => readings.push(reading),
            Err(_) => findings.push(unreachable(&server.to_string())),
        }
    }
    findings.extend(compare(&readings, ttl));
    Ok(findings)
}

/// The members that can become primary or be read from. The answer does not name hidden members.
fn members(hello: &Document) -> Vec<ServerAddress> {
    let named = |field| hello.get_array(field).into_iter().flatten();
    let hosts = named("hosts").chain(named("passives"));
    hosts.filter_map(Bson::as_str).filter_map(address).collect()
}

/// As the driver writes it: a member may have capital letters in its name.
fn address(name: &str) -> Option<ServerAddress> {
    ServerAddress::parse(name).ok()
}

/// All servers that the driver has found.
async fn reachable(database: &Database) -> Result<Vec<ServerAddress>> {
    let seen = Arc::new(Mutex::new(HashSet::new()));
    let found = Arc::clone(&seen);
    let any = SelectionCriteria::Predicate(Arc::new(move |server| {
        found.lock().unwrap_or_else(PoisonError::into_inner).insert(server.address().clone());
        true
    }));
    database.run_command(doc! { "ping": 1 }).selection_criteria(any).await?;
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(seen.iter().cloned().collect())
}

/// This machine's clock in milliseconds. It is read once, and a monotonic clock, which cannot be set, carries it on.
fn own_clock() -> impl Fn(Instant) -> i64 {
    let (clock, then) = (SystemTime::now(), Instant::now());
    move |at| {
        let clock = clock.duration_since(UNIX_EPOCH).unwrap_or_default();
        let millis = (clock + at.saturating_duration_since(then)).as_millis();
        i64::try_from(millis).unwrap_or(i64::MAX)
    }
}

async fn read(
    database: &Database,
    server: &ServerAddress,
    here: impl Fn(Instant) -> i64,
) -> Result<Reading> {
    let address = server.clone();
    let only = SelectionCriteria::Predicate(Arc::new(move |it| *it.address() == address));
    let mut readings = Vec::new();
    for _ in 0..ROUNDS {
        let asked = Instant::now();
        let greeting = database.run_command(doc! { "hello": 1 }).selection_criteria(only.clone());
        let greeting = greeting.await?;
        let half = asked.elapsed() / 2;
        let time = greeting.get_datetime("localTime").map_err(Error::custom)?.timestamp_millis();
        readings.push(Reading {
            server: server.to_string(),
            ahead_ms: time - here(asked + half),
            // Both clocks are read in whole milliseconds.
            give_or_take_ms: i64::try_from(half.as_millis()).unwrap_or(i64::MAX).saturating_add(2),
        });
    }
    let best = readings.into_iter().min_by_key(|reading| reading.give_or_take_ms);
    best.ok_or_else(|| Error::custom("no answer"))
}

fn unreachable(server: &str) -> Finding {
    Severity::Warning.finding(
        "unreachable_member",
        server,
        "this member of the replica set does not answer here: its clock was not checked, and if it \
         becomes primary no document can be locked from here",
        "start it, or make it reachable from this machine by that name; if the URI says \
         `directConnection=true`, name all members instead, with `replicaSet=…`",
    )
}

/// The first reading is of the clock that counts at the moment.
fn compare(readings: &[Reading], ttl: Duration) -> Vec<Finding> {
    let Some((first, others)) = readings.split_first() else { return Vec::new() };
    let mut findings = Vec::new();
    for other in others {
        let apart = other.ahead_ms - first.ahead_ms;
        let give_or_take = other.give_or_take_ms + first.give_or_take_ms;
        if apart.abs() - give_or_take < TOLERATED_MS {
            continue;
        }
        let is_grave = apart.unsigned_abs() >= ttl.as_millis() as u64 / 3;
        let severity = if is_grave { Severity::Error } else { Severity::Warning };
        let (direction, comes_of_it) = if apart > 0 {
            ("ahead of", "all locks are that much older, and those with less time left are lost")
        } else {
            ("behind", "the locks of sessions that have vanished stay for that much longer")
        };
        findings.push(severity.finding("skewed_clock",
            &other.server,
            format!(
                "its clock is {} {direction} that of {} (measured to within {}): once it takes over, \
                 {comes_of_it}",
                seconds(apart),
                first.server,
                seconds(give_or_take),
            ),
            "have the clocks of all servers set by NTP; on each of them `chronyc tracking` or \
             `timedatectl timesync-status` shows how far it is off",
        ));
    }
    if first.ahead_ms.abs() - first.give_or_take_ms >= TOLERATED_MS {
        let direction = if first.ahead_ms > 0 { "behind" } else { "ahead of" };
        findings.push(Severity::Info.finding("own_clock",
            "this machine",
            format!(
                "its clock is {} {direction} that of {}; locks do not depend on it, times in logs do",
                seconds(first.ahead_ms),
                first.server,
            ),
            "have it set by NTP",
        ));
    }
    findings
}

fn seconds(millis: i64) -> String {
    format!("{:.3} s", millis.unsigned_abs() as f64 / 1_000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(150);

    fn found(clocks: &[(i64, i64)]) -> Vec<(Severity, &'static str, String)> {
        let readings: Vec<_> = ["a:1", "b:1", "c:1"]
            .into_iter()
            .zip(clocks)
            .map(|(server, &(ahead_ms, give_or_take_ms))| Reading {
                server: server.to_owned(),
                ahead_ms,
                give_or_take_ms,
            })
            .collect();
        let findings = compare(&readings, TTL).into_iter();
        findings.map(|it| (it.severity, it.code, format!("{}: {}", it.about, it.problem))).collect()
    }

    #[test]
    fn a_clock_is_compared_with_the_one_that_counts_now() {
        use Severity::{Error, Info, Warning};
        assert_eq!(found(&[]), []);
        assert_eq!(found(&[(0, 1), (0, 1), (-999, 1)]), []);
        let [(Warning, "skewed_clock", ahead), (Error, "skewed_clock", behind)] =
            &found(&[(5, 1), (2_005, 1), (-300_000, 1)])[..]
        else {
            panic!("two clocks that are off");
        };
        assert!(ahead.starts_with("b:1: its clock is 2.000 s ahead of that of a:1"), "{ahead}");
        assert!(behind.starts_with("c:1: its clock is 300.005 s behind that of a:1"), "{behind}");
        // Only this machine is off, by the same amount from all servers.
        let [(Info, "own_clock", own)] = &found(&[(5_000, 1), (5_001, 1)])[..] else {
            panic!("no server is off");
        };
        assert!(own.contains("5.000 s behind that of a:1"), "{own}");
    }

    #[test]
    fn what_a_slow_answer_may_explain_is_no_difference() {
        assert_eq!(found(&[(0, 700), (1_800, 700)]), []);
        assert_eq!(found(&[(0, 300), (1_800, 300)]).len(), 1);
    }
}
