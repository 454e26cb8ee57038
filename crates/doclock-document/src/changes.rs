//! The changes of a document between load and save, and the proof that they can be read again.

use std::{iter, slice, sync::Arc};

use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};

use super::{
    Original, StoredDocument,
    aliases::{Read, without_aliases},
    merge::{Merge, Unwritable, Versions},
    node::{Members, Name, Node, Path, are_alike, are_same, differ, text_of},
    order::{arrange, kept},
};
use crate::BoxError;

/// How often a document is read to see what its type makes of a field, and how many bytes are read for that: a large
/// document must not hold up its server.
const PROBES: usize = 64;
const PROBED_BYTES: usize = 16 << 20;
/// At least this often, even a large document.
const FEWEST_PROBES: usize = 8;
/// Comparing documents of this size takes some milliseconds.
const LARGE: usize = 64 << 10;

/// Reads a document as a type, and returns it as that type writes it.
type Reread = fn(&StoredDocument) -> Result<StoredDocument, BoxError>;

fn reread<T: Serialize + DeserializeOwned>(
    document: &StoredDocument,
) -> Result<StoredDocument, BoxError> {
    StoredDocument::encode(document.format, &document.decode::<T>()?)
}

impl Original {
    /// `value` as the whole document, without the fields that its type does not name.
    ///
    /// # Errors
    /// As [`changes_to`](Self::changes_to).
    pub fn replacement<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
    ) -> Result<StoredDocument, BoxError> {
        self.draft(value)?.replacement()
    }

    /// The changes that turn this document into `value`.
    ///
    /// The result is read as a `T` here, and must give back `value`: so a save of these changes never makes a
    /// document that `T` cannot read, and never leaves out a change.
    ///
    /// # Errors
    /// If `value` has no stored form, if a name would stand twice in a document, if it is not certain which elements of
    /// an array are which, or if `T` would read another value from the result. The error names the field.
    pub fn changes_to<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
    ) -> Result<Changes, BoxError> {
        self.draft(value)?.changes()
    }

    /// The first part of [`changes_to`](Self::changes_to), for which the value is needed.
    ///
    /// # Errors
    /// The error of serde if `value` has no stored form.
    pub fn draft<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Draft, BoxError> {
        let after = StoredDocument::encode(self.loaded.format, value)?;
        Ok(Draft { original: self.clone(), after, reread: reread::<T> })
    }
}

/// A document as it is to be saved, before its changes are known.
#[derive(Debug, Clone)]
pub struct Draft {
    original: Original,
    after: StoredDocument,
    reread: Reread,
}

/// The difference between a document as it was loaded and as it is to be saved; see
/// [`Original::changes_to`].
#[derive(Debug, Clone)]
pub struct Changes {
    draft: Draft,
    /// The result, if no other program has changed the document.
    result: Planned,
    /// The documents of the result whose members have a new order.
    orders: Orders,
    /// The result of the last application. Clones share it.
    applied: Arc<Mutex<Option<StoredDocument>>>,
}

type Orders = Vec<(Path, Vec<Name>)>;

/// The result of applying the changes to the loaded document.
#[derive(Debug, Clone)]
enum Planned {
    Nothing,
    Merged(StoredDocument),
    /// Fields had to be renamed or corrected, so the stored document must still be the loaded one.
    Corrected(StoredDocument),
}

impl Changes {
    /// True if there are no changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        matches!(self.result, Planned::Nothing)
    }

    /// True if this document is the result: a save of these changes was carried out.
    pub(crate) fn are_done_in(&self, now: &StoredDocument) -> bool {
        match &self.result {
            Planned::Nothing => false,
            Planned::Merged(result) | Planned::Corrected(result) => result.is_same(now),
        }
    }

    /// True if the result must be stored with its members in the very order that it has.
    #[must_use]
    pub fn have_an_order(&self) -> bool {
        !self.orders.is_empty()
    }

    /// True if it takes some milliseconds to apply them.
    #[must_use]
    pub fn are_large(&self) -> bool {
        self.draft.is_large()
    }

    /// The result of applying these changes to the stored document `now`.
    ///
    /// # Errors
    /// The path of a field that another program has changed since the document was loaded, so that nothing may
    /// be written.
    pub fn apply(&self, now: &StoredDocument) -> Result<StoredDocument, String> {
        let applied = match &self.result {
            Planned::Nothing => now.clone(),
            Planned::Merged(result) | Planned::Corrected(result)
                if now.as_bytes() == self.draft.original.loaded.as_bytes() =>
            {
                result.clone()
            }
            _ => self.merged(now).map_err(|path| text_of(&path))?,
        };
        *self.applied.lock() = Some(applied.clone());
        Ok(applied)
    }

    /// The document as a save has stored it, with the changes of other programs. `None` if nothing had to be stored.
    #[must_use]
    pub fn stored(&self) -> Option<StoredDocument> {
        self.applied.lock().clone()
    }

    fn merged(&self, stored: &StoredDocument) -> Result<StoredDocument, Path> {
        let decoded = |document: &StoredDocument| document.node().map_err(|_| Path::new());
        let Draft { original: Original { loaded, before, .. }, after, .. } = &self.draft;
        let (loaded, before, after) = (decoded(loaded)?, decoded(before)?, decoded(after)?);
        let now = decoded(stored)?;
        let changed = || {
            let differences = differ(&loaded, &now, Node::is_same, 0);
            differences.into_iter().next().unwrap_or_default()
        };
        let (Planned::Merged(result) | Planned::Corrected(result)) = &self.result else {
            return Ok(stored.clone());
        };
        if decoded(result)?.is_same(&now) {
            // This save was carried out before, and its reply was lost.
            return Ok(result.clone());
        }
        if let Planned::Corrected(result) = &self.result {
            return if loaded.is_same(&now) { Ok(result.clone()) } else { Err(changed()) };
        }
        let (before, after) = (Some(&before), Some(&after));
        let versions = Versions { loaded: Some(&loaded), before, after, now: Some(&now) };
        let (mut merged, _) = Merge::of(versions).map_err(|(_, merge)| merge.path)?;
        for (path, order) in &self.orders {
            // The positions in an array are those of the loaded array.
            let field = &path[..path.len().min(1)];
            let is_within_array = path.iter().zip(1..).any(|(_, n)| {
                merged.value_at(&path[..n]).is_some_and(|it| it.elements().is_some())
            });
            if is_within_array && !are_same(loaded.value_at(field), now.value_at(field)) {
                return Err(field.to_vec());
            }
            arrange(&mut merged, path, order.iter());
        }
        let read = self.draft.as_read(&merged).ok();
        if read.is_some_and(|read| has_all(before, after, Some(&read))) {
            Ok(StoredDocument::of(&merged, stored.format))
        } else {
            Err(changed())
        }
    }

    /// The store has put new members into an order of its own.
    pub fn were_stored_as(&self, document: StoredDocument) {
        *self.applied.lock() = Some(document);
    }

    /// The document after the save, for the next save.
    ///
    /// If the save has also stored changes of other programs, the document is without them: its value does not have
    /// them, and a page that shows the value does not show them.
    #[must_use]
    pub fn into_original(self) -> Original {
        let stored = self.stored();
        let Draft { original, after, .. } = self.draft;
        let loaded = match self.result {
            Planned::Nothing => original.loaded,
            Planned::Merged(result) | Planned::Corrected(result) => {
                stored.filter(|stored| stored.is_same(&result)).unwrap_or(result)
            }
        };
        Original { loaded, before: after, is_in_doubt: false }
    }
}

impl Draft {
    fn as_read(&self, node: &Node) -> Result<Node, BoxError> {
        (self.reread)(&StoredDocument::of(node, self.after.format))?.node()
    }

    /// True if it takes some milliseconds to compare the documents.
    #[must_use]
    pub fn is_large(&self) -> bool {
        self.size() >= LARGE
    }

    fn size(&self) -> usize {
        self.original.loaded.bytes.len() + self.after.bytes.len()
    }

    fn probes(&self) -> usize {
        (PROBED_BYTES / self.size().max(1)).clamp(FEWEST_PROBES, PROBES)
    }

    /// Compares the documents.
    ///
    /// # Errors
    /// As [`Original::changes_to`].
    pub fn changes(self) -> Result<Changes, BoxError> {
        let (result, orders) = self.planned()?;
        Ok(Changes { draft: self, result, orders, applied: Arc::default() })
    }

    fn planned(&self) -> Result<(Planned, Orders), BoxError> {
        if self.original.before.bytes == self.after.bytes {
            return Ok((Planned::Nothing, Orders::new()));
        }
        let (before, after) = (self.original.before.node()?, self.after.node()?);
        refuse_repetition(&after)?;
        let mut loaded = self.original.loaded.node()?;
        let (mut probes, read) = (self.probes(), &|node: &Node| self.as_read(node));
        let result = |merged: &Node| StoredDocument::of(merged, self.after.format);
        let mut is_renamed = false;
        let (merged, orders) = loop {
            let (before, after) = (Some(&before), Some(&after));
            let versions = Versions { loaded: Some(&loaded), before, after, now: Some(&loaded) };
            let (merged, grown) = match Merge::of(versions) {
                Ok((mut merged, Merge { grown, reordered, .. })) => {
                    let orders = in_order(&mut merged, reordered, probes, read);
                    if orders.is_empty() && are_same(before, after) {
                        return Ok((Planned::Nothing, orders));
                    }
                    let is_read = || read(&merged).is_ok_and(|read| are_alike(Some(&read), after));
                    if !is_renamed && is_read() {
                        return Ok((Planned::Merged(result(&merged)), orders));
                    }
                    (Ok((merged, orders)), grown)
                }
                Err((why, merge)) => (Err(refused(why, &merge.path)), merge.grown),
            };
            // An aliased document may contain aliases. Each round leaves fewer members that have grown.
            match without_aliases(&loaded, before.unwrap_or(&loaded), &grown, &mut probes, read) {
                Some(renamed) => loaded = renamed,
                None => break merged?,
            }
            is_renamed = true;
        };
        let read_back = read(&merged)?;
        let corrected = corrected(Some(&merged), Some(&read_back), Some(&after));
        let corrected = corrected.unwrap_or(merged);
        self.gives_back(&corrected, &after)?;
        Ok((Planned::Corrected(result(&corrected)), orders))
    }

    /// The whole document, if it may replace the loaded one.
    ///
    /// # Errors
    /// As [`Original::changes_to`].
    pub fn replacement(self) -> Result<StoredDocument, BoxError> {
        let (loaded, after) = (self.original.loaded.node()?, self.after.node()?);
        refuse_repetition(&after)?;
        let named = Name::from("_id");
        let Some(id) = loaded.member(&named) else { return Ok(self.after) };
        if after.member(&named).is_some() {
            self.gives_back(&after, &after)?;
            return Ok(self.with_id_first(&after, id));
        }
        // A type that reads its id from `_id`, but writes it to another field, would add that
        // field.
        let stored = after.with_member(slice::from_ref(&named), Some(id.clone()));
        self.gives_back(&stored, &after)?;
        let read_back = self.as_read(&stored)?;
        let new = after.members().into_iter().flat_map(Members::keys);
        new.filter(|name| loaded.member(name).is_none())
            .try_for_each(|name| self.is_read(&stored, &read_back, slice::from_ref(name)))?;
        Ok(self.with_id_first(&after, id))
    }

    /// The whole document as MongoDB stores it: its `_id` is the first member.
    fn with_id_first(self, after: &Node, id: &Node) -> StoredDocument {
        let named = Name::from("_id");
        let members = || after.members().into_iter().flatten();
        if members().next().is_some_and(|(name, _)| *name == named) {
            return self.after;
        }
        let id = after.member(&named).unwrap_or(id).clone();
        let others = members().filter(|(name, _)| **name != named);
        let others = others.map(|(name, value)| (name.clone(), value.clone()));
        let ordered = iter::once((named.clone(), id)).chain(others).collect();
        StoredDocument::of(&Node::Document(ordered), self.after.format)
    }

    /// An error if the type reads another value than `after` from the document. The type may read a value in another
    /// form than it writes it, such as a text without the blanks at its end.
    fn gives_back(&self, stored: &Node, after: &Node) -> Result<(), BoxError> {
        let (read_back, probes) = (self.as_read(stored)?, self.probes());
        let differences = differ(&read_back, after, Node::is_alike, PROBES);
        for (n, path) in differences.into_iter().enumerate() {
            let wanted = after.value_at(&path);
            if n >= probes || wanted.is_none() || !are_same(stored.value_at(&path), wanted) {
                let path = text_of(&path);
                return Err(format!(
                    "the type reads another `{path}` from the stored document than it would save"
                )
                .into());
            }
            self.is_read(stored, &read_back, &path)?;
        }
        Ok(())
    }

    /// An error if the type does not read this field: the type reads the same value without the field, and with nonsense
    /// in it.
    fn is_read(&self, stored: &Node, read_back: &Node, path: &[Name]) -> Result<(), BoxError> {
        let nonsense = Members::from_iter([(Name::from(""), Node::Array(Vec::new()))]);
        let is_ignored = |instead: Option<Node>| {
            self.as_read(&stored.with_member(path, instead))
                .is_ok_and(|read| read.is_alike(read_back))
        };
        if !is_ignored(None) || !is_ignored(Some(Node::Document(nonsense))) {
            return Ok(());
        }
        let path = text_of(path);
        Err(format!("the type writes `{path}`, but does not read it: give it one name for both")
            .into())
    }
}

/// Puts members into their new order, where the type keeps it.
fn in_order(
    merged: &mut Node,
    reordered: Vec<(Path, &Members)>,
    probes: usize,
    read: Read<'_>,
) -> Orders {
    let orders = kept(merged, reordered, probes, read);
    for (path, order) in &orders {
        arrange(merged, path, order.keys());
    }
    orders.into_iter().map(|(path, order)| (path, order.keys().cloned().collect())).collect()
}

/// Nothing tells which elements of an array are which after a change, and some have fields that the type does not name.
#[derive(Debug, thiserror::Error)]
#[error(
    "it is not certain which elements of `{field}` are which, and some of them have fields that the type does not name, \
     which would be lost: give the elements an `_id` or an `id`, or keep their other fields in the type by \
     `#[serde(flatten)]`"
)]
pub struct UnclearChange {
    /// The path of the array.
    pub field: String,
}

fn refused(why: Unwritable, path: &Path) -> BoxError {
    let field = text_of(path);
    match why {
        Unwritable::Partial => UnclearChange { field }.into(),
        Unwritable::Changed => format!("`{field}` has changed since it was loaded").into(),
    }
}

/// # Errors
/// If a name stands twice in a document: no type could read that document again, or it would lose one of the two values.
fn refuse_repetition(after: &Node) -> Result<(), BoxError> {
    let Some(path) = after.repetition() else { return Ok(()) };
    let path = text_of(&path);
    Err(format!(
        "the type writes `{path}` twice: an entry of a `#[serde(flatten)]` map has the name of a field; give the entry \
         another name"
    )
    .into())
}

/// The merged document, corrected where the type reads another value from it than `after` has: a field without members
/// gets the value of `after`, or is removed. Fields that the type does not know stay.
fn corrected(merged: Option<&Node>, read: Option<&Node>, after: Option<&Node>) -> Option<Node> {
    if are_alike(read, after) {
        return merged.cloned();
    }
    let members = [merged, read, after].map(|it| it.and_then(Node::members));
    if let [Some(merged), Some(read), Some(after)] = members {
        let new = after.keys().filter(|name| !merged.contains_key(*name));
        let members = merged.keys().chain(new).filter_map(|name| {
            let value = corrected(merged.get(name), read.get(name), after.get(name));
            Some((name.clone(), value?))
        });
        return Some(Node::Document(members.collect()));
    }
    let is_plain =
        |it: &Node| it.is_leaf() || it.elements().is_some_and(|all| all.iter().all(Node::is_leaf));
    if merged.is_none_or(is_plain) { after.cloned() } else { merged.cloned() }
}

/// True if `read` has all changes from `before` to `after`.
fn has_all(before: Option<&Node>, after: Option<&Node>, read: Option<&Node>) -> bool {
    if are_same(before, after) || are_alike(read, after) {
        return true;
    }
    let members = [before, after, read].map(|it| it.and_then(Node::members));
    let [Some(before), Some(after), Some(read)] = members else { return false };
    let mut names = before.keys().chain(after.keys());
    names.all(|name| has_all(before.get(name), after.get(name), read.get(name)))
}
