//! The person of a request.

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::{
    actor::{Actor, Person},
    error::{LockError, Result},
    lock::uuid_of,
    web::request::{RequestLocks, Whose},
};

impl RequestLocks {
    pub(super) fn person(&self) -> Option<Actor> {
        match &*self.whose.borrow() {
            Whose::Session(session) => (self.settings.identify.as_ref()?)(session),
            Whose::Client(actor) => actor.clone(),
            Whose::Nobodys => None,
        }
    }

    /// The person, or a visitor under the name of all visitors.
    pub(in crate::web) fn actor(&self) -> Actor {
        self.person().unwrap_or_else(|| Actor::new(self.manager.core.settings.holder.label.clone()))
    }

    /// The person for whom the limits for each person count this request.
    pub(in crate::web) fn counts_as(&self) -> Person {
        let aid = self.aid_before.borrow();
        Person::of(self.person().as_ref(), aid.as_ref(), self.address)
    }

    /// What distinguishes the person of this session from others.
    pub(super) fn who(&self) -> Option<String> {
        let person = self.person()?;
        Some(match person.id() {
            Some(id) => format!("id {id}"),
            // The roles may tell the tenant.
            None => format!("{person:?}"),
        })
    }

    /// # Errors
    /// If the page of this request was opened for another person: the page shows the work of that person.
    pub(super) fn check_person(&self) -> Result<()> {
        let Some(opened_for) = self.headers.opened_for else { return Ok(()) };
        match self.person() {
            Some(person) if name_of(&person) == opened_for => Ok(()),
            Some(_) => Err(LockError::PersonChanged),
            None if self.settings.identify.is_some() || self.is_client() => {
                Err(LockError::LoginRequired)
            }
            None => Ok(()),
        }
    }
}

/// A person as the headers name them. A change of the roles is no change of the person.
pub(super) fn name_of(person: &Actor) -> Uuid {
    let (kind, name) = match person.id() {
        Some(id) => ("id", id),
        None => ("label", &*person.label),
    };
    uuid_of(Sha256::new().chain_update(format!("doclock person\0{kind}\0{name}")))
}
