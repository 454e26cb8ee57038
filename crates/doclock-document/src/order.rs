//! The order of members, for types that keep it: a `Document`, or an `IndexMap`.
//!
//! A struct writes its members in one order, a `BTreeMap` in another, and a `HashMap` in a new one each time: none of
//! them reads another order than before from a document in which the members have other places. Only a type that keeps
//! the order does.

use std::collections::HashSet;

use super::{
    aliases::Read,
    node::{Members, Name, Node, Path},
};

/// A `HashMap` of two entries has each order half of the time. It may pass for a type that keeps the order once in a
/// million saves: then the save writes what it need not write.
const CERTAINTY: f64 = 1e6;

/// Of the documents whose members the application may have put into another order, those of types that keep the order.
/// `merged` has all members, in any order. Reads the document at most `most` times, beyond the second time.
pub(crate) fn kept<'a>(
    merged: &Node,
    reordered: Vec<(Path, &'a Members)>,
    most: usize,
    read: Read<'_>,
) -> Vec<(Path, &'a Members)> {
    if reordered.is_empty() {
        return reordered;
    }
    let (mut in_order, mut backwards) = (merged.clone(), merged.clone());
    for (path, order) in &reordered {
        arrange(&mut in_order, path, order.keys());
        arrange(&mut backwards, path, order.keys().rev());
    }
    // A member may be missing, or have another name, in all that the type reads.
    let order_at =
        |of: &Node, path: &Path| Some(of.value_at(path)?.members()?.keys().cloned().collect());
    // A type may refuse that order.
    let mut read_backwards = read(&backwards);
    if read_backwards.is_err() {
        backwards = merged.clone();
        read_backwards = read(&backwards);
    }
    let Ok(read_backwards) = read_backwards else { return Vec::new() };
    let mut open: Vec<_> = (reordered.into_iter())
        .filter_map(|(path, order)| {
            let other: Vec<Name> = order_at(&read_backwards, &path)?;
            (!other.iter().eq(order.keys())).then_some((path, order, other))
        })
        .collect();
    let mut kept = Vec::new();
    for turn in 0..=most {
        if open.is_empty() {
            break;
        }
        let is_backwards = turn % 2 == 1;
        let Ok(again) = read(if is_backwards { &backwards } else { &in_order }) else { break };
        open.retain(|(path, order, other)| {
            let is: Option<Vec<Name>> = order_at(&again, path);
            is.is_some_and(
                |is| if is_backwards { is == *other } else { is.iter().eq(order.keys()) },
            )
        });
        let chance = |order: &Members| (1..=order.len()).map(|n| n as f64).product::<f64>();
        let is_certain =
            |order: &Members| chance(order).powi(turn as i32 + 1) >= CERTAINTY || turn == most;
        let certain = open.extract_if(.., |(_, order, _)| is_certain(order));
        kept.extend(certain.map(|(path, order, _)| (path, order)));
    }
    kept
}

/// Puts the members with these names of the document at the path into this order. All others keep their places.
pub(crate) fn arrange<'a>(value: &mut Node, path: &[Name], order: impl Iterator<Item = &'a Name>) {
    let Some(Node::Document(members)) = value.value_at_mut(path) else { return };
    let mut ordered: Members = Members::new();
    let order: Vec<_> = order.filter(|name| members.contains_key(*name)).cloned().collect();
    let named: HashSet<_> = order.iter().collect();
    let mut next = order.iter();
    let places: Vec<_> = members.keys().cloned().collect();
    for name in places {
        let name = if named.contains(&name) { next.next().cloned().unwrap_or(name) } else { name };
        if let Some(value) = members.get(&name) {
            ordered.insert(name, value.clone());
        }
    }
    *members = ordered;
}
