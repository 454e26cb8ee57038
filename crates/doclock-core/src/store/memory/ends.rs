//! The sessions that have ended or become idle, and their announcements.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime},
};

use uuid::Uuid;

use crate::{
    ended::{EndReason, MAX_NAMED_LOCKS, SessionEnded},
    key::LockKey,
    lock::{Aid, Holder, LockToken},
    random::{self, HashMap},
    store::{LastEnd, Settled, end_state::EndState},
};

/// How many expired locks are remembered.
const MOST_EXPIRED: usize = 10_000;
/// How long an ended session is remembered.
const REMEMBER_ENDED: Duration = Duration::from_secs(24 * 60 * 60);

/// A call of this store removes locks and records their end in one step, so each of the ends is in the state
/// [`Ready`](EndState::Ready) or [`Told`](EndState::Told).
#[derive(Debug, Clone, Default)]
pub(super) struct Ends {
    of: HashMap<Aid, End>,
    /// The names in the state [`Noted`](EndState::Noted), and the end of the time for which they count.
    noted: HashMap<Aid, (Names, Duration)>,
    /// The newest acquisitions that a sweep has found expired.
    expired: VecDeque<(LockKey, LockToken)>,
    /// The size at which old ends are searched for, so that the search costs nothing on average.
    sweep_at: usize,
}

/// The locks of a session, and its holder.
#[derive(Debug, Clone, Default)]
pub(super) struct Names {
    pub(super) locks: Vec<LockKey>,
    pub(super) holder: Option<Holder>,
}

impl Names {
    fn add(&mut self, Self { locks, holder }: Self) {
        self.locks.extend(locks);
        self.locks.sort();
        self.locks.dedup();
        self.holder = self.holder.take().or(holder);
    }
}

/// All times are on the store's clock, except `shown`.
#[derive(Debug, Clone)]
struct End {
    at: Duration,
    shown: SystemTime,
    reason: EndReason,
    for_good: bool,
    event: Uuid,
    names: Names,
    state: EndState,
    /// How many workers have taken the end in order to announce it, and which worker has it until when.
    taken: u32,
    lease: Option<(Uuid, Duration)>,
}

impl End {
    fn new(reason: EndReason, for_good: bool, now: Duration) -> Self {
        Self {
            at: now,
            shown: SystemTime::now(),
            reason,
            for_good,
            event: random::uuid(),
            names: Names::default(),
            state: EndState::Ready,
            taken: 0,
            lease: None,
        }
    }

    fn is_ready(&self) -> bool {
        self.state == EndState::Ready
    }

    fn is_taken(&self, now: Duration) -> bool {
        self.lease.is_some_and(|(_, until)| until > now)
    }
}

impl Ends {
    pub(super) fn for_good(
        &mut self,
        aid: &Aid,
        reason: EndReason,
        names: Names,
        now: Duration,
    ) -> Vec<LockKey> {
        self.forget_old(now);
        let earlier = self.of.remove(aid);
        let (end, named) = match earlier {
            Some(mut end) if end.for_good => {
                // Locks that the session took after its end. They join the announcement if that is still to come.
                if end.is_ready() {
                    end.names.add(names.clone());
                }
                (end, names.locks)
            }
            earlier => {
                let mut end = End::new(reason, true, now);
                // Locks that the session lost while it was idle, if that was not announced yet.
                end.names.add(
                    earlier
                        .filter(|end| end.is_ready())
                        .map_or_else(Names::default, |end| end.names),
                );
                end.names.add(self.take_noted(aid, now));
                end.names.add(names);
                let named = end.names.locks.clone();
                (end, named)
            }
        };
        self.of.insert(aid.clone(), end);
        named
    }

    /// A page of a session has been left. Nobody is told.
    pub(super) fn page(&mut self, page: &Aid, now: Duration) {
        self.forget_old(now);
        let end = || End { state: EndState::Told, ..End::new(EndReason::LoggedOut, true, now) };
        self.of.entry(page.clone()).or_insert_with(end);
    }

    /// True if an earlier idle timeout of this session is being announced at the moment.
    pub(super) fn is_being_announced(&self, aid: &Aid, now: Duration) -> bool {
        self.of.get(aid).is_some_and(|end| end.is_ready() && end.is_taken(now))
    }

    /// Remembers for `ttl` that these locks expired while their session had others.
    pub(super) fn note(&mut self, aid: &Aid, names: Names, ttl: Duration, now: Duration) {
        let mut noted = self.take_noted(aid, now);
        noted.add(names);
        self.noted.retain(|_, (_, until)| *until > now);
        self.noted.insert(aid.clone(), (noted, now + ttl));
    }

    fn take_noted(&mut self, aid: &Aid, now: Duration) -> Names {
        let noted = self.noted.remove(aid).filter(|(_, until)| *until > now);
        noted.map_or_else(Names::default, |(names, _)| names)
    }

    pub(super) fn became_idle(&mut self, aid: &Aid, names: Names, now: Duration) {
        self.forget_old(now);
        let noted = self.take_noted(aid, now);
        match self.of.get_mut(aid) {
            Some(end) if end.for_good => {}
            Some(end) if end.is_ready() => {
                end.names.add(noted);
                end.names.add(names);
            }
            _ => {
                let mut end = End::new(EndReason::Expired, false, now);
                end.names.add(noted);
                end.names.add(names);
                self.of.insert(aid.clone(), end);
            }
        }
    }

    pub(super) fn found_expired(&mut self, locks: impl Iterator<Item = (LockKey, LockToken)>) {
        self.expired.extend(locks);
        self.expired.drain(..self.expired.len().saturating_sub(MOST_EXPIRED));
    }

    pub(super) fn has_expired(&self, key: &LockKey, token: LockToken) -> bool {
        self.expired.iter().any(|it| (&it.0, it.1) == (key, token))
    }

    pub(super) fn last(&self, aid: &Aid, now: Duration) -> Option<LastEnd> {
        let end = self.of.get(aid)?;
        let ago = now.saturating_sub(end.at);
        Some(LastEnd { reason: end.reason, for_good: end.for_good, ago })
    }

    pub(super) fn some_to_announce(&self, now: Duration) -> bool {
        self.of.values().any(|end| end.is_ready() && !end.is_taken(now))
    }

    pub(super) fn take(
        &mut self,
        worker: Uuid,
        lease: Duration,
        limit: usize,
        now: Duration,
    ) -> Vec<SessionEnded> {
        let is_mine = |end: &End| end.lease.is_some_and(|(by, _)| by == worker);
        (self.of.iter_mut())
            .filter(|(_, end)| end.is_ready() && (is_mine(end) || !end.is_taken(now)))
            .take(limit)
            .map(|(aid, end)| {
                // A repeated call by the same worker, after a lost answer, does not count.
                end.taken += u32::from(!(is_mine(end) && end.is_taken(now)));
                end.lease = Some((worker, now + lease));
                SessionEnded {
                    event: end.event,
                    aid: aid.clone(),
                    reason: end.reason,
                    for_good: end.for_good,
                    locks: end.names.locks.iter().take(MAX_NAMED_LOCKS).cloned().collect(),
                    more: end.names.locks.len().saturating_sub(MAX_NAMED_LOCKS),
                    holder: end.names.holder.clone(),
                    at: end.shown,
                    repeated: end.taken > 1,
                }
            })
            .collect()
    }

    /// Only `Told` is recorded: an end in this store is ready at once, and no end is void.
    pub(super) fn settle(
        &mut self,
        aid: &Aid,
        event: Option<Uuid>,
        worker: Uuid,
        settled: Settled,
    ) {
        if settled == Settled::Told
            && let Some(end) = self.of.get_mut(aid)
            && event.is_none_or(|event| event == end.event)
            && end.lease.is_some_and(|(by, _)| by == worker)
        {
            end.state = EndState::Told;
            end.names = Names::default();
        }
    }

    fn forget_old(&mut self, now: Duration) {
        if self.of.len() >= self.sweep_at {
            self.of.retain(|_, end| now.saturating_sub(end.at) < REMEMBER_ENDED);
            self.sweep_at = (self.of.len() * 2).max(1024);
        }
    }

    /// Moves all times forward by `by`.
    pub(super) fn shift(&mut self, by: Duration) {
        for (_, until) in self.noted.values_mut() {
            *until += by;
        }
        for end in self.of.values_mut() {
            end.at += by;
            if let Some((_, until)) = &mut end.lease {
                *until += by;
            }
        }
    }
}
