//! The assertions every [`GpuDriver`] must pass: run on the simulator, on the mock library through NVML's C ABI,
//! and on real hardware. Read only towards the GPU.

use crate::{GpuDriver, GpuErrorCode, GpuUuid, MigMode, NvLinkPeer};

/// What is known beforehand about the GPUs behind a driver. Leave out what is not known (real hardware).
#[derive(Debug, Clone, Default)]
pub struct Expect {
    /// Exact number of GPUs.
    pub gpus: Option<usize>,
    /// Exact driver version text.
    pub driver_version: Option<String>,
    /// Exact product name of every GPU, in NVML's order.
    pub product_names: Option<Vec<String>>,
}

/// A broken assertion, as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation(pub String);

/// Checks a driver against the contract of [`GpuDriver`] and against `expect`; returns all violations.
pub fn conformance(driver: &dyn GpuDriver, expect: &Expect) -> Vec<Violation> {
    let mut bad = Vec::new();
    let mut check = |ok: bool, what: String| {
        if !ok {
            bad.push(Violation(what));
        }
    };
    match driver.system() {
        Ok(system) => {
            check(
                crate::normalise_version(&system.driver_version).is_some(),
                format!("driver version {:?} can be normalised", system.driver_version),
            );
            check(
                system.nvml_version.ends_with(&system.driver_version),
                format!(
                    "NVML version {:?} ends in driver version {:?}",
                    system.nvml_version, system.driver_version
                ),
            );
            check(
                system.cuda_version.major >= 9,
                format!("CUDA version {} is plausible", system.cuda_version),
            );
            if let Some(expected) = &expect.driver_version {
                check(
                    system.driver_version == *expected,
                    format!("driver version is {expected}, got {}", system.driver_version),
                );
            }
        }
        Err(error) => check(false, format!("system() answers: {error}")),
    }
    let uuids = match driver.list() {
        Ok(uuids) => uuids,
        Err(error) => {
            check(false, format!("list() answers: {error}"));
            return bad;
        }
    };
    check(driver.list().as_ref() == Ok(&uuids), "list() is stable".to_owned());
    if let Some(count) = expect.gpus {
        check(uuids.len() == count, format!("list() has {count} GPUs, got {}", uuids.len()));
    }
    let mut facts = Vec::new();
    let mut about_mig = Vec::new();
    for uuid in &uuids {
        match driver.facts(uuid) {
            Ok(f) => facts.push(f),
            Err(error) => check(false, format!("facts() answers: {error}")),
        }
        if let Err(error) = driver.processes(uuid) {
            check(false, format!("processes() answers: {error}"));
        }
    }
    for f in &facts {
        check(uuids.contains(&f.uuid), format!("{}: facts carry the UUID that was asked for", f.uuid));
        check(!f.product_name.is_empty(), format!("{}: has a name", f.uuid));
        check(
            f.pci_device_id & 0xffff == 0x10de,
            format!("{}: PCI vendor is NVIDIA, got {:#x}", f.uuid, f.pci_device_id),
        );
        check(f.memory_bytes != Some(0), format!("{}: memory is unknown or more than nothing", f.uuid));
        check(
            f.compute_capability.major >= 3,
            format!("{}: compute capability {} is plausible", f.uuid, f.compute_capability),
        );
        check(f.nvlinks.is_sorted(), format!("{}: NVLinks are sorted", f.uuid));
        check(
            !f.nvlinks.contains(&NvLinkPeer::Gpu(f.pci_address)),
            format!("{}: no NVLink to itself", f.uuid),
        );
        match driver.mig_mode(&f.uuid) {
            Ok(mode) => {
                check(mode == f.mig_mode, format!("{}: mig_mode() and facts() agree", f.uuid));
                if let MigMode::Supported { .. } = mode {
                    check(
                        f.compute_capability.major >= 8,
                        format!("{}: MIG needs compute capability 8, has {}", f.uuid, f.compute_capability),
                    );
                }
                about_mig.extend(crate::mig_conformance::read_only(driver, &f.uuid, mode));
            }
            Err(error) => check(false, format!("mig_mode() answers: {error}")),
        }
    }
    for f in &facts {
        match driver.vitals(&f.uuid) {
            Ok(vitals) => check(
                !matches!(vitals.recovery, Some(crate::health::RecoveryAction::Unknown(_))),
                format!("{}: the recovery action is a known one, got {:?}", f.uuid, vitals.recovery),
            ),
            Err(error) => check(
                error.code == GpuErrorCode::NOT_SUPPORTED,
                format!("vitals() answers, or is not supported: {error}"),
            ),
        }
    }
    for wait in [0, 10] {
        match driver.wait_events(std::time::Duration::from_millis(wait)) {
            Ok(events) => {
                let named = events.events.iter().filter_map(|event| event.gpu.as_ref());
                let strange: Vec<_> =
                    named.chain(events.unmonitored.keys()).filter(|gpu| !uuids.contains(gpu)).collect();
                check(strange.is_empty(), format!("events are of GPUs that are there, got {strange:?}"));
            }
            Err(error) => check(
                matches!(error.code, GpuErrorCode::NOT_SUPPORTED | GpuErrorCode::FUNCTION_NOT_FOUND),
                format!("wait_events() answers, or is not supported: {error}"),
            ),
        }
    }
    let mut seen = facts.iter().map(|f| f.pci_address).collect::<Vec<_>>();
    check(seen.is_sorted(), "list() is in order of PCI address".to_owned());
    seen.dedup();
    check(seen.len() == facts.len(), "PCI addresses are unique".to_owned());
    let mut minors: Vec<_> = facts.iter().filter_map(|f| f.minor).collect();
    let with_minor = minors.len();
    minors.sort_unstable();
    minors.dedup();
    check(minors.len() == with_minor, "minor numbers are unique".to_owned());
    if let Some(names) = &expect.product_names {
        let got: Vec<_> = facts.iter().map(|f| f.product_name.clone()).collect();
        check(got == *names, format!("product names are {names:?}, got {got:?}"));
    }
    #[expect(clippy::expect_used, reason = "a constant in the right form; tested")]
    let nobody: GpuUuid = "GPU-00000000-0000-0000-0000-000000000000".parse().expect("a GPU UUID");
    match driver.facts(&nobody) {
        Err(error) => {
            let known =
                [GpuErrorCode::NOT_FOUND, GpuErrorCode::INVALID_ARGUMENT, GpuErrorCode::GPU_NOT_FOUND];
            check(
                known.contains(&error.code),
                format!("facts() of a GPU that is not there says so, got {error}"),
            );
        }
        Ok(_) => check(false, "facts() of a GPU that is not there is an error".to_owned()),
    }
    check(driver.vitals(&nobody).is_err(), "vitals() of a GPU that is not there is an error".to_owned());
    bad.extend(about_mig);
    bad
}
