//! The grant, and the words that describe it.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{clock, key::LockKey, random};

/// The longest label of a [`Holder`], in bytes. A longer one is cut.
pub const MAX_LABEL_BYTES: usize = 4096;

/// "Application id": the web session, job or process that holds locks.
///
/// A random value that says nothing about anybody. It is no credential, but nobody else has any
/// use for it either: it is never shown to another client, and `Debug` shows only its beginning.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Aid(String);

impl Aid {
    /// A new random aid.
    #[expect(clippy::new_without_default, reason = "two calls never give the same value")]
    #[must_use]
    pub fn new() -> Self {
        Self(random::uuid().to_string())
    }

    /// The aid as it is stored.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// For stores: the aid that a record carries, which may be that of a foreign program.
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

/// Tells one acquisition of a lock from every other, also from those of the same session.
///
/// New for each acquisition, kept by renewal and re-entry. Clients see it as `Lock-Token`.
///
/// A claim whose outcome is not known is sent again under the [next attempt's](Self::next_attempt) token,
/// which only differs in its last bytes. So a claim recognises what an earlier attempt of it was granted;
/// and an attempt that the store carries out long after another one was answered does not bring to life
/// what was released since.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LockToken(Uuid);

impl LockToken {
    /// A new random token: that of the first attempt of a claim.
    #[expect(clippy::new_without_default, reason = "two calls never give the same value")]
    #[must_use]
    pub fn new() -> Self {
        Self(random::uuid()).of_place()
    }

    /// The same claim, sent again because nobody knows what became of it.
    #[must_use]
    pub fn next_attempt(self) -> Self {
        // Nobody has the time for as many as there are.
        let number = self.number();
        self.with(number & !ATTEMPT | number.wrapping_add(1) & ATTEMPT)
    }

    /// Of all attempts of a claim the first.
    #[must_use]
    pub fn first_attempt(self) -> Self {
        self.with(self.number() & !ATTEMPT)
    }

    /// Of all attempts that a claim can make the last. In between, in the order of their text, are those of
    /// this claim alone.
    #[must_use]
    pub fn last_attempt(self) -> Self {
        self.with(self.number() | ATTEMPT)
    }

    /// Whether they are attempts of the same claim.
    #[must_use]
    pub fn is_of_same_claim(self, other: Self) -> bool {
        self.first_attempt() == other.first_attempt()
    }

    /// The name of the place that this claim has in a queue. All claims of one who waits there, try after try,
    /// have the same one.
    #[must_use]
    pub fn of_place(self) -> Self {
        self.with(0)
    }

    /// Another claim of one who waits, and was refused. It keeps the same place.
    pub(crate) fn next_claim(self) -> Self {
        self.with(self.last_attempt().number().wrapping_add(1))
    }

    /// This attempt and all before it.
    pub(crate) fn attempts(self) -> impl Iterator<Item = Self> {
        (self.first_attempt().number()..=self.number()).map(move |number| self.with(number))
    }

    /// Which claim of its place, and which attempt of that.
    fn number(self) -> u32 {
        let [.., a, b, c, d] = self.0.into_bytes();
        u32::from_be_bytes([a, b, c, d])
    }

    fn with(self, number: u32) -> Self {
        let mut bytes = self.0.into_bytes();
        bytes[12..].copy_from_slice(&number.to_be_bytes());
        Self(Uuid::from_bytes(bytes))
    }
}

/// The bits of a token's number that count the attempts.
const ATTEMPT: u32 = 0xff;

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
                /// A new random one.
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
    /// One tab of a browser, or whatever else within a session is to have locks of its own.
    ///
    /// Chosen by the page and kept for as long as the tab lives. Like the aid it is never shown to
    /// another session.
    TabId;
    /// One load of a page: new each time, also in the same tab.
    PageId;
}

/// Who is shown to people as the one who holds a lock. For display; it gives no rights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Holder {
    /// A name that colleagues recognise. Shown to everybody who meets the lock.
    pub label: String,
    /// The person's id in the application, for policies: [`Actor::id`](crate::Actor::id). Never
    /// shown to anybody.
    #[serde(skip)]
    pub user: Option<String>,
}

impl Holder {
    /// A holder of this name, cut to [`MAX_LABEL_BYTES`].
    #[must_use]
    pub fn new(label: impl Into<String>) -> Self {
        Self { label: cut(label.into(), MAX_LABEL_BYTES), user: None }
    }

    /// The same with the person's id, cut alike.
    #[must_use]
    pub fn of_user(mut self, id: impl Into<String>) -> Self {
        self.user = Some(cut(id.into(), MAX_LABEL_BYTES));
        self
    }
}

/// At most so many bytes of it, and no half character.
pub(crate) fn cut(mut text: String, bytes: usize) -> String {
    let end = (0..=bytes.min(text.len())).rfind(|&i| text.is_char_boundary(i));
    text.truncate(end.unwrap_or(0));
    text
}

/// How much a lock excludes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mode {
    /// One holder, nobody beside it.
    Exclusive,
    /// Any number of readers, no exclusive lock beside them.
    Shared,
}

impl Mode {
    /// Whether who holds a lock in this mode may do what needs one in `wanted`.
    pub(crate) fn covers(self, wanted: Self) -> bool {
        self == Self::Exclusive || wanted == Self::Shared
    }
}

/// Tells a guarded thing outside the database which of two holders came later: it must refuse whoever
/// brings a lower one than it has seen.
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

/// For stores, and for what was written down.
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

/// One lock: a grant of ours, or what is known about somebody else's.
#[derive(Debug, Clone)]
pub struct Lock {
    /// The locked document.
    pub key: LockKey,
    /// How much it excludes.
    pub mode: Mode,
    /// The session that holds it.
    pub aid: Aid,
    /// The acquisition. `None` in the record of a foreign program, which writes no token.
    pub token: Option<LockToken>,
    /// The tab of the session that it was granted to, if that had a name.
    pub tab: Option<TabId>,
    /// The place of this acquisition among all of the document. Only in a
    /// [fenced](crate::Lockable::FENCED) collection.
    pub fence: Option<FencingToken>,
    /// Who is shown. `None` in the record of a foreign program.
    pub holder: Option<Holder>,
    /// When it was taken, by the server's clock. For display.
    pub since: SystemTime,
    /// When it runs out unless it is renewed, by the clock of this process that cannot be set.
    ///
    /// Counted from before the request was sent that brought this answer, so never later than what
    /// the server goes by. The server decides; this tells a holder when to stop believing.
    pub expires_at: Instant,
}

impl Lock {
    /// How long it still lives unless it is renewed; zero if it has run out.
    #[must_use]
    pub fn expires_in(&self) -> Duration {
        self.expires_at.saturating_duration_since(clock::now())
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
    fn all_claims_of_a_place_and_all_their_attempts_have_tokens_of_their_own() {
        let place = LockToken::new();
        let (mut token, mut seen) = (place, Vec::new());
        for _ in 0..300 {
            let attempts = [token, token.next_attempt(), token.next_attempt().next_attempt()];
            let (first, last) = (token.to_string(), token.last_attempt().to_string());
            for attempt in attempts {
                assert_eq!((attempt.of_place(), attempt.first_attempt()), (place, token));
                assert!(attempt.is_of_same_claim(token));
                assert!(!attempt.is_of_same_claim(token.next_claim()));
                // As the store in MongoDB compares them.
                assert!(first <= attempt.to_string() && attempt.to_string() <= last);
            }
            assert_eq!(attempts[2].attempts().collect::<Vec<_>>(), attempts);
            seen.extend(attempts);
            token = attempts[2].next_claim();
        }
        let different: std::collections::HashSet<_> = seen.iter().collect();
        assert_eq!(different.len(), seen.len());
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
