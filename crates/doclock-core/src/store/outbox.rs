//! The outbox of a store: news that the listeners of the application are to be told.

use uuid::Uuid;

use crate::{ended::SessionEnded, lock::Aid, takeover::Takeover};

/// The news for a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// A session has ended or has become idle.
    Ended(SessionEnded),
    /// A lock was broken or taken over.
    Takeover(Takeover),
}

/// Names a piece of news.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewsId {
    /// The end of this session. With an event, only the end with this event: a session that was idle may have ended
    /// permanently meanwhile.
    Ended(Aid, Option<Uuid>),
    /// The break or takeover with this event.
    Takeover(Uuid),
}

/// Which news [`take_news`](crate::store::Sessions::take_news) takes.
#[derive(Debug, Clone, Copy)]
pub enum Outbox<'a> {
    /// Ends of sessions.
    Ends,
    /// Takeovers. Unsettled takeovers are taken only in these collections, which must be prepared; the others are left
    /// to the servers that know their collections.
    Takeovers(&'a [&'a str]),
}

/// What became of a piece of news.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// It has happened, so that a listener is to be told.
    Ready,
    /// It has not happened: there is nothing to tell.
    Void,
    /// The listener was called.
    Told,
}
