//! Policies that are slow, hang, fail or panic, and how often a policy is asked.

use super::*;

/// The page of a person who was removed goes on sending heartbeats.
#[actix_web::test]
async fn heartbeats_ask_once_a_minute_whether_the_person_may_keep_all_locks() {
    tokio::time::pause();
    let (locks, _) = embedded().await;
    let (app, forbidden, asked) = changing(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let [a, b] = ["a", "b"].map(|id| format!("/locks/note/{id}"));
    let (a, b) = (alice.post(&a).await.json(), alice.post(&b).await.json());
    let beat = json!({ "locks": { "note/a": a["token"], "note/b": b["token"] } });
    *asked.borrow_mut() = 0;
    let mut lost_after = None;
    for beats in 1..=12 {
        tokio::time::sleep(Duration::from_secs(15)).await;
        let answer = alice.post_json("/locks/heartbeat", beat.clone()).await.json();
        assert_eq!(*asked.borrow(), beats / 4, "one call for all locks");
        if beats == 4 {
            assert_eq!(answer["lost"], json!([]));
            forbidden.borrow_mut().push("a");
        } else if lost_after.is_none() && answer["lost"] != json!([]) {
            assert_eq!(answer["lost"][0]["key"], "note/a");
            assert_eq!(answer["held"][0]["key"], "note/b");
            lost_after = Some(beats);
        }
    }
    assert_eq!(lost_after, Some(8));
    let left: Vec<_> = locks.list().await.unwrap().iter().map(|it| it.key.to_string()).collect();
    assert_eq!(left, ["note/b"]);
}

/// A person who was removed keeps a session alive by other requests than heartbeats.
#[actix_web::test]
async fn each_request_of_a_session_counts_for_the_question_whether_it_may_keep_its_locks() {
    tokio::time::pause();
    let (locks, _) = embedded().await;
    let (app, forbidden, asked) = changing(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/locks/note/a").await.token();
    alice.post_json("/locks/note/b", json!({ "mode": "shared" })).await.token();
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_secs(31)).await;
        alice.get("/plain").await;
    }
    assert_eq!(alice.get("/locks").await.json().as_array().unwrap().len(), 2);
    forbidden.borrow_mut().extend(["a", "b"]);
    *asked.borrow_mut() = 0;
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_secs(15)).await;
        assert_eq!(alice.get("/plain").await.status, 200);
    }
    assert_eq!(*asked.borrow(), 1, "one call for all locks");
    assert!(locks.list().await.unwrap().is_empty());
}

#[actix_web::test]
async fn a_policy_that_hangs_holds_up_no_request_without_a_lock() {
    tokio::time::pause();
    let (locks, _) = embedded_with(|it| it.deadline(Duration::from_secs(30))).await;
    let hangs = Rc::new(RefCell::new(false));
    let does = Rc::clone(&hangs);
    let app = serve_with(&locks, move |session| {
        session.access_policy(async move |_: Option<Actor>, _: LockKey, _| {
            if *does.borrow() {
                std::future::pending::<()>().await;
            }
            true
        })
    })
    .await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/locks/note/a").await.token();
    *hangs.borrow_mut() = true;
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(31)).await;
        let began = tokio::time::Instant::now();
        assert_eq!(alice.get("/plain").await.status, 200);
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    }
    assert_eq!(locks.list().await.unwrap().len(), 1);
}

/// As after a restart, or at another server.
#[actix_web::test]
async fn a_session_that_is_new_to_a_server_is_asked_for_at_once() {
    let (locks, store) = embedded().await;
    let app = serve_with_cookies(&locks).await;
    let alice = Browser::logged_in(&app, "alice").await;
    let token = alice.post("/locks/note/a").await.json()["token"].clone();
    let other = LockManager::builder(store).build().await.unwrap();
    other.register::<Note>().await.unwrap();
    let (app, forbidden, _) = changing(&other).await;
    forbidden.borrow_mut().push("a");
    let beat = json!({ "locks": { "note/a": token } });
    let answer = alice.at(&app).post_json("/locks/heartbeat", beat).await.json();
    assert_eq!((&answer["held"], &answer["lost"][0]["key"]), (&json!([]), &json!("note/a")));
}

#[actix_web::test]
async fn a_policy_that_panics_hangs_or_miscounts_is_an_outage() {
    tokio::time::pause();
    let (locks, _) = embedded().await;
    let how = Rc::new(RefCell::new("panics"));
    let does = Rc::clone(&how);
    let app = serve_with(&locks, move |session| {
        session.access_policy_for_many(async move |_: Option<Actor>, _: Vec<LockKey>, _| {
            let how = *does.borrow();
            match how {
                "panics" => panic!("on purpose"),
                "hangs" => std::future::pending().await,
                "miscounts" => Vec::new(),
                _ => vec![true],
            }
        })
    })
    .await;
    let alice = Browser::logged_in(&app, "alice").await;
    for does in ["panics", "hangs", "miscounts"] {
        *how.borrow_mut() = does;
        alice.post("/locks/note/a").await.problem(503);
        alice.post("/note/a").await.problem(503);
        alice.post_json("/locks/status", json!({ "keys": ["note/a"] })).await.problem(503);
    }
    assert!(locks.list().await.unwrap().is_empty());
    *how.borrow_mut() = "works";
    assert_eq!(alice.post("/note/a").await.status, 200);
}

/// 2 people with 20 streams each: at most one call for each person at a time, with all documents that wait.
#[actix_web::test]
async fn the_streams_of_a_person_share_the_answers_of_the_policy_and_a_slow_one_is_asked_for_many_at_once()
 {
    let (locks, _) = embedded().await;
    let asked = Rc::new(RefCell::new(Vec::new()));
    let gate = Rc::new(tokio::sync::Semaphore::new(0));
    let (asks, waits) = (Rc::clone(&asked), Rc::clone(&gate));
    let app = serve_with(&locks, move |session| {
        session.access_policy_for_many(
            async move |person: Option<Actor>, keys: Vec<LockKey>, access| {
                if access == Access::Look {
                    asks.borrow_mut().push((person.unwrap().label, keys.len()));
                    waits.acquire().await.unwrap().forget();
                }
                vec![true; keys.len()]
            },
        )
    })
    .await;
    let people = [Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await];
    let mut streams = Vec::new();
    streams.push(people[0].listen("").await);
    for person in people.iter().flat_map(|person| vec![person; 20]).skip(1) {
        streams.push(open(person, "").await);
    }
    let open_all = async |ids: std::ops::Range<i32>| {
        for id in ids {
            let (aid, holder) = (Aid::new(), Holder::new("worker"));
            drop(locks.lock_for_session(&key(&id.to_string()), &aid, &holder).await.unwrap());
        }
    };
    open_all(0..1).await;
    let mut told = Vec::new();
    let read = futures_util::future::join_all(streams.iter_mut().map(async |stream| {
        let mut keys = Vec::new();
        while keys.len() < 51 {
            let (event, data) = stream.event().await;
            assert_eq!(event, "acquired", "after {}", keys.len());
            keys.push(data["key"].to_string());
        }
        keys
    }));
    let writes = async {
        eventually("both were asked for", async || asked.borrow().len() == 2).await;
        open_all(1..51).await;
        // The policy has not answered yet, so it was not asked again.
        assert_eq!(asked.borrow().len(), 2);
        gate.add_permits(1_000);
    };
    let (read, ()) = tokio::join!(read, writes);
    told.extend(read);
    assert!(told.iter().all(|keys| *keys == told[0]) && told.len() == 40);
    let asked = asked.borrow();
    assert_eq!(asked.iter().map(|(_, keys)| keys).sum::<usize>(), 2 * 51, "{asked:?}");
}

/// A failed answer is not remembered, and a person for whom the policy hangs keeps nobody else waiting.
#[actix_web::test]
async fn a_policy_that_fails_for_one_person_is_asked_again_and_serves_the_others_meanwhile() {
    let (locks, _) = embedded().await;
    let calls = Rc::new(RefCell::new(Vec::new()));
    let asked = Rc::clone(&calls);
    let fails = Rc::new(RefCell::new(true));
    let failing = Rc::clone(&fails);
    let app = serve_with(&locks, move |session| {
        session.access_policy_for_many(
            async move |person: Option<Actor>, keys: Vec<LockKey>, access| {
                let label = person.unwrap().label;
                if access == Access::Look {
                    asked.borrow_mut().push(label.clone());
                    assert!(label != "carol" || !*failing.borrow(), "on purpose");
                    if label == "alice" {
                        std::future::pending::<()>().await;
                    }
                }
                vec![true; keys.len()]
            },
        )
    })
    .await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    let carol = Browser::logged_in(&app, "carol").await;
    let mut hears = bob.listen("").await;
    let mut fails_at = open(&carol, "").await;
    let mut hang = Vec::new();
    for n in 0..40 {
        hang.push(open(&alice, &format!("?keys=note/{n}")).await);
    }
    let hanging = futures_util::future::join_all(hang.iter_mut().map(Stream::next));
    let others = async {
        let aids: Vec<_> = (0..40).map(|_| Aid::new()).collect();
        for (n, aid) in aids.iter().enumerate() {
            let (key, holder) = (key(&n.to_string()), Holder::new("worker"));
            drop(locks.lock_for_session(&key, aid, &holder).await.unwrap());
        }
        for _ in 0..40 {
            assert_eq!(hears.event().await.0, "acquired");
        }
        assert!(fails_at.next().await.is_none(), "the stream ends");
        *fails.borrow_mut() = false;
        let mut again = open(&carol, "").await;
        locks.release_all(&aids[0]).await.unwrap();
        assert_eq!(again.event().await.1["key"], "note/0");
        // One at a time, and each takes five seconds.
        calls.borrow().iter().filter(|label| **label == "alice").count()
    };
    tokio::select! {
        _ = hanging => panic!("no stream of hers ends before the policy has failed"),
        asked = others => assert!(asked <= 8, "{asked}"),
    }
}
