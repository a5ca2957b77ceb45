//! A day in fast motion: pods of every kind come and go, while everything that can be killed is
//! killed and policies change. At the end nothing may be left of any of them: no record, no CDI
//! file, no partition, no pod that waits and does not say why.
//!
//! `cargo xtask soak day` runs it. [`load`] makes and ends pods, [`trouble`] kills and changes,
//! [`watch`] looks for GPUs with two holders; each on its thread.

mod load;
mod tally;
mod trouble;
mod watch;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use serde_json::json;

pub use tally::Tally;
pub use trouble::Trouble;
pub(crate) use watch::contradictions_until;

use crate::api::at;
use crate::case::Env;
use crate::cluster::Cluster;
use crate::driver::Driver;
use crate::wait::{poll, wait_for};

/// The node's GPUs.
pub const GPUS: &str = "h100x4,l4x2";
const NAMESPACE: &str = "soak";
/// Time that the end may take, with everything running again.
const END: Duration = Duration::from_mins(5);

/// Settings of a day.
#[derive(Debug, Clone)]
pub struct Day {
    pub length: Duration,
    /// Decides what happens; not in which order the cluster does it.
    pub seed: u64,
    /// Troubles that may happen.
    pub troubles: Vec<Trouble>,
    /// Number of pods, about.
    pub pods: usize,
}

/// State that all threads share.
struct Shared<'a> {
    env: Env<'a>,
    over: AtomicBool,
    tally: Mutex<Tally>,
}

impl Shared<'_> {
    fn count(&self, what: impl Into<String>) {
        if let Ok(mut tally) = self.tally.lock() {
            tally.count(what);
        }
    }

    /// Something that must not be.
    fn wrong(&self, what: String) {
        crate::process::say(&format!("WRONG: {what}"));
        if let Ok(mut tally) = self.tally.lock() {
            tally.wrong.push(what);
        }
    }

    /// Progress for the person who waits.
    fn report(&self, minute: u64) {
        let wrong = self.tally.lock().map_or(0, |tally| tally.wrong.len());
        crate::process::say(&format!("minute {minute}: {wrong} things were wrong"));
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Waits so long, or until the day is over.
    fn rest(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.is_over() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(100).min(time));
        }
    }
}

/// Lives through a day and says what happened.
pub fn run(cluster: &Cluster, driver: &Driver, day: &Day) -> Result<Tally> {
    let env = Env {
        cluster,
        driver,
        namespace: NAMESPACE.to_owned(),
    };
    prepare(&env)?;
    let shared = Shared {
        env,
        over: AtomicBool::new(false),
        tally: Mutex::default(),
    };
    let left = std::thread::scope(|scope| {
        let load = scope.spawn(|| load::run(&shared, day));
        let troubles = scope.spawn(|| trouble::run(&shared, day));
        let watch = scope.spawn(|| watch::run(&shared));
        let (begin, mut reported) = (Instant::now(), 0);
        while begin.elapsed() < day.length && cluster.is_up() {
            std::thread::sleep(Duration::from_secs(1));
            let minute = begin.elapsed().as_secs() / 60;
            if minute > reported {
                reported = minute;
                shared.report(minute);
            }
        }
        shared.over.store(true, Ordering::Relaxed);
        let died = |_| anyhow::anyhow!("a thread of the test panicked");
        let left = load.join().map_err(died)?;
        troubles.join().map_err(died)??;
        watch.join().map_err(died)?;
        Ok::<_, anyhow::Error>(left)
    })?;
    let ended = evening(&shared, &left);
    if let Err(error) = ended {
        shared.wrong(format!("{error:#}"));
    }
    Ok(shared
        .tally
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// A namespace, and everything allowed.
fn prepare(env: &Env) -> Result<()> {
    // Admin access is for namespaces that say so.
    let labels = json!({"resource.kubernetes.io/admin-access": "true"});
    let object = json!({"metadata": {"name": env.namespace, "labels": labels}});
    env.api().create("/api/v1/namespaces", &object)?;
    let account = format!(
        "/api/v1/namespaces/{}/serviceaccounts/default",
        env.namespace
    );
    wait_for("default ServiceAccount of the namespace", END, || {
        env.api().get(&account)
    })?;
    trouble::set_policy(env, &trouble::everything())
}

/// Everything runs, everything is allowed, all pods end: what is left then is a leak.
fn evening(shared: &Shared, left: &load::Live) -> Result<()> {
    let env = &shared.env;
    trouble::set_policy(env, &trouble::everything())?;
    env.driver.wait_until_ready()?;
    left.end_all(shared)?;
    poll("end of all records of claims", END, || {
        Ok(watch::records(env)?.is_empty())
    })
    .with_context(|| {
        let left: Vec<String> = watch::records(env)
            .unwrap_or_default()
            .iter()
            .map(ToString::to_string)
            .collect();
        format!("left: {}", left.join("; "))
    })?;
    poll("end of all partitions", END, || {
        let all = env.driver.gpus().of_product("");
        all.iter().try_fold(true, |none, gpu| {
            Ok(none && env.driver.gpus().instances(gpu)?.is_empty())
        })
    })?;
    let cdi = fs_err::read_dir(env.cluster.node_path("/run/cdi"))?.count();
    ensure!(cdi == 0, "{cdi} CDI files are left");
    poll("untainted devices of all GPUs", END, || {
        let devices = env.driver.devices()?;
        let free =
            |device: &&serde_json::Value| at(device, "taints").as_array().is_none_or(Vec::is_empty);
        let whole = devices
            .iter()
            .filter(|device| at(device, "attributes.type.string") == "gpu");
        Ok(whole.filter(free).count() == env.driver.gpus().count())
    })?;
    // And it all still works.
    for kind in load::Kind::ALL {
        load::tomorrow(env, kind).with_context(|| format!("after the day, {}", kind.name()))?;
        shared.count(format!("the day after: {} runs and ends", kind.name()));
    }
    let slices = env.driver.slices()?;
    let drivers: Vec<_> = slices
        .iter()
        .map(|slice| at(slice, "spec.driver"))
        .collect();
    ensure!(
        drivers.iter().all(|driver| **driver == names::DRIVER),
        "slices of {drivers:?}"
    );
    Ok(())
}

/// Numbers that look random and are the same for the same seed (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.roll() % n.max(1) as u64).unwrap_or(0)
    }

    fn one_of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.below(all.len()))
    }
}
