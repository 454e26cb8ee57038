//! What a person types is not lost: the first keystroke, stale pages, ends, kept texts, and readers who see saves.

use serde_json::json;

use super::pages::{empty_page, script};
use super::*;

/// A form as any page has one: `form`, with `type(text)` as a person does it, `typed(field)` as an editor of the page tells it, and
/// `load()`, which shows the stored text and returns its version.
const FORM: &str = r#"
    document.body.innerHTML = `<form id="form"><input name="title"><textarea name="body"></textarea>
        <select name="kind"><option>a<option>b</select><button>Save</button><button type="button">Help</button></form>`;
    const form = document.getElementById('form'), body = form.elements.body;
    const type = text => { body.select(); document.execCommand('insertText', false, text); };
    const typed = field => field.dispatchEvent(new Event('doclock-typed', { bubbles: true }));
    const load = async () => {
        const answer = await fetch(doc(0)), stored = await answer.json();
        form.elements.title.value = stored.title;
        body.value = stored.body;
        return answer.headers.get('ETag').replaceAll('"', '');
    };
    const saving = fields => ({ method: 'PUT', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(fields) });
"#;

async fn with_form<T: serde::de::DeserializeOwned>(page: &Page, body: &str) -> T {
    script(page, &format!("{FORM} {body}")).await
}

#[actix_web::test]
async fn the_first_input_takes_the_lock_and_reading_takes_none() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let before: Value = with_form(
            &page,
            "const version = await load(); \
             window.lock = DocLock.open(url(0), { on: form, version }); \
             await until(() => lock.state === 'free'); \
             return [form.dataset.doclock, body.readOnly]",
        )
        .await;
        assert_eq!(before, json!(["free", false]));
        assert_eq!(stage.lock().await["state"], "free");
        let typed: Value = script(
            &page,
            "const form = document.getElementById('form'); \
             form.elements.body.value = 'x'; \
             form.elements.body.dispatchEvent(new Event('input', { bubbles: true })); \
             await until(() => lock.token); \
             return [lock.current, form.dataset.doclock, form.elements.body.value]",
        )
        .await;
        assert_eq!(typed, json!([true, "mine", "x"]));
        assert_eq!(stage.lock().await["state"], "held");
    })
    .await;
}

#[actix_web::test]
async fn a_form_of_a_document_that_another_person_edits_is_read_only_until_it_is_free() {
    on_mongodb(async |stage, _| {
        let alice = stage.person("alice").await;
        let page = empty_page(stage).await;
        script::<()>(&page, "await fetch('/login', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: '{\"name\":\"bob\"}' }); return null").await;
        // Nobody edits when the page is opened, and alice is quicker.
        with_form::<()>(
            &page,
            "window.lock = DocLock.open(url(0), { on: form, version: await load() }); \
             await until(() => lock.state === 'free'); \
             return null",
        )
        .await;
        edit_first(&alice).await;
        let refused: Value = script(
            &page,
            "const form = document.getElementById('form'), { body, kind } = form.elements; \
             body.value = 'typed by bob'; \
             body.dispatchEvent(new Event('input', { bubbles: true })); \
             await until(() => lock.state === 'held' && !lock.busy); \
             const [save, help] = form.querySelectorAll('button'); \
             return [lock.holder, body.value, body.readOnly, kind.disabled, save.disabled, help.disabled, form.dataset.doclock]",
        )
        .await;
        let all = json!(["alice", "typed by bob", true, true, true, false, "held"]);
        assert_eq!(refused, all);
        alice.click("close").await;
        let free: Value = script(
            &page,
            "const form = document.getElementById('form'), { body, kind } = form.elements; \
             await until(() => lock.state === 'free'); \
             return [body.value, body.readOnly, kind.disabled, form.querySelector('button').disabled]",
        )
        .await;
        assert_eq!(free, json!(["typed by bob", false, false, false]));
    })
    .await;
}

#[actix_web::test]
async fn a_page_that_shows_an_old_text_is_told_at_the_first_input_and_at_a_save() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_form(
            &page,
            "const old = await load(); \
             const first = DocLock.open(url(0), { version: old }); \
             await until(() => first.token); \
             const saved = await first.fetch(doc(0), saving({ title: 't', body: 'another text' })); \
             const next = first.version, named = sent.map(it => it.headers.get('If-Match')).find(Boolean); \
             await first.close(); \
             const told = []; \
             const lock = DocLock.open(url(0), { on: form, version: old, onstale: ({ version }) => told.push(version) }); \
             await until(() => lock.state === 'free'); \
             type('x'); \
             await until(() => told.length); \
             const isHeld = Boolean(lock.token), { current } = lock; \
             const refused = await lock.fetch(doc(0), saving({ title: 't', body: 'x' })); \
             const { code } = await refused.json(); \
             const stays = Boolean(lock.token); \
             lock.version = told.at(-1); \
             const again = await lock.fetch(doc(0), saving({ title: 't', body: 'x' })); \
             return [saved.status, named === `\"${old}\"`, next === old, told.every(it => it === next), told.length, isHeld, current, \
                     refused.status, code, stays, again.status, lock.version === next]",
        )
        .await;
        let expected =
            json!([200, true, false, true, 2, true, false, 412, "stale_copy", true, 200, false]);
        assert_eq!(told, expected);
        assert_eq!(stage.text().await, "x");
    })
    .await;
}

#[actix_web::test]
async fn a_page_that_names_no_version_sends_no_condition() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let sent: Value = with_form(
            &page,
            "const lock = DocLock.open(url(0)); \
             await until(() => lock.token); \
             for (const body of ['a', 'b']) await lock.fetch(doc(0), saving({ title: 't', body })); \
             return [sent.some(it => it.headers.has('If-Match') || /version/.test(it.body)), lock.version]",
        )
        .await;
        assert_eq!(sent, json!([false, null]));
    })
    .await;
}

/// The server tells a page whose person is away for 100 s how much of the time is left.
const IDLE: &str = "answer = async (it, real) => { \
         const response = await real(); \
         if (!/heartbeat$|workitem.[0-9a-f]+$/.test(it.url) || !response.ok) return response; \
         const told = await response.json(), end = window.ends(it); \
         for (const one of told.held ?? [told]) Object.assign(one, end); \
         return new Response(JSON.stringify(told), { status: response.status, headers: response.headers }); \
     };";

#[actix_web::test]
async fn a_person_is_warned_before_an_end_and_one_key_extends_what_can_be_extended() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            &format!(
                "{IDLE} \
                 let left = 600_000; \
                 window.ends = () => ({{ ends_in_ms: left, ends_why: 'idle' }}); \
                 const told = []; \
                 const lock = DocLock.open(url(0), {{ onending: ending => told.push(ending.why, ending.canExtend) }}); \
                 await until(() => lock.token); \
                 left = 50_000; \
                 await lock.check(); \
                 await until(() => lock.ending); \
                 const at = Math.round((lock.ending.at - Date.now()) / 10_000); \
                 left = 600_000; \
                 dispatchEvent(new KeyboardEvent('keydown', {{ key: 'a' }})); \
                 await until(() => !lock.ending); \
                 const extended = [...told]; \
                 left = 30_000; window.ends = () => ({{ ends_in_ms: left, ends_why: 'max_hold' }}); \
                 await lock.check(); \
                 const helps = await lock.extend(); \
                 window.ends = () => ({{}}); \
                 await lock.check(); \
                 return [at, extended, told.slice(2), helps, lock.ending]"
            ),
        )
        .await;
        assert_eq!(told, json!([5, ["idle", true], ["max_hold", false], false, null]));
    })
    .await;
}

#[actix_web::test]
async fn a_warning_comes_twenty_seconds_before_the_end_at_the_latest() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            &format!(
                "{IDLE} \
                 let left = 21_000; \
                 window.ends = () => ({{ ends_in_ms: left, ends_why: 'session' }}); \
                 const lock = DocLock.open(url(0), {{ warnMs: 1 }}); \
                 await until(() => lock.token); \
                 const early = lock.ending; \
                 left = 19_000; \
                 await lock.check(); \
                 return [early, lock.ending.why]"
            ),
        )
        .await;
        assert_eq!(told, json!([null, "session"]));
    })
    .await;
}

#[actix_web::test]
async fn a_lock_is_taken_again_if_the_document_is_unchanged_and_otherwise_the_page_is_told() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_form(
            &page,
            "const version = await load(); \
             const lock = DocLock.open(url(0), { version }), other = DocLock.open(url(1)); \
             await until(() => lock.token && other.token); \
             const lose = async () => { \
                 await fetch(lock.url + '/release', { method: 'POST' }); \
                 await lock.check(); \
                 await until(() => lock.lost); \
             }; \
             await lose(); \
             const same = await lock.resume(); \
             await fetch(doc(0), { ...saving({ title: 't', body: 'changed' }), headers: { \
                 'Content-Type': 'application/json', 'Lock-Token': `<urn:uuid:${lock.token}>` } }); \
             await lose(); \
             const changed = await lock.resume(); \
             return [same, changed, Boolean(lock.token)]",
        )
        .await;
        assert_eq!(told, json!(["mine", "stale", true]));
    })
    .await;
}

#[actix_web::test]
async fn a_reader_hears_of_a_save_at_once_and_its_writer_does_not() {
    on_mongodb(async |stage, _| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let reader = empty_page(stage).await;
        script::<()>(
            &reader,
            "window.told = []; \
             window.lock = DocLock.open(url(0), { acquire: false, onsaved: save => told.push(save) }); \
             await until(() => lock.state === 'held' || lock.state === 'mine_elsewhere'); return null",
        )
        .await;
        alice.run::<()>("window.told = 0").await;
        alice.write("body", "one more word").await;
        alice.click("save").await;
        alice.until_says("save-state", "Saved").await;
        let told: Value = script(
            &reader,
            "await until(() => told.length); \
             const answer = await fetch(doc(0)); \
             return [told[0].by, `\"${told[0].version}\"` === answer.headers.get('ETag'), told.length]",
        )
        .await;
        assert_eq!(told, json!(["alice", true, 1]));
    })
    .await;
}

#[actix_web::test]
async fn a_reader_who_misses_the_event_of_a_save_hears_of_it_later_and_once() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_form(
            &page,
            "window.EventSource = class { addEventListener() {} close() {} }; \
             const old = await load(), told = []; \
             const reader = DocLock.open(url(0), { acquire: false, version: old, onsaved: save => told.push(save) }); \
             await until(() => reader.state === 'free'); \
             const taken = await fetch(url(0), { method: 'POST' }), { token } = await taken.json(); \
             const headers = { 'Content-Type': 'application/json', 'Lock-Token': `<urn:uuid:${token}>` }; \
             const save = body => fetch(doc(0), { ...saving({ title: 't', body }), headers }); \
             const first = await save('new'); \
             await until(() => told.length); \
             await reader.check(); await reader.check(); \
             const once = told.length, isNew = `\"${told[0].version}\"` === first.headers.get('ETag'); \
             await fetch(doc(0), { method: 'DELETE', headers }); \
             await until(() => told.length > 1); \
             return [told[0].by, isNew, once, told[1]]",
        )
        .await;
        assert_eq!(told, json!([null, true, 1, { "by": null, "version": null }]));
    })
    .await;
}

#[actix_web::test]
async fn the_text_of_a_closed_tab_is_offered_and_never_restored_silently() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let stored = stage.text().await;
        alice.write("body", "typed, and never saved").await;
        // As after a crash: nothing is sent and nothing runs any more.
        script::<()>(&alice, "await new Promise(done => setTimeout(done, 1500)); return null")
            .await;
        let again = alice.beside(&stage.first_document().await).await;
        alice.close().await;
        until_editing(&again).await;
        again.until_shown("kept").await;
        assert_eq!(again.value("body").await, stored);
        assert!(again.text("kept-text").await.contains("typed, and never saved"));
        again.click("kept-restore").await;
        assert_eq!(again.value("body").await, "typed, and never saved");
        again.click("save").await;
        again.until_says("save-state", "Saved").await;
        assert_eq!(stage.text().await, "typed, and never saved");
        // Nothing is left of it.
        again.reload().await;
        until_editing(&again).await;
        again.until_hidden("kept").await;
    })
    .await;
}

#[actix_web::test]
async fn the_next_person_in_a_browser_does_not_see_the_text_of_the_first_one() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_form(
            &page,
            "const login = name => fetch('/login', \
                 { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ name }) }); \
             const offered = async () => { \
                 await load(); \
                 const lock = DocLock.open(url(0)); \
                 await until(() => lock.token); \
                 const found = []; \
                 const keeper = await lock.keep(form, { onkept: text => found.push(text.fields.body[0]) }); \
                 await keeper.flush(); \
                 await new Promise(done => setTimeout(done, 200)); \
                 return { lock, keeper, found }; \
             }; \
             const end = async ({ lock, keeper }) => { await keeper.flush(); keeper.close(); await lock.close(); }; \
             const first = await offered(); \
             type('a secret of alice'); \
             await end(first); \
             await login('bob'); \
             const bob = await offered(); \
             type('a secret of bob'); \
             await end(bob); \
             await login('alice'); \
             const alice = await offered(); \
             const asked = []; \
             const isKept = await DocLock.clearKept(count => asked.push(count) && false); \
             const isGone = await DocLock.clearKept(count => asked.push(count)); \
             await end(alice); \
             const nothing = await offered(); \
             await end(nothing); \
             await login('bob'); \
             return [bob.found, alice.found, isKept, isGone, asked, nothing.found, (await offered()).found]",
        )
        .await;
        let expected = json!([
            [], ["a secret of alice"], false, true, [1, 1], [], ["a secret of bob"]
        ]);
        assert_eq!(told, expected);
    })
    .await;
}

#[actix_web::test]
async fn a_kept_form_forgets_secrets_and_finds_its_fields_again_although_the_form_has_changed() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "const draw = html => { document.body.innerHTML = `<form id=form>${html}</form>`; return document.getElementById('form'); }; \
             const open = async (form, options) => { \
                 const lock = DocLock.open(url(0)); \
                 await until(() => lock.token); \
                 return { lock, keeper: await lock.keep(form, options) }; \
             }; \
             const one = draw('<input name=a value=1><input name=a value=2><input name=p type=password><input type=file name=f>' \
                 + '<input type=hidden name=csrf value=h><input type=checkbox name=c value=x><input type=checkbox name=c value=y>' \
                 + '<input type=radio name=r value=m checked><input type=radio name=r value=n><select name=s multiple><option>1<option>2<option>3</select>' \
                 + '<select name=t><option>now<option>later</select><div data-doclock-keep=no><textarea name=n></textarea></div><input name=gone>'); \
             const first = await open(one); \
             const set = (name, n, change) => { const all = one.querySelectorAll(`[name=${name}]`); Object.assign(all[n], change); }; \
             set('a', 0, { value: 'first' }); set('a', 1, { value: 'second' }); set('p', 0, { value: 'secret' }); \
             set('c', 1, { checked: true }); set('r', 1, { checked: true }); set('n', 0, { value: 'secret' }); set('gone', 0, { value: 'left' }); \
             set('t', 0, { value: 'later' }); \
             for (const option of one.elements.s.options) option.selected = option.value !== '2'; \
             for (const field of one.elements) field.dispatchEvent(new Event('doclock-typed', { bubbles: true })); \
             await first.keeper.flush(); first.keeper.close(); await first.lock.close(); \
             const two = draw('<input name=a><textarea name=a></textarea><input name=p type=password><input type=checkbox name=c value=y>' \
                 + '<input type=checkbox name=c value=x checked><input type=radio name=r value=n><input type=radio name=r value=m checked>' \
                 + '<select name=s multiple><option>3<option>2<option>1</select><select name=t><option>now</select><textarea name=n></textarea>'); \
             let text = null; \
             await open(two, { onkept: it => { text = it; } }); \
             await until(() => text); \
             const before = two.elements.a[0].value, raw = JSON.stringify(text.fields), left = text.restore(); \
             return [before, /secret|csrf/.test(raw), [...two.elements.a].map(it => it.value), two.elements.p.value, \
                 [...two.elements.c].map(it => it.checked), two.elements.r.value, [...two.elements.s.selectedOptions].map(it => it.value), \
                 two.elements.n.value, left]",
        )
        .await;
        let expected = json!([
            "", false, ["", ""], "", [true, true], "n", ["3", "1"], "",
            { "a": ["first", "second"], "t": ["later"], "gone": ["left"] }
        ]);
        assert_eq!(told, expected);
    })
    .await;
}

/// What the tests below need: `open(n, options)` shows the document `n` in the form, and keeps its text; `end` leaves it; `rows`
/// looks into the database.
const KEEP: &str = r#"
    const open = async (options = {}) => {
        const version = await load(), found = [];
        const lock = DocLock.open(url(0), { version });
        await until(() => lock.token);
        const keeper = await lock.keep(form, { onkept: text => found.push(text), ...options });
        await new Promise(done => setTimeout(done, 300));
        return { lock, keeper, found, bodies: () => found.map(it => it.fields.body[0]) };
    };
    const end = async ({ lock, keeper }) => { await keeper.flush(); keeper.close(); await lock.close(); };
    const rows = work => new Promise((done, fail) => {
        const request = indexedDB.open('doclock-kept');
        request.onerror = fail;
        request.onsuccess = () => {
            const all = work(request.result.transaction('texts', 'readwrite').objectStore('texts'));
            all.onsuccess = () => { request.result.close(); done(all.result); };
        };
    });
    const kept = async () => (await rows(store => store.getAll())).map(it => it.records.find(it => it.name === 'body').value).sort();
    const put = (lock, body, options) => lock.fetch(doc(0), saving({ title: 't', body }), options);
"#;

async fn with_kept<T: serde::de::DeserializeOwned>(page: &Page, body: &str) -> T {
    with_form(page, &format!("{KEEP} {body}")).await
}

#[actix_web::test]
async fn an_undecided_text_survives_new_typing_and_a_save() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_kept(
            &page,
            "const one = await open(); type('the first text'); await end(one); \
             const two = await open(); type('the second text'); await end(two); \
             const three = await open(), both = three.bodies().sort(); \
             type('saved'); \
             await put(three.lock, 'saved'); \
             await end(three); \
             const four = await open(), after = four.bodies().sort(); \
             const first = four.found.find(it => it.fields.body[0] === 'the first text'); \
             const { isCurrent, differences } = first; \
             await first.discard(); await end(four); \
             const five = await open(); \
             return [one.found.length, both, after, isCurrent, differences, five.bodies()]",
        )
        .await;
        let texts = json!(["the first text", "the second text"]);
        let differ =
            json!([{ "name": "body", "label": "body", "kept": "the first text", "now": "saved" }]);
        assert_eq!(told, json!([0, texts, texts, false, differ, ["the second text"]]));
    })
    .await;
}

#[actix_web::test]
async fn only_a_save_of_the_text_ends_its_keeping_and_what_was_typed_meanwhile_stays() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_kept(
            &page,
            "const one = await open(); \
             type('first'); await one.keeper.flush(); \
             const after = async change => { await change(); await one.keeper.flush(); return kept(); }; \
             const asks = how => async (it, real) => it.url.includes('/api/') ? how(real) : real(); \
             answer = asks(async real => new Response('log in', { status: 500 })); \
             const refused = await after(() => put(one.lock, 'first')); \
             answer = asks(async real => Object.defineProperty(new Response('log in'), 'redirected', { value: true })); \
             const redirected = await after(() => put(one.lock, 'first')); \
             answer = asks(real => real()); \
             const comment = await after(() => put(one.lock, 'first', { saves: false })); \
             answer = asks(async real => { const done = await real(); type('first and more'); return done; }); \
             const meanwhile = await after(() => put(one.lock, 'first')); \
             answer = asks(real => real()); \
             const saved = await after(() => put(one.lock, 'first and more')); \
             return [refused, redirected, comment, meanwhile, saved]",
        )
        .await;
        let first = json!(["first"]);
        assert_eq!(told, json!([first, first, first, ["first and more"], []]));
    })
    .await;
}

#[actix_web::test]
async fn the_text_of_an_open_tab_is_not_offered_in_another_one() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let one = empty_page(stage).await;
        with_kept::<()>(
            &one,
            "window.one = await open(); type('still open'); await one.keeper.flush(); return null",
        )
        .await;
        let two = one.beside(&stage.editor.url("/page.css")).await;
        let there = "const version = await load(), found = [], lock = DocLock.open(url(0), { version, acquire: false }); \
             await until(() => lock.state !== 'unknown'); \
             const keeper = await lock.keep(form, { onkept: it => found.push(it.fields.body[0]) }); \
             await new Promise(done => setTimeout(done, 500)); \
             type('in the second tab'); await keeper.flush(); \
             return [found, await kept()]";
        let told: Value = with_kept(&two, there).await;
        assert_eq!(told, json!([[], ["in the second tab", "still open"]]));
        // As it is closed, its last words are kept, too.
        one.run::<()>(
            "document.getElementById('form').elements.body.select(); document.execCommand('insertText', false, 'last words')",
        )
        .await;
        one.close().await;
        let told: Value = with_kept(&two, there).await;
        assert_eq!(told, json!([["last words"], ["in the second tab", "in the second tab", "last words"]]));
    })
    .await;
}

#[actix_web::test]
async fn a_restored_text_leaves_the_fields_of_others_and_sets_the_text_of_the_page_aside() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_kept(
            &page,
            "const one = await open(); type('typed'); await end(one); \
             const two = await open(); \
             form.elements.title.value = 'by somebody else'; form.elements.kind.value = 'b'; \
             await two.keeper.saved(); \
             type('typed since'); \
             const left = two.found[0].restore(); \
             await two.keeper.flush(); \
             await new Promise(done => setTimeout(done, 300)); \
             return [left, body.value, form.elements.title.value, form.elements.kind.value, two.bodies(), await kept()]",
        )
        .await;
        let both = json!(["typed", "typed since"]);
        assert_eq!(told, json!([{}, "typed", "by somebody else", "b", both, both]));
    })
    .await;
}

/// React redraws the fields from its own values, and hears of an input only if the field has another value than a script has
/// last written by the property of that field.
#[actix_web::test]
async fn a_framework_that_controls_the_fields_hears_of_a_restored_text() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_kept(
            &page,
            "const heard = []; \
             const control = (field, name, event) => { \
                 const { get, set } = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), name); \
                 let known = get.call(field); \
                 Object.defineProperty(field, name, { configurable: true, get, set(value) { set.call(field, known = value); } }); \
                 field.addEventListener(event, () => { \
                     if (known === field[name]) return; \
                     heard.push([field.name, known = field[name], field.value]); \
                 }); \
             }; \
             const draw = () => { \
                 form.innerHTML = `<input name='title' value='t'><textarea name='body'>b</textarea><input type='checkbox' name='tick' checked> \
                     <input type='radio' name='one' value='n' checked><input type='radio' name='one' value='m'><select name='kind'><option>a<option>b</select>`; \
                 for (const field of form.elements) { \
                     const isTick = /checkbox|radio/.test(field.type); \
                     control(field, isTick ? 'checked' : 'value', isTick ? 'click' : 'input'); \
                 } \
                 return form.elements; \
             }; \
             const keep = async () => { \
                 const lock = DocLock.open(url(0)), found = []; \
                 await until(() => lock.token); \
                 const keeper = await lock.keep(form, { onkept: text => found.push(text) }); \
                 return { lock, keeper, found }; \
             }; \
             const fields = draw(), first = await keep(); \
             [fields.title.value, fields.body.value, fields.tick.checked, fields.kind.value] = ['typed', 'words', false, 'b']; \
             fields.one[1].checked = true; \
             for (const field of form.elements) typed(field); \
             await end(first); \
             draw(); \
             const second = await keep(); \
             await until(() => second.found.length); \
             const left = second.found[0].restore(); \
             return [left, heard]",
        )
        .await;
        let heard = json!([
            ["title", "typed", "typed"], ["body", "words", "words"], ["tick", false, "on"],
            ["one", true, "m"], ["kind", "b", "b"]
        ]);
        assert_eq!(told, json!([{}, heard]));
    })
    .await;
}

#[actix_web::test]
async fn a_page_whose_fields_the_browser_has_filled_shows_what_was_delivered_and_offers_the_text() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_kept(
            &page,
            "const one = await open(); type('typed yesterday'); const { version } = one.lock; await end(one); \
             const two = await open(); await put(two.lock, 'by somebody else'); await end(two); \
             const now = await load(); \
             form.elements.title.defaultValue = form.elements.title.value; body.defaultValue = 'by somebody else'; \
             body.value = 'typed yesterday'; \
             const three = DocLock.open(url(0), { version: now, on: form }), found = []; \
             await until(() => three.state === 'free'); \
             const keeper = await three.keep(form, { onkept: it => found.push(it) }); \
             await until(() => found.length); \
             await keeper.flush(); \
             await new Promise(done => setTimeout(done, 500)); \
             return [form.getAttribute('autocomplete'), three.version === now && version !== now, body.value, found[0].isCurrent, await kept()]",
        )
        .await;
        assert_eq!(told, json!(["off", true, "by somebody else", false, ["typed yesterday"]]));
    })
    .await;
}

#[actix_web::test]
async fn fields_with_odd_names_and_outside_of_their_form_are_locked_and_kept() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = script(
            &page,
            "document.body.innerHTML = '<form id=f><input name=elements><input name=constructor><input name=pin type=password></form><textarea form=f name=out></textarea>'; \
             const form = document.getElementById('f'), out = document.querySelector('textarea'), pin = document.querySelector('[name=pin]'); \
             const set = (field, value) => { field.value = value; for (const type of ['input', 'doclock-typed']) field.dispatchEvent(new Event(type, { bubbles: true })); }; \
             const lock = DocLock.open(url(0), { on: form }), found = []; \
             await until(() => lock.state === 'free'); \
             const keeper = await lock.keep(form); \
             set(out, 'typed outside'); \
             await until(() => lock.token); \
             pin.type = 'text'; set(pin, 'secret'); set(document.querySelector('[name=constructor]'), 'c'); \
             await keeper.flush(); keeper.close(); await lock.close(); \
             document.querySelector('[name=constructor]').remove(); out.value = ''; \
             const other = DocLock.open(url(0)); \
             await until(() => other.token); \
             await other.keep(form, { onkept: it => found.push(it) }); \
             await until(() => found.length); \
             const raw = JSON.stringify(found[0].fields), left = found[0].restore(); \
             return [raw.includes('secret'), out.value, left]",
        )
        .await;
        assert_eq!(told, json!([false, "typed outside", { "constructor": ["c"] }]));
    })
    .await;
}

#[actix_web::test]
async fn two_saves_at_once_follow_each_other_and_a_weak_tag_is_understood() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_kept(
            &page,
            "const version = await load(), lock = DocLock.open(url(0), { version: `W/\"${version}\"` }); \
             await until(() => lock.token); \
             const stale = []; \
             lock.addEventListener('stale', () => stale.push(1)); \
             const query = '?version=' + version + '&lock_token=' + lock.token; \
             const both = await Promise.all(['one', 'two'].map(body => lock.fetch(doc(0) + query, saving({ title: 't', body })))); \
             const read = await lock.fetch(doc(1), { method: 'GET' }).catch(() => null); \
             const again = await put(lock, 'three'); \
             return [lock.current, both.map(it => it.status), stale.length, again.status]",
        )
        .await;
        assert_eq!(told, json!([true, [200, 200], 0, 200]));
        assert_eq!(stage.text().await, "three");
    })
    .await;
}

#[actix_web::test]
async fn a_browser_that_keeps_no_text_says_so_and_keeps_the_newest_fifty_otherwise() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let told: Value = with_kept(
            &page,
            "const problems = [], onproblem = problem => problems.push(problem), one = await open({ onproblem }); \
             type('x'.repeat(1_100_000)); \
             await one.keeper.flush(); \
             type('short'); \
             await one.keeper.flush(); \
             const [text] = await rows(store => store.getAll()), day = 86_400_000; \
             for (let n = 0; n < 60; n++) await rows(store => store.put({ ...text, id: 'n' + n, url: '/x/' + n, at: Date.now() - n * day })); \
             await end(one); \
             const two = await open(); \
             await new Promise(done => setTimeout(done, 500)); \
             const left = await rows(store => store.getAll()); \
             const isOld = left.some(it => Date.now() - it.at > 31 * day); \
             return [problems, text.records[0].value, left.length <= 50, isOld, two.bodies()]",
        )
        .await;
        assert_eq!(told, json!([["too_large"], "short", true, false, ["short"]]));
        let forbidden: Value = with_form(
            &page,
            "const { keep } = await import('/locks/keep.js?another'), { Fields } = await import('/locks/client.js'); \
             IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); }; \
             const problems = [], lock = DocLock.open(url(1)); \
             await until(() => lock.token); \
             const fields = new Fields(form); \
             fields.listen(); \
             const keeper = keep(lock, { person: 'p', ahead: 0 }, fields, { onproblem: problem => problems.push(problem) }); \
             type('x'); \
             await keeper.flush(); \
             await until(() => problems.length); \
             return [problems[0], body.value]",
        )
        .await;
        assert_eq!(forbidden, json!(["unavailable", "x"]));
    })
    .await;
}
