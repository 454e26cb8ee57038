//! A back office of plain HTML: each page is a template, and none has a script of its own. The element `doclock-form` locks,
//! keeps what is typed, and says who is editing. Without JavaScript, buttons do the same, and a save without the lock shows
//! the typed text beside the stored one.
//!
//! `cargo run --example forms` starts it on the embedded store; `--mongodb URI` uses a database.

use std::time::Duration;

use actix_doclock::web::{Problem, Refused};
use actix_doclock::{
    Actor, BoxError, HeldDoc, LockError, LockKey, LockManager, LockToken, Lockable, MemoryStore,
    MongoStore, SessionLocks, lock_api,
};
use actix_session::{Session, SessionMiddleware, storage::CookieSessionStore};
use actix_web::{
    App, HttpRequest, HttpResponse, HttpServer, ResponseError,
    cookie::Key,
    dev::RequestHead,
    http::{StatusCode, header},
    middleware::DefaultHeaders,
    web::{self, Form, FormConfig, Path, Query},
};
use askama::Template;
use clap::Parser;
use mongodb::bson::doc;
use serde::{Deserialize, Serialize};

#[derive(Parser)]
struct Args {
    #[arg(long, default_value = "127.0.0.1:8081")]
    bind: String,
    #[arg(long, value_name = "URI")]
    mongodb: Option<String>,
    #[arg(long, default_value = "doclock_forms", value_name = "NAME")]
    database: String,
    #[arg(long, default_value_t = 150, value_name = "N")]
    ttl_secs: u64,
    /// At least 32 characters; the same on all servers. Without it, logins end with this process.
    #[arg(long, env = "FORMS_SECRET", hide_env_values = true)]
    secret: Option<String>,
}

/// An article, named by its slug in every address.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct Article {
    #[serde(rename = "_id")]
    slug: String,
    title: String,
    text: String,
}

impl Lockable for Article {
    type Id = String;
    const COLLECTION: &'static str = "article";
}

/// The form, with the button that was pressed.
#[derive(Deserialize)]
struct Posted {
    title: String,
    text: String,
    close: Option<String>,
    take_over: Option<String>,
}

impl Posted {
    /// Browsers send line breaks as CR LF.
    fn article(&self, slug: &str) -> Article {
        let (title, text) = (self.title.clone(), self.text.replace("\r\n", "\n"));
        Article { slug: slug.to_owned(), title, text }
    }
}

#[derive(Deserialize)]
struct Named {
    version: Option<String>,
}

#[derive(Template)]
#[template(path = "list.html", config = "examples/forms/askama.toml")]
struct List {
    name: Option<String>,
    articles: Vec<Article>,
}

#[derive(Template)]
#[template(path = "article.html", config = "examples/forms/askama.toml")]
struct Page {
    /// In the fields: what is stored, or what was typed.
    shown: Article,
    /// `None` if the database does not answer, or if there is no such article any more.
    stored: Option<Article>,
    /// Of what is stored and shown; otherwise the one that the request has named.
    version: Option<String>,
    is_unsaved: bool,
    token: Option<LockToken>,
    refused: Option<Refused>,
}

fn see(place: &str) -> HttpResponse {
    HttpResponse::SeeOther().insert_header((header::LOCATION, place)).finish()
}

fn html(status: StatusCode, page: &impl Template) -> HttpResponse {
    match page.render() {
        Ok(text) => HttpResponse::build(status).content_type("text/html; charset=utf-8").body(text),
        Err(error) => HttpResponse::InternalServerError().body(error.to_string()),
    }
}

fn name(session: &Session) -> Option<String> {
    session.get("name").ok().flatten()
}

#[derive(Deserialize)]
struct Login {
    name: String,
}

async fn login(session: Session, form: Form<Login>) -> Result<HttpResponse, actix_web::Error> {
    session.renew();
    session.insert("name", form.name.trim())?;
    Ok(see("/"))
}

async fn logout(session: Session) -> HttpResponse {
    session.purge();
    see("/")
}

const SLUGS: [&str; 2] = ["about-us", "price list"];

async fn list(session: Session, locks: SessionLocks) -> Result<HttpResponse, LockError> {
    let mut articles = Vec::new();
    for slug in SLUGS {
        // The titles are for everybody.
        articles.push(locks.load_without_policy::<Article>(slug.to_owned()).await?);
    }
    Ok(html(StatusCode::OK, &List { name: name(&session), articles }))
}

/// Takes no lock: the element does that for its tab, or a button. If the session has a lock without a tab, this is a page
/// without JavaScript, whose form names the lock.
async fn read(req: HttpRequest, slug: Path<String>, locks: SessionLocks) -> HttpResponse {
    let held = locks.held::<Article>(slug.clone()).await.ok();
    let token = held.filter(|held| held.lock().tab.is_none()).map(|held| held.token());
    page(&req, &slug, &locks, None, token, None).await
}

/// What was typed and is not stored, if there is such a text, stands beside what is stored.
async fn page(
    req: &HttpRequest,
    slug: &str,
    locks: &SessionLocks,
    typed: Option<Article>,
    token: Option<LockToken>,
    error: Option<&LockError>,
) -> HttpResponse {
    let loaded = locks.load::<Article>(slug.to_owned()).await;
    // That the article is gone says more than that its lock is gone.
    let error = error.map(|error| loaded.as_ref().err().unwrap_or(error));
    let refused = error.map(|error| locks.refused(error));
    let status = error.map_or(StatusCode::OK, ResponseError::status_code);
    let (shown, stored) = match (typed, loaded) {
        (typed, Ok(stored)) => (typed.unwrap_or_else(|| stored.clone()), Some(stored)),
        (Some(typed), Err(_)) => (typed, None),
        (None, Err(LockError::LoginRequired)) => return see("/"),
        (None, Err(error)) => return error.error_response(),
    };
    let is_unsaved = stored.as_ref() != Some(&shown);
    let version = locks.version().filter(|_| stored.is_some());
    let named = Query::<Named>::from_query(req.query_string()).ok().and_then(|it| it.0.version);
    let version = version.map(|it| it.to_string()).or(named);
    html(status, &Page { shown, stored, version, is_unsaved, token, refused })
}

/// The buttons of a page without JavaScript.
async fn lock(
    req: HttpRequest,
    slug: Path<String>,
    locks: SessionLocks,
    form: Form<Posted>,
) -> HttpResponse {
    let typed = form.article(&slug);
    let locked = match form.take_over {
        Some(_) => locks.take_over::<Article>(slug.clone()).await,
        None => locks.open::<Article>(slug.clone()).await,
    };
    match locked {
        Ok(article) if *article == typed => see(req.path().trim_end_matches("/lock")),
        Ok(article) => page(&req, &slug, &locks, Some(typed), Some(article.token()), None).await,
        Err(error) => page(&req, &slug, &locks, Some(typed), None, Some(&error)).await,
    }
}

async fn save(
    req: HttpRequest,
    slug: Path<String>,
    locks: SessionLocks,
    form: Form<Posted>,
) -> HttpResponse {
    let typed = form.article(&slug);
    let saved = async {
        let mut article: HeldDoc<Article> = locks.held(slug.clone()).await?;
        *article = typed.clone();
        if form.close.is_some() { article.save_and_release().await } else { article.save().await }
    };
    if let Err(error) = saved.await {
        // Perhaps a second submit. What is stored already needs no save.
        let may_be =
            [StatusCode::CONFLICT, StatusCode::PRECONDITION_FAILED].contains(&error.status_code());
        let stored = locks.load::<Article>(slug.clone()).await;
        if !(may_be && stored.is_ok_and(|stored| stored == typed)) {
            return page(&req, &slug, &locks, Some(typed), None, Some(&error)).await;
        }
    }
    see(if form.close.is_some() { "/" } else { req.path() })
}

async fn manager(args: &Args) -> Result<LockManager, BoxError> {
    let samples = SLUGS.map(|slug| Article {
        slug: slug.to_owned(),
        title: slug.to_owned(),
        text: String::new(),
    });
    let builder = if let Some(uri) = &args.mongodb {
        let store = MongoStore::connect(uri, &args.database).await?;
        let articles = store.database().collection::<Article>(Article::COLLECTION);
        for Article { slug, title, text } in samples {
            let fields = doc! { "$setOnInsert": { "title": title, "text": text } };
            articles.update_one(doc! { "_id": slug }, fields).upsert(true).await?;
        }
        LockManager::builder(store)
    } else {
        let store = MemoryStore::new();
        for sample in samples {
            store.put(sample.slug.clone(), &sample)?;
        }
        LockManager::builder(store)
    };
    let locks = builder.ttl(Duration::from_secs(args.ttl_secs)).build().await?;
    locks.register::<Article>().await?;
    Ok(locks)
}

#[actix_web::main]
async fn main() -> Result<(), BoxError> {
    env_logger::init_from_env(env_logger::Env::default().default_filter_or("info"));
    let args = Args::parse();
    let locks = manager(&args).await?;
    let served = locks.clone();
    let key = args.secret.map_or_else(Key::generate, |secret| Key::derive_from(secret.as_bytes()));
    let server = HttpServer::new(move || {
        let session = SessionMiddleware::builder(CookieSessionStore::default(), key.clone())
            .cookie_secure(false) // for http on this machine
            .build();
        let wrap = locks
            .session(session)
            .identify(|session| name(session).map(|name| Actor::new(&*name).with_id(&*name)))
            // Who may lock an article may also read its page: `load` asks this policy, too.
            .access_policy(async |person: Option<Actor>, _: LockKey, _| person.is_some())
            .render_errors(|request: &RequestHead, problem: &Problem| {
                let text = format!("{} Go back: your text is there.", problem.for_people(request));
                Some(HttpResponse::build(problem.status_code()).body(text))
            });
        let policy = (header::CONTENT_SECURITY_POLICY, "default-src 'self'; img-src data:");
        App::new()
            .app_data(FormConfig::default().limit(1 << 20))
            .wrap(wrap)
            .wrap(DefaultHeaders::new().add(policy))
            .route("/", web::get().to(list))
            .route("/login", web::post().to(login))
            .route("/logout", web::post().to(logout))
            .route("/article/{slug}", web::get().to(read))
            .route("/article/{slug}", web::post().to(save))
            .route("/article/{slug}/lock", web::post().to(lock))
            .service(web::scope("/locks").configure(lock_api))
    });
    let server = server.bind(&args.bind)?;
    for address in server.addrs() {
        println!("listening on http://{address}");
    }
    served.serve(server).await?;
    Ok(())
}
