//! One session that follows the steps of a test, so that it can be stopped at any step.

use std::time::Duration;

use actix_doclock::LockKey;
use tokio::time::sleep;

use super::desk::Desk;
use super::{Fenced, Server};
use actix_doclock::Lockable;

/// Each step is a verb, or `wait:name`, which waits for a file with that name.
pub(super) async fn run(server: &Server, steps: &[String], id: &str) {
    let desk = Desk::new(server);
    let key = LockKey::new(Fenced::COLLECTION, id).unwrap();
    let (mut lock, mut loaded) = (None, None);
    for step in steps {
        let held = || lock.as_ref().expect("acquired before");
        match step.split_once(':') {
            Some(("wait", name)) => server.told(name).await,
            _ => match step.as_str() {
                "acquire" => {
                    lock = desk.acquire(&key).await;
                    loaded = match lock {
                        None => None,
                        Some(_) => desk.load(&key).await,
                    };
                }
                "renew" => desk.renew(held()).await,
                "save" => {
                    let _ = desk.save(held(), loaded.clone().expect("loaded before")).await;
                }
                "release" => desk.release(held()).await,
                "sweep" => match server.locks.sweep().await {
                    Ok(_) => server.history.say("swept"),
                    Err(e) => server.history.say(format!("not swept: {e}")),
                },
                "begin" | "idle" => {}
                other => panic!("no such step: {other}"),
            },
        }
        server.history.say(step.as_str());
    }
    // The test decides how to go on.
    sleep(Duration::from_secs(600)).await;
}
