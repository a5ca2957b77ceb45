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
    let system = driver.system()?;
    let mut inventory = Inventory { system, gpus: BTreeMap::new(), problems: Vec::new() };
    for uuid in driver.list()? {
        match driver.facts(&uuid) {
            Ok(facts) => {
                let topology = topology(facts.pci_address);
                let mig = mig_of(driver, &facts);
                inventory.gpus.insert(uuid, Gpu { facts, topology, mig });
            }
            Err(error) if concerns_all(error.code) => return Err(error),
            Err(error) if error.code == GpuErrorCode::NOT_FOUND => {}
            Err(error) => inventory.problems.push(GpuProblem { gpu: uuid, error }),
        }
    }
    Ok(inventory)
}

/// What a GPU can be cut into, and is. Not being told is no problem of the GPU: it is offered whole.
fn mig_of(driver: &dyn GpuDriver, facts: &GpuFacts) -> Option<GpuMig> {
    if facts.mig_mode == MigMode::Unsupported {
        return None;
    }
    let unknown = |error: GpuError| {
        tracing::debug!(%error, "MIG cannot be told");
        error
    };
    let capabilities = driver.mig_capabilities(&facts.uuid).map_err(unknown).ok()?;
    let instances = if facts.mig_mode.is_on() {
        driver.gpu_instances(&facts.uuid).map_err(unknown).ok()?
    } else {
        Vec::new()
    };
    Some(GpuMig { capabilities, instances })
}
