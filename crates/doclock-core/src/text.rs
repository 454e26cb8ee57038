//! Text that is stored or shown, and durations as programs get them.

use std::time::Duration;

use serde::{Serialize, Serializer};

/// Cuts the text to at most this many bytes, between two characters.
pub fn cut(mut text: String, bytes: usize) -> String {
    let end = (0..=bytes.min(text.len())).rfind(|&i| text.is_char_boundary(i));
    text.truncate(end.unwrap_or(0));
    text
}

/// A text that somebody has written for other people, as one line of at most this many bytes: without line breaks and other
/// control characters, and without marks that change the direction of the text around it. Empty if nobody can see any of it.
pub fn one_line(text: &str, bytes: usize) -> String {
    let turns = |c| matches!(c, '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
    let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    let plain = text.chars().filter(|c| !turns(*c)).map(|c| if breaks(c) { ' ' } else { c });
    let plain: String = plain.collect();
    // Within a text they stay: they join the parts of an emoji, for example.
    let is_shown = |c: char| !c.is_whitespace() && !is_blank(c);
    if plain.chars().any(is_shown) { cut(plain.trim().to_owned(), bytes) } else { String::new() }
}

/// True for a character without a shape that is no white space: joiners, fillers, selectors and tags.
fn is_blank(c: char) -> bool {
    matches!(c, '\u{AD}' | '\u{34F}' | '\u{115F}' | '\u{1160}' | '\u{17B4}' | '\u{17B5}' | '\u{180B}'..='\u{180F}'
        | '\u{200B}'..='\u{200D}' | '\u{2060}'..='\u{206F}' | '\u{2800}' | '\u{3164}' | '\u{FE00}'..='\u{FE0F}'
        | '\u{FEFF}' | '\u{FFA0}' | '\u{E0000}'..='\u{E0FFF}')
}

/// Shortens a name for a line of the log: clients choose names, and the beginning says enough.
pub fn short(name: &str) -> String {
    cut(name.to_owned(), 200)
}

/// The text as one line that is safe for a terminal: characters without a visible shape are shown by their
/// number.
pub fn printable(text: &str) -> String {
    // The text has no delimiters, so quotes need no escape.
    text.escape_debug().to_string().replace("\\'", "'").replace("\\\"", "\"")
}

/// Serializes a duration in milliseconds, for programs.
pub fn millis<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).serialize(to)
}

pub fn millis_if_any<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => millis(duration, to),
        None => to.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_nobody_can_see_is_empty() {
        for blank in [
            "\u{200B}",
            " \u{FEFF}\t\u{2060}",
            "\u{3164}\u{2800}",
            "\u{A0}\u{3000}",
            "\u{E0041}\u{FE0F}",
        ] {
            assert_eq!(one_line(blank, 100), "", "{blank:?}");
        }
        assert_eq!(one_line("\u{1F469}\u{200D}\u{1F4BB}", 100), "\u{1F469}\u{200D}\u{1F4BB}");
    }
}
