//! Waiters get the lock in the order of their arrival.

use super::*;
use doclock_core::store::{Place, Rules, Ticket, Turn, Waiters};

const LEASE: Duration = Duration::from_secs(200);

/// The only waiter of a server.
#[derive(Clone)]
pub(super) struct Waits {
    claim: Claim,
    server: Uuid,
}

impl Asks for Waits {
    fn as_claim(&self) -> Claim {
        self.claim.clone()
    }
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
        let writer = (mode == Exclusive).then_some(first);
        Place { first, writer, last: first, aid, holder, mode }
    }

    pub(super) fn waiters(&self, place: Option<Place>) -> Waiters {
        Waiters { server: self.server, place, lease: LEASE }
    }

    /// Another claim of the waiter's session, without a turn.
    fn another(&self, mode: Mode) -> Claim {
        Claim { mode, token: LockToken::new(), turn: None, ..self.claim.clone() }
    }

    /// The same waiter, with a ticket.
    fn with(mut self, ticket: Ticket) -> Self {
        self.claim.turn = Some(Turn { ticket, others: self.waiters(None) });
        self
    }

    /// The same waiter, while this one waits at the same server, with its ticket or a later one.
    fn beside(mut self, other: &Self) -> Self {
        let place = Place { last: self.ticket(), ..other.place() };
        self.claim.turn = Some(Turn { ticket: self.ticket(), others: other.waiters(Some(place)) });
        self
    }
}

impl<S: Subject> Steps<S> {
    async fn is_fair(&self) {
        self.prepare(COLLECTION, &Rules::new(TTL).fair(), NONE).await.unwrap();
    }

    /// Sets the place of the waiter's server.
    pub(super) async fn sets(&self, id: &str, of: &Waits, place: Option<Place>) -> Option<Ticket> {
        self.set_place(&key(id), &of.waiters(place), NONE).await.unwrap()
    }

    /// The waiter draws a ticket.
    pub(super) async fn queues(&self, id: &str, waiter: Waits) -> Waits {
        let drawn = self.sets(id, &waiter, Some(waiter.place())).await;
        waiter.with(drawn.expect("a ticket"))
    }

    async fn waits(&self, mode: Mode) -> Waits {
        self.queues("a", Waits::new(mode)).await
    }

    /// The waiter renews its place.
    async fn keeps(&self, waiter: &Waits) {
        assert_eq!(self.sets("a", waiter, Some(waiter.place())).await, None, "it has a ticket");
    }

    async fn gives_up(&self, waiter: &Waits) {
        assert_eq!(self.sets("a", waiter, None).await, None);
    }

    async fn gets(&self, who: &impl Asks) -> Lock {
        self.granted("a", who).await
    }

    /// The claim is refused, because of the other one.
    async fn waits_for(&self, who: &impl Asks, other: &impl Asks) -> Lock {
        let seen = self.held("a", who).await;
        assert_eq!(seen.aid, other.as_claim().aid, "another session is in the way: {seen:?}");
        seen
    }

    async fn leaves(&self, who: &impl Asks) {
        let Claim { aid, token, mode, .. } = who.as_claim();
        let released = self.release(&key("a"), &aid, token, mode).await.unwrap();
        assert_eq!(released, Released::Released);
    }

    /// The lock is granted to `who` when `before` leaves.
    async fn follows(&self, who: &impl Asks, before: &impl Asks) {
        self.leaves(before).await;
        self.gets(who).await;
    }

    /// A holder, and waiters in these modes, each at a server of its own.
    async fn queue<const N: usize>(&self, modes: [Mode; N]) -> (Claim, [Waits; N]) {
        self.is_fair().await;
        let holder = claim(&Aid::new());
        self.gets(&holder).await;
        let mut waiting = Vec::new();
        for mode in modes {
            let waiter = self.waits(mode).await;
            self.waits_for(&waiter, &holder).await;
            waiting.push(waiter);
        }
        assert!(waiting.is_sorted_by(|a, b| a.ticket() < b.ticket()), "each ticket is a later one");
        (holder, waiting.try_into().unwrap_or_else(|_| panic!("one waiter for each mode")))
    }
}

cases! {
    tests fair($);
    needs [Fair];

    async fn waiters_are_let_in_in_the_order_of_their_tickets(store) {
        let (mut holder, waiting) = store.queue([Exclusive, Exclusive, Exclusive]).await;
        for (turn, next) in waiting.iter().enumerate() {
            store.leaves(&holder).await;
            for later in waiting[turn + 1..].iter().rev() {
                store.waits_for(later, next).await;
            }
            store.gets(next).await;
            store.gets(next).await;
            holder = next.as_claim();
        }
        store.follows(&Aid::new(), &holder).await;
    }

    async fn a_reserved_document_names_the_first_waiter(store) {
        let (holder, [first, second]) = store.queue([Exclusive, Shared]).await;
        store.age("a", 5 * TICK).await;
        store.leaves(&holder).await;
        assert!(store.lock_on("a").await.is_none(), "nobody holds it");
        assert_eq!(store.all().await.len(), 0);
        for other in [claim(&Aid::new()), second.as_claim()] {
            let seen = store.waits_for(&other, &first).await;
            assert_eq!((seen.token, seen.mode), (None, Exclusive));
            assert_eq!(seen.holder.as_ref().unwrap().label, "waits");
            let left = seen.expires_in();
            assert!(left <= LEASE - 5 * TICK && left > TICK, "{left:?}");
            assert_eq!(store.breaks(&seen).await, Released::AlreadyGone);
        }
        store.gets(&first).await;
    }

    async fn nobody_overtakes_the_queue(store) {
        let (holder, [first]) = store.queue([Exclusive]).await;
        store.leaves(&holder).await;
        store.waits_for(&Aid::new(), &first).await;
        store.waits_for(&reading(&Aid::new()), &first).await;
        // The former holder does not overtake the queue either.
        store.waits_for(&holder.aid, &first).await;
        store.gets(&first).await;
        let late = store.waits(Exclusive).await;
        store.waits_for(&late, &first).await;
        store.age("a", TTL).await;
        store.keeps(&late).await;
        store.gets(&late).await;
    }

    async fn a_repeated_draw_gives_a_later_ticket_and_one_place(store) {
        let (holder, [first]) = store.queue([Exclusive]).await;
        let twice = Waits::new(Exclusive);
        let earlier = store.queues("a", twice.clone()).await.ticket();
        let second = store.queues("a", twice).await;
        let third = store.waits(Exclusive).await;
        assert!(first.ticket() < earlier && earlier < second.ticket());
        assert!(second.ticket() < third.ticket());
        store.follows(&first, &holder).await;
        store.leaves(&first).await;
        store.waits_for(&third, &second).await;
        store.gets(&second).await;
        store.follows(&third, &second).await;
    }

    async fn the_claims_of_one_waiter_have_one_turn(store) {
        for mode in [Exclusive, Shared] {
            let (holder, [waiter]) = store.queue([mode]).await;
            let first = &waiter.as_claim();
            let next = Claim { token: first.token.next_attempt(), ..first.clone() };
            let later = Claim { token: LockToken::new(), ..first.clone() };
            for attempt in [&next, &later] {
                store.waits_for(attempt, &holder).await;
            }
            store.leaves(&holder).await;
            store.waits_for(&Aid::new(), first).await;
            store.gets(&later).await;
            store.leaves(&later).await;
            // The place is gone with the grant.
            store.gets(&holder.aid).await;
            store.releases_all(&holder.aid).await;

            // A late attempt is granted, and the waiter's next claim is told of that lock. Giving the
            // attempt back must leave the lock.
            let late = store.gets(first).await;
            assert_eq!(store.reenters("a", &later).await.token, late.token, "{mode:?}");
            assert_eq!(store.retracts(&late).await, Released::AlreadyGone, "{mode:?}");
            store.leaves(first).await;
        }
    }

    async fn a_place_lasts_as_long_as_it_is_kept_and_comes_back_where_it_was(store) {
        let (holder, [first, second]) = store.queue([Exclusive, Exclusive]).await;
        for _ in 0..3 {
            store.age("a", LEASE / 2).await;
            store.keeps(&second).await;
            store.keeps(&first).await;
        }
        store.age("a", LEASE / 2).await;
        store.keeps(&second).await;
        store.leaves(&holder).await;
        store.waits_for(&second, &first).await;
        store.age("a", LEASE / 2).await;
        store.gets(&second).await;
        let third = store.waits(Exclusive).await;
        store.keeps(&first).await;
        store.leaves(&second).await;
        store.waits_for(&third, &first).await;
        store.gets(&first).await;
    }

    async fn a_place_that_is_given_up_blocks_nobody(store) {
        let (holder, [first, second]) = store.queue([Exclusive, Exclusive]).await;
        for waiter in [&first, &first, &Waits::new(Exclusive)] {
            store.gives_up(waiter).await;
        }
        assert_eq!(store.token_on("a").await, Some(holder.token), "the lock is not touched");
        store.leaves(&holder).await;
        store.gives_up(&second).await;
        store.gets(&Aid::new()).await;
    }

    async fn readers_at_the_front_of_the_queue_go_together(store) {
        let (holder, waiting) = store.queue([Shared, Shared, Exclusive, Shared]).await;
        let [first, second, writer, last] = &waiting;
        store.follows(second, &holder).await;
        store.waits_for(last, writer).await;
        store.waits_for(writer, second).await;
        store.gets(first).await;
        let newcomer = reading(&Aid::new());
        store.waits_for(&newcomer, writer).await;
        store.leaves(first).await;
        store.leaves(second).await;
        store.waits_for(last, writer).await;
        store.gets(writer).await;
        store.follows(last, writer).await;
        store.gets(&newcomer).await;
    }

    async fn the_waiters_of_one_server_share_a_place_and_keep_the_common_order(store) {
        let (holder, [first, second]) = store.queue([Exclusive, Exclusive]).await;
        let both = Place { last: Ticket::NEW, ..first.place() };
        let drawn = store.sets("a", &first, Some(both)).await;
        // The third waiter is at the server of the first one.
        let third = Waits { server: first.server, ..Waits::new(Exclusive) };
        let third = third.with(drawn.expect("a ticket"));
        assert!(second.ticket() < third.ticket());
        store.leaves(&holder).await;
        store.waits_for(&second, &first).await;
        store.gets(&first.clone().beside(&third)).await;
        store.waits_for(&third, &first).await;
        store.leaves(&first).await;
        store.waits_for(&third, &second).await;
        store.gets(&second).await;
        store.leaves(&second).await;
        // The place of the first waiter names the third one now.
        store.waits_for(&Aid::new(), &third).await;
        store.gets(&third).await;
        store.follows(&Aid::new(), &third).await;
    }

    async fn readers_do_not_overtake_a_writer_behind_a_reader_of_its_server(store) {
        let (holder, [reader]) = store.queue([Shared]).await;
        let early = store.waits(Shared).await;
        let place = Place { writer: Some(Ticket::NEW), last: Ticket::NEW, ..reader.place() };
        let drawn = store.sets("a", &reader, Some(place)).await;
        let late = store.waits(Shared).await;
        let writer = Waits { server: reader.server, ..Waits::new(Exclusive) };
        let writer = writer.with(drawn.expect("a ticket"));
        store.follows(&early, &holder).await;
        // A writer is with that reader.
        store.waits_for(&late, &reader).await;
        store.gets(&reader).await;
        store.leaves(&reader).await;
        store.follows(&writer, &early).await;
    }

    #[needs(HandOver)]
    async fn a_handover_passes_nobody_over(store) {
        for mode in [Exclusive, Shared] {
            let (holder, [first, second]) = store.queue([Exclusive, mode]).await;
            let held = store.gets(&holder).await;
            let released = store.hands_over(&held, &second).await;
            assert!(matches!(released, HandedOver::Released), "{released:?}");
            let again = store.hands_over(&held, &second).await;
            assert!(matches!(again, HandedOver::AlreadyGone), "{again:?}");
            assert_eq!(store.waits_for(&second, &first).await.token, None);
            let ahead = Waits::new(Exclusive).with(Ticket(0));
            let held = store.gets(&ahead).await;
            for _ in 0..2 {
                let lock = store.hands_over(&held, &first).await.lock().expect("its turn");
                assert_eq!((lock.token, lock.mode), (Some(first.claim.token), Exclusive));
            }
            let held = store.gets(&first).await;
            let lock = store.hands_over(&held, &second).await.lock().expect("its turn");
            assert_eq!((lock.token, lock.mode), (Some(second.claim.token), mode));
            store.leaves(&second).await;
            let free = store.gets(&Aid::new()).await;
            store.releases(&free).await;
        }
    }

    async fn reentry_and_upgrades_do_not_queue(store) {
        let (holder, [reader, writer]) = store.queue([Shared, Exclusive]).await;
        let again = store.reenters("a", &holder.aid).await;
        assert_eq!(again.token, Some(holder.token));
        store.follows(&reader, &holder).await;
        let again = Claim { token: LockToken::new(), ..reader.as_claim() };
        assert_eq!(store.reenters("a", &again).await.token, Some(reader.claim.token));
        let upgrade = reader.another(Exclusive);
        store.gets(&upgrade).await;
        store.follows(&writer, &upgrade).await;
    }

    async fn the_place_of_a_session_is_not_in_its_own_way(store) {
        for mode in [Exclusive, Shared] {
            let store = &store.another().await;
            let (holder, [first, second]) = store.queue([mode, Exclusive]).await;
            // A claim from another tab of the first waiter: another waiter is ahead of it.
            let other_tab = first.another(mode);
            store.leaves(&holder).await;
            store.waits_for(&other_tab, &second).await;
            store.gives_up(&second).await;
            store.gets(&other_tab).await;
            assert_eq!(store.reenters("a", &first).await.token, Some(other_tab.token));
            store.follows(&Aid::new(), &other_tab).await;
        }
    }

    async fn a_session_that_waits_for_less_is_in_its_own_way(store) {
        let (holder, [reader]) = store.queue([Shared]).await;
        let writes = reader.another(Exclusive);
        store.leaves(&holder).await;
        store.waits_for(&writes, &reader).await;
        store.gets(&reader).await;
        store.gets(&writes).await;
    }

    #[needs(Sessions)]
    async fn places_outlive_the_lock_however_it_ends(store) {
        for how in WAYS {
            let store = &store.another().await;
            let (holder, [waiter]) = store.queue([Exclusive]).await;
            let held = store.gets(&holder).await;
            let place = Some(waiter.place());
            let long = Waiters { lease: 2 * TTL, ..waiter.waiters(place) };
            store.set_place(&key("a"), &long, NONE).await.unwrap();
            store.loses(&held, "a", how).await;
            let seen = store.waits_for(&Aid::new(), &waiter).await;
            assert_eq!(seen.token, None, "{how}");
            store.gets(&waiter).await;
        }
    }

    #[needs(Sessions)]
    async fn a_document_reserved_for_a_vanished_waiter_is_swept(store) {
        let (holder, _) = store.queue([Exclusive, Shared]).await;
        store.leaves(&holder).await;
        store.sweeps().await;
        store.age("a", LEASE).await;
        store.finds_nobody_idle().await;
        assert_eq!(store.sweeps().await.next, None, "nothing is left");
        store.gets(&Aid::new()).await;
    }

    #[needs(Sessions, Fenced)]
    async fn fair_and_fenced_go_together(store) {
        store.prepare(COLLECTION, &Rules::new(TTL).fair().fenced(), NONE).await.unwrap();
        let first = store.gets(&Aid::new()).await;
        let waiter = store.waits(Shared).await;
        store.releases(&first).await;
        store.waits_for(&Aid::new(), &waiter).await;
        let second = store.gets(&waiter).await;
        assert!(second.fence > first.fence);
        let writer = store.waits(Exclusive).await;
        store.waits_for(&writer, &waiter).await;
        store.leaves(&waiter).await;
        store.age("a", LEASE).await;
        store.sweeps().await;
        assert_eq!(store.sweeps().await.next, None);
        assert!(store.gets(&Aid::new()).await.fence > second.fence);
    }

    async fn without_a_fair_queue_nobody_has_a_place(store, alice) {
        let held = store.gets(alice).await;
        let waiter = Waits::new(Exclusive);
        assert_eq!(store.sets("a", &waiter, Some(waiter.place())).await, None);
        store.gives_up(&waiter).await;
        store.releases(&held).await;
        store.gets(&Aid::new()).await;
    }
}
