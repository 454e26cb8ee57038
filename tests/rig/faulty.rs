//! An application server whose network fails.

use std::time::Duration;

use mongodb::{Client, Database};

use super::app::{App, NO_DEADLINE, with_deadline};
use super::mongod::{self, Mongod};
use super::proxy::Proxy;
use super::{client, fresh_name, patient_client};

/// An application server behind a [`Proxy`], and a way around it.
#[derive(Debug)]
pub(crate) struct Faulty {
    pub(crate) proxy: Proxy,
    pub(crate) app: App,
    /// The same database, on a connection that never fails.
    pub(crate) database: Database,
    /// Another application server, on that connection.
    pub(crate) other: App,
}

impl Faulty {
    /// On a replica set, without a tight deadline.
    pub(crate) async fn new() -> Self {
        Self::with_deadline(NO_DEADLINE).await
    }

    /// On a replica set, with this deadline.
    pub(crate) async fn with_deadline(deadline: Duration) -> Self {
        Self::on(mongod::local_replica_set().await, "", deadline).await
    }

    /// As [`with_deadline`](Self::with_deadline), with a driver that reports no fault: only the deadline ends an operation.
    pub(crate) async fn with_a_patient_driver(deadline: Duration) -> Self {
        let server = mongod::local_replica_set().await;
        let proxy = Proxy::start(server.port());
        let through = patient_client(&proxy.uri()).await;
        Self::behind(server, proxy, through, deadline).await
    }

    /// With more options in the URI, such as `&retryWrites=false`.
    pub(crate) async fn on(server: &Mongod, options: &str, deadline: Duration) -> Self {
        let proxy = Proxy::start(server.port());
        let through = client(&format!("{}{options}", proxy.uri())).await;
        Self::behind(server, proxy, through, deadline).await
    }

    async fn behind(server: &Mongod, proxy: Proxy, through: Client, deadline: Duration) -> Self {
        let name = fresh_name();
        let database = client(&server.uri()).await.database(&name);
        let other = App::on(&database).await;
        let app = App::with(&through.database(&name), with_deadline(deadline)).await;
        Self { proxy, app, database, other }
    }

    /// Asserts that exactly this many faults took place.
    pub(crate) fn assert_fired(&self, faults: usize) {
        assert_eq!(self.proxy.fired(), faults, "faults that took place");
    }
}
