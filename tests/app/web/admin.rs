//! The table of all locks.

use serde_json::json;

use super::*;

#[actix_web::test]
async fn without_a_policy_there_is_no_table_of_all_locks() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let root = Browser::logged_in(&app, "root").await;
    for uri in ["/locks/admin", "/locks/admin.json", "/locks/admin.js", "/locks/admin.css"] {
        root.get(uri).await.problem(404);
    }
}

#[actix_web::test]
async fn only_permitted_people_see_the_table_of_all_locks() {
    let (locks, _) =
        embedded_with(|settings| settings.admin_policy(|actor| actor.has_role("chief"))).await;
    let app = serve_with_cookies(&locks).await;
    let (alice, root) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "root").await);
    for uri in ["/locks/admin", "/locks/admin.json", "/locks/admin.js", "/locks/admin.css"] {
        alice.get(uri).await.problem(403);
        Browser::new(&app).get(uri).await.problem(403);
        assert_eq!(root.get(uri).await.status, 200, "{uri}");
    }
    let page = root.get("/locks/admin").await;
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.contains("frame-ancestors 'none'") && policy.contains("default-src 'self'"));
    let token = alice.post("/locks/note/b").await.json()["token"].clone();
    tokio::time::sleep(Duration::from_millis(5)).await;
    root.post("/locks/note/a").await.token();
    let all = root.get("/locks/admin.json").await.json();
    assert_eq!((&all["more"], &all["told"]), (&false.into(), &true.into()));
    let [first, second] = &all["locks"].as_array().unwrap()[..] else { panic!("{all}") };
    assert_eq!(
        (&first["key"], &first["id"]),
        (&"note/b".into(), &"b".into()),
        "the oldest lock comes first"
    );
    assert_eq!((&first["holder"], &first["token"]), (&json!({ "label": "alice" }), &token));
    assert_eq!((&first["may_break"], &first["mode"]), (&true.into(), &"exclusive".into()));
    assert!(first["since"].is_string() && first["expires_in_ms"].as_u64().unwrap() > 0);
    assert_eq!(second["holder"]["label"], "root");

    let why = json!({ "token": token, "reason": "gone home" });
    assert_eq!(root.post_json("/locks/note/b/break", why).await.status, 204);
    assert_eq!(root.get("/locks/admin.json").await.json()["locks"].as_array().unwrap().len(), 1);
}

/// A browser takes `.` and `..` out of each path, also if they are encoded.
#[actix_web::test]
async fn the_lock_on_an_id_that_no_path_can_name_is_broken_by_its_key() {
    let (locks, store) = embedded().await;
    for id in [".", "..", "a/b"] {
        store.put(id.to_owned(), &Note { id: id.to_owned(), text: String::new() }).unwrap();
    }
    let app = serve_with_cookies(&locks).await;
    let (alice, root) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "root").await);
    for id in [".", "..", "a/b"] {
        let name = format!("note/{id}");
        let taken = alice.post_json("/locks", json!({ "keys": [name] })).await.json();
        let token = &taken["held"][0]["token"];
        let by = |token: &Value| json!({ "key": name, "token": token, "reason": "why" });
        assert_eq!(
            alice.post_json("/locks/break", by(token)).await.problem(403)["code"],
            "break_refused"
        );
        let other = root.post_json("/locks/break", by(&json!(ONE))).await;
        assert_eq!((other.status.as_u16(), other.header("doclock-broken")), (204, Some("0")));
        let broken = root.post_json("/locks/break", by(token)).await;
        assert_eq!((broken.status.as_u16(), broken.header("doclock-broken")), (204, Some("1")));
        assert!(locks.inspect(&key(id)).await.unwrap().is_none());
    }
    for (name, status) in [("note", 400), ("", 400), ("elsewhere/a", 404)] {
        root.post_json("/locks/break", json!({ "key": name, "reason": "why" }))
            .await
            .problem(status);
    }
    // A document that the person may not see is a missing one.
    let hidden = serve_with(&locks, |wrap| wrap.access_policy(async |_, _, _| false)).await;
    let blind = Browser::logged_in(&hidden, "root").await;
    let name = json!({ "key": "note/a" });
    assert_eq!(blind.post_json("/locks/break", name).await.problem(404)["code"], "not_found");
    let anybody = Browser::new(&app);
    anybody.post_json("/locks/break", json!({ "key": "note/a" })).await.problem(401);
}

#[actix_web::test]
async fn files_for_browsers_are_sent_again_only_after_a_change() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let anybody = Browser::new(&app);
    for (uri, content_type) in [
        ("/locks/client.js", "text/javascript; charset=utf-8"),
        ("/locks/client.d.ts", "text/plain; charset=utf-8"),
    ] {
        let first = anybody.get(uri).await;
        assert_eq!(first.status, 200);
        assert_eq!(first.header("content-type"), Some(content_type));
        assert_eq!(first.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(first.header("cache-control"), Some("private, no-cache"));
        assert!(first.text().contains("DocLock"));
        let tag = first.header("etag").unwrap();
        let again = anybody.request(Method::GET, uri).insert_header(("if-none-match", tag));
        let again = anybody.send(again).await;
        assert_eq!((again.status.as_u16(), again.body.len()), (304, 0));
        assert_eq!(again.header("etag"), Some(tag));
        let other = anybody.request(Method::GET, uri).insert_header(("if-none-match", "\"old\""));
        assert_eq!(anybody.send(other).await.status, 200);
    }
}
