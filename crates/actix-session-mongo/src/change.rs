//! The changes that a request made to its session, so that two concurrent requests do not undo each other.

use std::collections::HashMap;

/// Entries by name. Values are JSON, as in actix-session.
pub(crate) type State = HashMap<String, String>;

/// The entries that a record also has as fields, and their names in the state.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    pub(crate) id: Option<String>,
    pub(crate) user: String,
}

impl Names {
    fn id_in(&self, state: &State) -> Option<String> {
        state.get(self.id.as_ref()?).cloned()
    }

    pub(crate) fn user_in<'a>(&self, state: &'a State) -> Option<&'a String> {
        state.get(&self.user).filter(|json| *json != "null")
    }

    /// The session that was loaded in this state. The one of a person without an id may get one at any moment; the one of a
    /// visitor is another one when it has one.
    pub(crate) fn whose(&self, loaded: &State) -> Option<Whose> {
        let (entry, id) = (self.id.clone()?, self.id_in(loaded));
        let is_known = id.is_some() || self.user_in(loaded).is_none();
        is_known.then(|| Whose { entry, ids: vec![id] })
    }
}

/// The session whose entry has one of these values: the one that was loaded, or the one that an earlier attempt has written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Whose {
    pub(crate) entry: String,
    pub(crate) ids: Vec<Option<String>>,
}

impl Whose {
    /// The id as it was loaded.
    pub(crate) fn id(&self) -> Option<String> {
        self.ids.first()?.as_deref().map(text_of)
    }
}

/// The difference between the loaded session and the one to be saved.
#[derive(Debug, PartialEq)]
pub(crate) struct Change {
    /// Nothing of the former state is kept.
    pub(crate) replaces: bool,
    pub(crate) set: State,
    pub(crate) removed: Vec<String>,
    pub(crate) id: Fact,
    pub(crate) user: Fact,
    /// The id of the session that this one replaces.
    pub(crate) former_id: Option<String>,
    /// Without it, the session is whichever its key finds.
    pub(crate) only_of: Option<Whose>,
}

/// The change to a field outside the state.
#[derive(Debug, PartialEq)]
pub(crate) enum Fact {
    Unchanged,
    Is(String),
    Gone,
}

impl Change {
    /// Without a `base` everything is replaced. A request that has cleared the session, or has begun another one in it,
    /// also replaces everything, whatever other requests added in the meantime.
    pub(crate) fn between(base: Option<State>, state: State, names: &Names) -> Self {
        let is_kept = |base: &State| base.is_empty() || base.keys().any(|k| state.contains_key(k));
        let id = names.id_in(&state);
        let former_id = base.as_ref().and_then(|base| names.id_in(base));
        let former_id = former_id.filter(|it| id.as_ref() != Some(it)).as_deref().map(text_of);
        let whose = base.as_ref().and_then(|base| names.whose(base));
        let kept = base.filter(|base| is_kept(base) && former_id.is_none());
        let replaces = kept.is_none();
        // A visitor may log in at the same moment: that keeps the entries of other requests, and goes before a clear.
        let only_of = whose.filter(|it| it.id().is_some() || replaces && id.is_none());
        let only_of =
            only_of.map(|it| Whose { ids: it.ids.into_iter().chain([id.clone()]).collect(), ..it });
        let base = kept.unwrap_or_default();
        let removed: Vec<_> =
            base.keys().filter(|name| !state.contains_key(*name)).cloned().collect();
        let is_new = |name: &String, value: &String| base.get(name) != Some(value);
        let set: State = state.into_iter().filter(|(name, value)| is_new(name, value)).collect();
        let fact = |name: &String, json: Option<&String>| match json {
            Some(json) => Fact::Is(text_of(json)),
            None if replaces || removed.contains(name) => Fact::Gone,
            None => Fact::Unchanged,
        };
        let user = fact(&names.user, set.get(&names.user));
        // A server that did not know the entry may have saved the session before.
        let id = names.id.as_ref().map_or(Fact::Unchanged, |name| fact(name, id.as_ref()));
        Self { replaces, set, removed, id, user, former_id, only_of }
    }
}

/// A JSON string without its quotes; any other value unchanged.
pub(crate) fn text_of(json: &str) -> String {
    serde_json::from_str(json).unwrap_or_else(|_| json.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state<const N: usize>(entries: [(&str, &str); N]) -> State {
        entries.map(|(name, json)| (name.to_owned(), json.to_owned())).into()
    }

    fn between(base: Option<State>, now: State) -> Change {
        let names = Names { id: Some("id".to_owned()), user: "user".to_owned() };
        Change::between(base, now, &names)
    }

    #[test]
    fn only_what_the_request_has_touched_is_written() {
        let before = state([("user", "\"bob\""), ("theme", "1"), ("old", "2")]);
        let change =
            between(Some(before), state([("user", "\"bob\""), ("theme", "3"), ("id", "\"A\"")]));
        assert!(!change.replaces);
        assert_eq!(change.set, state([("theme", "3"), ("id", "\"A\"")]));
        assert_eq!(change.removed, ["old"]);
        assert_eq!((change.id, change.user), (Fact::Is("A".into()), Fact::Unchanged));
    }

    #[test]
    fn a_cleared_session_and_one_of_unknown_origin_are_replaced() {
        for base in [None, Some(state([("user", "\"bob\""), ("id", "\"A\"")]))] {
            let change = between(base, state([("theme", "1")]));
            assert!(change.replaces);
            assert_eq!((change.id, change.user), (Fact::Gone, Fact::Gone));
        }
    }

    #[test]
    fn another_id_is_another_session_whatever_names_its_entries_have() {
        let before = || Some(state([("user", "\"bob\""), ("id", "\"A\"")]));
        for now in [state([("user", "\"eve\"")]), state([("user", "\"eve\""), ("id", "\"B\"")])] {
            let change = between(before(), now);
            assert!(change.replaces);
            assert_eq!(change.former_id.as_deref(), Some("A"));
        }
        assert_eq!(between(before(), before().unwrap()).former_id, None);
    }

    #[test]
    fn an_empty_session_is_not_a_cleared_one() {
        assert!(!between(Some(state([])), state([("theme", "1")])).replaces);
    }

    #[test]
    fn a_user_may_be_anything() {
        for (json, name) in [("\"a\\\"b\"", "a\"b"), ("4711", "4711"), ("{\"id\":1}", "{\"id\":1}")]
        {
            let change = between(None, state([("user", json)]));
            assert_eq!(change.user, Fact::Is(name.into()));
        }
    }
}
