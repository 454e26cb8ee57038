//! Jobs at work under guards, which the crate renews automatically.

use std::time::{Duration, Instant};

use actix_doclock::{LockError, LockGuard, LockKey, Released, Wait};
use tokio::time::sleep;

use super::Server;
use crate::history::{Event, name, now};

/// How often a holder checks whether it still believes in its lock.
const ASK: Duration = Duration::from_millis(20);

/// Waits for the lock, holds it for this time or until it is lost, and gives it back.
pub(crate) async fn hold(server: &Server, key: &LockKey, shared: bool, hold: Duration) {
    let history = &server.history;
    let op = history.next_op();
    history.write(op, Event::AcquireBegan { key: name(key) });
    let wait = Wait::for_at_most(Duration::from_secs(3));
    let guard = match shared {
        true => server.locks.acquire_shared(key, wait).await,
        false => server.locks.acquire(key, wait).await,
    };
    match guard {
        Ok(guard) => {
            history.write(op, Event::granted(guard.lock()));
            work_under(server, guard, hold).await;
        }
        Err(LockError::Held(_)) => history.write(op, Event::Held),
        Err(e) => history.write(op, Event::Unknown { why: e.to_string() }),
    }
}

async fn work_under(server: &Server, guard: LockGuard, hold: Duration) {
    let history = &server.history;
    let op = history.next_op();
    let token = guard.token().to_string();
    let lost = guard.lost();
    tokio::pin!(lost);
    let ends = Instant::now() + hold;
    while Instant::now() < ends {
        // Taken before the check, so that a pause in between does not count as belief.
        let at = now();
        tokio::select! {
            biased;
            () = &mut lost => {
                history.write(op, Event::Lost { token });
                return;
            }
            () = std::future::ready(()) => {
                history.write_at(at, op, Event::Believed { token: token.clone() });
            }
        }
        sleep(ASK).await;
    }
    history.write(op, Event::ReleaseBegan { token });
    history.write(
        op,
        match guard.release().await {
            Ok(Released::Released) => Event::Released,
            Ok(_) => Event::AlreadyGone,
            Err(e) => Event::Unknown { why: e.to_string() },
        },
    );
}
