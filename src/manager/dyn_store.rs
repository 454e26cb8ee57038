//! The store of a manager, whatever its type is.

use std::{future::Future, pin::Pin, time::Duration};

use uuid::Uuid;

use crate::{
    ended::EndReason,
    freeze::{Freeze, NewFreeze, Scope},
    key::LockKey,
    lock::{Aid, Answer, Ask, Lock},
    store::*,
    takeover::Takeover,
};

/// The return type of each verb of [`DynStore`].
pub(super) type Boxed<'a, T> = Pin<Box<dyn Future<Output = StoreResult<T>> + Send + 'a>>;

/// Declares [`DynStore`], with a boxed twin of each verb in the table below, which repeats the signatures.
macro_rules! erase {
    ($($trait:ident { $(fn $verb:ident($($arg:ident: $type:ty),*) -> $answer:ty;)* })*) => {
        /// [`Store`], object safe. Implemented for every store.
        pub(super) trait DynStore: Send + Sync + 'static {
            fn can(&self, ability: Ability) -> bool;
            fn format(&self) -> Format;
            $($(fn $verb<'a>(&'a self, $($arg: $type,)* until: Deadline) -> Boxed<'a, $answer>;)*)*
        }

        impl<S: Store> DynStore for S {
            fn can(&self, ability: Ability) -> bool {
                Locks::can(self, ability)
            }
            fn format(&self) -> Format {
                Documents::format(self)
            }
            $($(fn $verb<'a>(&'a self, $($arg: $type,)* until: Deadline) -> Boxed<'a, $answer> {
                Box::pin($trait::$verb(self, $($arg,)* until))
            })*)*
        }
    };
}

erase! {
    Locks {
        fn prepare(collection: &'a str, rules: &'a Rules) -> ();
        fn try_acquire(key: &'a LockKey, claim: &'a Claim) -> TryAcquire;
        fn renew(collection: &'a str, active: &'a [Active], ttl: Duration) -> Renewed;
        fn remove_lock(removal: Removal<'a>) -> Released;
        fn locks(collection: &'a str, query: Query<'a>, limit: usize) -> Vec<Lock>;
        fn hand_over(from: &'a Acquisition, claim: &'a Claim) -> HandedOver;
        fn confirm(key: &'a LockKey, aid: &'a Aid, load: bool) -> Option<Confirmed>;
        fn release_all(collection: &'a str, aid: &'a Aid) -> Vec<LockKey>;
        fn expire_in(held: &'a Acquisition, page: Option<PageId>, grace: Duration) -> Released;
        fn ask(key: &'a LockKey, ask: &'a Ask, again: bool) -> Asked;
        fn answer(held: &'a Acquisition, ask: Uuid, answer: &'a Answer) -> Answered;
        fn withdraw(key: &'a LockKey, aid: &'a Aid, user: Option<&'a str>) -> ();
        fn set_place(key: &'a LockKey, waiters: &'a Waiters) -> Option<Ticket>;
        fn watch(collection: &'a str) -> Option<Watch>;
        fn collections(like: &'a Pattern, limit: usize) -> Vec<String>;
        fn status(collections: &'a [&'a str]) -> StoreStatus;
    }
    Documents {
        fn load(key: &'a LockKey) -> Option<StoredDocument>;
        fn exists(key: &'a LockKey) -> bool;
        fn save(held: &'a Acquisition, edit: &'a Edit) -> Saved;
    }
    Sessions {
        fn end_session(
            aid: &'a Aid,
            reason: EndReason,
            collections: &'a [&'a str],
            worker: Uuid
        ) -> Ended;
        fn end_page(page: &'a Aid) -> ();
        fn last_ends(aids: &'a [Aid]) -> Vec<Option<LastEnd>>;
        fn has_expired(held: &'a Acquisition) -> bool;
        fn sweep(collections: &'a [&'a str], worker: Uuid, limit: usize) -> Swept;
        fn put_news(takeover: &'a Takeover, lease: Duration) -> ();
        fn take_news(what: Outbox<'a>, worker: Uuid, lease: Duration, limit: usize) -> Vec<News>;
        fn settle_news(news: &'a [NewsId], worker: Uuid, settled: Settled) -> ();
    }
    Servers {
        fn set_freeze(scope: &'a Scope, freeze: Option<&'a NewFreeze>) -> Vec<Freeze>;
        fn freezes() -> Frozen;
        fn obey_freeze(id: Uuid, server: Uuid) -> ();
        fn note_server(id: Uuid, note: Option<&'a ServerNote>) -> Fleet;
    }
}
