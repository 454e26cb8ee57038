//! The example's page in real browsers, as people see and use it.

mod admin;
mod editing;
mod elements;
mod forms;
mod keyboard;
mod leaving;
mod looks;
mod pages;
mod typed_text;

use std::cell::RefCell;
use std::rc::Rc;

use awc::Client;
use mongodb::Database;
use serde_json::Value;
use thirtyfour::Key;
use tokio::sync::Semaphore;

use crate::rig;
use crate::rig::app::eventually;
use crate::rig::browser::{Browser, Page};
use crate::rig::editor::Editor;

/// How many tests may run browsers at a time; each browser is a dozen processes.
static STAGES: Semaphore = Semaphore::const_new(3);

/// A server and the people who use it.
struct Stage {
    editor: Editor,
    browsers: RefCell<Vec<Rc<Browser>>>,
}

/// Runs a test, and then checks that no page has complained.
async fn stage(editor: impl FnOnce() -> Editor, test: impl AsyncFnOnce(&Stage)) {
    let _turn = STAGES.acquire().await.unwrap();
    let stage = Stage { editor: editor(), browsers: RefCell::default() };
    test(&stage).await;
    for browser in stage.browsers.take() {
        assert_eq!(browser.complaints().await, [""; 0], "complaints of the pages");
        browser.leave(&stage.editor.url("")).await;
    }
}

/// Like [`stage`], on the embedded store.
async fn embedded(args: &[&str], test: impl AsyncFnOnce(&Stage)) {
    stage(|| Editor::start(args), test).await;
}

/// Like [`stage`], on a database of the shared replica set.
async fn on_mongodb(test: impl AsyncFnOnce(&Stage, &Database)) {
    let shared = rig::mongod::shared_replica_set().await;
    let database = rig::fresh_database(shared.uri()).await;
    let editor = || Editor::on_mongodb(database.name(), shared.uri());
    stage(editor, async |stage| test(stage, &database).await).await;
}

impl Stage {
    /// The list page, in the browser of a person who has logged in.
    async fn person(&self, name: &str) -> Page {
        self.person_of(3, name).await
    }

    /// The same, if there are this many documents.
    async fn person_of(&self, documents: usize, name: &str) -> Page {
        let page = self.visitor_of(documents).await;
        page.write("name", name).await;
        page.press("\n").await;
        page.until_shown("logged-in").await;
        page
    }

    /// The list page, in a new browser.
    async fn visitor(&self) -> Page {
        self.visitor_of(3).await
    }

    async fn visitor_of(&self, documents: usize) -> Page {
        let browser = Browser::start().await;
        self.browsers.borrow_mut().push(browser.clone());
        let page = browser.open(&self.editor.url("/")).await;
        let listed = format!("document.querySelectorAll('#list li').length === {documents}");
        page.until(&listed).await;
        page
    }

    async fn get(&self, path: &str) -> Value {
        let mut answer = Client::default().get(self.editor.url(path)).send().await.unwrap();
        answer.json().await.unwrap()
    }

    async fn first(&self) -> Value {
        self.get("/api/workitem").await[0].take()
    }

    async fn first_id(&self) -> String {
        self.first().await["id"].as_str().unwrap().to_owned()
    }

    /// The URL of the first document.
    async fn first_document(&self) -> String {
        self.editor.url(&format!("/#/{}", self.first_id().await))
    }

    /// The saved text of the first document.
    async fn text(&self) -> String {
        self.first().await["body"].as_str().unwrap().to_owned()
    }

    /// The status of the first document's lock, as a stranger sees it.
    async fn lock(&self) -> Value {
        self.get(&format!("/locks/workitem/{}", self.first_id().await)).await
    }
}

/// Opens the first document from the list.
async fn open_first(page: &Page) {
    page.click_on("#list li a").await;
}

/// Opens the first document, and waits until it can be edited.
async fn edit_first(page: &Page) {
    open_first(page).await;
    until_editing(page).await;
}

/// Waits until the open document can be edited.
async fn until_editing(page: &Page) {
    page.until("document.getElementById('doc').dataset.mode === 'edit'").await;
    page.until_shown("save").await;
}

/// The texts that this browser keeps: the lock of each, and its fields with the old and the typed value.
async fn kept(page: &Page) -> Value {
    page.run_async(
        "const done = arguments[0], request = indexedDB.open('doclock-kept'); \
         request.onupgradeneeded = () => request.transaction.abort(); \
         request.onerror = () => done([]); \
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

/// Waits until this browser keeps these texts.
async fn keeps(page: &Page, texts: Value) {
    eventually(&format!("{texts} is kept"), async || kept(page).await == texts).await;
}

/// Whether the page fits without clipping and without scrolling sideways.
async fn fits(page: &Page) -> bool {
    page.run("return document.documentElement.scrollWidth <= innerWidth").await
}
