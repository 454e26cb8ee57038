//! A finding of the doctor.

use mongodb::Namespace;
use serde::Serialize;

/// A problem of a database that affects its locks, as reported by
/// [`diagnose`](crate::diagnose).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// How serious it is.
    pub severity: Severity,
    /// The kind of finding, for programs: `missing_index`, for example.
    pub code: &'static str,
    /// The collection, server or user concerned.
    pub about: String,
    /// The problem and its consequences.
    pub problem: String,
    /// The remedy.
    pub advice: String,
    /// A command to paste into `mongosh`, if a command is the remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// How serious a [`Finding`] is.
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

impl Severity {
    pub(super) fn finding(
        self,
        code: &'static str,
        about: impl ToString,
        problem: impl Into<String>,
        advice: impl Into<String>,
    ) -> Finding {
        let (about, problem, advice) = (about.to_string(), problem.into(), advice.into());
        Finding { severity: self, code, about, problem, advice, command: None }
    }
}

impl Finding {
    pub(super) fn with_command(mut self, command: impl Into<String>) -> Self {
        self.command = Some(command.into());
        self
    }
}

/// The collection as an expression of `mongosh`.
pub(super) fn in_shell(namespace: &Namespace) -> String {
    format!("{}.getCollection({})", database_in_shell(&namespace.db), quoted(&namespace.coll))
}

pub(super) fn database_in_shell(database: &str) -> String {
    format!("db.getSiblingDB({})", quoted(database))
}

/// The text as a JavaScript literal, with only characters that are safe to print and to paste.
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
