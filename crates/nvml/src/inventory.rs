//! [`read_inventory`]: everything about a node's GPUs, read once.

use std::collections::BTreeMap;

use divvy_model::{
    Gpu, GpuDriver, GpuError, GpuErrorCode, GpuFacts, GpuMig, GpuProblem, HostTopology, Inventory,
    MigMode, PciAddress,
};

use crate::driver::concerns_all;

/// Reads all GPUs. A GPU that does not answer becomes a problem and does not hide the others; one
/// that left between the list and its facts is left out. Fails only where nothing can be said about
/// any GPU.
pub fn read_inventory(
    driver: &dyn GpuDriver,
    topology: &dyn Fn(PciAddress) -> HostTopology,
) -> Result<Inventory, GpuError> {
    read_inventory_after(driver, topology, None)
}

/// Reads all GPUs as [`read_inventory`], with an earlier result: a GPU's MIG profiles and its
/// multiprocessors do not change while the driver stays the same, so an answer that is missing now
/// (before R550: after MIG mode went off) takes nothing away from what was known.
pub fn read_inventory_after(
    driver: &dyn GpuDriver,
    topology: &dyn Fn(PciAddress) -> HostTopology,
    before: Option<&Inventory>,
) -> Result<Inventory, GpuError> {
    let system = driver.system()?;
    // Another driver version may report other profiles: nothing of the earlier answer counts.
    let before = before.filter(|before| before.system.driver_version == system.driver_version);
    let mut inventory = Inventory {
        system,
        gpus: BTreeMap::new(),
        problems: Vec::new(),
        with_mig: before.map_or_else(BTreeMap::new, |before| before.with_mig.clone()),
    };
    for uuid in driver.list()? {
        match driver.facts(&uuid) {
            Ok(mut facts) => {
                let topology = topology(facts.pci_address);
                let known = before.and_then(|before| before.gpus.get(&uuid));
                // A GPU that had a MIG mode has one: whether instances live on it is not known, and
                // it must not be offered whole.
                if facts.mig_mode != MigMode::Unsupported {
                    inventory.with_mig.insert(uuid.clone(), facts.mig_mode);
                } else if let Some(last) = inventory.with_mig.get(&uuid) {
                    facts.mig_mode = *last;
                }
                // A failure of MIG calls ends the reading only if it concerns all of NVML; see
                // `reported`.
                let mig = mig_of(driver, &facts, known)?;
                if facts.multiprocessors.is_none() {
                    let known = known.and_then(|known| known.facts.multiprocessors);
                    let cut = mig.as_ref().filter(|_| facts.mig_mode.is_on());
                    // The larger: the count of an earlier answer that lacked the largest profile
                    // is too small, and that of the profiles never exceeds the GPU's.
                    facts.multiprocessors = known.max(cut.and_then(most_multiprocessors));
                }
                inventory.gpus.insert(
                    uuid,
                    Gpu {
                        facts,
                        topology,
                        mig,
                    },
                );
            }
            Err(error) if concerns_all(error.op, error.code) => return Err(error),
            // It left between the list and this question.
            Err(error) if error.code == GpuErrorCode::NOT_FOUND => {}
            Err(error) => inventory.problems.push(GpuProblem { gpu: uuid, error }),
        }
    }
    Ok(inventory)
}

/// Reads the MIG profiles and instances of a GPU. A missing answer is no problem of the GPU:
/// earlier answers still hold. `None` where the profiles were never reported.
fn mig_of(
    driver: &dyn GpuDriver,
    facts: &GpuFacts,
    known: Option<&Gpu>,
) -> Result<Option<GpuMig>, GpuError> {
    if facts.mig_mode == MigMode::Unsupported {
        return Ok(None);
    }
    // Instances end when MIG mode goes off, so an earlier list counts only if the mode was on then
    // too.
    let was_on = known.is_some_and(|known| known.facts.mig_mode.is_on());
    let known = known.and_then(|known| known.mig.as_ref());
    let answer = reported(driver.mig_capabilities(&facts.uuid))?;
    let capabilities = match (answer, known) {
        (Some(answer), Some(known)) => answer.with_those_of(&known.capabilities),
        (Some(answer), None) => answer,
        (None, Some(known)) => known.capabilities.clone(),
        (None, None) => return Ok(None),
    };
    let mut mig = GpuMig {
        capabilities,
        instances: Some(Vec::new()),
        uuids: BTreeMap::new(),
    };
    if facts.mig_mode.is_on() {
        let Some(instances) = reported(driver.gpu_instances(&facts.uuid))? else {
            // Never "none lives": what was known of this mode, or unknown.
            (mig.instances, mig.uuids) = match known.filter(|_| was_on) {
                Some(known) => (known.instances.clone(), known.uuids.clone()),
                None => (None, BTreeMap::new()),
            };
            return Ok(Some(mig));
        };
        for instance in &instances {
            // Only a partition that has one compute instance is a device: its UUID is that of the
            // compute instance.
            if let Some([one]) =
                reported(driver.compute_instances(&facts.uuid, instance.id))?.as_deref()
            {
                mig.uuids.insert(instance.id, one.uuid.clone());
            }
        }
        mig.instances = Some(instances);
    }
    Ok(Some(mig))
}

/// Counts the multiprocessors of the profile that takes the whole GPU, if there is one. NVML does
/// not count cores while MIG mode is on, and where nothing was read before that this is the
/// nearest: the same as the whole GPU's on most boards, less on A100 (98 of 108).
fn most_multiprocessors(mig: &GpuMig) -> Option<u32> {
    mig.capabilities
        .whole()
        .map(|profile| profile.multiprocessors)
}

/// Separates answers from errors: `None` where only this question has no answer.
fn reported<T>(answer: Result<T, GpuError>) -> Result<Option<T>, GpuError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error)
            if concerns_all(error.op, error.code)
                && error.code != GpuErrorCode::FUNCTION_NOT_FOUND =>
        {
            Err(error)
        }
        Err(error) => {
            tracing::debug!(%error, "failed to read MIG profiles or instances");
            Ok(None)
        }
    }
}
