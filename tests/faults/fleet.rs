//! Several application servers on one database, which a test starts, pauses and kills.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use actix_doclock::LockKey;
use futures_util::TryStreamExt;
use mongodb::Database;
use mongodb::bson::{Document, doc};
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use crate::application::{
    ARGUMENTS, Config, Counter, DOCUMENTS, ENDED, NAMES, READY, Role, Server, Settings, environment,
};
use crate::check::{Clocks, Report, Stored, check, check_to_the_end};
use crate::history::{self, Event, Line, Moment};
use crate::rig::child::Child;
use crate::rig::{client, fresh_name};
use crate::ways::Ways;

/// For steps that usually take a second or two, however slow the machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// One application server, seen from the outside.
#[derive(Debug)]
pub(crate) struct Application {
    pub(crate) child: Child,
    pub(crate) process: String,
    /// Its own ways to the database, if they can be cut.
    pub(crate) ways: Option<Ways>,
}

/// All application servers, and everything that they share.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) database: Database,
    pub(crate) applications: Vec<Application>,
    dir: TempDir,
    uri: String,
    settings: Settings,
    started: usize,
}

impl Fleet {
    /// On a new database, reached by a way that does not fail.
    pub(crate) async fn new(uri: &str) -> Self {
        let database = client(uri).await.database(&fresh_name());
        let dir = tempfile::Builder::new().prefix("histories-").tempdir().expect("a directory");
        let (uri, settings) = (uri.to_owned(), Settings::default());
        Self { database, applications: Vec::new(), dir, uri, settings, started: 0 }
    }

    pub(crate) fn with(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    pub(crate) fn settings(&self) -> Settings {
        self.settings
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Starts another application server on the same way to the database. Returns its number.
    pub(crate) async fn start(&mut self, role: Role) -> usize {
        let uri = self.uri.clone();
        self.start_on(&uri, role, &[]).await
    }

    /// Starts one by another way, or in another environment.
    pub(crate) async fn start_on(
        &mut self,
        uri: &str,
        role: Role,
        more_environment: &[String],
    ) -> usize {
        let application = self.launch(uri, role, more_environment).await;
        self.applications.push(application);
        self.applications.len() - 1
    }

    /// Starts one with its own ways to the database.
    pub(crate) async fn start_behind(&mut self, ways: Ways, role: Role) {
        let number = self.start_on(&ways.uri(), role, &[]).await;
        self.applications[number].ways = Some(ways);
    }

    /// Starts a new application server in the place of a killed one.
    pub(crate) async fn replace(&mut self, number: usize, role: Role) {
        let ways = self.applications[number].ways.take();
        let uri = ways.as_ref().map_or_else(|| self.uri.clone(), Ways::uri);
        let application = self.launch(&uri, role, &[]).await;
        self.applications[number] = Application { ways, ..application };
    }

    async fn launch(&mut self, uri: &str, role: Role, more: &[String]) -> Application {
        self.started += 1;
        let process = format!("app{}", self.started);
        let config = self.config(uri, &process, role);
        let mut settings = more.to_vec();
        settings.push(environment(&config));
        let this = env::current_exe().expect("a running binary");
        let child = Child::start(this, &settings, ARGUMENTS, READY).await;
        Application { child, process, ways: None }
    }

    fn config(&self, uri: &str, process: &str, role: Role) -> Config {
        Config {
            uri: uri.to_owned(),
            database: self.database.name().to_owned(),
            process: process.to_owned(),
            dir: self.dir().to_owned(),
            settings: self.settings,
            role,
        }
    }

    /// A server inside this process, driven by the test itself.
    pub(crate) async fn inside(&self, process: &str) -> Server {
        self.inside_on(&self.uri, process).await
    }

    /// The same, by another way to the database.
    pub(crate) async fn inside_on(&self, uri: &str, process: &str) -> Server {
        let nothing = Role::Script { steps: Vec::new(), id: String::new() };
        Server::start(&self.config(uri, process, nothing)).await
    }

    /// Sends this word to the application servers that wait for it.
    pub(crate) fn tell(&self, word: &str) {
        fs::write(self.dir().join(word), "").expect("a file");
    }

    pub(crate) fn lines(&self) -> Vec<Line> {
        history::read_all(self.dir())
    }

    /// Waits until this application server has written such a line.
    pub(crate) async fn until(
        &self,
        number: usize,
        what: &str,
        is_it: impl Fn(&Event) -> bool,
    ) -> Line {
        let process = &self.applications[number].process;
        let found = timeout(PATIENCE, self.until_written(process, is_it)).await;
        found.unwrap_or_else(|_| panic!("{process}: never {what}"))
    }

    /// The same for a server inside this process.
    pub(crate) async fn until_written(
        &self,
        process: &str,
        is_it: impl Fn(&Event) -> bool,
    ) -> Line {
        let began = Instant::now();
        loop {
            let looked = Instant::now();
            if let Some(line) = self.lines_of(process).into_iter().find(|line| is_it(&line.event)) {
                return line;
            }
            assert!(began.elapsed() < 2 * PATIENCE, "{process}: no such line");
            sleep(pause_after(looked)).await;
        }
    }

    pub(crate) fn lines_of(&self, process: &str) -> Vec<Line> {
        history::read(&self.dir().join(format!("{process}.jsonl")))
    }

    pub(crate) async fn until_said(&self, number: usize, text: &str) -> Line {
        let is_it = |event: &Event| matches!(event, Event::Said(said) if said == text);
        self.until(number, text, is_it).await
    }

    /// Waits until the recorded history fulfils this condition.
    pub(crate) async fn until_recorded(&self, what: &str, holds: impl Fn(&[Line]) -> bool) {
        let began = Instant::now();
        let mut looked = began;
        while !holds(&self.lines()) {
            assert!(began.elapsed() < 3 * PATIENCE, "{what}: never");
            sleep(pause_after(looked)).await;
            looked = Instant::now();
        }
    }

    /// Waits until a save has succeeded since then, as a sign that everything works again.
    pub(crate) async fn until_saved_since(&self, since: Moment) {
        let is_saved = |line: &Line| line.at > since && line.event == Event::Saved;
        self.until_recorded("a save succeeds", |lines| lines.iter().any(is_saved)).await;
    }

    /// Writes new documents to work on.
    pub(crate) async fn put_documents(&self, keys: usize) {
        for collection in DOCUMENTS {
            let fresh = (0..keys).map(|id| Counter { id: id.to_string(), ..Counter::default() });
            let documents = self.database.collection::<Counter>(collection);
            documents.insert_many(fresh).await.unwrap();
        }
    }

    /// Stops the load, and waits until all application servers have ended.
    pub(crate) async fn stop(&self) {
        self.tell("stop");
        for number in 0..self.applications.len() {
            self.until_said(number, ENDED).await;
        }
    }

    /// The final state of the documents.
    pub(crate) async fn stored(&self) -> Stored {
        let mut stored = BTreeMap::new();
        for collection in DOCUMENTS {
            let documents = self.database.collection::<Counter>(collection);
            let all = documents.find(doc! {}).await.unwrap();
            for document in all.try_collect::<Vec<_>>().await.unwrap() {
                assert_eq!(document.n, document.by.len() as u64, "half a document: {document:?}");
                let key = LockKey::new(collection, document.id.as_str()).unwrap();
                stored.insert(history::name(&key), document.by);
            }
        }
        stored
    }

    /// Waits until no live lock is left, and no lock that a server should have removed, and until all
    /// idle sessions are announced.
    pub(crate) async fn until_nothing_is_left(&self) {
        // A server that was killed during a save may have left a transaction open. MongoDB ends it
        // after a minute, or half a minute later.
        let began = Instant::now();
        let mut left = Vec::new();
        while began.elapsed() < 3 * PATIENCE {
            left.clear();
            for collection in DOCUMENTS.iter().chain(&NAMES) {
                let locks = self.database.collection::<Document>(&format!("{collection}.lock"));
                let held = doc! { "$or": [
                    { "aid": { "$exists": true } }, { "readers": { "$ne": [], "$exists": true } },
                ] };
                left.extend(locks.find(held).await.unwrap().try_collect::<Vec<_>>().await.unwrap());
            }
            let ended = self.database.collection::<Document>("doclock.ended");
            let step = doc! { "step": { "$exists": true } };
            left.extend(ended.find(step).await.unwrap().try_collect::<Vec<_>>().await.unwrap());
            if left.is_empty() {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
        panic!("left behind: {left:#?}");
    }

    /// Checks the recorded history. Keeps it for inspection if a check fails.
    pub(crate) async fn check(&self, clocks: Clocks) -> Report {
        let stored = self.stored().await;
        let report = check(&self.lines(), &stored, clocks);
        self.keep(report, &stored).await
    }

    /// The same, and also checks that all idle sessions were announced and that nothing is left.
    pub(crate) async fn check_to_the_end(&self) -> Report {
        let stored = self.stored().await;
        let report = check_to_the_end(&self.lines(), &stored);
        self.keep(report, &stored).await
    }

    async fn keep(&self, report: Report, stored: &Stored) -> Report {
        if !report.violations.is_empty() {
            let kept = tempfile::Builder::new().prefix("violation-").tempdir();
            let kept = kept.expect("a directory").keep();
            for file in fs::read_dir(self.dir()).expect("a directory").flatten() {
                fs::copy(file.path(), kept.join(file.file_name())).expect("disk space");
            }
            fs::write(kept.join("stored"), format!("{stored:#?}")).expect("disk space");
            fs::write(kept.join("oplog"), self.written().await.join("\n")).expect("disk space");
            println!("the histories are kept in {}", kept.display());
        }
        report
    }

    /// The writes of the database server, as far back as its oplog goes.
    async fn written(&self) -> Vec<String> {
        let oplog = self.database.client().database("local").collection::<Document>("oplog.rs");
        let here = doc! { "$or": [
            { "ns": { "$regex": format!("^{}\\.", self.database.name()) } },
            { "o.applyOps.ns": { "$regex": format!("^{}\\.", self.database.name()) } },
        ] };
        let all = oplog.find(here).await.unwrap().try_collect::<Vec<_>>().await.unwrap();
        all.iter().map(ToString::to_string).collect()
    }

    pub(crate) fn say(&self, text: &str) {
        // In the directory of the applications' histories, and in their format.
        history::History::create(&self.dir().join("nemesis.jsonl"), "nemesis").say(text);
    }
}

/// A look reads all that is recorded, so the longer it takes, the fewer there are.
fn pause_after(looked: Instant) -> Duration {
    Duration::from_millis(20).max(5 * looked.elapsed())
}

/// A test leaves its histories behind, however it fails.
impl Drop for Fleet {
    fn drop(&mut self) {
        if thread::panicking() {
            self.dir.disable_cleanup(true);
            println!("the histories are left in {}", self.dir().display());
        }
    }
}
