//! Ids as text. Only the application knows which type the ids of a collection have.

use actix_doclock::{LockId, LockKey};
use mongodb::bson::oid::ObjectId;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{Failure, Result};

/// All documents that this text may name, as `COLLECTION/ID`.
pub(crate) fn keys(text: &str) -> Result<Vec<LockKey>> {
    let (collection, id) = text.split_once('/').ok_or_else(|| {
        Failure::Usage(format!("`{text}` does not name a document: write COLLECTION/ID"))
    })?;
    let key = |id| LockKey::new(collection, id).map_err(|e| Failure::Usage(e.to_string()));
    ids(id)?.into_iter().map(key).collect()
}

/// A key in a form that [`keys`] reads back.
pub(crate) fn text(key: &LockKey) -> String {
    let plain = key.id().to_string();
    if ids(&plain).is_ok_and(|ids| ids.first() == Some(key.id())) {
        return key.to_string();
    }
    format!("{}/{}", key.collection(), json(key.id()))
}

/// MongoDB's extended JSON.
pub(crate) fn json(id: &LockId) -> Value {
    match id {
        LockId::ObjectId(_) => json!({ "$oid": id.to_string() }),
        LockId::Uuid(_) => json!({ "$uuid": id.to_string() }),
        LockId::Int32(n) => json!(n),
        LockId::Int64(n) => json!(n),
        LockId::String(s) => json!(s),
        // A later version may have more types.
        other => json!(other.to_string()),
    }
}

/// The likeliest type comes first. MongoDB treats integers of both widths as equal.
fn ids(text: &str) -> Result<Vec<LockId>> {
    if let Ok(value) = serde_json::from_str(text)
        && let Some(id) = from_json(&value)?
    {
        return Ok(vec![id]);
    }
    let mut ids: Vec<LockId> = Vec::new();
    ids.extend(object_id(text));
    ids.extend(uuid(text));
    ids.extend(integer(text));
    ids.push(text.into());
    Ok(ids)
}

/// A bare number gives `None`, because it may also be meant as a string.
fn from_json(value: &Value) -> Result<Option<LockId>> {
    let object = match value {
        Value::String(s) => return Ok(Some(s.as_str().into())),
        Value::Object(object) if object.len() == 1 => object,
        _ => return Ok(None),
    };
    let Some((kind, of)) = object.iter().next().filter(|(kind, _)| kind.starts_with('$')) else {
        return Ok(None);
    };
    let text = of.as_str().unwrap_or_default();
    let (id, needed) = match kind.as_str() {
        "$oid" => (object_id(text), "an ObjectId has 24 hexadecimal digits, in quotes"),
        "$uuid" => (uuid(text), "a UUID has 32 hexadecimal digits, in quotes"),
        "$numberInt" | "$numberLong" => {
            (integer(text), "an integer has at most 64 bits, in quotes")
        }
        _ => (None, "the types are `$oid`, `$uuid`, `$numberInt` and `$numberLong`"),
    };
    let wrong = || Failure::Usage(format!("`{value}` is no id: {needed}"));
    id.map(Some).ok_or_else(wrong)
}

fn object_id(text: &str) -> Option<LockId> {
    ObjectId::parse_str(text).ok().map(LockId::from)
}

fn uuid(text: &str) -> Option<LockId> {
    Uuid::parse_str(text).ok().map(LockId::from)
}

fn integer(text: &str) -> Option<LockId> {
    text.parse::<i64>().ok().map(LockId::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_tried_as_all_that_it_can_stand_for() {
        let hex = "5087b72181a44598000102ff";
        let uuid = "0f8fad5b-d9cb-469f-a165-70867728950e";
        let shown = |text: &str| format!("{:?}", ids(text).ok().unwrap());
        assert_eq!(shown(hex), format!("[ObjectId({hex}), String({hex:?})]"));
        assert_eq!(shown(uuid), format!("[Uuid({uuid}), String({uuid:?})]"));
        assert_eq!(shown("-5"), r#"[Int64(-5), String("-5")]"#);
        assert_eq!(shown("a/b"), r#"[String("a/b")]"#);
        assert_eq!(shown(""), r#"[String("")]"#);
        assert_eq!(shown("ä7b72181a44598000102fff"), r#"[String("ä7b72181a44598000102fff")]"#);
        assert_eq!(shown(r#""5""#), r#"[String("5")]"#);
        assert_eq!(shown(r#"{"$oid":"5087b72181a44598000102ff"}"#), format!("[ObjectId({hex})]"));
        assert_eq!(shown(r#"{"$numberLong":"5"}"#), "[Int64(5)]");
        assert_eq!(shown(r#"{"a":"5"}"#), r#"[String("{\"a\":\"5\"}")]"#);
    }

    #[test]
    fn an_id_in_json_that_its_type_cannot_have_is_wrong_use() {
        for (wrong, says) in [
            (r#"{"$oid":"zz"}"#, "an ObjectId has 24"),
            (r#"{"$oid":5}"#, "in quotes"),
            (r#"{"$uuid":"x"}"#, "a UUID has 32"),
            (r#"{"$numberLong":"x"}"#, "an integer has at most 64 bits"),
            (r#"{"$numberInt":"9223372036854775808"}"#, "an integer has at most 64 bits"),
            (r#"{"$date":"2026-11-21T15:24:07Z"}"#, "the types are"),
        ] {
            let Err(Failure::Usage(text)) = keys(&format!("workitem/{wrong}")) else {
                panic!("{wrong}")
            };
            assert!(text.contains(wrong) && text.contains(says), "{text}");
        }
    }

    #[test]
    fn what_is_shown_reads_back_as_the_same_id() {
        let uuid = Uuid::from_u128(7);
        for id in [
            LockId::ObjectId([0xff; 12]),
            uuid.into(),
            5_i32.into(),
            i64::MIN.into(),
            "a/b".into(),
            "5".into(),
            "007".into(),
            "\"5\"".into(),
            r#"{"$oid":"5"}"#.into(),
            uuid.to_string().into(),
            "ffffffffffffffffffffffff".into(),
            "".into(),
        ] {
            let key = LockKey::new("workitem", id).unwrap();
            let shown = text(&key);
            let Ok(read) = keys(&shown) else { panic!("{shown}") };
            assert_eq!(read.first(), Some(&key), "{shown}");
        }
    }
}
