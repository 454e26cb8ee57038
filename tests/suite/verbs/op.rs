//! The operations, in any order. Numbers stand for sessions, documents and earlier claims, so that
//! every sequence has a meaning, even a shrunk one.

use std::time::Duration;

use proptest::{collection::vec, prelude::*};

pub(super) const TTL: u64 = 600;
pub(super) const SESSIONS: usize = 3;
pub(super) const DOCUMENTS: usize = 2;

/// How the collection was registered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub(super) fair: bool,
    pub(super) fenced: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Ask {
    pub(super) who: usize,
    pub(super) document: usize,
    pub(super) shared: bool,
    /// An exclusive claim names this earlier claim as the shared lock that it upgrades.
    pub(super) upgrades: Option<usize>,
    /// Waits in the queue if the document is locked.
    pub(super) waits: bool,
    pub(super) tab: Option<usize>,
    pub(super) page: Option<usize>,
    pub(super) ttl: u64,
    pub(super) max_hold: Option<u64>,
}

/// A `usize` that is neither a session nor a document counts back through the claims: 0 is the latest.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Acquire(Ask),
    /// The same claim once more, as after a lost reply, or long after; or its next attempt.
    AcquireAgain(usize, bool),
    Renew(Vec<usize>),
    KeepPlace(usize),
    Leave(usize),
    /// The flag says whether the mode is known.
    Release(usize, bool),
    Retract(usize),
    RunOutIn(usize, Option<usize>, u64),
    /// To this session. If the session already holds the lock, it keeps it.
    HandOver(usize, usize, bool),
    ReleaseSession(usize),
    End(usize, bool),
    Sweep,
    Announce,
    Break(usize),
    /// Somebody else asks the holder of this document for it, which changes nothing but that.
    AskFor(usize),
    Save(usize),
    /// Makes the locks and the waiters of this document older.
    Age(usize, u64),
}

/// All times are hundreds of seconds, and no case takes that long, so the real time that passes in the
/// meantime does not matter.
fn hundreds(of: std::ops::RangeInclusive<u64>) -> impl Strategy<Value = u64> {
    of.prop_map(|n| n * 100)
}

/// Never the same moment as the end of a lease; otherwise milliseconds would decide which comes first.
fn graces() -> impl Strategy<Value = u64> {
    hundreds(0..=2).prop_map(|n| n + 50)
}

fn ask() -> impl Strategy<Value = Ask> {
    let who = (0..SESSIONS, 0..DOCUMENTS, any::<bool>(), any::<bool>());
    let named = || prop_oneof![2 => Just(None), 1 => (0..2_usize).prop_map(Some)];
    let times =
        (hundreds(2..=6), prop_oneof![3 => Just(None), 1 => hundreds(2..=9).prop_map(Some)]);
    let upgrades = prop_oneof![3 => Just(None), 1 => (0..4_usize).prop_map(Some)];
    (who, named(), named(), times, upgrades).prop_map(
        |((who, document, shared, waits), tab, page, (ttl, max_hold), upgrades)| Ask {
            who,
            document,
            shared,
            upgrades: upgrades.filter(|_| !shared),
            waits,
            tab,
            page,
            ttl,
            max_hold,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let back = || 0..4_usize;
    prop_oneof![
        8 => ask().prop_map(Op::Acquire),
        4 => (back(), any::<bool>()).prop_map(|(nth, next)| Op::AcquireAgain(nth, next)),
        2 => vec(0..SESSIONS, 1..3).prop_map(Op::Renew),
        1 => back().prop_map(Op::KeepPlace),
        1 => back().prop_map(Op::Leave),
        3 => (back(), any::<bool>()).prop_map(|(nth, known)| Op::Release(nth, known)),
        2 => back().prop_map(Op::Retract),
        2 => (back(), proptest::option::of(0..2_usize), graces())
            .prop_map(|(nth, page, grace)| Op::RunOutIn(nth, page, grace)),
        2 => (back(), 0..SESSIONS, any::<bool>()).prop_map(|(nth, to, shared)| Op::HandOver(nth, to, shared)),
        1 => (0..SESSIONS).prop_map(Op::ReleaseSession),
        1 => (0..SESSIONS, any::<bool>()).prop_map(|(who, revoked)| Op::End(who, revoked)),
        2 => Just(Op::Sweep),
        1 => Just(Op::Announce),
        1 => (0..DOCUMENTS).prop_map(Op::Break),
        3 => (0..DOCUMENTS).prop_map(Op::AskFor),
        2 => back().prop_map(Op::Save),
        4 => (0..DOCUMENTS, hundreds(1..=6)).prop_map(|(document, by)| Op::Age(document, by)),
    ]
}

pub(super) fn sequences(longest: usize) -> impl Strategy<Value = (Kind, Vec<Op>)> {
    let kind = (any::<bool>(), any::<bool>()).prop_map(|(fair, fenced)| Kind { fair, fenced });
    (kind, vec(op(), 1..longest))
}

pub(super) fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}
