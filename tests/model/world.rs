//! The world: two sessions, the logout of one of them, a database, a reaper, and the requests and
//! replies on their way.

pub(crate) use crate::stored::*;

/// How many ticks of the clock a lease lasts.
pub(crate) const TTL: u8 = 2;
/// The same as a signed number.
pub(crate) const LEASE: i8 = TTL as i8;
/// How many ticks a client waits for the answer to a request.
pub(crate) const DEADLINE: u8 = 1;
/// After this many ticks, a request that is still on its way is no longer carried out.
pub(crate) const LATEST: u8 = 1;
/// More ticks than any of Alice's earlier requests can keep a lock, unless she keeps renewing it.
pub(crate) const FOR_GOOD: u8 = 10;
/// The largest number of requests on their way.
const ROOM: usize = 3;

/// A web session. Alice may log out on another application server than the one on which she edits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Who {
    Alice,
    Bob,
}

impl Who {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Alice => Self::Bob,
            Self::Bob => Self::Alice,
        }
    }
}

/// One acquisition: its session, its number, and its attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Token {
    pub(crate) who: Who,
    pub(crate) nth: u8,
    pub(crate) send: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Verb {
    Acquire(Token),
    /// Asks whether the session has ended, and loads the document.
    Look(Who),
    Renew(Token),
    Save(Token, u8),
    Release(Token),
    /// A release, unless another request was told that the session has the lock.
    Retract(Token),
    Tombstone,
    RemoveAll,
    /// An acquire that replaces this expired lock of the other session.
    TakeOver(Token, Former),
    /// Leaves a trace of this expired lock.
    Trace(Former),
    /// Commits a save over this version. The flag says whether its transaction has changed the lock
    /// record.
    Commit(Token, u8, bool),
    /// A break by an administrator.
    Break(Token),
    /// The second half of a step: writes that a stranger asks for this lock, as it was read.
    Ask(Lock),
    /// A re-entry: a read of the majority-committed lock and document.
    Confirm(Token),
}

/// The answers to requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Answer {
    Granted(Token),
    AlreadyMine(Token),
    Held,
    /// This expired lock is in the way, and the reaper has to hear of it first.
    Expired(Former),
    /// The version of the document; the session has not ended.
    Goes(u8),
    Ended,
    Renewed,
    /// The lock is live for that many ticks; the version of the document.
    Confirmed(u8, u8),
    /// Not committed yet. The flag says whether the lock record was changed.
    Touched(bool),
    Saved(u8),
    /// The document has this version, and not the one that the save named. Nothing was written.
    Stale(u8),
    Lost,
    Done,
}

/// An answer on its way back. It arrives only once the write is majority-committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Reply {
    pub(crate) answer: Answer,
    pub(crate) durable: bool,
}

/// A request on its way, with its age in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Request {
    pub(crate) verb: Verb,
    pub(crate) age: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    Idle,
    Asking,
    /// An expired lock of the other session is in the way.
    Tracing,
    /// Granted, but not reported yet.
    Looking,
    /// Reported to the person who edits.
    Editing,
    Renewing,
    Confirming,
    Saving,
    Releasing,
    /// Gives back a lock that it does not want, or may have.
    GivingBack,
}

/// An application server that acts for one session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Client {
    pub(crate) phase: Phase,
    /// How many acquisitions it has begun, and how often it has sent the current one.
    pub(crate) asked: u8,
    pub(crate) sends: u8,
    /// The token of its current acquisition.
    pub(crate) token: Token,
    /// The expired lock that it takes over after leaving a trace of it.
    pub(crate) former: Option<Former>,
    /// How many ticks it still waits for the answer.
    pub(crate) patience: u8,
    /// How long it still believes in its lock, and how long it may believe if the answer is positive.
    pub(crate) belief: u8,
    pub(crate) if_answered: u8,
    /// The version that its user edits.
    pub(crate) seen: u8,
    /// The version that its page shows, whatever lock it has now.
    pub(crate) form: Option<u8>,
    pub(crate) reply: Option<Reply>,
}

impl Client {
    fn new(who: Who) -> Self {
        let token = Token { who, nth: 0, send: 0 };
        let (phase, reply) = (Phase::Idle, None);
        Self {
            phase,
            asked: 0,
            sends: 0,
            token,
            former: None,
            patience: 0,
            belief: 0,
            if_answered: 0,
            seen: 0,
            form: None,
            reply,
        }
    }

    /// Its user has been told that they have the lock, and has not been told otherwise.
    pub(crate) fn believes(&self) -> bool {
        self.belief > 0
            && matches!(
                self.phase,
                Phase::Editing | Phase::Renewing | Phase::Confirming | Phase::Saving
            )
    }

    pub(crate) fn is_waiting(&self) -> bool {
        !matches!(self.phase, Phase::Idle | Phase::Editing)
    }

    /// The request whose answer it waits for, to be sent (again).
    pub(crate) fn request(&self) -> Verb {
        match (self.phase, self.former) {
            (Phase::Tracing, Some(former)) => Verb::Trace(former),
            (Phase::Asking, Some(former)) => Verb::TakeOver(self.token, former),
            (phase, _) => self.request_in(phase),
        }
    }

    fn request_in(&self, phase: Phase) -> Verb {
        match phase {
            Phase::Looking => Verb::Look(self.token.who),
            Phase::Renewing => Verb::Renew(self.token),
            Phase::Confirming => Verb::Confirm(self.token),
            Phase::Saving => Verb::Save(self.token, self.seen),
            Phase::Releasing => Verb::Release(self.token),
            Phase::GivingBack => Verb::Retract(self.token),
            _ => Verb::Acquire(self.token),
        }
    }

    /// Forgets everything: no request, no belief.
    pub(crate) fn stop(&mut self) {
        *self = Self { asked: self.asked, form: self.form, ..Self::new(self.token.who) };
    }

    /// Tells its user about this version, or lets them go on with it. Resets the rest, which saves
    /// states.
    pub(crate) fn edits(&mut self, version: u8) {
        (self.phase, self.seen, self.former) = (Phase::Editing, version, None);
        (self.patience, self.if_answered, self.sends, self.reply) = (0, 0, 0, None);
    }
}

/// The progress of Alice's logout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Logout {
    No,
    First,
    Second,
    /// She has been told. Since then her lock existed for this many ticks in a row.
    Done(u8),
}

/// The progress of the reaper. If it dies, it forgets everything that it has not written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Sweep {
    Idle,
    /// This session may be idle, as these traces say. If it holds a lock, it is not idle.
    Found {
        who: Who,
        traces: Leases,
        awake: bool,
    },
    /// The reaper has claimed the end of this session, and named its locks. These traces are done with.
    Claimed {
        who: Who,
        traces: Leases,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct World {
    /// The state of the primary, and the majority-committed state.
    pub(crate) primary: Database,
    pub(crate) majority: Database,
    /// The majority-committed state of a former primary that still answers reads.
    pub(crate) deposed: Option<Database>,
    pub(crate) clients: [Client; 2],
    pub(crate) logout: Logout,
    pub(crate) logout_reply: Option<Reply>,
    pub(crate) under_way: [Option<Request>; ROOM],
    pub(crate) sweep: Sweep,
    /// The acquisition that an administrator has broken.
    pub(crate) broken: Option<Token>,
    /// How much may still happen: failovers, repeated requests, breaks by an administrator, asks of a stranger, and
    /// backward steps of the server's clock.
    pub(crate) failovers: u8,
    pub(crate) repetitions: u8,
    pub(crate) breaks: u8,
    pub(crate) asks: u8,
    pub(crate) steps_back: u8,
    /// The newest version that was acknowledged as saved.
    pub(crate) acknowledged: u8,
}

impl World {
    pub(crate) fn new() -> Self {
        Self {
            primary: Database::default(),
            majority: Database::default(),
            deposed: None,
            clients: [Client::new(Who::Alice), Client::new(Who::Bob)],
            logout: Logout::No,
            logout_reply: None,
            under_way: [None; ROOM],
            sweep: Sweep::Idle,
            broken: None,
            failovers: 0,
            repetitions: 0,
            breaks: 0,
            asks: 0,
            steps_back: 0,
            acknowledged: 0,
        }
    }

    pub(crate) fn client(&mut self, who: Who) -> &mut Client {
        &mut self.clients[who as usize]
    }

    /// Keeps requests sorted, so that two worlds that differ only by the order of sending are equal.
    #[must_use]
    pub(crate) fn send(&mut self, verb: Verb) -> bool {
        let Some(free) = self.under_way.iter_mut().find(|it| it.is_none()) else { return false };
        *free = Some(Request { verb, age: 0 });
        self.under_way.sort_unstable();
        true
    }

    pub(crate) fn remove(&mut self, at: usize) {
        self.under_way[at] = None;
        self.under_way.sort_unstable();
    }

    /// The client that waited for this save has given up, and its task gives up too.
    pub(crate) fn cancel(&mut self, verb: Verb) {
        for it in &mut self.under_way {
            *it = it.filter(|request| request.verb != verb);
        }
        self.under_way.sort_unstable();
    }

    /// `expired_stay`: whether the records of expired locks stay until they are replaced or removed.
    pub(crate) fn tick(&mut self, expired_stay: bool) {
        // The age of an expired lock matters only if the clock may step back.
        let least = if self.steps_back > 0 { -1 } else { 0 };
        for database in [&mut self.primary, &mut self.majority].into_iter().chain(&mut self.deposed)
        {
            if let Some(lock) = &mut database.lock {
                lock.left = (lock.left - 1).max(least);
            }
            database.lock = database.lock.filter(|lock| expired_stay || lock.is_live());
        }
        for client in &mut self.clients {
            client.patience = client.patience.saturating_sub(1);
            client.belief = client.belief.saturating_sub(1);
            client.if_answered = client.if_answered.saturating_sub(1);
        }
        if let Logout::Done(ticks) = &mut self.logout {
            *ticks =
                if self.primary.is_held_by(Who::Alice) { (*ticks + 1).min(FOR_GOOD) } else { 0 };
        }
        for it in &mut self.under_way {
            if let Some(request) = it {
                request.age += 1;
            }
            *it = it.filter(|request| request.age <= LATEST);
        }
        self.under_way.sort_unstable();
    }

    /// Only the server's clock steps back, not the clocks of the application servers.
    pub(crate) fn step_back(&mut self) {
        for lock in [&mut self.primary.lock, &mut self.majority.lock].into_iter().flatten() {
            lock.left += 1;
        }
    }

    /// A lock was found expired, and the reaper's work on it is not complete.
    pub(crate) fn is_passing_on(&self) -> bool {
        let has_found = |client: &Client| {
            let reply = client.reply.map(|reply| reply.answer);
            client.former.is_some() || matches!(reply, Some(Answer::Expired(_)))
        };
        self.sweep != Sweep::Idle
            || self.clients.iter().any(has_found)
            || self
                .under_way
                .iter()
                .flatten()
                .any(|it| matches!(it.verb, Verb::TakeOver(..) | Verb::Trace(_)))
            || [Who::Alice, Who::Bob].iter().any(|who| self.primary.knows_of(*who))
    }

    pub(crate) fn open_transactions(&self) -> impl Iterator<Item = (Token, bool)> {
        self.under_way.iter().flatten().filter_map(|it| match it.verb {
            Verb::Commit(token, _, changed) => Some((token, changed)),
            _ => None,
        })
    }

    /// No session has a lock, believes in one, or is about to get one.
    pub(crate) fn is_free(&self) -> bool {
        let nothing = |it: &Database| it.live().is_none();
        nothing(&self.primary)
            && nothing(&self.majority)
            && self.under_way.iter().all(Option::is_none)
            && self.clients.iter().all(|client| client.phase == Phase::Idle)
    }
    /// The same, and each session whose lock expired was announced or has come back.
    pub(crate) fn is_free_and_all_announced(&self) -> bool {
        let sessions = [Who::Alice, Who::Bob];
        self.is_free()
            && self.primary.lock.is_none()
            && self.sweep == Sweep::Idle
            && !sessions.iter().any(|who| self.primary.knows_of(*who))
            && self.primary.owed == [Leases::NONE; 2]
    }
}
