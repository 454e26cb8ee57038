//! Guards: kept alive, lost, dropped, and several at once.

use tokio::sync::Notify;

use super::*;

on_each_store! {
    async fn a_dropped_guard_lets_the_next_one_in(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let held = one.acquire(&key("a"), Wait::no()).await.unwrap();
        let waiting = waiting(&other, &key("a")).await;
        drop(held);
        drop(in_time("the waiter is let in", waiting).await.unwrap());
    }

    async fn a_guard_is_renewed_as_long_as_it_lives(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let ttl = Duration::from_secs(15);
        let guard = one.job("long").ttl(ttl).acquire(&key("a"), Wait::no()).await.unwrap();
        let end = async || other.inspect(&key("a")).await.unwrap().expect("a lock").expires_at;
        for _ in 0..2 {
            let before = end().await;
            eventually("it is renewed", async || end().await > before + ttl / 6).await;
        }
        assert!(timeout(A_WHILE, guard.lost()).await.is_err(), "it is not lost");
    }

    async fn a_broken_lock_is_lost_and_its_work_is_dropped(cluster: Cluster) {
        let locks = cluster.server_with(|settings| settings.break_policy(|_, _| true)).await;
        let (working, key, begun) = (locks.clone(), key("a"), Arc::new(Notify::new()));
        let work = tokio::spawn({
            let (key, begins) = (key.clone(), Arc::clone(&begun));
            async move {
                let work = async {
                    begins.notify_one();
                    std::future::pending::<()>().await;
                };
                working.with_lock(&key, Wait::no(), work).await
            }
        });
        in_time("it works", begun.notified()).await;
        crate::rig::app::break_on(&locks, &key, &actix_doclock::Actor::new("admin")).await.unwrap();
        let lost = in_time("it is dropped", work).await.unwrap();
        assert!(matches!(lost, Err(LockError::Lost { .. })), "{lost:?}");
    }

    async fn work_under_a_lock_returns_its_result_and_leaves_no_lock(cluster: Cluster) {
        let locks = cluster.server().await;
        let done = locks.with_lock(&key("a"), Wait::no(), async { 4711 }).await.unwrap();
        assert_eq!(done, 4711);
        assert!(locks.inspect(&key("a")).await.unwrap().is_none());
    }

    async fn several_locks_are_acquired_all_or_none(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let keys = || ["c", "a", "b", "a"].map(key);
        let all = one.acquire_all(keys(), Wait::no()).await.unwrap();
        let order: Vec<_> = all.iter().map(|guard| guard.key().clone()).collect();
        assert_eq!(order, ["a", "b", "c"].map(key));
        all.release().await.unwrap();
        let in_the_way = other.acquire(&key("c"), Wait::no()).await.unwrap();
        let refused = one.acquire_all(keys(), Wait::for_at_most(A_WHILE)).await;
        assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
        one.shutdown().await;
        assert_eq!(other.list().await.unwrap().len(), 1, "the first lock was given back");
        drop(in_the_way);
    }

    async fn jobs_that_would_wait_for_each_other_are_refused(cluster: Cluster) {
        let locks = cluster.server().await;
        let (one, two) = (locks.job("one"), locks.job("two"));
        let _a = one.acquire(&key("a"), Wait::no()).await.unwrap();
        let b = two.acquire(&key("b"), Wait::no()).await.unwrap();
        let waiting = tokio::spawn(waits(one.clone(), key("b")));
        sleep(A_WHILE).await;
        let refused = in_time("it is refused", two.acquire(&key("a"), Wait::until_acquired())).await;
        assert!(matches!(refused, Err(LockError::WouldDeadlock { .. })), "{refused:?}");
        drop(b);
        drop(in_time("the other one goes on", waiting).await.unwrap().unwrap());
        let itself = in_time("a job that would wait for itself is refused too", one.acquire(&key("a"), Wait::until_acquired())).await;
        assert!(matches!(itself, Err(LockError::WouldDeadlock { .. })), "{itself:?}");
    }

    async fn a_job_creates_changes_and_deletes_a_document_under_its_guard(cluster: Cluster) {
        let locks = cluster.server().await;
        let item = |title: &str| WorkItem { id: "new".to_owned(), title: title.to_owned() };
        let guard = locks.acquire(&key("new"), Wait::no()).await.unwrap();
        let missing = guard.update(|it: &mut WorkItem| it.title.clear()).await;
        assert!(matches!(missing, Err(LockError::NotFound { .. })), "{missing:?}");
        guard.create(&item("first")).await.unwrap();
        let again = guard.create(&item("second")).await;
        assert!(matches!(again, Err(LockError::Rejected { .. })), "{again:?}");
        let changed = guard.update(|it: &mut WorkItem| it.title += " changed").await.unwrap();
        assert_eq!(changed.title, "first changed");
        assert_eq!(guard.load::<WorkItem>().await.unwrap().title, "first changed");
        guard.delete().await.unwrap();
        let next = locks.acquire(&key("new"), Wait::for_at_most(SOON)).await.unwrap();
        let gone = next.load::<WorkItem>().await;
        assert!(matches!(gone, Err(LockError::NotFound { .. })), "{gone:?}");
    }

    async fn an_upgrade_is_lost_if_the_shared_lock_was_lost_whoever_came_in_between(cluster: Cluster) {
        let locks = cluster.server_with(|settings| settings.break_policy(|_, _| true)).await;
        let admin = actix_doclock::Actor::new("admin");
        for between in ["nobody", "a writer", "a reader", "a writer who stays"] {
            let mut guard = locks.acquire_shared(&key("a"), Wait::no()).await.unwrap();
            crate::rig::app::break_on(&locks, &key("a"), &admin).await.unwrap();
            let other = match between {
                "nobody" => None,
                "a reader" => Some(locks.acquire_shared(&key("a"), Wait::no()).await.unwrap()),
                _ => Some(locks.acquire(&key("a"), Wait::no()).await.unwrap()),
            };
            let stays = other.filter(|_| between == "a writer who stays");
            locks.shutdown().await;
            let upgraded = guard.upgrade().await;
            assert!(matches!(upgraded, Err(LockError::Lost { .. })), "{between}: {upgraded:?}");
            let held = locks.inspect(&key("a")).await.unwrap().and_then(|lock| lock.token);
            assert_eq!(held, stays.as_ref().map(LockGuard::token), "{between}: nothing is taken");
            drop((guard, stays));
            locks.shutdown().await;
        }
    }

    async fn an_upgrade_of_the_only_reader_is_granted_and_among_others_refused(cluster: Cluster) {
        let (one, other) = (cluster.server().await, cluster.server().await);
        let mut guard = one.acquire_shared(&key("a"), Wait::no()).await.unwrap();
        let read = other.acquire_shared(&key("a"), Wait::no()).await.unwrap();
        let refused = guard.upgrade().await;
        assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
        read.release().await.unwrap();
        guard.upgrade().await.unwrap();
        let lock = other.inspect(&key("a")).await.unwrap().expect("a lock");
        assert_eq!((lock.token, lock.mode), (Some(guard.token()), actix_doclock::Mode::Exclusive));
    }

    async fn a_job_that_has_lost_its_lock_writes_nothing(cluster: Cluster) {
        let locks = cluster.server_with(|settings| settings.break_policy(|_, _| true)).await;
        let guard = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        guard.create(&WorkItem { id: "a".to_owned(), title: "old".to_owned() }).await.unwrap();
        let lost = crate::rig::app::break_on(&locks, &key("a"), &actix_doclock::Actor::new("admin")).await.unwrap();
        assert!(lost.is_some());
        let next = locks.acquire(&key("a"), Wait::no()).await.unwrap();
        let late = guard.update(|it: &mut WorkItem| it.title = "late".to_owned()).await;
        assert!(matches!(late, Err(LockError::Lost { .. })), "{late:?}");
        assert!(matches!(guard.delete().await, Err(LockError::Lost { .. })));
        assert_eq!(next.load::<WorkItem>().await.unwrap().title, "old");
    }

    async fn a_guard_writes_only_the_documents_that_it_locks(cluster: Cluster) {
        let locks = cluster.server().await;
        locks.register::<actix_doclock::Named>().await.unwrap();
        let named = LockKey::named("nightly").unwrap();
        let guard = locks.acquire(&named, Wait::no()).await.unwrap();
        let wrong = guard.load::<WorkItem>().await;
        assert!(matches!(wrong, Err(LockError::Misconfigured(_))), "{wrong:?}");
    }
}

async fn waits(job: Job, key: LockKey) -> Result<LockGuard, LockError> {
    job.acquire(&key, Wait::until_acquired()).await
}
