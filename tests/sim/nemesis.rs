//! The faults, one after the other, sometimes two at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::world::{Weather, World};

/// Faults of the database, until all workers wind down.
/// `rush` brings ten times the load.
pub(crate) async fn of_database(world: Arc<World>, rush: impl Fn()) {
    while begins(&world).await {
        let settings = &world.settings;
        let fault = world.rng().u8(..100);
        match fault {
            0..60 => replication(&world).await,
            60..70 => no_primary(&world).await,
            70..75 => overload(&world, &rush).await,
            75.. if let Some(most) = settings.clock_steps_back => {
                let by = world.rng().u64(1..most.as_millis() as u64);
                world.stats().clock_steps += 1;
                world.note(format_args!("the clock is set back by {by} ms"));
                world.database.clock_steps_back(Duration::from_millis(by));
            }
            75.. if settings.clock_jumps => {
                let by = settings.part(&mut world.rng(), 1.5);
                world.stats().clock_steps += 1;
                world.note(format_args!("the clock is set forward by {by:?}"));
                world.database.clock_jumps(by);
            }
            _ => {}
        }
    }
}

/// Faults of the servers and their network. `crash` names a server that is to be replaced.
pub(crate) async fn of_servers(world: Arc<World>, crash: impl Fn(usize)) {
    while begins(&world).await {
        let fault = world.rng().u8(..100);
        match fault {
            0..30 => partition(&world).await,
            30..48 => pause_of_a_server(&world).await,
            48..58 => {
                let server = live_server(&world);
                world.stats().crashes += 1;
                world.note(format_args!("s{server} is killed"));
                world.change(server, |it| it.is_dead = true);
                crash(server);
            }
            _ => {
                let weather = weather(&world);
                world.note(format_args!("the weather becomes {weather:?}"));
                world.becomes(weather);
            }
        }
    }
    world.becomes(Weather::default());
}

/// Waits a while. False if there are to be no more faults.
async fn begins(world: &World) -> bool {
    let pause = world.rng().u64(20..2_000);
    sleep(Duration::from_millis(pause)).await;
    world.is_active() && !world.settings.is_calm
}

fn weather(world: &World) -> Weather {
    let mut rng = world.rng();
    let mut chance = |most: f64| if rng.bool() { rng.f64() * most } else { 0.0 };
    let (lost_requests, lost_replies) = (chance(0.15), chance(0.2));
    let (late_requests, repeated_requests) = (chance(0.15), chance(0.15));
    let slow_ways = chance(0.5);
    let slowest = rng.u64(5..world.settings.ttl.as_millis() as u64 / 12);
    Weather { lost_requests, lost_replies, late_requests, repeated_requests, slow_ways, slowest }
}

fn live_server(world: &World) -> usize {
    let live: Vec<_> =
        (0..world.machines()).filter(|it| !world.server(*it, |it| it.is_dead)).collect();
    live[world.rng().usize(..live.len())]
}

/// Sleeps for at most this fraction of the ttl.
async fn lasts(world: &World, most: f64) {
    let lasts = world.settings.part(&mut world.rng(), most);
    sleep(lasts).await;
}

/// Replication stops. Then either everything is replicated, or another primary comes up.
async fn replication(world: &World) {
    world.stats().stalls += 1;
    world.note(format_args!("replication stops"));
    world.database.replication_stops();
    let most = if world.rng().u8(..6) == 0 { 0.8 } else { 0.2 };
    lasts(world, most).await;
    if world.rng().bool() {
        world.note(format_args!("a majority has everything"));
        world.database.replicates();
    } else {
        world.database.goes_down();
        lasts(world, 0.07).await;
        fails_over(world);
    }
}

async fn no_primary(world: &World) {
    world.note(format_args!("the primary is gone"));
    world.database.goes_down();
    lasts(world, 0.2).await;
    fails_over(world);
}

/// The database stands still, and ten times the load comes. Afterwards, work goes on.
async fn overload(world: &World, rush: &impl Fn()) {
    world.stats().rushes += 1;
    world.note(format_args!("the database stands still"));
    world.database.stands_still();
    rush();
    lasts(world, 0.5).await;
    world.note(format_args!("the database goes on"));
    world.database.goes_on();
    let (before, until) = (world.stats().grants, Instant::now() + world.settings.ttl * 2);
    while world.is_active() && world.stats().grants == before {
        if Instant::now() >= until {
            return world.violation("nothing is granted after the database stood still");
        }
        sleep(Duration::from_millis(20)).await;
    }
}

fn fails_over(world: &World) {
    let rolls_back = world.rng().u8(..3) > 0;
    let most = world.settings.clock_steps_back.unwrap_or_default().as_millis() as u64;
    let behind = Duration::from_millis(world.rng().u64(..=most));
    let mut stats = world.stats();
    stats.failovers += 1;
    stats.rollbacks += u64::from(rolls_back);
    stats.clock_steps += u64::from(!behind.is_zero());
    drop(stats);
    world.note(format_args!("another primary, rolls back: {rolls_back}, {behind:?} behind"));
    world.database.comes_up(rolls_back, behind);
}

async fn partition(world: &World) {
    let server = live_server(world);
    world.stats().partitions += 1;
    world.note(format_args!("s{server} is cut off"));
    world.change(server, |it| it.is_cut = true);
    lasts(world, 0.4).await;
    world.note(format_args!("s{server} is back"));
    world.change(server, |it| it.is_cut = false);
}

/// Now and then longer than the ttl.
async fn pause_of_a_server(world: &World) {
    let server = live_server(world);
    world.stats().pauses += 1;
    world.note(format_args!("s{server} is paused"));
    world.change(server, |it| it.is_frozen = true);
    lasts(world, 1.3).await;
    world.note(format_args!("s{server} goes on"));
    world.change(server, |it| it.is_frozen = false);
}
