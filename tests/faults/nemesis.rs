//! The faults. Each is certain to take effect, and is healed again.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;
use mongodb::bson::doc;
use tokio::time::sleep;

use crate::application::Role;
use crate::fleet::Fleet;
use crate::rig::proxy::Proxy;
use crate::rig::replica_set::ReplicaSet;
use crate::ways::{Break, From};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// The primary crashes, and comes back as a secondary.
    KillPrimary,
    StepDown,
    /// The primary is paused, replaced, and resumes as if nothing had happened.
    PausePrimary,
    /// The primary acknowledges writes that never reach another member, and then crashes.
    LagAndKill,
    LoseMajority,
    /// An application server is paused for longer than the ttl of its locks.
    PauseApplication,
    /// An application server crashes, and another one is started.
    KillApplication,
    /// An application server can no longer reach the primary, or any member at all.
    CutApplicationOff,
}

pub(crate) const ALL: [Fault; 8] = [
    Fault::CutApplicationOff,
    Fault::PauseApplication,
    Fault::KillPrimary,
    Fault::KillApplication,
    Fault::StepDown,
    Fault::PausePrimary,
    Fault::LoseMajority,
    Fault::LagAndKill,
];

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KillPrimary => "primary killed",
            Self::StepDown => "primary stepped down",
            Self::PausePrimary => "primary paused and replaced",
            Self::LagAndKill => "replication stopped, then primary killed",
            Self::LoseMajority => "majority lost and back",
            Self::PauseApplication => "application server paused beyond the ttl",
            Self::KillApplication => "application server killed",
            Self::CutApplicationOff => "application server cut off from the database",
        })
    }
}

/// Injects a fault and heals it. If the fault is to change the primary, there is a new primary by then.
pub(crate) async fn inject(
    fault: Fault,
    set: &ReplicaSet,
    fleet: &mut Fleet,
    load: impl Fn(u64) -> Role,
    rng: &mut Rng,
) {
    fleet.say(&fault.to_string());
    match fault {
        Fault::StepDown => set.step_down().await,
        Fault::KillPrimary => {
            let primary = set.primary().await;
            set.members()[primary].kill9();
            set.another_than(primary).await;
            set.members()[primary].restart_member().await;
        }
        Fault::PausePrimary => {
            let primary = set.primary().await;
            set.members()[primary].pause();
            set.another_than(primary).await;
            sleep(Duration::from_millis(rng.u64(..1_000))).await;
            set.members()[primary].resume();
        }
        Fault::LagAndKill => {
            let primary = set.primary().await;
            stop_replication(set, primary, true).await;
            sleep(Duration::from_millis(rng.u64(300..1_500))).await;
            set.members()[primary].kill9();
            stop_replication(set, primary, false).await;
            set.another_than(primary).await;
            set.members()[primary].restart_member().await;
        }
        Fault::LoseMajority => {
            let primary = set.primary().await;
            let others = || (0..3).filter(|&n| n != primary).map(|n| &set.members()[n]);
            others().for_each(|member| member.pause());
            sleep(Duration::from_millis(rng.u64(1_500..3_000))).await;
            others().for_each(|member| member.resume());
        }
        Fault::PauseApplication => {
            let number = rng.usize(..fleet.applications.len());
            fleet.applications[number].child.pause();
            let more = Duration::from_millis(rng.u64(100..1_000));
            sleep(fleet.settings().ttl + more).await;
            fleet.applications[number].child.resume();
        }
        Fault::KillApplication => {
            let number = rng.usize(..fleet.applications.len());
            fleet.applications[number].child.kill9();
            fleet.replace(number, load(rng.u64(..))).await;
        }
        Fault::CutApplicationOff => {
            let number = rng.usize(..fleet.applications.len());
            let from = if rng.bool() { From::Primary } else { From::Everything };
            let cut: Break = if rng.bool() { Proxy::blackhole } else { Proxy::cut };
            let primary = set.primary().await;
            let ways = fleet.applications[number].ways.as_ref().expect("ways of its own");
            ways.cut_from(from, primary, cut);
            let ttl = u64::try_from(fleet.settings().ttl.as_millis()).expect("a short ttl");
            sleep(Duration::from_millis(rng.u64(100..2 * ttl))).await;
            ways.heal();
        }
    }
    set.until_complete().await;
    fleet.say("healed");
}

/// Stops or resumes replication from this member to all others.
pub(crate) async fn stop_replication(set: &ReplicaSet, primary: usize, stop: bool) {
    let mode = if stop { "alwaysOn" } else { "off" };
    for (n, member) in set.members().iter().enumerate() {
        if n != primary {
            member.admin(doc! { "configureFailPoint": "stopReplProducer", "mode": mode }).await;
        }
    }
}
