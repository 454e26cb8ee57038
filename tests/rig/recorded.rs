//! Metrics, as a recorder of the application gets them.

use std::collections::BTreeMap;

use metrics::LocalRecorderGuard;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

/// The metrics recorded by this thread, and so by a single-threaded test.
pub(crate) struct Recorded {
    snapshotter: Snapshotter,
    /// The sum for each metric with its labels; for a histogram, the number of values.
    seen: BTreeMap<String, f64>,
    _guard: LocalRecorderGuard<'static>,
}

impl Recorded {
    pub(crate) fn start() -> Self {
        let recorder: &'static DebuggingRecorder = Box::leak(Box::default());
        let guard = ::metrics::set_default_local_recorder(recorder);
        Self { snapshotter: recorder.snapshotter(), seen: BTreeMap::new(), _guard: guard }
    }

    /// A snapshot resets the values that it shows, gauges included.
    pub(crate) fn all(&mut self) -> &BTreeMap<String, f64> {
        for (metric, _, _, value) in self.snapshotter.snapshot().into_vec() {
            let key = metric.key();
            let labels: Vec<_> =
                key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
            let sum =
                self.seen.entry(format!("{}{{{}}}", key.name(), labels.join(","))).or_default();
            *sum += match value {
                DebugValue::Counter(count) => count as f64,
                DebugValue::Gauge(value) => value.into_inner(),
                DebugValue::Histogram(values) => {
                    assert!(values.iter().all(|value| (0.0..60.0).contains(&value.into_inner())));
                    values.len() as f64
                }
            };
        }
        &self.seen
    }

    pub(crate) fn of(&mut self, metric: &str, labels: &str) -> f64 {
        self.all().get(&format!("{metric}{{{labels}}}")).copied().unwrap_or(0.0)
    }

    /// Asserts that exactly these label sets of the metric were seen, with these values.
    pub(crate) fn assert_only(&mut self, metric: &str, expected: &[(&str, f64)]) {
        let prefix = format!("{metric}{{");
        let seen: BTreeMap<_, _> = (self.all().iter())
            .filter_map(|(name, value)| {
                Some((name.strip_prefix(&prefix)?.trim_end_matches('}'), *value))
            })
            .collect();
        assert_eq!(seen, expected.iter().copied().collect(), "{metric}");
    }
}
