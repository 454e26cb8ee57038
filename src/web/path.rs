//! Decoding parts of a URL.

use std::borrow::Cow;

use actix_web::HttpRequest;
use percent_encoding::percent_decode_str;

/// The path parameter of this name, decoded; `None` if the route has none.
///
/// The router leaves `%2F` and `%25` encoded, so that they are not taken for delimiters. An id may
/// contain them. The router has already replaced bytes that are not UTF-8.
pub(super) fn path_param<'a>(req: &'a HttpRequest, name: &str) -> Option<Cow<'a, str>> {
    Some(percent_decode_str(req.match_info().get(name)?).decode_utf8_lossy())
}
