//! The cases. Each is named after the rule that it checks.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant, SystemTime},
};

use uuid::Uuid;

use doclock_core::{
    Aid, EndReason, Holder, Lock, LockKey, LockToken,
    Mode::{self, Exclusive, Shared},
    Released, StoreErrorKind, TabId, TryAcquire,
    store::{
        Ability, Active, Claim, Deadline, Documents, Edit, HandedOver, Locks, NamedBy, PageId,
        Renewed, Saved, Servers, Sessions, Settled, StoredDocument, TakenBy, TakeoverKind,
    },
};

use crate::{COLLECTION, Page, Shorthand, Subject, TTL, steps::*};

/// Makes the cases of a file, and a macro that makes one test of each case. A case gets the store, and sessions without
/// locks. A case is left out if the store lacks an ability that its file or the case itself needs. `$dollar` is a `$`
/// for the macro that is made, because a macro cannot write a `$` into another macro.
macro_rules! cases {
    (
        tests $file:ident($dollar:tt);
        needs [$($all:ident),*];
        $(
            $(#[needs($($own:ident),+)])?
            async fn $case:ident($store:ident $(, $session:ident)* $(,)?) $body:block
        )*
    ) => {
        const NEEDS: &[Ability] = &[$(Ability::$all),*];

        $(
            pub async fn $case<S: Subject>() {
                let needed = [NEEDS, &[$($(Ability::$own),+)?]].concat();
                if let Some($store) = &Steps::<S>::of(stringify!($case), &needed).await {
                    $(let $session = &Aid::new();)*
                    $body
                }
            }
        )*

        #[doc(hidden)]
        #[macro_export]
        macro_rules! $file {
            ($dollar subject:ty) => {
                $(
                    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                    async fn $case() {
                        $dollar crate::cases::$file::$case::<$dollar subject>().await;
                    }
                )*
            };
        }
    };
}

pub mod asks;
pub mod ends;
pub mod fair;
pub mod fence;
pub mod hand_over;
pub mod locks;
pub mod pages;
pub mod saves;
pub mod servers;
pub mod shared;
pub mod takeovers;
pub mod watch;
