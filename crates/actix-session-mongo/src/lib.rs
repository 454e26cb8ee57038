#![doc = include_str!("../README.md")]

mod builder;
mod change;
mod end;
mod error;
mod indexes;
mod owner;
mod pipeline;
mod records;
mod store;
mod sweep;
mod wrap;

pub use builder::{MongoSessionStoreBuilder, prepare};
pub use end::{EndReason, SessionEnd};
pub use error::{BoxError, Error};
pub use indexes::{DATES, indexes};
pub use owner::others_records;
pub use records::{ACTIONS, StoredSession};
pub use store::MongoSessionStore;
pub use wrap::{SessionWrap, session_ends_in};
