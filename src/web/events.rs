//! Server-sent events: tells pages what happens to locks.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use actix_web::{
    HttpResponse,
    http::{StatusCode, header},
    web::{Bytes, Query},
};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    clock,
    event::LockEvent,
    lock::{Aid, Lock, Mode, TabId},
    manager::watch::{events::LockEvents, streams::Admitted},
    web::{
        Problem, SessionLocks,
        access::Visible,
        format::{millis, rfc3339},
    },
};

/// Proxies close idle connections, most of them after a minute, some after half a minute.
const BEAT: Duration = Duration::from_secs(15);
/// How long a stream lasts. Browsers open the next stream themselves. A client that is no longer allowed
/// to do so notices it then.
const LIFE: Duration = Duration::from_secs(15 * 60);
/// When a page may try again after its stream was refused.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
pub(super) struct Asked {
    /// An `EventSource` cannot set headers.
    tab: Option<String>,
    /// The documents to report, separated by commas; otherwise all.
    keys: Option<String>,
}

/// The receiver of a stream.
struct Listener {
    events: LockEvents,
    aid: Option<Aid>,
    tab: Option<TabId>,
    keys: Option<HashSet<String>>,
    visible: Visible,
    /// An administrator.
    sees_all: bool,
    ends: bool,
    until: Instant,
    /// For the first message.
    manager: crate::LockManager,
    _admitted: Admitted,
}

pub(super) async fn stream(
    locks: SessionLocks,
    asked: Query<Asked>,
) -> Result<HttpResponse, Problem> {
    let permissions = locks.locks.permissions();
    permissions.check_any()?;
    let (manager, address, person) =
        (locks.manager().clone(), locks.locks.address(), locks.locks.counts_as());
    let admitted = manager.event_streams().admit(address, person, locks.locks.streams());
    let admitted = admitted.ok_or_else(|| {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_streams")
            .detail("you or this server have too many open event streams; poll instead")
            .retry_after(TRY_AGAIN_AFTER)
    })?;
    let Asked { tab, keys } = asked.into_inner();
    let tab = tab.and_then(|tab| tab.parse().ok());
    let keys: Option<HashSet<_>> =
        keys.map(|keys| keys.split(',').map(ToOwned::to_owned).collect());
    let events = manager.events();
    let listener = Listener {
        events,
        aid: locks.locks.aid(),
        tab,
        keys,
        sees_all: permissions.sees_all,
        visible: Visible::new(permissions),
        ends: false,
        until: clock::now() + LIFE,
        manager,
        _admitted: admitted,
    };
    let messages = stream::unfold(listener, |mut listener| async {
        let message = listener.next().await?;
        Some((Ok::<_, actix_web::Error>(Bytes::from(message)), listener))
    });
    Ok(HttpResponse::Ok()
        .content_type("text/event-stream")
        .insert_header((header::CACHE_CONTROL, "no-store"))
        // Neither the compression of this server nor a proxy should wait for more data.
        .insert_header((header::CONTENT_ENCODING, "identity"))
        .insert_header(("x-accel-buffering", "no"))
        .streaming(messages))
}

impl Listener {
    /// `None` when the server is being stopped, the session has ended, the access policy does not answer, or
    /// the stream has lasted for its full time.
    async fn next(&mut self) -> Option<String> {
        loop {
            if self.ends || clock::now() >= self.until {
                return None;
            }
            let event = match timeout(BEAT, self.events.next()).await {
                Ok(event) => event?,
                Err(_) => return Some(": beat\n\n".to_owned()),
            };
            if let LockEvent::SessionEnded(lock) = &*event {
                self.ends = self.aid.as_ref() == Some(&lock.aid);
            }
            if self.concerns(&event).await? {
                let data = self.data(&event);
                return Some(format!("event: {}\ndata: {data}\n\n", event.name()));
            }
        }
    }

    /// Whether this receiver has asked for the event, and may see it.
    async fn concerns(&mut self, event: &LockEvent) -> Option<bool> {
        let Some(lock) = event.lock() else { return Some(true) };
        let is_asked_for =
            self.keys.as_ref().is_none_or(|keys| keys.contains(&lock.key.to_string()));
        if is_asked_for { self.visible.has(&lock.key).await } else { Some(false) }
    }

    /// The data of the event for this receiver.
    fn data(&self, event: &Arc<LockEvent>) -> Value {
        let Some(lock) = event.lock() else {
            return json!({ "told": self.manager.is_told_of_events() });
        };
        let mut data = json!({
            "key": lock.key.to_string(),
            "collection": lock.key.collection(),
            "id": lock.key.id().to_string(),
            "mode": lock.mode,
            "holder": lock.holder,
            "since": rfc3339(lock.since),
        });
        if let LockEvent::Acquired(_) = **event {
            data["state"] = self.whose(lock).into();
            data["expires_in_ms"] = millis(lock.expires_in()).into();
        } else {
            data["state"] = "free".into();
            data["was"] = self.whose(lock).into();
        }
        if let LockEvent::Broken(_, taken) = &**event {
            data["by"] = taken.by.as_str().into();
            if self.sees_all || self.aid.as_ref() == Some(&lock.aid) {
                data["reason"] = taken.reason.as_str().into();
            }
        }
        data
    }

    fn whose(&self, lock: &Lock) -> &'static str {
        let is_exclusive = lock.mode == Mode::Exclusive;
        match (self.aid.as_ref() == Some(&lock.aid), self.tab.zip(lock.tab)) {
            (false, _) => "held",
            (true, Some((this, of_lock))) if is_exclusive && this != of_lock => "mine_elsewhere",
            (true, _) => "mine",
        }
    }
}
