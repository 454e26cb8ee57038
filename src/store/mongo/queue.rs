//! The places of the servers that have waiters, in a fair collection.

use mongodb::{bson::doc, error::Result};

use crate::{
    key::LockId,
    store::{
        Ticket, Waiters,
        mongo::{Prepared, codec, pipeline},
    },
};

impl Prepared {
    // With waiters, findAndModify returns: the ticket in the place of the server, and it is a new one if
    // the waiters lacked one. No ticket → the queue is full. Nothing → impossible, because an upsert returns the
    // document. Error 11000 → two first upserts met; repeated. No reply → not known; repeated, and draws
    // another ticket.
    //
    // Without waiters: the outcomes of each change of a record.
    pub(super) async fn set_place(&self, id: &LockId, waiters: &Waiters) -> Result<Option<Ticket>> {
        let (mut filter, update) = (pipeline::by_id(id), pipeline::set_place(waiters, &self.rules));
        let Some(place) = &waiters.place else {
            filter.insert("queue.server", waiters.server.to_string());
            self.change(filter, update, id).await?;
            return Ok(None);
        };
        let fields = doc! { "_id": 0, "drawn": pipeline::drawn(waiters.server) };
        let turn = self.lanes.turn(id).await?;
        let record = self.modify(turn, filter, update, true, Some(fields)).await?.record;
        let drawn = record.as_ref().and_then(|it| it.get("drawn")).and_then(codec::number);
        Ok(drawn.filter(|_| place.last == Ticket::NEW).map(|it| Ticket(it as u64)))
    }
}
