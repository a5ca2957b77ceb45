//! Decides which GPUs have users outside of divvy, from the kubelet's answer, other drivers'
//! objects and NVML.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{GpuUuid, Inventory};
use divvy_offer::Use;

/// A device that another driver or a device plugin has allocated to a pod or a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GivenOut {
    /// The giver.
    pub(crate) by: Giver,
    /// To whom: a pod or a claim, as `pod namespace/name`.
    pub(crate) to: String,
    /// The device, as the giver calls it.
    pub(crate) device: String,
}

impl GivenOut {
    /// The device, if it is another driver's.
    pub(crate) fn driver_device(&self) -> Option<DriverDevice> {
        match &self.by {
            Giver::DevicePlugin(_) => None,
            Giver::Driver { name, pool } => Some((name.clone(), pool.clone(), self.device.clone())),
        }
    }
}

/// A giver of devices outside of divvy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Giver {
    /// A device plugin, under this resource name.
    DevicePlugin(String),
    /// Another DRA driver, in this pool.
    Driver { name: String, pool: String },
}

/// The GPU behind a device of another driver: driver, pool and device name.
pub(crate) type DriverDevice = (String, String, String);

/// The input of [`decide`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Observations<'a> {
    /// The node's GPUs.
    pub(crate) inventory: &'a Inventory,
    /// Devices that others have given out.
    pub(crate) given: &'a BTreeSet<GivenOut>,
    /// The GPUs behind devices of other drivers.
    pub(crate) devices: &'a BTreeMap<DriverDevice, GpuUuid>,
    /// Our pool. A driver of another name that has it is divvy, too.
    pub(crate) pool: &'a str,
    /// Driver and pool of NVIDIA's plugin on this node, where we stand in for it.
    pub(crate) nvidias: Option<(&'a str, &'a str)>,
    /// Processes that compute on GPUs now.
    pub(crate) processes: &'a BTreeMap<GpuUuid, BTreeSet<u32>>,
    /// The same a while ago: a process of a claim that was released between two polls belongs to no
    /// claim for a moment.
    pub(crate) before: &'a BTreeMap<GpuUuid, BTreeSet<u32>>,
    /// GPUs that claims of ours hold, as of after the processes were read; lingering ones too.
    pub(crate) held: &'a BTreeSet<GpuUuid>,
}

/// Decides. GPUs without such a use are left out.
pub(crate) fn decide(around: &Observations<'_>) -> BTreeMap<GpuUuid, BTreeSet<Use>> {
    let mut uses = BTreeMap::<GpuUuid, BTreeSet<Use>>::new();
    // A pod has a driver's device by a claim: one user, of which the pod says more.
    let is_said_by_a_pod = |claim: &GivenOut| {
        let of_pod = |other: &GivenOut| {
            (&other.by, &other.device) == (&claim.by, &claim.device) && other.to.starts_with("pod ")
        };
        claim.to.starts_with("claim ") && around.given.iter().any(of_pod)
    };
    for given in around.given.iter().filter(|given| !is_said_by_a_pod(given)) {
        let to = given.to.clone();
        let found = match &given.by {
            Giver::DevicePlugin(resource) => {
                plugin_device(around.inventory, resource, &given.device).map(|gpu| {
                    (
                        gpu,
                        Use::DevicePlugin {
                            resource: resource.clone(),
                            to,
                        },
                    )
                })
            }
            Giver::Driver { name, pool } => given
                .driver_device()
                .and_then(|device| around.devices.get(&device))
                .map(|gpu| {
                    let by_nvidia = around.nvidias == Some((name, pool));
                    let name = name.clone();
                    let given = if by_nvidia {
                        Use::NvidiaPlugin { to }
                    } else if pool == around.pool {
                        Use::OtherName { name, to }
                    } else {
                        Use::Driver { name, to }
                    };
                    (gpu.clone(), given)
                }),
        };
        if let Some((gpu, used)) = found {
            uses.entry(gpu).or_default().insert(used);
        }
    }
    // Processes count only if they were there at the last look too: those of a claim that has just
    // been released, or is about to be recorded, are gone or held by then.
    for (gpu, now) in around
        .processes
        .iter()
        .filter(|(gpu, _)| !around.held.contains(*gpu))
    {
        let lasting = around
            .before
            .get(gpu)
            .map(|before| now.intersection(before).copied().collect());
        let pids: Vec<u32> = lasting.unwrap_or_default();
        if !pids.is_empty() && around.inventory.gpus.contains_key(gpu) {
            uses.entry(gpu.clone())
                .or_default()
                .insert(Use::Processes { pids });
        }
    }
    uses
}

/// Resources of NVIDIA's device plugin.
const NVIDIA: &str = "nvidia.com/";

/// The GPU behind a device plugin's device id: a UUID or NVML's index, with a number after `::`
/// where the plugin lets several share it. MIG devices are not looked for: they are foreign
/// instances, and reported as such.
fn plugin_device(inventory: &Inventory, resource: &str, id: &str) -> Option<GpuUuid> {
    let id = id.split("::").next().unwrap_or(id);
    // Other plugins number their devices 0, 1, 2, too.
    if let Some(index) = id
        .parse::<usize>()
        .ok()
        .filter(|_| resource.starts_with(NVIDIA))
    {
        // NVML counts by PCI address.
        let mut all: Vec<_> = inventory
            .gpus
            .iter()
            .map(|(uuid, gpu)| (gpu.facts.pci_address, uuid))
            .collect();
        all.sort();
        return all.get(index).map(|(_, uuid)| (*uuid).clone());
    }
    inventory
        .gpus
        .keys()
        .find(|uuid| uuid.as_str() == id)
        .cloned()
}

/// Returns the GPU behind a device name of NVIDIA's DRA driver: `gpu-<minor>`, or a partition of
/// it, `gpu-<minor>-mig-…`. The minor number is that of `/dev/nvidia<minor>`.
pub(crate) fn by_minor(device: &str, inventory: &Inventory) -> Option<GpuUuid> {
    let rest = device.strip_prefix("gpu-")?;
    let number = rest.split_once("-mig-").map_or(rest, |(number, _)| number);
    let minor: u32 = number.parse().ok()?;
    let mut gpus = inventory.gpus.iter();
    let (uuid, _) = gpus.find(|(_, gpu)| gpu.facts.minor == Some(minor))?;
    Some(uuid.clone())
}

#[cfg(test)]
mod tests;
