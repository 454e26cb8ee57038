//! Tabs that are reloaded, closed, opened twice, or left alone.

use std::time::{Duration, Instant};

use mongodb::bson::Document;
use tokio::time::sleep;

use super::pages::{empty_page, script};
use super::*;
use crate::rig::app::age_all;

/// Longer than the grace period of a page that is being reloaded.
const GRACE: Duration = Duration::from_secs(6);

#[actix_web::test]
async fn a_reload_keeps_the_lock() {
    on_mongodb(async |stage, database| {
        let records = database.collection::<Document>("workitem.lock");
        let token = async || {
            let record = records.find_one(Document::new()).await.unwrap().expect("a lock");
            record.get("token").cloned().expect("ours")
        };
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        bob.until_says("kicker", "waiting").await;
        let (mut before, mut kept) = (token().await, 0);
        while kept < 3 {
            let began = Instant::now();
            alice.reload().await;
            alice
                .until("['edit', 'read'].includes(document.getElementById('doc').dataset.mode)")
                .await;
            if token().await == before {
                until_editing(&alice).await;
                kept += 1;
                continue;
            }
            // On a slow machine a reload may take longer than the grace period: the waiter is in then.
            assert!(began.elapsed() > Duration::from_secs(4), "the waiter was let in too early");
            until_editing(&bob).await;
            bob.click("close").await;
            until_editing(&alice).await;
            open_first(&bob).await;
            bob.until_says("kicker", "waiting").await;
            before = token().await;
        }
        alice.write("body", "after the reload").await;
        alice.click("save").await;
        alice.until_says("save-state", "Saved").await;
        assert!(bob.text("banner-title").await.contains("alice is editing this"));

        // The grace period of the last reload must not end the lock.
        sleep(GRACE).await;
        assert_eq!(token().await, before);
        alice.until_shown("save").await;
    })
    .await;
}

/// Within six seconds once the server has heard of it.
#[actix_web::test]
async fn a_closed_tab_frees_the_document_after_a_few_seconds_of_grace() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        alice.write("body", "not saved, and not asked").await;
        assert!(stage.lock().await["expires_in_ms"].as_u64().unwrap() > 100_000);
        let closed = Instant::now();
        alice.close().await;
        eventually("the server hears of it", async || {
            stage.lock().await["expires_in_ms"].as_u64().is_none_or(|left| left <= 4_500)
        })
        .await;
        eventually("it is free", async || stage.lock().await["state"] == "free").await;
        println!("free {:?} after the tab was closed", closed.elapsed());
    })
    .await;
}

/// Firefox aborts the first listener of a page for `pagehide` part-way when its tab closes. Here the first beacon fails,
/// and everything else that the page does when it is left.
#[actix_web::test]
async fn a_closed_tab_frees_the_document_although_its_first_listener_is_aborted() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        alice
            .run::<()>(
                "const [real, close] = [navigator.sendBeacon.bind(navigator), BroadcastChannel.prototype.close]; \
                 let isFirst = true; \
                 const abort = () => { throw 0; }; \
                 window.addEventListener('error', event => event.preventDefault()); \
                 navigator.sendBeacon = (...all) => isFirst ? abort(isFirst = false) : real(...all); \
                 BroadcastChannel.prototype.close = abort",
            )
            .await;
        alice.close().await;
        eventually("it is free", async || stage.lock().await["state"] == "free").await;
    })
    .await;
}

/// A page that is closed as soon as it has appeared.
#[actix_web::test]
async fn a_tab_that_is_closed_before_it_hears_of_its_lock_frees_the_document() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        for opens in ["{}", "{ wait: true }"] {
            let page = empty_page(stage).await;
            let script_of = format!(
                "answer = (it, real) => it.url === url(0) ? real().then(() => new Promise(() => {{}})) : real(); \
                 DocLock.open(url(0), {opens})"
            );
            script::<()>(&page, &format!("{script_of}; return null")).await;
            eventually("it is granted", async || stage.lock().await["state"] == "held").await;
            page.close().await;
            eventually("it is free", async || stage.lock().await["state"] == "free").await;
        }
    })
    .await;
}

/// Firefox and WebKit abort the requests of a page that is left.
#[actix_web::test]
async fn a_lock_that_is_given_up_right_before_the_page_is_left_is_released() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        for (answered, given_up) in [(true, "close"), (true, "release"), (false, "close")] {
            let page = empty_page(stage).await;
            let opens = format!(
                "answer = (it, real) => it.url === url(0) && {answered} ? real() : \
                     it.url.startsWith(url(0)) ? (it.url === url(0) && real(), new Promise(() => {{}})) : real(); \
                 window.one = DocLock.open(url(0)); \
                 await until(() => one.token || !{answered}); \
                 return null"
            );
            script::<()>(&page, &opens).await;
            eventually("it is granted", async || stage.lock().await["state"] == "held").await;
            let leaves = format!("one.{given_up}(); location.href = '/page.js'");
            page.run::<()>(&leaves).await;
            eventually("it is free", async || stage.lock().await["state"] == "free").await;
        }
    })
    .await;
}

/// As behind a proxy, which keeps the waiting request although its page has gone.
#[actix_web::test]
async fn a_waiter_that_closes_its_tab_gets_nothing_although_its_request_goes_on() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let waiter = empty_page(stage).await;
        script::<()>(
            &waiter,
            "const real = window.fetch; \
             window.fetch = (url, init) => real(url, { ...init, signal: null, keepalive: true }); \
             window.one = DocLock.open(url(0), { wait: true }); \
             await until(() => sent.some(it => it.body?.includes('\"wait_ms\":25'))); \
             await new Promise(done => setTimeout(done, 500)); \
             return null",
        )
        .await;
        waiter.close().await;
        // The wait ends within about a second on every server.
        sleep(Duration::from_secs(3)).await;
        alice.click("close").await;
        eventually("it is free", async || stage.lock().await["state"] == "free").await;
        let carol = stage.person("carol").await;
        edit_first(&carol).await;
    })
    .await;
}

#[actix_web::test]
async fn a_waiter_edits_after_the_holder_has_closed_the_tab() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        bob.until_says("kicker", "waiting").await;
        alice.close().await;
        until_editing(&bob).await;
    })
    .await;
}

#[actix_web::test]
async fn a_waiter_that_closes_its_tab_gets_nothing() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        bob.until_says("kicker", "waiting").await;
        bob.close().await;
        let carol = stage.person("carol").await;
        open_first(&carol).await;
        carol.until_says("kicker", "waiting").await;
        alice.click("close").await;
        until_editing(&carol).await;
    })
    .await;
}

#[actix_web::test]
async fn of_two_tabs_one_edits_and_the_lock_moves_with_one_click() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let first = stage.person("alice").await;
        edit_first(&first).await;
        first.write("body", "typed in the first").await;

        let second = first.beside(&stage.first_document().await).await;
        second.until_says("banner-title", "You are editing this in another tab").await;
        assert!(!second.shows("form").await);
        second.until_says("enter", "Edit here").await;
        first.until_shown("save").await;

        second.click("enter").await;
        until_editing(&second).await;
        first.until_says("banner-title", "You are editing this in another tab").await;
        first.until_disabled("save").await;
        assert_eq!(first.value("body").await, "typed in the first");
        second.write("body", "typed in the second").await;
        second.click("save").await;
        second.until_says("save-state", "Saved").await;
        assert_eq!(stage.text().await, "typed in the second");
    })
    .await;
}

#[actix_web::test]
async fn a_duplicated_tab_is_another_tab() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let first = stage.person("alice").await;
        edit_first(&first).await;
        let second = first.duplicate().await;
        second.until_says("banner-title", "You are editing this in another tab").await;
        first.write("body", "typed in the first").await;
        first.click("save").await;
        first.until_says("save-state", "Saved").await;
        assert!(!second.shows("form").await);
    })
    .await;
}

#[actix_web::test]
async fn a_person_who_leaves_the_page_and_comes_back_keeps_editing() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        // On a slow machine the way back may take longer than the grace period: the lock is another one then.
        let since = loop {
            let (since, began) = (stage.lock().await["since"].take(), Instant::now());
            alice.go(&stage.editor.url("/page.css")).await;
            alice.back().await;
            until_editing(&alice).await;
            eventually("the grace period is over", async || {
                stage.lock().await["expires_in_ms"].as_u64().is_some_and(|left| left > 5_000)
            })
            .await;
            if stage.lock().await["since"] == since {
                break since;
            }
            assert!(began.elapsed() > Duration::from_secs(4), "the lock was given up too early");
        };
        alice.write("body", "after coming back").await;
        alice.click("save").await;
        alice.until_says("save-state", "Saved").await;
        assert_eq!(
            (stage.text().await.as_str(), &stage.lock().await["since"]),
            ("after coming back", &since)
        );
    })
    .await;
}

#[actix_web::test]
async fn a_browser_that_slept_longer_than_the_ttl_saves_nothing_and_keeps_the_text() {
    on_mongodb(async |stage, database| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        alice.write("body", "typed before the sleep").await;
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        bob.until_says("kicker", "waiting").await;

        alice.browser().sleep();
        age_all(database, Duration::from_secs(600)).await;
        until_editing(&bob).await;
        bob.write("body", "by bob").await;
        bob.click("save").await;
        bob.until_says("save-state", "Saved").await;
        alice.browser().wake();
        // As soon as the page hears the keyboard, which may be before it has heard of the loss.
        alice.press_control('s').await;

        alice.until_says("banner-title", "bob is editing this").await;
        assert_eq!(alice.value("body").await, "typed before the sleep");
        alice.until_disabled("save").await;
        assert_eq!(stage.text().await, "by bob");
        assert!(bob.shows("save").await);
    })
    .await;
}

#[actix_web::test]
async fn a_short_time_without_a_network_costs_nothing() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        alice.set_offline(true).await;
        alice.write("body", "typed offline").await;
        alice.click("save").await;
        alice.until_says("banner-title", "Not saved").await;
        assert_eq!(alice.value("body").await, "typed offline");
        alice.set_offline(false).await;
        alice.click("save").await;
        alice.until_says("save-state", "Saved").await;
        assert_eq!(stage.text().await, "typed offline");
    })
    .await;
}

#[actix_web::test]
async fn a_logout_frees_the_document_and_keeps_what_was_typed() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        alice.write("body", "not saved yet").await;
        let bob = stage.person("bob").await;
        open_first(&bob).await;
        bob.until_says("kicker", "waiting").await;
        alice.click("logout").await;
        until_editing(&bob).await;
        alice.until_says("banner-title", "Your session ended").await;
        assert_eq!(alice.value("body").await, "not saved yet");
    })
    .await;
}

#[actix_web::test]
async fn the_next_person_in_a_browser_cannot_save_the_text_of_the_first_one() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        alice.write("body", "of alice").await;
        // In another tab.
        let post = "const done = arguments[0], headers = { 'Content-Type': 'application/json' }, \
                    body = '{\"name\":\"bob\"}'; \
                    fetch(path, { method: 'POST', headers, body }).then(it => done(it.ok))";
        assert!(alice.run_async::<bool>(&post.replace("path", "'/logout'")).await);
        alice.until_says("banner-title", "is gone").await;
        assert!(alice.run_async::<bool>(&post.replace("path", "'/login'")).await);
        alice.run::<()>("dispatchEvent(new Event('focus'))").await;
        alice.until_says("me", "bob").await;
        alice.until_says("banner-title", "Somebody else is logged in").await;
        assert_eq!(alice.value("body").await, "of alice");
        assert_ne!(stage.text().await, "of alice");
        // As himself, and without her text.
        alice.click("enter").await;
        alice.click("ask-yes").await;
        until_editing(&alice).await;
        assert_ne!(alice.value("body").await, "of alice");
    })
    .await;
}

#[actix_web::test]
async fn a_prerendered_page_takes_no_lock_before_it_is_seen() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let mut alice = stage.person("alice").await;
        let ahead = stage.first_document().await.replace("/#", "/?ahead#");
        // Until Chromium has really prerendered the page; it does not tell when that is done.
        for patience in 1.. {
            assert!(patience < 10, "Chromium does not prerender");
            alice.load_ahead(&ahead).await;
            sleep(Duration::from_millis(500) * patience).await;
            let since = alice.run::<f64>("return Date.now()").await;
            alice = alice.follow(&ahead).await;
            until_editing(&alice).await;
            let lock = stage.lock().await;
            let taken = format!("return Date.parse({}) - {since}", lock["since"]);
            assert!(alice.run::<f64>(&taken).await >= 0.0, "taken before it was seen: {lock}");
            let ran_before = "const seen = performance.getEntriesByType('navigation')[0].activationStart; \
                 return performance.getEntriesByType('resource').some(r => r.name.endsWith('/api/workitem') && r.responseEnd < seen)";
            if alice.run(ran_before).await {
                break;
            }
            alice.click("close").await;
            alice.go(&stage.editor.url("/")).await;
        }
    })
    .await;
}
