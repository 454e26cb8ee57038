//! Tells the streams that serve a session for long that the session has ended, on whatever server.

use std::{
    future::pending,
    mem,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    clock,
    lock::Aid,
    manager::{Core, pauses::jittered},
    random::HashMap,
};

/// How often the store is asked about these sessions, a quarter more or less.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// How many sessions one query asks about.
const AT_ONCE: usize = 1_000;
/// If an end was longer ago than this when the session was first served, it is an old end: the session came back, with
/// a copied cookie or from a store that cannot forget.
const IS_NEWS_FOR: Duration = Duration::from_secs(60);

/// The sessions that are served for long.
#[derive(Debug, Default)]
pub(in crate::manager) struct Served(Mutex<ServedSessions>);

#[derive(Debug, Default)]
struct ServedSessions {
    sessions: HashMap<Aid, ServedSession>,
    /// True if a task asks the store about them.
    has_task: bool,
}

#[derive(Debug)]
struct ServedSession {
    ended: CancellationToken,
    began: Instant,
    /// How many streams it has.
    users: usize,
}

/// Resolves when the session has ended.
#[derive(Debug)]
pub(crate) struct EndOf {
    aid: Aid,
    ended: CancellationToken,
    core: Arc<Core>,
}

impl EndOf {
    pub(crate) async fn came(&self) {
        self.ended.cancelled().await;
    }

    pub(crate) fn has_come(&self) -> bool {
        self.ended.is_cancelled()
    }
}

/// Resolves when this end has come; never, if there is none to wait for.
pub(crate) async fn came(end: Option<&EndOf>) {
    match end {
        Some(end) => end.came().await,
        None => pending().await,
    }
}

impl Drop for EndOf {
    fn drop(&mut self) {
        let sessions = &mut self.core.served.0.lock().sessions;
        // A session that has ended was forgotten, and another one may have come back under its name.
        if let Some(session) = sessions.get_mut(&self.aid).filter(|_| !self.has_come()) {
            session.users -= 1;
            if session.users == 0 {
                sessions.remove(&self.aid);
            }
        }
    }
}

impl Served {
    /// True if no session is served: the task ends.
    fn is_idle(&self) -> bool {
        let mut state = self.0.lock();
        state.has_task = !state.sessions.is_empty();
        !state.has_task
    }

    /// This session has ended here or elsewhere.
    pub(in crate::manager) fn ended(&self, aid: &Aid) {
        if let Some(session) = self.0.lock().sessions.remove(aid) {
            session.ended.cancel();
        }
    }
}

impl Core {
    /// Tells within about a second that this session has ended.
    pub(crate) fn end_of(self: &Arc<Self>, aid: &Aid) -> EndOf {
        let mut state = self.served.0.lock();
        let has_task = mem::replace(&mut state.has_task, true);
        let session = state.sessions.entry(aid.clone()).or_insert_with(|| ServedSession {
            ended: CancellationToken::new(),
            began: clock::now(),
            users: 0,
        });
        session.users += 1;
        let ended = session.ended.clone();
        drop(state);
        if !has_task {
            self.supervise("ends of sessions", |_| {}, follow);
        }
        EndOf { aid: aid.clone(), ended, core: Arc::clone(self) }
    }

    async fn ask_for_ends(&self) {
        let aids: Vec<_> = self.served.0.lock().sessions.keys().cloned().collect();
        for aids in aids.chunks(AT_ONCE) {
            let args: Arc<[Aid]> = aids.into();
            let ends = self
                .verbs
                .ask("last_ends", args, |store, aids, until| store.last_ends(aids, until));
            let ends = match ends.await {
                Ok(ends) => ends,
                Err(e) => {
                    log::debug!(target: "actix_doclock::background", "streams hear of ends later: {e}");
                    return;
                }
            };
            for (aid, end) in aids.iter().zip(ends) {
                let began = self.served.0.lock().sessions.get(aid).map(|it| it.began);
                if let (Some(end), Some(began)) = (end, began)
                    && end.for_good
                    && end.ago <= clock::since(began) + IS_NEWS_FOR
                {
                    self.served.ended(aid);
                }
            }
        }
    }
}

/// Asks the store as long as a session is served.
async fn follow(manager: Weak<Core>) {
    loop {
        sleep(jittered(ASK_EVERY)).await;
        let Some(core) = manager.upgrade() else { return };
        if core.served.is_idle() {
            return;
        }
        core.ask_for_ends().await;
    }
}
