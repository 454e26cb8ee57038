//! Reports of documents that become free.

use super::*;
use actix_doclock::store::{Change, Rules, Watch};

/// Waits until the document is reported as free, or changes as missed.
async fn told_of(watch: &mut Watch, key: &LockKey, how: &str) {
    let told = async {
        loop {
            match watch.next().await {
                Some(Ok(Change::Freed(freed))) if freed == *key => return,
                Some(Ok(Change::Missed)) => return,
                Some(Ok(_)) => {}
                other => panic!("{how}: the watch ended: {other:?}"),
            }
        }
    };
    let in_time = tokio::time::timeout(30 * SECOND, told).await;
    in_time.unwrap_or_else(|_| panic!("{how}: not told"));
}

cases! {
    needs [Watch];

    #[needs(Sessions, Fair, Fenced)]
    async fn a_watch_reports_every_document_that_becomes_free<S: Subject>(subject: &S) {
        let (store, alice, bob) = (subject.store(), Aid::new(), Aid::new());
        let rules = Rules::new(TTL);
        for (n, rules) in [rules, rules.fenced(), rules.fair()].into_iter().enumerate() {
            store.prepare(COLLECTION, &rules, NONE).await.unwrap();
            let Some(mut watch) = store.watch(COLLECTION, NONE).await.unwrap() else { return };
            // Each case has its own document, so that no earlier change counts.
            let key = |how: &str| key(&format!("{n} {how}"));

            let token = granted(store, &key("released"), &alice).await;
            store.release(&key("released"), &alice, token, Mode::Exclusive).await.unwrap();
            told_of(&mut watch, &key("released"), "released").await;
            let token = granted(store, &key("retracted"), &alice).await;
            store.retract(&key("retracted"), &alice, &[token], Mode::Exclusive).await.unwrap();
            told_of(&mut watch, &key("retracted"), "retracted").await;
            granted(store, &key("broken"), &alice).await;
            let seen = store.inspect(&key("broken"), None).await.unwrap().unwrap();
            store.break_lock(&seen, &taken()).await.unwrap();
            told_of(&mut watch, &key("broken"), "broken").await;
            granted(store, &key("all"), &alice).await;
            store.release_all(COLLECTION, &alice, NONE).await.unwrap();
            told_of(&mut watch, &key("all"), "all released").await;
            granted(store, &key("swept"), &alice).await;
            subject.age(&key("swept"), TTL).await;
            sweep(store, 100).await;
            told_of(&mut watch, &key("swept"), "swept").await;

            // When one of two readers leaves, the other may become a writer.
            let claims = [&alice, &bob].map(|aid| Claim { mode: Mode::Shared, ..claim(aid) });
            for claim in &claims {
                let _ = store.try_acquire(&key("read"), claim, NONE).await.unwrap();
            }
            store.release(&key("read"), &alice, claims[0].token, Mode::Shared).await.unwrap();
            told_of(&mut watch, &key("read"), "a reader has left").await;
            if rules.fair {
                let (on, other) = (key("read"), fair::Waits::new(Mode::Exclusive));
                let waits = fair::Waits::new(Mode::Exclusive).queues_for(store, &on).await;
                store.release(&on, &bob, claims[1].token, Mode::Shared).await.unwrap();
                told_of(&mut watch, &on, "the last reader has left").await;
                let other = other.queues_for(store, &on).await;
                let later = waits.waiters(Some(other.place()));
                store.set_place(&on, &later, NONE).await.unwrap();
                told_of(&mut watch, &on, "a place has moved on").await;
                store.set_place(&on, &waits.waiters(None), NONE).await.unwrap();
                told_of(&mut watch, &on, "a place was given up").await;
            }
            let ends = Aid::new();
            granted(store, &key("ended"), &ends).await;
            end(store, &ends, EndReason::LoggedOut).await;
            told_of(&mut watch, &key("ended"), "ended").await;
        }
    }
}
