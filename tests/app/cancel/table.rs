//! The functions, each in a scene, with the condition that must hold after the function was dropped
//! half-way.

#![allow(clippy::async_yields_async, reason = "the futures are dropped half-way, not awaited")]

use std::{future::Future, pin::Pin, rc::Rc, time::SystemTime};

use actix_doclock::{Actor, Answer, Ask, Holder, LockManager, Lockable, MemoryStore, Named, Wait};

use uuid::Uuid;

use super::{
    requests,
    scene::{Paper, Scene},
};
use crate::rig::app::TTL;

#[derive(Debug, Clone, Copy)]
pub(super) enum After {
    Free,
    FreeOnceBegun,
    /// Alice still has her lock.
    Hers,
    HersOrFree,
    /// There is one lock, and it belongs to the session of the request.
    Somebodys,
    SomebodysOrFree,
}

use After::{Free, FreeOnceBegun, Hers, HersOrFree};

pub(super) type Pending = Pin<Box<dyn Future<Output = ()>>>;
type Begun = Pin<Box<dyn Future<Output = Pending>>>;

pub(super) struct Case {
    /// File and function, and in brackets the special circumstances.
    pub(super) name: &'static str,
    pub(super) after: After,
    pub(super) at_least: usize,
    /// Sets the scene, and returns the future that is to be dropped.
    pub(super) begin: fn(Rc<Scene>) -> Begun,
}

/// Functions without a lock, without a store, or for the life of the process.
pub(super) const EXEMPT: &[(&str, &str)] = &[
    ("web/serve.rs::serve", "for the life of the process"),
    ("store/mongo/connect.rs::connect", "before there is a lock"),
    ("store/mongo.rs::topology", "reads"),
    ("store/mongo/schema/requirements.rs::needs", "reads"),
    ("store/mongo/schema/survey.rs::others_records", "reads"),
    ("store/mongo/schema/survey.rs::survey", "reads"),
    ("store/mongo/servers.rs::servers", "reads"),
    ("store/mongo/collection.rs::lock_collections", "reads"),
    ("store/mongo/collection.rs::attach", "reads"),
    ("manager/facade.rs::descriptions", "without a lock; the call goes on"),
    ("store/mongo/transaction.rs::transaction", "needs a real server: see `transactions`"),
    ("store/mongo/transaction.rs::confirm_in", "in a transaction of the caller"),
    ("store/mongo/update.rs::update", "made of a transaction"),
    ("manager/guard.rs::asked", "reads; what next of LockEvents is made of"),
    ("store/watch.rs::next", "reads; what next of LockEvents is made of"),
];

macro_rules! table {
    ($($name:literal => $after:ident, $least:literal, |$s:ident| { $($before:tt)* } $what:block)*) => {
        vec![$(Case {
            name: $name,
            after: $after,
            at_least: $least,
            begin: |$s| Box::pin(async move {
                $($before)*
                Box::pin(async move { let _ = $what; }) as Pending
            }),
        }),*]
    };
}

pub(super) fn cases() -> Vec<Case> {
    let mut all = manager();
    all.extend(jobs());
    all.extend(sessions());
    all.extend(requests::cases());
    all
}

fn manager() -> Vec<Case> {
    table! {
        "manager/facade.rs::register" => Hers, 0, |s| { s.hers().await; } { s.locks.register::<Paper>().await }
        "manager/facade.rs::register_in" => Hers, 0, |s| { s.hers().await; } {
            s.locks.register_in::<Paper>("another_paper").await
        }
        "manager/facade.rs::register_matching" => Hers, 0, |s| { s.hers().await; } {
            s.locks.register_matching::<Paper>("*_paper").await
        }
        "manager/facade.rs::lock_for_session" => Free, 0, |s| {} {
            s.locks.lock_for_session(&s.key, &s.alice, &Holder::new("alice")).await
        }
        "manager/facade.rs::renew" => Hers, 0, |s| { s.hers().await; } { s.locks.renew(&s.alice).await }
        "manager/facade.rs::release" => FreeOnceBegun, 0, |s| { let lock = s.hers().await; } {
            s.locks.release(&lock).await
        }
        "manager/facade.rs::end_session" => FreeOnceBegun, 0, |s| { s.hers().await; } {
            s.locks.end_session(&s.alice).await
        }
        "manager/facade.rs::revoke_session" => FreeOnceBegun, 0, |s| { s.hers().await; } {
            s.locks.revoke_session(&s.alice).await
        }
        "manager/facade.rs::release_all" => FreeOnceBegun, 0, |s| { s.hers().await; } {
            s.locks.release_all(&s.alice).await
        }
        "manager/facade.rs::inspect" => Hers, 0, |s| { s.hers().await; } { s.locks.inspect(&s.key).await }
        "manager/facade.rs::inspect_many" => Hers, 0, |s| { s.hers().await; } {
            s.locks.inspect_many(&[s.key.clone(), s.other.clone()]).await
        }
        "manager/facade.rs::locks_on" => Hers, 0, |s| { s.hers().await; } { s.locks.locks_on(&s.key).await }
        "manager/facade.rs::list" => Hers, 0, |s| { s.hers().await; } { s.locks.list().await }
        "manager/facade.rs::list_of" => Hers, 0, |s| { s.hers().await; } { s.locks.list_of(&s.alice).await }
        "manager.rs::shutdown" => Free, 0, |s| {
            drop(s.locks.acquire(&s.key, Wait::no()).await.unwrap());
        } { s.locks.shutdown().await }
        "manager/health.rs::check_health" => Hers, 0, |s| { s.hers().await; } {
            s.locks.check_health().await
        }
        // A freeze of the lock's own collection would be in the way of the next case.
        "manager/facade.rs::freeze" => Hers, 0, |s| { s.hers().await; } {
            s.locks.freeze(Named::COLLECTION, "", SystemTime::now() + TTL, &Actor::new("root")).await
        }
        "manager/facade.rs::thaw" => Hers, 0, |s| { s.hers().await; } {
            s.locks.thaw(Named::COLLECTION).await
        }
        "manager/facade.rs::break_lock" => FreeOnceBegun, 0, |s| { let lock = s.hers().await; } {
            s.locks.break_lock(&lock, &s.actor(), "").await
        }
        "manager/facade.rs::sweep" => Hers, 0, |s| { s.hers().await; } { s.locks.sweep().await }
        "manager/watch/events.rs::next" => Hers, 1, |s| {
            s.hers().await;
            let mut events = s.locks.events();
        } { while events.next().await.is_some() {} }
        "manager/builder.rs::build" => Free, 0, |s| { drop(s); } {
            LockManager::builder(MemoryStore::new()).build().await
        }
    }
}

fn jobs() -> Vec<Case> {
    table! {
        "manager/guard/job.rs::acquire" => Free, 0, |s| { let job = s.locks.job("it"); } {
            job.acquire(&s.key, Wait::no()).await
        }
        "manager/guard/job.rs::acquire_shared" => Free, 0, |s| { let job = s.locks.job("it"); } {
            job.acquire_shared(&s.key, Wait::no()).await
        }
        "manager/guard/job.rs::acquire_all" => Free, 1, |s| { let job = s.locks.job("it"); } {
            job.acquire_all([s.other.clone(), s.key.clone()], Wait::no()).await
        }
        "manager/guard/job.rs::acquire_each" => Free, 1, |s| { let job = s.locks.job("it"); } {
            job.acquire_each([s.other.clone(), s.key.clone()]).await
        }
        "manager/guard/job.rs::with_lock" => Free, 2, |s| { let job = s.locks.job("it"); } {
            job.with_lock(&s.key, Wait::no(), tokio::task::yield_now()).await
        }
        "manager/guard/job.rs::acquire" => Free, 0, |s| {} { s.locks.acquire(&s.key, s.patience()).await }
        "manager/guard/job.rs::acquire_shared" => Free, 0, |s| {} {
            s.locks.acquire_shared(&s.key, s.patience()).await
        }
        "manager/guard/job.rs::acquire_all" => Free, 1, |s| {} {
            s.locks.acquire_all([s.other.clone(), s.key.clone()], s.patience()).await
        }
        "manager/guard/job.rs::with_lock" => Free, 2, |s| {} {
            s.locks.with_lock(&s.key, s.patience(), tokio::task::yield_now()).await
        }
        "manager/guard/job.rs::acquire (waits)" => Hers, 1, |s| { s.hers().await; } {
            s.locks.acquire(&s.key, s.patience()).await
        }
        "manager/guard/job.rs::acquire_shared (waits)" => Hers, 1, |s| { s.hers().await; } {
            s.locks.acquire_shared(&s.key, s.patience()).await
        }
        "manager/guard/job.rs::acquire (let in by a release)" => FreeOnceBegun, 1, |s| { let lock = s.hers().await; } {
            tokio::join!(s.locks.acquire(&s.key, s.patience()), s.locks.release(&lock))
        }
        "manager/guard.rs::upgrade" => Free, 0, |s| {
            let mut guard = s.locks.acquire_shared(&s.key, Wait::no()).await.unwrap();
        } { guard.upgrade().await }
        "manager/guard/write.rs::load" => Free, 0, |s| {
            let guard = s.locks.acquire(&s.key, Wait::no()).await.unwrap();
        } { guard.load::<Paper>().await }
        "manager/guard/write.rs::update" => Free, 0, |s| {
            let guard = s.locks.acquire(&s.key, Wait::no()).await.unwrap();
        } { guard.update(|_: &mut Paper| ()).await }
        "manager/guard/write.rs::create" => Free, 0, |s| {
            let guard = s.locks.acquire(&s.key, Wait::no()).await.unwrap();
        } { guard.create(&Paper { id: s.key.id().to_string() }).await }
        "manager/guard/write.rs::delete" => Free, 0, |s| {
            let guard = s.locks.acquire(&s.key, Wait::no()).await.unwrap();
        } { guard.delete().await }
        "manager/guard.rs::answer" => Free, 0, |s| {
            let guard = s.locks.acquire(&s.key, Wait::no()).await.unwrap();
            let ask = Ask {
                id: Uuid::new_v4(),
                aid: s.alice.clone(),
                by: Holder::new("alice"),
                message: String::new(),
                at: SystemTime::UNIX_EPOCH,
                answer: None,
            };
        } { guard.answer(&ask, Answer::No(String::new())).await }
        "manager/guard.rs::release" => Free, 0, |s| {
            let guard = s.locks.acquire(&s.key, Wait::no()).await.unwrap();
        } { guard.release().await }
        "manager/guard.rs::lost" => Free, 0, |s| {
            let keys = [s.key.clone(), s.other.clone()];
            let guards = s.locks.acquire_all(keys, Wait::no()).await.unwrap();
        } { guards.lost().await }
        "manager/guard.rs::release" => Free, 0, |s| {
            let keys = [s.key.clone(), s.other.clone()];
            let guards = s.locks.acquire_all(keys, Wait::no()).await.unwrap();
        } { guards.release().await }
    }
}

/// Only for stores that keep sessions; elsewhere sessions end at once.
fn sessions() -> Vec<Case> {
    table! {
        "list_of (MongoSessionStore)" => Hers, 0, |s| { s.hers().await; } {
            match &s.sessions {
                Some(sessions) => drop(sessions.list_of("alice").await),
                None => tokio::task::yield_now().await,
            }
        }
        "revoke (MongoSessionStore)" => HersOrFree, 0, |s| { s.hers().await; } {
            match &s.sessions {
                Some(sessions) => drop(sessions.revoke(s.alice.as_str()).await),
                None => tokio::task::yield_now().await,
            }
        }
        "revoke_all_of (MongoSessionStore)" => Hers, 0, |s| { s.hers().await; } {
            match &s.sessions {
                Some(sessions) => drop(sessions.revoke_all_of("bob").await),
                None => tokio::task::yield_now().await,
            }
        }
        "sweep (MongoSessionStore)" => Hers, 0, |s| { s.hers().await; } {
            match &s.sessions {
                Some(sessions) => drop(sessions.sweep().await),
                None => tokio::task::yield_now().await,
            }
        }
    }
}
