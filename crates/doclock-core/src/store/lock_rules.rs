//! The rules: what a verb does to the locks on one document, and to its queue. Both stores run them.
//!
//! A rule reads and changes a [`Record`] by the store's clock, and does nothing else.

use std::time::{Duration, Instant, SystemTime};

use uuid::Uuid;

mod asks;

pub use asks::MAX_ASKS;

use crate::{
    key::LockKey,
    lock::{Aid, Ask, FencingToken, Holder, Lock, LockToken, Mode, PageId, TabId},
    store::{
        Acquisition, Active, Claim, HandedOver, MAX_READERS, Place, Removal, Rules, TakenBy,
        Ticket, TryAcquire, Waiters,
    },
};

/// A moment on the store's clock, and the reading of the caller's clock for it. That reading comes before any answer,
/// so that no holder believes in its lock for longer than the store does.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    pub now: Duration,
    pub read: Instant,
    /// The date, for values that are shown, and for numbers that must rise even if all records are lost.
    pub date: SystemTime,
}

/// Longer than any lock. A foreign program may write any date, and an `Instant` has an end.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

impl Moment {
    fn instant_of(self, time: Duration) -> Instant {
        self.read + time.saturating_sub(self.now).min(FOREVER)
    }

    /// In milliseconds since 1970.
    fn number(self) -> u64 {
        let since_1970 = self.date.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
    }
}

/// The longest lease of a place, so that no date from a foreign program reserves a document forever. Also how
/// far a ticket may be ahead of the clock.
pub const LONGEST_LEASE: Duration = Duration::from_secs(60 * 60);

/// All times are on the store's clock, except values of `SystemTime`, which are only shown.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Record {
    /// One exclusive grant, or any number of readers. An expired grant stays until the sweep removes
    /// it, or until another grant replaces it.
    pub grants: Vec<Grant>,
    /// The last fencing token.
    pub fence: u64,
    /// The last ticket that was drawn. A store need not keep it where its clock moves on between two commands.
    pub ticket: u64,
    /// The servers that have waiters.
    pub queue: Vec<Queued>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Grant {
    pub ts: Duration,
    pub ttl: Duration,
    pub mode: Mode,
    pub aid: Aid,
    /// `None` for the lock of a foreign program.
    pub token: Option<LockToken>,
    pub since: SystemTime,
    pub holder: Option<Holder>,
    pub tab: Option<TabId>,
    pub page: Option<PageId>,
    pub fence: Option<FencingToken>,
    /// When the grant expires at the latest.
    pub until: Option<Duration>,
    /// In the grace period of a page that has gone: what `until` is again, if the page comes back.
    pub leaving: Option<Option<Duration>>,
    /// True if a second request was told that the session holds the lock.
    pub again: bool,
    /// The acquisition that was broken or taken over, and by whom.
    pub taken: Option<(LockToken, TakenBy)>,
    /// The asks for it. Only an exclusive grant has asks.
    pub asks: Vec<StandingAsk>,
}

/// An ask, and until when it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct StandingAsk {
    pub ask: Ask,
    pub until: Duration,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Queued {
    pub server: Uuid,
    pub until: Duration,
    pub place: Place,
}

impl Record {
    pub fn try_acquire(
        &mut self,
        key: &LockKey,
        claim: &Claim,
        rules: &Rules,
        moment: Moment,
    ) -> TryAcquire {
        let now = moment.now;
        self.forget_places(now);
        if claim.upgrades.is_some() && !self.may_upgrade(claim, now) {
            return TryAcquire::Lost(key.clone());
        }
        if let Some(answer) = self.reenter(key, claim, moment) {
            self.leaves_others(claim, moment);
            return answer;
        }
        if let Some(held) = self.in_the_way(key, claim, moment) {
            return TryAcquire::Held(held);
        }
        TryAcquire::Granted(self.grant(key, claim, rules, None, moment))
    }

    /// True if the shared lock that the claim upgrades is live, or an attempt of the claim has replaced it already.
    fn may_upgrade(&self, claim: &Claim, now: Duration) -> bool {
        self.grants.iter().any(|it| {
            let is_it = match it.mode {
                Mode::Shared => claim.upgrades == it.token,
                Mode::Exclusive => it.is_of_same_claim(claim),
            };
            is_it && it.aid == claim.aid && it.is_live(now)
        })
    }

    /// Releases the exclusive lock `from` and grants the claim.
    pub fn hand_over(
        &mut self,
        from: &Acquisition,
        claim: &Claim,
        rules: &Rules,
        moment: Moment,
    ) -> HandedOver {
        let now = moment.now;
        self.forget_places(now);
        // A lock that is taken over must be live. (A holder may hand its own lock over even when it has
        // expired.)
        let is_from = |it: &mut Grant| {
            let may_be = claim.taken.is_none() || it.is_live(now);
            it.mode == Mode::Exclusive && it.is_acquisition(&from.aid, from.token) && may_be
        };
        let given = self.grants.extract_if(.., is_from).next();
        if given.is_some() && claim.turn.is_some() && self.before(claim).is_some() {
            return HandedOver::Released;
        }
        let is_handed = |it: &Grant| it.is_acquisition(&claim.aid, claim.token) && it.is_live(now);
        if given.is_none() && !self.grants.iter().any(is_handed) {
            return HandedOver::AlreadyGone;
        }
        let taken = claim.taken.clone().map(|by| (from.token, by));
        let continued = given.filter(|given| given.aid == claim.aid);
        let lock = self.grant(&from.key, claim, rules, continued, moment);
        if let Some(grant) = self.grants.iter_mut().find(|it| it.token == lock.token) {
            grant.taken = taken;
        }
        HandedOver::To(lock)
    }

    /// Renews the leases of these sessions, for at least `ttl`. True if there was one.
    pub fn renew(&mut self, active: &[Active], ttl: Duration, now: Duration) -> bool {
        let is_named = |grant: &&mut Grant| {
            let tab = grant.tab.filter(|_| grant.mode == Mode::Exclusive);
            active.iter().any(|it| it.aid == grant.aid && it.names(tab, grant.token))
        };
        let live = self.grants.iter_mut().filter(|grant| grant.is_live(now)).filter(is_named);
        live.map(|grant| grant.renew(now, grant.ttl.max(ttl))).count() > 0
    }

    /// Removes what the removal names. True if it was there.
    pub fn remove(&mut self, removal: Removal<'_>, now: Duration) -> bool {
        self.remove_if(now, |grant| match removal {
            Removal::Release(it) => grant.is_acquisition(&it.aid, it.token),
            Removal::Retract(attempts) => {
                !grant.again && attempts.iter().any(|it| grant.is_acquisition(&it.aid, it.token))
            }
            // An expired lock is left to the sweep.
            Removal::Break { seen, .. } => grant.is_live(now) && grant.is_as_shown(seen),
        })
    }

    /// Removes these grants. True if there was one.
    pub fn remove_if(&mut self, now: Duration, goes: impl Fn(&Grant) -> bool) -> bool {
        self.forget_places(now);
        let before = self.grants.len();
        self.grants.retain(|grant| !goes(grant));
        self.grants.len() < before
    }

    /// Makes the lock expire, and keeps by whom it was broken, until it is removed. True if it is broken, perhaps by an
    /// earlier attempt.
    pub fn mark_broken(&mut self, seen: &Lock, by: &TakenBy, now: Duration) -> bool {
        let Some(grant) = self.grants.iter_mut().find(|it| it.is_as_shown(seen)) else {
            return false;
        };
        if !grant.is_live(now) {
            return grant.taken.as_ref().is_some_and(|(token, _)| Some(*token) == seen.token);
        }
        grant.expire_by(now);
        grant.taken = seen.token.map(|token| (token, by.clone()));
        true
    }

    /// Makes this exclusive lock expire within the grace period of a page. False if there is no such live lock.
    pub fn expire_in(
        &mut self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
        now: Duration,
    ) -> bool {
        let is_it = |grant: &&mut Grant| {
            grant.is_acquisition(&held.aid, held.token)
                && grant.mode == Mode::Exclusive
                && (page.is_none() || grant.page == page)
                && grant.is_live(now)
        };
        let Some(grant) = self.grants.iter_mut().find(is_it) else { return false };
        grant.leaving = grant.leaving.or(Some(grant.until));
        grant.expire_by(now + grace);
        true
    }

    pub fn is_shared(&self) -> bool {
        self.grants.first().is_some_and(|grant| grant.mode == Mode::Shared)
    }

    /// True if nothing in it needs to be kept.
    pub fn is_empty(&self, rules: &Rules) -> bool {
        self.grants.is_empty() && self.queue.is_empty() && !(rules.fenced && self.fence > 0)
    }

    /// Removes the places of servers that have vanished.
    pub fn forget_places(&mut self, now: Duration) {
        self.queue.retain(|place| place.until > now);
    }

    /// The expired grants of other sessions, except those that ended with their `max_hold`.
    pub fn of_idle_sessions(&self, than: &Aid, now: Duration) -> Vec<Grant> {
        self.grants.iter().filter(|it| it.is_of_idle_session(than, now)).cloned().collect()
    }

    /// Grants the claim, whatever else is there: an exclusive lock is removed. `before` is an earlier
    /// acquisition that continues.
    pub fn grant(
        &mut self,
        key: &LockKey,
        claim: &Claim,
        rules: &Rules,
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
        self.leaves_others(claim, moment);
        let fence = rules.fenced.then(|| self.next_fence(moment));
        let mut grant = Grant::new(claim, fence, moment);
        if let Some(before) = before {
            (grant.since, grant.until) = (before.since, before.leaving.unwrap_or(before.until));
            if claim.mode == Mode::Exclusive {
                grant.asks = before.asks;
            }
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
        // A page that was left has come back.
        mine.until = mine.leaving.take().unwrap_or(mine.until);
        mine.page = claim.page.or(mine.page);
        mine.renew(now, claim.ttl);
        mine.holder = Some(claim.holder.clone());
        let is_same = mine.is_of_same_claim(claim);
        mine.again |= !is_same;
        let lock = mine.to_lock(key, moment);
        Some(if is_same { TryAcquire::Granted(lock) } else { TryAcquire::AlreadyMine(lock) })
    }

    fn in_the_way(&self, key: &LockKey, claim: &Claim, moment: Moment) -> Option<Lock> {
        let live = || self.grants.iter().filter(|grant| grant.is_live(moment.now));
        let last = |others: &mut dyn Iterator<Item = &Grant>| {
            others.max_by_key(|grant| grant.expires()).map(|grant| grant.to_lock(key, moment))
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
    pub(in crate::store) fn place_of(&self, server: Uuid) -> Option<(Ticket, Option<Ticket>)> {
        let queued = self.queue.iter().find(|it| it.server == server)?;
        Some((queued.place.first, queued.place.writer))
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
    fn leaves_others(&mut self, claim: &Claim, moment: Moment) {
        if let Some(turn) = &claim.turn {
            self.set_place(&turn.others, moment);
        }
    }

    /// Returns the ticket that was drawn, if the waiters lack one. A server keeps its position in the list.
    pub fn set_place(&mut self, waiters: &Waiters, moment: Moment) -> Option<Ticket> {
        self.forget_places(moment.now);
        let (server, until) = (waiters.server, moment.now + waiters.lease.min(LONGEST_LEASE));
        let at = self.queue.iter().position(|it| it.server == server);
        let Some(place) = waiters.place.clone() else {
            self.queue.retain(|it| it.server != server);
            return None;
        };
        if at.is_none() && self.queue.len() >= MAX_READERS {
            return None;
        }
        let last = self.queue.iter().map(|it| it.place.last.0).max().unwrap_or(0);
        let drawn = Ticket(moment.number().max(last.max(self.ticket) + 1));
        let is_new = place.last == Ticket::NEW;
        if is_new {
            self.ticket = drawn.0;
        }
        let queued = Queued { server, until, place: place.with(drawn) };
        match at {
            Some(at) => self.queue[at] = queued,
            None => self.queue.push(queued),
        }
        is_new.then_some(drawn)
    }

    /// Of several readers: the lock of this session, or else the one that expires last.
    pub fn live(&self, aid: Option<&Aid>, now: Duration) -> Option<&Grant> {
        let live = || self.grants.iter().filter(|grant| grant.is_live(now));
        let mine = live().find(|grant| aid == Some(&grant.aid));
        mine.or_else(|| live().max_by_key(|grant| grant.expires()))
    }

    /// Higher than the last one. If all records were lost, it is still higher than any earlier token, as long as the
    /// clock is not set back.
    fn next_fence(&mut self, moment: Moment) -> FencingToken {
        self.fence = moment.number().max(self.fence + 1);
        self.fence.into()
    }
}

impl Grant {
    fn new(claim: &Claim, fence: Option<FencingToken>, moment: Moment) -> Self {
        let now = moment.now;
        let mut grant = Self {
            ts: now,
            ttl: claim.ttl,
            mode: claim.mode,
            aid: claim.aid.clone(),
            token: Some(claim.token),
            since: moment.date,
            holder: Some(claim.holder.clone()),
            tab: claim.tab,
            page: claim.page,
            fence,
            until: claim.max_hold.map(|max| now + max),
            leaving: None,
            again: false,
            taken: None,
            asks: Vec::new(),
        };
        grant.renew(now, claim.ttl);
        grant
    }

    /// True if both are the same acquisition, in whatever state.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.mode, self.token, &self.aid) == (other.mode, other.token, &other.aid)
    }

    fn is_of_same_claim(&self, claim: &Claim) -> bool {
        self.token.is_some_and(|token| token.is_of_same_claim(claim.token))
    }

    /// True if it is this lock. A foreign lock has no token, and is recognised by the date at which it was taken.
    fn is_as_shown(&self, seen: &Lock) -> bool {
        let is_it = self.aid == seen.aid && self.token == seen.token;
        is_it && (self.token.is_some() || self.since == seen.since)
    }

    pub fn is_live(&self, now: Duration) -> bool {
        self.expires() > now
    }

    pub fn expires(&self) -> Duration {
        self.ts + self.ttl
    }

    pub(in crate::store) fn is_of_idle_session(&self, other: &Aid, now: Duration) -> bool {
        self.aid != *other && self.is_idle(now)
    }

    /// True if the lock has expired because nobody has renewed it: not by a break, and not at its `max_hold`.
    pub fn is_idle(&self, now: Duration) -> bool {
        !self.is_live(now) && !self.has_reached_max_hold()
    }

    /// Renews the lease, but not beyond the end of `max_hold`, and never back in time: a test may have turned the
    /// clock back.
    pub(in crate::store) fn renew(&mut self, now: Duration, ttl: Duration) {
        self.ts = self.ts.max(now);
        self.ttl = self.until.map_or(ttl, |until| ttl.min(until.saturating_sub(now)));
    }

    /// Makes the grant expire by then, however often it is renewed.
    pub(in crate::store) fn expire_by(&mut self, at: Duration) {
        let until = self.until.map_or(at, |until| until.min(at));
        self.until = Some(until);
        self.ttl = self.ttl.min(until.saturating_sub(self.ts));
    }

    pub fn has_reached_max_hold(&self) -> bool {
        self.until.is_some_and(|until| self.expires() >= until)
    }

    pub fn is_acquisition(&self, aid: &Aid, token: LockToken) -> bool {
        self.aid == *aid && self.token == Some(token)
    }

    pub fn to_lock(&self, key: &LockKey, moment: Moment) -> Lock {
        Lock {
            key: key.clone(),
            description: None,
            mode: self.mode,
            aid: self.aid.clone(),
            token: self.token,
            tab: self.tab,
            fence: self.fence,
            holder: self.holder.clone(),
            since: self.since,
            expires_at: moment.instant_of(self.expires()),
            // The grace period of a page that has gone is no end: the page may come back.
            ends_at: self.leaving.unwrap_or(self.until).map(|until| moment.instant_of(until)),
            asks: self.asks_at(moment.now),
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
            ends_at: None,
            asks: Vec::new(),
        }
    }
}
