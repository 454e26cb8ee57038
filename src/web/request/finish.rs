//! How a request ends: its new locks are kept or given back, when its session is saved.

use std::time::Duration;

use actix_session::SessionStatus;
use actix_web::{
    HttpResponse,
    http::{StatusCode, header::SET_COOKIE},
};
use tokio::time::timeout_at;

use crate::{
    clock,
    ended::EndReason,
    error::{LockError, Result},
    lock::Aid,
    web::{
        current_request::misconfigured,
        request::{AID, LONGEST_LOOK, RequestLocks, Whose, aid_in, headers},
    },
};

/// From this time on, the answer of a request may reach the browser after a logout that began later.
const SLOW: Duration = Duration::from_millis(250);

/// How long a request that the browser has sent before a logout may take to arrive.
const UNDER_WAY: Duration = Duration::from_secs(5);

/// What happened to a session while one of its requests was served. The answer carries the cookie of the session only if
/// nothing did: otherwise the answer would undo a logout, or the login of the next person in this browser. A cookie store
/// would log the ended session in again, and another store would send a dead key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    /// Nobody knows, and this request has changed nothing itself.
    Perhaps,
    Ended,
}

impl RequestLocks {
    /// Called when the handler has answered. Changes to the session are still saved after this call.
    pub(in crate::web) fn before_session_is_saved(&self, response: &HttpResponse<impl Sized>) {
        let status = response.status();
        self.cookies.set(Some(response.headers().get_all(SET_COOKIE).count()));
        let whose = self.whose.borrow();
        let Whose::Session(session) = &*whose else { return };
        let (before, mut now) = (self.aid_before.borrow().clone(), aid_in(session));
        if before.is_some() && now.is_none() && session.status() == SessionStatus::Unchanged {
            // No handler has purged or cleared the session, or removed the aid: another middleware has emptied it.
            misconfigured(
                "there is another session middleware inside `locks.session(…)`: remove its \
                 `.wrap(SessionMiddleware::new(store, key))`",
            );
            return;
        }
        let is_another_person = *self.person_before.borrow() != self.who();
        if now.is_some() && is_another_person {
            // The locks go with their person. Otherwise the next person in this browser would hold them, and so would an
            // older cookie.
            session.remove(AID);
            now = None;
        }
        let vanished = before.is_some() && now != before;
        // A lock that a handler has taken after a login belongs to the new aid already.
        let has_new_aid = *self.aid.borrow() != before;
        if vanished {
            self.ending.replace(before);
            // If a handler turns the session into another one (`clear`, then a login), the new session
            // gets a new aid.
            self.aid.borrow_mut().take_if(|_| !has_new_aid);
        }
        let needs_aid = !self.fresh.borrow().is_empty() || self.has_asked.get();
        let keeps_locks = (!vanished || has_new_aid) && self.keeps(status) && needs_aid;
        // A login saves the session anyway, so it begins the aid: if the aid is there before the first lock, two
        // simultaneous first requests cannot lose it. No other request of a session without an aid does so: its aid
        // could replace the aid of a simultaneous first lock.
        let begins = match session.status() {
            SessionStatus::Renewed => true,
            SessionStatus::Changed => self.began_empty.get() || vanished || is_another_person,
            _ => false,
        };
        let is_saved_anyway = begins && !session.entries().is_empty() && now.is_none();
        if keeps_locks || is_saved_anyway {
            let aid = self.aid.borrow_mut().get_or_insert_with(Aid::new).clone();
            if now.as_ref() != Some(&aid) {
                // Cannot fail for a string, and does nothing in a purged session.
                let _ = session.insert(AID, &aid);
                self.manager.core.sessions.session_begins(&aid);
            }
        }
        if keeps_locks && aid_in(session) != *self.aid.borrow() {
            // The session was purged by the same request that began it.
            self.fresh.take();
            self.held.take();
        }
        let is_changed =
            [SessionStatus::Changed, SessionStatus::Renewed].contains(&session.status());
        self.is_to_be_saved.set(is_changed && !session.entries().is_empty());
        self.goes_on.set(!vanished && !session.entries().is_empty());
    }

    /// Called when the session middleware has finished.
    ///
    /// # Errors
    /// If the request was granted a lock, but its session was not saved: no session has the aid of that lock.
    pub(in crate::web) async fn session_saved(
        &self,
        response: &mut HttpResponse<impl Sized>,
    ) -> Result<()> {
        // A session store does not send the cookie of a session that another request has ended meanwhile.
        let cookies = response.headers().get_all(SET_COOKIE).count();
        let of_others = self.cookies.get().filter(|of_others| cookies > *of_others);
        let mut is_saved = !self.is_to_be_saved.get() || of_others.is_some();
        if let Some(of_others) = of_others {
            let meanwhile = self.meanwhile(response.status()).await;
            is_saved = meanwhile != Meanwhile::Ended;
            if meanwhile != Meanwhile::Nothing {
                let headers = response.headers_mut();
                let all: Vec<_> = headers.remove(SET_COOKIE).collect();
                all.into_iter().take(of_others).for_each(|it| headers.append(SET_COOKIE, it));
            }
        }
        if !is_saved && !self.fresh.borrow().is_empty() {
            self.session_not_saved().await;
            return Err(LockError::SessionEnded { ago: Duration::ZERO });
        }
        let ending = self.ending.take();
        if let Some(aid) = ending {
            let mut fresh = self.fresh.take();
            fresh.retain(|fresh| fresh.lock.aid != aid);
            self.held.replace(fresh.iter().map(|fresh| fresh.token).collect());
            self.fresh.replace(fresh);
            if let Err(e) = self.manager.core.sessions.end(&aid, EndReason::LoggedOut).await {
                log::error!(
                    target: "actix_doclock::session",
                    "the locks of the ended session {aid:?} were not released, and remain until they \
                     expire: {e}",
                );
            }
        }
        let fresh = self.fresh.take();
        if self.keeps(response.status()) {
            for fresh in fresh {
                fresh.confirm();
            }
        } else {
            let given_back = |token| fresh.iter().any(|fresh| fresh.token == token);
            self.held.borrow_mut().retain(|token| !given_back(*token));
            // The handler may have taken longer than its last operation might. In an outage, the answer does not wait for a
            // second deadline.
            if !fresh.is_empty() && response.status() != StatusCode::SERVICE_UNAVAILABLE {
                self.begin();
            }
            drop(fresh);
        }
        self.settle().await;
        let version = self.versions.borrow().shown().filter(|_| response.status().is_success());
        let person = self.name_of_person.get();
        headers::announce(response.headers_mut(), &self.held.borrow(), person, version);
        Ok(())
    }

    /// What other requests have done to the session while this one was served, perhaps at another server.
    async fn meanwhile(&self, answer: StatusCode) -> Meanwhile {
        // Only a change that this request has made itself needs the cookie.
        let unknown =
            if self.is_to_be_saved.get() { Meanwhile::Nothing } else { Meanwhile::Perhaps };
        if self.is_for_everybody.get() {
            return unknown;
        }
        if self.has_ended.get() {
            return Meanwhile::Ended;
        }
        if !self.goes_on.get() || clock::since(self.began) < SLOW {
            return Meanwhile::Nothing;
        }
        let aid = self.aid_before.borrow().clone();
        let end = match &aid {
            // In an outage, the answer does not wait for a second deadline.
            _ if answer.is_server_error() => return Meanwhile::Perhaps,
            Some(aid) => {
                let until = clock::now() + LONGEST_LOOK.min(self.manager.core.verbs.deadline);
                self.manager.core.sessions.refuse_ended(aid, None, until).await
            }
            None => Ok(()),
        };
        // A request that began later belongs to a session that came back, or logs in again.
        let during = clock::since(self.began) + UNDER_WAY;
        match end {
            Err(LockError::SessionEnded { ago }) if ago <= during => Meanwhile::Ended,
            Ok(()) | Err(LockError::SessionEnded { .. }) if !self.has_waited.get() => {
                Meanwhile::Nothing
            }
            _ => unknown,
        }
    }

    /// Called if the request has failed, or its session could not be saved: no lock is kept, and no session
    /// has ended.
    pub(in crate::web) async fn session_not_saved(&self) {
        self.ending.take();
        self.fresh.take();
        self.settle().await;
    }

    fn keeps(&self, status: StatusCode) -> bool {
        self.settings.keep_fresh_on_error || !(status.is_client_error() || status.is_server_error())
    }

    /// Waits until the operations of this request are complete, so that its answer is final: "400" means
    /// "not locked". Does not wait longer than the operations may take.
    async fn settle(&self) {
        if let Some(until) = self.until.get() {
            self.scope.close();
            let _ = timeout_at(until.into(), self.scope.wait()).await;
        }
    }
}
