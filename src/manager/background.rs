//! The background tasks: the reaper, the listener, the renewal of sessions, and the supervisor of all tasks.

pub(super) mod listener;
pub(super) mod reaper;
pub(super) mod reaper_health;
pub(super) mod supervisor;
