//! The record of a takeover, or a break, that listeners are to be told.
//!
//! ```text
//! { _id: "taken <event>",  ts: <Date>,  step: "tell",
//!   asked: true,                      // the lock was to be taken; absent when it is known to be taken
//!   by: "<worker>", lease: <Date>,    // as for ends; first the event itself, for the server that takes it
//!   taken: <how often it was taken to be told>,
//!   taking: { c: "<collection>", id: <_id>, aid, token, how: "broken" | "taken_over",
//!             from: { label, user? }, by: { label, user? }, reason } }
//! ```

use std::{slice, time::Duration};

use mongodb::bson::{Bson, Document, doc};
use uuid::Uuid;

use crate::{
    key::{LockId, LockKey},
    lock::{Aid, Holder},
    store::{
        Query,
        mongo::{
            codec::{holder_in, is, millis, presentable},
            ends::{Ends, is_repeated},
            error::Result,
            send::Write,
        },
    },
    takeover::{Takeover, TakeoverKind},
};

pub(super) const TELL: &str = "tell";

impl Ends<'_> {
    // update, an upsert: inserted; or found, because the reply to an earlier attempt was lost.
    pub(super) async fn put_news(&self, takeover: &Takeover, lease: Duration) -> Result<()> {
        let content = doc! {
            "c": takeover.key.collection(),
            "id": Bson::from(takeover.key.id()),
            "aid": takeover.aid.as_str(),
            "token": takeover.token.map(|token| token.to_string()),
            "how": takeover.kind.as_str(),
            "from": takeover.from.as_ref().map(stored),
            "by": stored(&takeover.by),
            "reason": &takeover.reason,
        };
        let new = doc! {
            "_id": "$_id",
            "ts": "$$NOW",
            "step": TELL,
            "asked": true,
            "by": self.by(),
            "lease": { "$add": ["$$NOW", millis(lease)] },
            "taking": { "$literal": content },
        };
        let once = doc! { "$replaceWith": { "$cond": [is("$ts", "date"), "$$ROOT", new] } };
        let id = doc! { "_id": { "$eq": id_of(takeover.event) } };
        self.write(id, &Write::Upsert(vec![once])).await.map(drop)
    }

    /// True if the holder still has its lock: the server that wrote the note died first.
    pub(super) async fn still_has(&self, takeover: &Takeover) -> Result<bool> {
        let collection = self.prepared(takeover.key.collection())?;
        let locks = collection.locks(Query::On(slice::from_ref(&takeover.key)), 1).await?;
        Ok(locks.iter().any(|lock| lock.aid == takeover.aid && lock.token == takeover.token))
    }
}

pub(super) fn id_of(event: Uuid) -> String {
    format!("taken {event}")
}

fn stored(holder: &Holder) -> Document {
    let mut stored = doc! { "label": &holder.label };
    if let Some(user) = &holder.user {
        stored.insert("user", user);
    }
    stored
}

/// True if it is not known yet whether the lock was taken.
pub(super) fn is_open(note: &Document) -> bool {
    note.get_bool("asked").unwrap_or(false)
}

/// To the state in which the lock is known to be taken.
pub(super) fn ready() -> Write {
    Write::Update(vec![doc! { "$unset": ["asked", "by", "lease"] }])
}

/// Matches the notes that are settled, and those in these collections: only a server that knows the collection can tell
/// whether its lock is gone.
pub(super) fn settled_or_in(collections: &[&str]) -> Vec<Document> {
    vec![doc! { "asked": { "$exists": false } }, doc! { "taking.c": { "$in": collections } }]
}

/// The takeover, as a listener is told of it. `None` for a record that somebody has edited.
pub(super) fn takeover_in(note: &Document) -> Option<Takeover> {
    let event = note.get_str("_id").ok()?.strip_prefix("taken ")?.parse().ok()?;
    let content = note.get_document("taking").ok()?;
    let id = LockId::from_bson(content.get("id")?)?;
    Some(Takeover {
        event,
        key: LockKey::new(content.get_str("c").ok()?, id).ok()?,
        kind: TakeoverKind::named(content.get_str("how").ok()),
        from: holder_in(content, "from"),
        aid: Aid::from(content.get_str("aid").ok()?.to_owned()),
        token: content.get_str("token").ok().and_then(|token| token.parse().ok()),
        by: holder_in(content, "by")?,
        reason: content.get_str("reason").unwrap_or_default().to_owned(),
        at: presentable(note.get_datetime("ts").ok().copied()),
        repeated: is_repeated(note),
    })
}
