//! The outbox: takes ends and takeovers that wait to be told, and settles them.

use std::time::Duration;

use mongodb::bson::{Document, doc};

use crate::store::{
    News, NewsId, Outbox, Settled,
    mongo::{
        codec::millis,
        ends::{Ends, end, takeover},
        error::Result,
        send::{Timing, Write, rows},
    },
};

impl Ends<'_> {
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
                NewsId::Takeover(event) => takeovers.push(takeover::id_of(*event)),
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
                Settled::Ready => (end::RELEASE, end::ready()),
                Settled::Told => (end::ANNOUNCE, end::told()),
                // An end is never void: it has happened.
                Settled::Void => return Ok(()),
            };
            mine.insert("step", step);
            self.write(mine, &by).await?;
        }
        if !takeovers.is_empty() {
            let by = match settled {
                Settled::Ready => takeover::ready(),
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
            Outbox::Ends => self.waits_for(end::ANNOUNCE),
            Outbox::Takeovers(collections) => {
                let mut waiting = self.waits_for(takeover::TELL);
                waiting.insert("$or", takeover::settled_or_in(collections));
                waiting
            }
        };
        for record in self.take(waiting, lease, limit).await? {
            let read = match what {
                Outbox::Ends => end::ended_in(&record).map(News::Ended),
                Outbox::Takeovers(_) => takeover::takeover_in(&record).map(News::Takeover),
            };
            match read {
                None => self.give_up(&record).await?,
                Some(News::Takeover(takeover)) if takeover::is_open(&record) => {
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
    async fn take(
        &self,
        waiting: Document,
        lease: Duration,
        limit: usize,
    ) -> Result<Vec<Document>> {
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

    /// A record that somebody has edited cannot be announced. It is logged once, and then counts as
    /// done.
    async fn give_up(&self, record: &Document) -> Result<()> {
        log::warn!(
            target: "actix_doclock::store",
            "{} holds a record that is not ours to understand, and is left out: {:?}",
            self.store.inner.ended.name(),
            record.get("_id"),
        );
        let id = doc! { "_id": { "$eq": record.get("_id").cloned() } };
        self.write(id, &end::told()).await.map(drop)
    }
}
