//! Checks whether a database is fit to keep locks.

use std::{cmp::Reverse, time::Duration};

use mongodb::{
    bson::{Document, doc},
    error::Result as MongoResult,
};

use crate::{
    error::StoreError,
    store::mongo::{
        ENDED, MongoStore,
        error::{code, is_denied, store_error},
        indexes, majority,
    },
};

mod clock;
mod finding;
mod index;
mod privilege;
mod sharding;
mod topology;

pub use finding::{Finding, Severity};

/// The default ttl of a lock.
const USUAL_TTL: Duration = Duration::from_secs(150);

impl MongoStore {
    /// Looks for dangers to the locks of these collections: the kind of deployment, the write concern
    /// of the URI, missing indexes, a TTL index that differs from `ttl` or from the locks that are
    /// held, servers whose clocks differ, missing privileges of the database user, and the sharding of
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

        let status = doc! { "connectionStatus": 1, "showPrivileges": true };
        // The strict Stable API lacks this command. Missing privileges then show where they are needed.
        let status = unless_strict(database.run_command(status).await)?;
        let user = privilege::User::of(&status.unwrap_or_default());
        let ended = database.collection::<Document>(ENDED);
        let existing = allowed(indexes::list(database, ended.name()).await)?;
        if existing.is_none() && user.is_unknown() {
            findings.push(privilege::not_authenticated(database.name()));
            return Ok(findings);
        }
        let collections: Vec<_> = collections.iter().map(AsRef::as_ref).collect();
        findings.extend(user.findings(database.name(), &collections, server));
        findings.extend(clock::findings(database, &hello, server, ttl.unwrap_or(USUAL_TTL)).await?);
        if collections.is_empty() {
            findings.push(index::no_collections(database.name()));
            return Ok(findings);
        }
        let ended = ended.namespace();
        findings.extend(existing.iter().flat_map(|existing| index::of_ended(&ended, existing)));
        for collection in collections {
            let locks = majority::<Document>(database, &format!("{collection}.lock"));
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

const API_STRICT: i32 = 323;

/// `None` if the connection uses the strict Stable API, which does not know the command.
fn unless_strict<T>(result: MongoResult<T>) -> MongoResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if code(&e) == Some(API_STRICT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// `None` if the database user may not do this. The check of the privileges reports that anyway.
fn allowed<T>(result: MongoResult<T>) -> MongoResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if is_denied(&e) => Ok(None),
        Err(e) => Err(e),
    }
}
