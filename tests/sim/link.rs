//! How one application server reaches the database: a [`Store`] on whose way everything can happen.

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_doclock::store::PageId;
use actix_doclock::{
    Aid, Answer, Ask, EndReason, Lock, LockKey, LockToken, MemoryStore, Mode, Released, StoreError,
    StoreErrorKind, TryAcquire,
    store::{
        self, Ability, Acquisition, Active, Answered, Change, Claim, Content, Deadline, Documents,
        Edit, Ended, HandedOver, LastEnd, Locks, News, NewsId, Outbox, Query, Removal, Renewed,
        Rules as Behaviour, Saved, Servers, Sessions, Settled, StoreStatus, StoredDocument, Swept,
        TakenBy, Ticket, Waiters, Watch,
    },
};
use doclock_conformance::Shorthand;
use futures_util::stream;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::database::{State, Touches, Transaction, Written, at_once, unavailable};
use crate::truth::Why;
use crate::world::World;

/// Of a request that its caller has given up: after that part of the ttl it is not carried out any more.
const LATEST: f64 = 0.18;
/// While the database stands still, so many requests of a server are sent, and so many wait.
const SENT: usize = 4;
const WAITING: usize = 12;
/// How long the steps of one verb are apart at most, as a part of the ttl.
const STALLS: f64 = 0.15;

#[derive(Debug, Clone)]
pub(crate) struct Link {
    pub(crate) world: Arc<World>,
    pub(crate) server: usize,
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Arrives,
    /// It is not carried out.
    IsLost,
    /// It is carried out, and its caller does not hear of it.
    ReplyIsLost,
    /// Its caller has given it up before it is carried out.
    IsLate,
    /// It is carried out once more, late.
    ComesTwice,
}

/// What may happen to a verb on its way.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Repeats {
    /// Twice is as good as once, however late.
    Harmless,
    /// A second time and late it would do something else. Nobody sends it twice like that: each
    /// attempt of a claim has a token of its own.
    Never,
}

/// The outcome of a step, and when it was taken.
type Done<T> = (T, Instant);

impl Link {
    /// A dead process sends nothing and hears nothing; a paused one does later.
    async fn is_alive(&self) {
        loop {
            let (dead, thawed) =
                self.world.server(self.server, |it| (it.is_dead, it.is_frozen.then(|| it.thaws())));
            if dead {
                return pending().await;
            }
            let Some(thawed) = thawed else { return };
            thawed.notified().await;
        }
    }

    fn is_cut(&self) -> bool {
        self.world.server(self.server, |server| server.is_cut)
    }

    async fn way(&self) {
        let pause = self.world.on_the_way();
        if pause > 0 {
            sleep(Duration::from_millis(pause)).await;
        }
    }

    /// Between two commands that belong together, now and then: long enough for others to come between.
    async fn stalls(&self) {
        let stalls = !self.world.settings.is_calm && self.world.rng().u8(..100) < 5;
        if stalls {
            let pause = self.world.settings.part(&mut self.world.rng(), STALLS);
            sleep(pause).await;
        }
    }

    /// A request that never arrives: the caller learns it after a while.
    async fn breaks<T>(&self, verb: &str, why: &str) -> Result<T, StoreError> {
        let pause = self.world.settings.part(&mut self.world.rng(), 0.05);
        sleep(pause).await;
        self.is_alive().await;
        self.world.note(format_args!("s{} {verb}: {why}", self.server));
        Err(unavailable(why))
    }

    /// While the database stands still, a request that waits is refused in the end. It was never sent.
    async fn is_admitted(&self, verb: &str) -> Result<(), StoreError> {
        let (world, database) = (&self.world, &self.world.database);
        let ahead = world.server(self.server, |it| it.waiting);
        world.change(self.server, |it| it.waiting += 1);
        let is_sent = match ahead {
            ..SENT => {
                database.listens().await;
                true
            }
            SENT..WAITING => timeout(world.settings.deadline / 2, database.listens()).await.is_ok(),
            _ => false,
        };
        world.change(self.server, |it| it.waiting -= 1);
        if is_sent {
            return Ok(());
        }
        world.stats().overloaded += 1;
        world.note(format_args!("s{} {verb}: too much is waiting", self.server));
        Err(StoreError::new(StoreErrorKind::Overloaded, "too much is waiting"))
    }

    /// One verb of one step, there and back.
    async fn send<T: Send + 'static>(
        &self,
        verb: &'static str,
        touches: Touches,
        repeats: Repeats,
        work: impl Fn(&mut State) -> T + Send + Sync + 'static,
    ) -> Result<Done<T>, StoreError> {
        self.is_alive().await;
        let fate = self.world.fate(repeats == Repeats::Harmless);
        self.way().await;
        self.is_alive().await;
        if self.is_cut() {
            return self.breaks(verb, "the server is cut off").await;
        }
        self.is_admitted(verb).await?;
        let work = Arc::new(work);
        match fate {
            Fate::IsLost => return self.breaks(verb, "the request is lost").await,
            Fate::IsLate => {
                self.later(verb, &touches, &work);
                return self.breaks(verb, "the connection breaks, and the request arrives").await;
            }
            Fate::ComesTwice => self.later(verb, &touches, &work),
            Fate::Arrives | Fate::ReplyIsLost => {}
        }
        let (done, written) = self.carry_out(verb, &touches, &*work).await?;
        if self.world.rules().majority && touches != Touches::Nothing {
            self.world.database.majority_has(written).await?;
        }
        self.comes_back(verb, fate).await?;
        Ok(done)
    }

    async fn comes_back(&self, verb: &str, fate: Fate) -> Result<(), StoreError> {
        self.way().await;
        self.is_alive().await;
        if fate == Fate::ReplyIsLost || self.is_cut() {
            return self.breaks(verb, "the reply is lost").await;
        }
        Ok(())
    }

    fn later<T: Send + 'static>(
        &self,
        verb: &'static str,
        touches: &Touches,
        work: &Arc<impl Fn(&mut State) -> T + Send + Sync + 'static>,
    ) {
        let (link, touches, work) = (self.clone(), touches.clone(), Arc::clone(work));
        let pause = self.world.settings.part(&mut self.world.rng(), LATEST);
        tokio::spawn(async move {
            sleep(pause).await;
            drop(link.carry_out(verb, &touches, &*work).await);
        });
    }

    async fn carry_out<T>(
        &self,
        verb: &'static str,
        touches: &Touches,
        work: &(impl Fn(&mut State) -> T + ?Sized),
    ) -> Result<(Done<T>, Written), StoreError> {
        let stepped = self.world.database.step(touches, |state| (work(state), now())).await;
        let outcome = if stepped.is_ok() { "done" } else { "no primary" };
        self.world.note(format_args!("s{} {verb} {touches:?}: {outcome}", self.server));
        stepped
    }

    /// As the holder counts it: from before the request was sent.
    fn believed(&self, mut lock: Lock, asked: Instant, done: Instant) -> Lock {
        let from = if self.world.rules().count_from_the_send { asked } else { now() };
        lock.expires_at = from + lock.expires_at.saturating_duration_since(done);
        lock
    }

    fn named(&self, state: &mut State, lock: &mut Lock) {
        if !self.world.rules().fences_rise && lock.fence.is_some() {
            let clock = u64::try_from(state.primary.clock().as_millis()).expect("our time");
            let token = lock.token.map(|token| token.to_string()).unwrap_or_default();
            lock.fence = Some((*state.fences.entry(token).or_insert(clock)).into());
        }
    }

    /// Reads what can be relied upon.
    async fn read<T: Send + 'static>(
        &self,
        verb: &'static str,
        read: impl Fn(&MemoryStore) -> T + Send + Sync + 'static,
        is_in_doubt: impl Fn(&T, &T) -> bool + Send + Sync + 'static,
    ) -> Result<Done<T>, StoreError> {
        let of_majority = self.world.rules().leases_of_a_majority;
        let (found, at) = self
            .send(verb, Touches::Nothing, Repeats::Harmless, move |state| {
                let of_primary = read(&state.primary);
                if !of_majority {
                    return Ok(of_primary);
                }
                let found = read(state.majority());
                match is_in_doubt(&found, &of_primary) {
                    true => Err(unavailable("only the primary has it")),
                    false => Ok(found),
                }
            })
            .await?;
        Ok((found?, at))
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

fn fated(world: &World, may_repeat: bool) -> Fate {
    let weather = world.weather();
    let mut rng = world.rng();
    let dice = rng.f64();
    let mut below = 0.0;
    let mut is = |chance: f64| {
        below += chance;
        dice < below
    };
    if is(weather.lost_requests) {
        Fate::IsLost
    } else if is(weather.lost_replies) {
        Fate::ReplyIsLost
    } else if is(weather.late_requests) {
        Fate::IsLate
    } else if is(weather.repeated_requests) && may_repeat {
        Fate::ComesTwice
    } else {
        Fate::Arrives
    }
}

impl World {
    fn fate(&self, may_repeat: bool) -> Fate {
        let fate = fated(self, may_repeat);
        let mut stats = self.stats();
        match fate {
            Fate::Arrives => {}
            Fate::IsLost => stats.lost_requests += 1,
            Fate::ReplyIsLost => stats.lost_replies += 1,
            Fate::IsLate => stats.late_requests += 1,
            Fate::ComesTwice => stats.repeated_requests += 1,
        }
        fate
    }
}

/// What the record is like after a step.
fn seen<T>(state: &mut State, why: Why<'_>, done: T) -> T {
    state.looks_at_record(why);
    done
}

/// A sweep, or who takes an expired lock over, sees who is idle.
fn looks_at_idle(state: &mut State) {
    let clock = state.primary.clock();
    let State { heard, truth, .. } = state;
    heard.swept(truth, clock);
}

impl Locks for Link {
    fn can(&self, ability: Ability) -> bool {
        self.world.database.state().primary.can(ability)
    }

    async fn prepare(
        &self,
        collection: &str,
        rules: &Behaviour,
        _until: Deadline,
    ) -> Result<(), StoreError> {
        at_once(self.world.database.state().primary.prepare(collection, rules, Deadline::NONE))
    }

    async fn try_acquire(
        &self,
        key: &LockKey,
        claim: &Claim,
        _until: Deadline,
    ) -> Result<TryAcquire, StoreError> {
        let asked = now();
        self.world.claims(self.server, claim.token);
        let keeps_holder = self.world.rules().takeover_keeps_the_former_holder;
        let (link, to, by) = (self.clone(), key.clone(), claim.clone());
        let (answer, at) = self
            .send("acquire", Touches::One(key.clone()), Repeats::Never, move |state| {
                looks_at_idle(state);
                if !keeps_holder {
                    forget_expired(state, &to, &by);
                }
                let mut answer = at_once(state.primary.try_acquire(&to, &by, Deadline::NONE))?;
                if let TryAcquire::Granted(lock) | TryAcquire::AlreadyMine(lock) = &mut answer {
                    link.named(state, lock);
                }
                if let TryAcquire::AlreadyMine(Lock { token: Some(token), .. }) = answer {
                    state.told_again.insert(token.to_string());
                }
                link.world.note(format_args!("{:?} {}: {}", by.aid, by.token, said(&answer)));
                Ok(seen(state, Why::Granted(&by.aid), answer))
            })
            .await?;
        let believed = |lock| self.believed(lock, asked, at);
        Ok(match answer? {
            TryAcquire::Granted(lock) => TryAcquire::Granted(believed(lock)),
            TryAcquire::AlreadyMine(lock) => TryAcquire::AlreadyMine(believed(lock)),
            TryAcquire::Held(lock) => TryAcquire::Held(believed(lock)),
            TryAcquire::Lost(key) => TryAcquire::Lost(key),
        })
    }

    async fn renew(
        &self,
        collection: &str,
        active: &[Active],
        at_least: Duration,
        _until: Deadline,
    ) -> Result<Renewed, StoreError> {
        let (collection, active) = (collection.to_owned(), active.to_vec());
        let aids: Vec<_> = active.iter().map(|it| it.aid.clone()).collect();
        let (revives, ttl) = (!self.world.rules().renew_only_what_lives, self.world.settings.ttl);
        let renewed = self
            .send("renew", Touches::Any, Repeats::Harmless, move |state| {
                if revives {
                    revive(state, &collection, &aids, ttl);
                }
                let renewed =
                    at_once(state.primary.renew(&collection, &active, at_least, Deadline::NONE));
                seen(state, Why::Removed, renewed)
            })
            .await?;
        renewed.0
    }

    async fn ask(
        &self,
        key: &LockKey,
        ask: &Ask,
        again: bool,
        _until: Deadline,
    ) -> Result<store::Asked, StoreError> {
        let (on, ask) = (key.clone(), ask.clone());
        let asked = self
            .send("ask", Touches::One(key.clone()), Repeats::Harmless, move |state| {
                at_once(state.primary.ask(&on, &ask, again, Deadline::NONE))
            })
            .await?;
        asked.0
    }

    async fn answer(
        &self,
        held: &Acquisition,
        ask: Uuid,
        answer: &Answer,
        _until: Deadline,
    ) -> Result<Answered, StoreError> {
        let (held, answer) = (held.clone(), answer.clone());
        let answered = self
            .send("answer", Touches::One(held.key.clone()), Repeats::Harmless, move |state| {
                at_once(state.primary.answer(&held, ask, &answer, Deadline::NONE))
            })
            .await?;
        answered.0
    }

    async fn withdraw(
        &self,
        key: &LockKey,
        aid: &Aid,
        user: Option<&str>,
        _until: Deadline,
    ) -> Result<(), StoreError> {
        let (on, aid, user) = (key.clone(), aid.clone(), user.map(str::to_owned));
        let withdrawn = self
            .send("withdraw", Touches::One(key.clone()), Repeats::Harmless, move |state| {
                at_once(state.primary.withdraw(&on, &aid, user.as_deref(), Deadline::NONE))
            })
            .await?;
        withdrawn.0
    }

    async fn set_place(
        &self,
        key: &LockKey,
        waiters: &Waiters,
        _until: Deadline,
    ) -> Result<Option<Ticket>, StoreError> {
        let (on, waiters) = (key.clone(), waiters.clone());
        let set = self
            .send("set_place", Touches::One(key.clone()), Repeats::Harmless, move |state| {
                at_once(state.primary.set_place(&on, &waiters, Deadline::NONE))
            })
            .await?;
        set.0
    }

    async fn remove_lock(
        &self,
        removal: Removal<'_>,
        _until: Deadline,
    ) -> Result<Released, StoreError> {
        match removal {
            Removal::Release(it) => self.release(it).await,
            Removal::Retract(attempts) => self.retract(attempts).await,
            Removal::Break { seen, taken } => self.break_lock(seen, taken).await,
        }
    }

    async fn hand_over(
        &self,
        from: &Acquisition,
        claim: &Claim,
        _until: Deadline,
    ) -> Result<HandedOver, StoreError> {
        let asked = now();
        self.world.claims(self.server, claim.token);
        let (link, held, to) = (self.clone(), from.clone(), claim.clone());
        let (handed, at) = self
            .send("hand_over", Touches::One(from.key.clone()), Repeats::Harmless, move |state| {
                looks_at_idle(state);
                let mut handed = at_once(state.primary.hand_over(&held, &to, Deadline::NONE))?;
                if let HandedOver::To(lock) = &mut handed {
                    link.named(state, lock);
                }
                Ok(seen(state, Why::Removed, handed))
            })
            .await?;
        Ok(match handed? {
            HandedOver::To(lock) => HandedOver::To(self.believed(lock, asked, at)),
            other => other,
        })
    }

    async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
        _until: Deadline,
    ) -> Result<Released, StoreError> {
        let it = held.clone();
        let shortened = self
            .send("expire_in", Touches::One(held.key.clone()), Repeats::Harmless, move |state| {
                let done = at_once(state.primary.expire_in(&it, page, grace, Deadline::NONE));
                seen(state, Why::Removed, done)
            })
            .await?;
        shortened.0
    }

    async fn release_all(
        &self,
        collection: &str,
        aid: &Aid,
        _until: Deadline,
    ) -> Result<Vec<LockKey>, StoreError> {
        let (collection, of) = (collection.to_owned(), aid.clone());
        let released = self
            .send("release_all", Touches::Any, Repeats::Never, move |state| {
                let released = at_once(state.primary.release_all(&collection, &of, Deadline::NONE));
                seen(state, Why::Removed, released)
            })
            .await?;
        released.0
    }

    async fn locks(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
        _until: Deadline,
    ) -> Result<Vec<Lock>, StoreError> {
        let asked = now();
        let (collection, query) = (collection.to_owned(), Asked::from(query));
        let (each, all) = (matches!(query, Asked::Each(..)), matches!(query, Asked::All));
        let (found, at) = self
            .read(
                "locks",
                move |store| {
                    at_once(store.locks(&collection, query.as_query(), limit, Deadline::NONE))
                },
                move |majority, primary| match each {
                    true => has_another_key(primary, majority),
                    false => !all && has_more(primary, majority),
                },
            )
            .await?;
        Ok(found?.into_iter().map(|lock| self.believed(lock, asked, at)).collect())
    }

    async fn watch(&self, collection: &str, _until: Deadline) -> Result<Option<Watch>, StoreError> {
        let collection = collection.to_owned();
        let opened = self
            .send("watch", Touches::Nothing, Repeats::Harmless, move |state| {
                (at_once(state.primary.watch(&collection, Deadline::NONE)), state.epoch)
            })
            .await?;
        let (watch, epoch) = opened.0;
        Ok(watch?.map(|watch| self.tells(watch, epoch)))
    }

    async fn status(
        &self,
        collections: &[&str],
        _until: Deadline,
    ) -> Result<StoreStatus, StoreError> {
        at_once(self.world.database.state().primary.status(collections, Deadline::NONE))
    }
}

impl Documents for Link {
    async fn load(
        &self,
        key: &LockKey,
        _until: Deadline,
    ) -> Result<Option<StoredDocument>, StoreError> {
        let on = key.clone();
        let loaded = self
            .send("load", Touches::Nothing, Repeats::Harmless, move |state| {
                at_once(state.primary.load(&on, Deadline::NONE))
            })
            .await?;
        loaded.0
    }

    async fn save(
        &self,
        held: &Acquisition,
        edit: &Edit,
        until: Deadline,
    ) -> Result<Saved, StoreError> {
        let Acquisition { key, aid, token, .. } = held;
        // The servers of the simulation write whole documents.
        let Content::Replacement(document) = &edit.content else {
            panic!("not a whole document: {edit:?}")
        };
        self.is_alive().await;
        let fate = self.world.fate(false);
        self.way().await;
        if self.is_cut() || fate == Fate::IsLost {
            return self.breaks("save", "the request is lost").await;
        }
        if !self.world.rules().save_in_one_transaction {
            self.world.database.write_at_once(key, document);
        }
        let mut it = self.world.database.begin(key)?;
        let saved = self
            .in_transaction(
                &mut it,
                aid,
                *token,
                document,
                until.moment().unwrap_or_else(|| now() + self.world.settings.ttl),
                fate,
            )
            .await;
        self.world.database.abort(&it);
        let outcome = saved.as_ref().map_err(|error| error.kind());
        self.world.note(format_args!("s{} save {key:?} {token}: {outcome:?}", self.server));
        saved
    }
}

impl Sessions for Link {
    /// In its two steps.
    async fn end_session(
        &self,
        aid: &Aid,
        reason: EndReason,
        collections: &[&str],
        worker: Uuid,
        _until: Deadline,
    ) -> Result<Ended, StoreError> {
        let of = aid.clone();
        let all: Arc<[String]> = collections.iter().map(|it| (*it).to_owned()).collect();
        let in_all = Arc::clone(&all);
        let tombstone_first = self.world.rules().tombstone_first;
        self.send("end_session, first", Touches::Any, Repeats::Harmless, move |state| {
            if tombstone_first {
                state.tombstones.insert(of.clone());
            } else {
                for collection in &*in_all {
                    drop(at_once(state.primary.release_all(collection, &of, Deadline::NONE)));
                }
                state.looks_at_record(Why::Removed);
            }
        })
        .await?;
        self.stalls().await;
        let of = aid.clone();
        let ended = self
            .send("end_session, second", Touches::Any, Repeats::Harmless, move |state| {
                let names: Vec<_> = all.iter().map(String::as_str).collect();
                let names = if tombstone_first { &names[..] } else { &[] };
                let ended =
                    at_once(state.primary.end_session(&of, reason, names, worker, Deadline::NONE));
                let clock = state.primary.clock();
                if let Ok(ended) = &ended
                    && let Some(wrong) = state.truth.ended(&of, &ended.locks, clock)
                {
                    state.wrong.push(wrong);
                }
                seen(state, Why::Removed, ended)
            })
            .await?;
        ended.0
    }

    async fn sweep(
        &self,
        collections: &[&str],
        worker: Uuid,
        limit: usize,
        _until: Deadline,
    ) -> Result<Swept, StoreError> {
        let all: Vec<_> = collections.iter().map(|it| (*it).to_owned()).collect();
        let purges_by_age = !self.world.rules().purge_by_lease;
        let ttl = self.world.settings.ttl;
        let swept = self
            .send("sweep", Touches::Any, Repeats::Harmless, move |state| {
                looks_at_idle(state);
                if purges_by_age {
                    purge(state, ttl);
                }
                let names: Vec<_> = all.iter().map(String::as_str).collect();
                let swept = at_once(state.primary.sweep(&names, worker, limit, Deadline::NONE));
                seen(state, Why::Swept, swept)
            })
            .await?;
        swept.0
    }

    async fn last_ends(
        &self,
        aids: &[Aid],
        _until: Deadline,
    ) -> Result<Vec<Option<LastEnd>>, StoreError> {
        let of = aids.to_vec();
        let last = self
            .send("last_end", Touches::Nothing, Repeats::Harmless, move |state| {
                let begun =
                    LastEnd { reason: EndReason::LoggedOut, for_good: true, ago: Duration::ZERO };
                let mut ends = at_once(state.primary.last_ends(&of, Deadline::NONE))?;
                for (last, aid) in ends.iter_mut().zip(&of) {
                    let is_over = last.is_some_and(|last| last.for_good);
                    if !is_over && state.tombstones.contains(aid) {
                        *last = Some(begun);
                    }
                }
                Ok(ends)
            })
            .await?;
        last.0
    }

    async fn take_news(
        &self,
        what: Outbox<'_>,
        worker: Uuid,
        lease: Duration,
        limit: usize,
        until: Deadline,
    ) -> Result<Vec<News>, StoreError> {
        // No server of the simulation breaks a lock or takes one over.
        let Outbox::Ends = what else { return Ok(Vec::new()) };
        let taken = self
            .send("take_news", Touches::Ends, Repeats::Harmless, move |state| {
                at_once(state.primary.take_news(Outbox::Ends, worker, lease, limit, until))
            })
            .await?;
        taken.0
    }

    async fn settle_news(
        &self,
        news: &[NewsId],
        worker: Uuid,
        settled: Settled,
        until: Deadline,
    ) -> Result<(), StoreError> {
        let news = news.to_vec();
        let noted = self
            .send("settle_news", Touches::Ends, Repeats::Harmless, move |state| {
                at_once(state.primary.settle_news(&news, worker, settled, until))
            })
            .await?;
        noted.0
    }
}

impl Servers for Link {}

/// A [`Query`] that outlives its caller.
enum Asked {
    Each(Vec<LockKey>, Option<Aid>),
    On(Vec<LockKey>),
    Of(Vec<Aid>),
    All,
}

impl From<Query<'_>> for Asked {
    fn from(query: Query<'_>) -> Self {
        match query {
            Query::Each { keys, aid } => Self::Each(keys.to_vec(), aid.cloned()),
            Query::On(keys) => Self::On(keys.to_vec()),
            Query::Of(aids) => Self::Of(aids.to_vec()),
            Query::All => Self::All,
        }
    }
}

impl Asked {
    fn as_query(&self) -> Query<'_> {
        match self {
            Self::Each(keys, aid) => Query::Each { keys, aid: aid.as_ref() },
            Self::On(keys) => Query::On(keys),
            Self::Of(aids) => Query::Of(aids),
            Self::All => Query::All,
        }
    }
}

/// Removals.
impl Link {
    async fn release(&self, it: &Acquisition) -> Result<Released, StoreError> {
        let it = it.clone();
        let by_token = self.world.rules().release_by_token;
        let released = self
            .send("release", Touches::One(it.key.clone()), Repeats::Harmless, move |state| {
                let mut these = vec![it.clone()];
                if !by_token {
                    let all = state.primary.on_record().into_iter();
                    these = all
                        .filter(|other| (&other.key, &other.aid) == (&it.key, &it.aid))
                        .map(|other| Acquisition { token: other.token, ..it.clone() })
                        .collect();
                }
                let mut released = Ok(Released::AlreadyGone);
                for it in these {
                    released =
                        at_once(state.primary.remove_lock(Removal::Release(&it), Deadline::NONE));
                }
                seen(state, Why::Removed, released)
            })
            .await?;
        released.0
    }

    async fn retract(&self, attempts: &[Acquisition]) -> Result<Released, StoreError> {
        let Some(first) = attempts.first() else { return Ok(Released::AlreadyGone) };
        let touches = Touches::One(first.key.clone());
        let attempts = attempts.to_vec();
        let spares_told = self.world.rules().retract_unless_told;
        let retracted = self
            .send("retract", touches, Repeats::Harmless, move |state| {
                let mut retracted =
                    at_once(state.primary.remove_lock(Removal::Retract(&attempts), Deadline::NONE));
                for it in attempts.iter().filter(|_| !spares_told) {
                    retracted =
                        at_once(state.primary.remove_lock(Removal::Release(it), Deadline::NONE));
                }
                seen(state, Why::Removed, retracted)
            })
            .await?;
        retracted.0
    }

    /// First the lock expires, then it goes.
    async fn break_lock(&self, seen_lock: &Lock, taken: &TakenBy) -> Result<Released, StoreError> {
        let touches = Touches::One(seen_lock.key.clone());
        let mut has_expired = Released::AlreadyGone;
        if let (Some(it), Mode::Exclusive) = (Acquisition::of(seen_lock), seen_lock.mode) {
            let expired = self
                .send("break_lock, first", touches.clone(), Repeats::Harmless, move |state| {
                    let expired =
                        at_once(state.primary.expire_in(&it, None, Duration::ZERO, Deadline::NONE));
                    seen(state, Why::Removed, expired)
                })
                .await?;
            has_expired = expired.0?;
            self.stalls().await;
        }
        let (broken, taken) = (seen_lock.clone(), taken.clone());
        let removed = self
            .send("break_lock, second", touches, Repeats::Harmless, move |state| {
                let removal = Removal::Break { seen: &broken, taken: &taken };
                let removed = at_once(state.primary.remove_lock(removal, Deadline::NONE));
                seen(state, Why::Removed, removed)
            })
            .await?;
        Ok(if has_expired == Released::Released { has_expired } else { removed.0? })
    }
}

impl Link {
    async fn in_transaction(
        &self,
        it: &mut Transaction,
        aid: &Aid,
        token: LockToken,
        document: &StoredDocument,
        until: Instant,
        fate: Fate,
    ) -> Result<Saved, StoreError> {
        let database = &self.world.database;
        self.on_in_transaction().await?;
        let saved = database.touch(it, aid, token, document)?;
        self.world.note(format_args!("s{} touch: {saved:?}", self.server));
        self.on_in_transaction().await?;
        if saved != Saved::Saved {
            return Ok(saved);
        }
        if now() >= until {
            return Err(unavailable("it is too late"));
        }
        self.on_in_transaction().await?;
        let written = database.commit(it)?;
        self.world.note(format_args!("s{} commit", self.server));
        let rules = self.world.rules();
        if rules.majority_commit && database.majority_has(written).await.is_err() {
            return Err(unknown());
        }
        // The driver asks again what became of a commit.
        if self.comes_back("commit", fate).await.is_err() && (now() >= until || self.is_cut()) {
            return Err(unknown());
        }
        Ok(Saved::Saved)
    }

    /// The next command of a transaction.
    async fn on_in_transaction(&self) -> Result<(), StoreError> {
        self.way().await;
        self.stalls().await;
        self.is_alive().await;
        if self.is_cut() {
            return self.breaks("save", "the server is cut off").await;
        }
        Ok(())
    }

    /// What a watch yields, until the primary changes or the connection breaks.
    fn tells(&self, watch: Watch, epoch: u64) -> Watch {
        let changes = stream::unfold((self.clone(), watch, epoch), |(link, mut watch, epoch)| {
            async move {
                let change = loop {
                    // A fail-over or a partition is noticed some time after it has begun.
                    let told = timeout(Duration::from_millis(500), watch.next()).await;
                    link.is_alive().await;
                    if link.is_cut() || link.world.database.state().epoch != epoch {
                        return None;
                    }
                    match told {
                        Ok(change) => break change?,
                        Err(_) => continue,
                    }
                };
                link.way().await;
                let change =
                    if link.world.rng().u8(..200) == 0 { Ok(Change::Missed) } else { change };
                Some((change.ok()?, (link, watch, epoch)))
            }
        });
        Watch::new(futures_util::StreamExt::map(changes, Ok))
    }
}

fn unknown() -> StoreError {
    StoreError::new(StoreErrorKind::OutcomeUnknown, "whether it was committed is not known")
}

fn said(answer: &TryAcquire) -> String {
    let token = |lock: &Lock| lock.token.map_or_else(|| "a place".to_owned(), |it| it.to_string());
    match answer {
        TryAcquire::Granted(lock) => format!("granted, {}", token(lock)),
        TryAcquire::AlreadyMine(lock) => format!("mine already, {}", token(lock)),
        TryAcquire::Held(lock) => format!("held by {}", token(lock)),
        TryAcquire::Lost(_) => "lost what it upgrades".to_owned(),
    }
}

type Found<T> = Result<T, StoreError>;

fn has_another_key(primary: &Found<Vec<Lock>>, majority: &Found<Vec<Lock>>) -> bool {
    let (Ok(primary), Ok(majority)) = (primary, majority) else { return false };
    primary.iter().any(|lock| !majority.iter().any(|it| it.key == lock.key))
}

fn has_more(primary: &Found<Vec<Lock>>, majority: &Found<Vec<Lock>>) -> bool {
    let (Ok(primary), Ok(majority)) = (primary, majority) else { return false };
    primary.iter().any(|lock| !majority.iter().any(|it| it.token == lock.token))
}

/// Before an expired lock is taken over, all that is left of it goes.
fn forget_expired(state: &mut State, key: &LockKey, claim: &Claim) {
    let view = state.primary.fork_of(key);
    if !matches!(at_once(view.try_acquire(key, claim, Deadline::NONE)), Ok(TryAcquire::Granted(_)))
    {
        return;
    }
    let clock = state.primary.clock();
    for it in state.primary.on_record() {
        if it.key == *key && it.until <= clock && it.aid != claim.aid {
            drop(at_once(state.primary.release(&it.key, &it.aid, it.token, it.mode)));
        }
    }
    state.looks_at_record(Why::Granted(&claim.aid));
}

fn revive(state: &mut State, collection: &str, aids: &[Aid], ttl: Duration) {
    let clock = state.primary.clock();
    for it in state.primary.on_record() {
        let is_meant = it.key.collection() == collection && aids.contains(&it.aid);
        if is_meant && it.until <= clock && it.mode == Mode::Exclusive {
            let claim = Claim {
                aid: it.aid.clone(),
                token: it.token,
                tab: None,
                page: None,
                holder: actix_doclock::Holder::new("revived"),
                taken: None,
                mode: it.mode,
                ttl,
                max_hold: None,
                turn: None,
                upgrades: None,
            };
            drop(at_once(state.primary.try_acquire(&it.key, &claim, Deadline::NONE)));
        }
    }
}

/// As an index on when a lock was taken would have it.
fn purge(state: &mut State, ttl: Duration) {
    let clock = state.primary.clock();
    for it in state.primary.on_record() {
        let granted = state.granted.get(&it.token.to_string()).copied().unwrap_or(clock);
        if granted + ttl < clock {
            drop(at_once(state.primary.release(&it.key, &it.aid, it.token, it.mode)));
        }
    }
    state.looks_at_record(Why::Removed);
}
