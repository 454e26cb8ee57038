//! Checks whether a database is fit to keep locks.

use std::{cmp::Reverse, time::Duration};

use mongodb::{
    Namespace,
    bson::{Document, doc},
    error::Result as MongoResult,
};

use crate::{
    error::StoreError,
    store::mongo::{
        ENDED, MongoStore, SESSIONS,
        error::{code, is_denied, store_error},
        indexes,
    },
};

mod clock;
mod finding;
mod fleet;
mod index;
mod majority;
mod privilege;
mod sharding;
mod topology;

pub use finding::{Finding, Severity};
pub(super) use majority::majority_lag;
pub(super) use privilege::{User, is_schema};
pub(super) use topology::Kind;

/// The default ttl of a lock.
const USUAL_TTL: Duration = Duration::from_secs(150);

impl MongoStore {
    /// Looks for dangers to the locks of these collections: the kind of deployment, the write concern
    /// of the URI, missing indexes, a TTL index that differs from `ttl` or from the locks that are
    /// held, the collection of web sessions if there is one, servers that disagree, servers whose clocks differ, missing privileges of the database user, and the sharding of
    /// the lock collections. The worst finding comes first; an empty list means that nothing is wrong.
    ///
    /// It only reads, so an application may log the findings when it starts:
    ///
    /// ```no_run
    /// # use actix_doclock::{MongoStore, StoreError};
    /// # async fn start(store: &MongoStore) -> Result<(), StoreError> {
    /// for finding in store.diagnose(&["workitem"], None).await? {
    ///     println!("{}: {}; {}", finding.about, finding.problem, finding.advice);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the database is not reached. A check that the database user has no privilege for is left out,
    /// and reported as left out.
    pub async fn diagnose(
        &self,
        collections: &[impl AsRef<str>],
        ttl: Option<Duration>,
    ) -> Result<Vec<Finding>, StoreError> {
        let found = self.look_over(collections, ttl).await;
        let mut findings = found.map_err(|e| store_error("checking the database", e))?;
        findings.sort_by_key(|finding| Reverse(finding.severity));
        Ok(findings)
    }

    async fn look_over(
        &self,
        collections: &[impl AsRef<str>],
        ttl: Option<Duration>,
    ) -> MongoResult<Vec<Finding>> {
        let database = &self.inner.database;
        let hello = database.run_command(doc! { "hello": 1 }).await?;
        let server = topology::Kind::of(&hello);
        let mut findings = topology::findings(&hello, server);
        findings.extend(topology::write_concern(server, database.write_concern()));

        findings.extend(majority::stalled(database, &hello, server).await);
        let user = User::ask(database).await?;
        let ended = database.collection::<Document>(ENDED);
        let existing = allowed(indexes::list(database, ended.name()).await)?;
        if existing.is_none() && user.is_unknown() {
            findings.push(privilege::not_authenticated(database.name()));
            return Ok(findings);
        }
        let servers = allowed(self.read_notes().await)?.unwrap_or_default();
        findings.extend(fleet::findings(database.name(), &servers));
        let collections: Vec<_> = collections.iter().map(AsRef::as_ref).collect();
        let sessions = self.existing_sessions().await?;
        let named = sessions.as_ref().map(|(name, _)| &**name);
        findings.extend(user.findings(database.name(), &collections, named, server));
        if let Some((name, existing)) = &sessions {
            let namespace = Namespace::new(database.name(), name);
            findings.extend(existing.iter().flat_map(|it| index::of_sessions(&namespace, it)));
        }
        findings.extend(clock::findings(database, &hello, server, ttl.unwrap_or(USUAL_TTL)).await?);
        if collections.is_empty() {
            findings.push(index::no_collections(database.name()));
            return Ok(findings);
        }
        let ended = ended.namespace();
        findings.extend(existing.iter().flat_map(|existing| index::of_ended(&ended, existing)));
        for collection in collections {
            let locks = super::majority::<Document>(database, &format!("{collection}.lock"));
            if let Some(existing) = allowed(indexes::list(database, locks.name()).await)? {
                let foreign_ttl = ttl.unwrap_or(USUAL_TTL);
                let held = indexes::longest_live(&locks, foreign_ttl).await;
                let held = allowed(held)?.flatten();
                findings.extend(index::of_locks(&locks.namespace(), &existing, ttl, held));
            }
            if server == topology::Kind::Sharded {
                let sharded = allowed(sharding::of(database.client(), &locks.namespace()).await)?;
                findings.push(sharding::finding(&locks.namespace(), sharded.as_ref()));
            }
        }
        Ok(findings)
    }
}

impl MongoStore {
    /// The collection of web sessions and its indexes, if the user may see them; `None` if there seem to be none.
    async fn existing_sessions(&self) -> MongoResult<Option<(String, Option<Vec<Document>>)>> {
        let known = self.sessions();
        let name = known.clone().unwrap_or_else(|| SESSIONS.to_owned());
        let existing = allowed(indexes::list(&self.inner.database, &name).await)?;
        let is_there = known.is_some() || existing.as_ref().is_some_and(|it| !it.is_empty());
        Ok(is_there.then_some((name, existing)))
    }
}

const API_STRICT: i32 = 323;

/// `None` if the connection uses the strict Stable API, which does not know the command.
pub(super) fn unless_strict<T>(result: MongoResult<T>) -> MongoResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if code(&e) == Some(API_STRICT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// `None` if the database user may not do this. The check of the privileges reports that anyway.
pub(super) fn allowed<T>(result: MongoResult<T>) -> MongoResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if is_denied(&e) => Ok(None),
        Err(e) => Err(e),
    }
}
