//! Renewals: one command for many sessions.

use std::{collections::HashSet, time::Duration};

use mongodb::{
    bson::{Bson, Document, doc},
    error::Result,
};

use crate::{
    lock::Aid,
    store::{
        Active, Renewed,
        mongo::{
            Prepared,
            error::{LeftOut, ours, ran_out_of_time},
            lanes, pipeline,
            write::{self, Write},
        },
    },
};

impl Prepared {
    // update returns: n matched → n live locks renewed; any other lock that the session believes in is
    // lost. Out of time → nobody knows which locks are renewed, so all sessions of the command are late.
    pub(super) async fn renew(&self, active: &[Active], ttl: Duration) -> Result<Renewed> {
        if let [session] = active {
            let (renewed, by) = self.renewal(active, ttl);
            let written = self.write_all(renewed, &by).await;
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
        let (renewed, by) = self.renewal(&active, ttl);
        let command = by.command(&self.locks, renewed, false);
        match write::write(&self.locks, command, lanes::write_limit()).await {
            Ok(documents) => Ok(Renewed { documents, late }),
            Err(e) if ran_out_of_time(&e) => {
                Ok(Renewed { documents: 0, late: [late, aids_of(&active)].concat() })
            }
            Err(e) => Err(e),
        }
    }

    fn renewal(&self, active: &[Active], ttl: Duration) -> (Document, Write) {
        let by = pipeline::renew(&aids_of(active), ttl, &self.rules);
        (pipeline::renewable(active, self.rules.ttl), Write::Update(by))
    }

    /// The sessions with a lock on a record that is known to be stuck.
    async fn with_stuck_locks(&self, aids: &[Aid]) -> Result<HashSet<String>> {
        let (stuck, mut blocked) = (self.lanes.stuck(), HashSet::new());
        if stuck.is_empty() {
            return Ok(blocked);
        }
        let mut filter = pipeline::of_sessions(aids);
        filter.insert("_id", doc! { "$in": stuck });
        let fields = doc! { "_id": 0, "aid": 1, "readers.aid": 1 };
        let mut found =
            self.locks.find(filter).projection(fields).max_time(lanes::read_limit()).await?;
        while found.advance().await? {
            let mut record = found.deserialize_current()?;
            let readers = match record.remove("readers") {
                Some(Bson::Array(readers)) => readers,
                _ => Vec::new(),
            };
            let grants = readers.iter().filter_map(Bson::as_document).chain([&record]);
            blocked.extend(grants.filter_map(|grant| Some(grant.get_str("aid").ok()?.to_owned())));
        }
        Ok(blocked)
    }
}

fn aids_of(active: &[Active]) -> Vec<Aid> {
    active.iter().map(|it| it.aid.clone()).collect()
}
