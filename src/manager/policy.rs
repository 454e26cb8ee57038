//! Who asks.

use std::collections::BTreeSet;

/// A person as the application knows them: a name for others to see, and roles for the policies.
///
/// ```
/// use actix_doclock::Actor;
///
/// let actor = Actor::new("alice").with_role("editor-in-chief");
/// assert!(actor.has_role("editor-in-chief"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor {
    /// Shown to others as the holder of this person's locks.
    pub label: String,
    roles: BTreeSet<String>,
}

impl Actor {
    /// A person of this name, without roles.
    #[must_use]
    pub fn new(label: impl Into<String>) -> Self {
        Self { label: label.into(), roles: BTreeSet::new() }
    }

    /// The same person with one role more.
    #[must_use]
    pub fn with_role(mut self, role: impl Into<String>) -> Self {
        self.roles.insert(role.into());
        self
    }

    /// Whether the person has the role.
    #[must_use]
    pub fn has_role(&self, role: &str) -> bool {
        self.roles.contains(role)
    }
}
