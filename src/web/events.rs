//! Server-sent events: tells pages what happens to locks.

use std::{
    collections::HashSet,
    fmt::Write,
    sync::Arc,
    time::{Duration, Instant},
};

use actix_web::{
    HttpResponse,
    http::{StatusCode, header},
    web::{Bytes, Query},
};
use futures_util::{FutureExt, stream};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    clock,
    event::LockEvent,
    key::LockKey,
    lock::{Aid, TabId},
    manager::watch::{
        ends::{EndOf, came},
        events::LockEvents,
        streams::Admitted,
    },
    web::{
        Problem,
        access::Permissions,
        format::{AskBody, KeyBody, millis, rfc3339, whose},
        request::Locks,
    },
};

/// After this time without an event there is a beat. Proxies close idle connections, most of them after a minute, some
/// after half a minute; and a page takes a stream for dead after 25 s. An event, because a page does not hear comments.
const BEAT: Duration = Duration::from_secs(10);
const BEAT_MESSAGE: &str = "event: beat\ndata: {}\n\n";
/// How long a stream lasts. Browsers open the next stream themselves. A client that may no longer open
/// a stream learns it then.
const LIFE: Duration = Duration::from_secs(15 * 60);
/// How many events one message tells at most.
const AT_ONCE: usize = 256;
/// For how long after the end of its session a stream still tells what has become of the session's locks.
const FAREWELL: Duration = Duration::from_millis(500);
/// How long a stream lasts if its session has no aid. Nothing would tell it that its person has gone, or that the session
/// holds or asks now.
const LIFE_WITHOUT_SESSION: Duration = Duration::from_secs(60);
/// When a page may try again after its stream was refused.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
pub(super) struct StreamQuery {
    /// An `EventSource` cannot set headers.
    tab: Option<String>,
    /// The documents to report, separated by commas; otherwise all.
    keys: Option<String>,
}

#[derive(Serialize)]
struct AskEvent {
    #[serde(flatten)]
    key: KeyBody,
    whose: &'static str,
    #[serde(flatten)]
    ask: AskBody,
}

/// The receiver of a stream.
struct Listener {
    events: LockEvents,
    aid: Option<Aid>,
    tab: Option<TabId>,
    keys: Option<HashSet<LockKey>>,
    permissions: Permissions,
    end: Option<EndOf>,
    has_ended: bool,
    ends_at: Instant,
    _admitted: Admitted,
}

pub(super) async fn stream(
    Locks(locks): Locks,
    query: Result<Query<StreamQuery>, actix_web::Error>,
) -> Result<HttpResponse, Problem> {
    let permissions = locks.permissions();
    permissions.check_any()?;
    let malformed = |e| Problem::new(StatusCode::BAD_REQUEST, "bad_request").detail(e);
    let StreamQuery { tab, keys } = query.map_err(malformed)?.into_inner();
    let core = &locks.manager.core;
    let admitted = core.event_streams.admit(locks.address, locks.counts_as());
    let admitted = admitted.ok_or_else(|| {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_streams")
            .detail("you or this server have too many open event streams; poll instead")
            .retry_after(TRY_AGAIN_AFTER)
    })?;
    core.collections.all_collections(locks.begin()).await;
    let tab = tab.and_then(|tab| tab.parse().ok());
    let keys: Option<HashSet<_>> =
        keys.map(|keys| keys.split(',').filter_map(|name| locks.key_named(name)).collect());
    let has_session = locks.aid().is_some();
    let end = locks.aid().map(|aid| core.end_of(&aid));
    let listener = Listener {
        events: locks.manager.events(),
        aid: locks.aid(),
        tab,
        keys,
        permissions,
        ends_at: clock::now() + if has_session { LIFE } else { LIFE_WITHOUT_SESSION },
        end,
        has_ended: false,
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
    /// The next messages. `None` when the server is being stopped, the session has ended, the access policy fails, or
    /// the stream has lasted for its full time.
    async fn next(&mut self) -> Option<String> {
        // The beat is on time, even if many events arrive that this receiver is not told of.
        let beat_at = clock::now() + BEAT;
        loop {
            if clock::now() >= self.ends_at {
                return None;
            }
            let beat = beat_at.min(self.ends_at).saturating_duration_since(clock::now());
            let next = tokio::select! {
                biased;
                () = came(self.end.as_ref()), if !self.has_ended => {
                    self.has_ended = true;
                    self.ends_at = clock::now() + FAREWELL;
                    continue;
                }
                next = timeout(beat, self.events.next()) => next,
            };
            let first = match next {
                Ok(event) => event?,
                Err(_) if clock::now() >= self.ends_at => return None,
                Err(_) => return Some(BEAT_MESSAGE.to_owned()),
            };
            let mut events = vec![first];
            // The policy is asked once for all that have arrived meanwhile.
            while events.len() < AT_ONCE
                && let Some(Some(next)) = self.events.next().now_or_never()
            {
                events.push(next);
            }
            let mut message = self.message(&events).await?;
            if self.end.as_ref().is_some_and(EndOf::has_come) {
                // The next person in this browser must not hear of other locks than those of the ended session.
                events.retain(|event| {
                    event.lock().is_some_and(|lock| Some(&lock.aid) == self.aid.as_ref())
                });
                message = self.message(&events).await?;
            }
            if !message.is_empty() {
                return Some(message);
            }
            if clock::now() >= beat_at {
                return Some(BEAT_MESSAGE.to_owned());
            }
        }
    }

    /// The message with the events that this receiver has asked for, and may see.
    async fn message(&self, events: &[Arc<LockEvent>]) -> Option<String> {
        let is_asked_for =
            |key: &&LockKey| self.keys.as_ref().is_none_or(|keys| keys.contains(*key));
        let events = || events.iter().filter(|event| self.concerns(event));
        let asked_for = events().filter_map(|event| event.key().filter(is_asked_for));
        let visible = self.permissions.visible(asked_for.cloned().collect()).await?;
        let mut message = String::new();
        for event in events() {
            if event.key().is_none_or(|key| visible.contains(key)) {
                let data = self.data(event);
                let _ = write!(message, "event: {}\ndata: {data}\n\n", event.name());
            }
        }
        Some(message)
    }

    /// False for the asks and answers of other people.
    fn concerns(&self, event: &LockEvent) -> bool {
        let user = self.permissions.person.as_ref().and_then(|person| person.id());
        match event {
            LockEvent::Asked(lock, _) => self.aid.as_ref() == Some(&lock.aid),
            LockEvent::Answered(_, ask) => ask.is_of(self.aid.as_ref(), user),
            _ => true,
        }
    }

    /// The data of the event for this receiver.
    fn data(&self, event: &Arc<LockEvent>) -> Value {
        if let LockEvent::Saved(key, save, lock) = &**event {
            let whose = lock.as_ref().map(|lock| whose(lock, self.aid.as_ref(), self.tab));
            return json!({
                "key": key.to_string(),
                "collection": key.collection(),
                "id": key.id().to_string(),
                "whose": whose.unwrap_or("held"),
                "by": save.by,
                "version": save.version,
            });
        }
        if let LockEvent::Asked(lock, ask) | LockEvent::Answered(lock, ask) = &**event {
            let (ask, key) = (AskBody::from(ask), KeyBody::from(&lock.key));
            let whose = whose(lock, self.aid.as_ref(), self.tab);
            return json!(AskEvent { key, whose, ask });
        }
        let Some(lock) = event.lock() else {
            return json!({ "told": self.permissions.manager.core.is_told_of_events() });
        };
        let mut data = json!({
            "key": lock.key.to_string(),
            "collection": lock.key.collection(),
            "id": lock.key.id().to_string(),
            "mode": lock.mode,
            "holder": lock.holder,
            "since": rfc3339(lock.since),
        });
        let whose = whose(lock, self.aid.as_ref(), self.tab);
        if let LockEvent::Acquired(_) = **event {
            data["state"] = whose.into();
            data["expires_in_ms"] = millis(lock.expires_in()).into();
        } else {
            data["state"] = "free".into();
            data["was"] = whose.into();
        }
        if let LockEvent::Broken(_, taken_by) = &**event {
            data["by"] = taken_by.by.as_str().into();
            if self.permissions.sees_all() || self.aid.as_ref() == Some(&lock.aid) {
                data["reason"] = taken_by.reason.as_str().into();
            }
        }
        data
    }
}
