//! Troubles, and changes that admins make.

use std::time::Duration;

use anyhow::Result;
use divvy_api::names;
use serde_json::{Value, json};

use super::{Day, Dice, Shared};
use crate::case::Env;
use crate::components::Component;
use crate::process::Signal;
use crate::wait::poll;

const POLICIES: &str = "/apis/divvy.dev/v1beta1/gpupolicies";
const POLICY: &str = "soak";
/// Drivers that come one after the other.
const VERSIONS: [&str; 3] = ["580.95.05", "580.105.08", "590.44.01"];
/// Time that a start may take on a busy machine.
const START: Duration = Duration::from_mins(2);

/// Something that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// The plugin is killed.
    Plugin,
    /// The kubelet is killed, and started.
    Kubelet,
    /// The API server is killed, and started after a while.
    ApiServer,
    /// The container runtime is killed, and started.
    Containerd,
    /// The scheduler is killed, and started.
    Scheduler,
    /// GPUs may become something else from now on.
    Policy,
    /// A GPU falls off the bus, and comes back.
    GpuLost,
    /// NVIDIA's driver is unloaded and removed, and another version is installed and loaded.
    DriverReload,
}

impl Trouble {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Plugin,
        Self::Kubelet,
        Self::ApiServer,
        Self::Containerd,
        Self::Scheduler,
        Self::Policy,
        Self::GpuLost,
        Self::DriverReload,
    ];

    /// Returns the name on the command line and in the tally.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plugin => "plugin",
            Self::Kubelet => "kubelet",
            Self::ApiServer => "api-server",
            Self::Containerd => "containerd",
            Self::Scheduler => "scheduler",
            Self::Policy => "policy",
            Self::GpuLost => "gpu-lost",
            Self::DriverReload => "driver-reload",
        }
    }

    /// The one with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|trouble| trouble.name() == name)
    }
}

/// Makes trouble until the day is over; everything runs again afterwards.
pub(super) fn run(shared: &Shared, day: &Day) -> Result<()> {
    let mut dice = Dice(day.seed ^ 0x0074_726f_7562_6c65);
    while !shared.is_over() {
        shared.rest(Duration::from_secs(3 + dice.below(12) as u64));
        let Some(trouble) = dice.one_of(&day.troubles).copied() else {
            continue;
        };
        if shared.is_over() {
            break;
        }
        match make(shared, trouble, &mut dice) {
            Ok(()) => shared.count(format!("trouble: {}", trouble.name())),
            // Trouble on top of trouble: the API server of a policy may be away.
            Err(error) => {
                crate::process::say(&format!("no trouble with {}: {error:#}", trouble.name()));
                shared.count(format!(
                    "trouble that could not be made: {}",
                    trouble.name()
                ));
            }
        }
    }
    for component in [
        Component::ApiServer,
        Component::Containerd,
        Component::Scheduler,
        Component::Kubelet,
    ] {
        shared.env.cluster.component(component).start()?;
    }
    shared.env.cluster.wait_for_api()
}

fn make(shared: &Shared, trouble: Trouble, dice: &mut Dice) -> Result<()> {
    let env = &shared.env;
    let killed = |component: Component, away: u64| {
        let daemon = env.cluster.component(component);
        daemon.stop(Signal::Kill)?;
        shared.rest(Duration::from_secs(away));
        daemon.start()
    };
    match trouble {
        Trouble::Plugin => {
            for pid in env.driver.pids()? {
                env.cluster.send(pid, Signal::Kill)?;
            }
            Ok(())
        }
        Trouble::Kubelet => killed(Component::Kubelet, dice.below(5) as u64),
        Trouble::Containerd => killed(Component::Containerd, dice.below(3) as u64),
        Trouble::Scheduler => killed(Component::Scheduler, dice.below(3) as u64),
        Trouble::ApiServer => {
            killed(Component::ApiServer, dice.below(10) as u64)?;
            env.cluster.wait_for_api()
        }
        Trouble::Policy => set_policy(env, &some_policy(env, dice)),
        Trouble::GpuLost => {
            let all = env.driver.gpus().of_product("");
            let Some(gpu) = dice.one_of(&all) else {
                return Ok(());
            };
            env.driver.gpus().set_lost(gpu, true)?;
            shared.rest(Duration::from_secs(5 + dice.below(10) as u64));
            env.driver.gpus().set_lost(gpu, false)
        }
        Trouble::DriverReload => {
            let version = dice.one_of(&VERSIONS).copied().unwrap_or("580.95.05");
            env.driver.gpus().remove_driver()?;
            shared.rest(Duration::from_secs(2 + dice.below(8) as u64));
            env.driver.gpus().install_driver(version)
        }
    }
}

/// Everything that a GPU can become.
pub(super) fn everything() -> Value {
    json!({"rules": [{"modes": ["Whole", "Mig", "TimeSlicing"]}]})
}

/// Each GPU may become something.
fn some_policy(env: &Env, dice: &mut Dice) -> Value {
    const MODES: [&[&str]; 6] = [
        &["Whole", "Mig", "TimeSlicing"],
        &["Whole", "TimeSlicing"],
        &["Mig", "TimeSlicing"],
        &["Whole", "Mig"],
        &["Whole"],
        &["TimeSlicing"],
    ];
    let rules: Vec<Value> = env
        .driver
        .gpus()
        .of_product("")
        .iter()
        .map(|gpu| json!({"gpus": {"uuids": [gpu]}, "modes": dice.one_of(&MODES)}))
        .collect();
    json!({"rules": rules})
}

/// Lets this policy be the only one.
pub(super) fn set_policy(env: &Env, spec: &Value) -> Result<()> {
    let path = format!("{POLICIES}/{POLICY}");
    let object = json!({
        "apiVersion": names::API_VERSION, "kind": "GpuPolicy", "metadata": {"name": POLICY}, "spec": spec,
    });
    poll("written policy", START, || {
        if env.api().get(&path)?.is_some() {
            env.api().patch(&path, &json!({"spec": spec}))?;
        } else {
            env.api().create(POLICIES, &object)?;
        }
        Ok(true)
    })
}
