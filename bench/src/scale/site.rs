//! An application whose pages lock documents, and its people. Requests go to the service of the application
//! in this process: only the network and the parsing of HTTP are left out.

use std::{rc::Rc, time::Duration};

use actix_doclock::{HeldDoc, LockManager, Lockable, LockedDoc, MongoStore};
use actix_http::Request;
use actix_session::{Session, SessionMiddleware, storage::CookieSessionStore};
use actix_web::{
    App, HttpResponse, Responder,
    body::to_bytes,
    cookie::Key,
    dev::Service,
    http::header::COOKIE,
    test::{self, TestRequest},
    web::{self, Bytes},
};
use futures_util::future::LocalBoxFuture;
use mongodb::Database;

use crate::ours::Page;

/// The default, which the pages assume.
pub const TTL: Duration = Duration::from_secs(150);
/// As in `client.js`: a third of the ttl, and a little more, so that each heartbeat renews.
pub const HEARTBEAT: Duration = Duration::from_millis(50_250);

const TEXT: usize = 500;
/// More would be too large for one message.
const AT_ONCE: usize = 10_000;

pub type Site = Rc<dyn Fn(Request) -> LocalBoxFuture<'static, Answer>>;

pub struct Answer {
    status: u16,
    cookie: Option<String>,
    token: Option<String>,
    version: Option<String>,
    body: Bytes,
}

/// A manager of one collection, with the default settings.
pub async fn manager(database: &Database) -> LockManager {
    let locks = LockManager::builder(MongoStore::new(database)).ttl(TTL).build().await.unwrap();
    locks.register::<Page>().await.unwrap();
    locks
}

pub fn name(n: usize) -> String {
    format!("document-{n:06}")
}

/// Creates the first documents.
pub async fn write_documents(database: &Database, documents: usize) {
    let pages = database.collection::<Page>(Page::COLLECTION);
    for from in (0..documents).step_by(AT_ONCE) {
        let some = (from..documents.min(from + AT_ONCE))
            .map(|n| Page { id: name(n), text: "x".repeat(TEXT) });
        pages.insert_many(some).await.unwrap();
    }
}

pub async fn open(locks: &LockManager) -> Site {
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
    let app = App::new()
        .wrap(locks.session(session).longest_wait(Duration::from_secs(600)))
        .service(web::scope("/locks").configure(actix_doclock::lock_api))
        .route("/edit/{id}", web::post().to(edit))
        .route("/page/{id}", web::put().to(save))
        .route("/look", web::get().to(HttpResponse::Ok))
        .route("/logout", web::post().to(log_out));
    let service = Rc::new(test::init_service(app).await);
    Rc::new(move |request| {
        let service = Rc::clone(&service);
        Box::pin(async move {
            let answer = match service.call(request).await {
                Ok(answer) => answer,
                Err(e) => {
                    let status = e.error_response().status().as_u16();
                    let body = Bytes::from(e.to_string());
                    return Answer { status, cookie: None, token: None, version: None, body };
                }
            };
            let cookie = answer.response().cookies().next().map(|it| it.stripped().to_string());
            let header = |name| Some(answer.headers().get(name)?.to_str().ok()?.to_owned());
            let (token, version) = (header("lock-token"), header("etag"));
            let status = answer.status().as_u16();
            let body = to_bytes(answer.into_body()).await.unwrap_or_default();
            Answer { status, cookie, token, version, body }
        })
    })
}

async fn edit(page: LockedDoc<Page>) -> impl Responder {
    HttpResponse::Ok().json(&*page)
}

async fn save(mut page: HeldDoc<Page>, text: String) -> actix_web::Result<impl Responder> {
    page.text = text;
    page.save().await?;
    Ok(HttpResponse::NoContent())
}

async fn log_out(session: Session) -> impl Responder {
    session.purge();
    HttpResponse::NoContent()
}

/// A browser with one page, and the token that it has.
pub struct Person {
    site: Site,
    cookie: Option<String>,
    pub token: Option<String>,
    /// The version of the document that the page shows, and whether its saves name it.
    version: Option<String>,
    pub names_version: bool,
    pub id: String,
    saves: usize,
}

impl Person {
    pub fn new(site: &Site, id: String) -> Self {
        Self {
            site: Rc::clone(site),
            cookie: None,
            token: None,
            version: None,
            names_version: false,
            id,
            saves: 0,
        }
    }

    /// The same person at another server.
    pub fn at(mut self, site: &Site) -> Self {
        self.site = Rc::clone(site);
        self
    }

    async fn send(&mut self, request: TestRequest) -> Answer {
        let request = self
            .cookie
            .iter()
            .fold(request, |it, cookie| it.insert_header((COOKIE, cookie.as_str())));
        let request =
            self.token.iter().fold(request, |it, token| it.insert_header(("lock-token", &**token)));
        let answer = (self.site)(request.to_request()).await;
        if let Some(cookie) = &answer.cookie {
            self.cookie = Some(cookie.clone());
        }
        answer
    }

    /// Opens the editor; if it is open, asks for the document again.
    pub async fn edit(&mut self) -> u16 {
        let answer = self.send(TestRequest::post().uri(&format!("/edit/{}", self.id))).await;
        if answer.status == 200 {
            (self.token, self.version) = (answer.token, answer.version);
        }
        answer.status
    }

    /// Waits for the lock, by the lock API.
    pub async fn wait(&mut self, ms: u64) -> u16 {
        let request = TestRequest::post().uri(&format!("/locks/page/{}", self.id));
        self.send(request.set_payload(format!("{{\"wait_ms\":{ms}}}"))).await.status
    }

    /// Loads a page that locks nothing.
    pub async fn look(&mut self) -> u16 {
        self.send(TestRequest::get().uri("/look")).await.status
    }

    /// 409 if the page has lost its lock.
    pub async fn heartbeat(&mut self) -> u16 {
        let token = self.token.take().unwrap_or_default();
        let body = format!("{{\"locks\":{{\"page/{}\":\"{token}\"}}}}", self.id);
        let request = TestRequest::post().uri("/locks/heartbeat").set_payload(body);
        let answer = self.send(request).await;
        self.token = Some(token);
        let has_lost = answer.status == 200 && !answer.body.ends_with(b"\"lost\":[]}");
        if has_lost { 409 } else { answer.status }
    }

    /// Writes another text of the same length.
    pub async fn save(&mut self) -> u16 {
        self.saves += 1;
        let text = format!("{:0>width$}", self.saves, width = TEXT);
        let request = TestRequest::put().uri(&format!("/page/{}", self.id));
        let named = self.version.iter().filter(|_| self.names_version);
        let request = named.fold(request, |it, version| it.insert_header(("if-match", &**version)));
        let answer = self.send(request.set_payload(text)).await;
        if answer.status == 204 {
            self.version = answer.version;
        }
        answer.status
    }

    /// Asks the holder of this document for it.
    pub async fn ask(&mut self, id: &str) -> u16 {
        let request = TestRequest::post().uri(&format!("/locks/page/{id}/ask"));
        self.send(request.set_payload(r#"{"message":"for the meeting at three"}"#)).await.status
    }

    pub async fn release(&mut self) -> u16 {
        let request = TestRequest::delete().uri(&format!("/locks/page/{}", self.id));
        let answer = self.send(request).await;
        self.token = None;
        answer.status
    }

    pub async fn log_out(&mut self) -> u16 {
        self.token = None;
        self.send(TestRequest::post().uri("/logout")).await.status
    }
}
