//! What the person on call gets: health, metrics, spans, lines of the log.

mod documents;
mod health;
#[cfg(feature = "metrics")]
pub(crate) mod metrics;
#[cfg(feature = "tracing")]
mod spans;
