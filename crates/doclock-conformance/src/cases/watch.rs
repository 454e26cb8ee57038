//! Reports of documents that become free.

use super::*;
use doclock_core::store::{Change, Content, Original, Rules, Watch, Written};

/// Waits for the change that `is_it` accepts.
pub(super) async fn told(watch: &mut Watch, what: &str, is_it: impl Fn(&Change) -> bool) {
    let told = async {
        loop {
            match watch.next().await {
                Some(Ok(change)) if is_it(&change) => return,
                Some(Ok(_)) => {}
                other => panic!("{what}: the watch ended: {other:?}"),
            }
        }
    };
    tokio::time::timeout(30 * TICK, told).await.unwrap_or_else(|_| panic!("{what}: not told"));
}

cases! {
    tests watch($);
    needs [Watch];

    #[needs(Sessions, Fair, Fenced)]
    async fn a_watch_reports_every_document_that_becomes_free(store, alice, bob) {
        let rules = Rules::new(TTL);
        for rules in [rules, rules.fenced(), rules.fair()] {
            store.prepare(COLLECTION, &rules, NONE).await.unwrap();
            let Some(mut watch) = store.watch(COLLECTION, NONE).await.unwrap() else { return };
            let mut tells = async |id: &str, how: &str| {
                let freed = Change::Freed(key(id));
                told(&mut watch, how, |it| *it == freed || *it == Change::Missed).await;
            };
            // Each way has its own document, so that no earlier change counts.
            let id = |how: &str| format!("{how}: {rules:?}");
            for how in WAYS {
                let id = id(how);
                let mine = store.granted(&id, &Aid::new()).await;
                store.loses(&mine, &id, how).await;
                tells(&id, how).await;
            }
            // When one of two readers leaves, the other may become a writer.
            let id = id("read");
            let of_alice = store.granted(&id, &reading(alice)).await;
            let of_bob = store.granted(&id, &reading(bob)).await;
            store.releases(&of_alice).await;
            tells(&id, "a reader has left").await;
            if rules.fair {
                let waiter = store.queues(&id, fair::Waits::new(Exclusive)).await;
                store.releases(&of_bob).await;
                tells(&id, "the last reader has left").await;
                let other = store.queues(&id, fair::Waits::new(Exclusive)).await;
                store.sets(&id, &waiter, Some(other.place())).await;
                tells(&id, "a place has moved on").await;
                store.sets(&id, &waiter, None).await;
                tells(&id, "a place was given up").await;
            }
            store.releases_all(bob).await;
        }
    }

    #[needs(Documents)]
    async fn a_watch_reports_each_save_after_it_was_written_and_none_that_was_refused(store, alice) {
        let Some(mut watch) = store.watch(COLLECTION, NONE).await.unwrap() else { return };
        store.put("a", "old").await;
        let lost = store.granted("a", alice).await;
        store.releases(&lost).await;
        assert_eq!(store.saves(&lost, "lost").await, Saved::Lost);
        let mine = store.granted("a", alice).await;
        let stored = async || store.load(&key("a"), NONE).await.unwrap().unwrap();
        let page = |text: &str| Page { id: "a".to_owned(), text: text.to_owned() };
        let original = Original::new(stored().await, &page("old")).unwrap();
        // Nothing is written by these either.
        let same = original.changes_to(&page("old")).unwrap();
        assert_eq!(store.edits(&mine, same.into()).await.unwrap(), Saved::Saved);
        let other = original.replacement(&page("other")).unwrap();
        let stale = Edit { onto: Some(other.version()), ..other.into() };
        let refused = store.edits(&mine, stale).await.unwrap();
        assert_eq!(refused, Saved::ChangedMeanwhile(String::new()));

        let by = &mine.holder.as_ref().unwrap().label;
        let mut tells = async |version| {
            let save = Written { by: by.clone(), version };
            told(&mut watch, "saved", |it| match it {
                Change::Saved(of, told) => {
                    assert_eq!((of, told), (&key("a"), &save));
                    true
                }
                _ => false,
            })
            .await;
        };
        let changes = original.changes_to(&page("new")).unwrap();
        assert_eq!(store.edits(&mine, changes.into()).await.unwrap(), Saved::Saved);
        tells(Some(stored().await.version())).await;
        assert_eq!(store.saves(&mine, "whole").await, Saved::Saved);
        tells(Some(stored().await.version())).await;
        let deletion = Content::Deletion.into();
        assert_eq!(store.edits(&mine, deletion).await.unwrap(), Saved::Saved);
        tells(None).await;
    }
}
