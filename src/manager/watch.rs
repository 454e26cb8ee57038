//! News about locks: for waiters, and for events.

pub(crate) mod events;
pub(crate) mod streams;
pub(super) mod wakeups;
