//! Tasks that can be done with Tab and Enter alone.

use super::*;

/// Presses Tab until the element has the focus. At each stop on the way, the focus must be visible.
async fn tab_to(page: &Page, name: &str) {
    let mut stops = Vec::new();
    while stops.last().is_none_or(|stop: &String| !stop.starts_with(name)) {
        assert!(stops.len() < 30, "no {name}, but {stops:?}");
        page.press(Key::Tab + "").await;
        stops.push(page.focused().await);
        let marked = "const s = getComputedStyle(document.activeElement); \
             return document.activeElement === document.body || s.outlineStyle !== 'none' || s.boxShadow !== 'none'";
        assert!(page.run::<bool>(marked).await, "the focus on {:?} is visible", stops.last());
    }
}

#[actix_web::test]
async fn keys_alone_suffice_to_log_in_open_edit_save_and_close() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let page = stage.visitor().await;
        tab_to(&page, "name").await;
        page.press("alice").await;
        page.press(Key::Enter + "").await;
        page.until_shown("logged-in").await;

        let title = page
            .run::<String>("return document.querySelector('#list li .title').textContent")
            .await;
        tab_to(&page, &title).await;
        page.press(Key::Enter + "").await;
        until_editing(&page).await;
        page.until("document.activeElement.id === 'heading'").await;

        tab_to(&page, "body").await;
        page.press("typed with the keyboard, ").await;
        tab_to(&page, "save-close").await;
        page.press(Key::Enter + "").await;
        page.until_hidden("doc").await;
        let text = stage.text().await;
        assert!(text.contains("typed with the keyboard, "), "{text}");
        assert!(page.focused().await.starts_with(&title), "the focus returns to its origin");
    })
    .await;
}

#[actix_web::test]
async fn keys_alone_suffice_to_take_over_or_to_leave_the_lock_to_its_holder() {
    embedded(&["--ttl-secs", "60", "--admin", "root"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let root = stage.person("root").await;
        open_first(&root).await;
        root.until_says("banner-title", "alice is editing this").await;
        tab_to(&root, "take-over").await;
        root.press(Key::Enter + "").await;
        root.until_shown("holder").await;
        assert_eq!(
            root.focused().await,
            "holder-close",
            "the focus is not on the button that takes over"
        );
        root.press(Key::Escape + "").await;
        root.until_hidden("holder").await;
        assert_eq!(root.focused().await, "take-over");

        root.press(Key::Enter + "").await;
        root.until_shown("holder").await;
        tab_to(&root, "holder-take").await;
        root.press(Key::Enter + "").await;
        until_editing(&root).await;
        alice.until_says("banner-title", "root is editing this").await;
    })
    .await;
}

#[actix_web::test]
async fn keys_alone_suffice_to_find_and_break_a_lock() {
    embedded(&["--ttl-secs", "60", "--admin", "root"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let root = stage.person("root").await;
        root.go(&stage.editor.url("/locks/admin")).await;
        root.until_says("locks", "alice").await;
        tab_to(&root, "filter").await;
        root.press("alice").await;
        tab_to(&root, "Break").await;
        root.press(Key::Enter + "").await;
        root.until("document.activeElement.id === 'reason'").await;
        root.press("she has gone home").await;
        root.press(Key::Enter + "").await;
        root.until_hidden("break").await;
        root.until_hidden("locks").await;
        alice.until_says("banner-text", "she has gone home").await;
    })
    .await;
}
