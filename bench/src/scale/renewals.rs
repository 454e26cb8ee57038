//! Sessions that only renew: first by requests that lock nothing, then by the heartbeats of `client.js`.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::time::{Instant, sleep, sleep_until};

use super::{
    Set, Size, on_a_thread,
    site::{self, HEARTBEAT, Person},
};
use crate::meter;

/// How many requests are under way or wait for their time. A heartbeat waits up to half a second for the round
/// of renewals.
const AT_ONCE: usize = 1_000;

pub async fn measure(set: &Set, size: Size) {
    let sessions = size.pick(500, 10_000);
    let database = meter::counted(&set.mongo).await;
    site::write_documents(&database, sessions).await;
    let locks = site::manager(&database).await;
    let (at, meter, idle) = (set.at, set.meter.clone(), set.idle);
    let periods = size.pick(1, 2);
    let own = locks.clone();
    on_a_thread(move || async move {
        let locks = own;
        let site = site::open(&locks).await;
        // People arrive evenly within one heartbeat, so that their heartbeats are spread evenly, too.
        let began = Instant::now();
        let arrivals = (0..sessions).map(|n| {
            let mut person = Person::new(&site, site::name(n));
            let at = began + HEARTBEAT * n as u32 / sessions as u32;
            async move {
                sleep_until(at).await;
                assert_eq!(person.edit().await, 200);
                person
            }
        });
        let mut people: Vec<_> = stream::iter(arrivals).buffered(64).collect().await;
        let mut began = Instant::now();
        for has_heartbeats in [false, true] {
            // The first period, in which the phases settle, does not count.
            let mut before = None;
            for period in 0..=periods {
                if period == 1 {
                    meter::take_sent();
                    before = Some(meter.read());
                }
                let beats = people.iter_mut().enumerate().map(|(n, person)| {
                    let at = began + HEARTBEAT * n as u32 / sessions as u32;
                    async move {
                        sleep_until(at).await;
                        let status = if has_heartbeats {
                            person.heartbeat().await
                        } else {
                            person.look().await
                        };
                        assert_eq!(status, 200);
                    }
                });
                stream::iter(beats).buffered(AT_ONCE).collect::<Vec<()>>().await;
                began += HEARTBEAT;
            }
            sleep(Duration::from_millis(600)).await;
            let used = meter.read().since(&before.expect("a period"));
            let sent = meter::take_sent();
            let seconds = used.time.as_secs_f64();
            let all = sent.values().sum::<u64>() as f64;
            let by_name: Vec<_> = sent
                .iter()
                .map(|(name, n)| format!("{name} {:.2}", *n as f64 / seconds))
                .collect();
            let renewals = (sessions * periods) as f64;
            println!(
                "[{at}] {sessions} sessions renewed by {}: {:.2} commands/s ({}); mongod {:.2} % of a core \
                 ({:.2} % with idle), {:.1} µs for each renewal; app {:.2} %; {seconds:.0} s",
                if has_heartbeats { "heartbeats" } else { "requests that lock nothing" },
                all / seconds,
                by_name.join(", "),
                (used.mongod_cores() - idle) * 100.0,
                used.mongod_cores() * 100.0,
                (used.mongod.as_secs_f64() - idle * seconds) / renewals * 1e6,
                used.app_cores() * 100.0,
            );
        }
        // Each heartbeat has said that its lock is held.
        drop(locks);
    })
    .await;
    locks.shutdown().await;
    let _ = database.drop().await;
}
