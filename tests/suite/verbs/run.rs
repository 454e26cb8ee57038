//! Runs one sequence, step by step, on a store and on the reference.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant, SystemTime},
};

use actix_doclock::store::PageId;
use actix_doclock::store::verbs::*;
use actix_doclock::{
    Aid, EndReason, FencingToken, Holder, Lock, LockKey, LockToken, Mode, Released, TabId,
    TryAcquire,
    store::{
        self, Acquisition, Claim, Place, Saved, Store, StoredDocument, TakenBy, TakeoverKind,
        Ticket, Turn, Waiters,
    },
};
use doclock_conformance::Shorthand;
use uuid::Uuid;

use super::{
    op::{Ask, DOCUMENTS, Kind, Op, SESSIONS, TTL, seconds},
    reference::{Answer, Asked, PLACE, Reference},
};
use crate::rig::app::{WorkItem, key};

const COLLECTIONS: &[&str] = &["workitem"];

/// A store, and the operations beyond its verbs that the test needs.
pub(super) trait Subject {
    type Store: Store;

    fn store(&self) -> &Self::Store;

    /// Makes the locks and places on this document older, if there are any.
    async fn age(&self, key: &LockKey, by: Duration);

    /// The number of lock records, live or not. `None` if the test cannot see them.
    async fn records(&self) -> Option<u64>;
}

pub(super) struct Run<'a, S> {
    on: &'a S,
    kind: Kind,
    reference: Reference,
    aids: Vec<Aid>,
    tabs: [TabId; 2],
    pages: [PageId; 2],
    /// All claims, the latest last. Their positions are the tokens of the reference.
    claims: Vec<(Asked, Claim)>,
    fences: BTreeMap<usize, FencingToken>,
    /// How many tickets were drawn.
    draws: usize,
    /// Asks for documents, and holds none.
    stranger: Aid,
    /// The session that was asked last, by document.
    asked: [Option<usize>; DOCUMENTS],
}

pub(super) fn document(n: usize) -> LockKey {
    key(["a", "b"][n])
}

impl<'a, S: Subject> Run<'a, S> {
    pub(super) fn new(on: &'a S, kind: Kind) -> Self {
        Self {
            on,
            kind,
            reference: Reference::new(kind),
            aids: (0..SESSIONS).map(|_| Aid::new()).collect(),
            tabs: [TabId::new(), TabId::new()],
            pages: [PageId::new(), PageId::new()],
            claims: Vec::new(),
            fences: BTreeMap::new(),
            draws: 0,
            stranger: Aid::new(),
            asked: [None; DOCUMENTS],
        }
    }

    pub(super) async fn all(mut self, ops: &[Op]) {
        for op in ops {
            self.step(op).await;
            self.compare().await;
        }
        self.compare_in_detail().await;
        self.clear().await;
    }

    async fn step(&mut self, op: &Op) {
        let store = self.on.store();
        match op {
            Op::Acquire(ask) => {
                let token = self.claim(ask);
                self.acquire(token).await;
            }
            Op::AcquireAgain(back, next) => {
                if let Some((asked, claim)) = self.back(*back) {
                    let token = if *next { self.next_attempt(asked, claim) } else { asked.token };
                    self.acquire(token).await;
                }
            }
            Op::Renew(who) => {
                let aids: Vec<_> = who.iter().map(|who| self.aids[*who].clone()).collect();
                let renewed = store.renew_all(COLLECTIONS[0], &aids).await.unwrap();
                assert_eq!(renewed, self.reference.renew(who), "renewed");
            }
            Op::Sweep => self.sweep().await,
            Op::Announce => self.announce().await,
            Op::ReleaseSession(who) => {
                let named = store
                    .release_all(COLLECTIONS[0], &self.aids[*who], Deadline::NONE)
                    .await
                    .unwrap();
                assert_eq!(numbers(&named), self.reference.release_session(*who), "released");
            }
            Op::End(who, revoked) => {
                let (reason, name) = if *revoked {
                    (EndReason::Revoked, "revoked")
                } else {
                    (EndReason::LoggedOut, "logged_out")
                };
                let (aid, worker) = (&self.aids[*who], Uuid::new_v4());
                let named = store
                    .end_session(aid, reason, COLLECTIONS, worker, Deadline::NONE)
                    .await
                    .unwrap();
                store.ready(aid, worker).await.unwrap();
                assert_eq!(named.more, 0);
                assert_eq!(numbers(&named.locks), self.reference.end(*who, name), "ended with");
            }
            Op::Break(n) => {
                let Some(seen) = store.inspect(&document(*n), None).await.unwrap() else { return };
                let by = TakenBy {
                    kind: TakeoverKind::Broken,
                    by: "root".to_owned(),
                    reason: "$$ROOT".to_owned(),
                };
                let broken = store.break_lock(&seen, &by).await.unwrap() == Released::Released;
                let seen = (self.who(&seen.aid), self.token(&seen).expect("its own"));
                assert_eq!(broken, self.reference.break_seen(*n, seen), "broken");
            }
            Op::AskFor(n) => self.ask_for(*n).await,
            Op::Age(n, by) => {
                self.on.age(&document(*n), seconds(*by)).await;
                self.reference.age(*n, *by);
            }
            Op::KeepPlace(back)
            | Op::Leave(back)
            | Op::Release(back, _)
            | Op::Retract(back)
            | Op::RunOutIn(back, ..)
            | Op::HandOver(back, ..)
            | Op::Save(back) => {
                if let Some((asked, claim)) = self.back(*back) {
                    self.step_of_claim(op, &asked, &claim).await;
                }
            }
        }
    }

    async fn ask_for(&mut self, n: usize) {
        let ask = actix_doclock::Ask {
            id: Uuid::new_v4(),
            aid: self.stranger.clone(),
            by: Holder::new("$stranger"),
            message: "$$ROOT".to_owned(),
            at: SystemTime::UNIX_EPOCH,
            answer: None,
        };
        let asked = self.on.store().ask(&document(n), &ask, false, Deadline::NONE).await.unwrap();
        let expected = self.reference.locks_on(n);
        match (expected.iter().next(), asked) {
            (None, store::Asked::Free) => {}
            (Some((_, (grant, _))), store::Asked::NobodyHears) if grant.shared => {}
            (Some(((who, _), (grant, _))), store::Asked::Stands { ask: stands, .. }) => {
                assert!(!grant.shared && stands.message == ask.message, "{stands:?}");
                self.asked[n] = Some(*who);
            }
            (_, other) => panic!("{other:?}, but the locks are {expected:?}"),
        }
    }

    /// A step that concerns one acquisition.
    async fn step_of_claim(&mut self, op: &Op, asked: &Asked, claim: &Claim) {
        let (store, key) = (self.on.store(), document(asked.document));
        let (aid, token) = (&claim.aid, claim.token);
        let released = |it: Released| it == Released::Released;
        match op {
            Op::KeepPlace(_) => {
                if let Some(turn) = &claim.turn {
                    let place = waiters(asked, claim, Some(turn.ticket));
                    assert_eq!(store.set_place(&key, &place, Deadline::NONE).await.unwrap(), None);
                    self.reference.keep_place(asked);
                }
            }
            Op::Leave(_) => {
                let none = waiters(asked, claim, None);
                assert_eq!(store.set_place(&key, &none, Deadline::NONE).await.unwrap(), None);
                self.reference.leave(asked);
            }
            Op::Release(_, known) => {
                let mode = if *known { claim.mode } else { Mode::Shared };
                let answer = store.release(&key, aid, token, mode).await.unwrap();
                assert_eq!(released(answer), self.reference.release(asked), "released");
            }
            Op::Retract(_) => {
                let answer = store.retract(&key, aid, &[token], claim.mode).await.unwrap();
                assert_eq!(released(answer), self.reference.retract(asked), "retracted");
            }
            Op::RunOutIn(_, page, grace) => {
                let of = page.map(|page| self.pages[page]);
                let answer = store
                    .expire_in(
                        &Acquisition::exclusive(&key, aid, token),
                        of,
                        seconds(*grace),
                        Deadline::NONE,
                    )
                    .await
                    .unwrap();
                let expected = self.reference.run_out_in(asked, *page, *grace);
                assert_eq!(released(answer), expected, "has a grace");
            }
            Op::HandOver(_, to, shared) => {
                let (tab, page) = (asked.tab, asked.page);
                let to = self.claim(&Ask {
                    who: *to,
                    document: asked.document,
                    shared: *shared,
                    upgrades: None,
                    waits: false,
                    tab,
                    page,
                    ttl: TTL,
                    max_hold: asked.max_hold,
                });
                let (to, mut claim) = self.claims[to].clone();
                // In a fair collection, the lock is taken over, not handed over.
                let by = TakenBy {
                    kind: TakeoverKind::Broken,
                    by: "root".to_owned(),
                    reason: String::new(),
                };
                claim.taken = self.kind.fair.then_some(by);
                let lock = store
                    .hand_over(&Acquisition::exclusive(&key, aid, token), &claim, Deadline::NONE)
                    .await
                    .unwrap()
                    .lock();
                assert_eq!(lock.is_some(), self.reference.hand_over(asked, &to), "handed over");
                if let Some(lock) = lock {
                    assert_eq!(self.token(&lock), Some(to.token));
                    self.rises(to.document, &lock);
                }
            }
            _ => {
                let item = WorkItem { id: key.id().to_string(), title: asked.token.to_string() };
                let item = StoredDocument::encode(store.format(), &item).unwrap();
                let until = Instant::now() + seconds(60);
                let saved = match store
                    .save(
                        &Acquisition::exclusive(&key, aid, token),
                        &item.into(),
                        Deadline::at(until),
                    )
                    .await
                    .unwrap()
                {
                    Saved::ChangedMeanwhile(field) => panic!("`{field}` of a whole document"),
                    Saved::Saved => "saved",
                    Saved::Lost => "lost",
                    Saved::DocumentGone => "gone",
                };
                assert_eq!(saved, self.reference.save(asked));
            }
        }
    }

    async fn acquire(&mut self, token: usize) {
        let (asked, claim) = self.claims[token].clone();
        let key = document(asked.document);
        let answer = self.on.store().try_acquire(&key, &claim, Deadline::NONE).await.unwrap();
        match (self.reference.acquire(&asked), &answer) {
            (Answer::Granted(token), TryAcquire::Granted(lock)) => {
                assert_eq!(self.token(lock), Some(token), "granted");
                assert_eq!((&lock.aid, lock.mode), (&claim.aid, claim.mode));
                self.rises(asked.document, lock);
            }
            (Answer::Already(token), TryAcquire::AlreadyMine(lock)) => {
                assert_eq!(
                    (self.token(lock), &lock.aid),
                    (Some(token), &claim.aid),
                    "already mine"
                );
            }
            (Answer::Held(by), TryAcquire::Held(lock)) => {
                let held = (self.who(&lock.aid), self.token(lock));
                assert!(by.contains(&held), "held by {held:?}, not by any of {by:?}");
                if self.kind.fair && asked.waits && asked.ticket.is_none() {
                    self.draw(asked, claim).await;
                }
            }
            (Answer::Lost, TryAcquire::Lost(lost)) => assert_eq!(*lost, key),
            (expected, _) => panic!("{answer:?}, not {expected:?}"),
        }
    }

    /// All attempts of the claim have this ticket from now on.
    async fn draw(&mut self, asked: Asked, claim: Claim) {
        let new = waiters(&asked, &claim, Some(Ticket::NEW));
        let drawn = self
            .on
            .store()
            .set_place(&document(asked.document), &new, Deadline::NONE)
            .await
            .unwrap();
        let others = waiters(&asked, &claim, None);
        let turn = Turn { ticket: drawn.expect("a ticket"), others };
        self.draws += 1;
        let asked = Asked { ticket: Some(self.draws), ..asked };
        self.reference.keep_place(&asked);
        for (other, claim) in self.claims.iter_mut().filter(|(it, _)| it.claim == asked.claim) {
            (other.ticket, claim.turn) = (asked.ticket, Some(turn.clone()));
        }
    }

    async fn sweep(&mut self) {
        let swept = self
            .on
            .store()
            .sweep(COLLECTIONS, Uuid::new_v4(), 1_000, Deadline::NONE)
            .await
            .unwrap();
        assert_eq!(swept.sessions, self.reference.sweep(), "sessions that became idle");
        assert!(!swept.more);
    }

    async fn announce(&mut self) {
        let (store, worker) = (self.on.store(), Uuid::new_v4());
        let ended = store.take_ends(worker, seconds(60), 1_000).await.unwrap();
        store.told(worker, &ended).await.unwrap();
        let expected = self.reference.announce();
        assert_eq!(ended.len(), expected.len(), "{ended:?}, not {expected:?}");
        for ended in ended {
            let it = &expected[&self.who(&ended.aid)];
            let told = (ended.for_good, name(ended.reason), numbers(&ended.locks));
            assert_eq!(told, (it.for_good, it.reason, it.documents.clone()), "announced");
            assert!(!ended.repeated);
        }
    }

    /// Compares the live locks, and their time left.
    async fn compare(&self) {
        let listed = self.on.store().list(COLLECTIONS[0], None, 100).await.unwrap();
        let mut seen = BTreeMap::new();
        for lock in &listed {
            let n = numbers(std::slice::from_ref(&lock.key));
            let token = self.token(lock).expect("its own");
            seen.insert((n, self.who(&lock.aid), token), lock);
        }
        let expected: Vec<_> = (0..DOCUMENTS)
            .flat_map(|n| self.reference.locks_on(n).into_iter().map(move |it| (n, it)))
            .collect();
        assert_eq!(listed.len(), expected.len(), "live: {listed:#?}, not {expected:#?}");
        for (n, ((who, token), (grant, left))) in expected {
            let lock = seen.get(&(BTreeSet::from([n]), who, token));
            let lock = lock.unwrap_or_else(|| panic!("{grant:?} on {n} is missing: {listed:#?}"));
            let (left, told) = (seconds(left), lock.expires_in());
            assert!(told <= left && told > left - seconds(40), "{told:?}, not {left:?}: {grant:?}");
            assert_eq!(lock.mode == Mode::Shared, grant.shared);
            assert!(lock.asks.is_empty() || self.asked[n] == Some(who), "{lock:?}");
            assert_eq!(lock.tab, grant.tab.map(|tab| self.tabs[tab]));
            assert_eq!(lock.fence, self.fences.get(&token).copied(), "the fence stays");
        }
    }

    /// Compares everything that a store can be asked.
    async fn compare_in_detail(&self) {
        let store = self.on.store();
        for n in 0..DOCUMENTS {
            let (key, expected) = (document(n), self.reference.locks_on(n));
            let locks = store.locks_on(key.collection(), std::slice::from_ref(&key)).await.unwrap();
            let named: BTreeSet<_> = locks
                .iter()
                .map(|it| (self.who(&it.aid), self.token(it).expect("its own")))
                .collect();
            assert_eq!(named, expected.keys().copied().collect(), "locks on {key}");
            for (who, aid) in self.aids.iter().enumerate() {
                let lock = store.inspect(&key, Some(aid)).await.unwrap();
                let seen =
                    lock.as_ref().map(|it| (self.who(&it.aid), self.token(it).expect("its own")));
                let mine = expected.keys().find(|(it, _)| *it == who);
                assert!(mine.map_or(seen.is_some() != expected.is_empty(), |it| seen == Some(*it)));
            }
            assert_eq!(store.exists(&key, Deadline::NONE).await.unwrap(), n == 0);
        }
        let title = store.load(&document(0), Deadline::NONE).await.unwrap().unwrap();
        let title = title.decode::<WorkItem>().unwrap().title;
        assert_eq!(title, self.reference.saved(0).map_or("old".to_owned(), |it| it.to_string()));
        for (who, aid) in self.aids.iter().enumerate() {
            let last = store.last_end(aid).await.unwrap().map(|last| name(last.reason));
            assert_eq!(
                last,
                self.reference.last_end(who).map(|end| end.reason),
                "last end of {who}"
            );
            let for_good = self.reference.last_end(who).is_some_and(|end| end.for_good);
            assert_eq!(store.session_ended(aid).await.unwrap().is_some(), for_good);
        }
    }

    /// Once all sessions have gone, nothing is left.
    async fn clear(self) {
        let store = self.on.store();
        for (asked, claim) in &self.claims {
            let none = waiters(asked, claim, None);
            store.set_place(&document(asked.document), &none, Deadline::NONE).await.unwrap();
        }
        for aid in &self.aids {
            store.release_all(COLLECTIONS[0], aid, Deadline::NONE).await.unwrap();
        }
        store.sweep(COLLECTIONS, Uuid::new_v4(), 1_000, Deadline::NONE).await.unwrap();
        if let (Some(records), false) = (self.on.records().await, self.kind.fenced) {
            assert_eq!(records, 0, "left behind");
        }
    }

    fn claim(&mut self, ask: &Ask) -> usize {
        let Ask { who, document, shared, upgrades, waits, tab, page, ttl, max_hold } = ask.clone();
        let upgrades = upgrades.and_then(|back| self.back(back));
        let token = self.claims.len();
        let claim = Claim {
            aid: self.aids[who].clone(),
            token: LockToken::new(),
            holder: Holder::new("$alice"),
            mode: if shared { Mode::Shared } else { Mode::Exclusive },
            ttl: seconds(ttl),
            tab: tab.map(|tab| self.tabs[tab]),
            page: page.map(|page| self.pages[page]),
            taken: None,
            max_hold: max_hold.map(seconds),
            turn: None,
            upgrades: upgrades.as_ref().map(|(_, claim)| claim.token),
        };
        let upgrades = upgrades.map(|(asked, _)| asked.token);
        let (claimed, ticket) = (token, None);
        let asked = Asked {
            token,
            claim: claimed,
            who,
            document,
            shared,
            upgrades,
            waits,
            ticket,
            tab,
            page,
            ttl,
            max_hold,
        };
        self.claims.push((asked, claim));
        token
    }

    fn next_attempt(&mut self, asked: Asked, claim: Claim) -> usize {
        let (number, mut token) = (self.claims.len(), claim.token.first_attempt());
        for _ in self.claims.iter().filter(|(it, _)| it.claim == asked.claim) {
            token = token.next_attempt();
        }
        self.claims.push((Asked { token: number, ..asked }, Claim { token, ..claim }));
        number
    }

    fn back(&self, back: usize) -> Option<(Asked, Claim)> {
        self.claims.iter().rev().nth(back).cloned()
    }

    fn who(&self, aid: &Aid) -> usize {
        self.aids.iter().position(|it| it == aid).expect("one of ours")
    }

    fn token(&self, lock: &Lock) -> Option<usize> {
        let token = lock.token?;
        let of = |(_, claim): &(Asked, Claim)| claim.token == token;
        Some(self.claims.iter().position(of).expect("one of ours"))
    }

    /// A new grant has a higher fence than all earlier ones; a repeated grant keeps its own.
    fn rises(&mut self, n: usize, lock: &Lock) {
        assert_eq!(lock.fence.is_some(), self.kind.fenced);
        let (Some(fence), Some(token)) = (lock.fence, self.token(lock)) else { return };
        let before = |it: &&usize| self.claims[**it].0.document == n && **it != token;
        let highest = self.fences.keys().filter(before).map(|it| self.fences[it]).max();
        // A token that was granted again after its expiry has a new fence.
        if self.fences.get(&token) != Some(&fence) {
            assert!(highest.is_none_or(|highest| fence > highest), "{fence} after {highest:?}");
        }
        self.fences.insert(token, fence);
    }
}

/// The place of this claim, which waits alone at a server of its own; without a ticket, no place.
fn waiters(asked: &Asked, claim: &Claim, ticket: Option<Ticket>) -> Waiters {
    let place = ticket.map(|first| Place {
        first,
        writer: (!asked.shared).then_some(first),
        last: first,
        aid: claim.aid.clone(),
        holder: claim.holder.clone(),
        mode: claim.mode,
    });
    Waiters { server: Uuid::from_u128(asked.claim as u128), place, lease: seconds(PLACE) }
}

fn numbers(keys: &[LockKey]) -> BTreeSet<usize> {
    let number = |key: &LockKey| (0..DOCUMENTS).find(|n| document(*n) == *key);
    keys.iter().map(|key| number(key).expect("one of ours")).collect()
}

fn name(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Expired => "expired",
        EndReason::Revoked => "revoked",
        _ => "logged_out",
    }
}
