//! Access of tests to claims' records and GPUs' files, in words of their own. All that depends on
//! how the product stores it is in here: the tests assert on these types.

use divvy_cdi::{Hook, Stage};
use divvy_claims::{Caller, decode_gpu_state, encode_gpu_state, holds_on};
use divvy_gpu::{Cause, ChangeError, Changed as Kept, Goal, GpuState, Instance, Life, Scope, Want};
use divvy_model::mig::{ComputeInstanceId, GpuInstanceId, Partition};
use divvy_model::{BootId, ComputeMode, Sharing, Target};

use super::*;

/// A partition as it was made: ids and UUID are new at every creation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Made {
    pub gi: GpuInstanceId,
    pub ci: ComputeInstanceId,
    pub uuid: MigUuid,
}

/// Progress of an instance that a GPU's file notes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Far {
    /// It may have been made.
    Begun,
    /// Its GPU instance is made.
    Half(GpuInstanceId),
    Whole(Made),
}

/// An instance that a GPU's file notes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Noted {
    pub made_for: ClaimUid,
    pub place: Partition,
    pub far: Far,
    /// In which boot it was made.
    pub boot: BootId,
}

/// A setting of a GPU that we have changed and not given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Changed<T> {
    pub found: Option<T>,
    /// `None`: not known, or not kept.
    pub ours: Option<T>,
}

/// Settings of a GPU that a file says we have changed. `None`: nothing of ours.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Settings {
    pub mig: Option<Changed<bool>>,
    pub compute: Option<Changed<ComputeMode>>,
    pub slice: Option<Changed<TimeSlice>>,
}

/// An open question about a GPU: nothing new is put there until it is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Open {
    /// Claim of a call whose outcome is not known; `None`: the GPU's own file cannot be read.
    pub claim: Option<ClaimUid>,
    pub boot: BootId,
}

/// Content of a GPU's file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GpuPicture {
    pub settings: Settings,
    /// By place.
    pub noted: Vec<Noted>,
    pub open: Vec<Open>,
    pub grant: Grant,
}

impl GpuPicture {
    /// Returns the picture of a GPU that nothing was done to.
    pub(crate) fn untouched(may_change_mode: bool) -> Self {
        Self {
            grant: Grant {
                may_change_mode: Some(may_change_mode),
                offers_partitions: Some(may_change_mode),
                share_time_slice: None,
                ..Grant::default()
            },
            ..Self::default()
        }
    }

    /// Returns true if MIG mode is on and we have turned it on.
    pub(crate) fn turned_mig_on(&self) -> bool {
        self.settings.mig.is_some_and(|mig| mig.ours == Some(true))
    }
}

// --- Records ---

/// Returns the partition that a claim was given for a device, be it ours or of others.
pub(crate) fn given(_record: &Record, device: &RecordedDevice) -> Option<Made> {
    let made = device.given.as_ref()?;
    Some(Made {
        gi: made.gi,
        ci: made.ci,
        uuid: made.uuid.clone(),
    })
}

/// The partition that a device is, whether or not it is made.
pub(crate) fn place_of(device: &RecordedDevice) -> Option<Partition> {
    Some(partition(&device.gpu, device.target.place()?))
}

fn partition(gpu: &GpuUuid, place: divvy_model::Place) -> Partition {
    Partition {
        gpu: gpu.clone(),
        profile: place.profile,
        placement: place.placement,
    }
}

/// Returns true if others have made the device: it is found, and never removed.
pub(crate) fn is_theirs(device: &RecordedDevice) -> bool {
    device.theirs
}

/// Returns true if a device counts: admin access reserves nothing.
pub(crate) fn counts(device: &RecordedDevice) -> bool {
    device.sharing.holds()
}

/// Returns true if a device is a whole GPU for one claim.
pub(crate) fn is_whole(device: &RecordedDevice) -> bool {
    (device.target, device.sharing) == (Target::Gpu, Sharing::Exclusive)
}

/// Returns true if something is begun for the claim of which the end is not on record.
pub(crate) fn is_under_way(record: &Record) -> bool {
    record.phase == Phase::Preparing
}

/// Places of the partitions that a claim was given, by GPU.
pub(crate) fn places_given(record: &Record) -> Vec<(GpuUuid, Place3)> {
    let devices = record.devices.iter();
    let mut places: Vec<_> = devices
        .filter(|device| given(record, device).is_some())
        .filter_map(place_of)
        .map(|place| (place.gpu.clone(), place3(&place)))
        .collect();
    places.sort();
    places
}

/// Profile, start and size of a partition.
pub(crate) type Place3 = (u32, u32, u32);

pub(crate) fn place3(place: &Partition) -> Place3 {
    let Partition {
        profile, placement, ..
    } = place;
    (profile.0, placement.start, placement.size)
}

/// Returns the partitions that a claim was given, by device; empty without a record.
pub(crate) fn made(world: &World, claim: &ClaimUid) -> Vec<(GpuUuid, Made)> {
    let records = world.lock().records();
    let record = records.get(claim).and_then(Stored::fine);
    let devices = record
        .into_iter()
        .flat_map(|r| r.devices.iter().map(move |d| (r, d)));
    devices
        .filter_map(|(record, device)| Some((device.gpu.clone(), given(record, device)?)))
        .collect()
}

// --- Files of GPUs ---

fn any_gpu() -> GpuUuid {
    "GPU-00000000-0000-0000-0000-000000000000".parse().unwrap()
}

fn file_of(gpu: &GpuUuid) -> String {
    format!("{gpu}.json")
}

/// Decodes the bytes of a GPU's file, which must be readable.
pub(crate) fn picture_of(bytes: &[u8]) -> GpuPicture {
    match decode_gpu_state(bytes) {
        Stored::Fine(state) => seen(&any_gpu(), &state),
        other => panic!("{other:?}"),
    }
}

/// Returns the content of a GPU's file; without a file, of a GPU that was never touched.
pub(crate) fn picture(world: &World, gpu: &GpuUuid) -> GpuPicture {
    let bytes = world.lock().file(Folder::Gpus, &file_of(gpu));
    match bytes.map(|bytes| decode_gpu_state(&bytes)) {
        None => seen(gpu, &GpuState::default()),
        Some(Stored::Fine(state)) => seen(gpu, &state),
        Some(other) => panic!("{other:?}"),
    }
}

/// Instances that a GPU's file notes.
pub(crate) fn noted(world: &World, gpu: &GpuUuid) -> Vec<Noted> {
    picture(world, gpu).noted
}

/// Settings of a GPU that we have changed.
pub(crate) fn settings(world: &World, gpu: &GpuUuid) -> Settings {
    picture(world, gpu).settings
}

/// Returns what policies let a prepare do with a GPU, as stored.
pub(crate) fn granted(world: &World, gpu: &GpuUuid) -> Grant {
    picture(world, gpu).grant
}

fn seen(gpu: &GpuUuid, state: &GpuState) -> GpuPicture {
    let boot = state
        .boot
        .clone()
        .unwrap_or_else(|| "none".parse().unwrap());
    let noted = state.instances.iter().map(|(place, instance)| Noted {
        made_for: instance.made_for.clone(),
        place: partition(gpu, *place),
        far: match &instance.life {
            Life::Begun => Far::Begun,
            Life::Half { gi } => Far::Half(*gi),
            Life::Whole(made) => Far::Whole(Made {
                gi: made.gi,
                ci: made.ci,
                uuid: made.uuid.clone(),
            }),
        },
        boot: boot.clone(),
    });
    let mut noted: Vec<_> = noted.collect();
    noted.sort_by_key(|note| (place3(&note.place), note.made_for.clone()));
    let open = state.instances.values().filter(|i| i.doubt.is_some());
    GpuPicture {
        settings: Settings {
            mig: state.mig.map(changed),
            compute: state.compute.map(changed),
            slice: state.slice.map(changed),
        },
        noted,
        open: open
            .map(|instance| Open {
                claim: Some(instance.made_for.clone()),
                boot: boot.clone(),
            })
            .collect(),
        grant: Grant {
            may_change_mode: Some(state.grant.may_change_mode),
            offers_partitions: Some(state.grant.offers_partitions),
            share_time_slice: state.grant.share_time_slice,
            share_unit: state.grant.share_unit,
            share_reserved_mib: state.grant.share_reserved_mib,
            share_burst: state.grant.share_burst,
            mps: state.grant.mps,
            mps_slots_in_partitions: state.grant.mps_slots_in_partitions,
            restarts_wedged_mps: state.grant.restarts_wedged_mps,
            caps: (!state.grant.caps.is_never()).then_some(state.grant.caps),
        },
    }
}

fn changed<T>(kept: Kept<T>) -> Changed<T> {
    Changed {
        found: Some(kept.found),
        ours: Some(kept.ours),
    }
}

/// The time slice that a GPU is to have for its holds, with what its policy gives to shares.
pub(crate) fn wanted_time_slice(world: &World, gpu: &GpuUuid) -> Option<TimeSlice> {
    let records = world.lock().records();
    let records = records.into_iter().map(|(uid, r)| (uid, Arc::new(r)));
    let bytes = world.lock().file(Folder::Gpus, &file_of(gpu));
    let state = bytes.map(|bytes| decode_gpu_state(&bytes).fine().unwrap().clone());
    let (state, boot) = (state.unwrap_or_default(), "any".parse().unwrap());
    let holds = holds_on(gpu, Caller::Round, &records.collect(), &boot);
    let scope = Scope::new(holds, state.grant, &state.instances);
    match Goal::of(&scope, &state.mps).slice {
        Want::To(slice) => Some(slice),
        Want::Found => None,
    }
}

// --- Files as a crash, a bad disk or a person leaves them ---

/// Puts these bytes in the place of a GPU's file.
pub(crate) fn tear_gpu(world: &World, gpu: &GpuUuid, bytes: &[u8]) {
    world.lock().put(Folder::Gpus, &file_of(gpu), Some(bytes));
}

/// Removes a GPU's file.
pub(crate) fn lose_gpu_file(world: &World, gpu: &GpuUuid) {
    world.lock().put(Folder::Gpus, &file_of(gpu), None);
}

/// Puts these bytes in the place of a claim's record.
pub(crate) fn tear(world: &World, claim: &ClaimUid, bytes: &[u8]) {
    let name = format!("{claim}.json");
    world.lock().put(Folder::Claims, &name, Some(bytes));
}

/// Removes a claim's record.
pub(crate) fn lose(world: &World, claim: &ClaimUid) {
    let name = format!("{claim}.json");
    world.lock().put(Folder::Claims, &name, None);
}

fn change(world: &World, gpu: &GpuUuid, change: impl FnOnce(&mut GpuState)) {
    let mut state = match world.lock().file(Folder::Gpus, &file_of(gpu)) {
        None => GpuState::default(),
        Some(bytes) => decode_gpu_state(&bytes).fine().unwrap().clone(),
    };
    change(&mut state);
    tear_gpu(world, gpu, &encode_gpu_state(&state));
}

/// Drops the notes of instances from a GPU's file that are not to be kept.
pub(crate) fn keep_notes(world: &World, gpu: &GpuUuid, keep: impl Fn(&Noted) -> bool) {
    let noted = noted(world, gpu);
    change(world, gpu, |state| {
        state.instances.retain(|place, _| {
            let at = place3(&partition(gpu, *place));
            noted
                .iter()
                .any(|note| place3(&note.place) == at && keep(note))
        });
    });
}

/// Writes an open question into a GPU's file: about the first instance that it notes for the claim,
/// or one of its own.
pub(crate) fn open_question(world: &World, gpu: &GpuUuid, question: &Open) {
    let claim = question.claim.clone().expect("of a claim");
    change(world, gpu, |state| {
        state.boot = Some(question.boot.clone());
        let doubt = Some("not known".to_owned());
        let known = state.instances.values_mut().find(|i| i.made_for == claim);
        if let Some(instance) = known {
            instance.doubt = doubt;
            return;
        }
        let place = divvy_model::Place {
            profile: divvy_model::mig::GpuInstanceProfileId(19),
            placement: divvy_model::mig::Placement { start: 6, size: 1 },
        };
        let instance = Instance {
            made_for: claim,
            life: Life::Begun,
            doubt,
        };
        state.instances.insert(place, instance);
    });
}

// --- Ports ---

/// Failures that `nvidia-smi` comes back with, or does not: it was not done, or it is not known.
pub(super) fn not_done(what: &str) -> ChangeError {
    ChangeError::NotDone(Cause::new(what))
}

pub(super) fn unknown(what: &str) -> ChangeError {
    ChangeError::Unknown(Cause::new(what))
}

impl From<Dead> for ChangeError {
    fn from(_: Dead) -> Self {
        unknown("the process is dead")
    }
}

impl DeviceEdits for World {
    fn common(&self) -> Result<Arc<CommonEdits>, EditsError> {
        self.common_edits()
    }
    fn device(&self, gpu: &Gpu, device: &RecordedDevice) -> Result<ContainerEdits, EditsError> {
        let made = device.given.as_ref();
        Ok(Self::edits_of(gpu, made.map(|made| &made.uuid)))
    }
    fn cap(&self, claim: &ClaimUid, device: &str) -> Option<Hook> {
        let args = ["limits", claim.as_str(), device].map(str::to_owned);
        let path = "/opt/divvy/hook".to_owned();
        Some(Hook::new(
            Stage::CreateRuntime,
            path,
            args.to_vec(),
            Vec::new(),
            30,
        ))
    }
    fn attributes(&self, inventory: &Inventory, device: &RecordedDevice) -> Attributes {
        Self::attributes_of(inventory, &device.gpu)
    }
}

/// Gives the node a driver with this protocol of MPS.
pub(crate) fn set_protocol(world: &World, protocol: MpsProtocol) {
    let mut m = world.lock();
    let mut inventory = (**m.inventory.as_ref().unwrap()).clone();
    inventory.system.mps = MpsAbility::Available(protocol);
    m.inventory = Some(Arc::new(inventory));
}
