//! [`read_inventory`]: everything about a node's GPUs, read once.

use std::collections::BTreeMap;

use divvy_model::{
    Gpu, GpuDriver, GpuError, GpuErrorCode, GpuFacts, GpuMig, GpuProblem, HostTopology, Inventory, MigMode,
    PciAddress,
};

use crate::driver::concerns_all;

/// Reads all GPUs. One that does not answer becomes a problem and does not hide the others; one that left between
/// the list and its facts is left out. Fails only where nothing can be said about any GPU.
pub fn read_inventory(
    driver: &dyn GpuDriver,
    topology: &dyn Fn(PciAddress) -> HostTopology,
) -> Result<Inventory, GpuError> {
    read_inventory_after(driver, topology, None)
}

/// [`read_inventory`] with an earlier result. A GPU's MIG profiles do not change while the driver stays the same, and
/// reading them takes longer than everything else, so they are kept; before R550 they are also what is still known after
/// MIG mode went off.
pub fn read_inventory_after(
    driver: &dyn GpuDriver,
    topology: &dyn Fn(PciAddress) -> HostTopology,
    before: Option<&Inventory>,
) -> Result<Inventory, GpuError> {
    let system = driver.system()?;
    let before = before.filter(|before| before.system.driver_version == system.driver_version);
    let mut inventory = Inventory { system, gpus: BTreeMap::new(), problems: Vec::new() };
    for uuid in driver.list()? {
        match driver.facts(&uuid) {
            Ok(mut facts) => {
                let topology = topology(facts.pci_address);
                let known = before.and_then(|before| before.gpus.get(&uuid));
                let mig = mig_of(driver, &facts, known.and_then(|known| known.mig.as_ref()))?;
                if facts.multiprocessors.is_none() && facts.mig_mode.is_on() {
                    let known = known.and_then(|known| known.facts.multiprocessors);
                    facts.multiprocessors = known.or_else(|| mig.as_ref().and_then(most_multiprocessors));
                }
                inventory.gpus.insert(uuid, Gpu { facts, topology, mig });
            }
            Err(error) if concerns_all(error.op, error.code) => return Err(error),
            Err(error) if error.code == GpuErrorCode::NOT_FOUND => {}
            Err(error) => inventory.problems.push(GpuProblem { gpu: uuid, error }),
        }
    }
    Ok(inventory)
}

/// MIG profiles and instances of a GPU. A missing answer is no problem of the GPU: earlier answers still hold, and
/// without one it is offered whole.
fn mig_of(
    driver: &dyn GpuDriver,
    facts: &GpuFacts,
    known: Option<&GpuMig>,
) -> Result<Option<GpuMig>, GpuError> {
    if facts.mig_mode == MigMode::Unsupported {
        return Ok(None);
    }
    let capabilities = match known {
        Some(known) => Some(known.capabilities.clone()),
        None => reported(driver.mig_capabilities(&facts.uuid))?,
    };
    let Some(capabilities) = capabilities else { return Ok(None) };
    let mut mig = GpuMig { capabilities, instances: Vec::new(), uuids: BTreeMap::new() };
    if facts.mig_mode.is_on() {
        match (reported(driver.gpu_instances(&facts.uuid))?, known) {
            (Some(instances), _) => mig.instances = instances,
            (None, Some(known)) => return Ok(Some(known.clone())),
            (None, None) => {}
        }
        for instance in &mig.instances {
            if let Some([one]) = reported(driver.compute_instances(&facts.uuid, instance.id))?.as_deref() {
                mig.uuids.insert(instance.id, one.uuid.clone());
            }
        }
    }
    Ok(Some(mig))
}

/// Those of the largest profile. NVML does not count cores while MIG mode is on, and where nothing was read before that
/// this is the nearest: the same as the whole GPU's on most boards, less on A100 (98 of 108).
fn most_multiprocessors(mig: &GpuMig) -> Option<u32> {
    mig.capabilities.profiles().iter().map(|profile| profile.multiprocessors).max()
}

fn reported<T>(answer: Result<T, GpuError>) -> Result<Option<T>, GpuError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error)
            if concerns_all(error.op, error.code) && error.code != GpuErrorCode::FUNCTION_NOT_FOUND =>
        {
            Err(error)
        }
        Err(error) => {
            tracing::debug!(%error, "failed to read MIG profiles or instances");
            Ok(None)
        }
    }
}
