//! What stands in a URL.

use std::borrow::Cow;

use actix_web::HttpRequest;
use percent_encoding::percent_decode_str;

/// The path parameter of this name, decoded; `None` if the route has none.
///
/// The router leaves `%2F` and `%25` as they are, so that they are not taken for delimiters. An id
/// may contain them. What is no UTF-8, the router has replaced already.
pub(super) fn path_param<'a>(req: &'a HttpRequest, name: &str) -> Option<Cow<'a, str>> {
    Some(percent_decode_str(req.match_info().get(name)?).decode_utf8_lossy())
}
