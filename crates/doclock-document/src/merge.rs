//! The result of a save: a three-way merge, along the document that was loaded.
//!
//! A Rust type may know a stored document under other names, with defaults, or in part. So the type's own form of
//! the document *before* and *after* the change only tells which values the application has changed. The result
//! follows the *loaded* document:
//!
//! - A value that the application left alone keeps its stored form, and the changes of other programs.
//! - A document is merged member by member, at any depth.
//! - An array is rewritten as a whole. Its elements are [aligned](super::align) with the elements of the loaded array: an
//!   unchanged element keeps its stored form, and a changed element is merged like a document. If it is in doubt what
//!   became of an element, and the element has members that the type does not know, nothing is written.
//! - A document or an array is rewritten as a whole only if it has not changed since it was loaded. A value without
//!   members replaces another such value in any case: the holder of the lock decides.

use std::collections::{HashMap, HashSet};

use super::{
    align::{Alignment, align},
    node::{Feature, Members, Name, Node, Path, are_same},
};

/// How many loaded elements are looked at, of those with a value in common.
const CANDIDATES: usize = 64;

/// One value in four versions. `None` if the version does not have it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Versions<'a> {
    /// As it was loaded.
    pub(crate) loaded: Option<&'a Node>,
    /// The loaded value, as the Rust type writes it.
    pub(crate) before: Option<&'a Node>,
    /// As the Rust type writes it after the change.
    pub(crate) after: Option<&'a Node>,
    /// As it is stored now. Other programs may have changed it since it was loaded.
    pub(crate) now: Option<&'a Node>,
}

/// A merge under way.
#[derive(Debug, Default)]
pub(crate) struct Merge<'a> {
    /// The place in the loaded document at which the merge is.
    pub(crate) path: Path,
    /// The same place in the result, in which the elements of arrays may have other positions.
    place: Path,
    /// Members that the merge would add, although the type read a value for them before, each with the document as the
    /// type writes it. The value may be stored under another name.
    pub(crate) grown: Vec<(Path, &'a Members)>,
    /// The documents of the result whose members the application may have put into another order, and the new order.
    pub(crate) reordered: Vec<(Path, &'a Members)>,
}

impl<'a> Merge<'a> {
    /// The result.
    ///
    /// # Errors
    /// Why a value cannot be written, and the merge, which has stopped at this value.
    pub(crate) fn of(versions: Versions<'a>) -> Result<(Node, Self), (Unwritable, Self)> {
        let mut merge = Self::default();
        match merge.value(versions) {
            Ok(merged) => Ok((merged.unwrap_or_else(|| Node::Document(Members::new())), merge)),
            Err(why) => Err((why, merge)),
        }
    }

    fn within<T>(
        &mut self,
        step: Name,
        in_result: Name,
        act: impl FnOnce(&mut Self) -> Result<T, Unwritable>,
    ) -> Result<T, Unwritable> {
        self.path.push(step);
        self.place.push(in_result);
        let done = act(self)?;
        self.path.pop();
        self.place.pop();
        Ok(done)
    }

    fn value(&mut self, it: Versions<'a>) -> Result<Option<Node>, Unwritable> {
        let Versions { loaded, before, after, now } = it;
        if are_same(before, after) {
            if let (Some(before), Some(after)) = (before, after) {
                self.note_order(before, after);
            }
            return Ok(now.cloned());
        }
        if are_same(now, after) {
            return Ok(now.cloned());
        }
        if let Some(merged) = self.members(it)? {
            return Ok(Some(merged));
        }
        let is_whole = [loaded, after, now].into_iter().flatten().any(|it| !it.is_leaf());
        if is_whole && !are_same(loaded, now) {
            return Err(Unwritable::Changed);
        }
        match [loaded, before, after].map(|it| it.and_then(Node::elements)) {
            [Some(loaded), Some(before), Some(after)] if loaded.len() == before.len() => {
                self.elements(loaded, before, after).map(Some)
            }
            // Nothing tells which element is which, so all of them must be known to the type.
            [Some(loaded), Some(before), _] if !are_known(loaded, before) => {
                Err(Unwritable::Partial)
            }
            _ => Ok(after.cloned()),
        }
    }

    /// Merges member by member, if all versions are documents.
    fn members(&mut self, it: Versions<'a>) -> Result<Option<Node>, Unwritable> {
        let members = [it.loaded, it.before, it.after, it.now].map(|it| it.and_then(Node::members));
        let [Some(loaded), Some(before), Some(after), Some(now)] = members else {
            return Ok(None);
        };
        if is_reordered(before, after) {
            self.reordered.push((self.place.clone(), after));
        }
        let new = after.keys().filter(|name| !now.contains_key(*name));
        let mut merged = Members::new();
        for name in now.keys().chain(new) {
            let [loaded, before_it, after, now] =
                [loaded, before, after, now].map(|members| members.get(name));
            let value = self.within(name.clone(), name.clone(), |merge| {
                if loaded.is_none() && before_it.is_some() && !are_same(before_it, after) {
                    merge.grown.push((merge.path.clone(), before));
                }
                merge.value(Versions { loaded, before: before_it, after, now })
            })?;
            merged.extend(value.map(|value| (name.clone(), value)));
        }
        Ok(Some(Node::Document(merged)))
    }

    /// The new array. The stored array has not changed since it was loaded.
    fn elements(
        &mut self,
        loaded: &'a [Node],
        before: &'a [Node],
        after: &'a [Node],
    ) -> Result<Node, Unwritable> {
        let Some(origins) = origins(loaded, before) else {
            let is_lossless = are_known(loaded, before);
            return if is_lossless {
                Ok(Node::Array(after.to_vec()))
            } else {
                Err(Unwritable::Partial)
            };
        };
        let are_equal = |a: usize, b: usize| loaded[origins[a]].is_same(&loaded[origins[b]]);
        let Alignment { partners, doubtful } = align(before, after, are_equal);
        if doubtful.iter().any(|at| has_strangers(&loaded[origins[*at]], &before[*at])) {
            // Perhaps the type knows all of it, but under other names.
            for (before, at) in before.iter().zip(origins) {
                self.path.push(at.into());
                self.note_missing(&loaded[at], before);
                self.path.pop();
            }
            return Err(Unwritable::Partial);
        }
        let mut merged = Vec::with_capacity(after.len());
        for (n, (element, partner)) in after.iter().zip(partners).enumerate() {
            let Some(at) = partner else {
                merged.push(element.clone());
                continue;
            };
            let loaded = Some(&loaded[origins[at]]);
            let (before, after) = (Some(&before[at]), Some(element));
            let versions = Versions { loaded, before, after, now: loaded };
            let value = self.within(origins[at].into(), n.into(), |merge| merge.value(versions));
            merged.extend(value?);
        }
        Ok(Node::Array(merged))
    }

    /// Notes the members that the type has read, but which are not stored under their names.
    fn note_missing(&mut self, loaded: &Node, before: &'a Node) {
        match (loaded, before) {
            (Node::Document(loaded), Node::Document(written)) => {
                for (name, before) in written {
                    self.path.push(name.clone());
                    match loaded.get(name) {
                        Some(loaded) => self.note_missing(loaded, before),
                        None => self.grown.push((self.path.clone(), written)),
                    }
                    self.path.pop();
                }
            }
            (Node::Array(loaded), Node::Array(before)) if loaded.len() == before.len() => {
                for (at, before) in origins(loaded, before).into_iter().flatten().zip(before) {
                    self.path.push(at.into());
                    self.note_missing(&loaded[at], before);
                    self.path.pop();
                }
            }
            _ => {}
        }
    }

    /// Notes the documents in a value that has stayed the same but for the order of its members.
    fn note_order(&mut self, before: &Node, after: &'a Node) {
        let mut note = |step: Name, before: &Node, after: &'a Node| {
            self.place.push(step);
            self.note_order(before, after);
            self.place.pop();
        };
        match (before, after) {
            (Node::Document(before), Node::Document(after)) => {
                for (name, after) in after {
                    if let Some(before) = before.get(name) {
                        note(name.clone(), before, after);
                    }
                }
                if is_reordered(before, after) {
                    self.reordered.push((self.place.clone(), after));
                }
            }
            (Node::Array(before), Node::Array(after)) => {
                let both = before.iter().zip(after).enumerate();
                both.for_each(|(at, (before, after))| note(at.into(), before, after));
            }
            _ => {}
        }
    }
}

/// True if members have changed their order, or if a new member is not the last.
fn is_reordered(before: &Members, after: &Members) -> bool {
    let old = before.keys().filter(|name| after.contains_key(*name));
    let new = after.keys().filter(|name| !before.contains_key(*name)).count();
    new > 1 || !old.eq(after.keys().take(after.len() - new))
}

/// Why a value cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unwritable {
    /// It would be rewritten as a whole, but has changed since it was loaded.
    Changed,
    /// Fields or elements of an array that the type does not know would be lost.
    Partial,
}

/// True if the type knows all of these elements with all that is in them.
fn are_known(loaded: &[Node], before: &[Node]) -> bool {
    let known: HashSet<_> = before.iter().map(Node::form).collect();
    loaded.iter().all(|it| known.contains(&it.form()))
}

/// For each element of `before`, the position of the loaded element that it comes from. A set may have another order
/// than its stored form; both arrays have the same length. `None` if nothing tells.
fn origins(loaded: &[Node], before: &[Node]) -> Option<Vec<usize>> {
    let in_place = || (0..before.len()).collect();
    let may_be_odd = |at: &usize| !is_form_of(&loaded[*at], &before[*at]);
    let odd: Vec<_> = (0..before.len()).filter(may_be_odd).collect();
    if odd.is_empty() {
        return Some(in_place());
    }
    let mut having = HashMap::<Feature, Vec<usize>>::new();
    for (at, element) in loaded.iter().enumerate() {
        element.features().into_iter().for_each(|it| having.entry(it).or_default().push(at));
    }
    // The loaded elements with all values of this one.
    let like = |at: usize| {
        let features = before[at].features();
        let all: Option<Vec<_>> = features.iter().map(|it| having.get(it)).collect();
        let fewest = all?.into_iter().min_by_key(|all| all.len())?;
        let found = fewest.iter().copied().take(CANDIDATES);
        Some(found.filter(move |it| is_form_of(&loaded[*it], &before[at])).collect::<Vec<_>>())
    };
    let mut origins = vec![None; before.len()];
    let mut is_taken = vec![false; loaded.len()];
    let mut all: Vec<_> = (0..before.len()).map(|at| (at, like(at).unwrap_or_default())).collect();
    // An element with few likely origins leaves the others to the rest.
    all.sort_by_key(|(_, like)| like.len());
    for (at, like) in &all {
        let free = like.iter().copied().find(|it| !is_taken[*it]);
        if let Some(it) = free {
            (origins[*at], is_taken[it]) = (Some(it), true);
        }
    }
    origins.into_iter().collect::<Option<Vec<_>>>().or_else(|| {
        let is_odd: HashSet<_> = odd.iter().collect();
        // A list stays in its order. Some elements of this one are read in another form than they are stored.
        let is_elsewhere =
            |(at, like): &(usize, Vec<usize>)| is_odd.contains(at) && !like.is_empty();
        (!all.iter().any(is_elsewhere)).then(in_place)
    })
}

/// True if a type that names some member of the loaded value may write it so.
fn is_form_of(loaded: &Node, before: &Node) -> bool {
    let shares = match (loaded.members(), before.members()) {
        (Some(loaded), Some(before)) => {
            before.is_empty() || before.keys().any(|name| loaded.contains_key(name))
        }
        _ => true,
    };
    shares && agree(loaded, before)
}

/// True if `before` may be the form in which a type writes `loaded`.
fn agree(loaded: &Node, before: &Node) -> bool {
    match (loaded, before) {
        (Node::Array(loaded), Node::Array(before)) => {
            loaded.len() == before.len() && loaded.iter().zip(before).all(|(l, b)| agree(l, b))
        }
        (Node::Document(loaded), Node::Document(before)) => before
            .iter()
            .all(|(name, before)| loaded.get(name).is_none_or(|loaded| agree(loaded, before))),
        _ => loaded.form() == before.form(),
    }
}

/// True if the loaded value has something that the type does not know.
fn has_strangers(loaded: &Node, before: &Node) -> bool {
    match (loaded, before) {
        (Node::Array(loaded), Node::Array(before)) => {
            loaded.len() != before.len()
                || loaded.iter().zip(before).any(|(l, b)| has_strangers(l, b))
        }
        (Node::Document(loaded), Node::Document(before)) => loaded.iter().any(|(name, value)| {
            before.get(name).is_none_or(|before| has_strangers(value, before))
        }),
        (loaded, _) => !loaded.is_leaf(),
    }
}
