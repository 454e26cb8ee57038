//! Together with actix-identity, whose middleware goes inside the wrap.

use actix_identity::{Identity, IdentityMiddleware};
use actix_web::{HttpMessage, HttpRequest};

use super::*;

async fn login(req: HttpRequest) -> impl Responder {
    Identity::login(&req.extensions(), "alice".to_owned()).unwrap();
    HttpResponse::NoContent()
}

async fn logout(identity: Identity) -> impl Responder {
    identity.logout();
    HttpResponse::NoContent()
}

pub(super) async fn serve_with_identity<K: SessionStore + 'static>(
    locks: &LockManager,
    sessions: K,
    identity: IdentityMiddleware,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    let session = SessionMiddleware::new(sessions, Key::from(&[7; 64]));
    let app = App::new()
        .wrap(identity)
        .wrap(locks.session(session))
        .route("/identity/login", web::post().to(login))
        .route("/identity/logout", web::post().to(logout))
        .configure(routes);
    test::init_service(app).await
}

#[actix_web::test]
async fn a_login_keeps_the_locks_and_a_logout_releases_them() {
    let (locks, _) = embedded().await;
    let (sessions, identity) = (CookieSessionStore::default(), IdentityMiddleware::default());
    let app = serve_with_identity(&locks, sessions, identity).await;
    let browser = Browser::new(&app);
    let token = browser.post("/note/a").await.token();
    assert_eq!(browser.post("/identity/login").await.status, 204);
    assert_eq!(browser.post("/note/a").await.token(), token);
    assert_eq!(browser.post("/identity/logout").await.status, 204);
    assert!(locks.inspect(&key("a")).await.unwrap().is_none());
}
