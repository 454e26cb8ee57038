//! A request that an attacker could make up, built from arbitrary bytes. Also the body of a fuzz
//! target.

use actix_web::{
    http::{
        Method, Uri,
        header::{HeaderName, HeaderValue},
    },
    test::TestRequest,
};

/// All headers that the application parses.
const HEADERS: &[&str] = &[
    "lock-token",
    "doclock-tab",
    "doclock-page",
    "doclock-idle-ms",
    "cookie",
    "content-type",
    "origin",
    "sec-fetch-site",
    "sec-purpose",
    "last-event-id",
    "accept",
];

/// Paths of the lock API, and of the application's documents.
const PLACES: &[&str] = &[
    "/locks/note/{}",
    "/locks/number/{}",
    "/locks/short/{}",
    "/locks/uuid/{}",
    "/locks/{}/a",
    "/locks/{}",
    "/locks/heartbeat?{}",
    "/locks/note/{}/release",
    "/locks/note/{}/break",
    "/locks/heartbeat",
    "/locks",
    "/note/{}",
    "/note/a",
    "/locks/note/a",
    "/locks/note/a/break",
    "/locks/note/a/release",
];

#[derive(Debug, Clone)]
pub(crate) struct Hostile {
    pub(crate) method: u8,
    pub(crate) place: u8,
    /// The id in the path. The second number of each pair decides whether its byte is percent-encoded.
    pub(crate) id: Vec<(u8, u8)>,
    pub(crate) headers: Vec<(u8, Vec<u8>)>,
    pub(crate) body: Vec<u8>,
}

impl Hostile {
    /// `None` if an HTTP parser would not let the request through.
    pub(crate) fn request(&self) -> Option<TestRequest> {
        let methods = [Method::GET, Method::POST, Method::PUT, Method::DELETE];
        let method = methods[usize::from(self.method) % methods.len()].clone();
        let place = PLACES[usize::from(self.place) % PLACES.len()];
        let uri = place.replace("{}", &self.path_segment());
        uri.parse::<Uri>().ok()?;
        let mut request = TestRequest::default().method(method).uri(&uri);
        for (name, value) in &self.headers {
            let name = HeaderName::from_static(HEADERS[usize::from(*name) % HEADERS.len()]);
            request = request.append_header((name, HeaderValue::from_bytes(value).ok()?));
        }
        Some(request.set_payload(self.body.clone()))
    }

    fn path_segment(&self) -> String {
        let mut segment = String::new();
        for (byte, how) in &self.id {
            match how % 4 {
                // Includes characters that are not allowed unencoded, and half an encoding.
                0 if byte.is_ascii_graphic() => segment.push(char::from(*byte)),
                1 => segment.push_str(&format!("%{byte:02x}")),
                2 => segment.push_str(&format!("%25{byte:02X}")),
                _ => segment.push_str(&format!("%{byte:02X}")),
            }
        }
        segment
    }

    /// Builds a request from a fuzzer's bytes.
    #[allow(dead_code, reason = "for the fuzz targets")]
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (&[method, place, id, headers], mut rest) = bytes.split_first_chunk()?;
        let mut take = |n: usize| {
            let (taken, left) = rest.split_at(n.min(rest.len()));
            rest = left;
            taken.to_vec()
        };
        let id = take(usize::from(id)).chunks(2).map(|it| (it[0], it.len() as u8)).collect();
        let headers = (0..headers % 4)
            .map(|_| {
                let head = take(2);
                let [name, length] = head[..] else { return (0, Vec::new()) };
                (name, take(usize::from(length)))
            })
            .collect();
        let body = take(usize::MAX);
        Some(Self { method, place, id, headers, body })
    }
}
