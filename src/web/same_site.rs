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
        header::{AUTHORIZATION, COOKIE, FORWARDED, HOST, HeaderMap, ORIGIN, X_FORWARDED_PROTO},
        uri::Scheme,
    },
};

use crate::web::problem::Problem;

/// Proves that a request does not come from a page of another site.
///
/// It uses `Sec-Fetch-Site`, and `Origin`, which must be that of the request. Browsers set both, and pages cannot. A
/// request with neither header does not come from a browser.
#[derive(Debug)]
pub(super) struct SameSite;

/// What the application has said about its clients.
#[derive(Debug, Clone, Default)]
pub(super) struct Rules {
    /// Other origins whose pages may change locks.
    trusted: Vec<String>,
    /// The headers in which clients send their tokens, besides `Authorization`.
    pub(super) token_headers: Vec<String>,
    /// True if browsers reach the application by https only.
    pub(super) is_https: bool,
    /// True if the wrap checks the requests of all routes.
    pub(super) is_for_all_routes: bool,
}

/// The origin that a request is sent to (its target origin), according to the reverse proxy.
struct TargetOrigin<'a> {
    /// `None` if nobody has told.
    scheme: Option<&'a str>,
    /// The host with its port, of the proxy and of the request itself.
    hosts: [&'a str; 2],
}

impl FromRequest for SameSite {
    type Error = Problem;
    type Future = Ready<Result<Self, Problem>>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        let rules = req.extensions().get::<Rc<Rules>>().cloned().unwrap_or_default();
        ready(rules.check(req, req.app_config().secure()).map(|()| Self))
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

    /// # Errors
    /// 403 if a page of another site has made a browser send this request. `is_secure`: the connection of the request
    /// has TLS.
    pub(super) fn check(&self, req: &HttpRequest, is_secure: bool) -> Result<(), Problem> {
        let (headers, connection) = (req.headers(), req.connection_info());
        let forwarded = headers.get_all(FORWARDED).filter_map(|it| it.to_str().ok());
        let has_proto = |it: &str| it.to_ascii_lowercase().contains("proto=");
        let is_told =
            headers.contains_key(X_FORWARDED_PROTO) || forwarded.into_iter().any(has_proto);
        let scheme = match connection.scheme() {
            scheme if is_told && !self.is_https => Some(scheme),
            _ if is_secure || self.is_https => Some("https"),
            _ => None,
        };
        let own_host = headers.get(HOST).and_then(|host| host.to_str().ok());
        let hosts = [connection.host(), own_host.unwrap_or(connection.host())];
        if self.has_own_token(headers)
            || !self.is_cross_site(headers, &TargetOrigin { scheme, hosts })
        {
            return Ok(());
        }
        Err(Problem::new(StatusCode::FORBIDDEN, "cross_site").detail(
            "only pages of this site may change locks: name others with `trusted_origin`, and let a reverse proxy \
             forward the header `Host`, and the scheme of the browser in `X-Forwarded-Proto`, or call `https_only`",
        ))
    }

    fn is_cross_site(&self, headers: &HeaderMap, target: &TargetOrigin<'_>) -> bool {
        let origin = headers.get(ORIGIN).map(|origin| origin.to_str().unwrap_or_default());
        if origin.is_some_and(|origin| self.trusted.iter().any(|it| it == origin)) {
            return false;
        }
        let site = headers.get("sec-fetch-site").map(|site| site.as_bytes());
        match (origin, site) {
            // Not `same-site`: other hosts, ports and schemes of a site may belong to somebody else.
            (_, Some(site)) if site != b"same-origin" && site != b"none" => true,
            // `null` names no page: a sandboxed or redirected one, or a form or beacon of a page that sends
            // no referrer.
            (Some("null"), None) => true,
            (None | Some("null"), _) => false,
            (Some(origin), _) => !target.equals(origin, site == Some(b"same-origin")),
        }
    }
}

impl TargetOrigin<'_> {
    /// True if this is the target origin. `is_told`: the browser says that it is, so a proxy may have another
    /// opinion about the scheme.
    ///
    /// Where nobody has told the scheme of the request, a page of `https` is not refused: a proxy may have removed TLS.
    fn equals(&self, origin: &str, is_told: bool) -> bool {
        let origin = origin.parse::<Uri>().ok();
        let parts = origin.as_ref().and_then(|it| it.scheme().zip(it.authority()));
        let Some((scheme, authority)) = parts else { return false };
        // A browser leaves the default port out, but some proxies add it.
        let port = match scheme {
            it if *it == Scheme::HTTPS => ":443",
            it if *it == Scheme::HTTP => ":80",
            _ => return false,
        };
        let is_scheme =
            is_told || self.scheme.is_none_or(|it| it.eq_ignore_ascii_case(scheme.as_str()));
        let is_host = |host: &&str| host.strip_suffix(port).unwrap_or(host) == authority.as_str();
        is_scheme && self.hosts.iter().any(is_host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::{
        http::header::{HeaderName, HeaderValue},
        test::TestRequest,
    };

    fn headers(given: &[(&'static str, &'static str)]) -> HeaderMap {
        (given.iter())
            .map(|(n, v)| (HeaderName::from_static(n), HeaderValue::from_static(v)))
            .collect()
    }

    /// The requests that are refused, of those with these headers and an answer that says so.
    fn wrong(rules: &Rules, is_secure: bool, cases: &[(&[(&'static str, &'static str)], bool)]) {
        for (given, is_cross) in cases {
            let given = [&[("host", "shop.example")], *given].concat();
            let mut request = TestRequest::default();
            for header in &given {
                request = request.insert_header(*header);
            }
            let answer = rules.check(&request.to_http_request(), is_secure);
            assert_eq!(answer.is_err(), *is_cross, "{given:?}");
        }
    }

    #[test]
    fn a_page_of_another_site_is_told_by_its_headers() {
        let rules = Rules { trusted: vec!["https://spa.example".into()], ..Rules::default() };
        wrong(
            &rules,
            false,
            &[
                (&[], false),
                (&[("sec-fetch-site", "same-origin")], false),
                (&[("sec-fetch-site", "none")], false),
                (&[("sec-fetch-site", "same-site")], true),
                (&[("sec-fetch-site", "cross-site")], true),
                (&[("sec-fetch-site", "")], true),
                (&[("origin", "https://shop.example")], false),
                (&[("origin", "https://spa.example")], false),
                (&[("origin", "http://spa.example")], true),
                (&[("origin", "https://spa.example:8443")], true),
                (&[("origin", "https://evil.example")], true),
                (&[("origin", "https://shop.example.evil.example")], true),
                (&[("origin", "https://shop.example:8443")], true),
                (&[("origin", "ftp://shop.example")], true),
                (&[("origin", "moz-extension://shop.example")], true),
                (&[("origin", "null")], true),
                (&[("origin", "")], true),
                (&[("sec-fetch-site", "same-origin"), ("origin", "https://shop.example")], false),
                (&[("sec-fetch-site", "same-origin"), ("origin", "http://evil.example")], true),
                (&[("sec-fetch-site", "same-site"), ("origin", "https://wiki.shop.example")], true),
                (&[("sec-fetch-site", "same-site"), ("origin", "https://shop.example")], true),
                (&[("sec-fetch-site", "cross-site"), ("origin", "https://shop.example")], true),
                (&[("sec-fetch-site", "cross-site"), ("origin", "https://spa.example")], false),
                (&[("sec-fetch-site", "same-origin"), ("origin", "null")], false),
                (&[("sec-fetch-site", "same-site"), ("origin", "null")], true),
                (&[("sec-fetch-site", "cross-site"), ("origin", "null")], true),
            ],
        );
    }

    #[test]
    fn a_page_of_http_is_another_site_than_https_on_the_same_host() {
        let http: &[_] = &[("origin", "http://shop.example")];
        let https: &[_] = &[("origin", "https://shop.example")];
        // Nobody tells the scheme: the site may be plain, or a proxy may have removed TLS.
        wrong(&Rules::default(), false, &[(http, false), (https, false)]);
        wrong(&Rules::default(), true, &[(http, true), (https, false)]);
        let only_https = Rules { is_https: true, ..Rules::default() };
        wrong(&only_https, false, &[(http, true), (https, false)]);
        let behind = |proxy: (&'static str, &'static str), is_http: bool| {
            let with = |page: &[_]| [&[proxy], page].concat();
            let vouched = |page: &[_]| [&[proxy, ("sec-fetch-site", "same-origin")], page].concat();
            wrong(
                &Rules::default(),
                false,
                &[
                    (&with(http), !is_http),
                    (&with(https), is_http),
                    // The browser knows better than a proxy behind another proxy.
                    (&vouched(http), false),
                    (&vouched(https), false),
                ],
            );
        };
        behind(("x-forwarded-proto", "https"), false);
        behind(("x-forwarded-proto", "https, http"), false);
        behind(("x-forwarded-proto", "HTTPS"), false);
        behind(("x-forwarded-proto", "http"), true);
        behind(("forwarded", "for=10.0.0.1;proto=https"), false);
        behind(("forwarded", "for=10.0.0.1; Proto=\"http\""), true);
        let silent = ("forwarded", "for=10.0.0.1");
        wrong(
            &Rules::default(),
            false,
            &[(&[silent, https[0]], false), (&[silent, http[0]], false)],
        );
    }

    #[test]
    fn the_port_of_the_page_is_that_of_the_request() {
        for (host, proto, origin, is_cross) in [
            ("shop.example:443", "https", "https://shop.example", false),
            ("shop.example:80", "http", "http://shop.example", false),
            ("shop.example:8443", "https", "https://shop.example:8443", false),
            ("shop.example", "https", "https://shop.example:8443", true),
            ("shop.example:443", "http", "http://shop.example", true),
            ("shop.example:80", "https", "http://shop.example", true),
        ] {
            for named in ["host", "x-forwarded-host"] {
                let headers: &[_] = &[
                    ("host", host),
                    (named, host),
                    ("x-forwarded-proto", proto),
                    ("origin", origin),
                ];
                wrong(&Rules::default(), false, &[(headers, is_cross)]);
            }
        }
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
