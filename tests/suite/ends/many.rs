//! Ends of very many sessions, and of sessions with very many locks.

use super::*;

/// Locks that expired a moment ago, each of a session of its own.
async fn expired_at_once(app: &App, database: &Database, many: usize) {
    app.granted(&key("first"), &Aid::new()).await;
    let first = record(database, &key("first")).await.unwrap();
    let others = (1..many).map(|n| {
        let mut other = first.clone();
        other.insert("_id", n.to_string());
        other.insert("aid", Aid::new().as_str());
        other.insert("token", uuid::Uuid::new_v4().to_string());
        other
    });
    lock_records(database).insert_many(others).await.unwrap();
    age_all(database, app.locks.ttl()).await;
}

/// Puts more locks on record for each of these sessions, all like the first lock.
async fn hold_more(app: &App, database: &Database, aids: &[Aid], each: usize) {
    app.granted(&key("first"), &aids[0]).await;
    let first = record(database, &key("first")).await.unwrap();
    let all = aids.iter().flat_map(|aid| (0..each).map(move |n| (aid, n)));
    let others = all.skip(1).map(|(aid, n)| {
        let mut other = first.clone();
        other.insert("_id", format!("{n} of {}", aid.as_str()));
        other.insert("aid", aid.as_str());
        other.insert("token", uuid::Uuid::new_v4().to_string());
        other
    });
    lock_records(database).insert_many(others).await.unwrap();
}

/// One command names at most 8 000 locks, and one end at most 1 000.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_of_many_locks_names_those_of_each_session_or_counts_them() {
    for (sessions, each) in [(90, 101), (1, 9_000)] {
        let database = replica_set().await;
        let app = App::on(&database).await;
        let aids: Vec<_> = (0..sessions).map(|_| Aid::new()).collect();
        hold_more(&app, &database, &aids, each).await;
        age_all(&database, TTL).await;
        let heard = Heard::default();
        let listening = App::with(&database, heard.listening()).await;
        while count(&database).await > 0 {
            listening.locks.sweep().await.unwrap();
        }
        heard.until("all are announced", sessions).await;
        listening.locks.shutdown().await;
        assert_eq!(heard.all().len(), sessions);
        for ended in heard.all() {
            let named = each.min(1_000);
            assert_eq!((ended.locks.len(), ended.more), (named, each - named));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_logout_of_more_locks_than_one_command_names_counts_the_others() {
    const LOCKS: usize = 9_000;
    let database = replica_set().await;
    let app = App::on(&database).await;
    let alice = Aid::new();
    hold_more(&app, &database, std::slice::from_ref(&alice), LOCKS).await;
    let worker = Uuid::new_v4();
    let records = lock_records(&database);
    let some = records.find(doc! {}).sort(doc! { "_id": -1 }).limit(1_200).await.unwrap();
    let some: Vec<_> = some.try_collect().await.unwrap();
    // Again, as if the first reply was lost; and as if the removal had stopped half-way.
    for left in [0, 0, some.len()] {
        if left > 0 {
            records.insert_many(&some).await.unwrap();
        }
        let (reason, collections) = (EndReason::LoggedOut, ["workitem"]);
        let ended = app.store.end_session(&alice, reason, &collections, worker, Deadline::NONE);
        let ended = ended.await.unwrap();
        assert_eq!(ended.locks.len() + ended.more, LOCKS);
        assert!(ended.more > 0, "not all were read");
        assert_eq!(count(&database).await, 0, "all were released");
    }
    app.store.ready(&alice, worker).await.unwrap();
    app.locks.shutdown().await;
    let heard = Heard::default();
    let listening = App::with(&database, heard.listening()).await;
    nothing_is_left_to_announce(&database).await;
    listening.locks.shutdown().await;
    let [ended] = &heard.all()[..] else { panic!("{heard:?}") };
    assert_eq!((ended.locks.len(), ended.more), (1_000, LOCKS - 1_000));
    let told = database.collection::<Document>("doclock.ended");
    let told = told.find_one(doc! { "_id": alice.as_str() }).await.unwrap().unwrap();
    assert!(!told.contains_key("locks") && !told.contains_key("more"), "{told:?}");
}

/// A session that lives on has lost many locks, and their note has been forgotten since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_that_were_counted_in_a_forgotten_note_are_not_counted_again() {
    let database = replica_set().await;
    let app = App::on(&database).await;
    let alice = Aid::new();
    hold_more(&app, &database, std::slice::from_ref(&alice), 1_005).await;
    age_all(&database, TTL).await;
    for id in ["b", "c"] {
        app.granted(&key(id), &alice).await;
    }
    let sweep_all = async || {
        while count(&database).await > 2 {
            app.locks.sweep().await.unwrap();
        }
    };
    sweep_all().await;
    let notes = database.collection::<Document>("doclock.ended");
    let of_alice = doc! { "_id": alice.as_str() };
    let note = notes.find_one(of_alice.clone()).await.unwrap().unwrap();
    assert!(note.contains_key("more"), "{note:?}");
    let forgotten = doc! { "$set": { "noted": DateTime::from_millis(1) } };
    notes.update_one(of_alice, forgotten).await.unwrap();
    let heard = Heard::default();
    for id in ["b", "c"] {
        age(&database, &key(id), TTL).await;
        app.locks.sweep().await.unwrap();
    }
    let listening = App::with(&database, heard.listening()).await;
    heard.until("the end is announced", 1).await;
    listening.locks.shutdown().await;
    let ended = heard.of(&alice).remove(0);
    assert_eq!((ended.locks, ended.more), (vec![key("b"), key("c")], 0));
}

/// MongoDB removes expired locks too, and nobody hears of their sessions then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_expire_together_are_all_announced_although_the_ttl_monitor_runs() {
    // With 20 000 all are announced after 39 s on two cores; the margin is 60 s.
    const MANY: usize = 1_500;
    let eager = Unusual { eager_ttl_monitor: true, ..Unusual::default() };
    let server = Mongod::start_replica_set_that_is(eager).await;
    let database = fresh_database(&server.uri()).await;
    let app = App::on(&database).await;
    expired_at_once(&app, &database, MANY).await;
    let (heard, began) = (Heard::default(), Instant::now());
    let reaping = App::with(&database, heard.reaping()).await;
    eventually("the locks are gone", async || count(&database).await == 0).await;
    println!("{MANY} sessions are ended {:?} after the start of the reaper", began.elapsed());
    heard.until("all are announced", MANY).await;
    println!("and announced after {:?}", began.elapsed());
    let aids: BTreeSet<_> = heard.all().into_iter().map(|ended| ended.aid).collect();
    assert_eq!(aids.len(), MANY);
    let behind = || reaping.locks.health().reaper.behind;
    eventually("the reaper keeps up", async || behind().is_none()).await;
}
