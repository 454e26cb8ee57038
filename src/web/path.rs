//! What stands in a URL.

use std::{borrow::Cow, str::Utf8Error};

use actix_web::HttpRequest;
use percent_encoding::percent_decode_str;

/// The path parameter of this name, decoded; `None` if the route has none.
///
/// The router leaves `%2F` and `%25` as they are, so that they are not taken for delimiters. An id
/// may contain them.
pub(super) fn path_param<'a>(
    req: &'a HttpRequest,
    name: &str,
) -> Option<Result<Cow<'a, str>, Utf8Error>> {
    Some(percent_decode_str(req.match_info().get(name)?).decode_utf8())
}
