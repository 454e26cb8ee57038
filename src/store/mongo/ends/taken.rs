//! Notes of locks that are taken from their holders, in `doclock.ended` beside the ends that are to be
//! announced:
//!
//! ```text
//! { _id: "taken <event>",  ts: <Date>,  step: "tell",
//!   asked: true,                      // the lock was to be taken; absent when it is known to be taken
//!   by: "<worker>", lease: <Date>,    // as for ends; first the event itself, for the server that takes it
//!   taken: <how often it was taken to be told>,
//!   taking: { c: "<collection>", id: <_id>, aid, token, how: "broken" | "taken_over",
//!             from: { label, user? }, by: { label, user? }, reason } }
//! ```

use std::time::Duration;

use mongodb::bson::{Bson, Document as Record, doc};
use uuid::Uuid;

use crate::{
    error::StoreError,
    key::LockKey,
    lock::{Aid, Holder},
    store::{
        Query,
        mongo::{
            MongoStore, codec,
            ends::pipeline,
            error::{retry_duplicate_key, store_error},
            lanes,
            pipeline::millis,
            record::presentable,
            write::{self, Write},
        },
    },
    taken::{LockTaken, Settled, Taking},
};

impl MongoStore {
    // update, an upsert: inserted; or found, because the reply to an earlier attempt was lost.
    pub(in crate::store::mongo) async fn note_taking(
        &self,
        taking: &LockTaken,
        lease: Duration,
    ) -> Result<(), StoreError> {
        let noted = self.write_ended(by_event(taking.event), note(taking, lease), true).await;
        noted.map_err(|e| retry_duplicate_key(store_error("noting a break or takeover", e)))?;
        Ok(())
    }

    // update or delete returns: 1 → done. 0 → done by an earlier attempt, or another worker has the note.
    pub(in crate::store::mongo) async fn settle_note(
        &self,
        event: Uuid,
        worker: Uuid,
        settled: Settled,
    ) -> Result<(), StoreError> {
        let mut mine = by_event(event);
        mine.insert("by", worker.to_string());
        let done = match settled {
            Settled::Taken => {
                let tell = vec![doc! { "$unset": ["asked", "by", "lease"] }];
                self.write_ended(mine, tell, false).await
            }
            Settled::NotTaken | Settled::Told => {
                let ended = &self.inner.ended;
                let gone = Write::Delete.command(ended, mine, false);
                write::write(ended, gone, lanes::write_limit()).await
            }
        };
        done.map_err(|e| store_error("settling a break or takeover", e))?;
        Ok(())
    }

    pub(in crate::store::mongo) async fn take_notes(
        &self,
        collections: &[&str],
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<LockTaken>, StoreError> {
        let mut told = Vec::new();
        let mut waiting = pipeline::waits_for("tell", worker);
        // Only a server that knows the collection can tell whether its lock is gone.
        let is_settled = doc! { "asked": { "$exists": false } };
        waiting.insert("$or", vec![is_settled, doc! { "taking.c": { "$in": collections } }]);
        for record in self.take_waiting(waiting, worker, lease, limit).await? {
            let Some(taking) = to_taking(&record) else {
                self.give_up(&record).await?;
                continue;
            };
            let is_asked = record.get_bool("asked").unwrap_or(false);
            if !is_asked {
                told.push(taking);
                continue;
            }
            match self.still_has(&taking).await {
                Ok(false) => told.push(taking),
                Ok(true) => self.settle_note(taking.event, worker, Settled::NotTaken).await?,
                // The note is taken again after its lease. The others do not wait for it.
                Err(e) => log::debug!(
                    target: "actix_doclock::store",
                    "it is not known yet whether a lock was taken: {e}",
                ),
            }
        }
        Ok(told)
    }

    /// Whether the former holder still has its lock: then the server died before it took the lock.
    async fn still_has(&self, taking: &LockTaken) -> Result<bool, StoreError> {
        let key = std::slice::from_ref(&taking.key);
        let locks = self.locks_of(taking.key.collection(), Query::On(key), 1).await?;
        Ok(locks.iter().any(|lock| lock.aid == taking.aid && lock.token == taking.token))
    }
}

fn by_event(event: Uuid) -> Record {
    doc! { "_id": { "$eq": format!("taken {event}") } }
}

fn note(taking: &LockTaken, lease: Duration) -> Vec<Record> {
    let how = match taking.how {
        Taking::Broken => "broken",
        Taking::TakenOver => "taken_over",
    };
    let content = doc! {
        "c": taking.key.collection(),
        "id": Bson::from(taking.key.id()),
        "aid": taking.aid.as_str(),
        "token": taking.token.map(|token| token.to_string()),
        "how": how,
        "from": taking.from.as_ref().map(holder),
        "by": holder(&taking.by),
        "reason": &taking.reason,
    };
    let new = doc! {
        "_id": "$_id",
        "ts": "$$NOW",
        "step": "tell",
        "asked": true,
        "by": taking.event.to_string(),
        "lease": { "$add": ["$$NOW", millis(lease)] },
        "taking": { "$literal": content },
    };
    let is_there = doc! { "$eq": [{ "$type": "$ts" }, "date"] };
    vec![doc! { "$replaceWith": { "$cond": [is_there, "$$ROOT", new] } }]
}

fn holder(holder: &Holder) -> Record {
    let mut record = doc! { "label": &holder.label };
    if let Some(user) = &holder.user {
        record.insert("user", user);
    }
    record
}

fn to_holder(record: &Record) -> Option<Holder> {
    let holder = Holder::new(record.get_str("label").ok()?);
    Some(match record.get_str("user") {
        Ok(user) => holder.of_user(user),
        Err(_) => holder,
    })
}

fn to_taking(record: &Record) -> Option<LockTaken> {
    let event = record.get_str("_id").ok()?.strip_prefix("taken ")?.parse().ok()?;
    let taking = record.get_document("taking").ok()?;
    let id = codec::lock_id(taking.get("id")?)?;
    Some(LockTaken {
        event,
        key: LockKey::new(taking.get_str("c").ok()?, id).ok()?,
        how: match taking.get_str("how").ok()? {
            "taken_over" => Taking::TakenOver,
            _ => Taking::Broken,
        },
        from: taking.get_document("from").ok().and_then(to_holder),
        aid: Aid::from(taking.get_str("aid").ok()?.to_owned()),
        token: taking.get_str("token").ok().and_then(|token| token.parse().ok()),
        by: to_holder(taking.get_document("by").ok()?)?,
        reason: taking.get_str("reason").unwrap_or_default().to_owned(),
        at: presentable(record.get_datetime("ts").ok().copied()),
        repeated: pipeline::is_repeated(record),
    })
}
