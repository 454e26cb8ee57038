//! Which element of an array is which, before and after a change: certain, or said to be in doubt.
//!
//! The elements are paired by one rule after the other:
//!
//! 1. by an `_id` or `id` that no other element of the array has;
//! 2. by unchanged content that no other element has;
//! 3. by unchanged content that several elements have: in their order, first between the same neighbours, then anywhere;
//! 4. by a text that only these two have, if no such text speaks for another pair; otherwise by another such value, if
//!    none speaks for another pair; otherwise by the most values that are alike, if each of the two is more like the
//!    other than like any third element;
//! 5. by their order between two pairs, if both sides have the same number of elements there, and no value that only two
//!    elements have speaks against it.
//!
//! An element of which nothing is left after the change was removed, if no element is new. Otherwise it is in doubt.
//!
//! The pairs that are in the same order on both sides are the anchors of the third and the fifth rule: the longest such
//! series, as in a patience diff. The work grows with the size of the array, and not with its square: the fourth rule
//! looks elements up by their values, and passes over values that many elements have.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap, HashSet},
};

use super::node::{Feature, Name, Node};

/// A value that more elements have does not tell which element is which.
const SHARED_BY: usize = 8;
/// How often the fourth rule is applied: a pair may make another one certain.
const ROUNDS: usize = 4;

/// Which element is which.
#[derive(Debug)]
pub(super) struct Alignment {
    /// For each element after the change, the position of the element before it that it comes from.
    pub(super) partners: Vec<Option<usize>>,
    /// Elements before the change that may have been changed, moved or removed: nothing tells which.
    pub(super) doubtful: Vec<usize>,
}

/// `are_equal` tells of two elements with the same content before the change whether they are stored alike, too.
pub(super) fn align(
    before: &[Node],
    after: &[Node],
    are_equal: impl Fn(usize, usize) -> bool,
) -> Alignment {
    let mut it = Aligning {
        before,
        after,
        ids: [before, after].map(ids),
        origins: vec![None; after.len()],
        is_taken: vec![false; before.len()],
    };
    let by_id: HashMap<_, _> = it.ids[BEFORE].iter().zip(0..).collect();
    let same = |(a, id): (usize, &Option<u64>)| Some((*by_id.get(id)?, a)).filter(|_| id.is_some());
    it.pair(it.ids[AFTER].iter().enumerate().filter_map(same).collect());
    let contents = [before, after].map(|all| all.iter().map(Node::form).collect::<Vec<_>>());
    it.pair(it.only_ones(|side, at| contents[side][at]));
    let mut doubtful = it.pair_copies(&contents, true, &are_equal);
    doubtful.extend(it.pair_copies(&contents, false, &are_equal));
    let contradictions = it.pair_alike();
    doubtful.extend(it.pair_in_order(&contradictions));
    Alignment { partners: it.origins, doubtful }
}

/// The ids of elements; none for an element without an id, or with the id of another one.
fn ids(elements: &[Node]) -> Vec<Option<u64>> {
    let names: [Name; 2] = ["_id", "id"].map(Name::from);
    let id = |it: &Node| names.iter().find_map(|name| it.member(name)).map(Node::form);
    let ids: Vec<_> = elements.iter().map(id).collect();
    let mut counts = HashMap::<_, usize>::new();
    ids.iter().flatten().for_each(|id| *counts.entry(*id).or_default() += 1);
    ids.into_iter().map(|id| id.filter(|id| counts[id] == 1)).collect()
}

/// Positions of elements: before the change, and after it.
type Pair = (usize, usize);
/// For each key, the positions before the change, and those after it.
type Both<K> = BTreeMap<K, [Vec<usize>; 2]>;

const BEFORE: usize = 0;
const AFTER: usize = 1;

struct Aligning<'a> {
    before: &'a [Node],
    after: &'a [Node],
    ids: [Vec<Option<u64>>; 2],
    origins: Vec<Option<usize>>,
    is_taken: Vec<bool>,
}

impl Aligning<'_> {
    fn pair(&mut self, pairs: Vec<Pair>) {
        for (b, a) in pairs {
            if self.may_be_one(b, a) {
                (self.origins[a], self.is_taken[b]) = (Some(b), true);
            }
        }
    }

    /// False if the two have different ids, or one of them is paired.
    fn may_be_one(&self, b: usize, a: usize) -> bool {
        let ids = (self.ids[BEFORE][b], self.ids[AFTER][a]);
        let is_free = !self.is_taken[b] && self.origins[a].is_none();
        is_free && (ids.0 == ids.1 || ids.0.is_none() || ids.1.is_none())
    }

    /// The elements that have no partner yet. An element with an id stays alone if all elements on the other side have
    /// ids, too.
    fn left(&self) -> [Vec<usize>; 2] {
        let free = (0..self.before.len()).filter(|b| !self.is_taken[*b]).collect::<Vec<_>>();
        let open = (0..self.after.len()).filter(|a| self.origins[*a].is_none()).collect::<Vec<_>>();
        let all = [free, open];
        let is_nameless = |side: usize| all[side].iter().any(|at| self.ids[side][*at].is_none());
        let are_nameless = [is_nameless(BEFORE), is_nameless(AFTER)];
        let mut left = all.clone();
        for side in [BEFORE, AFTER] {
            left[side].retain(|at| self.ids[side][*at].is_none() || are_nameless[1 - side]);
        }
        left
    }

    fn left_by<K: Ord>(&self, key: impl Fn(usize, usize) -> K) -> Both<K> {
        let mut by_key = Both::<K>::new();
        for (side, left) in self.left().into_iter().enumerate() {
            left.iter().for_each(|at| by_key.entry(key(side, *at)).or_default()[side].push(*at));
        }
        by_key
    }

    /// The pairs of those elements that are the only ones of their side with their key.
    fn only_ones<K: Ord>(&self, key: impl Fn(usize, usize) -> K) -> Vec<Pair> {
        let only_one = |both: [Vec<usize>; 2]| match both.each_ref().map(Vec::as_slice) {
            [[b], [a]] => Some((*b, *a)),
            _ => None,
        };
        self.left_by(key).into_values().filter_map(only_one).collect()
    }

    /// Pairs elements of the same content in their order, either between anchors or anywhere. Returns those that are in
    /// doubt: one of them was removed, and they are not stored alike.
    fn pair_copies(
        &mut self,
        contents: &[Vec<u64>; 2],
        between_anchors: bool,
        are_equal: &impl Fn(usize, usize) -> bool,
    ) -> Vec<usize> {
        let gaps = self.gaps();
        let gap = |side: usize, at: usize| if between_anchors { gaps[side][at] } else { 0 };
        let copies = self.left_by(|side, at| (contents[side][at], gap(side, at)));
        let mut doubtful = Vec::new();
        for [before, after] in copies.into_values() {
            let are_fewer = before.len() > after.len() && !after.is_empty();
            if are_fewer && before.windows(2).any(|two| !are_equal(two[0], two[1])) {
                doubtful.extend(&before);
            }
            self.pair(before.into_iter().zip(after).collect());
        }
        doubtful
    }

    /// For each element of each side, how many anchors there are up to it.
    fn gaps(&self) -> [Vec<usize>; 2] {
        let mut gaps = [vec![0; self.before.len()], vec![0; self.after.len()]];
        for (b, a) in self.anchors() {
            (gaps[BEFORE][b], gaps[AFTER][a]) = (1, 1);
        }
        for side in &mut gaps {
            let mut passed = 0;
            for gap in side {
                passed += *gap;
                *gap = passed;
            }
        }
        gaps
    }

    /// The longest series of pairs that are in the same order on both sides.
    ///
    /// Source: patience sorting, as in Schensted, "Longest increasing and decreasing subsequences" (1961).
    fn anchors(&self) -> Vec<Pair> {
        let pairs = self.origins.iter().enumerate().filter_map(|(a, b)| Some(((*b)?, a)));
        // For each length, the series that ends first, as the position of its last pair; and for each pair the one
        // before it.
        let (mut ends, mut known) = (Vec::<usize>::new(), Vec::<(Pair, Option<usize>)>::new());
        for pair in pairs {
            let length = ends.partition_point(|end| known[*end].0.0 < pair.0);
            known.push((pair, length.checked_sub(1).map(|shorter| ends[shorter])));
            ends.truncate(ends.len().max(length));
            match ends.get_mut(length) {
                Some(end) => *end = known.len() - 1,
                None => ends.push(known.len() - 1),
            }
        }
        let mut series = Vec::new();
        let mut last = ends.last().copied();
        while let Some(at) = last {
            series.push(known[at].0);
            last = known[at].1;
        }
        series.reverse();
        series
    }

    /// Pairs the elements that are alike. Returns the pairs that speak against others: some value is only in these two.
    fn pair_alike(&mut self) -> HashSet<Pair> {
        if self.left().iter().any(Vec::is_empty) {
            return HashSet::new();
        }
        let having = having([self.before, self.after]);
        let mut likeness = self.likeness(&having);
        for _ in 0..ROUNDS {
            let found = self.most_alike(&likeness);
            if found.is_empty() {
                break;
            }
            self.pair(found);
            likeness = self.likeness(&having);
        }
        let tells = |likeness: &Likeness| likeness.texts + likeness.others > 0;
        likeness.pairs.into_iter().filter(|(_, it)| tells(it)).map(|(pair, _)| pair).collect()
    }

    /// How much the elements without a partner have in common with all others.
    fn likeness(&self, having: &HashMap<Feature, [Vec<usize>; 2]>) -> Likenesses {
        let mut is_left = [vec![false; self.before.len()], vec![false; self.after.len()]];
        for (side, left) in self.left().into_iter().enumerate() {
            left.into_iter().for_each(|at| is_left[side][at] = true);
        }
        let mut it = Likenesses {
            pairs: HashMap::new(),
            passed_over: [vec![0; self.before.len()], vec![0; self.after.len()]],
        };
        for (value, sides) in having {
            if sides.iter().any(|all| all.len() > SHARED_BY) {
                for (side, all) in sides.iter().enumerate() {
                    all.iter().for_each(|at| it.passed_over[side][*at] += 1);
                }
                continue;
            }
            let is_unique = sides.iter().all(|all| all.len() == 1);
            let [before, after] = sides;
            for (b, a) in before.iter().flat_map(|b| after.iter().map(|a| (*b, *a))) {
                let are_left = [is_left[BEFORE][b], is_left[AFTER][a]];
                if are_left == [false; 2] {
                    continue;
                }
                let likeness = it.pairs.entry((b, a)).or_default();
                likeness.alike += 1;
                if is_unique && self.may_be_one(b, a) {
                    let kind =
                        if value.is_text { &mut likeness.texts } else { &mut likeness.others };
                    *kind += 1;
                }
            }
        }
        it
    }

    fn most_alike(&self, Likenesses { pairs, passed_over }: &Likenesses) -> Vec<Pair> {
        let best = [best_of(pairs, |it| it.0), best_of(pairs, |it| it.1)];
        let is_best = |(pair, likeness): (&Pair, &Likeness)| {
            let mut each = [(BEFORE, pair.0), (AFTER, pair.1)].into_iter();
            let is_best = each.all(|(side, at)| {
                let tells = likeness.texts + likeness.others > 0;
                let is_sure = tells || likeness.alike > passed_over[side][at];
                is_sure && best[side].get(&at).is_some_and(|it| it.only == Some(*pair))
            });
            (is_best && self.may_be_one(pair.0, pair.1)).then_some(*pair)
        };
        let mut found: Vec<_> = pairs.iter().filter_map(is_best).collect();
        found.sort_unstable();
        found
    }

    /// Pairs elements by their order between two anchors, if there is nothing to be said against it. Returns those that
    /// are in doubt: they may have been removed, or moved and changed.
    fn pair_in_order(&mut self, contradictions: &HashSet<Pair>) -> Vec<usize> {
        let (mut with, mut of) = (HashMap::<_, Vec<_>>::new(), HashMap::<_, Vec<_>>::new());
        for (b, a) in contradictions {
            with.entry(*b).or_default().push(*a);
            of.entry(*a).or_default().push(*b);
        }
        let is_certain = |it: &Self, b: usize, a: usize| {
            let others = with.get(&b).into_iter().flatten().any(|it| *it != a);
            it.may_be_one(b, a) && !others && of.get(&a).into_iter().flatten().all(|it| *it == b)
        };
        let gaps = self.gaps();
        for [before, after] in self.left_by(|side, at| gaps[side][at]).into_values() {
            let are_as_many = before.len() == after.len();
            let pairs: Vec<_> = before.into_iter().zip(after).collect();
            if are_as_many && pairs.iter().all(|(b, a)| is_certain(self, *b, *a)) {
                self.pair(pairs);
            }
        }
        let [free, open] = self.left();
        if open.is_empty() { Vec::new() } else { free }
    }
}

/// How much two elements have in common.
#[derive(Debug, Default, Clone, Copy)]
struct Likeness {
    /// Texts and ids that only these two elements have.
    texts: usize,
    /// Numbers and other values that only these two elements have.
    others: usize,
    /// All values that they share.
    alike: usize,
}

struct Likenesses {
    pairs: HashMap<Pair, Likeness>,
    /// How many values of each element were passed over: an element that nobody looked at may share them.
    passed_over: [Vec<usize>; 2],
}

/// What one element has in common with those of the other side.
#[derive(Default)]
struct Best {
    /// One kind of evidence outweighs the next: a text, another value, the number of values.
    of: [usize; 3],
    /// The only pair with the strongest evidence. Two texts that tell two things leave none.
    only: Option<Pair>,
}

fn best_of(pairs: &HashMap<Pair, Likeness>, of: impl Fn(&Pair) -> usize) -> HashMap<usize, Best> {
    let mut best = HashMap::<usize, Best>::new();
    for (pair, &Likeness { texts, others, alike }) in pairs {
        let evidence = match (texts, others) {
            (0, 0) => [0, 0, alike],
            (0, _) => [0, 1, 0],
            _ => [1, 0, 0],
        };
        let it = best.entry(of(pair)).or_default();
        match evidence.cmp(&it.of) {
            Ordering::Greater => *it = Best { of: evidence, only: Some(*pair) },
            Ordering::Equal => it.only = None,
            Ordering::Less => {}
        }
    }
    best
}

/// The elements of each side that have a value, for the values that both sides have.
fn having(sides: [&[Node]; 2]) -> HashMap<Feature, [Vec<usize>; 2]> {
    let mut having = HashMap::<_, [Vec<usize>; 2]>::new();
    for (side, elements) in sides.into_iter().enumerate() {
        for (at, element) in elements.iter().enumerate() {
            for feature in element.features() {
                having.entry(feature).or_default()[side].push(at);
            }
        }
    }
    having.retain(|_, sides| sides.iter().all(|it| !it.is_empty()));
    having
}
