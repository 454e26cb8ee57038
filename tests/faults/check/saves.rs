//! Conditions on the saves of a history. Each save counts up by one and leaves its id in the document.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{Grant, Save, Stored, successor};

/// A save that began after another one was answered has saved the higher value.
pub(super) fn are_in_order(saves: &[Save<'_>], violations: &mut Vec<String>) {
    for saves in by_key(saves).values_mut() {
        let mut answered: Vec<_> =
            saves.iter().filter_map(|save| Some((save.saved?, *save))).collect();
        answered.sort_by_key(|(saved, _)| *saved);
        saves.retain(|save| save.saved.is_some());
        saves.sort_by_key(|save| save.began);
        let (mut done, mut highest) = (0, None::<&Save<'_>>);
        for save in saves.iter() {
            while let Some((saved, earlier)) = answered.get(done)
                && *saved < save.began
            {
                if highest.is_none_or(|highest| earlier.value > highest.value) {
                    highest = Some(earlier);
                }
                done += 1;
            }
            if let Some(highest) = highest.filter(|highest| highest.value >= save.value) {
                violations.push(format!(
                    "{}: {} saved {} after {} had saved {}",
                    save.key, save.id, save.value, highest.id, highest.value
                ));
            }
        }
    }
}

/// No session saves after another session has succeeded it as the holder.
pub(super) fn are_of_the_holder(
    saves: &[Save<'_>],
    grants: &[Grant<'_>],
    violations: &mut Vec<String>,
) {
    let mut of_key: HashMap<&str, Vec<&Grant<'_>>> = HashMap::new();
    for grant in grants {
        of_key.entry(grant.key).or_default().push(grant);
    }
    let by_token: HashMap<&str, &Grant<'_>> = grants.iter().map(|g| (g.token, g)).collect();
    for save in saves.iter().filter(|save| save.saved.is_some()) {
        let Some(mine) = by_token.get(save.token) else { continue };
        if let Some(next) = successor(mine, &of_key[mine.key], save.began) {
            violations.push(format!(
                "{}: {} was saved by {} although {} had the lock by then",
                save.key, save.id, mine.token, next.token
            ));
        }
    }
}

/// Each acknowledged save is stored exactly once, at its position, and nothing is stored that nobody
/// has sent.
pub(super) fn are_stored(saves: &[Save<'_>], stored: &Stored, violations: &mut Vec<String>) {
    let keys = by_key(saves);
    for (key, ids) in stored {
        let saves = keys.get(key.as_str()).map_or(&[][..], |saves| saves);
        let sent: HashSet<&str> = saves.iter().map(|save| save.id).collect();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for (place, id) in ids.iter().enumerate() {
            if places.insert(id, place).is_some() {
                violations.push(format!("{key}: {id} is stored twice"));
            }
            if !sent.contains(id.as_str()) {
                violations.push(format!("{key}: nobody has sent {id}"));
            }
        }
        for save in saves.iter().filter(|save| save.saved.is_some()) {
            match places.get(save.id) {
                None => violations.push(format!("{key}: {} was saved and is lost", save.id)),
                Some(&place) if place as u64 + 1 != save.value => violations.push(format!(
                    "{key}: {} was saved as number {} and is number {}",
                    save.id,
                    save.value,
                    place + 1
                )),
                Some(_) => {}
            }
        }
    }
    for key in keys.keys().filter(|key| !stored.contains_key(**key)) {
        violations.push(format!("{key}: the stored document was not read"));
    }
}

fn by_key<'s, 'a>(saves: &'s [Save<'a>]) -> BTreeMap<&'a str, Vec<&'s Save<'a>>> {
    let mut keys: BTreeMap<&str, Vec<&Save<'_>>> = BTreeMap::new();
    for save in saves {
        keys.entry(save.key).or_default().push(save);
    }
    keys
}
