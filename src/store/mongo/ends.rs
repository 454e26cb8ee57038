//! The ends of sessions. Unfinished work is recorded in `doclock.ended`, so that any server can
//! continue where another one stopped.

use std::{
    collections::HashMap,
    slice,
    time::{Duration, Instant},
};

use futures_util::{TryStreamExt, future::try_join_all};
use mongodb::{
    bson::{Bson, Document as Record, doc},
    error::Error,
    options::ReturnDocument,
};
use uuid::Uuid;

use crate::{
    ended::EndReason,
    error::{StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Holder},
    store::{
        LastEnd,
        mongo::{
            ENDED, MongoStore, codec,
            error::{DUPLICATE_KEY, retry_duplicate_key, store_error},
            lanes, majority_acknowledges,
            pipeline::millis,
            removal::Grants,
            write::{self, Write},
        },
        with_deadline,
    },
};

mod announce;
mod former;
mod overdue;
mod pipeline;
mod sweep;
mod taken;

/// How many locks are named in one command. With the longest possible ids the command must stay within
/// the limits of the server. Locks beyond that number are released without being named.
const NAMES_AT_ONCE: usize = 8_000;

impl MongoStore {
    /// Two writes: the tombstone with the names of the locks, and the removal of the locks. The end is then
    /// left to [`allow_announcement`](Self::allow_announcement), or to a sweep if this process dies. After
    /// each step any worker can continue: the tombstone prevents new locks, and the names keep any lock from
    /// being forgotten.
    pub(super) async fn end_for_good(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        worker: Uuid,
    ) -> Result<Vec<LockKey>, StoreError> {
        let failed = |e| store_error("ending a session", e);
        // Without an answer soon, the tombstone comes first, and the names later.
        let soon = Instant::now() + lanes::group_limit();
        let (keys, holder, _) =
            with_deadline(soon, self.held_by(aid, collections)).await.unwrap_or_default();
        // findAndModify, an upsert, returns: a new end; or an idle end that became permanent; or an end that
        // an earlier attempt of this worker began, with the names that it stored; or the end of another
        // worker, which only gets more names.
        let mut end = pipeline::end_for_good(reason, Uuid::new_v4(), worker);
        if !keys.is_empty() {
            end.extend(pipeline::name(&keys, holder.as_ref()));
        }
        let begun = (self.inner.ended)
            .find_one_and_update(by_aid(aid), end)
            .upsert(true)
            .return_document(ReturnDocument::After)
            .max_time(lanes::write_limit())
            .await;
        let begun = begun.map_err(|e| retry_duplicate_key(failed(e)))?;
        // A lock that was taken before the tombstone was there belonged to the session.
        let (mut released, holder, may_read) = self.held_by(aid, collections).await?;
        if released.iter().any(|key| !keys.contains(key)) {
            self.store_names(aid, &released, holder.as_ref()).await?;
        }
        self.remove_in(collections, &Grants::Of(slice::from_ref(aid)), may_read).await?;
        let mine = begun.filter(|end| end.get_str("by").is_ok_and(|by| by == worker.to_string()));
        released.extend(mine.as_ref().map_or(keys, names_of));
        released.sort();
        released.dedup();
        self.are_gone(&released);
        Ok(released)
    }

    /// Nobody needs to look whether these documents are still locked.
    pub(super) fn are_gone(&self, keys: &[LockKey]) {
        for key in keys {
            if let Ok(at) = self.prepared(key.collection()) {
                at.seen.gone(key.id());
            }
        }
    }

    // updateOne returns: 1 → the end may be announced; 0 → another worker did that, or is at it.
    pub(super) async fn allow_announcement(
        &self,
        aid: &Aid,
        worker: Uuid,
    ) -> Result<(), StoreError> {
        let mut mine = pipeline::waits_for("release", worker);
        mine.extend(by_aid(aid));
        mine.insert("by", worker.to_string());
        let finished = self.write_ended(mine, pipeline::released(), false).await;
        finished.map(drop).map_err(|e| store_error("finishing the end of a session", e))
    }

    // find returns for each session: how it ended last; or a note of expired locks, which is no end; or
    // nothing.
    pub(super) async fn last_ends_of(
        &self,
        aids: &[Aid],
    ) -> Result<Vec<Option<LastEnd>>, StoreError> {
        let ids: Vec<_> = aids.iter().map(Aid::as_str).collect();
        let found = async {
            let found = self.inner.ended.find(doc! { "_id": { "$in": ids } });
            let found = found.max_time(lanes::read_limit()).projection(pipeline::last_end());
            found.await?.try_collect::<Vec<_>>().await
        };
        let found = found.await.map_err(|e| store_error("asking how sessions have ended", e))?;
        let ends: HashMap<_, _> = found
            .iter()
            .filter_map(|record| Some((record.get_str("_id").ok()?, last_end_in(record)?)))
            .collect();
        Ok(aids.iter().map(|aid| ends.get(aid.as_str()).copied()).collect())
    }

    /// Removes all locks of a session that has ended.
    async fn release_ended(&self, aid: &Aid, collections: &[&str]) -> Result<(), StoreError> {
        let (keys, holder, may_read) = self.held_by(aid, collections).await?;
        if !keys.is_empty() {
            self.store_names(aid, &keys, holder.as_ref()).await?;
        }
        self.remove_in(collections, &Grants::Of(slice::from_ref(aid)), may_read).await
    }

    /// The documents that the session has locked, whose it is, and whether it may be among the readers of any.
    async fn held_by(
        &self,
        aid: &Aid,
        collections: &[&str],
    ) -> Result<(Vec<LockKey>, Option<Holder>, bool), StoreError> {
        let held = try_join_all(collections.iter().map(|c| self.of_session(c, aid, NAMES_AT_ONCE)));
        let held = held.await?;
        let may_read = held.iter().any(|it| it.may_read);
        let mut locks = held.into_iter().flat_map(|it| it.held).peekable();
        let holder = locks.peek().and_then(|lock| lock.holder.clone());
        Ok((locks.map(|lock| lock.key).collect(), holder, may_read))
    }

    async fn store_names(
        &self,
        aid: &Aid,
        keys: &[LockKey],
        holder: Option<&Holder>,
    ) -> Result<(), StoreError> {
        let named = self.write_ended(by_aid(aid), pipeline::name(keys, holder), false).await;
        named.map(drop).map_err(|e| store_error("ending a session", e))
    }

    async fn remove_in(
        &self,
        collections: &[&str],
        grants: &Grants<'_>,
        shared: bool,
    ) -> Result<(), StoreError> {
        let remove = |collection| {
            let at = self.prepared(collection);
            async move {
                let removed = at?.remove_many(grants, shared).await;
                removed.map_err(|e| store_error(format!("releasing locks in {collection}"), e))
            }
        };
        try_join_all(collections.iter().copied().map(remove)).await?;
        Ok(())
    }

    /// One update of all matching records of `doclock.ended`; with `upsert`, creates the record if it
    /// is missing.
    async fn write_ended(
        &self,
        filter: Record,
        by: Vec<Record>,
        upsert: bool,
    ) -> Result<u64, Error> {
        let ended = &self.inner.ended;
        let command = Write::Update(by).command(ended, filter, upsert);
        write::write(ended, command, lanes::write_limit()).await
    }

    /// Many updates of `doclock.ended` in one command. The driver has no method for that before MongoDB
    /// 8.
    async fn update_ended(&self, updates: Vec<Record>) -> Result<(), StoreError> {
        if updates.is_empty() {
            return Ok(());
        }
        let command = doc! {
            "update": ENDED,
            "updates": updates,
            "ordered": false,
            "maxTimeMS": millis(lanes::read_limit()),
            "writeConcern": majority_acknowledges(),
        };
        let doing = "recording the ends of sessions";
        let reply = self.inner.database.run_command(command).await;
        let reply = reply.map_err(|e| store_error(doing, e))?;
        write::acknowledged(&reply, false).map_err(|e| store_error(doing, e))?;
        let errors = reply.get_array("writeErrors").map_or(&[][..], |errors| errors);
        // Two servers claimed the same session at the same moment: it belongs to the other one.
        let refused = errors
            .iter()
            .filter_map(Bson::as_document)
            .find(|error| error.get("code").and_then(codec::number) != Some(DUPLICATE_KEY.into()));
        match refused {
            None => Ok(()),
            Some(error) => {
                let why = error.get_str("errmsg").unwrap_or_default().to_owned();
                let message = format!("{doing}: MongoDB refused");
                Err(StoreError::new(StoreErrorKind::Other, message).because(why))
            }
        }
    }
}

fn by_aid(aid: &Aid) -> Record {
    doc! { "_id": { "$eq": aid.as_str() } }
}

fn aid_of(record: &Record, field: &str) -> Aid {
    Aid::from(record.get_str(field).unwrap_or_default().to_owned())
}

fn names_of(end: &Record) -> Vec<LockKey> {
    let names = end.get_array("locks").map_or(&[][..], |names| names);
    let key = |name: &Record| {
        let id = codec::lock_id(name.get("id")?)?;
        LockKey::new(name.get_str("c").ok()?, id).ok()
    };
    names.iter().filter_map(Bson::as_document).filter_map(key).collect()
}

fn last_end_in(record: &Record) -> Option<LastEnd> {
    let for_good = record.get_bool("for_good").unwrap_or(false);
    let reason = record.get_str("reason").ok();
    if reason.is_none() && !for_good {
        return None;
    }
    let ago = record.get_i64("ago").ok().and_then(|ago| ago.try_into().ok()).unwrap_or(0);
    let reason = EndReason::from_stored(reason.unwrap_or_default());
    Some(LastEnd { reason, for_good, ago: Duration::from_millis(ago) })
}
