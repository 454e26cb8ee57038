//! What the protocol rests on, each to be taken out alone.

/// The rules of the protocol that the model follows, and the assumptions that it makes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// A release names the acquisition: late, it removes nothing newer.
    pub(crate) release_by_token: bool,
    /// The token is chosen before the first send, so that a repetition finds its own grant.
    pub(crate) token_before_first_send: bool,
    /// What nobody waits for any more is given back only if no other request was told of it.
    pub(crate) retract_unless_told: bool,
    /// Who acquires looks afterwards whether the session has ended.
    pub(crate) look_for_tombstone: bool,
    /// The end of a session is written down before its locks are removed.
    pub(crate) tombstone_first: bool,
    /// The holder counts its lease from before the request was sent.
    pub(crate) count_from_the_send: bool,
    /// A reply waits until a majority has the write.
    pub(crate) majority: bool,
    /// A save is written only while its acquisition is on record.
    pub(crate) guarded_save: bool,
    /// Assumed: when a request has been answered, an earlier attempt at it is not carried out any more.
    pub(crate) answered_is_over: bool,
    /// Assumed: who has asked for a release does not acquire again before that is through or gone.
    pub(crate) releases_are_not_overtaken: bool,
}

impl Rules {
    pub(crate) const ALL: Self = Self {
        release_by_token: true,
        token_before_first_send: true,
        retract_unless_told: true,
        look_for_tombstone: true,
        tombstone_first: true,
        count_from_the_send: true,
        majority: true,
        guarded_save: true,
        answered_is_over: true,
        releases_are_not_overtaken: true,
    };
}
