//! Locks of jobs and workers, without people: `cargo run --example jobs` names the five.
#![allow(missing_docs)]

mod categories;
mod critical_section;
mod fencing;
mod reporting;
mod support;
mod workers;

use actix_doclock::BoxError;
use clap::Parser;

#[derive(Parser)]
enum Job {
    /// Contacts name categories, which another program deletes
    Categories(categories::Arguments),
    /// One task at a time in a section, over several servers
    CriticalSection(critical_section::Arguments),
    /// A file that refuses a writer whose lock has expired
    Fencing(fencing::Arguments),
    /// A report that several requests update
    Reporting(reporting::Arguments),
    /// Workers that write to one file for each type of message
    Workers(workers::Arguments),
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    match Job::parse() {
        Job::Categories(arguments) => categories::run(arguments).await,
        Job::CriticalSection(arguments) => critical_section::run(arguments).await,
        Job::Fencing(arguments) => fencing::run(arguments).await,
        Job::Reporting(arguments) => reporting::run(arguments).await,
        Job::Workers(arguments) => workers::run(arguments).await,
    }
}
