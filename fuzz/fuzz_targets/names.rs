//! Everything that is parsed from a string: tokens, tabs, pages, labels, keys.
#![no_main]

use actix_doclock::{Holder, LockKey, LockToken, TabId, limits::MAX_LABEL_BYTES};
use actix_doclock::store::PageId;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(token) = text.parse::<LockToken>() {
        assert_eq!(token.to_string().parse(), Ok(token));
    }
    let _ = (text.parse::<TabId>(), text.parse::<PageId>());
    let label = Holder::new(text).label;
    assert!(label.len() <= MAX_LABEL_BYTES && text.starts_with(&label));
    let (collection, id) = text.split_once('\n').unwrap_or(("note", text));
    if let Ok(key) = LockKey::new(collection, id) {
        assert_eq!(key.to_string(), format!("{collection}/{id}"));
    }
});
