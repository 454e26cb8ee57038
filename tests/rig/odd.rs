//! Documents and records as some drivers write them: with a name twice, or with texts that are not UTF-8.

use mongodb::bson::{Bson, RawDocumentBuf, doc};

/// A value whose documents may have a name twice.
#[derive(Debug, Clone)]
pub(crate) enum Odd {
    Plain(Bson),
    Members(Vec<(&'static str, Odd)>),
    Elements(Vec<Odd>),
    /// A document, as it is encoded.
    Raw(Vec<u8>),
}

impl<T: Into<Bson>> From<T> for Odd {
    fn from(value: T) -> Self {
        Self::Plain(value.into())
    }
}

pub(crate) fn within(members: &[(&'static str, Odd)]) -> Odd {
    Odd::Members(members.to_vec())
}

/// Stands for bytes that are no UTF-8.
pub(crate) const NOT_UTF8: &str = "\u{1}NOT";

/// A document with these members.
pub(crate) fn odd(members: &[(&'static str, Odd)]) -> RawDocumentBuf {
    let mut bytes = encoded(&mut members.iter().map(|(name, it)| ((*name).to_owned(), it)));
    while let Some(at) = bytes.windows(4).position(|it| it == NOT_UTF8.as_bytes()) {
        bytes[at..at + 4].copy_from_slice(b"\xff\xfe\xc0\x80");
    }
    RawDocumentBuf::from_bytes(bytes).unwrap()
}

fn encoded(members: &mut dyn Iterator<Item = (String, &Odd)>) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    for (name, value) in members {
        let (kind, value) = match value {
            Odd::Members(all) => {
                (3, encoded(&mut all.iter().map(|(name, it)| ((*name).to_owned(), it))))
            }
            Odd::Elements(all) => {
                (4, encoded(&mut all.iter().enumerate().map(|(at, it)| (at.to_string(), it))))
            }
            Odd::Raw(bytes) => (3, bytes.clone()),
            Odd::Plain(value) => {
                let one = RawDocumentBuf::try_from(&doc! { "": value.clone() }).unwrap();
                let one = one.into_bytes();
                (one[4], one[6..one.len() - 1].to_vec())
            }
        };
        bytes.push(kind);
        bytes.extend(name.bytes().chain([0]).chain(value));
    }
    bytes.push(0);
    let length = i32::try_from(bytes.len()).unwrap();
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes
}
