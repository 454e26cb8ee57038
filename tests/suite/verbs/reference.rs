//! The behaviour of a store, written once more as plainly as possible: with lists and whole seconds.

use std::collections::{BTreeMap, BTreeSet};

use super::op::{DOCUMENTS, Kind};

/// How long a place is kept.
pub(super) const PLACE: u64 = 300;

/// A claim, with a number as its token.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) token: usize,
    /// The first attempt of the claim.
    pub(super) claim: usize,
    pub(super) who: usize,
    pub(super) document: usize,
    pub(super) shared: bool,
    /// The claim that was granted the shared lock that this one upgrades.
    pub(super) upgrades: Option<usize>,
    pub(super) waits: bool,
    /// The number of its ticket, in the order of the draws.
    pub(super) ticket: Option<usize>,
    pub(super) tab: Option<usize>,
    pub(super) page: Option<usize>,
    pub(super) ttl: u64,
    pub(super) max_hold: Option<u64>,
}

#[derive(Debug, Clone)]
pub(super) struct Grant {
    pub(super) token: usize,
    claim: usize,
    pub(super) who: usize,
    pub(super) shared: bool,
    pub(super) tab: Option<usize>,
    page: Option<usize>,
    granted: u64,
    renewed: u64,
    ttl: u64,
    max_hold: Option<u64>,
    /// The end of the grace period, if its page has left.
    grace: Option<u64>,
    /// Another request was told of the lock, or has saved under it.
    told: bool,
}

#[derive(Debug, Clone)]
struct Place {
    who: usize,
    shared: bool,
    ticket: usize,
    until: u64,
}

#[derive(Debug, Clone, Default)]
struct Document {
    /// Each document has its own clock, and making its locks older advances the clock.
    now: u64,
    grants: Vec<Grant>,
    queue: Vec<Place>,
    saved: Option<usize>,
}

#[derive(Debug, Clone)]
pub(super) struct End {
    pub(super) for_good: bool,
    pub(super) reason: &'static str,
    pub(super) documents: BTreeSet<usize>,
    announced: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    Granted(usize),
    Already(usize),
    /// Held by one of these: the holder that expires last, or the next waiter. Holders have a token.
    Held(Vec<(usize, Option<usize>)>),
    Lost,
}

#[derive(Debug, Clone)]
pub(super) struct Reference {
    fair: bool,
    documents: Vec<Document>,
    /// The sessions that lost an expired lock to another session, and on which document.
    former: BTreeSet<(usize, usize)>,
    /// Documents whose locks expired while their session had other locks.
    noted: BTreeMap<usize, BTreeSet<usize>>,
    ends: BTreeMap<usize, End>,
}

impl Grant {
    fn limit(&self) -> Option<u64> {
        let most = self.max_hold.map(|most| self.granted + most);
        most.into_iter().chain(self.grace).min()
    }

    pub(super) fn runs_out(&self) -> u64 {
        let idle_at = self.renewed + self.ttl;
        self.limit().map_or(idle_at, |limit| limit.min(idle_at))
    }

    /// It has expired although it could have been renewed, and it belongs to another session.
    fn is_of_idle_session(&self, other: usize, now: u64) -> bool {
        let by_idleness = self.limit().is_none_or(|limit| self.renewed + self.ttl < limit);
        self.runs_out() <= now && self.who != other && by_idleness
    }

    fn is_acquisition(&self, asked: &Asked) -> bool {
        (self.token, self.who) == (asked.token, asked.who)
    }
}

impl Document {
    fn is_live(&self, grant: &Grant) -> bool {
        grant.runs_out() > self.now
    }

    fn live(&self) -> impl Iterator<Item = &Grant> {
        self.grants.iter().filter(|grant| self.is_live(grant))
    }

    fn live_mut(&mut self, is_it: impl Fn(&Grant) -> bool) -> Option<&mut Grant> {
        let now = self.now;
        self.grants.iter_mut().find(|grant| grant.runs_out() > now && is_it(grant))
    }

    fn grant(&mut self, asked: &Asked) -> &mut Grant {
        let now = self.now;
        // A reader joins the other readers; all other grants are alone.
        self.grants.retain(|it| asked.shared && it.shared && it.who != asked.who);
        self.leave(asked);
        self.grants.push(Grant {
            token: asked.token,
            claim: asked.claim,
            who: asked.who,
            shared: asked.shared,
            tab: asked.tab,
            page: asked.page,
            granted: now,
            renewed: now,
            ttl: asked.ttl,
            max_hold: asked.max_hold,
            grace: None,
            told: false,
        });
        self.grants.last_mut().expect("it is there")
    }

    /// Without a ticket it has no place.
    fn leave(&mut self, asked: &Asked) {
        self.queue.retain(|place| Some(place.ticket) != asked.ticket);
    }

    fn remove(&mut self, goes: impl Fn(&Grant) -> bool) -> bool {
        let before = self.grants.len();
        self.grants.retain(|grant| !goes(grant));
        self.grants.len() < before
    }
}

impl Reference {
    pub(super) fn new(kind: Kind) -> Self {
        let documents = vec![Document::default(); DOCUMENTS];
        let (former, noted, ends) = (BTreeSet::new(), BTreeMap::new(), BTreeMap::new());
        Self { fair: kind.fair, documents, former, noted, ends }
    }

    pub(super) fn age(&mut self, document: usize, by: u64) {
        self.documents[document].now += by;
    }

    pub(super) fn acquire(&mut self, asked: &Asked) -> Answer {
        let document = &mut self.documents[asked.document];
        let now = document.now;
        document.queue.retain(|place| place.until > now);
        if let Some(shared) = asked.upgrades {
            let is_it = |it: &Grant| {
                if it.shared { it.token == shared } else { it.claim == asked.claim }
            };
            if !document.live().any(|it| it.who == asked.who && is_it(it)) {
                return Answer::Lost;
            }
        }
        let covers = |it: &Grant| it.who == asked.who && (!it.shared || asked.shared);
        if let Some(mine) = document.live_mut(covers) {
            let elsewhere = !mine.shared && mine.tab.zip(asked.tab).is_some_and(|(a, b)| a != b);
            if !elsewhere {
                (mine.renewed, mine.ttl, mine.grace) = (now, asked.ttl, None);
                mine.page = asked.page.or(mine.page);
                mine.told |= mine.claim != asked.claim;
            }
            let (token, same) = (mine.token, mine.claim == asked.claim && !elsewhere);
            document.leave(asked);
            return if same { Answer::Granted(token) } else { Answer::Already(token) };
        }
        if let Some(held) = document.in_the_way(asked) {
            return Answer::Held(held);
        }
        let before = document.grants.clone();
        document.grant(asked);
        let gone =
            before.iter().filter(|old| !document.grants.iter().any(|it| it.token == old.token));
        let idle = gone.filter(|old| old.is_of_idle_session(asked.who, now));
        self.former.extend(idle.map(|old| (old.who, asked.document)));
        Answer::Granted(asked.token)
    }

    pub(super) fn renew(&mut self, who: &[usize]) -> u64 {
        let mut renewed = 0;
        for document in &mut self.documents {
            let now = document.now;
            let mut live: Vec<_> = (document.grants.iter_mut())
                .filter(|grant| grant.runs_out() > now && who.contains(&grant.who))
                .collect();
            live.iter_mut().for_each(|grant| grant.renewed = now);
            renewed += u64::from(!live.is_empty());
        }
        renewed
    }

    /// Sets the place of a claim that has a ticket.
    pub(super) fn keep_place(&mut self, asked: &Asked) {
        let document = &mut self.documents[asked.document];
        document.leave(asked);
        let (until, Some(ticket)) = (document.now + PLACE, asked.ticket) else { return };
        let (who, shared) = (asked.who, asked.shared);
        document.queue.push(Place { who, shared, ticket, until });
    }

    pub(super) fn leave(&mut self, asked: &Asked) {
        self.documents[asked.document].leave(asked);
    }

    pub(super) fn release(&mut self, asked: &Asked) -> bool {
        self.documents[asked.document].remove(|grant| grant.is_acquisition(asked))
    }

    pub(super) fn retract(&mut self, asked: &Asked) -> bool {
        self.documents[asked.document].remove(|grant| grant.is_acquisition(asked) && !grant.told)
    }

    pub(super) fn run_out_in(&mut self, asked: &Asked, page: Option<usize>, grace: u64) -> bool {
        let document = &mut self.documents[asked.document];
        let at = document.now + grace;
        let is_it = |it: &Grant| {
            it.is_acquisition(asked) && !it.shared && (page.is_none() || it.page == page)
        };
        let grant = document.live_mut(is_it);
        grant.map(|it| it.grace = Some(it.grace.map_or(at, |before| before.min(at)))).is_some()
    }

    /// Returns whether it was handed over.
    pub(super) fn hand_over(&mut self, from: &Asked, to: &Asked) -> bool {
        let document = &mut self.documents[from.document];
        let is_from = |grant: &Grant| grant.is_acquisition(from) && !grant.shared;
        let Some(at) = document.grants.iter().position(is_from) else { return false };
        // In a fair collection this is a takeover, which only takes a live lock.
        if self.fair && !document.is_live(&document.grants[at]) {
            return false;
        }
        let before = document.grants.remove(at);
        let grant = document.grant(to);
        if before.who == to.who {
            grant.granted = before.granted;
        }
        true
    }

    pub(super) fn save(&mut self, asked: &Asked) -> &'static str {
        let document = &mut self.documents[asked.document];
        let now = document.now;
        let is_it = |grant: &Grant| grant.is_acquisition(asked) && !grant.shared;
        let Some(grant) = document.live_mut(is_it) else { return "lost" };
        if asked.document > 0 {
            return "gone";
        }
        (grant.renewed, grant.told) = (now, true);
        document.saved = Some(asked.token);
        "saved"
    }

    pub(super) fn break_seen(&mut self, document: usize, (who, token): (usize, usize)) -> bool {
        self.documents[document].remove(|grant| (grant.who, grant.token) == (who, token))
    }

    /// Returns the documents on which the session had a live lock.
    pub(super) fn release_session(&mut self, who: usize) -> BTreeSet<usize> {
        let mut named = BTreeSet::new();
        for (at, document) in self.documents.iter_mut().enumerate() {
            if document.live().any(|grant| grant.who == who) {
                named.insert(at);
            }
            document.remove(|grant| grant.who == who);
        }
        named
    }

    /// The documents whose locks the session has lost, and that no sweep has seen.
    fn take_lost(&mut self, who: usize) -> BTreeSet<usize> {
        let of = self.former.iter().filter(|(of, _)| *of == who);
        let mut lost: BTreeSet<_> = of.map(|(_, at)| *at).collect();
        self.former.retain(|(of, _)| *of != who);
        for (at, document) in self.documents.iter().enumerate() {
            let mut grants = document.grants.iter();
            // Any other session will do.
            if grants.any(|it| it.who == who && it.is_of_idle_session(usize::MAX, document.now)) {
                lost.insert(at);
            }
        }
        lost
    }

    pub(super) fn end(&mut self, who: usize, reason: &'static str) -> BTreeSet<usize> {
        let mut released = self.take_lost(who);
        released.extend(self.release_session(who));
        if let Some(end) = self.ends.get_mut(&who).filter(|end| end.for_good) {
            // Includes locks taken after the end, if the end is not announced yet.
            if !end.announced {
                end.documents.extend(&released);
            }
            return released;
        }
        let mut documents = self.noted.remove(&who).unwrap_or_default();
        // Includes the locks of an unannounced expiry.
        let idle_end = self.ends.remove(&who).filter(|end| !end.announced);
        documents.extend(idle_end.map_or(BTreeSet::new(), |end| end.documents));
        documents.extend(released);
        let end = End { for_good: true, reason, documents: documents.clone(), announced: false };
        self.ends.insert(who, end);
        documents
    }

    /// Returns how many sessions have become idle.
    pub(super) fn sweep(&mut self) -> usize {
        let mut run_out: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        let mut awake = BTreeSet::new();
        for (at, document) in self.documents.iter_mut().enumerate() {
            awake.extend(document.live().map(|grant| grant.who));
            let now = document.now;
            document.queue.retain(|place| place.until > now);
            for grant in document.grants.extract_if(.., |grant| grant.runs_out() <= now) {
                // A lock that reached its limit says nothing about its session.
                if grant.limit().is_none_or(|limit| grant.renewed + grant.ttl < limit) {
                    run_out.entry(grant.who).or_default().insert(at);
                }
            }
        }
        for (who, at) in std::mem::take(&mut self.former) {
            run_out.entry(who).or_default().insert(at);
        }
        let mut idle = 0;
        for (who, documents) in run_out {
            if awake.contains(&who) {
                self.noted.entry(who).or_default().extend(documents);
                continue;
            }
            idle += 1;
            let mut all = self.noted.remove(&who).unwrap_or_default();
            all.extend(documents);
            match self.ends.get_mut(&who) {
                Some(end) if end.for_good => {}
                Some(end) if !end.announced => end.documents.extend(all),
                _ => {
                    let (for_good, reason, announced) = (false, "expired", false);
                    self.ends.insert(who, End { for_good, reason, documents: all, announced });
                }
            }
        }
        idle
    }

    /// Takes all unannounced ends, and marks them as announced.
    pub(super) fn announce(&mut self) -> BTreeMap<usize, End> {
        let mut told = BTreeMap::new();
        for (who, end) in self.ends.iter_mut().filter(|(_, end)| !end.announced) {
            told.insert(*who, end.clone());
            end.announced = true;
        }
        told
    }

    pub(super) fn last_end(&self, who: usize) -> Option<&End> {
        self.ends.get(&who)
    }

    /// The live locks on a document, each with the time left.
    pub(super) fn locks_on(&self, document: usize) -> BTreeMap<(usize, usize), (Grant, u64)> {
        let document = &self.documents[document];
        let left = |grant: &Grant| (grant.clone(), grant.runs_out() - document.now);
        document.live().map(|grant| ((grant.who, grant.token), left(grant))).collect()
    }

    /// The claim under which the document was saved last.
    pub(super) fn saved(&self, document: usize) -> Option<usize> {
        self.documents[document].saved
    }
}

impl Document {
    fn in_the_way(&self, asked: &Asked) -> Option<Vec<(usize, Option<usize>)>> {
        let excludes = |shared: bool| !shared || !asked.shared;
        let others: Vec<_> =
            self.live().filter(|it| it.who != asked.who && excludes(it.shared)).collect();
        if let Some(last) = others.iter().map(|it| it.runs_out()).max() {
            let last = others.iter().filter(|it| it.runs_out() == last);
            return Some(last.map(|it| (it.who, Some(it.token))).collect());
        }
        // A reader does not queue for an upgrade, because the waiters wait for that reader.
        if self.live().any(|it| it.who == asked.who) {
            return None;
        }
        let waits_for_as_much = |it: &Place| asked.shared || !it.shared;
        let is_before = |it: &&Place| {
            excludes(it.shared)
                && (it.who != asked.who || !waits_for_as_much(it))
                && asked.ticket.is_none_or(|ticket| it.ticket < ticket)
        };
        let first = self.queue.iter().filter(is_before).min_by_key(|it| it.ticket);
        first.map(|it| vec![(it.who, None)])
    }
}
