//! Tables of the page, made from the raw results.

use std::fmt::Write;

use crate::{
    floors::INSERT_DELETE,
    measures::{
        cycle::{KEYS, TASKS},
        hand_over, parts, settings, verbs, web,
    },
    ours::{MANAGER, WAITING},
    plot::number,
    report::{Report, Role, Row},
};

/// The environment of a measurement, in words.
pub fn place(at: &str) -> &str {
    match at {
        "one" => "MongoDB, one node",
        "three" => "MongoDB, three nodes",
        "redis" => "Redis, in memory only",
        "redis-aof" => "Redis, appendfsync always",
        "memory" => "MemoryStore",
        other => other,
    }
}

/// The table of this name.
pub fn table(report: &Report, name: &str) -> String {
    match name {
        "summary of latency" => summary(report, &latencies(), "p50", "ms"),
        "summary of throughput" => summary(report, &throughputs(), "per_second", "1/s"),
        "cycle, no contention" => uncontended(report),
        "cycle, contention" => contended(report),
        "refusal" => latency(report, "refusal", &[(1, 1), (16, 1)]),
        "re-entry" => latency(report, "re-entry", &[(1, 1), (16, 1)]),
        "renew" => sizes(report, "renew"),
        "end session" => sizes(report, "end session"),
        "hand-over" => latency(report, "hand-over", &[(0, 0)]),
        "waiters" => waiters(report),
        "wrap" => wrap(report),
        "web" => latency(report, "web", &[(1, 1), (16, 16)]),
        "many" => many(report),
        "memory" => memory(report),
        "parts" => parts(report),
        "processor" => processor(report),
        "write concern" => latency(report, "write concern", &[(1, 10_000), (16, 10_000)]),
        "pool" => latency(report, "pool", &[(256, 10_000)]),
        "journal" => latency(report, "journal", &[(1, 10_000), (16, 10_000)]),
        "history" => latency(report, "history", &settings::NAMES.map(|names| (16, names))),
        _ => panic!("there is no table {name}"),
    }
}

// The summary

struct Subject {
    what: String,
    measure: &'static str,
    at: &'static str,
    load: (usize, usize),
    ours: &'static str,
    floor: &'static str,
}

impl Subject {
    fn row<'a>(&self, report: &'a Report, who: &str) -> Option<&'a Row> {
        let (tasks, keys) = self.load;
        report.of(self.measure).find(|row| {
            row.at == self.at && row.who == who && row.tasks == tasks && row.keys == keys
        })
    }

    fn best<'a>(&self, report: &'a Report, value: &str) -> Option<&'a Row> {
        let peers = report.of(self.measure).filter(|row| {
            row.role == Role::Peer && row.at == self.at && (row.tasks, row.keys) == self.load
        });
        let sign = if value == "per_second" { -1.0 } else { 1.0 };
        let of = |row: &Row| sign * row.get(value).unwrap_or(f64::NAN);
        peers.min_by(|a, b| of(a).total_cmp(&of(b)))
    }
}

fn latencies() -> Vec<Subject> {
    let mut all = Vec::new();
    for at in ["one", "three"] {
        let mut add = |what: &str, measure, load, ours, floor| {
            let what = format!("{what}, {}", nodes(at));
            all.push(Subject { what, measure, at, load, ours, floor });
        };
        add("acquire + release, `LockManager`", "cycle", (1, 10_000), MANAGER, INSERT_DELETE);
        add("refusal, with the holder", "refusal", (1, 1), MANAGER, verbs::FIND);
        add("re-entry", "re-entry", (1, 1), MANAGER, verbs::UPDATE);
        add("renewal of 1 lock", "renew", (1, 1), MANAGER, verbs::UPDATE_MANY);
        add("renewal of 1 000 locks", "renew", (1, 1_000), MANAGER, verbs::UPDATE_MANY);
        add("end of a session with 1 lock", "end session", (1, 1), MANAGER, verbs::DELETE_MANY);
        add(
            "end of a session with 1 000 locks",
            "end session",
            (1, 1_000),
            MANAGER,
            verbs::DELETE_MANY,
        );
        add("handover in one process", "hand-over", (0, 0), hand_over::SAME, hand_over::STREAM);
        add("handover between processes", "hand-over", (0, 0), hand_over::OTHER, hand_over::STREAM);
        add("HTTP request with `LockedDoc`", "web", (1, 1), web::LOCKED, web::PLAIN);
    }
    all
}

fn throughputs() -> Vec<Subject> {
    let mut all = Vec::new();
    let mut add = |what: String, (measure, at), load, (ours, floor)| {
        all.push(Subject { what, measure, at, load, ours, floor });
    };
    for at in ["one", "three"] {
        for tasks in [16, 64, 256] {
            let what = format!("acquire + release, {tasks} tasks, {}", nodes(at));
            add(what, ("cycle", at), (tasks, 10_000), (MANAGER, INSERT_DELETE));
        }
        for (keys, named) in [(16, "16 keys"), (1, "1 key")] {
            let what = format!("the same, 64 tasks wait for {named}, {}", nodes(at));
            add(what, ("cycle", at), (64, keys), (WAITING, INSERT_DELETE));
        }
    }
    for at in ["memory", "one", "three"] {
        let what = format!("HTTP requests with `LockedDoc`, 16 clients, {}", place(at));
        add(what, ("web", at), (16, 16), (web::LOCKED, web::PLAIN));
    }
    all
}

fn nodes(at: &str) -> &'static str {
    if at == "three" { "three nodes" } else { "one node" }
}

fn summary(report: &Report, subjects: &[Subject], value: &str, unit: &str) -> String {
    let scale = if value == "p50" { 1e-3 } else { 1.0 };
    let mut table = format!(
        "| what ({unit}) | ours | floor | ratio | best peer on MongoDB | ratio |\n\
         |---|---:|---:|---:|---|---:|\n"
    );
    for subject in subjects {
        let Some(ours) = subject.row(report, subject.ours).and_then(|row| row.get(value)) else {
            continue;
        };
        let floor = subject.row(report, subject.floor).and_then(|row| row.get(value));
        let shown = |it: Option<f64>| it.map_or("–".into(), |it| number(it * scale));
        let against = |it: Option<f64>| it.map_or("–".into(), |it| ratio(ours, it));
        let peer = match subject.best(report, value) {
            Some(row) => {
                let it = row.get(value);
                format!("{} {} | {}", shown(it), row.who, against(it))
            }
            None => "– | –".into(),
        };
        let what = &subject.what;
        let (ours, floor, to_floor) = (shown(Some(ours)), shown(floor), against(floor));
        writeln!(table, "| {what} | {ours} | {floor} | {to_floor} | {peer} |").expect("a string");
    }
    table
}

pub fn ratio(ours: f64, other: f64) -> String {
    let ratio = ours / other;
    match ratio {
        r if r >= 99.5 => format!("{r:.0} ×"),
        r if r >= 9.95 => format!("{r:.1} ×"),
        r if r >= 0.0995 => format!("{r:.2} ×"),
        r => format!("{r:.3} ×"),
    }
}

// Acquire and release

fn uncontended(report: &Report) -> String {
    let mut table = String::from("| |");
    for tasks in TASKS {
        write!(
            table,
            " {tasks} {}: p50 / p99 ms | 1/s | to floor |",
            if tasks == 1 { "task" } else { "tasks" }
        )
        .expect("a string");
    }
    table.push_str("\n|---|");
    table.push_str(&"---:|---:|---:|".repeat(TASKS.len()));
    table.push('\n');
    each(report, "cycle", &mut table, TASKS.len() * 3, |at, who, table| {
        for tasks in TASKS {
            let row = find(report, "cycle", at, who, (tasks, 10_000));
            let floor = find(report, "cycle", at, INSERT_DELETE, (tasks, 10_000));
            let Some(row) = row else {
                table.push_str(" – | – | – |");
                continue;
            };
            let per_second = row.get("per_second").unwrap_or(f64::NAN);
            let floor = floor.and_then(|floor| floor.get("per_second"));
            let to_floor = floor.map_or("–".into(), |floor| ratio(per_second, floor));
            write!(table, " {} | {} | {to_floor} |", milliseconds(row), number(per_second))
                .expect("a string");
        }
    });
    table
}

/// Acquire and release, measured separately.
fn parts(report: &Report) -> String {
    let mut table = String::from("| p50 / p99 ms | acquire | release |\n|---|---:|---:|\n");
    each(report, "acquire", &mut table, 2, |at, who, table| {
        let release = if who == "insert_one" { "delete_one" } else { who };
        for (measure, who) in [("acquire", who), ("release", release)] {
            let row = report.find(measure, at, who);
            table.push_str(&row.map_or(" – |".into(), |row| format!(" {} |", milliseconds(row))));
        }
    });
    table
}

fn processor(report: &Report) -> String {
    let mut table = String::from("| µs a cycle |");
    for tasks in parts::TASKS {
        write!(table, " {tasks} tasks: application | `mongod`, all nodes |").expect("a string");
    }
    let columns = 2 * parts::TASKS.len();
    writeln!(table, "\n|---|{}", "---:|".repeat(columns)).expect("a string");
    each(report, "processor", &mut table, columns, |at, who, table| {
        for tasks in parts::TASKS {
            let row = find(report, "processor", at, who, (tasks, 10_000));
            for name in ["client", "servers"] {
                let value = row.and_then(|row| row.get(name)).map_or("–".into(), number);
                write!(table, " {value} |").expect("a string");
            }
        }
    });
    table
}

fn contended(report: &Report) -> String {
    let loads: Vec<_> = KEYS[..2]
        .iter()
        .flat_map(|&keys| TASKS[1..].iter().map(move |&tasks| (tasks, keys)))
        .collect();
    let mut table = String::from("| grants/s (refusals/s) |");
    for (tasks, keys) in &loads {
        let keys = if *keys == 1 { "1 key".into() } else { format!("{keys} keys") };
        write!(table, " {tasks} tasks, {keys} |").expect("a string");
    }
    table.push_str("\n|---|");
    table.push_str(&"---:|".repeat(loads.len()));
    table.push('\n');
    each(report, "cycle", &mut table, loads.len(), |at, who, table| {
        for load in &loads {
            let row = find(report, "cycle", at, who, *load);
            let value = |name| row.and_then(|row| row.get(name)).unwrap_or(f64::NAN);
            let (granted, refused) = (value("per_second"), value("refused_per_second"));
            match (granted.is_nan(), refused) {
                (true, _) => table.push_str(" – |"),
                (_, 0.0) => write!(table, " {} |", number(granted)).expect("a string"),
                _ => {
                    write!(table, " {} ({}) |", number(granted), number(refused)).expect("a string")
                }
            }
        }
    });
    table
}

/// The contenders of a measure, grouped by place.
fn each(
    report: &Report,
    measure: &str,
    table: &mut String,
    columns: usize,
    cells: impl Fn(&str, &str, &mut String),
) {
    for at in ["memory", "one", "three", "redis", "redis-aof"] {
        let mut names: Vec<&str> = Vec::new();
        for row in report.of(measure).filter(|row| row.at == at) {
            if !names.contains(&&*row.who) {
                names.push(&row.who);
            }
        }
        if names.is_empty() {
            continue;
        }
        writeln!(table, "| **{}** |{}", place(at), " |".repeat(columns)).expect("a string");
        for who in names {
            let mut row = String::new();
            cells(at, who, &mut row);
            // Not every contender takes part in every measure.
            if row.contains(|c: char| c.is_ascii_digit()) {
                let who = shown(report, measure, at, who);
                writeln!(table, "| {who} |{row}").expect("a string");
            }
        }
    }
}

/// Floors in italics, our rows in bold.
fn shown(report: &Report, measure: &str, at: &str, who: &str) -> String {
    match report.find(measure, at, who).map(|row| row.role) {
        Some(Role::Floor) => format!("*{who}*"),
        Some(Role::Ours) => format!("**{who}**"),
        _ => who.to_owned(),
    }
}

fn find<'a>(
    report: &'a Report,
    measure: &'a str,
    at: &str,
    who: &str,
    load: (usize, usize),
) -> Option<&'a Row> {
    report.of(measure).find(|row| row.at == at && row.who == who && (row.tasks, row.keys) == load)
}

fn milliseconds(row: &Row) -> String {
    let value = |name| number(row.get(name).unwrap_or(f64::NAN) / 1e3);
    format!("{} / {}", value("p50"), value("p99"))
}

// The others

fn latency(report: &Report, measure: &str, loads: &[(usize, usize)]) -> String {
    let throughput = loads.iter().any(|(tasks, _)| *tasks > 0);
    let only_keys_differ = loads.len() > 1 && loads.iter().all(|load| load.0 == loads[0].0);
    let mut table = String::from("| |");
    for (tasks, keys) in loads {
        match tasks {
            _ if only_keys_differ => {
                write!(table, " {} names: p50 / p99 ms | 1/s |", number(*keys as f64))
                    .expect("a string");
            }
            0 => table.push_str(" p50 / p99 ms |"),
            _ => write!(table, " {tasks} at once: p50 / p99 ms | 1/s |").expect("a string"),
        }
    }
    let columns = loads.len() * if throughput { 2 } else { 1 };
    write!(table, "\n|---|{}\n", "---:|".repeat(columns)).expect("a string");
    each(report, measure, &mut table, columns, |at, who, table| {
        for load in loads {
            let row = find(report, measure, at, who, *load);
            table.push_str(&row.map_or(" – |".into(), |row| format!(" {} |", milliseconds(row))));
            if throughput {
                let per_second = row.and_then(|row| row.get("per_second"));
                write!(table, " {} |", per_second.map_or("–".into(), number)).expect("a string");
            }
        }
    });
    table
}

fn sizes(report: &Report, measure: &str) -> String {
    let mut table = String::from("| p50 / p99 ms |");
    for size in verbs::SIZES {
        write!(table, " {} {} |", size, if size == 1 { "lock" } else { "locks" })
            .expect("a string");
    }
    write!(table, "\n|---|{}\n", "---:|".repeat(verbs::SIZES.len())).expect("a string");
    each(report, measure, &mut table, verbs::SIZES.len(), |at, who, table| {
        for size in verbs::SIZES {
            let row = find(report, measure, at, who, (1, size));
            table.push_str(&row.map_or(" – |".into(), |row| format!(" {} |", milliseconds(row))));
        }
    });
    table
}

fn waiters(report: &Report) -> String {
    let mut table = String::from(
        "| | waiters | granted | until the last, ms | each, ms | out of turn by, places: p50 / max |\n\
         |---|---:|---:|---:|---:|---:|\n",
    );
    each(report, "waiters", &mut table, 5, |at, who, table| {
        let Some(row) = report.find("waiters", at, who) else { return };
        let value = |name| row.get(name).unwrap_or(f64::NAN);
        let (ms, each) = (number(value("ms")), number(value("each") / 1e3));
        let (p50, max) = (value("moved_p50"), value("moved_max"));
        let (crowd, got) = (row.tasks, value("in"));
        write!(table, " {crowd} | {got} | {ms} | {each} | {p50} / {max} |").expect("a string");
    });
    table
}

fn wrap(report: &Report) -> String {
    let mut table = String::from(
        "| | ns a request, p50 | allocations | more than without, ns |\n|---|---:|---:|---:|\n",
    );
    for row in report.of("wrap") {
        let who = shown(report, "wrap", "memory", &row.who);
        let ns = row.get("p50").map_or("–".into(), |us| number(us * 1e3));
        let allocations = row.get("allocations").map_or("–".into(), |it| format!("{it:.0}"));
        let more = added_by_wrap(report, &row.who).map_or("–".into(), number);
        writeln!(table, "| {who} | {ns} | {allocations} | {more} |").expect("a string");
    }
    table
}

/// By how many ns the wrap slows down these requests.
pub fn added_by_wrap(report: &Report, who: &str) -> Option<f64> {
    let of = |who: &str| report.find("wrap", "memory", who)?.get("p50");
    let without = who.replace(web::WRAP, web::SESSION);
    (without != who).then_some((of(who)? - of(&without)?) * 1e3)
}

fn many(report: &Report) -> String {
    let mut table = String::from(
        "| | other locks held | 1 task: p50 / p99 ms | 16 tasks: 1/s |\n|---|---:|---:|---:|\n",
    );
    for row in report.of("many").filter(|row| row.tasks == 1) {
        let sixteen = find(report, "many", &row.at, &row.who, (16, row.keys));
        let per_second = sixteen.and_then(|row| row.get("per_second")).map_or("–".into(), number);
        let who = shown(report, "many", &row.at, &row.who);
        let held = number(row.keys as f64);
        writeln!(table, "| {who} | {held} | {} | {per_second} |", milliseconds(row))
            .expect("a string");
    }
    table
}

fn memory(report: &Report) -> String {
    let mut table = String::from("| | bytes |\n|---|---:|\n");
    for row in report.of("memory") {
        let bytes = row.get("bytes").map_or("–".into(), number);
        writeln!(table, "| {}, in the application | {bytes} |", row.who).expect("a string");
    }
    for row in report.of("record") {
        for (name, what) in [
            ("size", "as BSON"),
            ("storageSize", "on disk, compressed"),
            ("totalIndexSize", "its indexes, on disk"),
        ] {
            let bytes = row.get(name).map_or("–".into(), number);
            writeln!(table, "| {} in MongoDB, {what} | {bytes} |", row.who).expect("a string");
        }
    }
    table
}
