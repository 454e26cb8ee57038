//! The titles of documents in refusals.

use crate::{error::LockError, web::request::RequestLocks};

impl RequestLocks {
    /// Adds the titles of their documents to the refusals that lack them, by one call.
    pub(super) async fn describe_each(&self, errors: impl IntoIterator<Item = &mut LockError>) {
        let mut locks = Vec::new();
        for error in errors {
            if let LockError::Held(lock)
            | LockError::HeldByOtherTab(lock)
            | LockError::WouldDeadlock { holder: Some(lock), .. } = error
                && lock.description.is_none()
            {
                locks.push(lock);
            }
        }
        if locks.is_empty() {
            return;
        }
        let keys: Vec<_> = locks.iter().map(|lock| lock.key.clone()).collect();
        let (person, asker) = (self.person(), self.counts_as());
        let core = &self.manager.core;
        let titles = core.descriptions_for(person.as_ref(), Some(&asker), &keys).await;
        for lock in locks {
            lock.description = titles.get(&lock.key).cloned().map(Box::new);
        }
    }
}
