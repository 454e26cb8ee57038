//! The actual lock record, step by step, and the announcements that listeners are still owed.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::time::Duration;

use actix_doclock::{Aid, LockKey, LockToken, SessionEnded, store::OnRecord};

/// The reason why a grant may have disappeared in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Why<'a> {
    /// It was given back, broken or handed over, or its session was ended.
    Removed,
    /// This session was granted a lock.
    Granted(&'a Aid),
    /// It had expired.
    Swept,
    /// A transaction has committed. It touched the lock some time ago, and has blocked all others since
    /// then.
    Committed,
}

/// Part of the primary's state: a failover reverts it with the rest.
#[derive(Debug, Clone, Default)]
pub(crate) struct Truth {
    grants: Vec<OnRecord>,
    /// By session: locks that have expired and are no longer on record, and were not announced.
    untold: BTreeMap<Aid, BTreeMap<LockKey, Expired>>,
    /// The same for sessions that lived on by another lock. They are announced only by a sweep that
    /// sees them after that lock is gone too.
    lived_on: BTreeMap<Aid, BTreeMap<LockKey, Expired>>,
    /// Sessions that have logged out. If a late duplicate of a request later locks something for such a
    /// session, that is not announced again.
    ended: BTreeSet<Aid>,
}

/// A lock that was live until then.
#[derive(Debug, Clone, Copy)]
struct Expired {
    until: Duration,
    token: LockToken,
}

impl From<&OnRecord> for Expired {
    fn from(grant: &OnRecord) -> Self {
        Self { until: grant.until, token: grant.token }
    }
}

/// The knowledge that a failover does not revert: the announced sessions, and those that may be
/// announced.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    /// Sessions that were idle at a sweep since their last announcement.
    idle: BTreeSet<Aid>,
    /// The documents that sessions have lost by expiry, and that no idle end has named since.
    expired: BTreeSet<(Aid, LockKey)>,
    events: BTreeMap<uuid::Uuid, usize>,
    ended: BTreeSet<Aid>,
}

impl Truth {
    /// The record after a step. Returns the violation, if there is one.
    pub(crate) fn now_is(
        &mut self,
        grants: Vec<OnRecord>,
        why: Why<'_>,
        clock: Duration,
    ) -> Option<String> {
        let revived = grants.iter().filter(|new| new.until > clock).find_map(|new| {
            let same = self.grants.iter().find(|it| (&it.key, it.token) == (&new.key, new.token));
            let before = same.filter(|it| it.until <= clock && why != Why::Committed)?;
            let (key, token) = (&new.key, new.token);
            Some(format!(
                "{key:?}: at {clock:?} {token} has come back to life, until {:?} instead of {:?}: {why:?}",
                new.until, before.until,
            ))
        });
        let is_there =
            |it: &&OnRecord| grants.iter().any(|new| (&new.key, new.token) == (&it.key, it.token));
        for gone in self.grants.iter().filter(|it| !is_there(it)) {
            let by_own_session = why == Why::Granted(&gone.aid);
            let is_idle = gone.until <= clock && !gone.at_max_hold;
            let has_ended = self.ended.contains(&gone.aid);
            if is_idle && why != Why::Removed && !by_own_session && !has_ended {
                let of_session = self.untold.entry(gone.aid.clone()).or_default();
                of_session.insert(gone.key.clone(), gone.into());
            }
        }
        self.grants = grants;
        if !self.untold.is_empty() {
            // A session that has come back may become idle again, and is then announced.
            let live: BTreeSet<_> =
                self.grants.iter().filter(|it| it.until > clock).map(|it| &it.aid).collect();
            let (lived_on, untold) =
                take(&mut self.untold).into_iter().partition(|(aid, _)| live.contains(aid));
            self.untold = untold;
            let lived_on: BTreeMap<_, BTreeMap<_, _>> = lived_on;
            for (aid, keys) in lived_on {
                self.lived_on.entry(aid).or_default().extend(keys);
            }
        }
        revived
    }

    pub(crate) fn live(&self, clock: Duration) -> impl Iterator<Item = &OnRecord> {
        self.grants.iter().filter(move |it| it.until > clock)
    }

    /// Expired locks, on record or not, by session; without sessions that have a live lock.
    fn idle_sessions(&self, clock: Duration) -> BTreeMap<&Aid, BTreeMap<&LockKey, Expired>> {
        let mut all: BTreeMap<&Aid, BTreeMap<&LockKey, Expired>> = BTreeMap::new();
        for (aid, keys) in &self.untold {
            all.entry(aid).or_default().extend(keys.iter().map(|(key, it)| (key, *it)));
        }
        for it in self.grants.iter().filter(|it| it.until <= clock && !it.at_max_hold) {
            all.entry(&it.aid).or_default().insert(&it.key, it.into());
        }
        all.retain(|aid, _| {
            !self.ended.contains(aid) && !self.live(clock).any(|it| it.aid == **aid)
        });
        all
    }

    /// The sessions that must be announced, each with the document that expired last, and idle by the
    /// store's clock since then. A grant to a late duplicate of a request, which no caller heard of,
    /// obliges nobody.
    pub(crate) fn owed(
        &self,
        clock: Duration,
        was_heard_of: impl Fn(LockToken) -> bool,
    ) -> Vec<(Aid, LockKey, Duration)> {
        let idle_sessions = self.idle_sessions(clock);
        let last = idle_sessions.into_iter().filter_map(|(aid, keys)| {
            let heard_of = keys.into_iter().filter(|(_, it)| was_heard_of(it.token));
            let (key, last) = heard_of.max_by_key(|(_, it)| it.until)?;
            Some((aid.clone(), key.clone(), clock.saturating_sub(last.until)))
        });
        last.collect()
    }

    /// A listener was called.
    pub(crate) fn told(&mut self, ended: &SessionEnded) {
        for lost in [&mut self.untold, &mut self.lived_on] {
            let Some(keys) = lost.get_mut(&ended.aid) else { continue };
            // Locks that expired before that belong to the same idle period, or were forgotten with their
            // ttl. Later ones belong to the next idle period, which may be over before this one is announced.
            let told = keys.iter().filter(|(key, _)| ended.locks.contains(key));
            let told = told.map(|(_, it)| it.until).max();
            keys.retain(|_, it| !ended.for_good && told.is_none_or(|told| it.until > told));
            if keys.is_empty() {
                lost.remove(&ended.aid);
            }
        }
    }

    /// The session's own logout names these locks. Returns the violation, if it leaves one out that the session has lost
    /// and that no end has told.
    pub(crate) fn ended(
        &mut self,
        aid: &Aid,
        named: &[LockKey],
        clock: Duration,
    ) -> Option<String> {
        let untold = self.untold.remove(aid).unwrap_or_default();
        if !self.ended.insert(aid.clone()) {
            return None;
        }
        let of_session = self.grants.iter().filter(|it| it.aid == *aid);
        let on_record = of_session.filter(|it| it.until > clock || !it.at_max_hold);
        let mut lost = untold.into_keys().chain(on_record.map(|it| it.key.clone()));
        let missing = lost.find(|key| !named.contains(key))?;
        Some(format!(
            "{aid:?} was ended at {clock:?} without naming {missing:?}, which it had lost"
        ))
    }
}

impl Heard {
    /// The state that a sweep sees.
    pub(crate) fn swept(&mut self, truth: &Truth, clock: Duration) {
        for it in truth.grants.iter().filter(|it| it.until <= clock) {
            self.expired.insert((it.aid.clone(), it.key.clone()));
        }
        for (aid, keys) in truth.idle_sessions(clock) {
            self.expired.extend(keys.into_keys().map(|key| (aid.clone(), key.clone())));
            self.idle.insert(aid.clone());
        }
        for (aid, keys) in &truth.lived_on {
            if !truth.live(clock).any(|it| it.aid == *aid) {
                self.expired.extend(keys.keys().map(|key| (aid.clone(), key.clone())));
                self.idle.insert(aid.clone());
            }
        }
    }

    /// The violation in this announcement, if there is one.
    pub(crate) fn of(&mut self, ended: &SessionEnded) -> Option<String> {
        let times = self.events.entry(ended.event).or_default();
        *times += 1;
        if ended.for_good {
            self.ended.insert(ended.aid.clone());
        }
        if ended.for_good || *times > 1 {
            return None;
        }
        if !self.idle.remove(&ended.aid) {
            return Some(format!("{:?} was announced as idle, and was not", ended.aid));
        }
        // A lock that was told belongs to no other end, unless the session loses it once more.
        let mut wrong = ended.locks.clone();
        wrong.retain(|key| !self.expired.remove(&(ended.aid.clone(), key.clone())));
        let wrong = wrong.first()?;
        Some(format!("{:?} was announced with {wrong}, which it did not lose", ended.aid))
    }

    pub(crate) fn has_ended(&self, aid: &Aid) -> bool {
        self.ended.contains(aid)
    }
}

#[test]
fn an_announcement_forgets_only_the_locks_of_its_own_idle_period() {
    let (aid, [one, two]) = (Aid::new(), ["1", "2"].map(|id| LockKey::new("page", id).unwrap()));
    let lost = |secs| Expired { until: Duration::from_secs(secs), token: LockToken::new() };
    let lost = BTreeMap::from([(one.clone(), lost(1)), (two.clone(), lost(2))]);
    let mut truth = Truth { lived_on: [(aid.clone(), lost)].into(), ..Truth::default() };
    let mut ended = SessionEnded {
        event: uuid::Uuid::nil(),
        aid: aid.clone(),
        holder: None,
        reason: actix_doclock::EndReason::Expired,
        for_good: false,
        locks: vec![one],
        more: 0,
        at: std::time::SystemTime::UNIX_EPOCH,
        repeated: false,
    };
    // The session came back, lost the second lock, and became idle again before the first announcement was heard.
    truth.told(&ended);
    assert!(truth.lived_on[&aid].keys().eq([&two]));
    let mut heard = Heard { events: [(uuid::Uuid::nil(), 1)].into(), ..Heard::default() };
    heard.swept(&truth, Duration::from_secs(3));
    (ended.event, ended.locks) = (uuid::Uuid::max(), vec![two]);
    assert_eq!(heard.of(&ended), None);
    truth.told(&ended);
    assert!(truth.lived_on.is_empty());
}
