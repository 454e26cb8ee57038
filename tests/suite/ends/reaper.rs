//! The task that sweeps: how it starts, fails and stops.

use super::*;

#[tokio::test]
async fn the_reaper_outlives_an_outage() {
    let faulty = Faulty::new().await;
    let heard = Heard::default();
    let name = faulty.database.name().to_owned();
    let through = client(&faulty.proxy.uri()).await.database(&name);
    let deadline = Duration::from_secs(2);
    let reaping = |settings| heard.reaping()(settings).deadline(deadline);
    let _reaper = App::with(&through, reaping).await;
    faulty.proxy.cut();
    faulty.proxy.until_fired(1).await;
    let [alice] = &sessions(&faulty.other, 1).await[..] else { unreachable!() };
    age_all(&faulty.database, TTL).await;
    sleep(2 * deadline).await;
    assert_eq!(heard.all(), []);
    faulty.proxy.heal();
    heard.until("it recovers without help", 1).await;
    assert_eq!(heard.of(alice).len(), 1);
}

#[tokio::test]
async fn a_shutdown_stops_the_reaper_and_waits_for_the_listener() {
    let database = replica_set().await;
    let (called, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let heard = Heard::default();
    let (told, calls, goes_on) = (heard.clone(), called.clone(), go_on.clone());
    let app = App::with(&database, |settings| {
        settings.reaper_interval(OFTEN).on_session_end(move |ended| {
            let (told, calls, goes_on) = (told.clone(), calls.clone(), goes_on.clone());
            async move {
                calls.notify_one();
                goes_on.notified().await;
                told.0.lock().unwrap().push(ended);
                Ok(())
            }
        })
    });
    let app = app.await;
    let alice = sessions(&app, 1).await.remove(0);
    app.locks.end_session(&alice).await.unwrap();
    called.notified().await;
    let mut shutdown = Box::pin(app.locks.shutdown());
    assert!(timeout(5 * OFTEN, &mut shutdown).await.is_err(), "the listener is waited for");
    go_on.notify_one();
    shutdown.await;
    assert_eq!(heard.all().len(), 1);
    sessions(&app, 1).await;
    age_all(&database, TTL).await;
    sleep(10 * OFTEN).await;
    assert_eq!(count(&database).await, 2, "no sweep runs any more");
}

/// The store hangs, so the current operation cannot end, but the reaper stops anyway.
#[tokio::test]
async fn the_reaper_stops_although_the_store_hangs() {
    let faulty = Faulty::new().await;
    let name = faulty.database.name().to_owned();
    let through = client(&faulty.proxy.uri()).await.database(&name);
    let deadline = Duration::from_millis(400);
    let app = App::with(&through, |settings| settings.reaper_interval(OFTEN).deadline(deadline));
    let app = app.await;
    faulty.proxy.blackhole();
    faulty.proxy.until_fired(1).await;
    timeout(Duration::from_secs(10), app.locks.shutdown()).await.expect("twice the deadline");
    // Except what the driver was about to send.
    let mut sent = usize::MAX;
    eventually("nothing is sent any more", async || {
        let before = std::mem::replace(&mut sent, faulty.proxy.fired());
        sleep(10 * OFTEN).await;
        before == faulty.proxy.fired()
    })
    .await;
}

#[tokio::test]
async fn a_dropped_manager_is_not_kept_alive_by_its_tasks() {
    let heard = Heard::default();
    let store = MemoryStore::new();
    let locks = heard.reaping()(LockManager::builder(store.clone())).build().await.unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let other = LockManager::builder(store.clone()).without_reaper().build().await.unwrap();
    other.register::<WorkItem>().await.unwrap();
    drop(locks);
    sleep(5 * OFTEN).await;
    other.end_session(&Aid::new()).await.unwrap();
    sleep(5 * OFTEN).await;
    assert_eq!(heard.all(), []);
}

/// A date that some programs write for "forever". It must not stop the reaper for other locks.
#[tokio::test]
async fn no_date_of_a_foreign_record_stops_the_reaper() {
    let database = replica_set().await;
    let app = App::on(&database).await;
    let alice = sessions(&app, 1).await.remove(0);
    age_all(&database, TTL).await;
    for (id, ms) in [("max", i64::MAX), ("min", i64::MIN), ("before 1970", -1)] {
        let foreign = doc! { "_id": id, "ts": DateTime::from_millis(ms), "aid": "x", "token": "x" };
        lock_records(&database).insert_one(foreign).await.unwrap();
        app.locks.sweep().await.unwrap_or_else(|e| panic!("{id}: {e}"));
    }
    assert_eq!(app.locks.list_of(&alice).await.unwrap().len(), 0);
    assert!(
        lock_records(&database).find_one(doc! { "aid": alice.as_str() }).await.unwrap().is_none()
    );
}

/// A server that is just starting does not know all types yet.
#[tokio::test]
async fn the_reaper_waits_until_all_types_are_registered() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Later {
        #[serde(rename = "_id")]
        id: String,
    }
    impl actix_doclock::Lockable for Later {
        type Id = String;
        const COLLECTION: &'static str = "later";
    }
    let database = replica_set().await;
    let before = App::on(&database).await;
    before.locks.register::<Later>().await.unwrap();
    let alice = sessions(&before, 1).await.remove(0);
    age_all(&database, TTL).await;
    let live = actix_doclock::LockKey::of::<Later>("live".into()).unwrap();
    before.granted(&live, &alice).await;

    let heard = Heard::default();
    let interval = Duration::from_secs(10);
    let app =
        App::with(&database, |settings| heard.listening()(settings).reaper_interval(interval));
    let app = app.await;
    app.locks.register::<Later>().await.unwrap();
    eventually("it has swept", async || count(&database).await == 0).await;
    app.locks.shutdown().await;
    assert_eq!(heard.all(), [], "she holds a lock on another type");
}
