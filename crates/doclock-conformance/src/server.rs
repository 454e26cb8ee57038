//! Notes of servers.

use std::collections::BTreeMap;

use super::*;
use actix_doclock::store::{Flags, ServerNote};

fn note(name: &str, ttl: Duration) -> ServerNote {
    ServerNote {
        id: Uuid::new_v4(),
        name: name.to_owned(),
        version: "1.2.3".to_owned(),
        ttl,
        collections: BTreeMap::from([("$page".to_owned(), Flags::new(true, false))]),
        key: Some("$key".to_owned()),
    }
}

cases! {
    needs [Servers];

    async fn a_server_is_noted_until_its_note_is_removed<S: Subject>(subject: &S) {
        let (store, mut one) = (subject.store(), note("$one", TTL));
        let fleet = store.note_server(one.id, Some(&one), NONE).await.unwrap();
        assert_eq!(fleet.servers, [one.clone()]);
        if store.note_server(Uuid::new_v4(), None, NONE).await.unwrap().servers.is_empty() {
            return; // a store of one server
        }
        one.ttl = TTL * 2;
        assert_eq!(store.note_server(one.id, Some(&one), NONE).await.unwrap().servers, [one.clone()]);
        let two = note("two", TTL);
        let mut both = store.note_server(two.id, Some(&two), NONE).await.unwrap().servers;
        both.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(both, [one.clone(), two.clone()]);
        assert_eq!(store.note_server(one.id, None, NONE).await.unwrap().servers, [two]);
    }
}
