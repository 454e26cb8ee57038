//! Which fields a Rust type reads and writes.

use std::fmt;

use serde::{Deserialize, Deserializer, de::IgnoredAny, de::Visitor, forward_to_deserialize_any};

use serde_json::{Map, Value};

use crate::{key::LockId, store::document::StoredDocument};

/// The field under which the type writes the document's id, if it reads the id from `_id` but writes it
/// elsewhere: `#[serde(rename(serialize = "id", deserialize = "_id"))]`, meant for an HTTP answer.
///
/// Such a type would add a field to every document that it replaces. A type that does not write its id
/// at all is fine.
///
/// If the fields that the type reads cannot be determined, a field `id` with the text of this id counts.
pub(crate) fn misnamed_id<'de, T: Deserialize<'de>>(
    written: &StoredDocument,
    id: Option<&LockId>,
) -> Option<String> {
    let Some(reads) = fields_of::<T>() else { return written_as_id(written, id?) };
    if !reads.contains(&"_id") {
        return None;
    }
    let written: Vec<String> = written.decode::<Names>().ok()?.0;
    if written.iter().any(|name| name == "_id") {
        return None;
    }
    written.into_iter().find(|name| !reads.contains(&name.as_str()))
}

fn written_as_id(written: &StoredDocument, id: &LockId) -> Option<String> {
    let written: Map<String, Value> = written.decode().ok()?;
    let value = written.get("id").filter(|_| !written.contains_key("_id"))?;
    let text = value.as_str().or_else(|| value.get("$oid")?.as_str())?;
    (text == id.to_string()).then(|| "id".to_owned())
}

/// The fields that a struct asks for; `None` if they cannot be determined, as with `#[serde(flatten)]`.
fn fields_of<'de, T: Deserialize<'de>>() -> Option<&'static [&'static str]> {
    match T::deserialize(Probe) {
        Err(Asked(fields)) => fields,
        Ok(_) => None,
    }
}

/// A deserializer without content that only records which fields the type asks for.
struct Probe;

#[derive(Debug)]
struct Asked(Option<&'static [&'static str]>);

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing to read")
    }
}

impl std::error::Error for Asked {}

impl serde::de::Error for Asked {
    fn custom<M: fmt::Display>(_: M) -> Self {
        Self(None)
    }
}

impl<'de> Deserializer<'de> for Probe {
    type Error = Asked;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Asked> {
        Err(Asked(None))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Asked> {
        Err(Asked(Some(fields)))
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Asked> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// The names of a document's fields.
struct Names(Vec<String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfMap;

        impl<'de> Visitor<'de> for OfMap {
            type Value = Names;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a document")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Names, A::Error> {
                let mut names = Vec::new();
                while let Some((name, IgnoredAny)) = map.next_entry()? {
                    names.push(name);
                }
                Ok(Names(names))
            }
        }

        deserializer.deserialize_map(OfMap)
    }
}

#[cfg(test)]
mod tests {
    use serde::Serialize;

    use super::*;
    use crate::store::Format;

    fn misnamed<T: Default + Serialize + for<'de> Deserialize<'de>>() -> Option<String> {
        let written = StoredDocument::encode(Format::Json, &T::default()).unwrap();
        misnamed_id::<T>(&written, None)
    }

    #[derive(Default, Serialize, Deserialize)]
    struct Stored {
        #[serde(rename = "_id")]
        id: i64,
        text: String,
    }

    #[derive(Default, Serialize, Deserialize)]
    struct Answer {
        #[serde(rename(serialize = "id", deserialize = "_id"))]
        id: i64,
        text: String,
    }

    #[derive(Default, Serialize, Deserialize)]
    #[expect(dead_code, reason = "only its shape counts")]
    struct ReadOnly {
        #[serde(rename = "_id", skip_serializing)]
        id: i64,
        text: String,
    }

    #[derive(Default, Serialize, Deserialize)]
    struct Partial {
        text: String,
    }

    #[derive(Default, Clone, Serialize, Deserialize)]
    #[serde(from = "Stored", into = "Answer")]
    struct Converted {
        id: i64,
        text: String,
    }

    impl From<Stored> for Converted {
        fn from(Stored { id, text }: Stored) -> Self {
            Self { id, text }
        }
    }

    impl From<Converted> for Answer {
        fn from(Converted { id, text }: Converted) -> Self {
            Self { id, text }
        }
    }

    #[test]
    fn a_type_that_reads_its_id_and_writes_it_elsewhere_is_told_from_those_that_do_not() {
        assert_eq!(misnamed::<Answer>().as_deref(), Some("id"));
        assert_eq!(misnamed::<Converted>().as_deref(), Some("id"));
        assert_eq!(misnamed::<Stored>(), None);
        assert_eq!(misnamed::<ReadOnly>(), None);
        assert_eq!(misnamed::<Partial>(), None);
    }

    /// With `flatten`, serde does not tell which fields a type reads.
    #[derive(Serialize, Deserialize)]
    struct Flat {
        id: String,
        #[serde(flatten)]
        rest: Partial,
    }

    #[test]
    fn a_flat_type_that_writes_the_text_of_its_id_as_id_is_misnamed() {
        let flat = Flat { id: "64b7f0c2a1d3e4f5a6b7c8d9".to_owned(), rest: Partial::default() };
        let written = StoredDocument::encode(Format::Json, &flat).unwrap();
        let misnamed = |id: &str| misnamed_id::<Flat>(&written, Some(&LockId::from(id)));
        assert_eq!(misnamed("64b7f0c2a1d3e4f5a6b7c8d9").as_deref(), Some("id"));
        assert_eq!(misnamed("another").as_deref(), None);
    }
}
