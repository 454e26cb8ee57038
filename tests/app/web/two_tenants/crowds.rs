//! Many streams, waiters and tabs of one person leave room for everybody else.

use super::*;

#[actix_web::test]
async fn strangers_who_ask_all_the_time_keep_the_owner_out_of_nothing() {
    let (_, [a, b]) = two_servers(USUAL, &["north-1"]).await;
    let ann = Visitor::logged_in(&a, "ann@north").await;
    let bob = Visitor::logged_in(&a, "bob@south").await;
    let (opened, asked) = (Cell::new(0), Cell::new(0));
    let ways = ["/workitem/north-1", "/workitem/north-1/read", "/locks/workitem/north-1"];
    let loops = ways.iter().chain(["/create/north-1"].iter()).map(async |path| {
        let bob = bob.clone();
        while opened.get() < 50 {
            for server in [&a, &b] {
                bob.post(server, path).await.is(404);
                asked.set(asked.get() + 1);
            }
        }
    });
    let opens = async {
        while opened.get() < 50 {
            for server in [&a, &b] {
                ann.post(server, "/workitem/north-1").await.is(200);
                ann.delete(server, "/locks/workitem/north-1").await.is(204);
                opened.set(opened.get() + 1);
            }
        }
    };
    tokio::join!(join_all(loops), opens);
    assert!(asked.get() >= 8, "they asked meanwhile");
}

/// 30 people of two tenants have ten streams each.
#[actix_web::test]
async fn with_a_slow_policy_every_stream_hears_every_opening_and_few_calls_serve_all() {
    const PEOPLE: usize = 30;
    const STREAMS: usize = 10;
    const OPENINGS: usize = 40;
    let ids: Vec<_> = (0..OPENINGS)
        .map(|i| format!("{}-{i}", if i % 2 == 0 { "north" } else { "south" }))
        .collect();
    let settings = Settings { tenant: Tenant::Named, ..USUAL };
    let ids: Vec<_> = ids.iter().map(String::as_str).collect();
    let (_, servers) = two_servers(settings, &ids).await;
    let [a, b] = &servers;
    let ann = Visitor::logged_in(a, "ann@north").await;
    let bob = Visitor::logged_in(a, "bob@south").await;
    let eve = Visitor::logged_in(a, "eve@south").await;
    let mut listeners = Vec::new();
    for i in 0..PEOPLE {
        let tenant = if i % 2 == 0 { "north" } else { "south" };
        let person = Visitor::logged_in(a, &format!("p{i}@{tenant}")).await;
        for server in servers.iter().cycle().take(STREAMS) {
            let mut stream = person.listen(server).await;
            let own: BTreeSet<_> =
                ids.iter().filter(|id| id.starts_with(tenant)).map(|id| (*id).to_owned()).collect();
            listeners.push(rt::spawn(async move {
                let (mut heard, mut others) = (BTreeSet::new(), 0);
                while heard.len() < own.len() {
                    let (event, data) = stream.event().await;
                    let id = data["id"].as_str().unwrap_or_default();
                    if event == "acquired" && own.contains(id) {
                        heard.insert(id.to_owned());
                    } else {
                        assert!(id.starts_with(tenant), "{event} {data}");
                        others += 1;
                    }
                }
                others
            }));
        }
    }
    let is_over = Cell::new(false);
    let posts = async {
        let mut posted = 0;
        while !is_over.get() {
            for server in [a, b] {
                for path in ["/workitem", "/locks/workitem"] {
                    eve.post(server, &format!("{path}/south-missing-{posted}")).await.is(404);
                    posted += 1;
                }
            }
        }
        posted
    };
    let opens = async {
        let mut tenth = interval(Duration::from_millis(100));
        for (i, id) in ids.iter().enumerate() {
            tenth.tick().await;
            let (person, server) =
                (if i % 2 == 0 { &ann } else { &bob }, if i % 4 < 2 { a } else { b });
            person.post(server, &format!("/workitem/{id}")).await.is(200);
        }
        let heard = timeout(SOON * 5, join_all(listeners)).await.expect("every stream hears all");
        is_over.set(true);
        heard
    };
    let (posted, heard) = tokio::join!(posts, opens);
    let others: usize = heard.into_iter().map(Result::unwrap).sum();
    let count = |of: fn(&Policy) -> &AtomicUsize| -> usize {
        servers.iter().map(|server| of(&server.policy).load(Ordering::Relaxed)).sum()
    };
    let (calls, asked) = (count(|it| &it.calls), count(|it| &it.asked));
    println!(
        "{posted} posts to missing documents, {others} events of them; {calls} calls of the policy for {asked} documents",
    );
    // Each of the two workers of a server asks once for a person and a document.
    assert!(asked <= 2 * 2 * PEOPLE * (OPENINGS + posted), "{asked}");
}

/// Otherwise whoever asks for documents that are not there makes work for all who listen.
#[actix_web::test]
async fn a_person_who_asks_for_missing_documents_is_announced_with_the_first_at_most() {
    let settings = Settings { tenant: Tenant::Named, ..USUAL };
    let (_, [a, b]) = two_servers(settings, &["south-1"]).await;
    let eve = Visitor::logged_in(&a, "eve@south").await;
    let mut heard = eve.listen(&b).await;
    for i in 0..20 {
        for path in ["/workitem", "/locks/workitem"] {
            eve.post(&a, &format!("{path}/south-missing-{i}")).await.is(404);
        }
    }
    eve.post(&a, "/workitem/south-1").await.is(200);
    loop {
        let (_, data) = heard.event().await;
        if data["id"] == "south-1" {
            break;
        }
        assert_eq!(data["id"], "south-missing-0");
    }
}

#[actix_web::test]
async fn one_person_has_64_streams_of_a_server_and_shuts_nobody_out() {
    let (_, [a, b]) = two_servers(USUAL, &["south-1"]).await;
    let mut logins = Vec::new();
    for _ in 0..4 {
        logins.push(Visitor::logged_in(&b, "ann@north").await);
    }
    let mut open = Vec::new();
    for login in logins.iter().cycle().take(64) {
        open.push(login.listen(&a).await);
    }
    for login in &logins {
        assert_eq!(login.asks_for_stream(&a).await.status(), 503);
        let refused = login.request(&a, Method::GET, "/locks/events");
        let refused = login.send(refused, Value::Null).await;
        refused.is_problem(503, "too_many_streams");
        assert!(refused.headers.contains_key("retry-after"));
    }
    for server in [&a, &b] {
        let bob = Visitor::logged_in(server, "bob@south").await;
        let mut his = bob.listen(server).await;
        bob.post(&b, "/workitem/south-1").await.is(200);
        assert_eq!(his.event().await.1["id"], "south-1");
        bob.delete(&b, "/locks/workitem/south-1").await.is(204);
    }
    // A stream that is closed makes room.
    open.pop();
    let again = async || logins[0].asks_for_stream(&a).await.status() == 200;
    eventually("there is room again", again).await;
}

/// Without the limit for each person, the places would be taken.
#[actix_web::test]
async fn the_waiters_of_one_person_in_many_logins_leave_places_for_others_on_each_server() {
    const LOGINS: usize = 12;
    let settings = Settings {
        manager: |builder| {
            builder.limits(Limits {
                waiters_per_session: 2,
                waiters_per_person: 4,
                waiters: 6,
                ..Limits::default()
            })
        },
        ..USUAL
    };
    let (_, [a, b]) = two_servers(settings, &["north-1", "north-2"]).await;
    let cid = Visitor::logged_in(&a, "cid@north").await;
    let long = json!({ "wait_ms": 50_000 });
    for server in [&a, &b] {
        for id in ["north-1", "north-2"] {
            cid.post(server, &format!("/locks/workitem/{id}")).await.is(201);
        }
        let mut logins = Vec::new();
        for _ in 0..LOGINS {
            logins.push(Visitor::logged_in(&b, "ann@north").await);
        }
        let refused = Cell::new(0);
        let greedy = join_all(logins.iter().enumerate().map(async |(i, login)| {
            let path = format!("/locks/workitem/north-{}", 1 + i % 2);
            let answer = login.post_json(server, &path, long.clone()).await;
            if answer.status == 503 {
                answer.is_problem(503, "too_many_waiters");
                refused.set(refused.get() + 1);
            } else {
                assert_eq!(answer.status, 201);
                login.delete(server, &path).await.is(204);
            }
        }));
        let dan = async {
            eventually("she is refused", async || refused.get() == LOGINS - 4).await;
            let dan = Visitor::logged_in(server, "dan@north").await;
            let frees = async {
                server.waiting(5).await;
                for id in ["north-1", "north-2"] {
                    cid.delete(server, &format!("/locks/workitem/{id}")).await.is(204);
                }
            };
            let waits = dan.post_json(server, "/locks/workitem/north-1", long.clone());
            let (answer, ()) = tokio::join!(waits, frees);
            answer.is(201);
            dan.delete(server, "/locks/workitem/north-1").await.is(204);
        };
        tokio::join!(greedy, dan);
    }
}
