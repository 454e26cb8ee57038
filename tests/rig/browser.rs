//! Headless Chromium: one instance for each person, so that no two people share cookies or processes. A start costs
//! more than most tests need, so the next test gets the browsers of an earlier one, as clean as new ones.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use std::{env, fs};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use thirtyfour::prelude::*;
use thirtyfour::{ChromeCapabilities, ChromiumLikeCapabilities, LoggingPrefsLogLevel};
use tokio::time::{sleep, timeout};

use super::server::{self, Server};

/// Generous: a page needs only milliseconds for any step if the machine has nothing else to do.
const WITHIN: Duration = Duration::from_secs(90);

const FLAGS: [&str; 12] = [
    "--headless=new",
    // The tests may run as root, and open no pages but ours.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-breakpad",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--in-process-gpu",
    "--disable-extensions",
    // The first two wait below the address bar, and take half of the start-up time; the third starts a process for a page
    // that nobody may ever open.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,SpareRendererForSitePerProcess",
];

/// Statuses that Chromium logs automatically, although the page is prepared for them: a malformed id, not logged
/// in, lost, stale, held. A page cannot prevent the log entry.
const ANSWERS: [&str; 7] = ["400", "401", "403", "409", "412", "423", "503"];

/// Clean browsers, for the next tests. They end with this process.
static IDLE: Mutex<Vec<Browser>> = Mutex::new(Vec::new());
const MOST_IDLE: usize = 6;

/// One person's browser. It ends when it is dropped, whatever it is doing.
#[derive(Debug)]
pub(crate) struct Browser {
    driver: WebDriver,
    /// The tab that was open at the start. It stays open and blank.
    first: WindowHandle,
    /// The tab that gets the commands.
    current: RefCell<Option<WindowHandle>>,
    // When the server ends, so does the browser with all its processes and files.
    server: Server,
}

/// A tab.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    browser: Rc<Browser>,
    window: WindowHandle,
}

/// A finding of axe-core.
#[derive(Debug, Deserialize)]
pub(crate) struct Fault {
    pub(crate) id: String,
    pub(crate) impact: Option<String>,
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    html: String,
    failure_summary: Option<String>,
}

impl Browser {
    /// A browser with an empty profile.
    pub(crate) async fn start() -> Rc<Self> {
        let idle = IDLE.lock().expect("no panic while locked").pop();
        Rc::new(match idle {
            Some(browser) => browser,
            None => Self::launch().await,
        })
    }

    async fn launch() -> Self {
        let chromium = server::program("CHROMIUM", "chromium").await;
        let chromedriver = env::var("CHROMEDRIVER").ok().filter(|path| !path.is_empty());
        let chromedriver = chromedriver.unwrap_or_else(|| "chromedriver".to_owned());
        // The leader of a process group, so that the guardian ends it together with its browser.
        let arguments = |port| vec![chromedriver.clone(), format!("--port={port}")];
        let server = Server::start("setsid".into(), arguments, "was started successfully").await;

        let mut wanted = ChromeCapabilities::new();
        // The profile lies in the directory of the server, which is its TMPDIR.
        for flag in FLAGS {
            wanted.add_arg(flag).expect("a flag");
        }
        wanted.set_binary(&chromium.to_string_lossy()).expect("a path");
        wanted.set_browser_log_level(LoggingPrefsLogLevel::All).expect("a level");
        let url = format!("http://127.0.0.1:{}", server.port());
        // The next test has another runtime, and no connection outlives its own.
        let client = reqwest::Client::builder().pool_max_idle_per_host(0);
        let client = client.timeout(2 * WITHIN).build().expect("a client");
        let driver = WebDriver::builder(url, wanted).client(client);
        let driver = driver.await.expect("Chromium starts");
        // The browser is not asked to quit: a page may be frozen, or may ask whether it should be left.
        driver.clone().leak().expect("a session that is open");
        // Longer than a page waits, and shorter than the client.
        let limit = Some(2 * WITHIN - Duration::from_secs(10));
        let limits = TimeoutConfiguration::new(limit, limit, None);
        driver.update_timeouts(limits).await.expect("Chromium obeys");
        let first = driver.window().await.expect("a tab");
        Self { driver, first, current: RefCell::default(), server }
    }

    /// Leaves the browser to another test, without the tabs and the data of this one. If a page is in the way, the
    /// browser ends.
    pub(crate) async fn leave(self: Rc<Self>, origin: &str) {
        let Ok(browser) = Rc::try_unwrap(self) else { return };
        let cleaned = timeout(Duration::from_secs(10), browser.clean(origin)).await;
        let mut idle = IDLE.lock().expect("no panic while locked");
        if matches!(cleaned, Ok(Ok(()))) && idle.len() < MOST_IDLE {
            idle.push(browser);
        }
    }

    async fn clean(&self, origin: &str) -> WebDriverResult<()> {
        let Self { driver, first, current, .. } = self;
        for window in driver.windows().await? {
            if window != *first {
                driver.switch_to_window(window).await?;
                driver.close_window().await?;
            }
        }
        driver.switch_to_window(first.clone()).await?;
        current.take();
        let stored = json!({ "origin": origin, "storageTypes": "all" });
        for (method, parameters) in [
            ("Network.clearBrowserCookies", json!({})),
            ("Storage.clearDataForOrigin", stored),
            ("Browser.resetPermissions", json!({})),
        ] {
            driver.cdp().send_raw(method, parameters).await?;
        }
        driver.browser_log().await?;
        Ok(())
    }

    /// Opens another tab in the foreground.
    pub(crate) async fn open(self: &Rc<Self>, url: &str) -> Page {
        let window = self.driver.new_tab().await.expect("a new tab");
        let page = Page { browser: self.clone(), window };
        page.go(url).await;
        page
    }

    /// Stops all processes, like closing the lid of a laptop. Until [`Self::wake`], no command may be
    /// sent to the browser. Chromium's own freezing of pages spares visible pages.
    pub(crate) fn sleep(&self) {
        self.server.signal_group("STOP");
    }

    pub(crate) fn wake(&self) {
        self.server.signal_group("CONT");
    }

    /// The complaints of its pages since the last call: script errors, and violations of the content
    /// security policy.
    pub(crate) async fn complaints(&self) -> Vec<String> {
        let entries = self.driver.browser_log().await.expect("a log");
        entries
            .into_iter()
            .filter(|entry| entry.level == "SEVERE")
            .filter(|entry| {
                let answered = |status| entry.message.contains(&format!("a status of {status} "));
                let is_answer =
                    entry.source.as_deref() == Some("network") && ANSWERS.into_iter().any(answered);
                !is_answer && !entry.message.contains("net::ERR_INTERNET_DISCONNECTED")
            })
            .map(|entry| format!("{}: {}", entry.source.unwrap_or_default(), entry.message))
            .collect()
    }
}

impl Page {
    /// The browser that the tab belongs to.
    pub(crate) fn browser(&self) -> &Rc<Browser> {
        &self.browser
    }

    async fn driver(&self) -> &WebDriver {
        let Browser { driver, current, .. } = &*self.browser;
        if current.borrow().as_ref() != Some(&self.window) {
            driver.switch_to_window(self.window.clone()).await.expect("the tab is open");
            current.replace(Some(self.window.clone()));
        }
        driver
    }

    async fn devtools(&self, method: &str, parameters: Value) -> Value {
        let devtools = self.driver().await.cdp();
        devtools.send_raw(method, parameters).await.expect("Chromium obeys")
    }

    /// Duplicates the tab like a browser, including the page's session storage.
    pub(crate) async fn duplicate(&self) -> Self {
        let driver = self.driver().await;
        let before = driver.windows().await.expect("tabs");
        self.run::<()>("window.open(location.href)").await;
        let began = Instant::now();
        loop {
            let mut windows = driver.windows().await.expect("tabs");
            windows.retain(|window| !before.contains(window));
            if let Some(window) = windows.pop() {
                return Self { browser: self.browser.clone(), window };
            }
            assert!(began.elapsed() < WITHIN, "no other tab");
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Opens another tab of the same browser.
    pub(crate) async fn beside(&self, url: &str) -> Self {
        self.browser.open(url).await
    }

    pub(crate) async fn go(&self, url: &str) {
        self.driver().await.goto(url).await.expect("the page loads");
    }

    /// Reloads the page, as F5 does.
    pub(crate) async fn reload(&self) {
        self.driver().await.refresh().await.expect("the page loads");
    }

    pub(crate) async fn back(&self) {
        self.driver().await.back().await.expect("a page to go back to");
    }

    /// Closes the tab, as with the mouse; unsaved input is lost.
    pub(crate) async fn close(self) {
        self.driver().await.close_window().await.expect("the tab closes");
        // The next command needs an open tab.
        let windows = self.browser.driver.windows().await.expect("the first tab stays");
        let first = windows.into_iter().next().expect("the first tab stays");
        self.browser.driver.switch_to_window(first).await.expect("the first tab stays");
        self.browser.current.take();
    }

    /// Switches the network off or on.
    pub(crate) async fn set_offline(&self, offline: bool) {
        self.devtools("Network.enable", json!({})).await;
        let conditions = json!({ "offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1 });
        self.devtools("Network.emulateNetworkConditions", conditions).await;
    }

    /// Gives the window this size, in CSS pixels.
    pub(crate) async fn resize(&self, width: u32, height: u32) {
        let metrics =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", metrics).await;
    }

    /// Forbids all scripts of pages that are loaded from now on.
    pub(crate) async fn forbid_scripts(&self) {
        self.devtools("Emulation.setScriptExecutionDisabled", json!({ "value": true })).await;
    }

    /// Runs this in each page of the tab from now on, before any script of the page.
    pub(crate) async fn before_each_page(&self, script: &str) {
        self.devtools("Page.addScriptToEvaluateOnNewDocument", json!({ "source": script })).await;
    }

    /// From now on, no page of the tab says that it is left: on a slow machine, the grace period of its lock may be over before
    /// the next page asks for it.
    pub(crate) async fn sends_no_beacons(&self) {
        let stub = "navigator.sendBeacon = () => true";
        self.before_each_page(stub).await;
        self.run::<()>(stub).await;
    }

    /// Sets the preferred colour scheme, `light` or `dark`.
    pub(crate) async fn prefers(&self, scheme: &str) {
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", scheme).await;
    }

    /// The result of a function with this body in the page.
    pub(crate) async fn run<T: DeserializeOwned>(&self, body: &str) -> T {
        let returned = self.driver().await.execute(body, vec![]).await;
        let returned = returned.unwrap_or_else(|error| panic!("{body}: {error}"));
        returned.convert().unwrap_or_else(|error| panic!("{body}: {error}"))
    }

    /// Like [`Self::run`], for a body that calls its argument when it is done.
    pub(crate) async fn run_async<T: DeserializeOwned>(&self, body: &str) -> T {
        let returned = self.driver().await.execute_async(body, vec![]).await;
        let returned = returned.unwrap_or_else(|error| panic!("{body}: {error}"));
        returned.convert().unwrap_or_else(|error| panic!("{body}: {error}"))
    }

    /// Waits until `condition`, an expression in the page, is true.
    pub(crate) async fn until(&self, condition: &str) {
        let body = format!("return Boolean({condition})");
        let began = Instant::now();
        loop {
            // While a page loads, it returns nothing or an error.
            let answer = self.driver().await.execute(&*body, vec![]).await;
            if matches!(&answer, Ok(answer) if answer.json() == true) {
                return;
            }
            if began.elapsed() > WITHIN {
                let shown: Value = self.run("return document.body.innerText").await;
                panic!(
                    "not within {WITHIN:?}: {condition}; {answer:?}; the page shows:\n{shown:#}"
                );
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the element with this id is visible and not disabled.
    pub(crate) async fn until_shown(&self, id: &str) {
        let id = quoted(id);
        self.until(&format!(
            "(e => e && e.checkVisibility() && !e.disabled)(document.getElementById({id}))"
        ))
        .await;
    }

    /// Waits until the element with this id is disabled.
    pub(crate) async fn until_disabled(&self, id: &str) {
        self.until(&format!("document.getElementById({}).disabled", quoted(id))).await;
    }

    /// Waits until the element with this id is not visible.
    pub(crate) async fn until_hidden(&self, id: &str) {
        let id = quoted(id);
        self.until(&format!("!document.getElementById({id})?.checkVisibility()")).await;
    }

    /// Waits until the text of the element with this id contains `part`.
    pub(crate) async fn until_says(&self, id: &str, part: &str) {
        let (id, part) = (quoted(id), quoted(part));
        self.until(&format!("document.getElementById({id})?.textContent.includes({part})")).await;
    }

    /// The text of the element with this id.
    pub(crate) async fn text(&self, id: &str) -> String {
        self.run(&format!("return document.getElementById({}).textContent", quoted(id))).await
    }

    /// The contents of the field with this id.
    pub(crate) async fn value(&self, id: &str) -> String {
        self.run(&format!("return document.getElementById({}).value", quoted(id))).await
    }

    /// Whether the element with this id is visible.
    pub(crate) async fn shows(&self, id: &str) -> bool {
        let id = quoted(id);
        self.run(&format!("return Boolean(document.getElementById({id})?.checkVisibility())")).await
    }

    async fn element(&self, id: &str) -> WebElement {
        self.until_shown(id).await;
        self.driver().await.find(By::Id(id)).await.expect("it is shown")
    }

    /// Clicks on the element with this id once it is shown.
    pub(crate) async fn click(&self, id: &str) {
        let element = self.element(id).await;
        element.click().await.unwrap_or_else(|error| panic!("click on {id}: {error}"));
    }

    /// Clicks on the first element that a selector finds.
    pub(crate) async fn click_on(&self, selector: &str) {
        self.until(&format!("document.querySelector({})?.checkVisibility()", quoted(selector)))
            .await;
        let element = self.driver().await.find(By::Css(selector)).await.expect("it is shown");
        element.click().await.unwrap_or_else(|error| panic!("click on {selector}: {error}"));
    }

    /// Replaces the contents of the field with this id by typing.
    pub(crate) async fn write(&self, id: &str, text: &str) {
        let field = self.element(id).await;
        field.send_keys(Key::Control + "a").await.expect("a field");
        field.send_keys(text).await.expect("a field");
    }

    /// Presses a letter together with the control key.
    pub(crate) async fn press_control(&self, letter: char) {
        let keyboard = self.driver().await.action_chain().key_down(Key::Control).send_keys(letter);
        keyboard.key_up(Key::Control).perform().await.expect("a keyboard");
    }

    /// Types into the focused element.
    pub(crate) async fn press(&self, keys: impl Into<TypingData>) {
        let typing: TypingData = keys.into();
        let keyboard = self.driver().await.action_chain();
        keyboard.send_keys(typing).perform().await.expect("a keyboard");
    }

    /// The focused element: its id, or its text if it has none.
    pub(crate) async fn focused(&self) -> String {
        self.run("const e = document.activeElement; return e.id || e.textContent.trim()").await
    }

    /// The contents of the clipboard.
    pub(crate) async fn clipboard(&self) -> String {
        let permissions = json!({ "permissions": ["clipboardReadWrite"] });
        self.devtools("Browser.grantPermissions", permissions).await;
        let read = "const done = arguments[0]; navigator.clipboard.readText().then(done, e => done(String(e)))";
        self.run_async(read).await
    }

    /// The findings of axe-core in the page as it is now.
    pub(crate) async fn faults(&self) -> Vec<Fault> {
        let axe = server::program("AXE_CORE", "axe-core").await;
        let axe = fs::read_to_string(axe).expect("axe.min.js");
        let driver = self.driver().await;
        driver.execute(axe, vec![]).await.expect("axe-core loads");
        let check = "const done = arguments[0]; \
             axe.run(document, { resultTypes: ['violations'] }).then(r => done(r.violations), e => done(String(e)))";
        self.run_async(check).await
    }

    /// Makes the browser prerender a page, including its scripts.
    pub(crate) async fn load_ahead(&self, url: &str) {
        // The rules are an inline script, which the content security policy would have to allow.
        self.devtools("Page.setBypassCSP", json!({ "enabled": true })).await;
        self.reload().await;
        let rules = json!({ "prerender": [{ "source": "list", "urls": [url] }] }).to_string();
        self.run::<()>(&format!(
            "const rules = document.createElement('script'); rules.type = 'speculationrules'; \
             rules.textContent = {}; document.head.append(rules)",
            Value::from(rules)
        ))
        .await;
    }

    /// Follows a link to a page that may be prerendered; the new page takes the place of this one.
    pub(crate) async fn follow(self, url: &str) -> Self {
        self.run::<()>(&format!("location.href = {}", quoted(url))).await;
        let began = Instant::now();
        loop {
            for window in self.browser.driver.windows().await.expect("tabs") {
                let page = Self { browser: self.browser.clone(), window };
                let here = page.driver().await.current_url().await;
                if here.is_ok_and(|here| here.as_str() == url) {
                    return page;
                }
            }
            assert!(began.elapsed() < WITHIN, "{url} does not open");
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Takes a picture of the page at this size, or higher if the page is longer.
    pub(crate) async fn picture(&self, path: &Path, (width, height): (u32, u32)) {
        self.devtools("Emulation.setScrollbarsHidden", json!({ "hidden": true })).await;
        self.resize(width, height).await;
        let all = self.run("return Math.ceil(document.documentElement.scrollHeight)").await;
        self.resize(width, height.max(all)).await;
        let png = self.driver().await.screenshot_as_png().await.expect("a picture");
        fs::write(path, png).expect("a directory to write to");
    }
}

fn quoted(text: &str) -> Value {
    Value::from(text)
}
