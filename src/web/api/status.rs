//! The state of one document, or of many: free, or locked by whom.

use std::collections::HashSet;

use actix_web::{HttpRequest, ResponseError, http::StatusCode, web::Query};
use serde::{Deserialize, Serialize};

use super::{Body, DocumentBody, allowed, bad_request, by_name, read};
use crate::{
    actor::Person,
    error::LockError,
    key::LockKey,
    lock::{Ask, Holder, Lock, LockToken, Mode},
    version::Version,
    web::{
        Problem,
        access::Access,
        format::{AskBody, Current, millis, rfc3339, whose},
        request::{Locks, RequestLocks, path_param},
        same_site::SameSite,
    },
};

/// How many documents one request may ask for.
const MAX_KEYS: usize = 200;

#[derive(Serialize)]
pub(super) struct StateBody {
    state: &'static str,
    /// The name of the document, if the URL writes its id in another way.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<Mode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_in_ms: Option<u64>,
    /// Whether the person who asks holds the lock in another session.
    #[serde(skip_serializing_if = "Option::is_none")]
    same_person: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    may_take_over: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    may_ask: Option<bool>,
    /// The ask of this person.
    #[serde(skip_serializing_if = "Option::is_none")]
    ask: Option<AskBody>,
    /// The freeze, if no new lock is granted at the moment.
    #[serde(skip_serializing_if = "Option::is_none")]
    frozen: Option<FrozenBody>,
    #[serde(flatten)]
    document: Option<DocumentBody>,
}

#[derive(Deserialize)]
struct StatusQuery {
    /// The version of the document that the page shows.
    shown: Option<Version>,
    /// A lock under which the page has sent a save of a text with that version, and does not know what became of it.
    saved_under: Option<LockToken>,
}

#[derive(Serialize)]
struct FrozenBody {
    reason: String,
    until: String,
}

impl StateBody {
    fn of(key: &LockKey, lock: Option<Lock>, locks: &RequestLocks) -> Self {
        let freeze = locks.manager.core.freezes.on(key.collection());
        let (aid, tab) = (locks.aid(), locks.headers.tab);
        let state = lock.as_ref().map_or("free", |lock| whose(lock, aid.as_ref(), tab));
        let may_take_over = match (state, &lock) {
            ("held", Some(lock)) => Some(locks.may_take_over(lock)),
            ("mine_elsewhere", _) => Some(true),
            _ => None,
        };
        let (actor, held) = (locks.actor(), lock.as_ref().filter(|_| state == "held"));
        let is_own = |ask: &&Ask| ask.is_of(aid.as_ref(), actor.id());
        let ask = lock.as_ref().and_then(|lock| lock.asks.iter().find(is_own));
        Self {
            state,
            ask: ask.map(AskBody::from),
            key: None,
            mode: lock.as_ref().map(|lock| lock.mode),
            since: lock.as_ref().map(|lock| rfc3339(lock.since)),
            expires_in_ms: lock.as_ref().map(|lock| millis(lock.expires_in())),
            same_person: held.map(|lock| actor.is_holder_of(lock)),
            may_ask: held.map(|lock| locks.manager.core.hears_asks(lock)),
            holder: lock.and_then(|lock| lock.holder),
            may_take_over,
            frozen: freeze
                .map(|freeze| FrozenBody { until: rfc3339(freeze.until), reason: freeze.reason }),
            document: None,
        }
    }
}

pub(super) async fn of_one(
    Locks(locks): Locks,
    req: HttpRequest,
) -> Result<Current<StateBody>, Problem> {
    let key = allowed(&locks, &req, Access::Look).await?;
    let (aid, until) = (locks.aid(), locks.begin());
    let lock = locks.manager.core.reads.inspect(&key, aid.as_ref(), until).await?;
    let [collection, id] = ["collection", "id"].map(|it| path_param(&req, it).unwrap_or_default());
    let name = Some(key.to_string()).filter(|name| *name != format!("{collection}/{id}"));
    let Query(StatusQuery { shown, saved_under }) =
        Query::from_query(req.query_string()).map_err(bad_request)?;
    let document = match shown {
        Some(shown) => match locks.manager.core.reads.load(&key, until).await {
            Ok(document) => Some(DocumentBody::of(Some(document.version()), shown)),
            Err(LockError::NotFound { .. }) => Some(DocumentBody::of(None, shown)),
            Err(error) => return Err(error.into()),
        }
        .map(|it| DocumentBody {
            saved: locks.saved_under(&key, saved_under.as_slice(), &[shown]),
            ..it
        }),
        None => None,
    };
    Ok(Current(StateBody { key: name, document, ..StateBody::of(&key, lock, &locks) }))
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct StatusBody {
    /// The documents, each as `"collection/id"`.
    keys: Vec<String>,
}

#[derive(Serialize)]
pub(super) struct StatusAnswer {
    /// In the order of the keys. The keys that name no document follow at the end.
    locks: Vec<Row>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Row {
    Known(Box<KeyedState>),
    Unknown { key: String, state: &'static str, problem: &'static str },
}

#[derive(Serialize)]
struct KeyedState {
    key: String,
    /// The key as it was asked for, if its id can be written in several ways.
    #[serde(skip_serializing_if = "Option::is_none")]
    asked: Option<String>,
    collection: String,
    id: String,
    #[serde(flatten)]
    state: StateBody,
}

pub(super) async fn of_many(
    _: SameSite,
    Locks(locks): Locks,
    body: Body,
) -> Result<Current<StatusAnswer>, Problem> {
    let permissions = locks.permissions();
    permissions.check_any()?;
    let StatusBody { keys } = read(body)?;
    if keys.len() > MAX_KEYS {
        return Err(bad_request(format_args!("ask for at most {MAX_KEYS} keys at once")));
    }
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for key in keys {
        match by_name(&permissions, &key) {
            Ok(named) => known.push((key, named)),
            Err(problem) if problem.status_code() == StatusCode::NOT_FOUND => return Err(problem),
            _ => unknown.push(Row::Unknown { key, state: "unknown", problem: "malformed_key" }),
        }
    }
    let keys: Vec<_> = known.iter().map(|(_, key)| key.clone()).collect();
    // All visitors of a proxy count as one person, and each of their pages asks.
    let _turn = match locks.counts_as() {
        Person::Visitors(_) => None,
        _ => locks.turn(&keys).await?,
    };
    let allowed: HashSet<_> = permissions.allowed(keys, Access::Look).await?.into_iter().collect();
    known.retain(|(_, key)| allowed.contains(key));
    let keys: Vec<_> = known.iter().map(|(_, key)| key.clone()).collect();
    let (aid, until) = (locks.aid(), locks.begin());
    let found = locks.manager.core.reads.inspect_many(&keys, aid.as_ref(), until).await?;
    let known = known.into_iter().zip(found).map(|((asked, key), lock)| {
        let name = key.to_string();
        Row::Known(Box::new(KeyedState {
            state: StateBody::of(&key, lock, &locks),
            asked: (asked != name).then_some(asked),
            key: name,
            collection: key.collection().to_owned(),
            id: key.id().to_string(),
        }))
    });
    Ok(Current(StatusAnswer { locks: known.chain(unknown).collect() }))
}
