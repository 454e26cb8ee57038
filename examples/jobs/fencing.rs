//! Fencing tokens guard a file outside the database: the file itself refuses a writer that was stalled
//! for longer than the lease of its lock, without knowing it.
//!
//! `cargo run --example jobs -- fencing` keeps the locks in this process,
//! `cargo run --example jobs -- fencing --mongodb mongodb://127.0.0.1/?replicaSet=rs0` in MongoDB.

use std::{
    env, fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use actix_doclock::{BoxError, FencingToken, LockKey, LockManager, Lockable, Wait};
use clap::Args;
use serde::{Deserialize, Serialize};

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    locks: crate::support::Locks,
}

/// The type of the locks on such files. There are no documents, only names.
#[derive(Serialize, Deserialize)]
struct Ledger {}

impl Lockable for Ledger {
    type Id = String;
    const COLLECTION: &'static str = "ledger";
    const FENCED: bool = true;
}

/// A file that remembers the highest token with which it was written. The check and the write must be
/// one step; here a rename does both.
struct FencedFile(PathBuf);

impl FencedFile {
    fn read(&self) -> Result<(u64, String), BoxError> {
        let content = match fs::read_to_string(&self.0) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok((0, String::new())),
            content => content?,
        };
        let (fence, text) = content.split_once('\n').ok_or("not a fenced file")?;
        Ok((fence.parse()?, text.to_owned()))
    }

    fn write(&self, text: &str, fence: FencingToken) -> Result<(), BoxError> {
        let (seen, _) = self.read()?;
        if fence.get() < seen {
            return Err(format!("the file was written with {seen}, {fence} comes too late").into());
        }
        let new = self.0.with_extension("new");
        fs::write(&new, format!("{fence}\n{text}"))?;
        fs::rename(new, &self.0)?;
        Ok(())
    }
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), BoxError> {
    let servers = arguments.locks.servers(2, Duration::from_secs(60)).await?;
    for locks in &servers {
        locks.register::<Ledger>().await?;
    }
    let directory = env::temp_dir().join(format!("doclock-fencing-{}", std::process::id()));
    fs::create_dir_all(&directory)?;
    let outcome = write_both(&servers, &directory).await;
    fs::remove_dir_all(&directory)?;
    outcome
}

async fn write_both(servers: &[LockManager], directory: &Path) -> Result<(), BoxError> {
    let [one, other] = servers else { return Err("two servers were asked for".into()) };
    let (file, key) = (FencedFile(directory.join("ledger")), LockKey::of::<Ledger>("2026".into())?);

    let stalled = one.job("stalls").ttl(Duration::from_secs(1)).acquire(&key, Wait::no()).await?;
    let first = stalled.fence().ok_or("not a fenced collection")?;
    file.write("by the first one", first)?;
    println!("the first one has written, with its token");
    // The first writer stalls: nothing renews its lock any more, and the writer does not notice.
    one.shutdown().await;

    let next = other.acquire(&key, Wait::until_acquired()).await?;
    let second = next.fence().ok_or("not a fenced collection")?;
    file.write("by the second one", second)?;
    println!("the second one has written, with a higher token: {}", second > first);

    match file.write("by the first one, late", first) {
        Err(_) => println!("the first one wakes up, writes, and is refused"),
        Ok(()) => println!("the first one has overwritten what the second one wrote"),
    }
    println!("the file says: {}", file.read()?.1);
    next.release().await?;
    other.shutdown().await;
    Ok(())
}
