//! The person that acts on locks.

use std::collections::BTreeSet;

use crate::lock::{Holder, Lock};

/// A person as the application knows them: a name for others to see, and roles for the policies.
///
/// ```
/// use actix_doclock::Actor;
///
/// let actor = Actor::new("alice").with_role("editor-in-chief");
/// assert!(actor.has_role("editor-in-chief"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Actor {
    id: Option<String>,
    /// Shown to others as the holder of this person's locks.
    pub label: String,
    roles: BTreeSet<String>,
}

impl Actor {
    /// A person of this name, without roles.
    #[must_use]
    pub fn new(label: impl Into<String>) -> Self {
        Self { id: None, label: label.into(), roles: BTreeSet::new() }
    }

    /// The same person with an id, by which the application distinguishes people: for example the key of
    /// their account. Two sessions with one id belong to one person, and each may take over the other's
    /// locks.
    #[must_use]
    pub fn with_id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// The id by which the application distinguishes this person, if it gave one.
    #[must_use]
    pub fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// The holder that others see in this person's locks.
    pub(crate) fn holder(&self) -> Holder {
        let holder = Holder::new(self.label.clone());
        match &self.id {
            Some(id) => holder.of_user(id.clone()),
            None => holder,
        }
    }

    /// Whether a session of this person holds the lock. Always false unless both have an
    /// [id](Self::with_id).
    #[must_use]
    pub fn is_holder_of(&self, lock: &Lock) -> bool {
        let user = lock.holder.as_ref().and_then(|holder| holder.user.as_deref());
        self.id.is_some() && self.id.as_deref() == user
    }

    /// The same person with one more role.
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
