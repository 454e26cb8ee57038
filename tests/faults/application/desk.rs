//! One session at work: each verb of the crate, recorded before and after.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, Holder, Lock, LockKey, Released, TryAcquire,
    store::{Acquisition, Saved, StoredDocument},
};
use mongodb::bson::doc;
use mongodb::options::WriteConcern;

use super::{Counter, Server};
use crate::history::{Event, moment, name};

/// The place of work of one session.
#[derive(Debug)]
pub(crate) struct Desk {
    server: Server,
    aid: Aid,
    /// There may be a lock that nobody knows of.
    uncertain: AtomicBool,
}

impl Desk {
    pub(crate) fn new(server: &Server) -> Self {
        Self { server: server.clone(), aid: Aid::new(), uncertain: AtomicBool::new(false) }
    }

    /// The same session on another server.
    pub(crate) fn moved_to(&self, server: &Server) -> Self {
        Self { aid: self.aid.clone(), ..Self::new(server) }
    }

    /// Whether all outcomes so far are known.
    pub(crate) fn is_certain(&self) -> bool {
        !self.uncertain.load(Ordering::Relaxed)
    }

    fn unknown(&self, why: impl Display) -> Event {
        self.uncertain.store(true, Ordering::Relaxed);
        Event::Unknown { why: why.to_string() }
    }

    pub(crate) async fn acquire(&self, key: &LockKey) -> Option<Lock> {
        let history = &self.server.history;
        let op = history.next_op();
        history.write(op, Event::AcquireBegan { key: name(key) });
        let answer = self.server.locks.lock_for_session(key, &self.aid, &Holder::new("desk")).await;
        match answer {
            Ok(TryAcquire::Granted(lock) | TryAcquire::AlreadyMine(lock)) => {
                history.write(op, Event::granted(&lock));
                Some(lock)
            }
            Ok(TryAcquire::Held(_) | TryAcquire::Lost(_)) => {
                history.write(op, Event::Held);
                None
            }
            Err(e) => {
                history.write(op, self.unknown(e));
                None
            }
        }
    }

    /// Renews the only lock of the session.
    pub(crate) async fn renew(&self, lock: &Lock) {
        let history = &self.server.history;
        let (op, asked) = (history.next_op(), Instant::now());
        match self.server.locks.renew(&self.aid).await {
            Ok(1) => {
                let until = moment(asked + self.server.settings.ttl);
                history.write(op, Event::Renewed { token: token(lock), until });
            }
            Ok(_) => history.write(op, Event::Lost { token: token(lock) }),
            Err(e) => history.write(op, self.unknown(e)),
        }
    }

    /// The stored document. `None` if the server does not answer.
    pub(crate) async fn load(&self, key: &LockKey) -> Option<Counter> {
        self.server
            .store
            .load(key, Deadline::NONE)
            .await
            .ok()?
            .map(|it| it.decode().expect("a counter"))
    }

    /// Saves the loaded counter plus one. Returns whether the save is known to have succeeded.
    pub(crate) async fn save(&self, lock: &Lock, loaded: Counter) -> bool {
        let (op, counted) = self.begin_save(lock, loaded);
        let document = StoredDocument::encode(self.server.store.format(), &counted).unwrap();
        let until = Instant::now() + self.server.settings.deadline;
        let (store, token) = (&self.server.store, lock.token.expect("our own"));
        let saved = store
            .save(
                &Acquisition::exclusive(&lock.key, &self.aid, token),
                &document.into(),
                Deadline::at(until),
            )
            .await;
        let is_saved = matches!(saved, Ok(Saved::Saved));
        self.server.history.write(
            op,
            match saved {
                Ok(Saved::Saved) => Event::Saved,
                Ok(_) => Event::NotSaved,
                Err(e) => self.unknown(e),
            },
        );
        is_saved
    }

    /// The same without the crate's guard, as a broken application would do it.
    pub(crate) async fn save_unguarded(&self, lock: &Lock, loaded: Counter) {
        let (op, counted) = self.begin_save(lock, loaded);
        let documents = self.server.store.database().collection::<Counter>(lock.key.collection());
        let saved = documents
            .replace_one(doc! { "_id": &counted.id }, &counted)
            .write_concern(WriteConcern::majority())
            .await;
        self.server.history.write(
            op,
            match saved {
                Ok(_) => Event::Saved,
                Err(e) => self.unknown(e),
            },
        );
    }

    fn begin_save(&self, lock: &Lock, mut counted: Counter) -> (u64, Counter) {
        let history = &self.server.history;
        let (op, key, token) = (history.next_op(), name(&lock.key), token(lock));
        let id = format!("{:.8}-{op}", token);
        counted.n += 1;
        counted.by.push(id.clone());
        history.write(op, Event::SaveBegan { key, token, id, value: counted.n });
        (op, counted)
    }

    pub(crate) async fn release(&self, lock: &Lock) {
        let history = &self.server.history;
        let op = history.next_op();
        history.write(op, Event::ReleaseBegan { token: token(lock) });
        history.write(
            op,
            match self.server.locks.release(lock).await {
                Ok(Released::Released) => Event::Released,
                Ok(_) => Event::AlreadyGone,
                Err(e) => self.unknown(e),
            },
        );
    }

    /// Ends the session, and with it its only lock.
    pub(crate) async fn log_out(self, lock: &Lock) {
        let history = &self.server.history;
        let op = history.next_op();
        history.write(op, Event::ReleaseBegan { token: token(lock) });
        history.write(
            op,
            match self.server.locks.end_session(&self.aid).await {
                // It does not say how many of them were live.
                Ok(_) => Event::AlreadyGone,
                Err(e) => self.unknown(e),
            },
        );
    }
}

fn token(lock: &Lock) -> String {
    lock.token.expect("our own").to_string()
}
