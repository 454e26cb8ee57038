//! The queue of a document in a fair collection: one place for each server that has waiters.

use mongodb::bson::{Bson, Document, doc};
use uuid::Uuid;

use crate::{
    key::LockId,
    lock::Mode,
    store::{
        Claim, MAX_READERS, Place, Ticket, Waiters,
        mongo::{
            Call,
            codec::{self, literal, millis},
            error::Result,
            record::by_id,
            settle::{LONGEST_LEASE, filtered, live_places, settle},
        },
    },
};

impl Call<'_> {
    // With waiters, findAndModify returns: the ticket in the place of the server, and it is a new one if
    // the waiters lacked one. No ticket → the queue is full. Nothing → impossible, because an upsert returns the
    // document. Error 11000 → two first upserts met; repeated. No reply → not known; repeated, and draws
    // another ticket.
    //
    // Without waiters: the outcomes of each change of a record.
    pub(super) async fn set_place(&self, id: &LockId, waiters: &Waiters) -> Result<Option<Ticket>> {
        if !self.rules.fair {
            return Ok(None);
        }
        let (mut filter, server) = (by_id(id), waiters.server.to_string());
        let mut update = vec![doc! { "$set": { "queue": with(waiters) } }];
        update.extend(settle(&self.rules));
        let Some(place) = &waiters.place else {
            filter.insert("queue.server", server);
            self.change(id, filter, update).await?;
            return Ok(None);
        };
        let mine = filtered(live_places(), doc! { "$eq": ["$$p.server", server] });
        let drawn = doc! { "$max": { "$map": { "input": mine, "as": "p", "in": "$$p.last" } } };
        let fields = doc! { "_id": 0, "drawn": drawn };
        let admitted = self.admit(id).await?;
        let record = self.modify(admitted, filter, update, true, Some(fields)).await?;
        let drawn = record.as_ref().and_then(|it| it.get("drawn")).and_then(codec::number);
        Ok(drawn.filter(|_| place.last == Ticket::NEW).map(|it| Ticket(it as u64)))
    }
}

/// The places of other servers that are ahead of this claim and exclude it. A place of the claim's own
/// session excludes it only if the session waits there for less.
pub(super) fn in_the_way_of(claim: &Claim) -> Document {
    let mut in_the_way = Vec::new();
    let mut ticket = Ticket::NEW;
    if let Some(turn) = &claim.turn {
        ticket = turn.ticket;
        in_the_way.push(is_not_of(turn.others.server));
    }
    let is_of_another = doc! { "$ne": ["$$p.aid", literal(claim.aid.as_str())] };
    let first = match claim.mode {
        Mode::Exclusive => {
            let waits_for_less = doc! { "$eq": ["$$p.mode", mode(Mode::Shared)] };
            in_the_way.push(doc! { "$or": [is_of_another, waits_for_less] });
            "$$p.first"
        }
        Mode::Shared => {
            in_the_way.push(is_of_another);
            in_the_way.push(doc! { "$isNumber": "$$p.writer" });
            "$$p.writer"
        }
    };
    if ticket != Ticket::NEW {
        in_the_way.push(doc! { "$lt": [first, number(ticket)] });
    }
    filtered(live_places(), doc! { "$and": in_the_way })
}

/// The first of these places.
pub(super) fn first_of(places: Document) -> Document {
    let first = doc! { "$indexOfArray": ["$$places.first", { "$min": "$$places.first" }] };
    let first = doc! { "$cond": [
        { "$eq": ["$$places", []] }, "$$REMOVE", { "$arrayElemAt": ["$$places", first] },
    ] };
    doc! { "$let": { "vars": { "places": places }, "in": first } }
}

/// The queue after this claim was granted, or was told of the lock that its session has.
pub(super) fn after(claim: &Claim) -> Document {
    claim.turn.as_ref().map_or_else(live_places, |turn| with(&turn.others))
}

/// The queue with these waiters in the place of their server. The place stays where it is, so that an
/// event names only what has changed. A queue has at most as many places as the list of readers; a server
/// beyond that gets no place.
fn with(waiters: &Waiters) -> Document {
    let is_other = is_not_of(waiters.server);
    let Some(place) = &waiters.place else { return filtered(live_places(), is_other) };
    let place = in_record(place, waiters);
    let replaced = doc! { "$map": {
        "input": "$$queue", "as": "p", "in": { "$cond": [is_other, "$$p", place.clone()] },
    } };
    let places = doc! { "$switch": {
        "branches": [
            { "case": { "$in": [waiters.server.to_string(), "$$queue.server"] }, "then": replaced },
            { "case": { "$gte": [{ "$size": "$$queue" }, MAX_READERS as i64] }, "then": "$$queue" },
        ],
        "default": { "$concatArrays": ["$$queue", [place]] },
    } };
    let above = doc! { "$add": [{ "$max": "$$queue.last" }, 1i64] };
    let drawn = doc! { "$max": [{ "$toLong": "$$NOW" }, above] };
    let places = doc! { "$let": { "vars": { "drawn": drawn }, "in": places } };
    doc! { "$let": { "vars": { "queue": live_places() }, "in": places } }
}

fn in_record(place: &Place, waiters: &Waiters) -> Document {
    let ticket = |it| if it == Ticket::NEW { "$$drawn".into() } else { number(it) };
    let mut fields = doc! {
        "server": waiters.server.to_string(),
        "first": ticket(place.first),
        "last": ticket(place.last),
        "aid": literal(place.aid.as_str()),
        "holder": { "label": literal(&place.holder.label) },
        "mode": mode(place.mode),
        "until": { "$add": ["$$NOW", millis(waiters.lease.min(LONGEST_LEASE))] },
    };
    if let Some(writer) = place.writer {
        fields.insert("writer", ticket(writer));
    }
    fields
}

fn is_not_of(server: Uuid) -> Document {
    doc! { "$ne": ["$$p.server", server.to_string()] }
}

fn number(ticket: Ticket) -> Bson {
    i64::try_from(ticket.0).unwrap_or(i64::MAX).into()
}

fn mode(mode: Mode) -> Bson {
    mode.as_str().into()
}
