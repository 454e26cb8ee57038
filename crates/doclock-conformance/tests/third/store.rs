//! The store: one verb is one transaction of the database.
//!
//! The database of the tests is in memory, so that no verb blocks its thread for long. With a database on disk, `write`
//! and `read` belong into `spawn_blocking`.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use doclock_core::{
    Aid, Lock, LockKey, Mode, Released, StoreError, StoreErrorKind, TryAcquire,
    store::{
        Ability, Acquisition, Active, Claim, Confirmed, Content, Edit, Format, HandedOver,
        MAX_READERS, PageId, Query, Removal, Renewed, Rules, Saved, StoredDocument, verbs::*,
    },
};
use redb::{Database, ReadableDatabase, ReadableTable, Table, TableDefinition};
use serde::Serialize;
use serde_json::Value;

use crate::grant::{Grant, Now, key_of, name_of, refused};

/// The name of a document, and the session.
type Row = (&'static str, &'static str);
type Name = &'static str;
type Json = &'static [u8];

/// Locks and documents of one collection in one transaction, and the date of the verb.
struct Collection<L, D> {
    locks: L,
    documents: D,
    now: Now,
}

impl<L: ReadableTable<Row, Json>, D: ReadableTable<Name, Json>> Collection<L, D> {
    /// The grants on the document that are on record.
    fn rows(&self, name: &str) -> Result<Vec<Grant>, StoreError> {
        let after = format!("{name}\0");
        let rows = self.locks.range((name, "")..(after.as_str(), "")).map_err(failed)?;
        rows.map(|row| decode(row.map_err(failed)?.1.value())).collect()
    }

    /// The live grants on the document.
    fn grants(&self, name: &str) -> Result<Vec<Grant>, StoreError> {
        let mut grants = self.rows(name)?;
        grants.retain(|grant| self.is_live(grant));
        Ok(grants)
    }

    /// The live grant to the session.
    fn grant(&self, name: &str, aid: &Aid) -> Result<Option<Grant>, StoreError> {
        let row = self.locks.get((name, aid.as_str())).map_err(failed)?;
        let grant = row.map(|row| decode(row.value())).transpose()?;
        Ok(grant.filter(|it| self.is_live(it)))
    }

    /// The live grant with this token.
    fn held(&self, name: &str, held: &Acquisition) -> Result<Option<Grant>, StoreError> {
        Ok(self.grant(name, &held.aid)?.filter(|it| it.token == held.token))
    }

    fn is_live(&self, grant: &Grant) -> bool {
        grant.is_live(self.now)
    }

    /// The names of all documents with a row, in order.
    fn names(&self) -> Result<BTreeSet<String>, StoreError> {
        let rows = self.locks.iter().map_err(failed)?;
        rows.map(|row| Ok(row.map_err(failed)?.0.value().0.to_owned())).collect()
    }

    fn document(&self, name: &str) -> Result<Option<StoredDocument>, StoreError> {
        let row = self.documents.get(name).map_err(failed)?;
        Ok(row.map(|row| StoredDocument::from_bytes(Format::Json, row.value().to_vec())))
    }
}

type Writable<'t> = Collection<Table<'t, Row, Json>, Table<'t, Name, Json>>;

impl Writable<'_> {
    fn put(&mut self, name: &str, grant: &Grant) -> Result<(), StoreError> {
        let row = serde_json::to_vec(grant).map_err(unreadable)?;
        self.locks.insert((name, grant.aid.as_str()), &row[..]).map_err(failed)?;
        Ok(())
    }

    fn remove(&mut self, name: &str, grant: &Grant) -> Result<(), StoreError> {
        self.locks.remove((name, grant.aid.as_str())).map_err(failed)?;
        Ok(())
    }

    fn write(&mut self, name: &str, document: Option<&StoredDocument>) -> Result<(), StoreError> {
        match document {
            Some(document) => self.documents.insert(name, document.as_bytes()),
            None => self.documents.remove(name),
        }
        .map_err(failed)?;
        Ok(())
    }

    fn acquire(&mut self, key: &LockKey, claim: &Claim) -> Result<TryAcquire, StoreError> {
        let (name, now) = (name_of(key.id())?, self.now);
        let (live, expired): (Vec<_>, Vec<_>) =
            self.rows(&name)?.into_iter().partition(|grant| grant.is_live(now));
        // Nothing else removes them: the store has no sweep.
        for grant in expired {
            self.remove(&name, &grant)?;
        }
        let (mine, others): (Vec<_>, Vec<_>) =
            live.into_iter().partition(|grant| grant.aid == claim.aid);
        if claim.upgrades.is_some() && !mine.iter().any(|grant| grant.may_become(claim)) {
            return Ok(TryAcquire::Lost(key.clone()));
        }
        if let Some(mut mine) = mine.into_iter().find(|grant| grant.covers(claim)) {
            let is_same_claim = mine.token.is_of_same_claim(claim.token);
            if is_same_claim || !mine.is_of_another_tab(claim) {
                mine.reenter(claim, now);
                self.put(&name, &mine)?;
            }
            let lock = mine.lock(key, now);
            return Ok(if is_same_claim {
                TryAcquire::Granted(lock)
            } else {
                TryAcquire::AlreadyMine(lock)
            });
        }
        let is_full = others.len() >= MAX_READERS;
        let last = others.into_iter().max_by_key(Grant::expires);
        let in_the_way = last.filter(|other| {
            is_full || claim.mode == Mode::Exclusive || other.mode == Mode::Exclusive
        });
        if let Some(other) = in_the_way {
            return Ok(TryAcquire::Held(other.lock(key, now)));
        }
        let grant = Grant::new(claim, now);
        self.put(&name, &grant)?;
        Ok(TryAcquire::Granted(grant.lock(key, now)))
    }

    fn renew(&mut self, active: &[Active], ttl: Duration) -> Result<Renewed, StoreError> {
        let mut documents = 0;
        for name in self.names()? {
            let mut is_renewed = false;
            for mut grant in self.grants(&name)? {
                if active.iter().any(|active| grant.is_named_by(active)) {
                    grant.renew(ttl, self.now);
                    self.put(&name, &grant)?;
                    is_renewed = true;
                }
            }
            documents += u64::from(is_renewed);
        }
        Ok(Renewed { documents, late: Vec::new() })
    }

    fn remove_one(&mut self, removal: Removal<'_>) -> Result<Released, StoreError> {
        let Some(key) = removal.key() else { return Ok(Released::AlreadyGone) };
        let name = name_of(key.id())?;
        let grant = match removal {
            Removal::Release(held) => self.held(&name, held)?,
            Removal::Retract(attempts) => {
                let aid = attempts.first().map(|attempt| &attempt.aid);
                let grant = aid.map(|aid| self.grant(&name, aid)).transpose()?.flatten();
                grant.filter(|it| {
                    !it.is_known && attempts.iter().any(|attempt| attempt.token == it.token)
                })
            }
            Removal::Break { seen, .. } => {
                self.grant(&name, &seen.aid)?.filter(|it| Some(it.token) == seen.token)
            }
        };
        let Some(grant) = grant else { return Ok(Released::AlreadyGone) };
        self.remove(&name, &grant)?;
        Ok(Released::Released)
    }

    fn hand_over(&mut self, from: &Acquisition, claim: &Claim) -> Result<HandedOver, StoreError> {
        let (name, now) = (name_of(from.key.id())?, self.now);
        let earlier = self.grant(&name, &claim.aid)?;
        if let Some(earlier) = earlier.filter(|it| it.token.is_of_same_claim(claim.token)) {
            return Ok(HandedOver::To(earlier.lock(&from.key, now)));
        }
        let held = self.held(&name, from)?.filter(|it| it.mode == Mode::Exclusive);
        let Some(held) = held else { return Ok(HandedOver::AlreadyGone) };
        self.remove(&name, &held)?;
        let grant = if held.aid == claim.aid {
            Grant::continuing(&held, claim, now)
        } else {
            Grant::new(claim, now)
        };
        self.put(&name, &grant)?;
        Ok(HandedOver::To(grant.lock(&from.key, now)))
    }

    fn expire_in(
        &mut self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
    ) -> Result<Released, StoreError> {
        let name = name_of(held.key.id())?;
        let grant = self.held(&name, held)?.filter(|it| {
            it.mode == Mode::Exclusive && page.is_none_or(|page| it.page == Some(page))
        });
        let Some(mut grant) = grant else { return Ok(Released::AlreadyGone) };
        let leaves = self.now.date + grace;
        grant.leaves = Some(grant.leaves.map_or(leaves, |earlier| earlier.min(leaves)));
        self.put(&name, &grant)?;
        Ok(Released::Released)
    }

    fn save(&mut self, held: &Acquisition, edit: &Edit) -> Result<Saved, StoreError> {
        let name = name_of(held.key.id())?;
        let grant = self.held(&name, held)?.filter(|it| it.mode == Mode::Exclusive);
        let Some(mut grant) = grant else { return Ok(Saved::Lost) };
        let now = self.document(&name)?;
        if now.as_ref().is_some_and(|now| !edit.fits(now)) {
            return Ok(Saved::ChangedMeanwhile(String::new()));
        }
        let result = match (now, &edit.content) {
            (None, Content::Creation(new)) => {
                check_id(new, |id| is_id_of(id, &held.key))?;
                Some(new.clone())
            }
            (Some(_), Content::Creation(_)) => {
                return Err(rejected("there is such a document already"));
            }
            (None, _) => return Ok(Saved::DocumentGone),
            (Some(_), Content::Deletion) => None,
            (Some(now), Content::Replacement(new)) => Some(keep_id(&now, new.clone())?),
            (Some(now), Content::Changes(changes)) => match changes.apply(&now) {
                Ok(new) => Some(keep_id(&now, new)?),
                Err(path) => return Ok(Saved::ChangedMeanwhile(path)),
            },
        };
        self.write(&name, result.as_ref())?;
        grant.renew_by_save(self.now);
        self.put(&name, &grant)?;
        Ok(Saved::Saved)
    }
}

#[derive(Debug)]
pub(crate) struct RedbStore {
    database: Database,
}

impl RedbStore {
    pub(crate) fn new(database: Database) -> Self {
        Self { database }
    }

    /// Writes a document without regard to locks.
    pub(crate) fn put(&self, key: &LockKey, document: &impl Serialize) -> Result<(), StoreError> {
        let name = name_of(key.id())?;
        let document = StoredDocument::encode(Format::Json, document)
            .map_err(|error| rejected("the document is no JSON").because(error))?;
        self.write(key.collection(), |collection| collection.write(&name, Some(&document)))
    }

    /// Deletes a document without regard to locks.
    pub(crate) fn delete(&self, key: &LockKey) -> Result<(), StoreError> {
        let name = name_of(key.id())?;
        self.write(key.collection(), |collection| collection.write(&name, None))
    }

    /// Makes the locks on the document older.
    pub(crate) fn age(&self, key: &LockKey, by: Duration) -> Result<(), StoreError> {
        let name = name_of(key.id())?;
        self.write(key.collection(), |collection| {
            for mut grant in collection.grants(&name)? {
                grant.age(by);
                collection.put(&name, &grant)?;
            }
            Ok(())
        })
    }

    fn write<T>(
        &self,
        collection: &str,
        work: impl FnOnce(&mut Writable<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.write_or(StoreErrorKind::Unavailable, collection, work)
    }

    /// One transaction. If nobody knows whether it was committed, the error is of the kind `in_doubt`.
    fn write_or<T>(
        &self,
        in_doubt: StoreErrorKind,
        collection: &str,
        work: impl FnOnce(&mut Writable<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let transaction = self.database.begin_write().map_err(failed)?;
        let answer = {
            let [locks, documents] = names_of_tables(collection);
            let locks = transaction.open_table(TableDefinition::new(&locks)).map_err(failed)?;
            let documents =
                transaction.open_table(TableDefinition::new(&documents)).map_err(failed)?;
            // Only now can no other verb come between.
            work(&mut Collection { locks, documents, now: Now::read() })?
        };
        let unknown = |error| StoreError::new(in_doubt, "the commit failed").because(error);
        transaction.commit().map_err(unknown)?;
        Ok(answer)
    }

    fn read<T>(
        &self,
        collection: &str,
        work: impl FnOnce(
            &Collection<redb::ReadOnlyTable<Row, Json>, redb::ReadOnlyTable<Name, Json>>,
        ) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let now = Now::read();
        let transaction = self.database.begin_read().map_err(failed)?;
        let [locks, documents] = names_of_tables(collection);
        let locks = transaction.open_table(TableDefinition::new(&locks)).map_err(failed)?;
        let documents = transaction.open_table(TableDefinition::new(&documents)).map_err(failed)?;
        work(&Collection { locks, documents, now })
    }
}

impl Locks for RedbStore {
    fn can(&self, ability: Ability) -> bool {
        use Ability::{Confirm, Documents, HandOver, Pages};
        matches!(ability, Confirm | Documents | HandOver | Pages)
    }

    async fn prepare(&self, collection: &str, _: &Rules, _: Deadline) -> Result<(), StoreError> {
        // A transaction opens the tables, and so makes them.
        self.write(collection, |_| Ok(()))
    }

    async fn try_acquire(
        &self,
        key: &LockKey,
        claim: &Claim,
        _: Deadline,
    ) -> Result<TryAcquire, StoreError> {
        self.write(key.collection(), |collection| collection.acquire(key, claim))
    }

    async fn renew(
        &self,
        collection: &str,
        active: &[Active],
        ttl: Duration,
        _: Deadline,
    ) -> Result<Renewed, StoreError> {
        self.write(collection, |collection| collection.renew(active, ttl))
    }

    async fn remove_lock(&self, removal: Removal<'_>, _: Deadline) -> Result<Released, StoreError> {
        let Some(key) = removal.key() else { return Ok(Released::AlreadyGone) };
        self.write(key.collection(), |collection| collection.remove_one(removal))
    }

    async fn locks(
        &self,
        collection: &str,
        query: Query<'_>,
        limit: usize,
        _: Deadline,
    ) -> Result<Vec<Lock>, StoreError> {
        self.read(collection, |rows| {
            let names = match query {
                Query::Each { keys, .. } | Query::On(keys) => {
                    keys.iter().map(|key| name_of(key.id())).collect::<Result<_, _>>()?
                }
                Query::Of(_) | Query::All => rows.names()?,
            };
            let mut documents = Vec::new();
            for name in names {
                let mut grants = rows.grants(&name)?;
                match query {
                    Query::Each { aid, .. } => {
                        let rank = |it: &Grant| (Some(&it.aid) == aid, it.expires());
                        grants.sort_by_key(|it| std::cmp::Reverse(rank(it)));
                        grants.truncate(1);
                    }
                    Query::Of(aids) => grants.retain(|it| aids.contains(&it.aid)),
                    Query::On(_) | Query::All => {}
                }
                if !grants.is_empty() {
                    let key = key_of(collection, &name)?;
                    documents.push(grants.into_iter().map(move |it| it.lock(&key, rows.now)));
                }
            }
            Ok(documents.into_iter().take(limit).flatten().collect())
        })
    }

    async fn hand_over(
        &self,
        from: &Acquisition,
        claim: &Claim,
        _: Deadline,
    ) -> Result<HandedOver, StoreError> {
        self.write(from.key.collection(), |collection| collection.hand_over(from, claim))
    }

    async fn confirm(
        &self,
        key: &LockKey,
        aid: &Aid,
        load: bool,
        _: Deadline,
    ) -> Result<Option<Confirmed>, StoreError> {
        let name = name_of(key.id())?;
        self.read(key.collection(), |collection| {
            let Some(grant) = collection.grant(&name, aid)? else { return Ok(None) };
            Ok(Some(Confirmed {
                lock: grant.lock(key, collection.now),
                page: grant.page,
                is_known: grant.is_known,
                is_leaving: grant.leaves.is_some(),
                document: if load { collection.document(&name)? } else { None },
            }))
        })
    }

    async fn expire_in(
        &self,
        held: &Acquisition,
        page: Option<PageId>,
        grace: Duration,
        _: Deadline,
    ) -> Result<Released, StoreError> {
        self.write(held.key.collection(), |collection| collection.expire_in(held, page, grace))
    }
}

impl Documents for RedbStore {
    async fn load(&self, key: &LockKey, _: Deadline) -> Result<Option<StoredDocument>, StoreError> {
        let name = name_of(key.id())?;
        self.read(key.collection(), |collection| collection.document(&name))
    }

    async fn save(
        &self,
        held: &Acquisition,
        edit: &Edit,
        until: Deadline,
    ) -> Result<Saved, StoreError> {
        self.write_or(StoreErrorKind::OutcomeUnknown, held.key.collection(), |collection| {
            if until.moment().is_some_and(|moment| moment <= Instant::now()) {
                let late = "the save came after its deadline, and wrote nothing";
                return Err(StoreError::new(StoreErrorKind::Unavailable, late));
            }
            collection.save(held, edit)
        })
    }
}

impl Sessions for RedbStore {}

impl Servers for RedbStore {}

fn names_of_tables(collection: &str) -> [String; 2] {
    [format!("{collection}.lock"), collection.to_owned()]
}

fn failed(error: impl Into<redb::Error>) -> StoreError {
    refused("the database failed").because(error.into())
}

fn unreadable(error: serde_json::Error) -> StoreError {
    refused("a record is no JSON, or of another version").because(error)
}

fn rejected(message: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Rejected, message)
}

fn decode<T: serde::de::DeserializeOwned>(row: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(row).map_err(unreadable)
}

fn check_id(
    document: &StoredDocument,
    is_right: impl FnOnce(&Value) -> bool,
) -> Result<(), StoreError> {
    let fields: Value = decode(document.as_bytes())?;
    if is_right(&fields["_id"]) {
        Ok(())
    } else {
        Err(rejected("the document has another `_id` than the lock"))
    }
}

/// `new`, if it has the `_id` of the document as it is stored.
fn keep_id(now: &StoredDocument, new: StoredDocument) -> Result<StoredDocument, StoreError> {
    let stored: Value = decode(now.as_bytes())?;
    check_id(&new, |id| *id == stored["_id"])?;
    Ok(new)
}

/// True if this JSON is the id of the document.
fn is_id_of(id: &Value, key: &LockKey) -> bool {
    match id {
        Value::String(text) => *text == key.id().to_string(),
        Value::Number(number) => number.to_string() == key.id().to_string(),
        _ => false,
    }
}
