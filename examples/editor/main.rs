//! A small back office: people log in by name and edit documents, never two people the same document.
//!
//! `cargo run --example editor` starts it on the embedded store. `--mongodb URI` (or the variable
//! `MONGODB_URI`) uses a database instead; then any number of servers can share it, and a login expires
//! on all of them at the same time.

mod documents;
mod operations;
mod routes;

use std::time::Duration;

use actix_doclock::web::{Access, Problem};
use actix_doclock::{Actor, BoxError, LockManager, SessionEnded, lock_api, store::Needs};
use actix_session::{
    SessionMiddleware,
    config::BrowserSession,
    storage::{CookieSessionStore, SessionStore},
};
use actix_session_mongo::{MongoSessionStore, SessionWrap};
use actix_web::{
    App, HttpServer, cookie,
    http::header,
    middleware::{DefaultHeaders, from_fn},
    web,
};
use clap::Parser;

use crate::{
    documents::{Documents, WorkItem},
    routes::{ADMIN, Admins, person},
};

#[derive(Parser)]
struct Args {
    /// The address to listen on; port 0 picks a free port.
    #[arg(long, default_value = "127.0.0.1:8080")]
    bind: String,
    /// A MongoDB URI. Without one, everything is in memory and gone when the server ends.
    #[arg(long, env = "MONGODB_URI", value_name = "URI", hide_env_values = true)]
    mongodb: Option<String>,
    /// The database on MongoDB.
    #[arg(long, default_value = "doclock_editor", value_name = "NAME")]
    database: String,
    /// How long a lock outlives the last sign of life of its session.
    #[arg(long, default_value_t = 150, value_name = "N")]
    ttl_secs: u64,
    /// How long it goes on to serve requests after SIGTERM, while /health already says that it stops.
    #[arg(long, default_value_t = 0, value_name = "N")]
    drain_secs: u64,
    /// How long a login lasts, on MongoDB. (A cookie cannot be revoked.)
    #[arg(long, default_value_t = 12 * 60 * 60, value_name = "N")]
    login_secs: u32,
    /// The name of an administrator, who may open `/locks/admin`, and break or take over all locks. (There
    /// are no passwords: anybody can log in by that name.) May be repeated.
    #[arg(long, value_name = "NAME")]
    admin: Vec<String>,
}

#[actix_web::main]
async fn main() -> Result<(), BoxError> {
    env_logger::init_from_env(env_logger::Env::default().default_filter_or("info"));
    let args = Args::parse();
    operations::metrics::install()?;

    let documents = match &args.mongodb {
        Some(uri) => Documents::on_mongodb(uri, &args.database).await?,
        None => Documents::in_memory(),
    };
    documents.insert_samples_if_empty().await?;

    let locks = match &documents {
        Documents::Memory(store) => LockManager::builder(store.clone()),
        Documents::Mongo(store) => LockManager::builder(store.clone()),
    };
    let locks = if args.admin.is_empty() {
        locks
    } else {
        locks.admin_policy(|person| person.has_role(ADMIN))
    };
    let locks = locks
        .ttl(Duration::from_secs(args.ttl_secs))
        .drain_delay(Duration::from_secs(args.drain_secs))
        .holder_label("somebody who is not logged in")
        .break_policy(|person, _| person.has_role(ADMIN))
        .take_over_policy(|person, lock| person.has_role(ADMIN) || person.is_holder_of(lock))
        .describe({
            let documents = documents.clone();
            move |keys| documents.clone().describe(keys)
        })
        .on_session_end(async |ended: SessionEnded| {
            let keys: Vec<_> = ended.locks.iter().map(ToString::to_string).collect();
            let SessionEnded { event, reason, .. } = ended; // a repeated call has the same event
            log::info!("a session has ended ({reason:?}); free again: {keys:?}; event {event}");
            Ok(())
        })
        .build()
        .await?;
    locks.register::<WorkItem>().await?;

    match documents.clone() {
        Documents::Memory(_) => serve(args, documents, locks, CookieSessionStore::default).await,
        Documents::Mongo(store) => {
            const COLLECTION: &str = "doclock.session";
            let sessions = MongoSessionStore::builder(store.database())
                .collection(COLLECTION)
                .user_key(routes::NAME)
                .id_key("doclock.aid")
                .on_end(locks.session_ends())
                .build()
                .await?;
            let indexes = actix_session_mongo::indexes();
            store.also_needs(Needs::new(COLLECTION, actix_session_mongo::ACTIONS, indexes));
            serve(args, documents, locks, move || sessions.clone()).await
        }
    }
}

async fn serve<S: SessionStore + 'static>(
    args: Args,
    documents: Documents,
    locks: LockManager,
    sessions: impl Fn() -> S + Clone + Send + 'static,
) -> Result<(), BoxError> {
    let key = documents.session_key().await?;
    locks.note_session_key(&key);
    let login = cookie::time::Duration::seconds(args.login_secs.into());
    let admins = web::Data::new(Admins(args.admin));
    let manager = locks.clone();
    let server = HttpServer::new(move || {
        let session = SessionMiddleware::builder(sessions(), key.clone())
            .session_lifecycle(BrowserSession::default().state_ttl(login))
            // For http on this machine. Behind https, remove this line.
            .cookie_secure(false)
            .build();
        let known = admins.clone();
        App::new()
            .app_data(web::Data::new(documents.clone()))
            .app_data(admins.clone())
            .app_data(web::Data::new(locks.clone()))
            .app_data(Problem::json_config())
            .wrap(from_fn(routes::only_readers_need_no_login))
            .wrap(
                locks
                    .session(SessionWrap(session))
                    .identify(move |session| person(session, &known.0))
                    .session_ends_in(|_| actix_session_mongo::session_ends_in())
                    // A visitor reads, and sees who edits.
                    .access_policy(async |person: Option<Actor>, _, access| {
                        person.is_some() || access == Access::Look
                    })
                    .admit_visitors(),
            )
            .wrap(
                DefaultHeaders::new()
                    .add((header::CONTENT_SECURITY_POLICY, "default-src 'self'"))
                    .add((header::X_CONTENT_TYPE_OPTIONS, "nosniff")),
            )
            .configure(routes::configure)
            .configure(operations::configure)
            .service(web::scope("/locks").configure(lock_api))
            .default_service(web::to(routes::not_found))
    })
    // A page that takes nothing should not keep its connection.
    .on_connect(LockManager::cut_slow_readers)
    .bind(&args.bind)?;
    for address in server.addrs() {
        println!("listening on http://{address}");
    }
    manager.serve(server).await?;
    Ok(())
}
