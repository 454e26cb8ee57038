//! Asks the application for the titles of documents.

use std::{
    collections::{BTreeSet, HashMap},
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::timeout_at,
};

use crate::{
    actor::Actor, clock, description::Description, error::BoxError, key::LockKey, manager::Parts,
};

/// How many documents one call asks for.
const MAX_KEYS: usize = 200;
/// How long a caller waits for titles, and how long one call may take.
const LIMIT: Duration = Duration::from_secs(2);
/// How many calls may run at the same time on this server.
const AT_ONCE: usize = 4;
/// How long an answer is remembered, and for how many documents.
const REMEMBER: Duration = Duration::from_secs(10);
const REMEMBERED: usize = 1_000;
/// How long the application is not asked after a failure. So a failure is logged at most this often.
const PAUSE: Duration = Duration::from_secs(10);

type Titles = HashMap<LockKey, Description>;
type Asked = Pin<Box<dyn Future<Output = Result<Titles, BoxError>> + Send>>;

/// The function of the application.
#[derive(Clone)]
pub(super) struct Describe {
    of: Arc<dyn Fn(Option<Actor>, Vec<LockKey>) -> Asked + Send + Sync>,
    is_personal: bool,
}

impl Describe {
    pub(super) fn new<F>(describe: impl Fn(Vec<LockKey>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Titles, BoxError>> + Send + 'static,
    {
        Self { of: Arc::new(move |_, keys| Box::pin(describe(keys))), is_personal: false }
    }

    pub(super) fn personal<F>(
        describe: impl Fn(Option<Actor>, Vec<LockKey>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<Titles, BoxError>> + Send + 'static,
    {
        let of = Arc::new(move |person, keys| -> Asked { Box::pin(describe(person, keys)) });
        Self { of, is_personal: true }
    }
}

/// One call: its titles, when it has ended.
type Call = watch::Receiver<Option<Titles>>;

/// The calls under way, and the latest answers.
pub(super) struct Descriptions {
    describe: Describe,
    turns: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Each for the person that has asked, if that makes a difference.
    known: HashMap<(Option<Actor>, LockKey), (Option<Description>, Instant)>,
    /// The calls under way. For one person, a document is in one call only.
    asked: HashMap<(Option<Actor>, LockKey), Call>,
    failed: Option<Instant>,
    left_links_out: Option<Instant>,
}

impl Descriptions {
    pub(super) fn new(describe: Describe) -> Arc<Self> {
        let turns = Arc::new(Semaphore::new(AT_ONCE));
        Arc::new(Self { describe, turns, state: Mutex::default() })
    }

    /// The titles that are known, and for the other documents the calls that will tell. Begins these
    /// calls, each in a task of its own.
    fn look(
        self: &Arc<Self>,
        person: Option<&Actor>,
        keys: &[LockKey],
        parts: &Arc<Parts>,
    ) -> (Titles, Calls) {
        let person = person.filter(|_| self.describe.is_personal).cloned();
        let (mut titles, mut calls, mut unknown) = (Titles::new(), Calls::new(), Vec::new());
        let mut state = self.state.lock();
        for key in keys.iter().collect::<BTreeSet<_>>() {
            let of_person = (person.clone(), key.clone());
            if let Some((known, at)) = state.known.get(&of_person)
                && clock::since(*at) < REMEMBER
            {
                titles.extend(known.clone().map(|known| (key.clone(), known)));
            } else if let Some(call) = state.asked.get(&of_person) {
                calls.push((key.clone(), call.clone()));
            } else if !state.is_paused() {
                unknown.push(key.clone());
            }
        }
        for keys in unknown.chunks(MAX_KEYS) {
            let (told, call) = watch::channel(None);
            for key in keys {
                state.asked.insert((person.clone(), key.clone()), call.clone());
                calls.push((key.clone(), call.clone()));
            }
            let (this, person, keys) = (Arc::clone(self), person.clone(), keys.to_vec());
            let asks = Arc::clone(parts);
            parts.calls.runner.spawn_untracked(async move {
                let answer = this.ask(person.clone(), keys.clone(), asks).await;
                let _ = told.send(Some(this.learn(&person, &keys, answer)));
            });
        }
        (titles, calls)
    }

    /// Asks the application, if it is this call's turn in time.
    async fn ask(&self, person: Option<Actor>, keys: Vec<LockKey>, parts: Arc<Parts>) -> Answer {
        let turn = Arc::clone(&self.turns).acquire_owned();
        let Ok(Ok(turn)) = timeout_at((clock::now() + LIMIT).into(), turn).await else {
            return Answer::NoTurn;
        };
        if self.state.lock().is_paused() {
            return Answer::NoTurn;
        }
        let call = self.call(person, keys, turn);
        match call.await {
            Ok(titles) => Answer::Titles(titles),
            Err(why) => {
                // It usually needs the same database, so its failure says nothing about the function.
                let answers = parts.freezes.ask(clock::now() + LIMIT).await;
                Answer::Failure { why, outage: answers.is_err() }
            }
        }
    }

    /// In a task of its own: a panic ends only this calls, and a call that blocks its thread delays
    /// nobody. Such a call keeps its turn until it returns.
    async fn call(
        &self,
        person: Option<Actor>,
        keys: Vec<LockKey>,
        turn: OwnedSemaphorePermit,
    ) -> Result<Titles, String> {
        let describe = Arc::clone(&self.describe.of);
        let mut call = tokio::spawn(async move {
            let _turn = turn;
            describe(person, keys).await.map_err(|e| format!("failed: {e}"))
        });
        match timeout_at((clock::now() + LIMIT).into(), &mut call).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(e)) => Err(format!("panicked: {e}")),
            Err(_) => {
                call.abort();
                Err(format!("did not answer within {LIMIT:?}, and was dropped"))
            }
        }
    }

    /// Remembers the answer. Returns the titles of the documents that were asked for.
    fn learn(&self, person: &Option<Actor>, keys: &[LockKey], answer: Answer) -> Titles {
        let (mut titles, mut left_out) = (Titles::new(), None);
        let mut state = self.state.lock();
        for key in keys {
            state.asked.remove(&(person.clone(), key.clone()));
        }
        let mut answered = match answer {
            Answer::Titles(answered) => answered,
            Answer::NoTurn => return titles,
            Answer::Failure { why, outage } => {
                let is_news = !state.is_paused();
                state.failed = Some(clock::now());
                drop(state);
                if outage {
                    log::debug!(
                        target: "actix_doclock::manager",
                        "`describe` {why}, while the database does not answer",
                    );
                } else if let (true, Some(first)) = (is_news, keys.first()) {
                    log::warn!(
                        target: "actix_doclock::manager",
                        "`describe` {why}; it was asked for {} documents, the first is {first:?}; no document \
                         has a title for {PAUSE:?}: repair the function",
                        keys.len(),
                    );
                }
                return titles;
            }
        };
        for key in keys {
            let (known, is_left_out) =
                answered.remove(key).map_or((None, false), Description::presentable);
            left_out = left_out.or_else(|| is_left_out.then_some(key));
            titles.extend(known.clone().map(|known| (key.clone(), known)));
            state.remember((person.clone(), key.clone()), known);
        }
        let left_out = left_out.filter(|_| state.may_tell_of_links());
        drop(state);
        if let Some(key) = left_out {
            log::warn!(
                target: "actix_doclock::manager",
                "`describe` gave {key:?} a link that is left out: a link begins with `/`, `http://` or \
                 `https://`, has no spaces, and is at most 2 048 bytes long",
            );
        }
        titles
    }
}

type Calls = Vec<(LockKey, Call)>;

enum Answer {
    Titles(Titles),
    Failure {
        why: String,
        /// The store of the locks does not answer at the moment.
        outage: bool,
    },
    /// Other calls take too long. The application was not asked.
    NoTurn,
}

impl State {
    fn is_paused(&self) -> bool {
        self.failed.is_some_and(|at| clock::since(at) < PAUSE)
    }

    fn may_tell_of_links(&mut self) -> bool {
        let is_time = self.left_links_out.is_none_or(|at| clock::since(at) >= PAUSE);
        if is_time {
            self.left_links_out = Some(clock::now());
        }
        is_time
    }

    fn remember(&mut self, of: (Option<Actor>, LockKey), known: Option<Description>) {
        if self.known.len() >= REMEMBERED && !self.known.contains_key(&of) {
            self.known.retain(|_, (_, at)| clock::since(*at) < REMEMBER);
        }
        if self.known.len() >= REMEMBERED && !self.known.contains_key(&of) {
            self.known.clear();
        }
        self.known.insert(of, (known, clock::now()));
    }
}

impl Parts {
    /// The titles and links of these documents that the application gives for this person. Never fails, and answers
    /// within 2 s: a document without a title is left out.
    pub(crate) async fn descriptions_for(
        self: &Arc<Self>,
        person: Option<&Actor>,
        keys: &[LockKey],
    ) -> HashMap<LockKey, Description> {
        let Some(descriptions) = &self.descriptions else { return HashMap::new() };
        let until = clock::now() + LIMIT;
        let (mut titles, calls) = descriptions.look(person, keys, self);
        for (key, mut call) in calls {
            let told = timeout_at(until.into(), call.wait_for(Option::is_some)).await;
            let Ok(Ok(told)) = told else { continue };
            let title = told.as_ref().and_then(|told| told.get(&key)).cloned();
            titles.extend(title.map(|title| (key, title)));
        }
        titles
    }

    /// The same for one document.
    pub(crate) async fn description(
        self: &Arc<Self>,
        person: Option<&Actor>,
        key: &LockKey,
    ) -> Option<Description> {
        self.descriptions_for(person, std::slice::from_ref(key)).await.remove(key)
    }
}
