//! What the protocol rests on, each to be taken out alone.

/// The rules of the protocol that the model follows, and the assumptions that it makes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// A release names the acquisition: late, it removes nothing newer.
    pub(crate) release_by_token: bool,
    /// All attempts at an acquire are known for one claim: each finds what another was granted, and they
    /// are given back together.
    pub(crate) attempts_are_one_claim: bool,
    /// Each attempt has a token of its own: a late one does not bring back what was released.
    pub(crate) token_for_each_attempt: bool,
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
    /// Rule 10: a guarded save always changes the lock record, so that its transaction conflicts with
    /// every other write on it.
    pub(crate) save_changes_record: bool,
    /// Rule 12: who finds an expired lock of another session leaves a trace of it to the reaper, and
    /// only then takes the lock over.
    pub(crate) former_to_reaper: bool,
    /// Rule 12: the reaper looks for these traces as well as for expired locks.
    pub(crate) reaper_reads_traces: bool,
    /// Assumed: who has asked for a release does not acquire again before that is through or gone.
    pub(crate) releases_are_not_overtaken: bool,
    /// A break leaves a lock alone that has expired meanwhile.
    pub(crate) break_spares_expired: bool,
    /// A trace and a takeover name one lease of the former holder (its `ts`), and not only its token.
    pub(crate) trace_names_lease: bool,
    /// Assumed: the clock of the server does not step back between a lock that was found expired and
    /// the end of what the reaper makes of it.
    pub(crate) expired_stays_expired: bool,
}

impl Rules {
    pub(crate) const ALL: Self = Self {
        release_by_token: true,
        attempts_are_one_claim: true,
        token_for_each_attempt: true,
        retract_unless_told: true,
        look_for_tombstone: true,
        tombstone_first: true,
        count_from_the_send: true,
        majority: true,
        guarded_save: true,
        save_changes_record: true,
        former_to_reaper: true,
        reaper_reads_traces: true,
        releases_are_not_overtaken: true,
        break_spares_expired: true,
        trace_names_lease: true,
        expired_stays_expired: true,
    };
}
