//! A document as a value that loses nothing: neither the order of its members, nor a name that stands twice, nor a text
//! that is not UTF-8. Other programs store all of these.

use std::{
    collections::HashMap,
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
};

use indexmap::IndexMap;

/// The name of a member, and how many members of that name stand before it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    text: Box<[u8]>,
    nth: usize,
}

impl Name {
    /// The text, if it is UTF-8 and the first of that name in its document.
    pub fn plain(&self) -> Option<&str> {
        std::str::from_utf8(&self.text).ok().filter(|_| self.nth == 0)
    }

    /// The same name a second time.
    #[cfg(feature = "bson")]
    pub fn repeated(&self) -> Self {
        Self { nth: self.nth + 1, ..self.clone() }
    }

    #[cfg(feature = "bson")]
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.text
    }

    pub(crate) fn is_repetition(&self) -> bool {
        self.nth > 0
    }
}

impl From<&[u8]> for Name {
    fn from(text: &[u8]) -> Self {
        Self { text: text.into(), nth: 0 }
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        text.as_bytes().into()
    }
}

/// The position of an element.
impl From<usize> for Name {
    fn from(position: usize) -> Self {
        (&*position.to_string()).into()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        String::from_utf8_lossy(&self.text).fmt(f)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

/// Where a value is in its document: the names of members, and the positions of elements.
pub type Path = Vec<Name>;

/// A path as people read it.
pub(crate) fn text_of(path: &[Name]) -> String {
    path.iter().map(Name::to_string).collect::<Vec<_>>().join(".")
}

/// The members of a document, in their order.
pub type Members = IndexMap<Name, Node>;

/// Collects the members of a document.
#[derive(Default)]
pub(crate) struct Collected {
    pub(crate) members: Members,
    /// How often each name has been repeated.
    repeated: HashMap<Name, usize>,
}

impl Collected {
    /// Adds a member, even if there is one of that name.
    pub(crate) fn push(&mut self, mut name: Name, value: Node) {
        if self.members.contains_key(&name) {
            let nth = self.repeated.entry(name.clone()).or_default();
            *nth += 1;
            name.nth = *nth;
        }
        self.members.insert(name, value);
    }
}

/// A JSON or BSON value.
#[derive(Debug, Clone)]
pub enum Node {
    /// A document within a document, or the whole.
    Document(Members),
    /// An array.
    Array(Vec<Self>),
    /// Any other value.
    Leaf(Leaf),
}

/// A value without members and elements, as it is encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaf {
    /// The type of a BSON value; zero in JSON.
    pub(crate) kind: u8,
    pub(crate) bytes: Box<[u8]>,
    pub(crate) content: LeafContent,
}

/// What a leaf is to people, whatever its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LeafContent {
    /// A text or an id. It tells more about an element than a number or a date.
    Text,
    Whole(i128),
    /// The bits of another number.
    Broken(u64),
    Null,
    Other,
}

impl From<f64> for LeafContent {
    fn from(number: f64) -> Self {
        // Below this size a whole number is exact in both forms.
        let is_whole = number.fract() == 0.0 && number.abs() < 1e15;
        if is_whole { Self::Whole(number as i128) } else { Self::Broken(number.to_bits()) }
    }
}

/// A value within another, as numbers that are the same for the same value in the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Feature {
    /// The names around it.
    member: u64,
    value: u64,
    pub(crate) is_text: bool,
}

/// How two values are compared.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sameness {
    /// Numbers are the same whatever their type.
    OfNumbers,
    /// Elements are the same in any order.
    OfSets,
}

impl Node {
    /// The members, if it is a document.
    #[must_use]
    pub fn members(&self) -> Option<&Members> {
        if let Self::Document(members) = self { Some(members) } else { None }
    }

    /// The member of this name, if it is a document that has it.
    #[must_use]
    pub fn member(&self, name: &Name) -> Option<&Self> {
        self.members()?.get(name)
    }

    pub(crate) fn elements(&self) -> Option<&[Self]> {
        if let Self::Array(elements) = self { Some(elements) } else { None }
    }

    pub(crate) fn is_null(&self) -> bool {
        matches!(self, Self::Leaf(leaf) if leaf.content == LeafContent::Null)
    }

    pub(crate) fn is_leaf(&self) -> bool {
        matches!(self, Self::Leaf(_))
    }

    /// True if replacing one value with the other changes nothing but the order of members.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Document(mine), Self::Document(theirs)) => {
                let is_there = |(name, it): (&Name, &Self)| {
                    theirs.get(name).is_some_and(|other| it.is_same(other))
                };
                mine.len() == theirs.len() && mine.iter().all(is_there)
            }
            (Self::Array(mine), Self::Array(theirs)) => {
                mine.len() == theirs.len() && mine.iter().zip(theirs).all(|(a, b)| a.is_same(b))
            }
            (Self::Leaf(mine), Self::Leaf(theirs)) => mine == theirs,
            _ => false,
        }
    }

    /// True if the two are the same, and so is the order of their members.
    #[cfg(feature = "bson")]
    pub fn is_identical(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Document(mine), Self::Document(theirs)) => {
                let is_same = |((name, it), (other, its)): ((&Name, &Self), (&Name, &Self))| {
                    name == other && it.is_identical(its)
                };
                mine.len() == theirs.len() && mine.iter().zip(theirs).all(is_same)
            }
            (Self::Array(mine), Self::Array(theirs)) => {
                mine.len() == theirs.len()
                    && mine.iter().zip(theirs).all(|(a, b)| a.is_identical(b))
            }
            _ => self.is_same(other),
        }
    }

    /// True if the two are the same, except for the order of members and elements: a set may encode its elements in
    /// another order each time.
    pub(crate) fn is_alike(&self, other: &Self) -> bool {
        self.is_same(other) || self.digest(Sameness::OfSets) == other.digest(Sameness::OfSets)
    }

    /// The same number for values that are the same. Numbers are the same whatever their type.
    pub(crate) fn form(&self) -> u64 {
        self.digest(Sameness::OfNumbers)
    }

    fn digest(&self, how: Sameness) -> u64 {
        let of_all = |digests: &mut dyn Iterator<Item = u64>| digests.fold(0, u64::wrapping_add);
        match self {
            Self::Document(members) => {
                let of_each = members.iter().map(|(name, it)| hash((name, it.digest(how))));
                hash((1, members.len(), of_all(&mut { of_each })))
            }
            Self::Array(elements) => {
                let mut of_each = elements.iter().map(|it| it.digest(how));
                match how {
                    Sameness::OfSets => hash((2, elements.len(), of_all(&mut of_each))),
                    Sameness::OfNumbers => hash((2, of_each.collect::<Vec<_>>())),
                }
            }
            Self::Leaf(leaf) => match leaf.content {
                number @ (LeafContent::Whole(_) | LeafContent::Broken(_))
                    if how == Sameness::OfNumbers =>
                {
                    hash((3, number))
                }
                _ => hash((4, leaf.kind, &leaf.bytes)),
            },
        }
    }

    /// The values within that have no members and no elements.
    pub(crate) fn features(&self) -> Vec<Feature> {
        fn add(node: &Node, member: u64, features: &mut Vec<Feature>) {
            match node {
                Node::Document(members) if !members.is_empty() => {
                    for (name, it) in members {
                        add(it, hash((member, name)), features);
                    }
                }
                Node::Array(elements) if !elements.is_empty() => {
                    elements.iter().for_each(|it| add(it, hash((member, "[]")), features));
                }
                Node::Leaf(leaf) => {
                    let (value, is_text) = (node.form(), leaf.content == LeafContent::Text);
                    features.push(Feature { member, value, is_text });
                }
                // An empty document or array tells nothing.
                _ => {}
            }
        }
        let mut features = Vec::new();
        add(self, 0, &mut features);
        features.sort_unstable();
        features.dedup();
        features
    }

    /// The path of a member whose name stands twice in its document.
    pub(crate) fn repetition(&self) -> Option<Path> {
        self.find(&|name, _| name.is_some_and(Name::is_repetition))
    }

    /// The path of the first value for which `is_it` is true.
    pub(crate) fn find(&self, is_it: &dyn Fn(Option<&Name>, &Self) -> bool) -> Option<Path> {
        fn search(
            name: Option<&Name>,
            it: &Node,
            path: &mut Path,
            is_it: &dyn Fn(Option<&Name>, &Node) -> bool,
        ) -> bool {
            if is_it(name, it) {
                return true;
            }
            // An element of an array has a step in the path, but no name.
            let mut within = |step: Name, name: Option<&Name>, it: &Node| {
                path.push(step);
                let is_found = search(name, it, path, is_it);
                if !is_found {
                    path.pop();
                }
                is_found
            };
            match it {
                Node::Document(members) => {
                    members.iter().any(|(name, it)| within(name.clone(), Some(name), it))
                }
                Node::Array(elements) => {
                    elements.iter().enumerate().any(|(at, it)| within(at.into(), None, it))
                }
                Node::Leaf(_) => false,
            }
        }
        let mut path = Path::new();
        search(None, self, &mut path, is_it).then_some(path)
    }

    pub(crate) fn value_at(&self, path: &[Name]) -> Option<&Self> {
        path.iter().try_fold(self, |value, name| match value {
            Self::Array(elements) => elements.get(name.plain()?.parse::<usize>().ok()?),
            value => value.member(name),
        })
    }

    pub(crate) fn value_at_mut(&mut self, path: &[Name]) -> Option<&mut Self> {
        path.iter().try_fold(self, |value, name| match value {
            Self::Array(elements) => elements.get_mut(name.plain()?.parse::<usize>().ok()?),
            Self::Document(members) => members.get_mut(name),
            Self::Leaf(_) => None,
        })
    }

    /// This value with another member at the path, or without that member.
    pub(crate) fn with_member(&self, path: &[Name], new: Option<Self>) -> Self {
        let mut changed = self.clone();
        if let Some((name, outer)) = path.split_last()
            && let Some(Self::Document(members)) = changed.value_at_mut(outer)
        {
            match new {
                Some(new) => drop(members.insert(name.clone(), new)),
                None => drop(members.shift_remove(name)),
            }
        }
        changed
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

pub(crate) fn are_same(a: Option<&Node>, b: Option<&Node>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.is_same(b),
        (a, b) => a.is_none() && b.is_none(),
    }
}

pub(crate) fn are_alike(a: Option<&Node>, b: Option<&Node>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.is_alike(b),
        (a, b) => a.is_none() && b.is_none(),
    }
}

/// The paths at which two documents differ, at most one more than `most`.
pub(crate) fn differ(
    a: &Node,
    b: &Node,
    is_same: fn(&Node, &Node) -> bool,
    most: usize,
) -> Vec<Path> {
    struct Search<'a> {
        is_same: fn(&Node, &Node) -> bool,
        most: usize,
        path: Path,
        found: &'a mut Vec<Path>,
    }
    impl Search<'_> {
        fn compare(&mut self, a: &Node, b: &Node) {
            if self.found.len() > self.most || (self.is_same)(a, b) {
                return;
            }
            let (Node::Document(mine), Node::Document(theirs)) = (a, b) else {
                self.found.push(self.path.clone());
                return;
            };
            let theirs_alone = theirs.keys().filter(|name| !mine.contains_key(*name));
            for name in mine.keys().chain(theirs_alone) {
                self.path.push(name.clone());
                match (mine.get(name), theirs.get(name)) {
                    (Some(a), Some(b)) => self.compare(a, b),
                    _ => self.found.push(self.path.clone()),
                }
                self.path.pop();
            }
        }
    }
    let mut found = Vec::new();
    Search { is_same, most, path: Path::new(), found: &mut found }.compare(a, b);
    found
}
