#![doc = include_str!("../README.md")]

use std::{error::Error, sync::Arc};

use serde::{Serialize, de::DeserializeOwned};

mod aliases;
mod align;
#[cfg(feature = "bson")]
mod bson;
mod changes;
#[cfg(feature = "bson")]
mod driver;
mod json;
mod merge;
mod node;
mod order;
mod version;

#[cfg(feature = "bson")]
pub use bson::readable;
pub use changes::{Changes, Draft, UnclearChange};
#[cfg(feature = "bson")]
pub use driver::decode;
pub use node::{Leaf, Members, Name, Node, Path};
pub use version::{InvalidVersion, Version};

/// Any error, such as one of serde.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// The encoding in which a store hands documents out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// JSON text.
    Json,
    /// BSON, as the MongoDB driver encodes a `Collection<T>`.
    #[cfg(feature = "bson")]
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
            #[cfg(feature = "bson")]
            Format::Bson => driver::encode(value)?,
        };
        Ok(Self::from_bytes(format, bytes))
    }

    /// # Errors
    /// The error of serde if the document is not a `T`.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, BoxError> {
        match self.format {
            Format::Json => Ok(serde_json::from_slice(&self.bytes)?),
            #[cfg(feature = "bson")]
            Format::Bson => driver::decode(&self.bytes),
        }
    }
}

impl StoredDocument {
    /// The document as a value.
    ///
    /// # Errors
    /// If the bytes are no document of this format.
    pub fn node(&self) -> Result<Node, BoxError> {
        match self.format {
            Format::Json => json::read(&self.bytes),
            #[cfg(feature = "bson")]
            Format::Bson => bson::read(&self.bytes),
        }
    }

    /// True if nothing but the order of members differs.
    fn is_same(&self, other: &Self) -> bool {
        let nodes = || self.node().ok().zip(other.node().ok());
        self == other || nodes().is_some_and(|(mine, theirs)| mine.is_same(&theirs))
    }

    /// The encoded value.
    #[must_use]
    pub fn of(node: &Node, format: Format) -> Self {
        let bytes = match format {
            Format::Json => json::written(node),
            #[cfg(feature = "bson")]
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
    pub fn doubt(&mut self) {
        self.is_in_doubt = true;
    }

    /// True if nobody knows whether an earlier save of this document was carried out.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.is_in_doubt
    }
}

/// A save that is carried out only under the lock of its document.
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
    /// Inserts a new document. It is rejected if its `_id` is not the locked
    /// one, or if a document with this `_id` exists already.
    Creation(StoredDocument),
    /// Deletes the document.
    Deletion,
}

impl Edit {
    /// True if the edit may be written onto this stored document: there is no condition, the document has the right
    /// version, or it is the result of this edit already. (A reply may have been lost, or the same form was sent twice.)
    ///
    /// Otherwise the document was changed meanwhile, without a field that could be named.
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
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(&self.content, Content::Changes(changes) if changes.is_empty())
    }

    /// The version of the document after this edit was written. `None` if the edit deletes the document, or if nothing was applied.
    #[must_use]
    pub fn version_after(&self) -> Option<Version> {
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
