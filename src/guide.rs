//! The guide: one subject to a page.
//!
//! | page | answers |
//! |---|---|
//! | [http] | headers, the lock API, every answer and its code, events, `client.js`, the admin page |
//! | [typed_text] | the first keystroke, pages of yesterday, warnings before an end, kept texts |
//! | [server_rendered] | one tag around a form; lists; pages without JavaScript; React, axios and htmx |
//! | [saving] | what a save writes, and when it is refused; other writes under a lock |
//! | [waiting] | waiting and its order, asking the holder, jobs, readers and writers, deadlocks, fences |
//! | [sessions] | session stores; how the application is told of ended sessions and taken locks; cookies |
//! | [ttl] | how long a lock should outlive the last sign of life |
//! | [configuration] | settings and features |
//! | [life_of_a_lock] | the states of a lock, the commands, the stored record field by field |
//! | [guarantees] | the guarantees in full, and their limits |
//! | [a_store_of_your_own] | the contract of stores, and its suite |
//! | [existing_application] | into an existing application: tenants, `$set`, JWT, errors in its own style |
//! | [from_a_hand_written_protocol] | migrating from your own locks |
//! | [production], [proxies], [operations], [cli] | a checklist; several servers and reverse proxies; health, metrics, log lines; the command `doclock` |
//! | [upgrading], [policies] | from one version to the next; what counts as breaking, what was tested |
//! | [troubleshooting] | symptoms and questions |
//!
//! # Evidence
//!
//! The folder `docs/evidence` of the repository shows why you may believe the guide. Its pages are not part of the
//! package:
//!
//! - `tests.md`: the tests of each guarantee, and the seeded bugs that they find
//! - `faults.md`, `model.md`, `simulation.md`, `upgrading.md`: how the guarantees were tested
//! - `benchmarks.md`, `scale.md`: the cost of a lock, and how many people can edit
//! - `other-projects.md`: faults of other locks, and what prevents them here

macro_rules! pages {
    ($($page:ident: $file:literal,)*) => {
        $(
            // If a link is defined twice, the first definition counts: on docs.rs a page is a module, in the
            // repository a file.
            #[doc = include_str!("guide/links.md")]
            #[doc = include_str!(concat!("../docs/", $file))]
            pub mod $page {}
        )*
    };
}

pages! {
    a_store_of_your_own: "a-store-of-your-own.md",
    cli: "cli.md",
    configuration: "configuration.md",
    existing_application: "existing-application.md",
    from_a_hand_written_protocol: "from-a-hand-written-protocol.md",
    guarantees: "guarantees.md",
    http: "http.md",
    life_of_a_lock: "life-of-a-lock.md",
    operations: "operations.md",
    policies: "policies.md",
    production: "production.md",
    proxies: "proxies.md",
    saving: "saving.md",
    server_rendered: "server-rendered.md",
    sessions: "sessions.md",
    troubleshooting: "troubleshooting.md",
    ttl: "ttl.md",
    typed_text: "typed-text.md",
    upgrading: "upgrading.md",
    waiting: "waiting.md",
}
