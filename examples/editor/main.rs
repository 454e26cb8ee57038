//! A small back office: people log in by name and edit documents, never two of them the same one.
//!
//! `cargo run --example editor` starts it on the embedded store. `--mongodb URI` (or the variable
//! `MONGODB_URI`) takes a database instead; then any number of servers can run side by side.

mod documents;
mod routes;

use std::time::Duration;

use actix_doclock::{BoxError, LockManager, Problem, lock_api};
use actix_session::{SessionMiddleware, storage::CookieSessionStore};
use actix_web::{
    App, HttpServer,
    http::header,
    middleware::{DefaultHeaders, from_fn},
    web,
};
use clap::Parser;

use crate::documents::{Documents, WorkItem};

#[derive(Parser)]
struct Args {
    /// Where to listen; port 0 picks a free one.
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
}

#[actix_web::main]
async fn main() -> Result<(), BoxError> {
    env_logger::init_from_env(env_logger::Env::default().default_filter_or("info"));
    let args = Args::parse();

    let documents = match &args.mongodb {
        Some(uri) => Documents::on_mongodb(uri, &args.database).await?,
        None => Documents::in_memory(),
    };
    documents.insert_samples_if_empty().await?;

    let locks = match &documents {
        Documents::Memory(store) => LockManager::builder(store.clone()),
        Documents::Mongo(store) => LockManager::builder(store.clone()),
    };
    let locks = locks
        .ttl(Duration::from_secs(args.ttl_secs))
        .holder_label("somebody who is not logged in")
        .build()
        .await?;
    locks.register::<WorkItem>().await?;

    let key = documents.session_key().await?;
    let manager = locks.clone();
    let server = HttpServer::new(move || {
        let session = SessionMiddleware::builder(CookieSessionStore::default(), key.clone())
            // For http on this machine. Behind https, leave it out.
            .cookie_secure(false)
            .build();
        App::new()
            .app_data(web::Data::new(documents.clone()))
            .app_data(Problem::json_config())
            .wrap(from_fn(routes::only_readers_need_no_login))
            .wrap(locks.session(session).identify(routes::person))
            .wrap(
                DefaultHeaders::new()
                    .add((header::CONTENT_SECURITY_POLICY, "default-src 'self'"))
                    .add((header::X_CONTENT_TYPE_OPTIONS, "nosniff")),
            )
            .configure(routes::configure)
            .service(web::scope("/locks").configure(lock_api))
            .default_service(web::to(routes::not_found))
    })
    .bind(&args.bind)?;
    for address in server.addrs() {
        println!("listening on http://{address}");
    }
    server.run().await?;
    manager.shutdown().await;
    Ok(())
}
