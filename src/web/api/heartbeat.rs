//! The sign of life of a page.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::{
    key::LockKey,
    lock::Lock,
    web::{
        Problem,
        api::{Body, OwnLockBody, all_of, parse_token, read},
        format::{Current, KeyBody},
        request::Locks,
        same_site::SameSite,
    },
};

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct HeartbeatBody {
    /// The locks that the client believes it holds: `"collection/id"` → token.
    locks: HashMap<String, String>,
}

#[derive(Serialize)]
pub(super) struct HeartbeatAnswer {
    held: Vec<OwnLockBody>,
    lost: Vec<KeyBody>,
}

/// Renews the locks of the session, and says which of the locks that the page believes it holds are lost.
pub(super) async fn renew(
    _: SameSite,
    Locks(locks): Locks,
    body: Body,
) -> Result<Current<HeartbeatAnswer>, Problem> {
    let mut believed = Vec::new();
    for (name, token) in read::<HeartbeatBody>(body)?.locks {
        let key = locks.key_named(&name);
        believed.push((name, key, parse_token(&token)?));
    }
    locks.check_client()?;
    // `locks.session(…)` has started a renewal of the session's locks, if one was due.
    let until = locks.begin();
    locks.renewed(until).await;
    locks.ask_again().await;
    let until = locks.begin();
    let mut held = match locks.aid() {
        // Names tell the collections, so there is no need to look into others, which may be in trouble.
        Some(aid) if !believed.is_empty() => {
            let named = believed.iter().filter_map(|(_, key, _)| Some(key.as_ref()?.collection()));
            let named: BTreeSet<_> = named.collect();
            locks.manager.core.collections.learn(&named, until).await?;
            locks.manager.core.reads.list_among(&named, &aid, until).await?
        }
        _ => locks.list(until).await?,
    };
    locks.manager.core.leave_out_ended_askers(&mut held, until).await;
    let tokens: HashMap<_, _> = held.iter().map(|lock| (&lock.key, lock.token)).collect();
    let is_held = |key: &LockKey, token| tokens.get(key) == Some(&Some(token));
    let mut lost = Vec::new();
    for (name, key, token) in &believed {
        let Some(key) = key else {
            lost.push(KeyBody::named(name));
            continue;
        };
        if !is_held(key, *token) {
            if locks.aid().is_some() {
                locks.manager.core.granting.missed_lock(key, *token, "heartbeat");
            }
            lost.push(KeyBody::from(key));
        }
    }
    if believed.is_empty() {
        return Ok(Current(HeartbeatAnswer { held: all_of(&locks, &held).await?, lost }));
    }
    let keys: HashSet<_> =
        believed.iter().filter_map(|(_, key, token)| Some((key.as_ref()?, Some(*token)))).collect();
    let is_named = |lock: &&Lock| keys.contains(&(&lock.key, lock.token));
    let named = held.iter().filter(is_named).inspect(|lock| locks.also_renew(lock));
    let held = named.map(|lock| OwnLockBody::of(lock, &locks)).collect();
    Ok(Current(HeartbeatAnswer { held, lost }))
}
