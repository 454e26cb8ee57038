//! The raw results: one JSON file from which the page and the plots are made.

use std::{collections::BTreeMap, fs, io, path::Path};

use serde::{Deserialize, Serialize};

use crate::stats::Samples;

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The machine, the versions, when and how.
    pub about: BTreeMap<String, String>,
    pub rows: Vec<Row>,
}

/// One measurement of one contender.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The name of the measure, such as `cycle`.
    pub measure: String,
    /// The environment: `one`, `three`, `redis`, …
    pub at: String,
    pub who: String,
    pub role: Role,
    #[serde(default)]
    pub tasks: usize,
    #[serde(default)]
    pub keys: usize,
    /// By name: `p50`, `p99` in µs, `per_second`, `n`, …
    pub values: BTreeMap<String, f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Floor,
    Ours,
    Peer,
}

impl Row {
    pub fn new(measure: &str, at: &str, who: &str, role: Role) -> Self {
        let [measure, at, who] = [measure, at, who].map(str::to_owned);
        Self { measure, at, who, role, tasks: 0, keys: 0, values: BTreeMap::new() }
    }

    pub fn load(mut self, tasks: usize, keys: usize) -> Self {
        (self.tasks, self.keys) = (tasks, keys);
        self
    }

    pub fn value(mut self, name: &str, value: f64) -> Self {
        // JSON has no NaN.
        if value.is_finite() {
            self.values.insert(name.into(), value);
        }
        self
    }

    pub fn samples(self, samples: &Samples) -> Self {
        let [p50, p90, p99, max] = samples.at(&[0.5, 0.9, 0.99, 1.0])[..] else { return self };
        let row = self.value("p50", p50).value("p90", p90).value("p99", p99).value("max", max);
        let row = row.value("n", samples.took.len() as f64);
        if samples.elapsed.is_zero() {
            return row;
        }
        let refused = samples.refused as f64 / samples.elapsed.as_secs_f64();
        row.value("per_second", samples.per_second()).value("refused_per_second", refused)
    }

    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied()
    }
}

impl Report {
    pub fn add(&mut self, row: Row) {
        let load =
            if row.tasks > 0 { format!(" {}×{}", row.tasks, row.keys) } else { String::new() };
        let values = row.values.iter().map(|(name, value)| format!("{name} {value:.1}"));
        let values: Vec<_> = values.collect();
        eprintln!("{} {}{load} | {} | {}", row.measure, row.at, row.who, values.join(", "));
        self.rows.push(row);
    }

    pub fn find(&self, measure: &str, at: &str, who: &str) -> Option<&Row> {
        self.of(measure).find(|row| row.at == at && row.who == who)
    }

    pub fn of<'a>(&'a self, measure: &str) -> impl Iterator<Item = &'a Row> {
        self.rows.iter().filter(move |row| row.measure == measure)
    }

    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    pub fn write(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path.parent().expect("a file in a directory"))?;
        fs::write(path, serde_json::to_vec_pretty(self)?)
    }
}
