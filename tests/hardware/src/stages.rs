//! The checks, one after the other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum as _;
use divvy_conformance::{Expect, conformance};
use divvy_host::{Driver, DriverRoot, HostRoot, Smi};
use divvy_model::{Gpu, GpuDriver, GpuFacts, GpuUuid, Inventory, MemoryCaps};
use divvy_nvml::NvmlDriver;
use serde::Serialize;

use crate::apply::{self, Container, Ran};
use crate::claim::{self, Prepared, Want};
use crate::report::{Allow, Check, Outcome, Report};
use crate::smi::see;
use crate::{Args, caps, changes, clients, compare, cuda, mps, smi};

/// Time limit of the driver to list a process.
const LISTED_WITHIN: Duration = Duration::from_secs(10);
/// Permissions whose checks run programs in the container of a claim.
const IN_A_CONTAINER: [Allow; 3] = [Allow::Mps, Allow::ComputeMode, Allow::MemoryLimit];

/// A root is like the image's if its loader does not find the driver's libraries.
pub(crate) fn as_the_image() -> Outcome {
    if cuda::can_be_loaded() {
        Outcome::Failed("the loader finds libcuda.so.1, as it does not in the image".to_owned())
    } else {
        Outcome::Ok("the host is at a prefix, and the loader finds no libcuda".to_owned())
    }
}

/// Objects that are looked at.
struct Machine<'a> {
    args: &'a Args,
    host: HostRoot,
    driver: Result<Driver>,
    library: PathBuf,
    nvml: NvmlDriver,
    inventory: Inventory,
}

/// All of them. An error: there is no GPU here.
pub(crate) fn all(args: &Args, report: &mut Report) -> Result<()> {
    let host = HostRoot::under(&args.host_root);
    let driver = match &args.driver_root {
        None => divvy_host::find_driver(&host, None),
        Some(root) => {
            divvy_host::find_driver_at(&host, DriverRoot::new(see(&args.prefix, root), root))
        }
    };
    let library = match (&args.nvml_library, &driver) {
        (Some(path), _) => path.clone(),
        (None, Ok(driver)) => driver.nvml_library.clone(),
        (None, Err(_)) => return Err(driver.err().context("no driver")?.into()),
    };
    let nvml = NvmlDriver::open(Some(&library))?;
    let topology = |address| divvy_host::topology(&host, address).unwrap_or_default();
    let inventory = match divvy_nvml::read_inventory(&nvml, &topology) {
        Ok(inventory) => inventory,
        Err(error) => {
            report.note(
                Check::Inventory,
                Outcome::Failed(format!("{:#}", anyhow::Error::from(error))),
            );
            return Ok(());
        }
    };
    ensure!(
        !(inventory.gpus.is_empty() && inventory.problems.is_empty()),
        "the driver lists none"
    );
    let driver = driver.map_err(Into::into);
    let machine = Machine {
        args,
        host,
        driver,
        library,
        nvml,
        inventory,
    };
    machine.describe(report);
    machine.read(report);
    report.only(&args.allow);
    if args.allow.is_empty() {
        return Ok(());
    }
    if args.hook.is_none() {
        let why = "there is no divvy-cdi-hook beside this program (--hook)";
        report.not_tried(Check::value_variants(), why);
    } else if let Some(uuid) = machine.idle() {
        machine.use_it(report, &uuid);
    } else {
        let why = "every GPU has MIG mode on or is in use";
        report.not_tried(Check::value_variants(), why);
    }
    Ok(())
}

impl Machine<'_> {
    /// Notes the facts of the machine.
    fn describe(&self, report: &mut Report) {
        let system = &self.inventory.system;
        let or_none = |value: Option<String>| value.unwrap_or_else(|| "not known".to_owned());
        let kernel = fs_err::read_to_string("/proc/sys/kernel/osrelease").ok();
        let system = format!(
            "driver {}\nNVML {}\nCUDA {}\nkernel {}\n",
            system.driver_version,
            or_none(system.nvml_version.clone()),
            or_none(system.cuda_version.map(|cuda| cuda.to_string())),
            or_none(kernel).trim(),
        );
        let line = |(uuid, gpu): (&GpuUuid, &Gpu)| {
            let facts = &gpu.facts;
            let mib = facts.memory_bytes.map(|bytes| (bytes >> 20).to_string());
            format!(
                "{uuid} at {}: {}, {} multiprocessors, {} MiB, MIG mode {:?}, compute mode {}\n",
                facts.pci_address,
                facts.product_name,
                or_none(facts.multiprocessors.map(|n| n.to_string())),
                or_none(mib),
                facts.mig_mode,
                or_none(facts.compute_mode.map(|mode| format!("{mode:?}"))),
            )
        };
        let gpus: String = self.inventory.gpus.iter().map(line).collect();
        let text = system + &gpus;
        report.parts.insert("machine".to_owned(), text);
    }

    fn may(&self, allow: Allow) -> bool {
        self.args.allow.contains(&allow)
    }

    /// Runs what is allowed on a GPU that is idle.
    fn use_it(&self, report: &mut Report, uuid: &GpuUuid) {
        let container = if self.may(Allow::Program) {
            self.whole(report, uuid)
        } else {
            None
        };
        if self.may(Allow::Mps) {
            self.mps(report, uuid, container.as_ref());
        }
        if self.may(Allow::MemoryLimit)
            && let (Some(container), true) = (&container, self.has_memory_limits())
        {
            let groups = self.host.see(Path::new("/sys/fs/cgroup"));
            let found = clients::in_a_group(&self.nvml, uuid, &groups, container);
            report.note(Check::MemoryLimit, Outcome::from(found));
        }
        for allow in IN_A_CONTAINER {
            let checks: Vec<Check> = Check::that_need(allow).collect();
            let why = match () {
                () if !self.may(Allow::Program) => "its programs run by a claim (--allow program)",
                () if allow == Allow::ComputeMode && !self.may(Allow::Mps) => {
                    "it needs an MPS server (--allow mps)"
                }
                () if !self.has_memory_limits() && allow == Allow::MemoryLimit => {
                    "the driver limits no memory of control groups"
                }
                () => "no claim of the GPU has given a container",
            };
            report.not_tried(&checks, why);
        }
        if !report.is_well() {
            let changes = [Allow::Mig, Allow::TimeSlice].map(Check::that_need);
            let changes: Vec<Check> = changes.into_iter().flatten().collect();
            report.not_tried(&changes, "an earlier check has failed");
            return;
        }
        self.change(report, uuid);
    }

    fn has_memory_limits(&self) -> bool {
        !matches!(
            self.inventory.system.memory_caps,
            MemoryCaps::OldDriver | MemoryCaps::NoCalls
        )
    }

    /// Runs the checks that change nothing.
    fn read(&self, report: &mut Report) {
        let inventory = &self.inventory;
        let gpus: BTreeMap<_, _> = inventory
            .gpus
            .iter()
            .map(|(uuid, gpu)| (uuid.to_string(), gpu))
            .collect();
        let read = serde_json::json!({ "system": inventory.system, "gpus": gpus });
        let captured = self.capture("inventory", &read);
        let names: Vec<_> = inventory
            .gpus
            .iter()
            .map(|(uuid, gpu)| format!("{uuid} {}", gpu.facts.product_name))
            .collect();
        let mut problems: Vec<_> = inventory
            .problems
            .iter()
            .map(|problem| problem.error.to_string())
            .collect();
        problems.extend(captured.err().map(|error| format!("--capture: {error:#}")));
        let fine = format!(
            "driver {}: {}",
            inventory.system.driver_version,
            names.join(", ")
        );
        report.note(Check::Inventory, Outcome::of(&problems, fine));

        let broken: Vec<_> = conformance(&self.nvml, &Expect::default())
            .into_iter()
            .map(|v| v.0)
            .collect();
        report.note(
            Check::Conformance,
            Outcome::of(&broken, "the driver keeps the contract of the simulator"),
        );
        report.note(Check::ProfileNames, self.profile_names());
        report.note(Check::NvidiaSmi, Outcome::from(self.nvidia_smi()));
        let differs = compare::with_files(&self.host, inventory);
        report.note(
            Check::Sysfs,
            Outcome::of(&differs, "ids, minors and UUIDs are the kernel's"),
        );
        report.note(Check::TimeSliceIsRead, Outcome::from(self.time_slice()));
        // A GPU that is free: a question opens it.
        let gpu = self.idle();
        let found = caps::outcome(&self.host, &self.nvml, &inventory.system, gpu.as_ref());
        report.note(Check::MemoryCaps, found);
    }

    fn profile_names(&self) -> Outcome {
        let cut = self
            .inventory
            .gpus
            .values()
            .filter_map(|gpu| gpu.mig.as_ref());
        let named: Vec<_> = cut
            .filter_map(|mig| compare::names(&mig.capabilities))
            .collect();
        if named.is_empty() {
            return Outcome::NotTried("no driver's name of a MIG profile is known here".to_owned());
        }
        Outcome::of(
            &named.concat(),
            "divvy's names of MIG profiles are the driver's",
        )
    }

    fn nvidia_smi(&self) -> Result<Outcome> {
        let xml = smi::ask(self.driver()?, &self.args.prefix)?;
        self.capture_text("nvidia-smi.xml", &xml)?;
        let differs = smi::differences(&xml, &self.inventory)?;
        Ok(Outcome::of(
            &differs,
            "nvidia-smi -q -x says the same of every GPU",
        ))
    }

    fn time_slice(&self) -> Result<Outcome> {
        let gpu = self.inventory.gpus.keys().next().context("no GPU")?;
        changes::time_slice(&Smi::new(), self.driver()?, gpu)
    }

    fn driver(&self) -> Result<&Driver> {
        self.driver
            .as_ref()
            .map_err(|error| anyhow::anyhow!("{error:#}"))
    }

    /// A GPU that is not in use and is available whole without a change.
    fn idle(&self) -> Option<GpuUuid> {
        let free = |uuid: &GpuUuid| {
            self.nvml
                .processes(uuid)
                .is_ok_and(|found| found.is_empty())
        };
        let whole = self
            .inventory
            .gpus
            .iter()
            .filter(|(_, gpu)| !gpu.facts.mig_mode.is_on());
        whole.map(|(uuid, _)| uuid).find(|uuid| free(uuid)).cloned()
    }

    /// A claim of a whole GPU, and a program in its container.
    fn whole(&self, report: &mut Report, uuid: &GpuUuid) -> Option<Container> {
        let gpu = self.inventory.gpus.get(uuid)?;
        let prepared = match self.prepared(Want::Whole(uuid)) {
            Ok(prepared) => prepared,
            Err(error) => {
                report.note(Check::Claim, Outcome::Failed(format!("{error:#}")));
                return None;
            }
        };
        report.note(
            Check::Claim,
            Outcome::Ok("prepared by the node plugin".to_owned()),
        );
        let used = self.used(&prepared, uuid, &mut |pid| {
            report.note(Check::Processes, Outcome::from(self.listed(uuid, pid)));
        });
        let gone = prepared
            .let_go()
            .map(|()| Outcome::Ok("no record and no CDI file is left".to_owned()));
        let container = match used {
            Ok((container, ran)) => {
                self.judge(report, &container, &ran, &gpu.facts);
                Some(container)
            }
            Err(error) => {
                report.note(Check::Cuda, Outcome::Failed(format!("{error:#}")));
                None
            }
        };
        report.note(Check::LetGo, Outcome::from(gone));
        container
    }

    /// NVIDIA's program for MPS, and what it answers.
    fn mps(&self, report: &mut Report, uuid: &GpuUuid, container: Option<&Container>) {
        let answers = self.ask_mps(uuid, container);
        let answers = answers.and_then(|answers| {
            for (name, text) in &answers.transcripts {
                self.capture_text(&format!("{name}.txt"), text)?;
            }
            Ok(answers)
        });
        match answers {
            Err(error) => report.note(Check::Mps, Outcome::Failed(format!("{error:#}"))),
            Ok(answers) => {
                for (check, outcome) in answers.outcomes {
                    report.note(check, outcome);
                }
                report.parts.extend(answers.transcripts);
            }
        }
    }

    fn ask_mps(&self, uuid: &GpuUuid, container: Option<&Container>) -> Result<mps::Answers> {
        let gpu = self.inventory.gpus.get(uuid).context("the GPU is gone")?;
        let node = mps::Node {
            nvml: &self.nvml,
            facts: &gpu.facts,
            container,
            may_be_alone: self.may(Allow::ComputeMode),
            host: &self.host,
            driver: self.driver()?,
            driver_root: self.args.driver_root.as_deref(),
            driver_version: &self.inventory.system.driver_version,
            prefix: &self.args.prefix,
        };
        mps::answers(&node, uuid)
    }

    /// The same with a partition, for which the node plugin switches MIG mode on.
    fn partition(&self, uuid: &GpuUuid) -> Result<Outcome> {
        let prepared = self.prepared(Want::Partition(uuid));
        let ran = prepared.and_then(|prepared| {
            let used = self.used(&prepared, uuid, &mut |_| {});
            let published = prepared.multiprocessors;
            prepared.let_go().and(used).map(|(_, ran)| (ran, published))
        });
        // The plugin leaves it on for the next claim.
        changes::set_mode(&self.nvml, uuid, false)?;
        let (ran, published) = ran?;
        Ok(in_a_partition(&ran, published))
    }

    fn prepared(&self, want: Want<'_>) -> Result<Prepared> {
        let _tls = rustls::crypto::ring::default_provider().install_default();
        claim::prepared(self.args, &self.library, want)
    }

    /// Runs the program in the claim's container.
    fn used(
        &self,
        prepared: &Prepared,
        uuid: &GpuUuid,
        held: &mut dyn FnMut(u32),
    ) -> Result<(Container, Ran)> {
        self.capture("cdi", &prepared.cdi)?;
        let others = self.inventory.gpus.iter().filter(|(gpu, _)| *gpu != uuid);
        let others = others.filter_map(|(_, gpu)| gpu.facts.minor).collect();
        let container = Container::of(&prepared.cdi, &self.args.prefix, others)?;
        let ran = apply::run(&container, held)?;
        Ok((container, ran))
    }

    /// Reports the results of the program in the container.
    fn judge(&self, report: &mut Report, container: &Container, ran: &Ran, facts: &GpuFacts) {
        let no_root = "mount namespaces are not allowed here";
        match (ran.apart, container.hooks()) {
            (Some(false), _) => {
                report.not_tried(&[Check::Hook, Check::Libcuda, Check::Isolation], no_root);
            }
            (_, 0) => report.note(
                Check::Hook,
                Outcome::Failed("the CDI file calls none".to_owned()),
            ),
            (None, _) => report.note(Check::Hook, Outcome::Failed(ran.error.clone())),
            (Some(true), hooks) => {
                report.note(Check::Hook, Outcome::Ok(format!("{hooks} hooks ran")));
            }
        }
        let Some(answer) = &ran.answer else {
            report.note(Check::Cuda, Outcome::Failed(ran.error.clone()));
            return;
        };
        let seen = &answer.seen;
        report.note(Check::Cuda, Outcome::Ok(seen.to_string()));
        report.note(Check::Libcuda, libcuda(seen.library.as_deref(), container));
        let differs = compare::with_cuda(seen, facts);
        report.note(
            Check::CudaAgrees,
            Outcome::of(&differs, "UUID, address, name, multiprocessors and memory"),
        );
        report.note(
            Check::Isolation,
            isolation(answer, self.inventory.gpus.len()),
        );
    }

    /// Checks that NVML lists the process, with the id that it has here.
    fn listed(&self, uuid: &GpuUuid, pid: u32) -> Result<Outcome> {
        let until = Instant::now() + LISTED_WITHIN;
        loop {
            let found: Vec<u32> = self
                .nvml
                .processes(uuid)?
                .iter()
                .map(|process| process.pid)
                .collect();
            if found.contains(&pid) {
                return Ok(Outcome::Ok(format!(
                    "process {pid} is listed while it computes"
                )));
            }
            if Instant::now() > until {
                return Ok(Outcome::Failed(format!(
                    "process {pid} computes, and {found:?} are listed (in a PID namespace of its own this program does \
                     not know its host's ids)"
                )));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Runs the checks that change the GPU and change it back.
    fn change(&self, report: &mut Report, uuid: &GpuUuid) {
        let Some(gpu) = self.inventory.gpus.get(uuid) else {
            return;
        };
        if !self.may(Allow::Mig) {
            // Said already.
        } else if let Some(why) = changes::why_no_mig(&gpu.facts) {
            report.not_tried(
                &[Check::MigMode, Check::Partitions, Check::PartitionClaim],
                &why,
            );
        } else {
            changes::mig(report, &self.nvml, uuid);
            report.note(Check::PartitionClaim, Outcome::from(self.partition(uuid)));
        }
        if !self.may(Allow::TimeSlice) {
            return;
        }
        let slices = self
            .driver()
            .and_then(|driver| changes::time_slices(&Smi::new(), driver, uuid));
        report.note(Check::TimeSlice, Outcome::from(slices));
    }

    fn capture(&self, name: &str, what: &impl Serialize) -> Result<()> {
        self.capture_text(
            &format!("{name}.json"),
            &serde_json::to_string_pretty(what)?,
        )
    }

    fn capture_text(&self, name: &str, text: &str) -> Result<()> {
        let Some(folder) = &self.args.capture else {
            return Ok(());
        };
        fs_err::create_dir_all(folder)?;
        Ok(fs_err::write(folder.join(name), text)?)
    }
}

/// Checks that libcuda came from where the claim put it.
fn libcuda(loaded: Option<&Path>, container: &Container) -> Outcome {
    let Some(path) = loaded else {
        return Outcome::Failed("no libcuda is among the maps".to_owned());
    };
    let folders = container.library_folders();
    if path.parent().is_some_and(|folder| folders.contains(folder)) {
        Outcome::Ok(format!("{}, in a root without any other", path.display()))
    } else {
        Outcome::Failed(format!(
            "{} was loaded; the claim's is in {folders:?}",
            path.display()
        ))
    }
}

/// Checks that the container reached no GPU but its own.
fn isolation(answer: &apply::Answer, gpus: usize) -> Outcome {
    let count = answer.seen.count;
    if count != 1 {
        return Outcome::Failed(format!("the claim has one GPU, and CUDA sees {count}"));
    }
    if !answer.reached.is_empty() {
        return Outcome::Failed(format!(
            "nodes of other GPUs can be made: {:?}",
            answer.reached
        ));
    }
    match gpus {
        0 | 1 => Outcome::NotTried("there is one GPU only".to_owned()),
        _ => Outcome::Ok(format!(
            "CUDA sees one of {gpus} GPUs, and no node of another can be made"
        )),
    }
}

fn in_a_partition(ran: &Ran, published: Option<u32>) -> Outcome {
    let Some(answer) = &ran.answer else {
        return Outcome::Failed(ran.error.clone());
    };
    let (count, multiprocessors) = (answer.seen.count, answer.seen.multiprocessors);
    let mut problems = Vec::new();
    if count != 1 {
        problems.push(format!("one partition was claimed, and CUDA sees {count}"));
    }
    if published != Some(multiprocessors) {
        problems.push(format!(
            "{published:?} multiprocessors are published, CUDA says {multiprocessors}"
        ));
    }
    Outcome::of(
        &problems,
        format!(
            "in a partition of {multiprocessors} multiprocessors, {}",
            answer.seen
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apply::Answer;
    use crate::cuda::Seen;

    fn answer(count: i32, reached: &[&str]) -> Answer {
        let seen = Seen {
            count,
            name: "GPU".to_owned(),
            uuid: "GPU-0".to_owned(),
            bus_id: String::new(),
            multiprocessors: 1,
            memory_bytes: 1,
            capability: (9, 0),
            library: None,
        };
        Answer {
            seen,
            reached: reached.iter().map(PathBuf::from).collect(),
            allocated: None,
        }
    }

    #[test]
    fn one_gpu_alone_shows_nothing_of_isolation() {
        assert!(matches!(
            isolation(&answer(1, &[]), 1),
            Outcome::NotTried(_)
        ));
        assert!(matches!(isolation(&answer(1, &[]), 2), Outcome::Ok(_)));
        assert!(matches!(isolation(&answer(2, &[]), 2), Outcome::Failed(_)));
        assert!(matches!(
            isolation(&answer(1, &["/dev/other"]), 2),
            Outcome::Failed(_)
        ));
    }

    #[test]
    fn a_partition_has_the_multiprocessors_that_are_published() {
        let ran = |count| Ran {
            answer: Some(answer(count, &[])),
            ..Ran::default()
        };
        assert!(matches!(in_a_partition(&ran(1), Some(1)), Outcome::Ok(_)));
        for (ran, published) in [
            (ran(2), Some(1)),
            (ran(1), Some(14)),
            (ran(1), None),
            (Ran::default(), Some(1)),
        ] {
            assert!(matches!(
                in_a_partition(&ran, published),
                Outcome::Failed(_)
            ));
        }
    }

    #[test]
    fn a_libcuda_from_elsewhere_is_a_failure() {
        let cdi = serde_json::json!({ "containerEdits": {
            "deviceNodes": [{ "path": "/dev/nvidia0", "major": 195, "minor": 0 }],
            "mounts": [{ "hostPath": "/l/libcuda.so.1", "containerPath": "/usr/local/nvidia/lib64/libcuda.so.580" }],
        } });
        let container = Container::of(&cdi, Path::new("/"), Vec::new()).unwrap();
        let of = |path: &str| libcuda(Some(Path::new(path)), &container);
        assert!(matches!(
            of("/usr/local/nvidia/lib64/libcuda.so.580"),
            Outcome::Ok(_)
        ));
        assert!(matches!(
            of("/usr/lib/x86_64-linux-gnu/libcuda.so.580"),
            Outcome::Failed(_)
        ));
        assert!(matches!(libcuda(None, &container), Outcome::Failed(_)));
    }
}
