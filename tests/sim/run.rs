//! The life of a world, from its seed to its outcome.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::check::{Stored, check};
use crate::history::{Event, name};
use crate::nemesis;
use crate::rules::Rules;
use crate::work::{DOCUMENTS, FairPage, FencedPage, Page, Worker, keys};
use crate::world::{Server, Stats, World, panics, remember_panics};

const EDITORS: usize = 3;
const JOBS: usize = 2;

/// The outcome of a seed.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) seed: u64,
    pub(crate) violations: Vec<String>,
    pub(crate) stats: Stats,
    /// The hash of all lines of the trace.
    pub(crate) hash: u64,
    pub(crate) lines: Vec<String>,
}

/// Runs the world of this seed.
pub(crate) fn run(seed: u64, rules: Rules, keeps_lines: bool) -> Outcome {
    remember_panics();
    drop(panics());
    actix_doclock::store::seed_randomness(seed);
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let world = runtime.block_on(live(seed, rules, keeps_lines));
    drop(runtime);
    let mut violations = world.violations();
    violations.extend(panics());
    let mut stats = *world.stats();
    stats.worlds = 1;
    let (hash, lines) = world.ends();
    Outcome { seed, violations, stats, hash, lines }
}

async fn live(seed: u64, rules: Rules, keeps_lines: bool) -> Arc<World> {
    let world = Arc::new(World::new(seed, rules, keeps_lines));
    world.note(format_args!("{:?}", world.settings));
    for key in keys() {
        let id = key.id().to_string().parse().expect("a number");
        Page::new(id).put(&world.database.state().primary, &key);
    }
    let staff = Staff::start(&world).await;
    let hires = staff.clone();
    let (crashed, mut to_start) = tokio::sync::mpsc::unbounded_channel();
    let replaces = tokio::spawn(async move {
        while let Some(dead) = to_start.recv().await {
            hires.replace(dead).await;
        }
    });
    let crash = move |dead| crashed.send(dead).expect("it listens");
    let of_servers = tokio::spawn(nemesis::of_servers(Arc::clone(&world), crash));
    let rushes = staff.clone();
    let rush = move || rushes.rush();
    let of_database = tokio::spawn(nemesis::of_database(Arc::clone(&world), rush));
    let watching = Arc::clone(&world);
    tokio::spawn(async move { watches_announcements(&watching).await });
    sleep(world.settings.works).await;
    world.winds_down();
    for task in [of_servers, of_database, replaces] {
        task.await.expect("no panic");
    }
    // The servers stay, and end the remaining sessions.
    let servers = staff.goes_home().await;
    // Pages of ended sessions are still open; after this, all remaining locks have expired.
    sleep(world.settings.ttl * 6).await;
    sleep(Duration::from_secs(30)).await;
    drop(servers);
    looks_at_the_end(&world);
    world
}

/// A server, and the workers at it.
type Team = (Server, Vec<JoinHandle<()>>);

/// All servers, and the workers at them.
#[derive(Debug, Clone)]
struct Staff {
    world: Arc<World>,
    at: Arc<Mutex<BTreeMap<usize, Team>>>,
}

impl Staff {
    async fn start(world: &Arc<World>) -> Self {
        let staff = Self { world: Arc::clone(world), at: Arc::default() };
        let mut servers = Vec::new();
        for _ in 0..world.settings.servers {
            servers.push(Server::start(world).await);
        }
        for server in &servers {
            staff.hires(server, &servers);
        }
        staff
    }

    fn hires(&self, server: &Server, all: &[Server]) {
        let mut tasks = Vec::new();
        for _ in 0..EDITORS {
            tasks.push(tokio::spawn(Worker::new(server).edit(all.to_vec())));
        }
        for _ in 0..JOBS {
            tasks.push(tokio::spawn(Worker::new(server).work()));
        }
        tasks.push(tokio::spawn(Worker::new(server).administer()));
        self.at.lock().expect("no panic").insert(server.number, (server.clone(), tasks));
    }

    /// Ten times as many people as usual come to each server, and each wants one lock.
    fn rush(&self) {
        let at = self.at.lock().expect("no panic");
        let all: Vec<_> = at.values().map(|(server, _)| server.clone()).collect();
        for server in &all {
            for _ in 0..10 * (EDITORS + JOBS) {
                tokio::spawn(Worker::new(server).want_one(all.clone()));
            }
        }
    }

    /// A server was killed: starts another one in its place.
    async fn replace(&self, dead: usize) {
        let gone = self.at.lock().expect("no panic").remove(&dead);
        if let Some((_, tasks)) = gone {
            tasks.iter().for_each(JoinHandle::abort);
        }
        let server = Server::start(&self.world).await;
        let mut all: Vec<_> =
            self.at.lock().expect("no panic").values().map(|(server, _)| server.clone()).collect();
        all.push(server.clone());
        self.hires(&server, &all);
    }

    /// All workers finish their current work, within a time in which every wait can end.
    async fn goes_home(&self) -> Vec<Server> {
        let mut servers = Vec::new();
        let all = std::mem::take(&mut *self.at.lock().expect("no panic"));
        for (number, (server, tasks)) in all {
            servers.push(server);
            for task in tasks {
                match timeout(Duration::from_secs(120), task).await {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => self.world.violation(format!("a worker at s{number}: {e}")),
                    Err(_) => {
                        self.world.violation(format!("a worker at s{number} never stops waiting"))
                    }
                }
            }
        }
        servers
    }
}

/// While nothing fails, an idle session is announced at once.
async fn watches_announcements(world: &World) {
    if !world.settings.is_calm {
        return;
    }
    loop {
        sleep(Duration::from_millis(100)).await;
        for (aid, key, ago) in world.owed() {
            if ago > Duration::from_millis(1_500) && ago <= Duration::from_millis(1_600) {
                world.violation(format!(
                    "{aid:?} became idle {ago:?} ago with {key:?}, and was not announced in time"
                ));
            }
        }
    }
}

/// Checks the conditions that only hold at the end.
fn looks_at_the_end(world: &World) {
    let wrong = std::mem::take(&mut world.database.state().wrong);
    wrong.into_iter().for_each(|wrong| world.violation(wrong));
    for (aid, key, ago) in world.owed() {
        world.violation(format!(
            "{aid:?} became idle {ago:?} ago with {key:?}, and was never announced"
        ));
    }
    for aid in world.unheard_ends() {
        world.violation(format!("{aid:?} was ended, and its end was never announced"));
    }
    let history = world.history();
    let stored = stored(world, &history);
    let report = check(&history, &stored, world.settings.clocks());
    for violation in report.violations {
        world.violation(violation);
    }
}

/// The chain of saves that leads to each document: each save names the one that it was based on.
fn stored(world: &World, history: &[crate::history::Line]) -> Stored {
    let store = world.database.state().primary.clone();
    let mut pages = BTreeMap::new();
    let mut add = |collection: &str, page: Page| {
        pages.insert(format!("{collection}/{}", page.id), page);
    };
    store.all::<Page>().unwrap().into_iter().for_each(|it| add("page", it));
    store.all::<FairPage>().unwrap().into_iter().for_each(|it| add("fair", it.0));
    store.all::<FencedPage>().unwrap().into_iter().for_each(|it| add("fenced", it.0));
    assert_eq!(pages.len() as i64, 3 * DOCUMENTS);
    let saved: Vec<_> = history
        .iter()
        .filter_map(|line| match &line.event {
            Event::SaveBegan { key, .. } => Some(key.clone()),
            _ => None,
        })
        .collect();
    let mut all = Stored::new();
    for key in keys().map(|key| name(&key)).filter(|key| saved.contains(key)) {
        let chain = pages.get(&key).map_or("", |page| &page.by);
        let mut ids: Vec<_> =
            chain.split('<').filter(|id| !id.is_empty()).map(str::to_owned).collect();
        ids.reverse();
        all.insert(key, ids);
    }
    all
}
