//! MIG on an [`Engine`]: mode, occupancy, ids, and the codes NVML refuses with.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_model::mig::{
    ComputeInstance, ComputeInstanceId, ComputeInstanceProfile, ComputeInstanceProfileId, Engines,
    GpuInstance, GpuInstanceId, GpuInstanceProfile, GpuInstanceProfileId, MigCapabilities,
    Placement,
};
use divvy_model::{ComputeMode, GpuError, GpuErrorCode, GpuOp, GpuUuid, MigActivation, MigMode};
use serde::{Deserialize, Serialize};

use crate::engine::{Engine, SimGpu, lowest_free};
use crate::{compute_profiles, mig_capabilities};

/// The first driver that reports profiles and placements while MIG mode is off.
const QUERY_WITHOUT_MIG: u32 = 550;

/// A GPU instance that lives, with what lives in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimInstance {
    /// NVML's description of it.
    pub instance: GpuInstance,
    /// Its compute instances, by id.
    pub compute: Vec<ComputeInstance>,
}

/// Time that changes take, in milliseconds; half of it before the change and half after. Nothing by
/// default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MigLatency {
    /// Creating a GPU instance.
    pub create_ms: u64,
    /// Destroying a GPU instance.
    pub destroy_ms: u64,
    /// Setting MIG mode.
    pub mode_ms: u64,
}

impl MigLatency {
    /// Returns the time that an operation takes.
    pub fn of(self, op: GpuOp) -> Duration {
        Duration::from_millis(match op {
            GpuOp::CreateGpuInstance => self.create_ms,
            GpuOp::DestroyGpuInstance => self.destroy_ms,
            GpuOp::SetMigMode => self.mode_ms,
            _ => 0,
        })
    }
}

impl SimGpu {
    /// Ends what does not survive that the kernel module is unloaded, or a reset of Hopper and
    /// later.
    pub(crate) fn unload(&mut self) {
        self.instances.clear();
        // Not kept without the driver, unlike MIG mode before Hopper.
        self.facts.compute_mode = self.facts.compute_mode.map(|_| ComputeMode::Default);
        let keeps = !self.facts.architecture.toggles_mig_without_reset();
        if let MigMode::Supported { current, pending } = &mut self.facts.mig_mode {
            *current = *pending && keeps;
            *pending = *current;
        }
    }

    fn instance(&self, id: GpuInstanceId) -> Result<&SimInstance, GpuErrorCode> {
        self.instances
            .iter()
            .find(|i| i.instance.id == id)
            .ok_or(GpuErrorCode::NOT_FOUND)
    }

    fn mig_is_on(&self) -> Result<(), GpuErrorCode> {
        if self.facts.mig_mode.is_on() {
            Ok(())
        } else {
            Err(GpuErrorCode::NOT_SUPPORTED)
        }
    }

    /// Returns the profiles of the board, under the names the driver has for them.
    fn capabilities(&self) -> Result<MigCapabilities, GpuErrorCode> {
        if self.facts.mig_mode == MigMode::Unsupported {
            return Err(GpuErrorCode::NOT_SUPPORTED);
        }
        let board = mig_capabilities(&self.model).ok_or(GpuErrorCode::NOT_SUPPORTED)?;
        let name = |p: &GpuInstanceProfile| {
            board
                .name(p)
                .map(|name| format!("MIG {name}"))
                .or(p.driver_name.clone())
        };
        let named = board.profiles().iter().map(|p| GpuInstanceProfile {
            driver_name: name(p),
            ..p.clone()
        });
        Ok(MigCapabilities::new(
            self.facts.memory_bytes.unwrap_or(0),
            named,
        ))
    }

    fn set_mode(&mut self, on: bool) -> Result<MigActivation, GpuErrorCode> {
        let busy =
            !(self.processes.is_empty() && self.clients.is_empty() && self.instances.is_empty());
        let at_once = self.facts.architecture.toggles_mig_without_reset();
        let MigMode::Supported { current, pending } = &mut self.facts.mig_mode else {
            return Err(GpuErrorCode::NOT_SUPPORTED);
        };
        *pending = on;
        if *current == on {
            return Ok(MigActivation::Active);
        }
        if !at_once {
            return Ok(MigActivation::Pending(GpuErrorCode::RESET_REQUIRED));
        }
        if busy {
            return Ok(MigActivation::Pending(GpuErrorCode::IN_USE));
        }
        *current = on;
        self.facts.minor = self.next_minor.take().or(self.facts.minor);
        Ok(MigActivation::Active)
    }

    fn create(
        &mut self,
        profile: GpuInstanceProfileId,
        placement: Placement,
    ) -> Result<GpuInstance, GpuErrorCode> {
        self.mig_is_on()?;
        let caps = self.capabilities()?;
        let found = caps
            .profile(profile)
            .ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
        if caps.placement(profile, placement.start) != Some(placement) {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        // A context on the whole GPU has its memory and channels everywhere.
        if self.processes.iter().any(|p| p.gpu_instance.is_none()) {
            return Err(GpuErrorCode::IN_USE);
        }
        let taken = self
            .instances
            .iter()
            .any(|i| i.instance.placement.overlaps(placement));
        if taken || self.lacks_engines(&caps, found) {
            return Err(GpuErrorCode::INSUFFICIENT_RESOURCES);
        }
        let id = instance_id(placement, caps.memory_slices());
        let instance = GpuInstance {
            id,
            profile,
            placement,
        };
        self.instances.push(SimInstance {
            instance,
            compute: Vec::new(),
        });
        self.instances.sort_by_key(|i| i.instance.id);
        Ok(instance)
    }

    /// Returns whether the GPU lacks the media engines for one more: as many as its largest profile
    /// has are all it has.
    fn lacks_engines(&self, caps: &MigCapabilities, more: &GpuInstanceProfile) -> bool {
        let living = self
            .instances
            .iter()
            .filter_map(|i| caps.profile(i.instance.profile));
        let used: Vec<Engines> = living.chain([more]).map(|p| p.engines).collect();
        let kinds: [fn(&Engines) -> u32; 4] =
            [|e| e.decoders, |e| e.encoders, |e| e.jpeg, |e| e.ofa];
        kinds.iter().any(|count| {
            let all = caps
                .profiles()
                .iter()
                .map(|p| count(&p.engines))
                .max()
                .unwrap_or(0);
            used.iter().map(count).sum::<u32>() > all
        })
    }

    fn destroy(&mut self, id: GpuInstanceId) -> Result<(), GpuErrorCode> {
        self.mig_is_on()?;
        if !self.instance(id)?.compute.is_empty() || self.has_processes_in(id) {
            return Err(GpuErrorCode::IN_USE);
        }
        self.instances.retain(|i| i.instance.id != id);
        Ok(())
    }

    /// Processes are known by their GPU instance; which compute instance they are in is not.
    fn has_processes_in(&self, id: GpuInstanceId) -> bool {
        self.processes.iter().any(|p| p.gpu_instance == Some(id.0))
    }

    fn offered(&self, id: GpuInstanceId) -> Result<Vec<ComputeInstanceProfile>, GpuErrorCode> {
        self.mig_is_on()?;
        let profile = self.instance(id)?.instance.profile;
        let caps = self.capabilities()?;
        Ok(compute_profiles(
            caps.profile(profile).ok_or(GpuErrorCode::UNKNOWN)?,
        ))
    }

    /// The id of a compute instance that may be created.
    fn free_compute_id(
        &self,
        id: GpuInstanceId,
        profile: ComputeInstanceProfileId,
    ) -> Result<ComputeInstanceId, GpuErrorCode> {
        let offered = self.offered(id)?;
        let slices = |profile| offered.iter().find(|p| p.id == profile).map(|p| p.slices);
        let asked = slices(profile).ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
        let living = &self.instance(id)?.compute;
        let used: u32 = living.iter().filter_map(|c| slices(c.profile)).sum();
        let all = offered.iter().map(|p| p.slices).max().unwrap_or(0);
        if used + asked > all {
            return Err(GpuErrorCode::INSUFFICIENT_RESOURCES);
        }
        Ok(ComputeInstanceId(lowest_free(
            0,
            &living.iter().map(|c| c.id.0).collect::<BTreeSet<_>>(),
        )))
    }
}

/// Ids follow from size and place: 0 for the whole GPU, 1 and 2 for halves, 3 to 6 for quarters, 7
/// to 14 for eighths.
fn instance_id(placement: Placement, slices: u32) -> GpuInstanceId {
    let size = placement.size.max(1);
    let parts = (slices / size).max(1);
    GpuInstanceId(parts - 1 + placement.start / size)
}

impl Engine {
    /// See [`divvy_model::GpuDriver::mig_capabilities`].
    pub fn mig_capabilities(&self, gpu: &GpuUuid) -> Result<MigCapabilities, GpuError> {
        let op = GpuOp::MigCapabilities;
        let found = self.find(op, gpu)?;
        if !found.facts.mig_mode.is_on() && !self.reports_profiles_without_mig() {
            return Err(GpuError::on_gpu(op, GpuErrorCode::NOT_SUPPORTED, gpu));
        }
        found
            .capabilities()
            .map_err(|code| GpuError::on_gpu(op, code, gpu))
    }

    /// Returns whether the driver is recent enough to report profiles and placements while MIG mode
    /// is off (R550).
    pub fn reports_profiles_without_mig(&self) -> bool {
        let major = self
            .system
            .driver_version
            .split('.')
            .next()
            .and_then(|major| major.parse::<u32>().ok());
        major.is_some_and(|major| major >= QUERY_WITHOUT_MIG)
    }

    /// See [`divvy_model::GpuDriver::set_mig_mode`]. At once on Hopper and later unless the GPU is
    /// in use; pending on others until [`Engine::reset_gpu`] or a reboot.
    pub fn set_mig_mode(&mut self, gpu: &GpuUuid, on: bool) -> Result<MigActivation, GpuError> {
        self.change(GpuOp::SetMigMode, gpu, |g| g.set_mode(on))
    }

    /// See [`divvy_model::GpuDriver::set_compute_mode`]. A limit of a single process is nothing for
    /// a GPU in MIG mode.
    pub fn set_compute_mode(&mut self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), GpuError> {
        self.change(GpuOp::SetComputeMode, gpu, |g| {
            let in_mig = g.facts.mig_mode.is_on() && to == ComputeMode::ExclusiveProcess;
            let mode = g.facts.compute_mode.as_mut().filter(|_| !in_mig);
            *mode.ok_or(GpuErrorCode::NOT_SUPPORTED)? = to;
            Ok(())
        })
    }

    /// Resets a GPU as `nvidia-smi --gpu-reset` does: a pending MIG mode takes effect, instances
    /// are gone, and so is what a reset cures. Refused while the GPU is in use.
    pub fn reset_gpu(&mut self, gpu: &GpuUuid) -> Result<(), GpuError> {
        self.change(GpuOp::SetMigMode, gpu, |g| {
            if !(g.processes.is_empty() && g.clients.is_empty()) {
                return Err(GpuErrorCode::IN_USE);
            }
            g.instances.clear();
            if let MigMode::Supported { current, pending } = &mut g.facts.mig_mode {
                *current = *pending;
            }
            g.heal();
            Ok(())
        })
    }

    /// See [`divvy_model::GpuDriver::gpu_instances`].
    pub fn gpu_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        // Measured on an H200 with 580.159.04; which branch was the first to do so is not known.
        let answers_without = self.driver_branch() >= Some(580);
        self.ask(GpuOp::GpuInstances, gpu, |g| {
            let is_able = g.facts.mig_mode != MigMode::Unsupported;
            if !(answers_without && is_able) {
                g.mig_is_on()?;
            }
            Ok(g.instances.iter().map(|i| i.instance).collect())
        })
    }

    /// See [`divvy_model::GpuDriver::create_gpu_instance`].
    pub fn create_gpu_instance(
        &mut self,
        gpu: &GpuUuid,
        profile: GpuInstanceProfileId,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError> {
        self.change(GpuOp::CreateGpuInstance, gpu, |g| {
            g.create(profile, placement)
        })
    }

    /// See [`divvy_model::GpuDriver::destroy_gpu_instance`].
    pub fn destroy_gpu_instance(
        &mut self,
        gpu: &GpuUuid,
        id: GpuInstanceId,
    ) -> Result<(), GpuError> {
        self.change(GpuOp::DestroyGpuInstance, gpu, |g| g.destroy(id))
    }

    /// See [`divvy_model::GpuDriver::compute_profiles`].
    pub fn compute_profiles(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstanceProfile>, GpuError> {
        self.ask(GpuOp::ComputeProfiles, gpu, |g| {
            let mut offered = g.offered(gpu_instance)?;
            offered.sort_by_key(|p| p.index);
            Ok(offered)
        })
    }

    /// See [`divvy_model::GpuDriver::compute_instances`].
    pub fn compute_instances(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstance>, GpuError> {
        self.ask(GpuOp::ComputeInstances, gpu, |g| {
            g.mig_is_on()?;
            Ok(g.instance(gpu_instance)?.compute.clone())
        })
    }

    /// See [`divvy_model::GpuDriver::create_compute_instance`].
    pub fn create_compute_instance(
        &mut self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        profile: ComputeInstanceProfileId,
    ) -> Result<ComputeInstance, GpuError> {
        let op = GpuOp::CreateComputeInstance;
        let id = self.ask(op, gpu, |g| g.free_compute_id(gpu_instance, profile))?;
        self.compute_instances_made += 1;
        let (node, serial) = (self.node_number, self.compute_instances_made);
        #[expect(clippy::expect_used, reason = "the form is fixed; tested")]
        let uuid = format!("MIG-12345678-1234-5678-{node:04x}-{serial:012x}")
            .parse()
            .expect("a MIG UUID");
        let made = ComputeInstance {
            id,
            gpu_instance,
            profile,
            uuid,
        };
        self.change(op, gpu, |g| {
            let inside = g
                .instances
                .iter_mut()
                .find(|i| i.instance.id == gpu_instance);
            let inside = inside.ok_or(GpuErrorCode::NOT_FOUND)?;
            inside.compute.push(made.clone());
            inside.compute.sort_by_key(|c| c.id);
            Ok(made)
        })
    }

    /// See [`divvy_model::GpuDriver::destroy_compute_instance`].
    pub fn destroy_compute_instance(
        &mut self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        id: ComputeInstanceId,
    ) -> Result<(), GpuError> {
        self.change(GpuOp::DestroyComputeInstance, gpu, |g| {
            g.mig_is_on()?;
            if g.instance(gpu_instance)?.compute.iter().all(|c| c.id != id) {
                return Err(GpuErrorCode::NOT_FOUND);
            }
            if g.has_processes_in(gpu_instance) {
                return Err(GpuErrorCode::IN_USE);
            }
            for inside in g
                .instances
                .iter_mut()
                .filter(|i| i.instance.id == gpu_instance)
            {
                inside.compute.retain(|c| c.id != id);
            }
            Ok(())
        })
    }

    /// An administrator with nvidia-smi makes an instance, and a compute instance that takes it
    /// whole. MIG mode must be on and the placement free.
    pub fn make_foreign_instance(
        &mut self,
        gpu: &GpuUuid,
        profile: GpuInstanceProfileId,
        start: u32,
    ) -> Result<ComputeInstance, GpuError> {
        let op = GpuOp::CreateGpuInstance;
        let bad = || GpuError::on_gpu(op, GpuErrorCode::INVALID_ARGUMENT, gpu);
        let caps = self.mig_capabilities(gpu)?;
        let placement = caps.placement(profile, start).ok_or_else(bad)?;
        let made = self.create_gpu_instance(gpu, profile, placement)?;
        let offered = self.compute_profiles(gpu, made.id)?;
        let whole = caps
            .profile(profile)
            .and_then(|p| p.whole_compute_profile(&offered))
            .ok_or_else(bad)?;
        self.create_compute_instance(gpu, made.id, whole.id)
    }

    pub(crate) fn ask<T>(
        &self,
        op: GpuOp,
        gpu: &GpuUuid,
        ask: impl FnOnce(&SimGpu) -> Result<T, GpuErrorCode>,
    ) -> Result<T, GpuError> {
        ask(self.find(op, gpu)?).map_err(|code| GpuError::on_gpu(op, code, gpu))
    }

    fn change<T>(
        &mut self,
        op: GpuOp,
        gpu: &GpuUuid,
        change: impl FnOnce(&mut SimGpu) -> Result<T, GpuErrorCode>,
    ) -> Result<T, GpuError> {
        self.find(op, gpu)?;
        let found = self
            .gpu(gpu)
            .ok_or_else(|| GpuError::on_gpu(op, GpuErrorCode::NOT_FOUND, gpu))?;
        change(found).map_err(|code| GpuError::on_gpu(op, code, gpu))
    }
}
