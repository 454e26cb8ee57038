//! What people meet: the crate in an application over HTTP, its pages in browsers, the command and the examples. Apart from
//! the suite, so that the two compile at once.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "../rig/mod.rs"]
mod rig;

mod browser;
mod cancel;
mod cli;
mod examples;
mod web;
