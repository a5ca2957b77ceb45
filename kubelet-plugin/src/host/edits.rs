//! The needs of containers, as CDI edits: the driver's files and control nodes (the same for all,
//! found once and looked at again now and then), and the nodes of one GPU.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use divvy_api::names;
use divvy_cdi::{CommonEdits, ContainerEdits, Hook};
use divvy_claims::{Attributes, RecordedDevice};
use divvy_executor::{DeviceEdits, EditsError};
use divvy_host::{
    ControlNodes, DeviceNodes, Driver, DriverAt, DriverRoot, GpuNodes, HostRoot, LibraryDelivery,
};
use divvy_model::mig::ProfileVariant;
use divvy_model::{ClaimUid, Gpu, GpuTarget, Inventory, PciAddress, Place, Target};

use crate::host::mps;

/// Edits from the host's files.
pub(crate) struct HostEdits {
    host: HostRoot,
    at: DriverAt,
    nodes: DeviceNodes,
    delivery: LibraryDelivery,
    /// The folder of the supervisor of MPS daemons, if there is one.
    mps: Option<PathBuf>,
    common: Mutex<Option<Common>>,
    /// Nodes of GPUs, by minor number and address, until the driver is looked at again: finding
    /// them takes a dozen looks into sysfs.
    gpu_nodes: Mutex<BTreeMap<(u32, PciAddress), GpuNodes>>,
    /// Held while files are listed for a claim; when that last failed, and why.
    failed: Mutex<Option<(Instant, String)>>,
    /// `true` once it was logged that nodes cannot be made.
    no_nodes: AtomicBool,
    /// `true` once `nvidia-uvm` was loaded, or that was tried, for each load of the driver: an
    /// admin who unloads modules would not get far otherwise.
    uvm_loaded: AtomicBool,
}

/// Listing a driver's files takes a while, and prepares that wait for them ask several times a
/// second, with locks held.
const LIST_AGAIN: Duration = Duration::from_secs(1);

struct Common {
    driver: Driver,
    control: ControlNodes,
    edits: Arc<CommonEdits>,
}

impl HostEdits {
    /// Returns whether a program is called when a container starts.
    pub(crate) fn calls_hook(&self) -> bool {
        matches!(self.delivery, LibraryDelivery::Hook(_))
    }

    pub(crate) fn new(
        host: HostRoot,
        at: DriverAt,
        nodes: DeviceNodes,
        delivery: LibraryDelivery,
    ) -> Self {
        let (common, gpu_nodes, failed) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (no_nodes, uvm_loaded) = (AtomicBool::default(), AtomicBool::default());
        Self {
            host,
            at,
            nodes,
            delivery,
            mps: None,
            common,
            gpu_nodes,
            failed,
            no_nodes,
            uvm_loaded,
        }
    }

    /// Adds the folder of the supervisor of MPS daemons.
    pub(crate) fn with_mps(self, mps: Option<PathBuf>) -> Self {
        Self { mps, ..self }
    }

    /// Returns whether the driver has its programs for MPS, which the supervisor runs.
    pub(crate) fn has_mps_programs(&self) -> bool {
        let known = self
            .lock()
            .as_ref()
            .map(|common| common.driver.root.clone());
        let root = known.or_else(|| Some(self.at.find(&self.host).ok()?.root));
        root.is_some_and(|root| mps::has_programs(&root))
    }

    /// Looks whether the driver is still the one known, and lists its files again if not
    /// (`thorough`: in any case). Returns whether anything that containers get has changed; the
    /// first time does not count.
    ///
    /// After a failure no files are known. The files of before may be gone, as in the middle of an
    /// upgrade: a claim that is prepared with them would only fail later, in the runtime.
    pub(crate) fn refresh(&self, thorough: bool) -> Result<bool, EditsError> {
        let refreshed = self.look(thorough);
        if refreshed.is_err() {
            *self.lock() = None;
        }
        refreshed
    }

    fn look(&self, thorough: bool) -> Result<bool, EditsError> {
        // Another driver may number devices differently: minor numbers are looked up again.
        self.known_nodes().clear();
        let driver = self
            .at
            .find(&self.host)
            .map_err(|e| edits_error("the NVIDIA driver's files were not found", e))?;
        let control = self.control()?;
        let same = |known: &Common| known.driver == driver && known.control == control;
        if !thorough && self.lock().as_ref().is_some_and(same) {
            return Ok(false);
        }
        let edits = CommonEdits::new(self.list(&driver, &control)?)
            .map_err(|e| edits_error("the NVIDIA driver's files cannot be expressed in CDI", e))?;
        let edits = Arc::new(edits);
        let before = self.lock().replace(Common {
            driver,
            control,
            edits: edits.clone(),
        });
        Ok(before.is_some_and(|before| before.edits.edits() != edits.edits()))
    }

    /// Returns the control nodes. CUDA needs `nvidia-uvm`, and on a host without a udev rule for it
    /// nothing loads that after a boot.
    fn control(&self) -> Result<ControlNodes, EditsError> {
        const UVM: &str = "nvidia-uvm";
        let look = || {
            divvy_host::control_nodes(&self.host, &self.nodes)
                .map_err(|e| edits_error("the driver's control nodes cannot be determined", e))
        };
        let control = look()?;
        let lacks_uvm = control
            .missing
            .iter()
            .any(|node| node.needed && node.module == UVM);
        // It would bring the main module with it, which may be away on purpose.
        if !matches!(divvy_host::nvidia_module(&self.host), Ok(Some(_))) {
            // A program that loads the driver again, as after an upgrade, may not load this module.
            self.uvm_loaded.store(false, Ordering::Relaxed);
            return Ok(control);
        }
        if !lacks_uvm || self.uvm_loaded.swap(true, Ordering::Relaxed) {
            return Ok(control);
        }
        match divvy_host::load_module(&self.host, UVM) {
            Ok(()) => tracing::info!("the kernel module {UVM} was loaded"),
            Err(error) => tracing::warn!(%error, "failed to load the kernel module {UVM}"),
        }
        look()
    }

    /// Checks that containers can get the driver; cheap while they can.
    pub(crate) fn check(&self) -> Result<(), EditsError> {
        if self.lock().is_some() {
            Ok(())
        } else {
            self.list_once()
        }
    }

    /// Lists the driver's files if they are not known; not again within a second after that failed.
    fn list_once(&self) -> Result<(), EditsError> {
        let mut failed = crate::lock(&self.failed);
        // Another claim's thread has listed them meanwhile, or the keeper has.
        if self.lock().is_some() {
            return Ok(());
        }
        if let Some((_, what)) = failed.as_ref().filter(|(at, _)| at.elapsed() < LIST_AGAIN) {
            return Err(EditsError {
                what: what.clone(),
                source: None,
            });
        }
        let listed = self.refresh(true);
        *failed = listed
            .as_ref()
            .err()
            .map(|error| (Instant::now(), crate::chain(error)));
        listed.map(drop)
    }

    fn list(&self, driver: &Driver, control: &ControlNodes) -> Result<ContainerEdits, EditsError> {
        let files = divvy_host::driver_files(&self.host, driver)
            .map_err(|e| edits_error("failed to list the NVIDIA driver's files", e))?;
        if let Some(missing) = control.missing.iter().find(|node| node.needed) {
            let what = format!(
                "{} does not exist and its kernel module is not loaded (load {} on the node)",
                missing.path, missing.module
            );
            return Err(EditsError { what, source: None });
        }
        // After the check for missing ones: of a driver that is only half loaded nothing is made.
        self.make_nodes(&control.nodes);
        Ok(divvy_host::driver_edits(&files, control, &self.delivery))
    }

    /// Makes device nodes on the host. Most pods do without them, so that failing is no error.
    fn make_nodes<'a>(&self, wanted: impl IntoIterator<Item = &'a divvy_host::DeviceNode>) {
        match divvy_host::make_nodes(&self.host, &self.nodes, wanted) {
            Ok(made) if made.is_empty() => {}
            Ok(made) => tracing::info!(nodes = ?made, "created device nodes on the node"),
            Err(error) if !self.no_nodes.swap(true, Ordering::Relaxed) => tracing::warn!(
                %error,
                "failed to create device nodes on the node; pods with `hostUsers: false` will not start"
            ),
            Err(_) => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Common>> {
        crate::lock(&self.common)
    }

    fn known_nodes(&self) -> MutexGuard<'_, BTreeMap<(u32, PciAddress), GpuNodes>> {
        crate::lock(&self.gpu_nodes)
    }

    fn nodes_of(&self, gpu: &Gpu, minor: u32) -> Result<GpuNodes, EditsError> {
        let pci = gpu.facts.pci_address;
        // Held while they are looked for, so that what was seen before a refresh is not kept after
        // it.
        let mut known = self.known_nodes();
        if let Some(nodes) = known.get(&(minor, pci)) {
            return Ok(nodes.clone());
        }
        let nodes = divvy_host::gpu_nodes(&self.host, &self.nodes, minor, pci).map_err(|e| {
            edits_error(
                &format!("the device nodes of {} are unknown", gpu.facts.uuid),
                e,
            )
        })?;
        self.make_nodes([&nodes.main]);
        known.insert((minor, pci), nodes.clone());
        Ok(nodes)
    }
}

impl DeviceEdits for HostEdits {
    /// Returns what all containers get. The files are looked at each time: between two rounds of
    /// [`HostEdits::refresh`] a driver may be replaced.
    fn common(&self) -> Result<Arc<CommonEdits>, EditsError> {
        let known = self
            .lock()
            .as_ref()
            .map(|common| (common.edits.clone(), common.driver.root.clone()));
        if let Some((edits, root)) = known {
            if self.are_there(&edits, &root) {
                return Ok(edits);
            }
            // Another thread may have listed the files of the next driver meanwhile.
            let mut common = self.lock();
            if common
                .as_ref()
                .is_some_and(|now| Arc::ptr_eq(&now.edits, &edits))
            {
                *common = None;
            }
        }
        self.list_once()?;
        match self.lock().as_ref() {
            Some(common) => Ok(common.edits.clone()),
            // Another thread found the driver gone just now.
            None => Err(EditsError {
                what: "the NVIDIA driver's files were not found".to_owned(),
                source: None,
            }),
        }
    }

    fn device(&self, gpu: &Gpu, device: &RecordedDevice) -> Result<ContainerEdits, EditsError> {
        let facts = &gpu.facts;
        let minor = facts.minor.ok_or_else(|| EditsError {
            what: format!(
                "{} has no minor number, so its device node is unknown (is this WSL?)",
                facts.uuid
            ),
            source: None,
        })?;
        let nodes = self.nodes_of(gpu, minor)?;
        let mut edits = match device.target {
            Target::Gpu => divvy_host::gpu_edits(&nodes),
            Target::Partition(Place { profile, .. }) => {
                let profile = gpu
                    .mig
                    .as_ref()
                    .and_then(|mig| mig.capabilities.profile(profile));
                let graphics =
                    profile.is_some_and(|found| found.variant() == ProfileVariant::Graphics);
                self.partition(&nodes, minor, device, graphics)?
            }
        };
        if let Some(slot) = &device.mps {
            let dir = self.mps.as_ref().ok_or_else(|| EditsError {
                what: "MPS is switched off (chart value mps.enabled)".to_owned(),
                source: None,
            })?;
            let (gpu, target) = (device.gpu.clone(), device.target);
            let of_mps = mps::edits(dir, &GpuTarget { gpu, target }, slot);
            edits.env.extend(of_mps.env);
            edits.mounts.extend(of_mps.mounts);
        }
        // A pattern may also find nodes of the GPU itself.
        for node in self.extra_nodes(&device.extra_nodes)? {
            if !edits.device_nodes.iter().any(|own| own.path == node.path) {
                edits.device_nodes.push((&node).into());
            }
        }
        Ok(edits)
    }

    fn cap(&self, claim: &ClaimUid, cdi_device: &str) -> Option<Hook> {
        divvy_host::cap(&self.delivery, claim.as_str(), cdi_device)
    }

    fn attributes(&self, inventory: &Inventory, device: &RecordedDevice) -> Attributes {
        divvy_offer::attributes(
            &device.allocated.device,
            &device.gpu,
            inventory,
            device.time_slice,
        )
    }
}

impl HostEdits {
    /// Returns whether all files that are mounted are still on the host.
    fn are_there(&self, common: &CommonEdits, root: &DriverRoot) -> bool {
        common.edits().mounts.iter().all(|mount| {
            let path = Path::new(&mount.host_path);
            // Sockets and firmware are the host's, not the driver's.
            let seen = match path.strip_prefix(root.host()) {
                Ok(inside) => root.see(inside),
                Err(_) => self.host.see(path),
            };
            seen.symlink_metadata().is_ok()
        })
    }

    /// Returns the capabilities of the instances that the claim was given, and their UUID for
    /// people and programs: one variable for each partition, since a container may have several.
    fn partition(
        &self,
        gpu: &GpuNodes,
        minor: u32,
        device: &RecordedDevice,
        graphics: bool,
    ) -> Result<ContainerEdits, EditsError> {
        let name = &device.allocated.device;
        let made = device.given.as_ref().ok_or_else(|| EditsError {
            what: format!("the record lacks the MIG instances of {name}"),
            source: None,
        })?;
        let (gi, ci) = (made.gi, made.ci);
        let nodes = divvy_host::mig_nodes(&self.host, &self.nodes, minor, gi, ci)
            .map_err(|e| edits_error(&format!("the device nodes of {name} are unknown"), e))?;
        if !nodes.as_expected {
            tracing::debug!(device = %name, ?nodes, "the driver numbers MIG capabilities in an unknown way");
        }
        self.make_nodes([&nodes.gpu_instance, &nodes.compute_instance]);
        let mut edits = divvy_host::partition_edits(gpu, &nodes, graphics);
        edits.env.push(format!(
            "{}={}",
            names::env::mig_uuid(name.as_str()),
            made.uuid
        ));
        if device.theirs {
            edits
                .env
                .push(format!("{}=true", names::env::mig_static(name.as_str())));
        }
        Ok(edits)
    }

    /// Returns the device nodes that the claim's config asks for, each once: a node may be asked
    /// for by its name and by a pattern.
    fn extra_nodes(&self, wanted: &[String]) -> Result<Vec<divvy_host::DeviceNode>, EditsError> {
        let mut all: Vec<divvy_host::DeviceNode> = Vec::new();
        for path in wanted {
            let found = divvy_host::extra_nodes(&self.host, &self.nodes, path).map_err(|e| {
                edits_error(
                    &format!("{path}, which the claim's config asks for, cannot be given"),
                    e,
                )
            })?;
            if found.is_empty() {
                let what = format!(
                    "the node has no {path}, which the claim's config asks for (load its kernel module on the node, or choose nodes that have it)"
                );
                return Err(EditsError { what, source: None });
            }
            for node in found {
                if !all.iter().any(|known| known.path == node.path) {
                    all.push(node);
                }
            }
        }
        Ok(all)
    }
}

fn edits_error(what: &str, source: impl std::error::Error + Send + Sync + 'static) -> EditsError {
    EditsError {
        what: what.to_owned(),
        source: Some(Box::new(source)),
    }
}

#[cfg(test)]
mod tests;
