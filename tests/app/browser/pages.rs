//! `client.js` in pages of other applications.

mod objects;
mod people;
mod requests;
mod streams;

use super::*;
use actix_cors::Cors;
use actix_doclock::{Actor, HeldDoc, LockManager, Lockable, MemoryStore};
use actix_session::{Session, SessionMiddleware, storage::CookieSessionStore};
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::middleware::{Next, from_fn};
use actix_web::{App, HttpResponse, HttpServer, Responder, cookie::Key, web};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::json;
use std::io::ErrorKind;
use std::process::Command;

/// What the pages below need: `url(n)` of a lock and `doc(n)` of a document, `until(condition)`, the `sent`
/// requests, the URLs of the `streams`, and `answer`, which may replace or delay the answer to a request. However slow
/// the machine is, neither a request nor the database of this browser is given up.
const TOOLS: &str = r"
    if (!window.sent) {
        const [realFetch, RealSource, realTimeout] = [fetch, EventSource, setTimeout];
        AbortSignal.timeout = () => new AbortController().signal;
        window.setTimeout = (act, ms) => realTimeout(act, /database does not answer/.test(act) ? 100_000 : ms);
        Object.assign(window, { sent: [], streams: [], answer: (request, real) => real() });
        window.fetch = async (url, init) => {
            const request = { url: String(url.url ?? url), headers: new Headers(init?.headers), body: init?.body };
            sent.push(request);
            return answer(request, () => realFetch(url, init));
        };
        window.EventSource = class extends RealSource {
            constructor(url) { super(url); streams.push(decodeURIComponent(url)); }
        };
        const ids = (await (await realFetch('/api/workitem')).json()).map(it => it.id);
        window.key = n => 'workitem/' + ids[n];
        window.url = n => '/locks/' + key(n);
        window.doc = n => '/api/' + key(n);
        window.until = async condition => { while (!condition()) await new Promise(done => setTimeout(done, 20)); };
        window.count = (list, part) => list.filter(it => it.includes(part)).length;
        window.problem = (status, body) =>
            new Response(JSON.stringify(body), { status, headers: { 'Content-Type': 'application/problem+json' } });
    }
    const { DocLock } = await import('/locks/client.js');
    const untilFree = async n => {
        while ((await DocLock.look(url(n))).state !== 'free') await new Promise(done => setTimeout(done, 50));
    };
    const untilLive = async () => {
        let isLive = false;
        DocLock.events('/locks', event => { isLive ||= event.isLive; });
        await until(() => isLive);
    };
";

/// The result of an asynchronous function with this body.
pub(super) async fn script<T: DeserializeOwned>(page: &Page, body: &str) -> T {
    let told: Value = page
        .run_async(&format!(
            "const done = arguments[0]; \
             (async () => {{ {TOOLS} {body} }})().then(done, error => done('failed: ' + error))"
        ))
        .await;
    serde_json::from_value(told.clone()).unwrap_or_else(|error| panic!("{error}: {told}"))
}

/// An empty page of a person who has logged in.
pub(super) async fn empty_page(stage: &Stage) -> Page {
    let page = stage.person("alice").await;
    page.go(&stage.editor.url("/page.css")).await;
    page
}

#[actix_web::test]
async fn input_and_touch_are_activity_and_a_clock_that_is_set_back_is_not() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Vec<i64> = script(
            &page,
            "const real = Date.now, hour = 3_600_000; \
             const idle = async shift => { \
                 Date.now = () => real() + shift; \
                 await DocLock.look(url(0)); \
                 return Number(sent.at(-1).headers.get('Doclock-Idle-Ms')); \
             }; \
             const idles = [await idle(-hour), await idle(hour)]; \
             document.body.dispatchEvent(new InputEvent('input', { bubbles: true })); \
             idles.push(await idle(hour), await idle(2 * hour)); \
             DocLock.touch(); \
             idles.push(await idle(2 * hour)); \
             Date.now = real; \
             return idles",
        )
        .await;
        let hours: Vec<_> = told.iter().map(|idle| idle.div_euclid(3_600_000)).collect();
        assert_eq!(hours, [0, 1, 0, 1, 0], "{told:?}");
    })
    .await;
}

/// Otherwise a person who works in one tab would lose the lock of another.
#[actix_web::test]
async fn a_person_who_is_active_in_one_tab_is_active_in_all() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let first = empty_page(stage).await;
        let idle =
            "await DocLock.look(url(0)); return Number(sent.at(-1).headers.get('Doclock-Idle-Ms'))";
        script::<()>(
            &first,
            "window.heard = false; \
             new BroadcastChannel('doclock-touch').onmessage = () => { heard = true; }; \
             Date.now = (real => () => real() + 3_600_000)(Date.now)",
        )
        .await;
        let before: i64 = script(&first, idle).await;
        let second = first.beside(&stage.editor.url("/page.css")).await;
        script::<()>(&second, "DocLock.touch()").await;
        script::<()>(&first, "await until(() => heard)").await;
        let after: i64 = script(&first, idle).await;
        assert!(before >= 3_600_000, "{before}");
        assert!(after < 3_600_000, "{after}");
    })
    .await;
}

/// An API on another port, with CORS, as the guide shows it.
async fn api_for(page_origin: &str) -> String {
    let store = MemoryStore::new();
    for id in ["a", "b", "c", "d"] {
        store.put(id.to_owned(), &Note { id: id.to_owned() }).unwrap();
    }
    let locks = LockManager::builder(store).build().await.unwrap();
    locks.register::<Note>().await.unwrap();
    async fn login(session: Session, name: Option<web::Path<String>>) -> impl Responder {
        session.insert("name", name.map_or("alice".to_owned(), web::Path::into_inner)).unwrap();
        HttpResponse::NoContent()
    }
    async fn save(note: HeldDoc<Note>) -> impl Responder {
        HttpResponse::Ok().body(note.id.clone())
    }
    /// A page that locks the first of these documents, and has a frame for each of the others; the last frame is in
    /// another one.
    async fn frames(ids: web::Path<String>) -> impl Responder {
        let (own, inner) = match &*ids.into_inner() {
            "a" => ("a", "<iframe src=/frames/b></iframe><iframe src=/frames/c></iframe>"),
            "c" => ("c", "<iframe src=/frames/d></iframe>"),
            "b" => ("b", ""),
            _ => ("d", ""),
        };
        web::Html::new(format!(
            "<title>Frames</title><link rel=icon href=data:,><script type=module>\
             import {{ DocLock }} from '/locks/client.js'; \
             window.lock = DocLock.open('/locks/note/{own}')</script>{inner}"
        ))
    }
    let origin = page_origin.to_owned();
    let server = HttpServer::new(move || {
        let session =
            SessionMiddleware::builder(CookieSessionStore::default(), Key::from(&[7; 64]));
        // Cookies do not tell ports apart.
        let session = session.cookie_name("api".to_owned()).cookie_secure(false).build();
        let session = locks
            .session(session)
            .identify(|it: &Session| Some(Actor::new(it.get::<String>("name").ok()??)));
        let cors = Cors::default()
            .allowed_origin(&origin)
            .allow_any_method()
            .allowed_headers([
                "content-type",
                "lock-token",
                "doclock-tab",
                "doclock-page",
                "doclock-idle-ms",
                "if-match",
            ])
            .expose_headers(["lock-token", "doclock-person", "date", "etag"])
            .supports_credentials()
            .max_age(3600);
        App::new()
            .wrap(session.trusted_origin(&origin))
            .wrap(cors)
            .wrap(from_fn(to_the_login))
            .route("/login", web::post().to(login))
            .route("/login/{name}", web::post().to(login))
            .route("/note/{id}", web::put().to(save))
            .route("/frames/{ids}", web::get().to(frames))
            .service(web::scope("/locks").configure(actix_doclock::lock_api))
    });
    let server = server.workers(1).bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}", server.addrs()[0]);
    actix_web::rt::spawn(server.run());
    url
}

/// As a proxy that has logged a person out: by the cookie `login`, to the page of the login in it. (But not the stream: the
/// browser complains of a stream that is redirected to another origin.)
async fn to_the_login(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, actix_web::Error> {
    match request.cookie("login") {
        Some(page)
            if request.path().starts_with("/locks/") && !request.path().ends_with("/events") =>
        {
            let found = HttpResponse::Found().insert_header(("Location", page.value())).finish();
            Ok(request.into_response(found))
        }
        _ => Ok(next.call(request).await?.map_into_boxed_body()),
    }
}

/// The origin of an empty page.
fn empty_origin() -> String {
    // Its icon is a data URL, so that the browser asks for no other.
    async fn html() -> impl Responder {
        web::Html::new("<title>SPA</title><link rel=icon href=data:,>")
    }
    let page = || App::new().route("/", web::get().to(html));
    let server = HttpServer::new(page).workers(1).bind(("127.0.0.1", 0)).unwrap();
    let origin = format!("http://{}", server.addrs()[0]);
    actix_web::rt::spawn(server.run());
    origin
}

#[derive(Serialize, Deserialize)]
struct Note {
    #[serde(rename = "_id")]
    id: String,
}

impl Lockable for Note {
    type Id = String;
    const COLLECTION: &'static str = "note";
}

/// Runs a script in a page of another origin than that of its lock API, `api`.
async fn script_elsewhere(stage: &Stage, body: &str) -> Value {
    let origin = empty_origin();
    let api = api_for(&origin).await;
    let page = stage.visitor().await;
    page.go(&origin).await;
    let script = format!(
        "const done = arguments[0], api = '{api}', \
             until = async condition => {{ while (!condition()) await new Promise(done => setTimeout(done, 20)); }}, \
             post = path => fetch(api + path, {{ method: 'POST', credentials: 'include' }}); \
         AbortSignal.timeout = () => new AbortController().signal; \
         (async () => {{ const {{ DocLock }} = await import(api + '/locks/client.js'); {body} }})() \
             .then(done, error => done('failed: ' + error))"
    );
    page.run_async(&script).await
}

#[actix_web::test]
async fn the_lock_api_may_have_another_origin_than_the_page() {
    embedded(&[], async |stage| {
        let told = script_elsewhere(
            stage,
            "await post('/login'); \
             const heard = []; \
             DocLock.events(api + '/locks/', it => heard.push(it.type + ' ' + it.key + ' ' + it.isLive)); \
             await until(() => heard.some(it => it.includes('true'))); \
             const lock = DocLock.open(api + '/locks/note/a'); \
             await until(() => lock.token); \
             await until(() => heard.some(it => it.startsWith('acquired note/a'))); \
             const saved = await lock.fetch(api + '/note/a', { method: 'PUT', credentials: 'include' }); \
             await lock.check(); \
             const states = [saved.status, lock.state, lock.key]; \
             await lock.close(); \
             return [...states, (await DocLock.look(api + '/locks/note/a')).state]",
        )
        .await;
        assert_eq!(told, json!([200, "mine", "note/a", "free"]));
    })
    .await;
}

#[actix_web::test]
async fn a_snapshot_never_changes_and_is_another_one_after_each_change() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const lock = DocLock.open(url(0)), { subscribe, getSnapshot } = lock; \
             let changes = 0; \
             const first = getSnapshot(), isSame = first === getSnapshot(), end = subscribe(() => changes++); \
             await until(() => getSnapshot().state === 'mine'); \
             const second = getSnapshot(), heard = changes; \
             end(); \
             await lock.release(); \
             return [isSame, first.state, Object.isFrozen(first), second.token.length, second.state, heard > 0, heard === changes, \
                 getSnapshot().state]",
        )
        .await;
        assert_eq!(told, json!([true, "unknown", true, 36, "mine", true, true, "free"]));
    })
    .await;
}

/// In Node, if it is installed.
#[test]
fn the_modules_can_be_imported_where_there_is_no_page() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/web/");
    for (name, exports) in [
        ("client.js", "DocLock,Fields,Typed,channelOf,clearedKept,isPost,own,place,same,versionIn"),
        ("elements.js", "texts"),
        ("keep.js", "clear,keep,settle"),
    ] {
        let code = "import(process.argv[1]).then(it => console.log(Object.keys(it).join()))";
        match Command::new("node").args(["-e", code, &format!("{folder}{name}")]).output() {
            Ok(output) => {
                let shown = String::from_utf8_lossy(&output.stderr);
                assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), exports, "{shown}");
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
        }
    }
}

/// In Node with jsdom, if both can be had: typed text, in many small forms and in forms at random; and a lock whose server,
/// network or browser behaves oddly.
#[test]
fn the_modules_for_pages_pass_their_tests_in_node() {
    let root = env!("CARGO_MANIFEST_DIR");
    let dom = Command::new(format!("{root}/scripts/tool")).arg("dom").output().unwrap();
    if !dom.status.success() {
        println!("not run: {}", String::from_utf8_lossy(&dom.stderr));
        return;
    }
    let dom = String::from_utf8(dom.stdout).unwrap();
    let run = Command::new("node")
        .args(["--test", "--test-force-exit", "--test-reporter=spec", "tests/web/"])
        .env("DOCLOCK_DOM", dom.trim())
        .current_dir(root)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("fail 0"), "{said}");
}

/// By npm, if it is installed.
#[test]
fn the_npm_package_has_the_files_that_the_server_serves_and_the_version_of_the_crate() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/web");
    match Command::new("npm").args(["pack", "--dry-run", "--json"]).current_dir(folder).output() {
        Ok(output) => {
            let packed: Value = serde_json::from_slice(&output.stdout).unwrap();
            let names: Vec<_> = packed[0]["files"]
                .as_array()
                .unwrap()
                .iter()
                .map(|it| it["path"].as_str().unwrap())
                .collect();
            assert_eq!(
                names,
                [
                    "README.md",
                    "client.d.ts",
                    "client.js",
                    "elements.d.ts",
                    "elements.js",
                    "keep.js",
                    "package.json"
                ]
            );
            assert_eq!(packed[0]["version"], env!("CARGO_PKG_VERSION"));
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
    }
}

#[actix_web::test]
async fn a_reload_of_a_page_with_frames_keeps_the_locks_of_all_of_them() {
    embedded(&[], async |stage| {
        let api = api_for("http://127.0.0.1:1").await;
        let page = stage.visitor().await;
        page.sends_no_beacons().await;
        page.go(&format!("{api}/frames/a")).await;
        page.run_async::<()>(
            "const done = arguments[0]; fetch('/login', { method: 'POST' }).then(() => done())",
        )
        .await;
        let all = "[window, frames[0], frames[1], frames[1].frames[0]].map(it => it.lock?.token)";
        let mut before = Vec::new();
        for _ in 0..3 {
            page.reload().await;
            page.until(&format!("{all}.every(token => token)")).await;
            let tokens: Vec<String> = page.run(&format!("return {all}")).await;
            assert!(before.is_empty() || tokens == before, "{tokens:?} were {before:?}");
            before = tokens;
        }
    })
    .await;
}

#[actix_web::test]
async fn a_page_without_a_network_gives_its_lock_up_when_it_expires_and_says_so() {
    embedded(&["--ttl-secs", "4"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "window.setInterval = () => 0;   /* nothing else looks at the time, and its two clocks agree */ \
             const began = Date.now() - performance.now(); \
             Date.now = () => began + performance.now(); \
             const { DocLock: Own } = await import('/locks/client.js?own'), told = []; \
             let shown = null, lostAt = null;   /* from the grant on there is no network, and the page hears so before the expiry */ \
             answer = (_, real) => { if (shown) throw new TypeError('no network'); return real(); }; \
             const onchange = it => { \
                 told.push(it.state); \
                 if (!it.token || shown) return; \
                 shown = it.expiresAt; \
                 it.check(); \
             }; \
             const onlost = ({ kind }) => { told.push(kind); lostAt = Date.now(); }; \
             const lock = Own.open(url(0), { onlost, onchange }); \
             await until(() => lock.lost); \
             return [lostAt < shown, told.includes('expired'), told.at(-1), lock.offline, lock.token]",
        )
        .await;
        assert_eq!(told, json!([false, true, "unknown", true, null]));
    })
    .await;
}
