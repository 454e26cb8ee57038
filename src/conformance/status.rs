//! The status of a store.

use super::*;
use crate::store::Rules;

cases! {
    async fn a_prepared_store_takes_writes_and_lacks_no_index<S: Subject>(subject: &S) {
        let (store, other) = (subject.store(), "another_page");
        store.prepare(other, &Rules::new(TTL).fenced()).await.unwrap();
        granted(store, &key("held"), &Aid::new()).await;
        let status = store.status(&[COLLECTION, other]).await.unwrap();
        assert!(status.writable, "{status:?}");
        assert!(status.missing_indexes.is_empty(), "{status:?}");
    }
}
