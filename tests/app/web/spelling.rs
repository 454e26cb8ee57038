//! Ids that can be written in several ways: each names the same document, under one name in the answers.

use mongodb::bson::oid::ObjectId;
use serde_json::json;

use super::*;

macro_rules! counted {
    ($name:ident: $id:ty, $collection:literal) => {
        #[derive(Debug, Clone, Serialize, Deserialize)]
        struct $name {
            #[serde(rename = "_id")]
            id: $id,
        }

        impl Lockable for $name {
            type Id = $id;
            const COLLECTION: &'static str = $collection;
        }
    };
}

counted!(Number: i64, "number");
counted!(Hex: ObjectId, "hex");
counted!(Unique: uuid::Uuid, "unique");

/// For each document its name, and other ways to write the id.
const SPELLED: [(&str, &str, &[&str]); 3] = [
    ("number", "7", &["007", "+7", "07"]),
    ("hex", "64b7f0c2a1d3e4f5a6b7c8d9", &["64B7F0C2A1D3E4F5A6B7C8D9", "64b7f0c2a1d3e4f5a6b7c8D9"]),
    (
        "unique",
        "9a3f4e52-31c8-4d2b-8f57-0c6e1b2a7d94",
        &["9A3F4E52-31C8-4D2B-8F57-0C6E1B2A7D94", "9a3f4e5231c84d2b8f570c6e1b2a7d94"],
    ),
];

#[actix_web::test]
async fn an_id_in_another_spelling_names_the_same_document_in_every_call() {
    let (locks, store) = embedded().await;
    locks.register::<Number>().await.unwrap();
    locks.register::<Hex>().await.unwrap();
    locks.register::<Unique>().await.unwrap();
    let put = |collection: &str, id: &str| match collection {
        "number" => store.put(7_i64, &Number { id: 7 }).unwrap(),
        "hex" => {
            let id: ObjectId = id.parse().unwrap();
            store.put(id, &Hex { id }).unwrap();
        }
        _ => {
            let id: uuid::Uuid = id.parse().unwrap();
            store.put(id, &Unique { id }).unwrap();
        }
    };
    let app = serve_with_cookies(&locks).await;
    let (alice, bob) =
        (Browser::logged_in(&app, "alice").await, Browser::logged_in(&app, "bob").await);
    // From now on the server watches the collections.
    let _watches = bob.listen("").await;
    for (collection, id, others) in SPELLED {
        put(collection, id);
        let name = format!("{collection}/{id}");
        for other in others {
            let asked = format!("{collection}/{}", other.replace('+', "%2B"));
            let (path, written) = (format!("/locks/{asked}"), format!("{collection}/{other}"));
            let stream = bob.request(Method::GET, &format!("/locks/events?keys={asked}"));
            let stream = app.call(stream.to_request()).await.unwrap_or_else(|e| panic!("{e}"));
            let mut stream = events::Stream::new(stream.into_parts().1.into_parts().1);
            assert_eq!(stream.next().await.unwrap().0, "resync");
            let taken = alice.post(&path).await.json();
            assert_eq!((&taken["key"], &taken["id"]), (&json!(name), &json!(id)), "{asked}");
            let (event, data) = stream.event().await;
            assert_eq!((event.as_str(), &data["key"]), ("acquired", &json!(name)), "{asked}");

            for (browser, state) in [(&alice, "mine"), (&bob, "held")] {
                let one = browser.get(&path).await.json();
                assert_eq!((&one["key"], &one["state"]), (&json!(name), &json!(state)), "{asked}");
                assert_eq!(browser.get(&format!("/locks/{name}")).await.json().get("key"), None);
                let keys = json!({ "keys": [written, name] });
                let many = browser.post_json("/locks/status", keys).await.json();
                assert_eq!(many["locks"][0]["key"], name, "{many}");
                assert_eq!(many["locks"][0]["asked"], json!(written), "{many}");
                assert_eq!(many["locks"][0]["state"], state, "{many}");
                assert_eq!(many["locks"][1].get("asked"), None, "{many}");
            }
            assert_eq!(bob.post(&path).await.problem(423)["key"], name);
            let refused = bob.post_json("/locks", json!({ "keys": [written, name] })).await.json();
            assert_eq!(refused["refused"].as_array().unwrap().len(), 1, "{refused}");
            assert_eq!(refused["refused"][0]["key"], name);

            let beat = async |key: &str, token: &Value| {
                let locks = json!({ "locks": { key: token } });
                alice.post_json("/locks/heartbeat", locks).await.json()
            };
            for key in [&written, &name] {
                let heard = beat(key, &taken["token"]).await;
                assert_eq!((&heard["held"][0]["key"], &heard["lost"]), (&json!(name), &json!([])));
            }
            let heard = beat(&written, &json!("11111111-1111-4111-8111-111111111111")).await;
            assert_eq!((&heard["lost"][0]["key"], &heard["held"]), (&json!(name), &json!([])));
            assert_eq!(alice.delete(&path).await.status, 204);
            assert_eq!(alice.get(&path).await.json()["state"], "free");
        }
    }
}
