//! A machine's outputs about simulated GPUs, for tests.
use std::path::Path;

use divvy_gpu_sim::SimNode;
use divvy_model::{Gpu, Inventory, MigMode};

/// Returns divvy's readings of them.
pub(crate) fn inventory(spec: &str) -> Inventory {
    SimNode::parse(spec).unwrap().inventory()
}

/// Returns the output of `nvidia-smi -q -x` about them (the elements, their order and their forms
/// are those of R580).
pub(crate) fn xml(inventory: &Inventory) -> String {
    let known = |value: Option<String>| value.unwrap_or_else(|| "N/A".to_owned());
    let on = |on: bool| if on { "Enabled" } else { "Disabled" }.to_owned();
    let gpu = |gpu: &Gpu| {
        let facts = &gpu.facts;
        let mig = match facts.mig_mode {
            MigMode::Unsupported => None,
            MigMode::Supported { current, .. } => Some(on(current)),
        };
        let (mig, bus) = (known(mig), facts.pci_address.to_string().to_uppercase());
        format!(
            "<gpu id=\"0000{bus}\">\n<product_name>{}</product_name>\n<addressing_mode>{}</addressing_mode>\n\
             <mig_mode>\n<current_mig>{mig}</current_mig>\n<pending_mig>{mig}</pending_mig>\n</mig_mode>\n\
             <mig_devices>None</mig_devices>\n<uuid>{}</uuid>\n<minor_number>{}</minor_number>\n\
             <c2c_mode>{}</c2c_mode>\n<pci>\n<pci_bus>{:02X}</pci_bus>\n<pci_device_id>{:08X}</pci_device_id>\n\
             <pci_bus_id>0000{bus}</pci_bus_id>\n</pci>\n<fb_memory_usage>\n<total>{}</total>\n<used>4 MiB</used>\n\
             </fb_memory_usage>\n<compute_mode>Default</compute_mode>\n<processes>\n</processes>\n</gpu>\n",
            facts.product_name,
            known(facts.addressing_mode.clone()),
            facts.uuid,
            known(facts.minor.map(|minor| minor.to_string())),
            known(facts.c2c.map(on)),
            facts.pci_address.bus,
            facts.pci_device_id,
            known(
                facts
                    .memory_bytes
                    .map(|bytes| format!("{} MiB", bytes >> 20))
            ),
        )
    };
    let gpus: String = inventory.gpus.values().map(gpu).collect();
    format!(
        "<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">\n<nvidia_smi_log>\n\
         <driver_version>{}</driver_version>\n<cuda_version>{}</cuda_version>\n\
         <attached_gpus>{}</attached_gpus>\n{gpus}</nvidia_smi_log>\n",
        inventory.system.driver_version,
        inventory.system.cuda_version.unwrap(),
        inventory.gpus.len(),
    )
}

/// Writes the files that the kernel and its module would have about them.
pub(crate) fn kernel_files(host: &Path, inventory: &Inventory) {
    for (uuid, gpu) in &inventory.gpus {
        let (facts, pci) = (&gpu.facts, gpu.facts.pci_address.to_string());
        let device = host.join("sys/bus/pci/devices").join(&pci);
        fs_err::create_dir_all(&device).unwrap();
        fs_err::write(
            device.join("vendor"),
            format!("{:#06x}\n", facts.pci_device_id & 0xffff),
        )
        .unwrap();
        fs_err::write(
            device.join("device"),
            format!("{:#06x}\n", facts.pci_device_id >> 16),
        )
        .unwrap();
        let folder = host.join("proc/driver/nvidia/gpus").join(&pci);
        fs_err::create_dir_all(&folder).unwrap();
        let minor = facts.minor.unwrap();
        let text = format!(
            "Model: \t\t {}\nIRQ:   \t\t 120\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\nBus Location: \t {pci}\nDevice Minor: \t {minor}\n",
            facts.product_name
        );
        fs_err::write(folder.join("information"), text).unwrap();
    }
}
