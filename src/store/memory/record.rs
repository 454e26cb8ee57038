//! The locks on one document, and its queue.

use std::time::{Duration, Instant, SystemTime};

use uuid::Uuid;

use crate::{
    key::LockKey,
    lock::{Aid, FencingToken, Holder, Lock, LockToken, Mode, PageId, TabId},
    store::{Claim, MAX_READERS, Place, Ticket, TryAcquire, Waiters},
};

/// A moment on the store's clock, and the reading of the caller's clock for it. That reading comes before any answer,
/// so that no holder believes in its lock for longer than the store does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) now: Duration,
    pub(super) read: Instant,
}

impl Moment {
    fn instant_of(self, time: Duration) -> Instant {
        self.read + time.saturating_sub(self.now)
    }
}

/// All times are on the store's clock, except values of `SystemTime`, which are only shown.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Record {
    /// One exclusive grant, or any number of readers. An expired grant stays until the sweep removes
    /// it, or until another grant replaces it.
    pub(super) grants: Vec<Grant>,
    /// The last fencing token.
    fence: u64,
    /// The last ticket that was drawn, in a fair collection.
    ticket: u64,
    /// The servers that have waiters.
    pub(super) queue: Vec<Queued>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Grant {
    pub(super) ts: Duration,
    pub(super) ttl: Duration,
    pub(super) mode: Mode,
    pub(super) aid: Aid,
    pub(super) token: LockToken,
    pub(super) since: SystemTime,
    pub(super) holder: Holder,
    pub(super) tab: Option<TabId>,
    pub(super) page: Option<PageId>,
    /// When it was granted, and how long it may be held. A grace period does not change these two.
    pub(super) granted: Duration,
    max_hold: Option<Duration>,
    fence: Option<FencingToken>,
    /// When it expires at the latest.
    pub(super) until: Option<Duration>,
    /// True if a second request was told that the session holds the lock.
    pub(super) again: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Queued {
    server: Uuid,
    pub(super) until: Duration,
    place: Place,
}

impl Record {
    pub(super) fn try_acquire(
        &mut self,
        key: &LockKey,
        claim: &Claim,
        fenced: bool,
        moment: Moment,
    ) -> TryAcquire {
        let now = moment.now;
        self.queue.retain(|place| place.until > now);
        if let Some(answer) = self.reenter(key, claim, moment) {
            self.leaves_others(claim, now);
            return answer;
        }
        if let Some(held) = self.in_the_way(key, claim, moment) {
            return TryAcquire::Held(held);
        }
        TryAcquire::Granted(self.grant(key, claim, fenced, None, moment))
    }

    /// True if the shared lock that the claim upgrades is live, or an attempt of the claim has replaced it already.
    pub(super) fn may_upgrade(&self, claim: &Claim, now: Duration) -> bool {
        self.grants.iter().any(|it| {
            let is_it = match it.mode {
                Mode::Shared => claim.upgrades == Some(it.token),
                Mode::Exclusive => it.token.is_of_same_claim(claim.token),
            };
            is_it && it.aid == claim.aid && it.is_live(now)
        })
    }

    /// The expired grants of other sessions, except those that ended with their `max_hold`.
    pub(super) fn of_idle_sessions(&self, than: &Aid, now: Duration) -> Vec<Grant> {
        self.grants.iter().filter(|it| it.is_of_idle_session(than, now)).cloned().collect()
    }

    /// Grants the claim, whatever else is there: an exclusive lock is removed. `before` is an earlier
    /// acquisition that continues.
    pub(super) fn grant(
        &mut self,
        key: &LockKey,
        claim: &Claim,
        fenced: bool,
        before: Option<Grant>,
        moment: Moment,
    ) -> Lock {
        let now = moment.now;
        let is_same = |it: &&Grant| it.is_acquisition(&claim.aid, claim.token) && it.is_live(now);
        if let Some(same) = self.grants.iter().find(is_same) {
            return same.to_lock(key, moment);
        }
        match claim.mode {
            Mode::Exclusive => self.grants.clear(),
            Mode::Shared => {
                let full = self.grants.len() >= MAX_READERS;
                self.grants.retain(|it| {
                    it.mode == Mode::Shared && it.aid != claim.aid && (!full || it.is_live(now))
                });
            }
        }
        self.leaves_others(claim, now);
        let fence = fenced.then(|| self.next_fence());
        let mut grant = Grant::new(claim, fence, now);
        if let Some(before) = before {
            (grant.since, grant.granted) = (before.since, before.granted);
            grant.until = grant.max_hold.map(|max| grant.granted + max);
            grant.renew(now, claim.ttl);
        }
        let lock = grant.to_lock(key, moment);
        self.grants.push(grant);
        lock
    }

    /// The lock that the session already has.
    fn reenter(&mut self, key: &LockKey, claim: &Claim, moment: Moment) -> Option<TryAcquire> {
        let now = moment.now;
        let mine = self.grants.iter_mut().find(|grant| {
            grant.aid == claim.aid && grant.is_live(now) && grant.mode.covers(claim.mode)
        })?;
        if mine.mode == Mode::Exclusive && mine.tab.zip(claim.tab).is_some_and(|(a, b)| a != b) {
            return Some(TryAcquire::AlreadyMine(mine.to_lock(key, moment)));
        }
        mine.until = mine.max_hold.map(|max| mine.granted + max);
        mine.page = claim.page.or(mine.page);
        mine.renew(now, claim.ttl);
        mine.holder = claim.holder.clone();
        let is_same = mine.token.is_of_same_claim(claim.token);
        mine.again |= !is_same;
        let lock = mine.to_lock(key, moment);
        Some(if is_same { TryAcquire::Granted(lock) } else { TryAcquire::AlreadyMine(lock) })
    }

    fn in_the_way(&self, key: &LockKey, claim: &Claim, moment: Moment) -> Option<Lock> {
        let live = || self.grants.iter().filter(|grant| grant.is_live(moment.now));
        let last = |others: &mut dyn Iterator<Item = &Grant>| {
            others.max_by_key(|grant| grant.ts + grant.ttl).map(|grant| grant.to_lock(key, moment))
        };
        let excludes = |it: &&Grant| {
            it.aid != claim.aid && (it.mode == Mode::Exclusive || claim.mode == Mode::Exclusive)
        };
        // An upgrade does not queue: the waiters are waiting for its session.
        let is_reader = live().any(|grant| grant.aid == claim.aid);
        last(&mut live().filter(excludes))
            .or_else(|| self.before(claim).filter(|_| !is_reader).map(|it| it.to_lock(key, moment)))
            .or_else(|| last(&mut live()).filter(|_| live().count() >= MAX_READERS))
    }

    /// The lowest ticket of this server, and the lowest of its writers: these two keep other servers waiting.
    pub(super) fn place_of(&self, server: Uuid) -> Option<(Ticket, Option<Ticket>)> {
        let queued = self.queue.iter().find(|it| it.server == server)?;
        Some((queued.place.first, queued.place.writer))
    }

    /// True if another server is ahead of the turn of this claim.
    pub(super) fn comes_after_others(&mut self, claim: &Claim, now: Duration) -> bool {
        self.queue.retain(|it| it.until > now);
        claim.turn.is_some() && self.before(claim).is_some()
    }

    /// The first waiter of another server that would be let in before this claim.
    fn before(&self, claim: &Claim) -> Option<&Queued> {
        let turn = claim.turn.as_ref();
        let (ticket, own) =
            turn.map_or((Ticket::NEW, None), |it| (it.ticket, Some(it.others.server)));
        let wants = |mode| claim.mode == mode;
        let is_before = |it: &&Queued| {
            let excludes =
                if wants(Mode::Exclusive) { Some(it.place.first) } else { it.place.writer };
            // A claim need not wait behind its own session, unless that session waits for a weaker mode.
            let is_own = it.place.aid == claim.aid
                && (wants(Mode::Shared) || it.place.mode == Mode::Exclusive);
            Some(it.server) != own && !is_own && excludes.is_some_and(|first| first < ticket)
        };
        self.queue.iter().filter(is_before).min_by_key(|it| it.place.first)
    }

    /// The claim was granted, or its session has the lock already.
    fn leaves_others(&mut self, claim: &Claim, now: Duration) {
        if let Some(turn) = &claim.turn {
            self.set_place(&turn.others, now);
        }
    }

    /// Returns the ticket that was drawn, if the waiters lack one.
    pub(super) fn set_place(&mut self, waiters: &Waiters, now: Duration) -> Option<Ticket> {
        self.queue.retain(|it| it.until > now && it.server != waiters.server);
        let place = waiters.place.clone().filter(|_| self.queue.len() < MAX_READERS)?;
        let drawn = Ticket(since_epoch().max(self.ticket + 1));
        let is_new = place.last == Ticket::NEW;
        if is_new {
            self.ticket = drawn.0;
        }
        let (server, until) = (waiters.server, now + waiters.lease);
        self.queue.push(Queued { server, until, place: place.with(drawn) });
        is_new.then_some(drawn)
    }

    /// Of several readers: the lock of this session, or else the one that expires last.
    pub(super) fn live(&self, aid: Option<&Aid>, now: Duration) -> Option<&Grant> {
        let live = || self.grants.iter().filter(|grant| grant.is_live(now));
        let mine = live().find(|grant| aid == Some(&grant.aid));
        mine.or_else(|| live().max_by_key(|grant| grant.ts + grant.ttl))
    }

    fn next_fence(&mut self) -> FencingToken {
        self.fence = since_epoch().max(self.fence + 1);
        self.fence.into()
    }
}

impl Grant {
    fn new(claim: &Claim, fence: Option<FencingToken>, now: Duration) -> Self {
        let mut grant = Self {
            ts: now,
            ttl: claim.ttl,
            mode: claim.mode,
            aid: claim.aid.clone(),
            token: claim.token,
            since: SystemTime::now(),
            holder: claim.holder.clone(),
            tab: claim.tab,
            page: claim.page,
            granted: now,
            max_hold: claim.max_hold,
            fence,
            until: claim.max_hold.map(|max| now + max),
            again: false,
        };
        grant.renew(now, claim.ttl);
        grant
    }

    pub(super) fn is_live(&self, now: Duration) -> bool {
        self.ts + self.ttl > now
    }

    pub(super) fn is_of_idle_session(&self, other: &Aid, now: Duration) -> bool {
        !self.is_live(now) && self.aid != *other && !self.has_reached_max_hold()
    }

    /// Renews the lease, but not beyond the end of `max_hold`, and never back in time: a test may have turned the
    /// clock back.
    pub(super) fn renew(&mut self, now: Duration, ttl: Duration) {
        self.ts = self.ts.max(now);
        self.ttl = self.until.map_or(ttl, |until| ttl.min(until.saturating_sub(now)));
    }

    /// Makes the grant expire by then, however often it is renewed.
    pub(super) fn expire_by(&mut self, at: Duration) {
        let until = self.until.map_or(at, |until| until.min(at));
        self.until = Some(until);
        self.ttl = self.ttl.min(until.saturating_sub(self.ts));
    }

    pub(super) fn has_reached_max_hold(&self) -> bool {
        self.until.is_some_and(|until| self.ts + self.ttl >= until)
    }

    /// True if a grace period limits the grant.
    pub(super) fn is_leaving(&self) -> bool {
        self.until != self.max_hold.map(|max| self.granted + max)
    }

    pub(super) fn is_acquisition(&self, aid: &Aid, token: LockToken) -> bool {
        self.aid == *aid && self.token == token
    }

    pub(super) fn to_lock(&self, key: &LockKey, moment: Moment) -> Lock {
        Lock {
            key: key.clone(),
            description: None,
            mode: self.mode,
            aid: self.aid.clone(),
            token: Some(self.token),
            tab: self.tab,
            fence: self.fence,
            holder: Some(self.holder.clone()),
            since: self.since,
            expires_at: moment.instant_of(self.ts + self.ttl),
        }
    }
}

impl Queued {
    /// The waiter, shown as the next holder of the document.
    fn to_lock(&self, key: &LockKey, moment: Moment) -> Lock {
        let place = &self.place;
        Lock {
            key: key.clone(),
            description: None,
            mode: place.mode,
            aid: place.aid.clone(),
            token: None,
            tab: None,
            fence: None,
            holder: Some(place.holder.clone()),
            since: SystemTime::UNIX_EPOCH + Duration::from_millis(place.first.0),
            expires_at: moment.instant_of(self.until),
        }
    }
}

/// In milliseconds.
fn since_epoch() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
