//! The result of a save: a three-way merge, along the document that was loaded.
//!
//! A Rust type may know a stored document under other names, with defaults, or in part. So the type's own form of
//! the document *before* and *after* the change only tells which values the application has changed. The result
//! follows the *loaded* document:
//!
//! - A value that the application left alone keeps its stored form, and the changes of other programs.
//! - A document is merged member by member, at any depth.
//! - An array is rewritten as a whole. Its elements are paired with the elements of the loaded array: an unchanged
//!   element keeps its stored form, and a changed element is merged like a document.
//! - A document or an array is rewritten as a whole only if it has not changed since it was loaded. A value without
//!   members replaces another such value in any case: the holder of the lock decides.

use std::{
    collections::{HashMap, VecDeque},
    fmt::Debug,
};

/// A JSON or BSON value.
pub(in crate::store) trait Value: Clone + Debug {
    /// The members, if the value is a document.
    fn members(&self) -> Option<impl Iterator<Item = (&String, &Self)>>;

    /// A member, if the value is a document that has it.
    fn member(&self, name: &str) -> Option<&Self>;

    /// The elements, if the value is an array.
    fn elements(&self) -> Option<&[Self]>;

    fn document(members: impl Iterator<Item = (String, Self)>) -> Self;

    fn array(elements: Vec<Self>) -> Self;

    /// True if neither value has members or elements, and replacing one with the other changes nothing.
    fn is_same_leaf(&self, other: &Self) -> bool;

    fn is_leaf(&self) -> bool {
        self.elements().is_none() && self.members().is_none()
    }

    /// True if replacing one value with the other changes nothing. The order of members does not count: a
    /// map may encode its entries in a different order each time.
    fn is_same(&self, other: &Self) -> bool {
        match (self.members(), other.members(), self.elements(), other.elements()) {
            (Some(mine), Some(theirs), ..) => {
                let mut count = 0;
                mine.inspect(|_| count += 1)
                    .all(|(name, value)| other.member(name).is_some_and(|it| value.is_same(it)))
                    && theirs.count() == count
            }
            (_, _, Some(mine), Some(theirs)) => {
                mine.len() == theirs.len() && mine.iter().zip(theirs).all(|(a, b)| a.is_same(b))
            }
            (None, None, None, None) => self.is_same_leaf(other),
            _ => false,
        }
    }

    /// True if the two are the same, except for the order of elements: a set may encode its elements in another
    /// order each time.
    fn is_alike(&self, other: &Self) -> bool {
        if let (Some(mine), Some(theirs)) = (self.members(), other.members()) {
            let theirs = theirs.count();
            let mut mine = mine.map(|(name, value)| (value, other.member(name)));
            let members = self.members().map_or(0, Iterator::count);
            return members == theirs && mine.all(|(a, b)| b.is_some_and(|b| a.is_alike(b)));
        }
        let (Some(mine), Some(theirs)) = (self.elements(), other.elements()) else {
            return self.is_same(other);
        };
        let sorted = |all: &[Self]| {
            let mut all: Vec<_> = all.iter().map(|it| format!("{it:?}")).collect();
            all.sort();
            all
        };
        let is_in_order = || mine.iter().zip(theirs).all(|(a, b)| a.is_alike(b));
        mine.len() == theirs.len() && (is_in_order() || sorted(mine) == sorted(theirs))
    }
}

/// Where a value is in its document: the names of members, and the positions of elements.
pub(super) type Path = Vec<String>;

/// One value in four versions. `None` if the version does not have it.
#[derive(Debug)]
pub(super) struct Versions<'a, V> {
    /// As it was loaded.
    pub(super) loaded: Option<&'a V>,
    /// The same, as the Rust type writes it.
    pub(super) before: Option<&'a V>,
    /// As the Rust type writes it after the change.
    pub(super) after: Option<&'a V>,
    /// As it is stored now. Other programs may have changed it since it was loaded.
    pub(super) now: Option<&'a V>,
}

impl<V> Clone for Versions<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V> Copy for Versions<'_, V> {}

/// A merge under way.
#[derive(Debug)]
pub(super) struct Merge {
    /// The place in the loaded document at which the merge is.
    path: Path,
    /// The documents to which the merge has added a member that was not stored, although the type read a value
    /// for it. The value may be stored under another name.
    pub(super) grown: Vec<Path>,
}

impl Merge {
    /// The result.
    ///
    /// # Errors
    /// Why a value cannot be written, and its path.
    pub(super) fn of<V: Value>(versions: Versions<'_, V>) -> Result<(V, Self), (Refused, Path)> {
        let mut merge = Self { path: Path::new(), grown: Vec::new() };
        match merge.value(versions) {
            Ok(merged) => Ok((merged.unwrap_or_else(|| V::document([].into_iter())), merge)),
            Err(why) => Err((why, merge.path)),
        }
    }

    fn value<'a, V: Value>(&mut self, it: Versions<'a, V>) -> Result<Option<V>, Refused> {
        let Versions { loaded, before, after, now } = it;
        if are_same(before, after) || are_same(now, after) {
            return Ok(now.cloned());
        }
        if let Some(merged) = self.members(it)? {
            return Ok(Some(merged));
        }
        let is_whole = [loaded, after, now].into_iter().flatten().any(|it| !it.is_leaf());
        if is_whole && !are_same(loaded, now) {
            return Err(Refused::Changed);
        }
        let elements = |of: Option<&'a V>| of.and_then(V::elements);
        match (elements(loaded), elements(before), elements(after)) {
            (Some(loaded), Some(before), Some(after)) if loaded.len() == before.len() => {
                // A set may have another order than its stored form.
                let is_set = loaded.iter().all(V::is_leaf) && are_alike(it.loaded, it.before);
                let loaded = if is_set { before } else { loaded };
                self.elements(loaded, before, after).map(Some)
            }
            // Nothing tells which element is which, so all of them must be known to the type.
            (Some(loaded), Some(before), _)
                if !loaded.iter().all(|it| before.iter().any(|other| other.is_same(it))) =>
            {
                Err(Refused::Partial)
            }
            _ => Ok(after.cloned()),
        }
    }

    /// Member by member, if all versions are documents.
    fn members<V: Value>(&mut self, it: Versions<'_, V>) -> Result<Option<V>, Refused> {
        let Versions {
            loaded: Some(loaded),
            before: Some(before),
            after: Some(after),
            now: Some(now),
        } = it
        else {
            return Ok(None);
        };
        let (Some(_), Some(_), Some(new), Some(old)) =
            (loaded.members(), before.members(), after.members(), now.members())
        else {
            return Ok(None);
        };
        let new = new.map(|(name, _)| name).filter(|name| now.member(name).is_none());
        let mut merged = Vec::new();
        for name in old.map(|(name, _)| name).chain(new) {
            let versions = Versions {
                loaded: loaded.member(name),
                before: before.member(name),
                after: after.member(name),
                now: now.member(name),
            };
            let is_grown = versions.loaded.is_none() && versions.before.is_some();
            if is_grown && !are_same(versions.before, versions.after) {
                self.grown.push(self.path.clone());
            }
            self.path.push(name.clone());
            let value = self.value(versions)?;
            self.path.pop();
            merged.extend(value.map(|value| (name.clone(), value)));
        }
        Ok(Some(V::document(merged.into_iter())))
    }

    /// The new array. The stored array has not changed since it was loaded.
    fn elements<V: Value>(
        &mut self,
        loaded: &[V],
        before: &[V],
        after: &[V],
    ) -> Result<V, Refused> {
        let mut merged = Vec::new();
        for (element, partner) in after.iter().zip(partners(before, after)) {
            let Some(at) = partner else {
                merged.push(element.clone());
                continue;
            };
            self.path.push(at.to_string());
            let loaded = Some(&loaded[at]);
            let (before, after) = (Some(&before[at]), Some(element));
            merged.extend(self.value(Versions { loaded, before, after, now: loaded })?);
            self.path.pop();
        }
        Ok(V::array(merged))
    }
}

/// Why a value cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// It would be rewritten as a whole, but has changed since it was loaded.
    Changed,
    /// The type has read only some elements of an array, so the others would be lost.
    Partial,
}

pub(super) fn are_same<V: Value>(a: Option<&V>, b: Option<&V>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.is_same(b),
        (a, b) => a.is_none() && b.is_none(),
    }
}

pub(super) fn are_alike<V: Value>(a: Option<&V>, b: Option<&V>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.is_alike(b),
        (a, b) => a.is_none() && b.is_none(),
    }
}

/// How many pairs of changed elements are compared with each other. In larger arrays a changed element is
/// recognised by its position alone.
const COMPARED: usize = 10_000;

/// For each element of `after`, the element of `before` that it was.
///
/// First the elements that have not changed: from the front, from the back, and those that have moved. The
/// changed ones are recognised by the same `_id` or `id`, then by the most members that are the same, then by
/// their position.
fn partners<V: Value>(before: &[V], after: &[V]) -> Vec<Option<usize>> {
    let mut partners = vec![None; after.len()];
    let both = || before.iter().zip(after);
    let front = both().take_while(|(b, a)| b.is_same(a)).count();
    let rest = before.len().min(after.len()) - front;
    let back = before.iter().rev().zip(after.iter().rev()).take(rest);
    let back = back.take_while(|(b, a)| b.is_same(a)).count();
    (0..front).for_each(|at| partners[at] = Some(at));
    for n in 1..=back {
        partners[after.len() - n] = Some(before.len() - n);
    }

    let mut free: Vec<_> = (front..before.len() - back).collect();
    let mut open: Vec<_> = (front..after.len() - back).collect();
    let mut moved = HashMap::<String, VecDeque<usize>>::new();
    for at in &free {
        moved.entry(format!("{:?}", before[*at])).or_default().push_back(*at);
    }
    open.retain(|&at| {
        let same = moved.get_mut(&format!("{:?}", after[at]));
        partners[at] = same.and_then(VecDeque::pop_front);
        partners[at].is_none()
    });
    free.retain(|at| !partners.contains(&Some(*at)));

    let mut pairs = Vec::new();
    for (place, &b) in free.iter().enumerate() {
        let is_compared = free.len().saturating_mul(open.len()) <= COMPARED;
        let others: Vec<_> = match is_compared {
            true => (0..open.len()).collect(),
            false => Vec::from_iter((place < open.len()).then_some(place)),
        };
        for other in others {
            let likeness = likeness(&before[b], &after[open[other]]);
            let is_in_place = place == other && free.len() == open.len();
            if likeness > Some(0) || (likeness.is_some() && is_in_place) {
                pairs.push((likeness, b.abs_diff(open[other]), b, open[other]));
            }
        }
    }
    pairs.sort_by_key(|(likeness, distance, ..)| (std::cmp::Reverse(*likeness), *distance));
    let mut taken = vec![false; before.len()];
    for (.., b, a) in pairs {
        if partners[a].is_none() && !taken[b] {
            (partners[a], taken[b]) = (Some(b), true);
        }
    }
    partners
}

/// How many members of two documents are the same. `None` if the two cannot be one document at two times.
fn likeness<V: Value>(before: &V, after: &V) -> Option<usize> {
    if before.elements().is_some() && after.elements().is_some() {
        return Some(0);
    }
    let (members, _) = (before.members()?, after.members()?);
    for id in ["_id", "id"] {
        if let (Some(before), Some(after)) = (before.member(id), after.member(id)) {
            return before.is_same(after).then_some(usize::MAX);
        }
    }
    Some(members.filter(|(name, value)| are_same(after.member(name), Some(*value))).count())
}

impl Value for serde_json::Value {
    fn members(&self) -> Option<impl Iterator<Item = (&String, &Self)>> {
        self.as_object().map(|members| members.iter())
    }

    fn member(&self, name: &str) -> Option<&Self> {
        self.as_object()?.get(name)
    }

    fn elements(&self) -> Option<&[Self]> {
        self.as_array().map(Vec::as_slice)
    }

    fn document(members: impl Iterator<Item = (String, Self)>) -> Self {
        Self::Object(members.collect())
    }

    fn array(elements: Vec<Self>) -> Self {
        Self::Array(elements)
    }

    fn is_same_leaf(&self, other: &Self) -> bool {
        self == other
    }
}
