//! Notes of locks that are taken from their holders. A store that keeps none passes.

use super::*;
use crate::taken::{LockTaken, Settled, Taking};

const LEASE: Duration = Duration::from_secs(60);

fn taking(lock: &Lock) -> LockTaken {
    LockTaken {
        event: Uuid::new_v4(),
        key: lock.key.clone(),
        how: Taking::TakenOver,
        from: Some(Holder::new("$alice").of_user("$a")),
        aid: lock.aid.clone(),
        token: lock.token,
        by: Holder::new("{bob}").of_user("b"),
        reason: "$why".to_owned(),
        at: SystemTime::UNIX_EPOCH,
        repeated: false,
    }
}

/// A note of a lock that is live.
async fn noted(store: &impl Store, id: &str, lease: Duration) -> LockTaken {
    granted(store, &key(id), &Aid::new()).await;
    let taking = taking(&store.inspect(&key(id), None).await.unwrap().unwrap());
    store.begin_taking(&taking, lease).await.unwrap();
    taking
}

async fn keeps_notes(store: &impl Store) -> bool {
    let probe = noted(store, "probe", LEASE).await;
    store.settle_taking(probe.event, probe.event, Settled::Taken).await.unwrap();
    let worker = Uuid::new_v4();
    let told = store.takings(&[COLLECTION], worker, LEASE, 10).await.unwrap();
    store.settle_taking(probe.event, worker, Settled::Told).await.unwrap();
    !told.is_empty()
}

cases! {
    async fn a_taken_lock_is_told_once_with_everything_about_it<S: Subject>(subject: &S) {
        let store = subject.store();
        if !keeps_notes(store).await { return }
        let taking = noted(store, "a", LEASE).await;
        store.begin_taking(&taking, LEASE).await.unwrap();
        let (one, other) = (Uuid::new_v4(), Uuid::new_v4());
        assert_eq!(store.takings(&[COLLECTION], one, LEASE, 10).await.unwrap(), [], "it is not known to be taken");
        store.settle_taking(taking.event, taking.event, Settled::Taken).await.unwrap();
        assert!(sweep(store, 100).await.announcements);
        let told = store.takings(&[COLLECTION], one, LEASE, 10).await.unwrap();
        assert!(told[0].at > SystemTime::UNIX_EPOCH);
        let expected = LockTaken { at: told[0].at, ..taking.clone() };
        assert_eq!(told, std::slice::from_ref(&expected));
        assert_eq!(store.takings(&[COLLECTION], one, LEASE, 10).await.unwrap(), [expected], "its own repetition");
        assert_eq!(store.takings(&[COLLECTION], other, LEASE, 10).await.unwrap(), []);
        store.settle_taking(taking.event, other, Settled::Told).await.unwrap();
        store.settle_taking(taking.event, one, Settled::Told).await.unwrap();
        assert_eq!(store.takings(&[COLLECTION], one, LEASE, 10).await.unwrap(), []);
        assert!(!sweep(store, 100).await.announcements);
        // A late repetition.
        store.settle_taking(taking.event, one, Settled::Told).await.unwrap();
    }

    async fn a_lock_that_was_not_taken_is_not_told<S: Subject>(subject: &S) {
        let store = subject.store();
        let taking = noted(store, "a", Duration::from_millis(1)).await;
        store.settle_taking(taking.event, taking.event, Settled::NotTaken).await.unwrap();
        let seen = store.inspect(&taking.key, None).await.unwrap().unwrap();
        store.break_lock(&seen, &taken()).await.unwrap();
        tokio::time::sleep(SECOND / 20).await;
        assert_eq!(store.takings(&[COLLECTION], Uuid::new_v4(), LEASE, 10).await.unwrap(), []);
    }

    async fn the_note_of_a_dead_server_is_told_if_the_lock_is_gone<S: Subject>(subject: &S) {
        let store = subject.store();
        if !keeps_notes(store).await { return }
        let short = Duration::from_millis(1);
        let (live, gone) = (noted(store, "live", short).await, noted(store, "gone", short).await);
        let seen = store.inspect(&gone.key, None).await.unwrap().unwrap();
        store.break_lock(&seen, &taken()).await.unwrap();
        tokio::time::sleep(SECOND / 20).await;
        let elsewhere = store.takings(&["elsewhere"], Uuid::new_v4(), LEASE, 10).await.unwrap();
        assert_eq!(elsewhere, [], "a server that does not know the collection");
        let told = store.takings(&[COLLECTION], Uuid::new_v4(), short, 10).await.unwrap();
        assert_eq!(told.iter().map(|it| it.event).collect::<Vec<_>>(), [gone.event]);
        assert!(!told[0].repeated, "nobody was told before");
        tokio::time::sleep(SECOND / 20).await;
        let again = store.takings(&[COLLECTION], Uuid::new_v4(), LEASE, 10).await.unwrap();
        assert!(again.len() == 1 && again[0].repeated, "{again:?}");
        assert!(store.inspect(&live.key, None).await.unwrap().is_some());
    }
}
