//! The changes that a request made to its session, so that two concurrent requests do not undo each
//! other.

use crate::store::mongo::sessions::State;

/// The difference between the loaded session and the one to be saved.
#[derive(Debug, PartialEq)]
pub(crate) struct Change {
    /// Nothing of the former state is kept.
    pub(super) replaces: bool,
    pub(super) set: State,
    pub(super) removed: Vec<String>,
    pub(super) aid: Fact,
    /// The entry of an aid that is set only if the session has none. Not part of `set`.
    pub(super) spare_aid: Option<(String, String)>,
    pub(super) user: Fact,
}

/// The change to a field outside the state.
#[derive(Debug, PartialEq)]
pub(super) enum Fact {
    Unchanged,
    Is(String),
    IsIfNone(String),
    Gone,
}

impl Change {
    /// Without a `base` everything is replaced. A request that has cleared the session, or has begun
    /// another one in it, also replaces everything, whatever other requests added in the meantime.
    /// `aid` and `user` are the names of the entries that the record also has outside the state. A
    /// spare aid yields to an aid that another request has given the session since.
    pub(crate) fn between(
        base: Option<State>,
        state: State,
        aid: &str,
        user: &str,
        aid_is_spare: bool,
    ) -> Self {
        let is_kept = |base: &State| base.is_empty() || base.keys().any(|k| state.contains_key(k));
        let is_another = |base: &State| base.contains_key(aid) && base.get(aid) != state.get(aid);
        let kept = base.filter(|base| is_kept(base) && !is_another(base));
        let replaces = kept.is_none();
        let base = kept.unwrap_or_default();
        let removed = base.keys().filter(|name| !state.contains_key(*name)).cloned().collect();
        let is_new = |name: &String, value: &String| base.get(name) != Some(value);
        let set = state.into_iter().filter(|(name, value)| is_new(name, value)).collect();
        let facts = (Fact::Unchanged, Fact::Unchanged);
        let mut change =
            Self { replaces, set, removed, aid: facts.0, spare_aid: None, user: facts.1 };
        (change.aid, change.user) = (change.fact(aid), change.fact(user));
        if aid_is_spare && !replaces {
            change.spare_aid = change.set.remove_entry(aid);
            if let Some((_, json)) = &change.spare_aid {
                change.aid = Fact::IsIfNone(text_of(json));
            }
        }
        change
    }

    /// Whether this begins another session instead of changing the loaded one.
    pub(crate) fn replaces(&self) -> bool {
        self.replaces
    }

    fn fact(&self, name: &str) -> Fact {
        match self.set.get(name) {
            Some(json) => Fact::Is(text_of(json)),
            None if self.replaces || self.removed.iter().any(|removed| removed == name) => {
                Fact::Gone
            }
            None => Fact::Unchanged,
        }
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
        Change::between(base, now, "aid", "user", false)
    }

    #[test]
    fn only_what_the_request_has_touched_is_written() {
        let before = state([("user", "\"bob\""), ("theme", "1"), ("old", "2")]);
        let change =
            between(Some(before), state([("user", "\"bob\""), ("theme", "3"), ("aid", "\"A\"")]));
        assert!(!change.replaces);
        assert_eq!(change.set, state([("theme", "3"), ("aid", "\"A\"")]));
        assert_eq!(change.removed, ["old"]);
        assert_eq!((change.aid, change.user), (Fact::Is("A".into()), Fact::Unchanged));
    }

    #[test]
    fn a_cleared_session_and_one_of_unknown_origin_are_replaced() {
        for base in [None, Some(state([("user", "\"bob\""), ("aid", "\"A\"")]))] {
            let change = between(base, state([("theme", "1")]));
            assert!(change.replaces);
            assert_eq!((change.aid, change.user), (Fact::Gone, Fact::Gone));
        }
    }

    #[test]
    fn another_aid_is_another_session_whatever_names_its_entries_have() {
        let before = || Some(state([("user", "\"bob\""), ("aid", "\"A\"")]));
        for now in [state([("user", "\"eve\"")]), state([("user", "\"eve\""), ("aid", "\"B\"")])] {
            assert!(between(before(), now).replaces);
        }
    }

    #[test]
    fn a_spare_aid_is_set_if_there_is_none() {
        let now = state([("user", "\"bob\""), ("aid", "\"A\"")]);
        let change = Change::between(Some(state([])), now, "aid", "user", true);
        assert_eq!(change.set, state([("user", "\"bob\"")]));
        assert_eq!(change.spare_aid, Some(("aid".into(), "\"A\"".into())));
        assert_eq!(change.aid, Fact::IsIfNone("A".into()));
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
