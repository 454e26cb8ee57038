//! Writes on many records, so that a stuck record does not hold up the others.

use mongodb::{
    bson::{Bson, Document, doc},
    error::Error,
};
use tokio::time::timeout;

use crate::{
    key::LockId,
    store::mongo::{
        LockCollection,
        error::{LeftOut, MAX_TIME_EXPIRED, RefusedWrite, Result, exceeded_time_limit},
        send::{Timing, Write, write},
        time_limits::{LIMIT, answered},
    },
};

/// How many records one command writes when the write on all of them has exceeded its time limit, or when
/// one of them is stuck.
const PAGE: usize = 1_000;
/// Into how many parts a page is split to find a stuck record in it.
const PARTS: usize = 10;

impl LockCollection<'_> {
    /// One write on all records that `filter` matches. Returns how many it matched.
    ///
    /// A stuck record does not keep the others from being written.
    ///
    /// # Errors
    /// If any record is left out. All others are written, unless the write ends early.
    pub(super) async fn write_all(&self, filter: Document, by: &Write) -> Result<u64> {
        if self.admission.stuck().is_empty() {
            match write(&self.primary, filter.clone(), by, self.until.write_limit()).await {
                Err(e) if exceeded_time_limit(&e) => {}
                done => return done,
            }
        }
        self.write_in_pages(filter, by).await
    }

    /// As `write_all`, in pages. The records that are known to be stuck come last.
    async fn write_in_pages(&self, filter: Document, by: &Write) -> Result<u64> {
        let found = self.primary.find(filter.clone()).projection(doc! { "_id": 1 });
        let found = found.batch_size(PAGE as u32).max_time(self.until.read_limit());
        let mut found = answered(found).await?;
        let known = self.admission.stuck();
        let mut all = LeftOut { written: 0, left_out: 0 };
        let mut last = Vec::new();
        loop {
            let mut page = Vec::new();
            while page.len() < PAGE && answered(found.advance()).await? {
                let id = found.deserialize_current()?.remove("_id").unwrap_or(Bson::Null);
                (if known.contains(&id) { &mut last } else { &mut page }).push(id);
            }
            if page.is_empty() {
                break;
            }
            self.write_parts(page, &filter, by, &mut all).await?;
        }
        for id in last {
            self.write_parts(vec![id], &filter, by, &mut all).await?;
        }
        if all.left_out == 0 { Ok(all.written) } else { Err(Error::custom(all)) }
    }

    /// Writes these records. A part that exceeds its time limit is split further.
    async fn write_parts(
        &self,
        ids: Vec<Bson>,
        filter: &Document,
        by: &Write,
        all: &mut LeftOut,
    ) -> Result<()> {
        let mut open = vec![ids];
        while let Some(ids) = open.pop() {
            self.until.in_time()?;
            let filter = doc! { "$and": [filter.clone(), { "_id": { "$in": &ids } }] };
            let done = match &ids[..] {
                [id] => self.write_stuck(id, filter, by).await,
                // A fixed limit: a limit that grew with the time of the search would use up the deadline.
                _ => write(&self.primary, filter, by, LIMIT).await,
            };
            match done {
                Ok(written) => all.written += written,
                Err(e) if !exceeded_time_limit(&e) => return Err(e),
                Err(_) if ids.len() == 1 => all.left_out += 1,
                Err(_) => open.extend(ids.chunks(ids.len().div_ceil(PARTS)).map(<[_]>::to_vec)),
            }
        }
        Ok(())
    }

    /// Writes a record that may be stuck, and notes whether the record is stuck.
    async fn write_stuck(&self, id: &Bson, filter: Document, by: &Write) -> Result<u64> {
        // The id of a foreign program.
        let Some(id) = LockId::from_bson(id) else {
            return write(&self.primary, filter, by, LIMIT).await;
        };
        match timeout(LIMIT, self.admit(&id)).await {
            Ok(Ok(mut admitted)) => {
                admitted.limit = admitted.limit.min(LIMIT);
                let limit = admitted.limit;
                admitted.carry_out(write(&self.primary, filter, by, limit)).await
            }
            // The record gets no turn, because of other writes on stuck records.
            _ => {
                let message = "an open transaction blocks the record".to_owned();
                Err(Error::custom(RefusedWrite { code: MAX_TIME_EXPIRED, message }))
            }
        }
    }
}
