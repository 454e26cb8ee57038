//! Any value of a large type, with any changes of others: each field keeps the one change that it got, or nothing is written.

use super::*;

fn small() -> impl Strategy<Value = i64> {
    0..4_i64
}

fn people() -> impl Strategy<Value = Person> {
    (text(), text()).prop_map(|(first, last)| Person { first, last })
}

fn lines() -> impl Strategy<Value = Vec<Line>> {
    let line = (small(), vec(text(), 0..3), proptest::option::of(people()));
    let lines = vec((0..6_i64, line), 0..5);
    lines.prop_map(|lines| {
        let lines: BTreeMap<_, _> = lines.into_iter().collect();
        let line = |(id, (qty, colors, maker))| Line { id, qty, colors, maker };
        lines.into_iter().map(line).collect()
    })
}

fn by_name() -> impl Strategy<Value = BTreeMap<String, Entry>> {
    let name = select(vec!["a", "b", "0", "a.b", "$set", ""]).prop_map(str::to_owned);
    let entry = (small(), text()).prop_map(|(n, text)| Entry { n, text });
    proptest::collection::btree_map(name, entry, 0..4)
}

fn riches() -> impl Strategy<Value = Rich> {
    let state = prop_oneof![
        Just(State::Draft),
        (text(), small()).prop_map(|(by, days)| State::Review { by, days }),
        people().prop_map(State::Done),
        small().prop_map(State::Number),
    ];
    let shape = prop_oneof![
        small().prop_map(|radius| Shape::Circle { radius }),
        (small(), small(), proptest::option::of(small()))
            .prop_map(|(width, height, radius)| Shape::Box { width, height, radius }),
    ];
    let event = prop_oneof![
        Just(Event::None),
        (small(), small()).prop_map(|(x, y)| Event::Moved { x, y }),
        text().prop_map(Event::Said),
    ];
    let either = prop_oneof![
        (text(), small()).prop_map(|(text, n)| Either::Long { text, n }),
        small().prop_map(|n| Either::Short { n }),
    ];
    let note = (text(), small()).prop_map(|(text, stars)| Note { text, stars });
    let settings = (small(), text()).prop_map(|(left, right)| Settings { left, right });
    let flat = (small(), text()).prop_map(|(flat_left, flat_right)| Flat { flat_left, flat_right });
    let tags = proptest::collection::hash_set(text(), 0..4);
    let parts = (note, settings, proptest::option::of(people()), flat, tags);
    let enums = (state, shape, event, either);
    (text(), small(), parts, enums, lines(), by_name()).prop_map(
        |(title, count, parts, enums, lines, by_name)| {
            let (note, settings, owner, flat, tags) = parts;
            let (state, shape, event, either) = enums;
            let id = "a".to_owned();
            Rich {
                id,
                title,
                count,
                note,
                settings,
                owner,
                state,
                shape,
                event,
                either,
                lines,
                by_name,
                tags,
                flat,
            }
        },
    )
}

/// How a stored document differs from what the type writes.
#[derive(Debug, Clone)]
struct Oddities {
    /// Numbers are `i32`, as another driver stores them.
    small_numbers: bool,
    /// Old names, read by aliases.
    old_names: bool,
    /// Fields with a default that are not stored, or are null.
    missing: Vec<&'static str>,
    null_note: bool,
    /// A field that the type does not know in each document.
    strangers: bool,
}

fn oddities() -> impl Strategy<Value = Oddities> {
    let optional = vec!["n", "note", "settings", "state", "lines", "by_name", "tags", "flat_right"];
    let missing = proptest::sample::subsequence(optional, 0..4);
    (any::<bool>(), any::<bool>(), missing, any::<bool>(), any::<bool>()).prop_map(
        |(small_numbers, old_names, missing, null_note, strangers)| Oddities {
            small_numbers,
            old_names,
            missing,
            null_note,
            strangers,
        },
    )
}

const STRANGER: &str = "x_stranger";

fn stored_as(rich: &Rich, odd: &Oddities) -> Document {
    let mut stored = canonical(rich);
    if odd.strangers {
        stored = add_strangers(stored);
    }
    if odd.old_names {
        rename(&mut stored, "title", "name");
        for line in stored.get_array_mut("lines").unwrap() {
            rename(line.as_document_mut().unwrap(), "qty", "quantity");
        }
    }
    for name in &odd.missing {
        stored.remove(name);
    }
    if odd.null_note {
        stored.insert("note", Bson::Null);
    }
    if odd.small_numbers { shrunk(stored.into()).as_document().unwrap().clone() } else { stored }
}

fn rename(document: &mut Document, from: &str, to: &str) {
    if let Some(value) = document.remove(from) {
        document.insert(to, value);
    }
}

fn shrunk(value: Bson) -> Bson {
    match value {
        Bson::Int64(n) => Bson::Int32(n as i32),
        Bson::Array(all) => Bson::Array(all.into_iter().map(shrunk).collect()),
        Bson::Document(all) => {
            Bson::Document(all.into_iter().map(|(name, value)| (name, shrunk(value))).collect())
        }
        other => other,
    }
}

/// Visits each document within, with a place that stays the same when arrays and enums change.
fn visit(value: &mut Bson, place: &str, visitor: &mut impl FnMut(&str, &mut Document)) {
    match value {
        Bson::Array(all) => {
            for it in all {
                let id = it.as_document().and_then(|it| it.get("id")).and_then(number);
                visit(it, &format!("{place}[{}]", id.unwrap_or_default()), visitor);
            }
        }
        Bson::Document(document) => {
            // A map and an enum with an outer tag have no members but their own.
            if !["/by_name", "/state"].contains(&place) {
                visitor(place, document);
            }
            let tag = document.get_str("t").unwrap_or_default().to_owned();
            for (name, value) in document.iter_mut() {
                let kind = value.as_document().and_then(|it| it.get_str("kind").ok());
                let variant = kind.or((name == "c").then_some(&tag)).unwrap_or_default();
                let place = format!("{place}/{name}{variant}");
                visit(value, &place, visitor);
            }
        }
        _ => {}
    }
}

/// Adds a field to each document that no type knows. Its value is its place.
fn add_strangers(document: Document) -> Document {
    let mut value = Bson::Document(document);
    visit(&mut value, "", &mut |place, it| drop(it.insert(STRANGER, place)));
    value.as_document().unwrap().clone()
}

fn places(document: &Document) -> Vec<String> {
    let mut places = Vec::new();
    visit(&mut document.clone().into(), "", &mut |place, _| places.push(place.to_owned()));
    places
}

/// The places at which there is a stranger.
fn strangers(document: &Document) -> Vec<(String, Bson)> {
    let mut found = Vec::new();
    visit(&mut document.clone().into(), "", &mut |place, it| {
        found.extend(it.get(STRANGER).map(|value| (place.to_owned(), value.clone())));
    });
    found
}

/// What another program does between the load and the save.
fn meddled(stored: &Document, how: usize) -> Document {
    let mut now = stored.clone();
    let set_within = |now: &mut Document, outer: &str, name: &str, value: Bson| {
        if let Ok(inner) = now.get_document_mut(outer) {
            inner.insert(name, value);
        }
    };
    match how {
        0 => drop(now.insert("x_new", 1)),
        1 => {
            let name = if now.contains_key("name") { "name" } else { "title" };
            now.insert(name, "theirs");
        }
        2 => {
            if let Ok(lines) = now.get_array_mut("lines") {
                lines.push(doc! { "id": 9, "qty": 1 }.into());
            }
        }
        3 => {
            if let Some(Bson::Document(line)) =
                now.get_array_mut("lines").ok().and_then(|lines| lines.first_mut())
            {
                line.insert("x_new", 1);
            }
        }
        4 => drop(now.remove("note")),
        5 => drop(now.remove("settings")),
        6 => drop(now.insert("owner", Bson::Null)),
        7 => drop(now.insert("owner", doc! { "first": "o", "last": "p", STRANGER: "/owner" })),
        8 => drop(now.insert("shape", doc! { "kind": "Circle", "radius": 7 })),
        9 => drop(now.insert("state", doc! { "Number": 5 })),
        10 => set_within(&mut now, "by_name", "z", doc! { "n": 1 }.into()),
        11 => set_within(&mut now, "settings", "left", 9.into()),
        12 => drop(now.insert("event", doc! { "t": "Moved", "c": { "x": 8, "y": 8 } })),
        13 => drop(now.insert("either", doc! { "n": 9, "text": "theirs" })),
        _ => {}
    }
    now
}

/// The three-way comparison by field. What only one side has changed is as that side has it.
fn expected(before: &Bson, mine: &Bson, theirs: &Bson) -> Bson {
    if before == mine {
        return theirs.clone();
    }
    let (Bson::Document(old), Bson::Document(mine), Bson::Document(theirs)) =
        (before, mine, theirs)
    else {
        let is_array = |it: &Bson| it.as_array().is_some();
        assert!(
            before == theirs || mine == theirs || !is_array(before),
            "an array that both changed"
        );
        return mine.clone();
    };
    let mut merged = Document::new();
    for name in mine.keys().chain(theirs.keys()) {
        let none = Bson::Undefined;
        let of = |it: &Document| it.get(name).unwrap_or(&none).clone();
        match expected(&of(old), &of(mine), &of(theirs)) {
            Bson::Undefined => {}
            value => drop(merged.insert(name, value)),
        }
    }
    merged.into()
}

/// With sorted members.
fn normal(value: &Bson) -> String {
    match value {
        Bson::Document(it) => {
            let members: BTreeMap<_, _> = it.iter().map(|(name, it)| (name, normal(it))).collect();
            format!("{members:?}")
        }
        Bson::Array(all) => format!("{:?}", all.iter().map(normal).collect::<Vec<_>>()),
        other => other.to_string(),
    }
}

/// The top-level fields that differ.
fn touched(a: &Document, b: &Document) -> Vec<String> {
    let names: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    let differ = |name: &&&String| a.get(name).map(normal) != b.get(name).map(normal);
    names.iter().filter(differ).map(|name| (**name).clone()).collect()
}

async fn check(shop: &impl Shop, before: &Rich, after: &Rich, odd: &Oddities, meddling: usize) {
    let stored = stored_as(before, odd);
    let now = meddled(&stored, meddling);
    let read_before: Rich = read(&stored).unwrap();
    let became = save::<Rich>(shop, &stored, &now, |it| *it = after.clone()).await;
    let theirs = read::<Rich>(&now);
    let (old, mine) = (canonical(&read_before), canonical(&after));
    let saved = match became {
        Became::Saved(saved) => saved,
        refused => {
            let both: Vec<_> = touched(&stored, &now);
            let is_shared = touched(&old, &mine).iter().any(|name| both.contains(name));
            let is_renamed = odd.old_names && stored != now;
            assert!(is_shared || is_renamed, "{refused:?} without a reason: {stored} {now} {mine}");
            return;
        }
    };
    let is: Rich = read(&saved).unwrap_or_else(|e| panic!("nobody can read {saved}: {e}"));
    let theirs = canonical(&theirs.unwrap());
    let should = expected(&old.clone().into(), &mine.clone().into(), &theirs.into());
    assert_eq!(normal(&canonical(&is).into()), normal(&should), "{stored} {now} {mine} {saved}");
    let (known, kept, here) = (places(&old), places(&mine), strangers(&saved));
    for (place, value) in strangers(&now) {
        let is_deleted = known.contains(&place) && !kept.contains(&place);
        let stays = here.contains(&(place.clone(), value));
        assert!(is_deleted || stays, "{place} lost its stranger: {stored} {now} {mine} {saved}");
    }
}

/// A change of some fields only, so that the others are left to other programs.
fn partly(before: &Rich, after: &Rich, which: u16) -> Rich {
    let (before, after) = (canonical(before), canonical(after));
    let names = before.keys().chain(after.keys()).collect::<BTreeSet<_>>();
    let chosen = names.into_iter().enumerate().filter_map(|(n, name)| {
        let from = if which >> (n % 16) & 1 == 1 { &after } else { &before };
        Some((name.clone(), from.get(name)?.clone()))
    });
    read(&chosen.collect()).unwrap()
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn a_save_in_memory_merges_field_by_field_or_changes_nothing(
        before in riches(), after in riches(), which in any::<u16>(), odd in oddities(), how in 0..20_usize,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let read_before = read(&stored_as(&before, &odd)).unwrap();
            let after = partly(&read_before, &after, which);
            check(&MemoryStore::new(), &before, &after, &odd, how).await;
        });
    }

}

proptest! {
    #![proptest_config(cases(80))]

    #[test]
    fn a_save_on_mongodb_merges_field_by_field_or_changes_nothing(
        before in riches(), after in riches(), which in any::<u16>(), odd in oddities(), how in 0..20_usize,
    ) {
        static RUNTIME: std::sync::OnceLock<(Runtime, OnMongo)> = std::sync::OnceLock::new();
        let (runtime, shop) = RUNTIME.get_or_init(|| {
            let runtime = Runtime::new().unwrap();
            let shop = runtime.block_on(on_mongo());
            (runtime, shop)
        });
        runtime.block_on(async {
            let read_before = read(&stored_as(&before, &odd)).unwrap();
            let after = partly(&read_before, &after, which);
            check(shop, &before, &after, &odd, how).await;
        });
    }
}

/// Nothing is compared with everything else.
#[test]
fn large_arrays_are_merged_in_linear_time() {
    let loaded = StoredDocument::encode(Format::Json, &vec_of(0)).unwrap();
    let original = Original::new(loaded, &vec_of(0)).unwrap();
    assert!(!original.changes_to(&vec_of(1)).unwrap().is_empty());
}

fn vec_of(n: i64) -> HashMap<String, Vec<i64>> {
    HashMap::from([("all".to_owned(), (n..n + 200_000).map(|it| it * 2 + n).collect())])
}
