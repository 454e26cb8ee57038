//! News about locks: for waiters, and for events.

pub(super) mod changes;
pub(crate) mod ends;
pub(crate) mod events;
pub(crate) mod streams;
