//! Refuses requests that a page of another web site makes a browser send.

use std::future::{Ready, ready};

use actix_web::{
    FromRequest, HttpRequest,
    dev::Payload,
    http::{
        StatusCode, Uri,
        header::{HOST, HeaderMap, ORIGIN},
    },
};

use crate::web::{problem::Problem, request::RequestLocks};

/// Proves that a request does not come from a page of another site.
///
/// It uses `Sec-Fetch-Site`, which browsers set and pages cannot set; in older browsers it uses `Origin`,
/// which must be the host of the request. A request with neither header does not come from a browser.
#[derive(Debug)]
pub(super) struct SameSite;

impl FromRequest for SameSite {
    type Error = Problem;
    type Future = Ready<Result<Self, Problem>>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        // A browser adds no token of its own to a request, as it adds cookies.
        let is_client = RequestLocks::of(req).is_ok_and(|locks| locks.is_client());
        ready(if !is_client && is_cross_site(req.headers(), req.connection_info().host()) {
            Err(Problem::new(StatusCode::FORBIDDEN, "cross_site")
                .detail("requests from pages of other sites may not change locks"))
        } else {
            Ok(Self)
        })
    }
}

/// `host` is the requested host according to the reverse proxy.
fn is_cross_site(headers: &HeaderMap, host: &str) -> bool {
    if let Some(site) = headers.get("sec-fetch-site") {
        return site == "cross-site";
    }
    let Some(origin) = headers.get(ORIGIN) else { return false };
    let origin = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok());
    let Some(authority) = origin.as_ref().and_then(Uri::authority) else {
        // `null`: a sandboxed or redirected page.
        return true;
    };
    let asked = headers.get(HOST).and_then(|host| host.to_str().ok());
    authority.as_str() != host && Some(authority.as_str()) != asked
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::http::header::{HeaderName, HeaderValue};

    #[test]
    fn a_page_of_another_site_is_told_by_its_headers() {
        let cases: [(&[(&str, &str)], bool); 10] = [
            (&[], false),
            (&[("sec-fetch-site", "same-origin")], false),
            (&[("sec-fetch-site", "none")], false),
            (&[("sec-fetch-site", "same-site")], false),
            (&[("sec-fetch-site", "cross-site")], true),
            (&[("sec-fetch-site", "same-origin"), ("origin", "http://evil.example")], false),
            (&[("origin", "https://shop.example")], false),
            (&[("origin", "https://evil.example")], true),
            (&[("origin", "https://shop.example.evil.example")], true),
            (&[("origin", "null")], true),
        ];
        for (headers, is_cross) in cases {
            let map: HeaderMap = (headers.iter())
                .map(|(n, v)| (HeaderName::from_static(n), HeaderValue::from_static(v)))
                .collect();
            assert_eq!(is_cross_site(&map, "shop.example"), is_cross, "{headers:?}");
        }
    }
}
