//! One person who asks for too much, and requests that join the grant of another one.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use actix_doclock::limits::MAX_COLLECTIONS;
use futures_util::{FutureExt, future::join_all};
use serde_json::json;
use tokio::{sync::watch, task::yield_now};

use super::*;
use crate::rig::{
    self,
    log::{count_logged, log_lines, logged},
    paused::Paused,
};

const LIMIT: usize = 10;

fn at_most(locks_per_session: usize) -> Limits {
    Limits { locks_per_session, ..Limits::default() }
}

fn named(n: usize) -> Note {
    Note { id: format!("n{n:02}"), text: "old".to_owned() }
}

/// A store with many notes.
fn crowded() -> MemoryStore {
    let store = MemoryStore::new();
    for note in (0..60).map(named) {
        store.put(note.id.clone(), &note).unwrap();
    }
    store
}

/// A server whose verbs take turns with those of all others.
async fn limited(store: &MemoryStore) -> LockManager {
    let paused = Paused::new(store.clone(), || yield_now().boxed());
    let locks = LockManager::builder(paused).limits(at_most(LIMIT)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    locks
}

/// Every lock that these answers promise, except those that are refused.
fn promised(answers: &[Answer]) -> BTreeMap<String, String> {
    let mut promised = BTreeMap::new();
    let mut take = |lock: &Value| {
        let [key, token] = ["key", "token"].map(|it| lock[it].as_str().unwrap().to_owned());
        promised.insert(key, token);
    };
    for answer in answers {
        match answer.status.as_u16() {
            429 => assert_eq!(answer.problem(429)["code"], "too_many_locks"),
            _ if answer.json()["held"].is_array() => {
                answer.json()["held"].as_array().unwrap().iter().for_each(&mut take);
                for refused in answer.json()["refused"].as_array().unwrap() {
                    assert_eq!(refused["code"], "too_many_locks", "{refused}");
                }
            }
            200 | 201 => take(&answer.json()),
            other => panic!("{other}: {}", answer.text()),
        }
    }
    promised
}

async fn stored(locks: &LockManager) -> BTreeMap<String, String> {
    locks.shutdown().await;
    let all = locks.list().await.unwrap().into_iter();
    all.map(|lock| (lock.key.to_string(), lock.token.unwrap().to_string())).collect()
}

#[actix_web::test]
async fn a_session_gets_no_more_locks_by_asking_several_times_at_once() {
    // How long one lock waits for another to give way does not depend on the machine.
    tokio::time::pause();
    for batches in [false, true] {
        let store = crowded();
        let locks = limited(&store).await;
        let app = serve_with_cookies(&locks).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let keys: Vec<_> = (0..60).map(|n| format!("note/{}", named(n).id)).collect();
        // Some of them before, so that the others come when there is little room.
        for key in &keys[..LIMIT / 2] {
            assert_eq!(alice.post(&format!("/locks/{key}")).await.status, 201);
        }
        let answers = if batches {
            let batch = || alice.post_json("/locks", json!({ "keys": keys }));
            join_all((0..4).map(|_| batch())).await
        } else {
            let twice = keys.iter().chain(&keys).map(|key| format!("/locks/{key}"));
            join_all(twice.map(async |uri| alice.post(&uri).await)).await
        };
        let promised = promised(&answers);
        assert_eq!(promised.len(), LIMIT, "batches: {batches}: there was room for so many");
        assert_eq!(stored(&locks).await, promised, "batches: {batches}: no more, and no others");
        let more = alice.post("/locks/note/n59").await;
        assert!(more.status == 429 || promised.contains_key("note/n59"));
        // Somebody else still gets what is free.
        let bob = Browser::logged_in(&app, "bob").await;
        let free = keys.iter().find(|key| !promised.contains_key(*key)).unwrap();
        assert_eq!(bob.post(&format!("/locks/{free}")).await.status, 201);
    }
}

#[actix_web::test]
async fn a_session_gets_no_more_locks_by_asking_two_servers_at_once() {
    // How long one lock waits for another to give way does not depend on the machine.
    tokio::time::pause();
    let store = crowded();
    let (one, two) = (limited(&store).await, limited(&store).await);
    let (first, second) = (serve_with_cookies(&one).await, serve_with_cookies(&two).await);
    let alice = Browser::logged_in(&first, "alice").await;
    let there = alice.at(&second);
    let uris: Vec<_> = (0..60).map(|n| format!("/locks/note/{}", named(n).id)).collect();
    for uri in &uris[..LIMIT - 1] {
        assert!(alice.post(uri).await.status.is_success());
        assert!(there.post(uri).await.status.is_success());
    }
    let here = join_all(uris.iter().map(|uri| alice.post(uri)));
    let there = join_all(uris.iter().map(|uri| there.post(uri)));
    let _ = futures_util::join!(here, there);
    two.shutdown().await;
    assert_eq!(stored(&one).await.len(), LIMIT);
}

/// The second server has never counted the locks of the session, and the first one does not hear of the second one's.
#[actix_web::test]
async fn a_session_that_is_nearly_full_on_one_server_gets_one_more_on_one_of_two() {
    for there_first in [false, true] {
        let store = crowded();
        let (one, two) = (limited(&store).await, limited(&store).await);
        let (first, second) = (serve_with_cookies(&one).await, serve_with_cookies(&two).await);
        let alice = Browser::logged_in(&first, "alice").await;
        let there = alice.at(&second);
        for n in 0..LIMIT - 1 {
            assert_eq!(alice.post(&format!("/locks/note/{}", named(n).id)).await.status, 201);
        }
        let [last, beyond] = [LIMIT, LIMIT + 1].map(|n| format!("/locks/note/{}", named(n).id));
        let statuses = if there_first {
            [there.post(&last).await.status, alice.post(&beyond).await.status]
        } else {
            [alice.post(&last).await.status, there.post(&beyond).await.status]
        };
        assert_eq!(statuses, [201, 429], "there first: {there_first}");
        two.shutdown().await;
        assert_eq!(stored(&one).await.len(), LIMIT);
    }
}

/// With the limit that nobody has changed.
#[actix_web::test]
async fn on_mongodb_two_servers_keep_the_limit_one_after_the_other_and_at_once() {
    let uri = rig::mongod::shared_replica_set().await.uri().to_owned();
    let limit = Limits::default().locks_per_session;
    for round in 0..rig::depth() {
        for before in [limit - 1, limit - 20] {
            let database = rig::fresh_database(&uri).await;
            let notes: Vec<_> = (0..limit + 40).map(named).collect();
            database.collection::<Note>(Note::COLLECTION).insert_many(&notes).await.unwrap();
            let server = async || {
                let client = rig::client(&uri).await;
                let locks = crate::rig::app::manager_on(&client.database(database.name()));
                let locks = locks.without_reaper().build().await.unwrap();
                locks.register::<Note>().await.unwrap();
                locks
            };
            let (one, two) = (server().await, server().await);
            let (first, second) = (serve_with_cookies(&one).await, serve_with_cookies(&two).await);
            let alice = Browser::logged_in(&first, "alice").await;
            let there = alice.at(&second);
            let uris: Vec<_> = notes.iter().map(|it| format!("/locks/note/{}", it.id)).collect();
            let (full, more) = uris.split_at(before);
            for uri in full {
                assert_eq!(alice.post(uri).await.status, 201);
            }
            if before == limit - 1 {
                let statuses =
                    [there.post(&more[0]).await.status, alice.post(&more[1]).await.status];
                assert_eq!(statuses, [201, 429], "round {round}");
            } else {
                let here = join_all(more.iter().take(40).map(|uri| alice.post(uri)));
                let there = join_all(more.iter().rev().take(40).map(|uri| there.post(uri)));
                let _ = futures_util::join!(here, there);
            }
            two.shutdown().await;
            let stored = stored(&one).await.len();
            // If all are there before one of them is counted, all are too many.
            assert!((before..=limit).contains(&stored), "round {round}: {stored} locks");
        }
    }
}

#[actix_web::test]
async fn a_session_without_room_takes_no_lock_from_somebody_else() {
    let store = crowded();
    let locks = LockManager::builder(store.clone()).limits(at_most(LIMIT));
    let locks = locks.take_over_policy(|_, _| true).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    bob.post("/locks/note/n20").await.token();
    for n in 0..LIMIT {
        alice.post(&format!("/locks/note/{}", named(n).id)).await.token();
    }
    let take_over = json!({ "take_over": true });
    let refused = alice.post_json("/locks/note/n20", take_over.clone()).await;
    assert_eq!(refused.problem(429)["code"], "too_many_locks");
    assert_eq!(bob.get("/locks/note/n20").await.json()["state"], "mine");
    assert_eq!(
        alice.post("/locks/note/n20").await.problem(423)["code"],
        "held",
        "as without limit"
    );
    alice.delete("/locks/note/n00").await;
    assert_eq!(alice.post_json("/locks/note/n20", take_over).await.status, 201);
}

/// A store whose calls number `held` do not end before they may.
fn held_up(
    store: &MemoryStore,
    held: &'static [usize],
) -> (LockManagerBuilder, watch::Sender<bool>) {
    let (go, may_go) = watch::channel(false);
    let calls = Arc::new(AtomicUsize::new(0));
    let paused = Paused::new(store.clone(), move || {
        let (mut may_go, is_held) = (may_go.clone(), held.contains(&calls.fetch_add(1, SeqCst)));
        async move {
            if is_held {
                let _ = may_go.wait_for(|go| *go).await;
            }
        }
        .boxed()
    });
    (LockManager::builder(paused).without_reaper(), go)
}

/// What happens after two requests of a session were granted one lock, and before they hear of it.
async fn two_join_and(what: &str, uri: &str, status: u16) {
    let store = crowded();
    // The second pause of the first claim, and of the second one.
    let (builder, go) = held_up(&store, &[1, 3]);
    let locks = builder.build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let ends = alice.copy();
    let meanwhile = async {
        // Both have claimed the lock by now.
        for _ in 0..100 {
            yield_now().await;
        }
        let all = store_locks(&store).await;
        assert_eq!(all.len(), 1, "{what}: they wait for the answer to their claims");
        match what {
            "freeze" => {
                let in_an_hour = std::time::SystemTime::now() + Duration::from_secs(3600);
                locks.freeze("note", "why", in_an_hour, &Actor::new("root")).await.unwrap();
            }
            "end" => drop(ends.post("/purge").await),
            _ => {}
        }
        go.send(true).unwrap();
    };
    let (one, other, ()) = futures_util::join!(alice.post(uri), alice.post(uri), meanwhile);
    for answer in [one, other] {
        assert_eq!(answer.status, status, "{what} {uri}: {}", answer.text());
        assert_eq!(answer.header("lock-token"), None);
    }
    locks.shutdown().await;
    assert!(store_locks(&store).await.is_empty(), "{what} {uri}: nobody knows of the lock");
}

#[actix_web::test]
async fn a_lock_that_another_request_has_joined_stays_if_there_is_no_room_in_time() {
    // How long one lock waits for another to give way does not depend on the machine.
    tokio::time::pause();
    for gives_way in [true, false] {
        let store = crowded();
        // The second pause of the first claim: the lock is granted, and is not counted yet.
        let (builder, go) = held_up(&store, &[1]);
        let locks = builder.limits(at_most(LIMIT)).build().await.unwrap();
        let larger = LockManager::builder(store.clone()).limits(at_most(2 * LIMIT));
        let larger = larger.without_reaper().build().await.unwrap();
        locks.register::<Note>().await.unwrap();
        larger.register::<Note>().await.unwrap();
        let (app, other) = (serve_with_cookies(&locks).await, serve_with_cookies(&larger).await);
        let there = Browser::logged_in(&other, "alice").await;
        let alice = there.at(&app);
        for n in 1..LIMIT {
            there.post(&format!("/locks/note/{}", named(n).id)).await.token();
        }
        let newer = async {
            while store_locks(&store).await.len() < LIMIT {
                yield_now().await;
            }
            there.post("/locks/note/n50").await.token();
            go.send(true).unwrap();
            if gives_way {
                tokio::time::sleep(Duration::from_secs(1)).await;
                assert_eq!(there.delete("/locks/note/n50").await.status, 204);
            }
        };
        let joins = async {
            let _ = go.subscribe().wait_for(|go| *go).await;
            alice.post("/locks/note/n00").await.status.as_u16()
        };
        let (granted, joined, ()) =
            futures_util::join!(alice.post("/locks/note/n00"), joins, newer);
        let told = if gives_way { [201, 200] } else { [503, 200] };
        assert_eq!([granted.status.as_u16(), joined], told, "gives way: {gives_way}");
        let stays = store_locks(&store).await.iter().any(|lock| lock.key.to_string() == "note/n00");
        assert!(stays, "one of them was told that the session holds it");
    }
}

/// The locks in the store, as another server sees them.
async fn store_locks(store: &MemoryStore) -> Vec<Lock> {
    let other = LockManager::builder(store.clone()).without_reaper().build().await.unwrap();
    other.register::<Note>().await.unwrap();
    other.list().await.unwrap()
}

#[actix_web::test]
async fn a_request_that_joins_a_grant_keeps_no_lock_that_was_frozen_meanwhile() {
    for uri in ["/locks/note/n00", "/note/n00"] {
        two_join_and("freeze", uri, 423).await;
    }
}

#[actix_web::test]
async fn a_request_that_joins_a_grant_keeps_no_lock_of_a_session_that_has_ended_meanwhile() {
    for uri in ["/locks/note/n00", "/note/n00"] {
        two_join_and("end", uri, 401).await;
    }
}

#[actix_web::test]
async fn a_request_that_joins_a_grant_keeps_no_lock_on_a_missing_document() {
    for uri in ["/locks/note/none", "/note/none"] {
        two_join_and("missing", uri, 404).await;
    }
}

/// A server on a database with the notes, and what it sends.
async fn counted() -> (LockManager, rig::Commands) {
    let server = rig::mongod::local_replica_set().await;
    let (database, commands) = rig::counted_database(&server.uri()).await;
    let notes: Vec<_> = (0..60).map(named).collect();
    database.collection::<Note>(Note::COLLECTION).insert_many(&notes).await.unwrap();
    let locks = crate::rig::app::manager_on(&database).without_reaper();
    let locks = locks.limits(at_most(LIMIT)).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    (locks, commands)
}

fn all_keys() -> Vec<String> {
    (0..60).map(|n| format!("note/{}", named(n).id)).collect()
}

#[actix_web::test]
async fn a_batch_costs_no_more_claims_than_there_is_room_and_no_more_reads_than_collections() {
    let (locks, commands) = counted().await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let sent = async || {
        locks.shutdown().await;
        let sent = commands.take();
        let reads = sent.iter().filter(|it| ["find", "aggregate"].contains(&&***it)).count();
        (sent.len() - reads, reads)
    };
    let batch = async |person: &Browser<'_, _>| {
        sent().await;
        person.post_json("/locks", json!({ "keys": all_keys() })).await.json()
    };
    let held = batch(&alice).await["held"].as_array().unwrap().len();
    let (claims, reads) = sent().await;
    // Claims of all would be 60. One whose answer is late is sent once more.
    assert!(held == LIMIT && claims <= 2 * LIMIT, "claims that are given back: {claims}");
    // Each claim may read before it, prove its date, load its document and count the locks of the session.
    assert!(reads <= 4 * LIMIT + 4, "for each claim, and not for each key: {reads}");

    let again = batch(&alice).await;
    assert_eq!(again["held"].as_array().unwrap().len(), LIMIT, "they are confirmed");
    let (claims, reads) = sent().await;
    assert!(claims <= 2 * LIMIT && reads <= 5 * LIMIT + 4, "{claims} claims, {reads} reads");

    // All that is left for Bob are the notes that Alice does not have. He takes his share.
    assert_eq!(batch(&bob).await["held"].as_array().unwrap().len(), LIMIT);
    let carol = Browser::logged_in(&app, "carol").await;
    let mine: Vec<_> = again["held"].as_array().unwrap().iter().map(|it| &it["key"]).collect();
    sent().await;
    let refused = carol.post_json("/locks", json!({ "keys": mine })).await.json();
    let refused = refused["refused"].as_array().unwrap();
    assert_eq!(refused.len(), LIMIT);
    assert!(refused.iter().all(|it| it["code"] == "held" && it["holder"]["label"] == "alice"));
    let (claims, reads) = sent().await;
    assert!(claims == 0 && reads <= 3, "who holds them is asked once: {reads}");
}

#[actix_web::test]
async fn of_the_requests_of_a_person_that_name_many_documents_one_is_under_way() {
    tokio::time::pause(); // their deadline
    let (asked, begun) = watch::channel(0);
    let (go, may_go) = watch::channel(false);
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, move |session| {
        session.access_policy_for_many(async move |person, keys, _| {
            if person.is_some_and(|person| person.label == "alice") {
                asked.send_modify(|asked| *asked += 1);
                let _ = may_go.clone().wait_for(|go| *go).await;
            }
            vec![true; keys.len()]
        })
    })
    .await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let keys = json!({ "keys": ["note/a", "note/b"] });
    let ask = async |n: usize| {
        let path = ["/locks", "/locks/status"][n % 2];
        alice.post_json(path, keys.clone()).await.status.as_u16()
    };
    let others = async {
        let _ = begun.clone().wait_for(|asked| *asked > 0).await;
        for _ in 0..100 {
            yield_now().await;
        }
        assert_eq!(*begun.borrow(), 1, "the others wait for their turn");
        assert_eq!(bob.post_json("/locks/status", keys.clone()).await.status, 200);
        assert_eq!(bob.post_json("/locks", keys.clone()).await.status, 200);
        go.send(true).unwrap();
    };
    let (all, ()) = futures_util::join!(join_all((0..70).map(ask)), others);
    let (served, refused): (Vec<u16>, _) = all.into_iter().partition(|status| *status == 200);
    assert_eq!((served.len(), refused), (64, vec![503; 6]));
    assert_eq!(ask(0).await, 200, "there is room again");
}

/// All of them may sit behind one proxy.
#[actix_web::test]
async fn visitors_of_one_address_do_not_wait_for_each_other_to_look() {
    let (locks, _) = embedded().await;
    let app = serve_with(&locks, |session| {
        session.access_policy(async |_: Option<Actor>, _: LockKey, _| true).admit_visitors()
    })
    .await;
    let keys = json!({ "keys": ["note/a", "note/b"] });
    let ask = async |_| Browser::new(&app).post_json("/locks/status", keys.clone()).await.status;
    let all = join_all((0..100).map(ask)).await;
    assert!(all.iter().all(|status| *status == 200), "{all:?}");
}

/// As after a deployment with a lower limit.
#[actix_web::test]
async fn a_re_entry_beyond_a_lower_limit_takes_no_lock_away() {
    tokio::time::pause(); // for how long the request waits for room
    let (locks, store) = embedded().await;
    let stricter = LockManager::builder(store).limits(at_most(1)).build().await.unwrap();
    stricter.register::<Note>().await.unwrap();
    let (app, other) = (serve_with_cookies(&locks).await, serve_with_cookies(&stricter).await);
    let alice = Browser::logged_in(&app, "alice").await;
    for id in ["a", "b"] {
        alice.post(&format!("/locks/note/{id}")).await.token();
    }
    let there = alice.at(&other);
    assert_eq!(there.post("/locks/note/a").await.status, 200);
    assert_eq!(there.post("/locks/note/b").await.problem(429)["code"], "too_many_locks");
    assert_eq!(holder_of(&locks, "b").await.as_deref(), Some("alice"));
}

#[actix_web::test]
async fn a_handler_that_opens_many_documents_opens_no_more_than_there_is_room() {
    async fn open_some(
        locks: SessionLocks,
        ids: web::Json<Vec<String>>,
    ) -> Result<impl Responder, LockError> {
        let mut all = Vec::new();
        for (key, note) in locks.open_each::<Note>(ids.into_inner()).await? {
            all.push(format!(
                "{key}: {}",
                note.map_or_else(|e| e.to_string(), |it| it.text.clone())
            ));
        }
        Ok(HttpResponse::Ok().json(all))
    }
    let store = crowded();
    let locks = limited(&store).await;
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let session = locks.session(session).identify(person);
    let app = App::new().wrap(session).route("/some", web::post().to(open_some)).configure(routes);
    let app = test::init_service(app).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    bob.post("/locks/note/n03").await.token();
    let ids: Vec<_> = (0..20).map(|n| named(n).id).collect();
    let all = alice.post_json("/some", json!(ids)).await.json();
    let all: Vec<_> = all.as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    assert_eq!(all[3], "note/n03: note/n03 is locked by bob", "in the order of the keys");
    let opened = all.iter().filter(|it| it.ends_with(": old")).count();
    let refused = all.iter().filter(|it| it.contains("holds 10 locks")).count();
    assert_eq!((opened, refused), (LIMIT, 20 - LIMIT - 1), "{all:?}");
}

/// However often a client causes it, a fault of one kind is one line of the log in ten seconds.
#[actix_web::test]
async fn faults_that_a_person_causes_in_any_number_share_lines() {
    log_lines();
    /// A note that does not fit its type, and one in a collection that a pattern covers.
    #[derive(Serialize, Deserialize)]
    struct Odd<const OF_TENANT: bool> {
        #[serde(rename = "_id")]
        id: String,
        text: i32,
    }
    impl<const OF_TENANT: bool> Lockable for Odd<OF_TENANT> {
        type Id = String;
        const COLLECTION: &'static str = if OF_TENANT { "acme_greedy" } else { Note::COLLECTION };
    }
    let (locks, store) = embedded().await;
    store.put("odd".to_owned(), &Odd::<false> { id: "odd".to_owned(), text: 5 }).unwrap();
    store.put("a".to_owned(), &Odd::<true> { id: "a".to_owned(), text: 5 }).unwrap();
    locks.register_matching::<Note>("*_greedy").await.unwrap();
    for n in 0..MAX_COLLECTIONS {
        locks.register_in::<Note>(&format!("other{n}")).await.unwrap();
    }
    let app = serve_with(&locks, |session| {
        session.access_policy(async |_: Option<Actor>, key: LockKey, _| {
            assert!(key.id().to_string() != "panic", "on purpose");
            true
        })
    })
    .await;
    let alice = Browser::logged_in(&app, "alice").await;
    let began = std::time::Instant::now();
    for _ in 0..40 {
        alice.post("/note/odd").await.problem(500);
        alice.post("/locks/acme_greedy/a").await.problem(500);
        alice.post("/locks/evil%1B%5B2J_greedy/panic").await.problem(503);
        alice.post_json("/locks/status", json!({ "keys": ["note/panic"] })).await.problem(503);
    }
    // Other tests have faults of other documents.
    for (line, of) in [
        ("does not fit its Rust type", "odd"),
        ("cannot be locked", "acme_greedy"),
        ("policy has panicked", "_greedy"),
    ] {
        let lines = count_logged(&["ERROR", line, of]);
        let most = 2 + began.elapsed().as_secs() / 10;
        assert!(lines >= 1 && lines as u64 <= most, "{line}: {lines}, at most {most}");
    }
    assert!(!logged("\u{1b}[2J"), "nor does a name reach the terminal of whoever reads the log");
    assert!(logged(r"evil\u{1b}[2J_greedy"));
}
