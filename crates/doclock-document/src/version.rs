//! The version of a document.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Tells whether a document is still what a page shows: two reads of the same stored bytes give the same version, on
/// every server and in every release. It is no field of the document.
///
/// As text: 32 hexadecimal digits, the first half of a SHA-256 of the stored bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Version(u128);

const DIGITS: usize = 32;

impl Version {
    /// The version of a document with these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let digest = Sha256::digest(bytes);
        Self(digest.iter().take(16).fold(0, |version, byte| version << 8 | u128::from(*byte)))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.to_string()
    }
}

/// This text is no [`Version`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a version has 32 hexadecimal digits, as the server sent them")]
pub struct InvalidVersion;

impl FromStr for Version {
    type Err = InvalidVersion;

    /// Also with the ending that a proxy has added to the `ETag` because it compresses: `-gzip`, `--gzip`, `;br`.
    fn from_str(text: &str) -> Result<Self, InvalidVersion> {
        let (digits, ending) = text.split_at_checked(DIGITS).ok_or(InvalidVersion)?;
        let is_version = digits.bytes().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'))
            && !ending.starts_with(char::is_alphanumeric);
        let version = is_version.then(|| u128::from_str_radix(digits, 16).ok()).flatten();
        version.map(Self).ok_or(InvalidVersion)
    }
}

impl TryFrom<String> for Version {
    type Error = InvalidVersion;

    fn try_from(text: String) -> Result<Self, InvalidVersion> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages and servers of other releases have these versions, too: a failure here breaks a rolling restart.
    #[test]
    fn the_version_of_these_bytes_never_changes() {
        let of = |bytes: &[u8]| Version::of(bytes).to_string();
        assert_eq!(of(b""), "e3b0c44298fc1c149afbf4c8996fb924");
        assert_eq!(of(br#"{"_id":"1","title":"a"}"#), "4a9cf58f6c15858c0e24f96558f0a333");
    }

    #[test]
    fn only_the_text_of_a_version_is_a_version() {
        let version = Version::of(b"a document");
        assert_eq!(version.to_string().parse(), Ok(version));
        assert_eq!(format!("{:032x}", 5).parse(), Ok(Version(5)));
        let upper = version.to_string().to_uppercase();
        let plus = format!("+{}", &version.to_string()[1..]);
        for ending in ["-gzip", "--gzip", ";br", "_zstd", "+", "/1", " "] {
            assert_eq!(format!("{version}{ending}").parse(), Ok(version), "{ending}");
        }
        for text in ["", "*", "5", &"a".repeat(31), &"a".repeat(33), &"ä".repeat(16), &upper, &plus]
        {
            assert_eq!(text.parse::<Version>(), Err(InvalidVersion), "{text:?}");
        }
    }
}
