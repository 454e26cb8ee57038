//! More is asked than the database can do: what cannot be sent in time is refused, and costs nothing later.

use std::collections::HashSet;
use std::time::Duration;

use actix_doclock::{Aid, LockError, Released, StoreErrorKind};
use doclock_conformance::Shorthand;
use futures_util::future::join_all;
use mongodb::bson::{Bson, Document};

use crate::rig;
use crate::rig::app::{App, NO_DEADLINE, count, eventually, key, with_deadline};
use crate::rig::mongod::{self, Mongod};

/// The ids of the records that a command of the store writes.
fn written(command: &Document) -> Vec<String> {
    let statements = ["updates", "deletes"].iter().find_map(|name| command.get_array(name).ok());
    let filters = statements.into_iter().flatten().filter_map(Bson::as_document);
    let filters = filters.filter_map(|it| it.get_document("q").ok());
    let made = command.get_array("documents").ok().into_iter().flatten();
    let made = made.filter_map(Bson::as_document);
    let filters = filters.chain(command.get_document("query").ok()).chain(made);
    filters.filter_map(|it| it.get_str("_id").ok().map(str::to_owned)).collect()
}

#[tokio::test]
async fn a_claim_that_was_not_sent_is_refused_as_overloaded_and_nothing_is_ever_sent_for_it() {
    const CLAIMS: usize = 600;
    let server = Mongod::start_replica_set().await;
    let (database, sent) = rig::recorded_database(&server.uri()).await;
    let app = App::with(&database, with_deadline(Duration::from_millis(1_500))).await;
    let patient = App::on(&database).await;
    patient.granted(&key("before"), &Aid::new()).await;
    server.pause();
    let claim = async |n: usize| match app.try_acquire(&key(&n.to_string()), &Aid::new()).await {
        Err(LockError::Store(e)) => (n, e.kind()),
        other => panic!("{other:?}"),
    };
    let all = join_all((0..CLAIMS).map(claim)).await;
    server.resume();
    let refused: HashSet<_> = (all.iter())
        .filter(|(_, kind)| *kind == StoreErrorKind::Overloaded)
        .map(|(n, _)| n.to_string())
        .collect();
    assert!(!refused.is_empty() && refused.len() < CLAIMS, "{}", refused.len());
    assert!(
        all.iter().all(|(_, it)| {
            matches!(it, StoreErrorKind::Overloaded | StoreErrorKind::Unavailable)
        })
    );
    // The others are given back.
    eventually("only the first lock is left", async || count(&database).await == 1).await;
    patient.granted(&key("after"), &Aid::new()).await;
    app.locks.shutdown().await;
    for command in sent.lock().unwrap().iter() {
        assert!(!written(command).iter().any(|id| refused.contains(id)), "{command}");
    }
}

/// Its session would renew the lock, although its user believes that it is released.
#[tokio::test]
async fn a_release_that_was_refused_as_overloaded_goes_on_without_its_caller() {
    const LOCKS: usize = 600;
    let server = Mongod::start_replica_set().await;
    let (database, _) = rig::recorded_database(&server.uri()).await;
    let holder = App::with(&database, with_deadline(NO_DEADLINE)).await;
    let name = |n: usize| key(&n.to_string());
    let locks =
        join_all((0..LOCKS).map(async |n| holder.granted(&name(n), &Aid::new()).await)).await;
    let app = App::with(&database, with_deadline(Duration::from_millis(1_500))).await;
    server.pause();
    let all = join_all(locks.iter().map(|lock| app.locks.release(lock))).await;
    server.resume();
    let refused: HashSet<_> = (locks.iter().zip(all))
        .filter(|(_, released)| {
            matches!(released, Err(LockError::Store(e)) if e.kind() == StoreErrorKind::Overloaded)
        })
        .map(|(lock, _)| lock.key.clone())
        .collect();
    assert!(!refused.is_empty());
    eventually("what was refused is released", async || {
        holder.locks.list().await.unwrap().iter().all(|lock| !refused.contains(&lock.key))
    })
    .await;
}

/// Each claim that fails leads to two of them.
#[tokio::test]
async fn retractions_share_commands_and_spare_the_lock_that_another_request_knows() {
    const LOCKS: usize = 60;
    let (database, sent) = rig::recorded_database(mongod::shared_replica_set().await.uri()).await;
    let app = App::with(&database, with_deadline(NO_DEADLINE)).await;
    let aids = [(); LOCKS].map(|()| Aid::new());
    let name = |n: usize| key(&n.to_string());
    let locks = join_all((0..LOCKS).map(async |n| app.granted(&name(n), &aids[n]).await)).await;
    app.already_mine(&name(7), &aids[7]).await;
    let retract = async |n: usize| {
        let lock = &locks[n];
        let token = lock.token.expect("our own");
        app.store.retract(&lock.key, &lock.aid, &[token], lock.mode).await.unwrap()
    };
    let retracted = join_all((0..LOCKS).map(retract)).await;
    assert_eq!(retracted[7], Released::AlreadyGone);
    assert_eq!(count(&database).await, 1);
    assert_eq!(app.held(&name(7)).await.token, locks[7].token);
    let sent = sent.lock().unwrap();
    let deletes: Vec<_> = sent.iter().filter(|it| it.contains_key("delete")).map(written).collect();
    assert_eq!(deletes.iter().map(Vec::len).sum::<usize>(), LOCKS);
    assert!(deletes.len() < LOCKS / 4, "{} commands", deletes.len());
}
