//! Renewals: one command for many sessions.

use std::{collections::HashSet, time::Duration};

use mongodb::bson::{Bson, Document, doc};

use crate::{
    lock::Aid,
    store::{
        Active, Named, Renewed,
        mongo::{
            Call,
            codec::{documents, millis},
            error::{LeftOut, Result, exceeded_time_limit, ours},
            grant::{
                Grant, exclusive_of, held_by, is_live_reader, is_of, is_shared, of_sessions,
                readers, renewed_exclusive, replace_with,
            },
            send::{Write, rows, write},
            settle::settle,
        },
    },
};

impl Call<'_> {
    // update returns: n matched → n live locks renewed; any other lock that the session believes in is
    // lost. Out of time → nobody knows which locks are renewed, so all sessions of the command are late.
    pub(super) async fn renew(&self, active: &[Active], ttl: Duration) -> Result<Renewed> {
        if let [session] = active {
            let written = self.write_all(self.renewable(active), &self.renewal(active, ttl)).await;
            return match written.as_ref().map_err(ours) {
                Err(Some(&LeftOut { written, .. })) => {
                    Ok(Renewed { documents: written, late: vec![session.aid.clone()] })
                }
                _ => Ok(Renewed { documents: written?, late: Vec::new() }),
            };
        }
        let blocked = self.with_stuck_locks(&aids_of(active)).await?;
        let (late, active): (Vec<_>, Vec<_>) =
            active.iter().cloned().partition(|it| blocked.contains(it.aid.as_str()));
        let late = aids_of(&late);
        if active.is_empty() {
            return Ok(Renewed { documents: 0, late });
        }
        let (renewable, by) = (self.renewable(&active), self.renewal(&active, ttl));
        match write(&self.primary, renewable, &by, self.until.write_limit()).await {
            Err(e) if exceeded_time_limit(&e) => {
                Ok(Renewed { documents: 0, late: [late, aids_of(&active)].concat() })
            }
            documents => Ok(Renewed { documents: documents?, late }),
        }
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

    /// The records with a lock that is to be renewed.
    ///
    /// The filter stays short, because it does not say which session has named which tab. The result is the same: the
    /// names of tabs and tokens are random, and known only to their own session.
    fn renewable(&self, active: &[Active]) -> Document {
        let aids = aids_of(active);
        let whole = active.iter().filter(|it| it.named.is_none()).map(|it| it.aid.as_str());
        let (mut tabs, mut tokens) = (vec![Bson::Null], Vec::new());
        for named in active.iter().filter_map(|it| it.named.as_ref()).flatten() {
            match named {
                Named::Tab(tab) => tabs.push(tab.to_string().into()),
                Named::Token(token) => tokens.push(token.to_string()),
            }
        }
        let mut exclusive = exclusive_of(&aids);
        let is_named = doc! { "$or": [
            { "tab": { "$in": tabs } },
            { "token": { "$in": tokens } },
            { "aid": { "$in": whole.collect::<Vec<_>>() } },
        ] };
        exclusive.extend(is_named);
        held_by(&aids, exclusive, self.rules.ttl)
    }

    /// Renews the leases of these sessions, for at least `ttl`.
    fn renewal(&self, active: &[Active], ttl: Duration) -> Write {
        let mine = doc! { "$and": [is_of(Grant::Reader, &aids_of(active)), is_live_reader()] };
        let longer = doc! { "$max": ["$$r.ttl", millis(ttl)] };
        let renewed = doc! { "$mergeObjects": [
            "$$r", { "ts": Grant::Reader.not_before(), "ttl": Grant::Reader.capped(longer) },
        ] };
        let each = doc! { "$cond": [mine, renewed, "$$r"] };
        let shared = doc! { "readers": { "$map": { "input": readers(), "as": "r", "in": each } } };
        let longer = doc! { "$max": ["$ttl", millis(ttl)] };
        let renewed =
            doc! { "$cond": [is_shared(), shared, renewed_exclusive(longer, &self.rules)] };
        let mut stages = vec![replace_with(doc! { "$mergeObjects": ["$$ROOT", renewed] })];
        stages.extend(settle(&self.rules));
        Write::Update(stages)
    }
}

fn aids_of(active: &[Active]) -> Vec<Aid> {
    active.iter().map(|it| it.aid.clone()).collect()
}
