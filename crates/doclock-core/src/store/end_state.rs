//! The states of the end of a session.

/// The work that is left for the end of a session.
///
/// An end is permanent, or the session has become idle and may come back. Every store passes through the same states;
/// a store that removes locks and records their end in one step leaves out `Releasing` and `ReleasingAgain`.
///
/// | state | logout | a sweep finds an idle session | a sweep finds expired and live locks | the locks are removed | a listener was called |
/// |---|---|---|---|---|---|
/// | no end | `Releasing`, permanent | `Releasing`, idle | `Noted` | | |
/// | `Noted` | `Releasing`, permanent, with its names | `Releasing`, idle, with its names | `Noted`, for longer | | |
/// | `Releasing`, idle | `Releasing`, permanent, with its names | goes on | gets the names | `Ready` ¹ | |
/// | `Ready`, idle | `Releasing`, permanent, with its names | `Releasing`, the same end | gets the names ² | | `Told` |
/// | `Told`, idle | `Releasing`, permanent | `Releasing`, idle: a new end ³ | `Noted` | | |
/// | `Releasing`, permanent | goes on | goes on | gets the names | `Ready` | |
/// | `Ready`, permanent | stays | `Releasing`, the same end | gets the names | | `Told` |
/// | `Told`, permanent | stays | `ReleasingAgain` | stays | | |
/// | `ReleasingAgain`, permanent | goes on | goes on | stays | `Told` | |
///
/// 1. If the sweep finds no lock to name, there is no end: another worker was quicker, or the session has come back.
/// 2. In the embedded store the names wait for the next end.
/// 3. Unless the end has named all of these locks: another worker was quicker.
///
/// The state of an end that a worker has reserved changes only by that worker until the reservation is over; others may
/// add names. There is one exception: a logout replaces the end of an idle session at any time. Only a permanent end outlasts everything: it keeps its
/// time, its reason and its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndState {
    /// No end yet: some locks have expired while the session had others. For the time of a ttl the next end names them.
    Noted,
    /// The end is recorded, and its locks are being removed.
    Releasing,
    /// The locks are gone, and a listener is to be told.
    Ready,
    /// Nothing is left to do.
    Told,
    /// Locks that were acquired in spite of an end that was told are being removed. Nobody is told again.
    ReleasingAgain,
}
