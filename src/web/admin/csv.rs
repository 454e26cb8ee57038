//! The table of all locks for spreadsheets: RFC 4180.

use std::borrow::Cow;

use actix_web::{HttpResponse, http::header};

use super::{AllLocks, allowed};
use crate::{
    lock::{Lock, Mode},
    web::{Problem, SessionLocks, format::rfc3339},
};

const COLUMNS: [&str; 7] = ["collection", "id", "title", "mode", "holder", "since", "expires_in_s"];

pub(super) async fn all(locks: SessionLocks) -> Result<HttpResponse, Problem> {
    allowed(&locks)?;
    // Spreadsheets take a text without this mark for Latin 1.
    let mut text = String::from('\u{feff}');
    line(&mut text, COLUMNS.map(Cow::from));
    for lock in AllLocks::list(&locks).await?.locks {
        line(&mut text, cells(&lock));
    }
    Ok(HttpResponse::Ok()
        .content_type("text/csv; charset=utf-8")
        .insert_header((header::CONTENT_DISPOSITION, "attachment; filename=\"locks.csv\""))
        .insert_header((header::CACHE_CONTROL, "no-store"))
        .insert_header((header::X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .body(text))
}

/// The id of the holder is missing: it is for policies, and never shown to anybody.
fn cells(lock: &Lock) -> [Cow<'_, str>; COLUMNS.len()] {
    [
        lock.key.collection().into(),
        lock.key.id().to_string().into(),
        lock.description.as_ref().map_or("", |it| &it.title).into(),
        if lock.mode == Mode::Shared { "shared" } else { "exclusive" }.into(),
        lock.holder.as_ref().map_or("".into(), |it| it.label.replace(char::is_control, " ").into()),
        rfc3339(lock.since).into(),
        lock.expires_in().as_secs().to_string().into(),
    ]
}

fn line<'a>(text: &mut String, cells: impl IntoIterator<Item = Cow<'a, str>>) {
    for (i, cell) in cells.into_iter().enumerate() {
        if i > 0 {
            text.push(',');
        }
        let cell = without_formulas(cell);
        if cell.contains(['"', ',', '\r', '\n']) {
            text.push_str(&format!("\"{}\"", cell.replace('"', "\"\"")));
        } else {
            text.push_str(&cell);
        }
    }
    text.push_str("\r\n");
}

/// A spreadsheet would take a cell that begins like this for a formula. Some end a cell at a semicolon or a
/// tab, even within quotes.
fn without_formulas(cell: Cow<'_, str>) -> Cow<'_, str> {
    const FORMULA: [char; 11] = ['=', '+', '-', '@', '＝', '＋', '－', '＠', '\t', '\r', '\n'];
    let ends_cell = |c| matches!(c, ';' | '\t');
    // A spreadsheet may drop characters without a shape.
    let is_invisible = |c: char| c.is_whitespace() || c.escape_debug().len() > 1;
    let is_formula = |part: &str| {
        part.starts_with(FORMULA) || part.trim_start_matches(is_invisible).starts_with(FORMULA)
    };
    if !cell.split(ends_cell).any(is_formula) {
        return cell;
    }
    let mut safe = String::new();
    for part in cell.split_inclusive(ends_cell) {
        safe.extend(is_formula(part).then_some('\''));
        safe.push_str(part);
    }
    safe.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cell_ends_early_and_none_is_a_formula() {
        for (cell, written) in [
            ("plain", "plain"),
            ("", ""),
            ("a,b", "\"a,b\""),
            ("the \"A\" file", "\"the \"\"A\"\" file\""),
            ("two\r\nlines", "\"two\r\nlines\""),
            ("=HYPERLINK(\"x\",\"y\")", "\"'=HYPERLINK(\"\"x\"\",\"\"y\"\")\""),
            ("+1", "'+1"),
            ("-1", "'-1"),
            ("@SUM(A1)", "'@SUM(A1)"),
            ("x;=HYPERLINK(1)", "x;'=HYPERLINK(1)"),
            ("x\t=1", "x\t'=1"),
            ("a;b-c", "a;b-c"),
            ("\t=1", "'\t'=1"),
            ("\r=1", "\"'\r=1\""),
            ("\n=1", "\"'\n=1\""),
            ("1=1", "1=1"),
            ("＝1", "'＝1"),
            ("\u{200b}\u{feff}=1", "'\u{200b}\u{feff}=1"),
        ] {
            let mut text = String::new();
            line(&mut text, [cell.into(), "end".into()]);
            assert_eq!(text, format!("{written},end\r\n"));
        }
    }
}
