//! The sign of life of a page.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::{
    lock::{Lock, LockToken},
    web::{
        Problem,
        api::{Body, MineBody, all_of, parse_token, read},
        format::Current,
        request::Locks,
        same_site::SameSite,
    },
};

#[derive(Default, Deserialize)]
#[serde(default)]
struct HeartbeatBody {
    /// The locks that the client believes it holds: `"collection/id"` → token.
    locks: HashMap<String, String>,
}

#[derive(Serialize)]
pub(super) struct HeartbeatAnswer {
    held: Vec<MineBody>,
    lost: Vec<LostBody>,
}

#[derive(Serialize)]
struct LostBody {
    key: String,
    collection: String,
    id: String,
}

/// Renews the locks of the session, and says which of the locks that the page believes it holds are lost.
pub(super) async fn renew(
    _: SameSite,
    Locks(locks): Locks,
    body: Body,
) -> Result<Current<HeartbeatAnswer>, Problem> {
    let believed = (read::<HeartbeatBody>(body)?.locks.into_iter())
        .map(|(name, token)| Ok((name, parse_token(&token)?)))
        .collect::<Result<HashMap<_, _>, Problem>>()?;
    locks.check_client()?;
    // `locks.session(…)` has started a renewal of the session's locks, if one was due.
    let until = locks.begin();
    locks.renewed(until).await;
    let until = locks.begin();
    let named = believed.keys().filter_map(|name| Some(name.split_once('/')?.0));
    locks.manager.parts.collections.learn(named, until).await;
    let held = locks.still_allowed(locks.list(until).await?).await;
    let tokens: HashMap<String, Option<LockToken>> =
        held.iter().map(|lock| (lock.key.to_string(), lock.token)).collect();
    let is_held = |name: &String, token: &LockToken| tokens.get(name) == Some(&Some(*token));
    let lost = (believed.iter().filter(|(name, token)| !is_held(name, token)))
        .map(|(name, token)| {
            let (collection, id) = name.split_once('/').unwrap_or_default();
            if let (Some(_), Ok(key)) = (locks.aid(), locks.manager.key(collection, id)) {
                locks.manager.parts.granting.missed_lock(&key, *token, "heartbeat");
            }
            LostBody { key: name.clone(), collection: collection.into(), id: id.into() }
        })
        .collect();
    if believed.is_empty() {
        return Ok(Current(HeartbeatAnswer { held: all_of(&locks, &held).await?, lost }));
    }
    let is_named = |lock: &&Lock| believed.get(&lock.key.to_string()).copied() == lock.token;
    let named = held.iter().filter(is_named).inspect(|lock| locks.names(lock));
    let held = named.map(MineBody::from).collect();
    Ok(Current(HeartbeatAnswer { held, lost }))
}
