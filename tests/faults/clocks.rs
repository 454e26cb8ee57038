//! Clocks that are minutes off. Without libfaketime, these tests report that they are skipped.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use tokio::time::sleep;

use crate::application::{Settings, WALL_CLOCK};
use crate::check::Clocks;
use crate::fleet::Fleet;
use crate::history::{Event, Line, now};
use crate::rig::faketime;
use crate::rig::mongod::{Unusual, strict_replica_set};
use crate::rig::replica_set::ReplicaSet;
use crate::round;

const FIVE_MINUTES: i64 = 300;

fn can_fake_time() -> bool {
    let can = faketime::library().is_some();
    if !can {
        println!("skipped: no libfaketimeMT.so.1; see scripts/tool faketime");
    }
    can
}

fn wall() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    i64::try_from(since.as_secs()).expect("in our time")
}

/// Only the server's clock decides, so a wrong clock of an application server changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn application_servers_with_wrong_clocks_behave_like_all_others() {
    if !can_fake_time() {
        return;
    }
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let uri = strict_replica_set().await.uri();
    let mut fleet = Fleet::new(&uri).await;
    fleet.put_documents(3).await;
    for ahead in [FIVE_MINUTES, -FIVE_MINUTES, 0] {
        let clock = faketime::environment(ahead);
        let number = fleet.start_on(&uri, round::load(rng.u64(..)), &clock).await;
        let shows = |event: &Event| matches!(event, Event::Said(it) if it.starts_with(WALL_CLOCK));
        let Event::Said(shows) = fleet.until(number, "on the clock", shows).await.event else {
            unreachable!()
        };
        let shows: i64 = shows[WALL_CLOCK.len()..].parse().unwrap();
        assert!((shows - wall() - ahead).abs() < 60, "{ahead} s ahead: {shows}");
    }
    let is_saved = |line: &&Line| line.event == Event::Saved;
    let enough = |lines: &[Line]| lines.iter().filter(is_saved).count() >= 150;
    fleet.until_recorded("150 saves", enough).await;
    let too_late = |line: &Line| line.event == Event::NotSaved;
    fleet.until_recorded("a save was too late", |lines| lines.iter().any(too_late)).await;
    let report = round::finish(fleet, Clocks::Agree).await;
    assert_eq!(report.violations, [""; 0]);
}

/// The primary's clock is off, and then another member becomes the primary. Leases may expire early or
/// late. No stale save is accepted, and fences keep rising.
async fn a_failover_to_another_clock(ahead: i64) {
    if !can_fake_time() {
        return;
    }
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let first = Unusual { clock_ahead: Some(ahead), ..Unusual::default() };
    let set = ReplicaSet::start_with(first).await;
    while set.primary().await != 0 {
        set.step_down().await;
    }
    let told = set.members()[0].admin(mongodb::bson::doc! { "hello": 1 }).await;
    let shows = told.get_datetime("localTime").unwrap().timestamp_millis() / 1_000;
    assert!((shows - wall() - ahead).abs() < 60, "{ahead} s ahead: {shows}");

    // Longer than the load thinks, so that locks are held during the failover.
    let settings = Settings { ttl: Duration::from_secs(3), ..Settings::default() };
    let mut fleet = Fleet::new(&set.uri()).await.with(settings);
    // Many keys, because locks that are taken while the clock is ahead stay locked for minutes.
    const KEYS: usize = 20;
    fleet.put_documents(KEYS).await;
    for _ in 0..2 {
        let (seed, careless) = (rng.u64(..), false);
        fleet.start(crate::application::Role::Load { seed, keys: KEYS, careless }).await;
    }
    fleet.until_saved_since(now()).await;
    sleep(Duration::from_secs(4)).await;
    set.kill_primary().await;
    let failed_over = now();
    fleet.until_saved_since(failed_over).await;
    sleep(Duration::from_secs(4)).await;
    let report = round::finish(fleet, Clocks::Jump).await;
    assert_eq!(report.violations, [""; 0]);
    assert!(report.saves > 0, "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_that_sets_the_clock_back() {
    a_failover_to_another_clock(FIVE_MINUTES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_that_sets_the_clock_ahead() {
    a_failover_to_another_clock(-FIVE_MINUTES).await;
}
