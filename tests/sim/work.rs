//! The work of applications: sessions that edit, jobs that hold guards, administrators who break locks.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use actix_doclock::{
    Actor, Aid, Answer, Ask, Holder, Lock, LockError, LockGuard, LockKey, Lockable, MemoryStore,
    Released, StoreErrorKind, TryAcquire, Wait,
    store::{Acquisition, Asked, Deadline, Documents, Locks, Saved, StoredDocument},
};
use doclock_conformance::Shorthand;
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, timeout_at};
use uuid::Uuid;

use crate::history::{Event, name};
use crate::world::{Known, Server, World};

/// The number of documents in each collection.
pub(crate) const DOCUMENTS: i64 = 2;

/// A document with a counter, and the save that wrote it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Page {
    #[serde(rename = "_id")]
    pub(crate) id: i64,
    pub(crate) n: u64,
    pub(crate) by: String,
}

impl Page {
    pub(crate) fn new(id: i64) -> Self {
        Self { id, n: 0, by: String::new() }
    }

    /// Writes the document without regard to locks.
    pub(crate) fn put(self, store: &MemoryStore, key: &LockKey) {
        let put = match key.collection() {
            Self::COLLECTION => store.put(self.id, &self),
            FairPage::COLLECTION => store.put(self.id, &FairPage(self)),
            _ => store.put(self.id, &FencedPage(self)),
        };
        put.expect("a page");
    }
}

impl Lockable for Page {
    type Id = i64;
    const COLLECTION: &'static str = "page";
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct FairPage(pub(crate) Page);

impl Lockable for FairPage {
    type Id = i64;
    const COLLECTION: &'static str = "fair";
    const FAIR: bool = true;
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct FencedPage(pub(crate) Page);

impl Lockable for FencedPage {
    type Id = i64;
    const COLLECTION: &'static str = "fenced";
    const FENCED: bool = true;
}

pub(crate) fn keys() -> impl Iterator<Item = LockKey> {
    let all = [Page::COLLECTION, FairPage::COLLECTION, FencedPage::COLLECTION];
    all.into_iter().flat_map(|collection| {
        (0..DOCUMENTS).map(move |id| LockKey::new(collection, id).expect("a short name"))
    })
}

/// One worker, which does everything at random.
#[derive(Debug)]
pub(crate) struct Worker {
    server: Server,
    rng: Rng,
}

/// A session at a server.
#[derive(Debug, Clone)]
struct Desk {
    server: Server,
    aid: Aid,
}

/// How a lock is given up.
#[derive(Debug, Clone, Copy)]
enum End {
    Release,
    ReleaseAll,
    LogOut,
    /// The user leaves without a release.
    Vanish,
}

impl Worker {
    pub(crate) fn new(server: &Server) -> Self {
        let rng = server.world.rng().fork();
        Self { server: server.clone(), rng }
    }

    fn world(&self) -> &World {
        &self.server.world
    }

    fn key(&mut self) -> LockKey {
        let all: Vec<_> = keys().collect();
        all[self.rng.usize(..all.len())].clone()
    }

    fn dice(&mut self, chance: u8) -> bool {
        self.rng.u8(..100) < chance
    }

    async fn millis(&mut self, range: std::ops::Range<u64>) {
        sleep(Duration::from_millis(self.rng.u64(range))).await;
    }

    async fn part_of_ttl(&mut self, most: f64) {
        let part = self.server.world.settings.part(&mut self.rng, most);
        sleep(part).await;
    }

    /// A session: opens a document, thinks, saves, closes.
    pub(crate) async fn edit(mut self, others: Vec<Server>) {
        let mut desk = Desk { server: self.server.clone(), aid: Aid::new() };
        while self.world().is_active() {
            let key = self.key();
            let has_tab = self.dice(10);
            if has_tab {
                let other = others[self.rng.usize(..others.len())].clone();
                let tab = Desk { server: other.clone(), aid: desk.aid.clone() };
                tokio::spawn(Self::new(&other).look_from_another_tab(tab, key.clone()));
            }
            let mut is_certain = true;
            if let Some(lock) = desk.acquire(&key, &mut is_certain).await {
                if self.dice(8) {
                    self.watch_over(&desk, &others, lock).await;
                    desk.aid = Aid::new();
                    continue;
                }
                is_certain &= self.work_on(&desk, &others, &lock).await;
                let end = match self.rng.u8(..100) {
                    0..7 => End::Vanish,
                    7..16 => End::LogOut,
                    16..60 if has_tab => End::LogOut,
                    16..20 => End::ReleaseAll,
                    _ => End::Release,
                };
                is_certain &= desk.ends(&lock, end).await;
                if !is_certain || !matches!(end, End::Release) {
                    if !matches!(end, End::Vanish) && (has_tab || self.dice(20)) {
                        self.page_goes_on(&desk, &others, matches!(end, End::LogOut) && is_certain);
                    }
                    desk.aid = Aid::new();
                }
            } else if !is_certain {
                if self.dice(50) {
                    self.page_goes_on(&desk, &others, false);
                }
                desk.aid = Aid::new();
            }
            self.millis(0..60).await;
        }
    }

    /// Returns whether all outcomes are known.
    async fn work_on(&mut self, desk: &Desk, others: &[Server], lock: &Lock) -> bool {
        let ttl = self.world().settings.ttl.as_millis() as u64;
        let Some(mut page) = desk.load(&lock.key).await else { return true };
        match self.rng.u8(..100) {
            0..3 => self.millis(ttl..ttl * 8 / 7).await,
            3..8 => {
                self.part_of_ttl(0.5).await;
                desk.renew().await;
                self.part_of_ttl(0.75).await;
            }
            8..13 => {
                let other = others[self.rng.usize(..others.len())].clone();
                let again = Desk { server: other, aid: desk.aid.clone() };
                let mut is_certain = true;
                let Some(same) = again.acquire(&lock.key, &mut is_certain).await else {
                    return is_certain;
                };
                if same.token != lock.token {
                    // Another acquisition, to begin with again.
                    again.ends(&same, End::Release).await;
                    return true;
                }
            }
            _ => self.millis(0..25).await,
        }
        let (saves, pause) =
            if self.dice(15) { (self.rng.u8(2..8), 300) } else { (self.rng.u8(..4), 20) };
        for _ in 0..saves {
            match desk.save(lock, &page).await {
                Ok(Some(saved)) => page = saved,
                Ok(None) => return true,
                Err(()) => return false,
            }
            if self.rng.bool() {
                self.millis(0..pause).await;
            }
        }
        true
    }

    /// Holds the lock for long, while another page of the session keeps the session alive. Believes in
    /// the lock until it is reported lost.
    async fn watch_over(&mut self, desk: &Desk, others: &[Server], lock: Lock) {
        let world = Arc::clone(&self.server.world);
        let ttl = world.settings.ttl;
        let page = others[self.rng.usize(..others.len())].clone();
        let beats = ttl.mul_f64(self.rng.f64() * 0.5 + 0.1);
        let goes_on = async {
            loop {
                sleep(beats).await;
                drop(page.locks.renew(&desk.aid).await);
            }
        };
        let holds = world.settings.part(&mut self.rng, 3.0);
        let is_lost = tokio::select! {
            biased;
            () = self.server.locks.lost(&lock) => true,
            () = sleep(holds) => false,
            () = goes_on => false,
        };
        let (op, token) = (world.next_op(), lock.token.expect("our own").to_string());
        world.write(op, Event::Believed { token: token.clone() });
        if is_lost {
            world.write(op, Event::Lost { token });
        } else {
            desk.ends(&lock, End::Release).await;
        }
    }

    /// A session that opens a document once, and closes it.
    pub(crate) async fn want_one(mut self, others: Vec<Server>) {
        self.millis(0..200).await;
        let desk = Desk { server: self.server.clone(), aid: Aid::new() };
        let (key, mut is_certain) = (self.key(), true);
        if let Some(lock) = desk.acquire(&key, &mut is_certain).await {
            is_certain &= desk.ends(&lock, End::Release).await;
        }
        if !is_certain && self.dice(20) {
            self.page_goes_on(&desk, &others, false);
        }
    }

    /// Another tab of the session opens the same document, and closes it.
    async fn look_from_another_tab(mut self, desk: Desk, key: LockKey) {
        self.millis(0..80).await;
        let mut is_certain = true;
        if let Some(lock) = desk.acquire(&key, &mut is_certain).await {
            if self.dice(50) {
                // The tab stays open.
                return;
            }
            self.part_of_ttl(0.4).await;
            desk.renew().await;
            self.part_of_ttl(0.4).await;
            desk.ends(&lock, End::Release).await;
        }
    }

    /// Another page of the session is still open and keeps the session alive. In the end the session
    /// must not have a lock that nobody knows of.
    fn page_goes_on(&mut self, desk: &Desk, others: &[Server], has_ended: bool) {
        let ttl = desk.server.world.settings.ttl;
        let server = others[self.rng.usize(..others.len())].clone();
        let desk = Desk { server, aid: desk.aid.clone() };
        tokio::spawn(async move {
            for beat in 0..16 {
                sleep(if beat < 4 { ttl / 12 } else { ttl / 3 }).await;
                let world = &desk.server.world;
                if has_ended && let Some(kept) = world.kept(&desk.aid).first() {
                    return world
                        .violation(format!("an ended session keeps {kept}, {:?}", desk.aid));
                }
                drop(desk.server.locks.renew(&desk.aid).await);
            }
            for orphan in desk.server.world.orphans(&desk.aid) {
                desk.server.world.violation(format!(
                    "a session keeps a lock that nobody believes in: {orphan}, {:?}",
                    desk.aid
                ));
            }
        });
    }

    /// A job: waits for a lock, works under a guard, gives it back.
    pub(crate) async fn work(mut self) {
        while self.world().is_active() {
            let key = self.key();
            let patience = match self.rng.u8(..10) {
                0 => None,
                1 => Some(Duration::ZERO),
                _ => Some(self.server.world.settings.part(&mut self.rng, 0.8)),
            };
            if self.dice(25) {
                self.hold_shared(&key, patience).await;
            } else if self.dice(10) {
                self.hold_several(patience).await;
            } else {
                self.hold(&key, patience).await;
            }
            self.millis(0..120).await;
        }
    }

    fn wait(patience: Option<Duration>) -> Wait {
        patience.map_or(Wait::until_acquired(), Wait::for_at_most)
    }

    /// A wait includes outages, and the last attempt may take its time. If no holder can be named, the
    /// lock is asked for once more.
    fn has_waited(&self, key: &LockKey, asked: Instant, patience: Option<Duration>) {
        if let Some(patience) = patience {
            let at_most = patience + self.world().settings.deadline * 2;
            self.world().answered(&format!("a wait for {key:?}"), asked, at_most);
        }
    }

    async fn hold(&mut self, key: &LockKey, patience: Option<Duration>) {
        let (world, asked) = (Arc::clone(&self.server.world), Instant::now());
        let op = world.next_op();
        world.write(op, Event::AcquireBegan { key: name(key) });
        let answer = self.server.locks.acquire(key, Self::wait(patience)).await;
        self.has_waited(key, asked, patience);
        if let Some(guard) = self.granted(op, answer) {
            self.work_under(guard).await;
        }
    }

    async fn hold_shared(&mut self, key: &LockKey, patience: Option<Duration>) {
        let (world, asked) = (Arc::clone(&self.server.world), Instant::now());
        let op = world.next_op();
        world.write(op, Event::AcquireBegan { key: name(key) });
        let answer = self.server.locks.acquire_shared(key, Self::wait(patience)).await;
        self.has_waited(key, asked, patience);
        let Some(mut guard) = self.granted(op, answer) else { return };
        if self.dice(30) {
            self.millis(0..50).await;
            let (op, before) = (world.next_op(), guard.token());
            world.write(op, Event::AcquireBegan { key: name(key) });
            // If the upgrade is granted, the earlier acquisition is over.
            world.takes(op, before);
            match guard.upgrade().await {
                Ok(()) => {
                    world.knows(before, Known::Gone);
                    world.granted(op, guard.lock());
                }
                Err(_) => return drop(guard),
            }
        }
        self.work_under(guard).await;
    }

    async fn hold_several(&mut self, patience: Option<Duration>) {
        let world = Arc::clone(&self.server.world);
        let wanted = BTreeSet::from([self.key(), self.key()]);
        let began: Vec<_> = wanted.iter().map(|key| (world.next_op(), name(key))).collect();
        for (op, key) in &began {
            world.write(*op, Event::AcquireBegan { key: key.clone() });
        }
        let all = self.server.locks.acquire_all(wanted, Self::wait(patience)).await;
        let Ok(guards) = all else { return world.write(began[0].0, Event::Held) };
        // In the order of their keys. No caller was told of the first lock before the last one was
        // granted.
        for (guard, (op, _)) in guards.iter().zip(began) {
            world.granted(op, guard.lock());
        }
        self.millis(0..100).await;
        for guard in &*guards {
            let token = guard.token().to_string();
            world.write(world.next_op(), Event::ReleaseBegan { token });
        }
        drop(guards.release().await);
    }

    fn granted(&self, op: u64, answer: Result<LockGuard, LockError>) -> Option<LockGuard> {
        let world = self.world();
        match answer {
            Ok(guard) => {
                world.granted(op, guard.lock());
                Some(guard)
            }
            Err(LockError::Held(_)) => {
                world.write(op, Event::Held);
                None
            }
            Err(e) => {
                world.write(op, Event::Unknown { why: e.to_string() });
                None
            }
        }
    }

    /// Believes in the lock until it is reported lost.
    async fn work_under(&mut self, guard: LockGuard) {
        let world = Arc::clone(&self.server.world);
        let (op, token) = (world.next_op(), guard.token().to_string());
        let ttl = world.settings.ttl.as_millis() as u64;
        let hold = match self.rng.u8(..100) {
            0..10 => self.rng.u64(ttl..ttl * 3),
            _ => self.rng.u64(0..80),
        };
        let desk = Desk { server: self.server.clone(), aid: guard.lock().aid.clone() };
        let lock = guard.lock().clone();
        let saves = guard.mode() == actix_doclock::Mode::Exclusive && self.rng.bool();
        let work = async {
            if saves && let Some(page) = desk.load(&lock.key).await {
                drop(desk.save(&lock, &page).await);
            }
            sleep(Duration::from_millis(hold)).await;
        };
        let is_lost = tokio::select! {
            biased;
            () = guard.lost() => true,
            () = work => false,
        };
        world.write(op, Event::Believed { token: token.clone() });
        if is_lost {
            world.write(op, Event::Lost { token });
            return drop(guard);
        }
        world.write(op, Event::ReleaseBegan { token });
        let (known, asked) = (guard.token(), Instant::now());
        if self.dice(20) {
            return drop(guard);
        }
        let released = guard.release().await;
        world.answered("a release", asked, world.settings.deadline);
        if released.is_ok() {
            world.knows(known, Known::Gone);
        }
        world.write(op, outcome(released));
    }

    /// The next document that is being saved.
    async fn saved_soon(&mut self) -> Option<LockKey> {
        for _ in 0..200 {
            if let Some(saved) = self.world().database.is_being_saved() {
                return Some(saved);
            }
            sleep(Duration::from_millis(1)).await;
        }
        None
    }

    /// An administrator, who breaks locks.
    pub(crate) async fn administer(mut self) {
        while self.world().is_active() {
            self.millis(10..1_000).await;
            let mut key = self.key();
            // A break does most harm in the middle of a save.
            if self.rng.bool() {
                key = self.saved_soon().await.unwrap_or(key);
            }
            let world = Arc::clone(&self.server.world);
            let Ok(Some(lock)) = self.server.locks.inspect(&key).await else { continue };
            let (op, token) = (world.next_op(), lock.token.expect("our own").to_string());
            world.stats().broken += 1;
            world.takes(op, token);
            drop(self.server.locks.break_lock(&lock, &Actor::new("root"), "").await);
        }
    }
}

fn outcome(released: Result<Released, LockError>) -> Event {
    match released {
        Ok(Released::Released) => Event::Released,
        Ok(_) => Event::AlreadyGone,
        Err(e) => Event::Unknown { why: e.to_string() },
    }
}

impl Desk {
    fn world(&self) -> &World {
        &self.server.world
    }

    /// Like a request: acquires, and checks whether the session has ended.
    async fn acquire(&self, key: &LockKey, is_certain: &mut bool) -> Option<Lock> {
        self.server.is_awake().await;
        let (world, asked) = (self.world(), Instant::now());
        let op = world.next_op();
        world.write(op, Event::AcquireBegan { key: name(key) });
        let answer = self.server.locks.lock_for_session(key, &self.aid, &Holder::new("desk")).await;
        world.answered("an acquire", asked, world.settings.deadline);
        let (lock, is_fresh) = match answer {
            Ok(TryAcquire::Granted(lock)) => (lock, true),
            Ok(TryAcquire::AlreadyMine(lock)) => (lock, false),
            Ok(TryAcquire::Held(lock)) => {
                world.write(op, Event::Held);
                if world.rng().u8(..100) < 30 {
                    tokio::spawn(self.clone().asks_for(lock));
                }
                return None;
            }
            Ok(TryAcquire::Lost(_)) => {
                world.write(op, Event::Held);
                return None;
            }
            Err(e) => {
                *is_certain = false;
                world.write(op, Event::Unknown { why: e.to_string() });
                return None;
            }
        };
        if is_fresh && world.rules().look_for_tombstone {
            match self.has_ended().await {
                Some(false) => {}
                Some(true) => {
                    // Unconditionally, whatever another request of the ended session was told.
                    let token = lock.token.expect("our own");
                    world.takes(op, token);
                    if self.server.locks.release(&lock).await.is_ok() {
                        world.knows(token, Known::Gone);
                    } else {
                        // As a request does, whose grant is dropped with the error.
                        tokio::spawn(self.clone().gives_back(lock));
                    }
                    *is_certain = false;
                    return None;
                }
                None => {
                    tokio::spawn(self.clone().gives_back(lock));
                    *is_certain = false;
                    return None;
                }
            }
        }
        self.server.is_awake().await;
        world.granted(op, &lock);
        Some(lock)
    }

    /// Asks the holder, who answers. Whatever comes of it, no lock may change.
    async fn asks_for(self, lock: Lock) {
        let (link, world) = (&self.server.link, self.world());
        let ask = Ask {
            id: Uuid::new_v4(),
            aid: self.aid.clone(),
            by: Holder::new("desk"),
            message: String::new(),
            at: SystemTime::UNIX_EPOCH,
            answer: None,
        };
        let asked = link.ask(&lock.key, &ask, false, Deadline::NONE).await;
        let (Ok(Asked::Stands { ask, .. }), Some(held)) = (asked, Acquisition::of(&lock)) else {
            return;
        };
        world.stats().asked += 1;
        drop(link.answer(&held, ask.id, &Answer::Soon(String::new()), Deadline::NONE).await);
        if world.rng().bool() {
            drop(link.withdraw(&lock.key, &self.aid, None, Deadline::NONE).await);
        }
    }

    /// `None` if there is no answer within the deadline.
    async fn has_ended(&self) -> Option<bool> {
        let until = Instant::now() + self.world().settings.deadline;
        while Instant::now() < until {
            match timeout_at(until, self.server.link.session_ended(&self.aid)).await {
                Ok(Ok(ended)) => return Some(ended.is_some()),
                Ok(Err(_)) => sleep(Duration::from_millis(20)).await,
                Err(_) => {}
            }
        }
        None
    }

    /// Gives back the lock of a failed request, unless another request was told of it.
    async fn gives_back(self, lock: Lock) {
        let settings = &self.world().settings;
        let tokens = [lock.token.expect("our own")];
        // The server may be paused for the whole first ttl, and could not try.
        for _ in 0..2 {
            let until = Instant::now() + settings.ttl;
            while Instant::now() < until {
                let link = &self.server.link;
                if link.retract(&lock.key, &lock.aid, &tokens, lock.mode).await.is_ok() {
                    return;
                }
                sleep(Duration::from_millis(100)).await;
            }
        }
    }

    async fn load(&self, key: &LockKey) -> Option<Page> {
        self.server.is_awake().await;
        self.world().next_op();
        self.server.link.load(key, Deadline::NONE).await.ok()??.decode().ok()
    }

    /// Renews the locks of the session, and checks which ones it has.
    async fn renew(&self) {
        self.server.is_awake().await;
        let (world, asked) = (self.world(), Instant::now());
        let op = world.next_op();
        let renewed = self.server.locks.renew(&self.aid).await;
        world.answered("a renewal", asked, world.settings.deadline);
        if renewed.is_err() {
            return;
        }
        let Ok(held) = self.server.locks.list_of(&self.aid).await else { return };
        for lock in held {
            let (token, until) = (lock.token.expect("our own"), world.moment(lock.expires_at));
            world.write(op, Event::Renewed { token: token.to_string(), until });
        }
    }

    /// Saves the loaded counter plus one. `None` if it was refused, an error if the outcome is unknown.
    async fn save(&self, lock: &Lock, loaded: &Page) -> Result<Option<Page>, ()> {
        self.server.is_awake().await;
        let world = self.world();
        let (op, token) = (world.next_op(), lock.token.expect("our own"));
        let page = Page { id: loaded.id, n: loaded.n + 1, by: format!("{op}<{}", loaded.by) };
        let id = op.to_string();
        let (key, value) = (name(&lock.key), page.n);
        world.write(op, Event::SaveBegan { key, token: token.to_string(), id, value });
        let until = Instant::now() + world.settings.deadline;
        let (link, key, aid) = (self.server.link.clone(), lock.key.clone(), self.aid.clone());
        let document = StoredDocument::encode(link.format(), &page).expect("plain data");
        // In a task of its own, as in the manager, so that it is never dropped half-way.
        let saving = tokio::spawn(async move {
            let mut pause = Duration::from_millis(20);
            loop {
                let saved = link
                    .save(
                        &Acquisition::exclusive(&key, &aid, token),
                        &document.clone().into(),
                        Deadline::at(until.into_std()),
                    )
                    .await;
                let may_try = matches!(&saved, Err(e) if e.kind() == StoreErrorKind::Unavailable);
                if !may_try || Instant::now() + pause >= until {
                    return saved;
                }
                sleep(pause).await;
                pause *= 2;
            }
        });
        let saved = timeout_at(until, saving).await;
        let mut stats = world.stats();
        let (event, saved) = match saved {
            Ok(Ok(Ok(Saved::Saved))) => (Event::Saved, Ok(Some(page))),
            Ok(Ok(Ok(_))) => (Event::NotSaved, Ok(None)),
            other => (Event::Unknown { why: format!("{other:?}") }, Err(())),
        };
        match &event {
            Event::Saved => stats.saved += 1,
            Event::NotSaved => stats.refused += 1,
            _ => stats.unknown += 1,
        }
        drop(stats);
        world.write(op, event);
        saved
    }

    /// Returns whether the lock is known to be given up.
    async fn ends(&self, lock: &Lock, end: End) -> bool {
        if let End::Vanish = end {
            return true;
        }
        self.server.is_awake().await;
        let (world, locks) = (self.world(), &self.server.locks);
        let (op, token) = (world.next_op(), lock.token.expect("our own"));
        world.write(op, Event::ReleaseBegan { token: token.to_string() });
        if !matches!(end, End::Release) {
            world.takes_all_of(op, &self.aid);
        }
        let asked = Instant::now();
        let event = match end {
            End::Release => outcome(locks.release(lock).await),
            // It does not say how many of them were live.
            End::ReleaseAll => {
                outcome(locks.release_all(&self.aid).await.map(|_| Released::AlreadyGone))
            }
            End::LogOut | End::Vanish => {
                world.stats().ended += 1;
                let ended = locks.end_session(&self.aid).await;
                if ended.is_ok() {
                    world.has_ended(&self.aid);
                }
                outcome(ended.map(|_| Released::AlreadyGone))
            }
        };
        world.answered("an end", asked, world.settings.deadline);
        let is_certain = !matches!(event, Event::Unknown { .. });
        if is_certain {
            world.knows(token, Known::Gone);
        }
        world.write(op, event);
        is_certain
    }
}
