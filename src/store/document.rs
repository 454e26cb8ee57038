//! A document on its way between a store and a Rust type.

use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};

use crate::error::BoxError;

mod shape;

pub(crate) use shape::misnamed_id;

/// How a store keeps documents while they are outside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// JSON text.
    Json,
    /// BSON, as the MongoDB driver encodes a `Collection<T>`.
    #[cfg(feature = "_mongo")]
    Bson,
}

/// An encoded document. Only its store looks into it.
#[derive(Debug, Clone)]
pub struct StoredDocument {
    format: Format,
    bytes: Arc<[u8]>,
}

impl StoredDocument {
    /// A document that a store has loaded.
    #[must_use]
    pub fn from_bytes(format: Format, bytes: Vec<u8>) -> Self {
        Self { format, bytes: bytes.into() }
    }

    /// The encoded bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// # Errors
    /// What serde says if `value` has no form in this format.
    pub fn encode<T: Serialize>(format: Format, value: &T) -> Result<Self, BoxError> {
        let bytes = match format {
            Format::Json => serde_json::to_vec(value)?,
            #[cfg(feature = "_mongo")]
            Format::Bson => super::mongo::codec::encode(value)?,
        };
        Ok(Self::from_bytes(format, bytes))
    }

    /// # Errors
    /// What serde says if the document is not a `T`.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, BoxError> {
        match self.format {
            Format::Json => Ok(serde_json::from_slice(&self.bytes)?),
            #[cfg(feature = "_mongo")]
            Format::Bson => super::mongo::codec::decode(&self.bytes),
        }
    }
}

/// What a [guarded save](crate::Store::save) writes.
#[derive(Debug, Clone)]
pub enum Edit {
    /// What differs between two versions of the document, field by field, and nothing else: fields that
    /// neither version names stay as they are, to the byte. Arrays count as one value.
    ///
    /// `before` is what was loaded, as the Rust type writes it: not what is stored, of which that type
    /// may know only a part.
    Changes {
        /// As it was loaded.
        before: StoredDocument,
        /// As it is to be.
        after: StoredDocument,
    },
    /// The whole document. Fields that it does not name are gone.
    Replacement(StoredDocument),
}

impl From<StoredDocument> for Edit {
    fn from(document: StoredDocument) -> Self {
        Self::Replacement(document)
    }
}
