//! The documents that a request means.

use std::{any::type_name, borrow::Cow};

use actix_web::HttpRequest;
use percent_encoding::percent_decode_str;

use crate::{
    error::{LockError, Result},
    key::{InvalidKey, LockKey, Lockable},
    web::{
        current_request::{hidden, misconfigured},
        request::RequestLocks,
    },
};

impl RequestLocks {
    /// The document of this type whose id is in the path.
    ///
    /// # Errors
    /// If the route or the collection is not set up correctly, or as [`key_of`](Self::key_of).
    pub(in crate::web) fn key_in_path<T: Lockable>(
        &self,
        request: &HttpRequest,
    ) -> Result<LockKey> {
        let param = path_param(request, T::PATH_PARAM).ok_or_else(|| {
            misconfigured(format!(
                "the route `{}` has no parameter `{{{}}}` for the id of `{}`: name a parameter \
                 like this, or set `Lockable::PATH_PARAM`",
                request.match_pattern().unwrap_or_default(),
                T::PATH_PARAM,
                T::COLLECTION,
            ))
        })?;
        let not_an_id = |_| InvalidKey::NotOfType { collection: T::COLLECTION };
        let key = self.key_of::<T>(request, param.parse().map_err(not_an_id)?)?;
        if self.manager.core.collections.is_registered(key.collection()) {
            return Ok(key);
        }
        Err(misconfigured(format!(
            "the collection `{}` is not registered: call `locks.register::<{}>().await?` when the server starts",
            key.collection(),
            type_name::<T>(),
        )))
    }

    /// The document of this type with this id, in the collection that the request means.
    ///
    /// # Errors
    /// [`LockError::NotFound`] if the application names no collection for this person, [`LockError::LoginRequired`] if
    /// nobody is logged in.
    pub(in crate::web) fn key_of<T: Lockable>(
        &self,
        request: &HttpRequest,
        id: T::Id,
    ) -> Result<LockKey> {
        let Some(names) = &self.settings.collection_names else {
            return Ok(LockKey::of::<T>(id)?);
        };
        match names(request, T::COLLECTION) {
            Some(name) => Ok(LockKey::new(name, id)?),
            None if self.settings.identify.is_some() && self.person().is_none() => {
                Err(LockError::LoginRequired)
            }
            None => Err(hidden(LockKey::of::<T>(id)?)),
        }
    }

    /// The document of this name, `"collection/id"`, if there may be one.
    pub(in crate::web) fn key_named(&self, name: &str) -> Option<LockKey> {
        let (collection, id) = name.split_once('/')?;
        self.manager.key(collection, id).ok()
    }
}

/// The path parameter of this name, decoded; `None` if the route has none.
///
/// The router leaves `%2F` and `%25` encoded, so that they are not taken for delimiters. An id may
/// contain them. The router has already replaced bytes that are not UTF-8.
pub(in crate::web) fn path_param<'a>(req: &'a HttpRequest, name: &str) -> Option<Cow<'a, str>> {
    Some(percent_decode_str(req.match_info().get(name)?).decode_utf8_lossy())
}
