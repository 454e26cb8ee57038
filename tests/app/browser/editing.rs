//! Two people and one document.

use std::time::Duration;

use actix_doclock::store::verbs::*;
use actix_doclock::{
    MongoStore,
    freeze::{End, NewFreeze, Scope},
};
use mongodb::bson::{Document, doc};
use uuid::Uuid;

use super::*;

async fn the_second_person_waits_and_sees_who_is_editing(stage: &Stage) {
    let alice = stage.person("alice").await;
    edit_first(&alice).await;
    alice.write("body", "by alice").await;

    let bob = stage.person("bob").await;
    open_first(&bob).await;
    bob.until_says("banner-title", "alice is editing this").await;
    let told = bob.text("banner-title").await;
    assert!(told.contains("since ") && told.contains(|c: char| c.is_ascii_digit()), "{told}");
    assert!(!bob.shows("form").await, "read only");

    alice.click("save-close").await;
    until_editing(&bob).await;
    assert_eq!(
        bob.value("body").await,
        "by alice",
        "he edits the latest text, not the one that he was shown first"
    );
    bob.write("body", "by bob").await;
    bob.click("save").await;
    bob.until_says("save-state", "Saved").await;
    assert_eq!(stage.text().await, "by bob");
}

#[actix_web::test]
async fn the_second_person_reads_and_then_edits_without_a_click() {
    embedded(&["--ttl-secs", "600"], the_second_person_waits_and_sees_who_is_editing).await;
}

#[actix_web::test]
async fn the_second_person_reads_and_then_edits_without_a_click_on_mongodb() {
    on_mongodb(async |stage, _| the_second_person_waits_and_sees_who_is_editing(stage).await).await;
}

#[actix_web::test]
async fn waiters_edit_in_the_order_of_their_arrival() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        bob.until_says("kicker", "waiting").await;
        let carol = stage.person("carol").await;
        open_first(&carol).await;
        carol.until_says("kicker", "waiting").await;

        alice.click("close").await;
        until_editing(&bob).await;
        carol.until_says("banner-title", "bob is editing this").await;
        bob.click("close").await;
        until_editing(&carol).await;
    })
    .await;
}

#[actix_web::test]
async fn the_focus_stays_where_it_is_when_the_lock_arrives() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        bob.until_says("kicker", "waiting").await;
        assert_eq!(bob.focused().await, "heading", "he has opened the document");
        bob.run::<()>("document.getElementById('logout').focus()").await;
        alice.click("close").await;
        until_editing(&bob).await;
        assert_eq!(bob.focused().await, "logout");
    })
    .await;
}

/// Tells the page that it is visible or hidden: a browser without a head shows all its tabs.
async fn show(page: &Page, visible: bool) {
    let state = if visible { "visible" } else { "hidden" };
    page.run::<()>(&format!(
        "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }}); \
         Object.defineProperty(document, 'visibilityState', {{ value: '{state}', configurable: true }}); \
         document.dispatchEvent(new Event('visibilitychange'))",
        !visible
    ))
    .await;
}

#[actix_web::test]
async fn a_waiter_in_a_hidden_tab_keeps_its_place_and_the_title_says_when_it_is_in() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let bob = stage.person("bob").await;
        show(&bob, false).await;
        open_first(&bob).await;
        bob.until_says("kicker", "waiting").await;
        show(&bob, true).await;
        show(&bob, false).await;
        // Notes that disappear by themselves do so at once.
        let hurry =
            "const real = setTimeout; window.setTimeout = (f, ms) => real(f, ms === 6000 ? 0 : ms)";
        bob.run::<()>(hurry).await;
        let carol = stage.person("carol").await;
        open_first(&carol).await;
        carol.until_says("kicker", "waiting").await;

        alice.click("close").await;
        carol.until_says("banner-title", "bob is editing this").await;
        bob.until("document.title.startsWith('You can edit now: ')").await;
        assert!(bob.text("toast").await.contains("You can edit now"));
        show(&bob, true).await;
        bob.until("!document.hidden && !document.title.startsWith('You')").await;
        assert!(bob.shows("toast-close").await, "he was not here to read the note");
        bob.click("toast-close").await;
        assert_eq!(bob.text("toast").await, "");
    })
    .await;
}

#[actix_web::test]
async fn an_id_that_no_url_can_name_is_a_missing_document() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        for dots in ["/#/..", "/#/."] {
            alice.go(&stage.editor.url(dots)).await;
            alice.reload().await;
            alice.until_says("toast", "There is no such document").await;
            assert!(!alice.shows("doc").await);
        }
        edit_first(&alice).await;
    })
    .await;
}

#[actix_web::test]
async fn a_waiter_can_leave_the_queue() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        bob.until_says("wait", "Only read").await;
        bob.click("wait").await;
        bob.until_says("wait", "Edit when it is free").await;

        alice.click("close").await;
        bob.until_says("banner-title", "free now").await;
        assert!(!bob.shows("form").await);
        eventually("it is free", async || stage.lock().await["state"] == "free").await;
        bob.click("enter").await;
        until_editing(&bob).await;
    })
    .await;
}

#[actix_web::test]
async fn a_visitor_reads_and_is_told_when_the_document_is_free_again() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let visitor = stage.visitor().await;
        open_first(&visitor).await;
        visitor.until_says("banner-title", "alice is editing this").await;
        visitor.until("document.querySelector('#list .badge').textContent.includes('alice')").await;
        alice.click("close").await;
        visitor.until_says("banner-title", "Log in").await;
        visitor.until("document.querySelector('#list .badge').textContent === 'Free'").await;
        assert!(!visitor.shows("form").await);
    })
    .await;
}

#[actix_web::test]
async fn a_person_whose_lock_is_taken_over_is_told_and_keeps_the_text() {
    embedded(&["--ttl-secs", "600", "--admin", "root"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        alice.write("title", "her title").await;
        alice.write("body", "not saved yet").await;

        let root = stage.person("root").await;
        open_first(&root).await;
        root.until_says("banner-title", "alice is editing this").await;
        root.click("take-over").await;
        root.until_says("holder-who", "alice").await;
        for id in ["holder-since", "holder-until"] {
            let told = root.text(id).await;
            assert!(told.contains(|c: char| c.is_ascii_digit()), "{id}: {told}");
        }
        root.click("holder-take").await;
        until_editing(&root).await;
        assert!(!root.shows("holder").await);

        alice.until_says("banner-title", "root is editing this").await;
        alice.until_disabled("save").await;
        assert_eq!(alice.value("body").await, "not saved yet");
        alice.click("copy").await;
        alice.until_says("toast", "clipboard").await;
        assert_eq!(alice.clipboard().await, "her title\n\nnot saved yet");
        root.write("body", "by root").await;
        root.click("save-close").await;
        root.until_hidden("doc").await;
        assert_eq!(stage.text().await, "by root");
    })
    .await;
}

#[actix_web::test]
async fn a_loss_without_a_change_of_the_document_costs_one_click() {
    embedded(&["--ttl-secs", "600", "--admin", "root"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        alice.write("body", "not saved yet").await;
        let root = stage.person("root").await;
        open_first(&root).await;
        root.click("take-over").await;
        root.click("holder-take").await;
        until_editing(&root).await;
        alice.until_disabled("save").await;
        root.click("close").await;

        alice.until_says("banner-text", "Nobody is editing").await;
        alice.click("enter").await;
        until_editing(&alice).await;
        assert_eq!(alice.value("body").await, "not saved yet");
        assert!(!alice.shows("saved").await, "there is no conflict to resolve");
        alice.click("save").await;
        alice.until_says("save-state", "Saved").await;
        assert_eq!(stage.text().await, "not saved yet");
    })
    .await;
}

#[actix_web::test]
async fn a_person_who_may_not_take_over_sees_the_holder_and_no_button() {
    embedded(&["--ttl-secs", "600", "--admin", "root"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        bob.click("take-over").await;
        bob.until_says("holder-who", "alice").await;
        assert!(!bob.shows("holder-take").await);
        bob.click("holder-close").await;
        bob.until_hidden("holder").await;
    })
    .await;
}

/// With markup, with marks that reverse the writing direction, and with all 200 bytes that the example
/// allows.
#[actix_web::test]
async fn a_name_is_shown_as_text_whatever_is_in_it() {
    let name = "<img src=x onerror=alert(1)>\u{202e}\u{5e9}\u{5dc}\u{200f}&amp;";
    let name = format!("{name}{}", "m".repeat(200 - name.len()));
    embedded(&["--ttl-secs", "600", "--admin", "root"], async |stage| {
        let alice = stage.visitor().await;
        let login = format!(
            "const done = arguments[0]; const headers = {{ 'Content-Type': 'application/json' }}; \
             fetch('/login', {{ method: 'POST', headers, body: JSON.stringify({{ name: {} }}) }}).then(r => done(r.status))",
            Value::from(&*name)
        );
        assert_eq!(alice.run_async::<u16>(&login).await, 204);
        alice.reload().await;
        alice.until_says("me", &name).await;
        edit_first(&alice).await;

        let root = stage.person("root").await;
        root.resize(390, 844).await;
        open_first(&root).await;
        root.until_says("banner-title", &name).await;
        root.click("take-over").await;
        root.until_says("holder-who", &name).await;
        let admin = root.beside(&stage.editor.url("/locks/admin")).await;
        admin.resize(390, 844).await;
        admin.until(&format!("document.querySelector('#locks tbody').textContent.includes({})", Value::from(&*name))).await;
        for page in [&root, &admin] {
            assert_eq!(page.run::<u32>("return document.querySelectorAll('img').length").await, 0);
            assert!(fits(page).await, "no scrolling sideways");
            let stray = "const is = (e, t) => getComputedStyle(e).unicodeBidi.startsWith(t); \
                 return [...document.querySelectorAll('main *, dialog *')].filter(e => e.checkVisibility() && \
                 [...e.childNodes].some(n => n.nodeType === 3 && n.data.includes('\u{202e}')) && !is(e, 'isolate')).map(e => e.outerHTML)";
            assert_eq!(page.run::<Vec<String>>(stray).await, [""; 0], "the name reverses the text next to it");
        }
    })
    .await;
}

#[actix_web::test]
async fn a_document_is_created_locked_and_deleted_after_a_question() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let rows =
            |count: usize| format!("document.querySelectorAll('#list li').length === {count}");
        let alice = stage.person("alice").await;
        let bob = stage.person("bob").await;
        alice.click("new").await;
        until_editing(&alice).await;
        alice.write("title", "A new document").await;
        alice.click("save").await;
        alice.until_says("save-state", "Saved").await;

        let new = stage.get("/api/workitem").await[3].take();
        assert_eq!(new["title"], "A new document");
        let lock = format!("/locks/workitem/{}", new["id"].as_str().unwrap());
        assert_eq!(stage.get(&lock).await["holder"]["label"], "alice");

        alice.click("delete").await;
        alice.until_says("ask-head", "Delete this document?").await;
        alice.click("ask-no").await;
        assert_eq!(stage.get("/api/workitem").await.as_array().unwrap().len(), 4);
        alice.click("delete").await;
        alice.click("ask-yes").await;
        alice.until(&rows(3)).await;
        alice.until_says("toast", "is deleted").await;
        assert_eq!(stage.get("/api/workitem").await.as_array().unwrap().len(), 3);
        assert_eq!(stage.get(&lock).await["state"], "free");
        bob.until(&rows(3)).await;
    })
    .await;
}

#[actix_web::test]
async fn the_list_learns_the_state_of_all_rows_by_one_request() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        let free = "[...document.querySelectorAll('#list .badge')].every(it => it.dataset.state === 'free')";
        alice.until(free).await;
        let requests = "return performance.getEntriesByType('resource').map(it => new URL(it.name).pathname)";
        let paths: Vec<String> = alice.run(requests).await;
        assert!(paths.iter().any(|path| path == "/locks/status"), "{paths:?}");
        let alone = paths.iter().filter(|path| path.starts_with("/locks/workitem/")).count();
        assert_eq!(alone, 0, "{paths:?}");

        let bob = stage.person("bob").await;
        edit_first(&bob).await;
        alice.until("document.querySelector('#list .badge').dataset.state === 'held'").await;
    })
    .await;
}

#[actix_web::test]
async fn a_freeze_is_explained_and_a_waiting_page_edits_after_the_thaw() {
    on_mongodb(async |stage, database| {
        let store = MongoStore::new(database);
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let (reason, by) = ("New numbers <b>".to_owned(), "root".to_owned());
        let end = End::In(Duration::from_secs(60 * 60));
        let freeze = NewFreeze { id: Uuid::new_v4(), reason, by, end };
        store.set_freeze(&Scope::All, Some(&freeze), Deadline::NONE).await.unwrap();
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        alice.write("body", "by alice").await;
        alice.click("save-close").await;
        bob.until_says("banner-title", "No editing until").await;
        bob.until_says("banner-text", "New numbers <b>").await;
        bob.until("document.querySelector('#list .badge').textContent === 'No editing now'").await;
        assert!(!bob.shows("form").await && !bob.shows("enter").await);
        assert_eq!(stage.text().await, "by alice");
        let mut faults = bob.faults().await;
        faults.retain(|fault| matches!(fault.impact.as_deref(), Some("serious" | "critical")));
        assert!(faults.is_empty(), "{faults:#?}");

        store.set_freeze(&Scope::All, None, Deadline::NONE).await.unwrap();
        until_editing(&bob).await;
    })
    .await;
}

/// The requests for states of locks since the last call.
async fn asked(page: &Page) -> Vec<String> {
    page.run(
        "const asked = performance.getEntriesByType('resource').map(it => new URL(it.name).pathname); \
         performance.clearResourceTimings(); \
         return asked.filter(path => path.startsWith('/locks/') && !/client.js|events/.test(path))",
    )
    .await
}

/// The reads of the lock collection since the last call, without those of change streams and sweeps.
async fn reads(database: &Database) -> u64 {
    let profile = database.collection::<Document>("system.profile");
    let reads = doc! { "command.filter._id": { "$exists": true }, "command.find": "workitem.lock" };
    database.run_command(doc! { "profile": 0 }).await.unwrap();
    let count = profile.count_documents(reads).await.unwrap();
    let _ = profile.drop().await;
    database.run_command(doc! { "profile": 2 }).await.unwrap();
    count
}

/// A page without a stream polls, as it may on a busy machine. But it never asks for each row.
const FEW: usize = 10;

#[actix_web::test]
async fn a_list_of_a_hundred_rows_asks_for_all_together() {
    on_mongodb(async |stage, database| {
        let alice = stage.person("alice").await;
        let more = (3..100).map(|n| doc! { "title": format!("Number {n}"), "body": "" });
        database.collection("workitem").insert_many(more).await.unwrap();
        let known = "document.querySelectorAll('#list li').length === 100 && \
             [...document.querySelectorAll('#list .badge')].every(it => it.dataset.state === 'free')";
        reads(database).await;
        alice.reload().await;
        alice.until(known).await;
        let (at_load, reads_at_load) = (asked(&alice).await, reads(database).await);
        assert!(at_load.iter().all(|path| path == "/locks/status"), "{at_load:?}");
        assert!((1..FEW).contains(&at_load.len()), "at load: {at_load:?}");
        assert!(reads_at_load < 2 * FEW as u64, "at load: {reads_at_load} reads");

        let bob = stage.person_of(100, "bob").await;
        asked(&alice).await;
        edit_first(&bob).await;
        alice.until("document.querySelectorAll('#list .badge[data-state=held]').length === 1").await;
        let after_a_change = asked(&alice).await;
        assert!((1..FEW).contains(&after_a_change.len()), "{after_a_change:?}");
        println!("{} requests and {reads_at_load} reads; {}", at_load.len(), after_a_change.len());
    })
    .await;
}

#[actix_web::test]
async fn a_page_without_cookies_sends_its_headers_and_survives_if_they_fail() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        let path = format!("/locks/workitem/{}", stage.first_id().await);
        let ask = format!(
            "const done = arguments[0], real = window.fetch, sent = []; \
             window.fetch = (url, init) => {{ if (String(url).includes('{path}')) sent.push(init.headers?.Authorization ?? ''); return real(url, init); }}; \
             import('/locks/client.js').then(async ({{ DocLock }}) => {{ \
                 DocLock.headers = async () => ({{ Authorization: 'Bearer x' }}); \
                 const seen = await DocLock.look('{path}'); \
                 DocLock.headers = () => {{ throw new Error('no token'); }}; \
                 const failed = await DocLock.look('{path}'); \
                 done([sent.at(-1), seen?.state, failed]); \
             }}, error => done([String(error)]))"
        );
        let told: Value = alice.run_async(&ask).await;
        assert_eq!(told, serde_json::json!(["Bearer x", "free", null]));
    })
    .await;
}
