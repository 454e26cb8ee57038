//! Good histories pass, and each bad history is reported for its own fault.

use std::collections::BTreeMap;

use super::{Clocks, Report, Stored, check};
use crate::history::{Event, Line, Moment};

/// A handwritten history: each operation on the key `k`, with its moments.
#[derive(Debug, Default)]
struct Story {
    lines: Vec<Line>,
    stored: Vec<&'static str>,
}

impl Story {
    fn at(mut self, at: Moment, op: u64, event: Event) -> Self {
        self.lines.push(Line { at, process: "p".to_owned(), op, event });
        self.lines.sort_by_key(|line| line.at);
        self
    }

    fn op(&self) -> u64 {
        self.lines.len() as u64 + 1_000
    }

    /// The moments are: asked, answered, believed until.
    fn granted(self, token: &str, [asked, answered, until]: [Moment; 3]) -> Self {
        self.granted_as(token, false, None, [asked, answered, until])
    }

    fn fenced(self, token: &str, fence: u64, moments: [Moment; 3]) -> Self {
        self.granted_as(token, false, Some(fence), moments)
    }

    fn shared(self, token: &str, moments: [Moment; 3]) -> Self {
        self.granted_as(token, true, None, moments)
    }

    fn granted_as(
        self,
        token: &str,
        shared: bool,
        fence: Option<u64>,
        [asked, answered, until]: [Moment; 3],
    ) -> Self {
        let (op, token) = (self.op(), token.to_owned());
        let granted =
            Event::Granted { key: "k".to_owned(), aid: String::new(), token, shared, fence, until };
        self.at(asked, op, Event::AcquireBegan { key: "k".to_owned() }).at(answered, op, granted)
    }

    fn saved(mut self, token: &str, value: u64, id: &'static str, moments: [Moment; 2]) -> Self {
        self.stored.push(id);
        self.answered_save(token, value, id, moments, Event::Saved)
    }

    fn answered_save(
        self,
        token: &str,
        value: u64,
        id: &str,
        [began, answered]: [Moment; 2],
        answer: Event,
    ) -> Self {
        let (op, token, id) = (self.op(), token.to_owned(), id.to_owned());
        let save = Event::SaveBegan { key: "k".to_owned(), token, id, value };
        self.at(began, op, save).at(answered, op, answer)
    }

    fn released(self, token: &str, [began, answered]: [Moment; 2], answer: Event) -> Self {
        let (op, token) = (self.op(), token.to_owned());
        self.at(began, op, Event::ReleaseBegan { token }).at(answered, op, answer)
    }

    fn check(&self) -> Report {
        let ids = self.stored.iter().map(ToString::to_string).collect();
        check(&self.lines, &Stored::from([("k".to_owned(), ids)]), Clocks::Agree)
    }

    #[track_caller]
    fn is_good(&self) {
        assert_eq!(self.check().violations, [""; 0]);
    }

    /// Exactly this violation is found, and no other.
    #[track_caller]
    fn is_bad(&self, because: &str) {
        let violations = self.check().violations;
        assert!(!violations.is_empty(), "not seen: {because}");
        let others: Vec<_> = violations.iter().filter(|it| !it.contains(because)).collect();
        assert!(others.is_empty(), "besides {because}: {others:?}");
    }
}

fn story() -> Story {
    Story::default()
}

/// Two holders in turn; the first gives the lock back.
fn in_turn() -> Story {
    story()
        .fenced("a", 1, [0, 10, 1_000])
        .saved("a", 1, "a1", [20, 30])
        .released("a", [40, 60], Event::Released)
        .fenced("b", 2, [35, 50, 1_000])
        .saved("b", 2, "b1", [60, 70])
}

#[test]
fn a_good_history_is_good() {
    in_turn().is_good();
    // The lock has expired and is refused from then on.
    in_turn()
        .fenced("c", 3, [990, 1_001, 2_000])
        .answered_save("b", 3, "b2", [1_010, 1_020], Event::NotSaved)
        .released("b", [1_030, 1_040], Event::AlreadyGone)
        .is_good();
    assert_eq!(in_turn().check().operations(), 5);
}

#[test]
fn readers_may_read_at_the_same_time() {
    story().shared("a", [0, 10, 1_000]).shared("b", [20, 30, 1_000]).is_good();
}

#[test]
fn two_holders_at_once_are_found() {
    let two = story().granted("a", [0, 10, 1_000]);
    two.granted("b", [20, 30, 2_000]).is_bad("was over");
    let reader = || story().shared("a", [0, 10, 1_000]);
    reader().granted("b", [20, 30, 2_000]).is_bad("was over");
    story().granted("a", [0, 10, 1_000]).shared("b", [20, 30, 2_000]).is_bad("was over");
    // Also if a second reader ended earlier.
    reader().shared("b", [11, 12, 100]).granted("c", [500, 510, 2_000]).is_bad("was over");
}

#[test]
fn a_lock_that_had_expired_when_its_answer_came_excludes_nobody() {
    let late = |until| story().granted("b", [20, 60, until]).granted("a", [40, 50, 100]);
    late(60).is_good();
    late(61).is_bad("was over");
}

#[test]
fn a_belief_ends_with_a_loss_and_grows_with_a_renewal() {
    let token = || "a".to_owned();
    let lost = story().granted("a", [0, 10, 1_000]).at(500, 7, Event::Lost { token: token() });
    lost.granted("b", [0, 501, 2_000]).is_good();
    let renewed = Event::Renewed { token: token(), until: 1_500 };
    let renewed = story().granted("a", [0, 10, 1_000]).at(900, 7, renewed);
    renewed.granted("b", [0, 1_400, 2_000]).is_bad("was over");
    let believed = Event::Believed { token: token() };
    let believed = story().granted("a", [0, 10, 1_000]).at(1_200, 7, believed);
    believed.granted("b", [0, 1_100, 2_000]).is_bad("was over");
}

#[test]
fn a_fence_that_does_not_rise_is_found() {
    let one = || story().fenced("a", 5, [0, 10, 20]);
    one().fenced("b", 5, [0, 30, 40]).is_bad("given twice");
    one().fenced("b", 4, [30, 35, 40]).is_bad("not above");
    // Both asked at the same time, so either may be first.
    one().fenced("b", 4, [5, 30, 40]).is_good();
    // Also if the higher fence is not the immediate predecessor.
    one().fenced("b", 7, [30, 35, 40]).fenced("c", 6, [50, 55, 60]).is_bad("not above");
}

#[test]
fn a_lost_update_is_found() {
    let mut lost = in_turn();
    lost.stored = vec!["b1"];
    let violations = lost.check().violations.join("\n");
    assert!(violations.contains("a1 was saved and is lost"), "{violations}");
    let mut twice = in_turn();
    twice.stored = vec!["a1", "b1", "b1"];
    assert!(twice.check().violations.join("\n").contains("stored twice"));
    let mut strange = in_turn();
    strange.stored.push("x");
    strange.is_bad("nobody has sent x");
}

#[test]
fn a_save_of_unknown_outcome_may_have_happened_or_not() {
    let unknown = || Event::Unknown { why: String::new() };
    let save = || in_turn().answered_save("b", 3, "b2", [80, 90], unknown());
    save().is_good();
    let mut happened = save();
    happened.stored.push("b2");
    happened.is_good();
}

#[test]
fn a_save_with_an_old_number_is_found() {
    let old = in_turn().saved("b", 2, "b2", [80, 90]).check().violations.join("\n");
    assert!(old.contains("b2 saved 2 after b1 had saved 2"), "{old}");
}

#[test]
fn a_save_after_a_successor_was_let_in_is_found() {
    story()
        .granted("a", [0, 10, 20])
        .granted("b", [30, 40, 50])
        .saved("a", 1, "a1", [60, 70])
        .is_bad("had the lock by then");
    // The save may have come before the successor's grant.
    story()
        .granted("a", [0, 10, 20])
        .granted("b", [30, 40, 50])
        .saved("a", 1, "a1", [35, 70])
        .is_good();
}

#[test]
fn a_release_that_frees_another_lock_is_found() {
    let again = in_turn().released("b", [80, 90], Event::Released);
    again.released("b", [100, 110], Event::Released).is_bad("released 2 times");
    story()
        .granted("a", [0, 10, 20])
        .granted("b", [30, 40, 50])
        .released("a", [60, 70], Event::Released)
        .is_bad("had it by then");
}

#[test]
fn where_clocks_jump_only_leases_may_overlap() {
    let two = story().fenced("a", 1, [0, 10, 1_000]).fenced("b", 2, [20, 30, 2_000]);
    assert!(check(&two.lines, &BTreeMap::new(), Clocks::Jump).violations.is_empty());
    let bad = two.saved("a", 1, "a1", [60, 70]);
    let stored = Stored::from([("k".to_owned(), vec!["a1".to_owned()])]);
    assert_eq!(check(&bad.lines, &stored, Clocks::Jump).violations.len(), 1);
}
