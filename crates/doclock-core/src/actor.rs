//! The person that acts on locks.

use std::{collections::BTreeSet, net::IpAddr};

use crate::lock::{Aid, Holder, Lock};

/// A person as the application knows them: a name for others to see, and roles for the policies.
///
/// ```
/// # use doclock_core as actix_doclock;
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
    #[doc(hidden)]
    pub fn holder(&self) -> Holder {
        let holder = Holder::new(self.label.clone());
        match &self.id {
            Some(id) => holder.of_user(id.clone()),
            None => holder,
        }
    }

    /// True if a session of this person holds the lock. False if the person or the holder has no
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

    /// True if the person has the role.
    #[must_use]
    pub fn has_role(&self, role: &str) -> bool {
        self.roles.contains(role)
    }
}

/// What counts as one person for a limit for each person.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Person {
    /// Somebody with an id, in all sessions.
    User(String),
    /// A session of somebody without an id.
    Session(Aid),
    /// All visitors from this address who have no session yet.
    Visitors(Option<IpAddr>),
}

impl Person {
    pub fn of(actor: Option<&Actor>, aid: Option<&Aid>, address: Option<IpAddr>) -> Self {
        if let Some(id) = actor.and_then(Actor::id) {
            return Self::User(id.to_owned());
        }
        match aid {
            Some(aid) => Self::Session(aid.clone()),
            None => Self::Visitors(address.map(|it| network(it.to_canonical()))),
        }
    }
}

/// One visitor may have all IPv6 addresses of a network.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(it) => IpAddr::V6((it.to_bits() & (u128::MAX << 64)).into()),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_counts_by_id_then_by_session_then_by_address() {
        let (alice, bob) = (Actor::new("alice").with_id("1"), Actor::new("bob"));
        let (aid, at) = (Aid::new(), |it: &str| Some(it.parse::<IpAddr>().unwrap()));
        let visitor = |it| Person::of(Some(&bob), None, at(it));
        assert_eq!(Person::of(Some(&alice), Some(&aid), at("::1")), Person::User("1".into()));
        assert_eq!(Person::of(Some(&bob), Some(&aid), at("::1")), Person::Session(aid.clone()));
        assert_eq!(Person::of(None, Some(&aid), at("::1")), Person::Session(aid));
        assert_eq!(visitor("10.0.0.1"), Person::Visitors(at("10.0.0.1")));
        assert_eq!(visitor("::ffff:10.0.0.1"), visitor("10.0.0.1"));
        assert_ne!(visitor("10.0.0.1"), visitor("10.0.0.2"));
        assert_eq!(visitor("2001:db8::1"), visitor("2001:db8::ffff:0:0:1"));
        assert_ne!(visitor("2001:db8::1"), visitor("2001:db8:0:1::1"));
    }
}
