//! What a request has done to its session, so that two at the same moment do not undo each other.

use super::State;

/// The difference between what was loaded and what is to be saved.
#[derive(Debug, PartialEq)]
pub(crate) struct Change {
    /// Nothing of the former state stays.
    pub(super) replaces: bool,
    pub(super) set: State,
    pub(super) removed: Vec<String>,
    pub(super) aid: Fact,
    pub(super) user: Fact,
}

/// What becomes of a field beside the state.
#[derive(Debug, PartialEq)]
pub(super) enum Fact {
    Unchanged,
    Is(String),
    Gone,
}

impl Change {
    /// Without a `base` everything is replaced. So it is by a request that has cleared the session,
    /// whatever others have added in the meantime. `aid` and `user` are the names of the entries that
    /// the record has beside the state, too.
    pub(crate) fn between(base: Option<State>, state: State, aid: &str, user: &str) -> Self {
        let is_kept = |base: &State| base.keys().any(|name| state.contains_key(name));
        let kept = base.filter(|base| base.is_empty() || is_kept(base));
        let replaces = kept.is_none();
        let base = kept.unwrap_or_default();
        let removed = base.keys().filter(|name| !state.contains_key(*name)).cloned().collect();
        let is_new = |name: &String, value: &String| base.get(name) != Some(value);
        let set = state.into_iter().filter(|(name, value)| is_new(name, value)).collect();
        let mut change =
            Self { replaces, set, removed, aid: Fact::Unchanged, user: Fact::Unchanged };
        (change.aid, change.user) = (change.fact(aid), change.fact(user));
        change
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

/// A JSON string without its quotes; anything else as it is.
fn text_of(json: &str) -> String {
    serde_json::from_str(json).unwrap_or_else(|_| json.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state<const N: usize>(entries: [(&str, &str); N]) -> State {
        entries.map(|(name, json)| (name.to_owned(), json.to_owned())).into()
    }

    fn between(base: Option<State>, now: State) -> Change {
        Change::between(base, now, "aid", "user")
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
