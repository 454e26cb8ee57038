//! What is told about one thing that is wrong.

use mongodb::Namespace;
use serde::Serialize;

/// Something about a database that its locks suffer from, as
/// [`MongoStore::diagnose`](crate::MongoStore::diagnose) finds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What kind of finding it is, for programs: `missing_index`, for example.
    pub code: &'static str,
    /// The collection, server or user that it is about.
    pub about: String,
    /// What is wrong, and what comes of it.
    pub problem: String,
    /// What to do.
    pub advice: String,
    /// What to paste into `mongosh`, where a command does it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Severity {
    /// Good to know; nothing is wrong.
    Info,
    /// Locks work, but not as well or as safely as they could.
    Warning,
    /// Locks are refused, or lost while they are held.
    Error,
}

impl Finding {
    pub(super) fn new(
        severity: Severity,
        code: &'static str,
        about: impl ToString,
        problem: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        let (problem, advice) = (problem.into(), advice.into());
        Self { severity, code, about: about.to_string(), problem, advice, command: None }
    }

    pub(super) fn with_command(mut self, command: impl Into<String>) -> Self {
        self.command = Some(command.into());
        self
    }
}

/// The collection in the words of `mongosh`.
pub(super) fn in_shell(namespace: &Namespace) -> String {
    format!("{}.getCollection({})", database_in_shell(&namespace.db), quoted(&namespace.coll))
}

pub(super) fn database_in_shell(database: &str) -> String {
    format!("db.getSiblingDB({})", quoted(database))
}

/// As a literal of JavaScript, of characters that are safe to print and to paste.
pub(super) fn quoted(text: &str) -> String {
    let literal = serde_json::Value::from(text).to_string();
    let ascii = |c: char| match c {
        ' '..='~' => c.to_string(),
        c => format!("\\u{{{:x}}}", u32::from(c)),
    };
    literal.chars().map(ascii).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_in_a_command_is_a_string_whatever_it_contains() {
        assert_eq!(quoted("it's"), r#""it's""#);
        assert_eq!(quoted("\");drop(\""), r#""\");drop(\"""#);
        assert_eq!(quoted("ß\u{202e}\u{9b}\u{7f}\n\\"), r#""\u{df}\u{202e}\u{9b}\u{7f}\n\\""#);
    }
}
