//! Puts the parts of a manager together, and starts their tasks.

use std::sync::Arc;

use crate::manager::{
    Core, Stop,
    activity::Activity,
    background::{
        listener::{self, Listeners},
        reaper,
    },
    collections::{self, Collections},
    describe::{Describe, Descriptions},
    dyn_store::DynStore,
    fleet::{self, Servers},
    freezes::{self, Freezes},
    granting::Granting,
    log_limit::LogLimit,
    reads::Reads,
    saves::Saves,
    sessions::Sessions,
    settings::Settings,
    store_time::StoreTime,
    verbs::{Runner, Verbs},
    wait::Queues,
    watch::{events::Events, streams::Streams},
    watched::Beliefs,
};

impl Core {
    /// Puts the parts together, on the current Tokio runtime.
    pub(super) fn new(
        store: Arc<dyn DynStore>,
        settings: Settings,
        describe: Option<Describe>,
    ) -> Arc<Self> {
        let Settings { ttl, deadline, max_hold, limits, .. } = settings;
        let stop = Stop::default();
        let verbs = Arc::new(Verbs::new(store, Runner::on_current_runtime(), deadline));
        let (events, log_limit) = (Arc::<Events>::default(), Arc::<LogLimit>::default());
        let time = Arc::<StoreTime>::default();
        let freezes = Freezes::new(Arc::clone(&verbs), Arc::clone(&events), Arc::clone(&time));
        let freezes = Arc::new(freezes);
        let servers = Arc::new(Servers::new(Arc::clone(&verbs), ttl));
        let collections = Arc::new(Collections::new(
            Arc::clone(&verbs),
            Arc::clone(&freezes),
            Arc::clone(&servers),
            Arc::clone(&log_limit),
            ttl,
        ));
        let beliefs = Arc::new(Beliefs {
            activity: Activity::new(ttl / 3),
            watched: Default::default(),
            losses: Default::default(),
            time,
            queues: Arc::new(Queues::new(
                limits,
                Arc::clone(&verbs),
                Arc::clone(&collections),
                Arc::clone(&freezes),
                stop.token().child_token(),
            )),
        });
        let reads = Arc::new(Reads {
            verbs: Arc::clone(&verbs),
            collections: Arc::clone(&collections),
            beliefs: Arc::clone(&beliefs),
        });
        let granting = Arc::new(Granting {
            verbs: Arc::clone(&verbs),
            collections: Arc::clone(&collections),
            freezes: Arc::clone(&freezes),
            beliefs: Arc::clone(&beliefs),
            reads: Arc::clone(&reads),
            ttl,
            max_hold,
            max_locks: limits.locks_per_session,
        });
        let causes = Arc::default();
        let saves = Saves {
            verbs: Arc::clone(&verbs),
            collections: Arc::clone(&collections),
            beliefs: Arc::clone(&beliefs),
            causes: Arc::clone(&causes),
            comparisons: Saves::comparisons(),
        };
        let served = Arc::default();
        let sessions = Arc::new(Sessions {
            verbs: Arc::clone(&verbs),
            collections: Arc::clone(&collections),
            beliefs: Arc::clone(&beliefs),
            reads: Arc::clone(&reads),
            renewals: Default::default(),
            paces: Default::default(),
            served: Arc::clone(&served),
            stop: stop.token(),
            ttl,
            max_hold,
        });
        Arc::new(Self {
            verbs,
            collections,
            freezes,
            beliefs,
            reads,
            granting,
            saves,
            sessions,
            settings,
            watches: Default::default(),
            events,
            causes,
            event_streams: Streams::new(limits),
            long_requests: Default::default(),
            asks: Default::default(),
            served,
            log_limit,
            descriptions: describe.map(Descriptions::new),
            stop_begins: stop.token().child_token(),
            stop,
            servers,
            sweeps: Default::default(),
            panics: Default::default(),
        })
    }

    /// Starts the background tasks.
    pub(super) fn start(self: &Arc<Self>, listeners: Listeners) {
        let weak = Arc::downgrade(self);
        self.collections.follow_with(move || {
            if let Some(core) = weak.upgrade() {
                core.follow_all();
            }
        });
        self.supervise("freezes", |_| {}, freezes::follow);
        self.supervise("collections", |_| {}, collections::follow);
        if let Some(interval) = self.settings.reaper_interval {
            let run = move |core| reaper::run(core, interval);
            self.sweeps.by(self.supervise("reaper", |_| {}, run));
            self.supervise("note of this server", |_| {}, fleet::follow);
        }
        let (Listeners { ended, takeovers }, limit) = (listeners, self.settings.listener_timeout);
        for (task, listener) in [("listener", ended), ("listener for taken locks", takeovers)] {
            let Some(listener) = listener else { continue };
            let run = move |core| listener::run(core, listener.clone(), limit);
            self.supervise(task, |_| {}, run);
        }
    }
}
