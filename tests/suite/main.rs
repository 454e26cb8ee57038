//! A single test binary for everything larger than a unit test, because linking it once costs less than
//! a binary for each file. There is one module for each concern.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "../rig/mod.rs"]
mod rig;

mod arrays;
mod asks;
#[cfg(feature = "web")]
mod browser;
#[cfg(feature = "web")]
mod cancel;
#[cfg(feature = "web")]
mod cli;
mod commands;
mod conformance;
mod contention;
mod ends;
#[cfg(feature = "web")]
mod examples;
mod foreign;
mod freeze;
mod guarantees;
mod leftovers;
mod links;
mod lost;
mod lost_replies;
mod merging;
mod odd_documents;
mod odd_records;
mod operations;
mod outage;
mod overload;
mod properties;
#[cfg(all(feature = "web", not(feature = "bson-3")))]
mod records;
mod register;
mod rules;
mod saving;
mod shared;
mod stuck;
mod taken;
mod transactions;
mod verbs;
mod waiting;
#[cfg(feature = "web")]
mod web;
