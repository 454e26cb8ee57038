//! Asks the application for the titles of documents.

use std::{
    collections::{BTreeSet, HashMap},
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout_at,
};

use crate::{
    actor::{Actor, Person},
    clock,
    description::Description,
    error::BoxError,
    key::LockKey,
    manager::{
        Core,
        batches::Batches,
        person_queues::{PersonQueues, PersonTurn},
    },
};

/// How many documents one call asks for.
const MAX_KEYS: usize = 200;
/// How long a caller waits for titles, and how long one call may take.
const LIMIT: Duration = Duration::from_secs(2);
/// How many calls may run at the same time on this server.
const AT_ONCE: usize = 4;
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

/// A call: the titles of its documents. `None` if it has failed.
type Call = BoxFuture<'static, Option<Arc<Titles>>>;

/// Asks for titles, and remembers them for a while.
pub(super) struct Descriptions {
    describe: Describe,
    turns: Arc<Semaphore>,
    /// One call at a time: a person whose documents take long leaves the turns to the others.
    of_person: PersonQueues<Person>,
    /// For each person, if that makes a difference.
    calls: Batches<Option<Actor>, Call>,
    faults: Mutex<Faults>,
}

/// When a call last failed, and when a link was last left out.
#[derive(Default)]
struct Faults {
    failed: Option<Instant>,
    left_links_out: Option<Instant>,
}

impl Descriptions {
    pub(super) fn new(describe: Describe) -> Arc<Self> {
        Arc::new(Self {
            describe,
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            of_person: PersonQueues::default(),
            calls: Batches::of_at_most(MAX_KEYS),
            faults: Mutex::default(),
        })
    }

    fn is_paused(&self) -> bool {
        self.faults.lock().failed.is_some_and(|at| clock::since(at) < PAUSE)
    }

    /// The calls that tell the titles of these documents. Begins those that are missing, each in a task of its own.
    fn calls(
        self: &Arc<Self>,
        person: Option<&Actor>,
        asker: Option<&Person>,
        keys: &[LockKey],
        core: &Arc<Core>,
    ) -> Vec<(LockKey, Shared<Call>)> {
        let person = person.filter(|_| self.describe.is_personal).cloned();
        let keys = keys.iter().collect::<BTreeSet<_>>().into_iter().cloned().collect();
        self.calls.share(&person, keys, |keys| {
            // After a failure the application is not asked, and the title is left out.
            if self.is_paused() {
                return None;
            }
            let (this, core, person) = (Arc::clone(self), Arc::clone(core), person.clone());
            let turn = asker.and_then(|it| self.of_person.join(it.clone(), usize::MAX));
            let runtime = core.verbs.runner.runtime().clone();
            let call = runtime.spawn(async move { this.ask(turn, person, keys, &core).await });
            Some(async { call.await.ok().flatten() }.boxed().shared())
        })
    }

    /// Asks the application, if it is this call's turn in time.
    async fn ask(
        &self,
        own_turn: Option<impl Future<Output = Option<PersonTurn>>>,
        person: Option<Actor>,
        keys: Vec<LockKey>,
        core: &Core,
    ) -> Option<Arc<Titles>> {
        let turns = async {
            let own = match own_turn {
                Some(turn) => turn.await,
                None => None,
            };
            Some((own, Arc::clone(&self.turns).acquire_owned().await.ok()?))
        };
        let turns = timeout_at((clock::now() + LIMIT).into(), turns).await.ok()??;
        if self.is_paused() {
            return None;
        }
        match self.call(person, keys.clone(), turns).await {
            Ok(answered) => Some(Arc::new(self.presentable(&keys, answered))),
            Err(why) => {
                // The function usually needs the same database, so in an outage its failure says nothing about the
                // function.
                let is_outage = core.freezes.ask(clock::now() + LIMIT).await.is_err();
                self.failed(&keys, &why, is_outage);
                None
            }
        }
    }

    /// Calls the function in a task of its own: a panic ends only this call, and a call that blocks its thread delays
    /// nobody. Such a call keeps its turns until it returns.
    async fn call(
        &self,
        person: Option<Actor>,
        keys: Vec<LockKey>,
        turns: (Option<PersonTurn>, OwnedSemaphorePermit),
    ) -> Result<Titles, String> {
        let describe = Arc::clone(&self.describe.of);
        let mut call = tokio::spawn(async move {
            let _turns = turns;
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

    /// True if the latest warning about links is long ago.
    fn may_warn(&self) -> bool {
        let told = &mut self.faults.lock().left_links_out;
        let may = told.is_none_or(|at| clock::since(at) >= PAUSE);
        if may {
            *told = Some(clock::now());
        }
        may
    }

    fn failed(&self, keys: &[LockKey], why: &str, is_outage: bool) {
        let before = self.faults.lock().failed.replace(clock::now());
        let is_news = before.is_none_or(|at| clock::since(at) >= PAUSE);
        if is_outage {
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
    }

    /// The answer for these documents, as it can be shown.
    fn presentable(&self, keys: &[LockKey], mut answered: Titles) -> Titles {
        let (mut titles, mut left_out) = (Titles::new(), None);
        for key in keys {
            let Some(described) = answered.remove(key) else { continue };
            let (known, is_left_out) = described.presentable();
            left_out = left_out.or_else(|| is_left_out.then_some(key));
            titles.extend(known.map(|known| (key.clone(), known)));
        }
        if let Some(key) = left_out.filter(|_| self.may_warn()) {
            log::warn!(
                target: "actix_doclock::manager",
                "`describe` gave {key:?} a link that is left out: a link begins with `/`, `http://` or \
                 `https://`, has no spaces, and is at most 2 048 bytes long",
            );
        }
        titles
    }
}

impl Core {
    /// The titles and links of these documents that the application gives for this person. Never fails, and answers
    /// within 2 s: a document without a title is left out. The calls for one `asker` take turns.
    pub(crate) async fn descriptions_for(
        self: &Arc<Self>,
        person: Option<&Actor>,
        asker: Option<&Person>,
        keys: &[LockKey],
    ) -> HashMap<LockKey, Description> {
        let Some(descriptions) = &self.descriptions else { return HashMap::new() };
        let until = clock::now() + LIMIT;
        let mut titles = Titles::new();
        for (key, call) in descriptions.calls(person, asker, keys, self) {
            let told = timeout_at(until.into(), call).await.ok().flatten();
            let title = told.and_then(|told| told.get(&key).cloned());
            titles.extend(title.map(|title| (key, title)));
        }
        titles
    }
}
