//! The lock API, for pages that lock without loading.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime},
};

use actix_web::{
    HttpRequest, HttpResponse,
    http::StatusCode,
    web::{self, Bytes, Json, PayloadConfig, ServiceConfig},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{Problem, SessionLocks, path::path_param, same_site::SameSite};
use crate::{Holder, Lock, LockError, LockKey, LockToken, Mode, manager::Acquisition};

/// The largest body that the lock API takes: a heartbeat of some hundred locks.
const MAX_BODY_BYTES: usize = 64 * 1024;

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
/// | `GET /{collection}/{id}` | 200 `{"state": "free" \| "mine" \| "held", …}` |
/// | `DELETE /{collection}/{id}`, `POST /{collection}/{id}/release` | 204, also when it had gone |
/// | `POST /heartbeat` | 200 `{"held": […], "lost": […]}`; renews everything of the session |
/// | `GET /` | 200, the locks of the session |
/// | `POST /{collection}/{id}/break` | 204, or 403 by the [policy](crate::LockManagerBuilder::break_policy) |
///
/// Bodies are JSON of any content type, and may be empty. `POST /{collection}/{id}` takes `{"mode":
/// "exclusive" | "shared", "wait_ms": 0}`, these two being the defaults; who waits is cut at
/// [`longest_wait`](crate::LockingSession::longest_wait). `heartbeat`: `{"locks": {"collection/id":
/// "token", …}}` is what the page believes it holds; what it does not is in `lost`. Without a body,
/// everything of the session is in `held`. `release`: `{"token": "…"}` releases that acquisition only;
/// `sendBeacon` cannot set headers. Tokens may be written as they stand in `Lock-Token`. At most 64 KiB.
/// A session that has ended holds nothing, so these two and `GET` answer it as any other.
///
/// Who may call it is the application's to say: wrap the scope in what guards your other routes.
/// Changes are refused to pages of other sites.
pub fn lock_api(config: &mut ServiceConfig) {
    config
        .app_data(PayloadConfig::new(MAX_BODY_BYTES))
        .route("", web::get().to(own))
        .route("/", web::get().to(own))
        .route("/heartbeat", web::post().to(heartbeat))
        .service(web::resource("/{collection}/{id}").get(state).post(acquire).delete(release))
        .route("/{collection}/{id}/release", web::post().to(release))
        .route("/{collection}/{id}/break", web::post().to(break_lock));
}

/// One lock of the session, as the client sees it.
#[derive(Serialize)]
struct MineBody {
    /// As a heartbeat names it.
    key: String,
    collection: String,
    id: String,
    mode: Mode,
    token: Option<LockToken>,
    since: String,
    expires_in_ms: u64,
    state: &'static str,
}

impl From<&Lock> for MineBody {
    fn from(lock: &Lock) -> Self {
        Self {
            key: lock.key.to_string(),
            collection: lock.key.collection().to_owned(),
            id: lock.key.id().to_string(),
            mode: lock.mode,
            token: lock.token,
            since: rfc3339(lock.since),
            expires_in_ms: millis(lock.expires_in()),
            state: "mine",
        }
    }
}

async fn own(locks: SessionLocks) -> Result<Json<Vec<MineBody>>, LockError> {
    Ok(Json(locks.list().await?.iter().map(MineBody::from).collect()))
}

#[derive(Serialize)]
struct StateBody {
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<Mode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_in_ms: Option<u64>,
}

async fn state(locks: SessionLocks, req: HttpRequest) -> Result<Json<StateBody>, Problem> {
    let key = key(&locks, &req)?;
    let (aid, until) = (locks.locks.aid(), locks.locks.begin());
    let lock = locks.manager().inspect_by(&key, aid.as_ref(), until).await?;
    let state = match &lock {
        None => "free",
        Some(lock) if Some(&lock.aid) == aid.as_ref() => "mine",
        Some(_) => "held",
    };
    Ok(Json(StateBody {
        state,
        mode: lock.as_ref().map(|lock| lock.mode),
        since: lock.as_ref().map(|lock| rfc3339(lock.since)),
        expires_in_ms: lock.as_ref().map(|lock| millis(lock.expires_in())),
        holder: lock.and_then(|lock| lock.holder),
    }))
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct AcquireBody {
    mode: Option<Mode>,
    wait_ms: u64,
}

async fn acquire(
    _: SameSite,
    locks: SessionLocks,
    req: HttpRequest,
    body: Body,
) -> Result<HttpResponse, Problem> {
    let key = key(&locks, &req)?;
    let AcquireBody { mode, wait_ms } = read(body)?;
    let (locks, mode) = (&locks.locks, mode.unwrap_or(Mode::Exclusive));
    let wait = locks.wait_at_most(Duration::from_millis(wait_ms));
    let exists = async |is_fresh: bool, until| {
        if !is_fresh || locks.manager().exists(&key, until).await? {
            return Ok(());
        }
        Err(LockError::NotFound { key: key.clone() })
    };
    let (mine, ()) = locks.acquire(&key, mode, locks.offered()?, wait, exists).await?;
    let mut response = if mine.is_fresh { HttpResponse::Created() } else { HttpResponse::Ok() };
    Ok(response.json(MineBody::from(&mine.lock)))
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ReleaseBody {
    /// The acquisition to release. `sendBeacon` cannot set a header.
    token: Option<String>,
}

async fn release(
    _: SameSite,
    locks: SessionLocks,
    req: HttpRequest,
    body: Body,
) -> Result<HttpResponse, Problem> {
    let key = key(&locks, &req)?;
    let mut tokens = locks.locks.offered()?.to_vec();
    if let Some(token) = read::<ReleaseBody>(body)?.token {
        tokens.push(parse_token(&token)?);
    }
    if tokens.is_empty() {
        locks.release_key(&key).await?;
    }
    let until = locks.locks.begin();
    if let Some(aid) = locks.locks.aid() {
        for token in tokens {
            // Or an exclusive one: a beacon does not say.
            let mode = Mode::Shared;
            let held = Acquisition { key: key.clone(), aid: aid.clone(), token, mode };
            locks.manager().release_by(&held, until).await?;
        }
    }
    Ok(HttpResponse::NoContent().finish())
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct HeartbeatBody {
    /// What the client believes it holds: `"collection/id"` → token.
    locks: HashMap<String, String>,
}

#[derive(Serialize)]
struct HeartbeatAnswer {
    held: Vec<MineBody>,
    lost: Vec<LostBody>,
}

#[derive(Serialize)]
struct LostBody {
    key: String,
    collection: String,
    id: String,
}

async fn heartbeat(
    _: SameSite,
    locks: SessionLocks,
    body: Body,
) -> Result<Json<HeartbeatAnswer>, Problem> {
    let believed = (read::<HeartbeatBody>(body)?.locks.into_iter())
        .map(|(name, token)| Ok((name, parse_token(&token)?)))
        .collect::<Result<HashMap<_, _>, Problem>>()?;
    // The wrap has started a renewal of the session's locks, if one was due.
    let until = locks.locks.begin();
    locks.locks.renewed(until).await;
    let held = match locks.locks.aid() {
        Some(aid) => locks.manager().list_by(Some(&aid), until).await?,
        None => Vec::new(),
    };
    let tokens: HashMap<String, Option<LockToken>> =
        held.iter().map(|lock| (lock.key.to_string(), lock.token)).collect();
    let is_held = |name: &String, token: &LockToken| tokens.get(name) == Some(&Some(*token));
    let lost = (believed.iter().filter(|(name, token)| !is_held(name, token)))
        .map(|(name, _)| {
            let (collection, id) = name.split_once('/').unwrap_or_default();
            LostBody { key: name.clone(), collection: collection.into(), id: id.into() }
        })
        .collect();
    let is_asked_for = |lock: &&Lock| {
        believed.is_empty() || believed.get(&lock.key.to_string()).copied() == lock.token
    };
    let held = held.iter().filter(is_asked_for).map(MineBody::from).collect();
    Ok(Json(HeartbeatAnswer { held, lost }))
}

async fn break_lock(
    _: SameSite,
    locks: SessionLocks,
    req: HttpRequest,
) -> Result<HttpResponse, Problem> {
    let key = key(&locks, &req)?;
    locks.manager().break_lock(&key, &locks.locks.actor()).await?;
    Ok(HttpResponse::NoContent().finish())
}

type Body = Result<Bytes, actix_web::Error>;

/// The document that `/{collection}/{id}` names.
fn key(locks: &SessionLocks, req: &HttpRequest) -> Result<LockKey, Problem> {
    let param = |name| path_param(req, name).unwrap_or_default();
    locks.manager().key(&param("collection"), &param("id")).map_err(|e| match e {
        LockError::Misconfigured(_) => {
            // A developer's mistake or anybody's guess, so no error.
            log::warn!(target: "actix_doclock::web", "the lock API was asked for {:?}: {e}", req.path());
            Problem::new(StatusCode::NOT_FOUND, "no_such_collection")
                .detail("there is no such collection of lockable documents")
        }
        e => e.into(),
    })
}

/// An empty body says the same as `{}`. Its type is not looked at: `sendBeacon` sends text.
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

pub(super) fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    let time = time.replace_millisecond(time.millisecond()).unwrap_or(time);
    // Stores give dates between 1970 and 9999, which can be formatted.
    time.format(&Rfc3339).unwrap_or_default()
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
