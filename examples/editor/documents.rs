//! The documents of the editor, and all operations on them except locking.

use std::collections::HashMap;

use actix_doclock::{BoxError, Description, LockKey, Lockable, MemoryStore, MongoStore};
use actix_web::cookie::Key;
use futures_util::TryStreamExt;
use mongodb::{
    Collection,
    bson::{Binary, Bson, Document, doc, oid::ObjectId, spec::BinarySubtype},
    options::{ReturnDocument, WriteConcern},
};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct WorkItem {
    #[serde(rename = "_id")]
    pub(crate) id: ObjectId,
    pub(crate) title: String,
    pub(crate) body: String,
}

impl Lockable for WorkItem {
    type Id = ObjectId;
    const COLLECTION: &'static str = "workitem";
}

const SAMPLES: [(&str, &str); 3] = [
    (
        "Opening hours in December",
        "The reading room is open from 10:00 to 18:00, on the 24th until 13:00.\n\n\
         To be checked: the late opening on Thursdays.",
    ),
    (
        "Complaint 4711: parcel left in the rain",
        "The customer asks for a new print of the catalogue. Photographs are in the file.\n\n\
         Next step: ask the carrier for the delivery note.",
    ),
    (
        "Price list, spring",
        "Paper has gone up by 4 %. Draft with the new prices, to be agreed on until Friday.",
    ),
];

/// The store of the documents.
#[derive(Clone)]
pub(crate) enum Documents {
    Memory(MemoryStore),
    Mongo(MongoStore),
}

impl Documents {
    pub(crate) fn in_memory() -> Self {
        Self::Memory(MemoryStore::new())
    }

    pub(crate) async fn on_mongodb(uri: &str, database: &str) -> Result<Self, BoxError> {
        Ok(Self::Mongo(MongoStore::connect(uri, database).await?))
    }

    pub(crate) async fn all(&self) -> Result<Vec<WorkItem>, BoxError> {
        match self {
            Self::Memory(store) => Ok(store.all()?),
            Self::Mongo(store) => {
                let mut cursor = workitems(store).find(doc! {}).sort(doc! { "_id": 1 }).await?;
                let mut items = Vec::new();
                while cursor.advance().await? {
                    items.push(cursor.deserialize_current()?);
                }
                Ok(items)
            }
        }
    }

    /// The titles of these documents, and the links that open them.
    pub(crate) async fn describe(
        self,
        keys: Vec<LockKey>,
    ) -> Result<HashMap<LockKey, Description>, BoxError> {
        let items = match &self {
            Self::Memory(_) => self.all().await?,
            Self::Mongo(store) => {
                let ids: Vec<_> = keys.iter().map(|key| Bson::from(key.id())).collect();
                let found = workitems(store).find(doc! { "_id": { "$in": ids } }).await?;
                found.try_collect().await?
            }
        };
        let described = items.into_iter().map(|item| {
            let link = format!("/#/{}", item.id.to_hex());
            Ok((LockKey::of::<WorkItem>(item.id)?, Description::new(item.title).link(link)))
        });
        described.collect()
    }

    pub(crate) async fn insert_samples_if_empty(&self) -> Result<(), BoxError> {
        if !self.all().await?.is_empty() {
            return Ok(());
        }
        for (n, (title, body)) in (1..).zip(SAMPLES) {
            // The same ids on every server: two servers may start at the same moment.
            let id = ObjectId::from_bytes([n; 12]);
            match self {
                Self::Memory(store) => {
                    let (title, body) = (title.to_owned(), body.to_owned());
                    store.put(id, &WorkItem { id, title, body })?;
                }
                Self::Mongo(store) => {
                    let fields = doc! { "$setOnInsert": { "title": title, "body": body } };
                    workitems(store).update_one(doc! { "_id": id }, fields).upsert(true).await?;
                }
            }
        }
        Ok(())
    }

    /// The key that encrypts the session cookies: the same for all servers on one database.
    pub(crate) async fn session_key(&self) -> Result<Key, BoxError> {
        let Self::Mongo(store) = self else {
            return Ok(Key::generate());
        };
        let mine =
            Binary { subtype: BinarySubtype::Generic, bytes: Key::generate().master().to_vec() };
        let settings: Collection<Document> = store.database().collection("editor.settings");
        let ours = settings
            .find_one_and_update(
                doc! { "_id": "session key" },
                doc! { "$setOnInsert": { "key": mine } },
            )
            .upsert(true)
            .return_document(ReturnDocument::After)
            .write_concern(WriteConcern::majority())
            .await?
            .ok_or("an upsert returns the document")?;
        Ok(Key::from(ours.get_binary_generic("key")?))
    }
}

fn workitems(store: &MongoStore) -> Collection<WorkItem> {
    store.database().collection(WorkItem::COLLECTION)
}
