//! The administrator's table.

use super::*;

const ROWS: &str = "document.querySelectorAll('#locks tbody tr').length";

#[actix_web::test]
async fn the_table_follows_all_changes_and_a_break_tells_the_holder_why() {
    embedded(&["--ttl-secs", "60", "--admin", "root"], async |stage| {
        let root = stage.person("root").await;
        root.go(&stage.editor.url("/locks/admin")).await;
        root.until("document.getElementById('live').dataset.live === 'true'").await;
        root.until_says("none", "Nothing is locked").await;

        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        alice.write("body", "not saved yet").await;
        root.until_says("locks", "alice").await;
        let bob = stage.person("bob").await;
        bob.click_on("#list li:nth-child(2) a").await;
        until_editing(&bob).await;
        root.until(&format!("{ROWS} === 2")).await;
        root.write("filter", "ALICE").await;
        root.until(&format!("{ROWS} === 1")).await;

        root.click_on("#locks .break").await;
        root.write("reason", "<b>gone</b> home").await;
        root.click("break-yes").await;
        root.until_hidden("break").await;
        alice.until_says("banner-text", "<b>gone</b> home").await;
        alice.until_says("banner-text", "root").await;
        assert_eq!(alice.value("body").await, "not saved yet");
        alice.until_disabled("save").await;
        assert!(bob.shows("save").await);

        root.write("filter", "bob").await;
        root.until(&format!("{ROWS} === 1")).await;
        bob.click("close").await;
        root.until_says("none", "Nothing is locked").await;
    })
    .await;
}

#[actix_web::test]
async fn a_break_of_a_lock_that_has_changed_hands_breaks_nothing() {
    embedded(&["--ttl-secs", "60", "--admin", "root"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let root = stage.person("root").await;
        root.go(&stage.editor.url("/locks/admin")).await;
        root.until_says("locks", "alice").await;
        root.click_on("#locks .break").await;
        root.write("reason", "she has gone home").await;

        alice.click("close").await;
        alice.until_hidden("doc").await;
        let bob = stage.person("bob").await;
        edit_first(&bob).await;
        root.click("break-yes").await;
        root.until_says("locks", "bob").await;
        assert_eq!(stage.lock().await["holder"]["label"], "bob");
        assert!(bob.shows("save").await);
    })
    .await;
}

#[actix_web::test]
async fn the_table_is_hidden_from_others() {
    embedded(&["--ttl-secs", "60", "--admin", "root"], async |stage| {
        let alice = stage.person("alice").await;
        edit_first(&alice).await;
        let bob = stage.person("bob").await;
        bob.go(&stage.editor.url("/locks/admin")).await;
        let shown: String = bob.run("return document.body.innerText").await;
        assert!(!shown.contains("alice"), "{shown}");
        bob.go(&stage.editor.url("/locks/admin.json")).await;
        let shown: String = bob.run("return document.body.innerText").await;
        assert!(shown.contains("403") && !shown.contains("alice"), "{shown}");
    })
    .await;
}
