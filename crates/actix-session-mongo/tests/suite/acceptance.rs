//! The cases of actix-session's own acceptance suite for stores that can invalidate a session.

use actix_session::{
    SessionExt,
    config::{
        CookieContentSecurity, PersistentSession, SessionMiddlewareBuilder, TtlExtensionPolicy,
    },
};
use actix_web::guard::{GuardContext, fn_guard};

use super::*;

fn one(name: &str, json: &str) -> State {
    State::from([(name.to_owned(), json.to_owned())])
}

#[actix_web::test]
async fn a_saved_session_is_loaded_until_it_is_deleted() {
    let store = Server::on(&database().await).await.sessions;
    let (first, second) = (one("counter", "1"), one("counter", "2"));
    let key = store.save(first.clone(), &DAY).await.unwrap();
    let other = store.save(first.clone(), &DAY).await.unwrap();
    assert_ne!(key, other);
    assert_eq!(store.load(&key).await.unwrap(), Some(first.clone()));
    let same = store.update(session_key(key.as_ref()), second.clone(), &DAY).await.unwrap();
    assert_eq!(same, key);
    assert_eq!(store.load(&key).await.unwrap(), Some(second));
    store.delete(&key).await.unwrap();
    assert_eq!(store.load(&key).await.unwrap(), None);
    store.delete(&key).await.unwrap();
    assert_eq!(store.load(&other).await.unwrap(), Some(first), "each session has its own state");
}

#[actix_web::test]
async fn a_session_without_entries_is_a_session() {
    let store = Server::on(&database().await).await.sessions;
    let key = store.save(one("counter", "1"), &DAY).await.unwrap();
    store.update(session_key(key.as_ref()), State::new(), &DAY).await.unwrap();
    assert_eq!(store.load(&key).await.unwrap(), Some(State::new()));
}

#[actix_web::test]
async fn an_unknown_key_loads_extends_and_deletes_nothing() {
    let store = Server::on(&database().await).await.sessions;
    let unknown = session_key("x".repeat(64));
    assert_eq!(store.load(&unknown).await.unwrap(), None);
    store.update_ttl(&unknown, &DAY).await.unwrap();
    store.delete(&unknown).await.unwrap();
    assert_eq!(store.load(&unknown).await.unwrap(), None);
}

#[actix_web::test]
async fn updating_an_unknown_key_gives_a_new_key() {
    let store = Server::on(&database().await).await.sessions;
    let unknown = "x".repeat(64);
    let state = one("counter", "1");
    let key = store.update(session_key(&unknown), state.clone(), &DAY).await.unwrap();
    assert_ne!(key.as_ref(), unknown);
    assert_eq!(store.load(&key).await.unwrap(), Some(state));
    assert_eq!(store.load(&session_key(unknown)).await.unwrap(), None);
}

#[actix_web::test]
async fn update_and_update_ttl_extend_a_session() {
    let server = Server::on(&database().await).await;
    let (store, ttl) = (&server.sessions, Ttl::minutes(60));
    let key = store.save(one("counter", "1"), &ttl).await.unwrap();
    let left = async || left(&server.database, doc! {}).await.as_secs() / 60;
    for extend in ["update", "update_ttl"] {
        age(&server.database, doc! {}, Duration::from_secs(40 * 60)).await;
        assert!(left().await <= 20);
        match extend {
            "update_ttl" => store.update_ttl(&key, &ttl).await.unwrap(),
            _ => drop(store.update(session_key(key.as_ref()), State::new(), &ttl).await.unwrap()),
        }
        assert!(left().await > 40, "{extend}");
        // No sweep examines it before that.
        let due = doc! { "$expr": { "$eq": ["$due", "$expires"] } };
        assert_eq!(records(&server.database).count_documents(due).await.unwrap(), 1, "{extend}");
    }
}

/// The routes of actix-session's suite, in a small version.
fn counter(config: &mut web::ServiceConfig) {
    async fn count(session: Session) -> impl Responder {
        let user = session.get::<String>("name").unwrap();
        HttpResponse::Ok().json(json!([user, session.get::<i32>("counter").unwrap()]))
    }
    async fn add(session: Session) -> impl Responder {
        let counter = session.get::<i32>("counter").unwrap().unwrap_or(0) + 1;
        session.insert("counter", counter).unwrap();
        count(session).await
    }
    async fn enter(session: Session, name: web::Path<String>) -> impl Responder {
        session.insert("name", name.into_inner()).unwrap();
        session.renew();
        count(session).await
    }
    async fn leave(session: Session) -> impl Responder {
        session.purge();
        HttpResponse::NoContent()
    }
    let is_member = |ctx: &GuardContext<'_>| ctx.get_session().contains_key("name");
    config
        .service(web::resource("/count").get(count).post(add))
        .route("/enter/{name}", web::post().to(enter))
        .route("/leave", web::post().to(leave))
        .service(web::scope("/members").guard(fn_guard(is_member)).route("", web::get().to(count)));
}

type Builder = SessionMiddlewareBuilder<MongoSessionStore>;

/// Runs a scenario on applications with the session middleware alone and with the wrap, each with both
/// kinds of cookies.
macro_rules! in_every_application {
    ($settings:expr, $scenario:ident) => {
        let server = Server::on(&database().await).await;
        let settings: fn(Builder) -> Builder = $settings;
        for security in [CookieContentSecurity::Signed, CookieContentSecurity::Private] {
            let session = || {
                let key = Key::from(&[7; 64]);
                let builder = SessionMiddleware::builder(server.sessions.clone(), key);
                settings(builder.cookie_content_security(security).cookie_secure(false)).build()
            };
            let alone = App::new().wrap(session()).configure(counter);
            $scenario(&server, test::init_service(alone).await).await;
            let wrapped = App::new().wrap(SessionWrap(session())).configure(counter);
            $scenario(&server, test::init_service(wrapped).await).await;
        }
    };
}

#[actix_web::test]
async fn a_visitor_counts_logs_in_logs_out_and_logs_in_on_another_browser() {
    in_every_application!(|builder| builder, visit);
}

async fn visit<S>(_: &Server, app: S)
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    let browser = Browser::new(&app);
    assert_eq!(browser.get("/count").await.json(), json!([null, null]));
    assert!(!browser.has_cookie(), "nothing to keep");
    assert_eq!(browser.get("/members").await.status, 404);

    assert_eq!(browser.post("/count").await.json(), json!([null, 1]));
    let answer = browser.get("/count").await;
    assert_eq!(answer.json(), json!([null, 1]));
    assert_eq!(answer.header("set-cookie"), None, "a request without a change sets no cookie");
    assert_eq!(browser.post("/count").await.json(), json!([null, 2]));

    let before_login = browser.copy();
    assert_eq!(browser.post("/enter/ferris").await.json(), json!(["ferris", 2]));
    assert_eq!(browser.get("/members").await.json(), json!(["ferris", 2]));
    assert_eq!(browser.post("/count").await.json(), json!(["ferris", 3]));
    let answer = before_login.get("/count").await;
    assert_eq!(answer.json(), json!([null, null]), "the login has changed the key");
    assert_eq!(answer.header("set-cookie"), None);

    let elsewhere = Browser::new(&app);
    assert_eq!(elsewhere.post("/enter/ferris").await.json(), json!(["ferris", null]));
    let before_logout = browser.copy();
    let answer = browser.post("/leave").await;
    let removal = Cookie::parse(answer.header("set-cookie").unwrap()).unwrap();
    assert_eq!((removal.max_age(), removal.path()), (Some(Ttl::ZERO), Some("/")));
    assert_eq!(before_logout.get("/count").await.json(), json!([null, null]));
    assert_eq!(before_logout.get("/members").await.status, 404);
    assert_eq!(
        elsewhere.post("/count").await.json(),
        json!(["ferris", 1]),
        "the other browser is still logged in"
    );
}

const AN_HOUR: Ttl = Ttl::HOUR;

/// Ages the browser's session by half an hour. Returns whether the request has extended the session,
/// and its cookie.
async fn left_after(server: &Server, answer: impl Future<Output = Answer>) -> (bool, bool) {
    age(&server.database, doc! {}, Duration::from_secs(30 * 60)).await;
    let answer = answer.await;
    let cookie = answer.header("set-cookie").map(|cookie| Cookie::parse(cookie).unwrap());
    if let Some(cookie) = &cookie {
        assert_eq!(cookie.max_age(), Some(AN_HOUR));
    }
    let left = left(&server.database, doc! {}).await;
    (cookie.is_some(), left > Duration::from_secs(45 * 60))
}

#[actix_web::test]
async fn by_default_only_a_change_extends_the_session_and_its_cookie() {
    in_every_application!(
        |builder| builder.session_lifecycle(PersistentSession::default().session_ttl(AN_HOUR)),
        change_extends
    );
}

async fn change_extends<S>(server: &Server, app: S)
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    records(&server.database).delete_many(doc! {}).await.unwrap();
    let browser = Browser::new(&app);
    browser.post("/count").await;
    assert_eq!(left_after(server, browser.get("/count")).await, (false, false));
    records(&server.database).delete_many(doc! {}).await.unwrap();
    browser.post("/count").await;
    assert_eq!(left_after(server, browser.post("/count")).await, (true, true));
}

#[actix_web::test]
async fn if_so_configured_every_request_extends_the_session_and_its_cookie() {
    in_every_application!(
        |builder| {
            let policy = TtlExtensionPolicy::OnEveryRequest;
            let lifecycle = PersistentSession::default().session_ttl_extension_policy(policy);
            builder.session_lifecycle(lifecycle.session_ttl(AN_HOUR))
        },
        every_request_extends
    );
}

async fn every_request_extends<S>(server: &Server, app: S)
where
    S: Service<Request, Response = ServiceResponse, Error = Error>,
{
    records(&server.database).delete_many(doc! {}).await.unwrap();
    let browser = Browser::new(&app);
    browser.post("/count").await;
    assert_eq!(left_after(server, browser.get("/count")).await, (true, true));
    assert_eq!(left_after(server, browser.post("/count")).await, (true, true));
}
