//! A lock and its document, by one read.

use std::time::Instant;

use mongodb::bson::{Bson, Document, RawDocumentBuf};

use crate::{
    error::StoreError,
    key::LockKey,
    lock::{Aid, Lock, Mode},
    store::{
        Confirmed, Format, StoredDocument,
        mongo::{Prepared, codec, error::store_error, lanes, pipeline},
    },
};

impl Prepared {
    // aggregate returns: the record of the lock, if there is one, and then the document, if it was asked
    // for and exists, in a wrapper without an `_id`. The server reads the lock first, both from
    // majority-committed state. A live lock of the session → confirmed. Anything else → not known: only the
    // primary may have the lock or its last renewal, which this read does not see.
    pub(super) async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
    ) -> Result<Option<Confirmed>, StoreError> {
        let failed = |e| store_error(format!("confirming the lock on {key:?}"), e);
        let mut stages = pipeline::record(key.id());
        if load {
            stages.push(pipeline::with_document(self.documents.name(), key.id()));
        }
        let asked = Instant::now();
        let found = self.leases.aggregate(stages).with_type::<RawDocumentBuf>();
        let mut cursor = found.max_time(lanes::read_limit()).await.map_err(failed)?;
        let (mut confirmed, mut document) = (None, None);
        while cursor.advance().await.map_err(failed)? {
            let found = cursor.current();
            if found.get("_id").is_ok_and(|id| id.is_some()) {
                let record = codec::decode(found.as_bytes()).ok();
                confirmed = record.and_then(|record| self.own(key, aid, &record, asked));
            } else if let Ok(loaded) = found.get_document(pipeline::DOCUMENT) {
                let bytes = loaded.as_bytes().to_vec();
                document = Some(StoredDocument::from_bytes(Format::Bson, bytes));
            }
        }
        Ok(confirmed.map(|confirmed| Confirmed { document, ..confirmed }))
    }

    /// The live lock of this session in a record.
    fn own(
        &self,
        key: &LockKey,
        aid: &Aid,
        record: &Document,
        asked: Instant,
    ) -> Option<Confirmed> {
        let is_own =
            |lock: &Lock| lock.aid == *aid && lock.token.is_some() && !lock.expires_in().is_zero();
        let lock = self.fetched(key, record, asked).locks().find(is_own)?;
        let grant = match lock.mode {
            Mode::Exclusive => record,
            Mode::Shared => reader(record, aid)?,
        };
        Some(Confirmed {
            page: grant.get_str("page").ok().and_then(|page| page.parse().ok()),
            is_known: grant.get_bool("again").unwrap_or(false),
            is_leaving: grant.get_document("leaving").is_ok(),
            document: None,
            lock,
        })
    }
}

fn reader<'a>(record: &'a Document, aid: &Aid) -> Option<&'a Document> {
    let mut readers = record.get_array("readers").ok()?.iter().filter_map(Bson::as_document);
    readers.find(|reader| reader.get_str("aid").is_ok_and(|it| it == aid.as_str()))
}
