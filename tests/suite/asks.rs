//! Asks on records of MongoDB, which several servers and other programs write.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, SystemTime},
};

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, Answer, Ask, Holder, LockEvent, LockManager, MemoryStore, Mode, MongoStore,
    StoreErrorKind, Wait, limits,
    store::{Asked, Rules},
};
use futures_util::future::join_all;
use mongodb::{
    bson::{Bson, DateTime, Document, doc},
    error::Error,
};
use uuid::Uuid;

use crate::rig::{
    self,
    app::{App, TTL, WorkItem, key, lock_records, record},
    claims::claim,
    faulty::Faulty,
    mongod,
};
use doclock_conformance::Shorthand;

fn ask(aid: &Aid) -> Ask {
    Ask {
        id: Uuid::new_v4(),
        aid: aid.clone(),
        by: Holder::new("$bob").of_user(aid.as_str()),
        message: "$$ROOT".to_owned(),
        at: SystemTime::UNIX_EPOCH,
        answer: None,
    }
}

#[tokio::test]
async fn of_many_who_ask_at_several_servers_at_once_eight_are_heard_and_none_is_overwritten() {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    let servers = [App::on(&database).await, App::on(&database).await, App::on(&database).await];
    servers[0].granted(&key("a"), &Aid::new()).await;
    let asked = (0..24).map(async |n| {
        let server = &servers[n % servers.len()];
        server.store.ask(&key("a"), &ask(&Aid::new()), false, Deadline::NONE).await.unwrap()
    });
    let asked = join_all(asked).await;
    let stand = asked.iter().filter(|it| matches!(it, Asked::Stands { .. })).count();
    let lock = servers[0].locks.inspect(&key("a")).await.unwrap().unwrap();
    assert_eq!((stand, lock.asks.len()), (limits::MAX_ASKS, limits::MAX_ASKS));
}

#[tokio::test]
async fn asks_that_another_program_has_written_do_no_harm() {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    let app = App::on(&database).await;
    let store = &app.store;
    let odd = [
        Bson::Null,
        "asks".into(),
        doc! { "0": 1 }.into(),
        vec![Bson::from(7), doc! {}.into(), doc! { "id": 1, "until": DateTime::MAX }.into()].into(),
        vec![doc! { "id": "x", "label": 7, "message": doc! {}, "until": "never" }].into(),
    ];
    for (n, odd) in odd.into_iter().enumerate() {
        let (key, alice) = (key(&n.to_string()), Aid::new());
        let lock = app.granted(&key, &alice).await;
        let set = doc! { "$set": { "asks": &odd } };
        lock_records(&database).update_one(doc! { "_id": n.to_string() }, set).await.unwrap();
        let seen = store.inspect(&key, None).await.unwrap().unwrap();
        assert_eq!((seen.token, seen.asks.len()), (lock.token, 0), "{odd}");
        let stands = store.ask(&key, &ask(&Aid::new()), false, Deadline::NONE).await.unwrap();
        assert!(matches!(stands, Asked::Stands { .. }), "{odd}: {stands:?}");
        assert_eq!(store.inspect(&key, None).await.unwrap().unwrap().asks.len(), 1, "{odd}");
        store.release(&key, &alice, lock.token.unwrap(), lock.mode).await.unwrap();
        assert_eq!(record(&database, &key).await, None, "{odd}");
    }
}

const SOON: Duration = Duration::from_secs(120);

#[tokio::test]
async fn a_job_hears_an_ask_although_its_read_of_the_asks_has_failed() {
    let faulty = Faulty::with_deadline(Duration::from_secs(1)).await;
    // A wait outlasts the deadline, which a busy machine may miss.
    let job = faulty.app.locks.job("job").hears_asks();
    let job = job.acquire(&key("a"), Wait::for_at_most(SOON)).await.unwrap();
    let mut events = faulty.app.locks.events();
    let mut told = async || {
        let event = tokio::time::timeout(SOON, events.next()).await.expect("told");
        event.expect("no shutdown")
    };
    told().await;
    // The watch is open when it tells this lock, or that it may have missed something.
    faulty.other.granted(&key("b"), &Aid::new()).await;
    told().await;
    let ask = ask(&Aid::new());
    faulty.other.store.ask(&key("a"), &ask, false, Deadline::NONE).await.unwrap();
    // No event tells the ask a second time.
    while !matches!(&*told().await, LockEvent::Asked(..)) {}
    faulty.proxy.hold_request("find");
    let heard = tokio::time::timeout(SOON, job.asked()).await.expect("heard");
    assert_eq!((heard.expect("no shutdown").id, faulty.proxy.fired()), (ask.id, 1));
    faulty.proxy.let_go();
}

#[tokio::test]
async fn an_ask_and_an_answer_are_the_same_although_their_replies_were_lost() {
    let faulty = Faulty::new().await;
    let job =
        faulty.app.locks.job("job").hears_asks().acquire(&key("a"), Wait::no()).await.unwrap();
    let ask = ask(&Aid::new());
    faulty.proxy.drop_reply_to("update");
    let stands = loop {
        match faulty.app.store.ask(&key("a"), &ask, false, Deadline::NONE).await {
            Ok(Asked::Stands { ask, .. }) => break ask,
            Err(e) if e.kind() == StoreErrorKind::Unavailable => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(stands.id, ask.id);
    faulty.proxy.drop_reply_to("update");
    let soon = Answer::Soon("in a minute".to_owned());
    job.answer(&ask, soon.clone()).await.unwrap();
    let lock = faulty.other.locks.inspect(&key("a")).await.unwrap().unwrap();
    let answers: Vec<_> = lock.asks.iter().map(|it| (it.id, it.answer.clone())).collect();
    assert_eq!(answers, [(ask.id, Some(soon))]);
    assert_eq!(faulty.proxy.fired(), 2);
}

#[tokio::test]
async fn a_repetition_of_an_ask_disturbs_no_transaction_of_its_holder() {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    let app = App::on(&database).await;
    let job = app.locks.job("job").hears_asks().acquire(&key("a"), Wait::no()).await.unwrap();
    let (ask, runs) = (ask(&Aid::new()), AtomicUsize::new(0));
    app.store.ask(&key("a"), &ask, false, Deadline::NONE).await.unwrap();
    let entries = database.collection::<Document>("entry");
    let held = [job.held()];
    let done = app.store.transaction(&held, async |session| -> Result<_, Error> {
        runs.fetch_add(1, Ordering::Relaxed);
        entries.insert_one(doc! {}).session(session).await?;
        for again in [true, false] {
            app.store.ask(&key("a"), &ask, again, Deadline::NONE).await.expect("it stands");
        }
        Ok(())
    });
    done.await.unwrap();
    assert_eq!(runs.into_inner(), 1);
}

#[tokio::test]
async fn an_ask_that_the_subscribers_see_together_with_its_lock_is_told() {
    let store = MemoryStore::new();
    let locks = LockManager::builder(store.clone()).without_reaper().build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let mut events = locks.events();
    let mut next = async || tokio::time::timeout(SOON, events.next()).await.unwrap().unwrap();
    // The second one says that the changes are followed.
    for _ in 0..2 {
        assert!(matches!(*next().await, LockEvent::Resync));
    }
    // The task of the events does not run in between.
    let (claim, ask) = (claim(Mode::Exclusive), ask(&Aid::new()));
    let _granted = store.try_acquire(&key("a"), &claim, Deadline::NONE).await.unwrap();
    store.ask(&key("a"), &ask, false, Deadline::NONE).await.unwrap();
    assert!(matches!(*next().await, LockEvent::Acquired(_)));
    assert!(matches!(&*next().await, LockEvent::Asked(_, it) if it.id == ask.id));
}

#[tokio::test]
async fn a_record_that_stays_for_its_fence_keeps_no_asks() {
    let database = rig::fresh_database(mongod::shared_replica_set().await.uri()).await;
    let store = MongoStore::new(&database);
    store.prepare("workitem", &Rules::new(TTL).fenced(), Deadline::NONE).await.unwrap();
    let claim = claim(Mode::Exclusive);
    let _granted = store.try_acquire(&key("a"), &claim, Deadline::NONE).await.unwrap();
    store.ask(&key("a"), &ask(&Aid::new()), false, Deadline::NONE).await.unwrap();
    store.release(&key("a"), &claim.aid, claim.token, claim.mode).await.unwrap();
    let left = record(&database, &key("a")).await.expect("the fence stays");
    assert_eq!(left.keys().collect::<Vec<_>>(), ["_id", "fence"]);
}
