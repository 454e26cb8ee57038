//! Which members a save writes, and which saves are refused because the type would lose something.

use super::*;

type Map = HashMap<String, i64>;

on_both_stores! {
    async fn odd_names_in_a_map_that_is_not_stored_are_written_with_all_other_fields(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, title: String, #[serde(default)] map: Map }
        for name in ["a.b", "$a", ""] {
            let stored = doc! { "_id": "a", "title": "old" };
            let became = save(shop, &stored, &stored, |it: &mut It| {
                it.title = "new".to_owned();
                it.map.insert(name.to_owned(), 1);
            });
            let Became::Saved(saved) = became.await else { panic!("{name}") };
            let map: Map = read::<It>(&saved).unwrap().map;
            assert_eq!((saved.get_str("title").unwrap(), map.get(name)), ("new", Some(&1)));
        }
    }
}

on_both_stores! {
    async fn odd_names_at_the_top_level_are_written(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, #[serde(flatten)] map: Map }
        for name in ["a.b", "0"] {
            let stored = doc! { "_id": "a", "b": 1 };
            let became = save(shop, &stored, &stored, |it: &mut It| it.map.extend([(name.to_owned(), 1)]));
            let Became::Saved(saved) = became.await else { panic!("{name}") };
            assert_eq!(read::<It>(&saved).unwrap().map.len(), 2);
        }
    }
}

on_both_stores! {
    async fn a_struct_with_a_default_is_stored_as_a_whole_the_first_time(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, #[serde(default)] settings: Settings }
        let stored = doc! { "_id": "a" };
        let Became::Saved(saved) =
            save(shop, &stored, &stored, |it: &mut It| it.settings.left = 5).await
        else { panic!() };
        assert_eq!(read::<It>(&saved).unwrap().settings, Settings { left: 5, right: String::new() });
    }
}

on_both_stores! {
    async fn a_field_that_is_read_by_an_alias_gets_its_new_name(shop) {
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(alias = "name")] title: String,
            #[serde(default)] n: i64,
        }
        let stored = doc! { "_id": "a", "name": "old", "stranger": 1 };
        let Became::Saved(saved) =
            save(shop, &stored, &stored, |it: &mut It| it.title = "new".to_owned()).await
        else { panic!() };
        assert_eq!(saved.get_str("title").unwrap(), "new");
        assert_eq!((saved.get("name"), saved.get_i32("stranger").unwrap()), (None, 1));
        // Another field leaves the old name alone.
        let Became::Saved(saved) = save(shop, &stored, &stored, |it: &mut It| it.n = 5).await else { panic!() };
        assert_eq!(saved.get_str("name").unwrap(), "old");
    }
}

on_both_stores! {
    async fn a_name_that_is_written_but_not_read_is_refused_once_it_changes(shop) {
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(rename(serialize = "shown", deserialize = "hidden"), default)] title: String,
            n: i64,
        }
        for stored in [doc! { "_id": "a", "hidden": "old", "n": 1 }, doc! { "_id": "a", "n": 1 }] {
            let became = save(shop, &stored, &stored, |it: &mut It| it.title = "new".to_owned()).await;
            assert!(matches!(&became, Became::Unfit(why) if why.contains("`shown`")), "{became:?}");
            let became = save(shop, &stored, &stored, |it: &mut It| it.n = 2).await;
            assert!(matches!(became, Became::Saved(_)), "{became:?}");
        }
    }
}

on_both_stores! {
    async fn null_that_is_read_as_a_default_can_be_saved(shop) {
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(default, deserialize_with = "null_is_default")] note: Note,
        }
        let stored = doc! { "_id": "a", "note": null };
        let Became::Saved(saved) = save(shop, &stored, &stored, |it: &mut It| it.note.stars = 5).await
        else { panic!() };
        assert_eq!(read::<It>(&saved).unwrap().note, Note { text: String::new(), stars: 5 });
    }
}

on_both_stores! {
    async fn elements_of_an_array_keep_what_the_type_does_not_name(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, rows: Vec<Row> }
        #[derive(Clone, Serialize, Deserialize)]
        struct Row { sku: String, n: i64 }
        let row = |sku: &str, n: i64| doc! { "sku": sku, "n": n as i32, "of": sku };
        let rows = |rows: Vec<Document>| doc! { "_id": "a", "rows": rows };
        let stored = rows(vec![row("a", 1), row("b", 1), row("c", 1)]);
        let new = || Row { sku: "d".to_owned(), n: 1 };
        let after = async |change: &dyn Fn(&mut Vec<Row>)| {
            match save(shop, &stored, &stored, |it: &mut It| change(&mut it.rows)).await {
                Became::Saved(saved) => saved
                    .get_array("rows")
                    .unwrap()
                    .iter()
                    .map(|row| {
                        let row = row.as_document().unwrap();
                        let n = number(row.get("n").unwrap()).unwrap();
                        format!("{}{n}{}", row.get_str("sku").unwrap(), row.get_str("of").unwrap_or("-"))
                    })
                    .collect::<Vec<_>>()
                    .join(" "),
                refused => panic!("{refused:?}"),
            }
        };
        assert_eq!(after(&|rows| rows[1].n = 2).await, "a1a b2b c1c");
        assert_eq!(after(&|rows| rows.push(new())).await, "a1a b1b c1c d1-");
        assert_eq!(after(&|rows| rows.insert(0, new())).await, "d1- a1a b1b c1c");
        assert_eq!(after(&|rows| drop(rows.remove(0))).await, "b1b c1c");
        assert_eq!(after(&|rows| rows.reverse()).await, "c1c b1b a1a");
        assert_eq!(after(&|rows| { rows[2].n = 3; rows.push(new()) }).await, "a1a b1b c3c d1-");
        assert_eq!(after(&|rows| { rows.remove(0); rows[1].n = 3 }).await, "b1b c3c");
        assert_eq!(after(&|rows| rows.iter_mut().for_each(|row| row.n = 7)).await, "a7a b7b c7c");
        assert_eq!(after(&|rows| rows[1].sku = "x".to_owned()).await, "a1a x1b c1c");

        let pushed = rows(vec![row("a", 1), row("b", 1), row("c", 1), row("p", 1)]);
        let became = save(shop, &stored, &pushed, |it: &mut It| it.rows[0].n = 9).await;
        assert_eq!(became, Became::Changed("rows".to_owned()));
    }
}

on_both_stores! {
    async fn a_member_is_not_written_into_a_document_that_has_gone(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, #[serde(default)] settings: Settings, n: i64 }
        let stored = doc! { "_id": "a", "settings": { "left": 1, "right": "r" }, "n": 1 };
        let gone = doc! { "_id": "a", "n": 1 };
        let became = save(shop, &stored, &gone, |it: &mut It| { it.settings.left = 5; it.n = 2 }).await;
        assert_eq!(became, Became::Changed("settings".to_owned()));
    }
}

on_both_stores! {
    async fn a_part_that_the_type_would_drop_is_not_rewritten(shop) {
        /// Reads only the even numbers.
        fn even<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<i64>, D::Error> {
            let all = Vec::<i64>::deserialize(deserializer)?;
            Ok(all.into_iter().filter(|n| n % 2 == 0).collect())
        }
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, #[serde(deserialize_with = "even")] even: Vec<i64> }
        let stored = doc! { "_id": "a", "even": [1_i64, 2_i64] };
        let became = save(shop, &stored, &stored, |it: &mut It| it.even.push(4)).await;
        assert!(matches!(&became, Became::Unfit(why) if why.contains("`even`")), "{became:?}");
    }
}

on_both_stores! {
    async fn a_value_that_is_read_in_another_form_can_be_saved(shop) {
        fn trimmed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
            Ok(String::deserialize(deserializer)?.trim().to_owned())
        }
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(default, deserialize_with = "trimmed")] title: String,
        }
        let stored = doc! { "_id": "a", "title": "old" };
        let became = save(shop, &stored, &stored, |it: &mut It| it.title = "new ".to_owned()).await;
        assert_eq!(became, Became::Saved(doc! { "_id": "a", "title": "new " }));
        let became = save(shop, &stored, &stored, |it: &mut It| it.title = "  ".to_owned()).await;
        assert_eq!(became, Became::Saved(doc! { "_id": "a", "title": "  " }));
    }
}

on_both_stores! {
    async fn changes_of_both_sides_that_together_cannot_be_read_are_refused(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, state: State }
        let stored = doc! { "_id": "a", "state": { "Number": 1_i64 } };
        let theirs = doc! { "_id": "a", "state": { "Review": { "by": "b", "days": 1_i64 } } };
        let done = State::Done(Person { first: String::new(), last: String::new() });
        let became = save(shop, &stored, &theirs, |it: &mut It| it.state = done).await;
        assert!(matches!(became, Became::Changed(_)), "{became:?}");
    }
}

on_both_stores! {
    async fn an_aliased_document_or_array_keeps_what_the_type_does_not_name(shop) {
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(alias = "addr")] address: Person,
            #[serde(alias = "items")] rows: Vec<Row>,
        }
        #[derive(Serialize, Deserialize)]
        struct Row { #[serde(alias = "quantity")] n: i64 }
        let row = |n: i64| doc! { "quantity": n, "of": n };
        let stored = doc! {
            "_id": "a",
            "addr": { "first": "f", "last": "l", "geo": 1 },
            "items": (0..70).map(row).collect::<Vec<_>>(),
            "quantity": "not an alias here",
        };
        let became = save(shop, &stored, &stored, |it: &mut It| {
            it.address.first = "g".to_owned();
            for (row, n) in it.rows.iter_mut().zip(1_000..) {
                row.n = n;
            }
        });
        let Became::Saved(saved) = became.await else { panic!() };
        assert_eq!(saved.get_document("address").unwrap(), &doc! { "first": "g", "last": "l", "geo": 1 });
        for (n, row) in saved.get_array("rows").unwrap().iter().enumerate() {
            let row = row.as_document().unwrap();
            let fields = ["n", "of"].map(|name| number(row.get(name).unwrap()).unwrap());
            assert_eq!(fields, [n as i64 + 1_000, n as i64]);
        }
        assert_eq!(saved.get_str("quantity").unwrap(), "not an alias here");
        assert_eq!((saved.get("addr"), saved.get("items")), (None, None));
        // Only one of the aliases changes.
        let Became::Saved(saved) = save(shop, &stored, &stored, |it: &mut It| it.rows[0].n = 9).await else { panic!() };
        assert_eq!(saved.get("addr"), stored.get("addr"));
    }
}

on_both_stores! {
    async fn a_sorted_set_of_documents_keeps_what_the_type_does_not_name(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, rows: BTreeSet<Row> }
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        struct Row { sku: String }
        let row = |sku: &str| doc! { "sku": sku, "of": sku };
        let stored = doc! { "_id": "a", "rows": [row("c"), row("a"), row("b")] };
        let became = save(shop, &stored, &stored, |it: &mut It| it.rows.retain(|row| row.sku != "a"));
        let Became::Saved(saved) = became.await else { panic!() };
        assert_eq!(saved.get_array("rows").unwrap(), &vec![row("b").into(), row("c").into()]);
    }
}

on_both_stores! {
    async fn many_changed_elements_keep_their_own_fields_or_the_save_is_refused(shop) {
        #[derive(Serialize, Deserialize)]
        struct It { #[serde(rename = "_id")] id: String, rows: Vec<Row> }
        #[derive(Serialize, Deserialize)]
        struct Row { #[serde(default, skip_serializing_if = "Option::is_none")] id: Option<i64>, n: i64 }
        for has_id in [true, false] {
            let row = |n: i64| match has_id {
                true => doc! { "id": n, "n": n, "of": n },
                false => doc! { "n": n, "of": n },
            };
            let stored = doc! { "_id": "a", "rows": (0..300).map(row).collect::<Vec<_>>() };
            let became = save(shop, &stored, &stored, |it: &mut It| {
                it.rows.remove(0);
                it.rows.iter_mut().for_each(|row| row.n += 1_000);
            });
            match became.await {
                Became::Saved(saved) if has_id => {
                    for row in saved.get_array("rows").unwrap() {
                        let row = row.as_document().unwrap();
                        assert_eq!(row.get("of"), row.get("id"));
                    }
                }
                Became::Unfit(why) if !has_id => assert!(why.contains("`rows`"), "{why}"),
                other => panic!("{other:?}"),
            }
        }
    }
}

on_both_stores! {
    async fn a_field_that_would_come_back_at_the_next_load_is_refused(shop) {
        fn one() -> i64 {
            1
        }
        #[derive(Serialize, Deserialize)]
        struct It {
            #[serde(rename = "_id")] id: String,
            #[serde(default = "one", skip_serializing_if = "is_zero")] n: i64,
        }
        fn is_zero(n: &i64) -> bool {
            *n == 0
        }
        let stored = doc! { "_id": "a", "n": 5_i64 };
        let became = save(shop, &stored, &stored, |it: &mut It| it.n = 0).await;
        assert!(matches!(&became, Became::Unfit(why) if why.contains("`n`")), "{became:?}");
    }
}
