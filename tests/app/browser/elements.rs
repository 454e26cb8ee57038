//! The elements of `elements.js`, on the pages of the example `forms`, which have no script of their own.

mod asks;
mod markup;
mod texts;

use super::*;
use serde_json::json;

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

/// After a submit that no script has stopped, the page is expected to go, and says nothing of a loss for some seconds.
/// The page hears events from now on.
async fn until_live(page: &Page) {
    let listens = "const done = arguments[0]; \
         import('/locks/client.js').then(({ DocLock }) => DocLock.events('/locks', event => event.isLive && done()))";
    page.run_async::<()>(listens).await;
}

#[actix_web::test]
async fn a_page_that_sends_its_form_by_a_script_says_at_once_that_its_lock_is_lost() {
    forms(&[], async |stage| {
        let list = stage.author("alice").await;
        let page = stage.article(&list).await;
        until_mine(&page).await;
        until_live(&page).await;
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
        // A check joins one that is under way, which may have been sent before the logout.
        page.run::<()>(
            "const { lock } = document.querySelector('doclock-form'); setInterval(() => lock.check(), 500)",
        )
        .await;
        says(&page, "login has ended").await;
    })
    .await;
}

async fn is_read_only_of(page: &Page, element: &str) -> bool {
    page.run(&format!("return {element}.querySelector('textarea').readOnly")).await
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

/// Lets the page write down what was typed, and goes back to the list by its link.
async fn leaves(page: &Page) {
    eventually("a text is kept", async || kept(page).await != json!([])).await;
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

/// The page has an editor of its own, which writes its text into the form when that is sent.
#[actix_web::test]
async fn save_and_hand_over_sends_the_form_although_nothing_seems_to_be_typed() {
    forms(&[], async |stage| {
        let [_, _, alice, bob] = stage.one_is_asked().await;
        alice.sends_no_beacons().await;
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
        page.sends_no_beacons().await;
        page.before_each_page(
            "addEventListener('DOMContentLoaded', () => { for (const began = Date.now(); Date.now() - began < 1200;); }); \
             addEventListener('pagehide', () => { for (const began = Date.now(); Date.now() - began < 1000;); })",
        )
        .await;
        let before: String = page.run(token).await;
        for _ in 0..crate::rig::depth().min(3) {
            page.reload().await;
            until_mine(&page).await;
            assert_eq!(page.run::<String>(token).await, before);
        }
        // After each save.
        let other = stage.article(&list).await;
        other.sends_no_beacons().await;
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
