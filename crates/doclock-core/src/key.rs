//! The name of a document that can be locked: its collection and its `_id`.

use std::{cmp::Ordering, fmt, hash, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use uuid::Uuid;

use crate::text::printable;

#[cfg(feature = "actix-web")]
mod answer;
#[cfg(feature = "bson")]
mod bson;

/// The longest string id that is accepted, in bytes. The server itself has no such limit.
pub const MAX_ID_BYTES: usize = 1024;

/// The longest collection name, in bytes: MongoDB allows 255 for database, name and `.lock` together.
const MAX_COLLECTION_BYTES: usize = 120;

/// A document type whose documents can be locked.
///
/// ```
/// # use doclock_core as actix_doclock;
/// use actix_doclock::Lockable;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct Invoice {
///     #[serde(rename = "_id")]
///     number: i64,
///     total: f64,
/// }
///
/// impl Lockable for Invoice {
///     type Id = i64;
///     const COLLECTION: &'static str = "invoice";
/// }
/// ```
///
/// A type may contain only some of the fields: a guarded save writes the changes, and leaves the other
/// fields as they are.
pub trait Lockable: Serialize + DeserializeOwned + 'static {
    /// The type of `_id`. Any type that parses from a path segment and converts into a [`LockId`]:
    /// `ObjectId`, `String`, `i32`, `i64`, `Uuid`, or your own newtype around one of them.
    type Id: FromStr + Into<LockId>;

    /// The collection that holds the documents. Their locks live in `<COLLECTION>.lock`.
    const COLLECTION: &'static str;

    /// The name of the path parameter that carries the id, as in `/workitem/{id}`.
    const PATH_PARAM: &'static str = "id";

    /// True if each grant carries a [`FencingToken`](crate::FencingToken), to guard resources outside the
    /// database. Default: false.
    ///
    /// Fencing costs one permanent record for each document that was ever locked, because a counter must
    /// outlive the lock. Programs that lock by inserting a record (older protocols without this crate)
    /// find all of these documents locked. All servers must use the same value.
    const FENCED: bool = false;

    /// True if the waiters of a document get the lock in the order of their arrival, across all servers.
    /// Default: false; then that order holds within each process, but not between processes.
    ///
    /// Fairness costs one more command for all waiters of a server that arrive together, and one command a
    /// second from each server with waiters for a document. If a server dies while it has waiters, the next waiter
    /// loses at most 5 s. All servers must use the same value.
    const FAIR: bool = false;

    /// True if the lock API shows the locks of this type and lets people take them. Default: true, but
    /// false for [`Named`] locks, so that no visitor can keep a job from its lock. Administrators see and
    /// break all locks.
    const OVER_HTTP: bool = true;
}

/// The type of locks without a document, which [`LockKey::named`] names. Register it as any other type:
/// `locks.register::<Named>().await?`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Named {}

impl Lockable for Named {
    type Id = String;
    const COLLECTION: &'static str = "doclock.named";
    const OVER_HTTP: bool = false;
}

/// The `_id` of a document, with its BSON type.
///
/// Ids are equal if MongoDB treats them as equal: the numbers `5` of both widths name one document, the
/// string `"5"` names another. `Bson::from(&id)` is the value to query by, in an access policy for example.
#[derive(Clone)]
#[non_exhaustive]
pub enum LockId {
    /// An `ObjectId`, as its twelve bytes.
    ObjectId([u8; 12]),
    /// A string of at most [`MAX_ID_BYTES`].
    String(String),
    /// A 32-bit integer.
    Int32(i32),
    /// A 64-bit integer.
    Int64(i64),
    /// A UUID, stored as BSON binary of subtype 4.
    Uuid(Uuid),
}

/// The form in which ids are compared.
#[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Canonical<'a> {
    Number(i64),
    String(&'a str),
    ObjectId(&'a [u8; 12]),
    Uuid(&'a Uuid),
}

impl LockId {
    /// True if ids of this type may be strings. The function tries to parse examples; if none of them
    /// parses, the answer is true.
    pub(crate) fn may_be_text<I: FromStr + Into<Self>>() -> bool {
        const TEXTS: [&str; 4] =
            ["5", "home", "64b7f0c2a1d3e4f5a6b7c8d9", "9a3f4e52-31c8-4d2b-8f57-0c6e1b2a7d94"];
        let ids: Vec<Self> =
            TEXTS.iter().filter_map(|text| text.parse::<I>().ok()).map(Into::into).collect();
        ids.is_empty() || ids.iter().any(|id| matches!(id, Self::String(_)))
    }

    fn canonical(&self) -> Canonical<'_> {
        match self {
            Self::Int32(n) => Canonical::Number((*n).into()),
            Self::Int64(n) => Canonical::Number(*n),
            Self::String(s) => Canonical::String(s),
            Self::ObjectId(bytes) => Canonical::ObjectId(bytes),
            Self::Uuid(uuid) => Canonical::Uuid(uuid),
        }
    }
}

impl PartialEq for LockId {
    fn eq(&self, other: &Self) -> bool {
        self.canonical() == other.canonical()
    }
}

impl Eq for LockId {}

impl hash::Hash for LockId {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.canonical().hash(state);
    }
}

impl PartialOrd for LockId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for LockId {
    fn cmp(&self, other: &Self) -> Ordering {
        self.canonical().cmp(&other.canonical())
    }
}

/// The id as it appears in a URL, before percent-encoding.
impl fmt::Display for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ObjectId(bytes) => bytes.iter().try_for_each(|b| write!(f, "{b:02x}")),
            Self::String(s) => f.write_str(s),
            Self::Int32(n) => n.fmt(f),
            Self::Int64(n) => n.fmt(f),
            Self::Uuid(uuid) => uuid.fmt(f),
        }
    }
}

impl fmt::Debug for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ObjectId(_) => write!(f, "ObjectId({self})"),
            Self::String(s) => write!(f, "String({s:?})"),
            Self::Int32(n) => write!(f, "Int32({n})"),
            Self::Int64(n) => write!(f, "Int64({n})"),
            Self::Uuid(uuid) => write!(f, "Uuid({uuid})"),
        }
    }
}

impl From<String> for LockId {
    fn from(id: String) -> Self {
        Self::String(id)
    }
}

impl From<&str> for LockId {
    fn from(id: &str) -> Self {
        Self::String(id.to_owned())
    }
}

impl From<i32> for LockId {
    fn from(id: i32) -> Self {
        Self::Int32(id)
    }
}

impl From<i64> for LockId {
    fn from(id: i64) -> Self {
        Self::Int64(id)
    }
}

impl From<Uuid> for LockId {
    fn from(id: Uuid) -> Self {
        Self::Uuid(id)
    }
}

/// The name of one lockable document: its collection and its `_id`.
///
/// ```
/// # use doclock_core as actix_doclock;
/// use actix_doclock::LockKey;
///
/// let key = LockKey::new("invoice", 4711_i64)?;
/// assert_eq!(key.to_string(), "invoice/4711");
/// # Ok::<(), doclock_core::InvalidKey>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockKey {
    collection: Arc<str>,
    id: LockId,
}

impl LockKey {
    /// Names the document `id` of `collection`.
    ///
    /// # Errors
    /// [`InvalidKey`] for a string id longer than [`MAX_ID_BYTES`], and for a collection name that
    /// MongoDB refuses or that contains a `/`.
    pub fn new(collection: impl Into<Arc<str>>, id: impl Into<LockId>) -> Result<Self, InvalidKey> {
        let (collection, id) = (collection.into(), id.into());
        let name_is_sound = !collection.is_empty()
            && collection.len() <= MAX_COLLECTION_BYTES
            && !collection.contains(['$', '\0', '/'])
            && !collection.starts_with("system.");
        if !name_is_sound {
            return Err(InvalidKey::Collection);
        }
        match &id {
            LockId::String(s) if s.len() > MAX_ID_BYTES => Err(InvalidKey::IdTooLong(s.len())),
            _ => Ok(Self { collection, id }),
        }
    }

    /// Names a lock without a document, for a job or for anything outside the database. Its type is
    /// [`Named`].
    ///
    /// ```
    /// # use doclock_core as actix_doclock;
    /// use actix_doclock::LockKey;
    ///
    /// let key = LockKey::named("nightly-report")?;
    /// # Ok::<(), doclock_core::InvalidKey>(())
    /// ```
    ///
    /// # Errors
    /// [`InvalidKey::IdTooLong`] for a name of more than [`MAX_ID_BYTES`].
    pub fn named(name: impl Into<String>) -> Result<Self, InvalidKey> {
        Self::of::<Named>(name.into())
    }

    /// Names the document `id` of the type `T`.
    ///
    /// # Errors
    /// As [`LockKey::new`].
    pub fn of<T: Lockable>(id: T::Id) -> Result<Self, InvalidKey> {
        Self::new(T::COLLECTION, id)
    }

    /// The collection of the document, not of its lock.
    #[must_use]
    pub fn collection(&self) -> &str {
        &self.collection
    }

    /// The `_id` of the document, and of its lock record.
    #[must_use]
    pub fn id(&self) -> &LockId {
        &self.id
    }
}

impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.collection, self.id)
    }
}

impl LockKey {
    /// The key for the log, in a form that `doclock show` takes: strings in quotes, as in JSON.
    #[doc(hidden)]
    pub fn shown(&self) -> String {
        let collection = printable(&self.collection);
        let LockId::String(id) = &self.id else { return format!("{collection}/{}", self.id) };
        let mut quoted = String::from('"');
        for c in id.chars() {
            // Shows control characters and invisible characters by their numbers.
            let is_plain = c.escape_debug().len() == 1;
            if is_plain || matches!(c, '\'') {
                quoted.push(c);
            } else if matches!(c, '"' | '\\') {
                quoted.extend(['\\', c]);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    quoted += &format!("\\u{unit:04x}");
                }
            }
        }
        format!("{collection}/{quoted}\"")
    }
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A client may have chosen the name of the collection, where a pattern covers it.
        write!(f, "{}/{:?}", printable(&self.collection), self.id)
    }
}

/// Why a collection and an id do not name a lockable document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidKey {
    /// The collection name is empty, too long, or contains a reserved character.
    #[error(
        "a collection name has 1 to {MAX_COLLECTION_BYTES} bytes, no `$`, `/` or NUL, and does not begin with `system.`"
    )]
    Collection,
    /// The id is a string of this many bytes.
    #[error("an id has at most {MAX_ID_BYTES} bytes, this one has {0}")]
    IdTooLong(usize),
    /// The text is not an id of the collection's type.
    #[error("this is not an id of the collection `{collection}`")]
    NotOfType {
        /// The collection with that id type.
        collection: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_one_where_mongodb_says_so() {
        assert_eq!(LockId::from(5_i32), LockId::from(5_i64));
        assert_ne!(LockId::from(5_i32), LockId::from("5"));
        let uuid = Uuid::from_u128(7);
        assert_ne!(LockId::from(uuid), LockId::from(uuid.to_string()));
    }

    #[test]
    fn an_id_is_bounded_and_a_collection_name_has_no_second_meaning() {
        assert!(LockKey::new("workitem", "x".repeat(MAX_ID_BYTES)).is_ok());
        assert_eq!(
            LockKey::new("workitem", "x".repeat(MAX_ID_BYTES + 1)),
            Err(InvalidKey::IdTooLong(MAX_ID_BYTES + 1))
        );
        for name in ["", "a/b", "$cmd", "a\0b", "system.users", &"x".repeat(121)] {
            assert_eq!(LockKey::new(name, 1), Err(InvalidKey::Collection), "{name:?}");
        }
    }

    #[test]
    fn an_object_id_is_shown_as_its_hex_digits() {
        let id = LockId::ObjectId([0x50, 0x87, 0xb7, 0x21, 0x81, 0xa4, 0x45, 0x98, 0, 1, 2, 0xff]);
        assert_eq!(id.to_string(), "5087b72181a44598000102ff");
    }
}
