//! Hostile bytes, and records with random values.

#[cfg(feature = "web")]
mod hostile;
mod records;
#[cfg(feature = "web")]
mod requests;
