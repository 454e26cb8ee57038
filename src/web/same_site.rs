//! Refuses requests that a page of another web site makes a browser send.

use std::{
    future::{Ready, ready},
    rc::Rc,
};

use actix_web::{
    FromRequest, HttpMessage, HttpRequest,
    dev::Payload,
    http::{
        StatusCode, Uri,
        header::{AUTHORIZATION, COOKIE, HOST, HeaderMap, ORIGIN},
    },
};

use crate::web::problem::Problem;

/// Proves that a request does not come from a page of another site.
///
/// It uses `Origin`, which must be the host of the request, or `Sec-Fetch-Site` if there is no `Origin`.
/// Browsers set both, and pages cannot. A request with neither header does not come from a browser.
#[derive(Debug)]
pub(super) struct SameSite;

/// What the application has said about its clients.
#[derive(Debug, Clone, Default)]
pub(super) struct Rules {
    /// Other origins whose pages may change locks.
    trusted: Vec<String>,
    /// The headers in which clients send their tokens, besides `Authorization`.
    pub(super) token_headers: Vec<String>,
}

impl FromRequest for SameSite {
    type Error = Problem;
    type Future = Ready<Result<Self, Problem>>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        let rules = req.extensions().get::<Rc<Rules>>().cloned().unwrap_or_default();
        let (headers, host) = (req.headers(), req.connection_info());
        ready(if rules.has_own_token(headers) || !rules.is_cross_site(headers, host.host()) {
            Ok(Self)
        } else {
            Err(Problem::new(StatusCode::FORBIDDEN, "cross_site").detail(
                "only pages of this site may change locks: name others with `trusted_origin`, and \
                     let a reverse proxy forward the header `Host`",
            ))
        })
    }
}

impl Rules {
    /// # Panics
    /// If no browser would send this origin.
    pub(super) fn trust(&mut self, origin: &str) {
        let is_origin = origin.parse::<Uri>().is_ok_and(|it| {
            let (scheme, host) = (it.scheme_str(), it.authority());
            scheme.zip(host).is_some_and(|(scheme, host)| origin == format!("{scheme}://{host}"))
        });
        assert!(
            is_origin && origin == origin.to_ascii_lowercase(),
            "trusted_origin: write {origin:?} as browsers do, such as `https://spa.example`",
        );
        self.trusted.push(origin.to_owned());
    }

    /// True if the client itself has put a token into the request. To a request of any page, a browser adds
    /// cookies and the password of Basic authentication, but none of these headers.
    fn has_own_token(&self, headers: &HeaderMap) -> bool {
        let bearer = (headers.get(AUTHORIZATION))
            .and_then(|value| value.as_bytes().split_at_checked(7))
            .is_some_and(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "));
        let has_token = || self.token_headers.iter().any(|name| headers.contains_key(name));
        !headers.contains_key(COOKIE) && (bearer || has_token())
    }

    /// `host` is the requested host according to the reverse proxy.
    fn is_cross_site(&self, headers: &HeaderMap, host: &str) -> bool {
        match headers.get(ORIGIN).map(|origin| origin.to_str().unwrap_or_default()) {
            // `null` names no page: a sandboxed or redirected one, or a form or beacon of a page that sends
            // no referrer.
            None | Some("null") => match headers.get("sec-fetch-site") {
                // Not `same-site`: other hosts and ports of a site may belong to somebody else.
                Some(site) => site != "same-origin" && site != "none",
                None => headers.contains_key(ORIGIN),
            },
            Some(origin) if self.trusted.iter().any(|it| it == origin) => false,
            Some(origin) => {
                let origin = origin.parse::<Uri>().ok();
                let Some((scheme, authority)) =
                    origin.as_ref().and_then(|it| it.scheme_str().zip(it.authority()))
                else {
                    return true;
                };
                // A browser leaves the default port out, but some proxies add it.
                let port = match scheme {
                    "https" => ":443",
                    "http" => ":80",
                    _ => "",
                };
                let asked = headers.get(HOST).and_then(|host| host.to_str().ok());
                let is_named =
                    |asked: &str| asked.strip_suffix(port).unwrap_or(asked) == authority.as_str();
                !is_named(host) && !asked.is_some_and(is_named)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::http::header::{HeaderName, HeaderValue};

    fn headers(given: &[(&'static str, &'static str)]) -> HeaderMap {
        (given.iter())
            .map(|(n, v)| (HeaderName::from_static(n), HeaderValue::from_static(v)))
            .collect()
    }

    #[test]
    fn a_page_of_another_site_is_told_by_its_headers() {
        let rules = Rules { trusted: vec!["https://spa.example".into()], ..Rules::default() };
        let cases: [(&[_], bool); 21] = [
            (&[], false),
            (&[("sec-fetch-site", "same-origin")], false),
            (&[("sec-fetch-site", "none")], false),
            (&[("sec-fetch-site", "same-site")], true),
            (&[("sec-fetch-site", "cross-site")], true),
            (&[("origin", "https://shop.example")], false),
            (&[("origin", "https://spa.example")], false),
            (&[("origin", "http://spa.example")], true),
            (&[("origin", "https://spa.example:8443")], true),
            (&[("origin", "https://evil.example")], true),
            (&[("origin", "https://shop.example.evil.example")], true),
            (&[("origin", "https://shop.example:8443")], true),
            (&[("origin", "null")], true),
            (&[("origin", "")], true),
            (&[("sec-fetch-site", "same-origin"), ("origin", "https://shop.example")], false),
            (&[("sec-fetch-site", "same-origin"), ("origin", "http://evil.example")], true),
            (&[("sec-fetch-site", "same-site"), ("origin", "https://wiki.shop.example")], true),
            (&[("sec-fetch-site", "cross-site"), ("origin", "https://spa.example")], false),
            (&[("sec-fetch-site", "same-origin"), ("origin", "null")], false),
            (&[("sec-fetch-site", "same-site"), ("origin", "null")], true),
            (&[("sec-fetch-site", "cross-site"), ("origin", "null")], true),
        ];
        for (given, is_cross) in cases {
            let told = rules.is_cross_site(&headers(given), "shop.example");
            assert_eq!(told, is_cross, "{given:?}");
        }
        let with_port = |origin, host| rules.is_cross_site(&headers(&[("origin", origin)]), host);
        assert!(!with_port("https://shop.example", "shop.example:443"));
        assert!(!with_port("https://shop.example:8443", "shop.example:8443"));
        assert!(with_port("http://shop.example", "shop.example:443"));
    }

    #[test]
    fn an_origin_that_no_browser_sends_is_refused_at_the_start() {
        Rules::default().trust("http://localhost:5173");
        for wrong in ["spa.example", "https://spa.example/", "https://Spa.example", "null", "*", ""]
        {
            let trusted = std::panic::catch_unwind(|| Rules::default().trust(wrong));
            assert!(trusted.is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_a_token_that_no_browser_adds_proves_a_client() {
        let rules = Rules { token_headers: vec!["X-Api-Key".into()], ..Rules::default() };
        let cases: [(&[_], bool); 10] = [
            (&[], false),
            (&[("authorization", "Bearer abc")], true),
            (&[("authorization", "bEARER abc")], true),
            (&[("authorization", "Basic YTpi")], false),
            (&[("authorization", "Bearerabc")], false),
            (&[("authorization", "Negotiate abc")], false),
            (&[("x-api-key", "abc")], true),
            (&[("x-other-key", "abc")], false),
            (&[("authorization", "Bearer abc"), ("cookie", "jwt=abc")], false),
            (&[("x-api-key", "abc"), ("cookie", "theme=dark")], false),
        ];
        for (given, is_proof) in cases {
            assert_eq!(rules.has_own_token(&headers(given)), is_proof, "{given:?}");
        }
    }
}
