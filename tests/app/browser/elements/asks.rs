//! A waiter asks, and the holder answers.

use super::*;

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
        alice.sends_no_beacons().await;
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
        let [_, _, alice, bob] = stage.one_is_asked().await;
        alice.sends_no_beacons().await;
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
