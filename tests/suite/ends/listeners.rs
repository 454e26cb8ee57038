//! Who is told of an end, how often, and what a listener may do.

use super::*;

#[tokio::test]
async fn three_servers_announce_each_end_once() {
    const SESSIONS: usize = 60;
    let name = fresh_name();
    let heard = Heard::default();
    let mut servers = Vec::new();
    for _ in 0..3 {
        let database = client(mongod::shared_replica_set().await.uri()).await.database(&name);
        servers.push(App::with(&database, heard.reaping()).await);
    }
    let database = servers[0].store.database().clone();
    let mut aids = sessions(&servers[0], SESSIONS).await;
    let logs_out = aids.pop().unwrap();
    servers[1].locks.end_session(&logs_out).await.unwrap();
    age_all(&database, TTL).await;
    let live = servers[2].granted(&key("live"), &Aid::new()).await;

    heard.until("all ends are announced", SESSIONS).await;
    eventually("all locks are gone", async || count(&database).await == 1).await;
    // Time for a server to announce something again.
    sleep(10 * OFTEN).await;
    assert_eq!(heard.all().len(), SESSIONS);
    for aid in &aids {
        let [ended] = &heard.of(aid)[..] else { panic!("{:?}", heard.of(aid)) };
        assert_eq!(
            (ended.reason, ended.locks.len(), ended.repeated),
            (EndReason::Expired, 2, false)
        );
    }
    assert_eq!(heard.of(&logs_out)[0].reason, EndReason::LoggedOut);
    assert_eq!(servers[0].held(&key("live")).await.token, live.token);
}

#[tokio::test]
async fn a_listener_that_panics_hangs_or_fails_does_not_affect_others() {
    let heard = Heard::default();
    let told = heard.clone();
    let locks = LockManager::builder(MemoryStore::new())
        .listener_timeout(Duration::from_millis(100))
        .on_session_end(move |ended: SessionEnded| {
            told.0.lock().unwrap().push(ended.clone());
            let kind = ended.locks.first().map(|key| key.id().to_string());
            assert_ne!(kind.as_deref(), Some("panics at once"));
            async move {
                match kind.as_deref() {
                    Some("panics") => panic!("on purpose"),
                    Some("hangs") => std::future::pending().await,
                    Some("fails") => Err("on purpose".into()),
                    _ => Ok::<_, BoxError>(()),
                }
            }
        })
        .build()
        .await
        .unwrap();
    locks.register::<WorkItem>().await.unwrap();
    let kinds = ["panics at once", "panics", "hangs", "fails", "works"];
    // Twice each: a listener that comes after a hanging one is called too.
    for round in 0..2 {
        for kind in kinds {
            let aid = Aid::new();
            let holder = Holder::new("alice");
            let _ = locks.lock_for_session(&key(kind), &aid, &holder).await.unwrap();
            locks.end_session(&aid).await.unwrap();
        }
        heard.until("all are called", (round + 1) * kinds.len()).await;
    }
    sleep(Duration::from_millis(300)).await;
    assert_eq!(heard.all().len(), 2 * kinds.len(), "no session is announced again");
}

#[tokio::test]
async fn a_listener_may_use_the_manager() {
    let database = replica_set().await;
    let app = App::on(&database).await;
    let (done, told) = (Arc::new(Mutex::new(Vec::new())), app.clone());
    let seen = done.clone();
    let listening = App::with(&database, |settings| {
        settings.on_session_end(move |ended: SessionEnded| {
            let (app, seen) = (told.clone(), seen.clone());
            async move {
                let system = Aid::new();
                if ended.reason != EndReason::Revoked {
                    return Ok(());
                }
                for key in &ended.locks {
                    app.granted(key, &system).await;
                }
                let released = app.locks.end_session(&system).await?;
                seen.lock().unwrap().extend(released.locks);
                Ok(())
            }
        })
    });
    let listening = listening.await;
    let alice = Aid::new();
    app.granted(&key("a"), &alice).await;
    listening.locks.revoke_session(&alice).await.unwrap();
    eventually("its own session came and went", async || !done.lock().unwrap().is_empty()).await;
    assert_eq!(*done.lock().unwrap(), [key("a")]);
}

/// A worker that runs next to the application servers must not swallow the announcements that they
/// need.
#[tokio::test]
async fn a_session_ended_by_a_server_without_a_listener_is_announced_by_one_with_a_listener() {
    let database = replica_set().await;
    let deaf = App::with(&database, |settings| settings.reaper_interval(OFTEN)).await;
    let [alice, bob] = &sessions(&deaf, 2).await[..] else { unreachable!() };
    deaf.locks.end_session(alice).await.unwrap();
    age_all(&database, TTL).await;
    eventually("the deaf one has swept", async || count(&database).await == 0).await;
    let heard = Heard::default();
    let _hears = App::with(&database, heard.reaping()).await;
    heard.until("both ends are announced", 2).await;
    assert_eq!(heard.of(alice)[0].reason, EndReason::LoggedOut);
    assert_eq!(heard.of(bob)[0].reason, EndReason::Expired);
    assert!(heard.all().iter().all(|ended| ended.locks.len() == 2));
}

/// A server whose listener waits for the test, with that time as its deadline.
async fn with_patient_listener(
    database: &Database,
    heard: &Heard,
    deadline: Duration,
) -> (App, Arc<Notify>) {
    let go_on = Arc::new(Notify::new());
    let (told, goes_on) = (heard.clone(), go_on.clone());
    let app = App::with(database, |settings| {
        settings.reaper_interval(OFTEN).deadline(deadline).on_session_end(move |ended| {
            told.0.lock().unwrap().push(ended);
            let goes_on = goes_on.clone();
            async move {
                goes_on.notified().await;
                Ok(())
            }
        })
    });
    (app.await, go_on)
}

#[tokio::test]
async fn a_listener_is_called_once_although_the_record_of_the_call_is_lost() {
    for drop in [Proxy::drop_reply_to, Proxy::drop_request] {
        let faulty = Faulty::new().await;
        let heard = Heard::default();
        faulty.other.locks.end_session(&Aid::new()).await.unwrap();
        let through = faulty.app.store.database();
        let (_app, go_on) = with_patient_listener(through, &heard, NO_DEADLINE).await;
        heard.until("it is called", 1).await;
        drop(&faulty.proxy, "update");
        go_on.notify_one();
        faulty.proxy.until_fired(1).await;
        nothing_is_left_to_announce(&faulty.database).await;
        assert_eq!(heard.all().len(), 1);
    }
}

#[tokio::test]
async fn a_listener_is_called_once_although_an_outage_delays_the_record_of_the_call() {
    let deadline = Duration::from_millis(300);
    let faulty = Faulty::new().await;
    let heard = Heard::default();
    faulty.other.locks.end_session(&Aid::new()).await.unwrap();
    let through = faulty.app.store.database();
    let (_app, go_on) = with_patient_listener(through, &heard, deadline).await;
    heard.until("it is called", 1).await;
    faulty.proxy.cut();
    // A second call would not wait again.
    go_on.notify_one();
    go_on.notify_one();
    // Longer than the driver looks for a server.
    sleep(Duration::from_secs(7)).await;
    faulty.proxy.heal();
    nothing_is_left_to_announce(&faulty.database).await;
    sleep(5 * OFTEN).await;
    assert_eq!(heard.all().len(), 1);
}
