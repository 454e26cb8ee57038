//! Which element of an array is which, before and after a change: certain, or said to be in doubt.
//!
//! Three things make a pair certain:
//!
//! 1. **An id**: an `_id` or `id` that no other element of the array has.
//! 2. **Texts**: a text that only these two elements have, if no such text speaks for another element; or else more
//!    texts in common than with any third element.
//! 3. **Order**: between two elements that are certain, the same content, or the same position if both sides have as
//!    many elements there.
//!
//! Numbers and equal contents only cast doubt: an element of a list of numbers may have moved, or all numbers may have
//! changed. So the order is believed only if nothing speaks against it: no element that has changed looks as another one
//! did before, and no number that only two elements have joins two others. Of several elements with the same content,
//! nothing tells which one was removed. If elements are left on both sides, nothing tells whether they were removed and
//! inserted, or moved and changed.
//!
//! The pairs that are in the same order on both sides are the anchors of the third rule: the longest such series, as in a
//! patience diff. The work grows with the size of the array, and not with its square: elements are looked up by their
//! values, and values that many elements have are passed over.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    hash::Hash,
};

use super::node::{Feature, Name, Node};

/// A value that more elements have does not tell which element is which.
const SHARED_BY: usize = 4;
/// How often pairs are looked for by their texts: a pair may make another one certain.
const ROUNDS: usize = 4;

/// Which element is which.
#[derive(Debug)]
pub(crate) struct Alignment {
    /// For each element after the change, the position of the element before it that it comes from.
    pub(crate) partners: Vec<Option<usize>>,
    /// Elements before the change that may have been changed, moved or removed: nothing tells which.
    pub(crate) doubtful: HashSet<usize>,
}

/// `are_equal` tells of two elements with the same content before the change whether they are stored alike, too.
pub(crate) fn align(
    before: &[Node],
    after: &[Node],
    are_equal: impl Fn(usize, usize) -> bool,
) -> Alignment {
    let mut it = Aligning {
        ids: ids([before, after]),
        origins: vec![None; after.len()],
        partners: vec![None; before.len()],
        doubtful: HashSet::new(),
    };
    if before.len() <= after.len() && before.iter().zip(after).all(|(b, a)| b.is_same(a)) {
        it.pair((0..before.len()).map(|at| (at, at)));
    }
    it.pair_by_id();
    if it.left().iter().any(|left| !left.is_empty()) {
        let having = having([before, after]);
        it.pair_by_texts(&having);
        it.doubt_new_ids(&having);
        it.doubt_moves(&having);
        it.pair_in_order(&having, &[before, after].map(contents), are_equal);
    }
    Alignment { partners: it.origins, doubtful: it.doubtful }
}

fn contents(elements: &[Node]) -> Vec<u64> {
    elements.iter().map(Node::form).collect()
}

/// The ids of elements, by the first name that both sides use. None for an element without an id, or with the id of
/// another one.
fn ids(sides: [&[Node]; 2]) -> [Vec<Option<u64>>; 2] {
    let ids = |name: &Name| {
        let id = |it: &Node| it.member(name).filter(|id| !id.is_null()).map(Node::form);
        sides.map(|elements| elements.iter().map(id).collect::<Vec<_>>())
    };
    let is_used = |ids: &[Vec<Option<u64>>; 2]| ids.iter().all(|it| it.iter().any(Option::is_some));
    let mut both = ["_id", "id"].map(Name::from).iter().map(ids).find(is_used);
    for ids in both.iter_mut().flatten() {
        let mut counts = HashMap::<_, usize>::new();
        ids.iter().flatten().for_each(|id| *counts.entry(*id).or_default() += 1);
        for id in ids.iter_mut() {
            *id = id.filter(|id| counts[id] == 1);
        }
    }
    both.unwrap_or_else(|| sides.map(|elements| vec![None; elements.len()]))
}

/// Positions of elements: before the change, and after it.
type Pair = (usize, usize);
/// For each key, the positions before the change, and those after it.
type Both<K> = BTreeMap<K, [Vec<usize>; 2]>;
/// The elements of each side that have a value, for the values that both sides have.
type Having = HashMap<Feature, [Vec<usize>; 2]>;

const BEFORE: usize = 0;
const AFTER: usize = 1;

fn having(sides: [&[Node]; 2]) -> Having {
    let mut having = Having::new();
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

/// The pairs that alone have some value: a text, or another value.
fn only_in(having: &Having, is_text: bool) -> impl Iterator<Item = Pair> {
    having.iter().filter(move |(value, _)| value.is_text == is_text).filter_map(|(_, sides)| {
        let [[b], [a]] = sides.each_ref().map(Vec::as_slice) else { return None };
        Some((*b, *a))
    })
}

fn by_key<K: Ord>(elements: [&[usize]; 2], key: impl Fn(usize, usize) -> K) -> Both<K> {
    let mut by_key = Both::<K>::new();
    for (side, elements) in elements.into_iter().enumerate() {
        for at in elements {
            by_key.entry(key(side, *at)).or_default()[side].push(*at);
        }
    }
    by_key
}

/// The longest series of these pairs that are in the same order on both sides. The pairs are in the order after the
/// change.
///
/// Source: patience sorting, as in Schensted, "Longest increasing and decreasing subsequences" (1961).
fn anchors(pairs: impl Iterator<Item = Pair>) -> Vec<Pair> {
    // For each length, the series that ends first, as the position of its last pair; and for each pair the one
    // before it.
    let (mut ends, mut known) = (Vec::<usize>::new(), Vec::<(Pair, Option<usize>)>::new());
    for pair in pairs {
        let length = ends.partition_point(|end| known[*end].0.0 < pair.0);
        known.push((pair, length.checked_sub(1).map(|shorter| ends[shorter])));
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

struct Aligning {
    ids: [Vec<Option<u64>>; 2],
    /// For each element after the change, the one before it.
    origins: Vec<Option<usize>>,
    /// For each element before the change, the one after it.
    partners: Vec<Option<usize>>,
    doubtful: HashSet<usize>,
}

impl Aligning {
    fn pair(&mut self, pairs: impl IntoIterator<Item = Pair>) {
        for (b, a) in pairs {
            if self.may_be_one(b, a) {
                (self.origins[a], self.partners[b]) = (Some(b), Some(a));
            }
        }
    }

    /// False if the two have different ids, or one of them is paired.
    fn may_be_one(&self, b: usize, a: usize) -> bool {
        self.are_free(b, a) && !self.have_other_ids(b, a)
    }

    fn are_free(&self, b: usize, a: usize) -> bool {
        self.partners[b].is_none() && self.origins[a].is_none()
    }

    fn have_other_ids(&self, b: usize, a: usize) -> bool {
        let ids = (self.ids[BEFORE][b], self.ids[AFTER][a]);
        ids.0 != ids.1 && ids.0.is_some() && ids.1.is_some()
    }

    /// The elements that have no partner yet. An element with an id stays alone if all elements on the other side have
    /// ids, too.
    fn left(&self) -> [Vec<usize>; 2] {
        let of = |partners: &[Option<usize>]| {
            (0..partners.len()).filter(|at| partners[*at].is_none()).collect::<Vec<_>>()
        };
        let all = [of(&self.partners), of(&self.origins)];
        let has_nameless = |side: usize| all[side].iter().any(|at| self.ids[side][*at].is_none());
        let have_nameless = [has_nameless(BEFORE), has_nameless(AFTER)];
        let mut left = all.clone();
        for side in [BEFORE, AFTER] {
            left[side].retain(|at| self.ids[side][*at].is_none() || have_nameless[1 - side]);
        }
        left
    }

    fn pair_by_id(&mut self) {
        let before: HashMap<_, _> = self.ids[BEFORE].iter().zip(0..).collect();
        let same = |(id, a): (&Option<u64>, usize)| Some((*before.get(&Some((*id)?))?, a));
        let pairs: Vec<_> = self.ids[AFTER].iter().zip(0..).filter_map(same).collect();
        self.pair(pairs);
    }

    fn pair_by_texts(&mut self, having: &Having) {
        for _ in 0..ROUNDS {
            let only = only_in(having, true).filter(|(b, a)| self.may_be_one(*b, *a));
            let mut found = most_alike(only.map(|pair| (pair, 1)).collect(), |_, _, _| true);
            if found.is_empty() {
                found = self.by_shared_texts(having);
            }
            if found.is_empty() {
                break;
            }
            self.pair(found);
        }
    }

    /// The pairs that have more texts in common than either has with a third element.
    fn by_shared_texts(&self, having: &Having) -> Vec<Pair> {
        let mut alike = HashMap::<Pair, usize>::new();
        // How many texts of each element were passed over: an element that nobody looked at may share them.
        let mut passed_over = [vec![0; self.partners.len()], vec![0; self.origins.len()]];
        for (_, sides) in having.iter().filter(|(value, _)| value.is_text) {
            if sides.iter().any(|all| all.len() > SHARED_BY) {
                for (side, all) in sides.iter().enumerate() {
                    all.iter().for_each(|at| passed_over[side][*at] += 1);
                }
                continue;
            }
            let [before, after] = sides;
            for (b, a) in before.iter().flat_map(|b| after.iter().map(|a| (*b, *a))) {
                // A third element may have a partner.
                if self.partners[b].is_none() || self.origins[a].is_none() {
                    *alike.entry((b, a)).or_default() += 1;
                }
            }
        }
        let is_sure = |side: usize, at: usize, alike: usize| alike > passed_over[side][at];
        let found = most_alike(alike, is_sure).into_iter();
        found.filter(|(b, a)| self.may_be_one(*b, *a)).collect()
    }

    /// An element may have got another id.
    fn doubt_new_ids(&mut self, having: &Having) {
        let changed = only_in(having, true);
        let changed = changed.filter(|(b, a)| self.are_free(*b, *a) && self.have_other_ids(*b, *a));
        let changed: Vec<_> = changed.map(|(b, _)| b).collect();
        self.doubtful.extend(changed);
    }

    /// Texts may have changed places, while the elements and their numbers stayed: so it is if most elements that seem to
    /// have moved have a number in common with the element in their old place.
    fn doubt_moves(&mut self, having: &Having) {
        if self.partners.len() != self.origins.len() {
            return;
        }
        let has_own_id = |b: usize| self.ids[BEFORE][b].is_some();
        let is_moved = |b: usize| self.partners[b].is_some_and(|a| a != b) && !has_own_id(b);
        let moved: Vec<_> = (0..self.partners.len()).filter(|b| is_moved(*b)).collect();
        let stayed: HashSet<_> =
            only_in(having, false).filter(|(b, a)| b == a && is_moved(*b)).map(|it| it.0).collect();
        if 2 * stayed.len() > moved.len() {
            self.doubtful.extend(moved);
        }
    }

    /// For each element of each side, how many anchors there are up to it.
    fn gaps(&self) -> [Vec<usize>; 2] {
        let pairs = self.origins.iter().zip(0..).filter_map(|(b, a)| Some(((*b)?, a)));
        let mut gaps = [vec![0; self.partners.len()], vec![0; self.origins.len()]];
        for (b, a) in anchors(pairs) {
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

    fn pair_in_order(
        &mut self,
        having: &Having,
        contents: &[Vec<u64>; 2],
        are_equal: impl Fn(usize, usize) -> bool,
    ) {
        let (left, gaps) = (self.left(), self.gaps());
        let [free, open] = &left;
        let mut pairs = Vec::new();
        for [before, after] in by_key([free, open], |side, at| gaps[side][at]).into_values() {
            if before.len() == after.len() {
                pairs.extend(before.into_iter().zip(after));
                continue;
            }
            let (found, copies) = unchanged([&before, &after], contents, &are_equal);
            self.doubtful.extend(copies);
            let is_complete = before.len().min(after.len()) == found.len();
            if !is_complete && !after.is_empty() && !before.is_empty() {
                self.doubtful.extend(before);
            }
            pairs.extend(found);
        }
        self.pair(pairs);
        self.doubt_contradictions(&left, having, contents);
        let [free, open] = self.left();
        if !open.is_empty() {
            self.doubtful.extend(free);
        }
    }

    /// An element that has changed, or is gone, may be one that looks as it did.
    fn doubt_contradictions(
        &mut self,
        [free, open]: &[Vec<usize>; 2],
        having: &Having,
        contents: &[Vec<u64>; 2],
    ) {
        let is_unchanged = |b: usize, a: usize| contents[BEFORE][b] == contents[AFTER][a];
        let free =
            free.iter().filter(|b| !self.partners[**b].is_some_and(|a| is_unchanged(**b, a)));
        let open = open.iter().filter(|a| !self.origins[**a].is_some_and(|b| is_unchanged(b, **a)));
        let (free, open): (HashSet<_>, HashSet<_>) =
            (free.copied().collect(), open.copied().collect());
        let looks = |side: usize, of: &HashSet<usize>| {
            of.iter().map(|at| contents[side][*at]).collect::<HashSet<_>>()
        };
        let (before, after) = (looks(BEFORE, &free), looks(AFTER, &open));
        let mut doubtful: Vec<_> =
            free.iter().filter(|b| after.contains(&contents[BEFORE][**b])).copied().collect();
        let taken = open.iter().filter(|a| before.contains(&contents[AFTER][**a]));
        doubtful.extend(taken.filter_map(|a| self.origins[*a]));
        for (b, a) in only_in(having, false) {
            if free.contains(&b) && open.contains(&a) && self.origins[a] != Some(b) {
                doubtful.push(b);
                doubtful.extend(self.origins[a]);
            }
        }
        self.doubtful.extend(doubtful);
    }
}

/// The elements between two anchors that have not changed, and those between them that have the same number on both
/// sides; and the copies of which nothing tells which one is left.
fn unchanged(
    elements: [&[usize]; 2],
    contents: &[Vec<u64>; 2],
    are_equal: &impl Fn(usize, usize) -> bool,
) -> (Vec<Pair>, Vec<usize>) {
    let (mut pairs, mut copies) = (Vec::new(), Vec::new());
    for [before, after] in by_key(elements, |side, at| contents[side][at]).into_values() {
        let are_as_many = before.len() == after.len() || before.is_empty() || after.is_empty();
        let are_alike = || before.len() > 1 && before.windows(2).all(|it| are_equal(it[0], it[1]));
        if !(are_as_many || are_alike()) {
            copies.extend(&before);
        }
        pairs.extend(before.into_iter().zip(after));
    }
    pairs.sort_unstable_by_key(|(_, a)| *a);
    let mut anchors = anchors(pairs.into_iter());
    let gap = |side: usize, at: usize| anchors.partition_point(|(b, a)| [*b, *a][side] <= at);
    let is_anchor: [HashSet<_>; 2] =
        [anchors.iter().map(|it| it.0).collect(), anchors.iter().map(|it| it.1).collect()];
    let others = [BEFORE, AFTER].map(|side| {
        let others = elements[side].iter().filter(|at| !is_anchor[side].contains(*at));
        others.copied().collect::<Vec<_>>()
    });
    let between = by_key([&others[BEFORE], &others[AFTER]], gap).into_values();
    let as_many = between.filter(|[before, after]| before.len() == after.len());
    let changed: Vec<_> =
        as_many.flat_map(|[before, after]| before.into_iter().zip(after)).collect();
    anchors.extend(changed);
    (anchors, copies)
}

/// The pairs that have more in common than either has with any third element.
fn most_alike(
    alike: HashMap<Pair, usize>,
    is_sure: impl Fn(usize, usize, usize) -> bool,
) -> Vec<Pair> {
    let best = [best_of(&alike, |it| it.0), best_of(&alike, |it| it.1)];
    let is_best = |&(pair, alike): &(Pair, usize)| {
        let mut each = [(BEFORE, pair.0), (AFTER, pair.1)].into_iter();
        each.all(|(side, at)| best[side].get(&at) == Some(&Some(pair)) && is_sure(side, at, alike))
    };
    alike.into_iter().filter(is_best).map(|it| it.0).collect()
}

/// For each element of one side, the pair with the most in common; none if there are two such pairs.
fn best_of<K: Hash + Eq>(
    counts: &HashMap<Pair, usize>,
    of: impl Fn(&Pair) -> K,
) -> HashMap<K, Option<Pair>> {
    let mut best = HashMap::<K, (usize, Option<Pair>)>::new();
    for (pair, &in_common) in counts {
        let (most, best) = best.entry(of(pair)).or_default();
        if in_common > *most {
            (*most, *best) = (in_common, Some(*pair));
        } else if in_common == *most {
            *best = None;
        }
    }
    best.into_iter().map(|(at, (_, pair))| (at, pair)).collect()
}
