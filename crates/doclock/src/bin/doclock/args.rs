//! The arguments of the command.

use std::time::{Duration, SystemTime};

use actix_doclock::{LockKey, LockToken, limits::TTL_RANGE};
use clap::{Parser, Subcommand, builder::NonEmptyStringValueParser};
use doclock::SESSIONS;

/// Lists, watches and breaks the locks that actix-doclock keeps in a MongoDB database, and finds problems
/// of the database.
///
/// Only `break`, `freeze`, `thaw` and `init` write to the database.
#[derive(Debug, Parser)]
#[command(name = "doclock", version, after_help = EXIT_CODES, after_long_help = EXIT_CODES)]
pub(crate) struct Args {
    /// The URI of the database server. Better set in the environment, where other users do not see the
    /// password
    #[arg(long, env = "MONGODB_URI", hide_env_values = true, global = true)]
    pub(crate) uri: Option<String>,
    /// The database with the locks
    #[arg(long, env = "MONGODB_DATABASE", global = true, value_name = "NAME")]
    pub(crate) database: Option<String>,
    /// The name of the application, if it has one by `MongoStore::named`
    #[arg(long, env = "DOCLOCK_APPLICATION", global = true, value_name = "NAME")]
    pub(crate) application: Option<String>,
    /// Prints one JSON document instead of text for people; `watch` prints one document for each line
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  done; `doctor` has found no problem
  1  `doctor` has found a problem; there is no such lock or freeze, or the lock was not broken
  2  wrong use: an option, a name, the form of the URI, or a database without lock collections
  3  the database was not reached, or did not answer in time
  4  the database refused the command, or the output could not be written";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Shows all live locks
    List(List),
    /// Shows the live locks on one document
    Show(Which),
    /// Takes a document's lock from its holder, whose unsaved work is refused from then on
    ///
    /// Breaks exactly the lock that was there when the command looked, never a later one. The broken
    /// lock, the actor and the reason are written to the log (standard error).
    Break(Break),
    /// Follows the events of locks until it is interrupted
    ///
    /// On a replica set events arrive within milliseconds; otherwise the locks are listed once a second.
    /// With `--json` it prints one document for each line. A `resync` contains all live locks: some
    /// events before it may be missing.
    Watch(Collections),
    /// Grants no new locks for a while, for a migration or an editorial deadline
    ///
    /// Held locks stay, and their holders may save. All servers of the application obey within two
    /// seconds; the command waits for three, and says how many have noted it. Servers of versions without
    /// that note are not counted.
    Freeze(Freeze),
    /// Ends a freeze before its time
    Thaw(Frozen),
    /// Creates lock collections with their indexes, as an application does that registers its types
    ///
    /// May be repeated. A TTL index with a shorter ttl is raised. A longer ttl is never lowered, because
    /// live locks with that ttl would be removed: `doctor` tells how to lower it by hand.
    Init(Init),
    /// Finds problems that endanger the locks, and says what to do
    Doctor(Doctor),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Collections {
    /// Only this collection of documents; may be repeated. Default: all collections that have locks
    #[arg(long = "collection", value_name = "NAME", value_parser = collection)]
    pub(crate) collections: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct List {
    #[command(flatten)]
    pub(crate) of: Collections,
    /// Only locks whose holder's name contains this text; case is ignored
    #[arg(long, value_name = "TEXT")]
    pub(crate) holder: Option<String>,
    /// Also shows this field of the documents, as `title` or `customer.name`; a string or a number
    #[arg(long, value_name = "FIELD", value_parser = field)]
    pub(crate) title: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Which {
    /// The document, as `list` shows it
    ///
    /// If an id could have several types, all of them are tried. In JSON an id has exactly one type:
    /// `workitem/"5"` is a string, `workitem/{"$oid":"…"}` an ObjectId, `workitem/{"$uuid":"…"}` a UUID.
    #[arg(value_name = "COLLECTION/ID")]
    pub(crate) key: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Break {
    #[command(flatten)]
    pub(crate) which: Which,
    /// The reason; written to the log, and shown to those who have the document open
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    pub(crate) reason: String,
    /// The person who breaks the lock; written to the log, and shown to those who have the document open
    #[arg(long, env = "USER", hide_env_values = true, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) actor: String,
    /// Only this lock, for example of one of several readers; `show` prints the tokens
    #[arg(long)]
    pub(crate) token: Option<LockToken>,
    /// Does not ask for confirmation
    #[arg(long)]
    pub(crate) yes: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Freeze {
    #[command(flatten)]
    pub(crate) what: Frozen,
    /// The reason, as the people who cannot edit meanwhile see it
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    pub(crate) reason: String,
    /// Who freezes; recorded with the freeze, and written to the log
    #[arg(long, env = "USER", hide_env_values = true, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) actor: String,
    /// How long, for example `2h`, by the database's clock
    #[arg(long = "for", value_name = "DURATION", value_parser = duration, required_unless_present = "until")]
    pub(crate) lasts: Option<Duration>,
    /// When the freeze ends, for example `2026-12-24T18:00:00Z`
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_rfc3339_weak, conflicts_with = "lasts")]
    pub(crate) until: Option<SystemTime>,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Frozen {
    /// The collection of documents
    #[arg(value_name = "COLLECTION", value_parser = collection)]
    pub(crate) collection: Option<String>,
    /// All collections of documents, but not the named locks of jobs
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Init {
    /// The collections of the documents; the locks of `workitem` are kept in `workitem.lock`
    #[arg(required_unless_present = "sessions", value_name = "COLLECTION", value_parser = collection)]
    pub(crate) collections: Vec<String>,
    /// Also creates the collection of web sessions, for `MongoSessionStore`. Its name, if it has another one
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = SESSIONS, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sessions: Option<String>,
    /// How long a lock outlives the last activity of its session, from 1s to 30days
    #[arg(long, default_value = "150s", value_parser = ttl)]
    pub(crate) ttl: Duration,
    /// The types are registered with `FENCED`: records are kept when their locks are gone
    #[arg(long)]
    pub(crate) fenced: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) of: Collections,
    /// The collection of web sessions must be there. Without this option `doclock.session` is examined, if there is one
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = SESSIONS, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) sessions: Option<String>,
    /// The ttl that the application is configured with. Default: the ttl is not checked
    #[arg(long, value_parser = ttl)]
    pub(crate) ttl: Option<Duration>,
}

/// Parses a ttl within the limits of `LockManager`'s builder.
fn ttl(text: &str) -> Result<Duration, String> {
    let ttl = duration(text).map_err(|e| format!("{e}; write `150s` or `5m`"))?;
    if TTL_RANGE.contains(&ttl) {
        Ok(ttl)
    } else {
        Err("write a duration from 1s to 30days".into())
    }
}

/// Parses a duration. `2M` would be two months, and hardly ever means that.
fn duration(text: &str) -> Result<Duration, String> {
    if text.contains('M') {
        return Err("`M` could be minutes or months: write `2min` or `2months`".into());
    }
    humantime::parse_duration(text).map_err(|e| e.to_string())
}

/// Parses a reason, which people read.
fn reason(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("say why".into()) } else { Ok(text.to_owned()) }
}

/// Parses the name of a collection of documents.
fn collection(text: &str) -> Result<String, String> {
    match LockKey::new(text, 0) {
        Ok(_) => Ok(text.to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

/// Parses the name of a field, which may be a path.
fn field(text: &str) -> Result<String, String> {
    let is_name = |name: &str| !name.is_empty() && !name.starts_with('$') && !name.contains('\0');
    if text.split('.').all(is_name) {
        Ok(text.to_owned())
    } else {
        Err("write the name of a field, as `title` or `customer.name`".into())
    }
}

#[cfg(test)]
mod tests {
    use actix_doclock::limits::DEFAULT_TTL;
    use clap::{CommandFactory, Parser};

    use super::*;

    #[test]
    fn the_arguments_fit_together() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_default_ttl_is_that_of_an_application() {
        let args = Args::try_parse_from(["doclock", "init", "workitem"]).unwrap();
        let Command::Init(init) = args.command else { panic!("{args:?}") };
        assert_eq!(init.ttl, DEFAULT_TTL);
    }

    #[test]
    fn a_name_that_no_field_can_have_is_refused() {
        assert_eq!(field("customer.name").as_deref(), Ok("customer.name"));
        for wrong in ["", ".", "a.", ".a", "a..b", "$where", "a.$", "a\0"] {
            assert!(field(wrong).unwrap_err().contains("write"), "{wrong}");
        }
    }

    #[test]
    fn a_name_that_no_collection_can_have_is_refused_by_each_command() {
        let long = "x".repeat(121);
        for wrong in ["", "a$b", "a/b", "system.users", &long] {
            for args in [
                &["list", "--collection", wrong][..],
                &["watch", "--collection", wrong],
                &["doctor", "--collection", wrong],
                &["thaw", wrong],
                &["freeze", wrong, "--reason=why", "--for=1h", "--actor=A"],
                &["init", wrong],
            ] {
                let refused = Args::try_parse_from([&["doclock"], args].concat()).unwrap_err();
                assert!(refused.to_string().contains("collection"), "{args:?}: {refused}");
            }
        }
        assert_eq!(collection("a.b").as_deref(), Ok("a.b"));
    }

    #[test]
    fn months_for_minutes_and_an_empty_reason_are_refused() {
        assert_eq!(duration("2h 5min"), Ok(Duration::from_secs(2 * 3600 + 300)));
        assert_eq!(duration("1month").unwrap().as_secs() / 86_400, 30);
        for wrong in ["2M", "1h 5M", "2"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
        let freeze = |reason| {
            Args::try_parse_from([
                "doclock",
                "freeze",
                "--all",
                "--for=1h",
                "--actor=A",
                "--reason",
                reason,
            ])
        };
        let breaks = |reason| {
            Args::try_parse_from(["doclock", "break", "a/1", "--actor=A", "--reason", reason])
        };
        assert!(freeze("why").is_ok() && breaks("why").is_ok());
        for empty in ["", " ", "\t\n"] {
            assert!(freeze(empty).is_err() && breaks(empty).is_err(), "{empty:?}");
        }
    }

    #[test]
    fn a_ttl_that_no_application_may_have_is_refused() {
        assert_eq!(ttl("150s"), Ok(Duration::from_secs(150)));
        for wrong in ["150", "0s", "999ms", "31days", "-5s", "soon"] {
            assert!(ttl(wrong).unwrap_err().contains("write"), "{wrong}");
        }
    }
}
