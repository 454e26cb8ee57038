//! The checker: what a history must never show. Pure functions, fast for any length.
//!
//! An operation of unknown outcome may have happened or not, so it proves nothing; only what was
//! answered counts.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::history::{Event, Line, Moment};

// By their paths, because the simulation (tests/sim) has this module by its path, too.
#[path = "check/saves.rs"]
mod saves;
#[cfg(test)]
#[path = "check/tests.rs"]
mod tests;

/// What is stored in the end, for each key that was saved.
pub(crate) type Stored = BTreeMap<String, Vec<String>>;

/// What can be relied upon while it was recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Clocks {
    /// All nodes agree, more or less.
    Agree,
    /// A node's clock is minutes off: leases may end early or late, saves and fences must hold.
    Jump,
}

/// What was found.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) grants: usize,
    pub(crate) saves: usize,
    pub(crate) refused_saves: usize,
    pub(crate) releases: usize,
    pub(crate) unknown: usize,
    /// Sessions that held a lock and were never heard of again.
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
    /// When the answer was there: from then on its holder believes in it.
    answered: Moment,
    /// The last moment at which its holder believed in it.
    believed: Moment,
    /// Told to be gone, or given back: whatever was believed, not after this.
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

/// A save with its outcome.
#[derive(Debug)]
struct Save<'a> {
    key: &'a str,
    token: &'a str,
    id: &'a str,
    value: u64,
    began: Moment,
    /// When it was answered, if it was saved.
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

/// Checks also that idle sessions were announced; for a history after which nothing is left.
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
    /// The token, when it began, and whether it released something.
    releases: Vec<(&'a str, Moment)>,
    /// Sessions of which the listener was told that they are idle, and with which locks.
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
                        // An acquisition that its session comes back to.
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

    /// In the order of their answers.
    fn by_key(&self) -> BTreeMap<&str, Vec<&Grant<'a>>> {
        let mut keys: BTreeMap<&str, Vec<&Grant<'a>>> = BTreeMap::new();
        for grant in &self.grants {
            keys.entry(grant.key).or_default().push(grant);
        }
        keys
    }

    /// Who held a lock and has never been heard of again, whatever took the lock from it, is announced with
    /// the lock. Says how many those are.
    fn idle_sessions_are_announced(&self, violations: &mut Vec<String>) -> usize {
        let idle: Vec<_> = (self.grants.iter())
            .filter(|grant| grant.over.is_none() && !grant.aid.is_empty())
            .collect();
        let silent = idle.iter().filter(|it| !self.announced.contains(&(it.aid, it.key)));
        violations.extend(silent.map(|grant| {
            format!("{}: the idle holder of {} was announced to nobody", grant.key, grant.token)
        }));
        idle.len()
    }

    /// At most once for each grant, and not when somebody else had it already.
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

/// Somebody else who asked after `mine` was granted, was granted what excludes it, and had the
/// answer before that moment.
fn successor<'g>(mine: &Grant<'_>, of_key: &[&'g Grant<'g>], by: Moment) -> Option<&'g Grant<'g>> {
    let after = of_key.partition_point(|grant| grant.answered <= mine.answered);
    of_key[after..]
        .iter()
        .take_while(|grant| grant.answered < by)
        .find(|grant| grant.asked > mine.answered && grant.excludes(mine))
        .copied()
}

/// The holders that have believed longest are in the way of each new one.
fn never_two_at_once(grants: &[&Grant<'_>], violations: &mut Vec<String>) {
    let (mut exclusive, mut any): (Option<&Grant<'_>>, Option<&Grant<'_>>) = (None, None);
    let later = |longest: Option<&Grant<'_>>, grant: &Grant<'_>| {
        longest.is_none_or(|longest| grant.ends() > longest.ends())
    };
    // One that had run out when its answer came, after a pause, say, nobody has believed in.
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

/// Who asked after the other's answer has the higher fence; and no fence is given twice.
fn fences_rise(grants: &[&Grant<'_>], violations: &mut Vec<String>) {
    let mut fenced: Vec<_> =
        grants.iter().filter_map(|grant| Some((grant.fence?, *grant))).collect();
    fenced.sort_by_key(|(fence, grant)| (*fence, grant.asked));
    // From the highest down: the earliest answer among all that are higher.
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
