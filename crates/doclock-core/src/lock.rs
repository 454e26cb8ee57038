//! A lock, and the types that describe it.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::{Builder, Uuid};

use crate::{
    clock,
    description::Description,
    key::LockKey,
    random,
    text::{cut, one_line, short},
};

/// The longest label of a [`Holder`], in bytes. A longer one is cut.
pub const MAX_LABEL_BYTES: usize = 4096;

/// The longest text of an ask or of an answer, in bytes. The HTTP API refuses a longer one; other texts are cut.
pub const MAX_ASK_BYTES: usize = 500;

/// "Application id": the web session, job or process that holds locks.
///
/// A random value that reveals nothing about a person. It is not a credential, but it is still never
/// shown to another client, and `Debug` shows only its beginning.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Aid(String);

/// The beginning of the aid of a job.
const JOB: &str = "job:";
/// The beginning of the aid of a job that hears asks.
const LISTENING_JOB: &str = "job:asks:";

impl Aid {
    /// A new random aid.
    #[expect(clippy::new_without_default, reason = "two calls never give the same value")]
    #[must_use]
    pub fn new() -> Self {
        Self(random::uuid().to_string())
    }

    /// A new random aid of a job.
    #[doc(hidden)]
    pub fn of_job(hears_asks: bool) -> Self {
        let beginning = if hears_asks { LISTENING_JOB } else { JOB };
        Self(format!("{beginning}{}", random::uuid()))
    }

    /// The name under which a store remembers that this page of the session has been left.
    #[must_use]
    pub fn of_page(&self, page: PageId) -> Self {
        Self(format!("{}/{page}", self.0))
    }

    /// The aid of a client that sends a token with each request, such as a JWT or an API key: from the
    /// person (`sub`), and from the id of the login (`sid`). The same texts always give the same aid, and
    /// the stored aid is their hash.
    ///
    /// Two logins of a person must differ in `login`, so that a logout releases the locks of one of them
    /// only. When a token is refreshed, `login` must stay the same; otherwise the client loses its locks.
    #[must_use]
    pub fn of_client(person: &str, login: &str) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(b"doclock client\0");
        hasher.update((person.len() as u64).to_be_bytes());
        hasher.update(person);
        hasher.update(login);
        Self::from(uuid_of(hasher).to_string())
    }

    /// True if this is a job, and not the session of a person or client. Jobs of versions before 0.2 look like
    /// sessions.
    #[must_use]
    pub fn is_job(&self) -> bool {
        self.0.starts_with(JOB)
    }

    /// False for a job that hears no asks (`Job::hears_asks`).
    #[doc(hidden)]
    pub fn hears_asks(&self) -> bool {
        !self.is_job() || self.0.starts_with(LISTENING_JOB)
    }

    /// The aid as it is stored.
    #[must_use]
    #[doc(hidden)]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The first half of the hash.
pub fn uuid_of(hasher: Sha256) -> Uuid {
    let hash = hasher.finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    Builder::from_custom_bytes(bytes).into_uuid()
}

/// For stores: the aid of a record, which a foreign program may have written.
impl From<String> for Aid {
    fn from(stored: String) -> Self {
        Self(stored)
    }
}

impl fmt::Debug for Aid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let beginning: String = self.0.chars().take(8).collect();
        write!(f, "Aid({beginning}…)")
    }
}

/// Identifies one acquisition of a lock, even among acquisitions of the same session.
///
/// New for each acquisition, and kept by renewal and re-entry. Clients see it as `Lock-Token`.
///
/// A claim whose outcome is unknown is sent again under the [next attempt's](Self::next_attempt) token,
/// which differs only in its last byte. So a claim recognises a lock that was granted to one of its
/// earlier attempts. And a late duplicate, which the store carries out long after another attempt was
/// answered, cannot resurrect a released lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LockToken(Uuid);

impl LockToken {
    /// A new random token, for the first attempt of a claim.
    #[expect(clippy::new_without_default, reason = "two calls never give the same value")]
    #[must_use]
    pub fn new() -> Self {
        Self(random::uuid()).first_attempt()
    }

    /// The token of the same claim for a repetition, which is sent because the outcome is unknown.
    #[must_use]
    pub fn next_attempt(self) -> Self {
        // No claim lives long enough to use all the numbers.
        self.with(self.number().wrapping_add(1))
    }

    /// The token of the first attempt of this claim.
    #[must_use]
    pub fn first_attempt(self) -> Self {
        self.with(0)
    }

    /// The last token that an attempt of this claim can have. In text order, all tokens between the first
    /// and the last one belong to this claim.
    #[must_use]
    pub fn last_attempt(self) -> Self {
        self.with(u8::MAX)
    }

    /// True if both tokens belong to attempts of the same claim.
    #[must_use]
    pub fn is_of_same_claim(self, other: Self) -> bool {
        self.first_attempt() == other.first_attempt()
    }

    /// The tokens of this attempt and of all earlier ones.
    #[doc(hidden)]
    pub fn attempts(self) -> impl Iterator<Item = Self> {
        (0..=self.number()).map(move |number| self.with(number))
    }

    /// The number of the attempt.
    fn number(self) -> u8 {
        let [.., number] = self.0.into_bytes();
        number
    }

    fn with(self, number: u8) -> Self {
        let mut bytes = self.0.into_bytes();
        bytes[15] = number;
        Self(Uuid::from_bytes(bytes))
    }
}

impl fmt::Display for LockToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Takes a UUID with or without `urn:uuid:` and angle brackets (RFC 4918, `Coded-URL`).
impl FromStr for LockToken {
    type Err = uuid::Error;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let bare = s.strip_prefix('<').and_then(|s| s.strip_suffix('>'));
        Uuid::parse_str(bare.unwrap_or(s)).map(Self)
    }
}

/// A name that a page chooses for itself.
macro_rules! chosen_by_pages {
    ($($(#[doc = $text:literal])+ $name:ident;)*) => {
        $(
            $(#[doc = $text])+
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
            #[serde(transparent)]
            pub struct $name(Uuid);

            impl $name {
                /// A new random value.
                #[expect(clippy::new_without_default, reason = "two calls never give the same value")]
                #[must_use]
                pub fn new() -> Self {
                    Self(random::uuid())
                }
            }

            impl fmt::Display for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    self.0.fmt(f)
                }
            }

            impl FromStr for $name {
                type Err = uuid::Error;

                fn from_str(s: &str) -> Result<Self, Self::Err> {
                    Uuid::parse_str(s).map(Self)
                }
            }
        )*
    };
}

chosen_by_pages! {
    /// One tab of a browser, or another part of a session that has locks of its own.
    ///
    /// Chosen by the page and kept for as long as the tab lives. Like the aid it is never shown to
    /// another session.
    TabId;
    /// One load of a page: new each time, also in the same tab.
    PageId;
}

/// The name that people see as the holder of a lock. For display; it gives no rights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Holder {
    /// A name that colleagues recognise. Shown to everybody who finds the document locked.
    pub label: String,
    /// The person's id in the application, for policies: [`Actor::id`](crate::Actor::id). Never shown to
    /// anybody.
    #[serde(skip)]
    pub user: Option<String>,
}

impl Holder {
    /// A holder of this name, cut to [`MAX_LABEL_BYTES`].
    #[must_use]
    pub fn new(label: impl Into<String>) -> Self {
        Self { label: cut(label.into(), MAX_LABEL_BYTES), user: None }
    }

    /// The same holder with the person's id, also cut.
    #[must_use]
    pub fn of_user(mut self, id: impl Into<String>) -> Self {
        self.user = Some(cut(id.into(), MAX_LABEL_BYTES));
        self
    }

    /// The person for the log: the label, and the id if there is one.
    #[doc(hidden)]
    pub fn shown(&self) -> String {
        let label = short(&self.label);
        match &self.user {
            Some(id) => format!("{label:?} (id {:?})", short(id)),
            None => format!("{label:?}"),
        }
    }
}

/// How much a lock excludes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mode {
    /// One holder, and no other lock.
    Exclusive,
    /// Any number of readers, and no exclusive lock.
    Shared,
}

impl Mode {
    #[doc(hidden)]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Shared => "shared",
        }
    }

    /// True if a lock in this mode is enough for an operation that needs `wanted`.
    #[doc(hidden)]
    pub fn covers(self, wanted: Self) -> bool {
        self == Self::Exclusive || wanted == Self::Shared
    }
}

/// Tells a resource outside the database which of two holders came later. The resource must refuse a
/// token that is lower than one that it has seen.
///
/// Strictly increasing for each document of a [fenced](crate::Lockable::FENCED) collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FencingToken(u64);

impl FencingToken {
    /// The token as a number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

/// For stores, and for programs that keep tokens.
impl From<u64> for FencingToken {
    fn from(stored: u64) -> Self {
        Self(stored)
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One lock: our own grant, or what is known about another session's lock.
#[derive(Debug, Clone)]
pub struct Lock {
    /// The locked document.
    pub key: LockKey,
    /// What people call the document, in a refusal over HTTP. `None` elsewhere: stores do not know it.
    /// See `LockManagerBuilder::describe`.
    pub description: Option<Box<Description>>,
    /// How much the lock excludes.
    pub mode: Mode,
    /// The session that holds the lock.
    pub aid: Aid,
    /// The acquisition. `None` in the record of a foreign program, which writes no token.
    pub token: Option<LockToken>,
    /// The tab of the session to which the lock was granted, if the tab had a name.
    pub tab: Option<TabId>,
    /// The number of this acquisition among all acquisitions of the document. Only in a
    /// [fenced](crate::Lockable::FENCED) collection.
    pub fence: Option<FencingToken>,
    /// The holder as shown to people. `None` in the record of a foreign program.
    pub holder: Option<Holder>,
    /// When the lock was taken, by the server's clock. For display.
    pub since: SystemTime,
    /// When the lock expires unless it is renewed, by the monotonic clock of this process.
    ///
    /// Counted from a moment before the request was sent that led to this answer, so this value is never
    /// later than the server's own time of expiry. The server decides; this value tells a holder when to
    /// stop relying on the lock.
    pub expires_at: Instant,
    /// When the lock ends although it is renewed, at its `LockManagerBuilder::max_hold`, by the same
    /// clock. `None` if it has no such end.
    pub ends_at: Option<Instant>,
    /// The asks for it, the first one first: at most [`MAX_ASKS`](crate::limits::MAX_ASKS).
    pub asks: Vec<Ask>,
}

impl Lock {
    /// The remaining lifetime unless the lock is renewed; zero if it has expired.
    #[must_use]
    pub fn expires_in(&self) -> Duration {
        self.expires_at.saturating_duration_since(clock::now())
    }

    /// True if the lock was granted to another tab than this one. A shared lock belongs to all tabs of its session.
    #[doc(hidden)]
    pub fn is_of_another_tab(&self, tab: Option<TabId>) -> bool {
        self.mode == Mode::Exclusive && self.tab.zip(tab).is_some_and(|(of_lock, it)| of_lock != it)
    }
}

/// A request to the holder of a lock for the document. It changes neither the lock nor the order of its waiters.
///
/// An ask stands in the record of the lock, and goes with the lock. It also goes 90 s after its asker has last repeated it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// Names the ask. Another text gives it another name.
    pub id: Uuid,
    /// The session that asks. Never shown to anybody.
    pub aid: Aid,
    /// The asker.
    pub by: Holder,
    /// The reason, in one line of at most [`MAX_ASK_BYTES`]; perhaps empty.
    pub message: String,
    /// When, by the store's clock.
    pub at: SystemTime,
    /// The latest answer of the holder.
    pub answer: Option<Answer>,
}

/// What the holder of a lock answers to an [`Ask`]. To give the document away is to release it: its next waiter is in.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// The holder will release the lock soon, and says a word to that.
    Soon(String),
    /// The holder will not release the lock, and says why.
    No(String),
}

impl Ask {
    /// A new ask. The store sets the time.
    pub fn new(aid: Aid, by: Holder, message: &str) -> Self {
        let message = one_line(message, MAX_ASK_BYTES);
        Self { id: random::uuid(), aid, by, message, at: SystemTime::UNIX_EPOCH, answer: None }
    }

    /// True if it is an ask of this session, or of another session of the same person.
    #[doc(hidden)]
    pub fn is_of(&self, aid: Option<&Aid>, user: Option<&str>) -> bool {
        aid == Some(&self.aid) || user.is_some() && self.by.user.as_deref() == user
    }
}

impl Answer {
    /// `None` if there is no answer of this name.
    #[doc(hidden)]
    pub fn named(name: &str, message: &str) -> Option<Self> {
        match name {
            "soon" => Some(Self::Soon(message.to_owned())),
            "no" => Some(Self::No(message.to_owned())),
            _ => None,
        }
    }

    /// The answer in one line of at most [`MAX_ASK_BYTES`].
    #[doc(hidden)]
    pub fn in_one_line(mut self) -> Self {
        let (Self::Soon(message) | Self::No(message)) = &mut self;
        *message = one_line(message, MAX_ASK_BYTES);
        self
    }

    /// `soon` or `no`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Soon(_) => "soon",
            Self::No(_) => "no",
        }
    }

    /// The holder's words, perhaps none.
    #[must_use]
    pub fn message(&self) -> &str {
        let (Self::Soon(message) | Self::No(message)) = self;
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_back_in_every_form_that_clients_send() {
        let token = LockToken::new();
        for form in [
            format!("{token}"),
            format!("<{token}>"),
            format!("urn:uuid:{token}"),
            format!("<urn:uuid:{token}>"),
        ] {
            assert_eq!(form.parse(), Ok(token), "{form}");
        }
        for form in ["", "<>", "<urn:uuid:>", "opaquelocktoken:1", "<<>>"] {
            assert!(form.parse::<LockToken>().is_err(), "{form}");
        }
    }

    #[test]
    fn all_attempts_of_a_claim_have_tokens_of_their_own_that_tell_the_claim() {
        let token = LockToken::new();
        let attempts = [token, token.next_attempt(), token.next_attempt().next_attempt()];
        let (first, last) = (token.to_string(), token.last_attempt().to_string());
        for attempt in attempts {
            assert_eq!(attempt.first_attempt(), token);
            assert!(attempt.is_of_same_claim(token));
            assert!(!attempt.is_of_same_claim(LockToken::new()));
            // Compared as text, as in MongoDB.
            assert!(first <= attempt.to_string() && attempt.to_string() <= last);
        }
        assert_eq!(attempts[2].attempts().collect::<Vec<_>>(), attempts);
        let wraps = (0..256).fold(token, |token, _| token.next_attempt());
        assert_eq!(wraps, token, "an attempt never becomes another claim");
    }

    #[test]
    fn a_label_is_cut_between_characters() {
        assert_eq!(Holder::new("alice").label, "alice");
        let long = Holder::new("ä".repeat(MAX_LABEL_BYTES)).label;
        assert_eq!(long.len(), MAX_LABEL_BYTES);
        let odd = Holder::new(format!("x{}", "ä".repeat(MAX_LABEL_BYTES))).label;
        assert_eq!(odd.len(), MAX_LABEL_BYTES - 1);
    }

    #[test]
    fn debug_does_not_show_a_whole_aid() {
        let aid = Aid::new();
        assert!(!format!("{aid:?}").contains(aid.as_str()));
    }
}
