use std::{future::Future, slice, time::Duration};

use crate::{
    error::StoreError,
    key::LockKey,
    lock::{Aid, Lock, LockToken, Mode},
    store::{Acquisition, Active, LastEnd, Query, Released, Removal, Store, Taken},
};

/// Shorter calls of the verbs of a store, for tests.
pub trait Shorthand: Store {
    /// [`Store::renew`] with the ttl that each lock has. Nothing may be late. Returns the number of documents.
    fn renew_all(
        &self,
        collection: &str,
        aids: &[Aid],
    ) -> impl Future<Output = Result<u64, StoreError>> + Send {
        async move {
            let active: Vec<_> = aids.iter().map(Active::whole).collect();
            let renewed = self.renew(collection, &active, Duration::ZERO).await?;
            assert!(renewed.late.is_empty(), "{renewed:?}");
            Ok(renewed.documents)
        }
    }

    /// [`Removal::Release`].
    fn release(
        &self,
        key: &LockKey,
        aid: &Aid,
        token: LockToken,
        mode: Mode,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send {
        let it = Acquisition { key: key.clone(), aid: aid.clone(), token, mode };
        async move { self.remove_lock(Removal::Release(&it)).await }
    }

    /// [`Removal::Retract`].
    fn retract(
        &self,
        key: &LockKey,
        aid: &Aid,
        tokens: &[LockToken],
        mode: Mode,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send {
        let attempt = |&token| Acquisition { key: key.clone(), aid: aid.clone(), token, mode };
        let attempts: Vec<_> = tokens.iter().map(attempt).collect();
        async move { self.remove_lock(Removal::Retract(&attempts)).await }
    }

    /// [`Removal::Break`].
    fn break_lock(
        &self,
        seen: &Lock,
        taken: &Taken,
    ) -> impl Future<Output = Result<Released, StoreError>> + Send {
        async move { self.remove_lock(Removal::Break { seen, taken }).await }
    }

    /// [`Query::Each`], of one document.
    fn inspect(
        &self,
        key: &LockKey,
        aid: Option<&Aid>,
    ) -> impl Future<Output = Result<Option<Lock>, StoreError>> + Send {
        async move {
            let each = Query::Each { keys: slice::from_ref(key), aid };
            Ok(self.locks(key.collection(), each, 1).await?.pop())
        }
    }

    /// [`Query::Of`], or [`Query::All`].
    fn list(
        &self,
        collection: &str,
        aids: Option<&[Aid]>,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<Lock>, StoreError>> + Send {
        self.locks(collection, aids.map_or(Query::All, Query::Of), limit)
    }

    /// [`Query::On`].
    fn locks_on(
        &self,
        collection: &str,
        keys: &[LockKey],
    ) -> impl Future<Output = Result<Vec<Lock>, StoreError>> + Send {
        self.locks(collection, Query::On(keys), keys.len())
    }

    /// [`Store::last_ends`] of one session.
    fn last_end(
        &self,
        aid: &Aid,
    ) -> impl Future<Output = Result<Option<LastEnd>, StoreError>> + Send {
        async move { Ok(self.last_ends(slice::from_ref(aid)).await?.pop().flatten()) }
    }

    /// How long ago the session ended permanently, by [`Store::last_ends`].
    fn session_ended(
        &self,
        aid: &Aid,
    ) -> impl Future<Output = Result<Option<Duration>, StoreError>> + Send {
        async move {
            let end = self.last_end(aid).await?;
            Ok(end.filter(|end| end.for_good).map(|end| end.ago))
        }
    }
}

impl<S: Store> Shorthand for S {}
