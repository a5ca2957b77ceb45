//! [`read_inventory`]: everything about a node's GPUs, read once.

use std::collections::BTreeMap;

use divvy_model::{Gpu, GpuDriver, GpuError, GpuErrorCode, GpuProblem, HostTopology, Inventory, PciAddress};

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
                inventory.gpus.insert(uuid, Gpu { facts, topology });
            }
            Err(error) if concerns_all(error.code) => return Err(error),
            Err(error) if error.code == GpuErrorCode::NOT_FOUND => {}
            Err(error) => inventory.problems.push(GpuProblem { gpu: uuid, error }),
        }
    }
    Ok(inventory)
}
