//! What the verbs on readers cost in commands, and which indexes they use.

use super::*;

#[tokio::test]
async fn each_verb_on_readers_is_a_read_and_a_write_except_the_first_and_refusals() {
    let (store, commands, _) = counted(Rules::new(TTL)).await;
    let alone = takes(&store, "a", Mode::Shared).await;
    assert_eq!(commands.take(), ["findAndModify"]);
    let other = takes(&store, "a", Mode::Shared).await;
    assert_eq!(commands.take(), ["find", "update"]);
    refused(&store, "a", &claim(Mode::Exclusive)).await;
    assert_eq!(commands.take(), ["find"]);
    let exclusive = Claim { aid: alone.aid.clone(), ..claim(Mode::Exclusive) };
    let _ = store.try_acquire(&key("b"), &exclusive, Deadline::NONE).await.unwrap();
    commands.take();
    assert_eq!(store.renew_all(COLLECTION, std::slice::from_ref(&alone.aid)).await.unwrap(), 2);
    let mut renewed = commands.take();
    renewed.sort();
    assert_eq!(renewed, ["find", "find", "update", "update"], "one record of each kind");
    store.inspect(&key("a"), Some(&alone.aid)).await.unwrap();
    store.list(COLLECTION, None, 10).await.unwrap();
    assert_eq!(commands.take(), ["find", "find"]);
    release(&store, &other).await;
    assert_eq!(commands.take(), ["delete", "find", "update"], "it took the last lock");
    release(&store, &alone).await;
    assert_eq!(commands.take(), ["find", "delete"], "the only reader's record is deleted");
}

/// The usual re-entry is a command of its own. A server that does not know the holder takes a step.
#[tokio::test]
async fn a_reentry_by_one_command_changes_what_the_rules_change() {
    let (knows, commands, database) = counted(Rules::new(TTL)).await;
    let learns = on(&database, Rules::new(TTL)).await;
    for n in 0..8 {
        let (tab, page) = (n & 1 > 0, n & 2 > 0);
        let id = |name: &str| key(&format!("{name} {n}"));
        let first = Claim {
            ttl: if n & 4 > 0 { 2 * TTL } else { TTL },
            tab: tab.then(TabId::new),
            page: Some(PageId::new()),
            ..claim(Mode::Exclusive)
        };
        let again = Claim {
            ttl: TTL,
            page: page.then(PageId::new),
            holder: Holder::new("another name").of_user("her id"),
            ..first.clone()
        };
        let mut changed = Vec::new();
        for (name, store) in [("a", &knows), ("b", &learns)] {
            for (server, of) in [(&knows, &first), (store, &again)] {
                commands.take();
                let claim = Claim { token: LockToken::new(), ..of.clone() };
                let _ = server.try_acquire(&id(name), &claim, Deadline::NONE).await.unwrap();
            }
            let is_one = commands.take() == ["findAndModify"];
            assert_eq!(is_one, name == "a", "{n}");
            let mut stored = record(&database, &id(name)).await.unwrap();
            assert!(stored.get_bool("again").unwrap());
            for differs in ["_id", "ts", "token", "since"] {
                assert!(stored.remove(differs).is_some(), "{differs}");
            }
            changed.push(stored.into_iter().collect::<BTreeMap<_, _>>());
        }
        assert_eq!(changed[0], changed[1], "{n}");
    }
}

#[tokio::test]
async fn the_cost_of_fences_and_places() {
    let (store, commands, _) = counted(Rules::new(TTL).fenced()).await;
    let lock = takes(&store, "a", Mode::Exclusive).await;
    release(&store, &lock).await;
    assert_eq!(commands.take(), ["findAndModify", "update"]);

    let (store, commands, database) = counted(Rules::new(TTL).fair()).await;
    let lock = takes(&store, "a", Mode::Exclusive).await;
    release(&store, &lock).await;
    assert_eq!(commands.take(), ["findAndModify", "delete"], "the queue is empty");
    let lock = takes(&store, "a", Mode::Exclusive).await;
    let waiting = one_waiter(&claim(Mode::Exclusive), Ticket::NEW);
    commands.take();
    refused(&store, "a", &claim(Mode::Exclusive)).await;
    assert_eq!(commands.take(), ["find"]);
    store.set_place(&key("a"), &waiting, Deadline::NONE).await.unwrap().unwrap();
    assert_eq!(commands.take(), ["find", "update"]);
    release(&store, &lock).await;
    assert_eq!(commands.take(), ["delete", "find", "update"]);
    let stored = record(&database, &key("a")).await.unwrap();
    assert_eq!(fields(&stored), ["_id", "queue", "due"]);
    commands.take();
    let nobody = Waiters { place: None, ..waiting };
    store.set_place(&key("a"), &nobody, Deadline::NONE).await.unwrap();
    assert_eq!(commands.take(), ["find", "delete"]);
    assert_eq!(count(&database).await, 0);
}

#[tokio::test]
async fn a_refusal_because_of_readers_or_waiters_writes_nothing() {
    let (store, database) = store(Rules::new(TTL).fair()).await;
    let lock = takes(&store, "a", Mode::Exclusive).await;
    queues(&store, &key("a"), Mode::Exclusive).await;
    release(&store, &lock).await;
    for _ in 0..2 {
        takes(&store, "b", Mode::Shared).await;
    }
    let log = database.client().database("local").collection::<Document>("oplog.rs");
    let namespace = lock_records(&database).namespace().to_string();
    let written = async || log.count_documents(doc! { "ns": &namespace }).await.unwrap();
    let before = written().await;
    assert!(before > 0);
    for id in ["a", "b"] {
        refused(&store, id, &claim(Mode::Exclusive)).await;
    }
    refused(&store, "a", &claim(Mode::Shared)).await;
    assert_eq!(written().await, before);
}

#[tokio::test]
async fn no_command_carries_a_time_of_the_client() {
    let server = with_another_clock().await;
    let (database, sent) = rig::recorded_database(&server.uri()).await;
    for rules in [Rules::new(TTL), Rules::new(TTL).fenced(), Rules::new(TTL).fair()] {
        let store = on(&database, rules).await;
        let short = Claim { max_hold: Some(TTL / 2), ..claim(Mode::Shared) };
        let _ = store.try_acquire(&key("a"), &short, Deadline::NONE).await.unwrap();
        let lock = takes(&store, "a", Mode::Shared).await;
        let waiting = queues(&store, &key("a"), Mode::Exclusive).await;
        refused(&store, "a", &waiting).await;
        store.renew_all(COLLECTION, std::slice::from_ref(&lock.aid)).await.unwrap();
        store.inspect(&key("a"), None).await.unwrap();
        store.list(COLLECTION, Some(&[lock.aid.clone(), short.aid.clone()]), 5).await.unwrap();
        release(&store, &lock).await;
        let nobody = waiting.turn.map(|turn| turn.others);
        store.set_place(&key("a"), &nobody.unwrap(), Deadline::NONE).await.unwrap();
        rig::age(&database, &key("a"), TTL).await;
        sent.lock().unwrap().retain(|command| !command.to_string().contains("$$it"));
        sweep(&store).await;
        store
            .end_session(
                &lock.aid,
                EndReason::Revoked,
                &[COLLECTION],
                Uuid::new_v4(),
                Deadline::NONE,
            )
            .await
            .unwrap();
    }
    let sent = sent.lock().unwrap();
    assert!(sent.len() >= 30, "{}", sent.len());
    for command in sent.iter() {
        assert!(!carries_our_time(command), "{command}");
    }
}

/// All values of fields with this name, at any depth.
fn all_of<'a>(bson: &'a Bson, field: &str) -> Vec<&'a Bson> {
    match bson {
        Bson::Array(array) => array.iter().flat_map(|bson| all_of(bson, field)).collect(),
        Bson::Document(document) => {
            let within = document.iter().flat_map(|(name, value)| {
                let mut found = all_of(value, field);
                found.extend((name == field).then_some(value));
                found
            });
            within.collect()
        }
        _ => Vec::new(),
    }
}

async fn explain(database: &Database, command: Document) -> Bson {
    let explain = doc! { "explain": command, "verbosity": "executionStats" };
    database.run_command(explain).await.unwrap().into()
}

fn strings(explained: &Bson, field: &str) -> BTreeSet<String> {
    all_of(explained, field).into_iter().filter_map(Bson::as_str).map(str::to_owned).collect()
}

#[tokio::test]
async fn a_renewal_finds_locks_of_both_kinds_by_index() {
    let uri = mongod::shared_replica_set().await;
    let (database, sent) = rig::recorded_database(uri.uri()).await;
    let store = on(&database, Rules::new(TTL)).await;
    for n in 0..50 {
        takes(&store, &format!("{n}"), if n % 2 == 0 { Mode::Shared } else { Mode::Exclusive })
            .await;
    }
    let mine = takes(&store, "0", Mode::Shared).await;
    let _ = store
        .try_acquire(
            &key("b"),
            &Claim { aid: mine.aid.clone(), ..claim(Mode::Exclusive) },
            Deadline::NONE,
        )
        .await;
    sent.lock().unwrap().clear();
    store.renew_all(COLLECTION, std::slice::from_ref(&mine.aid)).await.unwrap();
    let named = vec![NamedBy::Tab(TabId::new()), NamedBy::Token(mine.token.unwrap())];
    let tab = Active { aid: mine.aid.clone(), named: Some(named) };
    store.renew(COLLECTION, &[tab], TTL, Deadline::NONE).await.unwrap();
    store.list(COLLECTION, Some(std::slice::from_ref(&mine.aid)), 10).await.unwrap();
    let sent = sent.lock().unwrap().clone();
    let mut used = BTreeSet::new();
    for command in sent {
        let ours = ["update", "updates", "find", "filter"];
        let command: Document =
            command.into_iter().filter(|(name, _)| ours.contains(&name.as_str())).collect();
        let explained = explain(&database, command).await;
        let indexes = strings(&explained, "indexName");
        assert!(!strings(&explained, "stage").contains("COLLSCAN"), "{explained}");
        used.extend(indexes);
        let examined: Vec<_> = all_of(&explained, "totalKeysExamined");
        println!("keys examined for 2 of 51 locks: {examined:?}");
        assert!(examined.iter().all(|n| n.as_i32().unwrap() <= 4), "{examined:?}");
    }
    assert!(["aid_1", "readers.aid_1"].iter().all(|it| used.contains(*it)), "{used:?}");
}

#[tokio::test]
async fn a_sweep_that_finds_nothing_is_one_query_of_index_ranges() {
    let uri = mongod::shared_replica_set().await;
    let (database, sent) = rig::recorded_database(uri.uri()).await;
    let store = on(&database, Rules::new(TTL)).await;
    for n in 0..100 {
        takes(&store, &format!("{n}"), if n % 2 == 0 { Mode::Shared } else { Mode::Exclusive })
            .await;
    }
    sent.lock().unwrap().clear();
    assert_eq!(sweep(&store).await.sessions, 0);
    let sent = sent.lock().unwrap().clone();
    let [query] = &sent[..] else { panic!("{sent:?}") };
    let mut parts = 0;
    for stage in query.get_array("pipeline").unwrap() {
        let Ok(part) = stage.as_document().unwrap().get_document("$unionWith") else { continue };
        let collection = part.get_str("coll").unwrap();
        let query = doc! {
            "aggregate": collection, "pipeline": part.get("pipeline").unwrap(), "cursor": {},
        };
        let explained = explain(&database, query).await;
        let keys: i64 = all_of(&explained, "totalKeysExamined")
            .iter()
            .map(|n| n.as_i64().or(n.as_i32().map(i64::from)).unwrap())
            .sum();
        let indexes = strings(&explained, "indexName");
        println!("{collection}: {keys} keys of {indexes:?}, {:?}", strings(&explained, "stage"));
        if collection != "doclock.ended" {
            assert!(keys <= 2, "{keys} keys: {explained}");
            assert!(!strings(&explained, "stage").contains("COLLSCAN"), "{explained}");
            parts += 1;
        }
    }
    assert_eq!(parts, 4);
}
