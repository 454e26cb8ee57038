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
    ids(id).into_iter().map(key).collect()
}

/// A key in a form that [`keys`] reads back.
pub(crate) fn text(key: &LockKey) -> String {
    let plain = key.id().to_string();
    if ids(&plain).first() == Some(key.id()) {
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
fn ids(text: &str) -> Vec<LockId> {
    if let Some(id) = serde_json::from_str(text).ok().and_then(|value| from_json(&value)) {
        return vec![id];
    }
    let mut ids: Vec<LockId> = Vec::new();
    ids.extend(object_id(text));
    ids.extend(Uuid::parse_str(text).ok().map(LockId::from));
    ids.extend(text.parse::<i64>().ok().map(LockId::from));
    ids.push(text.into());
    ids
}

/// A bare number gives `None`, because it may also be meant as a string.
fn from_json(value: &Value) -> Option<LockId> {
    match value {
        Value::String(s) => Some(s.as_str().into()),
        Value::Object(object) if object.len() == 1 => {
            let (kind, value) = object.iter().next()?;
            let value = value.as_str()?;
            match kind.as_str() {
                "$oid" => object_id(value),
                "$uuid" => Uuid::parse_str(value).ok().map(Into::into),
                "$numberInt" | "$numberLong" => value.parse::<i64>().ok().map(Into::into),
                _ => None,
            }
        }
        _ => None,
    }
}

fn object_id(text: &str) -> Option<LockId> {
    ObjectId::parse_str(text).ok().map(LockId::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_tried_as_all_that_it_can_stand_for() {
        let hex = "5087b72181a44598000102ff";
        let uuid = "0f8fad5b-d9cb-469f-a165-70867728950e";
        let shown = |text: &str| format!("{:?}", ids(text));
        assert_eq!(shown(hex), format!("[ObjectId({hex}), String({hex:?})]"));
        assert_eq!(shown(uuid), format!("[Uuid({uuid}), String({uuid:?})]"));
        assert_eq!(shown("-5"), r#"[Int64(-5), String("-5")]"#);
        assert_eq!(shown("a/b"), r#"[String("a/b")]"#);
        assert_eq!(shown(""), r#"[String("")]"#);
        assert_eq!(shown("ä7b72181a44598000102fff"), r#"[String("ä7b72181a44598000102fff")]"#);
        assert_eq!(shown(r#""5""#), r#"[String("5")]"#);
        assert_eq!(shown(r#"{"$oid":"5087b72181a44598000102ff"}"#), format!("[ObjectId({hex})]"));
        assert_eq!(shown(r#"{"$numberLong":"5"}"#), "[Int64(5)]");
        assert_eq!(shown(r#"{"$oid":"5"}"#), r#"[String("{\"$oid\":\"5\"}")]"#);
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
