//! `Store` as a trait object, so that the manager and the extractors need no type parameter for it.

use std::{
    future::Future,
    pin::Pin,
    time::{Duration, Instant},
};

use uuid::Uuid;

use crate::{
    ended::{EndReason, SessionEnded},
    error::StoreError,
    freeze::{Freeze, NewFreeze, Scope},
    key::LockKey,
    lock::{Aid, Lock, PageId},
    server::ServerNote,
    store::{
        Acquisition, Active, Claim, Confirmed, Edit, Fleet, Format, HandedOver, LastEnd, Pattern,
        Query, Released, Removal, Renewed, Rules, Saved, Store, StoreStatus, StoredDocument, Swept,
        Ticket, TryAcquire, Waiters, Watch,
    },
    taken::{LockTaken, Settled},
};

/// The return type of each verb of [`DynStore`].
pub(crate) type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// Declares the boxed twin of each verb, so that each trait spells out a verb only once.
macro_rules! erase {
    ($(fn $verb:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*) => {
        /// [`Store`], object safe. Implemented for every store.
        pub(crate) trait DynStore: Send + Sync + 'static {
            fn format(&self) -> Format;
            $(fn $verb<'a>(&'a self, $($arg: $type),*) -> Answer<'a, $answer>;)*
        }

        impl<S: Store> DynStore for S {
            fn format(&self) -> Format {
                Store::format(self)
            }
            $(fn $verb<'a>(&'a self, $($arg: $type),*) -> Answer<'a, $answer> {
                Box::pin(Store::$verb(self, $($arg),*))
            })*
        }
    };
}

erase! {
    fn prepare(collection: &'a str, rules: &'a Rules) -> ();
    fn try_acquire(key: &'a LockKey, claim: &'a Claim) -> TryAcquire;
    fn renew(collection: &'a str, active: &'a [Active], ttl: Duration) -> Renewed;
    fn remove_lock(removal: Removal<'a>) -> Released;
    fn hand_over(from: &'a Acquisition, claim: &'a Claim) -> HandedOver;
    fn end_session(
        aid: &'a Aid,
        reason: EndReason,
        collections: &'a [&'a str],
        worker: Uuid
    ) -> Vec<LockKey>;
    fn last_ends(aids: &'a [Aid]) -> Vec<Option<LastEnd>>;
    fn overdue(collections: &'a [&'a str], limit: usize) -> Vec<Aid>;
    fn sweep(collections: &'a [&'a str], worker: Uuid, limit: usize) -> Swept;
    fn locks(collection: &'a str, query: Query<'a>, limit: usize) -> Vec<Lock>;
    fn load(key: &'a LockKey) -> Option<StoredDocument>;
    fn save(held: &'a Acquisition, edit: &'a Edit, until: Instant) -> Saved;
    fn status(collections: &'a [&'a str]) -> StoreStatus;
    fn exists(key: &'a LockKey) -> bool;
    fn confirm(key: &'a LockKey, aid: &'a Aid, load: bool) -> Option<Confirmed>;
    fn release_all(collection: &'a str, aid: &'a Aid) -> Vec<LockKey>;
    fn set_place(key: &'a LockKey, waiters: &'a Waiters) -> Option<Ticket>;
    fn expire_in(held: &'a Acquisition, page: Option<PageId>, grace: Duration) -> Released;
    fn allow_announcement(aid: &'a Aid, worker: Uuid) -> ();
    fn take_announcements(worker: Uuid, lease: Duration, limit: usize) -> Vec<SessionEnded>;
    fn announced(worker: Uuid, ended: &'a [SessionEnded]) -> ();
    fn begin_taking(taking: &'a LockTaken, lease: Duration) -> ();
    fn settle_taking(event: Uuid, worker: Uuid, settled: Settled) -> ();
    fn takings(
        collections: &'a [&'a str],
        worker: Uuid,
        lease: Duration,
        limit: usize
    ) -> Vec<LockTaken>;
    fn set_freeze(scope: &'a Scope, freeze: Option<&'a NewFreeze>) -> Vec<Freeze>;
    fn freezes() -> Vec<Freeze>;
    fn collections(like: &'a Pattern, limit: usize) -> Vec<String>;
    fn obey_freeze(id: Uuid, server: Uuid) -> ();
    fn note_server(id: Uuid, note: Option<&'a ServerNote>) -> Fleet;
    fn watch(collection: &'a str) -> Option<Watch>;
}
