//! Locks many documents with one request: the free ones of them.

use std::collections::{BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Body, OwnLockBody, bad_request, by_name, problem, read, take};
use crate::{
    key::LockKey,
    lock::Mode,
    web::{
        Problem,
        access::Access,
        format::Current,
        request::{Locks, Terms},
        same_site::SameSite,
    },
};

/// How many documents one request may ask for.
const MAX_KEYS: usize = 100;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct EachBody {
    /// The documents, each as `"collection/id"`.
    keys: Vec<String>,
    mode: Option<Mode>,
}

#[derive(Serialize)]
pub(super) struct EachAnswer {
    held: Vec<OwnLockBody>,
    /// A problem for each document that was not locked, with its `key`.
    refused: Vec<Value>,
}

pub(super) async fn acquire(
    _: SameSite,
    Locks(locks): Locks,
    body: Body,
) -> Result<Current<EachAnswer>, Problem> {
    let permissions = locks.permissions();
    permissions.check_any()?;
    let EachBody { keys, mode } = read(body)?;
    if keys.len() > MAX_KEYS {
        return Err(bad_request(format_args!("ask for at most {MAX_KEYS} keys at once")));
    }
    let (locks, mode) = (&locks, mode.unwrap_or(Mode::Exclusive));
    let (mut wanted, mut refused) = (BTreeSet::new(), Vec::new());
    for name in keys {
        match by_name(&permissions, &name) {
            Ok(key) => drop(wanted.insert(key)),
            Err(problem) => refused.push(problem.with("key", name).into_body()),
        }
    }
    let wanted: Vec<LockKey> = wanted.into_iter().collect();
    let _turn = locks.turn(&wanted).await?;
    let allowed = permissions.allowed(wanted.clone(), Access::Lock).await?;
    let how = Terms { mode, ..Terms::in_any_tab() };
    let forbidden = wanted.iter().filter(|key| !allowed.contains(key));
    locks.give_back_forbidden(forbidden).await?;
    let attempts =
        locks.each(allowed, mode, async |key| Ok(take(locks, &key, how, false).await?.0)).await?;
    let mut attempts: HashMap<_, _> = attempts.into_iter().collect();
    let mut held = Vec::new();
    for key in wanted {
        let error = match attempts.remove(&key) {
            Some(Ok(own)) => {
                held.push(OwnLockBody::of(&own.lock, locks));
                continue;
            }
            Some(Err(error)) => error,
            None => permissions.refusal(&key),
        };
        refused.push(problem(locks, error).with("key", key.to_string()).into_body());
    }
    Ok(Current(EachAnswer { held, refused }))
}
