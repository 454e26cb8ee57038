//! Spans show the verb, its collection and its outcome, and nothing secret.

use std::env;
use std::io::{self, Write};
use std::process::Command;
use std::sync::{Arc, Mutex};

use actix_doclock::{Actor, Aid, Holder, LockManager, MemoryStore, TryAcquire, Wait};
use tracing_subscriber::fmt::format::FmtSpan;

use crate::rig::app::{WorkItem, key};
use crate::rig::log::{count_logged, log_lines};

/// The output of a subscriber.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

/// The aid and the token that must not appear.
async fn one_of_each() -> (Aid, String) {
    let locks = LockManager::builder(MemoryStore::new()).without_reaper().build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let (aid, holder) = (Aid::new(), Holder::new("alice"));
    let Ok(TryAcquire::Granted(lock)) = locks.lock_for_session(&key("secret"), &aid, &holder).await
    else {
        panic!("not granted");
    };
    let soon = Wait::for_at_most(std::time::Duration::from_millis(1));
    locks.acquire(&key("secret"), soon).await.unwrap_err();
    locks.renew(&aid).await.unwrap();
    crate::rig::app::break_on(&locks, &key("secret"), &Actor::new("bob")).await.unwrap_err();
    locks.release(&lock).await.unwrap();
    locks.sweep().await.unwrap();
    locks.end_session(&aid).await.unwrap();
    (aid, lock.token.unwrap().to_string())
}

/// `actix-web` switches on the feature `log` of `tracing`, which writes spans into the log unless there is a subscriber.
#[tokio::test]
async fn without_a_subscriber_no_span_is_a_line_of_the_log() {
    log_lines();
    one_of_each().await;
    let spans = count_logged(&["doclock.acquire"]) + count_logged(&["doclock.release"]);
    assert_eq!(spans, 0);
}

/// Runs in a process of its own: for each place in the code, `tracing` records for the whole process
/// whether anything subscribes to it, and asks only the first thread that comes there.
#[test]
fn each_verb_is_a_span_with_its_collection_and_its_outcome() {
    let mut alone = Command::new(env::current_exe().unwrap());
    let alone = alone.args(["--exact", "operations::spans::alone", "--ignored"]).output().unwrap();
    let said = String::from_utf8_lossy(&alone.stdout);
    assert!(alone.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test]
#[ignore = "started by the test above"]
async fn alone() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_span_events(FmtSpan::CLOSE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);

    let (aid, token) = one_of_each().await;

    let text = lines.text();
    for span in [
        r#"doclock.acquire{collection="workitem" outcome="granted"}"#,
        r#"doclock.wait{collection="workitem"}:doclock.acquire{collection="workitem" outcome="held"}"#,
        r#"doclock.wait{collection="workitem" outcome="held"}"#,
        r#"doclock.renew{outcome="ok"}"#,
        r#"doclock.inspect{collection="workitem"}"#,
        r#"doclock.break{collection="workitem" outcome="refused"}"#,
        r#"doclock.release{collection="workitem" outcome="released"}"#,
        r#"doclock.sweep{outcome="ok"}"#,
        "doclock.end_session",
    ] {
        assert!(text.contains(span), "no {span} in\n{text}");
    }
    for secret in [aid.as_str(), &token, "secret", "alice", "bob"] {
        assert!(!text.contains(secret), "{secret} in\n{text}");
    }
}
