//! Members that a type reads under another name than it writes.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    mem, slice,
};

use super::node::{Members, Name, Node, Path};
use crate::BoxError;

/// Reads a document as the type, and returns it as the type writes it.
pub(crate) type Read<'a> = &'a dyn Fn(&Node) -> Result<Node, BoxError>;

/// An old and a new name.
type Rename = (Name, Name);
/// The documents in which a member is looked for: the names that the type does not write, and the name of the member,
/// which is not stored.
type Kind = (Vec<Name>, Name);

/// A document with more members that its type does not write, or that it writes and does not read, is a map whose type
/// reads the names in another form.
const MOST: usize = 32;

/// The loaded document, with the members in [`grown`](super::merge::Merge::grown) under the names that the type writes. An
/// alias is a name that the type reads but does not write: its value moves, as it is stored, to the name that the type
/// writes. `None` if there are no aliases.
///
/// An alias belongs to a member of a type, so it is looked for in one document of each kind, and then renamed in all
/// others. The document is read as a whole for each look, at most twice for each of `probes`. In the end the renamed
/// document must read as before.
pub(crate) fn without_aliases(
    loaded: &Node,
    before: &Node,
    grown: &[(Path, &Members)],
    probes: &mut usize,
    read: Read<'_>,
) -> Option<Node> {
    let (known, found) = (HashSet::new(), HashMap::new());
    let mut search = Search { loaded, before, probes, read, known, found };
    let mut documents = HashMap::<&[Name], (&Members, Vec<&Name>)>::new();
    for (path, written) in grown {
        let (new, document) = path.split_last()?;
        documents.entry(document).or_insert((written, Vec::new())).1.push(new);
    }
    // Before the paths of the inner ones change.
    let mut innermost_first: Vec<_> = documents.into_iter().collect();
    innermost_first.sort_by_key(|(document, _)| (Reverse(document.len()), *document));
    let mut renamed = loaded.clone();
    let mut is_renamed = false;
    for (document, (written, names)) in innermost_first {
        let stored = loaded.value_at(document)?.members()?;
        let unwritten = stored.iter().filter(|(name, _)| !written.contains_key(*name));
        let unwritten: Vec<_> = unwritten.take(MOST + 1).collect();
        if unwritten.len().max(names.len()) > MOST {
            continue;
        }
        let renames: Vec<Rename> = (names.into_iter())
            .filter_map(|new| {
                Some((search.alias(document, new, &unwritten, written)?, new.clone()))
            })
            .collect();
        is_renamed |= !renames.is_empty();
        rename(&mut renamed, document, &renames);
    }
    (is_renamed && search.reads_as_before(&renamed)).then_some(renamed)
}

/// Renames members of the document at this path. They keep their places.
fn rename(value: &mut Node, document: &[Name], renames: &[Rename]) {
    if let Some(Node::Document(members)) = value.value_at_mut(document) {
        let new = |name: &Name| renames.iter().find(|(old, _)| old == name).map(|it| it.1.clone());
        let all = mem::take(members).into_iter();
        *members = all.map(|(name, it)| (new(&name).unwrap_or(name), it)).collect();
    }
}

struct Search<'a> {
    loaded: &'a Node,
    before: &'a Node,
    /// How many more names may be tried.
    probes: &'a mut usize,
    read: Read<'a>,
    /// The aliases that were found in some document.
    known: HashSet<Rename>,
    found: HashMap<Kind, Option<Name>>,
}

impl Search<'_> {
    fn reads_as_before(&self, value: &Node) -> bool {
        (self.read)(value).is_ok_and(|it| it.is_alike(self.before))
    }

    fn alias(
        &mut self,
        document: &[Name],
        new: &Name,
        unwritten: &[(&Name, &Node)],
        written: &Members,
    ) -> Option<Name> {
        let value = written.get(new)?;
        let others = unwritten.iter().filter(|(_, it)| it.is_leaf() == value.is_leaf());
        let mut others: Vec<_> = others.collect();
        let kind = (others.iter().map(|(old, _)| (*old).clone()).collect(), new.clone());
        if let Some(found) = self.found.get(&kind) {
            return found.clone();
        }
        // The likely aliases first.
        let is_known = |old: &Name| self.known.contains(&(old.clone(), new.clone()));
        others.sort_by_key(|(old, it)| (!is_known(old), !it.is_same(value)));
        let mut found = None;
        for (old, _) in others {
            let rename = ((*old).clone(), new.clone());
            // Without a probe left, a known alias is believed: the whole is read in the end.
            if self.is_alias(document, &rename) {
                self.known.insert(rename);
                found = Some((*old).clone());
                break;
            }
        }
        self.found.insert(kind, found.clone());
        found
    }

    /// True if the type reads this member under both names.
    fn is_alias(&mut self, document: &[Name], (old, new): &Rename) -> bool {
        if *self.probes == 0 {
            return self.known.contains(&(old.clone(), new.clone()));
        }
        *self.probes -= 1;
        let gone = [document, slice::from_ref(old)].concat();
        let mut renamed = self.loaded.clone();
        rename(&mut renamed, document, &[(old.clone(), new.clone())]);
        !self.reads_as_before(&self.loaded.with_member(&gone, None))
            && self.reads_as_before(&renamed)
    }
}
