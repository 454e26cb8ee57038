//! What was typed is kept until it is saved.

use super::*;

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
        keeps(&again, json!([])).await;
        assert!(
            !again.run::<bool>(&format!("return {BAR}('[part=discard]').checkVisibility()")).await
        );
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
        let unsaved = format!("return {BAR}('[part=more]').textContent");
        assert_eq!(page.run::<String>(&unsaved).await, "");
        // The next input is kept for the other document, and nothing else is.
        page.write("title", "its title").await;
        let both = json!([
            ["/locks/article/about-us", ["text", "", "of about-us"]],
            ["/locks/article/price%20list", ["title", "about-us", "its title"]]
        ]);
        keeps(&page, both).await;
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
        let typed = json!([["/locks/article/about-us", ["rich", "old", "typed"], ["own", "", "told"]]]);
        keeps(&page, typed).await;
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
