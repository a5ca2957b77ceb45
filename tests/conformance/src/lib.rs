//! The assertions every [`GpuDriver`] must pass: run on the simulator, on the mock library through
//! NVML's C ABI, and on real hardware. Read only towards the GPU.

mod mig;
mod usage;

use std::collections::BTreeSet;

use divvy_model::{GpuDriver, GpuErrorCode, GpuFacts, GpuUuid, MigMode, NvLinkPeer};

pub use mig::mig_conformance;

/// Facts known beforehand about the GPUs behind a driver. Leave out what is not known (real
/// hardware).
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

/// Checks a driver against the contract of [`GpuDriver`] and against `expect`; returns all
/// violations. Peculiarities that drivers may have are none: see [`divvy_model::peculiarities`].
pub fn conformance(driver: &dyn GpuDriver, expect: &Expect) -> Vec<Violation> {
    let mut checks = Checks::default();
    checks.system(driver, expect);
    let uuids = match driver.list() {
        Ok(uuids) => uuids,
        Err(error) => {
            checks.check(false, || format!("list() answers: {error}"));
            return checks.0;
        }
    };
    let facts = checks.answers(driver, expect, &uuids);
    for f in &facts {
        checks.facts(f, &uuids);
        checks.mig(driver, f);
    }
    for f in &facts {
        checks.vitals(driver, f);
        checks.0.extend(usage::read_only(driver, f));
    }
    checks.events(driver, &uuids);
    checks.listing(&facts, expect);
    checks.unknown_gpu(driver);
    checks.0
}

#[derive(Default)]
struct Checks(Vec<Violation>);

impl Checks {
    fn check(&mut self, ok: bool, what: impl FnOnce() -> String) {
        if !ok {
            self.0.push(Violation(what()));
        }
    }

    fn system(&mut self, driver: &dyn GpuDriver, expect: &Expect) {
        let system = match driver.system() {
            Ok(system) => system,
            Err(error) => return self.check(false, || format!("system() answers: {error}")),
        };
        let version = &system.driver_version;
        self.check(divvy_model::normalise_version(version).is_some(), || {
            format!("driver version {version:?} can be normalised")
        });
        self.check(
            system.cuda_version.is_none_or(|cuda| cuda.major >= 9),
            || format!("CUDA version {:?} is plausible", system.cuda_version),
        );
        if let Some(expected) = &expect.driver_version {
            self.check(version == expected, || {
                format!("driver version is {expected}, got {version}")
            });
        }
    }

    /// Asks for the facts of every GPU; those that answer.
    fn answers(
        &mut self,
        driver: &dyn GpuDriver,
        expect: &Expect,
        uuids: &[GpuUuid],
    ) -> Vec<GpuFacts> {
        self.check(driver.list().as_deref() == Ok(uuids), || {
            "list() is stable".to_owned()
        });
        if let Some(count) = expect.gpus {
            self.check(uuids.len() == count, || {
                format!("list() has {count} GPUs, got {}", uuids.len())
            });
        }
        let mut facts = Vec::new();
        for uuid in uuids {
            match driver.facts(uuid) {
                Ok(f) => facts.push(f),
                Err(error) => self.check(false, || format!("facts() answers: {error}")),
            }
            if let Err(error) = driver.processes(uuid) {
                self.check(false, || format!("processes() answers: {error}"));
            }
        }
        facts
    }

    fn facts(&mut self, f: &GpuFacts, uuids: &[GpuUuid]) {
        let gpu = &f.uuid;
        self.check(uuids.contains(gpu), || {
            format!("{gpu}: facts carry the UUID that was asked for")
        });
        self.check(!f.product_name.is_empty(), || format!("{gpu}: has a name"));
        self.check(f.pci_device_id & 0xffff == 0x10de, || {
            format!("{gpu}: PCI vendor is NVIDIA, got {:#x}", f.pci_device_id)
        });
        self.check(f.memory_bytes != Some(0), || {
            format!("{gpu}: memory is unknown or more than nothing")
        });
        self.check(f.compute_capability.major >= 3, || {
            format!(
                "{gpu}: compute capability {} is plausible",
                f.compute_capability
            )
        });
        self.check(f.nvlinks.is_sorted(), || {
            format!("{gpu}: NVLinks are sorted")
        });
        let to_itself = f.nvlinks.contains(&NvLinkPeer::Gpu(f.pci_address));
        self.check(!to_itself, || format!("{gpu}: no NVLink to itself"));
    }

    fn mig(&mut self, driver: &dyn GpuDriver, f: &GpuFacts) {
        let gpu = &f.uuid;
        let mode = match driver.mig_mode(gpu) {
            Ok(mode) => mode,
            Err(error) => return self.check(false, || format!("mig_mode() answers: {error}")),
        };
        self.check(mode == f.mig_mode, || {
            format!("{gpu}: mig_mode() and facts() agree")
        });
        let able = mode == MigMode::Unsupported || f.compute_capability.major >= 8;
        self.check(able, || {
            format!(
                "{gpu}: MIG needs compute capability 8, has {}",
                f.compute_capability
            )
        });
        self.0.extend(mig::read_only(driver, gpu, mode));
    }

    fn vitals(&mut self, driver: &dyn GpuDriver, f: &GpuFacts) {
        match driver.vitals(&f.uuid) {
            Ok(_) => {}
            Err(error) => self.check(error.code == GpuErrorCode::NOT_SUPPORTED, || {
                format!("vitals() answers, or is not supported: {error}")
            }),
        }
    }

    fn events(&mut self, driver: &dyn GpuDriver, uuids: &[GpuUuid]) {
        for wait in [0, 10] {
            match driver.wait_events(std::time::Duration::from_millis(wait)) {
                Ok(events) => {
                    let named = events.events.iter().filter_map(|event| event.gpu.as_ref());
                    let named = named.chain(events.unmonitored.keys());
                    let strange: Vec<_> = named.filter(|gpu| !uuids.contains(gpu)).collect();
                    self.check(strange.is_empty(), || {
                        format!("events are of GPUs that are there, got {strange:?}")
                    });
                }
                Err(error) => {
                    let unsupported = matches!(
                        error.code,
                        GpuErrorCode::NOT_SUPPORTED | GpuErrorCode::FUNCTION_NOT_FOUND
                    );
                    self.check(unsupported, || {
                        format!("wait_events() answers, or is not supported: {error}")
                    });
                }
            }
        }
    }

    fn listing(&mut self, facts: &[GpuFacts], expect: &Expect) {
        let seen: BTreeSet<_> = facts.iter().map(|f| f.pci_address).collect();
        self.check(seen.len() == facts.len(), || {
            "PCI addresses are unique".to_owned()
        });
        let mut minors: Vec<_> = facts.iter().filter_map(|f| f.minor).collect();
        let with_minor = minors.len();
        minors.sort_unstable();
        minors.dedup();
        self.check(minors.len() == with_minor, || {
            "minor numbers are unique".to_owned()
        });
        if let Some(names) = &expect.product_names {
            let got: Vec<_> = facts.iter().map(|f| f.product_name.clone()).collect();
            self.check(got == *names, || {
                format!("product names are {names:?}, got {got:?}")
            });
        }
    }

    fn unknown_gpu(&mut self, driver: &dyn GpuDriver) {
        #[expect(clippy::expect_used, reason = "a constant in the right form; tested")]
        let none: GpuUuid = "GPU-00000000-0000-0000-0000-000000000000"
            .parse()
            .expect("a GPU UUID");
        match driver.facts(&none) {
            Err(error) => {
                let known = [
                    GpuErrorCode::NOT_FOUND,
                    GpuErrorCode::INVALID_ARGUMENT,
                    GpuErrorCode::GPU_NOT_FOUND,
                ];
                self.check(known.contains(&error.code), || {
                    format!("facts() of a GPU that is not there says so, got {error}")
                });
            }
            Ok(_) => self.check(false, || {
                "facts() of a GPU that is not there is an error".to_owned()
            }),
        }
        let answers = driver.vitals(&none).is_ok();
        self.check(!answers, || {
            "vitals() of a GPU that is not there is an error".to_owned()
        });
    }
}
