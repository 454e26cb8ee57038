//! A guarded save as a transaction: it touches the lock record, writes the document, and commits.

use crate::{protocol::Protocol, world::*};

impl Protocol {
    /// The first half. No other session sees any of it before the commit, and if the commit is lost,
    /// nothing was written.
    pub(crate) fn touch(&self, world: &mut World, token: Token, seen: u8) -> Answer {
        let Some(lock) = world.primary.live().filter(|it| it.token == token) else {
            return Answer::Lost;
        };
        // Without the rule it sets `ts` to the later of `ts` and now, and sets `again`.
        let ts_is_ahead = lock.left > LEASE;
        let changed = self.rules.save_changes_record || !ts_is_ahead || !lock.again;
        // There is room, because the save itself has just arrived.
        let _ = world.send(Verb::Commit(token, seen, changed));
        Answer::Touched(changed)
    }
}

/// A save waits while another transaction has written the document: the server refuses it, and it is
/// tried again. A renewal waits while a transaction has written the lock record.
pub(crate) fn has_to_wait(world: &World, verb: Verb) -> bool {
    let saves = matches!(verb, Verb::Save(..)) && world.open_transactions().next().is_some();
    saves || renews_while_written(world, verb)
}

/// Whether this step has changed a lock record that an open transaction has changed too. The server
/// makes such a write wait.
pub(crate) fn conflicts(before: &World, after: &World) -> bool {
    let is_written = after.open_transactions().any(|(_, changed)| changed);
    is_written && before.primary.lock != after.primary.lock
}

/// The same for a write that renews a lease that has just begun: within a tick no two moments are the
/// same. Only after the clock has stepped back may such a write change nothing.
fn renews_while_written(before: &World, verb: Verb) -> bool {
    let is_written = before.open_transactions().any(|(_, changed)| changed);
    let lock = before.primary.live().filter(|lock| lock.left <= LEASE);
    is_written
        && match verb {
            Verb::Acquire(token) | Verb::TakeOver(token, _) | Verb::Renew(token) => {
                lock.is_some_and(|lock| lock.token.who == token.who)
            }
            _ => false,
        }
}

/// The second half, that many ticks after the first.
pub(crate) fn commit(
    database: &mut Database,
    token: Token,
    changed: bool,
    age: u8,
    counts: bool,
) -> Answer {
    if changed && let Some(lock) = database.lock.as_mut().filter(|it| it.token == token) {
        lock.renew_from(LEASE - age as i8, counts);
        lock.again = true;
    }
    database.version += 1;
    Answer::Saved(database.version)
}
