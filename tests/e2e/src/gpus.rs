//! GPUs that do not exist, for a cluster's node: a folder that stands in for the node's `/` where
//! the driver looks for NVIDIA's driver, sysfs, `/proc` and device nodes, and the state file of the
//! mock NVML library in it.

pub mod mps;
mod smi;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use divvy_gpu_sim::{Engine, SimInstance, SimSpec};
use divvy_host::capability_minor;
use divvy_host::fixture::{Fixture, FixtureGpu, FixtureHost};
use divvy_model::mig::{ComputeInstanceId, GpuInstanceId};
use divvy_model::{CudaVersion, GpuProcess, GpuUuid, Inventory, TimeSlice};
use fs_err as fs;
use nvidia_ml::MockState;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

/// The folder of the mock library's state, below the root.
const MOCK: &str = "mock";
/// The folder of the twins of control groups, below the root.
const GROUPS: &str = "groups";
/// The list of the controllers of a control group.
pub const CONTROLLERS: &str = "cgroup.controllers";

/// The simulated GPUs of a node.
#[derive(Debug, Clone)]
pub struct Gpus {
    root: PathBuf,
    by_uuid: BTreeMap<String, Gpu>,
    fixture: Fixture,
}

/// Facts that tests want to know of a simulated GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The number in its device node, `/dev/nvidia<minor>`.
    pub minor: u32,
    /// NVML's product name.
    pub product: String,
}

/// The host's files for simulated GPUs, in the order of their minor numbers.
pub fn fixture_of(inventory: &Inventory) -> Result<Fixture> {
    let mut gpus = Vec::new();
    for gpu in inventory.gpus.values() {
        gpus.push(FixtureGpu {
            minor: gpu
                .facts
                .minor
                .context("a simulated GPU has no minor number")?,
            pci: gpu.facts.pci_address,
            numa_node: gpu.topology.numa_node,
            pcie_root: gpu
                .topology
                .pcie_root
                .clone()
                .unwrap_or_else(|| "pci0000:00".to_owned()),
        });
    }
    gpus.sort_by_key(|gpu| gpu.minor);
    let mut fixture = Fixture::new(gpus);
    fixture
        .driver_version
        .clone_from(&inventory.system.driver_version);
    Ok(fixture)
}

impl Gpus {
    /// Where NVIDIA's driver is on the node, below [`Gpus::root`]: where a driver container mounts
    /// it.
    pub const DRIVER_ROOT: &'static str = "/run/nvidia/driver";

    /// Makes the folder. `nvml` is the built mock library.
    pub fn create(root: &Path, spec: &SimSpec, nvml: &Path) -> Result<Self> {
        fs::create_dir_all(root.join(MOCK))?;
        fs::create_dir_all(root.join(GROUPS))?;
        fs::write(root.join(GROUPS).join(CONTROLLERS), "cpu misc\n")?;
        let mock = MockState::open_or_create(root.join(MOCK).join("state.json"), spec)?;
        let inventory = mock.read()?.inventory();
        let mut by_uuid = BTreeMap::new();
        for (uuid, gpu) in &inventory.gpus {
            let minor = gpu
                .facts
                .minor
                .context("a simulated GPU has no minor number")?;
            by_uuid.insert(
                uuid.to_string(),
                Gpu {
                    minor,
                    product: gpu.facts.product_name.clone(),
                },
            );
        }
        let mut fixture = fixture_of(&inventory)?;
        fixture.driver_root = PathBuf::from(Self::DRIVER_ROOT);
        fixture.nvml = Some(nvml.to_owned());
        fs::read_to_string("/proc/sys/kernel/random/boot_id")?
            .trim()
            .clone_into(&mut fixture.boot_id);
        let gpus = Self {
            root: root.to_owned(),
            by_uuid,
            fixture,
        };
        gpus.set_controllers_of_pods("cpu misc\n")?;
        gpus.build(&gpus.fixture)?;
        Ok(gpus)
    }

    fn build(&self, fixture: &Fixture) -> Result<()> {
        // The driver may have put others in the place of those of an earlier time.
        for node in nvidia_nodes(&self.root.join("dev"))? {
            fs::remove_file(node)?;
        }
        let host = fixture.build(&self.root)?;
        for gpu in &fixture.gpus {
            capabilities(&host, gpu.minor)?;
        }
        smi::install(&self.driver_files())?;
        device_nodes(&self.root.join("dev"))
    }

    /// The driver's files, for us.
    pub fn driver_files(&self) -> PathBuf {
        self.root.join(Self::DRIVER_ROOT.trim_start_matches('/'))
    }

    /// The version of the driver that is there from the beginning.
    pub fn driver_version(&self) -> &str {
        &self.fixture.driver_version
    }

    /// Takes the driver off the node: the module is unloaded, its libraries and what the kernel
    /// says of it are gone.
    pub fn remove_driver(&self) -> Result<()> {
        MockState::open(self.mock_state())?.edit(|engine| engine.set_driver_loaded(false))?;
        for folder in ["usr", "lib"] {
            fs::remove_dir_all(self.driver_files().join(folder))?;
        }
        for folder in ["sys/module/nvidia", "proc/driver/nvidia"] {
            fs::remove_dir_all(self.root.join(folder))?;
        }
        let none = "Character devices:\n  1 mem\n\nBlock devices:\n";
        Ok(fs::write(self.root.join("proc/devices"), none)?)
    }

    /// Installs a driver of this version and loads it.
    pub fn install_driver(&self, version: &str) -> Result<()> {
        self.build(&Fixture {
            driver_version: version.to_owned(),
            ..self.fixture.clone()
        })?;
        Ok(MockState::open(self.mock_state())?.edit(|engine| {
            engine.set_driver_version(
                version,
                CudaVersion {
                    major: 13,
                    minor: 0,
                },
            );
            engine.set_driver_loaded(true);
        })?)
    }

    /// The time slice of a GPU, as the driver's `nvidia-smi` has set it.
    pub fn time_slice(&self, uuid: &str) -> Result<TimeSlice> {
        smi::time_slice(&self.driver_files(), uuid)
    }

    /// Adds the driver's programs for MPS: copies of this stand-in.
    pub fn install_mps(&self, stand_in: &Path) -> Result<()> {
        mps::install(&self.driver_files(), stand_in)
    }

    /// Has the MPS server with this number on the node be in the state FAULT; none any more without
    /// one.
    pub fn fault_mps(&self, server: Option<u32>) -> Result<()> {
        mps::fault(&self.driver_files(), server)
    }

    /// Takes the driver's programs for MPS away again.
    pub fn remove_mps(&self) -> Result<()> {
        mps::remove(&self.driver_files())
    }

    /// Returns the calls of the driver's `nvidia-smi` for a GPU, one line a call.
    pub fn smi_calls(&self, uuid: &str) -> Result<Vec<String>> {
        smi::calls(&self.driver_files(), uuid)
    }

    /// The folder in the driver's root that its `nvidia-smi` writes: the kernel module's memory.
    pub const TIME_SLICES: &'static str = "/run/nvidia/driver/run/nvidia-timeslices";

    /// The root of the twins of control groups; see `runtime-with-groups.sh`.
    pub fn groups(&self) -> PathBuf {
        self.root.join(GROUPS)
    }

    /// The same in the plugin's pod.
    pub fn groups_in_pod() -> String {
        format!("/host/{GROUPS}")
    }

    /// Gives the groups of pods, and those above them, these controllers from now on.
    pub fn set_controllers_of_pods(&self, list: &str) -> Result<()> {
        Ok(fs::write(
            self.root.join(format!("{GROUPS}.of-pods")),
            list,
        )?)
    }

    /// The folder that stands in for the node's `/`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The state file of the mock library, as host and plugin see it.
    pub fn mock_state(&self) -> PathBuf {
        self.root.join(MOCK).join("state.json")
    }

    /// The GPU with this UUID.
    pub fn get(&self, uuid: &str) -> Result<&Gpu> {
        self.by_uuid
            .get(uuid)
            .with_context(|| format!("no simulated GPU has the UUID {uuid}"))
    }

    /// The UUIDs of the GPUs whose product name contains this.
    pub fn of_product(&self, product: &str) -> Vec<&str> {
        let fitting = self
            .by_uuid
            .iter()
            .filter(|(_, gpu)| gpu.product.contains(product));
        fitting.map(|(uuid, _)| uuid.as_str()).collect()
    }

    /// A process opens a context on a GPU, as the NVML library reports it.
    pub fn start_process(&self, uuid: &str, pid: u32) -> Result<()> {
        let known = MockState::open(self.mock_state())?.edit(|engine| {
            let gpu = engine
                .gpus()
                .iter()
                .find(|gpu| gpu.facts.uuid.as_str() == uuid);
            let uuid = gpu.map(|gpu| gpu.facts.uuid.clone())?;
            engine
                .gpu(&uuid)?
                .processes
                .insert(GpuProcess::new(pid, None));
            Some(())
        })?;
        known.with_context(|| format!("no simulated GPU has the UUID {uuid}"))
    }

    /// A process ends: its contexts are gone from all GPUs.
    pub fn end_process(&self, pid: u32) -> Result<()> {
        Ok(MockState::open(self.mock_state())?.edit(|engine| engine.end_process(pid))?)
    }

    /// The UUID of the only GPU with this product name.
    pub fn only(&self, product: &str) -> Result<&str> {
        let mut fitting = self
            .by_uuid
            .iter()
            .filter(|(_, gpu)| gpu.product == product);
        match (fitting.next(), fitting.next()) {
            (Some((uuid, _)), None) => Ok(uuid),
            _ => bail!("there is not one {product}"),
        }
    }

    /// The MIG instances that live on a GPU, as the hardware has them.
    pub fn instances(&self, uuid: &str) -> Result<Vec<SimInstance>> {
        let engine = MockState::open(self.mock_state())?.read()?;
        let found = engine
            .gpus()
            .iter()
            .find(|gpu| gpu.facts.uuid.as_str() == uuid);
        Ok(found
            .with_context(|| format!("no simulated GPU has the UUID {uuid}"))?
            .instances
            .clone())
    }

    /// Changes what the mock library shows of a GPU.
    pub fn edit<T>(&self, uuid: &str, edit: impl FnOnce(&mut Engine, &GpuUuid) -> T) -> Result<T> {
        let changed = MockState::open(self.mock_state())?.edit(|engine| {
            let gpu = engine
                .gpus()
                .iter()
                .find(|gpu| gpu.facts.uuid.as_str() == uuid);
            let uuid = gpu.map(|gpu| gpu.facts.uuid.clone())?;
            Some(edit(engine, &uuid))
        })?;
        changed.with_context(|| format!("no simulated GPU has the UUID {uuid}"))
    }

    /// A GPU falls off the bus, or is back.
    pub fn set_lost(&self, uuid: &str, lost: bool) -> Result<()> {
        self.edit(uuid, |engine, uuid| {
            engine.gpu(uuid).map(|gpu| gpu.lost = lost)
        })?
        .context("no such GPU")
    }

    /// Returns the number of GPUs.
    pub fn count(&self) -> usize {
        self.by_uuid.len()
    }
}

/// Makes what the kernel module would write into proc as instances are made: here for all that
/// there can be, beforehand.
pub fn capabilities(host: &FixtureHost, gpu: u32) -> Result<()> {
    const INSTANCES: u32 = 15;
    let first = ComputeInstanceId(0);
    for id in 0..INSTANCES {
        let minor = |compute| capability_minor(gpu, GpuInstanceId(id), compute);
        host.mig_access(gpu, id, first.0, (minor(None), minor(Some(first))))?;
    }
    Ok(())
}

/// Puts a real device, the null device, in the place of every device file that the fixture made.
fn device_nodes(dev: &Path) -> Result<()> {
    for node in nvidia_nodes(dev)? {
        fs::remove_file(&node)?;
        let rights = Mode::from_raw_mode(0o666);
        mknodat(CWD, &node, FileType::CharacterDevice, rights, makedev(1, 3))
            .with_context(|| format!("cannot make the device node {}", node.display()))?;
        // Making one takes the umask into account.
        rustix::fs::chmod(&node, rights)?;
    }
    Ok(())
}

/// The GPUs' nodes in a folder that has all those of a machine.
fn nvidia_nodes(dev: &Path) -> Result<Vec<PathBuf>> {
    let mut nodes = Vec::new();
    for (folder, start) in [("", "nvidia"), ("dri", ""), ("nvidia-caps", "")] {
        let folder = dev.join(folder);
        if !folder.exists() {
            continue;
        }
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(start)
                && !entry.file_type()?.is_dir()
            {
                nodes.push(entry.path());
            }
        }
    }
    Ok(nodes)
}
