//! Pending announcements of ends.

use std::time::Duration;

use futures_util::TryStreamExt;
use mongodb::bson::{Document as Record, doc};
use uuid::Uuid;

use crate::{
    ended::{EndReason, SessionEnded},
    error::StoreError,
    lock::Aid,
    store::mongo::{
        ENDED, MongoStore,
        ends::{names_of, pipeline},
        error::store_error,
        lanes,
        record::{holder_of, presentable},
    },
};

impl MongoStore {
    pub(in crate::store::mongo) async fn take_ends(
        &self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<SessionEnded>, StoreError> {
        let mut taken = Vec::new();
        for record in
            self.take_waiting(pipeline::waits_for("announce", worker), worker, lease, limit).await?
        {
            match to_ended(&record) {
                Some(end) => taken.push(end),
                None => self.give_up(&record).await?,
            }
        }
        Ok(taken)
    }

    /// Takes records that wait for a step, and reserves them for this worker.
    pub(super) async fn take_waiting(
        &self,
        waiting: Record,
        worker: Uuid,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<Record>, StoreError> {
        let failed = |e| store_error("taking records to announce", e);
        let ended = &self.inner.ended;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let found = ended.find(waiting.clone()).projection(doc! { "_id": 1 }).limit(limit);
        let found = found.max_time(lanes::read_limit()).await.map_err(failed)?;
        let found: Vec<Record> = found.try_collect().await.map_err(failed)?;
        let ids: Vec<_> = found.iter().filter_map(|record| record.get("_id").cloned()).collect();
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut mine = waiting;
        mine.insert("_id", doc! { "$in": ids });
        let taken = self.write_ended(mine.clone(), pipeline::take(worker, lease), false).await;
        taken.map_err(failed)?;
        mine.insert("by", worker.to_string());
        let taken = ended.find(mine).max_time(lanes::read_limit()).await.map_err(failed)?;
        taken.try_collect().await.map_err(failed)
    }

    pub(in crate::store::mongo) async fn ends_announced(
        &self,
        worker: Uuid,
        ended: &[SessionEnded],
    ) -> Result<(), StoreError> {
        let ids: Vec<_> = ended.iter().map(|end| end.aid.as_str()).collect();
        // Only the same end: while its idle end was being announced, the session may have ended
        // permanently.
        let events: Vec<_> = ended.iter().map(|end| end.event.to_string()).collect();
        let mine = doc! {
            "_id": { "$in": ids },
            "event": { "$in": events },
            "by": worker.to_string(),
            "step": "announce",
        };
        let done = self.write_ended(mine, pipeline::announced(), false).await;
        done.map_err(|e| store_error("recording announced ends of sessions", e))?;
        Ok(())
    }

    /// A record that somebody has edited cannot be announced. It is logged once, and then counts as
    /// done.
    pub(super) async fn give_up(&self, record: &Record) -> Result<(), StoreError> {
        log::warn!(
            target: "actix_doclock::store",
            "{ENDED} holds a record that is not ours to understand, and is left out: {:?}",
            record.get("_id"),
        );
        let id = doc! { "_id": { "$eq": record.get("_id").cloned() } };
        let done = self.write_ended(id, pipeline::announced(), false).await;
        done.map_err(|e| store_error("leaving out a broken record", e))?;
        Ok(())
    }
}

fn to_ended(record: &Record) -> Option<SessionEnded> {
    Some(SessionEnded {
        event: record.get_str("event").ok()?.parse().ok()?,
        aid: Aid::from(record.get_str("_id").ok()?.to_owned()),
        holder: holder_of(record),
        reason: EndReason::from_stored(record.get_str("reason").unwrap_or_default()),
        for_good: !record.get_bool("silent").unwrap_or(false),
        locks: names_of(record),
        at: presentable(record.get_datetime("ts").ok().copied()),
        repeated: pipeline::is_repeated(record),
    })
}
