//! Typed text that outlives its page: offered, restored, set aside.

use super::*;

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
        keeps(&again, json!([])).await;
        again.until_hidden("kept").await;
    })
    .await;
}

#[actix_web::test]
async fn the_text_is_kept_while_a_person_types_without_a_pause() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = empty_page(stage).await;
        let kept: Value = with_kept(
            &page,
            "await open(); \
             const typing = setInterval(() => type('typed at ' + performance.now()), 100); \
             await until(() => body.value); \
             while (!(await kept()).length); \
             clearInterval(typing); \
             return (await kept())[0].includes('typed at')",
        )
        .await;
        assert_eq!(kept, true);
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
             const offered = async (texts = 0) => { \
                 await load(); \
                 const lock = DocLock.open(url(0)); \
                 await until(() => lock.token); \
                 const found = []; \
                 const keeper = await lock.keep(form, { onkept: text => found.push(text.fields.body[0]) }); \
                 await keeper.flush(); \
                 await until(() => found.length >= texts); \
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
             const alice = await offered(1); \
             const asked = []; \
             const isKept = await DocLock.clearKept(count => asked.push(count) && false); \
             const isGone = await DocLock.clearKept(count => asked.push(count)); \
             await end(alice); \
             const nothing = await offered(); \
             await end(nothing); \
             await login('bob'); \
             return [bob.found, alice.found, isKept, isGone, asked, nothing.found, (await offered(1)).found]",
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

/// Tools of the tests below: `open(n, options)` shows a document in the form, keeps its text, and waits until `n` texts are
/// offered; `end` leaves it; `rows` looks into the database.
const KEEP: &str = r#"
    const open = async (texts = 0, options = {}) => {
        const version = await load(), found = [];
        const lock = DocLock.open(url(0), { version });
        await until(() => lock.token);
        const keeper = await lock.keep(form, { onkept: text => found.push(text), ...options });
        await until(() => found.length >= texts);
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
             const two = await open(1); type('the second text'); await end(two); \
             const three = await open(2), both = three.bodies().sort(); \
             type('saved'); \
             await put(three.lock, 'saved'); \
             await end(three); \
             const four = await open(2), after = four.bodies().sort(); \
             const first = four.found.find(it => it.fields.body[0] === 'the first text'); \
             const { isCurrent, differences } = first; \
             await first.discard(); await end(four); \
             const five = await open(1); \
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
             await until(() => found.length >= texts); \
             await new Promise(done => setTimeout(done, 500)); \
             type('in the second tab'); await keeper.flush(); \
             return [found, await kept()]";
        let told: Value = with_kept(&two, &format!("const texts = 0; {there}")).await;
        assert_eq!(told, json!([[], ["in the second tab", "still open"]]));
        // As it is closed, its last words are kept, too.
        one.run::<()>(
            "document.getElementById('form').elements.body.select(); document.execCommand('insertText', false, 'last words')",
        )
        .await;
        one.close().await;
        let gone = "const open = async () => (await navigator.locks.query()).held.filter(it => it.name.startsWith('doclock-kept:')); \
             while ((await open()).length > 1 || !(await kept()).includes('last words')) await new Promise(done => setTimeout(done, 50));";
        let told: Value = with_kept(&two, &format!("{{ {gone} }} const texts = 1; {there}")).await;
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
             const two = await open(1); \
             form.elements.title.value = 'by somebody else'; form.elements.kind.value = 'b'; \
             await two.keeper.saved(); \
             type('typed since'); \
             const left = two.found[0].restore(); \
             await two.keeper.flush(); \
             await new Promise(done => setTimeout(done, 300)); \
             while ((await kept()).length > 2) await new Promise(done => setTimeout(done, 50)); \
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
            "const problems = [], onproblem = problem => problems.push(problem), one = await open(0, { onproblem }); \
             type('x'.repeat(1_100_000)); \
             await one.keeper.flush(); \
             type('short'); \
             await one.keeper.flush(); \
             const [text] = await rows(store => store.getAll()), day = 86_400_000; \
             const old = n => ({ ...text, id: 'n' + n, url: '/x/' + n, at: Date.now() - n * day }); \
             await rows(store => Array.from({ length: 60 }, (_, n) => store.put(old(n))).at(-1)); \
             await end(one); \
             const two = await open(1); \
             let left; \
             do left = await rows(store => store.getAll()); while (left.length > 50); \
             const isOld = left.some(it => Date.now() - it.at > 31 * day); \
             return [problems, text.records[0].value, isOld, two.bodies()]",
        )
        .await;
        assert_eq!(told, json!([["too_large"], "short", false, ["short"]]));
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
