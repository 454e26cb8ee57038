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
pub(crate) use changes::{Draft, UnclearChange};
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
}

impl Original {
    /// `loaded` is the stored document, and `value` is the same document as a Rust value, before any change.
    ///
    /// # Errors
    /// The error of serde if `value` has no stored form.
    pub fn new<T: Serialize>(loaded: StoredDocument, value: &T) -> Result<Self, BoxError> {
        let before = StoredDocument::encode(loaded.format, value)?;
        Ok(Self { loaded, before, is_in_doubt: false })
    }

    /// The version of the document as it was loaded or last saved. If a save has also stored changes of another program,
    /// which the Rust value does not have, no stored document has this version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.loaded.version()
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

/// A [guarded save](crate::store::Documents::save).
#[derive(Debug, Clone)]
pub struct Edit {
    /// What it does to the document.
    pub content: Content,
    /// The only version of the stored document onto which it may be written. `None` if there is no such condition.
    pub onto: Option<Version>,
}

/// What a guarded save does to its document.
#[derive(Debug, Clone)]
pub enum Content {
    /// Applies the application's changes since the document was loaded.
    Changes(Changes),
    /// Writes the whole document. Fields that it does not name are removed.
    Replacement(StoredDocument),
    /// Inserts a new document. It is [`Rejected`](crate::StoreErrorKind::Rejected) if its `_id` is not the locked
    /// one, or if a document with this `_id` exists already.
    Creation(StoredDocument),
    /// Deletes the document.
    Deletion,
}

impl Edit {
    /// True if the edit may be written onto this stored document: there is no condition, the document has the right
    /// version, or it is the result of this edit already. (A reply may have been lost, or the same form was sent twice.)
    ///
    /// Otherwise the answer is [`ChangedMeanwhile`](crate::store::Saved::ChangedMeanwhile) without a field.
    #[must_use]
    pub fn fits(&self, now: &StoredDocument) -> bool {
        let is_done = || match &self.content {
            Content::Changes(changes) => changes.are_done_in(now),
            Content::Replacement(document) => document == now,
            Content::Creation(_) | Content::Deletion => false,
        };
        self.onto.is_none_or(|onto| onto == now.version()) || is_done()
    }
}

impl Edit {
    /// True if it only renews the lock.
    pub(in crate::store) fn is_empty(&self) -> bool {
        matches!(&self.content, Content::Changes(changes) if changes.is_empty())
    }

    /// The version of the document after this edit was written. `None` if the edit deletes the document, or if nothing was applied.
    pub(crate) fn version_after(&self) -> Option<Version> {
        match &self.content {
            Content::Changes(changes) => changes.stored().map(|document| document.version()),
            Content::Replacement(document) | Content::Creation(document) => {
                Some(document.version())
            }
            Content::Deletion => None,
        }
    }
}

impl From<Content> for Edit {
    fn from(content: Content) -> Self {
        Self { content, onto: None }
    }
}

impl From<Changes> for Edit {
    fn from(changes: Changes) -> Self {
        Content::Changes(changes).into()
    }
}

impl From<StoredDocument> for Edit {
    fn from(document: StoredDocument) -> Self {
        Content::Replacement(document).into()
    }
}
