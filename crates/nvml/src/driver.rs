//! [`NvmlDriver`]: one open NVML session as a [`GpuDriver`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use divvy_model::health::{GpuEvents, GpuVitals};
use divvy_model::mig::{
    ComputeInstance, ComputeInstanceId, ComputeInstanceProfile, ComputeInstanceProfileId,
    GpuInstance, GpuInstanceId, GpuInstanceProfileId, MigCapabilities, Placement,
};
use divvy_model::{
    ComputeMode, CudaVersion, GpuDriver, GpuError, GpuErrorCode, GpuFacts, GpuMemory, GpuOp,
    GpuProcess, GpuUuid, MemoryCaps, MemoryLimit, MigActivation, MigDevice, MigMode, MpsAbility,
    ProcessSample, SystemFacts, lock,
};

use crate::ffi::{Failure, Handle, Library, ends_session};
use crate::gpm::Samples;
use crate::health::Watch;
use crate::kept::Kept;
use crate::{facts, health, mig};

/// Name by which the loader is asked when no path is given.
pub const DEFAULT_LIBRARY: &str = "libnvidia-ml.so.1";

/// The real NVML library, opened. Shut down when dropped; share it in an `Arc`.
pub struct NvmlDriver {
    pub(crate) library: Library,
    path: PathBuf,
    /// Looking a handle up costs up to seconds on a busy machine; a handle stays valid for the
    /// whole session.
    pub(crate) handles: Mutex<BTreeMap<GpuUuid, Handle>>,
    /// Profiles by which instances are listed.
    profiles: Kept<BTreeSet<GpuInstanceProfileId>>,
    /// Profiles by which compute instances are listed, of each profile of a GPU instance.
    compute_profiles: Kept<BTreeSet<ComputeInstanceProfileId>, (GpuUuid, GpuInstanceProfileId)>,
    /// GPUs that have reported a MIG mode.
    with_mig: Mutex<BTreeSet<GpuUuid>>,
    /// Profiles and placements: reading them takes longer than everything else.
    capabilities: Kept<MigCapabilities>,
    /// GPUs left out of [`GpuDriver::list`] that were logged already, by index and code.
    left_out: Mutex<BTreeSet<(u32, u32)>>,
    /// Events are waited for under this lock; no other call needs it.
    watch: Mutex<Option<Watch>>,
    pub(crate) gpm: Samples,
    /// A GPU may have been unbound since the watch began: it has to begin anew.
    rebound: AtomicBool,
}

impl Drop for NvmlDriver {
    fn drop(&mut self) {
        // Before the library shuts down.
        if let Some(watch) = lock(&self.watch).take() {
            watch.end(&self.library);
        }
        self.gpm.free(&self.library);
    }
}

impl NvmlDriver {
    /// Loads the library at `path` ([`DEFAULT_LIBRARY`] by the loader's own search if `None`) and
    /// initialises it.
    pub fn open(path: Option<&Path>) -> Result<Self, GpuError> {
        let path = path.unwrap_or(Path::new(DEFAULT_LIBRARY));
        let library = Library::open(path.as_os_str()).map_err(|f| error(GpuOp::Init, None, f))?;
        Ok(Self {
            library,
            path: path.to_owned(),
            handles: Mutex::new(BTreeMap::new()),
            profiles: Kept::default(),
            compute_profiles: Kept::default(),
            with_mig: Mutex::default(),
            capabilities: Kept::default(),
            left_out: Mutex::new(BTreeSet::new()),
            watch: Mutex::new(None),
            gpm: Samples::default(),
            rebound: AtomicBool::new(false),
        })
    }

    /// Handle of a GPU, from the cache if it is still that GPU's.
    fn handle(&self, op: GpuOp, gpu: &GpuUuid) -> Result<Handle, GpuError> {
        let fail = |f| error(op, Some(gpu), f);
        // A statement of its own: the lock must be free again below.
        let cached = lock(&self.handles).get(gpu).copied();
        if let Some(handle) = cached {
            match self.library.uuid(handle) {
                Ok(uuid) if uuid == gpu.as_str() => return Ok(handle),
                Err(failure) if failure.code == GpuErrorCode::GPU_IS_LOST => {
                    return Err(fail(failure));
                }
                // Another GPU took the place, or the session is a new one: look it up again.
                Ok(_) | Err(_) => lock(&self.handles).remove(gpu),
            };
        }
        let handle = self.library.handle_by_uuid(gpu.as_str()).map_err(fail)?;
        lock(&self.handles).insert(gpu.clone(), handle);
        Ok(handle)
    }

    /// Makes one operation on one GPU.
    fn on<T>(
        &self,
        op: GpuOp,
        gpu: &GpuUuid,
        call: impl FnOnce(&Library, Handle) -> Result<T, Failure>,
    ) -> Result<T, GpuError> {
        let handle = self.handle(op, gpu)?;
        call(&self.library, handle).map_err(|f| error(op, Some(gpu), f))
    }

    /// Looks further for a GPU that NVML does not know by its UUID: that is believed if it lists
    /// every GPU, and not this one. All that lives on a GPU that is gone counts as gone, too.
    fn handle_by_list(&self, gpu: &GpuUuid) -> Result<Handle, Failure> {
        let unclear = |failure: Failure| {
            if failure.is_final() {
                return failure;
            }
            Failure {
                code: GpuErrorCode::UNKNOWN,
                detail: Some(format!("NVML cannot list all GPUs: {}", failure.code)),
            }
        };
        for index in 0..self.library.count().map_err(unclear)? {
            if self.uuid_at(index).map_err(unclear)? == *gpu {
                let found = lock(&self.handles).get(gpu).copied();
                return found.ok_or_else(|| Failure::code(GpuErrorCode::UNKNOWN));
            }
        }
        Err(Failure::code(GpuErrorCode::NOT_FOUND))
    }

    /// Returns a MIG mode that was read, unless a GPU that had one is said to have none.
    fn believed(&self, gpu: &GpuUuid, mode: MigMode) -> Result<MigMode, Failure> {
        let mut with_mig = lock(&self.with_mig);
        match mode {
            MigMode::Supported { .. } => drop(with_mig.insert(gpu.clone())),
            MigMode::Unsupported if with_mig.contains(gpu) => {
                return Err(Failure {
                    code: GpuErrorCode::UNKNOWN,
                    detail: Some("NVML reported a MIG mode before, and none now".to_owned()),
                });
            }
            MigMode::Unsupported => {}
        }
        Ok(mode)
    }

    fn uuid_at(&self, index: u32) -> Result<GpuUuid, Failure> {
        // The loop over indices is how NVML lists GPUs; an index is no name, since it changes when
        // a card leaves.
        let handle = self.library.handle_by_index(index)?;
        let text = self.library.uuid(handle)?;
        let uuid: GpuUuid = text
            .parse()
            .map_err(|error: divvy_model::IdError| Failure {
                code: GpuErrorCode::UNKNOWN,
                detail: Some(error.to_string()),
            })?;
        lock(&self.handles).insert(uuid.clone(), handle);
        Ok(uuid)
    }

    /// Returns the GPUs that [`GpuDriver::list`] has left out since they did not answer, by their
    /// index at NVML, each with NVML's error.
    pub fn left_out(&self) -> Vec<(u32, GpuErrorCode)> {
        let all = lock(&self.left_out);
        all.iter()
            .map(|(index, code)| (*index, GpuErrorCode(*code)))
            .collect()
    }

    /// Logs once that a GPU is left out.
    fn note_left_out(&self, index: u32, failure: &Failure) {
        if lock(&self.left_out).insert((index, failure.code.0)) {
            tracing::warn!(index, code = %failure.code, detail = failure.detail, "a GPU does not answer: left out");
        }
    }
}

/// The model's error for a failed call.
pub(crate) fn error(op: GpuOp, gpu: Option<&GpuUuid>, failure: Failure) -> GpuError {
    GpuError {
        op,
        code: failure.code,
        gpu: gpu.cloned(),
        detail: failure.detail,
    }
}

#[deny(clippy::missing_trait_methods)]
impl GpuDriver for NvmlDriver {
    fn system(&self) -> Result<SystemFacts, GpuError> {
        let (library, fail) = (&self.library, |f| error(GpuOp::System, None, f));
        let nvml = library.optional(None, "version of NVML", library.nvml_version());
        let cuda = library.optional(None, "version of CUDA", library.cuda_version());
        let driver_version = library.driver_version().map_err(fail)?;
        // The calls and the kernel driver that keeps the limits: a library for tests has all calls.
        let memory_caps = match (
            MemoryCaps::since(&driver_version),
            library.has_memory_limits(),
        ) {
            (false, _) => MemoryCaps::OldDriver,
            (true, false) => MemoryCaps::NoCalls,
            (true, true) => MemoryCaps::Available,
        };
        Ok(SystemFacts {
            driver_version,
            nvml_version: nvml.map_err(fail)?,
            cuda_version: cuda.map_err(fail)?.map(CudaVersion::from_nvml),
            memory_caps,
            caps_linger: false,
            // NVML does not know the programs of the driver.
            mps: MpsAbility::default(),
        })
    }

    fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        let fail = |f| error(GpuOp::List, None, f);
        let count = self.library.count().map_err(fail)?;
        let mut uuids = Vec::new();
        for index in 0..count {
            match self.uuid_at(index) {
                Ok(uuid) => uuids.push(uuid),
                // An answer about NVML as a whole holds for every index.
                Err(f) if concerns_all(GpuOp::List, f.code) => return Err(fail(f)),
                // A bad GPU does not hide the others.
                Err(f) => self.note_left_out(index, &f),
            }
        }
        Ok(uuids)
    }

    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        let handle = self.handle(GpuOp::Facts, gpu)?;
        let fail = |f| error(GpuOp::Facts, Some(gpu), of_present(f));
        let facts = facts::read(&self.library, handle, gpu).map_err(fail)?;
        self.believed(gpu, facts.mig_mode).map_err(fail)?;
        // Kept answers are asked for again in the reading that this is part of.
        self.capabilities.age(|of| of == gpu);
        if facts.mig_mode.is_on() {
            self.profiles.age(|of| of == gpu);
            self.compute_profiles.age(|(of, _)| of == gpu);
        }
        Ok(facts)
    }

    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        let fail = |f| error(GpuOp::MigMode, Some(gpu), f);
        let handle = match self.handle(GpuOp::MigMode, gpu) {
            Err(lost) if lost.code == GpuErrorCode::GPU_IS_LOST || ends_session(lost.code) => {
                return Err(lost);
            }
            Err(_) => self.handle_by_list(gpu).map_err(fail)?,
            Ok(handle) => handle,
        };
        facts::mig_mode(&self.library, handle)
            .and_then(|mode| self.believed(gpu, mode))
            .map_err(|f| fail(of_present(f)))
    }

    /// Process ids are those of the PID namespace NVML runs in: the plugin needs the host's.
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        let handle = self.handle(GpuOp::Processes, gpu)?;
        let fail = |f| error(GpuOp::Processes, Some(gpu), f);
        // Graphics processes are not asked for: a display server holds no GPU for computing.
        let compute = self.library.compute_processes(handle).map_err(fail)?;
        let mps = match self.library.mps_processes(handle) {
            Err(failure) if failure.means_absent() => Vec::new(),
            // A process may compute through MPS: an unknown list is not an empty one.
            answer => answer.map_err(fail)?,
        };
        let mut all = BTreeMap::<_, GpuProcess>::new();
        for process in compute.into_iter().chain(mps) {
            let key = (process.pid, process.gpu_instance, process.compute_instance);
            // A process in both lists is one, whose memory each of them has in full.
            let known = all.entry(key).or_insert_with(|| process.clone());
            known.memory_bytes = known.memory_bytes.max(process.memory_bytes);
        }
        Ok(all.into_values().collect())
    }

    /// Nothing: a session is let go by dropping it.
    fn release(&self) {}

    /// None: calls block until they are done.
    fn changes_in_flight(&self, _: &GpuUuid) -> Vec<GpuOp> {
        Vec::new()
    }

    fn vitals(&self, gpu: &GpuUuid) -> Result<GpuVitals, GpuError> {
        self.on(GpuOp::Vitals, gpu, health::vitals)
    }

    fn wait_events(&self, at_most: Duration) -> Result<GpuEvents, GpuError> {
        let fail = |f| error(GpuOp::Events, None, f);
        // A single thread waits at a time. The set of a GPU that was unbound hears nothing more of
        // it.
        let mut kept = lock(&self.watch);
        if self.rebound.swap(false, Ordering::Relaxed)
            && let Some(old) = kept.take()
        {
            old.end(&self.library);
        }
        let watch = match &mut *kept {
            Some(watch) => watch,
            none => none.insert(Watch::begin(&self.library).map_err(fail)?),
        };
        // Register GPUs that came, or that refused before.
        if watch.is_due() {
            let listed = self.list()?.into_iter();
            let handles =
                listed.filter_map(|uuid| Some((self.handle(GpuOp::Events, &uuid).ok()?, uuid)));
            if let Err(failure) = watch.join(&self.library, handles) {
                kept.take()
                    .into_iter()
                    .for_each(|broken| broken.end(&self.library));
                return Err(fail(failure));
            }
        }
        // Wait. A failure keeps the set: the driver remembers events for it.
        watch.wait(&self.library, at_most).map_err(fail)
    }

    /// A MIG device is looked up each time: its handle ends with it.
    fn memory(&self, gpu: &GpuUuid, part: Option<&MigDevice>) -> Result<GpuMemory, GpuError> {
        self.on(GpuOp::Memory, gpu, |library, handle| {
            library.memory_v2(match part {
                Some(part) => library.handle_by_uuid(part.uuid.as_str())?,
                None => handle,
            })
        })
    }

    fn utilization(&self, gpu: &GpuUuid) -> Result<u32, GpuError> {
        self.on(GpuOp::Utilization, gpu, Library::utilization)
    }

    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since: u64,
    ) -> Result<Vec<ProcessSample>, GpuError> {
        let mut samples = self.on(GpuOp::ProcessUtilization, gpu, |l, h| {
            l.process_utilization(h, since)
        })?;
        samples.sort_unstable();
        Ok(samples)
    }

    fn sm_utilization(
        &self,
        gpu: &GpuUuid,
        part: Option<&MigDevice>,
    ) -> Result<Option<f64>, GpuError> {
        self.on(GpuOp::SmUtilization, gpu, |l, h| {
            self.gpm.measure(l, h, gpu, part)
        })
    }

    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        self.on(GpuOp::PersistenceMode, gpu, Library::persistence_mode)
    }

    fn memory_limit(&self, gpu: &GpuUuid, cgroup: &Path) -> Result<MemoryLimit, GpuError> {
        self.on(GpuOp::MemoryLimit, gpu, |l, h| l.memory_limit(h, cgroup))
    }

    fn set_memory_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        hard: Option<u64>,
    ) -> Result<(), GpuError> {
        self.on(GpuOp::SetMemoryLimit, gpu, |l, h| {
            l.set_memory_limit(h, cgroup, hard)
        })
    }

    fn mig_capabilities(&self, gpu: &GpuUuid) -> Result<MigCapabilities, GpuError> {
        self.on(GpuOp::MigCapabilities, gpu, |library, handle| {
            self.capabilities.get_or_ask(gpu, || {
                let (found, is_whole) = mig::capabilities(library, handle)?;
                let ids = found.profiles().iter().map(|profile| profile.id);
                self.profiles.learn_also(gpu, ids.collect());
                Ok((found, is_whole))
            })
        })
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<MigActivation, GpuError> {
        let result = self.on(GpuOp::SetMigMode, gpu, |library, handle| {
            mig::set_mode(library, handle, on)
        });
        // The GPU may have been unbound or reset on the way, even if that failed.
        lock(&self.handles).remove(gpu);
        self.rebound.store(true, Ordering::Relaxed);
        result
    }

    fn set_compute_mode(&self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), GpuError> {
        self.on(GpuOp::SetComputeMode, gpu, |library, handle| {
            library.set_compute_mode(handle, to.to_nvml())
        })
    }

    fn gpu_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        self.on(GpuOp::GpuInstances, gpu, |library, handle| {
            let ask = || mig::profile_ids(library, handle);
            let profiles = self.profiles.all_ever(gpu, ask)?;
            mig::gpu_instances(library, handle, &profiles)
        })
    }

    fn create_gpu_instance(
        &self,
        gpu: &GpuUuid,
        profile: GpuInstanceProfileId,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError> {
        self.on(GpuOp::CreateGpuInstance, gpu, |library, handle| {
            mig::create_gpu_instance(library, handle, profile, placement)
        })
    }

    fn destroy_gpu_instance(&self, gpu: &GpuUuid, id: GpuInstanceId) -> Result<(), GpuError> {
        self.on(GpuOp::DestroyGpuInstance, gpu, |l, h| {
            mig::destroy_gpu_instance(l, h, id)
        })
    }

    fn compute_profiles(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstanceProfile>, GpuError> {
        self.on(GpuOp::ComputeProfiles, gpu, |l, h| {
            mig::compute_profiles(l, h, gpu_instance)
        })
    }

    fn compute_instances(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstance>, GpuError> {
        self.on(GpuOp::ComputeInstances, gpu, |library, handle| {
            let instance = library.gpu_instance_by_id(handle, gpu_instance)?;
            let profile = library.gpu_instance_info(instance)?.profile;
            let ask = || mig::compute_profile_ids(library, instance);
            let of = (gpu.clone(), profile);
            let profiles = self.compute_profiles.all_ever(&of, ask)?;
            mig::compute_instances(library, instance, gpu_instance, &profiles)
        })
    }

    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        profile: ComputeInstanceProfileId,
    ) -> Result<ComputeInstance, GpuError> {
        self.on(GpuOp::CreateComputeInstance, gpu, |l, h| {
            mig::create_compute_instance(l, h, gpu_instance, profile)
        })
    }

    fn destroy_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        id: ComputeInstanceId,
    ) -> Result<(), GpuError> {
        self.on(GpuOp::DestroyComputeInstance, gpu, |l, h| {
            mig::destroy_compute_instance(l, h, gpu_instance, id)
        })
    }
}

/// Returns the failure of a question about a GPU that has a handle. It may say that there is no
/// such thing; the GPU is there all the same.
fn of_present(failure: Failure) -> Failure {
    match failure.code {
        GpuErrorCode::NOT_FOUND | GpuErrorCode::GPU_NOT_FOUND => Failure {
            code: GpuErrorCode::UNKNOWN,
            detail: Some(format!(
                "NVML answered {} about a GPU that it has",
                failure.code
            )),
        },
        _ => failure,
    }
}

/// Returns whether a code says something about NVML as a whole and not about one GPU.
/// `LIBRARY_NOT_FOUND` does so only where NVML is opened ([`GpuOp::Init`]): some calls need other
/// libraries, and mean those.
pub(crate) fn concerns_all(op: GpuOp, code: GpuErrorCode) -> bool {
    op == GpuOp::Init || code == GpuErrorCode::FUNCTION_NOT_FOUND || ends_session(code)
}

impl fmt::Debug for NvmlDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmlDriver")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}
