//! Forms as applications and frameworks write them.

use super::*;

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
        keeps(&page, json!([])).await;
        assert!(!page.run::<bool>(&format!("return {BAR}('[part=discard]').checkVisibility()")).await);
        writes(&page, "and more").await;
        keeps(&page, json!([["/locks/article/about-us", ["text", "saved", "and more"]]])).await;
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
        keeps(&page, json!([["/locks/article/about-us", ["closest", "", "typed"]]])).await;
        page.run::<()>("document.querySelector('doclock-form').lock.release()").await;
        page.until("document.getElementById('closest').readOnly").await;
        press(&page, "edit").await;
        until_mine(&page).await;
        assert!(!page.run::<bool>("return document.getElementById('closest').readOnly").await);
    })
    .await;
}
