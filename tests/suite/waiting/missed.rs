//! No release goes unnoticed, at whatever moment it happens.
//!
//! The waiter's server is behind a proxy, and the holder's server is not.

use super::*;
use crate::rig::faulty::Faulty;
use crate::rig::proxy::Proxy;

/// A waiter waits behind the proxy. When the first command of this name is held up there, the holder
/// releases, and then the command goes on.
async fn is_released_while(hold: fn(&Proxy, &str), command: &str) {
    let faulty = Faulty::new().await;
    let held = faulty.other.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    hold(&faulty.proxy, command);
    let waiting = waiting(&faulty.app.locks, &key("a")).await;
    faulty.proxy.until_fired(1).await;
    held.release().await.unwrap();
    faulty.proxy.let_go();
    drop(in_time("it is let in", waiting).await.unwrap());
    faulty.assert_fired(1);
}

/// Waits until the waiter is told of changes, and so no longer polls.
async fn has_looked_again(faulty: &Faulty) {
    let asked = || faulty.proxy.passed("find");
    eventually("nobody asks any more", async || {
        let before = asked();
        sleep(Duration::from_secs(1)).await;
        asked() == before
    })
    .await;
}

#[tokio::test]
async fn a_release_before_the_first_attempt_arrives() {
    is_released_while(Proxy::hold_request, "find").await;
}

#[tokio::test]
async fn a_release_between_the_first_refusal_and_the_stream() {
    is_released_while(Proxy::hold_reply_to, "find").await;
}

#[tokio::test]
async fn a_release_before_the_stream_is_open() {
    is_released_while(Proxy::hold_request, "aggregate").await;
}

#[tokio::test]
async fn a_release_before_the_server_knows_that_the_stream_is_open() {
    is_released_while(Proxy::hold_reply_to, "aggregate").await;
}

/// The refusal is older than the release, and the stream is newer. When the refusal arrives, no waiter
/// polls any more.
#[tokio::test]
async fn a_release_between_a_late_refusal_and_the_stream_of_other_waiters() {
    let faulty = Faulty::new().await;
    let (locks, other) = (&faulty.app.locks, &faulty.other.locks);
    let held = other.acquire(&key("a"), Wait::no()).await.unwrap();
    let _in_the_way = other.acquire(&key("b"), Wait::no()).await.unwrap();
    faulty.proxy.hold_reply_to("find");
    let waiting_late = waiting(locks, &key("a")).await;
    faulty.proxy.until_fired(1).await;
    held.release().await.unwrap();
    let _of_others = waiting(locks, &key("b")).await;
    until_told(locks, WorkItem::COLLECTION).await;
    faulty.proxy.let_go();
    drop(in_time("it is let in", waiting_late).await.unwrap());
}

#[tokio::test]
async fn a_later_release_is_reported_without_polling() {
    let faulty = Faulty::new().await;
    let locks = &faulty.app.locks;
    let held = faulty.other.locks.acquire(&key("a"), Wait::no()).await.unwrap();
    let waiting = waiting(locks, &key("a")).await;
    until_told(locks, WorkItem::COLLECTION).await;
    has_looked_again(&faulty).await;
    held.release().await.unwrap();
    drop(in_time("it is let in", waiting).await.unwrap());
}

/// The news that the lock is free again arrives before the answer that it was granted.
#[tokio::test]
async fn a_break_before_the_grant_is_known() {
    let faulty = Faulty::new().await;
    let (locks, other) = (&faulty.app.locks, &faulty.other.locks);
    let held = other.acquire(&key("a"), Wait::no()).await.unwrap();
    let first = waiting(locks, &key("a")).await;
    until_told(locks, WorkItem::COLLECTION).await;
    has_looked_again(&faulty).await;
    let second = waiting(locks, &key("a")).await;
    faulty.proxy.hold_reply_to("findAndModify");
    held.release().await.unwrap();
    faulty.proxy.until_fired(1).await;
    let granted = other.inspect(&key("a")).await.unwrap().unwrap();
    other.release(&granted).await.unwrap();
    // The news overtakes the answer.
    sleep(A_WHILE).await;
    faulty.proxy.let_go();
    let mut first = Some(in_time("it was granted", first).await.unwrap());
    // On a slow machine, it has asked again meanwhile.
    first.take_if(|first| Some(first.token()) != granted.token);
    in_time("the next one is let in", second).await.unwrap().release().await.unwrap();
    drop(first);
}

/// A waiter that is woken and leaves before it has asked passes the wake-up on.
#[tokio::test]
async fn a_release_whose_news_reaches_a_waiter_that_leaves() {
    for moment in 0..50 {
        let cluster = Cluster::memory().await;
        let (one, other) = (cluster.server().await, cluster.server().await);
        let held = one.acquire(&key("a"), Wait::no()).await.unwrap();
        let goes = waiting(&other, &key("a")).await;
        let stays = waiting(&other, &key("a")).await;
        until_told(&other, WorkItem::COLLECTION).await;
        // It has checked again.
        sleep(Duration::from_millis(20)).await;
        held.release().await.unwrap();
        // The news is on its way or has arrived, or the waiter's attempt is under way.
        for _ in 0..moment % 10 {
            yield_now().await;
        }
        goes.abort();
        drop(goes);
        drop(in_time("the next one is let in", stays).await.unwrap());
    }
}
