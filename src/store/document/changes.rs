//! The changes of a document between load and save, and the proof that they can be read again.

use std::slice;

use serde::{Serialize, de::DeserializeOwned};

use super::{
    Format, Original, StoredDocument,
    aliases::without_aliases,
    encoded::{Encoded, Reread, read, reread},
    merge::{Merge, Path, Value, Versions, are_alike, are_same},
    paths::{at, differ, with},
};
use crate::error::BoxError;
#[cfg(feature = "_mongo")]
use crate::store::mongo::codec::Bson;

/// How many fields are left out one by one to see whether the type reads them, and how many bytes are read for that: a
/// large document with many unknown fields must not hold up its server.
const PROBES: usize = 64;
const PROBED_BYTES: usize = 16 << 20;
/// At least this many fields are tried, even in a large document.
const FEWEST_PROBES: usize = 8;

impl Original {
    /// `value` as the whole document, without the fields that its type does not name.
    ///
    /// # Errors
    /// As [`changes_to`](Self::changes_to).
    pub fn replaced_by<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
    ) -> Result<StoredDocument, BoxError> {
        let after = StoredDocument::encode(self.loaded.format, value)?;
        match self.loaded.format {
            Format::Json => whole::<serde_json::Value>(&self.loaded, &after, &reread::<T>)?,
            #[cfg(feature = "_mongo")]
            Format::Bson => whole::<Bson>(&self.loaded, &after, &reread::<T>)?,
        }
        Ok(after)
    }

    /// The changes that turn this document into `value`.
    ///
    /// The result is read as a `T` here, and must give back `value`: so a save of these changes never makes a
    /// document that `T` cannot read, and never leaves out a change.
    ///
    /// # Errors
    /// If `value` has no stored form, or if `T` would read another value from the result. The error names the field.
    pub fn changes_to<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
    ) -> Result<Changes, BoxError> {
        let after = StoredDocument::encode(self.loaded.format, value)?;
        let result = match self.loaded.format {
            Format::Json => planned::<serde_json::Value>(self, &after, &reread::<T>)?,
            #[cfg(feature = "_mongo")]
            Format::Bson => planned::<Bson>(self, &after, &reread::<T>)?,
        };
        Ok(Changes { original: self.clone(), after, result, reread: reread::<T> })
    }
}

/// The difference between a document as it was loaded and as it is to be saved; see
/// [`Original::changes_to`].
#[derive(Debug, Clone)]
pub struct Changes {
    original: Original,
    after: StoredDocument,
    /// The result, if no other program has changed the document.
    result: Planned,
    reread: fn(&StoredDocument) -> Result<StoredDocument, BoxError>,
}

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

    /// The result of applying these changes to the stored document `now`.
    ///
    /// # Errors
    /// The path of a field that another program has changed since the document was loaded, so that nothing may
    /// be written.
    pub fn apply(&self, now: &StoredDocument) -> Result<StoredDocument, String> {
        match &self.result {
            Planned::Nothing => return Ok(now.clone()),
            Planned::Merged(result) | Planned::Corrected(result)
                if now.as_bytes() == self.original.loaded.as_bytes() =>
            {
                return Ok(result.clone());
            }
            _ => {}
        }
        let path = match now.format {
            Format::Json => self.merged::<serde_json::Value>(now),
            #[cfg(feature = "_mongo")]
            Format::Bson => self.merged::<Bson>(now),
        };
        path.map_err(|path| path.join("."))
    }

    fn merged<V: Encoded>(&self, now: &StoredDocument) -> Result<StoredDocument, Path> {
        let decoded = |document: &StoredDocument| V::decoded(document).map_err(|_| Path::new());
        let Original { loaded, before } = &self.original;
        let (loaded, before) = (decoded(loaded)?, decoded(before)?);
        let (after, now) = (decoded(&self.after)?, decoded(now)?);
        let changed = |loaded, now| {
            let mut differences = Vec::new();
            differ(loaded, now, V::is_same, PROBES, &mut Path::new(), &mut differences);
            differences.into_iter().next().unwrap_or_default()
        };
        if let Planned::Merged(result) | Planned::Corrected(result) = &self.result
            && decoded(result)?.is_same(&now)
        {
            // This save was carried out before, and its reply was lost.
            return Ok(result.clone());
        }
        if let Planned::Corrected(result) = &self.result {
            return if loaded.is_same(&now) {
                Ok(result.clone())
            } else {
                Err(changed(&loaded, &now))
            };
        }
        let (before, after) = (Some(&before), Some(&after));
        let versions = Versions { loaded: Some(&loaded), before, after, now: Some(&now) };
        let (merged, _) = Merge::of(versions).map_err(|(_, path)| path)?;
        let merged = merged.encoded().map_err(|_| changed(&loaded, &now))?;
        let read = (self.reread)(&merged).ok().and_then(|read| V::decoded(&read).ok());
        let is_complete = |read: &V| has_all(before, after, Some(read));
        if read.as_ref().is_some_and(is_complete) {
            Ok(merged)
        } else {
            Err(changed(&loaded, &now))
        }
    }

    /// The document after the save, for the next save.
    #[must_use]
    pub fn into_original(self) -> Original {
        let loaded = match self.result {
            Planned::Nothing => self.original.loaded,
            Planned::Merged(result) | Planned::Corrected(result) => result,
        };
        Original { loaded, before: self.after }
    }
}

fn planned<V: Encoded>(
    Original { loaded, before }: &Original,
    after: &StoredDocument,
    reread: Reread<'_>,
) -> Result<Planned, BoxError> {
    let (before, after) = (V::decoded(before)?, V::decoded(after)?);
    if before.is_same(&after) {
        return Ok(Planned::Nothing);
    }
    let mut loaded = V::decoded(loaded)?;
    let merge = |loaded: &V| {
        let (before, after) = (Some(&before), Some(&after));
        let loaded = Some(loaded);
        let merged = Merge::of(Versions { loaded, before, after, now: loaded });
        merged.map_err(|(_, path)| {
            let path = path.join(".");
            format!("fields or elements of `{path}` that the type does not know would be lost")
        })
    };
    let (mut merged, Merge { mut grown, .. }) = merge(&loaded)?;
    let mut first = read(&merged, reread);
    if first.as_ref().is_ok_and(|read| read.is_alike(&after)) {
        return Ok(Planned::Merged(merged.encoded()?));
    }
    let probes = probes(&merged.encoded()?);
    // An aliased document may contain aliases. Each round leaves fewer members that have grown.
    while let Some(renamed) = without_aliases(&loaded, &before, &grown, probes, reread) {
        loaded = renamed;
        (merged, Merge { grown, .. }) = merge(&loaded)?;
        first = read(&merged, reread);
    }
    let corrected = corrected(Some(&merged), Some(&first?), Some(&after)).unwrap_or(merged);
    gives_back(&corrected, &after, probes, reread)?;
    Ok(Planned::Corrected(corrected.encoded()?))
}

fn probes(document: &StoredDocument) -> usize {
    (PROBED_BYTES / document.as_bytes().len().max(1)).clamp(FEWEST_PROBES, PROBES)
}

/// An error if the whole document may not be replaced.
fn whole<V: Encoded>(
    loaded: &StoredDocument,
    after: &StoredDocument,
    reread: Reread<'_>,
) -> Result<(), BoxError> {
    let probes = probes(after);
    let (loaded, after) = (V::decoded(loaded)?, V::decoded(after)?);
    let Some(id) = loaded.member("_id") else { return Ok(()) };
    if after.member("_id").is_some() {
        return gives_back(&after, &after, probes, reread);
    }
    // The store adds the `_id`. A type that reads its id from `_id`, but writes it to another field, would add that
    // field.
    let stored = with(&after, &["_id".to_owned()], Some(id.clone()));
    gives_back(&stored, &after, probes, reread)?;
    let new = after.members().into_iter().flatten().map(|(name, _)| name);
    let read_back = read(&stored, reread)?;
    new.filter(|name| loaded.member(name).is_none())
        .try_for_each(|name| is_read(&stored, &read_back, slice::from_ref(name), reread))
}

/// The merged document, corrected where the type reads another value from it than `after` has: a field without members
/// gets the value of `after`, or is removed. Fields that the type does not know stay.
fn corrected<V: Value>(merged: Option<&V>, read: Option<&V>, after: Option<&V>) -> Option<V> {
    if are_alike(read, after) {
        return merged.cloned();
    }
    if let (Some(merged), Some(read), Some(after)) = (merged, read, after)
        && let (Some(old), Some(_), Some(new)) = (merged.members(), read.members(), after.members())
    {
        let new = new.map(|(name, _)| name).filter(|name| merged.member(name).is_none());
        let names = old.map(|(name, _)| name).chain(new);
        let members = names.filter_map(|name| {
            let value = corrected(merged.member(name), read.member(name), after.member(name));
            Some((name.clone(), value?))
        });
        return Some(V::document(members.collect::<Vec<_>>().into_iter()));
    }
    let is_plain =
        |it: &V| it.is_leaf() || it.elements().is_some_and(|all| all.iter().all(V::is_leaf));
    if merged.is_none_or(is_plain) { after.cloned() } else { merged.cloned() }
}

/// An error if the type reads another value than `after` from the document. The type may read a value in another
/// form than it writes it, such as a text without the blanks at its end.
fn gives_back<V: Encoded>(
    stored: &V,
    after: &V,
    probes: usize,
    reread: Reread<'_>,
) -> Result<(), BoxError> {
    let read_back = read(stored, reread)?;
    let mut differences = Vec::new();
    differ(&read_back, after, V::is_alike, PROBES, &mut Path::new(), &mut differences);
    for (n, path) in differences.into_iter().enumerate() {
        let wanted = at(after, &path);
        if n >= probes || wanted.is_none() || !are_same(at(stored, &path), wanted) {
            let path = path.join(".");
            return Err(format!(
                "the type reads another `{path}` from the stored document than it would save"
            )
            .into());
        }
        is_read(stored, &read_back, &path, reread)?;
    }
    Ok(())
}

/// An error if the type does not read this field: the type reads the same value without the field, and with nonsense
/// in it.
fn is_read<V: Encoded>(
    stored: &V,
    read_back: &V,
    path: &[String],
    reread: Reread<'_>,
) -> Result<(), BoxError> {
    let nonsense = V::document([(String::new(), V::array(Vec::new()))].into_iter());
    let is_ignored = |instead: Option<V>| {
        let read = read(&with(stored, path, instead), reread);
        read.is_ok_and(|read| read.is_alike(read_back))
    };
    if !is_ignored(None) || !is_ignored(Some(nonsense)) {
        return Ok(());
    }
    let path = path.join(".");
    Err(format!("the type writes `{path}`, but does not read it: give it one name for both").into())
}

/// True if `read` has all changes from `before` to `after`.
fn has_all<V: Value>(before: Option<&V>, after: Option<&V>, read: Option<&V>) -> bool {
    if are_same(before, after) || are_alike(read, after) {
        return true;
    }
    let (Some(before), Some(after), Some(read)) = (before, after, read) else { return false };
    let (Some(old), Some(new), Some(_)) = (before.members(), after.members(), read.members())
    else {
        return false;
    };
    let mut names = old.chain(new).map(|(name, _)| name);
    names.all(|name| has_all(before.member(name), after.member(name), read.member(name)))
}
