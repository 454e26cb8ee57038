//! The protocol of the locks, as a model small enough to explore every possible state.
//!
//! With all rules nothing breaks, and from every state there is a way back to a free document. With any
//! single rule taken out, the search must find a story in which something breaks; otherwise the model
//! would be blind to that rule. `docs/evidence/model.md` tells the stories. To print them: `cargo test --test
//! model -- --nocapture --test-threads 1`.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

mod client;
mod database;
mod ends;
mod logout;
mod protocol;
mod reaper;
mod rules;
mod save;
mod search;
mod stored;
mod words;
mod world;

use std::time::Instant;

use protocol::{Broken, Protocol};
use rules::Rules;
use search::Explored;
use world::{Who, World};

/// No session does anything.
const NOBODY: Protocol = Protocol {
    rules: Rules::ALL,
    asks: [0, 0],
    logout: false,
    clock: true,
    failovers: 0,
    repetitions: 0,
    vanish: false,
    renews: true,
    reenters: false,
    versions: 2,
    transactions: false,
    forms: false,
    breaks: 0,
    stranger_asks: 0,
    steps_back: 0,
    reaper: false,
    only: None,
};
/// Alice asks once.
const ALICE: Protocol = Protocol { asks: [1, 0], ..NOBODY };
/// Alice asks twice, so that there is an earlier acquisition of the same session.
const ALICE_TWICE: Protocol = Protocol { asks: [2, 0], ..NOBODY };
const ALICE_AND_BOB: Protocol = Protocol { asks: [1, 1], ..NOBODY };
const ALICE_TWICE_AND_BOB: Protocol = Protocol { asks: [2, 1], ..NOBODY };

/// A save is a transaction. Three versions: Alice saves twice, and then Bob does.
const SAVES: Protocol = Protocol {
    renews: false,
    versions: 3,
    transactions: true,
    breaks: 1,
    steps_back: 1,
    ..ALICE_AND_BOB
};
/// Alice's page shows a form of an earlier lock.
const FORMS: Protocol = Protocol { renews: false, forms: true, ..ALICE_TWICE_AND_BOB };
/// Alice opens her document again and again. An administrator may break her lock.
const REENTRY: Protocol = Protocol { renews: false, reenters: true, breaks: 1, ..ALICE_AND_BOB };
/// A reaper announces the sessions whose locks expired. Nobody saves or renews.
const REAPER: Protocol = Protocol { renews: false, versions: 0, reaper: true, ..ALICE_AND_BOB };
/// The same, but each session vanishes when it has got the lock, and then Alice logs out.
const REAPER_AND_LOGOUT: Protocol = Protocol { logout: true, vanish: true, ..REAPER };

fn explore(what: &str, model: &Protocol) -> Explored<Protocol> {
    let began = Instant::now();
    let explored = Explored::new(model);
    let (states, steps, depth) = (explored.states.len(), explored.steps, explored.depth);
    let story = explored.story.as_ref().map_or(String::new(), |story| format!("\n{story}"));
    println!(
        "{what}: {states} states, {steps} steps, depth {depth}, {:.1?}{story}",
        began.elapsed()
    );
    explored
}

fn holds(what: &str, model: &Protocol) {
    holds_up_to(what, model, World::is_free);
}

/// Nothing breaks, and from every state there is a way to a state for which `is_quiet` holds.
fn holds_up_to(what: &str, model: &Protocol, is_quiet: fn(&World) -> bool) {
    let explored = explore(what, model);
    if let Some(story) = explored.story {
        panic!("the protocol breaks:\n{story}");
    }
    if let Some(at) = explored.dead_end(is_quiet) {
        for step in explored.path_to(at) {
            println!("{step}");
        }
        panic!("no way back to a free document from {:?}", explored.states[at]);
    }
    assert!(explored.states.len() > 10_000, "the model does next to nothing");
}

#[test]
fn two_sessions_whose_requests_are_late_and_repeated() {
    holds("contention", &Protocol { repetitions: 1, ..ALICE_TWICE_AND_BOB });
}

#[test]
fn a_session_that_ends_while_another_waits_for_its_lock() {
    holds("logout while another session waits", &Protocol { logout: true, ..ALICE_AND_BOB });
}

#[test]
fn a_session_that_ends_while_it_acquires_more_than_once() {
    holds("logout alone", &Protocol { logout: true, repetitions: 1, ..ALICE_TWICE });
}

#[test]
fn a_form_that_is_older_than_its_lock() {
    holds("a form of an earlier lock", &FORMS);
}

#[test]
fn two_sessions_and_a_failover() {
    holds("failover", &Protocol { failovers: 1, ..ALICE_AND_BOB });
}

#[test]
fn a_session_that_ends_at_a_failover() {
    holds("logout and failover", &Protocol { logout: true, failovers: 1, ..ALICE_TWICE });
}

#[test]
fn a_save_during_which_the_lock_is_broken_and_the_clock_steps_back() {
    holds("save, break and clock", &SAVES);
}

/// Also beside saves of transactions, and a break.
#[test]
fn a_stranger_who_asks_while_the_lock_is_saved_under_and_broken() {
    holds("save, break and ask", &Protocol { stranger_asks: 1, steps_back: 0, ..SAVES });
}

#[test]
fn a_stranger_who_asks_while_the_lock_is_taken_over() {
    let model = Protocol { stranger_asks: 1, ..REAPER };
    holds_up_to("takeover and ask", &model, World::is_free_and_all_announced);
}

#[test]
fn a_takeover_during_the_sweep_of_a_reaper_that_dies() {
    holds_up_to("takeover and reaper", &REAPER, World::is_free_and_all_announced);
}

#[test]
fn a_logout_of_a_session_whose_lock_expires_at_the_same_moment() {
    holds_up_to("logout and reaper", &REAPER_AND_LOGOUT, World::is_free_and_all_announced);
}

#[test]
fn a_reentry_by_a_read_during_a_failover() {
    holds("re-entry by a read", &Protocol { failovers: 1, ..REENTRY });
}

/// It confirms a lock that is gone; see the rule below. But nothing is saved under that lock. One version: with
/// two, Alice could be shown the document before her own last save, and overwrite her own work.
#[test]
fn a_lock_that_a_deposed_primary_confirms_saves_nothing() {
    let rules = Rules { deposed_answers_no_reads: false, ..Rules::ALL };
    let only = Some(Broken::AStaleSaveOverwrote);
    let model = Protocol { rules, only, failovers: 1, versions: 1, ..REENTRY };
    let explored = explore("saves after a read by a deposed primary", &model);
    assert!(explored.story.is_none(), "{}", explored.story.unwrap());
    assert!(explored.states.len() > 10_000, "the model does next to nothing");
}

#[test]
fn a_reaper_that_ignores_traces_forgets_a_session() {
    let rules = Rules { reaper_reads_traces: false, ..Rules::ALL };
    let explored = explore("traces unread", &Protocol { rules, ..REAPER });
    let at = explored.dead_end(World::is_free_and_all_announced);
    let forgotten = explored.states[at.expect("the model does not notice that a rule is gone")];
    assert!([Who::Alice, Who::Bob].iter().any(|who| forgotten.primary.knows_of(*who)));
}

#[test]
#[ignore = "many minutes and gigabytes of memory, also in a release build"]
fn everything_at_once() {
    let all = Protocol { logout: true, failovers: 1, repetitions: 1, ..ALICE_TWICE_AND_BOB };
    holds("everything", &all);
}

/// The expected break of each model with this rule taken out, and the number of steps to it.
macro_rules! without {
    ($($rule:ident: $test:ident, $in:expr => $broken:ident in $steps:expr;)*) => {
        $(
            #[test]
            fn $test() {
                let rules = Rules { $rule: false, ..Rules::ALL };
                let model = Protocol { rules, only: Some(Broken::$broken), ..$in };
                let explored = explore(stringify!($test), &model);
                let story = explored.story.expect("the model does not notice that a rule is gone");
                assert_eq!((story.broken, story.steps.len()), (Broken::$broken, $steps));
            }
        )*
    };
}

without! {
    release_by_token: a_release_that_names_no_acquisition,
        ALICE_TWICE => AReleaseRemovedAnotherLock in 8;
    attempts_are_one_claim: attempts_that_do_not_know_each_other,
        Protocol { repetitions: 1, ..ALICE } => ALockWasLeftBehind in 8;
    retract_unless_told: a_grant_taken_back_that_another_request_was_told_of,
        ALICE_TWICE_AND_BOB => TwoBelieveAtOnce in 15;
    look_for_tombstone: an_acquire_that_does_not_look_for_the_tombstone,
        Protocol { logout: true, ..ALICE } => AnEndedSessionHasALock in 8;
    tombstone_first: an_end_that_removes_before_it_is_written_down,
        Protocol { logout: true, ..ALICE } => AnEndedSessionHasALock in 10;
    count_from_the_send: a_lease_counted_from_the_reply,
        ALICE_AND_BOB => TwoBelieveAtOnce in 10;
    majority: replies_before_a_majority_has_the_write,
        Protocol { failovers: 1, ..ALICE_AND_BOB } => TwoBelieveAtOnce in 9;
    majority: saves_acknowledged_before_a_majority_has_them,
        Protocol { failovers: 1, ..ALICE_AND_BOB } => AnAcknowledgedSaveIsGone in 7;
    guarded_save: a_save_that_does_not_look_at_the_lock,
        ALICE_AND_BOB => AStaleSaveOverwrote in 14;
    save_compares_versions: a_save_that_does_not_look_at_the_version_of_its_form,
        FORMS => AStaleSaveOverwrote in 18;
    token_for_each_attempt: an_attempt_that_comes_after_a_later_one_was_answered,
        Protocol { clock: false, logout: true, repetitions: 1, ..ALICE_AND_BOB } => AStaleSaveOverwrote in 21;
    save_changes_record: a_save_that_changes_nothing_in_the_lock_record,
        Protocol { clock: false, ..SAVES } => AStaleSaveOverwrote in 21;
    former_to_reaper: an_expired_lock_that_is_taken_over_without_a_trace,
        REAPER => AnIdleSessionIsForgotten in 6;
    releases_are_not_overtaken: a_release_that_is_overtaken_by_the_next_acquire,
        ALICE_TWICE_AND_BOB => TwoBelieveAtOnce in 17;
    break_spares_expired: a_break_of_a_lock_that_has_expired,
        Protocol { breaks: 1, ..REAPER } => AnIdleSessionIsForgotten in 6;
    ask_compares_record: an_ask_that_writes_over_what_has_changed_since_it_was_read,
        Protocol { stranger_asks: 1, ..ALICE_TWICE_AND_BOB } => TwoBelieveAtOnce in 15;
    trace_names_lease: a_trace_of_a_lock_that_a_save_renews_at_the_same_moment,
        Protocol { breaks: 0, steps_back: 0, versions: 1, reaper: true, ..SAVES } => AnIdleSessionIsForgotten in 17;
    expired_stays_expired: an_expired_lock_that_is_live_again_because_the_clock_stepped_back,
        Protocol { steps_back: 1, ..REAPER } => AnIdleSessionIsForgotten in 14;
    ends_keep_leases: an_end_that_does_not_know_what_an_earlier_one_has_told,
        REAPER => ALockIsToldTwice in 15;
    logout_names_expired: a_logout_that_names_only_live_locks,
        REAPER_AND_LOGOUT => ALostLockIsNeverTold in 10;
    logout_names_taken_over: a_logout_that_does_not_look_for_traces,
        REAPER_AND_LOGOUT => ALostLockIsNeverTold in 16;
    logout_takes_names_over: a_logout_that_forgets_what_a_sweep_has_named,
        REAPER_AND_LOGOUT => ALostLockIsNeverTold in 18;
    sweeps_are_shorter_than_leases: a_lock_that_expires_during_the_sweep_that_removes_it,
        Protocol { asks: [2, 0], ..REAPER } => AnIdleSessionIsForgotten in 13;
    deposed_answers_no_reads: a_deposed_primary_that_still_answers_reads,
        Protocol { failovers: 1, ..REENTRY } => AGoneLockWasConfirmed in 11;
}
