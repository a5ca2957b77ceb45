//! Everything that can be wrong with a node at once, and nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_claims::{AllocatedDevice, ClaimRef, Fence, Head, Leaving};
use divvy_executor::HeldDevice;
use divvy_gpu_sim::SimNode;
use divvy_model::health::RecoveryAction;
use divvy_model::{BootId, DeviceName, GpuError, GpuErrorCode, GpuOp, Hold, HoldKind, Inventory, Ordinals};
use divvy_offer::{HealthView, OneMode, PolicyProblem, Resolved, RuleRef, Sick, Unmonitored};

use super::*;
use crate::neighbours::Uses;
use crate::node::Recorded;
use crate::sinks::gpu_node::report;
use crate::sources::policies::{Effective, KnownPolicies};

/// What facts borrow from.
#[derive(Default)]
struct World {
    inventory: Option<Inventory>,
    recorded: Recorded,
    effective: Option<Effective>,
    health: HealthView,
    neighbours: Uses,
    foreign: Vec<(GpuUuid, Placement)>,
    notes: BTreeSet<Note>,
    one_mode: Option<OneMode>,
    driver: Option<String>,
    released: Option<String>,
}

impl World {
    /// A node with this many H100, all unused.
    fn new(gpus: u32) -> (Self, Vec<GpuUuid>) {
        let inventory = SimNode::parse(&format!("h100x{gpus}")).unwrap().inventory();
        let mut ordinals = Ordinals::default();
        ordinals.assign(inventory.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)));
        let uuids = (0..gpus).map(|n| ordinals.gpu(n).unwrap().clone()).collect();
        let recorded = Recorded { ordinals, ..Recorded::default() };
        (Self { inventory: Some(inventory), recorded, ..Self::default() }, uuids)
    }

    fn facts(&self) -> Facts<'_> {
        Facts {
            inventory: self.inventory.as_ref(),
            recorded: &self.recorded,
            pool: None,
            effective: self.effective.as_ref(),
            health: &self.health,
            neighbours: &self.neighbours,
            foreign: &self.foreign,
            notes: &self.notes,
            one_mode: self.one_mode.as_ref(),
            driver: self.driver.as_deref(),
            released: self.released.as_deref(),
            kubernetes: "1.37.1".to_owned(),
        }
    }

    fn hold(&mut self, name: &str, gpu: &GpuUuid, phase: Phase) -> ClaimUid {
        let uid: ClaimUid = format!("uid-{name}").parse().unwrap();
        let claim = ClaimRef { uid: uid.clone(), namespace: "default".to_owned(), name: name.to_owned() };
        let device: DeviceName = format!("gpu-{}", self.recorded.ordinals.of(gpu).unwrap()).parse().unwrap();
        let allocated = AllocatedDevice {
            request: "gpu".to_owned(),
            pool: "p".to_owned(),
            device: device.clone(),
            share_id: None,
            admin_access: false,
            consumed_capacity: BTreeMap::new(),
        };
        let hold =
            Hold { claim: uid.clone(), gpu: gpu.clone(), device, kind: HoldKind::Whole, time_slice: None };
        self.recorded.held.push(HeldDevice {
            claim,
            hold,
            phase,
            pods: Vec::new(),
            allocated_at: None,
            allocated,
            made: None,
        });
        uid
    }
}

/// One line each, without what is to be done: `!` for what needs a person.
fn lines(world: &World) -> Vec<String> {
    let line = |t: &Trouble| {
        assert!(!t.why.is_empty(), "{t:?}");
        assert!(t.notice || !t.remedy.is_empty(), "nothing is said to do about {t:?}");
        let mark = if t.notice { " " } else { "!" };
        format!("{mark} {} | {} | {} | {} | {}", t.kind, t.gpu, t.subject, t.claim, t.why)
    };
    troubles(&world.facts()).iter().map(line).collect()
}

#[test]
fn a_healthy_node_has_no_troubles() {
    let (world, _) = World::new(2);
    assert_eq!(lines(&world), Vec::<String>::new());
    assert_eq!(report(&world.facts()).summary.trouble, "");
}

#[test]
fn every_trouble_is_reported_with_its_reason_the_node_first_and_notices_last() {
    let (mut world, gpus) = World::new(9);
    let boot: BootId = "3f2c0a4e-52a3-4a0c-9f5e-0123456789ab".parse().unwrap();
    let leaving = Leaving { reason: "process 4711 still uses it".to_owned(), undoing: false };
    let stuck = world.hold("stuck", &gpus[0], Phase::Leaving(leaving.clone()));
    world.recorded.lingering.insert(stuck);
    // Being worked on: about to be gone.
    world.hold("busy", &gpus[0], Phase::Leaving(leaving));
    let cut = world.hold("cut", &gpus[1], Phase::Preparing);
    world.recorded.fences.insert(
        gpus[1].clone(),
        vec![Fence { claim: Some(cut), reason: "a step was cut off".to_owned(), boot }],
    );
    let later = Head { claim: None, gpus: vec![gpus[2].clone()] };
    world.recorded.newer.insert("uid-later".parse().unwrap(), later);
    world.foreign.push((gpus[3].clone(), Placement { start: 4, size: 4 }));
    let plugin = Use::DevicePlugin { resource: "nvidia.com/gpu".to_owned(), to: "pod a/b".to_owned() };
    let uses = [plugin, Use::Processes { pids: vec![7, 8] }];
    world.neighbours.insert(gpus[4].clone(), uses.into());
    let whole = [Ailment::Xid(79), Ailment::Recovery(RecoveryAction::Reset), Ailment::RemapPending];
    world.health.sick.insert(gpus[5].clone(), Sick { gpu: whole.into(), partitions: Vec::new() });
    let part = vec![(Placement { start: 0, size: 1 }, [Ailment::Ecc].into())];
    world.health.sick.insert(gpus[6].clone(), Sick { gpu: BTreeSet::new(), partitions: part });
    let inventory = world.inventory.as_mut().unwrap();
    inventory.gpus.remove(&gpus[7]);
    inventory.gpus.remove(&gpus[8]);
    let error = GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::UNKNOWN, &gpus[8]);
    inventory.problems.push(divvy_model::GpuProblem { gpu: gpus[8].clone(), error });
    let rule = RuleRef { policy: "p".to_owned(), index: 0, name: Some("big".to_owned()) };
    let problem = PolicyProblem { rule, gpu: gpus[0].clone(), problem: "no such profile".to_owned() };
    let known = KnownPolicies {
        bad: BTreeMap::from([("q".to_owned(), "no rules".to_owned())]),
        ..KnownPolicies::default()
    };
    let resolved = Resolved { problems: vec![problem], ..Resolved::default() };
    world.effective = Some(Effective { known: Arc::new(known), resolved: Arc::new(resolved) });
    world.one_mode = Some(OneMode::TurnedOff);
    world.notes.insert(Note::GivenTwice {
        gpu: 2,
        devices: "gpu-2 and gpu-2-ts".to_owned(),
        claims: Vec::new(),
    });
    world.notes.insert(Note::HeldUnknown { device: "strange-1".parse().unwrap() });
    world.driver = Some("libnvidia-ml.so.1 is not there".to_owned());
    assert_eq!(
        lines(&world),
        [
            "! bad-policy |  | q |  | no rules",
            "! driver-down |  |  |  | libnvidia-ml.so.1 is not there",
            "! unknown-device |  | strange-1 |  | a claim holds strange-1, which this version of the driver does not know: delete the claim, or run the version that published the device",
            "! lingering | gpu-0 | gpu-0 | default/stuck | the claim was released but still holds it: process 4711 still uses it",
            "! fenced | gpu-1 |  | default/cut | the state of the GPU is uncertain: a step was cut off",
            "! fenced | gpu-2 | record uid-later |  | the record of a claim on it was written by a later version of divvy",
            "! given-twice | gpu-2 |  |  | claims hold gpu-2 and gpu-2-ts, which exclude each other on one GPU: no part of gpu-2 is allocated until one of the claims is released",
            "! foreign | gpu-3 | memory slices 4..7 |  | the GPU has a MIG instance that divvy did not create",
            "! neighbour | gpu-4 | nvidia.com/gpu of pod a/b |  | the device plugin of nvidia.com/gpu has allocated it to pod a/b",
            "! neighbour | gpu-4 | processes |  | process 7, 8 computes on it without a claim of divvy",
            "! recovery | gpu-5 | reset |  | the GPU needs recovery: reset",
            "! row-remap | gpu-5 |  |  | the GPU needs a reset to apply remapped memory rows",
            "! xid | gpu-5 | 79 |  | the GPU reported Xid 79 (node)",
            "! ecc | gpu-6 | memory slices 0..0 |  | a partition of the GPU had uncorrectable ECC errors",
            "! lost | gpu-7 |  |  | the driver no longer lists the GPU",
            "! unreadable | gpu-8 |  |  | the GPU cannot be read: NVML facts failed on GPU-12345678-1234-1234-0000-123456780008: UNKNOWN (999)",
            "  one-mode |  | turned-off |  | each GPU is offered in one mode instead of several: the mode lock is turned off (--mode-lock, or modeLock of a GpuPolicy)",
            "  rule-without-effect | gpu-0 | p/big |  | no such profile",
        ]
    );
    assert_eq!(
        report(&world.facts()).summary.trouble,
        "bad-policy, driver-down, unknown-device, gpu-0 lingering, gpu-1 fenced, gpu-2 fenced+given-twice, gpu-3 foreign, gpu-4 neighbour, gpu-5 recovery+row-remap+xid, gpu-6 ecc, gpu-7 lost, gpu-8 unreadable"
    );
}

#[test]
fn a_gpu_whose_events_fail_requires_action_and_one_without_events_does_not() {
    let (mut world, gpus) = World::new(3);
    let unheard = |why: &str, for_good| Unmonitored { why: why.to_owned(), for_good };
    world.health.unmonitored.insert(gpus[0].clone(), unheard("NOT_SUPPORTED (3)", true));
    world.health.unmonitored.insert(gpus[1].clone(), unheard("UNKNOWN (999)", false));
    // A GPU that is gone is not reported.
    world.health.unmonitored.insert(gpus[2].clone(), unheard("UNKNOWN (999)", false));
    world.inventory.as_mut().unwrap().gpus.remove(&gpus[2]);
    world.health.removed.insert(gpus[2].clone());
    assert_eq!(
        lines(&world),
        [
            "! unmonitored | gpu-1 |  |  | the plugin receives no events (Xids) of it, so that only polls detect faults: UNKNOWN (999)",
            "  unmonitored | gpu-0 |  |  | the plugin receives no events (Xids) of it, so that only polls detect faults: NOT_SUPPORTED (3)",
        ]
    );
    assert_eq!(report(&world.facts()).summary.trouble, "gpu-1 unmonitored");
    world.driver = Some("the NVIDIA driver is not loaded".to_owned());
    assert_eq!(report(&world.facts()).summary.trouble, "driver-down");
}

#[test]
fn a_driver_that_was_never_there_is_reported_with_the_gpus_known_from_before() {
    let (mut world, gpus) = World::new(2);
    world.inventory = None;
    world.driver = Some("libnvidia-ml.so.1 is not there".to_owned());
    world.hold("running", &gpus[1], Phase::Prepared);
    let status = report(&world.facts());
    let summary = (status.summary.gpus, status.summary.free, status.summary.claims);
    assert_eq!((summary, status.summary.trouble.as_str()), ((2, 0, 1), "driver-down"));
    // Requested: no action is needed.
    world.released = Some("the node is drained".to_owned());
    let status = report(&world.facts());
    assert_eq!((status.summary.trouble.as_str(), status.troubles[0].kind.as_str()), ("", "driver-released"));
}
