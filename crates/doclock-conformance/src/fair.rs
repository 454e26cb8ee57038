//! Waiters are let in in the order of their arrival.

use super::*;
use actix_doclock::store::{HandedOver, Place, Rules, Ticket, Turn, Waiters};

const LEASE: Duration = Duration::from_secs(20);

async fn fair(store: &impl Store) {
    store.prepare(COLLECTION, &Rules::new(TTL).fair(), NONE).await.unwrap();
}

/// The only waiter of a server.
#[derive(Clone)]
pub(super) struct Waits {
    claim: Claim,
    server: Uuid,
}

impl Waits {
    pub(super) fn new(mode: Mode) -> Self {
        let claim = Claim { mode, holder: Holder::new("waits"), ..claim(&Aid::new()) };
        Self { claim, server: Uuid::new_v4() }
    }

    fn ticket(&self) -> Ticket {
        self.claim.turn.as_ref().map_or(Ticket::NEW, |turn| turn.ticket)
    }

    /// Its place, with its ticket or a new one.
    pub(super) fn place(&self) -> Place {
        let Claim { aid, holder, mode, .. } = self.claim.clone();
        let first = self.ticket();
        let writer = (mode == Mode::Exclusive).then_some(first);
        Place { first, writer, last: first, aid, holder, mode }
    }

    pub(super) fn waiters(&self, place: Option<Place>) -> Waiters {
        Waiters { server: self.server, place, lease: LEASE }
    }

    async fn queues(self, store: &impl Store) -> Self {
        self.queues_for(store, &key("a")).await
    }

    /// Draws a ticket.
    pub(super) async fn queues_for(mut self, store: &impl Store, key: &LockKey) -> Self {
        let drawn = store.set_place(key, &self.waiters(Some(self.place())), NONE).await.unwrap();
        let (ticket, others) = (drawn.expect("a ticket"), self.waiters(None));
        self.claim.turn = Some(Turn { ticket, others });
        self
    }

    /// Renews its place.
    async fn keeps(&self, store: &impl Store) {
        let place = self.waiters(Some(self.place()));
        let drawn = store.set_place(&key("a"), &place, NONE).await.unwrap();
        assert_eq!(drawn, None, "it has a ticket");
    }

    async fn gives_up(&self, store: &impl Store) {
        assert_eq!(store.set_place(&key("a"), &self.waiters(None), NONE).await.unwrap(), None);
    }

    /// The same waiter, while this one waits at the same server, with its ticket or a later one.
    fn beside(mut self, other: &Self) -> Self {
        let place = Place { last: self.ticket(), ..other.place() };
        self.claim.turn = Some(Turn { ticket: self.ticket(), others: other.waiters(Some(place)) });
        self
    }
}

/// The result of a claim: its own lock, or the lock or the place that is in its way.
async fn tries(store: &impl Store, claim: &Claim) -> Result<Lock, Lock> {
    match store.try_acquire(&key("a"), claim, NONE).await.unwrap() {
        TryAcquire::Granted(lock) | TryAcquire::AlreadyMine(lock) => Ok(lock),
        TryAcquire::Held(lock) => Err(lock),
    }
}

async fn gets(store: &impl Store, claim: &Claim) {
    let lock = tries(store, claim).await.unwrap_or_else(|held| panic!("refused by {held:?}"));
    assert_eq!((lock.token, lock.mode), (Some(claim.token), claim.mode));
}

async fn refused(store: &impl Store, claim: &Claim) -> Lock {
    tries(store, claim).await.expect_err("let in")
}

async fn leaves(store: &impl Store, claim: &Claim) {
    let released = store.release(&key("a"), &claim.aid, claim.token, claim.mode).await.unwrap();
    assert_eq!(released, Released::Released);
}

/// A document with a holder and a queue of waiters in these modes, each at a server of its own.
async fn queue<S: Subject>(store: &S::Store, modes: &[Mode]) -> (Claim, Vec<Waits>) {
    fair(store).await;
    let holder = claim(&Aid::new());
    gets(store, &holder).await;
    let mut waiting = Vec::new();
    for mode in modes {
        let waiter = Waits::new(*mode).queues(store).await;
        let held = refused(store, &waiter.claim).await;
        assert_eq!(held.aid, holder.aid, "the refusal names the holder");
        waiting.push(waiter);
    }
    assert!(waiting.is_sorted_by(|a, b| a.ticket() < b.ticket()), "each ticket is a later one");
    (holder, waiting)
}

use Mode::{Exclusive as X, Shared as R};

cases! {
    needs [Fair];

    async fn waiters_are_let_in_in_the_order_of_their_tickets<S: Subject>(subject: &S) {
        let store = subject.store();
        let (mut holder, waiting) = queue::<S>(store, &[X, X, X]).await;
        for (turn, next) in waiting.iter().enumerate() {
            leaves(store, &holder).await;
            for later in waiting[turn + 1..].iter().rev() {
                assert_eq!(refused(store, &later.claim).await.aid, next.claim.aid);
            }
            gets(store, &next.claim).await;
            gets(store, &next.claim).await;
            holder = next.claim.clone();
        }
        leaves(store, &holder).await;
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn a_reserved_document_names_the_first_waiter<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X, R]).await;
        subject.age(&key("a"), 5 * SECOND).await;
        leaves(store, &holder).await;
        assert!(store.inspect(&key("a"), None).await.unwrap().is_none(), "nobody holds it");
        assert_eq!(store.list(COLLECTION, None, 10).await.unwrap().len(), 0);
        for other in [claim(&Aid::new()), waiting[1].claim.clone()] {
            let seen = refused(store, &other).await;
            assert_eq!((&seen.aid, seen.token, seen.mode), (&waiting[0].claim.aid, None, X));
            assert_eq!(seen.holder.clone().unwrap().label, "waits");
            let left = seen.expires_in();
            assert!(left <= LEASE - 5 * SECOND && left > SECOND, "{left:?}");
            assert_eq!(store.break_lock(&seen, &taken()).await.unwrap(), Released::AlreadyGone);
        }
        gets(store, &waiting[0].claim).await;
    }

    async fn nobody_overtakes_the_queue<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X]).await;
        leaves(store, &holder).await;
        for mode in [X, R] {
            let quick = Claim { mode, ..claim(&Aid::new()) };
            assert_eq!(refused(store, &quick).await.aid, waiting[0].claim.aid);
        }
        // The former holder does not overtake the queue either.
        let again = Claim { token: LockToken::new(), ..holder };
        assert_eq!(refused(store, &again).await.aid, waiting[0].claim.aid);
        gets(store, &waiting[0].claim).await;
        let late = Waits::new(X).queues(store).await;
        refused(store, &late.claim).await;
        subject.age(&key("a"), TTL).await;
        late.keeps(store).await;
        gets(store, &late.claim).await;
    }

    async fn a_place_lasts_as_long_as_it_is_kept<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X, X]).await;
        for _ in 0..3 {
            subject.age(&key("a"), LEASE / 2).await;
            for waiter in waiting.iter().rev() {
                waiter.keeps(store).await;
            }
        }
        leaves(store, &holder).await;
        assert_eq!(refused(store, &waiting[1].claim).await.aid, waiting[0].claim.aid);
        gets(store, &waiting[0].claim).await;
    }

    async fn a_repeated_draw_gives_a_later_ticket_and_one_place<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X]).await;
        let twice = Waits::new(X);
        let first = twice.clone().queues(store).await.ticket();
        let second = twice.queues(store).await;
        let third = Waits::new(X).queues(store).await;
        assert!(waiting[0].ticket() < first && first < second.ticket());
        assert!(second.ticket() < third.ticket());
        leaves(store, &holder).await;
        gets(store, &waiting[0].claim).await;
        leaves(store, &waiting[0].claim).await;
        assert_eq!(refused(store, &third.claim).await.aid, second.claim.aid);
        gets(store, &second.claim).await;
        leaves(store, &second.claim).await;
        gets(store, &third.claim).await;
    }

    async fn the_claims_of_one_waiter_have_one_turn<S: Subject>(subject: &S) {
        for mode in [X, R] {
            let store = subject.store();
            let (holder, waiting) = queue::<S>(store, &[mode]).await;
            let first = &waiting[0].claim;
            let next = Claim { token: first.token.next_attempt(), ..first.clone() };
            let later = Claim { token: LockToken::new(), ..first.clone() };
            for attempt in [&next, &later] {
                assert_eq!(refused(store, attempt).await.aid, holder.aid);
            }
            leaves(store, &holder).await;
            assert_eq!(refused(store, &claim(&Aid::new())).await.aid, first.aid);
            gets(store, &later).await;
            leaves(store, &later).await;
            // The place is gone with the grant.
            granted(store, &key("a"), &holder.aid).await;
            drop(store.release_all(COLLECTION, &holder.aid, NONE).await.unwrap());

            // A late attempt is granted, and the waiter's next claim is told of that lock. Giving the
            // attempt back must leave the lock.
            gets(store, first).await;
            assert_eq!(tries(store, &later).await.unwrap().token, Some(first.token), "{mode:?}");
            let back = store.retract(&key("a"), &first.aid, &[first.token], mode).await.unwrap();
            assert_eq!(back, Released::AlreadyGone, "{mode:?}");
            leaves(store, first).await;
        }
    }

    async fn a_place_that_is_not_kept_is_passed_over_until_it_is_set_again<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X, X]).await;
        subject.age(&key("a"), LEASE / 2).await;
        waiting[1].keeps(store).await;
        leaves(store, &holder).await;
        let seen = refused(store, &waiting[1].claim).await;
        assert_eq!(seen.aid, waiting[0].claim.aid, "the place is still kept");
        subject.age(&key("a"), LEASE / 2).await;
        gets(store, &waiting[1].claim).await;
        // The lost place comes back where it was.
        let third = Waits::new(X).queues(store).await;
        waiting[0].keeps(store).await;
        leaves(store, &waiting[1].claim).await;
        assert_eq!(refused(store, &third.claim).await.aid, waiting[0].claim.aid);
    }

    async fn a_place_that_is_given_up_blocks_nobody<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X, X]).await;
        waiting[0].gives_up(store).await;
        waiting[0].gives_up(store).await;
        Waits::new(X).gives_up(store).await;
        assert_eq!(token_on(store, &key("a")).await, Some(holder.token), "the lock is not touched");
        leaves(store, &holder).await;
        waiting[1].gives_up(store).await;
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn readers_at_the_front_of_the_queue_go_together<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[R, R, X, R]).await;
        let [first, second, writer, last] = &waiting[..] else { panic!("four wait") };
        leaves(store, &holder).await;
        gets(store, &second.claim).await;
        let seen = refused(store, &last.claim).await;
        assert_eq!(seen.aid, writer.claim.aid, "it waits behind a writer");
        let seen = refused(store, &writer.claim).await;
        assert_eq!(seen.aid, second.claim.aid, "the reader holds the lock");
        gets(store, &first.claim).await;
        let newcomer = Claim { mode: R, ..claim(&Aid::new()) };
        assert_eq!(refused(store, &newcomer).await.aid, writer.claim.aid);
        leaves(store, &first.claim).await;
        leaves(store, &second.claim).await;
        assert_eq!(refused(store, &last.claim).await.aid, writer.claim.aid);
        gets(store, &writer.claim).await;
        leaves(store, &writer.claim).await;
        gets(store, &last.claim).await;
        gets(store, &newcomer).await;
    }

    async fn the_waiters_of_one_server_share_a_place_and_keep_the_common_order<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[X, X]).await;
        let [first, second] = &waiting[..] else { panic!("two wait") };
        // The third waiter is at the server of the first one.
        let third = Waits { server: first.server, ..Waits::new(X) };
        let both = Place { last: Ticket::NEW, ..first.place() };
        let drawn = store.set_place(&key("a"), &first.waiters(Some(both)), NONE).await.unwrap();
        let turn = Turn { ticket: drawn.expect("a ticket"), others: third.waiters(None) };
        let third = Waits { claim: Claim { turn: Some(turn), ..third.claim }, ..third };
        assert!(second.ticket() < third.ticket());
        leaves(store, &holder).await;
        assert_eq!(refused(store, &second.claim).await.aid, first.claim.aid);
        gets(store, &first.clone().beside(&third).claim).await;
        assert_eq!(refused(store, &third.claim).await.aid, first.claim.aid, "it holds the lock");
        leaves(store, &first.claim).await;
        assert_eq!(refused(store, &third.claim).await.aid, second.claim.aid);
        gets(store, &second.claim).await;
        leaves(store, &second.claim).await;
        let seen = refused(store, &claim(&Aid::new())).await;
        assert_eq!(seen.aid, third.claim.aid, "the place of the first names the third one now");
        gets(store, &third.claim).await;
        leaves(store, &third.claim).await;
        granted(store, &key("a"), &Aid::new()).await;
    }

    async fn readers_do_not_overtake_a_writer_behind_a_reader_of_its_server<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[R]).await;
        let reader = &waiting[0];
        let early = Waits::new(R).queues(store).await;
        let place = Place { writer: Some(Ticket::NEW), last: Ticket::NEW, ..reader.place() };
        let drawn = store.set_place(&key("a"), &reader.waiters(Some(place)), NONE).await.unwrap();
        let late = Waits::new(R).queues(store).await;
        let turn = Some(Turn { ticket: drawn.expect("a ticket"), others: reader.waiters(None) });
        let writer = Claim { turn, ..claim(&Aid::new()) };
        leaves(store, &holder).await;
        gets(store, &early.claim).await;
        assert_eq!(refused(store, &late.claim).await.aid, reader.claim.aid, "a writer is with it");
        gets(store, &reader.claim).await;
        leaves(store, &reader.claim).await;
        leaves(store, &early.claim).await;
        gets(store, &writer).await;
    }

    #[needs(HandOver)]
    async fn a_handover_passes_nobody_over<S: Subject>(subject: &S) {
        let store = subject.store();
        for mode in [X, R] {
            let (holder, waiting) = queue::<S>(store, &[X, mode]).await;
            let [first, second] = &waiting[..] else { panic!("two wait") };
            let held = Acquisition::exclusive(&key("a"), &holder.aid, holder.token);
            let released = store.hand_over(&held, &second.claim, NONE).await.unwrap();
            assert!(matches!(released, HandedOver::Released), "{released:?}");
            let again = store.hand_over(&held, &second.claim, NONE).await.unwrap();
            assert!(matches!(again, HandedOver::AlreadyGone), "{again:?}");
            let seen = refused(store, &second.claim).await;
            assert_eq!((seen.aid, seen.token), (first.claim.aid.clone(), None));
            let holder = Waits::new(X);
            let ahead = Turn { ticket: Ticket(0), others: holder.waiters(None) };
            let holder = Claim { turn: Some(ahead), ..holder.claim };
            gets(store, &holder).await;
            let held = Acquisition::exclusive(&key("a"), &holder.aid, holder.token);
            for _ in 0..2 {
                let handed = store.hand_over(&held, &first.claim, NONE).await.unwrap();
                let lock = handed.lock().expect("its turn");
                assert_eq!((lock.token, lock.mode), (Some(first.claim.token), X));
            }
            let held = Acquisition::exclusive(&key("a"), &first.claim.aid, first.claim.token);
            let lock = store.hand_over(&held, &second.claim, NONE).await.unwrap().lock().expect("its turn");
            assert_eq!((lock.token, lock.mode), (Some(second.claim.token), mode));
            leaves(store, &second.claim).await;
            let free = granted(store, &key("a"), &holder.aid).await;
            let _ = store.release(&key("a"), &holder.aid, free, X).await.unwrap();
        }
    }

    async fn reentry_and_upgrades_do_not_queue<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[R, X]).await;
        let again = Claim { token: LockToken::new(), ..holder.clone() };
        assert_eq!(tries(store, &again).await.unwrap().token, Some(holder.token));
        leaves(store, &holder).await;
        gets(store, &waiting[0].claim).await;
        let again = Claim { token: LockToken::new(), ..waiting[0].claim.clone() };
        assert_eq!(tries(store, &again).await.unwrap().token, Some(waiting[0].claim.token));
        let upgrade =
            Claim { mode: X, token: LockToken::new(), turn: None, ..waiting[0].claim.clone() };
        gets(store, &upgrade).await;
        leaves(store, &upgrade).await;
        gets(store, &waiting[1].claim).await;
    }

    async fn the_place_of_a_session_is_not_in_its_own_way<S: Subject>(subject: &S) {
        for mode in [X, R] {
            let subject = &S::fresh().await;
            let store = subject.store();
            let (holder, waiting) = queue::<S>(store, &[mode, X]).await;
            // A claim from another tab of the first waiter: another waiter is ahead of it.
            let first = &waiting[0].claim;
            let other_tab = Claim { token: LockToken::new(), turn: None, ..first.clone() };
            leaves(store, &holder).await;
            assert_eq!(refused(store, &other_tab).await.aid, waiting[1].claim.aid);
            waiting[1].gives_up(store).await;
            gets(store, &other_tab).await;
            assert_eq!(tries(store, first).await.unwrap().token, Some(other_tab.token));
            leaves(store, &other_tab).await;
            granted(store, &key("a"), &Aid::new()).await;
        }
        let _ = subject;
    }

    async fn a_session_that_waits_for_less_is_in_its_own_way<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, waiting) = queue::<S>(store, &[R]).await;
        let reader = &waiting[0].claim;
        let writes = Claim { mode: X, token: LockToken::new(), turn: None, ..reader.clone() };
        leaves(store, &holder).await;
        refused(store, &writes).await;
        gets(store, reader).await;
        gets(store, &writes).await;
    }

    #[needs(Sessions)]
    async fn places_outlive_the_lock_however_it_ends<S: Subject>(subject: &S) {
        for how in ["break", "end", "release", "sweep"] {
            let subject = &S::fresh().await;
            let store = subject.store();
            let (holder, waiting) = queue::<S>(store, &[X]).await;
            match how {
                "break" => {
                    let seen = store.inspect(&key("a"), None).await.unwrap().unwrap();
                    assert_eq!(store.break_lock(&seen, &taken()).await.unwrap(), Released::Released);
                }
                "end" => drop(end(store, &holder.aid, EndReason::LoggedOut).await),
                "release" => drop(store.release_all(COLLECTION, &holder.aid, NONE).await.unwrap()),
                _ => {
                    let place = Some(waiting[0].place());
                    let long = Waiters { lease: 2 * TTL, ..waiting[0].waiters(place) };
                    store.set_place(&key("a"), &long, NONE).await.unwrap();
                    subject.age(&key("a"), TTL).await;
                    assert_eq!(sweep(store, 100).await.sessions, 1);
                }
            }
            let seen = refused(store, &claim(&Aid::new())).await;
            assert_eq!((seen.aid, seen.token), (waiting[0].claim.aid.clone(), None), "{how}");
            gets(store, &waiting[0].claim).await;
        }
        let _ = subject;
    }

    #[needs(Sessions)]
    async fn a_document_reserved_for_a_vanished_waiter_is_swept<S: Subject>(subject: &S) {
        let store = subject.store();
        let (holder, _) = queue::<S>(store, &[X, R]).await;
        leaves(store, &holder).await;
        sweep(store, 100).await;
        subject.age(&key("a"), LEASE).await;
        let swept = sweep(store, 100).await;
        assert_eq!((swept.sessions, swept.announcements, swept.more), (0, false, false));
        assert_eq!(sweep(store, 100).await.next, None, "nothing is left");
        granted(store, &key("a"), &Aid::new()).await;
    }

    #[needs(Sessions, Fenced)]
    async fn fair_and_fenced_go_together<S: Subject>(subject: &S) {
        let store = subject.store();
        store.prepare(COLLECTION, &Rules::new(TTL).fair().fenced(), NONE).await.unwrap();
        let holder = claim(&Aid::new());
        let first = tries(store, &holder).await.unwrap().fence;
        let waiting = Waits::new(R).queues(store).await;
        leaves(store, &holder).await;
        refused(store, &claim(&Aid::new())).await;
        let second = tries(store, &waiting.claim).await.unwrap().fence;
        assert!(second > first);
        let writer = Waits::new(X).queues(store).await;
        refused(store, &writer.claim).await;
        leaves(store, &waiting.claim).await;
        subject.age(&key("a"), LEASE).await;
        sweep(store, 100).await;
        assert_eq!(sweep(store, 100).await.next, None);
        assert!(tries(store, &claim(&Aid::new())).await.unwrap().fence > second);
    }

    async fn without_a_fair_queue_nobody_has_a_place<S: Subject>(subject: &S) {
        let store = subject.store();
        let holder = claim(&Aid::new());
        gets(store, &holder).await;
        let waiting = Waits::new(X);
        let place = waiting.waiters(Some(waiting.place()));
        assert_eq!(store.set_place(&key("a"), &place, NONE).await.unwrap(), None);
        waiting.gives_up(store).await;
        leaves(store, &holder).await;
        granted(store, &key("a"), &Aid::new()).await;
    }
}
