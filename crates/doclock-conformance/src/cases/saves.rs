//! Guarded saves.

use std::collections::BTreeMap;

use super::*;
use doclock_core::store::{Content, Original, Topology};
use serde::{Deserialize, Serialize};

fn fields<const N: usize>(fields: [(&str, &str); N]) -> BTreeMap<String, String> {
    fields.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Tagged {
    #[serde(rename = "_id")]
    id: String,
    tags: Vec<String>,
}

/// Reads a page without its id.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Text {
    text: String,
}

cases! {
    tests saves($);
    needs [Documents];

    async fn a_grant_is_taken_back_unless_another_request_was_told_of_it(store, alice, bob) {
        store.put("a", "old").await;
        let mine = async || store.lock_of("a", alice).await.and_then(|lock| lock.token);
        for (mode, others) in [(Exclusive, false), (Shared, false), (Shared, true)] {
            if others {
                store.read("a", &[bob]).await;
            }
            let claim = Claim { mode, ..claim(alice) };
            // A repeated attempt of the claim is no other request, and a renewal is none either.
            store.granted("a", &claim).await;
            let lock = store.granted("a", &claim).await;
            store.renews(&[alice]).await;
            assert_eq!(store.retracts(&lock).await, Released::Released, "{mode:?}");
            assert_eq!(mine().await, None, "{mode:?}");

            let lock = store.granted("a", &claim).await;
            store.reenters("a", &Claim { token: LockToken::new(), ..claim }).await;
            assert_eq!(store.retracts(&lock).await, Released::AlreadyGone, "{mode:?}");
            assert_eq!(mine().await, lock.token, "re-entered: {mode:?}");
            assert_eq!(store.releases(&lock).await, Released::Released);
        }
        store.releases_all(bob).await;

        let lock = store.granted("a", alice).await;
        assert_eq!(store.saves(&lock, "new").await, Saved::Saved);
        assert_eq!(store.retracts(&lock).await, Released::AlreadyGone);
        assert_eq!(mine().await, lock.token, "a save used the lock");
    }

    async fn a_late_attempt_does_not_bring_a_released_lock_back(store, alice) {
        store.put("a", "old").await;
        let late = claim(alice);
        let answered = Claim { token: late.token.next_attempt(), ..late.clone() };
        let released = store.granted("a", &answered).await;
        store.releases(&released).await;

        let orphaned = store.granted("a", &late).await;
        assert_eq!(store.token_on("a").await, orphaned.token);
        assert_eq!(store.saves(&released, "stale").await, Saved::Lost);
        assert_eq!(store.retracts(&orphaned).await, Released::Released);
    }

    async fn a_save_under_a_live_lock_writes_and_renews(store, alice) {
        store.put("a", "old").await;
        let mine = store.granted("a", alice).await;
        store.age("a", 50 * TICK).await;
        assert_eq!(store.saves(&mine, "new").await, Saved::Saved);
        assert_eq!(store.text_of("a").await.unwrap(), "new");
        let lock = store.lock_on("a").await.unwrap();
        assert_eq!(lock.token, mine.token);
        assert!(is_full(&lock), "renewed: {lock:?}");
    }

    async fn changes_leave_the_fields_that_another_program_has_written(store, alice) {
        store.put("a", "loaded").await;
        let mine = store.granted("a", alice).await;
        let page = |text: &str| Page { id: "a".to_owned(), text: text.to_owned() };
        let loaded = store.load(&key("a"), NONE).await.unwrap().unwrap();
        let original = Original::new(loaded, &page("loaded")).unwrap();
        let changes = |text: &str| Edit::from(original.changes_to(&page(text)).unwrap());
        // Another program has added a field since.
        let now = fields([("_id", "a"), ("text", "loaded"), ("more", "foreign")]);
        let now = StoredDocument::encode(store.format(), &now).unwrap();
        assert_eq!(store.edits(&mine, now.into()).await.unwrap(), Saved::Saved);
        assert_eq!(store.edits(&mine, changes("changed")).await.unwrap(), Saved::Saved);
        let stored = store.load(&key("a"), NONE).await.unwrap().unwrap();
        let expected = fields([("_id", "a"), ("text", "changed"), ("more", "foreign")]);
        assert_eq!(stored.decode::<BTreeMap<String, String>>().unwrap(), expected);
    }

    async fn a_save_knows_the_version_that_a_load_returns(store, alice) {
        let version = async || store.load(&key("a"), NONE).await.unwrap().unwrap().version();
        store.put("a", "loaded").await;
        let mine = store.granted("a", alice).await;
        let loaded = store.load(&key("a"), NONE).await.unwrap().unwrap();
        assert_eq!((loaded.version(), version().await), (version().await, version().await));
        let before = fields([("_id", "a"), ("text", "loaded")]);
        let original = Original::new(loaded, &before).unwrap();
        assert_eq!(original.version(), version().await);

        // Several new fields, whose order the store may choose.
        let after = fields([("10", ""), ("9", ""), ("_id", "a"), ("b", ""), ("more", ""), ("text", "changed")]);
        let changes = original.changes_to(&after).unwrap();
        assert_eq!(store.edits(&mine, changes.clone().into()).await.unwrap(), Saved::Saved);
        let original = changes.into_original();
        assert_eq!(original.version(), version().await);
        let nothing = original.changes_to(&after).unwrap();
        assert_eq!(store.edits(&mine, nothing.clone().into()).await.unwrap(), Saved::Saved);
        assert_eq!(nothing.into_original().version(), version().await);

        // Whole documents: one has its `_id` in another place, and the other has none.
        let moved = fields([("A", ""), ("_id", "a"), ("text", "whole")]);
        let moved = original.replacement(&moved).unwrap();
        let without = original.replacement(&Text { text: "again".to_owned() }).unwrap();
        for whole in [moved, without] {
            assert_eq!(store.edits(&mine, whole.clone().into()).await.unwrap(), Saved::Saved);
            assert_eq!(whole.version(), version().await);
        }
    }

    async fn an_edit_of_one_version_is_carried_out_on_no_other_one(store, alice) {
        let is = async || store.load(&key("a"), NONE).await.unwrap().unwrap();
        store.put("a", "loaded").await;
        let mine = store.granted("a", alice).await;
        let page = |text: &str| Page { id: "a".to_owned(), text: text.to_owned() };
        let encoded = |text: &str| StoredDocument::encode(store.format(), &page(text)).unwrap();
        let loaded = is().await;
        let original = Original::new(loaded.clone(), &page("loaded")).unwrap();
        let changes = original.changes_to(&page("changed")).unwrap();
        let onto = |edit: Edit| Edit { onto: Some(loaded.version()), ..edit };
        let write = async |text: &str| {
            assert_eq!(store.edits(&mine, encoded(text).into()).await.unwrap(), Saved::Saved);
        };
        write("foreign").await;
        let foreign = is().await;
        for edit in [changes.clone().into(), encoded("whole").into(), Content::Deletion.into()] {
            let saved = store.edits(&mine, onto(edit)).await.unwrap();
            assert_eq!(saved, Saved::ChangedMeanwhile(String::new()));
            assert_eq!(is().await, foreign);
        }
        write("loaded").await;
        assert_eq!(is().await.version(), loaded.version(), "the same bytes again");
        for _ in 0..2 {
            // The reply was lost, or the same form was sent twice.
            assert_eq!(store.edits(&mine, onto(changes.clone().into())).await.unwrap(), Saved::Saved);
            assert_eq!(store.text_of("a").await.unwrap(), "changed");
        }
        let now = is().await.version();
        let deletion = Edit { content: Content::Deletion, onto: Some(now) };
        assert_eq!(store.edits(&mine, deletion.clone()).await.unwrap(), Saved::Saved);
        assert_eq!(store.edits(&mine, deletion).await.unwrap(), Saved::DocumentGone);
    }

    async fn a_save_with_changes_of_another_program_has_no_stored_version(store, alice) {
        store.put("a", "loaded").await;
        let mine = store.granted("a", alice).await;
        let loaded = store.load(&key("a"), NONE).await.unwrap().unwrap();
        let page = |text: &str| Page { id: "a".to_owned(), text: text.to_owned() };
        let original = Original::new(loaded, &page("loaded")).unwrap();
        let now = fields([("_id", "a"), ("text", "loaded"), ("more", "foreign")]);
        let now = StoredDocument::encode(store.format(), &now).unwrap();
        assert_eq!(store.edits(&mine, now.into()).await.unwrap(), Saved::Saved);
        let changes = original.changes_to(&page("changed")).unwrap();
        assert_eq!(store.edits(&mine, changes.clone().into()).await.unwrap(), Saved::Saved);
        let stored = store.load(&key("a"), NONE).await.unwrap().unwrap();
        // The page does not show what the other program has written.
        assert_ne!(changes.into_original().version(), stored.version());
    }

    async fn a_change_of_an_array_that_another_program_has_changed_writes_nothing(store, alice) {
        store.put("a", "old").await;
        let mine = store.granted("a", alice).await;
        let tagged = |tag: &str| Tagged { id: "a".to_owned(), tags: vec![tag.to_owned()] };
        let replaces = async |tag| {
            let document = StoredDocument::encode(store.format(), &tagged(tag)).unwrap();
            assert_eq!(store.edits(&mine, document.into()).await.unwrap(), Saved::Saved);
        };
        replaces("loaded").await;
        let loaded = store.load(&key("a"), NONE).await.unwrap().unwrap();
        let original = Original::new(loaded, &tagged("loaded")).unwrap();
        replaces("foreign").await;
        let changes = Edit::from(original.changes_to(&tagged("changed")).unwrap());
        let saved = store.edits(&mine, changes).await.unwrap();
        assert!(matches!(&saved, Saved::ChangedMeanwhile(field) if field == "tags"), "{saved:?}");
        let stored = store.load(&key("a"), NONE).await.unwrap().unwrap();
        assert_eq!(stored.decode::<Tagged>().unwrap(), tagged("foreign"));
    }

    async fn a_save_at_the_moment_of_a_break_never_overwrites_the_next_holder(store, alice, bob) {
        if store.status(&[COLLECTION], NONE).await.unwrap().topology == Topology::Standalone {
            return println!("left out: a standalone server has no transactions");
        }
        store.put("a", "old").await;
        let saves = async |held: &Lock, text: &str| {
            let edit: Edit = store.encoded("a", text).into();
            known(async || store.edits(held, edit.clone()).await).await
        };
        for round in 0..20 {
            let (mine, until) = (store.granted("a", alice).await, Instant::now() + TTL);
            at_once(8, async |n| {
                if n > 0 {
                    while saves(&mine, "alice").await == Saved::Saved && Instant::now() < until {}
                    return;
                }
                known(async || store.break_lock(&mine, &taken()).await).await;
                let claim = claim(bob);
                let answer = known(async || store.try_acquire(&mine.key, &claim, NONE).await).await;
                let TryAcquire::Granted(next) = answer else { panic!("{answer:?}") };
                assert_eq!(saves(&next, "bob").await, Saved::Saved);
            });
            assert_eq!(store.text_of("a").await.unwrap(), "bob", "round {round}");
            store.releases_all(bob).await;
        }
    }

    async fn a_save_is_refused_without_a_live_exclusive_lock(store, alice, bob) {
        store.put("a", "old").await;
        let refused = async |held: &Lock, why: &str| {
            assert_eq!(store.saves(held, "new").await, Saved::Lost, "{why}");
            assert_eq!(store.text_of("a").await.unwrap(), "old", "{why}");
        };
        let reader = store.granted("a", &reading(alice)).await;
        refused(&reader, "a reader").await;
        store.releases(&reader).await;

        let stale = store.expired("a", alice).await;
        refused(&stale, "expired").await;
        let expired = store.granted("a", alice).await;
        refused(&stale, "an earlier lock of the same session").await;
        store.age("a", TTL).await;
        let broken = store.granted("a", bob).await;
        refused(&expired, "taken over").await;
        store.breaks(&broken).await;
        refused(&broken, "broken").await;
        let released = store.granted("a", alice).await;
        store.releases(&released).await;
        refused(&released, "released").await;
    }

    async fn a_save_that_arrives_after_its_deadline_writes_nothing(store, alice) {
        store.put("a", "old").await;
        let mine = acquisition(&store.granted("a", alice).await);
        let edit = store.encoded("a", "new").into();
        let late = store.save(&mine, &edit, Deadline::at(Instant::now())).await;
        assert_eq!(late.unwrap_err().kind(), StoreErrorKind::Unavailable);
        assert_eq!(store.text_of("a").await.unwrap(), "old");
    }

    async fn a_save_does_not_bring_a_deleted_document_back(store, alice) {
        store.put("a", "old").await;
        let mine = store.granted("a", alice).await;
        store.delete("a").await;
        assert!(!store.exists(&key("a"), NONE).await.unwrap());
        assert_eq!(store.saves(&mine, "new").await, Saved::DocumentGone);
        assert_eq!(store.text_of("a").await, None);
    }

    async fn a_creation_needs_a_live_lock_and_a_free_id(store, alice) {
        let create = async |held: &Lock, id: &str, text: &str| {
            store.edits(held, Content::Creation(store.encoded(id, text)).into()).await
        };
        let released = store.granted("a", alice).await;
        store.releases(&released).await;
        assert_eq!(create(&released, "a", "unlocked").await.unwrap(), Saved::Lost);
        assert!(!store.exists(&key("a"), NONE).await.unwrap());
        let mine = store.granted("a", alice).await;
        assert!(create(&mine, "b", "another id").await.is_err());
        assert_eq!(create(&mine, "a", "new").await.unwrap(), Saved::Saved);
        assert_eq!(store.text_of("a").await.unwrap(), "new");
        let again = create(&mine, "a", "once more").await.unwrap_err();
        assert_eq!(again.kind(), StoreErrorKind::Rejected);
        assert_eq!(store.text_of("a").await.unwrap(), "new");
        assert_eq!(store.token_on("a").await, mine.token, "the lock stays");
    }

    async fn a_deletion_needs_a_live_lock(store, alice, bob) {
        store.put("a", "old").await;
        let delete = async |held: &Lock| store.edits(held, Content::Deletion.into()).await.unwrap();
        let exists = async || store.exists(&key("a"), NONE).await.unwrap();
        let stale = store.granted("a", alice).await;
        store.age("a", 2 * TTL).await;
        assert_eq!(delete(&stale).await, Saved::Lost);
        let mine = store.granted("a", bob).await;
        assert_eq!(delete(&stale).await, Saved::Lost);
        assert!(exists().await);
        assert_eq!(delete(&mine).await, Saved::Saved);
        assert!(!exists().await);
        assert_eq!(delete(&mine).await, Saved::DocumentGone);
        assert_eq!(store.token_on("a").await, mine.token, "the lock stays");
    }

    async fn a_save_does_not_give_a_document_another_id(store, alice) {
        store.put("a", "old").await;
        let mine = store.granted("a", alice).await;
        assert!(store.edits(&mine, store.encoded("b", "new").into()).await.is_err());
        assert_eq!(store.text_of("a").await.unwrap(), "old");
    }

    async fn locking_leaves_the_document_byte_for_byte_as_it_was(store, alice, bob) {
        store.put("a", "text").await;
        let load = async || store.load(&key("a"), NONE).await.unwrap().unwrap();
        let before = load().await;
        let unchanged = async |after: &str| {
            assert_eq!(load().await.as_bytes(), before.as_bytes(), "after {after}");
        };
        store.granted("a", alice).await;
        unchanged("acquiring").await;
        store.renews(&[alice]).await;
        unchanged("renewing").await;
        store.age("a", TTL).await;
        let lock = store.granted("a", bob).await;
        unchanged("taking over").await;
        store.releases(&lock).await;
        unchanged("releasing").await;
    }
}
