//! Locks live and die with their session, on every session store.

use std::{cell::Cell, rc::Rc};

use actix_session::storage::{LoadError, RedisSessionStore, SaveError, SessionKey, UpdateError};

use super::*;
use crate::rig;

/// One test of each scenario for each session store.
macro_rules! on_every_session_store {
    ($(async fn $scenario:ident<$k:ident>($sessions:ident: $type:ty) $body:block)*) => {
        mod scenarios {
            use super::*;
            $(pub(super) async fn $scenario<$k: SessionStore + 'static>($sessions: $type) $body)*
        }
        mod cookies {
            use super::*;
            $(#[actix_web::test] async fn $scenario() {
                scenarios::$scenario(CookieSessionStore::default()).await;
            })*
        }
        mod redis {
            use super::*;
            $(#[actix_web::test] async fn $scenario() {
                let url = rig::redis::shared().await;
                scenarios::$scenario(RedisSessionStore::new(url).await.unwrap()).await;
            })*
        }
    };
}

on_every_session_store! {
    async fn logging_out_frees_every_document_of_the_session<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions).await;
        let (alice, bob) = (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        for note in ["/note/a", "/note/b"] {
            alice.post(note).await.token();
            assert_eq!(bob.post(note).await.status, 423);
        }
        assert_eq!(alice.post("/purge").await.status, 204);
        for note in ["/note/a", "/note/b"] {
            assert_eq!(bob.post(note).await.status, 200, "free with the answer");
        }
    }

    async fn clearing_the_session_or_removing_its_aid_frees_them_too<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions).await;
        for end in ["/clear", "/forget"] {
            let alice = Browser::logged_in(&app, "alice").await;
            alice.post("/note/a").await.token();
            alice.post(end).await;
            assert!(locks.inspect(&key("a")).await.unwrap().is_none(), "{end}");
            // The browser goes on with what is left of its session.
            assert_eq!(alice.post("/note/a").await.status, 200);
            alice.post("/purge").await;
        }
    }

    async fn a_renewed_session_keeps_its_locks<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions).await;
        let (alice, bob) = (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        let token = alice.post("/note/a").await.token();
        alice.post("/renew").await;
        alice.post("/login/alice").await;
        assert_eq!(bob.post("/note/a").await.status, 423);
        assert_eq!(alice.put("/note/a", "new").await.token(), token);
    }

    async fn who_locks_before_logging_in_keeps_the_lock_through_the_login<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions).await;
        let visitor = Browser::new(&app);
        let token = visitor.post("/note/a").await.token();
        visitor.post("/login/alice").await;
        assert_eq!(visitor.post("/note/a").await.token(), token);
        assert_eq!(holder_of(&locks, "a").await.as_deref(), Some("alice"), "shown by name since");
    }

    async fn only_a_lock_that_is_kept_makes_a_session<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions).await;
        let alice = Browser::logged_in(&app, "alice").await;
        alice.post("/note/a").await.token();
        let visitor = Browser::new(&app);
        for refused in ["/note/a", "/note/missing", "/note/b/answer/500", "/locks/note/a"] {
            assert!(visitor.post(refused).await.status.is_client_error() || refused.contains("500"));
            assert!(!visitor.has_cookie(), "{refused} has set a cookie");
        }
        for lock_free in ["/plain", "/locks/note/a", "/locks"] {
            assert_eq!(visitor.get(lock_free).await.status, 200);
            assert!(!visitor.has_cookie(), "{lock_free} has set a cookie");
        }
        assert_eq!(visitor.post("/note/b").await.status, 200);
        assert!(visitor.has_cookie());
    }

    async fn the_aid_is_there_from_the_login_so_first_requests_at_one_moment_share_it<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions).await;
        let alice = Browser::logged_in(&app, "alice").await;
        let other_tab = alice.copy();
        let token = alice.post("/note/a").await.token();
        assert_eq!(other_tab.post("/note/a").await.token(), token);
    }

    async fn an_ended_session_is_refused_while_that_is_news<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions).await;
        let alice = Browser::logged_in(&app, "alice").await;
        alice.post("/note/a").await.token();
        let aid = locks.inspect(&key("a")).await.unwrap().unwrap().aid;
        // The other tab logs out, and this one still comes with the session: in flight, or with a
        // cookie that a cookie store cannot take back.
        locks.release_session(&aid).await.unwrap();
        alice.post("/note/a").await.problem(401);
        alice.put("/note/a", "new").await.problem(401);
        alice.post("/locks/note/a").await.problem(401);
        assert_eq!(holder_of(&locks, "a").await, None);
    }

    async fn a_session_that_came_back_later_gets_a_new_aid_and_may_lock<K>(sessions: K) {
        let (locks, store) = embedded().await;
        let app = serve(&locks, sessions).await;
        let (alice, bob) = (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        alice.post("/note/a").await.token();
        let ended = locks.inspect(&key("a")).await.unwrap().unwrap().aid;
        locks.release_session(&ended).await.unwrap();
        store.advance(Duration::from_secs(61));
        let token = alice.post("/note/a").await.token();
        assert_ne!(locks.inspect(&key("a")).await.unwrap().unwrap().aid, ended);
        assert_eq!(alice.put("/note/a", "new").await.token(), token);
        assert_eq!(bob.post("/note/a").await.status, 423);
    }

    async fn a_lock_taken_by_the_request_that_ends_the_session_goes_with_it<K>(sessions: K) {
        let (locks, _) = embedded().await;
        let app = serve(&locks, sessions).await;
        for browser in [Browser::new(&app), Browser::logged_in(&app, "alice").await] {
            assert_eq!(browser.post("/note/a/purge").await.status, 204);
            assert!(locks.inspect(&key("a")).await.unwrap().is_none());
        }
    }

    async fn what_a_session_holds_is_renewed_by_its_requests_once_in_a_third_of_the_ttl<K>(sessions: K) {
        let (locks, store) = embedded().await;
        let app = serve(&locks, sessions).await;
        let alice = Browser::logged_in(&app, "alice").await;
        alice.post("/note/a").await.token();
        alice.post("/note/b").await.token();
        let left = async |id: &str| {
            locks.shutdown().await;
            locks.inspect(&key(id)).await.unwrap().map(|lock| lock.expires_in().as_secs())
        };
        // The login counts as a sign of life, so nothing is due yet.
        for id in ["a", "b"] {
            store.age(&key(id), Duration::from_secs(50));
        }
        alice.get("/plain").await;
        assert!(left("a").await.unwrap() <= 10, "not due");

        // Another server does not know of that.
        let (other, _) = (LockManager::builder(store.clone()).ttl(Duration::from_secs(60)), ());
        let other = other.build().await.unwrap();
        other.register::<Note>().await.unwrap();
        let other_app = serve(&other, CookieSessionStore::default()).await;
        let there = Browser { app: &other_app, jar: alice.jar.clone() };
        there.get("/plain").await;
        other.shutdown().await;
        if there.get("/locks").await.json().as_array().is_some_and(|own| !own.is_empty()) {
            // Only a cookie store shares its sessions with the other server of this test.
            assert!(left("a").await.unwrap() > 30, "renewed");
            assert!(left("b").await.unwrap() > 30, "all of them");
            store.age(&key("a"), Duration::from_secs(50));
            there.get("/plain").await;
            other.shutdown().await;
            assert!(left("a").await.unwrap() <= 10, "not due again");
        }
    }
}

/// A session store that cannot be written to for a while.
#[derive(Clone, Default)]
pub(super) struct Faulty(Rc<Cell<Fault>>);

#[derive(Clone, Copy, Default)]
pub(super) enum Fault {
    #[default]
    None,
    Refuses,
    Hangs,
}

impl Faulty {
    pub(super) fn set(&self, fault: Fault) {
        self.0.set(fault);
    }

    async fn check(&self) -> Result<(), anyhow::Error> {
        match self.0.get() {
            Fault::None => Ok(()),
            Fault::Refuses => anyhow::bail!("the session store is down"),
            Fault::Hangs => std::future::pending().await,
        }
    }
}

type State = std::collections::HashMap<String, String>;
type Ttl = actix_web::cookie::time::Duration;

impl SessionStore for Faulty {
    async fn load(&self, key: &SessionKey) -> Result<Option<State>, LoadError> {
        CookieSessionStore::default().load(key).await
    }

    async fn save(&self, state: State, ttl: &Ttl) -> Result<SessionKey, SaveError> {
        self.check().await.map_err(SaveError::Other)?;
        CookieSessionStore::default().save(state, ttl).await
    }

    async fn update(
        &self,
        key: SessionKey,
        state: State,
        ttl: &Ttl,
    ) -> Result<SessionKey, UpdateError> {
        self.check().await.map_err(UpdateError::Other)?;
        CookieSessionStore::default().update(key, state, ttl).await
    }

    async fn update_ttl(&self, key: &SessionKey, ttl: &Ttl) -> Result<(), anyhow::Error> {
        CookieSessionStore::default().update_ttl(key, ttl).await
    }

    async fn delete(&self, key: &SessionKey) -> Result<(), anyhow::Error> {
        self.check().await?;
        CookieSessionStore::default().delete(key).await
    }
}

#[actix_web::test]
async fn a_logout_that_could_not_be_saved_releases_nothing() {
    let (locks, _) = embedded().await;
    let sessions = Faulty::default();
    let app = serve(&locks, sessions.clone()).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/note/a").await.token();
    sessions.set(Fault::Refuses);
    for end in ["/purge", "/clear"] {
        assert_eq!(alice.post(end).await.status, 500);
        assert!(locks.inspect(&key("a")).await.unwrap().is_some(), "{end}");
    }
    sessions.set(Fault::None);
    assert_eq!(alice.put("/note/a", "new").await.token(), token, "the session lives on");
}

#[actix_web::test]
async fn a_first_lock_whose_session_could_not_be_saved_is_given_back() {
    let (locks, _) = embedded().await;
    let sessions = Faulty::default();
    sessions.set(Fault::Refuses);
    let app = serve(&locks, sessions).await;
    assert_eq!(Browser::new(&app).post("/note/a").await.status, 500);
    assert!(locks.inspect(&key("a")).await.unwrap().is_none(), "nobody could ever release it");
}
