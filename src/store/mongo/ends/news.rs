//! The outbox: ends and takeovers that wait to be told.

use std::{slice, time::Duration};

use mongodb::bson::{Bson, Document as Record, doc};
use uuid::Uuid;

use crate::{
    ended::{EndReason, SessionEnded},
    key::{LockId, LockKey},
    lock::{Aid, Holder},
    store::{
        News, NewsId, Outbox, Query, Settled,
        mongo::{
            codec::{self, aid_in, holder_in, is, millis, presentable},
            ends::{Ends, more_in, names_of, released},
            error::Result,
            send::{Timing, Write, rows},
        },
    },
    takeover::{Takeover, TakeoverKind},
};

impl Ends<'_> {
    // update, an upsert: inserted; or found, because the reply to an earlier attempt was lost.
    pub(super) async fn put_news(&self, takeover: &Takeover, lease: Duration) -> Result<()> {
        let content = doc! {
            "c": takeover.key.collection(),
            "id": Bson::from(takeover.key.id()),
            "aid": takeover.aid.as_str(),
            "token": takeover.token.map(|token| token.to_string()),
            "how": takeover.kind.as_str(),
            "from": takeover.from.as_ref().map(stored),
            "by": stored(&takeover.by),
            "reason": &takeover.reason,
        };
        let new = doc! {
            "_id": "$_id",
            "ts": "$$NOW",
            "step": "tell",
            "asked": true,
            "by": self.by(),
            "lease": { "$add": ["$$NOW", millis(lease)] },
            "taking": { "$literal": content },
        };
        let once = doc! { "$replaceWith": { "$cond": [is("$ts", "date"), "$$ROOT", new] } };
        let id = doc! { "_id": { "$eq": id_of(takeover.event) } };
        self.write(id, &Write::Upsert(vec![once])).await.map(drop)
    }

    // update or delete returns: so many are settled. The others were settled by an earlier attempt, or another worker
    // has them.
    pub(super) async fn settle_news(&self, news: &[NewsId], settled: Settled) -> Result<()> {
        let (mut ends, mut events, mut takeovers) = (Vec::new(), Vec::new(), Vec::new());
        for id in news {
            match id {
                NewsId::Ended(aid, event) => {
                    ends.push(aid.as_str());
                    events.extend(event.map(|event| event.to_string()));
                }
                NewsId::Takeover(event) => takeovers.push(id_of(*event)),
            }
        }
        if !ends.is_empty() {
            let mut mine = doc! { "_id": { "$in": ends }, "by": self.by() };
            // Settles only the same end: while its idle end was being announced, the session may have ended
            // permanently.
            if !events.is_empty() {
                mine.insert("event", doc! { "$in": events });
            }
            let (step, by) = match settled {
                Settled::Ready => ("release", released()),
                Settled::Told => ("announce", announced()),
                // An end is never void: it has happened.
                Settled::Void => return Ok(()),
            };
            mine.insert("step", step);
            self.write(mine, &by).await?;
        }
        if !takeovers.is_empty() {
            let by = match settled {
                Settled::Ready => Write::Update(vec![doc! { "$unset": ["asked", "by", "lease"] }]),
                Settled::Void | Settled::Told => Write::Delete,
            };
            self.write(doc! { "_id": { "$in": takeovers }, "by": self.by() }, &by).await?;
        }
        Ok(())
    }

    pub(super) async fn take_news(
        &self,
        what: Outbox<'_>,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<News>> {
        let mut news = Vec::new();
        let waiting = match what {
            Outbox::Ends => self.waits_for("announce"),
            Outbox::Takeovers(collections) => {
                let mut waiting = self.waits_for("tell");
                // Only a server that knows the collection can tell whether its lock is gone.
                let is_settled = doc! { "asked": { "$exists": false } };
                let is_known = doc! { "taking.c": { "$in": collections } };
                waiting.insert("$or", vec![is_settled, is_known]);
                waiting
            }
        };
        for record in self.take(waiting, lease, limit).await? {
            let read = match what {
                Outbox::Ends => to_ended(&record).map(News::Ended),
                Outbox::Takeovers(_) => to_takeover(&record).map(News::Takeover),
            };
            match read {
                None => self.give_up(&record).await?,
                Some(News::Takeover(takeover)) if record.get_bool("asked").unwrap_or(false) => {
                    match self.still_has(&takeover).await {
                        Ok(false) => news.push(News::Takeover(takeover)),
                        Ok(true) => {
                            let id = NewsId::Takeover(takeover.event);
                            self.settle_news(&[id], Settled::Void).await?;
                        }
                        // The note is taken again after its lease. The other notes do not wait for it.
                        Err(e) => log::debug!(
                            target: "actix_doclock::store",
                            "it is not known yet whether a lock was taken: {e}",
                        ),
                    }
                }
                Some(it) => news.push(it),
            }
        }
        Ok(news)
    }

    /// Takes records that wait for a step, and reserves them for this worker.
    async fn take(&self, waiting: Record, lease: Duration, limit: usize) -> Result<Vec<Record>> {
        let (ended, limit) = (&self.store.inner.ended, i64::try_from(limit).unwrap_or(i64::MAX));
        let found = ended.find(waiting.clone()).projection(doc! { "_id": 1 }).limit(limit);
        let found = rows(found.max_time(self.until.read_limit())).await?;
        let ids: Vec<_> = found.iter().filter_map(|record| record.get("_id").cloned()).collect();
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        // A repetition of a command whose reply was lost does not count.
        let is_mine = doc! { "$eq": ["$by", self.by()] };
        let anew = doc! { "$cond": [{ "$and": [{ "$gt": ["$lease", "$$NOW"] }, is_mine] }, 0, 1] };
        let before = doc! { "$cond": [{ "$isNumber": "$taken" }, "$taken", 0] };
        let taken = vec![doc! { "$set": {
            "by": self.by(),
            "lease": { "$add": ["$$NOW", millis(lease)] },
            "taken": { "$add": [before, anew] },
        } }];
        let mut mine = waiting;
        mine.insert("_id", doc! { "$in": ids });
        self.write(mine.clone(), &Write::Update(taken)).await?;
        mine.insert("by", self.by());
        rows(ended.find(mine).max_time(self.until.read_limit())).await
    }

    /// True if the holder still has its lock: the server that wrote the note died first.
    async fn still_has(&self, takeover: &Takeover) -> Result<bool> {
        let collection = self.prepared(takeover.key.collection())?;
        let locks = collection.locks(Query::On(slice::from_ref(&takeover.key)), 1).await?;
        Ok(locks.iter().any(|lock| lock.aid == takeover.aid && lock.token == takeover.token))
    }

    /// A record that somebody has edited cannot be announced. It is logged once, and then counts as
    /// done.
    async fn give_up(&self, record: &Record) -> Result<()> {
        log::warn!(
            target: "actix_doclock::store",
            "{} holds a record that is not ours to understand, and is left out: {:?}",
            self.store.inner.ended.name(),
            record.get("_id"),
        );
        let id = doc! { "_id": { "$eq": record.get("_id").cloned() } };
        self.write(id, &announced()).await.map(drop)
    }
}

/// Marks all steps as done.
fn announced() -> Write {
    let done = ["step", "by", "lease", "locks", "more", "holder", "noted", "taken"];
    Write::Update(vec![doc! { "$unset": done.as_slice() }])
}

fn id_of(event: Uuid) -> String {
    format!("taken {event}")
}

fn stored(holder: &Holder) -> Record {
    let mut record = doc! { "label": &holder.label };
    if let Some(user) = &holder.user {
        record.insert("user", user);
    }
    record
}

/// True if the record was taken to be announced more than once.
fn is_repeated(record: &Record) -> bool {
    record.get("taken").and_then(codec::number).is_some_and(|taken| taken > 1.0)
}

fn to_ended(record: &Record) -> Option<SessionEnded> {
    Some(SessionEnded {
        event: record.get_str("event").ok()?.parse().ok()?,
        aid: aid_in(record, "_id"),
        holder: holder_in(record, "holder"),
        reason: EndReason::from_name(record.get_str("reason").unwrap_or_default()),
        for_good: !record.get_bool("silent").unwrap_or(false),
        locks: names_of(record),
        more: more_in(record),
        at: presentable(record.get_datetime("ts").ok().copied()),
        repeated: is_repeated(record),
    })
}

fn to_takeover(record: &Record) -> Option<Takeover> {
    let event = record.get_str("_id").ok()?.strip_prefix("taken ")?.parse().ok()?;
    let content = record.get_document("taking").ok()?;
    let id = LockId::from_bson(content.get("id")?)?;
    Some(Takeover {
        event,
        key: LockKey::new(content.get_str("c").ok()?, id).ok()?,
        kind: TakeoverKind::named(content.get_str("how").ok()),
        from: holder_in(content, "from"),
        aid: Aid::from(content.get_str("aid").ok()?.to_owned()),
        token: content.get_str("token").ok().and_then(|token| token.parse().ok()),
        by: holder_in(content, "by")?,
        reason: content.get_str("reason").unwrap_or_default().to_owned(),
        at: presentable(record.get_datetime("ts").ok().copied()),
        repeated: is_repeated(record),
    })
}
