//! The guide: one subject to a page.
//!
//! | page | answers |
//! |---|---|
//! | [life_of_a_lock] | the states of a lock, the record in each, waiting and handover |
//! | [waiting] | waiting, jobs, readers and writers, fences, several locks |
//! | [session_ends] | how the application is told of ended sessions |
//! | [ttl] | how long a lock should outlive the last sign of life |
//! | [sessions_and_proxies] | cookies, Redis or `MongoSessionStore`; reverse proxies |
//! | [http], [answers] | the lock API, its events, `client.js`; every answer and its code |
//! | [configuration] | settings and features |
//! | [saving] | what a save writes, and when it is refused |
//! | [stored] | the record of a lock, field by field |
//! | [production], [operations], [cli] | a checklist; health, metrics, log lines; the command `doclock` |
//! | [upgrading], [policies] | from one version to the next; what counts as breaking, what was tested |
//! | [troubleshooting], [faq] | symptoms and questions |
//! | [existing_application] | into an existing application: `$set`, JWT, errors in its own style |
//! | [from_a_hand_written_protocol] | migrating from your own locks |
//! | [guarantees], [tests] | the guarantees in full, and the tests that guard them |
//! | [faults], [model], [simulation] | how the guarantees were tested |
//! | [benchmarks] | the cost of a lock |
//! | [scale] | how many people can edit, and what to do then |

macro_rules! pages {
    ($($page:ident: $file:literal,)*) => {
        $(
            // The first definition of a link wins: here pages are modules, in the repository they are files.
            #[doc = include_str!("guide/links.md")]
            #[doc = include_str!(concat!("../docs/", $file))]
            pub mod $page {}
        )*
    };
}

pages! {
    answers: "answers.md",
    benchmarks: "benchmarks.md",
    scale: "scale.md",
    cli: "cli.md",
    configuration: "configuration.md",
    existing_application: "existing-application.md",
    faq: "faq.md",
    faults: "faults.md",
    from_a_hand_written_protocol: "from-a-hand-written-protocol.md",
    guarantees: "guarantees.md",
    http: "http.md",
    life_of_a_lock: "life-of-a-lock.md",
    model: "model.md",
    operations: "operations.md",
    policies: "policies.md",
    production: "production.md",
    saving: "saving.md",
    session_ends: "session-ends.md",
    sessions_and_proxies: "sessions-and-proxies.md",
    simulation: "simulation.md",
    stored: "stored.md",
    tests: "tests.md",
    troubleshooting: "troubleshooting.md",
    ttl: "ttl.md",
    upgrading: "upgrading.md",
    waiting: "waiting.md",
}
