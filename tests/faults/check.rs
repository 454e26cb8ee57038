//! The checker: conditions that no history may violate. Pure functions, fast for a history of any
//! length.
//!
//! An operation of unknown outcome may or may not have happened, so it proves nothing. Only answered
//! operations count.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::history::{Event, Line, Moment};

// The path is explicit because the simulation (tests/sim) includes this module by its path.
#[path = "check/saves.rs"]
mod saves;
#[cfg(test)]
#[path = "check/tests.rs"]
mod tests;

/// The final stored state of each key that was saved.
pub(crate) type Stored = BTreeMap<String, Vec<String>>;

/// The assumption about clocks while the history was recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Clocks {
    /// All nodes roughly agree.
    Agree,
    /// One node's clock is minutes off. Leases may end early or late; saves and fences must hold.
    Jump,
}

/// The findings.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) grants: usize,
    pub(crate) saves: usize,
    pub(crate) refused_saves: usize,
    pub(crate) releases: usize,
    pub(crate) unknown: usize,
    /// Sessions that held a lock and then did nothing more.
    pub(crate) idle: usize,
    pub(crate) violations: Vec<String>,
}

impl Report {
    pub(crate) fn operations(&self) -> usize {
        self.grants + self.saves + self.refused_saves + self.releases + self.unknown
    }
}

/// One grant, as its holder saw it.
#[derive(Debug)]
struct Grant<'a> {
    key: &'a str,
    aid: &'a str,
    token: &'a str,
    shared: bool,
    fence: Option<u64>,
    asked: Moment,
    /// When the answer arrived. From then on the holder believes in the lock.
    answered: Moment,
    /// The last moment at which its holder believed in it.
    believed: Moment,
    /// When the lock was reported lost or was given back. Belief ends here at the latest.
    over: Option<Moment>,
}

impl Grant<'_> {
    fn ends(&self) -> Moment {
        self.over.map_or(self.believed, |over| over.min(self.believed))
    }

    fn excludes(&self, other: &Self) -> bool {
        !(self.shared && other.shared)
    }
}

/// A save and its outcome.
#[derive(Debug)]
struct Save<'a> {
    key: &'a str,
    token: &'a str,
    id: &'a str,
    value: u64,
    began: Moment,
    /// When it was acknowledged, if it was saved.
    saved: Option<Moment>,
}

/// Checks everything.
pub(crate) fn check(lines: &[Line], stored: &Stored, clocks: Clocks) -> Report {
    let (mut report, history) = Parsed::new(lines);
    let violations = &mut report.violations;
    for grants in history.by_key().values() {
        if clocks == Clocks::Agree {
            never_two_at_once(grants, violations);
        }
        fences_rise(grants, violations);
    }
    history.releases_free_their_own(violations);
    saves::are_in_order(&history.saves, violations);
    saves::are_of_the_holder(&history.saves, &history.grants, violations);
    saves::are_stored(&history.saves, stored, violations);
    report
}

/// Also checks that idle sessions were announced. For a history whose locks have all gone.
pub(crate) fn check_to_the_end(lines: &[Line], stored: &Stored) -> Report {
    let mut report = check(lines, stored, Clocks::Agree);
    let (_, history) = Parsed::new(lines);
    report.idle = history.idle_sessions_are_announced(&mut report.violations);
    report
}

#[derive(Debug, Default)]
struct Parsed<'a> {
    grants: Vec<Grant<'a>>,
    saves: Vec<Save<'a>>,
    /// For each release: the token, when it began, and whether it released anything.
    releases: Vec<(&'a str, Moment)>,
    /// Sessions that were announced to the listener as idle, each with the lock's token.
    announced: HashSet<(&'a str, &'a str)>,
}

impl<'a> Parsed<'a> {
    fn new(lines: &'a [Line]) -> (Report, Self) {
        let (mut report, mut it) = (Report::default(), Self::default());
        let mut began: HashMap<(&str, u64), &Line> = HashMap::new();
        let mut saves: HashMap<(&str, u64), usize> = HashMap::new();
        let mut by_token: HashMap<&str, usize> = HashMap::new();
        for line in lines {
            let op = (line.process.as_str(), line.op);
            let asked = began.get(&op).map_or(line.at, |line| line.at);
            match &line.event {
                Event::AcquireBegan { .. } => {
                    began.insert(op, line);
                }
                Event::ReleaseBegan { token } => {
                    began.insert(op, line);
                    it.believe(&by_token, token, |grant| grant.over(line.at));
                }
                Event::Granted { key, aid, token, shared, fence, until } => {
                    report.grants += 1;
                    if let Some(&known) = by_token.get(token.as_str()) {
                        // Its session comes back to an acquisition that it already has.
                        it.grants[known].believes(*until);
                        continue;
                    }
                    by_token.insert(token, it.grants.len());
                    let (answered, believed) = (line.at, *until);
                    let (shared, fence, over) = (*shared, *fence, None);
                    it.grants.push(Grant {
                        key,
                        aid,
                        token,
                        shared,
                        fence,
                        asked,
                        answered,
                        believed,
                        over,
                    });
                }
                Event::Believed { token } => {
                    it.believe(&by_token, token, |grant| grant.believes(line.at));
                }
                Event::Renewed { token, until } => {
                    it.believe(&by_token, token, |grant| grant.believes(*until));
                }
                Event::Lost { token } => {
                    it.believe(&by_token, token, |grant| grant.over(line.at));
                }
                Event::SaveBegan { key, token, id, value } => {
                    saves.insert(op, it.saves.len());
                    let (value, began) = (*value, line.at);
                    it.saves.push(Save { key, token, id, value, began, saved: None });
                }
                Event::Saved => {
                    report.saves += 1;
                    it.saves[saves[&op]].saved = Some(line.at);
                }
                Event::NotSaved => report.refused_saves += 1,
                Event::Released => {
                    report.releases += 1;
                    if let Some(Event::ReleaseBegan { token }) = began.get(&op).map(|l| &l.event) {
                        it.releases.push((token, asked));
                    }
                }
                Event::AlreadyGone => report.releases += 1,
                Event::Unknown { .. } => report.unknown += 1,
                Event::Idle { aid, keys } => {
                    it.announced.extend(keys.iter().map(|key| (aid.as_str(), key.as_str())));
                }
                Event::Held | Event::Said(_) => {}
            }
        }
        (report, it)
    }

    fn believe(
        &mut self,
        by_token: &HashMap<&str, usize>,
        token: &str,
        learns: impl FnOnce(&mut Grant<'a>),
    ) {
        if let Some(&grant) = by_token.get(token) {
            learns(&mut self.grants[grant]);
        }
    }

    /// The grants of each key, in the order of their answers.
    fn by_key(&self) -> BTreeMap<&str, Vec<&Grant<'a>>> {
        let mut keys: BTreeMap<&str, Vec<&Grant<'a>>> = BTreeMap::new();
        for grant in &self.grants {
            keys.entry(grant.key).or_default().push(grant);
        }
        keys
    }

    /// If a holder has done nothing more, its session is announced with the lock, whatever took the
    /// lock from it. Returns the number of those sessions.
    fn idle_sessions_are_announced(&self, violations: &mut Vec<String>) -> usize {
        let idle: Vec<_> = (self.grants.iter())
            .filter(|grant| grant.over.is_none() && !grant.aid.is_empty())
            .collect();
        let unannounced = idle.iter().filter(|it| !self.announced.contains(&(it.aid, it.key)));
        violations.extend(unannounced.map(|grant| {
            format!("{}: the idle holder of {} was announced to nobody", grant.key, grant.token)
        }));
        idle.len()
    }

    /// A grant is released at most once, and not when another session already has the lock.
    fn releases_free_their_own(&self, violations: &mut Vec<String>) {
        let mut freed: HashMap<&str, usize> = HashMap::new();
        for (token, _) in &self.releases {
            *freed.entry(token).or_default() += 1;
        }
        let twice = freed.iter().filter(|(_, times)| **times > 1);
        violations
            .extend(twice.map(|(token, times)| format!("{token} was released {times} times")));
        let keys = self.by_key();
        let grants: HashMap<&str, &Grant<'_>> = self.grants.iter().map(|g| (g.token, g)).collect();
        for (token, began) in &self.releases {
            let Some(mine) = grants.get(token) else { continue };
            if let Some(next) = successor(mine, &keys[mine.key], *began) {
                violations.push(format!(
                    "{}: {token} was released although {} had it by then",
                    mine.key, next.token
                ));
            }
        }
    }
}

impl Grant<'_> {
    fn believes(&mut self, at: Moment) {
        self.believed = self.believed.max(at);
    }

    fn over(&mut self, at: Moment) {
        self.over = Some(self.over.map_or(at, |over| over.min(at)));
    }
}

/// A grant that excludes `mine`, was asked for after `mine` was granted, and was answered before `by`.
fn successor<'g>(mine: &Grant<'_>, of_key: &[&'g Grant<'g>], by: Moment) -> Option<&'g Grant<'g>> {
    let after = of_key.partition_point(|grant| grant.answered <= mine.answered);
    of_key[after..]
        .iter()
        .take_while(|grant| grant.answered < by)
        .find(|grant| grant.asked > mine.answered && grant.excludes(mine))
        .copied()
}

/// For each new grant, only the earlier holders that believed longest need to be checked.
fn never_two_at_once(grants: &[&Grant<'_>], violations: &mut Vec<String>) {
    let (mut exclusive, mut any): (Option<&Grant<'_>>, Option<&Grant<'_>>) = (None, None);
    let later = |longest: Option<&Grant<'_>>, grant: &Grant<'_>| {
        longest.is_none_or(|longest| grant.ends() > longest.ends())
    };
    // A lock that had expired when its answer came, for example after a pause, was never believed in.
    for grant in grants.iter().filter(|grant| grant.ends() > grant.answered) {
        let before = if grant.shared { exclusive } else { any };
        if let Some(before) = before.filter(|before| before.ends() > grant.answered) {
            violations.push(format!(
                "{}: {} was granted {:.3} ms before {} was over",
                grant.key,
                grant.token,
                (before.ends() - grant.answered) as f64 / 1e6,
                before.token,
            ));
        }
        if !grant.shared && later(exclusive, grant) {
            exclusive = Some(grant);
        }
        if later(any, grant) {
            any = Some(grant);
        }
    }
}

/// A grant that was asked for after another one's answer has the higher fence, and no fence is given
/// twice.
fn fences_rise(grants: &[&Grant<'_>], violations: &mut Vec<String>) {
    let mut fenced: Vec<_> =
        grants.iter().filter_map(|grant| Some((grant.fence?, *grant))).collect();
    fenced.sort_by_key(|(fence, grant)| (*fence, grant.asked));
    // From the highest fence down: keeps the earliest answer among all higher fences.
    let mut earliest: Option<&Grant<'_>> = None;
    for (n, (fence, grant)) in fenced.iter().enumerate().rev() {
        if let Some(higher) = earliest.filter(|higher| higher.answered < grant.asked) {
            violations.push(format!(
                "{}: {} has the fence {fence}, not above that of {} before it",
                grant.key, grant.token, higher.token
            ));
        }
        if n > 0 && fenced[n - 1].0 == *fence {
            violations.push(format!("{}: the fence {fence} was given twice", grant.key));
        }
        if earliest.is_none_or(|earliest| grant.answered < earliest.answered) {
            earliest = Some(grant);
        }
    }
}
