//! Telling those who wait that documents have become free.

use futures_util::{StreamExt, future::ready, stream};
use tokio::sync::broadcast::{self, error::RecvError};

use crate::{Change, LockKey, Watch};

/// How many changes are kept for one who is slow to hear them. More are [`Change::Missed`].
const KEPT: usize = 1024;

#[derive(Debug)]
pub(super) struct Freed(broadcast::Sender<LockKey>);

impl Default for Freed {
    fn default() -> Self {
        Self(broadcast::Sender::new(KEPT))
    }
}

impl Freed {
    pub(super) fn tell(&self, key: &LockKey) {
        // Nobody need listen.
        let _ = self.0.send(key.clone());
    }

    pub(super) fn watch(&self, collection: &str) -> Watch {
        let collection = collection.to_owned();
        let changes = stream::unfold(self.0.subscribe(), |mut freed| async {
            let change = match freed.recv().await {
                Ok(key) => Change::Freed(key),
                Err(RecvError::Lagged(_)) => Change::Missed,
                Err(RecvError::Closed) => return None,
            };
            Some((change, freed))
        });
        let ours = changes.filter(move |change| {
            ready(match change {
                Change::Freed(key) => key.collection() == collection,
                Change::Missed => true,
            })
        });
        Watch::new(ours.map(Ok))
    }
}
