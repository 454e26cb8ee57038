//! Properties that are tried with random values.
//!
//! Each run tries the same values, so that a change is never blamed for an old bug. `PROPTEST_RNG_SEED` gives other values,
//! and `DOCLOCK_DEPTH` gives more of them.

use std::{cell::RefCell, env, fmt::Debug};

use mongodb::bson::{
    Binary, Bson, DateTime, Decimal128, Document, Regex, Timestamp, oid::ObjectId,
    spec::BinarySubtype,
};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, RngSeed, TestCaseError, TestRunner},
};
use uuid::Uuid;

use super::depth;

pub(crate) fn cases(cases: u32) -> Config {
    let mut config =
        Config { cases: cases * depth(), failure_persistence: None, ..Config::default() };
    if env::var_os("PROPTEST_RNG_SEED").is_none() {
        config.rng_seed = RngSeed::Fixed(0);
    }
    config
}

/// Tries so many values, and panics with the smallest that fails. A panic in `holds` is a failure.
pub(crate) fn check<S>(what: &str, number: u32, values: &S, mut holds: impl FnMut(S::Value))
where
    S: Strategy<Value: Debug>,
{
    let holds = RefCell::new(&mut holds);
    let mut runner = TestRunner::new(Config { max_shrink_time: 60_000, ..cases(number) });
    let outcome = runner.run(values, |value| {
        (holds.borrow_mut())(value);
        Ok::<_, TestCaseError>(())
    });
    if let Err(e) = outcome {
        panic!("{what}: {e}");
    }
}

/// Any BSON, often of the right type.
#[allow(clippy::unnecessary_fallible_conversions, reason = "can fail with bson 3")]
pub(crate) fn values() -> impl Strategy<Value = Bson> {
    let now = DateTime::now().timestamp_millis();
    let leaf = prop_oneof![
        3 => prop_oneof![
            Just(now), Just(now - 1_000), Just(now + 3_600_000), Just(0), Just(i64::MAX), Just(i64::MIN),
            any::<i64>(),
        ].prop_map(|millis| Bson::DateTime(DateTime::from_millis(millis))),
        2 => prop_oneof![Just(0), Just(60_000), Just(-1), any::<i64>()].prop_map(Bson::Int64),
        2 => prop_oneof![
            Just("alice".to_owned()), Just("$aid".to_owned()), Just("$$ROOT".to_owned()),
            Just(Uuid::from_u128(7).to_string()), any::<String>(),
        ].prop_map(Bson::String),
        1 => any::<f64>().prop_map(Bson::Double),
        1 => any::<i32>().prop_map(Bson::Int32),
        1 => any::<bool>().prop_map(Bson::Boolean),
        1 => Just(Bson::Null),
        1 => Just(Bson::MinKey),
        1 => Just(Bson::MaxKey),
        1 => Just(Bson::Decimal128("NaN".parse::<Decimal128>().expect("a number"))),
        1 => any::<(u32, u32)>()
            .prop_map(|(time, increment)| Bson::Timestamp(Timestamp { time, increment })),
        1 => any::<[u8; 12]>().prop_map(|it| ObjectId::from_bytes(it).into()),
        1 => vec(any::<u8>(), 0..20)
            .prop_map(|bytes| Binary { subtype: BinarySubtype::Uuid, bytes }.into()),
        1 => Just(Bson::JavaScriptCode("sleep(1)".to_owned())),
        1 => Just(Bson::RegularExpression(Regex { pattern: ".*".try_into().expect("no NUL"), options: "".try_into().expect("no NUL") })),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        let name = proptest::sample::select(FIELDS);
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Bson::Array),
            vec((name, inner), 0..5).prop_map(|fields| {
                Bson::Document(fields.into_iter().map(|(name, it)| (name.to_owned(), it)).collect())
            }),
        ]
    })
}

/// All fields of lock records, and some more.
pub(crate) const FIELDS: &[&str] = &[
    "ts", "ttl", "aid", "token", "since", "holder", "label", "user", "readers", "until", "due",
    "leaving", "queue", "fence", "tab", "page", "again", "mode", "taken", "by", "reason",
    "max_hold", "server", "first", "last", "writer", "x", "$ne",
];

pub(crate) fn fields(names: &'static [&'static str]) -> impl Strategy<Value = Document> {
    let field = (proptest::sample::select(names), values());
    vec(field, 0..8)
        .prop_map(|fields| fields.into_iter().map(|(n, it)| (n.to_owned(), it)).collect())
}
