//! Hearing of what happens to locks: for waiters, and for events.

pub(crate) mod events;
pub(crate) mod streams;
pub(super) mod wakeups;
