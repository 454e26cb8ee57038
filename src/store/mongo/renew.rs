//! Renewals: one command for many sessions.

use std::{collections::HashSet, time::Duration};

use futures_util::future::join;
use mongodb::bson::{Bson, Document, doc};

use crate::{
    lock::Aid,
    store::{
        Active, NamedBy, Renewed,
        lock_rules::{Moment, Record},
        mongo::{
            LockCollection,
            codec::{documents, millis},
            error::{LeftOut, Result, exceeded_time_limit, ours},
            filters::{
                and_live, exclusive_of, of_sessions, renewed_exclusive, set_unless_odd, shared_of,
            },
            send::{Timing, Write, rows, write},
            step::Decided,
        },
    },
};

impl LockCollection<'_> {
    // A single session is asked for again because one of its locks is blocked: the others are renewed. Of several, those
    // with a lock that is known to be stuck are left out.
    pub(super) async fn renew(&self, active: &[Active], ttl: Duration) -> Result<Renewed> {
        let mut blocked = HashSet::new();
        if active.len() > 1 {
            blocked = self.with_stuck_locks(&aids_of(active)).await?;
        }
        let (blocked, active): (Vec<_>, Vec<_>) =
            active.iter().cloned().partition(|it| blocked.contains(it.aid.as_str()));
        let mut renewed = Renewed::default();
        if !active.is_empty() {
            let (exclusive, shared) =
                join(self.renew_exclusive(&active, ttl), self.renew_shared(&active, ttl)).await;
            renewed = exclusive?;
            match shared {
                Ok(documents) => renewed.documents += documents,
                // The exclusive locks are renewed. The sessions are asked for again, fewer at a time.
                Err(_) => renewed.late = aids_of(&active),
            }
        }
        renewed.late.extend(aids_of(&blocked));
        Ok(renewed)
    }

    // update returns: n matched → n live locks renewed; any other lock that the session believes in is
    // lost. Out of time → nobody knows which locks are renewed, so all sessions of the command are late.
    async fn renew_exclusive(&self, active: &[Active], ttl: Duration) -> Result<Renewed> {
        let longer = doc! { "$max": ["$ttl", millis(ttl)] };
        let by = Write::Update(set_unless_odd(renewed_exclusive(longer, &self.rules)));
        let renewable = self.renewable(active);
        let written = match active {
            [_] => self.write_all(renewable, &by).await,
            _ => write(&self.primary, renewable, &by, self.until.write_limit()).await,
        };
        let late = |documents| Renewed { documents, late: aids_of(active) };
        match written {
            Ok(documents) => Ok(Renewed { documents, late: Vec::new() }),
            Err(e) => match ours(&e) {
                Some(&LeftOut { written, .. }) => Ok(late(written)),
                None if exceeded_time_limit(&e) && active.len() > 1 => Ok(late(0)),
                None => Err(e),
            },
        }
    }

    /// Renews the shared locks of these sessions, with one step for each record.
    async fn renew_shared(&self, active: &[Active], ttl: Duration) -> Result<u64> {
        let shared = shared_of(&aids_of(active));
        let active = active.to_vec();
        let renew = move |record: &mut Record, moment: Moment| {
            let renewed = record.renew(&active, ttl, moment.now);
            Decided { answer: renewed, is_promise: renewed }
        };
        let renewed = self.step_each(shared, renew).await?;
        Ok(renewed.into_iter().filter(|renewed| *renewed).count() as u64)
    }

    /// The sessions with a lock on a record that is known to be stuck.
    async fn with_stuck_locks(&self, aids: &[Aid]) -> Result<HashSet<String>> {
        let stuck = self.admission.stuck();
        if stuck.is_empty() {
            return Ok(HashSet::new());
        }
        let mut filter = of_sessions(aids);
        filter.insert("_id", doc! { "$in": stuck });
        let fields = doc! { "_id": 0, "aid": 1, "readers.aid": 1 };
        let found = self.primary.find(filter).projection(fields);
        let found = rows(found.max_time(self.until.read_limit())).await?;
        let grants = found.iter().flat_map(|it| documents(it, "readers").chain([it]));
        Ok(grants.filter_map(|grant| Some(grant.get_str("aid").ok()?.to_owned())).collect())
    }

    /// The records with an exclusive lock that is to be renewed.
    ///
    /// The filter stays short, because it does not say which session has named which tab. The result is the same: the
    /// names of tabs and tokens are random, and known only to their own session.
    fn renewable(&self, active: &[Active]) -> Document {
        let aids = aids_of(active);
        let whole = active.iter().filter(|it| it.named.is_none()).map(|it| it.aid.as_str());
        let (mut tabs, mut tokens) = (vec![Bson::Null], Vec::new());
        for named in active.iter().filter_map(|it| it.named.as_ref()).flatten() {
            match named {
                NamedBy::Tab(tab) => tabs.push(tab.to_string().into()),
                NamedBy::Token(token) => tokens.push(token.to_string()),
            }
        }
        let mut exclusive = exclusive_of(&aids);
        exclusive.extend(doc! { "readers": { "$exists": false }, "$or": [
            { "tab": { "$in": tabs } },
            { "token": { "$in": tokens } },
            { "aid": { "$in": whole.collect::<Vec<_>>() } },
        ] });
        and_live(exclusive, self.rules.ttl)
    }
}

fn aids_of(active: &[Active]) -> Vec<Aid> {
    active.iter().map(|it| it.aid.clone()).collect()
}
