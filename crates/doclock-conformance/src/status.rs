//! The status of a store.

use super::*;
use actix_doclock::store::{Pattern, Rules};

cases! {
    needs [];

    #[needs(Fenced)]
    async fn a_prepared_store_takes_writes_and_lacks_no_index<S: Subject>(subject: &S) {
        let (store, other) = (subject.store(), "another_page");
        store.prepare(other, &Rules::new(TTL).fenced(), NONE).await.unwrap();
        granted(store, &key("held"), &Aid::new()).await;
        let status = store.status(&[COLLECTION, other], NONE).await.unwrap();
        assert!(status.writable, "{status:?}");
        assert!(status.missing_indexes.is_empty(), "{status:?}");
    }

    #[needs(Collections)]
    async fn a_pattern_finds_the_collections_that_it_covers_and_no_others<S: Subject>(subject: &S) {
        let store = subject.store();
        let names = ["a.c_page", "ab c_page", "x_page", "a.c_pages"];
        for name in names {
            store.prepare(name, &Rules::new(TTL), NONE).await.unwrap();
        }
        let found = async |pattern: &str| {
            let mut found = store.collections(&pattern.parse().unwrap(), 100, NONE).await.unwrap();
            found.sort();
            found
        };
        if found("x_page.lock").await.is_empty() {
            return; // A store that does not tell.
        }
        assert_eq!(found("*_page.lock").await, ["a.c_page.lock", "ab c_page.lock", "x_page.lock"]);
        assert_eq!(found("a.*_page.lock").await, ["a.c_page.lock"], "a point is no wildcard");
        assert_eq!(found("*_missing.lock").await, [""; 0]);
        let all: Pattern = "*.lock".parse().unwrap();
        assert_eq!(store.collections(&all, 2, NONE).await.unwrap().len(), 2);
    }
}
