//! The bodies of calls that a page without JavaScript may make, too: JSON, or an HTML form, which is answered with a
//! redirect.

use actix_web::{
    HttpMessage, HttpRequest, HttpResponse,
    http::{
        Uri,
        header::{HeaderName, LOCATION, REFERER},
    },
    web::{Bytes, Query},
};
use serde::de::DeserializeOwned;

use crate::web::{
    Problem,
    api::{Body, bad_request},
};

/// Says whether a browser navigates, or a script asks.
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

const FORM: &str = "application/x-www-form-urlencoded";

fn header(req: &HttpRequest, name: HeaderName) -> Option<&str> {
    req.headers().get(name)?.to_str().ok()
}

/// True if the body is that of an HTML form. A program may send JSON under the type of a form, as `curl` does.
fn is_form(req: &HttpRequest, body: &Bytes) -> bool {
    req.content_type().eq_ignore_ascii_case(FORM) && !body.trim_ascii_start().starts_with(b"{")
}

/// The body of a call, and whether it came as a form: the answer depends on that.
pub(super) struct CallBody<T> {
    pub(super) said: T,
    is_form: bool,
}

/// # Errors
/// If the body is neither, or has a member that the call does not know.
pub(super) fn read<T: Default + DeserializeOwned>(
    req: &HttpRequest,
    body: Body,
) -> Result<CallBody<T>, Problem> {
    let is_form = body.as_ref().is_ok_and(|body| is_form(req, body));
    let said = match body {
        Ok(body) if is_form => {
            let text = str::from_utf8(&body).map_err(bad_request)?;
            Query::<T>::from_query(text).map_err(bad_request)?.into_inner()
        }
        body => super::read(body)?,
    };
    Ok(CallBody { said, is_form })
}

impl<T> CallBody<T> {
    /// 204; for a form 303 to the path `to`, or else back to the page with the form, if that is one of this site. (The
    /// script of a page that sends the body of a form would follow a redirect.)
    ///
    /// # Errors
    /// If `to` may lead to another site. Call this before anything is done.
    pub(super) fn done(
        &self,
        req: &HttpRequest,
        to: Option<&str>,
    ) -> Result<HttpResponse, Problem> {
        let place = match to {
            Some(path) if is_path(path) => Some(path.to_owned()),
            Some(_) => return Err(bad_request("`to` must be a path of this site, as in /items/7")),
            None => header(req, REFERER).and_then(|from| {
                let from: Uri = from.parse().ok()?;
                let is_here = from.authority()?.as_str() == req.connection_info().host();
                Some(from.path_and_query()?.to_string()).filter(|path| is_here && is_path(path))
            }),
        };
        let is_page = header(req, SEC_FETCH_MODE).is_none_or(|mode| mode == "navigate");
        Ok(match place.filter(|_| self.is_form && is_page) {
            Some(place) => HttpResponse::SeeOther().insert_header((LOCATION, place)).finish(),
            None => HttpResponse::NoContent().finish(),
        })
    }
}

/// True if a browser stays on this site. It takes `//` and `/\` for the beginning of a host, and leaves out tabs and line
/// breaks.
fn is_path(text: &str) -> bool {
    let is_local = text.starts_with('/') && !text[1..].starts_with(['/', '\\']);
    is_local && !text.contains(char::is_control)
}
