#![doc = include_str!("../README.md")]

mod doctor;
mod titles;

pub use doctor::{Finding, SESSIONS, Severity, diagnose, sessions};
pub use titles::titles;
