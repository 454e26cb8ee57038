//! What people call a document.

use crate::text::cut;

/// The longest title of a document, in bytes. A longer one is cut.
const MAX_TITLE_BYTES: usize = 200;
/// A longer link is left out.
const MAX_LINK_BYTES: usize = 2_048;

/// How people know a document: its title, and where to open it. The answer of
/// `LockManagerBuilder::describe`.
///
/// ```
/// # use doclock_core as actix_doclock;
/// use actix_doclock::Description;
///
/// let contract = Description::new("Contract with Miller").link("/contracts/4711");
/// # assert_eq!(contract.title, "Contract with Miller");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// The title. At most 200 bytes are shown; a control character is shown as a space.
    pub title: String,
    /// Where to open the document: `/…`, `http://…` or `https://…`. Any other link is left out.
    pub link: Option<String>,
}

impl Description {
    /// A description with this title.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), link: None }
    }

    /// The same description with a link.
    #[must_use]
    pub fn link(mut self, link: impl Into<String>) -> Self {
        self.link = Some(link.into());
        self
    }

    /// The description as it may be shown, or `None` if nothing remains of the title. The `bool` is true if
    /// the link was left out.
    #[doc(hidden)]
    pub fn presentable(self) -> (Option<Self>, bool) {
        let title = self.title.replace(char::is_control, " ");
        let title = cut(title.trim().to_owned(), MAX_TITLE_BYTES).trim_end().to_owned();
        let (had_link, link) = (self.link.is_some(), self.link.filter(|link| is_safe(link)));
        let is_left_out = had_link && link.is_none();
        ((!title.is_empty()).then_some(Self { title, link }), is_left_out)
    }
}

/// True if the link leads to a page, and not to a script. Browsers skip tabs and line breaks in a link,
/// and read `\` as `/`.
fn is_safe(link: &str) -> bool {
    let starts =
        |with: &str| link.get(..with.len()).is_some_and(|start| start.eq_ignore_ascii_case(with));
    link.len() <= MAX_LINK_BYTES
        && !link.contains(|c: char| c.is_control() || c.is_whitespace() || c == '\\')
        && (starts("http://") || starts("https://") || starts("/") && !starts("//"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(title: &str) -> Option<String> {
        Description::new(title).presentable().0.map(|it| it.title)
    }

    #[test]
    fn a_title_is_one_line_of_at_most_200_bytes() {
        assert_eq!(shown("Contract <b>\"A\"</b>").unwrap(), "Contract <b>\"A\"</b>");
        assert_eq!(shown(" two\r\nlines\t\u{1b}[2J\u{9b} ").unwrap(), "two  lines  [2J");
        assert_eq!(shown(&"ä".repeat(101)).unwrap(), "ä".repeat(100));
        assert_eq!(shown(&format!("x{}", "ä".repeat(200))).unwrap().len(), 199);
        assert_eq!(shown(" \n\u{0} "), None);
        assert_eq!(shown(""), None);
    }

    #[test]
    fn only_links_to_pages_are_shown() {
        let link = |link: &str| Description::new("it").link(link).presentable();
        for good in ["/", "/doc/1?a=b#c", "http://x.example/", "HTTPS://x.example/ä"] {
            let (shown, is_left_out) = link(good);
            assert_eq!((shown.unwrap().link.as_deref(), is_left_out), (Some(good), false));
        }
        let long = format!("/{}", "x".repeat(MAX_LINK_BYTES));
        for bad in [
            "javascript:alert(1)",
            "JavaScript:alert(1)",
            "java\nscript:alert(1)",
            "\u{1}javascript:alert(1)",
            "data:text/html,x",
            "//evil.example",
            "/\\evil.example",
            "/\t/evil.example",
            " /x",
            "x",
            "http:",
            "ftp://x.example",
            "",
            &long,
        ] {
            let (shown, is_left_out) = link(bad);
            assert_eq!((shown.unwrap().link, is_left_out), (None, true), "{bad:?}");
        }
        assert_eq!(Description::new("it").presentable(), (Some(Description::new("it")), false));
    }
}
