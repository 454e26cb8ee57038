//! The crate in an actix-web application. Only this module uses HTTP.

mod access;
mod admin;
mod api;
mod assets;
mod clients;
mod events;
mod extract;
mod format;
mod memory;
mod path;
mod problem;
mod request;
mod same_site;
mod serve;
mod session;
mod session_locks;
#[cfg(all(feature = "mongo-session", feature = "_mongo"))]
mod session_store;
mod wrap;

pub use access::Access;
pub use api::lock_api;
pub use clients::{Clients, LockingClients};
pub use extract::{Acquire, Confirm, Guarded, HeldDoc, LockedDoc, Share, SharedDoc};
pub use problem::Problem;
pub use serve::IntoServer;
pub use session::LockingSession;
pub use session_locks::SessionLocks;
#[cfg(all(feature = "mongo-session", feature = "_mongo"))]
pub use session_store::{MongoSessionStore, MongoSessionStoreBuilder};
pub use wrap::{Locking, LockingMiddleware};
