//! What the requests of a page say, and how their answers are understood.

use super::*;

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
             const release = () => fetch(url(1) + '/release', { method: 'POST', body: JSON.stringify({ token: two.token }) }); \
             answer = async (it, real) => { \
                 if (it.url !== doc(1)) return real(); \
                 answer = (_, real) => real(); \
                 await release(); /* while the save is on its way */ \
                 return real(); \
             }; \
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
             const elsewhere = thrown(() => lock.address('https://elsewhere.example/')); \
             const headers = { ...lock.headers(), 'If-Match': '*' };  /* before the page can be told of the release */ \
             await fetch(url(0) + '/release', { method: 'POST', body: JSON.stringify({ token: lock.token }) }); \
             const lost = await put(doc(0), headers); \
             await lock.refused({ status: lost.status, data: await lost.json() }); \
             return [early, answers, elsewhere, lost.status, lock.lost?.kind ?? null]",
        )
        .await;
        let answers = json!([200, true, 412, true, true, true]);
        assert_eq!(told, json!([["Error", "Error"], answers, "TypeError", 409, "released"]));
    })
    .await;
}
