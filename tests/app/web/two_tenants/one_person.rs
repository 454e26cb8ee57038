//! The tabs, streams and waits of one person on two servers.

use super::*;

#[actix_web::test]
async fn a_lock_of_a_tab_lives_on_requests_that_name_it_and_on_no_others_on_each_server() {
    let (database, servers) = two_servers(USUAL, &["north-1", "north-2"]).await;
    let [a, b] = &servers;
    for (home, away) in [(a, b), (b, a)] {
        for names in ["tab", "token", "token in another tab", "heartbeat", "heartbeat elsewhere"] {
            let ann = Visitor::logged_in(home, "ann@north").await;
            let taken = ann.in_tab(home, ONE, "/locks/workitem/north-1", json!({})).await;
            let others = ann.in_tab(home, TWO, "/locks/workitem/north-2", json!({})).await;
            let beat = |id: &str, taken: &Seen| json!({ "locks": { (format!("workitem/{id}")): taken.json()["token"] } });
            for id in ["north-1", "north-2"] {
                rig::age(&database, &key(id), TTL / 2).await;
            }
            let ts = async |id| *record(&database, id).await.get_datetime("ts").unwrap();
            let (before, others_before) = (ts("north-1").await, ts("north-2").await);
            for server in [away, home] {
                ann.send(ann.request(server, Method::GET, "/plain"), Value::Null).await.is(204);
                ann.in_tab(server, TWO, "/locks/workitem/north-1", json!({})).await.is(423);
                ann.post_json(server, "/locks/heartbeat", json!({})).await.is(200);
                ann.in_tab(server, TWO, "/locks/heartbeat", beat("north-2", &others)).await.is(200);
            }
            // The renewals of the other server have been carried out, in the order of the requests.
            let renewed = async || ts("north-2").await > others_before;
            eventually("the other tab has renewed its own lock", renewed).await;
            assert_eq!(ts("north-1").await, before, "{names}");

            let get = ann.request(away, Method::GET, "/plain");
            let post = ann.request(away, Method::POST, "/locks/heartbeat");
            let (request, body) = match names {
                "tab" => (get.insert_header(("doclock-tab", ONE)), Value::Null),
                "token" => (get.insert_header(("lock-token", taken.token())), Value::Null),
                "token in another tab" => {
                    let put = ann.request(away, Method::PUT, "/workitem/north-1");
                    let put = put.insert_header(("lock-token", taken.token()));
                    (put.insert_header(("doclock-tab", TWO)), json!("new"))
                }
                "heartbeat" => (post, beat("north-1", &taken)),
                _ => (post.insert_header(("doclock-tab", TWO)), beat("north-1", &taken)),
            };
            let answer = ann.send(request, body).await;
            assert!(answer.status < 300, "{names}: {answer:?}");
            eventually(names, async || ts("north-1").await > before).await;
            ann.post(home, "/logout").await.is(204);
        }
    }
}

/// With a short ttl, which passes by itself.
#[actix_web::test]
async fn the_lock_of_a_crashed_tab_ends_while_another_tab_is_busy_on_both_servers() {
    let settings = Settings { manager: |builder| builder.ttl(Duration::from_secs(2)), ..USUAL };
    let (_, [a, b]) = two_servers(settings, &["north-1", "north-2"]).await;
    let ann = Visitor::logged_in(&a, "ann@north").await;
    let cid = Visitor::logged_in(&b, "cid@north").await;
    ann.in_tab(&a, ONE, "/locks/workitem/north-1", json!({})).await.is(201);
    ann.in_tab(&b, TWO, "/locks/workitem/north-2", json!({})).await.is(201);
    let is_over = Cell::new(false);
    let busy = async {
        while !is_over.get() {
            for server in [&a, &b] {
                ann.in_tab(server, TWO, "/locks/heartbeat", json!({})).await.is(200);
                ann.send(ann.request(server, Method::GET, "/plain"), Value::Null).await.is(204);
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let waits = async {
        let wait = json!({ "wait_ms": 30_000 });
        let answer = cid.post_json(&b, "/locks/workitem/north-1", wait).await;
        is_over.set(true);
        answer.is(201);
    };
    tokio::join!(busy, waits);
}

#[actix_web::test]
async fn a_client_that_hangs_up_while_it_waits_gets_no_lock_and_the_next_person_does() {
    let settings = Settings { wait: LONGEST_WAIT, ..USUAL };
    let (database, [a, b]) = two_servers(settings, &["north-1"]).await;
    let ann = Visitor::logged_in(&a, "ann@north").await;
    let bea = Visitor::logged_in(&a, "bea@north").await;
    let cid = Visitor::logged_in(&b, "cid@north").await;
    let (lock, wait) = ("/locks/workitem/north-1", json!({ "wait_ms": 120_000 }));
    for (path, body) in [(lock, wait.to_string()), ("/workitem/north-1", String::new())] {
        ann.post(&b, lock).await.is(201);
        let cookie = bea.cookie.borrow().as_ref().unwrap().stripped().to_string();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncookie: {cookie}\r\ncontent-length: {}\r\n\r\n{body}",
            a.address,
            body.len(),
        );
        let mut client = TcpStream::connect(a.address).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        a.waiting(1).await;
        drop(client);
        a.waiting(0).await;
        let release = async {
            b.waiting(1).await;
            ann.delete(&a, lock).await.is(204);
        };
        let (next, ()) = tokio::join!(cid.post_json(&b, lock, wait.clone()), release);
        next.is(201);
        let holder = record(&database, "north-1").await;
        assert_eq!(holder.get_document("holder").unwrap().get_str("label").unwrap(), "cid");
        cid.delete(&a, lock).await.is(204);
        assert!(a.locks.list().await.unwrap().is_empty());
    }
}

#[actix_web::test]
async fn a_stream_ends_with_its_person_on_the_other_server_and_the_next_one_hears_nothing_of_it() {
    let (_, [a, b]) = two_servers(USUAL, &["north-1", "north-2", "south-1"]).await;
    let cid = Visitor::logged_in(&a, "cid@north").await;
    let dan = Visitor::logged_in(&a, "dan@south").await;
    for end in ["logout", "revocation", "other person"] {
        let ann = Visitor::logged_in(&a, "ann@north").await;
        ann.post(&a, "/locks/workitem/north-2").await.is(201);
        let aid = a.locks.list().await.unwrap().pop().unwrap().aid;
        ann.delete(&a, "/locks/workitem/north-2").await.is(204);
        // From here on she holds no lock.
        let mut old = ann.listen(&b).await;
        match end {
            "logout" => drop(ann.post(&a, "/logout").await.is(204)),
            "revocation" => drop(a.locks.end_session(&aid).await.unwrap()),
            _ => {}
        }
        ann.post(&a, "/login/bob@south").await.is(204);
        let ends = async {
            while let Some((event, data)) = old.next().await {
                assert!(data["id"].is_null() || data["id"] == "north-2", "{end}: {event} {data}");
            }
        };
        timeout(SOON, ends).await.expect("it ends");
        let mut new = ann.listen(&b).await;
        cid.post(&a, "/workitem/north-1").await.is(200);
        dan.post(&a, "/workitem/south-1").await.is(200);
        let (event, data) = new.event().await;
        assert_eq!((event.as_str(), &data["id"]), ("acquired", &"south-1".into()), "{end}");
        cid.delete(&a, "/locks/workitem/north-1").await.is(204);
        dan.delete(&a, "/locks/workitem/south-1").await.is(204);
        let (event, data) = new.event().await;
        assert_eq!((event.as_str(), &data["id"]), ("released", &"south-1".into()), "{end}");
    }
}
