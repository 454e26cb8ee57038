//! The lock API, for pages that lock documents without loading them.

mod asks;
mod breaks;
mod each;
mod form;
mod heartbeat;
mod release;
mod status;

use std::{collections::HashSet, iter, slice, time::Duration};

use actix_web::{
    HttpRequest, Resource,
    http::StatusCode,
    web::{Bytes, PayloadConfig, ServiceConfig},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    error::{LockError, Result},
    key::LockKey,
    lock::{Lock, LockToken, Mode},
    manager::Wait,
    text::{printable, short},
    version::Version,
    web::{
        Problem,
        access::{Access, Permissions},
        admin, assets, events,
        format::{AskBody, Current, KeyBody, millis, rfc3339},
        problem::only,
        request::{Document, Elsewhere, Got, Locks, OwnLock, RequestLocks, Terms, path_param},
        same_site::SameSite,
    },
};

/// The largest body that the lock API accepts.
const MAX_BODY_BYTES: usize = 64 * 1024;
/// The largest body that names many documents: 200 ids of 1 KiB, even if JSON escapes each character.
const MAX_LIST_BYTES: usize = 512 * 1024;

/// The lock API. Mount it under a scope of your choice, inside
/// [`locks.session(…)`](crate::LockManager::session):
///
/// ```
/// # use actix_web::{App, web};
/// App::new().service(web::scope("/locks").configure(actix_doclock::lock_api));
/// ```
///
/// | call | answer |
/// |---|---|
/// | `POST /{collection}/{id}` | 201 taken, 200 held already; the lock |
/// | `GET /{collection}/{id}` | 200 `{"state": "free" \| "mine" \| "mine_elsewhere" \| "held", …}` |
/// | `POST /` | 200 `{"held": […], "refused": […]}`: of at most 100 documents, those that are free are locked |
/// | `POST /status` | 200 `{"locks": […]}`, the states of at most 200 documents |
/// | `DELETE /{collection}/{id}`, `POST /{collection}/{id}/release` | 204, also if the lock was gone |
/// | `POST /heartbeat` | 200 `{"held": […], "lost": […]}`; renews the locks of the session |
/// | `GET /` | 200, the locks of the session |
/// | `POST /{collection}/{id}/ask` | 202, the ask, and `ahead`; 409 `free` or `nobody_hears`; 429 `too_many_asks` |
/// | `DELETE /{collection}/{id}/ask`, `POST /{collection}/{id}/withdraw` | 204, also if there was no ask |
/// | `POST /{collection}/{id}/answer` | 204, by the holder with its `Lock-Token`; 404 `no_such_ask` |
/// | `POST /{collection}/{id}/break`, `POST /break` | 204, or 403 by the [policy](crate::LockManagerBuilder::break_policy) |
/// | `GET /events` | server-sent events; 503 if there are [too many](crate::limits::Limits::event_streams) streams |
/// | `GET /client.js`, `/elements.js`, `/keep.js`, `/client.d.ts`, `/elements.d.ts` | for pages: ES modules without dependencies, and their types |
/// | `GET /admin`, `/admin.json` | the table of all locks, if there is an [admin policy](crate::LockManagerBuilder::admin_policy) |
///
/// Bodies are JSON of any content type, of at most 64 KiB (for many documents: 512 KiB), and may be empty. Members that
/// a call does not know are refused. A session that has ended holds nothing, so `heartbeat` and
/// `release` answer it as any other session.
///
/// - `POST /{collection}/{id}` accepts `{"mode": "exclusive" | "shared", "wait_ms": 0, "take_over":
///   false}`; these values are the defaults. A wait is limited to
///   [`longest_wait`](crate::web::LockingSession::longest_wait). A client that asks again within 3 s after its
///   wait keeps its place in the queue of this server. `take_over` takes the lock from another tab of the
///   session, or from another session if the [policy](crate::LockManagerBuilder::take_over_policy) allows
///   it (otherwise 403). A refusal says in `may_take_over` whether the policy would allow a takeover.
/// - `status` accepts `{"keys": ["collection/id", …]}`, and answers in the same order: for each document
///   its `key`, `collection` and `id`, and what `GET /{collection}/{id}` says. A key that names no document
///   comes last, as `{"key", "state": "unknown", "problem": "malformed_key"}`. A call costs one query for each
///   collection.
/// - `heartbeat` accepts `{"locks": {"collection/id": "token", …}}`, the locks that the page believes it
///   holds. `lost` in the answer lists the locks that the page does not hold. Without a body, `held`
///   lists all locks of the session.
/// - `release` accepts `{"token": "…"}`, because `sendBeacon` cannot set headers, and then releases only
///   that acquisition. With `"grace_ms"`, at most 10 000, the lock expires after that time instead, unless
///   the session asks for the lock before. So a page that is reloaded keeps its lock. With `"page"` and without a token,
///   the page has been left and may not know its token: its exclusive lock on the document is released, and every lock that
///   it is granted later is given back at once. `"tab"` and `"page"` stand for the headers, which `sendBeacon` cannot set.
/// - `ask` accepts `{"message": "…"}`, at most [`MAX_ASK_BYTES`](crate::limits::MAX_ASK_BYTES), and tells the holder of the
///   exclusive lock: in `asks` of its lock in the answers to `heartbeat`, and by the event `asked`. The asker waits like
///   everybody: `ahead` says how many others are known to wait or to have asked before. The ask goes with the lock, 90 s after it
///   was last repeated by `{"ask": "…"}`, its id (404 `no_such_ask` if it is gone), and by `withdraw`. One person has one ask for
///   a document, and another message replaces it. A lock has at most [`MAX_ASKS`](crate::limits::MAX_ASKS).
/// - `answer` accepts `{"ask": "…", "answer": "soon" | "no", "message": "…"}`. The asker hears it by the event `answered`, and
///   finds it in `ask` of `GET /{collection}/{id}`. To give the document away is to release it.
/// - `break` accepts `{"reason": "…", "token": "…"}`, and without a document in its path also `"key": "collection/id"`:
///   the ids `.` and `..` cannot be parts of a path. The reason has at most [`MAX_REASON_BYTES`](crate::limits::MAX_REASON_BYTES). With a
///   token, only the lock with that token is broken. The answer says in `Doclock-Broken` how many locks were
///   broken.
///
/// Tokens may be written as they appear in `Lock-Token`.
///
/// A page that sends a UUID of its tab in the header `Doclock-Tab` keeps its locks to that tab: to other
/// tabs of the session they are `mine_elsewhere` (423) until they are taken over. Only requests that name the tab, or
/// the token of the lock, renew them. `/events` accepts the
/// UUID as `?tab=`. A page can also send a UUID of its current load, in the header `Doclock-Page` and as
/// `page` in the release. Then the last request of a closed page does no harm if it arrives after the
/// first request of the reloaded page.
///
/// The stream of events begins with `resync`, which is also sent after each gap: the page should then
/// read everything again. The other events are `acquired`, `released`, `expired`, `broken`, `session_ended` and
/// `saved`; for the holder `asked`, and for the asker `answered`. They carry the document, the holder, and whose lock it is or was: `mine`,
/// `mine_elsewhere` or `held`. `?keys=collection/id,…` selects some documents. After 10 s without an
/// event there is a `beat`.
///
/// Where people are [identified](crate::web::LockingSession::identify), only identified people look and lock: a
/// visitor gets 401. The [access policy](crate::web::LockingSession::access_policy) decides for each document; its
/// "no" is a 404, as for a missing document, and `status` and the events leave such documents out. If people are not
/// identified and there is no policy, everybody may look and lock: then wrap this scope in the guards of your other
/// routes. A page of another site may change nothing.
pub fn lock_api(config: &mut ServiceConfig) {
    config
        .app_data(PayloadConfig::new(MAX_BODY_BYTES))
        .service(naming_many("", "GET, POST").get(own).post(each::acquire))
        .service(naming_many("/", "GET, POST").get(own).post(each::acquire))
        .service(naming_many("/heartbeat", "POST").post(heartbeat::renew))
        .service(naming_many("/status", "POST").post(status::of_many))
        .service(only("/break", "POST").post(breaks::break_named))
        .service(only("/events", "GET").get(events::stream))
        .configure(assets::routes)
        .configure(admin::routes)
        .service(
            only("/{collection}/{id}", "GET, POST, DELETE")
                .get(status::of_one)
                .post(acquire)
                .delete(release::release),
        )
        .service(only("/{collection}/{id}/release", "POST").post(release::release))
        .service(
            only("/{collection}/{id}/ask", "POST, DELETE").post(asks::ask).delete(asks::withdraw),
        )
        .service(only("/{collection}/{id}/withdraw", "POST").post(asks::withdraw))
        .service(only("/{collection}/{id}/answer", "POST").post(asks::answer))
        .service(only("/{collection}/{id}/break", "POST").post(breaks::break_lock));
}

/// A resource whose bodies name many documents.
fn naming_many(path: &str, methods: &'static str) -> Resource {
    only(path, methods).app_data(PayloadConfig::new(MAX_LIST_BYTES))
}

/// One lock of the session, as the client sees it.
#[derive(Serialize)]
struct OwnLockBody {
    #[serde(flatten)]
    key: KeyBody,
    mode: Mode,
    token: Option<LockToken>,
    since: String,
    expires_in_ms: u64,
    state: &'static str,
    asks: Vec<AskBody>,
    #[serde(flatten)]
    end: Option<EndBody>,
    #[serde(flatten)]
    document: Option<DocumentBody>,
}

/// An end of the lock that no heartbeat moves.
#[derive(Serialize)]
struct EndBody {
    ends_in_ms: u64,
    ends_why: &'static str,
}

/// The document under the lock, for a client that has named the version that it shows.
#[derive(Serialize)]
struct DocumentBody {
    /// `None` if there is no such document.
    version: Option<Version>,
    /// True if that is the version that the client shows.
    current: bool,
    /// The version that the session has saved under the lock that the client names.
    #[serde(skip_serializing_if = "Option::is_none")]
    saved: Option<Version>,
}

impl DocumentBody {
    fn of(version: Option<Version>, shown: Version) -> Self {
        Self { version, current: version == Some(shown), saved: None }
    }
}

impl OwnLockBody {
    fn of(lock: &Lock, locks: &RequestLocks) -> Self {
        let end = locks
            .end_of(lock)
            .map(|(left, ends_why)| EndBody { ends_in_ms: millis(left), ends_why });
        Self {
            key: KeyBody::from(&lock.key),
            mode: lock.mode,
            token: lock.token,
            since: rfc3339(lock.since),
            expires_in_ms: millis(lock.expires_in()),
            state: "mine",
            asks: lock.asks.iter().map(AskBody::from).collect(),
            end,
            document: None,
        }
    }
}

async fn own(Locks(locks): Locks) -> Result<Current<Vec<OwnLockBody>>> {
    let until = locks.begin();
    let mut all = locks.list(until).await?;
    locks.manager.core.leave_out_ended_askers(&mut all, until).await;
    Ok(Current(all_of(&locks, &all).await?))
}

/// All locks of the session. Only a person who may lock the document sees the token of its lock, and the asks.
async fn all_of(locks: &RequestLocks, all: &[Lock]) -> Result<Vec<OwnLockBody>> {
    let keys = all.iter().map(|lock| lock.key.clone()).collect();
    let lockable: HashSet<_> =
        locks.permissions().allowed(keys, Access::Lock).await?.into_iter().collect();
    let bodies = all.iter().map(|lock| {
        let body = OwnLockBody::of(lock, locks);
        match lockable.contains(&lock.key) {
            true => body,
            false => OwnLockBody { token: None, asks: Vec::new(), ..body },
        }
    });
    Ok(bodies.collect())
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct AcquireBody {
    mode: Option<Mode>,
    wait_ms: u64,
    take_over: bool,
    /// The version of the document that the client shows.
    version: Option<String>,
}

async fn acquire(
    _: SameSite,
    Locks(locks): Locks,
    req: HttpRequest,
    body: Body,
) -> Result<(Current<OwnLockBody>, StatusCode), Problem> {
    let key = allowed(&locks, &req, Access::Lock).await?;
    let AcquireBody { mode, wait_ms, take_over, version } = read(body)?;
    let shown = version.map(|it| it.parse::<Version>()).transpose().map_err(bad_request)?;
    locks.shows_version.set(shown.is_some());
    let (locks, mode) = (&locks, mode.unwrap_or(Mode::Exclusive));
    let wait = Duration::from_millis(wait_ms).min(locks.settings.longest_wait);
    let elsewhere = if take_over { Elsewhere::TakeOver } else { Elsewhere::Refuse };
    let how = Terms {
        mode,
        offered: locks.headers.tokens()?,
        elsewhere,
        ..Terms::exclusive(Wait::for_at_most(wait))
    };
    let taken = take(locks, &key, how, shown.is_some()).await;
    let (mut own, version) = taken.map_err(|e| problem(locks, e))?;
    locks.manager.core.leave_out_ended_askers(slice::from_mut(&mut own.lock), locks.begin()).await;
    let status = if own.is_fresh() { StatusCode::CREATED } else { StatusCode::OK };
    let document = version.zip(shown).map(|(version, shown)| {
        locks.shows(&key, Some(version));
        DocumentBody::of(Some(version), shown)
    });
    Ok((Current(OwnLockBody { document, ..OwnLockBody::of(&own.lock, locks) }), status))
}

/// Takes or confirms the lock of a document that exists, for a person who may lock it. Returns the version of the
/// document if the client has named one, or if it `is_asked` for.
async fn take(
    locks: &RequestLocks,
    key: &LockKey,
    how: Terms<'_>,
    is_asked: bool,
) -> Result<(OwnLock, Option<Version>)> {
    let exists = async |own: &OwnLock, until| {
        if own.has_waited {
            locks.permissions().check(key, Access::Lock).await?;
        }
        if is_asked || locks.names_version() {
            return Ok(Some(locks.load(own, until).await?.version()));
        }
        if own.got == Got::Confirmed || locks.manager.core.reads.exists(key, until).await? {
            return Ok(None);
        }
        Err(LockError::NotFound { key: key.clone() })
    };
    locks.acquire(key, Terms { document: Document::MustExist, ..how }, exists).await
}

/// The refusal for this error. If somebody holds the lock, it also names the document, and says whether this person
/// may take the lock over, or ask for it.
fn problem(locks: &RequestLocks, error: LockError) -> Problem {
    let offers = match &error {
        LockError::Held(lock) => Some((
            lock.key.to_string(),
            locks.may_take_over(lock),
            locks.manager.core.hears_asks(lock),
        )),
        LockError::HeldByOtherTab(lock) => Some((lock.key.to_string(), true, false)),
        _ => None,
    };
    let problem = Problem::from(error);
    match offers {
        Some((key, may_take_over, may_ask)) => {
            problem.with("key", key).with("may_take_over", may_take_over).with("may_ask", may_ask)
        }
        None => problem,
    }
}

type Body = Result<Bytes, actix_web::Error>;

/// The document that `/{collection}/{id}` names, if this person has this access to it.
async fn allowed(
    locks: &RequestLocks,
    req: &HttpRequest,
    access: Access,
) -> Result<LockKey, Problem> {
    let permissions = locks.permissions();
    permissions.check_any()?;
    let key = key(&permissions, req)?;
    if let Err(refusal) = permissions.check(&key, access).await {
        if access == Access::Lock && matches!(refusal, LockError::NotFound { .. }) {
            locks.give_back_forbidden(iter::once(&key)).await?;
        }
        return Err(refusal.into());
    }
    Ok(key)
}

/// The document that `/{collection}/{id}` names.
fn key(permissions: &Permissions, req: &HttpRequest) -> Result<LockKey, Problem> {
    let param = |name| path_param(req, name).unwrap_or_default();
    named(permissions, &param("collection"), &param("id"))
}

/// The document of this name: `"collection/id"`.
fn by_name(permissions: &Permissions, name: &str) -> Result<LockKey, Problem> {
    let malformed = || bad_request("a key looks like `collection/id`");
    let (collection, id) = name.split_once('/').ok_or_else(malformed)?;
    named(permissions, collection, id)
}

fn named(permissions: &Permissions, collection: &str, id: &str) -> Result<LockKey, Problem> {
    let no_such_collection = || {
        Problem::new(StatusCode::NOT_FOUND, "no_such_collection")
            .detail("there is no such collection of lockable documents")
    };
    if permissions.sees_collection(collection) {
        return Ok(permissions.manager.core.collections.key(collection, id)?);
    }
    if !permissions.manager.core.collections.is_registered(collection) {
        // A developer's mistake or a guess of a client, so this is not logged as an error.
        permissions.manager.core.log_limit.warn("collection", || {
            let collection = short(&printable(collection));
            format!(
                "a client asked the lock API for the collection {collection}, which is not registered: \
                 call `locks.register::<T>().await?` for its type when the server starts"
            )
        });
    }
    Err(no_such_collection())
}

/// An empty body means `{}`. The content type is ignored: `sendBeacon` sends text.
fn read<T: Default + DeserializeOwned>(body: Body) -> Result<T, Problem> {
    let body = body.map_err(|e| Problem::of_body(e.as_response_error()))?;
    if body.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(&body).map_err(bad_request)
}

fn parse_token(token: &str) -> Result<LockToken, Problem> {
    token.parse().map_err(|_| bad_request("a token must be a UUID, as the server sent it"))
}

fn bad_request(detail: impl std::fmt::Display) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, "bad_request").detail(detail)
}
