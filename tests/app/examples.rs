//! Each example does what its article does, on the embedded store and on MongoDB.

use std::process::{Command, Output};

use tokio::task::spawn_blocking;

use crate::rig::{self, fresh_name, mongod};

async fn run(example: &'static str, args: &[&str]) -> String {
    let mut command = Command::new(rig::example("jobs"));
    command.arg(example).args(args).env_remove("MONGODB_URI");
    let Output { status, stdout, stderr } =
        spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let (out, err) = (String::from_utf8(stdout).unwrap(), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{example} {args:?}: {out}\n{err}");
    out
}

async fn on_mongodb(example: &'static str, args: &[&str]) -> String {
    let server = mongod::shared_replica_set().await;
    let name = fresh_name();
    let on_mongodb = ["--mongodb", server.uri(), "--database", &name];
    run(example, &[&on_mongodb, args].concat()).await
}

/// Asserts that the output on each store contains these lines.
async fn prints(example: &'static str, expected: &[&str]) {
    for out in [run(example, &[]).await, on_mongodb(example, &[]).await] {
        for line in expected {
            assert!(out.lines().any(|l| l == *line), "{example}: no {line:?} in\n{out}");
        }
    }
}

#[tokio::test]
async fn reporting_loses_no_update() {
    let out = run("reporting", &[]).await;
    assert_eq!(out.lines().filter(|line| line.contains("waited")).count(), 24, "{out}");
    prints(
        "reporting",
        &["report 0: 12 updates by 12 requests", "report 1: 12 updates by 12 requests"],
    )
    .await;
}

#[tokio::test]
async fn workers_corrupt_no_file() {
    let sound = [
        "t1: 20 of 20 messages intact, 120 pieces found",
        "t2: 20 of 20 messages intact, 120 pieces found",
        "all files are sound",
    ];
    prints("workers", &sound).await;
}

#[tokio::test]
async fn workers_without_the_lock_do() {
    let without = ["--without-lock"];
    for out in [run("workers", &without).await, on_mongodb("workers", &without).await] {
        assert!(out.ends_with("corrupted\n"), "{out}");
    }
}

#[tokio::test]
async fn a_critical_section_has_one_in_it_and_outlives_a_crash() {
    let expected = [
        "20 of 20 tasks were in the section, at most 1 at a time",
        "who does not wait is told who is in: the first one",
        "late release of the crashed one: AlreadyGone",
        "the next one still holds it: true",
    ];
    prints("critical-section", &expected).await;
}

#[tokio::test]
async fn no_contact_names_a_category_that_is_gone() {
    let expected = ["1 of 3 categories are left", "0 contacts name a category that is gone"];
    prints("categories", &expected).await;
    for out in [run("categories", &[]).await, on_mongodb("categories", &[]).await] {
        assert!(!out.contains("at most 1 at the same time"), "readers share: {out}");
    }
}

#[tokio::test]
async fn a_file_refuses_a_writer_that_was_stalled() {
    let expected = [
        "the second one has written, with a higher token: true",
        "the first one wakes up, writes, and is refused",
        "the file says: by the second one",
    ];
    prints("fencing", &expected).await;
}
