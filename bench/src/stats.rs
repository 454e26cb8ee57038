//! Samples of a measurement, and the figures computed from them.

use std::time::Duration;

/// The outcome of one or more slices of the same load.
#[derive(Debug, Default, Clone)]
pub struct Samples {
    /// The durations of the successful cycles, in µs.
    pub took: Vec<f32>,
    /// The number of refused cycles.
    pub refused: u64,
    pub elapsed: Duration,
}

impl Samples {
    pub fn of(took: impl IntoIterator<Item = Duration>) -> Self {
        let took = took.into_iter().map(|took| took.as_secs_f32() * 1e6).collect();
        Self { took, ..Self::default() }
    }

    pub fn add(&mut self, other: Self) {
        self.took.extend(other.took);
        self.refused += other.refused;
        self.elapsed += other.elapsed;
    }

    pub fn per_second(&self) -> f64 {
        self.took.len() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// The values at these fractions of the sorted samples, in µs.
    pub fn at(&self, parts: &[f64]) -> Vec<f64> {
        let mut sorted = self.took.clone();
        sorted.sort_by(f32::total_cmp);
        let last = sorted.len().saturating_sub(1);
        let at = |part: &f64| sorted.get((last as f64 * part).round() as usize).copied();
        parts.iter().map(|part| at(part).map_or(f64::NAN, f64::from)).collect()
    }
}
