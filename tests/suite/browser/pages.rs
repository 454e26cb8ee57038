//! `client.js` in pages of other applications.

use std::io::ErrorKind;
use std::process::Command;

use actix_cors::Cors;
use actix_doclock::{Actor, HeldDoc, LockManager, Lockable, MemoryStore};
use actix_session::{Session, SessionMiddleware, storage::CookieSessionStore};
use actix_web::{App, HttpResponse, HttpServer, Responder, cookie::Key, web};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::json;

use super::*;

/// What the pages below need: `url(n)` of a lock and `doc(n)` of a document, `until(condition)`, the `sent`
/// requests, the URLs of the `streams`, and `answer`, which may replace or delay the answer to a request.
const TOOLS: &str = r"
    if (!window.sent) {
        const [realFetch, RealSource] = [fetch, EventSource];
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
async fn closing_one_of_two_objects_for_a_document_releases_nothing() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const one = window.one = DocLock.open(url(0)); \
             await until(() => one.token); \
             let told = 0; \
             const other = DocLock.open(url(0), { wait: true, onheld: () => told++ }); \
             const third = DocLock.open(url(0), { acquire: false }); \
             await until(() => told); \
             const states = [other.state, third.state, other.token === one.token]; \
             await other.close(); \
             await other.close(); \
             await third.close(); \
             await one.check(); \
             return [...states, told, one.state, (await DocLock.look(url(0))).state]",
        )
        .await;
        assert_eq!(told, json!(["mine", "mine", true, 1, "mine", "mine"]));
        assert_eq!(stage.lock().await["state"], "held");
        script::<()>(&page, "await one.close()").await;
        assert_eq!(stage.lock().await["state"], "free");
    })
    .await;
}

/// As React does it in its strict mode, and as a person does who goes back and forth.
#[actix_web::test]
async fn a_lock_that_is_opened_closed_and_opened_again_is_held() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Vec<String> = script(
            &page,
            "const told = [], pause = ms => new Promise(done => setTimeout(done, ms)); \
             answer = async (request, real) => { const late = await real(); await pause(30); return late; }; \
             for (let round = 0; round < 12; round++) { \
                 const options = { wait: round % 2 === 1, onlost: () => told.push('lost in round ' + round) }; \
                 const first = DocLock.open(url(round % 3), options); \
                 await pause(5 * round); \
                 first.close(); \
                 if (round % 4 > 1) await pause(3); \
                 const second = DocLock.open(url(round % 3), options); \
                 await until(() => second.state === 'mine'); \
                 await pause(100); \
                 await second.check(); \
                 await until(() => second.state === 'mine');   /* of the first one, until its release began */ \
                 await second.close(); \
                 if ((await DocLock.look(url(round % 3))).state !== 'free') told.push('left in round ' + round); \
             } \
             return told",
        )
        .await;
        assert_eq!(told, [""; 0]);
    })
    .await;
}

#[actix_web::test]
async fn a_document_that_is_opened_during_its_last_save_is_held() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const first = DocLock.open(url(0)); \
             await until(() => first.token); \
             const init = { method: 'PUT', headers: { 'Content-Type': 'application/json' }, body: '{\"title\":\"t\",\"body\":\"b\"}' }; \
             const saved = first.fetch(doc(0) + '?release=true', init, { releases: true }); \
             const second = DocLock.open(url(0), { wait: true }); \
             const { status } = await saved; \
             await first.close(); \
             await until(() => second.token); \
             await second.check(); \
             return [status, second.state]",
        )
        .await;
        assert_eq!(told, json!([200, "mine"]));
    })
    .await;
}

/// Otherwise the lock would live as long as its tab.
#[actix_web::test]
async fn a_lock_that_nobody_needs_is_released_whatever_answers_are_lost() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let left: Vec<String> = script(
            &page,
            "const isRelease = it => it.url.endsWith('/release'), left = []; \
             let failures = 0; \
             const lost = () => { failures++; throw new TypeError('no network'); }; \
             const free = async n => { while ((await DocLock.look(url(n))).state !== 'free') await new Promise(done => setTimeout(done, 50)); }; \
             const one = DocLock.open(url(0)); \
             await until(() => one.token); \
             answer = (it, real) => !isRelease(it) ? real() : failures < 1 ? lost() : failures++ < 2 ? problem(503, { status: 503 }) : real(); \
             await one.close(); \
             await free(0); \
             if (failures < 2) left.push('no release has failed'); \
             answer = async (it, real) => { const late = await real(); return it.url === url(1) && it.body ? lost() : late; }; \
             const other = DocLock.open(url(1)); \
             await until(() => sent.some(it => it.url === url(1) && it.body)); \
             await until(() => !other.busy); \
             if (other.token) left.push('the answer was not lost'); \
             await other.close(); \
             await free(1); \
             return left",
        )
        .await;
        assert_eq!(left, [""; 0]);
    })
    .await;
}

#[actix_web::test]
async fn a_release_that_comes_late_does_not_release_the_next_lock_of_the_page() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const releases = () => count(sent.map(it => it.url), '/release'); \
             const one = DocLock.open(url(0)); \
             await until(() => one.token); \
             answer = (it, real) => { if (it.url.endsWith('/release')) throw new TypeError('no network'); return real(); }; \
             await one.close(); \
             const next = DocLock.open(url(0)); \
             await until(() => next.token); \
             answer = (it, real) => real(); \
             await new Promise(done => setTimeout(done, 2_000)); \
             await next.check(); \
             const told = [releases(), next.state]; \
             await next.close(); \
             return [...told, (await DocLock.look(url(0))).state]",
        )
        .await;
        assert_eq!(told, json!([1, "mine", "free"]));
    })
    .await;
}

#[actix_web::test]
async fn a_request_that_needs_two_locks_names_both_and_loses_only_the_one_that_is_gone() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const [one, two] = [0, 1].map(n => DocLock.open(url(n))); \
             await until(() => one.token && two.token); \
             const init = { method: 'PUT', headers: { 'Content-Type': 'application/json' }, body: '{\"title\":\"t\",\"body\":\"b\"}' }; \
             const save = n => one.fetch(doc(n), init, { locks: [two, one] }); \
             const tokens = () => sent.findLast(it => it.url === doc(1)).headers.get('Lock-Token').split(', ').length; \
             const statuses = [(await save(0)).status, (await save(1)).status, tokens()]; \
             await fetch(url(1) + '/release', { method: 'POST', body: JSON.stringify({ token: two.token }) }); \
             statuses.push((await save(1)).status); \
             await until(() => two.lost); \
             const states = [one.state, Boolean(one.lost)]; \
             await two.acquire(); \
             const both = await Promise.all([one.fetch(doc(0), init, { locks: [two], releases: true }), \
                 two.fetch(doc(1), init, { locks: [one], releases: true }).catch(e => e.message)]); \
             return [...statuses, ...states, both[0].status, one.token, two.token]",
        )
        .await;
        assert_eq!(told, json!([200, 200, 2, 409, "mine", false, 200, null, null]));
    })
    .await;
}

#[actix_web::test]
async fn each_request_names_the_tab_and_keeps_its_own_headers() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const lock = DocLock.open(url(0)); \
             await until(() => lock.token); \
             await lock.check(); \
             await DocLock.look([url(0), url(1)]); \
             const headers = { 'Content-Type': 'application/json' }; \
             const saved = await lock.fetch(new Request(doc(0), { method: 'PUT', headers, body: '{\"title\":\"t\",\"body\":\"by a Request\"}' })); \
             await lock.close(); \
             const tabs = sent.map(it => it.headers.get('Doclock-Tab')); \
             const beat = sent.find(it => it.url.endsWith('/heartbeat')); \
             return [saved.status, sent.length >= 4, tabs.every(tab => tab && tab === tabs[0]), Object.keys(JSON.parse(beat.body).locks).length]",
        )
        .await;
        assert_eq!(told, json!([200, true, true, 1]));
        assert_eq!(stage.text().await, "by a Request");
    })
    .await;
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

/// The next heartbeat would come after more than three minutes.
#[actix_web::test]
async fn a_loss_that_is_announced_before_an_older_answer_comes_is_noticed() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let told: Vec<String> = script(
            &page,
            "const heard = new Set(); \
             let isLive = false, delayed = '', letGo; \
             DocLock.events('/locks', event => { \
                 isLive ||= event.isLive; \
                 if (event.type === 'acquired' && event.state !== 'mine') heard.add(event.key); \
             }); \
             await until(() => isLive); \
             answer = async (request, real) => { \
                 const answer = await real(); \
                 if (request.url === delayed) { delayed = ''; await new Promise(go => { letGo = go; }); } \
                 return answer; \
             }; \
             const takeOver = async n => { \
                 await until(() => letGo); \
                 const headers = { 'Doclock-Tab': '11111111-2222-4333-8444-555555555555' }; \
                 await fetch(url(n), { method: 'POST', headers, body: JSON.stringify({ take_over: true }) }); \
                 await until(() => heard.has(key(n))); \
                 letGo(); \
                 letGo = null; \
             }; \
             const one = DocLock.open(url(0)); \
             await until(() => one.token); \
             await one.check(); \
             delayed = '/locks/heartbeat'; \
             one.check(); \
             await takeOver(0); \
             await until(() => one.lost); \
             delayed = url(1); \
             const other = DocLock.open(url(1)); \
             await takeOver(1); \
             await until(() => other.lost); \
             return [one.state, other.state]",
        )
        .await;
        assert!(!told.contains(&"mine".to_owned()), "{told:?}");
    })
    .await;
}

#[actix_web::test]
async fn a_refusal_and_a_fault_of_the_server_are_told_as_problems_and_not_as_offline() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const told = {}, lock = DocLock.open(url(0)), seen = it => [it.offline, it.problem?.code ?? null, it.problem?.status ?? null]; \
             await until(() => lock.token); \
             answer = () => problem(503, { status: 503, code: 'store_unavailable', detail: 'try again' }); \
             await lock.check(); \
             told.unavailable = seen(lock); \
             answer = () => new Response('<h1>Bad Gateway</h1>', { status: 502 }); \
             await lock.check(); \
             told.proxy = [...seen(lock), Boolean(lock.problem.detail)]; \
             answer = () => { throw new TypeError('no network'); }; \
             await lock.check(); \
             told.network = seen(lock); \
             answer = (request, real) => real(); \
             await lock.check(); \
             told.again = [...seen(lock), lock.state]; \
             answer = (it, real) => it.body && it.url.includes(url(1)) ? problem(429, { status: 429, code: 'too_many_locks', detail: 'close a document' }) : real(); \
             const another = DocLock.open(url(1)); \
             await until(() => another.problem && !another.busy); \
             told.refused = seen(another); \
             told.other = seen(lock); \
             answer = (request, real) => real(); \
             await another.acquire(); \
             told.granted = [...seen(another), another.state]; \
             return told",
        )
        .await;
        assert_eq!(
            told,
            json!({
                "unavailable": [false, "store_unavailable", 503],
                "proxy": [false, null, 502, true],
                "network": [true, null, null],
                "again": [false, null, null, "mine"],
                "refused": [false, "too_many_locks", 429],
                "other": [false, null, null],
                "granted": [false, null, null, "mine"],
            })
        );
    })
    .await;
}

#[actix_web::test]
async fn a_malformed_url_or_key_fails_alone() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const odd = DocLock.open('/locks/workitem/%E0%A4%A', { acquire: false }); \
             await until(() => odd.problem); \
             await odd.close(); \
             const states = await new Promise(done => DocLock.list('/locks', ['workitem/x', key(0)], done)); \
             const { state, problem } = states.get('workitem/x'); \
             let error; \
             try { DocLock.open('/locks/workitem/..'); } catch (it) { error = it.message; } \
             return [state, problem, states.get(key(0)).state, error.includes('is not the URL of a lock')]",
        )
        .await;
        assert_eq!(told, json!(["unknown", "malformed_key", "free", true]));
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
async fn requests_of_other_libraries_prove_the_lock_and_their_refusals_count() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "let stale = null; \
             const lock = DocLock.open(url(0), { version: null, onstale: now => { stale = now.version; } }); \
             const thrown = from => { try { from(); } catch (error) { return error.constructor.name; } }; \
             const early = [thrown(() => lock.headers()), thrown(() => lock.address(doc(0)))]; \
             await until(() => lock.token); \
             const put = (address, headers = {}) => fetch(address, { \
                 method: 'PUT', headers: { ...headers, 'Content-Type': 'application/json' }, body: '{\"title\":\"t\",\"body\":\"b\"}' }); \
             const stored = answer => answer.headers.get('ETag').replaceAll('\"', ''); \
             lock.version = stored(await fetch(doc(0))); \
             const old = lock.address(doc(0) + '?release=false'); \
             const saved = await put(doc(0), lock.headers()), refused = await put(old); \
             lock.saved(saved); \
             const answers = [saved.status, lock.version === stored(saved), refused.status, await lock.refused(refused)]; \
             answers.push(stale === stored(saved), Boolean(lock.token)); \
             await fetch(url(0) + '/release', { method: 'POST', body: JSON.stringify({ token: lock.token }) }); \
             const lost = await put(doc(0), { ...lock.headers(), 'If-Match': '*' }); \
             await lock.refused({ status: lost.status, data: await lost.json() }); \
             return [early, answers, thrown(() => lock.address('https://elsewhere.example/')), lost.status, lock.lost?.kind ?? null]",
        )
        .await;
        let answers = json!([200, true, 412, true, true, true]);
        assert_eq!(told, json!([["Error", "Error"], answers, "Error", 409, "released"]));
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
        ("client.js", "DocLock,Fields,Typed,clearedKept,isPost,own,place,same,versionIn"),
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

/// In Node with jsdom, if both can be had: what a person has typed, by many small forms and by forms at random.
#[test]
fn what_a_person_has_typed_is_known_by_field_and_put_back_by_field() {
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
async fn the_stream_of_a_browser_reports_the_documents_of_all_its_tabs_and_opens_anew_for_each() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let first = empty_page(stage).await;
        let asked: bool = script(
            &first,
            "window.lock = DocLock.open(url(0)); \
             await until(() => streams.length); \
             return streams.at(-1).endsWith('&keys=' + key(0))",
        )
        .await;
        assert!(asked, "only its own document");

        let second = first.beside(&stage.editor.url("/page.css")).await;
        script::<()>(
            &second,
            "window.heard = new Set(); \
             window.lock = DocLock.open(url(1), { acquire: false, onchange: it => heard.add(it.state) }); \
             await until(() => lock.state === 'free')",
        )
        .await;
        script::<()>(
            &first,
            "await until(() => streams.at(-1).includes(key(0)) && streams.at(-1).includes(key(1)))",
        )
        .await;

        let before: usize = script(&first, "return streams.length").await;
        let streams: usize = script(&second, "DocLock.reconnect(); return streams.length").await;
        assert_eq!(streams, 0, "the stream is in the other tab");
        script::<()>(&first, &format!("await until(() => streams.length > {before})")).await;

        let every: bool = script(
            &second,
            "window.events = []; \
             DocLock.events('/locks', event => events.push(event.key)); \
             return !streams.length",
        )
        .await;
        assert!(every);
        script::<()>(&first, "await until(() => !streams.at(-1).includes('keys='))").await;
    })
    .await;
}

#[actix_web::test]
async fn a_reload_of_a_page_with_frames_keeps_the_locks_of_all_of_them() {
    embedded(&[], async |stage| {
        let api = api_for("http://127.0.0.1:1").await;
        let page = stage.visitor().await;
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

/// A half-open connection raises no error. The stream may be in a hidden tab, whose timers are slow.
#[actix_web::test]
async fn a_stream_that_is_silent_or_was_open_during_a_sleep_is_opened_anew_in_whatever_tab_it_is() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let first = empty_page(stage).await;
        first.run::<()>("window.setInterval = () => 0").await;
        script::<()>(
            &first,
            "const Source = EventSource; \
             window.EventSource = class extends Source { \
                 addEventListener(type, listener) { \
                     const number = streams.length; \
                     super.addEventListener(type, it => number > dead && listener(it)); \
                 } \
             }; \
             window.dead = 0; \
             DocLock.events('/locks', () => {}); \
             await until(() => streams.length)",
        )
        .await;
        let opened = async || script::<usize>(&first, "return streams.length").await;
        let silence =
            "performance.now = (real => () => real() + 60_000)(performance.now.bind(performance))";
        let sleep = "Date.now = (real => () => real() + 60_000)(Date.now)";
        for (clock, is_dead) in [(silence, true), (sleep, false)] {
            let before = opened().await;
            let second = first.beside(&stage.editor.url("/page.css")).await;
            script::<()>(
                &second,
                "let isLive = false; \
                 DocLock.events('/locks', event => { isLive ||= event.isLive; }); \
                 await until(() => isLive)",
            )
            .await;
            assert_eq!(opened().await, before);
            if is_dead {
                first.run::<()>(&format!("window.dead = streams.length; {clock}")).await;
            }
            // In one step: chromedriver hides a tab when it turns to another one.
            let said = if is_dead { "silent" } else { "reconnect" };
            script::<()>(
                &second,
                &format!(
                    "let said = ''; \
                     new BroadcastChannel('doclock-feed3:/locks').onmessage = ({{ data }}) => {{ said += data.type; }}; \
                     {clock}; \
                     await until(() => said.includes('{said}'))"
                ),
            )
            .await;
            eventually("a new stream", async || opened().await > before).await;
            assert_eq!(script::<usize>(&second, "return streams.length").await, 0);
            second.close().await;
        }
    })
    .await;
}

/// The heartbeat of the server is heard, so that no stream that lives is opened anew.
#[actix_web::test]
async fn a_stream_without_changes_stays_open() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let beats: usize = script(
            &page,
            "const Source = EventSource, beats = []; \
             window.EventSource = class extends Source { \
                 constructor(url) { super(url); this.addEventListener('beat', it => beats.push(it.data)); } \
             }; \
             DocLock.events('/locks', () => {}); \
             await until(() => beats.length > 1); \
             return streams.length",
        )
        .await;
        assert_eq!(beats, 1);
    })
    .await;
}

/// Without the news, as after a break that the stream has not told yet.
#[actix_web::test]
async fn a_refused_save_tells_its_page_how_the_lock_was_lost() {
    embedded(&[], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const all = []; \
             for (const cause of ['taken_over', 'broken', 'expired', 'released', undefined]) { \
                 const lock = DocLock.open(url(0)); \
                 await until(() => lock.token); \
                 const why = cause === 'taken_over' || cause === 'broken' ? { by: 'bob', reason: 'gone home' } : {}; \
                 const body = JSON.stringify({ code: 'lost', state: 'lost', cause, ...why }); \
                 answer = async (request, real) => request.url === '/save' ? new Response(body, { status: 409 }) : real(); \
                 await lock.fetch('/save', { method: 'PUT' }); \
                 const { kind, by, reason } = lock.lost; \
                 all.push([kind, by, reason]); \
                 await lock.close(); \
             } \
             return all",
        )
        .await;
        let broken = json!(["broken", "bob", "gone home"]);
        let other = |kind: &str| json!([kind, null, null]);
        let all = [broken.clone(), broken, other("expired"), other("released"), other("unknown")];
        assert_eq!(told, Value::from(all.to_vec()));
    })
    .await;
}

#[actix_web::test]
async fn a_page_without_a_network_gives_its_lock_up_when_it_expires_and_says_so() {
    embedded(&["--ttl-secs", "4"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "window.setInterval = () => 0;   /* nothing else looks at the time */ \
             const { DocLock: Own } = await import('/locks/client.js?own'), told = []; \
             const lock = Own.open(url(0), { onlost: ({ kind }) => told.push(kind), onchange: it => told.push(it.state) }); \
             await until(() => lock.token); \
             answer = () => { throw new TypeError('no network'); }; \
             const shown = lock.expiresAt; \
             await until(() => lock.offline); \
             await until(() => lock.lost); \
             const early = Date.now() < lock.expiresAt; \
             return [early, told.includes('expired'), told.at(-1), lock.state, lock.token]",
        )
        .await;
        assert_eq!(told, json!([false, true, "unknown", "unknown", null]));
    })
    .await;
}

/// The guard of an application redirects to its login page.
#[actix_web::test]
async fn the_page_of_a_login_is_not_taken_for_an_answer() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const html = () => new Response('<h1>Log in</h1>', { headers: { 'Content-Type': 'text/html' } }); \
             const told = {}, seen = it => [it.state, it.problem?.code ?? null, Boolean(it.token), it.offline]; \
             const held = DocLock.open(url(0), { onlost: () => { told.isLost = true; } }); \
             await until(() => held.token); \
             answer = html; \
             await held.check(); \
             told.beat = seen(held); \
             const lock = DocLock.open(url(1), { onheld: () => { told.isHeld = true; } }); \
             await until(() => lock.problem && !lock.busy); \
             told.acquire = seen(lock); \
             const empty = DocLock.open(url(2), { acquire: false }); \
             await until(() => empty.problem); \
             told.look = [...seen(empty), await DocLock.look(url(2)), (await DocLock.look([url(2)]))[0]]; \
             told.list = [...(await new Promise(done => DocLock.list('/locks', [key(2)], done))).values()]; \
             answer = () => new Response('[]'); \
             await held.check(); \
             told.json = seen(held); \
             const isRelease = it => it.url === url(0) + '/release'; \
             answer = (it, real) => isRelease(it) && sent.filter(isRelease).length < 2 ? html() : real(); \
             await held.close(); \
             while ((await DocLock.look(url(0))).state !== 'free') await new Promise(done => setTimeout(done, 50)); \
             return told",
        )
        .await;
        assert_eq!(
            told,
            json!({
                "beat": ["mine", "login_required", true, false],
                "acquire": ["unknown", "login_required", false, false],
                "look": ["unknown", "login_required", false, false, null, null],
                "list": [null],
                "json": ["mine", "login_required", true, false],
            })
        );
    })
    .await;
}

#[actix_web::test]
async fn a_page_is_told_that_another_person_has_logged_in_and_locks_nothing_for_them() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const told = [], lost = n => ({ kind }) => told.push(n + kind); \
             const lock = DocLock.open(url(0), { onlost: lost(0) }), look = DocLock.open(url(1), { acquire: false }); \
             const saving = DocLock.open(url(2), { onlost: lost(2) }); \
             await until(() => lock.token && saving.token && look.state === 'free'); \
             await lock.check();   /* no heartbeat is under way */ \
             let isSwitched = false; \
             answer = (it, real) => it.url.endsWith('/heartbeat') && !isSwitched ? new Response('', { status: 503 }) : real(); \
             const post = (path, body) => fetch(path, { method: 'POST', body, headers: { 'Content-Type': 'application/json' } }); \
             await post('/logout'); \
             await post('/login', JSON.stringify({ name: 'bob' })); \
             const init = { method: 'PUT', body: '{\"title\":\"t\",\"body\":\"b\"}', \
                 headers: { 'Content-Type': 'application/json' } }; \
             told.push((await saving.fetch(doc(2), init)).status); \
             isSwitched = true; \
             await lock.check(); \
             await until(() => lock.lost); \
             for (const it of [lock, saving, look]) { \
                 await it.acquire(); \
                 told.push(it.problem.code, it.token, await it.fetch(doc(0), init).catch(error => error.message)); \
             } \
             told.push(lock.lost.kind, (await DocLock.look(url(0))).state); \
             const own = DocLock.open(url(0)); \
             await until(() => own.token); \
             told.push(own.state, Boolean(lock.token)); \
             await own.close(); \
             await post('/login', JSON.stringify({ name: 'alice' })); \
             await lock.acquire(); \
             return [...told, lock.state, lock.lost]",
        )
        .await;
        let refused = json!(["person_changed", null, "This page does not have the lock."]);
        let mut expected = json!(["2person_changed", 409, "0person_changed"]);
        let all = expected.as_array_mut().unwrap();
        (0..3).for_each(|_| all.extend_from_slice(refused.as_array().unwrap()));
        all.extend(["person_changed", "free", "mine"].map(Value::from));
        all.extend([json!(false), json!("mine"), Value::Null]);
        assert_eq!(told, expected);
    })
    .await;
}

#[actix_web::test]
async fn a_page_gives_back_a_lock_that_its_session_still_has_for_another_person() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const other = '11111111-1111-4111-8111-111111111111', told = []; \
             const as = async (person, real) => { \
                 const answer = await real(), headers = new Headers(answer.headers); \
                 headers.set('Doclock-Person', person); \
                 return new Response(await answer.text(), { status: answer.status, headers }); \
             }; \
             const lock = DocLock.open(url(0)); \
             await until(() => lock.token); \
             answer = (it, real) => it.url.endsWith('/heartbeat') ? as(other, real) : real(); \
             await lock.check(); \
             told.push(lock.lost?.kind); \
             while ((await DocLock.look(url(0))).state !== 'free') await new Promise(done => setTimeout(done, 50)); \
             /* The answer of a former opening comes late: its person is not the one of the new opening. */ \
             let go, isFirst = true; \
             const late = new Promise(done => { go = done; }); \
             answer = async (it, real) => { \
                 if (it.url !== url(1) || !isFirst) return real(); \
                 isFirst = false; \
                 await late; \
                 return as(other, real); \
             }; \
             const former = DocLock.open(url(1)); \
             await until(() => !isFirst); \
             former.close(); \
             const next = DocLock.open(url(1)); \
             go(); \
             await until(() => next.token); \
             await next.check(); \
             return [...told, next.state, next.lost]",
        )
        .await;
        assert_eq!(told, json!(["person_changed", "mine", null]));
    })
    .await;
}

#[actix_web::test]
async fn a_lock_that_was_lost_at_the_logout_is_refused_to_the_next_person_and_the_loss_says_so() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const told = []; \
             const lock = DocLock.open(url(0), { onlost: ({ kind }) => told.push(kind) }); \
             await until(() => lock.token); \
             const post = (path, body) => fetch(path, { method: 'POST', body, headers: { 'Content-Type': 'application/json' } }); \
             await post('/logout'); \
             await lock.check(); \
             await until(() => lock.lost?.kind === 'session_ended'); \
             await post('/login', JSON.stringify({ name: 'bob' })); \
             const statuses = []; \
             answer = async (it, real) => { \
                 const answer = await real(); \
                 if (it.url === url(0) && it.body) statuses.push(answer.status); \
                 return answer; \
             }; \
             await lock.acquire(); \
             return [told.length, statuses, lock.lost.kind, lock.problem.code]",
        )
        .await;
        assert_eq!(told, json!([1, [409], "person_changed", "person_changed"]));
    })
    .await;
}

/// The lock API on another origin gets no header, so the page itself compares the persons.
#[actix_web::test]
async fn a_page_gives_back_what_another_origin_has_granted_to_another_person() {
    embedded(&[], async |stage| {
        let told = script_elsewhere(
            stage,
            "await post('/login'); \
             const lock = DocLock.open(api + '/locks/note/a'); \
             await until(() => lock.token); \
             await lock.release(); \
             await post('/login/bob'); \
             await lock.acquire(); \
             const told = [lock.token, lock.problem.code]; \
             while ((await DocLock.look(api + '/locks/note/a')).state !== 'free') await new Promise(done => setTimeout(done, 50)); \
             const own = DocLock.open(api + '/locks/note/a'); \
             await until(() => own.token); \
             const saved = await own.fetch(api + '/note/a', { method: 'PUT', credentials: 'include' }); \
             return [...told, saved.status]",
        )
        .await;
        assert_eq!(told, json!([null, "person_changed", 200]));
    })
    .await;
}

#[actix_web::test]
async fn a_save_that_is_redirected_to_another_page_releases_nothing_by_itself() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const redirected = answer => Object.defineProperty(answer, 'redirected', { value: true }); \
             const lock = DocLock.open(url(0)), init = { method: 'PUT', body: '{\"title\":\"t\",\"body\":\"b\"}', \
                 headers: { 'Content-Type': 'application/json' } }; \
             await until(() => lock.token); \
             const save = () => lock.fetch(doc(0) + '?release=true', init, { releases: true }); \
             answer = (it, real) => it.url.startsWith(doc(0)) ? redirected(new Response('<h1>Log in</h1>')) : real(); \
             await save(); \
             const states = [lock.state]; \
             answer = async (it, real) => it.url.startsWith(doc(0)) ? redirected(await real()) : real(); \
             await save(); \
             return [...states, lock.state, lock.lost]",
        )
        .await;
        assert_eq!(told, json!(["mine", "free", null]));
    })
    .await;
}

#[actix_web::test]
async fn a_waiting_page_keeps_its_session_alive() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        edit_first(&stage.person("bob").await).await;
        let page = empty_page(stage).await;
        // The answer after a wait extends no session.
        let waits: Vec<u32> = script(
            &page,
            "const real = window.fetch, waits = []; \
             window.fetch = async (url, init) => { \
                 const wait = JSON.parse(init?.body ?? '{}').wait_ms; \
                 if (wait !== undefined) waits.push(wait); \
                 if (wait > 1) { \
                     await new Promise(over => setTimeout(over, 1200)); \
                     init = { ...init, body: init.body.replace(wait, 1) }; \
                 } \
                 return real(url, init); \
             }; \
             window.one = DocLock.open(url(0), { wait: true }); \
             await until(() => waits.length >= 5); \
             return waits.slice(0, 5)",
        )
        .await;
        assert_eq!(waits, [0, 25_000, 1, 25_000, 1]);
    })
    .await;
}

/// HTTP/1.1 allows six connections to a server. On plain http the visible pages wait.
#[actix_web::test]
async fn of_all_pages_of_a_browser_one_has_a_waiting_request() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let holder = stage.person("bob").await;
        edit_first(&holder).await;
        let mut pages = vec![empty_page(stage).await];
        for _ in 1..7 {
            pages.push(pages[0].beside(&stage.editor.url("/page.css")).await);
        }
        for page in &pages {
            script::<()>(
                page,
                "window.long = 0; \
                 const real = window.fetch; \
                 window.fetch = async (url, init) => { \
                     const waits = init?.body?.includes('\"wait_ms\":25'); \
                     if (waits) long++; \
                     try { return await real(url, init); } finally { if (waits) long--; } \
                 }; \
                 window.one = DocLock.open(url(0), { wait: true }); \
                 await until(() => sent.some(it => it.body?.includes('\"wait_ms\":1}') || long)); \
                 return null",
            )
            .await;
        }
        let mut waiting = 0;
        for page in &pages {
            waiting += page.run::<i32>("return long").await;
        }
        assert!(waiting <= 1, "{waiting}");
        script::<()>(&pages[0], "await fetch('/api/workitem'); return null").await;
        holder.click("close").await;
        eventually("one of them has it", async || {
            let mut held = 0;
            for page in &pages {
                held += page.run::<i32>("return Number(one.state === 'mine')").await;
            }
            held == 1
        })
        .await;
    })
    .await;
}
