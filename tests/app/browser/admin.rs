//! The administrator's table.

use awc::cookie::Cookie;
use serde_json::json;

use super::*;

const ROWS: &str = "document.querySelectorAll('#locks tbody tr').length";

/// A person without a page.
struct Person<'a> {
    stage: &'a Stage,
    cookie: Cookie<'static>,
}

impl<'a> Person<'a> {
    async fn logged_in(stage: &'a Stage, name: &str) -> Self {
        let login = Client::default().post(stage.editor.url("/login"));
        let answer = login.send_json(&json!({ "name": name })).await.unwrap();
        let cookie = answer.cookie("id").expect("a session").clone().into_owned();
        Self { stage, cookie }
    }

    async fn send(&self, method: &str, path: &str, body: Value) -> u16 {
        let request =
            Client::default().request(method.parse().unwrap(), self.stage.editor.url(path));
        let answer = request.cookie(self.cookie.clone()).send_json(&body).await.unwrap();
        answer.status().as_u16()
    }

    /// Locks the document with this number.
    async fn lock(&self, number: usize) {
        assert_eq!(self.send("POST", &self.path(number).await, json!({})).await, 201);
    }

    async fn release(&self, number: usize) {
        assert_eq!(self.send("DELETE", &self.path(number).await, json!({})).await, 204);
    }

    async fn path(&self, number: usize) -> String {
        let all = self.stage.get("/api/workitem").await;
        format!("/locks/workitem/{}", all[number]["id"].as_str().unwrap())
    }
}

/// The admin page with the locks of alice, bob and carol, in the order of their age.
async fn three_locks(test: impl AsyncFnOnce(&Page, &[Person<'_>])) {
    embedded(&["--ttl-secs", "600", "--admin", "root"], async |stage| {
        let mut people = Vec::new();
        for (number, name) in ["alice", "bob", "carol"].iter().enumerate() {
            let person = Person::logged_in(stage, name).await;
            person.lock(number).await;
            people.push(person);
        }
        let root = stage.person("root").await;
        root.go(&stage.editor.url("/locks/admin")).await;
        root.until(&format!("{ROWS} === 3")).await;
        test(&root, &people).await;
    })
    .await;
}

/// The beginnings of the titles, from top to bottom.
async fn titles(page: &Page) -> String {
    let titles = "[...document.querySelectorAll('#locks tbody .title')].map(e => e.textContent.split(' ')[0])";
    page.run(&format!("return {titles}.join(' ')")).await
}

async fn choose(page: &Page, id: &str, value: &str) {
    page.run::<()>(&format!(
        "const e = document.getElementById('{id}'); e.value = '{value}'; \
         if (e.value !== '{value}') throw 'no such choice'; e.dispatchEvent(new Event('input'))"
    ))
    .await;
}

/// Replaces the answers of the server.
async fn stub(page: &Page, answer: &str) {
    page.run::<()>(&format!(
        "window.fetch = async (url, init) => {{ {answer} }}; \
         document.dispatchEvent(new Event('visibilitychange'))"
    ))
    .await;
}

const MANY: &str = "const path = new URL(url).pathname; \
    const holder = i => ({ label: 'person ' + i % 50 }); \
    const lock = i => ({ key: 'c' + i % 3 + '/' + i, collection: 'c' + i % 3, id: String(i), \
        title: i % 2 ? 'Title ' + i : null, link: null, mode: 'exclusive', holder: holder(i), token: 'token-' + i, \
        since: new Date(Date.now() - i * 60000).toISOString(), expires_in_ms: 60000 + i, may_break: i % 5 !== 0 }); \
    if (init.method === 'GET') return Response.json({ locks: Array.from({ length: 1000 }, (_, i) => lock(i)), more: false, told: true }); ";

#[actix_web::test]
async fn the_table_follows_all_changes_and_a_break_tells_the_holder_why() {
    embedded(&["--ttl-secs", "60", "--admin", "root"], async |stage| {
        let root = stage.person("root").await;
        root.go(&stage.editor.url("/locks/admin")).await;
        root.until("document.getElementById('live').dataset.live === 'true'").await;
        root.until_says("none", "Nothing is locked").await;
        assert_eq!(root.text("frozen").await, "");

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
        root.until_hidden("break").await;
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

#[actix_web::test]
async fn the_table_names_documents_by_their_titles_and_the_link_opens_them() {
    embedded(&["--ttl-secs", "600", "--admin", "root"], async |stage| {
        let (root, alice) = (stage.person("root").await, Person::logged_in(stage, "alice").await);
        let hostile = "<img src=x onerror=alert(1)> \"&amp;\u{202e}";
        let created = json!({ "title": hostile, "body": "" });
        assert_eq!(alice.send("POST", "/api/workitem", created).await, 201);
        root.go(&stage.editor.url("/locks/admin")).await;
        root.until(&format!("{ROWS} === 1")).await;
        let cell = "document.querySelector('#locks .title')";
        assert_eq!(root.run::<String>(&format!("return {cell}.textContent")).await, hostile);
        assert_eq!(root.run::<usize>("return document.images.length").await, 0);
        let id: String = root.run("return document.querySelector('#locks .id').textContent").await;
        assert_eq!(id.len(), 24, "{id}");
        root.write("filter", "onerror").await;
        root.until(&format!("{ROWS} === 1")).await;
        root.click_on("#locks .title a").await;
        root.until_says("banner-title", "alice is editing this").await;
        assert!(root.run::<String>("return location.hash").await.ends_with(&id));
    })
    .await;
}

#[actix_web::test]
async fn the_headings_sort_the_table_also_with_the_keyboard() {
    three_locks(async |root, _| {
        assert_eq!(titles(root).await, "Opening Complaint Price", "the oldest lock comes first");
        let sorted = "return [...document.querySelectorAll('#locks [aria-sort]')] \
             .map(e => e.dataset.sort + ' ' + e.getAttribute('aria-sort')).join()";
        assert_eq!(root.run::<String>(sorted).await, "age descending");
        root.click_on("#locks [data-sort=document] button").await;
        assert_eq!(titles(root).await, "Complaint Opening Price");
        assert_eq!(root.run::<String>(sorted).await, "document ascending");
        root.press("\n").await;
        assert_eq!(titles(root).await, "Price Opening Complaint");
        assert_eq!(root.run::<String>(sorted).await, "document descending");
        root.click_on("#locks [data-sort=holder] button").await;
        assert_eq!(titles(root).await, "Opening Complaint Price");
        root.click_on("#locks [data-sort=age] button").await;
        assert_eq!(titles(root).await, "Price Complaint Opening", "the newest lock comes first");
    })
    .await;
}

#[actix_web::test]
async fn the_filters_by_collection_and_person_and_text_hold_together() {
    three_locks(async |root, people| {
        choose(root, "person", "bob").await;
        assert_eq!(titles(root).await, "Complaint");
        root.until_says("count", "1 of 3").await;
        choose(root, "collection", "workitem").await;
        assert_eq!(titles(root).await, "Complaint");
        root.write("filter", "DECEMBER").await;
        root.until_says("none", "No lock matches the filter").await;
        choose(root, "person", "").await;
        assert_eq!(titles(root).await, "Opening");
        // A person without locks stays chosen.
        root.write("filter", " ").await;
        choose(root, "person", "bob").await;
        people[1].release(1).await;
        root.until_says("none", "No lock matches the filter").await;
        assert_eq!(root.value("person").await, "bob");
        people[1].lock(1).await;
        root.until(&format!("{ROWS} === 1")).await;
    })
    .await;
}

#[actix_web::test]
async fn several_locks_are_broken_at_once_and_those_that_went_away_are_not_selected_any_more() {
    three_locks(async |root, people| {
        root.until_disabled("break-picked").await;
        root.click("all").await;
        root.until_says("break-picked", "(3)").await;
        root.click_on("#locks tbody tr:first-child .mark").await;
        root.until_says("break-picked", "(2)").await;
        assert!(root.run::<bool>("return document.getElementById('all').indeterminate").await);
        // The selection survives a reload of the table, and a lock that another person has by then is
        // not selected.
        people[1].release(1).await;
        root.until_says("break-picked", "(1)").await;
        people[1].lock(1).await;
        root.until(&format!("{ROWS} === 3")).await;
        root.until_says("break-picked", "(1)").await;

        root.click("all").await;
        root.until_says("break-picked", "(3)").await;
        // Also what the filter hides is shown before it is broken.
        choose(root, "person", "carol").await;
        root.click("break-picked").await;
        root.until_shown("break").await;
        let listed = root.text("break-many").await;
        assert!(
            ["Opening", "alice", "Complaint", "bob", "carol"].iter().all(|it| listed.contains(it)),
            "{listed}"
        );
        people[2].release(2).await;
        root.until_says("none", "No lock").await;
        root.write("reason", "night shift").await;
        root.click("break-yes").await;
        root.until_says("report", "2 locks were broken. 1 lock was already gone.").await;
        choose(root, "person", "").await;
        root.until_says("none", "Nothing is locked").await;
        assert!(!root.shows("break-picked").await && !root.shows("break").await);
    })
    .await;
}

#[actix_web::test]
async fn a_lock_on_an_id_that_no_path_can_name_is_broken_by_its_key() {
    three_locks(async |root, _| {
        let answers = "const dots = i => ({ ...lock(i), id: '.'.repeat(i), key: 'c0/' + '.'.repeat(i), may_break: true }); \
             if (init.method === 'GET') return Response.json({ locks: [1, 2, 3].map(dots), more: false, told: true }); \
             (window.asked ??= []).push(path + ' ' + (JSON.parse(init.body).key ?? '')); \
             return new Response(null, { status: 204, headers: { 'Doclock-Broken': '1' } });";
        let many = MANY.split_once("if (init").unwrap().0;
        stub(root, &format!("{many} {answers}")).await;
        root.until(&format!("{ROWS} === 3 && document.querySelector(\"#locks tr[data-key='c0/..']\")")).await;
        root.run::<()>("for (const e of document.querySelectorAll('.mark')) e.click()").await;
        root.click("break-picked").await;
        root.write("reason", "why").await;
        root.click("break-yes").await;
        root.until_says("report", "3 locks were broken.").await;
        let asked: Value = root.run("return asked.sort()").await;
        assert_eq!(asked, json!(["/locks/break c0/.", "/locks/break c0/..", "/locks/c0/.../break "]));
    })
    .await;
}

#[actix_web::test]
async fn a_break_that_is_refused_or_fails_is_reported_and_stays_selected() {
    three_locks(async |root, _| {
        let answers = "if (path.endsWith('/1/break')) return Response.json({ detail: 'not yours' }, { status: 403 }); \
             if (path.endsWith('/4/break')) return Response.json({}, { status: 503 }); \
             return new Response(null, { status: 204, headers: { 'Doclock-Broken': path.endsWith('/3/break') ? '0' : '1' } });";
        stub(root, &format!("{MANY} {answers}")).await;
        root.until(&format!("{ROWS} === 1000")).await;
        for number in [2, 3, 1] {
            let mark = format!("#locks tr[data-key$='/{number}'] .mark");
            root.run::<()>(&format!("document.querySelector(\"{mark}\").click()")).await;
        }
        root.click("break-picked").await;
        root.write("reason", "why").await;
        root.click("break-yes").await;
        let told = "1 lock was broken. 1 lock was already gone. 1 lock was refused. not yours";
        root.until_says("report", told).await;

        let only = "for (const e of document.querySelectorAll('.mark:checked')) e.click(); \
             document.querySelector(\"#locks tr[data-key$='/4'] .mark\").click(); \
             document.querySelector(\"#locks tr[data-key$='/6'] .mark\").click()";
        root.run::<()>(only).await;
        root.until_says("break-picked", "(2)").await;
        root.click("break-picked").await;
        root.write("reason", "why").await;
        root.click("break-yes").await;
        root.until_says("report", "The database cannot be reached.").await;
        root.until("document.getElementById('break-picked').textContent !== 'Break selected (0)'").await;
    })
    .await;
}

#[actix_web::test]
async fn a_thousand_rows_are_sorted_filtered_and_selected_without_a_new_row() {
    three_locks(async |root, _| {
        stub(root, MANY).await;
        root.until(&format!("{ROWS} === 1000")).await;
        let steps = "const body = document.getElementById('locks').tBodies[0], old = new Set(body.rows); \
             const changes = new MutationObserver(() => {}); \
             changes.observe(body, { childList: true, subtree: true, attributes: true, characterData: true }); \
             for (const by of ['document', 'document', 'holder', 'left']) document.querySelector(`[data-sort=${by}] button`).click(); \
             document.getElementById('all').click(); \
             return [[...body.rows].filter(row => !old.has(row)).length, changes.takeRecords().length]";
        let (new, changes): (usize, usize) = root.run(steps).await;
        assert_eq!(new, 0, "rows are moved, not drawn again");
        // Four sorts and one selection.
        assert!((4 * 1_000..5 * 1_000 * 20).contains(&changes), "{changes} changes of the page");
        root.until_says("break-picked", "(800)").await;
        choose(root, "person", "person 7").await;
        root.until(&format!("{ROWS} === 20")).await;
        choose(root, "collection", "c1").await;
        root.until_says("count", "of 1000").await;
        root.click("all").await;
        root.until("!document.getElementById('all').checked").await;
        let selected = root.text("break-picked").await;
        assert!(selected != "Break selected (800)" && selected != "Break selected (0)", "{selected}");
        for (width, height) in [(390, 844), (1280, 800)] {
            root.resize(width, height).await;
            assert!(fits(root).await, "scrolls sideways at {width} px");
        }
    })
    .await;
}

#[actix_web::test]
async fn each_second_only_the_rows_in_view_are_drawn() {
    three_locks(async |root, _| {
        stub(root, MANY).await;
        root.until(&format!("{ROWS} === 1000")).await;
        let drawn: Vec<usize> = root
            .run_async(
                "const done = arguments[0], told = []; \
                 window.fetch = () => new Promise(() => {}); \
                 const rowOf = ({ target }) => (target.closest ? target : target.parentElement).closest('tr'); \
                 new MutationObserver(changes => { \
                     told.push(new Set(changes.map(rowOf)).size); \
                     if (told.length === 3) done(told); \
                 }).observe(document.getElementById('locks').tBodies[0], { childList: true, subtree: true, characterData: true })",
            )
            .await;
        assert!(drawn.iter().all(|&rows| rows < 100), "{drawn:?}");
    })
    .await;
}

#[actix_web::test]
async fn changes_that_go_on_do_not_postpone_the_reload_of_the_table() {
    three_locks(async |root, people| {
        root.run::<()>(
            "const real = fetch; \
             window.reloads = 0; \
             window.fetch = (url, init) => { reloads += String(url).endsWith('admin.json'); return real(url, init); }",
        )
        .await;
        let changes = async {
            loop {
                people[0].release(0).await;
                people[0].lock(0).await;
            }
        };
        tokio::select! {
            () = root.until("reloads > 2") => {}
            () = changes => unreachable!(),
        }
    })
    .await;
}

/// The name and the text of the file that a click on the button hands out.
async fn downloaded(root: &Page) -> String {
    root.run_async(
        "const done = arguments[arguments.length - 1]; \
         let file; \
         URL.createObjectURL = blob => (file = blob, '#'); \
         HTMLAnchorElement.prototype.click = function () { file.text().then(text => done(this.download + ' ' + text)); }; \
         document.getElementById('csv').click()",
    )
    .await
}

#[actix_web::test]
async fn the_button_downloads_the_shown_locks_as_csv() {
    three_locks(async |root, _| {
        let csv = downloaded(root).await;
        assert!(
            csv.starts_with("locks.csv collection,id,title,mode,holder,since,expires_in_s\r\n"),
            "{csv}"
        );
        assert!(csv.contains("\"Price list, spring\",exclusive,carol,"), "{csv}");
        assert_eq!(csv.lines().count(), 4, "{csv}");
        root.write("filter", "carol").await;
        root.until(&format!("{ROWS} === 1")).await;
        assert_eq!(downloaded(root).await.lines().count(), 2);
    })
    .await;
}

#[actix_web::test]
async fn in_the_csv_no_cell_ends_early_and_none_is_a_formula() {
    let cases = [
        ("plain", "plain"),
        ("", ""),
        ("a,b", "\"a,b\""),
        ("the \"A\" file", "\"the \"\"A\"\" file\""),
        ("two\r\nlines", "\"two\r\nlines\""),
        ("=HYPERLINK(\"x\",\"y\")", "\"'=HYPERLINK(\"\"x\"\",\"\"y\"\")\""),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("x;=HYPERLINK(1)", "x;'=HYPERLINK(1)"),
        ("x\t=1", "x\t'=1"),
        ("a;b-c", "a;b-c"),
        ("\t=1", "'\t'=1"),
        ("\r=1", "\"'\r=1\""),
        ("\n=1", "\"'\n=1\""),
        ("1=1", "1=1"),
        ("＝1", "'＝1"),
        ("\u{200b}\u{feff}=1", "'\u{200b}\u{feff}=1"),
        ("x;\u{fe0f}=1", "x;'\u{fe0f}=1"),
        ("\"=1", "\"'\"\"=1\""),
        ("x;\"=1;y", "\"x;'\"\"=1;y\""),
        ("x;'\\=1", "x;''\\=1"),
    ];
    let lock = |(n, (title, _)): (usize, &(&str, &str))| {
        json!({
            "key": format!("note/{n}"), "collection": "note", "id": n.to_string(), "title": title,
            "mode": "exclusive", "holder": { "label": "@cmd\r\nnext", "user": "secret-id" },
            "since": format!("2026-01-01T00:00:{n:02}Z"), "expires_in_ms": 0, "token": n.to_string(),
        })
    };
    let locks: Vec<_> = cases.iter().enumerate().map(lock).collect();
    let list = json!({ "locks": locks, "more": false, "frozen": [] });
    three_locks(async |root, _| {
        let shown = format!(
            "const date = new Date('2026-01-02T00:00:00Z').toUTCString(); \
             window.fetch = async () => new Response(JSON.stringify({list}), {{ headers: {{ Date: date }} }}); \
             document.dispatchEvent(new Event('visibilitychange'))"
        );
        root.run::<Value>(&shown).await;
        root.until(&format!("{ROWS} === {}", cases.len())).await;
        let csv = downloaded(root).await;
        let mut rest = &*csv;
        for (n, (_, written)) in cases.iter().enumerate() {
            let line = format!("\r\nnote,{n},{written},exclusive,'@cmd  next,2026");
            let at = rest.find(&line).unwrap_or_else(|| panic!("{line:?} is not in {csv:?}"));
            rest = &rest[at + line.len()..];
        }
        assert!(!csv.contains("secret-id"), "the id of the holder is for policies only");
    })
    .await;
}

#[actix_web::test]
async fn the_table_says_what_is_frozen_and_for_how_long() {
    embedded(&["--ttl-secs", "60", "--admin", "root"], async |stage| {
        let root = stage.person("root").await;
        root.go(&stage.editor.url("/locks/admin")).await;
        root.until("document.getElementById('live').dataset.live === 'true'").await;
        let frozen = "return Response.json({ locks: [], more: false, told: true, frozen: [ \
            { collection: 'workitem', reason: 'New <b>numbers', ends_in_ms: 7260000 }, \
            { collection: null, reason: 'All', ends_in_ms: 60000 }] })";
        stub(&root, frozen).await;
        root.until_says("frozen", "No new locks in workitem for 2 h 1 min: New <b>numbers").await;
        root.until_says("frozen", "No new locks in any collection for 1 min: All").await;
    })
    .await;
}
