//! The holds that count in a goal, sorted by the part they have in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_model::{
    BootId, ClaimUid, GpuUuid, Hold, MpsNamespace, MpsNamespaceName, MpsServer, Place, Target,
};

use crate::gpu_state::GpuState;
use crate::record::{Phase, Record, RecordedDevice};
use crate::stored::Stored;

/// The claim that a call is about, and its part in the goal.
#[derive(Debug, Clone, Copy)]
pub enum Own<'a> {
    /// The claim gets these devices.
    Makes(&'a ClaimUid, &'a [RecordedDevice]),
    /// The claim lets these devices go.
    Leaves(&'a ClaimUid, &'a [RecordedDevice]),
    /// No claim: a round of reconcile.
    None,
}

/// The holds on one GPU, by their part in its goal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holds {
    /// Holds of the claim that the call is about, while it is to have them.
    pub make: Vec<Hold>,
    /// Holds of all other claims, in whatever phase.
    pub keep: Vec<Hold>,
    /// Places with an instance of ours that no record holds. They stay until their claim's own
    /// call, or reconcile in its place.
    pub strays: BTreeSet<Place>,
    /// Places that the claim lets go and that several claims can share.
    pub leaves_shared: BTreeSet<Place>,
    /// The MPS servers that users of targets need: the one that others have already, or that of the
    /// claim that is the first, or has the target alone. Without those of users of an earlier boot,
    /// or that are being undone, and of those beside the targets that the call is about.
    pub servers: BTreeMap<Target, MpsServer>,
    /// The targets whose server other claims use in this boot.
    pub served: BTreeSet<Target>,
    /// The targets that the call is about: of the claim that gets or lets go, and of a round all. A
    /// server beside them that cannot be started or does not end keeps the claim from nothing.
    pub about: Vec<Target>,
    /// The namespaces of the server of the whole GPU: of the claim that gets something, or in other
    /// calls of all claims that the server is needed for. A lost one keeps no other claim from
    /// getting its own.
    pub namespaces: BTreeMap<MpsNamespaceName, MpsNamespace>,
    /// The namespaces that go.
    pub leaves_namespaces: Ends,
    /// True in a round, which is about no claim.
    pub is_round: bool,
    /// True if a record that cannot be read may hold the GPU too.
    pub unknown: bool,
    /// True if another prepared claim of this boot has asked for the time slice that is noted:
    /// without one, the driver may have been loaded anew since it was set.
    pub vouched_for: bool,
}

/// The namespaces of an MPS server that a call ends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Ends {
    /// A call that makes something ends none.
    #[default]
    Nothing,
    /// The namespaces of the claim that is let go.
    These(BTreeSet<MpsNamespaceName>),
    /// Every namespace that no claim needs: a round.
    Strays,
}

impl Holds {
    /// Sorts the holds on a GPU.
    pub fn of(
        gpu: &GpuUuid,
        own: Own<'_>,
        records: &BTreeMap<ClaimUid, Arc<Stored<Record>>>,
        (state, boot): (&GpuState, &BootId),
    ) -> Self {
        let (claim, makes, leaves): (Option<&ClaimUid>, &[_], &[_]) = match own {
            Own::Makes(claim, devices) => (Some(claim), devices, &[]),
            Own::Leaves(claim, devices) => (Some(claim), &[], devices),
            Own::None => (None, &[], &[]),
        };
        let mut holds = Self {
            is_round: matches!(own, Own::None),
            ..Self::default()
        };
        let servers = |devices: &[RecordedDevice]| {
            let here = devices.iter().filter(|d| d.gpu == *gpu);
            let all = here.filter_map(|device| Some((device.target, device.mps?.server)));
            all.collect::<BTreeMap<_, _>>()
        };
        let namespaces = |devices: &[RecordedDevice]| {
            let here = devices.iter().filter(|d| d.gpu == *gpu);
            let all = here.filter_map(|device| device.mps?.namespace);
            all.map(|one| (one.name, one)).collect::<BTreeMap<_, _>>()
        };
        // Slots are those of the server that runs; a server of one claim is as its record has it.
        let noted_slots = |target: Target| {
            let noted = state.mps.get(&target).map(|noted| noted.server);
            noted.filter(|server| server.slots.is_some())
        };
        let on_gpu = |devices: &[RecordedDevice], of: &ClaimUid| {
            let here = devices.iter().filter(|d| d.gpu == *gpu);
            let held = here.map(|d| d.hold(of)).filter(|h| h.sharing.holds());
            held.collect::<Vec<_>>()
        };
        // Phase 1: the holds of all other claims, in whatever phase. A lingering claim counts: its
        // processes may still run on the device.
        for (uid, stored) in records.iter().filter(|(uid, _)| Some(*uid) != claim) {
            match stored.as_ref() {
                // A corrupt file has no list of GPUs that can be trusted, so it may hold any; the
                // head of a newer version can be read and names them.
                Stored::Corrupt { .. } => holds.unknown = true,
                Stored::Newer { head, .. } => holds.unknown |= head.gpus.contains(gpu),
                Stored::Absent => {}
                Stored::Fine(record) => {
                    let held = on_gpu(&record.devices, uid);
                    // A claim in any other phase, or of another boot, may be older than the slice.
                    if record.phase == Phase::Prepared && record.boot == *boot {
                        let noted = state.slice.map(|slice| slice.ours);
                        holds.vouched_for |=
                            noted.is_some() && held.iter().any(|h| h.time_slice == noted);
                    }
                    // A record of an earlier boot is carried out again by its own call, and one
                    // that is being undone may have stopped its server already.
                    let undoing =
                        matches!(&record.phase, Phase::Leaving(leaving) if leaving.undoing);
                    if record.may_be_of(boot) && !undoing {
                        for (target, kept) in servers(&record.devices) {
                            let running = noted_slots(target).filter(|_| kept.slots.is_some());
                            holds.servers.insert(target, running.unwrap_or(kept));
                        }
                        holds.namespaces.extend(namespaces(&record.devices));
                    }
                    holds.keep.extend(held);
                }
            }
        }
        holds.served = holds.servers.keys().copied().collect();
        // A record that cannot be read may be of a user of any of them.
        if holds.unknown {
            holds.served.extend(state.mps.keys());
        }
        // Phase 2: the part of the claim that the call is about.
        holds.about = match own {
            Own::Makes(_, devices) | Own::Leaves(_, devices) => {
                let here = devices.iter().filter(|device| device.gpu == *gpu);
                here.map(|device| device.target).collect()
            }
            Own::None => vec![Target::Gpu],
        };
        if let Some(claim) = claim {
            holds.make = on_gpu(makes, claim);
            let about = |target: &Target| holds.about.iter().any(|one| one.overlaps(*target));
            holds.servers.retain(|target, _| about(target));
            for (target, server) in servers(makes) {
                holds.servers.entry(target).or_insert(server);
            }
            let left = on_gpu(leaves, claim).into_iter();
            holds.leaves_shared = left
                .filter(|hold| hold.sharing.is_shared())
                .filter_map(|hold| hold.target.place())
                .collect();
        }
        holds.leaves_namespaces = match own {
            Own::Makes(_, devices) => {
                holds.namespaces = namespaces(devices);
                Ends::Nothing
            }
            Own::Leaves(_, devices) => Ends::These(namespaces(devices).into_keys().collect()),
            // A record that cannot be read may be of the claim of one of them.
            Own::None if holds.unknown => Ends::Nothing,
            Own::None => Ends::Strays,
        };
        // Phase 3: instances of ours that no record holds.
        holds.strays = strays(gpu, own, &holds, (state, boot));
        holds
    }
}

/// Returns the places of instances of ours that no record holds, as far as can be read. The claim's
/// own ones are no strays: they are made again or removed by this very call.
fn strays(
    gpu: &GpuUuid,
    own: Own<'_>,
    holds: &Holds,
    (state, boot): (&GpuState, &BootId),
) -> BTreeSet<Place> {
    let held: BTreeSet<Place> = holds.keep.iter().filter_map(own_place).collect();
    let going = |place: &Place, made_for: &ClaimUid| match own {
        Own::Makes(claim, devices) | Own::Leaves(claim, devices) => {
            let named = devices
                .iter()
                .any(|d| d.gpu == *gpu && d.own_place() == Some(*place));
            // Also an instance that was made for the claim under an allocation of which no record
            // is left, unless a record that cannot be read may be of a claim that shares it.
            named || (made_for == claim && !holds.unknown)
        }
        Own::None => false,
    };
    state
        .instances_in(boot)
        .filter(|(place, instance)| !held.contains(place) && !going(place, &instance.made_for))
        .map(|(place, _)| place)
        .collect()
}

/// Returns the place of a hold whose instance is ours to make.
pub(crate) fn own_place(hold: &Hold) -> Option<Place> {
    hold.target.place().filter(|_| !hold.theirs)
}

#[cfg(test)]
mod tests {
    use divvy_model::Sharing;

    use super::*;
    use crate::AllocatedDevice;
    use crate::gpu_state::{Instance, Life};
    use crate::stored::Head;

    fn gpu() -> GpuUuid {
        "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap()
    }

    fn place(start: u32) -> Place {
        format!("9@{start}+4").parse().unwrap()
    }

    /// A partition that a claim has.
    fn device(start: u32) -> RecordedDevice {
        RecordedDevice {
            allocated: AllocatedDevice {
                request: "main".to_owned(),
                pool: "n1/divvy".to_owned(),
                device: format!("gpu-1-mig-3g40gb-9-{start}").parse().unwrap(),
                share_id: None,
                admin_access: false,
                consumed_capacity: BTreeMap::new(),
            },
            gpu: gpu(),
            target: Target::Partition(place(start)),
            sharing: Sharing::Exclusive,
            theirs: false,
            time_slice: None,
            share_memory: None,
            memory_cap: None,
            clears_caps: false,
            mps: None,
            extra_nodes: Vec::new(),
            given: None,
        }
    }

    /// An instance that no record holds stays for its own claim: no other call takes it away or
    /// makes it anew.
    #[test]
    fn an_instance_without_a_record_is_a_stray_but_for_its_own_claim() {
        let [a, b]: [ClaimUid; 2] = ["a", "b"].map(|name| name.parse().unwrap());
        let boot: BootId = "boot-1".parse().unwrap();
        let made = |claim: &ClaimUid| Instance {
            made_for: claim.clone(),
            life: Life::Begun,
            doubt: None,
        };
        let state = GpuState {
            boot: Some(boot.clone()),
            instances: [(place(0), made(&a)), (place(4), made(&b))].into(),
            ..GpuState::default()
        };
        let none = BTreeMap::new();
        let record = Record {
            uid: a.clone(),
            namespace: "ns".to_owned(),
            name: "a".to_owned(),
            boot: boot.clone(),
            allocated_at: None,
            devices: vec![device(0)],
            pods: Vec::new(),
            received: None,
            metadata: None,
            phase: Phase::Prepared,
        };
        let of_a = BTreeMap::from([(a.clone(), Arc::new(Stored::Fine(record)))]);
        let (first, second) = ([device(0)], [device(4)]);
        let torn = Stored::Corrupt {
            reason: "torn".to_owned(),
        };
        let torn = BTreeMap::from([("c".parse().unwrap(), Arc::new(torn))]);
        for (own, records, expected) in [
            (Own::None, &none, &[0, 4][..]),
            (Own::None, &of_a, &[4]),
            (Own::Makes(&a, &first), &none, &[4]),
            (Own::Makes(&b, &second), &none, &[0]),
            (Own::Leaves(&a, &first), &none, &[4]),
            // Also an instance that was made for it under an earlier allocation, and one that it
            // names.
            (Own::Leaves(&a, &[]), &none, &[4]),
            (Own::Leaves(&a, &second), &none, &[]),
            // A claim whose record cannot be read may share the one of the earlier allocation.
            (Own::Makes(&a, &second), &torn, &[0]),
            (Own::Leaves(&a, &first), &torn, &[4]),
            (Own::Leaves(&a, &second), &torn, &[0]),
        ] {
            let holds = Holds::of(&gpu(), own, records, (&state, &boot));
            let expected: BTreeSet<_> = expected.iter().map(|start| place(*start)).collect();
            assert_eq!(holds.strays, expected, "{own:?}");
        }
        // Of another boot nothing lives.
        let later = "boot-2".parse().unwrap();
        let holds = Holds::of(&gpu(), Own::None, &none, (&state, &later));
        assert_eq!(holds.strays, BTreeSet::new());
        // Named on another GPU, it is another one.
        let mut other = device(4);
        other.gpu = "GPU-12345678-1234-1234-1234-123456780002".parse().unwrap();
        let other = [other];
        let holds = Holds::of(&gpu(), Own::Leaves(&a, &other), &none, (&state, &boot));
        assert_eq!(holds.strays, BTreeSet::from([place(4)]));
    }

    /// The file of a newer version names its GPUs, and no other GPU needs to wait for it.
    #[test]
    fn a_record_of_a_newer_version_may_hold_the_gpus_that_it_names() {
        let gpu = |number: u32| -> GpuUuid {
            let uuid = format!("GPU-12345678-1234-1234-1234-12345678000{number}");
            uuid.parse().unwrap()
        };
        let head = Head {
            gpus: vec![gpu(1)],
            ..Head::default()
        };
        let newer = Stored::Newer { version: 99, head };
        let records = [("a".parse().unwrap(), Arc::new(newer))].into();
        let boot: BootId = "boot-1".parse().unwrap();
        for (number, unknown) in [(1, true), (2, false)] {
            let state = GpuState::default();
            let holds = Holds::of(&gpu(number), Own::None, &records, (&state, &boot));
            assert_eq!(holds.unknown, unknown, "GPU {number}");
            let ends = if unknown { Ends::Nothing } else { Ends::Strays };
            assert_eq!(holds.leaves_namespaces, ends, "GPU {number}");
        }
    }
}
