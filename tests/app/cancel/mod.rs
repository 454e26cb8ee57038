//! Every public async function, dropped at each of its await points, on both stores. Afterwards there
//! is no unknown lock and no place in a queue, and everything that was to be released is gone.

mod requests;
mod scene;
mod table;

use std::{
    collections::BTreeMap,
    fs,
    future::Future,
    path::Path,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake},
    time::Duration,
};

use tokio::{sync::Notify, time::timeout};

use self::{
    scene::{Scene, Stores},
    table::{After, Case, EXEMPT, cases},
};

/// A future that has not been woken for this long waits for an event that never comes.
const NEVER: Duration = Duration::from_millis(500);
/// More await points than any of the functions has.
const MOST: usize = 60;

struct Woken(Notify);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

#[derive(Debug, PartialEq)]
enum Got {
    ToTheEnd,
    /// It was dropped at that await point.
    ToThere,
    /// It waited at an earlier point for an event that never comes, and was dropped there.
    NoFurther,
}

/// Polls a future until it has been pending that often, and drops it.
async fn drop_at(future: impl Future<Output = ()>, point: usize, never: Duration) -> Got {
    let mut future = pin!(future);
    let woken = Arc::new(Woken(Notify::new()));
    let waker = Arc::clone(&woken).into();
    for left in (0..point).rev() {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(()) => return Got::ToTheEnd,
            Poll::Pending if left == 0 => {}
            Poll::Pending => {
                if timeout(never, woken.0.notified()).await.is_err() {
                    return Got::NoFurther;
                }
            }
        }
    }
    Got::ToThere
}

/// Returns the number of await points.
async fn drop_everywhere(stores: &Stores, case: &Case, never: Duration) -> usize {
    for point in 0..MOST {
        let scene = Scene::new(stores).await;
        let future = (case.begin)(scene.clone()).await;
        let got = drop_at(future, point, never).await;
        scene.locks.shutdown().await;
        let what = format!("{}, dropped at await point {point} ({got:?})", case.name);
        if got == Got::ToTheEnd {
            return point;
        }
        match case.after {
            After::Free => scene.is_free(&what).await,
            // A future that was never polled has not begun.
            After::FreeOnceBegun if point == 0 => scene.is_hers_or_free(&what).await,
            After::FreeOnceBegun => scene.is_free(&what).await,
            After::Hers => scene.is_hers(&what).await,
            After::HersOrFree => scene.is_hers_or_free(&what).await,
            After::Somebodys => assert_eq!(scene.held_by().await, 1, "{what}"),
            After::SomebodysOrFree => {
                if scene.held_by().await == 0 {
                    scene.is_free(&what).await;
                }
            }
        }
        if got == Got::NoFurther {
            return point;
        }
    }
    panic!("{} does not end", case.name);
}

async fn on(stores: &Stores) {
    for case in cases() {
        let mut points = drop_everywhere(stores, &case, NEVER).await;
        if points <= case.at_least {
            // The answer of a busy server is late.
            points = drop_everywhere(stores, &case, 20 * NEVER).await;
        }
        println!("{}: {points} await points", case.name);
        assert!(points > case.at_least, "{}: {points} await points", case.name);
    }
}

#[actix_web::test]
async fn on_the_embedded_store_a_dropped_future_leaves_nothing_behind() {
    on(&Stores::Embedded).await;
}

#[actix_web::test]
async fn on_mongodb_a_dropped_future_leaves_nothing_behind() {
    on(&Stores::mongo().await).await;
}

/// Counts functions by names such as `manager.rs::renew`.
fn public_async_functions(under: &Path, found: &mut BTreeMap<String, usize>) {
    for entry in fs::read_dir(under).unwrap() {
        let path = entry.unwrap().path();
        let name = path.to_str().unwrap().split_once("/src/").unwrap().1.to_owned();
        if path.is_dir() {
            public_async_functions(&path, found);
        } else if !name.starts_with("conformance") {
            for line in fs::read_to_string(&path).unwrap().lines() {
                if let Some(rest) = line.trim().strip_prefix("pub async fn ") {
                    let function = rest.split(['(', '<']).next().unwrap();
                    *found.entry(format!("{name}::{function}")).or_default() += 1;
                }
            }
        }
    }
}

#[test]
fn no_public_async_function_is_left_out() {
    let mut there = BTreeMap::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for src in ["src", "crates/doclock-core/src"] {
        public_async_functions(&root.join(src), &mut there);
    }
    let mut covered: BTreeMap<String, usize> = BTreeMap::new();
    let cases = cases();
    for name in cases.iter().map(|case| case.name).chain(EXEMPT.iter().map(|(name, _)| *name)) {
        // A suffix in brackets distinguishes several cases of one function.
        if !name.contains('(') {
            *covered.entry(name.to_owned()).or_default() += 1;
        }
    }
    assert_eq!(covered, there, "the table of cancel/table.rs, and the public async functions");
}
