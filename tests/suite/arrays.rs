//! A save of an array whose elements have no id is certain, or it is refused: an element never gets what another program
//! stored in another element, and keeps what the type does not name.

use std::collections::{BTreeMap, BTreeSet};

use actix_doclock::MemoryStore;
use mongodb::bson::{Bson, Document, doc};
use proptest::{collection::vec, prelude::*};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::merging::{Became, Shop, canonical, on_mongo, save};
use crate::rig::random::cases;

const STRANGER: &str = "x_stranger";

#[derive(Clone, Serialize, Deserialize)]
struct It<E> {
    #[serde(rename = "_id")]
    id: String,
    all: Vec<E>,
}

fn it(all: Vec<impl Into<Bson>>) -> Document {
    doc! { "_id": "a", "all": all.into_iter().map(Into::into).collect::<Vec<Bson>>() }
}

/// An element with a name that never changes.
trait Element: Clone + Serialize + DeserializeOwned {
    /// True if no other text tells elements apart, such as the name of a variant.
    const IS_PLAIN: bool = true;

    fn new(name: i64, n: i64) -> Self;
    fn change(&mut self, n: i64);
}

#[derive(Clone, Serialize, Deserialize)]
struct Row {
    name: String,
    n: i64,
    same: i64,
    parts: Vec<Part>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Part {
    part: i64,
}

impl Element for Row {
    fn new(name: i64, n: i64) -> Self {
        let parts = (0..name % 3).map(|part| Part { part }).collect();
        Self { name: format!("row {name}"), n, same: name % 2, parts }
    }

    fn change(&mut self, n: i64) {
        self.n = n;
        self.parts.iter_mut().for_each(|it| it.part += n);
    }
}

/// One variant, and another that a change makes of it, with each kind of tag.
macro_rules! tagged {
    ($($name:ident, $changes:literal $(, #[$tag:meta])?;)*) => {$(
        #[derive(Clone, Serialize, Deserialize)]
        $(#[$tag])?
        enum $name {
            New { name: String, n: i64, text: String },
            Old { name: String, n: i64 },
        }

        impl Element for $name {
            const IS_PLAIN: bool = !$changes;

            fn new(name: i64, n: i64) -> Self {
                Self::Old { name: format!("it {name}"), n }
            }

            fn change(&mut self, by: i64) {
                // With another variant, an outer tag is another member.
                *self = match self.clone() {
                    Self::New { name, .. } => Self::Old { name, n: by },
                    Self::Old { name, .. } if $changes => {
                        Self::New { name, n: by, text: "new".to_owned() }
                    }
                    Self::Old { name, .. } => Self::Old { name, n: by },
                };
            }
        }
    )*};
}

tagged! {
    Outer, false;
    Inner, true, #[serde(tag = "kind")];
    Beside, true, #[serde(tag = "t", content = "c")];
    Untagged, true, #[serde(untagged)];
}

/// An array of an array.
impl Element for Vec<Row> {
    fn new(name: i64, n: i64) -> Self {
        (0..=name % 3).map(|it| Row::new(name * 10 + it, n)).collect()
    }

    fn change(&mut self, n: i64) {
        self[0].change(n);
    }
}

/// Adds a field to each document within that no type names, except to the outer document of a tag.
fn add_strangers(value: &mut Bson, whose: i64) {
    match value {
        Bson::Array(all) => all.iter_mut().for_each(|it| add_strangers(it, whose)),
        Bson::Document(it) => {
            let is_outer =
                it.len() == 1 && it.keys().all(|name| name.starts_with(char::is_uppercase));
            for (_, value) in it.iter_mut() {
                add_strangers(value, whose);
            }
            if !is_outer {
                it.insert(STRANGER, whose);
            }
        }
        _ => {}
    }
}

fn strangers(value: &Bson, found: &mut Vec<i64>) {
    match value {
        Bson::Array(all) => all.iter().for_each(|it| strangers(it, found)),
        Bson::Document(it) => {
            found.extend(
                it.get(STRANGER).and_then(|it| it.as_i64().or(it.as_i32().map(Into::into))),
            );
            it.values().for_each(|it| strangers(it, found));
        }
        _ => {}
    }
}

fn strangers_of(value: &Bson) -> Vec<i64> {
    let mut found = Vec::new();
    strangers(value, &mut found);
    found
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Change(usize, i64),
    Move(usize, usize),
    Insert(usize),
    Remove(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = || 0..30_usize;
    let step = prop_oneof![
        3 => (at(), 0..12_i64).prop_map(|(at, n)| Step::Change(at, n)),
        1 => (at(), at()).prop_map(|(from, to)| Step::Move(from, to)),
        1 => at().prop_map(Step::Insert),
        1 => at().prop_map(Step::Remove),
    ];
    vec(step, 1..6)
}

/// Elements by their names.
fn changed<E: Element>(before: &[(i64, E)], steps: &[Step], fresh: bool) -> Vec<(i64, E)> {
    let mut all = before.to_vec();
    let mut next = 1_000_000;
    for step in steps {
        next += 1;
        match *step {
            Step::Insert(at) => {
                let n = if fresh { next * 2 } else { next % 5 };
                all.insert(at % (all.len() + 1), (next, E::new(next, n)));
            }
            _ if all.is_empty() => {}
            Step::Change(at, n) => {
                let at = at % all.len();
                all[at].1.change(if fresh { next * 3 } else { n });
            }
            Step::Move(from, to) => {
                let moved = all.remove(from % all.len());
                all.insert(to % (all.len() + 1), moved);
            }
            Step::Remove(at) => drop(all.remove(at % all.len())),
        }
    }
    all
}

async fn check<E: Element>(shop: &impl Shop, size: i64, steps: &[Step], fresh: bool) {
    let before: Vec<_> = (0..size).map(|name| (name, E::new(name, name % 5))).collect();
    let after = changed(&before, steps, fresh);
    let stored = |(name, element): &(i64, E)| {
        let mut stored: Bson = canonical(&it_of(element)).remove("it").unwrap();
        add_strangers(&mut stored, *name);
        stored
    };
    let stored: Vec<Bson> = before.iter().map(stored).collect();
    let document = it(stored.clone());
    let new: Vec<E> = after.iter().map(|it| it.1.clone()).collect();
    let became = save(shop, &document, &document, |it: &mut It<E>| it.all = new).await;
    let names: BTreeSet<i64> = after.iter().map(|it| it.0).collect();
    let removed = before.iter().filter(|it| !names.contains(&it.0)).count();
    let inserted = after.iter().filter(|it| it.0 >= size).count();
    let saved = match became {
        Became::Saved(saved) => saved,
        Became::Unfit(why) => {
            assert!(why.contains("`all") && why.contains("_id"), "{why}");
            let is_certain = E::IS_PLAIN && fresh && (removed == 0 || inserted == 0);
            assert!(!is_certain, "refused without need: {steps:?}");
            return;
        }
        other => panic!("{other:?}"),
    };
    let saved = saved.get_array("all").unwrap();
    assert_eq!(saved.len(), after.len());
    for ((name, _), saved) in after.iter().zip(saved) {
        let found = strangers_of(saved);
        if *name < size {
            let had = strangers_of(&stored[*name as usize]);
            // The element of an array of arrays keeps those of its own elements.
            assert_eq!(found, had, "{name} after {steps:?}: {saved}, {}", stored[*name as usize]);
        } else {
            let is_theirs = found.iter().all(|whose| !names.contains(whose));
            assert!(is_theirs, "a new element has what another one has: {steps:?}: {saved}");
        }
    }
}

#[derive(Serialize)]
struct Within<'a, E> {
    it: &'a E,
}

fn it_of<E>(it: &E) -> Within<'_, E> {
    Within { it }
}

/// Elements of which the type knows only a number that others have, too.
#[derive(Clone, Serialize, Deserialize)]
struct Nameless {
    n: i64,
}

async fn check_nameless(shop: &impl Shop, numbers: &[i64], steps: &[Step]) {
    let stored = (numbers.iter().zip(0_i64..)).map(|(n, at)| doc! { "n": *n, STRANGER: at });
    let document = it(stored.collect::<Vec<_>>());
    let mut after: Vec<(Option<usize>, i64)> =
        numbers.iter().enumerate().map(|(at, n)| (Some(at), *n)).collect();
    let (mut removed, mut touched) = (0, BTreeSet::new());
    for step in steps {
        match *step {
            Step::Insert(at) => after.insert(at % (after.len() + 1), (None, 7)),
            _ if after.is_empty() => {}
            Step::Change(at, n) => {
                let at = at % after.len();
                after[at].1 = n;
                touched.extend(after[at].0);
            }
            Step::Move(from, to) => {
                let moved = after.remove(from % after.len());
                after.insert(to % (after.len() + 1), moved);
            }
            Step::Remove(at) => removed += usize::from(after.remove(at % after.len()).0.is_some()),
        }
    }
    let new: Vec<_> = after.iter().map(|it| Nameless { n: it.1 }).collect();
    let became = save(shop, &document, &document, |it: &mut It<Nameless>| it.all = new).await;
    let Became::Saved(saved) = became else { return };
    let saved = saved.get_array("all").unwrap();
    let found: Vec<_> = saved.iter().flat_map(strangers_of).collect();
    let distinct: BTreeSet<_> = found.iter().collect();
    assert_eq!(distinct.len(), found.len(), "one field in two elements: {steps:?} {saved:?}");
    assert!(found.len() + removed >= numbers.len(), "{removed} removed: {steps:?} {saved:?}");
    let count = |all: &[i64], n: i64| all.iter().filter(|it| **it == n).count();
    let numbers_after: Vec<_> = after.iter().map(|it| it.1).collect();
    for ((from, n), saved) in after.iter().zip(saved) {
        let is_only_one = count(numbers, *n) == 1 && count(&numbers_after, *n) == 1;
        if let Some(from) = from.filter(|from| is_only_one && !touched.contains(from)) {
            assert_eq!(strangers_of(saved), [from as i64], "{steps:?} {saved}");
        }
    }
}

/// Runs on a runtime of its own.
fn in_memory(test: impl AsyncFnOnce(&MemoryStore)) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(test(&MemoryStore::new()));
}

async fn check_all(shop: &impl Shop, size: i64, steps: &[Step], fresh: bool) {
    check::<Row>(shop, size, steps, fresh).await;
    check::<Outer>(shop, size, steps, fresh).await;
    check::<Inner>(shop, size, steps, fresh).await;
    check::<Beside>(shop, size, steps, fresh).await;
    check::<Untagged>(shop, size, steps, fresh).await;
    check::<Vec<Row>>(shop, size, steps, fresh).await;
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn elements_without_an_id_keep_their_own_fields_or_the_save_is_refused(
        size in 0..9_i64, steps in steps(), fresh in any::<bool>(),
    ) {
        in_memory(async |store| check_all(store, size, &steps, fresh).await);
    }

    #[test]
    fn elements_without_a_name_keep_their_own_fields_or_the_save_is_refused(
        numbers in vec(0..6_i64, 0..9), steps in steps(),
    ) {
        in_memory(async |store| check_nameless(store, &numbers, &steps).await);
    }
}

#[tokio::test]
async fn elements_without_an_id_keep_their_own_fields_on_mongodb() {
    let shop = on_mongo().await;
    let changes = [Step::Change(1, 3), Step::Insert(5), Step::Move(0, 3)];
    check_all(&shop, 5, &changes, true).await;
    check_all(&shop, 5, &[Step::Remove(0), Step::Change(2, 3)], true).await;
    check_nameless(&shop, &[1, 2, 3], &[Step::Change(0, 9), Step::Insert(3)]).await;
}

#[test]
fn thousands_of_elements_that_change_move_come_and_go_keep_their_own_fields() {
    in_memory(async |store| {
        let some = |of: fn(usize) -> Step| (0..40).map(move |n| of(n * 67));
        let changes = some(|at| Step::Change(at, at as i64));
        let moves = some(|at| Step::Move(at, at * 31));
        let steps: Vec<_> = changes.chain(moves).collect();
        for more in [some(Step::Insert), some(Step::Remove)] {
            let steps: Vec<_> = steps.iter().copied().chain(more).collect();
            check::<Row>(store, 3_000, &steps, true).await;
            check::<Vec<Row>>(store, 1_000, &steps, true).await;
        }
    });
}

/// The fields that the type does not name, in the order of the saved elements.
async fn kinds<E: Serialize + DeserializeOwned>(
    shop: &impl Shop,
    stored: Vec<Document>,
    change: impl FnOnce(&mut Vec<E>),
) -> Result<String, String> {
    let stored = it(stored);
    match save(shop, &stored, &stored, |it: &mut It<E>| change(&mut it.all)).await {
        Became::Saved(saved) => Ok((saved.get_array("all").unwrap().iter())
            .map(|it| it.as_document().unwrap().get_str("kind").unwrap_or("-").to_owned())
            .collect::<Vec<_>>()
            .join(" ")),
        Became::Unfit(why) => Err(why),
        other => panic!("{other:?}"),
    }
}

macro_rules! on_both_stores {
    (async fn $name:ident($shop:ident) $body:block) => {
        #[tokio::test]
        async fn $name() {
            async fn case($shop: &impl Shop) $body
            case(&MemoryStore::new()).await;
            case(&on_mongo().await).await;
        }
    };
}

#[derive(Clone, Serialize, Deserialize)]
struct Phone {
    number: String,
}

fn phone(number: &str) -> Phone {
    Phone { number: number.to_owned() }
}

fn phones(numbers: &[&str]) -> Vec<Document> {
    let kinds = ["home", "work", "car"].into_iter();
    numbers.iter().zip(kinds).map(|(it, kind)| doc! { "number": *it, "kind": kind }).collect()
}

on_both_stores! {
    async fn one_element_changes_and_another_one_comes_or_goes(shop) {
        let three = || phones(&["1", "2", "3"]);
        let pushed = |all: &mut Vec<Phone>| { all[0] = phone("9"); all.push(phone("4")) };
        assert_eq!(kinds(shop, three(), pushed).await.unwrap(), "home work car -");
        let inserted = |all: &mut Vec<Phone>| { all[2] = phone("9"); all.insert(1, phone("4")) };
        assert_eq!(kinds(shop, three(), inserted).await.unwrap(), "home - work car");
        let removed = |all: &mut Vec<Phone>| { all[0] = phone("9"); all.pop(); };
        assert_eq!(kinds(shop, three(), removed).await.unwrap(), "home work");
        let moved = |all: &mut Vec<Phone>| { all[0] = phone("9"); all.swap(1, 2) };
        assert_eq!(kinds(shop, three(), moved).await.unwrap(), "home car work");
    }
}

on_both_stores! {
    async fn elements_of_which_nothing_tells_what_became_of_them_refuse_the_save(shop) {
        let refused = [
            // Changed and pushed, or pushed and changed?
            kinds(shop, phones(&["1"]), |all: &mut Vec<Phone>| { all[0] = phone("8"); all.push(phone("9")) }).await,
            // Sorted after a change, or removed and pushed?
            kinds(shop, phones(&["1", "2"]), |all: &mut Vec<Phone>| { all.remove(0); all.push(phone("9")) }).await,
            // Which of the two was removed?
            kinds(shop, phones(&["1", "1"]), |all: &mut Vec<Phone>| drop(all.pop())).await,
            // Changed between two that were swapped, or removed and inserted?
            kinds(shop, phones(&["1", "2", "3"]), |all: &mut Vec<Phone>| { all[1] = phone("9"); all.swap(0, 2) }).await,
        ];
        for why in refused {
            let why = why.unwrap_err();
            assert!(why.contains("`all`") && why.contains("`_id`") && why.contains("flatten"), "{why}");
        }
        #[derive(Serialize, Deserialize)]
        struct Pair { a: i64, b: i64 }
        let stored = vec![
            doc! { "a": 1, "b": 5, "kind": "home" },
            doc! { "a": 2, "b": 7, "kind": "work" },
        ];
        let swapped = |all: &mut Vec<Pair>| (all[0].a, all[1].a) = (2, 1);
        assert!(kinds(shop, stored, swapped).await.is_err());
    }
}

on_both_stores! {
    async fn doubt_costs_nothing_where_the_type_names_all_or_the_elements_are_stored_alike(shop) {
        let plain = || vec![doc! { "number": "1" }, doc! { "number": "2" }];
        let changed = |all: &mut Vec<Phone>| *all = vec![phone("7"), phone("8"), phone("9")];
        assert_eq!(kinds(shop, plain(), changed).await.unwrap(), "- - -");
        let same = || vec![doc! { "number": "1", "kind": "home" }; 3];
        assert_eq!(kinds(shop, same(), |all: &mut Vec<Phone>| drop(all.pop())).await.unwrap(), "home home");
        let order_tells = vec![
            doc! { "number": "1", "kind": "home" },
            doc! { "number": "2", "kind": "work" },
            doc! { "number": "1", "kind": "car" },
        ];
        let popped = |all: &mut Vec<Phone>| drop(all.pop());
        assert_eq!(kinds(shop, order_tells, popped).await.unwrap(), "home work");
        #[derive(Serialize, Deserialize)]
        struct Rest { number: String, #[serde(flatten)] rest: BTreeMap<String, Bson> }
        let changed = |all: &mut Vec<Rest>| {
            all[0].number = "8".to_owned();
            all.push(Rest { number: "9".to_owned(), rest: BTreeMap::new() });
        };
        assert_eq!(kinds(shop, phones(&["1"]), changed).await.unwrap(), "home -");
    }
}

on_both_stores! {
    async fn an_element_that_gets_an_id_keeps_its_own_fields(shop) {
        #[derive(Serialize, Deserialize)]
        struct Numbered {
            #[serde(default, skip_serializing_if = "Option::is_none")] id: Option<i64>,
            number: String,
        }
        let numbered = |all: &mut Vec<Numbered>| {
            all.iter_mut().zip(1..).for_each(|(it, n)| it.id = Some(n));
            all.push(Numbered { id: Some(9), number: "4".to_owned() });
        };
        assert_eq!(kinds(shop, phones(&["1", "2"]), numbered).await.unwrap(), "home work -");
    }
}

on_both_stores! {
    async fn rows_that_are_sorted_and_all_change_keep_their_own_fields(shop) {
        #[derive(Serialize, Deserialize)]
        struct Article { name: String, quantity: i64 }
        for size in [3_i64, 120, 2_000] {
            // A permutation; the numbers are those of neighbours after the change.
            let name = |n: i64| format!("article {}", n * 7_919 % 10_007);
            let stored: Vec<_> = (0..size)
                .map(|n| doc! { "name": name(n), "quantity": n, "kind": name(n) })
                .collect();
            let sorted = |all: &mut Vec<Article>| {
                all.iter_mut().for_each(|it| it.quantity += 1);
                all.sort_by(|a, b| a.name.cmp(&b.name));
            };
            let mut names: Vec<_> = (0..size).map(name).collect();
            names.sort();
            assert_eq!(kinds(shop, stored, sorted).await.unwrap(), names.join(" "));
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Numbers {
    qty: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    price: Option<i64>,
}

fn numbers(rows: &[(i64, Option<i64>, &str)]) -> Vec<Document> {
    let row = |(qty, price, kind): &(i64, Option<i64>, &str)| {
        let mut row = doc! { "qty": *qty };
        row.extend(price.map(|price| ("price".to_owned(), price.into())));
        row.extend((!kind.is_empty()).then(|| ("kind".to_owned(), (*kind).into())));
        row
    };
    rows.iter().map(row).collect()
}

type Change = fn(&mut Vec<Numbers>);

on_both_stores! {
    async fn numbers_that_may_have_moved_or_changed_are_not_believed(shop) {
        let plain = || numbers(&[(1, None, "a"), (2, None, "b"), (3, None, "c")]);
        let priced = || numbers(&[(0, Some(1), "a"), (1, Some(1), "b")]);
        let pushed = || numbers(&[(1, Some(5), ""), (2, Some(6), "s"), (3, Some(7), "")]);
        let copies = || numbers(&[(1, None, "a"), (7, None, ""), (1, None, "b")]);
        let before_another = || numbers(&[(1, None, "a"), (7, None, "")]);
        let cases: [(&str, Vec<Document>, Change); 7] = [
            ("all turned in place", plain(), |all| all.iter_mut().for_each(|it| it.qty = it.qty % 3 + 1)),
            ("all raised in place", plain(), |all| all.iter_mut().for_each(|it| it.qty += 1)),
            ("two switches", priced(), |all| all.iter_mut().for_each(|it| it.qty = 1 - it.qty)),
            ("a new row with the number of a changed one", pushed(), |all| {
                all[1] = Numbers { qty: 8, price: Some(9) };
                all.push(Numbers { qty: 2, price: Some(1) });
            }),
            ("a copy before a row", before_another(), |all| all.insert(0, all[0].clone())),
            ("a move among copies", copies(), |all| all.swap(0, 1)),
            ("one of two copies removed", copies(), |all| all.truncate(2)),
        ];
        for (what, stored, change) in cases {
            let became = kinds(shop, stored, change).await;
            assert!(became.is_err(), "{what}: {became:?}");
        }
    }
}

on_both_stores! {
    async fn rows_that_change_in_place_keep_their_own_fields(shop) {
        let plain = || numbers(&[(2, None, ""), (1, None, "b"), (9, None, "c")]);
        let copied: Change = |all| all[0].qty = 1;
        assert_eq!(kinds(shop, plain(), copied).await.unwrap(), "- b c");
        let changed: Change = |all| all.iter_mut().for_each(|it| it.qty += 100);
        assert_eq!(kinds(shop, plain(), changed).await.unwrap(), "- b c");
        let appended: Change = |all| all.push(all[1].clone());
        assert_eq!(kinds(shop, plain(), appended).await.unwrap(), "- b c -");
        let removed: Change = |all| drop(all.drain(..1));
        assert_eq!(kinds(shop, plain(), removed).await.unwrap(), "b c");
    }
}

on_both_stores! {
    async fn two_texts_together_tell_which_row_is_which(shop) {
        #[derive(Serialize, Deserialize)]
        struct Part { name: String, place: String, qty: i64 }
        let row = |(n, (name, place)): (i64, (&str, &str))| {
            doc! { "name": name, "place": place, "qty": n, "kind": format!("{name}/{place}") }
        };
        let places = [("bolt", "north"), ("bolt", "south"), ("nut", "north"), ("nut", "south")];
        let stored = || (1..).zip(places).map(row).collect::<Vec<_>>();
        let all = places.map(|(name, place)| format!("{name}/{place}"));
        let raised = |rows: &mut Vec<Part>| rows.iter_mut().for_each(|it| it.qty += 1);
        assert_eq!(kinds(shop, stored(), raised).await.unwrap(), all.join(" "));
        let swapped = |rows: &mut Vec<Part>| (rows[0].qty, rows[1].qty) = (2, 1);
        assert_eq!(kinds(shop, stored(), swapped).await.unwrap(), all.join(" "));
        let reversed = |rows: &mut Vec<Part>| {
            rows.iter_mut().for_each(|it| it.qty += 1);
            rows.reverse();
        };
        let mut back = all.clone();
        back.reverse();
        assert_eq!(kinds(shop, stored(), reversed).await.unwrap(), back.join(" "));
    }
}

on_both_stores! {
    async fn texts_that_change_places_while_the_numbers_stay_are_not_believed(shop) {
        #[derive(Serialize, Deserialize)]
        struct Part { place: String, qty: i64 }
        let stored = ["north", "south"].iter().zip(1_i64..);
        let stored = stored.map(|(place, qty)| doc! { "place": *place, "qty": qty, "kind": *place });
        let swapped = |rows: &mut Vec<Part>| {
            (rows[0].place, rows[1].place) = ("south".to_owned(), "north".to_owned());
        };
        assert!(kinds(shop, stored.clone().collect(), swapped).await.is_err());
        let turned = |rows: &mut Vec<Part>| rows.reverse();
        assert_eq!(kinds(shop, stored.collect(), turned).await.unwrap(), "south north");
    }
}

on_both_stores! {
    async fn an_id_that_is_null_or_was_corrected_loses_nothing(shop) {
        #[derive(Serialize, Deserialize)]
        struct Named { id: Option<i64>, name: String }
        let stored = || vec![
            doc! { "id": null, "name": "x", "kind": "a" },
            doc! { "id": 3, "name": "y", "kind": "b" },
        ];
        let numbered = |all: &mut Vec<Named>| all[0].id = Some(9);
        assert_eq!(kinds(shop, stored(), numbered).await.unwrap(), "a b");
        let without = |all: &mut Vec<Named>| all[1].id = None;
        assert_eq!(kinds(shop, stored(), without).await.unwrap(), "a b");
        let corrected = |all: &mut Vec<Named>| all[1].id = Some(4);
        assert!(kinds(shop, stored(), corrected).await.is_err());
        let replaced = |all: &mut Vec<Named>| all[1] = Named { id: Some(4), name: "z".to_owned() };
        assert_eq!(kinds(shop, stored(), replaced).await.unwrap(), "a -");
    }
}

on_both_stores! {
    async fn a_set_is_found_whatever_its_stored_order_and_its_elements_are(shop) {
        #[derive(Serialize, Deserialize)]
        struct Sets {
            #[serde(rename = "_id")] id: String,
            enums: BTreeSet<Kind>,
            options: BTreeSet<Optional>,
            named: BTreeSet<WithId>,
        }
        #[derive(PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        enum Kind { A(i32), B(i32) }
        #[derive(PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        struct Optional {
            #[serde(default, skip_serializing_if = "Option::is_none")] a: Option<i32>,
            #[serde(default, skip_serializing_if = "Option::is_none")] b: Option<i32>,
        }
        // Another program gives each element an `_id`, too.
        #[derive(PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        struct WithId { id: i64, name: String }
        let stored = doc! {
            "_id": "a",
            "enums": [{ "B": 1 }, { "A": 2 }],
            "options": [{ "b": 2 }, { "a": 1 }],
            "named": [{ "_id": 8, "id": 2, "name": "y" }, { "_id": 9, "id": 1, "name": "x" }],
        };
        let became = save(shop, &stored, &stored, |it: &mut Sets| {
            it.enums.remove(&Kind::A(2));
            it.options.remove(&Optional { a: None, b: Some(2) });
            it.named.retain(|it| it.id != 1);
        });
        let Became::Saved(saved) = became.await else { panic!() };
        assert_eq!(saved.get_array("enums").unwrap().len(), 1);
        assert_eq!(saved.get_array("options").unwrap().len(), 1);
        let named = saved.get_array("named").unwrap();
        assert_eq!(named.len(), 1);
        let kept = named[0].as_document().unwrap().get("_id").unwrap();
        assert_eq!(kept.as_i64().or(kept.as_i32().map(Into::into)), Some(8));
    }
}

on_both_stores! {
    async fn a_list_whose_elements_are_read_in_another_form_stays_in_its_order(shop) {
        fn trimmed<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
            Ok(String::deserialize(deserializer)?.trim().to_owned())
        }
        #[derive(Serialize, Deserialize)]
        struct Trimmed { id: i64, #[serde(deserialize_with = "trimmed")] name: String }
        let stored = vec![
            doc! { "_id": 7, "id": 1, "name": "x ", "kind": "a" },
            doc! { "_id": 8, "id": 2, "name": " y", "kind": "b" },
        ];
        let pushed = |all: &mut Vec<Trimmed>| all.push(Trimmed { id: 3, name: "z".to_owned() });
        assert_eq!(kinds(shop, stored, pushed).await.unwrap(), "a b -");
    }
}

/// Many rows with few distinct values, all of which change.
#[test]
fn many_rows_of_few_values_are_refused_in_time() {
    in_memory(async |store| {
        let rows = (0..30_000_i64).map(|n| doc! { "qty": n % 3, "price": n % 2, "kind": n });
        let raised = |all: &mut Vec<Numbers>| all.iter_mut().for_each(|it| it.qty += 1);
        assert!(kinds(store, rows.collect(), raised).await.is_err());
    });
}
