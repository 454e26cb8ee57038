//! Freezes, and notes of servers. A store that cannot keep freezes passes.

use std::collections::BTreeMap;

use super::*;
use doclock_core::{
    freeze::{End, Freeze, MAX_NOTED, NewFreeze, Scope},
    store::{Flags, ServerNote},
};

impl<S: Subject> Steps<S> {
    /// `None` if the store cannot keep freezes.
    async fn freeze(&self, scope: &Scope, why: &str, end: impl Into<End>) -> Option<Vec<Freeze>> {
        let (reason, by, end) = (why.to_owned(), "$root".to_owned(), end.into());
        let new = NewFreeze { id: Uuid::new_v4(), reason, by, end };
        match self.set_freeze(scope, Some(&new), NONE).await {
            Ok(freezes) => Some(freezes),
            Err(e) if e.kind() == StoreErrorKind::Other => None,
            Err(e) => panic!("{e}"),
        }
    }

    async fn thaw(&self, scope: &Scope) -> Vec<Freeze> {
        self.set_freeze(scope, None, NONE).await.unwrap()
    }

    async fn frozen(&self) -> Vec<Freeze> {
        self.freezes(NONE).await.unwrap().on
    }
}

fn in_an_hour() -> SystemTime {
    SystemTime::now() + 3_600 * TICK
}

/// The scopes and reasons, in order.
fn named(freezes: &[Freeze]) -> Vec<(Scope, &str)> {
    let mut named: Vec<_> =
        freezes.iter().map(|freeze| (freeze.scope.clone(), &*freeze.reason)).collect();
    named.sort();
    named
}

fn note(name: &str) -> ServerNote {
    ServerNote {
        id: Uuid::new_v4(),
        name: name.to_owned(),
        version: "1.2.3".to_owned(),
        ttl: TTL,
        collections: BTreeMap::from([("$page".to_owned(), Flags::new(true, false))]),
        key: Some("$key".to_owned()),
    }
}

cases! {
    tests servers($);
    needs [Servers];

    async fn a_freeze_is_on_until_it_is_thawed(store) {
        let page = Scope::from(COLLECTION);
        assert_eq!(store.frozen().await, []);
        let Some(on) = store.freeze(&page, "$why, \"why\"", in_an_hour()).await else { return };
        assert_eq!(named(&on), [(page.clone(), "$why, \"why\"")]);
        assert_eq!((on[0].by.as_deref(), on[0].obeyed_by), (Some("$root"), 0));
        assert!(on[0].id.is_some());
        assert!(on[0].ends_in() > 3_500 * TICK && on[0].ends_in() <= 3_600 * TICK, "{on:?}");
        assert_eq!(store.frozen().await, on);
        assert_eq!(store.thaw(&Scope::All).await, on, "another scope");
        assert_eq!(store.thaw(&page).await, []);
        assert_eq!(store.thaw(&page).await, []);
        assert_eq!(store.frozen().await, []);
    }

    async fn a_second_freeze_replaces_the_first_and_one_that_has_passed_changes_nothing(store) {
        let page = Scope::from(COLLECTION);
        let Some(_) = store.freeze(&page, "first", in_an_hour()).await else { return };
        let on = store.freeze(&page, "second", in_an_hour()).await.unwrap();
        assert_eq!(named(&on), [(page.clone(), "second")]);
        let past = SystemTime::now() - 3_600 * TICK;
        let after = store.freeze(&page, "third", past).await.unwrap();
        assert_eq!(named(&after), [(page.clone(), "second")]);
        let after = store.freeze(&Scope::All, "past", past).await.unwrap();
        assert_eq!(named(&after), [(page, "second")]);
    }

    async fn freezes_at_the_same_moment_are_both_kept(store) {
        let page = Scope::from(COLLECTION);
        let (all, one) = tokio::join!(
            store.freeze(&Scope::All, "all", in_an_hour()),
            store.freeze(&page, "one", in_an_hour()),
        );
        if all.is_none() || one.is_none() {
            return;
        }
        let on = store.frozen().await;
        assert_eq!(named(&on), [(Scope::All, "all"), (page, "one")]);
    }

    async fn a_freeze_ends_by_itself(store) {
        let soon = SystemTime::now() + Duration::from_secs(1);
        let Some(_) = store.freeze(&Scope::All, "short", soon).await else { return };
        while !store.frozen().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(SystemTime::now() + Duration::from_millis(100) >= soon, "not before its end");
    }

    async fn a_freeze_lasts_for_its_duration_by_the_clock_of_the_store(store) {
        let Some(on) = store.freeze(&Scope::All, "why", 3_600 * TICK).await else { return };
        assert!(on[0].ends_in() > 3_500 * TICK && on[0].ends_in() <= 3_600 * TICK, "{on:?}");
        let off = SystemTime::now().duration_since(on[0].until).unwrap_or_default();
        assert!(off < 60 * TICK, "{on:?}");
        let after = store.freeze(&Scope::All, "nothing", Duration::ZERO).await.unwrap();
        assert_eq!(named(&after), [(Scope::All, "why")]);
    }

    async fn each_server_is_noted_once_with_the_freeze_that_it_obeys(store) {
        let page = Scope::from(COLLECTION);
        let Some(on) = store.freeze(&Scope::All, "all", in_an_hour()).await else { return };
        let all = on[0].id.unwrap();
        let on = store.freeze(&page, "one", in_an_hour()).await.unwrap();
        let one = on.iter().find_map(|freeze| freeze.id.filter(|id| *id != all)).unwrap();
        let noted = async || {
            let on = store.frozen().await;
            let of = |id| on.iter().find(|freeze| freeze.id == Some(id)).map(|it| it.obeyed_by);
            (of(all), of(one))
        };
        let servers = [Uuid::new_v4(), Uuid::new_v4()];
        for (id, server) in [(all, 0), (all, 0), (all, 1), (one, 0), (Uuid::new_v4(), 0)] {
            store.obey_freeze(id, servers[server], NONE).await.unwrap();
        }
        if noted().await == (Some(0), Some(0)) {
            return; // The store notes nothing.
        }
        assert_eq!(noted().await, (Some(2), Some(1)));
        let again = store.freeze(&page, "again", in_an_hour()).await.unwrap();
        assert_eq!(again.iter().map(|freeze| freeze.obeyed_by).sum::<usize>(), 2, "{again:?}");
        for _ in 0..MAX_NOTED {
            store.obey_freeze(all, Uuid::new_v4(), NONE).await.unwrap();
        }
        assert_eq!(noted().await.0, Some(MAX_NOTED));
    }

    async fn a_server_is_noted_until_its_note_is_removed(store) {
        let (mut one, two) = (note("$one"), note("two"));
        let noted = async |id, note: Option<&ServerNote>| {
            let mut servers = store.note_server(id, note, NONE).await.unwrap().servers;
            servers.sort_by(|a, b| a.name.cmp(&b.name));
            servers
        };
        assert_eq!(noted(one.id, Some(&one)).await, [one.clone()]);
        if noted(Uuid::new_v4(), None).await.is_empty() {
            return; // A store of one server.
        }
        one.ttl = TTL * 2;
        assert_eq!(noted(one.id, Some(&one)).await, [one.clone()]);
        assert_eq!(noted(two.id, Some(&two)).await, [one.clone(), two.clone()]);
        assert_eq!(noted(one.id, None).await, [two]);
    }
}
