//! Contacts and categories: a contact names categories. A task that adds a category to a contact holds
//! a shared lock on the category, so that many tasks can do so at the same time. A task that deletes a
//! category holds the exclusive lock while it removes the category from all contacts. So no contact ever
//! names a category that is gone.
//!
//! `cargo run --example jobs -- categories` keeps the locks in this process,
//! `cargo run --example jobs -- categories --mongodb mongodb://127.0.0.1/?replicaSet=rs0` in MongoDB. With
//! `--without-lock` the output shows the purpose of the locks.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use actix_doclock::{BoxError, LockKey, LockManager, Lockable, Wait};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::{task::JoinSet, time::sleep};

const CONTACTS: u32 = 40;
const CATEGORIES: u32 = 3;
const WAIT: Duration = Duration::from_secs(60);

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    locks: crate::support::Locks,
    /// Work without locks.
    #[arg(long)]
    without_lock: bool,
}

#[derive(Serialize, Deserialize)]
struct Category {
    #[serde(rename = "_id")]
    id: i64,
}

impl Lockable for Category {
    type Id = i64;
    const COLLECTION: &'static str = "category";
}

/// Categories, and contacts with their categories. Each change is atomic, a sequence of changes is not.
#[derive(Default)]
struct AddressBook {
    data: Mutex<Data>,
    adding: AtomicUsize,
    most_adding: AtomicUsize,
}

#[derive(Default)]
struct Data {
    categories: BTreeSet<u32>,
    contacts: BTreeMap<u32, BTreeSet<u32>>,
}

impl AddressBook {
    fn data(&self) -> MutexGuard<'_, Data> {
        self.data.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the category to the contact, if it exists. Other tasks run between the check and the write.
    async fn add(&self, contact: u32, category: u32) {
        let adding = self.adding.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_adding.fetch_max(adding, Ordering::SeqCst);
        if self.data().categories.contains(&category) {
            sleep(Duration::from_millis(20)).await;
            self.data().contacts.entry(contact).or_default().insert(category);
        }
        self.adding.fetch_sub(1, Ordering::SeqCst);
    }

    /// Removes the category from all contacts, then deletes it.
    async fn delete(&self, category: u32) {
        for categories in self.data().contacts.values_mut() {
            categories.remove(&category);
        }
        sleep(Duration::from_millis(5)).await;
        self.data().categories.remove(&category);
    }

    fn dangling(&self) -> usize {
        let Data { categories, contacts } = &*self.data();
        contacts.values().flatten().filter(|category| !categories.contains(category)).count()
    }
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), BoxError> {
    let servers = arguments.locks.servers(2, Duration::from_secs(60)).await?;
    for locks in &servers {
        locks.register::<Category>().await?;
    }
    let book = Arc::new(AddressBook::default());
    book.data().categories.extend(0..CATEGORIES);

    let mut tasks = JoinSet::new();
    for contact in 0..CONTACTS {
        let (locks, book) = (servers[contact as usize % 2].clone(), Arc::clone(&book));
        tasks.spawn(async move {
            for category in 0..CATEGORIES {
                let add = book.add(contact, category);
                if arguments.without_lock {
                    add.await;
                } else {
                    reading(&locks, category, add).await?;
                }
            }
            Ok::<_, BoxError>(())
        });
    }
    // The first category remains.
    for category in 1..CATEGORIES {
        let (locks, book) = (servers[category as usize % 2].clone(), Arc::clone(&book));
        tasks.spawn(async move {
            sleep(Duration::from_millis(10)).await;
            let delete = book.delete(category);
            if arguments.without_lock {
                delete.await;
            } else {
                let wait = Wait::for_at_most(WAIT);
                locks.with_lock(&LockKey::of::<Category>(category.into())?, wait, delete).await?;
            }
            Ok(())
        });
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }

    println!("{} of {CATEGORIES} categories are left", book.data().categories.len());
    println!(
        "at most {} at the same time added a category",
        book.most_adding.load(Ordering::SeqCst)
    );
    println!("{} contacts name a category that is gone", book.dangling());
    for locks in &servers {
        locks.shutdown().await;
    }
    Ok(())
}

/// Does `work` with a shared lock on the category.
async fn reading(
    locks: &LockManager,
    category: u32,
    work: impl Future<Output = ()>,
) -> Result<(), BoxError> {
    let key = LockKey::of::<Category>(category.into())?;
    let guard = locks.acquire_shared(&key, Wait::for_at_most(WAIT)).await?;
    work.await;
    guard.release().await?;
    Ok(())
}
