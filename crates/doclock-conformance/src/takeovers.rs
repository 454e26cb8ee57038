//! Notes of locks that are taken from their holders. A store that keeps none passes.

use super::*;
use actix_doclock::{Takeover, store::TakeoverKind};

const LEASE: Duration = Duration::from_secs(60);

fn takeover(lock: &Lock) -> Takeover {
    Takeover {
        event: Uuid::new_v4(),
        key: lock.key.clone(),
        kind: TakeoverKind::TakenOver,
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
async fn noted(store: &impl Store, id: &str, lease: Duration) -> Takeover {
    granted(store, &key(id), &Aid::new()).await;
    let takeover = takeover(&store.inspect(&key(id), None).await.unwrap().unwrap());
    store.put_news(&takeover, lease, NONE).await.unwrap();
    takeover
}

async fn keeps_notes(store: &impl Store) -> bool {
    let probe = noted(store, "probe", LEASE).await;
    store.settle(probe.event, probe.event, Settled::Ready).await.unwrap();
    let worker = Uuid::new_v4();
    let told = store.take_takeovers(&[COLLECTION], worker, LEASE, 10).await.unwrap();
    store.settle(probe.event, worker, Settled::Told).await.unwrap();
    !told.is_empty()
}

cases! {
    needs [Sessions];

    async fn a_taken_lock_is_told_once_with_everything_about_it<S: Subject>(subject: &S) {
        let store = subject.store();
        if !keeps_notes(store).await { return }
        let takeover = noted(store, "a", LEASE).await;
        store.put_news(&takeover, LEASE, NONE).await.unwrap();
        let (one, other) = (Uuid::new_v4(), Uuid::new_v4());
        assert_eq!(store.take_takeovers(&[COLLECTION], one, LEASE, 10).await.unwrap(), [], "it is not known to be taken");
        store.settle(takeover.event, takeover.event, Settled::Ready).await.unwrap();
        assert!(sweep(store, 100).await.announcements);
        let told = store.take_takeovers(&[COLLECTION], one, LEASE, 10).await.unwrap();
        assert!(told[0].at > SystemTime::UNIX_EPOCH);
        let expected = Takeover { at: told[0].at, ..takeover.clone() };
        assert_eq!(told, std::slice::from_ref(&expected));
        assert_eq!(store.take_takeovers(&[COLLECTION], one, LEASE, 10).await.unwrap(), [expected], "its own repetition");
        assert_eq!(store.take_takeovers(&[COLLECTION], other, LEASE, 10).await.unwrap(), []);
        store.settle(takeover.event, other, Settled::Told).await.unwrap();
        store.settle(takeover.event, one, Settled::Told).await.unwrap();
        assert_eq!(store.take_takeovers(&[COLLECTION], one, LEASE, 10).await.unwrap(), []);
        assert!(!sweep(store, 100).await.announcements);
        // A late repetition.
        store.settle(takeover.event, one, Settled::Told).await.unwrap();
    }

    async fn a_lock_that_was_not_taken_is_not_told<S: Subject>(subject: &S) {
        let store = subject.store();
        let takeover = noted(store, "a", Duration::from_millis(1)).await;
        store.settle(takeover.event, takeover.event, Settled::Void).await.unwrap();
        let seen = store.inspect(&takeover.key, None).await.unwrap().unwrap();
        store.break_lock(&seen, &taken()).await.unwrap();
        tokio::time::sleep(SECOND / 20).await;
        assert_eq!(store.take_takeovers(&[COLLECTION], Uuid::new_v4(), LEASE, 10).await.unwrap(), []);
    }

    async fn the_note_of_a_dead_server_is_told_if_the_lock_is_gone<S: Subject>(subject: &S) {
        let store = subject.store();
        if !keeps_notes(store).await { return }
        let short = Duration::from_millis(1);
        let (live, gone) = (noted(store, "live", short).await, noted(store, "gone", short).await);
        let seen = store.inspect(&gone.key, None).await.unwrap().unwrap();
        store.break_lock(&seen, &taken()).await.unwrap();
        tokio::time::sleep(SECOND / 20).await;
        let elsewhere = store.take_takeovers(&["elsewhere"], Uuid::new_v4(), LEASE, 10).await.unwrap();
        assert_eq!(elsewhere, [], "a server that does not know the collection");
        let told = store.take_takeovers(&[COLLECTION], Uuid::new_v4(), short, 10).await.unwrap();
        assert_eq!(told.iter().map(|it| it.event).collect::<Vec<_>>(), [gone.event]);
        assert!(!told[0].repeated, "nobody was told before");
        tokio::time::sleep(SECOND / 20).await;
        let again = store.take_takeovers(&[COLLECTION], Uuid::new_v4(), LEASE, 10).await.unwrap();
        assert!(again.len() == 1 && again[0].repeated, "{again:?}");
        assert!(store.inspect(&live.key, None).await.unwrap().is_some());
    }
}
