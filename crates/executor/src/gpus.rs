//! The files of GPUs: reading, changing and repairing them, and what they say of all GPUs. Written
//! under the GPU's lock only.

use std::collections::{BTreeMap, BTreeSet};

use divvy_claims::{MadeFor, ProcessOnGpu, Record, Stored, uses_of};
use divvy_gpu::{Fence, GpuState, MpsNote, Use};
use divvy_model::mig::GpuInstance;
use divvy_model::{
    BootId, ClaimUid, GpuError, GpuErrorCode, GpuTarget, GpuUuid, Grant, MigMode, MpsServer, Place,
    ShareUnit, Target, lock,
};

use crate::bring::ASK_WITHIN;
use crate::context::Context;
use crate::hardware::{AGREEING, Hardware};
use crate::records::{any_torn, fine};
use crate::state::Records;
use crate::{StoreError, chain};

/// GPU instances by GPU.
pub type Instances = BTreeMap<GpuUuid, Vec<GpuInstance>>;

/// The GPUs of the node: their files, and their hardware.
#[derive(Clone, Copy)]
pub(crate) struct Gpus<'a> {
    pub(crate) context: &'a Context,
    pub(crate) hardware: Hardware<'a>,
}

/// The state of a GPU as it counts in this boot, while it is changed.
#[derive(Debug)]
pub(crate) struct OpenState {
    pub(crate) state: GpuState,
    /// State that the file has now; `None` for a file that is to be written in any case.
    on_disk: Option<GpuState>,
    /// True if the file may be written: one of a later version is left alone.
    writable: bool,
}

impl<'a> Gpus<'a> {
    pub(crate) fn of(context: &'a Context) -> Self {
        Self {
            context,
            hardware: Hardware::of(context),
        }
    }

    /// Keeps what a prepare may do with GPUs on disk, so that a restart and the other instance
    /// know. GPUs that are not named keep what was granted last.
    pub(crate) fn grant(self, grants: &BTreeMap<GpuUuid, Grant>) -> Result<(), StoreError> {
        // In memory before the disk: a GPU whose file is lost later is made again with its grant
        // from here.
        lock(&self.context.grants).extend(grants.clone());
        // Write only what differs: a grant comes with every change of the pool.
        let known = self.context.state.gpus()?;
        let is_known = |gpu: &GpuUuid, grant: &Grant| {
            let state = known.get(gpu).and_then(|state| state.fine());
            state.map_or(GpuState::default().has(grant), |state| state.has(grant))
        };
        let unknown = grants.iter().filter(|(gpu, grant)| !is_known(gpu, grant));
        // A GPU whose lock is busy or whose file cannot be written keeps none of the others
        // waiting.
        let failed = unknown.filter_map(|(gpu, grant)| self.grant_one(gpu, *grant).err());
        failed.reduce(|first, _| first).map_or(Ok(()), Err)
    }

    fn grant_one(self, gpu: &GpuUuid, grant: Grant) -> Result<(), StoreError> {
        let _lock = self.context.lock_gpu(gpu).map_err(|error| StoreError {
            what: format!("the state of {gpu}"),
            action: "written",
            source: std::io::Error::other(error),
        })?;
        // Under the lock, since a call may be changing the file.
        let mut open = self.open(gpu)?;
        open.state.take(&grant);
        // The second copy first: what the file promises is noted there, whatever is lost.
        let caps = open.state.grant.caps;
        if open.writable && caps != self.context.state.promise(gpu)? {
            self.context.state.write_promise(gpu, caps)?;
        }
        self.save(gpu, &mut open)
    }

    /// Returns the open questions about GPUs in this boot.
    pub(crate) fn fences(self) -> Result<BTreeMap<GpuUuid, Vec<Fence>>, StoreError> {
        let boot = &self.context.config.boot;
        let fences = |state: &Stored<GpuState>| match state {
            Stored::Fine(state) => state.fences(boot).collect(),
            Stored::Corrupt { reason } => vec![Fence {
                claim: None,
                reason: format!("its state file cannot be read: {reason}"),
            }],
            Stored::Absent | Stored::Newer { .. } => Vec::new(),
        };
        let states = self.context.state.gpus()?.into_iter();
        Ok(states
            .map(|(gpu, state)| (gpu, fences(&state)))
            .filter(|(_, fences)| !fences.is_empty())
            .collect())
    }

    /// Returns the GPUs whose MIG mode divvy has changed, with the mode as it was found.
    pub(crate) fn mig_found(self) -> Result<BTreeMap<GpuUuid, bool>, StoreError> {
        let states = self.context.state.gpus()?.into_iter();
        Ok(states
            .filter_map(|(gpu, state)| Some((gpu, state.fine()?.mig?.found)))
            .collect())
    }

    /// Returns the processes on a GPU, but for those of its MPS servers, which are no user's. A
    /// server without a note is noted, so that a call takes it over or ends it like any other.
    /// Under the GPU's lock.
    pub(crate) fn processes(self, gpu: &GpuUuid) -> Result<Vec<ProcessOnGpu>, GpuError> {
        let mut found = list_processes(self.context, gpu)?;
        // Most GPUs have no process when they are asked, and then no supervisor is.
        if found.is_empty() {
            return Ok(found);
        }
        let until = self.context.now() + ASK_WITHIN;
        // Without an answer they count as a user's: the claim goes on holding.
        let running = self.hardware.mps.running(Some(gpu), until);
        let running = running.unwrap_or_default();
        let here = running.iter().filter(|(of, _)| of.gpu == *gpu);
        let pids: BTreeSet<u32> = here.clone().flat_map(|(_, one)| one.pids.clone()).collect();
        found.retain(|process| !pids.contains(&process.pid));
        note_servers(self, gpu, here.map(|(of, one)| (of.target, one.server)));
        Ok(found)
    }

    /// Returns the MPS servers that are noted in this boot.
    pub(crate) fn mps_servers(self) -> Result<BTreeMap<GpuTarget, MpsNote>, StoreError> {
        let boot = &self.context.config.boot;
        let mut all = BTreeMap::new();
        for (gpu, stored) in self.context.state.gpus()? {
            let state = stored.fine().map(|state| state.clone().in_boot(boot));
            for (target, noted) in state.into_iter().flat_map(|state| state.mps) {
                let gpu = gpu.clone();
                all.insert(GpuTarget { gpu, target }, noted);
            }
        }
        Ok(all)
    }

    /// Returns the units in which shares of GPUs were last published, of those that had any.
    pub(crate) fn share_units(self) -> Result<BTreeMap<GpuUuid, ShareUnit>, StoreError> {
        let states = self.context.state.gpus()?.into_iter();
        Ok(states
            .filter_map(|(gpu, state)| Some((gpu, state.fine()?.grant.share_unit?)))
            .collect())
    }

    /// Opens the state of a GPU: as it counts in this boot, with the instances that records were
    /// given and the file does not have. A file that cannot be read is made again from the records;
    /// while one of these cannot be read either, nothing is known of the GPU.
    pub(crate) fn open(self, gpu: &GpuUuid) -> Result<OpenState, StoreError> {
        let state = &self.context.state;
        let records = state.records()?;
        self.opened(gpu, state.gpu(gpu)?, &records)
    }

    /// Does the same with what was read under the GPU's lock.
    pub(crate) fn opened(
        self,
        gpu: &GpuUuid,
        stored: Stored<GpuState>,
        records: &Records,
    ) -> Result<OpenState, StoreError> {
        let Context { config, state, .. } = self.context;
        // A GPU of which nothing is to be noted has no file either.
        let may_be_lost = matches!(stored, Stored::Absent | Stored::Corrupt { .. });
        // Four answers of the file.
        let (on_disk, found, writable) = match stored {
            Stored::Fine(found) => (Some(found.clone()), found, true),
            Stored::Absent => (
                Some(GpuState::default()),
                without_file(self.context, gpu)?,
                true,
            ),
            // A later version knows more about the GPU than can be read here: nothing of it is
            // guessed, and nothing is written over it.
            Stored::Newer { .. } => (Some(GpuState::default()), GpuState::default(), false),
            Stored::Corrupt { reason } => {
                if any_torn(records) {
                    return Err(unreadable(gpu, &reason));
                }
                match state.copy_gpu_aside(gpu, self.context.now()) {
                    // Claims can be let go while the disk is full.
                    Err(error) if error.is_full() => {}
                    copied => copied?,
                }
                // Its settings before us are not known any more, so they are taken for what they
                // are now.
                (None, without_file(self.context, gpu)?, true)
            }
        };
        // Instances do not outlast a boot, and records know of some that the file lacks.
        let mut state = found.in_boot(&config.boot);
        let uses = uses(gpu, &config.boot, records);
        state.add_given(&uses);
        if may_be_lost {
            state.add_unsure(&uses);
        }
        Ok(OpenState {
            state,
            on_disk,
            writable,
        })
    }

    /// Writes the state of a GPU if it differs from the file.
    pub(crate) fn save(self, gpu: &GpuUuid, open: &mut OpenState) -> Result<(), StoreError> {
        let is_so = |on_disk: &GpuState| {
            *on_disk == open.state || (on_disk.is_default() && open.state.is_default())
        };
        if !open.writable || open.on_disk.as_ref().is_some_and(is_so) {
            return Ok(());
        }
        self.context.state.write_gpu(gpu, &open.state)?;
        open.on_disk = Some(open.state.clone());
        Ok(())
    }

    /// Writes the state of a GPU after something of it is gone. A failure holds nothing back: the
    /// next look finds again that it is gone.
    pub(crate) fn save_later(self, gpu: &GpuUuid, open: &mut OpenState) {
        if let Err(error) = self.save(gpu, open) {
            tracing::warn!(%gpu, error = chain(&error), "failed to update the GPU's file, will retry");
        }
    }

    /// Returns the instances that were made for claims and that no record holds, by claim.
    pub(crate) fn strays(self) -> Result<BTreeMap<ClaimUid, MadeFor>, StoreError> {
        let Context { config, state, .. } = self.context;
        let (gpus, records) = (state.gpus()?, state.records()?);
        let mut strays = BTreeMap::<ClaimUid, MadeFor>::new();
        for (gpu, stored) in &gpus {
            let noted = stored.fine().into_iter();
            for (place, instance) in noted.flat_map(|state| state.instances_in(&config.boot)) {
                if !is_held(gpu, place, &records) {
                    let of_claim = strays.entry(instance.made_for.clone()).or_default();
                    of_claim.insert((gpu.clone(), place), instance.clone());
                }
            }
        }
        Ok(strays)
    }

    /// Returns the strays that were made for one claim.
    pub(crate) fn strays_of(self, uid: &ClaimUid) -> Result<MadeFor, StoreError> {
        Ok(self.strays()?.remove(uid).unwrap_or_default())
    }

    /// Returns the strays that were made for one claim and still live, and drops the notes of those
    /// that do not; what cannot be read counts as there. Open questions have been settled. Under
    /// the locks of the GPUs concerned.
    pub(crate) fn living_of(self, uid: &ClaimUid) -> Result<MadeFor, StoreError> {
        let mut living = MadeFor::new();
        for ((gpu, place), instance) in self.strays_of(uid)? {
            let filling = self.hardware.filling(&gpu, place);
            let lives = filling.map_or(true, |there| {
                there.is_some_and(|there| there.is(&instance.life))
            });
            // A note about what is gone is dropped; a failure to write it is found again.
            if lives {
                living.insert((gpu, place), instance);
            } else {
                let mut open = self.open(&gpu)?;
                open.state.instances.remove(&place);
                self.save_later(&gpu, &mut open);
            }
        }
        Ok(living)
    }

    /// Returns GPU instances that neither a GPU's file nor a record accounts for: they were created
    /// outside of divvy and are never changed. For taints. A GPU that a call is working on, or that
    /// does not answer, keeps its last answer.
    pub(crate) fn foreign(self) -> Instances {
        let inventory = self.context.parts.inventory.inventory();
        let able = inventory
            .iter()
            .flat_map(|inventory| inventory.gpus.values());
        let gpus: Vec<_> = able
            .filter(|gpu| gpu.facts.mig_mode != MigMode::Unsupported)
            .map(|gpu| gpu.facts.uuid.clone())
            .collect();
        let mut last = lock(&self.context.last_foreign);
        for gpu in &gpus {
            // Under the lock nothing is made or removed between the two answers.
            let Ok(_lock) = self.context.lock_gpu(gpu) else {
                continue;
            };
            let Ok(mut living) = self.hardware.instances(gpu) else {
                continue;
            };
            // Most GPUs have none, and then no file is read.
            if !living.is_empty() {
                match self.accounted(gpu) {
                    Some(Ok(state)) => {
                        living.retain(|one| !state.accounts_for(&self.context.config.boot, one));
                    }
                    // A record of a later version may be about anything on its GPUs.
                    Some(Err(LaterVersion)) => living.clear(),
                    None => continue,
                }
            }
            last.insert(gpu.clone(), living);
        }
        last.retain(|gpu, living| gpus.contains(gpu) && !living.is_empty());
        last.clone()
    }

    /// Returns what accounts for the instances of a GPU; `None` if that cannot be read.
    fn accounted(self, gpu: &GpuUuid) -> Option<Result<GpuState, LaterVersion>> {
        let Context { config, state, .. } = self.context;
        let records = state.records().ok()?;
        let of_gpu = match state.gpu(gpu).ok()? {
            Stored::Fine(found) => found,
            Stored::Absent | Stored::Corrupt { .. } => GpuState::default(),
            Stored::Newer { .. } => return Some(Err(LaterVersion)),
        };
        let is_newer = records.values().any(|stored| match stored.as_ref() {
            Stored::Newer { head, .. } => head.gpus.contains(gpu),
            Stored::Absent | Stored::Corrupt { .. } | Stored::Fine(_) => false,
        });
        if is_newer {
            return Some(Err(LaterVersion));
        }
        let mut of_gpu = of_gpu.in_boot(&config.boot);
        let uses = uses(gpu, &config.boot, &records);
        of_gpu.add_given(&uses);
        of_gpu.add_unsure(&uses);
        Some(Ok(of_gpu))
    }
}

/// Lists the processes on a GPU. An error may be taken for "there are none", so that it has to come
/// several times in a row. A call that has timed out is not made again.
fn list_processes(context: &Context, gpu: &GpuUuid) -> Result<Vec<ProcessOnGpu>, GpuError> {
    let list = || context.parts.processes.on_gpu(gpu);
    let mut listed = list();
    for _ in 1..AGREEING {
        match &listed {
            Err(error) if error.code != GpuErrorCode::TIMEOUT => listed = list(),
            _ => break,
        }
    }
    listed
}

/// Notes MPS servers that run without a note: their start was answered with an error, and what it
/// had started could not be ended.
fn note_servers(gpus: Gpus<'_>, gpu: &GpuUuid, running: impl Iterator<Item = (Target, MpsServer)>) {
    let mut running = running.peekable();
    if running.peek().is_none() {
        return;
    }
    let Ok(mut open) = gpus.open(gpu) else {
        return;
    };
    for (target, server) in running {
        let noted = open.state.mps.entry(target);
        noted.or_insert(MpsNote::new(server, true));
    }
    gpus.save_later(gpu, &mut open);
}

/// Returns the uses of a GPU that records name.
fn uses(gpu: &GpuUuid, boot: &BootId, records: &Records) -> Vec<Use> {
    fine(records)
        .flat_map(|record| uses_of(record, gpu, boot))
        .collect()
}

/// A file that a later version of divvy has written.
struct LaterVersion;

/// Returns whether a record that can be read holds a place.
pub(crate) fn is_held(gpu: &GpuUuid, place: Place, records: &Records) -> bool {
    let devices = fine(records).flat_map(|record: &Record| &record.devices);
    devices
        .filter(|device| device.gpu == *gpu)
        .any(|device| device.own_place() == Some(place))
}

fn unreadable(gpu: &GpuUuid, reason: &str) -> StoreError {
    StoreError {
        what: format!("the state of {gpu} ({reason}; a claim's record cannot be read either)"),
        action: "rebuilt",
        source: std::io::ErrorKind::InvalidData.into(),
    }
}

/// Returns the state of a GPU without a file: what was granted to this process, and the promise of
/// caps, if there was one.
pub(crate) fn without_file(context: &Context, gpu: &GpuUuid) -> Result<GpuState, StoreError> {
    let mut state = GpuState::default();
    state.grant.caps = context.state.promise(gpu)?;
    let grants = lock(&context.grants);
    if let Some(grant) = grants.get(gpu) {
        state.take(grant);
    }
    Ok(state)
}
