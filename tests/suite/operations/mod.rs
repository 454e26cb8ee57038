//! The tools of operators on call: health, metrics, spans, and log lines.

mod documents;
mod health;
#[cfg(feature = "metrics")]
pub(crate) mod metrics;
#[cfg(feature = "tracing")]
mod spans;
