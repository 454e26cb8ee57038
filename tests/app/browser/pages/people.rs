//! Another person logs in while a page is open.

use super::*;

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
             await until(() => sent.some(it => it.url === url(1) && it.body) && !lock.busy); \
             told.acquire = seen(lock); \
             let looks = 0; \
             const empty = DocLock.open(url(2), { acquire: false, onchange: () => looks++ }); \
             await until(() => looks); \
             told.look = [...seen(empty), await DocLock.look(url(2)), (await DocLock.look([url(2)]))[0]]; \
             told.list = [...(await new Promise(done => DocLock.list('/locks', [key(2)], done))).values()]; \
             answer = () => new Response('[]'); \
             await held.check(); \
             told.json = seen(held); \
             const isRelease = it => it.url === url(0) + '/release'; \
             answer = (it, real) => isRelease(it) && sent.filter(isRelease).length < 2 ? html() : real(); \
             await held.close(); \
             await untilFree(0); \
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
async fn a_redirect_to_a_login_page_of_any_origin_is_told_as_such() {
    embedded(&[], async |stage| {
        let elsewhere = empty_origin();
        let api = api_for(&elsewhere).await;
        let page = stage.visitor().await;
        page.go(&format!("{api}/frames/b")).await;
        let told: Value = page
            .run_async(&format!(
                "const done = arguments[0], told = [], until = async condition => {{ while (!condition()) await new Promise(done => setTimeout(done, 20)); }}; \
                 AbortSignal.timeout = () => new AbortController().signal; \
                 const seen = it => [it.problem?.code ?? null, it.offline, it.state]; \
                 (async () => {{ \
                     await fetch('/login', {{ method: 'POST' }}); \
                     const {{ DocLock }} = await import('/locks/client.js'), held = DocLock.open('/locks/note/a'); \
                     await until(() => held.token); \
                     for (const login of ['{elsewhere}/', '/frames/d']) {{ \
                         document.cookie = 'login=' + login + '; path=/'; \
                         await held.check(); \
                         const other = DocLock.open('/locks/note/c', {{ acquire: false }}); \
                         await other.acquire(); \
                         told.push(seen(held), seen(other)); \
                         document.cookie = 'login=; path=/; max-age=0'; \
                         await held.check(); \
                         await other.acquire(); \
                         told.push(seen(held), seen(other)); \
                         await other.close(); \
                     }} \
                     return told; \
                 }})().then(done, error => done('failed: ' + error))"
            ))
            .await;
        let [out, back] = ["unknown", "mine"].map(|state| json!(["login_required", false, state]));
        let mine = json!([null, false, "mine"]);
        assert_eq!(told, json!([back, out, mine, mine, back, out, mine, mine]));
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
             await untilFree(0); \
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
             await untilLive(); \
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
