//! Tests of faults: application servers as processes, real database servers, a recorded history, and a
//! checker of that history. See docs/evidence/faults.md.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "../rig/mod.rs"]
mod rig;

mod application;
mod check;
mod clocks;
mod fleet;
mod history;
mod killed;
mod late;
mod members;
mod nemesis;
mod partition;
mod paused;
mod round;
mod soak;
mod standstill;
mod transactions;
mod ttl_monitor;
mod twins;
mod ways;
