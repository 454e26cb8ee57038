//! The rules that make the simulated database correct. Each can be taken out on its own; then the
//! simulation must find a violation.

/// The rules that [`Link`](crate::link::Link) and the sessions follow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// The transaction of a save changes the lock record, whatever its `ts` says, and so conflicts with
    /// every other write to the lock until the commit.
    pub(crate) guarded_write_changes_the_record: bool,
    /// A takeover of an expired lock leaves the former holder to the reaper.
    pub(crate) takeover_keeps_the_former_holder: bool,
    /// A reply waits until the write is majority-committed.
    pub(crate) majority: bool,
    /// The reply to a commit waits for a majority too.
    pub(crate) majority_commit: bool,
    /// A shown lease is majority-committed.
    pub(crate) leases_of_a_majority: bool,
    /// A save checks the lock.
    pub(crate) guarded_save: bool,
    /// A save writes the document in its transaction.
    pub(crate) save_in_one_transaction: bool,
    /// A renewal does not revive an expired lock.
    pub(crate) renew_only_what_lives: bool,
    /// A release names its acquisition.
    pub(crate) release_by_token: bool,
    /// A grant whose caller has stopped waiting is given back only if no other request was told of it.
    pub(crate) retract_unless_told: bool,
    /// The end of a session is recorded before its locks are removed.
    pub(crate) tombstone_first: bool,
    /// An acquire checks afterwards whether its session has ended.
    pub(crate) look_for_tombstone: bool,
    /// The holder counts its lease from before the request was sent.
    pub(crate) count_from_the_send: bool,
    /// A fence is higher than the last one, whatever the clock shows.
    pub(crate) fences_rise: bool,
    /// The server removes a lock by its last renewal, not by its age.
    pub(crate) purge_by_lease: bool,
}

impl Rules {
    pub(crate) const ALL: Self = Self {
        guarded_write_changes_the_record: true,
        takeover_keeps_the_former_holder: true,
        majority: true,
        majority_commit: true,
        leases_of_a_majority: true,
        guarded_save: true,
        save_in_one_transaction: true,
        renew_only_what_lives: true,
        release_by_token: true,
        retract_unless_told: true,
        tombstone_first: true,
        look_for_tombstone: true,
        count_from_the_send: true,
        fences_rise: true,
        purge_by_lease: true,
    };
}
