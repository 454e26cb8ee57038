//! Members that a type reads under another name than it writes.

use std::{collections::HashMap, slice};

use super::{
    encoded::{Encoded, Reread, read},
    merge::{Path, Value},
    paths::{at, with},
};

/// Old and new names of members, by the path of their document.
type Renames = HashMap<Path, Vec<(String, String)>>;

/// The loaded document, in which the members that have `grown` have the names that the type writes. An alias is a name
/// that the type reads but does not write: its value moves, as it is stored, to the name that the type writes. `None`
/// if there are no aliases.
pub(super) fn without_aliases<V: Encoded>(
    loaded: &V,
    before: &V,
    grown: &[Path],
    mut probes: usize,
    reread: Reread<'_>,
) -> Option<V> {
    let reads_as_before = |value: &V| read(value, reread).is_ok_and(|it| it.is_alike(before));
    // All elements of an array have the same aliases.
    let mut known = HashMap::<Path, Option<String>>::new();
    let mut renames = Renames::new();
    for path in grown {
        let (name, document) = path.split_last()?;
        let (stored, written) = (at(loaded, document)?, at(before, document)?);
        let value = written.member(name)?;
        let mut find = || {
            let others = stored.members().into_iter().flatten();
            let mut others: Vec<_> = others
                .filter(|(other, it)| {
                    written.member(other).is_none() && it.is_leaf() == value.is_leaf()
                })
                .collect();
            // The likely aliases first.
            others.sort_by_key(|(_, it)| !it.is_same(value));
            others.truncate(probes);
            let alias = others.iter().find(|(other, _)| {
                probes -= 1;
                let gone = [document, slice::from_ref(*other)].concat();
                let names = vec![((*other).clone(), name.clone())];
                let renamed = Renames::from([(document.to_vec(), names)]);
                !reads_as_before(&with(loaded, &gone, None))
                    && reads_as_before(&renamed_by(&renamed, loaded, &mut Path::new()))
            });
            alias.map(|(other, _)| (*other).clone())
        };
        let is_position = |step: &str| step.bytes().all(|it| it.is_ascii_digit());
        let kind = path.iter().filter(|step| !is_position(step)).cloned().collect();
        if let Some(alias) = known.entry(kind).or_insert_with(&mut find) {
            renames.entry(document.to_vec()).or_default().push((alias.clone(), name.clone()));
        }
    }
    let renamed = renamed_by(&renames, loaded, &mut Path::new());
    (!renames.is_empty() && reads_as_before(&renamed)).then_some(renamed)
}

fn renamed_by<V: Value>(renames: &Renames, value: &V, path: &mut Path) -> V {
    let mut within = |step: String, value: &V| {
        path.push(step);
        let renamed = renamed_by(renames, value, path);
        path.pop();
        renamed
    };
    if let Some(elements) = value.elements() {
        let elements = elements.iter().enumerate();
        return V::array(elements.map(|(at, it)| within(at.to_string(), it)).collect());
    }
    let Some(members) = value.members() else { return value.clone() };
    let members: Vec<_> = members.map(|(name, it)| (name, within(name.clone(), it))).collect();
    let names = renames.get(path);
    let renamed = |name: &String| {
        let new = names.into_iter().flatten().find(|(old, _)| old == name);
        new.map_or(name, |(_, new)| new).clone()
    };
    V::document(members.into_iter().map(|(name, value)| (renamed(name), value)))
}
