//! The version of a document.

pub use doclock_document::{InvalidVersion, Version};

/// A version that several parts of a request learn. `None` if it is not known.
pub type SharedVersion = std::sync::Arc<parking_lot::Mutex<Option<Version>>>;
