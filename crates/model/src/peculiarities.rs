//! Things that are odd or lacking about a driver and do no harm: a note where `divvy-conformance`
//! would be an alarm.

use crate::health::RecoveryAction;
use crate::{Architecture, GpuDriver, GpuFacts, MigMode};

/// Peculiarities of a driver, and values that it does not report: as sentences, in a stable order.
/// GPUs that do not answer have none.
pub fn peculiarities(driver: &dyn GpuDriver) -> Vec<String> {
    let mut found = Vec::new();
    if let Ok(system) = driver.system() {
        match &system.nvml_version {
            Some(nvml) if nvml.ends_with(&system.driver_version) => {}
            Some(nvml) => {
                found.push(format!(
                    "NVML is {nvml}, of another version than driver {}",
                    system.driver_version
                ));
            }
            None => found.push("the version of NVML is not reported".to_owned()),
        }
        if system.cuda_version.is_none() {
            found.push("the version of CUDA is not reported".to_owned());
        }
    }
    let uuids = driver.list().unwrap_or_default();
    let facts: Vec<GpuFacts> = uuids
        .iter()
        .filter_map(|uuid| driver.facts(uuid).ok())
        .collect();
    if !facts.is_sorted_by_key(|f| f.pci_address) {
        found.push("GPUs are not listed in order of PCI address".to_owned());
    }
    for f in &facts {
        let missing = missing(driver, f);
        if !missing.is_empty() {
            found.push(format!("{}: not reported: {}", f.uuid, missing.join(", ")));
        }
        if let Ok(Some(RecoveryAction::Unknown(number))) =
            driver.vitals(&f.uuid).map(|v| v.recovery)
        {
            found.push(format!(
                "{}: recovery action {number} is not known here",
                f.uuid
            ));
        }
    }
    found
}

fn missing(driver: &dyn GpuDriver, f: &GpuFacts) -> Vec<&'static str> {
    // A failed reading counts as one that reports nothing: this is a note, not a check.
    let vitals = driver.vitals(&f.uuid).unwrap_or_default();
    let able = f.mig_mode != MigMode::Unsupported;
    let questions = [
        (f.minor.is_none(), "minor number"),
        (
            matches!(f.architecture, Architecture::Unknown(_)),
            "architecture",
        ),
        (f.memory_bytes.is_none(), "memory"),
        (f.multiprocessors.is_none(), "multiprocessors"),
        (f.compute_mode.is_none(), "compute mode"),
        (f.addressing_mode.is_none(), "addressing mode"),
        (f.module_id.is_none(), "module id"),
        (
            able && driver.mig_capabilities(&f.uuid).is_err(),
            "MIG profiles",
        ),
        (vitals.recovery.is_none(), "recovery action"),
        (vitals.remap.is_none(), "remapped memory"),
        (vitals.uncorrected_ecc.is_none(), "ECC errors"),
        (driver.processes(&f.uuid).is_err(), "processes"),
    ];
    questions
        .into_iter()
        .filter_map(|(is_missing, what)| is_missing.then_some(what))
        .collect()
}
