//! Output for people and for programs.

use std::io::{self, IsTerminal, Write};

use comfy_table::{ColumnConstraint, ContentArrangement, Row, Table, Width, presets};
use serde_json::Value;
use terminal_size::{Width as Columns, terminal_size};

/// People chose these names; this much of a name is enough to recognise it.
const WIDEST: usize = 60;
/// A line that is too long for the terminal is better than an unreadable column.
const NARROWEST: u16 = 10;

/// Makes untrusted text safe for a terminal: characters without a visible shape are shown by their
/// number.
pub(crate) fn printable(text: &str) -> String {
    // The text has no delimiters, so quotes need no escape.
    text.escape_debug().to_string().replace("\\'", "'").replace("\\\"", "\"")
}

/// As `printable`, cut to the width of a table column.
pub(crate) fn short(text: &str) -> String {
    let text = printable(text);
    match text.char_indices().nth(WIDEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// One line for each row, cut to the terminal's width: first in the column `shrinks`, as far as that is
/// enough.
pub(crate) fn table(
    header: &[&str],
    shrinks: usize,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_truncation_indicator("…")
        .set_header(header);
    // A file or a pipe has no width.
    if io::stdout().is_terminal()
        && let Some((Columns(columns), _)) = terminal_size()
    {
        table.set_width(columns);
    }
    for row in rows {
        let mut row = Row::from(row.iter().map(|text| short(text)));
        row.max_height(1);
        table.add_row(row);
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_constraint(if i == shrinks {
            ColumnConstraint::LowerBoundary(Width::Fixed(NARROWEST))
        } else {
            ColumnConstraint::ContentWidth
        });
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}")?;
    stdout.flush()
}

/// Prints the value as JSON for a program, or the text for people.
pub(crate) fn show(json: bool, value: &Value, text: &str) -> io::Result<()> {
    if json { print_json(value) } else { print(text) }
}

/// Prints the value in one line. A program reads it, but perhaps a person does, too: characters without a visible shape
/// are written by their numbers.
pub(crate) fn print_json(value: &Value) -> io::Result<()> {
    print(&as_text(value))
}

pub(crate) fn as_text(value: &Value) -> String {
    let mut text = String::new();
    for c in value.to_string().chars() {
        // Only the strings in it have other characters.
        if c.is_ascii() && !c.is_ascii_control() || c.escape_debug().len() == 1 {
            text.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                text += &format!("\\u{unit:04x}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_printed() {
        for (written, shown) in [
            ("O'Brien \"Bob\"", "O'Brien \"Bob\""),
            ("日本 हिन्दी Ünal", "日本 हिन्दी Ünal"),
            ("red\u{1b}[31m\u{7}", "red\\u{1b}[31m\\u{7}"),
            ("\u{9b}2J", "\\u{9b}2J"),
            ("two\r\nlines\t", "two\\r\\nlines\\t"),
            ("exe\u{202e}txt\u{2066}\u{200f}", "exe\\u{202e}txt\\u{2066}\\u{200f}"),
            ("back\\slash", "back\\\\slash"),
        ] {
            assert_eq!(printable(written), shown);
        }
    }

    #[test]
    fn json_has_no_character_that_a_terminal_obeys_and_means_the_same() {
        let odd = "O'Brien \"B\" \\ 日本 हिन्दी \u{1b}[31m\u{7f}\u{9b}2J\u{202e}txt\u{e0041}\r\n";
        let value = serde_json::json!({ "label": odd });
        let text = as_text(&value);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
        assert!(
            text.contains("日本") && text.contains("\\u202e") && text.contains("\\u009b2J"),
            "{text}"
        );
        assert!(!text.contains(|c: char| c.is_control() || c == '\u{202e}'), "{text}");
    }

    #[test]
    fn a_row_is_one_line_and_a_column_no_wider_than_one_reads() {
        let long = "ä".repeat(4_096);
        let table = table(&["A", "B"], 0, [vec![long, "x\ny".into()]]);
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(lines.len(), 2, "{table}");
        assert!(lines[1].contains('…') && lines[1].ends_with("x\\ny"), "{table}");
        assert!(lines[1].chars().count() < 80, "{table}");
    }
}
