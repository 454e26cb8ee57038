//! Documents by the paths of their members and elements.

use super::merge::{Path, Value};

/// The paths at which two documents differ, at most one more than `most`.
pub(super) fn differ<V: Value>(
    a: &V,
    b: &V,
    is_same: fn(&V, &V) -> bool,
    most: usize,
    path: &mut Path,
    found: &mut Vec<Path>,
) {
    if found.len() > most || is_same(a, b) {
        return;
    }
    let (Some(mine), Some(theirs)) = (a.members(), b.members()) else {
        found.push(path.clone());
        return;
    };
    let theirs = theirs.map(|(name, _)| name).filter(|name| a.member(name).is_none());
    for name in mine.map(|(name, _)| name).chain(theirs) {
        path.push(name.clone());
        match (a.member(name), b.member(name)) {
            (Some(a), Some(b)) => differ(a, b, is_same, most, path, found),
            _ => found.push(path.clone()),
        }
        path.pop();
    }
}

pub(super) fn at<'a, V: Value>(value: &'a V, path: &[String]) -> Option<&'a V> {
    path.iter().try_fold(value, |value, name| match value.elements() {
        Some(elements) => elements.get(name.parse::<usize>().ok()?),
        None => value.member(name),
    })
}

/// This value with another member at the path, or without that member.
pub(super) fn with<V: Value>(value: &V, path: &[String], new: Option<V>) -> V {
    let [name, within @ ..] = path else { return new.unwrap_or_else(|| value.clone()) };
    if let Some(elements) = value.elements() {
        let changed = |(at, it): (usize, &V)| match at.to_string() == *name {
            true => with(it, within, new.clone()),
            false => it.clone(),
        };
        return V::array(elements.iter().enumerate().map(changed).collect());
    }
    let Some(members) = value.members() else { return value.clone() };
    let new = match value.member(name) {
        Some(old) if !within.is_empty() => Some(with(old, within, new)),
        _ => new,
    };
    let is_new = value.member(name).is_none();
    let others = members.filter_map(|(other, value)| match other == name {
        true => Some((other.clone(), new.clone()?)),
        false => Some((other.clone(), value.clone())),
    });
    let added = new.clone().filter(|_| is_new).map(|new| (name.clone(), new));
    V::document(others.chain(added).collect::<Vec<_>>().into_iter())
}
