//! Finds problems of the database.

use actix_doclock::{MongoStore, StoreErrorKind};
use doclock::{Finding, Severity};
use serde_json::json;

use crate::{
    Failure, Outcome, Result, answer,
    args::Doctor,
    lock_collections,
    output::{self, printable},
};

pub(crate) async fn doctor(store: &MongoStore, args: &Doctor, json: bool) -> Result {
    let collections = match &*args.of.collections {
        [] => match lock_collections(store).await {
            // The findings say what to grant.
            Err(Failure::Store(error)) if error.kind() == StoreErrorKind::Denied => Vec::new(),
            Err(Failure::Usage(_)) if args.sessions.is_some() => Vec::new(),
            found => found?,
        },
        named => named.to_vec(),
    };
    if let Some(sessions) = &args.sessions {
        store.also_needs(doclock::sessions(sessions));
    }
    let findings = answer(doclock::diagnose(store, &collections, args.ttl)).await?;
    let is_wrong = |finding: &&Finding| finding.severity > Severity::Info;
    let wrong = findings.iter().filter(is_wrong).count();
    if json {
        output::print_json(&json!({ "findings": findings }))?;
    } else {
        for finding in &findings {
            output::print(&text(finding))?;
        }
        let looked_at = match &collections[..] {
            [] => "no lock collections".to_owned(),
            some => format!("the locks of {}", printable(&some.join(", "))),
        };
        let result = match wrong {
            0 => "nothing is wrong".to_owned(),
            1 => "1 thing is wrong".to_owned(),
            more => format!("{more} things are wrong"),
        };
        output::print(&format!("looked at the servers and at {looked_at}: {result}"))?;
    }
    Ok(if wrong == 0 { Outcome::Done } else { Outcome::NotSo })
}

fn text(finding: &Finding) -> String {
    let severity = match finding.severity {
        Severity::Info => "info",
        Severity::Warning => "WARNING",
        _ => "ERROR",
    };
    let [about, problem, advice] =
        [&finding.about, &finding.problem, &finding.advice].map(|text| printable(text));
    let mut text = format!("{severity}: {about}: {problem}\n  what to do: {advice}");
    if let Some(command) = &finding.command {
        text += &format!("\n  in mongosh: {command}");
    }
    text + "\n"
}
