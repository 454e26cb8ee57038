//! This server notes itself in the store, and compares itself with the other servers.

use std::{
    collections::BTreeMap,
    env, fs, process,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::sleep};
use uuid::Uuid;

use crate::{
    clock,
    error::Result,
    manager::{Core, pauses::Pauses, verbs::Verbs},
    random,
    server::{Flags, ServerNote},
    store::{Fleet, Topology},
    text::short,
};

/// How often the note is refreshed.
const EVERY: Duration = Duration::from_secs(60);
/// The first note waits this long for further registrations.
const SETTLED: Duration = Duration::from_secs(1);
/// How many differences are named.
const NAMED: usize = 8;

/// The note of this server, and the notes of the others that it has read.
pub(crate) struct Servers {
    verbs: Arc<Verbs>,
    ttl: Duration,
    id: Uuid,
    state: Mutex<Standing>,
    changed: Arc<Notify>,
}

#[derive(Debug)]
struct Standing {
    collections: BTreeMap<String, Flags>,
    key: Option<String>,
    /// The last change of `collections` or `key`.
    since: Instant,
    /// How many servers there are, once this one has noted itself.
    count: Option<usize>,
    /// In words: how others differ, or why this server cannot note itself.
    problems: Vec<String>,
}

impl Servers {
    pub(super) fn new(verbs: Arc<Verbs>, ttl: Duration) -> Self {
        let state = Standing {
            collections: BTreeMap::new(),
            key: None,
            since: clock::now(),
            count: None,
            problems: Vec::new(),
        };
        let (id, state) = (random::uuid(), Mutex::new(state));
        Self { verbs, ttl, id, state, changed: Arc::default() }
    }

    pub(super) fn registered(&self, collection: &str, fenced: bool, fair: bool) {
        let mut state = self.state.lock();
        state.collections.insert(collection.to_owned(), Flags::new(fenced, fair));
        state.since = clock::now();
        drop(state);
        self.changed.notify_one();
    }

    /// How many servers have noted themselves, this one included; 0 if this one has not.
    pub(super) fn count(&self) -> usize {
        self.state.lock().count.unwrap_or(0)
    }

    pub(super) fn problems(&self) -> Vec<String> {
        self.state.lock().problems.clone()
    }

    fn note(&self) -> ServerNote {
        let state = self.state.lock();
        ServerNote {
            id: self.id,
            name: name(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ttl: self.ttl,
            collections: state.collections.clone(),
            key: state.key.clone(),
        }
    }
}

/// Containers set the name of the machine; elsewhere the system has it.
fn name() -> String {
    let machine = env::var("HOSTNAME").or_else(|_| fs::read_to_string("/etc/hostname"));
    let process = process::id();
    match machine.as_deref().map(str::trim) {
        Ok(machine) if !machine.is_empty() => {
            let printable: String = machine.chars().filter(|it| !it.is_control()).collect();
            format!("{}, process {process}", short(&printable))
        }
        _ => format!("process {process}"),
    }
}

impl Servers {
    #[cfg(feature = "web")]
    pub(crate) fn note_key(&self, fingerprint: String) {
        let mut state = self.state.lock();
        (state.key, state.since) = (Some(fingerprint), clock::now());
        drop(state);
        self.changed.notify_one();
    }

    async fn tell(&self) -> Result<()> {
        let note = self.note();
        let args = (self.id, note.clone());
        let noted = self.verbs.ask("note_server", args, |store, (id, note), until| {
            store.note_server(*id, Some(note), until)
        });
        let Fleet { topology, servers: all, .. } = noted.await?;
        let differs = |other: &ServerNote| {
            Some(format!("{other} differs from this one: {}", note.difference(other)?))
        };
        let problems: Vec<_> = all.iter().filter_map(differs).take(NAMED).collect();
        let mut state = self.state.lock();
        let is_first = state.count.replace(all.len()).is_none();
        let was = std::mem::replace(&mut state.problems, problems.clone());
        drop(state);
        if is_first {
            tell_start(&note, topology);
        }
        for problem in problems.iter().filter(|problem| !was.contains(problem)) {
            log::warn!(target: "actix_doclock::manager", "{problem}");
        }
        if problems.is_empty() && !was.is_empty() {
            log::info!(target: "actix_doclock::manager", "all servers agree again");
        }
        Ok(())
    }

    /// Removes the note, so that the others no longer see this server.
    pub(super) async fn forget(&self) {
        if self.state.lock().count.take().is_none() {
            return;
        }
        let forgotten = self
            .verbs
            .ask("note_server", self.id, |store, id, until| store.note_server(*id, None, until));
        if let Err(e) = forgotten.await {
            log::debug!(target: "actix_doclock::manager", "the note of this server stays for a while: {e}");
        }
    }
}

fn tell_start(note: &ServerNote, topology: Topology) {
    let collections = note.collections.iter().map(|(name, flags)| match flags {
        Flags { fenced: false, fair: false } => name.clone(),
        flags => format!("{name} ({flags})"),
    });
    let collections = collections.collect::<Vec<_>>().join(", ");
    log::info!(
        target: "actix_doclock::manager",
        "actix-doclock {} locks documents: {topology}, ttl {:?}, collections: {collections}",
        note.version, note.ttl,
    );
    if topology == Topology::Standalone {
        log::warn!(target: "actix_doclock::manager", "{STANDALONE}");
    }
}

/// Why a standalone server is not for production.
pub(super) const STANDALONE: &str = "the database is a standalone server, without transactions and change streams: \
    a save checks its lock and then writes, with a gap between the two, and waiters poll; use a replica set, of \
    which one member is enough";

/// Notes this server until the manager is gone.
pub(super) async fn follow(manager: Weak<Core>) {
    let mut pauses = Pauses::new("noting this server for the others", EVERY);
    while let Some(core) = manager.upgrade() {
        let servers = &core.servers;
        let changed = Arc::clone(&servers.changed);
        let settled = {
            let state = servers.state.lock();
            let is_known = !state.collections.is_empty();
            is_known.then(|| SETTLED.saturating_sub(clock::since(state.since)))
        };
        let pause = match settled {
            None => EVERY,
            Some(Duration::ZERO) => match servers.tell().await {
                Ok(()) => pauses.after_success(Some(EVERY)),
                Err(e) => {
                    servers.state.lock().problems =
                        vec![format!("this server cannot note itself for the others: {e}")];
                    pauses.after_failure(&e)
                }
            },
            Some(settled) => settled,
        };
        drop(core);
        tokio::select! {
            () = changed.notified() => {}
            () = sleep(pause) => {}
        }
    }
}
