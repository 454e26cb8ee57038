//! A lock and its document, by one read.

use std::time::Instant;

use mongodb::bson::{Document, RawDocumentBuf};

use crate::{
    error::{BoxError, StoreError, StoreErrorKind},
    key::LockKey,
    lock::{Aid, Mode},
    store::{
        Confirmed, Format, StoredDocument,
        mongo::{Prepared, codec, error::store_error, lanes, pipeline},
    },
};

impl Prepared {
    // aggregate returns: the record of the lock, if there is one, and then the document, if it was asked
    // for and exists. The server reads the lock first, both from majority-committed state. A live lock of
    // the session → confirmed. Anything else → not known: only the primary may have the lock or its last
    // renewal, which this read does not see.
    pub(super) async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
    ) -> Result<Option<Confirmed>, StoreError> {
        let failed = |e| store_error(format!("confirming the lock on {key:?}"), e);
        let mut stages = pipeline::own_lock(key.id(), aid);
        if load {
            stages.push(pipeline::with_document(self.documents.name(), key.id()));
        }
        let asked = Instant::now();
        let found = self.leases.aggregate(stages).with_type::<RawDocumentBuf>();
        let mut cursor = found.max_time(lanes::read_limit()).await.map_err(failed)?;
        let (mut confirmed, mut document) = (None, None);
        while cursor.advance().await.map_err(failed)? {
            let found = cursor.current();
            if let Ok(loaded) = found.get_document(pipeline::DOCUMENT) {
                let bytes = loaded.as_bytes().to_vec();
                document = Some(StoredDocument::from_bytes(Format::Bson, bytes));
            } else {
                let record = codec::decode(found.as_bytes()).map_err(|e| unreadable(key, e))?;
                confirmed = self.own(key, aid, &record, asked);
            }
        }
        Ok(confirmed.map(|confirmed| Confirmed { document, ..confirmed }))
    }

    fn own(
        &self,
        key: &LockKey,
        aid: &Aid,
        record: &Document,
        asked: Instant,
    ) -> Option<Confirmed> {
        let lock = self.fetched(key, record, asked).lock()?;
        if lock.aid != *aid || lock.token.is_none() || lock.expires_in().is_zero() {
            return None;
        }
        let grant = match lock.mode {
            Mode::Exclusive => record,
            Mode::Shared => record.get_document("reader").ok()?,
        };
        Some(Confirmed {
            lock,
            page: grant.get_str("page").ok().and_then(|page| page.parse().ok()),
            is_known: grant.get_bool("again").unwrap_or(false),
            is_leaving: record.get_bool(pipeline::LEAVING).unwrap_or(false),
            document: None,
        })
    }
}

fn unreadable(key: &LockKey, why: BoxError) -> StoreError {
    StoreError::new(StoreErrorKind::Other, format!("reading the lock on {key:?}")).because(why)
}
