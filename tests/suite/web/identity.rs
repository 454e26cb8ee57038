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

async fn serve_with_identity(
    locks: &LockManager,
    identity: IdentityMiddleware,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    let session = SessionMiddleware::new(CookieSessionStore::default(), Key::from(&[7; 64]));
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
    let app = serve_with_identity(&locks, IdentityMiddleware::default()).await;
    let browser = Browser::new(&app);
    let token = browser.post("/note/a").await.token();
    assert_eq!(browser.post("/identity/login").await.status, 204);
    assert_eq!(browser.post("/note/a").await.token(), token);
    assert_eq!(browser.post("/identity/logout").await.status, 204);
    assert!(locks.inspect(&key("a")).await.unwrap().is_none());
}

#[actix_web::test]
async fn a_login_that_has_passed_its_deadline_releases_them() {
    let (locks, _) = embedded().await;
    let deadline = Some(Duration::from_secs(0));
    let identity = IdentityMiddleware::builder().login_deadline(deadline).build();
    let app = serve_with_identity(&locks, identity).await;
    let browser = Browser::new(&app);
    browser.post("/note/a").await.token();
    browser.post("/identity/login").await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    browser.get("/plain").await;
    assert!(locks.inspect(&key("a")).await.unwrap().is_none());
}
