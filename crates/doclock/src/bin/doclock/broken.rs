//! Takes a lock from its holder.

use std::io::{self, IsTerminal, Write};

use actix_doclock::{Actor, Lock, MongoStore, Released};
use serde_json::json;

use crate::{
    Failure, Outcome, Result,
    args::Break,
    locks::{self, as_json},
    manager, output, tell,
};

pub(crate) async fn break_lock(store: &MongoStore, args: &Break, json: bool) -> Result {
    let mut seen = locks::on(store, &args.which).await?;
    let is_locked = !seen.is_empty();
    if args.token.is_some() {
        seen.retain(|lock| lock.token == args.token);
    }
    // Breaks exactly the locks that the person was asked about, however long the answer takes.
    let agreed = !seen.is_empty() && (args.yes || agreed(&seen)?);
    let locks = manager(store).await?;
    let actor = Actor::new(&args.actor);
    // A break that fails for one reader goes on with the others, and names them.
    let (mut broken, mut failed) = (Vec::new(), None);
    for lock in seen.iter().filter(|_| agreed) {
        match locks.break_lock(lock, &actor, &args.reason).await {
            Ok(Released::Released) => broken.push(lock),
            Ok(Released::AlreadyGone) => {}
            Err(e) => failed = failed.or(Some(e)),
        }
    }
    // The note for the application's listener is settled after the answer.
    locks.shutdown().await;
    if json {
        let broken: Vec<_> = broken.iter().map(|lock| as_json(lock)).collect();
        output::print_json(&json!({ "broken": broken }))?;
    } else if !broken.is_empty() {
        output::print(&format!("broken: {}", output::printable(&args.which.key)))?;
    }
    if let Some(error) = failed {
        return Err(error.into());
    }
    match (seen.len(), broken.len()) {
        (0, _) if is_locked => tell(&format!(
            "{} is locked, but not by the lock with this token; `doclock show` prints the tokens",
            args.which.key
        )),
        (0, _) => tell(&format!("{} is not locked", args.which.key)),
        (_, 0) if agreed => tell("the lock was gone by then"),
        (_, 0) => tell("nothing was broken"),
        _ => return Ok(Outcome::Done),
    }
    Ok(Outcome::NotSo)
}

fn agreed(seen: &[Lock]) -> Result<bool> {
    if !io::stdin().is_terminal() {
        return Err(Failure::Usage(
            "there is no terminal to ask for confirmation: add --yes".to_owned(),
        ));
    }
    let question = "Break this lock? Unsaved work of the holder will be refused. [y/N]";
    write!(io::stderr(), "{}\n{question} ", locks::table(seen, None))?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
