//! The page: a written text into which the tables and plots of the last run are inserted.

use std::{fs, path::Path};

use crate::{
    measures::web,
    plot::{self, Bar, Line},
    report::{Report, Row},
    table::{self, place},
};

/// Placeholders are `{{table NAME}}` and `{{about NAME}}`.
pub fn write(report: &Report, template: &Path, docs: &Path) {
    let template = fs::read_to_string(template).expect("the text of the page");
    fs::create_dir_all(docs).expect("a directory");
    let mut page = String::new();
    for (n, part) in template.split("{{").enumerate() {
        if n == 0 {
            page.push_str(part);
            continue;
        }
        let (placeholder, rest) = part.split_once("}}").expect("a placeholder that ends");
        page.push_str(&filled(report, placeholder));
        page.push_str(rest);
    }
    fs::write(docs.join("benchmarks.md"), page).expect("a file can be written");
    for (name, svg) in plots(report) {
        fs::write(docs.join(format!("bench-{name}.svg")), svg).expect("a file can be written");
    }
}

fn filled(report: &Report, placeholder: &str) -> String {
    match placeholder.split_once(' ') {
        Some(("table", name)) => table::table(report, name).trim_end().to_owned(),
        Some(("wrap", sessions)) => {
            let who = match sessions {
                "logged in" => format!("{}{}", web::WRAP, web::LOGGED_IN),
                _ => web::WRAP.to_owned(),
            };
            table::added_by_wrap(report, &who).map_or("?".into(), plot::number)
        }
        Some(("about", name)) => report.about.get(name).map_or("not there", |it| it).to_owned(),
        _ => panic!("what is {{{{{placeholder}}}}}?"),
    }
}

fn plots(report: &Report) -> [(&'static str, String); 4] {
    let latency = |places: &[&'static str], load, measure| {
        groups(report, places, measure, load, "p50", Some("p99"), 1e-3)
    };
    let everywhere = ["one", "three", "redis", "redis-aof"];
    let cycle = plot::bars(
        "Acquire + release by one task: median, whisker to the 99th percentile",
        "ms, logarithmic; shorter is better",
        &latency(&everywhere, (1, 10_000), "cycle"),
    );
    let hand_over = plot::bars(
        "Handover: from the release to the grant of the waiter, median and 99th percentile",
        "ms, logarithmic; shorter is better",
        &latency(&everywhere, (0, 0), "hand-over"),
    );
    let contended = plot::bars(
        "Grants per second with 64 tasks on one key",
        "grants/s, logarithmic; longer is better",
        &groups(report, &everywhere, "cycle", (64, 1), "per_second", None, 1.0),
    );
    let panels = ["one", "three"].map(|at| (place(at), scaling(report, at)));
    let throughput = plot::lines(
        "Acquire + release on 10 000 keys",
        ["tasks", "cycles/s, logarithmic; higher is better"],
        &panels,
    );
    [
        ("latency", cycle),
        ("hand-over", hand_over),
        ("contended", contended),
        ("throughput", throughput),
    ]
}

fn groups<'a>(
    report: &Report,
    places: &[&'a str],
    measure: &str,
    load: (usize, usize),
    value: &str,
    whisker: Option<&str>,
    scale: f64,
) -> Vec<(&'a str, Vec<Bar>)> {
    let bar = |row: &Row| {
        let up_to = whisker.and_then(|name| row.get(name)).map(|it| it * scale);
        let value = row.get(value)? * scale;
        Some(Bar { label: row.who.clone(), role: row.role, value, up_to })
    };
    let group = |at: &'a str| {
        let rows = report.of(measure).filter(|row| row.at == at && (row.tasks, row.keys) == load);
        let bars: Vec<_> = rows.filter_map(bar).collect();
        (!bars.is_empty()).then(|| (place(at), bars))
    };
    places.iter().filter_map(|at| group(at)).collect()
}

fn scaling(report: &Report, at: &str) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for row in report.of("cycle").filter(|row| row.at == at && row.keys == 10_000) {
        let Some(per_second) = row.get("per_second") else { continue };
        let point = (row.tasks as f64, per_second);
        match lines.iter_mut().find(|line| line.label == row.who) {
            Some(line) => line.points.push(point),
            None => {
                lines.push(Line { label: row.who.clone(), role: row.role, points: vec![point] })
            }
        }
    }
    lines
}
