//! The alternatives that people would pick, each with the client library and the settings that it comes
//! with.

pub mod mongo_lock;
pub mod redis;
pub mod seeds;
