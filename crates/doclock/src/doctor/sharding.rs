//! The sharding of a lock collection.

use mongodb::{
    Client, Namespace,
    bson::{Document, doc},
    error::Result,
};

use crate::doctor::finding::{Finding, Severity, quoted};

/// The shard key; `None` if the whole collection is on one shard.
pub(super) async fn key(client: &Client, namespace: &Namespace) -> Result<Option<Document>> {
    let known = client.database("config").collection::<Document>("collections");
    let known = known.find_one(doc! { "_id": namespace.to_string() }).await?;
    // Older versions keep dropped collections on the list.
    let known = known.filter(|it| !it.get_bool("dropped").unwrap_or_default());
    Ok(known.and_then(|it| it.get_document("key").ok().cloned()))
}

/// `None` instead of a [key](key()) means that the database user may not look.
pub(super) fn finding(locks: &Namespace, key: Option<Option<Document>>) -> Finding {
    let by_id = format!("sh.shardCollection({}, {{_id: \"hashed\"}})", quoted(&locks.to_string()));
    match key {
        None => Severity::Info.finding("sharding_unknown",
            locks,
            "the database user may not read `config.collections`, so its sharding was not checked",
            "let a user with that privilege run `sh.status()`: it should be sharded by `_id`, or not at all",
        ),
        Some(None) => Severity::Info.finding("not_sharded",
            locks,
            "it is not sharded: all locks are on the primary shard of the database, so every command \
             goes to one server",
            "leave it like this as long as one shard can write the locks; beyond that, shard it by `_id`",
        )
        .with_command(by_id),
        Some(Some(key)) if key.keys().eq(["_id"]) => Severity::Info.finding("sharded_by_id",
            locks,
            "it is sharded by `_id`: acquiring, saving under and releasing a lock goes to one shard; \
             renewals, logouts and the search for idle sessions go by session, and so to all shards",
            "expect on each shard one renewal in each third of the ttl from every session that holds \
             locks, and from every application server a search for idle sessions, at most one a second",
        ),
        Some(Some(key)) => Severity::Error.finding("wrong_shard_key",
            locks,
            format!(
                "it is sharded by {key}: an `_id` is then unique only on each shard, so that one document \
                 can be locked twice"
            ),
            "stop the application, drop the collection, and shard it by `_id`",
        )
        .with_command(by_id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_collection_that_is_sharded_by_something_else_is_wrong() {
        let of = |key: Option<Option<Document>>| {
            let finding = finding(&Namespace::new("shop", "item.lock"), key);
            (finding.severity, finding.code)
        };
        assert_eq!(of(None), (Severity::Info, "sharding_unknown"));
        assert_eq!(of(Some(None)), (Severity::Info, "not_sharded"));
        for key in [doc! { "_id": "hashed" }, doc! { "_id": 1 }] {
            assert_eq!(of(Some(Some(key))), (Severity::Info, "sharded_by_id"));
        }
        for key in [doc! { "aid": 1 }, doc! { "_id": 1, "aid": 1 }] {
            assert_eq!(of(Some(Some(key))), (Severity::Error, "wrong_shard_key"));
        }
    }
}
