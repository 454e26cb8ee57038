//! The settings of the session store, with their defaults.

use std::{sync::Arc, time::Duration};

use crate::{
    error::StoreError,
    manager::LockManager,
    store::{
        MongoStore,
        mongo::{SESSIONS, sessions::Sessions},
    },
    web::session_store::{Inner, MongoSessionStore, sweep},
};

/// Where actix-identity stores the user's id.
const USER: &str = "actix_identity.user_id";

/// Settings of a [`MongoSessionStore`].
#[must_use = "a builder does nothing until `build` is called"]
#[derive(Debug)]
pub struct MongoSessionStoreBuilder {
    store: MongoStore,
    locks: LockManager,
    collection: String,
    user_key: String,
    absolute_timeout: Option<Duration>,
}

impl MongoSessionStoreBuilder {
    /// The collection of the sessions. Default `doclock.session`.
    pub fn collection(mut self, name: impl Into<String>) -> Self {
        self.collection = name.into();
        self
    }

    /// The entry of the session's state that contains the user, for
    /// [`revoke_all_of`](MongoSessionStore::revoke_all_of). Default: the entry of actix-identity.
    pub fn user_key(mut self, key: impl Into<String>) -> Self {
        self.user_key = key.into();
        self
    }

    /// How long a session may live at most, however active it is. Default: no limit.
    pub fn absolute_timeout(mut self, timeout: Duration) -> Self {
        self.absolute_timeout = Some(timeout);
        self
    }

    /// Prepares the collection, and starts to watch for ended sessions, as often as the manager's
    /// [reaper](crate::LockManagerBuilder::reaper_interval). Does not watch if the manager has no reaper.
    ///
    /// # Errors
    /// If the database is not reached, or its user lacks a privilege; the message names it.
    pub async fn build(self) -> Result<MongoSessionStore, StoreError> {
        let (collection, absolute) = (self.collection, self.absolute_timeout);
        let store = self.store;
        let sessions = self.locks.in_own_task("preparing web sessions", move || {
            let (store, collection) = (store.clone(), collection.clone());
            async move { Sessions::prepare(&store, &collection, absolute).await }
        });
        let inner = Arc::new(Inner {
            sessions: sessions.await?,
            locks: self.locks,
            user_key: self.user_key,
        });
        if let Some(interval) = inner.locks.reaper_interval() {
            tokio::spawn(sweep::run(Arc::downgrade(&inner), interval));
        }
        Ok(MongoSessionStore { inner })
    }
}

impl MongoSessionStore {
    /// Settings for a store in the database of `store`, with the locks of `locks`.
    pub fn builder(store: &MongoStore, locks: &LockManager) -> MongoSessionStoreBuilder {
        MongoSessionStoreBuilder {
            store: store.clone(),
            locks: locks.clone(),
            collection: SESSIONS.to_owned(),
            user_key: USER.to_owned(),
            absolute_timeout: None,
        }
    }
}
