//! Tests of the behaviour that every [`Store`] must have: the conformance suite of the stores of actix-doclock.
//!
//! [`MemoryStore`](actix_doclock::MemoryStore) and `MongoStore` pass them; a store of your own should. Tell the
//! suite how to fill and age your store, and let [`store_conformance!`](crate::store_conformance) make
//! one test of each case:
//!
//! ```
//! use std::time::Duration;
//! use actix_doclock::{LockKey, MemoryStore, store::{Deadline, Locks, Rules}};
//! use doclock_conformance::{COLLECTION, Page, Subject, TTL};
//!
//! struct Memory(MemoryStore);
//!
//! impl Subject for Memory {
//!     type Store = MemoryStore;
//!
//!     async fn fresh() -> Self {
//!         let store = MemoryStore::new();
//!         store.prepare(COLLECTION, &Rules::new(TTL), Deadline::NONE).await.unwrap();
//!         Self(store)
//!     }
//!     fn store(&self) -> &MemoryStore { &self.0 }
//!     async fn put(&self, page: &Page) { self.0.put(page.id.clone(), page).unwrap() }
//!     async fn delete(&self, key: &LockKey) { self.0.remove(key); }
//!     async fn age(&self, key: &LockKey, by: Duration) { self.0.age(key, by) }
//! }
//!
//! doclock_conformance::store_conformance!(Memory);
//! ```

#![expect(clippy::unwrap_used, reason = "a failed case is a panic")]

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};
use tokio::sync::Barrier;
use uuid::Uuid;

use actix_doclock::{
    Aid, EndReason, Holder, Lock, LockKey, LockToken, Lockable, Mode, Released, SessionEnded,
    StoreErrorKind, TabId, TryAcquire,
    store::{
        Ability, Acquisition, Active, Claim, Deadline, Documents, Edit, Locks, Named, PageId,
        Renewed, Saved, Servers, Sessions, Settled, Store, StoredDocument, Swept, TakenBy,
    },
};

/// The collection that the cases lock in.
pub const COLLECTION: &str = "page";

/// The ttl with which the collection is prepared.
pub const TTL: Duration = Duration::from_secs(60);

const SECOND: Duration = Duration::from_secs(1);

const NONE: Deadline = Deadline::NONE;

/// A document of the cases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Page {
    #[serde(rename = "_id")]
    pub id: String,
    pub text: String,
}

impl Lockable for Page {
    type Id = String;
    const COLLECTION: &'static str = COLLECTION;
}

/// A store, and the operations beyond its verbs that the cases need.
#[expect(async_fn_in_trait, reason = "each case runs its futures itself, in one task")]
pub trait Subject: Sized {
    /// The store under test.
    type Store: Store;

    /// An empty store, prepared for [`COLLECTION`] with [`TTL`].
    async fn fresh() -> Self;

    /// The store.
    fn store(&self) -> &Self::Store;

    /// Writes a document without regard to locks.
    async fn put(&self, page: &Page);

    /// Deletes a document, but not its lock.
    async fn delete(&self, key: &LockKey);

    /// Makes the locks on `key` and the places in its queue older, and no others: moves all dates of
    /// expiry back by `by`.
    async fn age(&self, key: &LockKey, by: Duration);
}

fn key(id: &str) -> LockKey {
    LockKey::new(COLLECTION, id).unwrap()
}

fn taken() -> TakenBy {
    TakenBy { by: "root".to_owned(), reason: "on holiday".to_owned() }
}

fn claim(aid: &Aid) -> Claim {
    Claim {
        aid: aid.clone(),
        token: LockToken::new(),
        holder: Holder::new("alice"),
        mode: Mode::Exclusive,
        ttl: TTL,
        tab: None,
        page: None,
        taken: None,
        max_hold: None,
        turn: None,
    }
}

async fn end(store: &impl Store, aid: &Aid, reason: EndReason) -> Vec<LockKey> {
    let worker = Uuid::new_v4();
    let ended = store.end_session(aid, reason, &[COLLECTION], worker, NONE).await.unwrap();
    store.ready(aid, worker).await.unwrap();
    ended
}

async fn sweep(store: &impl Store, limit: usize) -> Swept {
    store.sweep(&[COLLECTION], Uuid::new_v4(), limit, NONE).await.unwrap()
}

/// Takes all pending announcements, and marks them as announced.
async fn announce_all(store: &impl Store) -> Vec<SessionEnded> {
    let worker = Uuid::new_v4();
    let ended = store.take_ends(worker, 60 * SECOND, 1_000).await.unwrap();
    store.told(worker, &ended).await.unwrap();
    ended
}

fn sorted(mut keys: Vec<LockKey>) -> Vec<LockKey> {
    keys.sort();
    keys
}

async fn granted(store: &impl Store, key: &LockKey, aid: &Aid) -> LockToken {
    let claim = claim(aid);
    match store.try_acquire(key, &claim, NONE).await.unwrap() {
        TryAcquire::Granted(lock) => {
            assert_eq!(lock.token, Some(claim.token));
            claim.token
        }
        other => panic!("not granted: {other:?}"),
    }
}

async fn held(store: &impl Store, key: &LockKey, aid: &Aid) -> Lock {
    match store.try_acquire(key, &claim(aid), NONE).await.unwrap() {
        TryAcquire::Held(lock) => lock,
        other => panic!("not held: {other:?}"),
    }
}

async fn token_on(store: &impl Store, key: &LockKey) -> Option<LockToken> {
    store.inspect(key, None).await.unwrap().and_then(|lock| lock.token)
}

fn encoded(store: &impl Store, id: &str, text: &str) -> StoredDocument {
    StoredDocument::encode(store.format(), &Page { id: id.to_owned(), text: text.to_owned() })
        .unwrap()
}

async fn save(
    store: &impl Store,
    key: &LockKey,
    aid: &Aid,
    token: LockToken,
    document: &StoredDocument,
) -> Saved {
    store
        .save(
            &Acquisition::exclusive(key, aid, token),
            &document.clone().into(),
            Deadline::at(Instant::now() + TTL),
        )
        .await
        .unwrap()
}

async fn text_of(store: &impl Store, key: &LockKey) -> String {
    store.load(key, NONE).await.unwrap().unwrap().decode::<Page>().unwrap().text
}

async fn put<S: Subject>(subject: &S, id: &str, text: &str) {
    subject.put(&Page { id: id.to_owned(), text: text.to_owned() }).await;
}

/// True if the store has all these abilities. Otherwise the case is left out, and says so.
fn can(store: &impl Store, case: &str, needed: &[Ability]) -> bool {
    match needed.iter().find(|ability| !store.can(**ability)) {
        Some(missing) => {
            println!("{case} is left out: the store does not say that it can do {missing:?}");
            false
        }
        None => true,
    }
}

/// Each case is named after the rule that it checks. It runs if the store can do what all cases of its file need, and
/// what the case itself needs.
macro_rules! cases {
    (
        needs [$($all:ident),*];
        $($(#[needs($($own:ident),+)])? async fn $case:ident<$s:ident: Subject>($subject:ident: $type:ty) $body:block)*
    ) => {
        const NEEDS: &[Ability] = &[$(Ability::$all),*];

        $(
            #[doc(hidden)]
            pub async fn $case<$s: Subject>() {
                let fresh = $s::fresh().await;
                let case = stringify!($case);
                if can(fresh.store(), case, NEEDS) $(&& can(fresh.store(), case, &[$(Ability::$own),+]))? {
                    let $subject: $type = &fresh;
                    $body
                }
            }
        )*

        pub(super) const CASES: &[&str] = &[$(stringify!($case)),*];
    };
}

mod ends;
mod fair;
mod fence;
mod freeze;
mod hand_over;
mod locks;
mod pages;
mod server;
mod shared;
mod shorthand;
mod status;
mod takeovers;
mod watch;

pub use ends::*;
pub use fair::*;
pub use fence::*;
pub use freeze::*;
pub use hand_over::*;
pub use locks::*;
pub use pages::*;
pub use server::*;
pub use shared::*;
pub use shorthand::Shorthand;

pub use status::*;
pub use takeovers::*;
pub use watch::*;

#[doc(hidden)]
pub fn cases() -> Vec<&'static str> {
    [
        locks::CASES,
        ends::CASES,
        shared::CASES,
        fence::CASES,
        fair::CASES,
        watch::CASES,
        hand_over::CASES,
        pages::CASES,
        status::CASES,
        freeze::CASES,
        takeovers::CASES,
        server::CASES,
    ]
    .concat()
}

/// Makes one `#[tokio::test]` of each case of the conformance suite, for a
/// [`Subject`](crate::Subject). Needs `tokio` with the features `macros` and `rt`.
#[macro_export]
macro_rules! store_conformance {
    ($subject:ty) => {
        $crate::store_conformance!(@each $subject:
            a_free_document_is_granted_with_the_token_of_the_claim,
            a_refusal_names_the_holder_and_says_since_when_and_how_long,
            a_refusal_does_not_renew,
            reentry_renews_and_keeps_the_token,
            a_repeated_claim_recognises_its_own_grant,
            an_expired_lock_is_taken_over_at_once,
            the_ttl_of_the_holder_counts_and_not_the_contenders,
            after_expiry_the_same_session_gets_a_new_token,
            renewal_extends_all_live_locks_of_the_session_and_no_others,
            a_renewal_leaves_the_locks_of_tabs_that_it_does_not_name,
            renewal_raises_a_shorter_ttl_keeps_a_longer_one_and_respects_max_hold,
            renewal_keeps_the_token_and_does_not_revive,
            a_released_document_is_free_and_a_second_release_succeeds,
            a_late_release_does_not_remove_a_newer_lock_of_the_same_session,
            nobody_releases_the_lock_of_another_session,
            a_grant_is_taken_back_unless_another_request_was_told_of_it,
            the_next_attempt_of_a_claim_recognises_an_earlier_grant,
            a_late_attempt_does_not_bring_a_released_lock_back,
            releasing_a_session_removes_and_names_its_locks_only,
            an_expired_lock_is_neither_inspected_nor_listed,
            a_break_removes_the_lock_that_was_seen_and_no_later_one,
            a_save_under_a_live_lock_writes_and_renews,
            a_save_is_refused_once_the_lock_has_expired,
            a_save_is_refused_under_an_earlier_lock_of_the_same_session,
            a_save_is_refused_after_a_takeover_a_break_or_a_release,
            a_save_that_arrives_after_its_deadline_writes_nothing,
            a_save_does_not_bring_a_deleted_document_back,
            a_creation_needs_a_live_lock_and_a_free_id,
            a_deletion_needs_a_live_lock,
            a_save_does_not_give_a_document_another_id,
            locking_leaves_the_document_byte_for_byte_as_it_was,
            ids_of_different_types_name_different_documents,
            text_that_looks_like_an_operator_stays_text,
            of_many_simultaneous_claims_exactly_one_wins,
            the_end_of_a_session_is_remembered_from_its_first_moment,
            an_ended_session_has_no_locks_and_is_announced_once_with_their_names,
            an_end_is_final_and_unique_whatever_its_reason,
            a_session_without_locks_is_announced_too_when_it_ends,
            an_idle_session_is_swept_and_announced_with_its_locks,
            sessions_are_overdue_while_their_expired_locks_are_there,
            the_end_of_a_session_tells_whose_it_was,
            a_session_with_a_live_lock_is_not_idle,
            a_lock_that_expired_a_little_earlier_than_the_rest_is_named_too,
            an_idle_session_may_come_back_and_become_idle_again,
            a_takeover_of_an_expired_lock_leaves_its_holder_to_the_sweep,
            a_holder_that_lost_an_expired_lock_and_has_others_is_not_idle,
            a_holder_that_logs_out_after_a_takeover_is_announced_once,
            a_session_that_comes_back_to_its_expired_lock_is_not_idle,
            a_holder_whose_lock_reached_max_hold_is_not_idle_after_a_takeover,
            a_break_of_an_expired_lock_leaves_its_idle_session_to_the_sweep,
            a_logout_replaces_an_unannounced_expiry,
            a_lock_of_an_ended_session_is_swept_without_another_announcement,
            a_sweep_is_bounded_and_reports_that_more_is_left,
            a_sweep_says_how_soon_the_next_lock_can_expire,
            many_sweeps_at_the_same_moment_end_each_session_once,
            an_announcement_belongs_to_one_worker_until_its_lease_has_passed,
            announcements_are_given_out_a_few_at_a_time,
            max_hold_ends_a_lock_however_often_it_is_renewed,
            a_lock_that_reached_max_hold_says_nothing_about_its_session,
            readers_share_and_keep_a_writer_out,
            a_writer_keeps_readers_out,
            the_exclusive_lock_lets_its_holder_read_too,
            reading_again_renews_and_keeps_the_token,
            the_only_reader_is_upgraded_and_others_are_refused_without_harm,
            a_reader_is_upgraded_past_an_expired_reader,
            an_idle_reader_expires_alone,
            each_reader_has_its_own_ttl,
            each_reader_has_its_own_token_and_releases_only_itself,
            a_release_without_a_mode_releases_either,
            a_reader_is_taken_back_unless_another_request_was_told_of_it,
            renewal_extends_only_the_sessions_own_reader,
            a_save_needs_more_than_a_reader,
            readers_are_listed_by_session_and_documents_are_counted,
            a_reader_is_broken_and_the_others_stay,
            ending_a_session_takes_its_reader_out_and_leaves_the_others,
            releasing_a_session_takes_its_readers_out,
            expired_readers_go_with_their_session_too,
            an_idle_reader_is_swept_although_another_renews,
            an_idle_reader_is_announced_although_others_come_and_go,
            a_session_that_still_reads_is_not_idle,
            max_hold_ends_a_reader_and_no_other,
            a_lock_with_a_ttl_of_its_own_is_swept_in_time,
            the_number_of_readers_is_limited,
            of_simultaneous_readers_and_writers_only_one_kind_gets_in,
            readers_that_leave_at_the_same_moment_leave_nothing_behind,
            fences_rise_over_release_expiry_takeover_break_and_end,
            reentry_renewal_and_repetition_keep_the_fence,
            each_reader_and_each_upgrade_has_its_own_fence,
            without_fences_a_lock_has_none,
            waiters_are_let_in_in_the_order_of_their_tickets,
            a_reserved_document_names_the_first_waiter,
            nobody_overtakes_the_queue,
            a_place_lasts_as_long_as_it_is_kept,
            a_repeated_draw_gives_a_later_ticket_and_one_place,
            the_claims_of_one_waiter_have_one_turn,
            a_place_that_is_not_kept_is_passed_over_until_it_is_set_again,
            a_place_that_is_given_up_blocks_nobody,
            readers_at_the_front_of_the_queue_go_together,
            the_waiters_of_one_server_share_a_place_and_keep_the_common_order,
            readers_do_not_overtake_a_writer_behind_a_reader_of_its_server,
            a_handover_passes_nobody_over,
            reentry_and_upgrades_do_not_queue,
            the_place_of_a_session_is_not_in_its_own_way,
            a_session_that_waits_for_less_is_in_its_own_way,
            places_outlive_the_lock_however_it_ends,
            a_document_reserved_for_a_vanished_waiter_is_swept,
            fair_and_fenced_go_together,
            without_a_fair_queue_nobody_has_a_place,
            a_watch_reports_every_document_that_becomes_free,
            a_handover_gives_the_lock_to_the_next_holder_with_its_own_lease,
            a_repeated_handover_is_the_same_grant,
            a_repeated_handover_revives_nothing,
            a_lock_that_is_gone_is_not_handed_over,
            a_lock_that_is_handed_over_to_a_reader_is_shared,
            a_lock_is_confirmed_together_with_its_document,
            a_read_confirms_no_lock_that_the_session_does_not_hold,
            a_reader_is_confirmed_among_others,
            a_lock_says_for_which_tab_and_which_user_it_was_granted,
            a_leaving_lock_expires_however_often_it_is_renewed,
            only_the_named_acquisition_expires_sooner,
            a_reloaded_page_gets_its_lock_back_in_full,
            a_page_that_came_back_in_time_may_renew_and_save_as_before,
            a_claim_of_another_tab_leaves_the_lock_as_it_is,
            a_session_that_moves_its_lock_to_another_tab_keeps_it,
            all_holders_of_a_document_are_named,
            the_last_end_of_a_session_is_known,
            a_watch_of_everything_reports_grants_and_takeovers_with_their_sessions,
            a_prepared_store_takes_writes_and_lacks_no_index,
            a_pattern_finds_the_collections_that_it_covers_and_no_others,
            a_freeze_is_on_until_it_is_thawed,
            a_second_freeze_replaces_the_first_and_one_that_has_passed_changes_nothing,
            freezes_at_the_same_moment_are_both_kept,
            a_freeze_ends_by_itself,
            a_freeze_lasts_for_its_duration_by_the_clock_of_the_store,
            each_server_is_noted_once_with_the_freeze_that_it_obeys,
            a_taken_lock_is_told_once_with_everything_about_it,
            a_lock_that_was_not_taken_is_not_told,
            the_note_of_a_dead_server_is_told_if_the_lock_is_gone,
            a_server_is_noted_until_its_note_is_removed,
        );
    };
    (@each $subject:ty: $($case:ident,)*) => {
        $(
            #[tokio::test]
            async fn $case() {
                $crate::$case::<$subject>().await;
            }
        )*

        #[test]
        fn no_case_is_left_out() {
            assert_eq!([$(stringify!($case)),*][..], $crate::cases());
        }
    };
}
