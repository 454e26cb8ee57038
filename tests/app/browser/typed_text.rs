//! What a person types is not lost: the first keystroke, stale pages, ends, kept texts, and readers who see saves.

mod kept;

use super::pages::{empty_page, script};
use super::*;
use serde_json::json;

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
                 const from = Date.now(); \
                 let left = 600_000; \
                 window.ends = () => ({{ ends_in_ms: left, ends_why: 'idle' }}); \
                 const told = []; \
                 const lock = DocLock.open(url(0), {{ onending: ending => told.push(ending.why, ending.canExtend) }}); \
                 await until(() => lock.token); \
                 left = 50_000; \
                 await lock.check(); \
                 await until(() => lock.ending); \
                 const {{ at }} = lock.ending, isRight = from + 50_000 <= at && at <= Date.now() + 50_000; \
                 left = 600_000; \
                 dispatchEvent(new KeyboardEvent('keydown', {{ key: 'a' }})); \
                 await until(() => !lock.ending); \
                 const extended = [...told]; \
                 left = 30_000; window.ends = () => ({{ ends_in_ms: left, ends_why: 'max_hold' }}); \
                 await lock.check(); \
                 const helps = await lock.extend(); \
                 window.ends = () => ({{}}); \
                 await lock.check(); \
                 return [isRight, extended, told.slice(2), helps, lock.ending]"
            ),
        )
        .await;
        assert_eq!(told, json!([true, ["idle", true], ["max_hold", false], false, null]));
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
                 let left = 55_000; \
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
             await untilLive(); \
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
