//! What people call documents: `describe` of the builder, and the places that show its titles.

use std::{
    collections::HashMap,
    future::{Future, pending},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Instant,
};

use actix_doclock::{BoxError, Description, Holder, Released};
use serde_json::json;

use super::*;
use crate::rig::{
    app::eventually,
    log::{count_logged, log_lines, logged},
};

type Titles = Result<HashMap<LockKey, Description>, BoxError>;

/// A manager that describes its documents with this function.
async fn described<F>(describe: impl Fn(Vec<LockKey>) -> F + Send + Sync + 'static) -> LockManager
where
    F: Future<Output = Titles> + Send + 'static,
{
    let settings = |builder: LockManagerBuilder| {
        builder
            .describe(describe)
            .admin_policy(|actor| actor.has_role("chief"))
            .take_over_policy(|actor, _| actor.has_role("chief"))
            .without_reaper()
    };
    embedded_with(settings).await.0
}

/// The title of each document is this text, and its id.
fn titled(keys: &[LockKey], title: &str) -> Titles {
    let one = |key: &LockKey| {
        let it = Description::new(format!("{title} {}", key.id()));
        (key.clone(), it.link(format!("/notes/{}", key.id())))
    };
    Ok(keys.iter().map(one).collect())
}

async fn title(locks: &LockManager, id: &str) -> Option<String> {
    locks.descriptions(&[key(id)]).await.remove(&key(id)).map(|it| it.title)
}

#[actix_web::test]
async fn a_refusal_names_the_document_by_its_title() {
    let locks = described(async |keys| titled(&keys, "Contract with Miller")).await;
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let granted = alice.post("/locks/note/a").await.json();
    assert!(granted.get("document").is_none(), "{granted}");

    let document = json!({ "title": "Contract with Miller a", "link": "/notes/a" });
    for uri in ["/locks/note/a", "/note/a", "/note/a/read"] {
        let refused = bob.post(uri).await.problem(423);
        assert_eq!(refused["document"], document, "{uri}");
        assert_eq!(refused["detail"], "“Contract with Miller a” is locked by alice", "{uri}");
        assert_eq!(refused["holder"], json!({ "label": "alice" }), "{uri}");
    }
    let view = bob.get("/note/a/view").await.text();
    assert_eq!(view, "read only: “Contract with Miller a” is locked by alice");

    let in_tab = |tab: u128| {
        let tab = uuid::Uuid::from_u128(tab).to_string();
        alice.request(Method::POST, "/locks/note/b").insert_header(("doclock-tab", tab))
    };
    alice.send(in_tab(1)).await.token();
    let elsewhere = alice.send(in_tab(2)).await.problem(423);
    assert_eq!(elsewhere["document"]["title"], "Contract with Miller b");
    assert_eq!(
        elsewhere["detail"],
        "another tab of this browser has “Contract with Miller b” open for editing"
    );
}

#[actix_web::test]
async fn without_a_title_a_refusal_names_the_document_by_its_key() {
    let (plain, _) = embedded().await;
    for locks in [plain, described(async |_| Ok(HashMap::new())).await] {
        let app = serve_with_cookies(&locks).await;
        let (alice, bob) =
            (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
        alice.post("/note/a").await.token();
        let refused = bob.post("/note/a").await.problem(423);
        assert_eq!(refused["detail"], "note/a is locked by alice");
        assert!(refused.get("document").is_none(), "{refused}");
    }
}

#[actix_web::test]
async fn each_person_sees_the_titles_that_are_meant_for_that_person() {
    let describe = async |person: Option<Actor>, keys: Vec<LockKey>| {
        let label = person.map_or("nobody".to_owned(), |person| person.label);
        titled(&keys, &format!("for {label}:"))
    };
    let settings = |builder: LockManagerBuilder| {
        let builder = builder.admin_policy(|actor| actor.has_role("chief"));
        builder.describe_for(describe).without_reaper()
    };
    let (locks, _) = embedded_with(settings).await;
    let app = serve_with_cookies(&locks).await;
    Browser::logged_in(&app, "alice").await.post("/note/a").await.token();
    for label in ["bob", "carol", "bob"] {
        let refused = Browser::logged_in(&app, label).await.post("/note/a").await.problem(423);
        assert_eq!(refused["document"]["title"], format!("for {label}: a"), "{refused}");
    }
    let all = Browser::logged_in(&app, "root").await.get("/locks/admin.json").await.json();
    assert_eq!(all["locks"][0]["title"], "for root: a", "{all}");
    assert_eq!(title(&locks, "a").await.unwrap(), "for nobody: a");
}

#[actix_web::test]
async fn the_table_of_all_locks_has_titles_and_links_to_pages_only() {
    log_lines();
    let locks = described(async |keys| {
        let links = ["/notes/a", "javascript:alert(1)"];
        let one = |(key, link): (LockKey, &str)| {
            (key, Description::new("<b>Title</b>\u{1b}[2J\r\n=1").link(link))
        };
        Ok(keys.into_iter().zip(links).map(one).collect())
    })
    .await;
    let app = serve_with_cookies(&locks).await;
    let root = Browser::logged_in(&app, "root").await;
    for uri in ["/locks/note/a", "/locks/note/b"] {
        root.post(uri).await.token();
    }
    let all = root.get("/locks/admin.json").await.json();
    let [a, b] = &all["locks"].as_array().unwrap()[..] else { panic!("{all}") };
    assert_eq!((&a["title"], &a["link"]), (&json!("<b>Title</b> [2J  =1"), &json!("/notes/a")));
    assert_eq!((&b["title"], &b["link"]), (&a["title"], &Value::Null));
    assert!(logged(r#"note/String("b") a link that is left out"#));
    assert!(!logged("alert(1)"));
}

#[actix_web::test]
async fn a_break_says_whether_the_lock_was_still_there() {
    let (locks, _) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let root = Browser::logged_in(&app, "root").await;
    let token = root.post("/locks/note/a").await.json()["token"].clone();
    let why = json!({ "token": token, "reason": "" });
    for broken in ["1", "0"] {
        let answer = root.post_json("/locks/note/a/break", why.clone()).await;
        assert_eq!((answer.status.as_u16(), answer.header("doclock-broken")), (204, Some(broken)));
    }
}

#[actix_web::test]
async fn the_audit_log_names_documents_by_their_titles_and_no_break_waits_for_them() {
    log_lines();
    let began = Arc::new(AtomicUsize::new(0));
    let asked = began.clone();
    let (answers, does_answer) = tokio::sync::watch::channel(false);
    let locks = described(move |keys| {
        asked.fetch_add(1, SeqCst);
        let mut does_answer = does_answer.clone();
        async move {
            does_answer.wait_for(|it| *it).await.unwrap();
            titled(&keys, "Audited \"\u{202e}X\"")
        }
    })
    .await;
    let (aid, holder) = (actix_doclock::Aid::new(), Holder::new("alice"));
    let granted = locks.lock_for_session(&key("a"), &aid, &holder).await.unwrap();
    let actix_doclock::TryAcquire::Granted(lock) = granted else { panic!("{granted:?}") };
    let root = Actor::new("root").with_role("chief");
    // The time that a title may take does not pass while anybody has something to do.
    tokio::time::pause();
    let broken = locks.break_lock(&lock, &root, "why\n").await.unwrap();
    assert_eq!(broken, Released::Released);
    assert!(!logged("Audited"), "nobody knows the title yet");
    answers.send_replace(true);
    // The line is not lost if the server stops now.
    locks.shutdown().await;
    let line = r#"the lock on note/"a" ("Audited \"\u{202e}X\" a") was broken by "root"; reason: "why\n"; it was held by "alice""#;
    assert!(logged(line));

    let app = serve_with_cookies(&locks).await;
    let (bob, root) =
        (Browser::logged_in(&app, "bob").await, Browser::logged_in(&app, "root").await);
    bob.post("/locks/note/b").await.token();
    root.post_json("/locks/note/b", json!({ "take_over": true })).await.token();
    locks.shutdown().await;
    assert!(logged(r#"("Audited \"\u{202e}X\" b") was taken over by "root" (id "root")"#));
    assert_eq!(began.load(SeqCst), 2);
}

#[actix_web::test]
async fn a_describe_that_fails_or_panics_leaves_documents_without_titles_and_logs_one_line() {
    log_lines();
    for (what, told) in
        [("fail", "`describe` failed: no fail today"), ("panic", "`describe` panicked")]
    {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let before = count_logged(&[told]);
        let locks = described(move |_| {
            counted.fetch_add(1, SeqCst);
            async move {
                assert!(what == "fail", "no title");
                Err("no fail today".into())
            }
        })
        .await;
        let app = serve_with_cookies(&locks).await;
        Browser::logged_in(&app, "alice").await.post("/note/a").await.token();
        let bob = Browser::logged_in(&app, "bob").await;
        for _ in 0..3 {
            let refused = bob.post("/note/a").await.problem(423);
            assert_eq!(refused["detail"], "note/a is locked by alice");
        }
        assert_eq!(title(&locks, "b").await, None);
        assert_eq!(calls.load(SeqCst), 1, "the function is not asked again at once");
        assert_eq!(count_logged(&[told]) - before, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_failure_the_function_is_asked_again_later() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let locks = described(move |keys| {
        let call = counted.fetch_add(1, SeqCst);
        async move { if call == 0 { Err("not yet".into()) } else { titled(&keys, "Note") } }
    })
    .await;
    assert_eq!(title(&locks, "a").await, None);
    tokio::time::advance(Duration::from_secs(9)).await;
    assert_eq!(title(&locks, "a").await, None);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(title(&locks, "a").await.as_deref(), Some("Note a"));
}

#[tokio::test(start_paused = true)]
async fn a_describe_that_hangs_delays_callers_by_its_limit_and_only_once() {
    log_lines();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let locks = described(move |_| {
        counted.fetch_add(1, SeqCst);
        pending()
    })
    .await;
    let told = ["`describe` did not answer within 2s, and was dropped", "note/String(\"hanging-"];
    let began = tokio::time::Instant::now();
    let ids: Vec<_> = (0..20).map(|i| format!("hanging-{i}")).collect();
    let all = ids.iter().map(|id| title(&locks, id));
    assert!(futures_util::future::join_all(all).await.iter().all(Option::is_none));
    assert_eq!(began.elapsed().as_secs(), 2);
    assert_eq!(calls.load(SeqCst), 4, "no more calls at the same time");
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(title(&locks, "late").await, None);
    assert_eq!(began.elapsed().as_secs(), 2, "nobody waits during the pause");
    assert_eq!((calls.load(SeqCst), count_logged(&told)), (4, 1));
}

/// A function must not block its thread. If it does, its callers still have a limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_describe_that_blocks_its_thread_delays_nobody_for_longer_than_its_limit() {
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let receiver = Mutex::new(receiver);
    let locks = described(move |_| {
        let _ = receiver.lock().unwrap().recv();
        async { Ok(HashMap::new()) }
    })
    .await;
    let began = Instant::now();
    assert_eq!(title(&locks, "a").await, None);
    assert!(began.elapsed() >= Duration::from_millis(1_900));
    assert!(began.elapsed() < Duration::from_secs(60));
    drop(sender);
    thread::yield_now();
}

#[tokio::test(start_paused = true)]
async fn a_storm_of_questions_about_one_document_is_one_call_in_ten_seconds() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let locks = described(move |keys| {
        counted.fetch_add(1, SeqCst);
        async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            titled(&keys, "Note")
        }
    })
    .await;
    for storm in 1..=2 {
        let all = (0..500).map(|_| title(&locks, "a"));
        let titles = futures_util::future::join_all(all).await;
        assert!(titles.iter().all(|title| title.as_deref() == Some("Note a")));
        assert_eq!(title(&locks, "a").await.as_deref(), Some("Note a"));
        assert_eq!(calls.load(SeqCst), storm);
        tokio::time::advance(Duration::from_secs(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_call_asks_for_at_most_200_documents_and_no_more_than_1000_are_remembered() {
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let counted = sizes.clone();
    let locks = described(move |keys| {
        counted.lock().unwrap().push(keys.len());
        async move { titled(&keys, "Note") }
    })
    .await;
    let keys: Vec<_> = (0..3_000).map(|i| key(&i.to_string())).collect();
    let twice = [&keys[..450], &keys[..450]].concat();
    assert_eq!(locks.descriptions(&twice).await.len(), 450);
    assert_eq!(*sizes.lock().unwrap(), [200, 200, 50]);
    assert_eq!(locks.descriptions(&keys[..450]).await.len(), 450);
    assert_eq!(sizes.lock().unwrap().len(), 3, "these are remembered");

    // All get their titles, however many they are; but not all are remembered.
    assert_eq!(locks.descriptions(&keys).await.len(), 3_000);
    sizes.lock().unwrap().clear();
    assert_eq!(locks.descriptions(&keys).await.len(), 3_000);
    assert!(sizes.lock().unwrap().iter().sum::<usize>() >= 2_000);

    // But no document is asked for twice at the same time.
    tokio::time::advance(Duration::from_secs(10)).await;
    sizes.lock().unwrap().clear();
    let pages = futures_util::future::join_all((0..3).map(|_| locks.descriptions(&keys)));
    assert!(pages.await.iter().all(|titles| titles.len() == 3_000));
    assert_eq!(sizes.lock().unwrap().iter().sum::<usize>(), 3_000);
}

#[actix_web::test]
async fn answers_for_other_documents_are_ignored() {
    let locks = described(async |_| {
        Ok([(key("b"), Description::new("not asked")), (key("a"), Description::new(" \u{0} "))]
            .into())
    })
    .await;
    assert!(locks.descriptions(&[key("a")]).await.is_empty());
    assert_eq!(title(&locks, "b").await.as_deref(), Some("not asked"));
    assert!(locks.descriptions(&[]).await.is_empty());
}

#[actix_web::test]
async fn a_caller_that_goes_away_leaves_the_answer_to_the_next_one() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let locks = described(move |keys| {
        counted.fetch_add(1, SeqCst);
        async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            titled(&keys, "Note")
        }
    })
    .await;
    let _ = tokio::time::timeout(Duration::from_millis(1), title(&locks, "a")).await;
    eventually("the call begins", async || calls.load(SeqCst) == 1).await;
    assert_eq!(title(&locks, "a").await.as_deref(), Some("Note a"));
    assert_eq!(calls.load(SeqCst), 1);
}

#[actix_web::test]
async fn a_batch_asks_once_for_titles_and_slow_titles_of_one_person_delay_nobody_else() {
    for is_personal in [false, true] {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let asked = calls.clone();
        let describe = move |keys: Vec<LockKey>| {
            asked.lock().unwrap().push(keys.len());
            async move {
                if keys.iter().any(|key| key.id().to_string().starts_with("slow")) {
                    pending::<()>().await;
                }
                titled(&keys, "Note")
            }
        };
        let settings = |builder: LockManagerBuilder| match is_personal {
            false => builder.describe(describe),
            true => builder.describe_for(move |_, keys| describe(keys)),
        };
        let (locks, store) = embedded_with(settings).await;
        let ids = |name: &str| (0..6).map(|n| format!("{name}{n}")).collect::<Vec<_>>();
        for id in ids("n").iter().chain(&ids("slow")) {
            store.put(id.clone(), &Note { id: id.clone(), text: "old".to_owned() }).unwrap();
        }
        let app = serve_with_cookies(&locks).await;
        let (alice, bob, holder) = (
            Browser::logged_in(&app, "alice").await,
            Browser::logged_in(&app, "bob").await,
            Browser::logged_in(&app, "holder").await,
        );
        for id in ids("n").iter().chain(&ids("slow")).map(String::as_str).chain(["a"]) {
            holder.post(&format!("/locks/note/{id}")).await.token();
        }
        let keys: Vec<_> = ids("n").iter().map(|id| format!("note/{id}")).collect();
        let batch = alice.post_json("/locks", json!({ "keys": keys })).await.json();
        for (n, refused) in batch["refused"].as_array().unwrap().iter().enumerate() {
            assert_eq!(refused["document"]["title"], format!("Note n{n}"), "{refused}");
        }
        assert_eq!(*calls.lock().unwrap(), [6], "one call for all documents of the request");

        let slow = ids("slow");
        let slow = slow.iter().map(async |id| alice.post(&format!("/locks/note/{id}")).await);
        let of_bob = async {
            eventually("the slow titles are asked for", async || calls.lock().unwrap().len() > 1)
                .await;
            // Time for all others, if they did not wait for the first one.
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert_eq!(calls.lock().unwrap().len(), 2, "of one person, one call at a time");
            bob.post("/locks/note/a").await.problem(423)
        };
        let (slow, refused) = futures_util::join!(futures_util::future::join_all(slow), of_bob);
        assert!(slow.iter().all(|it| it.status == 423));
        assert_eq!(refused["document"]["title"], "Note a", "personal: {is_personal}, {refused}");
    }
}
