//! Patterns for the names of collections.

use std::str::FromStr;

use crate::key::{InvalidKey, LockKey};

/// The name of a collection, or a pattern with one `*` for one or more characters: `*_invoice` names the collections
/// `acme_invoice` and `globex_invoice`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    before: String,
    /// `None` for a name without a `*`.
    after: Option<String>,
}

impl Pattern {
    /// This collection alone.
    #[must_use]
    pub fn exactly(name: impl Into<String>) -> Self {
        Self { before: name.into(), after: None }
    }

    /// The parts of the name before and after the `*`. Without a `*` there is no second part.
    #[must_use]
    pub fn parts(&self) -> (&str, Option<&str>) {
        (&self.before, self.after.as_deref())
    }

    /// True if the pattern covers this name.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        match &self.after {
            None => name == self.before,
            Some(after) => (name.strip_prefix(&*self.before))
                .and_then(|rest| rest.strip_suffix(&**after))
                .is_some_and(|between| !between.is_empty()),
        }
    }

    /// The pattern of the lock collections that belong to these collections.
    #[doc(hidden)]
    pub fn of_locks(&self) -> Self {
        let mut locks = self.clone();
        locks.after.as_mut().unwrap_or(&mut locks.before).push_str(".lock");
        locks
    }
}

/// # Errors
/// If no collection can have such a name, or if there are two `*`.
impl FromStr for Pattern {
    type Err = InvalidKey;

    fn from_str(pattern: &str) -> Result<Self, InvalidKey> {
        LockKey::new(pattern.replacen('*', "x", 1), 0)?;
        match pattern.split_once('*') {
            None => Ok(Self::exactly(pattern)),
            Some((_, after)) if after.contains('*') => Err(InvalidKey::Collection),
            Some((before, after)) => {
                Ok(Self { before: before.to_owned(), after: Some(after.to_owned()) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_one_or_more_characters() {
        let invoices: Pattern = "*_invoice".parse().unwrap();
        assert!(invoices.matches("acme_invoice"));
        for other in ["_invoice", "invoice", "acme_invoice.lock", "acme_invoices"] {
            assert!(!invoices.matches(other), "{other}");
        }
        assert!(invoices.of_locks().matches("acme_invoice.lock"));
        let of_users: Pattern = "user.*".parse().unwrap();
        assert!(of_users.matches("user.recipes") && !of_users.matches("user."));
        assert!("*_a*".parse::<Pattern>().is_err() && "a$*".parse::<Pattern>().is_err());
    }

    #[test]
    fn overlapping_parts_do_not_match_one_character_twice() {
        let pattern: Pattern = "aba*aba".parse().unwrap();
        assert!(!pattern.matches("ababa") && pattern.matches("aba-aba"));
    }
}
