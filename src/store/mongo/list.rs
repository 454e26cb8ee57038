//! Several locks at once.

use std::{slice, time::Instant};

use mongodb::bson::{Bson, Document};

use super::{MongoStore, codec, error::store_error, pipeline};
use crate::{Aid, Lock, LockKey, StoreError};

/// What a session has in a collection.
pub(super) struct OfSession {
    /// Its live locks.
    pub(super) held: Vec<Lock>,
    /// Whether it is in any list of readers, or may be: also where its own lease there is over.
    pub(super) may_read: bool,
}

impl MongoStore {
    /// Live locks, of these sessions only if any are named.
    pub(super) async fn list_of(
        &self,
        collection: &str,
        aids: Option<&[Aid]>,
        limit: usize,
    ) -> Result<Vec<Lock>, StoreError> {
        let rules = self.prepared(collection)?.rules;
        let live = match aids {
            None => pipeline::and_live(Document::new(), rules.ttl),
            Some(aids) => pipeline::held_by(aids, rules.ttl),
        };
        let mut locks = Vec::new();
        self.each_record(collection, live, aids, limit, |_, found| locks.extend(found)).await?;
        Ok(locks)
    }

    /// All that has to be removed if the session is to have nothing.
    pub(super) async fn of_session(
        &self,
        collection: &str,
        aid: &Aid,
        limit: usize,
    ) -> Result<OfSession, StoreError> {
        let aids = slice::from_ref(aid);
        let (mut of_session, mut seen) = (OfSession { held: Vec::new(), may_read: false }, 0);
        let records = pipeline::of_sessions(aids);
        self.each_record(collection, records, Some(aids), limit, |record, found| {
            seen += 1;
            of_session.may_read |= matches!(record.get("readers"), Some(Bson::Array(_)));
            of_session.held.extend(found.into_iter().filter(|lock| !lock.expires_in().is_zero()));
        })
        .await?;
        // Not known of those beyond the limit.
        of_session.may_read |= seen >= limit;
        Ok(of_session)
    }

    async fn each_record(
        &self,
        collection: &str,
        filter: Document,
        aids: Option<&[Aid]>,
        limit: usize,
        mut take: impl FnMut(&Document, Vec<Lock>),
    ) -> Result<(), StoreError> {
        let at = self.prepared(collection)?;
        let failed = |e| store_error(format!("listing locks in {collection}"), e);
        let asked = Instant::now();
        let mut cursor = (at.locks)
            .find(filter)
            .projection(pipeline::list_fields(aids))
            .limit(i64::try_from(limit).unwrap_or(0))
            .await
            .map_err(failed)?;
        while cursor.advance().await.map_err(failed)? {
            let record = cursor.deserialize_current().map_err(failed)?;
            // A foreign program may lock documents whose ids we cannot name, and so not lock.
            let id = record.get("_id").and_then(codec::lock_id);
            if let Some(key) = id.and_then(|id| LockKey::new(collection, id).ok()) {
                take(&record, at.fetched(&key, &record, asked).locks());
            }
        }
        Ok(())
    }
}
