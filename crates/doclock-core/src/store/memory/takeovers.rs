//! Breaks and takeovers in the outbox of the embedded store.

use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::{store::Settled, takeover::Takeover};

/// How long a note is kept, as for the ends of sessions.
const KEEP: Duration = Duration::from_secs(24 * 60 * 60);

/// All times are on the store's clock.
#[derive(Debug, Clone, Default)]
pub(super) struct Takeovers(Vec<Note>);

#[derive(Debug, Clone)]
struct Note {
    takeover: Takeover,
    is_settled: bool,
    at: Duration,
    worker: Option<(Uuid, Duration)>,
    told: u32,
}

impl Takeovers {
    pub(super) fn begin(&mut self, takeover: &Takeover, lease: Duration, now: Duration) {
        self.0.retain(|note| now.saturating_sub(note.at) < KEEP);
        if self.0.iter().all(|note| note.takeover.event != takeover.event) {
            let takeover = Takeover { at: SystemTime::now(), ..takeover.clone() };
            let worker = Some((takeover.event, now + lease));
            self.0.push(Note { takeover, is_settled: false, at: now, worker, told: 0 });
        }
    }

    pub(super) fn settle(&mut self, event: Uuid, worker: Uuid, settled: Settled) {
        let is_it = |note: &Note| note.takeover.event == event && note.belongs_to(worker);
        match settled {
            Settled::Void | Settled::Told => self.0.retain(|note| !is_it(note)),
            Settled::Ready => {
                for note in self.0.iter_mut().filter(|note| is_it(note)) {
                    (note.is_settled, note.worker) = (true, None);
                }
            }
        }
    }

    pub(super) fn some_to_tell(&self, now: Duration) -> bool {
        self.0.iter().any(|note| note.is_due(now))
    }

    pub(super) fn take(
        &mut self,
        collections: &[&str],
        worker: Uuid,
        lease: Duration,
        limit: usize,
        now: Duration,
        is_live: impl Fn(&Takeover) -> bool,
    ) -> Vec<Takeover> {
        let is_ours =
            |note: &Note| note.is_settled || collections.contains(&note.takeover.key.collection());
        self.0.retain(|note| {
            note.is_settled || !is_ours(note) || !note.is_due(now) || !is_live(&note.takeover)
        });
        let due = (self.0.iter_mut())
            .filter(|note| is_ours(note) && (note.belongs_to(worker) || note.is_due(now)));
        let told = due.take(limit).map(|note| {
            // A repeated call by the same worker, after a lost answer, does not count.
            note.told += u32::from(!note.belongs_to(worker) || note.is_due(now));
            note.worker = Some((worker, now + lease));
            Takeover { repeated: note.told > 1, ..note.takeover.clone() }
        });
        told.collect()
    }
}

impl Note {
    fn belongs_to(&self, worker: Uuid) -> bool {
        self.worker.is_some_and(|(by, _)| by == worker)
    }

    fn is_due(&self, now: Duration) -> bool {
        self.worker.is_none_or(|(_, until)| until <= now)
    }
}
