//! Documents in transit between a store and a Rust type.

use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};

use crate::{error::BoxError, version::Version};

mod aliases;
mod align;
#[cfg(feature = "_mongo")]
mod bson;
mod changes;
#[cfg(feature = "_mongo")]
mod driver;
mod json;
mod merge;
mod node;
mod order;

#[cfg(feature = "_mongo")]
pub(super) use bson::readable;
pub use changes::Changes;
pub(crate) use changes::Draft;
#[cfg(feature = "_mongo")]
pub(super) use driver::decode;
#[cfg(not(feature = "_mongo"))]
use node::Node;
#[cfg(feature = "_mongo")]
pub(super) use node::{Members, Name, Node};

/// The encoding in which a store hands documents out.
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
#[derive(Debug, Clone, PartialEq, Eq)]
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

    /// The version of the document with these bytes.
    #[must_use]
    pub fn version(&self) -> Version {
        Version::of(&self.bytes)
    }

    /// # Errors
    /// The error of serde if `value` cannot be encoded in this format.
    pub fn encode<T: Serialize>(format: Format, value: &T) -> Result<Self, BoxError> {
        let bytes = match format {
            Format::Json => serde_json::to_vec(value)?,
            #[cfg(feature = "_mongo")]
            Format::Bson => driver::encode(value)?,
        };
        Ok(Self::from_bytes(format, bytes))
    }

    /// # Errors
    /// The error of serde if the document is not a `T`.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, BoxError> {
        match self.format {
            Format::Json => Ok(serde_json::from_slice(&self.bytes)?),
            #[cfg(feature = "_mongo")]
            Format::Bson => driver::decode(&self.bytes),
        }
    }
}

impl StoredDocument {
    /// The document as a value.
    pub(super) fn node(&self) -> Result<Node, BoxError> {
        match self.format {
            Format::Json => json::read(&self.bytes),
            #[cfg(feature = "_mongo")]
            Format::Bson => bson::read(&self.bytes),
        }
    }

    /// True if nothing but the order of members differs.
    fn is_same(&self, other: &Self) -> bool {
        let nodes = || self.node().ok().zip(other.node().ok());
        self == other || nodes().is_some_and(|(mine, theirs)| mine.is_same(&theirs))
    }

    pub(super) fn of(node: &Node, format: Format) -> Self {
        let bytes = match format {
            Format::Json => json::written(node),
            #[cfg(feature = "_mongo")]
            Format::Bson => bson::written(node),
        };
        Self::from_bytes(format, bytes)
    }
}

/// A document as it was loaded or last saved, for a save of the differences.
#[derive(Debug, Clone)]
pub struct Original {
    loaded: StoredDocument,
    before: StoredDocument,
    /// True if nobody knows whether an earlier save of it was carried out.
    is_in_doubt: bool,
    /// True if nothing may be written onto another version.
    is_named: bool,
}

impl Original {
    /// `loaded` is the stored document, and `value` is the same document as a Rust value, before any change.
    ///
    /// # Errors
    /// The error of serde if `value` has no stored form.
    pub fn new<T: Serialize>(loaded: StoredDocument, value: &T) -> Result<Self, BoxError> {
        let before = StoredDocument::encode(loaded.format, value)?;
        Ok(Self { loaded, before, is_in_doubt: false, is_named: false })
    }

    /// The version of the document as it was loaded or last saved. If a save has also stored changes of another program,
    /// which the Rust value does not have, no stored document has this version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.loaded.version()
    }

    /// The client has named this version: nothing is written onto another one.
    #[must_use]
    pub(crate) fn named(self, is_named: bool) -> Self {
        Self { is_named, ..self }
    }

    pub(crate) fn is_named(&self) -> bool {
        self.is_named
    }

    /// The edit of this document, which is carried out on another version only if the client has named none.
    pub(crate) fn onto_it(&self, edit: Edit) -> Edit {
        match self.is_named {
            true => Edit::Onto(self.version(), Box::new(edit)),
            false => edit,
        }
    }

    /// Notes that nobody knows whether a save of this document was carried out.
    #[cfg(feature = "web")]
    pub(crate) fn doubt(&mut self) {
        self.is_in_doubt = true;
    }

    pub(crate) fn is_in_doubt(&self) -> bool {
        self.is_in_doubt
    }
}

/// The content of a [guarded save](crate::store::Documents::save).
#[derive(Debug, Clone)]
pub enum Edit {
    /// The application's changes since the document was loaded.
    Changes(Changes),
    /// The whole document. Fields that it does not name are removed.
    Replacement(StoredDocument),
    /// A new document. It is [`Rejected`](crate::StoreErrorKind::Rejected) if its `_id` is not the locked
    /// one, or if a document with this `_id` exists already.
    Creation(StoredDocument),
    /// Deletes the document.
    Deletion,
    /// The edit, if it [fits](Self::fits) the stored document. Otherwise the answer is
    /// [`ChangedMeanwhile`](crate::store::Saved::ChangedMeanwhile) without a field, and nothing is written.
    Onto(Version, Box<Edit>),
}

impl Edit {
    /// False if the edit is for another version than that of this stored document, and has not been carried out on it
    /// before. (The reply may have been lost, or the same form was sent twice.)
    #[must_use]
    pub fn fits(&self, now: &StoredDocument) -> bool {
        let Self::Onto(version, edit) = self else { return true };
        let is_done = || match &**edit {
            Self::Changes(changes) => changes.are_done_in(now),
            Self::Replacement(document) => document == now,
            _ => false,
        };
        *version == now.version() || is_done()
    }

    /// The edit without its condition.
    #[must_use]
    pub fn itself(&self) -> &Self {
        if let Self::Onto(_, edit) = self { edit } else { self }
    }
}

impl From<Changes> for Edit {
    fn from(changes: Changes) -> Self {
        Self::Changes(changes)
    }
}

impl From<StoredDocument> for Edit {
    fn from(document: StoredDocument) -> Self {
        Self::Replacement(document)
    }
}
