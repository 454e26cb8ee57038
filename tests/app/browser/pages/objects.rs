//! The lock of a document in a page, whatever order its opening, its closing and the answers come in.

use super::*;

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
             const one = DocLock.open(url(0)); \
             await until(() => one.token); \
             answer = (it, real) => !isRelease(it) ? real() : failures < 1 ? lost() : failures++ < 2 ? problem(503, { status: 503 }) : real(); \
             await one.close(); \
             await untilFree(0); \
             if (failures < 2) left.push('no release has failed'); \
             answer = async (it, real) => { const late = await real(); return it.url === url(1) && it.body ? lost() : late; }; \
             const other = DocLock.open(url(1)); \
             await until(() => sent.some(it => it.url === url(1) && it.body)); \
             await until(() => !other.busy); \
             if (other.token) left.push('the answer was not lost'); \
             await other.close(); \
             await untilFree(1); \
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

/// "Only read", at the moment at which it is the person's turn.
#[actix_web::test]
async fn a_wait_that_is_given_up_leaves_no_lock_whenever_it_is_granted() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let left: Vec<String> = script(
            &page,
            "const left = []; \
             let granted, letGo; \
             answer = async (it, real) => { \
                 if (it.url !== url(0) || !it.body) return real(); \
                 const late = await real(); \
                 granted = true; \
                 await new Promise(go => { letGo = go; }); \
                 return late; \
             }; \
             const one = DocLock.open(url(0), { acquire: false }); \
             one.wait(); \
             await until(() => granted); \
             one.stopWaiting(); \
             letGo(); \
             await untilFree(0); \
             if (one.token) left.push('the page has the lock'); \
             /* The server carries the wait out after the page has given it up. */ \
             let isAborted, later; \
             answer = (it, real) => { \
                 if (it.url !== url(1) || !it.body) return real(); \
                 later = () => fetch(url(1), { method: 'POST', headers: it.headers, body: it.body }); \
                 return new Promise((_, fail) => { isAborted = () => fail(new DOMException('', 'AbortError')); }); \
             }; \
             const other = DocLock.open(url(1), { acquire: false }); \
             other.wait(); \
             await until(() => isAborted); \
             other.stopWaiting(); \
             isAborted(); \
             answer = (it, real) => real(); \
             await until(() => sent.some(it => it.url === url(1) + '/release')); \
             if ((await later()).status !== 201) left.push('the wait was not granted'); \
             await untilFree(1); \
             return left",
        )
        .await;
        assert_eq!(left, [""; 0]);
    })
    .await;
}

/// A page shows a document that it also reads under a shared lock.
#[actix_web::test]
async fn an_exclusive_lock_is_released_although_the_page_still_reads_the_document() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const reads = DocLock.open(url(0), { mode: 'shared' }); \
             await until(() => reads.token); \
             const edits = DocLock.open(url(0)); \
             await until(() => edits.token); \
             await edits.check(); \
             const before = edits.state; \
             await edits.close(); \
             await until(() => sent.some(it => it.url.endsWith('/release'))); \
             await reads.check(); \
             const { state } = await DocLock.look(url(0)); \
             await reads.close(); \
             return [before, state]",
        )
        .await;
        assert_eq!(told, json!(["mine", "free"]));
    })
    .await;
}
