//! Describes the machine and the versions that a measurement ran on.

use std::{fs, process::Command, thread};

use crate::{report::Report, servers::Servers};

pub fn machine(report: &mut Report, servers: &Servers) {
    let mut say = |name: &str, value: String| {
        report.about.insert(name.into(), value);
    };
    say("cores", thread::available_parallelism().map_or(0, usize::from).to_string());
    say("processor", line_of("/proc/cpuinfo", "model name"));
    let memory = line_of("/proc/meminfo", "MemTotal");
    let kib: f64 = memory.trim_end_matches(" kB").parse().unwrap_or(0.0);
    say("memory", format!("{:.0} GiB", kib / 1024.0 / 1024.0));
    say("kernel", output("uname", &["-sr"]));
    say("date", output("date", &["-u", "+%Y-%m-%d"]));
    say("rust", output("rustc", &["--version"]));
    say("commit", output("git", &["rev-parse", "--short", "HEAD"]));
    say("MongoDB", servers.one.version.clone());
    if let Some(redis) = &servers.redis {
        say("Redis", redis.version.clone());
    }
    let versions = include_str!("../Cargo.lock");
    for name in ["mongodb", "redis", "rslock", "mongo-lock", "mongo-lock-async"] {
        let named = format!("name = \"{name}\"\nversion = \"");
        let found = versions.split(&named).skip(1).filter_map(|rest| rest.split('"').next());
        say(&format!("crate {name}"), found.collect::<Vec<_>>().join(", "));
    }
}

fn line_of(file: &str, name: &str) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    line.split_once(':').map_or("?", |(_, value)| value.trim()).to_owned()
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.ok().filter(|text| !text.is_empty()).unwrap_or("?".into())
}
