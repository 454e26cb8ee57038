//! A person who knows the contents of the database, or yesterday's cookie, cannot get in.

use mongodb::bson::{Binary, Bson, RawDocumentBuf};

use super::*;

/// Every record of every collection, as bytes and as values.
async fn dump(database: &Database) -> (Vec<u8>, Vec<Bson>) {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for name in database.list_collection_names().await.unwrap() {
        let mut cursor = database.collection::<RawDocumentBuf>(&name).find(doc! {}).await.unwrap();
        while cursor.advance().await.unwrap() {
            bytes.extend_from_slice(cursor.current().as_bytes());
            let record = Document::try_from(cursor.current()).unwrap();
            leaves(Bson::Document(record), &mut values);
        }
    }
    (bytes, values)
}

fn leaves(value: Bson, into: &mut Vec<Bson>) {
    match value {
        Bson::Document(fields) => fields.into_iter().for_each(|(_, field)| leaves(field, into)),
        Bson::Array(items) => items.into_iter().for_each(|item| leaves(item, into)),
        leaf => into.push(leaf),
    }
}

/// Everything that an attacker who has read `value` might try.
fn guesses(value: &Bson) -> Vec<String> {
    let of_bytes = |bytes: &[u8]| {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let latin_1 = bytes.iter().copied().map(char::from).collect();
        vec![hex.to_uppercase(), hex, base64(bytes), latin_1]
    };
    match value {
        Bson::Binary(Binary { bytes, .. }) => of_bytes(bytes),
        Bson::String(text) => [vec![text.clone()], of_bytes(text.as_bytes())].concat(),
        other => vec![other.to_string()],
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let [a, b, c] = [0, 1, 2].map(|i| u32::from(chunk.get(i).copied().unwrap_or(0)));
        let bits = a << 16 | b << 8 | c;
        for i in 0..=chunk.len() {
            text.push(char::from(DIGITS[(bits >> (18 - 6 * i) & 63) as usize]));
        }
    }
    text + "=".repeat((3 - bytes.len() % 3) % 3).as_str()
}

#[actix_web::test]
async fn the_database_contains_nothing_that_lets_anyone_in() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let direct = server.session("carol", "1").await;
    let alice = Browser::logged_in(&app, "alice").await;
    alice.post("/renew").await;
    let bob = Browser::logged_in(&app, "bob").await;
    let bobs = key_in(&bob);
    bob.post("/purge").await;
    let keys = [direct, key_in(&alice), bobs];
    assert!(server.load(&keys[0]).await.is_some() && server.load(&keys[1]).await.is_some());

    let (bytes, values) = dump(&server.database).await;
    assert!(bytes.windows(7).any(|text| text == b"\"carol\""), "the dump contains the sessions");
    for key in &keys {
        let key = key.as_ref().as_bytes();
        assert!(!bytes.windows(key.len()).any(|text| text == key));
    }
    let mut tried = 0;
    for guess in values.iter().flat_map(guesses).filter(|guess| guess.len() <= 4064) {
        assert_eq!(server.load(&session_key(&guess)).await, None, "{guess}");
        tried += 1;
    }
    assert!(tried > 50, "{tried}");
}

#[actix_web::test]
async fn a_key_is_unrelated_to_the_previous_one() {
    let server = Server::on(&database().await).await;
    let keys: Vec<_> = futures_util::future::join_all(
        (0..20).map(|_| async { server.sessions.save(State::new(), &DAY).await.unwrap() }),
    )
    .await;
    for (i, key) in keys.iter().enumerate() {
        let text = key.as_ref();
        assert!(text.len() == 64 && text.chars().all(|c| c.is_ascii_alphanumeric()), "{text}");
        assert!(keys[..i].iter().all(|other| other.as_ref()[..16] != text[..16]));
    }
}

/// Against session fixation: a person who knew the key before the login, or before any other `renew`,
/// has nothing.
#[actix_web::test]
async fn after_a_renew_the_old_key_lets_nobody_in() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    let visitor = Browser::new(&app);
    visitor.post("/theme").await;
    for renew in ["/login/alice", "/renew"] {
        let (before, thief) = (key_in(&visitor), visitor.copy());
        visitor.post(renew).await;
        assert_ne!(key_in(&visitor), before);
        assert_eq!(server.load(&before).await, None);
        assert_eq!(thief.get("/state").await.json(), json!({}), "{renew}");
        // Writing to it does not help either.
        thief.post("/theme").await;
        assert_ne!(key_in(&thief), before);
        assert_eq!(thief.get("/state").await.json(), json!({ "theme": "dark" }));
        assert_eq!(server.load(&before).await, None);
    }
    let expected = json!({ "name": "alice", "theme": "dark" });
    assert_eq!(visitor.get("/state").await.json(), expected);
}

#[actix_web::test]
async fn a_key_made_up_by_a_client_is_never_adopted() {
    let server = Server::on(&database().await).await;
    let app = server.app().await;
    for made_up in ["x".repeat(64), String::new(), "a\0b".to_owned(), "ä$".repeat(1000)] {
        let made_up = session_key(made_up);
        for request in ["/login/alice", "/theme", "/renew", "/purge"] {
            let browser = browser_with(&app, &made_up);
            browser.post(request).await;
            assert_eq!(server.load(&made_up).await, None, "{request}");
            if browser.has_cookie() && browser.get("/state").await.json() != json!({}) {
                assert_ne!(key_in(&browser), made_up, "{request}");
                browser.post("/purge").await;
            }
        }
    }
}
