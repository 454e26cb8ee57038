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
    cmp::Reverse,
    collections::{HashMap, HashSet, VecDeque},
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

    /// A text that is the same for values that are the same. Numbers have the same text whatever their type.
    fn form(&self) -> String {
        format!("{self:?}")
    }

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
            let mut all: Vec<_> = all.iter().map(Self::form).collect();
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
    /// The loaded value, as the Rust type writes it.
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
    /// The members that the merge has added, although the type read a value for them before. The value may be
    /// stored under another name.
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
                self.elements(loaded, before, after).map(Some)
            }
            // Nothing tells which element is which, so all of them must be known to the type.
            (Some(loaded), Some(before), _) => {
                let known: HashSet<_> = before.iter().map(V::form).collect();
                let are_known = loaded.iter().all(|it| known.contains(&it.form()));
                if are_known { Ok(after.cloned()) } else { Err(Refused::Partial) }
            }
            _ => Ok(after.cloned()),
        }
    }

    /// Merges member by member, if all versions are documents.
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
            self.path.push(name.clone());
            if is_grown && !are_same(versions.before, versions.after) {
                self.grown.push(self.path.clone());
            }
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
        let origins = origins(loaded, before);
        let (partners, are_certain) = partners(before, after);
        let has_strangers = |(at, before): (usize, &V)| has_strangers(&loaded[origins[at]], before);
        if !are_certain && before.iter().enumerate().any(has_strangers) {
            return Err(Refused::Partial);
        }
        let mut merged = Vec::new();
        for (element, partner) in after.iter().zip(partners) {
            let Some(at) = partner else {
                merged.push(element.clone());
                continue;
            };
            self.path.push(origins[at].to_string());
            let loaded = Some(&loaded[origins[at]]);
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
    /// Fields or elements of an array that the type does not know would be lost.
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

/// How many pairs of changed elements are compared with each other.
const COMPARED: usize = 10_000;

/// For each element of `before`, the position of the loaded element that it comes from. A set may have another order
/// than its stored form; both arrays have the same length.
fn origins<V: Value>(loaded: &[V], before: &[V]) -> Vec<usize> {
    let in_place = || (0..before.len()).collect();
    if loaded.iter().zip(before).all(|(loaded, before)| agree(loaded, before)) {
        return in_place();
    }
    let (partners, _) = partners(loaded, before);
    let pairs = partners.iter().zip(before).map(|(at, before)| {
        let at = (*at)?;
        agree(&loaded[at], before).then_some(at)
    });
    pairs.collect::<Option<_>>().unwrap_or_else(in_place)
}

/// True if `before` may be the form in which a type writes `loaded`.
fn agree<V: Value>(loaded: &V, before: &V) -> bool {
    match (loaded.elements(), before.elements(), before.members()) {
        (Some(loaded), Some(before), _) => {
            loaded.len() == before.len() && loaded.iter().zip(before).all(|(l, b)| agree(l, b))
        }
        (None, None, Some(mut members)) if loaded.members().is_some() => {
            members.all(|(name, before)| loaded.member(name).is_none_or(|it| agree(it, before)))
        }
        _ => loaded.form() == before.form(),
    }
}

/// True if the loaded value has members that the type does not know.
fn has_strangers<V: Value>(loaded: &V, before: &V) -> bool {
    if let (Some(loaded), Some(before)) = (loaded.elements(), before.elements()) {
        return loaded.iter().zip(before).any(|(l, b)| has_strangers(l, b));
    }
    loaded
        .members()
        .into_iter()
        .flatten()
        .any(|(name, value)| before.member(name).is_none_or(|before| has_strangers(value, before)))
}

/// For each element of `after`, the position of the element of `before` that it comes from. The flag is false if there
/// are too many changed elements to tell.
///
/// The unchanged elements are paired first: from the front, from the back, and those that have moved. The changed
/// elements are recognised by the same `_id` or `id`, then by the most members that are the same, then by
/// their position.
fn partners<V: Value>(before: &[V], after: &[V]) -> (Vec<Option<usize>>, bool) {
    let (mut partners, mut taken) = (vec![None; after.len()], vec![false; before.len()]);
    let mut pair = |b: usize, a: usize| {
        let is_free = partners[a].is_none() && !taken[b];
        if is_free {
            (partners[a], taken[b]) = (Some(b), true);
        }
        is_free
    };
    let both = || before.iter().zip(after);
    let front = both().take_while(|(b, a)| b.is_same(a)).count();
    let rest = before.len().min(after.len()) - front;
    let back = before.iter().rev().zip(after.iter().rev()).take(rest);
    let back = back.take_while(|(b, a)| b.is_same(a)).count();
    for at in 0..front {
        pair(at, at);
    }
    for n in 1..=back {
        pair(before.len() - n, after.len() - n);
    }

    let mut free: Vec<_> = (front..before.len() - back).collect();
    let mut open: Vec<_> = (front..after.len() - back).collect();
    for name in [V::form as fn(&V) -> String, id_of] {
        let mut named = HashMap::<String, VecDeque<usize>>::new();
        for &b in &free {
            named.entry(name(&before[b])).or_default().push_back(b);
        }
        open.retain(|&a| {
            let name = name(&after[a]);
            let b = named.get_mut(&name).filter(|_| !name.is_empty()).and_then(VecDeque::pop_front);
            !b.is_some_and(|b| pair(b, a))
        });
        let left: HashSet<_> = named.into_values().flatten().collect();
        free.retain(|b| left.contains(b));
    }
    free.retain(|&b| id_of(&before[b]).is_empty());
    open.retain(|&a| id_of(&after[a]).is_empty());

    if free.len() == open.len() && free.len() * open.len() > COMPARED {
        for (b, a) in free.into_iter().zip(open) {
            pair(b, a);
        }
        return (partners, true);
    }
    if free.len() * open.len() > COMPARED {
        return (partners, false);
    }
    let mut pairs = Vec::new();
    for (place, &b) in free.iter().enumerate() {
        for (other, &a) in open.iter().enumerate() {
            let likeness = likeness(&before[b], &after[a]);
            let is_in_place = place == other && free.len() == open.len();
            if likeness > Some(0) || (likeness.is_some() && is_in_place) {
                pairs.push((Reverse(likeness), b.abs_diff(a), b, a));
            }
        }
    }
    pairs.sort();
    for (.., b, a) in pairs {
        pair(b, a);
    }
    (partners, true)
}

/// The `_id` or `id` of an element; empty if it has none.
fn id_of<V: Value>(element: &V) -> String {
    let id = element.member("_id").or_else(|| element.member("id"));
    id.map(V::form).unwrap_or_default()
}

/// How many members of two documents are the same. `None` if the two cannot be one value at two times.
fn likeness<V: Value>(before: &V, after: &V) -> Option<usize> {
    if before.elements().is_some() && after.elements().is_some() {
        return Some(0);
    }
    let (members, _) = (before.members()?, after.members()?);
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
