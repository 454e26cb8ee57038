//! The tools of operators on call: health, metrics, spans, and log lines.

mod documents;
#[cfg(feature = "web")]
mod fleet;
mod health;
mod majority;
pub(crate) mod metrics;
mod readiness;
mod rights;
mod spans;
