//! Notes of locks that are taken from their holders. A store that keeps none passes.

use super::*;
use doclock_core::{Takeover, store::TakeoverKind};

const LEASE: Duration = TTL;
const SHORT: Duration = Duration::from_millis(1);

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

impl<S: Subject> Steps<S> {
    /// A note of a lock that is live.
    async fn notes(&self, id: &str, lease: Duration) -> Takeover {
        let takeover = takeover(&self.granted(id, &Aid::new()).await);
        self.put_news(&takeover, lease, NONE).await.unwrap();
        takeover
    }

    async fn settles(&self, it: &Takeover, worker: Uuid, settled: Settled) {
        self.settle(it.event, worker, settled).await.unwrap();
    }

    async fn takes(&self, worker: Uuid, lease: Duration) -> Vec<Takeover> {
        self.take_takeovers(&[COLLECTION], worker, lease, 10).await.unwrap()
    }

    async fn keeps_notes(&self) -> bool {
        let (probe, worker) = (self.notes("probe", LEASE).await, Uuid::new_v4());
        self.settles(&probe, probe.event, Settled::Ready).await;
        let told = self.takes(worker, LEASE).await;
        self.settles(&probe, worker, Settled::Told).await;
        !told.is_empty()
    }
}

cases! {
    tests takeovers($);
    needs [Sessions];

    async fn a_taken_lock_is_told_once_with_everything_about_it(store) {
        if !store.keeps_notes().await {
            return;
        }
        let takeover = store.notes("a", LEASE).await;
        store.put_news(&takeover, LEASE, NONE).await.unwrap();
        let (one, other) = (Uuid::new_v4(), Uuid::new_v4());
        assert_eq!(store.takes(one, LEASE).await, [], "it is not known to be taken");
        store.settles(&takeover, takeover.event, Settled::Ready).await;
        assert!(store.sweeps().await.announcements);
        let told = store.takes(one, LEASE).await;
        assert!(told[0].at > SystemTime::UNIX_EPOCH);
        let expected = [Takeover { at: told[0].at, ..takeover.clone() }];
        assert_eq!(told, expected);
        assert_eq!(store.takes(one, LEASE).await, expected, "its own repetition");
        assert_eq!(store.takes(other, LEASE).await, []);
        store.settles(&takeover, other, Settled::Told).await;
        store.settles(&takeover, one, Settled::Told).await;
        assert_eq!(store.takes(one, LEASE).await, []);
        assert!(!store.sweeps().await.announcements);
        // A late repetition.
        store.settles(&takeover, one, Settled::Told).await;
    }

    async fn a_lock_that_was_not_taken_is_not_told(store) {
        let takeover = store.notes("a", SHORT).await;
        store.settles(&takeover, takeover.event, Settled::Void).await;
        let seen = store.lock_on("a").await.unwrap();
        store.breaks(&seen).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(store.takes(Uuid::new_v4(), LEASE).await, []);
    }

    async fn the_note_of_a_dead_server_is_told_if_the_lock_is_gone(store) {
        if !store.keeps_notes().await {
            return;
        }
        store.notes("live", SHORT).await;
        let gone = store.notes("gone", SHORT).await;
        let seen = store.lock_on("gone").await.unwrap();
        store.breaks(&seen).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let elsewhere = store.take_takeovers(&["elsewhere"], Uuid::new_v4(), LEASE, 10).await;
        assert_eq!(elsewhere.unwrap(), [], "a server that does not know the collection");
        let told = store.takes(Uuid::new_v4(), SHORT).await;
        assert_eq!(told.iter().map(|it| it.event).collect::<Vec<_>>(), [gone.event]);
        assert!(!told[0].repeated, "nobody was told before");
        tokio::time::sleep(Duration::from_millis(50)).await;
        let again = store.takes(Uuid::new_v4(), LEASE).await;
        assert!(again.len() == 1 && again[0].repeated, "{again:?}");
        assert!(store.lock_on("live").await.is_some());
    }
}
