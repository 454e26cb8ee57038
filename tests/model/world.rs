//! What there is: two sessions, the logout of one of them, a database, and what is on its way.

/// How many ticks of the clock a lease lasts.
pub(crate) const TTL: u8 = 2;
/// How many ticks whoever has sent a request waits for the answer.
pub(crate) const DEADLINE: u8 = 1;
/// After so many ticks a request that is still on its way is not carried out any more.
pub(crate) const LATEST: u8 = 1;
/// More ticks than all that Alice has sent can keep a lock, unless she renews it again and again.
pub(crate) const FOR_GOOD: u8 = 10;
/// How many requests are on their way at most.
const ROOM: usize = 3;

/// A web session. Alice may log out, by another application server than the one that she edits by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Who {
    Alice,
    Bob,
}

/// One acquisition: of whom, which in order, and by which attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Token {
    pub(crate) who: Who,
    pub(crate) nth: u8,
    pub(crate) send: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Lock {
    pub(crate) token: Token,
    pub(crate) left: u8,
    /// Granted to an attempt that nobody waited for any more, or given back without an answer. Its
    /// holder is not to be blamed for it, but it goes with its ttl (in the code a bit earlier: it is
    /// given back once more after a third of it).
    pub(crate) orphan: bool,
    /// A second request of the session was told of it.
    pub(crate) again: bool,
}

/// The lock document, the locked document, and the tombstone of Alice's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Database {
    pub(crate) lock: Option<Lock>,
    /// How often it was saved.
    pub(crate) version: u8,
    pub(crate) ended: bool,
}

impl Database {
    pub(crate) fn is_held_by(&self, who: Who) -> bool {
        self.lock.is_some_and(|lock| lock.token.who == who)
    }

    pub(crate) fn tick(&mut self) {
        if let Some(lock) = &mut self.lock {
            lock.left -= 1;
        }
        self.lock = self.lock.filter(|lock| lock.left > 0);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Verb {
    Acquire(Token),
    /// Has the session ended? And the document as it is now.
    Look(Who),
    Renew(Token),
    Save(Token, u8),
    Release(Token),
    /// A release, unless another request was told that the session has it.
    Retract(Token),
    Tombstone,
    RemoveAll,
}

/// Whose answer it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Answer {
    Granted(Token),
    AlreadyMine(Token),
    Held,
    /// The version of the document; the session has not ended.
    Goes(u8),
    Ended,
    Renewed,
    Saved(u8),
    Lost,
    Done,
}

/// On its way back. Nobody hears it before a majority has what was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Reply {
    pub(crate) answer: Answer,
    pub(crate) durable: bool,
}

/// A request on its way, sent so many ticks ago.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Request {
    pub(crate) verb: Verb,
    pub(crate) age: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    Idle,
    Asking,
    /// It has been granted. Nobody has been told.
    Looking,
    /// Its person has been told.
    Editing,
    Renewing,
    Saving,
    Releasing,
    /// What it does not want, or does not know whether it has.
    GivingBack,
}

/// An application server, on behalf of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Client {
    pub(crate) phase: Phase,
    /// How many acquisitions it has begun, and how often it has sent the present one.
    pub(crate) asked: u8,
    pub(crate) sends: u8,
    /// The acquisition that it is at.
    pub(crate) token: Token,
    /// How long it waits for the answer.
    pub(crate) patience: u8,
    /// How long it believes in its lock, and how long it may if the answer is a good one.
    pub(crate) belief: u8,
    pub(crate) if_answered: u8,
    /// The version that its person edits.
    pub(crate) seen: u8,
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
            patience: 0,
            belief: 0,
            if_answered: 0,
            seen: 0,
            reply,
        }
    }

    /// Its person has been told that the lock is theirs, and nothing since.
    pub(crate) fn believes(&self) -> bool {
        self.belief > 0 && matches!(self.phase, Phase::Editing | Phase::Renewing | Phase::Saving)
    }

    pub(crate) fn is_waiting(&self) -> bool {
        !matches!(self.phase, Phase::Idle | Phase::Editing)
    }

    /// What it waits for, to be sent (again).
    pub(crate) fn request(&self) -> Verb {
        match self.phase {
            Phase::Looking => Verb::Look(self.token.who),
            Phase::Renewing => Verb::Renew(self.token),
            Phase::Saving => Verb::Save(self.token, self.seen),
            Phase::Releasing => Verb::Release(self.token),
            Phase::GivingBack => Verb::Retract(self.token),
            _ => Verb::Acquire(self.token),
        }
    }

    /// Nothing goes on, and nobody believes in anything.
    pub(crate) fn stop(&mut self) {
        *self = Self { asked: self.asked, ..Self::new(self.token.who) };
    }

    /// What its person is told, or goes on with. What it was has no traces: fewer states.
    pub(crate) fn edits(&mut self, version: u8) {
        (self.phase, self.seen) = (Phase::Editing, version);
        (self.patience, self.if_answered, self.sends, self.reply) = (0, 0, 0, None);
    }
}

/// How far the logout of Alice is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Logout {
    No,
    First,
    Second,
    /// She has been told. For so many ticks in a row since then there was a lock of hers.
    Done(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct World {
    /// What the primary has, and what a majority has.
    pub(crate) primary: Database,
    pub(crate) majority: Database,
    pub(crate) clients: [Client; 2],
    pub(crate) logout: Logout,
    pub(crate) logout_reply: Option<Reply>,
    pub(crate) under_way: [Option<Request>; ROOM],
    /// What may still happen: fail-overs, and requests that are sent again.
    pub(crate) failovers: u8,
    pub(crate) repetitions: u8,
    /// The newest version that somebody was told is saved.
    pub(crate) acknowledged: u8,
}

impl World {
    pub(crate) fn new(failovers: u8, repetitions: u8) -> Self {
        Self {
            primary: Database::default(),
            majority: Database::default(),
            clients: [Client::new(Who::Alice), Client::new(Who::Bob)],
            logout: Logout::No,
            logout_reply: None,
            under_way: [None; ROOM],
            failovers,
            repetitions,
            acknowledged: 0,
        }
    }

    pub(crate) fn client(&mut self, who: Who) -> &mut Client {
        &mut self.clients[who as usize]
    }

    /// In order, so that two worlds that differ by the order of sending only are one.
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

    /// Whoever waited for this save has given up: its task gives up with it.
    pub(crate) fn cancel(&mut self, verb: Verb) {
        for it in &mut self.under_way {
            *it = it.filter(|request| request.verb != verb);
        }
        self.under_way.sort_unstable();
    }

    pub(crate) fn tick(&mut self) {
        self.primary.tick();
        self.majority.tick();
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

    /// Nobody has a lock, believes in one, or is about to get one.
    pub(crate) fn is_free(&self) -> bool {
        let nothing = |it: &Database| it.lock.is_none();
        nothing(&self.primary)
            && nothing(&self.majority)
            && self.under_way.iter().all(Option::is_none)
            && self.clients.iter().all(|client| client.phase == Phase::Idle)
    }
}
