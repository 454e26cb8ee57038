//! The cost of the wrap to a request that locks nothing, and of the extractor to a request that does.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use actix_doclock::{
    LockKey, LockManager, Lockable, LockedDoc, MemoryStore, MongoStore,
    store::{Store, verbs::*},
};
use actix_session::{Session, SessionMiddleware, storage::CookieSessionStore};
use actix_web::{
    App, HttpResponse, HttpServer, Responder,
    cookie::Key,
    dev::{ServerHandle, Service, ServiceResponse},
    rt, test, web,
};
use futures_util::future::join_all;
use tokio::{sync::oneshot, task::spawn_blocking};

use super::{Bench, Effort};
use crate::{
    count, ours,
    ours::Page,
    report::{Role, Row},
    stats::Samples,
};

pub const BARE: &str = "no middleware";
pub const SESSION: &str = "SessionMiddleware";
pub const WRAP: &str = "locks.session(SessionMiddleware)";
pub const LOGGED_IN: &str = ", logged in";
pub const PLAIN: &str = "handler that loads the document";
pub const LOCKED: &str = "the same with LockedDoc";
pub const TAKEN: &str = "the same with LockedDoc, taken and given back";

pub async fn measure(bench: &mut Bench<'_>) {
    let effort = bench.effort;
    let rows = spawn_blocking(move || rt::System::new().block_on(wrap(effort))).await.unwrap();
    rows.into_iter().for_each(|row| bench.report.add(row));

    let rows = documents("memory", in_memory(), effort).await;
    rows.into_iter().for_each(|row| bench.report.add(row));
    let sets = bench.sets().map(|(at, mongo)| (at, mongo.uri()));
    for (at, uri) in sets {
        let rows = documents(at, on(&uri).await, effort).await;
        rows.into_iter().for_each(|row| bench.report.add(row));
    }
}

fn pages() -> Vec<Page> {
    let names =
        ["plain", "locked", "taken"].map(|path| (0..16).map(move |n| format!("{path}-{n}")));
    names.into_iter().flatten().map(|id| Page { id, text: "x".repeat(500) }).collect()
}

fn in_memory() -> MemoryStore {
    let store = MemoryStore::new();
    for page in pages() {
        store.put(page.id.clone(), &page).unwrap();
    }
    store
}

async fn on(uri: &str) -> MongoStore {
    let store = MongoStore::connect(uri, "bench_web").await.unwrap();
    store.database().collection(Page::COLLECTION).insert_many(pages()).await.unwrap();
    store
}

// The wrap

async fn wrap(effort: Effort) -> Vec<Row> {
    let locks = ours::manager(MemoryStore::new()).await;
    let session = || SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = || {
        App::new().route("/", web::get().to(HttpResponse::Ok)).route(
            "/login",
            web::get().to(async |session: Session| {
                session.insert("name", "alice").unwrap();
                HttpResponse::Ok()
            }),
        )
    };
    let bare = test::init_service(app()).await;
    let with_session = test::init_service(app().wrap(session())).await;
    let with_locks = test::init_service(app().wrap(locks.session(session()))).await;
    let cookies = [login(&with_session).await, login(&with_locks).await];

    let (batch, rounds) = effort.pick((500, 4), (5_000, 60));
    let mut took = vec![Vec::new(); 5];
    // The first round absorbs the one-time work.
    for _ in 0..=rounds {
        took[0].push(requests(&bare, None, batch).await);
        took[1].push(requests(&with_session, None, batch).await);
        took[2].push(requests(&with_locks, None, batch).await);
        took[3].push(requests(&with_session, Some(&cookies[0]), batch).await);
        took[4].push(requests(&with_locks, Some(&cookies[1]), batch).await);
    }
    let names = [
        (BARE.to_owned(), Role::Floor),
        (SESSION.to_owned(), Role::Floor),
        (WRAP.to_owned(), Role::Ours),
        (format!("{SESSION}{LOGGED_IN}"), Role::Floor),
        (format!("{WRAP}{LOGGED_IN}"), Role::Ours),
    ];
    let mut rows = Vec::new();
    for ((who, role), took) in names.into_iter().zip(took) {
        let samples = Samples::of(took.iter().skip(1).map(|(time, _)| *time));
        // From the last round, when everything is warm.
        let (_, allocations) = took.last().expect("a round");
        let row = Row::new("wrap", "memory", &who, role).samples(&samples);
        rows.push(row.value("allocations", *allocations));
    }
    rows
}

async fn login<S, B>(app: &S) -> String
where
    S: Service<actix_http::Request, Response = ServiceResponse<B>, Error = actix_web::Error>,
{
    let answer = test::TestRequest::get().uri("/login").to_request();
    let answer = app.call(answer).await.unwrap();
    let cookie = answer.response().cookies().next().expect("a session");
    cookie.stripped().to_string()
}

/// The time and the allocations of one request, averaged over a batch.
async fn requests<S, B>(app: &S, cookie: Option<&str>, batch: u32) -> (Duration, f64)
where
    S: Service<actix_http::Request, Response = ServiceResponse<B>, Error = actix_web::Error>,
{
    let request = || {
        let request = test::TestRequest::get().uri("/");
        cookie.iter().fold(request, |request, cookie| request.insert_header(("cookie", *cookie)))
    };
    // Built beforehand, so that building them is not measured.
    let all: Vec<_> = (0..batch).map(|_| request().to_request()).collect();
    let mut calls = 0;
    let began = Instant::now();
    for (n, request) in all.into_iter().enumerate() {
        if n == 0 {
            count::start();
        }
        let answer = app.call(request).await.unwrap();
        debug_assert!(answer.status().is_success());
        drop(answer);
        if n == 99 {
            (_, calls) = count::stop();
        }
    }
    (began.elapsed() / batch, calls as f64 / 100.0)
}

// The extractor

const CONNECTIONS: [usize; 2] = [1, 16];

/// Over real HTTP: each client has its own session and its own document.
async fn documents<S: Store + Clone>(at: &'static str, store: S, effort: Effort) -> Vec<Row> {
    let locks = ours::manager(store.clone()).await;
    let (sender, started) = oneshot::channel();
    let serving = thread::spawn(move || rt::System::new().block_on(serve(store, locks, sender)));
    let (address, handle) = started.await.expect("a server that starts");

    let (time, rounds) = effort.slices();
    let mut rows = Vec::new();
    let paths = [(PLAIN, "plain"), (LOCKED, "locked"), (TAKEN, "taken")];
    let mut cookies = paths.map(|_| vec![None; CONNECTIONS[1]]);
    for clients in CONNECTIONS {
        let mut all = paths.map(|_| Samples::default());
        for round in 0..=rounds {
            for ((_, path), (all, cookies)) in
                paths.into_iter().zip(all.iter_mut().zip(&mut cookies))
            {
                let mine = cookies[..clients].to_vec();
                let ask = move || rt::System::new().block_on(ask(address, path, mine, time));
                let (samples, mine) = spawn_blocking(ask).await.unwrap();
                cookies[..clients].clone_from_slice(&mine);
                // The first round absorbs the one-time work.
                if round > 0 {
                    all.add(samples);
                }
            }
        }
        for ((who, _), samples) in paths.iter().zip(&all) {
            let role = if *who == PLAIN { Role::Floor } else { Role::Ours };
            rows.push(Row::new("web", at, who, role).load(clients, clients).samples(samples));
        }
    }
    handle.stop(true).await;
    let _ = spawn_blocking(move || serving.join()).await;
    rows
}

async fn serve<S: Store + Clone>(
    store: S,
    locks: LockManager,
    started: oneshot::Sender<(SocketAddr, ServerHandle)>,
) {
    let server = HttpServer::new(move || {
        let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
        App::new()
            .app_data(web::Data::new(store.clone()))
            .wrap(locks.session(session))
            .route("/plain/{id}", web::post().to(plain::<S>))
            .route("/locked/{id}", web::post().to(locked))
            .route("/taken/{id}", web::post().to(taken))
    });
    let server = server.workers(2).disable_signals().bind(("127.0.0.1", 0)).expect("a free port");
    let address = server.addrs()[0];
    let server = server.run();
    let _ = started.send((address, server.handle()));
    server.await.expect("a server that ends well");
}

async fn plain<S: Store>(store: web::Data<S>, id: web::Path<String>) -> impl Responder {
    let key = LockKey::of::<Page>(id.into_inner()).unwrap();
    let page: Page =
        store.load(&key, Deadline::NONE).await.unwrap().expect("it is there").decode().unwrap();
    web::Json(page)
}

async fn locked(page: LockedDoc<Page>) -> impl Responder {
    HttpResponse::Ok().json(&*page)
}

async fn taken(page: LockedDoc<Page>) -> impl Responder {
    let answer = HttpResponse::Ok().json(&*page);
    page.release().await.unwrap();
    answer
}

/// The state of a client between its requests.
struct Client {
    http: awc::Client,
    url: String,
    cookie: Option<String>,
    samples: Samples,
}

/// Reuses the sessions of the earlier slices, which hold their documents.
async fn ask(
    address: SocketAddr,
    path: &str,
    cookies: Vec<Option<String>>,
    time: Duration,
) -> (Samples, Vec<Option<String>>) {
    let began = Instant::now();
    let until = began + time;
    let clients = cookies.into_iter().enumerate().map(|(n, cookie)| Client {
        http: awc::Client::builder().disable_redirects().finish(),
        url: format!("http://{address}/{path}/{path}-{n}"),
        cookie,
        samples: Samples::default(),
    });
    let clients = join_all(clients.map(async |mut client| {
        while Instant::now() < until {
            client.asks().await;
        }
        client
    }));
    let (mut all, mut cookies) = (Samples::default(), Vec::new());
    for client in clients.await {
        all.add(client.samples);
        cookies.push(client.cookie);
    }
    all.elapsed = began.elapsed();
    (all, cookies)
}

impl Client {
    async fn asks(&mut self) {
        let from = Instant::now();
        let mut request = self.http.post(&self.url);
        if let Some(cookie) = &self.cookie {
            request = request.insert_header(("cookie", cookie.as_str()));
        }
        let mut answer = request.send().await.unwrap();
        answer.body().await.unwrap();
        assert!(answer.status().is_success(), "{} says {}", self.url, answer.status());
        let set = answer.headers().get("set-cookie").and_then(|it| it.to_str().ok());
        if let Some(set) = set.and_then(|set| set.split(';').next()) {
            self.cookie = Some(set.to_owned());
        }
        self.samples.took.push(from.elapsed().as_secs_f32() * 1e6);
    }
}
