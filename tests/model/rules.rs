//! The rules on which the protocol rests. Each can be taken out on its own.

/// The rules of the protocol that the model follows, and the assumptions that it makes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// A release names its acquisition, so that a late one removes no newer lock.
    pub(crate) release_by_token: bool,
    /// All attempts at an acquire belong to one claim: each finds the grant of another, and they are
    /// given back together.
    pub(crate) attempts_are_one_claim: bool,
    /// Each attempt has its own token, so that a late one does not bring a released lock back.
    pub(crate) token_for_each_attempt: bool,
    /// A grant whose caller has stopped waiting is given back only if no other request was told of it.
    pub(crate) retract_unless_told: bool,
    /// An acquire checks afterwards whether its session has ended.
    pub(crate) look_for_tombstone: bool,
    /// The end of a session is recorded before its locks are removed.
    pub(crate) tombstone_first: bool,
    /// The holder counts its lease from before the request was sent.
    pub(crate) count_from_the_send: bool,
    /// A reply waits until the write is majority-committed.
    pub(crate) majority: bool,
    /// A save is written only while its acquisition is on record.
    pub(crate) guarded_save: bool,
    /// Rule 16: a save that names a version is written onto that version only.
    pub(crate) save_compares_versions: bool,
    /// Rule 10: a guarded save always changes the lock record, so that its transaction conflicts with
    /// every other write on it.
    pub(crate) save_changes_record: bool,
    /// Rule 12: a contender that finds an expired lock of another session first leaves a trace of it
    /// for the reaper, and only then takes the lock over.
    pub(crate) former_to_reaper: bool,
    /// Rule 12: the reaper looks for these traces as well as for expired locks.
    pub(crate) reaper_reads_traces: bool,
    /// Assumed: a session that has asked for a release does not acquire again before the release is
    /// carried out or lost.
    pub(crate) releases_are_not_overtaken: bool,
    /// A break leaves a lock alone if it has expired in the meantime.
    pub(crate) break_spares_expired: bool,
    /// A trace and a takeover name the former holder's lease (its `ts`), not only its token.
    pub(crate) trace_names_lease: bool,
    /// An ask is written only while the record is as it was read.
    pub(crate) ask_compares_record: bool,
    /// Assumed: the server's clock does not step back between the moment at which a lock is found
    /// expired and the end of the reaper's work on it.
    pub(crate) expired_stays_expired: bool,
    /// An end keeps the leases that it has named, and no lease is named again.
    pub(crate) ends_keep_leases: bool,
    /// The end of a session names its expired locks too.
    pub(crate) logout_names_expired: bool,
    /// The end of a session names the locks that another session has taken over.
    pub(crate) logout_names_taken_over: bool,
    /// The end of a session takes over the names of an idle end that was not told yet.
    pub(crate) logout_takes_names_over: bool,
    /// Assumed: no lock expires between the moment at which a reaper names the locks of an idle session and their
    /// removal.
    pub(crate) sweeps_are_shorter_than_leases: bool,
    /// Assumed: a primary answers no reads once another primary has been elected.
    pub(crate) deposed_answers_no_reads: bool,
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
        save_compares_versions: true,
        save_changes_record: true,
        former_to_reaper: true,
        reaper_reads_traces: true,
        releases_are_not_overtaken: true,
        break_spares_expired: true,
        trace_names_lease: true,
        ask_compares_record: true,
        expired_stays_expired: true,
        ends_keep_leases: true,
        logout_names_expired: true,
        logout_names_taken_over: true,
        logout_takes_names_over: true,
        sweeps_are_shorter_than_leases: true,
        deposed_answers_no_reads: true,
    };
}
