//! Ids, numbers, dates and documents as values of the driver.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, SystemTime},
};

pub(in crate::store) use mongodb::bson::Bson;
use mongodb::bson::{DateTime, Document, RawDocumentBuf, doc};
use mongodb::error::{Error, ErrorKind};

use crate::{
    error::BoxError,
    key::{LockId, LockKey},
    lock::{Aid, Holder, LockToken},
    store::{StoredDocument, readable},
};

/// True if the driver could not read the reply to a command that was carried out: it contains a text that is not UTF-8.
pub(super) fn is_unreadable(error: &Error) -> bool {
    reply_in(error).is_some_and(|reply| readable(reply.as_bytes()).is_some())
}

/// The reply that the driver could not read.
pub(super) fn reply_in(error: &Error) -> Option<&RawDocumentBuf> {
    let is_invalid = matches!(error.kind.as_ref(), ErrorKind::InvalidResponse { .. });
    error.server_response().filter(|_| is_invalid)
}

/// The driver's value of a document, in which texts that are not UTF-8 are bytes. The log names the first such document.
pub(super) fn readable_document(raw: &RawDocumentBuf) -> Result<Document, Error> {
    static HAS_WARNED: AtomicBool = AtomicBool::new(false);
    let read = |raw: RawDocumentBuf| Document::try_from(raw).map_err(Error::custom);
    let error = match read(raw.clone()) {
        Err(error) => error,
        read => return read,
    };
    let Some((bytes, path)) = readable(raw.as_bytes()) else { return Err(error) };
    let document = read(RawDocumentBuf::from_bytes(bytes).map_err(Error::custom)?)?;
    if !HAS_WARNED.swap(true, Relaxed) {
        log::warn!(
            target: "actix_doclock::store",
            "a record has a text that is not UTF-8, at `{path}`, and counts as if the text were missing: correct or \
             remove it, and look for others. Its `_id` is {}",
            document.get("_id").unwrap_or(&Bson::Null),
        );
    }
    Ok(document)
}

/// A number of any BSON type, because a foreign program may have written it.
pub(super) fn number(value: &Bson) -> Option<f64> {
    match value {
        Bson::Int32(n) => Some((*n).into()),
        Bson::Int64(n) => Some(*n as f64),
        Bson::Double(n) => Some(*n),
        Bson::Decimal128(n) => n.to_string().parse().ok(),
        _ => None,
    }
}

/// The key of the document whose record has this `_id`. `None` if a foreign program locks documents whose ids this
/// crate cannot represent. Nobody can lock them here.
pub(super) fn key_in(collection: &str, record: &Document) -> Option<LockKey> {
    LockKey::new(collection, LockId::from_bson(record.get("_id")?)?).ok()
}

/// The session in this field; empty if there is none.
pub(super) fn aid_in(record: &Document, field: &str) -> Aid {
    Aid::from(record.get_str(field).unwrap_or_default().to_owned())
}

pub(super) fn token_in(grant: &Document) -> Option<LockToken> {
    grant.get_str("token").ok().and_then(|token| token.parse().ok())
}

/// The person in this field.
pub(super) fn holder_in(record: &Document, field: &str) -> Option<Holder> {
    let stored = record.get_document(field).ok()?;
    let holder = Holder::new(stored.get_str("label").ok()?);
    Some(match stored.get_str("user") {
        Ok(user) => holder.of_user(user),
        Err(_) => holder,
    })
}

pub(super) fn in_our_time(millis: i64) -> Duration {
    /// Longer than any lock, and short enough for an `Instant`.
    const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    Duration::from_millis(millis.try_into().unwrap_or(0)).min(FOREVER)
}

/// A date that can be shown. Foreign programs write any date, but RFC 3339 has only years of four
/// digits.
pub(super) fn presentable(date: Option<DateTime>) -> SystemTime {
    const END_OF_9999: i64 = 253_402_300_799_999;
    let millis = date.map_or(0, DateTime::timestamp_millis).clamp(0, END_OF_9999);
    DateTime::from_millis(millis).to_system_time()
}

/// The documents in this array.
pub(super) fn documents<'a>(
    record: &'a Document,
    array: &str,
) -> impl Iterator<Item = &'a Document> + use<'a> {
    record.get_array(array).into_iter().flatten().filter_map(Bson::as_document)
}

/// True if the field has this type.
pub(super) fn is(field: &str, bson_type: &str) -> Document {
    doc! { "$eq": [{ "$type": field }, bson_type] }
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// True if the document has this `_id`.
pub(super) fn has_id(document: &StoredDocument, id: &LockId) -> bool {
    let raw = raw(document).ok();
    let found = raw.as_ref().and_then(|raw| Bson::try_from(raw.get("_id").ok()??).ok());
    found.as_ref().and_then(LockId::from_bson).as_ref() == Some(id)
}

pub(super) fn raw(document: &StoredDocument) -> Result<RawDocumentBuf, BoxError> {
    Ok(RawDocumentBuf::from_bytes(document.as_bytes().to_vec())?)
}

/// The document as a value of the driver's. `None` if such a value cannot hold all of it: a name stands twice, or a text
/// is not UTF-8.
///
/// Does not use serde, which would read `{ "$oid": … }` and its like as other types, and store them as those types.
pub(super) fn exact(document: &StoredDocument) -> Option<Document> {
    exactly(&raw(document).ok()?)
}

/// True if the driver's value holds all of this record.
pub(super) fn is_exact(record: &RawDocumentBuf) -> bool {
    exactly(record).is_some()
}

/// True if the driver's value holds all of these fields of a record.
pub(super) fn are_exact(record: &RawDocumentBuf, names: &[&str]) -> bool {
    let mut seen = Vec::new();
    record.iter().all(|field| {
        let Ok((name, value)) = field else { return false };
        let name = AsRef::<str>::as_ref(name);
        let within = |bytes: &[u8]| RawDocumentBuf::from_bytes(bytes.to_vec());
        let is_exact = || match (value.as_document(), value.as_array()) {
            (Some(it), _) => within(it.as_bytes()).is_ok_and(|it| is_exact(&it)),
            (_, Some(it)) => within(it.as_bytes()).is_ok_and(|it| is_exact(&it)),
            _ => Bson::try_from(value).is_ok(),
        };
        let is_first = !seen.contains(&name);
        seen.push(name);
        !names.contains(&name) || is_first && is_exact()
    })
}

fn exactly(raw: &RawDocumentBuf) -> Option<Document> {
    let exact = Document::try_from(raw.clone()).ok()?;
    let again = RawDocumentBuf::try_from(&exact).ok()?;
    (again.as_bytes() == raw.as_bytes()).then_some(exact)
}

#[cfg(test)]
mod tests {
    use mongodb::bson::oid::ObjectId;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn every_id_keeps_its_bson_type() {
        let ids: [LockId; 5] = [
            ObjectId::new().into(),
            "$where".into(),
            5_i32.into(),
            5_i64.into(),
            Uuid::new_v4().into(),
        ];
        for id in ids {
            let stored = Bson::from(&id);
            assert_eq!(format!("{:?}", LockId::from_bson(&stored)), format!("Some({id:?})"));
        }
        assert_eq!(LockId::from_bson(&Bson::Double(7.0)), Some(7_i64.into()));
        for foreign in [Bson::Null, Bson::Double(0.5), Bson::Double(f64::NAN), doc! {}.into()] {
            assert_eq!(LockId::from_bson(&foreign), None);
        }
    }
}
