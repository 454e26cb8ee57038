//! The log lines of the crates, for all tests of the process.

use std::sync::{Mutex, OnceLock};

/// Collects the log lines of the crates from the first call on, each preceded by its level.
pub(crate) fn log_lines() -> &'static Mutex<Vec<String>> {
    struct Collect;
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    impl log::Log for Collect {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            let target = metadata.target();
            target.starts_with("actix_doclock") || target.starts_with("actix_session_mongo")
        }
        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                LINES.lock().unwrap().push(format!("{} {}", record.level(), record.args()));
            }
        }
        fn flush(&self) {}
    }
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        log::set_logger(&Collect).unwrap();
        log::set_max_level(log::LevelFilter::Trace);
    });
    &LINES
}

pub(crate) fn logged(text: &str) -> bool {
    count_logged(&[text]) > 0
}

/// The number of lines that contain all of these texts.
pub(crate) fn count_logged(texts: &[&str]) -> usize {
    let lines = log_lines().lock().unwrap();
    lines.iter().filter(|line| texts.iter().all(|text| line.contains(text))).count()
}
