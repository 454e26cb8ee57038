//! A document on its way between a store and a Rust type.

use serde::{Serialize, de::DeserializeOwned};

use crate::BoxError;

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
    bytes: Vec<u8>,
}

impl StoredDocument {
    /// A document that a store has loaded.
    #[must_use]
    pub fn from_bytes(format: Format, bytes: Vec<u8>) -> Self {
        Self { format, bytes }
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
        Ok(Self { format, bytes })
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
