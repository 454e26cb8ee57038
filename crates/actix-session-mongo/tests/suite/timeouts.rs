//! The lifetime of a session, by the database's clock.

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

async fn server(absolute: Option<Duration>) -> Server {
    let sessions = |builder: MongoSessionStoreBuilder| match absolute {
        Some(timeout) => builder.absolute_timeout(timeout),
        None => builder,
    };
    Server::with(&database().await, sessions).await
}

#[actix_web::test]
async fn an_expired_session_is_over_although_its_record_still_exists() {
    let server = server(None).await;
    let store = &server.sessions;
    let state = state_of("alice", "1");
    let key = store.save(state.clone(), &Ttl::HOUR).await.unwrap();
    age(&server.database, doc! {}, 59 * MINUTE).await;
    assert_eq!(server.load(&key).await, Some(state.clone()));
    age(&server.database, doc! {}, MINUTE).await;
    let record = async || records(&server.database).find_one(doc! {}).await.unwrap().unwrap();
    let before = record().await;
    assert_eq!(server.load(&key).await, None);
    // No update brings it back either.
    assert_eq!(store.update(session_key(key.as_ref()), state, &DAY).await.unwrap(), key);
    store.update_ttl(&key, &DAY).await.unwrap();
    assert_eq!(server.load(&key).await, None);
    assert_eq!(record().await, before);
    assert_eq!(records(&server.database).count_documents(doc! {}).await.unwrap(), 1);
}

#[actix_web::test]
async fn a_request_knows_how_much_time_its_session_has_left() {
    let server = server(Some(50 * MINUTE)).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    age(&server.database, doc! {}, 10 * MINUTE).await;
    let left = async || alice.send(alice.request(Method::GET, "/left")).await.json();
    let seconds = left().await.as_u64().unwrap();
    assert!((30 * 60..=40 * 60).contains(&seconds), "{seconds} s");
    let never = doc! { "$set": { "expires": "never" } };
    records(&server.database).update_one(doc! {}, never).await.unwrap();
    assert_eq!(left().await, Value::Null);
    assert_eq!(actix_session_mongo::session_ends_in(), None, "outside of the wrap");
}

#[actix_web::test]
async fn a_session_lives_as_long_as_the_session_middleware_says() {
    let server = server(None).await;
    for (ttl, expected) in
        [(Ttl::minutes(30), 30 * MINUTE), (Ttl::seconds(-5), Duration::ZERO), (DAY, TWO_DAYS / 2)]
    {
        records(&server.database).delete_many(doc! {}).await.unwrap();
        let key = server.sessions.save(state_of("alice", "1"), &ttl).await.unwrap();
        let left = left(&server.database, doc! {}).await;
        assert!(left <= expected && left + MINUTE * 10 > expected, "{left:?} of {ttl}");
        assert_eq!(server.load(&key).await.is_some(), ttl.is_positive());
    }
}

/// A browser sends many requests for one page.
#[actix_web::test]
async fn a_session_that_has_hardly_aged_is_not_extended_by_a_write() {
    let server = server(None).await;
    let key = server.sessions.save(state_of("alice", "1"), &DAY).await.unwrap();
    let record = async || records(&server.database).find_one(doc! {}).await.unwrap();
    let before = record().await;
    server.sessions.update_ttl(&key, &DAY).await.unwrap();
    assert_eq!(record().await, before);
}

/// After a change of the configuration, the requested timeout counts.
#[actix_web::test]
async fn a_shorter_timeout_shortens_the_session() {
    let server = server(None).await;
    let key = server.sessions.save(state_of("alice", "1"), &DAY).await.unwrap();
    server.sessions.update_ttl(&key, &Ttl::HOUR).await.unwrap();
    assert!(left(&server.database, doc! {}).await <= 60 * MINUTE);
    server.sessions.update(session_key(key.as_ref()), State::new(), &Ttl::MINUTE).await.unwrap();
    assert!(left(&server.database, doc! {}).await <= MINUTE);
}

#[actix_web::test]
async fn nothing_extends_a_session_beyond_its_absolute_timeout() {
    let server = server(Some(60 * MINUTE)).await;
    let (store, half_an_hour) = (&server.sessions, Ttl::minutes(30));
    let key = store.save(State::new(), &half_an_hour).await.unwrap();
    let left = async || left(&server.database, doc! {}).await;
    age(&server.database, doc! {}, 20 * MINUTE).await;
    store.update_ttl(&key, &half_an_hour).await.unwrap();
    assert!(left().await > 20 * MINUTE, "not close to the limit yet");

    age(&server.database, doc! {}, 20 * MINUTE).await;
    store.update(session_key(key.as_ref()), State::new(), &half_an_hour).await.unwrap();
    assert!(left().await <= 20 * MINUTE);
    store.update_ttl(&key, &DAY).await.unwrap();
    store.update(session_key(key.as_ref()), State::new(), &DAY).await.unwrap();
    assert!(left().await <= 20 * MINUTE);
    assert!(server.load(&key).await.is_some());

    age(&server.database, doc! {}, 20 * MINUTE).await;
    store.update_ttl(&key, &DAY).await.unwrap();
    assert!(server.load(&key).await.is_none());

    store.save(State::from([("new".to_owned(), "1".to_owned())]), &DAY).await.unwrap();
    let new = super::left(&server.database, doc! { "state.k": "new" }).await;
    assert!(new <= 60 * MINUTE && new > 30 * MINUTE, "{new:?}");
}

/// Otherwise a person who renews often enough would never have to log in again.
#[actix_web::test]
async fn a_renewed_session_keeps_its_age_and_a_new_one_starts_afresh() {
    let server = server(Some(60 * MINUTE)).await;
    let app = server.app().await;
    let alice = Browser::logged_in(&app, "alice").await;
    age(&server.database, doc! {}, 50 * MINUTE).await;
    alice.post("/theme").await;
    let live = || doc! { "ended": { "$exists": false } };
    alice.post("/renew").await;
    assert!(left(&server.database, live()).await <= 10 * MINUTE);
    alice.post("/login/alice").await;
    assert!(left(&server.database, live()).await <= 10 * MINUTE);
    assert_eq!(alice.get("/state").await.json(), json!({ "name": "alice", "theme": "dark" }));
    alice.post("/switch/bob").await;
    assert_eq!(alice.get("/state").await.json(), json!({ "name": "bob" }));
    assert!(left(&server.database, live()).await > 30 * MINUTE);
}

/// As some people write "no limit".
#[actix_web::test]
async fn the_longest_possible_timeouts_can_be_set() {
    let server = server(Some(Duration::MAX)).await;
    let key = server.sessions.save(State::new(), &Ttl::MAX).await.unwrap();
    server.sessions.update_ttl(&key, &Ttl::MAX).await.unwrap();
    assert!(server.load(&key).await.is_some());
}
