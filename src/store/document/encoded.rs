//! Documents as values and as bytes.

use serde::{Serialize, de::DeserializeOwned};

use super::{Format, StoredDocument, merge::Value};
use crate::error::BoxError;

/// A value as the bytes of a document.
pub(in crate::store) trait Encoded: Value {
    fn decoded(document: &StoredDocument) -> Result<Self, BoxError>;
    fn encoded(&self) -> Result<StoredDocument, BoxError>;
}

impl Encoded for serde_json::Value {
    fn decoded(document: &StoredDocument) -> Result<Self, BoxError> {
        document.decode()
    }

    fn encoded(&self) -> Result<StoredDocument, BoxError> {
        Ok(StoredDocument::from_bytes(Format::Json, self.to_string().into_bytes()))
    }
}

/// Reads a document as a `T`, and returns it as `T` writes it.
pub(super) fn reread<T: Serialize + DeserializeOwned>(
    document: &StoredDocument,
) -> Result<StoredDocument, BoxError> {
    StoredDocument::encode(document.format, &document.decode::<T>()?)
}

pub(super) type Reread<'a> = &'a dyn Fn(&StoredDocument) -> Result<StoredDocument, BoxError>;

pub(super) fn read<V: Encoded>(value: &V, reread: Reread<'_>) -> Result<V, BoxError> {
    V::decoded(&reread(&value.encoded()?)?)
}
