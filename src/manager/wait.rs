//! Waiting for a lock that another session or job holds.
//!
//! The [machine](machine) keeps the queues, without I/O; the [driver](driver) executes its steps. The
//! [search](machine::deadlock) finds waiters that would wait for each other, and `fair` in both keeps one order over all
//! servers.

mod driver;
mod machine;

pub(super) use driver::{ForWaiters, Heir, InTurn, Queues, Together, is_outage};
