//! The appearance of the pages: contrast, names and roles by axe-core, and screenshots for the docs.

use std::path::Path;

use super::*;

/// Widths and heights of a desktop and of a phone.
const SIZES: [(u32, u32); 2] = [(1280, 800), (390, 844)];

/// Brings the pages into each state that people meet, and calls `look` with its name.
async fn walk(stage: &Stage, look: impl AsyncFn(&Page, &str)) {
    let visitor = stage.visitor().await;
    look(&visitor, "visitor").await;

    let alice = stage.person("Alice Meyer").await;
    edit_first(&alice).await;
    alice.write("body", "We are open on the 24th until noon.").await;
    look(&alice, "editor").await;

    let bob = stage.person("Bob").await;
    bob.until("document.querySelector('#list .badge').textContent.includes('Alice')").await;
    look(&bob, "list").await;
    open_first(&bob).await;
    bob.until_says("kicker", "waiting").await;
    look(&bob, "read-only").await;

    let root = stage.person("Root").await;
    root.click_on("#list li:nth-child(2) a").await;
    until_editing(&root).await;
    let admin = root.beside(&stage.editor.url("/locks/admin")).await;
    admin.until("document.querySelectorAll('#locks tbody tr').length === 2").await;
    look(&admin, "admin").await;
    admin.click("all").await;
    look(&admin, "admin-selected").await;
    admin.click("break-picked").await;
    admin.until_shown("break").await;
    look(&admin, "admin-break-many").await;
    admin.click("break-no").await;
    admin.click("all").await;
    admin.click_on("#locks .break").await;
    admin.until_shown("break").await;
    look(&admin, "admin-break").await;
    admin.close().await;

    root.click("close").await;
    open_first(&root).await;
    root.until_says("banner-title", "Alice Meyer is editing this").await;
    root.click("take-over").await;
    root.until_shown("holder").await;
    look(&root, "take-over").await;
    root.click("holder-take").await;
    until_editing(&root).await;
    alice.until_says("banner-title", "Root is editing this").await;
    look(&alice, "lost").await;

    bob.click("wait").await;
    root.write("body", "We are open on the 24th until one.").await;
    root.click("save-close").await;
    alice.until_says("banner-title", "Your lock on this document is gone").await;
    alice.click("enter").await;
    alice.until_shown("saved").await;
    look(&alice, "resume").await;
    // The server of the editor knows no idle people.
    alice
        .run::<()>(
            "const real = fetch; \
             window.fetch = async (url, init) => { \
                 const answer = await real(url, init); \
                 if (!String(url).endsWith('/heartbeat')) return answer; \
                 const told = await answer.json(); \
                 for (const lock of told.held) Object.assign(lock, { ends_in_ms: 50_000, ends_why: 'idle' }); \
                 return new Response(JSON.stringify(told), { headers: answer.headers }); \
             }; \
             dispatchEvent(new Event('online'))",
        )
        .await;
    alice.until_says("banner-title", "Your lock ends in").await;
    look(&alice, "ending").await;

    let document = stage.first_document().await;
    let again = alice.beside(&document).await;
    alice.close().await;
    until_editing(&again).await;
    again.until_shown("kept").await;
    look(&again, "kept").await;
}

const PEOPLE: [&str; 4] = ["--ttl-secs", "150", "--admin", "Root"];

#[actix_web::test]
async fn axe_core_finds_no_serious_fault_at_any_width_and_in_any_scheme() {
    embedded(&PEOPLE, async |stage| {
        walk(stage, async |page, name| {
            for (width, height) in SIZES {
                page.resize(width, height).await;
                for scheme in ["light", "dark"] {
                    page.prefers(scheme).await;
                    let mut faults = page.faults().await;
                    faults.retain(|fault| {
                        matches!(fault.impact.as_deref(), Some("serious" | "critical"))
                    });
                    assert!(faults.is_empty(), "{name}, {width} px, {scheme}: {faults:#?}");
                }
                assert!(fits(page).await, "{name} scrolls sideways at {width} px");
            }
            page.resize(1280, 800).await;
        })
        .await;
    })
    .await;
}

/// `scripts/browsers/screenshots` runs this.
#[actix_web::test]
#[ignore = "writes docs/*.png"]
async fn pictures() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    embedded(&PEOPLE, async |stage| {
        walk(stage, async |page, name| {
            let is_left_out = name.starts_with("admin-") || name == "visitor";
            if is_left_out {
                return;
            }
            page.prefers("light").await;
            for size in SIZES {
                page.picture(&docs.join(format!("{name}-{}.png", size.0)), size).await;
            }
            page.resize(1280, 800).await;
        })
        .await;
    })
    .await;
}
