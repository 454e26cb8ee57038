//! The routes of the server.

use actix_doclock::web::Problem;
use actix_doclock::{Actor, BoxError, HeldDoc, LockError, LockedDoc, SessionLocks};
use actix_session::{Session, SessionExt};
use actix_web::{
    Error, HttpRequest, HttpResponse, Responder,
    body::MessageBody,
    dev::{ServiceRequest, ServiceResponse},
    http::{StatusCode, header},
    middleware::Next,
    web::{Data, Json, Path, Query, ServiceConfig, get, post, resource},
};
use mongodb::bson::oid::ObjectId;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::documents::{Documents, WorkItem};

pub(crate) fn configure(config: &mut ServiceConfig) {
    config
        .route("/login", post().to(login))
        .route("/logout", post().to(logout))
        .route("/api/me", get().to(me))
        .service(resource("/api/workitem").get(list).post(create))
        .service(resource("/api/workitem/{id}").get(view).put(save).patch(change).delete(delete))
        .route("/api/workitem/{id}/edit", post().to(edit))
        .route("/", get().to(page))
        .route("/page.css", get().to(style))
        .route("/{module}.js", get().to(script))
        .route("/favicon.ico", get().to(HttpResponse::NoContent));
}

/// The session key for the name of the person.
pub(crate) const NAME: &str = "name";

/// The names of the people with the role [`ADMIN`].
pub(crate) struct Admins(pub(crate) Vec<String>);

/// The role that permits its people to see, break and take over all locks.
pub(crate) const ADMIN: &str = "admin";

fn name(session: &Session) -> Option<String> {
    session.get(NAME).ok().flatten()
}

/// The person of a session, as other people see them, with their roles.
pub(crate) fn person(session: &Session, admins: &[String]) -> Option<Actor> {
    let name = name(session)?;
    let actor = Actor::new(&*name).with_id(&*name);
    Some(if admins.contains(&name) { actor.with_role(ADMIN) } else { actor })
}

/// Without a login, a visitor may only read.
pub(crate) async fn only_readers_need_no_login(
    req: ServiceRequest,
    next: Next<impl MessageBody>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let is_open = matches!(req.path(), "/login" | "/logout" | "/locks/status");
    let needs_login = !req.method().is_safe() && !is_open;
    if needs_login && name(&req.get_session()).is_none() {
        let problem = Problem::new(StatusCode::UNAUTHORIZED, "login_required");
        return Err(problem.detail("log in first: POST /login {\"name\": …}").into());
    }
    next.call(req).await
}

/// A document as clients see it.
#[derive(Serialize)]
struct View<'a> {
    id: String,
    title: &'a str,
    body: &'a str,
}

impl<'a> From<&'a WorkItem> for View<'a> {
    fn from(item: &'a WorkItem) -> Self {
        Self { id: item.id.to_hex(), title: &item.title, body: &item.body }
    }
}

#[derive(Deserialize)]
struct Form {
    title: String,
    body: String,
}

#[derive(Deserialize)]
struct SaveOptions {
    #[serde(default)]
    release: bool,
}

/// Begins to edit: locks the document for this session, or answers with the name of the holder.
async fn edit(item: LockedDoc<WorkItem>) -> impl Responder {
    HttpResponse::Ok().json(View::from(&*item))
}

/// Saves the typed text, if the session still holds the lock.
async fn save(
    mut item: HeldDoc<WorkItem>,
    options: Query<SaveOptions>,
    form: Json<Form>,
) -> Result<impl Responder, LockError> {
    let Form { title, body } = form.into_inner();
    item.title = title;
    item.body = body;
    let answer = HttpResponse::Ok().json(View::from(&*item));
    if options.release {
        item.save_and_release().await?;
    } else {
        item.save().await?;
    }
    Ok(answer)
}

#[derive(Deserialize)]
struct Changes {
    title: Option<String>,
    body: Option<String>,
}

/// Saves the given fields only, if the session still holds the lock. All other fields of the stored
/// document stay as they are, also those that this program does not know.
async fn change(
    mut item: HeldDoc<WorkItem>,
    changes: Json<Changes>,
) -> Result<impl Responder, LockError> {
    let Changes { title, body } = changes.into_inner();
    if let Some(title) = title {
        item.title = title;
    }
    if let Some(body) = body {
        item.body = body;
    }
    item.save().await?;
    Ok(HttpResponse::Ok().json(View::from(&*item)))
}

/// Deletes the document, if the session still holds the lock.
async fn delete(item: HeldDoc<WorkItem>) -> Result<impl Responder, LockError> {
    item.delete().await?;
    Ok(HttpResponse::NoContent())
}

/// Creates a document that this session holds from the first moment.
async fn create(locks: SessionLocks, form: Json<Form>) -> Result<impl Responder, LockError> {
    let (Form { title, body }, id) = (form.into_inner(), ObjectId::new());
    let item = locks.create(id, WorkItem { id, title, body }).await?;
    let place = format!("/api/workitem/{}", id.to_hex());
    Ok(HttpResponse::Created().insert_header((header::LOCATION, place)).json(View::from(&*item)))
}

async fn list(documents: Data<Documents>) -> Result<impl Responder, Problem> {
    let items = documents.all().await.map_err(unreachable)?;
    Ok(HttpResponse::Ok().json(items.iter().map(View::from).collect::<Vec<_>>()))
}

async fn view(locks: SessionLocks, id: Path<String>) -> Result<impl Responder, Problem> {
    let id = ObjectId::parse_str(id.as_str())
        .map_err(|_| Problem::new(StatusCode::BAD_REQUEST, "bad_id").detail("not an ObjectId"))?;
    // Everybody may read what the list shows.
    let item = locks.load_without_policy::<WorkItem>(id).await?;
    Ok(HttpResponse::Ok().json(View::from(&item)))
}

#[derive(Deserialize)]
struct Login {
    name: String,
}

async fn login(session: Session, login: Json<Login>) -> Result<impl Responder, Error> {
    let new = login.name.trim();
    if new.is_empty() || new.len() > 200 {
        let problem = Problem::new(StatusCode::BAD_REQUEST, "bad_name");
        return Err(problem.detail("a name has 1 to 200 bytes").into());
    }
    if name(&session).is_some_and(|old| old != new) {
        // Another person at the same browser: the locks of the first person are released.
        session.clear();
    }
    // A new key for a session with new rights. Its locks remain.
    session.renew();
    session.insert(NAME, new)?;
    Ok(HttpResponse::NoContent())
}

/// Ends the session, and so releases its locks.
async fn logout(session: Session) -> impl Responder {
    session.purge();
    HttpResponse::NoContent()
}

async fn me(session: Session, admins: Data<Admins>) -> impl Responder {
    let person = person(&session, &admins.0);
    let is_admin = person.as_ref().is_some_and(|person| person.has_role(ADMIN));
    HttpResponse::Ok().json(json!({ "name": person.map(|it| it.label), "admin": is_admin }))
}

async fn page() -> impl Responder {
    HttpResponse::Ok()
        .content_type("text/html; charset=utf-8")
        .body(include_str!("page/index.html"))
}

async fn style() -> impl Responder {
    HttpResponse::Ok().content_type("text/css; charset=utf-8").body(include_str!("page/page.css"))
}

async fn script(module: Path<String>) -> Result<impl Responder, Problem> {
    let script = match module.as_str() {
        "page" => include_str!("page/page.js"),
        "document" => include_str!("page/document.js"),
        "server" => include_str!("page/server.js"),
        "show" => include_str!("page/show.js"),
        _ => return Err(no_such_route()),
    };
    Ok(HttpResponse::Ok().content_type("text/javascript; charset=utf-8").body(script))
}

pub(crate) async fn not_found(req: HttpRequest) -> Result<HttpResponse, Problem> {
    Err(no_such_route().detail(format_args!("{} {}", req.method(), req.path())))
}

fn no_such_route() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "no_such_route")
}

fn unreachable(error: BoxError) -> Problem {
    log::error!("{error}");
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable")
        .detail("the database gives no answer at the moment; try again")
}
