//! Stores, managers and guards: a single program, because linking it once costs less than a program for each file. There
//! is one module for each concern. What needs the web layer or a program is in tests/app.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "../rig/mod.rs"]
mod rig;

mod arrays;
mod asks;
mod commands;
mod conformance;
mod contention;
mod ends;
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
