//! The crate in an actix-web application: the wraps, the extractors, the lock API. Only this module uses HTTP.

mod access;
mod admin;
mod api;
mod assets;
mod clients;
mod current_request;
mod events;
mod format;
mod locked_doc;
mod problem;
mod refused;
mod request;
mod same_site;
mod serve;
mod session;
mod session_locks;
mod settings;
mod words;
mod wrap;

pub use access::{Access, PolicyAnswer};
pub use api::lock_api;
pub use clients::{Clients, LockingClients};
pub use locked_doc::{Acquire, Confirm, Exclusive, Guarded, HeldDoc, LockedDoc, Share, SharedDoc};
pub use problem::Problem;
pub use refused::Refused;
pub use serve::IntoServer;
pub use session::{InSession, LockingSession};
pub use session_locks::SessionLocks;
pub use settings::Locking;
pub use wrap::LockingMiddleware;
