//! All measures, in the order in which they run.

pub mod cycle;
mod embedded;
pub mod hand_over;
mod many;
mod memory;
pub mod parts;
mod processes;
pub mod settings;
mod streams;
mod sweep;
pub mod verbs;
pub mod web;

use std::{pin::Pin, time::Duration};

use mongodb::Database;
use uuid::Uuid;

use crate::{
    report::Report,
    servers::{Mongo, Servers},
};

pub struct Bench<'a> {
    pub servers: &'a Servers,
    pub report: &'a mut Report,
    pub effort: Effort,
    /// Measures only this crate and the floors, to compare two builds.
    pub without_peers: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// To try whether all of it works.
    Quick,
    /// For the page.
    Full,
}

impl Effort {
    pub fn pick<T>(self, quick: T, full: T) -> T {
        if self == Self::Quick { quick } else { full }
    }

    /// How long a slice of load lasts, and how many slices each contender gets, in turn with the
    /// others.
    pub fn slices(self) -> (Duration, usize) {
        self.pick((Duration::from_millis(120), 1), (Duration::from_millis(500), 3))
    }
}

impl<'a> Bench<'a> {
    /// The replica sets, by the names in the rows' field `at`.
    pub fn sets(&self) -> [(&'static str, &'a Mongo); 2] {
        [("one", &self.servers.one), ("three", &self.servers.three)]
    }
}

type Measure = for<'a> fn(&'a mut Bench<'_>) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// The measures of the page.
pub const ALL: &[(&str, Measure)] = &[
    ("cycle", |bench| Box::pin(cycle::measure(bench))),
    ("parts", |bench| Box::pin(parts::measure(bench))),
    ("settings", |bench| Box::pin(settings::measure(bench))),
    ("verbs", |bench| Box::pin(verbs::measure(bench))),
    ("hand-over", |bench| Box::pin(hand_over::measure(bench))),
    ("waiters", |bench| Box::pin(hand_over::waiters(bench))),
    ("web", |bench| Box::pin(web::measure(bench))),
    ("memory", |bench| Box::pin(memory::measure(bench))),
    ("many", |bench| Box::pin(many::measure(bench))),
];

/// The measures that are not on the page: they run if they are asked for by name.
pub const OTHERS: &[(&str, Measure)] = &[
    ("embedded", |bench| Box::pin(embedded::measure(bench))),
    ("processes", |bench| Box::pin(processes::measure(bench))),
    ("streams", |bench| Box::pin(streams::measure(bench))),
    ("expiry", |bench| Box::pin(sweep::expiry(bench))),
    ("idle", |bench| Box::pin(sweep::idle(bench))),
];

/// What a [child](crate::child::Child) does.
pub async fn child(arguments: &[String]) {
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["server", uri, database] => streams::child(uri.into(), database.into()).await,
        ["expiry", uri, database, scenario] => sweep::child(uri, database, scenario).await,
        [role, uri, database] => processes::child(role, uri, database).await,
        _ => panic!("no such child: {arguments:?}"),
    }
}

/// A new database, on a new client with the default options.
pub async fn fresh(mongo: &Mongo) -> Database {
    mongo.client().await.database(&format!("bench_{}", Uuid::new_v4().simple()))
}
