//! What happened to a request, in sentences for people.

use actix_web::{
    ResponseError,
    dev::RequestHead,
    http::header::{ACCEPT_LANGUAGE, AcceptLanguage, HeaderMap, Quality, from_comma_delimited},
};
use serde_json::Value;

use crate::{text::one_line, web::problem::Problem};

/// The longest text of somebody in a sentence, in bytes.
const MAX_BYTES: usize = 500;

/// The texts of one language.
struct Words {
    /// The primary tag of the language.
    language: &'static str,
    /// A document without a title, at the beginning of a sentence and within it.
    this: (&'static str, &'static str),
    /// A holder without a name.
    program: &'static str,
    /// By the code of a problem, or by its code and what else is known. In braces, a member of the problem.
    sentences: &'static [(&'static str, &'static str)],
}

const ENGLISH: Words = Words {
    language: "en",
    this: ("This document", "this document"),
    program: "another program",
    sentences: &[
        ("held", "{title} is being edited by {holder}. Wait until it is free."),
        (
            "held/own",
            "You are editing {title} in another window or browser. Save and close it there.",
        ),
        ("take_over", "Or take it over: then nothing can be saved there any more."),
        (
            "mine_elsewhere",
            "You are editing {title} in another tab. Save it there, or edit it here instead.",
        ),
        (
            "would_deadlock",
            "{title} is being edited by {holder}, who waits for a document of yours. Save and close one of yours.",
        ),
        ("frozen", "Nobody can begin to edit {title} at the moment ({reason}). Try again later."),
        (
            "lost",
            "You do not have the lock on {title} any more. Nothing was saved. Keep your text, and open the document again.",
        ),
        (
            "lost/held",
            "{title} is being edited by {holder} now. Nothing was saved. Keep your text, and wait until it is free.",
        ),
        (
            "lost/own",
            "You are editing {title} in another window or browser. Nothing was saved here. Keep your text, or edit here instead.",
        ),
        (
            "lost/expired",
            "Your lock on {title} has expired. Nothing was saved. Keep your text, and open the document again.",
        ),
        (
            "lost/broken",
            "{by} has ended your lock on {title}. Nothing was saved. Keep your text, and ask {by} before you save it again.",
        ),
        (
            "lost/taken_over",
            "{by} has taken {title} over. Nothing was saved. Keep your text, and ask {by} before you save it again.",
        ),
        (
            "lost/session_ended",
            "Your login has ended meanwhile. Nothing was saved. Keep your text, and open the document again.",
        ),
        (
            "lost/released",
            "You have closed {title} already. Nothing was saved now. Open the document again.",
        ),
        ("reason", "The reason: {reason}"),
        (
            "stale_copy",
            "{title} has been saved since you opened it. Nothing was saved now. Compare the texts, then save again.",
        ),
        (
            "saved",
            "Something was saved from this page before, perhaps by a second click or in another tab.",
        ),
        (
            "changed_meanwhile",
            "A program has changed {title} since you opened it. Nothing was saved. Open it again, and repeat your change.",
        ),
        (
            "unclear_change",
            "It is not clear which entries of a list you have removed, and which are new. Nothing was saved. Remove entries and save, then add the new ones and save again.",
        ),
        (
            "wrong_session",
            "This page belongs to another login. Nothing was saved. Log in again, and open the document again.",
        ),
        (
            "person_changed",
            "Somebody else has logged in since this page was opened. Nothing was saved. Keep your text, and open the page again.",
        ),
        ("not_found", "There is no such document, or you may not edit it."),
        (
            "not_found/deleted",
            "This document has been deleted. Nothing was saved. Keep your text if you need it.",
        ),
        (
            "rejected",
            "The database does not accept this, perhaps because another document has the same value. Nothing was saved. Change it, and save again.",
        ),
        (
            "session_ended",
            "Your login has ended. Nothing was saved. Log in again in another tab, then send this page again.",
        ),
        (
            "login_required",
            "You are not logged in. Nothing was saved. Log in in another tab, then send this page again.",
        ),
        ("take_over_refused", "You may not take {title} over. Wait until it is free."),
        ("too_many_locks", "You have too many documents open. Close one, and try again."),
        (
            "store_unavailable",
            "The database does not answer at the moment. Keep your text, and send it again in a moment.",
        ),
        (
            "busy",
            "Too much is asked of the server at the moment. Keep your text, and send it again in a moment.",
        ),
        (
            "outcome_unknown",
            "It is not known whether this was saved. Look at the document before you save again.",
        ),
        (
            "cross_site",
            "This was sent by a page of another site, so nothing was done. Open the page here, and send it again.",
        ),
        (
            "wrong_request",
            "The server does not understand what this page has sent. Keep your text, and open the page again.",
        ),
        (
            "fault",
            "Something is wrong with this application. Keep your text, and tell the people who run it.",
        ),
    ],
};

const GERMAN: Words = Words {
    language: "de",
    this: ("Dieses Dokument", "dieses Dokument"),
    program: "einem anderen Programm",
    sentences: &[
        ("held", "{title} wird gerade von {holder} bearbeitet. Warten Sie, bis es frei ist."),
        (
            "held/own",
            "Sie bearbeiten {title} in einem anderen Fenster oder Browser. Speichern und schließen Sie es dort.",
        ),
        ("take_over", "Oder übernehmen Sie es: Dann kann dort nichts mehr gespeichert werden."),
        (
            "mine_elsewhere",
            "Sie bearbeiten {title} in einem anderen Tab. Speichern Sie es dort, oder bearbeiten Sie es stattdessen hier.",
        ),
        (
            "would_deadlock",
            "{title} wird von {holder} bearbeitet. Dort wartet man auf ein Dokument von Ihnen. Speichern und schließen Sie eines von Ihren.",
        ),
        (
            "frozen",
            "Niemand kann zurzeit beginnen, {title} zu bearbeiten ({reason}). Versuchen Sie es später noch einmal.",
        ),
        (
            "lost",
            "Sie haben die Sperre für {title} nicht mehr. Nichts wurde gespeichert. Behalten Sie Ihren Text, und öffnen Sie das Dokument noch einmal.",
        ),
        (
            "lost/held",
            "{title} wird jetzt von {holder} bearbeitet. Nichts wurde gespeichert. Behalten Sie Ihren Text, und warten Sie, bis es frei ist.",
        ),
        (
            "lost/own",
            "Sie bearbeiten {title} in einem anderen Fenster oder Browser. Hier wurde nichts gespeichert. Behalten Sie Ihren Text, oder bearbeiten Sie stattdessen hier.",
        ),
        (
            "lost/expired",
            "Ihre Sperre für {title} ist abgelaufen. Nichts wurde gespeichert. Behalten Sie Ihren Text, und öffnen Sie das Dokument noch einmal.",
        ),
        (
            "lost/broken",
            "{by} hat Ihre Sperre für {title} beendet. Nichts wurde gespeichert. Behalten Sie Ihren Text, und fragen Sie {by}, bevor Sie ihn noch einmal speichern.",
        ),
        (
            "lost/taken_over",
            "{by} hat {title} übernommen. Nichts wurde gespeichert. Behalten Sie Ihren Text, und fragen Sie {by}, bevor Sie ihn noch einmal speichern.",
        ),
        (
            "lost/session_ended",
            "Ihre Anmeldung ist inzwischen zu Ende. Nichts wurde gespeichert. Behalten Sie Ihren Text, und öffnen Sie das Dokument noch einmal.",
        ),
        (
            "lost/released",
            "Sie haben {title} schon geschlossen. Jetzt wurde nichts gespeichert. Öffnen Sie das Dokument noch einmal.",
        ),
        ("reason", "Der Grund: {reason}"),
        (
            "stale_copy",
            "{title} wurde gespeichert, seit Sie es geöffnet haben. Jetzt wurde nichts gespeichert. Vergleichen Sie die Texte, und speichern Sie dann noch einmal.",
        ),
        (
            "saved",
            "Von dieser Seite wurde vorher schon etwas gespeichert, vielleicht durch einen zweiten Klick oder in einem anderen Tab.",
        ),
        (
            "changed_meanwhile",
            "Ein Programm hat {title} geändert, seit Sie es geöffnet haben. Nichts wurde gespeichert. Öffnen Sie es noch einmal, und wiederholen Sie Ihre Änderung.",
        ),
        (
            "unclear_change",
            "Es ist nicht klar, welche Einträge einer Liste Sie entfernt haben und welche neu sind. Nichts wurde gespeichert. Entfernen Sie Einträge und speichern Sie, fügen Sie dann die neuen hinzu und speichern Sie noch einmal.",
        ),
        (
            "wrong_session",
            "Diese Seite gehört zu einer anderen Anmeldung. Nichts wurde gespeichert. Melden Sie sich noch einmal an, und öffnen Sie das Dokument noch einmal.",
        ),
        (
            "person_changed",
            "Jemand anderes hat sich angemeldet, seit diese Seite geöffnet wurde. Nichts wurde gespeichert. Behalten Sie Ihren Text, und öffnen Sie die Seite noch einmal.",
        ),
        ("not_found", "Dieses Dokument gibt es nicht, oder Sie dürfen es nicht bearbeiten."),
        (
            "not_found/deleted",
            "Dieses Dokument wurde gelöscht. Nichts wurde gespeichert. Behalten Sie Ihren Text, wenn Sie ihn brauchen.",
        ),
        (
            "rejected",
            "Die Datenbank nimmt dies nicht an, vielleicht weil ein anderes Dokument denselben Wert hat. Nichts wurde gespeichert. Ändern Sie es, und speichern Sie noch einmal.",
        ),
        (
            "session_ended",
            "Ihre Anmeldung ist zu Ende. Nichts wurde gespeichert. Melden Sie sich in einem anderen Tab wieder an, und senden Sie diese Seite dann noch einmal.",
        ),
        (
            "login_required",
            "Sie sind nicht angemeldet. Nichts wurde gespeichert. Melden Sie sich in einem anderen Tab an, und senden Sie diese Seite dann noch einmal.",
        ),
        ("take_over_refused", "Sie dürfen {title} nicht übernehmen. Warten Sie, bis es frei ist."),
        (
            "too_many_locks",
            "Sie haben zu viele Dokumente geöffnet. Schließen Sie eines, und versuchen Sie es noch einmal.",
        ),
        (
            "store_unavailable",
            "Die Datenbank antwortet zurzeit nicht. Behalten Sie Ihren Text, und senden Sie ihn gleich noch einmal.",
        ),
        (
            "busy",
            "Der Server hat zurzeit zu viel zu tun. Behalten Sie Ihren Text, und senden Sie ihn gleich noch einmal.",
        ),
        (
            "outcome_unknown",
            "Es ist nicht bekannt, ob dies gespeichert wurde. Sehen Sie das Dokument an, bevor Sie noch einmal speichern.",
        ),
        (
            "cross_site",
            "Dies hat eine Seite einer anderen Website gesendet, deshalb geschah nichts. Öffnen Sie die Seite hier, und senden Sie es noch einmal.",
        ),
        (
            "wrong_request",
            "Der Server versteht nicht, was diese Seite gesendet hat. Behalten Sie Ihren Text, und öffnen Sie die Seite noch einmal.",
        ),
        (
            "fault",
            "In dieser Anwendung stimmt etwas nicht. Behalten Sie Ihren Text, und sagen Sie es denen, die sie betreiben.",
        ),
    ],
};

/// The first language of the request that is here. English if there is none.
fn words(headers: &HeaderMap) -> &'static Words {
    let all = from_comma_delimited(headers.get_all(ACCEPT_LANGUAGE));
    let mut all = AcceptLanguage(all.unwrap_or_default());
    all.0.retain(|it| it.quality > Quality::ZERO);
    let named = |language: &str| {
        [&ENGLISH, &GERMAN].into_iter().find(|it| language.eq_ignore_ascii_case(it.language))
    };
    let mut ranked = all.ranked().into_iter().filter_map(|it| it.into_item());
    ranked.find_map(|it| named(it.primary_language())).unwrap_or(&ENGLISH)
}

impl Problem {
    /// What happened and what to do, for the person of this request: in German if the person's browser prefers that
    /// (`Accept-Language`), otherwise in English. Says the title of the document and the holder, where they are known.
    /// The [text](Self::text) is for clients.
    #[must_use]
    pub fn for_people(&self, request: &RequestHead) -> String {
        let words = words(request.headers());
        let is = |name| self.member(name) == Some(&Value::Bool(true));
        let (code, cause) = (text(self.member("code")), text(self.member("cause")));
        let known = match (code.as_deref().unwrap_or_default(), cause) {
            ("held", _) if is("same_person") => "held/own".to_owned(),
            ("lost", Some(cause)) => format!("lost/{cause}"),
            ("lost", None) if is("same_person") => "lost/own".to_owned(),
            ("lost", None) if self.member("since").is_some() => "lost/held".to_owned(),
            ("not_found", _) if is("deleted") => "not_found/deleted".to_owned(),
            ("stale_token", _) => "lost".to_owned(),
            ("overloaded" | "too_many_waiters" | "shutting_down", _) => "busy".to_owned(),
            (code, _) => code.to_owned(),
        };
        let is_fault = self.status_code().is_server_error();
        let other = if is_fault { "fault" } else { "wrong_request" };
        let sentence = |name: &str| words.sentences.iter().find(|it| it.0 == name).map(|it| it.1);
        let also = [
            ("reason", known.starts_with("lost/") && text(self.member("reason")).is_some()),
            ("take_over", known.starts_with("held") && is("may_take_over")),
            ("saved", self.member("saved").is_some()),
        ];
        let also = also.into_iter().filter_map(|(name, is_so)| is_so.then_some(name));
        let first = sentence(&known).or_else(|| sentence(other));
        let all = first.into_iter().chain(also.filter_map(sentence));
        all.map(|it| self.filled(it, words)).collect::<Vec<_>>().join(" ")
    }

    /// The sentence with the values for its names. A value is no part of the sentence, whatever it contains.
    fn filled(&self, sentence: &str, words: &Words) -> String {
        let value = |name: &str, is_first: bool| match name {
            "title" => match text(self.member("document").and_then(|it| it.get("title"))) {
                Some(title) => format!("“{title}”"),
                None if is_first => words.this.0.to_owned(),
                None => words.this.1.to_owned(),
            },
            "holder" => text(self.member("holder").and_then(|it| it.get("label")))
                .unwrap_or_else(|| words.program.to_owned()),
            name => text(self.member(name)).unwrap_or_default(),
        };
        let mut filled = String::new();
        for part in sentence.split('{') {
            match part.split_once('}') {
                Some((name, rest)) => {
                    filled += &value(name, filled.is_empty());
                    filled += rest;
                }
                None => filled += part,
            }
        }
        filled
    }
}

/// A text of the problem as a part of a sentence. `None` if nobody could see it.
fn text(it: Option<&Value>) -> Option<String> {
    Some(one_line(it?.as_str()?, MAX_BYTES)).filter(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_language_says_the_same() {
        let places = |sentence: &str| {
            let mut all: Vec<_> = sentence
                .split('{')
                .skip(1)
                .filter_map(|it| Some(it.split_once('}')?.0.to_owned()))
                .collect();
            all.sort();
            all.dedup();
            all
        };
        let of = |words: &Words| -> Vec<_> {
            words.sentences.iter().map(|(name, sentence)| (*name, places(sentence))).collect()
        };
        assert_eq!(of(&ENGLISH), of(&GERMAN));
    }
}
