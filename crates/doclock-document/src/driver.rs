//! Rust values as BSON, as the driver encodes them, for both bson 2 and bson 3.

use serde::{Serialize, de::DeserializeOwned};

use super::readable;
use crate::BoxError;

/// Encodes a value as the driver does for a `Collection<T>`.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, BoxError> {
    #[allow(unused_imports, reason = "used with bson 2 only")]
    use either_bson::*;
    {
        #[allow(unused_imports, reason = "used with bson 3 only")]
        use mongodb::bson::*;
        Ok(serialize_to_raw_document_buf(value)?.into_bytes())
    }
}

/// Decodes a value as the driver does for a `Collection<T>`. Other drivers also store texts that are not UTF-8: these
/// are read as bytes, so that only a type that asks for such a text cannot read the document.
///
/// # Errors
/// The error of serde if the document is not a `T`. It names the first text that is not UTF-8.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, BoxError> {
    let decoded = decode_utf8(bytes);
    match decoded.is_err().then(|| readable(bytes)).flatten() {
        Some((readable, path)) => decode_utf8(&readable).map_err(|e| {
            format!("{e}; perhaps because a text is not UTF-8, as that at `{path}`").into()
        }),
        None => decoded,
    }
}

#[allow(clippy::needless_question_mark, reason = "each bson has another error type")]
fn decode_utf8<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, BoxError> {
    #[allow(unused_imports, reason = "used with bson 2 only")]
    use either_bson::*;
    {
        #[allow(unused_imports, reason = "used with bson 3 only")]
        use mongodb::bson::*;
        Ok(deserialize_from_slice(bytes)?)
    }
}

/// The two functions whose names differ between bson 2 and bson 3.
///
/// `mongodb::bson` becomes bson 3 as soon as any crate in the build asks for it, and no `cfg` of ours
/// can see that. So the compiler chooses: a glob import of an inner block takes precedence over a glob
/// import of an outer block. [`encode`] and [`decode`] call the functions by their names in bson 3, and fall back
/// to the functions of this module. These use the names in bson 2, and fall back to [`never`], which is
/// reached only if a bson had neither.
#[allow(clippy::needless_question_mark, reason = "each bson has another error type")]
mod either_bson {
    use super::{BoxError, DeserializeOwned, Serialize};
    use mongodb::bson::RawDocumentBuf;

    #[allow(dead_code, reason = "used with bson 2 only")]
    pub(crate) fn serialize_to_raw_document_buf<T: Serialize>(
        value: &T,
    ) -> Result<RawDocumentBuf, BoxError> {
        #[allow(unused_imports, reason = "used with bson 3 only")]
        use never::*;
        {
            #[allow(unused_imports, reason = "used with bson 2 only")]
            use mongodb::bson::*;
            Ok(to_raw_document_buf(value)?)
        }
    }

    /// bson 2 has `from_slice`. With bson 3 nobody calls this function.
    #[allow(dead_code, reason = "used with bson 2 only")]
    pub(crate) fn deserialize_from_slice<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, BoxError> {
        #[allow(unused_imports, reason = "used with bson 3 only")]
        use never::*;
        {
            #[allow(unused_imports, reason = "used with bson 2 only")]
            use mongodb::bson::*;
            Ok(from_slice(bytes)?)
        }
    }

    mod never {
        use super::{BoxError, RawDocumentBuf};

        #[allow(dead_code)]
        pub(crate) fn to_raw_document_buf<T>(_: &T) -> Result<RawDocumentBuf, BoxError> {
            Err("this bson is neither 2 nor 3".into())
        }

        #[allow(dead_code)]
        pub(crate) fn from_slice<T>(_: &[u8]) -> Result<T, BoxError> {
            Err("this bson is neither 2 nor 3".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use mongodb::bson::{Bson, oid::ObjectId};
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_value_is_encoded_as_the_driver_does() {
        #[derive(Debug, PartialEq, Serialize, serde::Deserialize)]
        struct Case {
            #[serde(rename = "_id")]
            id: ObjectId,
            uuid: Uuid,
            when: mongodb::bson::DateTime,
        }
        let case = Case {
            id: ObjectId::new(),
            uuid: Uuid::new_v4(),
            when: mongodb::bson::DateTime::from_millis(5),
        };
        let bytes = encode(&case).unwrap();
        assert_eq!(decode::<Case>(&bytes).unwrap(), case);
        // The driver's serializer is not "human readable": a `Uuid` is binary, not text.
        let document: mongodb::bson::Document = decode(&bytes).unwrap();
        assert!(matches!(document.get("uuid"), Some(Bson::Binary(_))), "{document}");
        assert!(matches!(document.get("when"), Some(Bson::DateTime(_))), "{document}");
    }
}
