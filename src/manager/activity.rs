//! The sessions that were active here recently. For each session: when its locks are due for renewal, about how many
//! locks it has, and which locks several of its requests know.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{clock, key::LockKey, lock::Aid, store::NamedBy};

/// How many of the joined locks of a session are remembered.
const JOINED: usize = 32;
/// How many tabs of a session are remembered. A tab that is forgotten is renewed a little too often.
const TABS: usize = 128;
/// How often the application is asked whether the person of a session may keep its locks.
const ASK: Duration = Duration::from_secs(60);
/// How many left pages of a session are recorded in a minute. A person leaves fewer.
const PAGES: u32 = 120;
/// For how long a session is known to have asked for a missing document.
const REMEMBER_MISSED: Duration = Duration::from_secs(60);

/// The next renewal of each session that was active here recently.
///
/// This only limits the rate: another server may renew the same session a moment later, which costs one
/// command and changes nothing.
#[derive(Debug)]
pub(super) struct Activity {
    sessions: Mutex<ActiveSessions>,
    /// How often the locks of a session are renewed.
    interval: Duration,
}

#[derive(Debug, Default)]
struct ActiveSessions {
    of: HashMap<Aid, ActiveSession>,
    /// The size at which idle sessions are removed, so that the removal costs nothing on average.
    sweep_at: usize,
}

#[derive(Debug)]
struct ActiveSession {
    /// When the session is due for its next renewal, apart from its tabs.
    due: Instant,
    /// When each tab that was active here is due, the latest first. A token that was named instead of a tab counts as
    /// a tab.
    tabs: VecDeque<(NamedBy, Instant)>,
    /// When a tab that was not active here yet is due: at once, unless the session began here, without locks.
    unknown_tabs_due: Instant,
    /// The number of its locks at the last count, and of the locks granted here since. Other servers may
    /// have granted more. `None` if they were not counted here yet.
    counted: Option<usize>,
    granted: usize,
    /// The locks that a second request has joined here, the latest first.
    joined: VecDeque<LockKey>,
    /// When it asked for a missing document.
    missed: Option<Instant>,
    /// When the application was last asked here about all of its locks.
    asked: Option<Instant>,
    /// When the minute began, how many left pages were recorded in it, and the latest one.
    left: (Instant, u32, Option<Aid>),
}

impl ActiveSession {
    fn new(due: Instant, unknown_tabs_due: Instant) -> Self {
        let (tabs, joined) = (VecDeque::new(), VecDeque::new());
        let (asked, left) = (None, (clock::now(), 0, None));
        Self {
            due,
            tabs,
            unknown_tabs_due,
            counted: None,
            granted: 0,
            joined,
            missed: None,
            asked,
            left,
        }
    }

    fn renewed(&mut self, named: &[NamedBy], next: Instant) {
        self.due = next;
        self.tabs.retain(|(tab, _)| !named.contains(tab));
        for tab in named {
            self.tabs.push_front((*tab, next));
        }
        self.tabs.truncate(TABS);
    }
}

impl ActiveSessions {
    fn begins(&mut self, aid: &Aid, now: Instant, interval: Duration) -> &mut ActiveSession {
        if self.of.len() >= self.sweep_at {
            self.of.retain(|_, session| now < session.due);
            self.sweep_at = (self.of.len() * 2).max(1024);
        }
        self.of.entry(aid.clone()).or_insert_with(|| ActiveSession::new(now + interval, now))
    }
}

impl Activity {
    pub(super) fn new(interval: Duration) -> Self {
        Self { sessions: Mutex::default(), interval }
    }

    /// True if the session or one of these tabs is due for a renewal. The caller must then renew them; they are due
    /// again after the interval.
    pub(super) fn is_due(&self, aid: &Aid, named: &[NamedBy]) -> bool {
        let (now, interval) = (clock::now(), self.interval);
        let mut sessions = self.sessions.lock();
        let is_known = sessions.of.contains_key(aid);
        let session = sessions.begins(aid, now, interval);
        let due_of = |named: &NamedBy| {
            let tab = session.tabs.iter().find(|(tab, _)| tab == named);
            tab.map_or(session.unknown_tabs_due, |(_, due)| *due)
        };
        let is_due =
            !is_known || named.iter().map(due_of).chain([session.due]).any(|due| now >= due);
        if is_due {
            session.renewed(named, now + interval);
        }
        is_due
    }

    /// Makes each session and each tab due at once: more time has passed since their renewals than this process knows.
    pub(super) fn all_are_due(&self) {
        let now = clock::now();
        for session in self.sessions.lock().of.values_mut() {
            (session.due, session.unknown_tabs_due) = (now, now);
            session.tabs.iter_mut().for_each(|(_, due)| *due = now);
        }
    }

    /// A new session has no locks, so it is not due for a while.
    pub(super) fn session_begins(&self, aid: &Aid) {
        let (now, interval) = (clock::now(), self.interval);
        let mut sessions = self.sessions.lock();
        let session = sessions.begins(aid, now, interval);
        (session.unknown_tabs_due, session.counted) = (now + interval, Some(0));
    }

    /// An answer shows that a lock of the session has this much time left. A lock that was renewed with the
    /// others has at least the interval left while its session is active. If less is left, another server has granted
    /// the lock for a shorter ttl: the session is then due within a third of the rest. (Not at once, because a lock at
    /// the end of its `max_hold` looks the same, and no renewal helps it.)
    pub(super) fn saw(&self, aid: &Aid, left: Duration) {
        if left < self.interval
            && let Some(session) = self.sessions.lock().of.get_mut(aid)
        {
            let due = clock::now() + left / 3;
            session.due = session.due.min(due);
            session.tabs.iter_mut().for_each(|(_, tab)| *tab = due.min(*tab));
        }
    }

    /// The session was granted one more lock. True if its locks have to be counted: they never were, the session may have
    /// come a quarter of the way closer to `most`, or it has more than half of that. So a session that begins here is not
    /// counted as long as it has few locks.
    pub(super) fn granted(&self, aid: &Aid, most: usize) -> bool {
        let mut sessions = self.sessions.lock();
        let session = match sessions.of.get_mut(aid) {
            Some(session) => session,
            None => sessions.begins(aid, clock::now(), self.interval),
        };
        session.granted += 1;
        let Some(counted) = session.counted else { return true };
        let is_near = counted + session.granted > most / 2;
        is_near || session.granted > most.saturating_sub(counted) / 4
    }

    /// How many locks the session has, as far as this server knows.
    pub(super) fn believed(&self, aid: &Aid) -> usize {
        let sessions = self.sessions.lock();
        let all = |session: &ActiveSession| session.counted.unwrap_or_default() + session.granted;
        sessions.of.get(aid).map_or(0, all)
    }

    /// The session has this many locks, including those from other servers.
    pub(super) fn counted(&self, aid: &Aid, locks: usize) {
        if let Some(session) = self.sessions.lock().of.get_mut(aid) {
            (session.counted, session.granted) = (Some(locks), 0);
        }
    }

    /// A second request of the session has joined this lock. Ignored for a session that was not active here.
    pub(super) fn joined(&self, aid: &Aid, key: &LockKey) {
        let mut sessions = self.sessions.lock();
        let Some(session) = sessions.of.get_mut(aid) else { return };
        if !session.joined.contains(key) {
            session.joined.truncate(JOINED - 1);
            session.joined.push_front(key.clone());
        }
    }

    /// True if the lock should be read rather than claimed. This is a hint, never a decision: another server may have
    /// released the lock.
    pub(super) fn was_joined(&self, aid: &Aid, key: &LockKey) -> bool {
        self.sessions.lock().of.get(aid).is_some_and(|session| session.joined.contains(key))
    }

    /// The session has asked for a missing document. Ignored for a session that was not active here.
    pub(super) fn missed(&self, aid: &Aid) {
        if let Some(session) = self.sessions.lock().of.get_mut(aid) {
            session.missed = Some(clock::now());
        }
    }

    pub(super) fn has_missed(&self, aid: &Aid) -> bool {
        let missed = self.sessions.lock().of.get(aid).and_then(|session| session.missed);
        missed.is_some_and(|at| clock::since(at) < REMEMBER_MISSED)
    }

    /// True if the application has to be asked whether the person of this session may keep its locks. Ignored for a
    /// session that was not active here.
    pub(super) fn is_to_be_asked(&self, aid: &Aid) -> bool {
        let mut sessions = self.sessions.lock();
        let Some(session) = sessions.of.get_mut(aid) else { return false };
        let is_due = session.asked.is_none_or(|at| clock::since(at) >= ASK);
        if is_due {
            session.asked = Some(clock::now());
        }
        is_due
    }

    /// True if this left page of the session may be recorded. A page says several times that it is left.
    pub(super) fn may_leave(&self, aid: &Aid, page: &Aid) -> bool {
        let now = clock::now();
        let mut sessions = self.sessions.lock();
        let (since, pages, latest) = &mut sessions.begins(aid, now, self.interval).left;
        if now.duration_since(*since) >= Duration::from_secs(60) {
            (*since, *pages) = (now, 0);
        }
        if latest.as_ref() != Some(page) {
            *latest = Some(page.clone());
            *pages = pages.saturating_add(1);
        }
        *pages <= PAGES
    }

    /// The next request asks the store: the lock is gone, or may be changing.
    pub(super) fn unlearn(&self, aid: &Aid, key: &LockKey) {
        if let Some(session) = self.sessions.lock().of.get_mut(aid) {
            session.joined.retain(|joined| joined != key);
        }
    }

    /// Its renewal has failed, so the session is due again at once.
    pub(super) fn forget(&self, aid: &Aid) {
        self.sessions.lock().of.remove(aid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::TabId;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_session_is_due_once_in_an_interval_and_at_once_after_a_failure() {
        let (activity, aid) = (Activity::new(HOUR), Aid::new());
        assert!(activity.is_due(&aid, &[]));
        assert!(!activity.is_due(&aid, &[]));
        assert!(activity.is_due(&Aid::new(), &[]), "each session for itself");
        activity.forget(&aid);
        assert!(activity.is_due(&aid, &[]));
    }

    #[test]
    fn after_a_standstill_each_tab_of_a_session_is_due_for_itself() {
        let [one, two] = [NamedBy::Tab(TabId::new()), NamedBy::Tab(TabId::new())];
        let (activity, aid) = (Activity::new(HOUR), Aid::new());
        activity.session_begins(&aid);
        assert!(!activity.is_due(&aid, &[one]) && !activity.is_due(&aid, &[two]));
        activity.all_are_due();
        assert!(activity.is_due(&aid, &[one]));
        assert!(activity.is_due(&aid, &[two]));
        assert!(!activity.is_due(&aid, &[one, two]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_that_leaves_pages_by_the_thousand_has_few_of_them_recorded() {
        let (activity, aid) = (Activity::new(HOUR), Aid::new());
        for _ in 0..2 {
            let recorded = (0..1_000).filter(|_| {
                let page = Aid::new();
                let [first, again] = [(); 2].map(|()| activity.may_leave(&aid, &page));
                assert_eq!(first, again, "each page counts once");
                first
            });
            assert_eq!(recorded.count(), PAGES as usize);
            tokio::time::advance(Duration::from_secs(61)).await;
        }
        assert!(activity.may_leave(&Aid::new(), &Aid::new()), "each session for itself");
    }

    #[test]
    fn each_tab_is_due_for_itself_but_no_tab_of_a_session_that_has_just_begun() {
        let [one, two] = [NamedBy::Tab(TabId::new()), NamedBy::Tab(TabId::new())];
        let (activity, aid) = (Activity::new(HOUR), Aid::new());
        activity.session_begins(&aid);
        assert!(!activity.is_due(&aid, &[one]));
        let (activity, aid) = (Activity::new(HOUR), Aid::new());
        assert!(activity.is_due(&aid, &[one]));
        assert!(!activity.is_due(&aid, &[one]) && !activity.is_due(&aid, &[]));
        assert!(activity.is_due(&aid, &[two, one]), "another server may have granted its lock");
        assert!(!activity.is_due(&aid, &[two]));
        for _ in 0..1_000 {
            activity.is_due(&aid, &[NamedBy::Tab(TabId::new())]);
        }
        assert_eq!(activity.sessions.lock().of[&aid].tabs.len(), TABS);
    }

    #[test]
    fn locks_are_counted_ever_more_often_the_closer_their_number_is_to_the_limit() {
        let (activity, aid) = (Activity::new(HOUR), Aid::new());
        activity.is_due(&aid, &[]);
        assert!(activity.granted(&aid, 100), "another server may have granted it a hundred");
        let aid = Aid::new();
        activity.session_begins(&aid);
        let mut counted_at = Vec::new();
        for locks in 1..=101 {
            if activity.granted(&aid, 100) {
                activity.counted(&aid, locks);
                counted_at.push(locks);
            }
        }
        assert_eq!(counted_at[0], 26, "{counted_at:?}");
        assert!(counted_at.ends_with(&Vec::from_iter(51..=101)), "{counted_at:?}");
        assert!(counted_at.len() < 55, "{counted_at:?}");
    }

    #[test]
    fn idle_sessions_are_forgotten() {
        let activity = Activity::new(Duration::ZERO);
        for _ in 0..10_000 {
            activity.is_due(&Aid::new(), &[]);
        }
        assert!(activity.sessions.lock().of.len() <= 1024);
    }
}
