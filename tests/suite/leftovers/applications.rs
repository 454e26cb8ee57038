use super::*;
use crate::rig::app::{NO_DEADLINE, TTL, eventually};
use crate::rig::log::{count_logged, log_lines};
use actix_doclock::{Actor, LockManager, Lockable, MongoStore, SessionEnded, freeze::Scope};
use std::sync::{Arc, Mutex};

#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Order {
    #[serde(rename = "_id")]
    id: String,
}

impl Lockable for Order {
    type Id = String;
    const COLLECTION: &'static str = "order";
}

/// A server of an application, and the sessions of which its listener was told.
struct Server {
    locks: LockManager,
    told: Arc<Mutex<Vec<Aid>>>,
}

impl Server {
    async fn on<T: Lockable>(store: MongoStore) -> Self {
        let told = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&told);
        let listener = move |end: SessionEnded| {
            to.lock().unwrap().push(end.aid);
            async { Ok(()) }
        };
        let settings = LockManager::builder(store).ttl(TTL).deadline(NO_DEADLINE);
        let settings = settings.on_session_end(listener);
        let locks = settings.reaper_interval(Duration::from_millis(50)).build().await.unwrap();
        locks.register::<T>().await.unwrap();
        Self { locks, told }
    }

    fn was_told(&self, aid: &Aid) -> bool {
        self.told.lock().unwrap().contains(aid)
    }

    async fn lock(&self, key: &str, aid: &Aid) -> bool {
        let (collection, id) = key.split_once('/').unwrap();
        let key = actix_doclock::LockKey::new(collection, id).unwrap();
        self.locks.lock_for_session(&key, aid, &actix_doclock::Holder::new("x")).await.is_ok()
    }
}

#[tokio::test]
async fn two_applications_in_one_database_are_told_of_each_other_in_the_log_and_by_health() {
    log_lines();
    let database = fresh_database().await;
    let first = Server::on::<WorkItem>(MongoStore::new(&database)).await;
    let second = Server::on::<Order>(MongoStore::new(&database)).await;
    let text = "two applications share this database";
    for server in [&first, &second] {
        eventually("health says so", async || {
            // The notes are compared once a minute, or when a server registers something.
            server.locks.register::<actix_doclock::Named>().await.unwrap();
            tokio::time::sleep(Duration::from_millis(1_500)).await;
            let problems = server.locks.check_health().await.problems.join("; ");
            problems.contains(text) && problems.contains("MongoStore::named")
        })
        .await;
    }
    assert!(count_logged(&["WARN", text]) > 0);
}

#[tokio::test]
async fn applications_with_names_share_a_database_and_nothing_else() {
    let database = fresh_database().await;
    let store = |name: Option<&str>| match name {
        None => MongoStore::new(&database),
        Some(name) => MongoStore::new(&database).named(name).unwrap(),
    };
    let plain = Server::on::<WorkItem>(store(None)).await;
    let shop = Server::on::<Order>(store(Some("shop"))).await;
    let desk = Server::on::<WorkItem>(store(Some("desk"))).await;

    // Ends.
    let (alice, bob, carol) = (Aid::new(), Aid::new(), Aid::new());
    assert!(plain.lock("workitem/a", &alice).await);
    assert!(shop.lock("order/a", &bob).await && desk.lock("workitem/c", &carol).await);
    for (server, aid) in [(&plain, &alice), (&shop, &bob), (&desk, &carol)] {
        server.locks.end_session(aid).await.unwrap();
        eventually("its listener is told", async || server.was_told(aid)).await;
    }
    for (server, others) in
        [(&plain, [&bob, &carol]), (&shop, [&alice, &carol]), (&desk, [&alice, &bob])]
    {
        assert!(others.iter().all(|aid| !server.was_told(aid)));
    }

    // Freezes.
    let (root, an_hour) = (Actor::new("root"), Duration::from_secs(3_600));
    let end = actix_doclock::freeze::End::In(an_hour);
    shop.locks.freeze(Scope::All, "inventory", end, &root).await.unwrap();
    assert!(!shop.lock("order/b", &Aid::new()).await);
    for server in [&plain, &desk] {
        // So that the server has asked for freezes since.
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(
            server.lock("workitem/b", &Aid::new()).await
                || server.lock("workitem/d", &Aid::new()).await
        );
        assert_eq!(server.locks.health().frozen, []);
    }
    assert!(shop.locks.thaw(Scope::All).await.unwrap());

    // Notes.
    for server in [&plain, &shop, &desk] {
        eventually("it has noted itself", async || server.locks.health().servers == 1).await;
        assert_eq!(server.locks.check_health().await.problems, [""; 0]);
    }
    let mut names = database.list_collection_names().await.unwrap();
    names.retain(|name| name.starts_with("doclock."));
    names.sort();
    let expected = [
        "desk.ended",
        "desk.server",
        "ended",
        "server",
        "shop.ended",
        "shop.frozen",
        "shop.server",
    ];
    assert_eq!(names, expected.map(|name| format!("doclock.{name}")));
}

#[tokio::test]
async fn a_name_that_is_no_part_of_a_name_of_a_collection_is_refused() {
    let database = fresh_database().await;
    for wrong in ["", "a.b", "A", "ä", "$x", "a b", &"x".repeat(41)] {
        let error = MongoStore::new(&database).named(wrong).unwrap_err();
        assert!(error.to_string().contains("small letters"), "{error}");
    }
    let store = MongoStore::new(&database).named("back-office_2").unwrap();
    assert_eq!(store.own_collection("ended"), "doclock.back-office_2.ended");
    // What was said of the client stays.
    let _ = store.with_connections(1);
}
