//! Asks on records of MongoDB, which several servers and other programs write.

use std::time::SystemTime;

use actix_doclock::store::verbs::*;
use actix_doclock::{Aid, Ask, Holder, limits, store::Asked};
use futures_util::future::join_all;
use mongodb::bson::{Bson, DateTime, doc};
use uuid::Uuid;

use crate::rig::{
    self,
    app::{App, key, lock_records, record},
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
