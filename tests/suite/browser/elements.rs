//! The elements of `elements.js`, on the pages of the example `forms`, which have no script of their own.

use serde_json::json;

use super::*;

const BAR: &str = "document.querySelector('doclock-form').shadowRoot.querySelector";
const ABOUT: &str = "/article/about-us";

/// Runs a test on the example, and then checks that no page has complained.
async fn forms(args: &[&str], test: impl AsyncFnOnce(&Stage)) {
    stage(|| Editor::of_forms(args), test).await;
}

impl Stage {
    /// The list of articles, in the browser of a person who has logged in.
    async fn author(&self, name: &str) -> Page {
        let browser = Browser::start().await;
        self.browsers.borrow_mut().push(browser.clone());
        let page = browser.open(&self.editor.url("/")).await;
        page.run::<()>(&format!(
            "document.querySelector('[name=name]').value = '{name}'; document.forms[0].submit()"
        ))
        .await;
        page.until("document.querySelector('form').action.endsWith('/logout')").await;
        page
    }

    /// The page of the first article, beside this one.
    async fn article(&self, page: &Page) -> Page {
        page.beside(&self.editor.url(ABOUT)).await
    }

    /// The lists of Alice and Bob, and the article that Alice edits.
    async fn one_edits(&self) -> [Page; 3] {
        let (list, bobs) = (self.author("alice").await, self.author("bob").await);
        let alice = self.article(&list).await;
        until_mine(&alice).await;
        [list, bobs, alice]
    }

    /// As [`one_edits`](Self::one_edits), and Bob's article, on which he has asked for it.
    async fn one_is_asked(&self) -> [Page; 4] {
        let [list, bobs, alice] = self.one_edits().await;
        let bob = self.article(&bobs).await;
        says(&bob, "alice").await;
        bob.run::<()>("document.querySelector('doclock-form').lock.ask('x')").await;
        is_asked(&alice, "bob").await;
        [list, bobs, alice, bob]
    }

    /// The page of the first article, beside this one, without JavaScript.
    async fn plain_article(&self, page: &Page) -> Page {
        let page = page.beside("about:blank").await;
        page.forbid_scripts().await;
        page.go(&self.editor.url(ABOUT)).await;
        page
    }
}

async fn until_mine(page: &Page) {
    page.until("document.querySelector('doclock-form').lock.token && !document.getElementById('text').readOnly").await;
}

/// Waits until the bar of the element says this.
async fn says(page: &Page, part: &str) {
    page.until(&format!("{BAR}('[part=says]').textContent.includes('{part}')")).await;
}

/// Presses a button of the element.
async fn press(page: &Page, button: &str) {
    page.until(&format!("{BAR}('[part={button}]').checkVisibility()")).await;
    page.run::<()>(&format!("{BAR}('[part={button}]').click()")).await;
}

async fn is_read_only(page: &Page) -> bool {
    page.run("return document.getElementById('text').readOnly && document.getElementById('save').disabled").await
}

async fn writes(page: &Page, text: &str) {
    page.run::<()>("document.getElementById('text').select()").await;
    page.write("text", text).await;
}

/// Presses the button, and waits for the page that a save leads to.
async fn saves(page: &Page) {
    page.run::<()>("window.isOld = true").await;
    page.click("save").await;
    let redirected = "performance.getEntriesByType('navigation')[0].redirectCount === 1";
    page.until(&format!("!window.isOld && {redirected}")).await;
}

#[actix_web::test]
async fn an_ordinary_form_is_locked_saved_and_released_without_a_script_of_its_own() {
    forms(&[], async |stage| {
        let [list, bobs, alice] = stage.one_edits().await;
        let bob = stage.article(&bobs).await;
        says(&bob, "alice").await;
        assert!(is_read_only(&bob).await);
        let badge = "document.querySelector('doclock-badge').shadowRoot.textContent";
        bobs.until(&format!("{badge}.includes('alice')")).await;
        list.until(&format!("{badge} === 'You are editing this.'")).await;

        for page in [&alice, &bob, &bobs] {
            let faults = page.faults().await;
            assert!(faults.is_empty(), "{faults:#?}");
        }
        press(&bob, "wait").await;
        press(&bob, "stop").await;
        writes(&alice, "first").await;
        saves(&alice).await;
        until_mine(&alice).await;
        writes(&alice, "second").await;
        saves(&alice).await;
        assert_eq!(alice.value("text").await, "second");
        says(&bob, "has saved").await;
        until_mine(&alice).await;
        alice.click("close").await;
        alice.until("location.pathname === '/'").await;
        list.until(&format!("{badge} === ''")).await;
        assert_eq!(bob.value("text").await, "", "nothing changes under the eyes of a reader");
        press(&bob, "stored").await;
        until_mine(&bob).await;
        assert_eq!(bob.value("text").await, "second");
    })
    .await;
}

#[actix_web::test]
async fn two_tabs_of_one_person_never_edit_at_once_and_the_older_text_stays() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let first = stage.article(&list).await;
        until_mine(&first).await;
        writes(&first, "of the first tab").await;
        let second = stage.article(&list).await;
        says(&second, "another tab").await;
        press(&second, "takeOver").await;
        until_mine(&second).await;
        says(&first, "another tab").await;
        assert!(is_read_only(&first).await);
        assert_eq!(first.value("text").await, "of the first tab");
        writes(&second, "of the second tab").await;
        saves(&second).await;
        until_mine(&second).await;

        press(&first, "takeOver").await;
        says(&first, "has been saved since").await;
        assert!(is_read_only(&first).await);
        press(&first, "replace").await;
        until_mine(&first).await;
        saves(&first).await;
        assert_eq!(first.value("text").await, "of the first tab");
    })
    .await;
}

#[actix_web::test]
async fn an_element_that_is_moved_keeps_its_lock_and_one_that_is_removed_gives_it_back() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        let token = "document.querySelector('doclock-form').lock.token";
        page.run::<()>(&format!("window.before = {token}; document.body.append(document.querySelector('doclock-form'))")).await;
        page.run::<()>("window.gone = document.querySelector('doclock-form')").await;
        page.until(&format!("{token} === before")).await;
        page.run::<()>("gone.remove()").await;
        page.until("gone.lock === null").await;
        assert!(!is_read_only_of(&page, "gone").await, "as without the element");
        list.until("document.querySelector('doclock-badge').dataset.state === 'free'").await;
        page.run::<()>("document.body.append(gone)").await;
        until_mine(&page).await;
        // Another form in its place, and another element, as by htmx: the lock is passed on.
        page.run::<()>("window.before = gone.lock.token; gone.innerHTML = '<form method=post><input id=text name=text></form>'").await;
        page.until("gone.lock?.token === before && gone.querySelector('form').action.includes(before)").await;
        page.run::<()>("gone.outerHTML = gone.outerHTML; window.next = document.querySelector('doclock-form')").await;
        page.until("next !== gone && next.lock?.token === before && gone.lock === null").await;
        // Also with a lock that only an input would take.
        let lazy = "next.setAttribute('on', 'input'); next.outerHTML = next.outerHTML; \
             window.last = document.querySelector('doclock-form')";
        page.run::<()>(lazy).await;
        page.until("last !== next && next.lock === null && last.lock?.token === before").await;
        page.run::<()>("return last.lock.check()").await;
        page.until("last.lock.token === before").await;
    })
    .await;
}

/// React and others write an attribute as a property, if the element has one of that name.
#[actix_web::test]
async fn a_framework_may_write_the_address_of_the_lock_as_a_property() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        let made = "'use strict'; const form = document.querySelector('doclock-form'), url = form.getAttribute('lock'); \
             window.next = document.createElement('doclock-form'); \
             next.innerHTML = form.innerHTML; \
             next.lock = url; \
             form.replaceWith(next); \
             return next.getAttribute('lock') === url";
        assert!(page.run::<bool>(made).await);
        until_mine(&page).await;
        page.run::<()>("'use strict'; next.remove(); next.lock = undefined").await;
        page.until("!next.hasAttribute('lock') && next.lock === null").await;
        list.until("document.querySelector('doclock-badge').dataset.state === 'free'").await;
    })
    .await;
}

/// After a submit that no script has stopped, the page is expected to go, and says nothing of a loss for some seconds.
#[actix_web::test]
async fn a_page_that_sends_its_form_by_a_script_says_at_once_that_its_lock_is_lost() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        page.run::<()>(
            "const now = performance.now(); \
             performance.now = () => now; \
             const form = document.querySelector('doclock-form form'); \
             form.addEventListener('submit', event => event.preventDefault()); \
             form.requestSubmit()",
        )
        .await;
        list.run::<()>("document.querySelector('form').submit()").await;
        list.until("document.querySelector('[name=name]')").await;
        page.run::<()>("return document.querySelector('doclock-form').lock.check()").await;
        says(&page, "login has ended").await;
    })
    .await;
}

async fn is_read_only_of(page: &Page, element: &str) -> bool {
    page.run(&format!("return {element}.querySelector('textarea').readOnly")).await
}

/// As Turbo and htmx keep them.
#[actix_web::test]
async fn a_copy_of_a_closed_form_opens_when_its_lock_is_there_and_a_sorted_list_keeps_its_badges() {
    forms(&[], async |stage| {
        let [_, bobs, alice] = stage.one_edits().await;
        let bob = stage.article(&bobs).await;
        says(&bob, "alice").await;
        assert!(is_read_only(&bob).await);
        let badge = "document.querySelector('[lock$=about-us]').shadowRoot.textContent";
        bobs.until(&format!("{badge}.includes('alice')")).await;
        let sorted: String = bobs
            .run(&format!(
                "const rows = document.querySelector('ul'); rows.append(rows.firstElementChild); return {badge}"
            ))
            .await;
        assert!(sorted.contains("alice"), "{sorted}");

        bob.run::<()>("const old = document.querySelector('doclock-form'); old.replaceWith(old.cloneNode(true))").await;
        says(&bob, "alice").await;
        alice.click("close").await;
        says(&bob, "Nobody").await;
        press(&bob, "edit").await;
        until_mine(&bob).await;
        assert!(!bob.run::<bool>("return document.getElementById('save').disabled").await);
    })
    .await;
}

#[actix_web::test]
async fn the_version_in_the_address_of_a_form_counts_and_without_one_a_save_that_was_told_does() {
    forms(&[], async |stage| {
        let [_, bobs, alice] = stage.one_edits().await;
        let (older, without) = (stage.article(&bobs).await, stage.article(&bobs).await);
        let forget = "const old = document.querySelector('doclock-form'), next = old.cloneNode(true); \
             next.querySelector('form').setAttribute('action', location.pathname); old.replaceWith(next)";
        without.run::<()>(forget).await;
        for page in [&older, &without] {
            says(page, "alice").await;
        }
        writes(&alice, "by alice").await;
        alice.click("close").await;
        for (page, current) in [(&older, json!(false)), (&without, Value::Null)] {
            says(page, "has saved").await;
            press(page, "edit").await;
            says(page, "has been saved since").await;
            let lock = "document.querySelector('doclock-form').lock";
            assert_eq!(page.run::<Value>(&format!("return {lock}.current")).await, current);
            assert!(is_read_only(page).await);
            // And once more.
            page.run::<()>("document.querySelector('doclock-form').lock.release()").await;
            says(page, "Nobody").await;
            press(page, "edit").await;
            says(page, "has been saved since").await;
            assert!(is_read_only(page).await);
            page.run::<()>("document.querySelector('doclock-form').remove()").await;
        }
    })
    .await;
}

#[actix_web::test]
async fn whoever_types_and_presses_enter_at_once_is_sent_when_the_lock_is_there() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        page.run::<()>("document.querySelector('doclock-form').setAttribute('on', 'input')").await;
        page.until("!document.querySelector('doclock-form').lock.busy").await;
        page.run::<()>("document.querySelector('doclock-form').lock.release()").await;
        list.until("document.querySelector('doclock-badge').dataset.state === 'free'").await;
        let types = "window.isOld = true; \
             const title = document.getElementById('title'); \
             title.value = 'at once'; \
             title.dispatchEvent(new Event('input', { bubbles: true })); \
             document.getElementById('article').requestSubmit(document.getElementById('save')); \
             document.getElementById('article').requestSubmit(document.getElementById('close'))";
        page.run::<()>(types).await;
        page.until("!window.isOld && document.title === 'at once'").await;
    })
    .await;
}

#[actix_web::test]
async fn a_wrong_address_says_so_and_leaves_the_form_alone() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        page.run::<()>("window.told = []; console.error = (...all) => told.push(all.join(' ')); document.querySelector('doclock-form').setAttribute('lock', '/nowhere')").await;
        says(&page, "wrong").await;
        assert!(!is_read_only_of(&page, "document").await);
        page.until("told.length === 1 && told[0].includes('nowhere')").await;
        // An address that the server does not know.
        let unknown = "window.fetch = async () => new Response('<h1>Not found</h1>', { status: 404 }); \
             window.EventSource = class extends EventTarget { close() {} }; \
             document.querySelector('doclock-form').setAttribute('lock', '/lock/article/about-us')";
        page.run::<()>(unknown).await;
        says(&page, "wrong").await;
    })
    .await;
}

#[actix_web::test]
async fn a_server_that_is_killed_loses_nothing_that_was_typed_into_a_form() {
    let _turn = STAGES.acquire().await.unwrap();
    let shared = rig::mongod::shared_replica_set().await;
    let database = rig::fresh_database(shared.uri()).await;
    let secret = "0123456789".repeat(5);
    let args = ["--mongodb", shared.uri(), "--database", database.name(), "--secret", &secret];
    let mut stage = Stage { editor: Editor::of_forms(&args), browsers: RefCell::default() };
    let list = stage.author("alice").await;
    let page = stage.article(&list).await;
    until_mine(&page).await;
    writes(&page, "typed before the crash").await;
    let (url, address) = (stage.editor.url(ABOUT), stage.editor.url("").replace("http://", ""));
    drop(std::mem::replace(&mut stage.editor, Editor::of_forms(&args)));
    page.click("save").await;
    page.until("location.protocol === 'chrome-error:'").await;
    let again = Editor::of_forms(&[&args[..], &["--bind", &address]].concat());
    page.go(&url).await;
    until_mine(&page).await;
    assert_eq!(
        page.value("text").await,
        "",
        "nothing was stored, and nothing is restored silently"
    );
    press(&page, "restore").await;
    saves(&page).await;
    assert_eq!(page.value("text").await, "typed before the crash");
    drop((page, list, again));
}

#[actix_web::test]
async fn the_same_pages_work_without_javascript() {
    forms(&[], async |stage| {
        let (list, bobs) = (stage.author("alice").await, stage.author("bob").await);
        let (alice, bob) = (stage.plain_article(&list).await, stage.plain_article(&bobs).await);
        // Without the lock nothing is saved, and the text stays.
        alice.write("text", "typed").await;
        alice.click("save").await;
        alice.until_says("why", "do not have the lock").await;
        assert_eq!(alice.value("text").await, "typed");
        alice.click("lock").await;
        alice.until_says("stored-title", "about-us").await;
        assert_eq!(alice.value("text").await, "typed");
        bob.click("lock").await;
        bob.until_says("why", "is being edited by alice").await;
        saves(&alice).await;
        assert_eq!(alice.value("text").await, "typed");
        let older = stage.plain_article(&list).await;
        alice.write("text", "typed more").await;
        saves(&alice).await;
        older.write("text", "typed older").await;
        older.click("save").await;
        older.until_says("why", "has been saved since you opened it").await;
        assert_eq!(older.value("text").await, "typed older");
        alice.click("close").await;
        alice.until("location.pathname === '/'").await;
        bob.click("lock").await;
        // What is in his fields is not what is stored: he sees both.
        bob.until_says("stored-text", "typed more").await;
        assert_eq!(bob.value("text").await, "");
    })
    .await;
}

/// What the element says to the holder about asks.
async fn is_asked(page: &Page, part: &str) {
    page.until(&format!("{BAR}('[part=asksSays]').textContent.includes('{part}')")).await;
}

async fn tells(page: &Page, part: &str) {
    page.until(&format!("{BAR}('[part=more]').textContent.includes('{part}')")).await;
}

/// Writes into a line of the element.
async fn words(page: &Page, line: &str, text: &str) {
    page.until(&format!("{BAR}('[part={line}]').checkVisibility()")).await;
    page.run::<()>(&format!("{BAR}('[part={line}]').value = '{text}'")).await;
}

#[actix_web::test]
async fn whoever_waits_asks_the_holder_who_answers_saves_and_hands_over() {
    forms(&[], async |stage| {
        let [_, bobs, alice] = stage.one_edits().await;
        let bob = stage.article(&bobs).await;
        says(&bob, "alice").await;
        press(&bob, "ask").await;
        bob.until(
            "document.querySelector('doclock-form').shadowRoot.activeElement.matches('[part=why]')",
        )
        .await;
        words(&bob, "why", "<b>the meeting</b>").await;
        press(&bob, "send").await;
        tells(&bob, "You have asked for it").await;
        is_asked(&alice, "bob").await;
        is_asked(&alice, "<b>the meeting</b>").await;
        for page in [&alice, &bob] {
            let faults = page.faults().await;
            assert!(faults.is_empty(), "{faults:#?}");
        }
        words(&alice, "word", "one more line").await;
        press(&alice, "soon").await;
        tells(&bob, "soon. \u{2068}one more line").await;
        is_asked(&alice, "You have told").await;

        writes(&alice, "for the meeting").await;
        alice.run::<()>("window.isOld = true").await;
        press(&alice, "pass").await;
        alice.until("!window.isOld").await;
        says(&alice, "bob").await;
        bob.until("document.querySelector('doclock-form').lock.token").await;
        says(&bob, "has been saved since").await;
        press(&bob, "stored").await;
        until_mine(&bob).await;
        assert_eq!(bob.value("text").await, "for the meeting");
        assert_eq!(
            bob.run::<Value>("return document.querySelector('doclock-form').lock.asks").await,
            json!([])
        );
    })
    .await;
}

/// As in another tab: the page hears nothing but that its lock is gone.
#[actix_web::test]
async fn a_document_that_is_gone_is_called_deleted_on_the_open_page() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        writes(&page, "typed").await;
        // The server refuses a new lock.
        page.run::<()>(
            "window.real = fetch; \
             const refusal = { status: 404, code: 'not_found', deleted: true, detail: 'article/about-us has been deleted' }; \
             window.fetch = async (url, init) => init?.method === 'POST' && url.endsWith('/about-us') \
                 ? new Response(JSON.stringify(refusal), { status: 404 }) : real(url, init); \
             document.querySelector('doclock-form').lock.release()",
        )
        .await;
        says(&page, "Nobody").await;
        press(&page, "edit").await;
        page.until(&format!(
            "/This document has been deleted/.test({BAR}('[part=bar]').textContent)"
        ))
        .await;
        // The server is asked whether the version of the page is still stored.
        page.run::<()>(
            "window.fetch = async (url, ...rest) => { \
                 const answer = await real(url, ...rest); \
                 if (!/shown=/.test(url) || !answer.ok) return answer; \
                 const state = { ...await answer.json(), version: null, current: false }; \
                 return new Response(JSON.stringify(state), answer); \
             }; \
             document.querySelector('doclock-form').lock.check()",
        )
        .await;
        says(&page, "has been deleted").await;
        page.until(&format!("{BAR}('[part=more]').textContent === 'Your text is not saved.'"))
            .await;
        assert_eq!(page.value("text").await, "typed");
    })
    .await;
}

#[actix_web::test]
async fn a_document_that_was_handed_over_can_be_edited_again() {
    forms(&[], async |stage| {
        let [_, _, alice, bob] = stage.one_is_asked().await;
        writes(&alice, "handed over").await;
        // The save leads to a page without the form.
        alice.run::<()>("document.getElementById('save').remove()").await;
        press(&alice, "pass").await;
        alice.until("location.pathname === '/' && document.readyState === 'complete'").await;
        let passed = "return sessionStorage.getItem('doclock-passed') !== null";
        assert!(alice.run::<bool>(passed).await);
        alice
            .run::<()>(
                "window.passed = JSON.parse(sessionStorage.getItem('doclock-passed')); \
                 const saved = document.createElement('doclock-saved'); \
                 saved.setAttribute('lock', '/locks/article/about-us'); document.body.append(saved)",
            )
            .await;
        assert!(!alice.run::<bool>(passed).await);
        bob.until("document.querySelector('doclock-form').lock.token").await;
        bob.run::<()>("document.querySelector('doclock-form').lock.release()").await;
        says(&bob, "Nobody").await;
        // A page that says nothing: the next form was not loaded by the save.
        alice
            .run::<()>(
                "const sent = performance.timeOrigin + performance.now() - 3100; \
                 sessionStorage.setItem('doclock-passed', JSON.stringify({ ...passed, sent }))",
            )
            .await;
        alice.go(&stage.editor.url("/article/about-us")).await;
        until_mine(&alice).await;
        alice.run_async::<()>("setTimeout(arguments[0], 300)").await;
        until_mine(&alice).await;
    })
    .await;
}

#[actix_web::test]
async fn a_save_that_is_refused_hands_nothing_over_and_a_page_that_goes_asks_nothing() {
    forms(&["--ttl-secs", "60"], async |stage| {
        let [_, _, alice, bob] = stage.one_is_asked().await;
        // Another program has saved.
        let version = "document.querySelector('doclock-form').lock.version = '0'.repeat(32)";
        alice.run::<()>(version).await;
        writes(&alice, "typed").await;
        alice.run::<()>("window.isOld = true").await;
        press(&alice, "pass").await;
        alice
            .until(
                "!window.isOld && document.querySelector('doclock-form').hasAttribute('unsaved')",
            )
            .await;
        until_mine(&alice).await;
        assert_eq!(alice.value("text").await, "typed");
        is_asked(&alice, "bob").await;
        bob.go(&stage.editor.url("/")).await;
        alice.until("!document.querySelector('doclock-form').lock.asks.length").await;
    })
    .await;
}

#[actix_web::test]
async fn a_hidden_holder_is_told_by_the_title_and_a_silent_one_is_noticed() {
    forms(&[], async |stage| {
        let [_, bobs, alice] = stage.one_edits().await;
        let bob = stage.article(&bobs).await;
        says(&bob, "alice").await;
        alice.run::<()>("Object.defineProperty(document, 'hidden', { get: () => true, configurable: true })").await;
        let title = alice.run::<String>("return document.title").await;
        bob.run::<()>("window.asked = document.querySelector('doclock-form').lock.ask('x')").await;
        alice.until("document.title.includes('bob')").await;
        bob.run::<()>("window.now = Date.now; Date.now = () => now() + 61_000").await;
        tells(&bob, "No answer yet").await;
        bob.run::<()>("Date.now = window.now").await;
        press(&alice, "refuse").await;
        alice.until(&format!("document.title === {}", json!(title))).await;
        press(&bob, "stop").await;
        alice.until("!document.querySelector('doclock-form').lock.asks.length").await;
    })
    .await;
}

#[actix_web::test]
async fn an_ask_belongs_to_its_page_and_another_tab_of_the_person_waits_on() {
    forms(&[], async |stage| {
        let [_, bobs, alice] = stage.one_edits().await;
        let [asks, waits] = [stage.article(&bobs).await, stage.article(&bobs).await];
        for page in [&asks, &waits] {
            says(page, "alice").await;
        }
        press(&asks, "ask").await;
        press(&asks, "send").await;
        is_asked(&alice, "bob").await;
        press(&waits, "wait").await;
        waits.until("document.querySelector('doclock-form').lock.waiting").await;
        let asking = "return document.querySelector('doclock-form').lock.asking";
        assert_eq!(waits.run::<Value>(asking).await, Value::Null);
        asks.go("about:blank").await;
        alice.until("!document.querySelector('doclock-form').lock.asks.length").await;
        alice.click("close").await;
        waits.until("document.querySelector('doclock-form').lock.token").await;
    })
    .await;
}

#[actix_web::test]
async fn a_page_that_comes_back_without_a_save_keeps_its_lock_after_handing_over() {
    forms(&[], async |stage| {
        let [_, bobs, alice] = stage.one_edits().await;
        let bob = stage.article(&bobs).await;
        says(&bob, "alice").await;
        bob.run::<()>("document.querySelector('doclock-form').lock.ask('x')").await;
        is_asked(&alice, "bob").await;
        // The answer to the save is the error page of a proxy, and the person goes back.
        let version = "document.querySelector('doclock-form').lock.version";
        alice
            .run::<()>(&format!(
                "sessionStorage.setItem('doclock-passed', JSON.stringify({{ url: '/locks{ABOUT}', version: {version}, sent: Date.now() }}))"
            ))
            .await;
        alice.go(&stage.editor.url(ABOUT)).await;
        until_mine(&alice).await;
        alice.until("!sessionStorage.getItem('doclock-passed')").await;
        is_asked(&alice, "bob").await;
        // A check of the page itself stops the save.
        alice.run::<()>("document.querySelector('form').addEventListener('submit', event => event.preventDefault(), { once: true })").await;
        writes(&alice, "typed").await;
        press(&alice, "pass").await;
        alice.until("!sessionStorage.getItem('doclock-passed')").await;
        saves(&alice).await;
        until_mine(&alice).await;
        is_asked(&alice, "bob").await;
        press(&alice, "pass").await;
        bob.until("document.querySelector('doclock-form').lock.token").await;
    })
    .await;
}

/// How many texts this browser keeps, and what was typed in them.
async fn kept(page: &Page) -> Value {
    page.run_async(
        "const done = arguments[0], request = indexedDB.open('doclock-kept'); \
         request.onsuccess = () => { \
             const all = request.result.transaction('texts').objectStore('texts').getAll(); \
             all.onsuccess = () => { \
                 request.result.close(); \
                 done(all.result.map(it => [it.url, ...it.records.map(it => [it.name, it.base, it.value])])); \
             }; \
         }",
    )
    .await
}

/// Lets the page write down what was typed, and goes back to the list by its link.
async fn leaves(page: &Page) {
    page.run_async::<()>("setTimeout(arguments[0], 800)").await;
    page.click_on("a[href='/']").await;
    page.until("location.pathname === '/'").await;
}

/// Back, until the form is shown.
async fn goes_back(page: &Page) {
    while !page.run::<bool>("return location.pathname.startsWith('/article/')").await {
        page.back().await;
    }
    page.until("document.querySelector('doclock-form')?.lock").await;
}

#[actix_web::test]
async fn a_form_whose_next_page_has_no_form_is_known_as_saved() {
    forms(&[], async |stage| {
        let [list, bobs, alice] = stage.one_edits().await;
        writes(&alice, "by alice").await;
        alice.click("close").await;
        alice.until("location.pathname === '/'").await;
        goes_back(&alice).await;
        until_mine(&alice).await;
        alice
            .until(&format!(
                "{BAR}('[part=says]').textContent === '' && {BAR}('[part=more]').textContent === ''"
            ))
            .await;
        alice.click("close").await;
        alice.until("location.pathname === '/'").await;
        list.until("document.querySelector('doclock-badge').dataset.state === 'free'").await;

        let bob = stage.article(&bobs).await;
        until_mine(&bob).await;
        writes(&bob, "by alice, and a line by bob").await;
        bob.click("close").await;
        bob.until("location.pathname === '/'").await;
        let again = stage.article(&list).await;
        until_mine(&again).await;
        again.run_async::<()>("setTimeout(arguments[0], 1000)").await;
        assert!(
            !again.run::<bool>(&format!("return {BAR}('[part=discard]').checkVisibility()")).await
        );
        assert_eq!(kept(&again).await, json!([]));
    })
    .await;
}

/// The page has an editor of its own, which writes its text into the form when that is sent.
#[actix_web::test]
async fn save_and_hand_over_sends_the_form_although_nothing_seems_to_be_typed() {
    forms(&[], async |stage| {
        let [_, bobs, alice] = stage.one_edits().await;
        let bob = stage.article(&bobs).await;
        says(&bob, "alice").await;
        bob.run::<()>("document.querySelector('doclock-form').lock.ask('x')").await;
        is_asked(&alice, "bob").await;
        let editor = "window.isOld = true; \
             document.querySelector('doclock-form form').addEventListener('submit', () => { document.getElementById('text').value = 'of the editor'; })";
        // What the server refuses is not handed over.
        let version = "document.querySelector('doclock-form').lock.version = '0'.repeat(32)";
        alice.run::<()>(&format!("{editor}; {version}")).await;
        press(&alice, "pass").await;
        alice.until("!window.isOld && document.querySelector('doclock-form').hasAttribute('unsaved')").await;
        until_mine(&alice).await;
        is_asked(&alice, "bob").await;
        alice.go(&stage.editor.url(ABOUT)).await;
        until_mine(&alice).await;
        alice.run::<()>(editor).await;
        press(&alice, "pass").await;
        alice.until("!window.isOld").await;
        bob.until("document.querySelector('doclock-form').lock.token").await;
        press(&bob, "stored").await;
        until_mine(&bob).await;
        assert_eq!(bob.value("text").await, "of the editor");
    })
    .await;
}

#[actix_web::test]
async fn a_busy_page_and_one_without_storage_keep_the_id_of_their_tab() {
    forms(&["--ttl-secs", "60"], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        let token = "return document.querySelector('doclock-form').lock.token";
        page.before_each_page(
            "addEventListener('DOMContentLoaded', () => { for (const began = Date.now(); Date.now() - began < 1200;); }); \
             addEventListener('pagehide', () => { for (const began = Date.now(); Date.now() - began < 1000;); })",
        )
        .await;
        let before: String = page.run(token).await;
        for _ in 0..3 {
            page.reload().await;
            until_mine(&page).await;
            assert_eq!(page.run::<String>(token).await, before);
        }
        // After each save.
        let other = stage.article(&list).await;
        other.before_each_page("Object.defineProperty(window, 'sessionStorage', { get() { throw new DOMException('no', 'SecurityError'); } })").await;
        page.click("close").await;
        page.until("location.pathname === '/'").await;
        other.reload().await;
        until_mine(&other).await;
        let before: String = other.run(token).await;
        for text in ["one", "two"] {
            writes(&other, text).await;
            saves(&other).await;
            until_mine(&other).await;
            assert_eq!(other.run::<String>(token).await, before);
        }
        // A duplicate is another tab.
        let twice = other.duplicate().await;
        says(&twice, "another tab").await;
    })
    .await;
}

#[actix_web::test]
async fn after_the_texts_are_cleared_back_shows_none_to_the_next_person() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        writes(&page, "a secret").await;
        leaves(&page).await;
        assert_eq!(kept(&page).await.as_array().unwrap().len(), 1);
        // In another tab, and then somebody else logs in.
        let clears = "import('/locks/client.js').then(({ DocLock }) => DocLock.clearKept(() => true)).then(arguments[0])";
        assert!(list.run_async::<bool>(clears).await);
        list.run::<()>("document.querySelector('form').submit()").await;
        list.until("document.querySelector('[name=name]')").await;
        list.run::<()>("document.querySelector('[name=name]').value = 'carol'; document.forms[0].submit()").await;
        list.until("document.querySelector('form').action.endsWith('/logout')").await;
        goes_back(&page).await;
        page.until("document.getElementById('text').value === ''").await;
        until_mine(&page).await;
        assert_eq!(kept(&page).await, json!([]));
    })
    .await;
}

#[actix_web::test]
async fn a_kept_text_is_shown_while_another_person_edits_and_put_back_later() {
    forms(&[], async |stage| {
        let (list, bobs) = (stage.author("alice").await, stage.author("bob").await);
        let page = stage.article(&list).await;
        until_mine(&page).await;
        writes(&page, "not saved").await;
        leaves(&page).await;
        list.until("document.querySelector('doclock-badge').dataset.state === 'free'").await;
        let bob = stage.article(&bobs).await;
        until_mine(&bob).await;
        let alice = stage.article(&list).await;
        says(&alice, "bob").await;
        alice
            .until(&format!("{BAR}('[part=differences]').textContent.includes('not saved')"))
            .await;
        assert!(
            !alice.run::<bool>(&format!("return {BAR}('[part=restore]').checkVisibility()")).await
        );
        bob.click("close").await;
        says(&alice, "Nobody").await;
        press(&alice, "edit").await;
        press(&alice, "restore").await;
        saves(&alice).await;
        assert_eq!(alice.value("text").await, "not saved");
    })
    .await;
}

#[actix_web::test]
async fn a_text_that_was_typed_for_one_document_is_never_kept_for_another() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        writes(&page, "of about-us").await;
        // The page shows another document in the same form: its text comes first, and then the address of its lock.
        page.run::<()>(
            "document.getElementById('text').value = 'the price list'; \
             document.querySelector('form').setAttribute('action', '/article/price%20list'); \
             document.querySelector('doclock-form').setAttribute('lock', '/locks/article/price%20list')",
        )
        .await;
        until_mine(&page).await;
        page.run::<()>("document.getElementById('title').focus()").await;
        page.run_async::<()>("setTimeout(arguments[0], 800)").await;
        assert_eq!(kept(&page).await, json!([["/locks/article/about-us", ["text", "", "of about-us"]]]));
        let unsaved = format!("return {BAR}('[part=more]').textContent");
        assert_eq!(page.run::<String>(&unsaved).await, "");
    })
    .await;
}

/// Editors of their own: a `contenteditable`, a form-associated element, and hooks for others.
#[actix_web::test]
async fn editors_of_their_own_are_closed_with_the_form_and_kept() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        page.run::<()>(
            "customElements.define('x-field', class extends HTMLElement { \
                 static formAssociated = true; \
                 value = ''; \
                 constructor() { super(); this.attachInternals(); } \
             }); \
             const form = document.getElementById('article'); \
             window.closes = []; \
             form.addEventListener('doclock-close', event => closes.push(event.detail.isClosed)); \
             form.insertAdjacentHTML('beforeend', '<div id=rich contenteditable>old</div><x-field id=own name=own></x-field> \
                 <input id=page-own disabled><select id=later><option>1</select><input id=read>')",
        )
        .await;
        let state = "return ['rich', 'own', 'page-own', 'later', 'read'].map(id => document.getElementById(id)) \
             .map(it => it.getAttribute('contenteditable') === 'false' || it.hasAttribute('disabled') || it.hasAttribute('readonly'))";
        assert_eq!(page.run::<Value>(state).await, json!([false, false, true, false, false]));
        page.write("rich", "typed").await;
        page.run::<()>(
            "const own = document.getElementById('own'); own.value = 'told'; \
             own.dispatchEvent(new Event('doclock-typed', { bubbles: true }))",
        )
        .await;
        page.run_async::<()>("setTimeout(arguments[0], 800)").await;
        let typed = json!([["/locks/article/about-us", ["rich", "old", "typed"], ["own", "", "told"]]]);
        assert_eq!(kept(&page).await, typed);
        page.run::<()>("document.querySelector('doclock-form').lock.release()").await;
        says(&page, "Nobody").await;
        assert_eq!(page.run::<Value>(state).await, json!([true, true, true, true, true]));
        // The page closes two of them itself, meanwhile.
        page.run::<()>("document.getElementById('later').disabled = true; document.getElementById('read').setAttribute('readonly', '')").await;
        press(&page, "edit").await;
        until_mine(&page).await;
        assert_eq!(page.run::<Value>(state).await, json!([false, false, true, true, true]));
        assert_eq!(page.run::<Value>("return closes").await, json!([true, false]));
    })
    .await;
}

#[actix_web::test]
async fn the_bar_stays_in_sight_and_the_page_may_change_its_title() {
    forms(&[], async |stage| {
        let [_, bobs, alice] = stage.one_edits().await;
        alice.run::<()>("document.getElementById('text').rows = 200; scrollTo(0, document.body.scrollHeight)").await;
        let bob = stage.article(&bobs).await;
        says(&bob, "alice").await;
        alice.run::<()>("Object.defineProperty(document, 'hidden', { get: () => true, configurable: true })").await;
        bob.run::<()>("document.querySelector('doclock-form').lock.ask('x')").await;
        is_asked(&alice, "bob").await;
        alice.until(&format!("(box => box.top >= 0 && box.bottom <= innerHeight && box.height > 0)({BAR}('[part=asks]').getBoundingClientRect())")).await;
        alice.until("document.title.includes('bob')").await;
        alice.run::<()>("document.title = 'of the page'").await;
        press(&alice, "refuse").await;
        bob.until("document.querySelector('doclock-form').lock.asking?.answer === 'no'").await;
        assert_eq!(alice.run::<String>("return document.title").await, "of the page");
    })
    .await;
}

/// As htmx does with `hx-swap="outerHTML"`: the answer takes the place of the element, which hears of nothing any more.
#[actix_web::test]
async fn a_text_whose_answer_takes_the_place_of_its_element_is_saved_and_words_after_it_are_kept() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        writes(&page, "saved").await;
        let sends = "const done = arguments[0], old = document.querySelector('doclock-form'), { lock } = old; \
             window.old = old; \
             fetch(location.pathname, { method: 'POST', headers: lock.headers(), body: new URLSearchParams(new FormData(old.querySelector('form'))) }) \
                 .then(it => it.text()).then(text => { \
                     old.outerHTML = new DOMParser().parseFromString(text, 'text/html').querySelector('doclock-form').outerHTML; \
                     setTimeout(done, 1500); \
                 })";
        page.run_async::<()>(sends).await;
        page.until("document.querySelector('doclock-form') !== window.old").await;
        until_mine(&page).await;
        assert_eq!(page.value("text").await, "saved");
        assert_eq!(kept(&page).await, json!([]));
        assert!(!page.run::<bool>(&format!("return {BAR}('[part=discard]').checkVisibility()")).await);
        writes(&page, "and more").await;
        page.run_async::<()>("setTimeout(arguments[0], 800)").await;
        assert_eq!(kept(&page).await, json!([["/locks/article/about-us", ["text", "saved", "and more"]]]));
    })
    .await;
}

#[actix_web::test]
async fn the_fields_of_a_form_may_have_the_names_of_its_methods() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        page.run::<()>(
            "const names = ['dataset', 'setAttribute', 'getAttribute', 'removeAttribute', 'getRootNode', 'closest', 'contains', 'dispatchEvent', 'requestSubmit', 'elements', 'ownerDocument']; \
             document.querySelector('doclock-form').innerHTML = `<form method=post action='${location.pathname}'>${names.map(it => `<input id='${it}' name='${it}'>`).join('')}<input id=text></form>`",
        )
        .await;
        until_mine(&page).await;
        page.write("closest", "typed").await;
        page.run_async::<()>("setTimeout(arguments[0], 800)").await;
        assert_eq!(kept(&page).await, json!([["/locks/article/about-us", ["closest", "", "typed"]]]));
        page.run::<()>("document.querySelector('doclock-form').lock.release()").await;
        page.until("document.getElementById('closest').readOnly").await;
        press(&page, "edit").await;
        until_mine(&page).await;
        assert!(!page.run::<bool>("return document.getElementById('closest').readOnly").await);
    })
    .await;
}
