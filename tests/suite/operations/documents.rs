//! `docs/operations.md` and `docs/grafana.json` agree with the code.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> String {
    fs::read_to_string(repository().join(file)).unwrap()
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|it| it == "rs")).collect()
}

/// Target and level of each line that the crate logs.
fn logged() -> BTreeSet<(String, String)> {
    let mut lines = BTreeSet::new();
    for file in sources(&repository().join("src")) {
        let source = fs::read_to_string(&file).unwrap();
        for call in source.split("log::").skip(1) {
            let Some((level, call)) = call.split_once("!(") else { continue };
            if !["error", "warn", "info", "debug", "trace", "log"].contains(&level) {
                continue;
            }
            let target = call.trim_start().strip_prefix("target: \"").unwrap_or_else(|| {
                panic!("{}: a line without a target: log::{level}!({call:.80}", file.display())
            });
            let (target, _) = target.split_once('"').unwrap();
            // The level is chosen at run time: a warning, and a debug line when it repeats.
            let levels = if level == "log" { vec!["warn", "debug"] } else { vec![level] };
            lines.extend(levels.into_iter().map(|level| (target.to_owned(), level.to_owned())));
        }
    }
    lines
}

/// People filter and alert by these names.
#[test]
fn each_target_and_level_of_the_log_is_in_the_table_and_no_other() {
    let document = read("docs/operations.md");
    let rows = document.lines().filter_map(|line| line.strip_prefix("| `actix_doclock::"));
    let documented: BTreeSet<_> = rows
        .map(|row| {
            let mut cells = row.split('|').map(str::trim);
            let target = format!("actix_doclock::{}", cells.next().unwrap().trim_matches('`'));
            (target, cells.next().unwrap().to_owned())
        })
        .collect();
    assert!(!documented.is_empty());
    assert_eq!(logged(), documented);
}

/// The names in the text that look like our metrics.
fn metrics_in(text: &str) -> BTreeSet<&str> {
    let names = text.match_indices("doclock_").filter_map(|(at, _)| {
        let is_whole = !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let name = text[at..].split(|c: char| !c.is_ascii_lowercase() && c != '_').next()?;
        let parts = ["_bucket", "_sum", "_count"];
        let name = parts.iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
        (is_whole && name != "doclock_").then_some(name)
    });
    names.collect()
}

#[test]
fn each_metric_is_in_the_table_and_each_metric_of_the_dashboard_exists() {
    let all: BTreeSet<_> = actix_doclock::metrics::ALL.iter().copied().collect();
    let document = read("docs/operations.md");
    let rows = document.lines().filter(|line| line.starts_with("| `doclock_"));
    assert_eq!(metrics_in(&rows.collect::<String>()), all);
    assert_eq!(metrics_in(&document), all, "the text names exactly these metrics");
    let dashboard = read("docs/grafana.json");
    let _: serde_json::Value = serde_json::from_str(&dashboard).expect("it is JSON");
    let shown = metrics_in(&dashboard);
    assert!(!shown.is_empty() && shown.is_subset(&all), "{shown:?}");
}
