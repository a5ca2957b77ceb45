//! Everything that can be wrong with a node at once, and nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_api::node::GpuNodeStatus;
use divvy_claims::{AllocatedDevice, ClaimRef, Fence, Head, Leaving, Phase};
use divvy_executor::HeldDevice;
use divvy_gpu_sim::SimNode;
use divvy_model::health::{Ailment, FabricFault, RecoveryAction};
use divvy_model::mig::Placement;
use divvy_model::{
    ClaimUid, DeviceName, GpuError, GpuErrorCode, GpuOp, GpuUuid, Hold, Inventory, Ordinals,
    Sharing, Target,
};
use divvy_offer::{HealthView, OneMode, PolicyProblem, Resolved, RuleRef, Sick, Unmonitored, Use};

use super::*;
use crate::node::facts::{Effective, KnownPolicies, Recorded};
use crate::node::findings::{Known, findings};
use crate::sinks::gpu_node::report;

/// The owner of everything that facts borrow.
#[derive(Default)]
struct World {
    inventory: Option<Inventory>,
    recorded: Recorded,
    effective: Option<Effective>,
    health: HealthView,
    offer: BTreeSet<Finding>,
    driver: Option<String>,
    released: Option<String>,
    ungranted: BTreeMap<GpuUuid, String>,
    unwritable: Option<String>,
}

impl World {
    /// A node with this many H100, all unused.
    fn new(gpus: u32) -> (Self, Vec<GpuUuid>) {
        let inventory = SimNode::parse(&format!("h100x{gpus}")).unwrap().inventory();
        let mut ordinals = Ordinals::default();
        ordinals.assign(
            inventory
                .gpus
                .iter()
                .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
        );
        let uuids = (0..gpus)
            .map(|n| ordinals.gpu(n).unwrap().clone())
            .collect();
        let recorded = Recorded {
            ordinals,
            ..Recorded::default()
        };
        (
            Self {
                inventory: Some(inventory),
                recorded,
                ..Self::default()
            },
            uuids,
        )
    }

    fn known(&self) -> Known<'_> {
        Known {
            inventory: self.inventory.as_ref(),
            recorded: &self.recorded,
            pool: None,
            effective: self.effective.as_ref(),
            health: &self.health,
            offer: &self.offer,
            driver: self.driver.as_deref(),
            released: self.released.as_deref(),
            kubernetes: "1.37.1".to_owned(),
            ungranted: &self.ungranted,
            unwritable: self.unwritable.as_deref(),
            nvidia_serves: false,
            supervisor_away: None,
        }
    }

    fn status(&self) -> GpuNodeStatus {
        let known = self.known();
        report(&known, &findings(&known))
    }

    fn hold(&mut self, name: &str, gpu: &GpuUuid, phase: Phase) -> ClaimUid {
        let uid: ClaimUid = format!("uid-{name}").parse().unwrap();
        let claim = ClaimRef {
            uid: uid.clone(),
            namespace: "default".to_owned(),
            name: name.to_owned(),
        };
        let device: DeviceName = format!("gpu-{}", self.recorded.ordinals.of(gpu).unwrap())
            .parse()
            .unwrap();
        let allocated = AllocatedDevice {
            request: "gpu".to_owned(),
            pool: "p".to_owned(),
            device: device.clone(),
            share_id: None,
            admin_access: false,
            consumed_capacity: BTreeMap::new(),
        };
        let hold = Hold {
            claim: uid.clone(),
            gpu: gpu.clone(),
            device,
            target: Target::Gpu,
            sharing: Sharing::Exclusive,
            theirs: false,
            time_slice: None,
            mps: None,
        };
        self.recorded.held.push(HeldDevice {
            claim,
            hold,
            phase,
            pods: Vec::new(),
            allocated_at: None,
            allocated,
            class: None,
            amounts: divvy_claims::ShareAmounts::default(),
            calls_for_caps: false,
            made: None,
        });
        uid
    }
}

/// Formats troubles as one line each, without the remedy; `!` marks those that need a person.
fn lines(world: &World) -> Vec<String> {
    let line = |t: &Trouble| {
        assert!(!t.why.is_empty(), "{t:?}");
        assert!(
            t.notice || !t.remedy.is_empty(),
            "nothing is said to do about {t:?}"
        );
        let mark = if t.notice { " " } else { "!" };
        format!(
            "{mark} {} | {} | {} | {} | {}",
            t.kind, t.gpu, t.subject, t.claim, t.why
        )
    };
    world.status().troubles.iter().map(line).collect()
}

#[test]
fn a_healthy_node_has_no_troubles() {
    let (world, _) = World::new(2);
    assert_eq!(lines(&world), Vec::<String>::new());
    assert_eq!(world.status().summary.trouble, "");
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn every_trouble_is_reported_with_its_reason_in_order() {
    let (mut world, gpus) = World::new(9);
    let leaving = Leaving {
        reason: "process 4711 still uses it".to_owned(),
        undoing: false,
    };
    let stuck = world.hold("stuck", &gpus[0], Phase::Leaving(leaving.clone()));
    world.recorded.lingering.insert(stuck);
    // Being worked on: about to be gone.
    world.hold("busy", &gpus[0], Phase::Leaving(leaving));
    let cut = world.hold("cut", &gpus[1], Phase::Preparing);
    world.recorded.fences.insert(
        gpus[1].clone(),
        vec![Fence {
            claim: Some(cut),
            reason: "a step was cut off".to_owned(),
        }],
    );
    let later = Head {
        claim: None,
        gpus: vec![gpus[2].clone()],
    };
    world
        .recorded
        .newer
        .insert("uid-later".parse().unwrap(), later);
    world.offer.insert(Finding::ForeignInstance {
        gpu: gpus[3].clone(),
        at: Placement { start: 4, size: 4 },
    });
    let plugin = Use::DevicePlugin {
        resource: "nvidia.com/gpu".to_owned(),
        to: "pod a/b".to_owned(),
    };
    let uses = [plugin, Use::Processes { pids: vec![7, 8] }];
    let findings = uses.map(|used| Finding::Neighbour {
        gpu: gpus[4].clone(),
        used,
    });
    world.offer.extend(findings);
    let whole = [
        Ailment::Xid(79),
        Ailment::Recovery(RecoveryAction::Reset),
        Ailment::Fabric(FabricFault::NotStarted),
        Ailment::RemapPending,
    ];
    world.health.sick.insert(
        gpus[5].clone(),
        Sick {
            gpu: whole.into(),
            ..Sick::default()
        },
    );
    let part = vec![(Placement { start: 0, size: 1 }, [Ailment::Ecc].into())];
    world.health.sick.insert(
        gpus[6].clone(),
        Sick {
            gpu: BTreeSet::new(),
            partitions: part,
            ..Sick::default()
        },
    );
    let inventory = world.inventory.as_mut().unwrap();
    inventory.gpus.remove(&gpus[7]);
    inventory.gpus.remove(&gpus[8]);
    let error = GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::UNKNOWN, &gpus[8]);
    inventory.problems.push(divvy_model::GpuProblem {
        gpu: gpus[8].clone(),
        error,
    });
    let rule = RuleRef {
        policy: "p".to_owned(),
        index: 0,
        name: Some("big".to_owned()),
    };
    let problem = PolicyProblem {
        rule,
        gpu: gpus[0].clone(),
        problem: "no such profile".to_owned(),
    };
    let known = KnownPolicies {
        bad: BTreeMap::from([("q".to_owned(), "no rules".to_owned())]),
        ..KnownPolicies::default()
    };
    let resolved = Resolved {
        problems: vec![problem.clone()],
        ..Resolved::default()
    };
    world.effective = Some(Effective {
        known: Arc::new(known),
        resolved: Arc::new(resolved),
    });
    world.offer.insert(Finding::RuleWithoutEffect(problem));
    world.offer.insert(Finding::OneModeForEach {
        why: OneMode::TurnedOff,
    });
    world.offer.insert(Finding::GivenTwice {
        gpu: 2,
        devices: "gpu-2 and gpu-2-ts".to_owned(),
        claims: Vec::new(),
    });
    world.offer.insert(Finding::HeldUnknown {
        device: "strange-1".parse().unwrap(),
    });
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
            "! fabric | gpu-5 | not-started |  | the GPU is not registered with its NVLink fabric",
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
        world.status().summary.trouble,
        "bad-policy, driver-down, unknown-device, gpu-0 lingering, gpu-1 fenced, gpu-2 fenced+given-twice, gpu-3 foreign, gpu-4 neighbour, gpu-5 fabric+recovery+row-remap+xid, gpu-6 ecc, gpu-7 lost, gpu-8 unreadable"
    );
}

/// No process of a GPU that is lost or needs a reset can be found: the GPU comes first.
#[test]
fn a_claim_that_lingers_on_a_sick_gpu_has_the_remedy_of_the_gpu() {
    let (mut world, gpus) = World::new(4);
    let leaving = || {
        Phase::Leaving(Leaving {
            reason: "its processes cannot be listed".to_owned(),
            undoing: false,
        })
    };
    let ailments = [
        Some(Ailment::Lost),
        Some(Ailment::Recovery(RecoveryAction::Reset)),
        // Its processes can be listed.
        Some(Ailment::Ecc),
        None,
    ];
    for (n, (gpu, ailment)) in gpus.iter().zip(ailments).enumerate() {
        let uid = world.hold(&format!("c{n}"), gpu, leaving());
        world.recorded.lingering.insert(uid);
        let sick = ailment.map(|ailment| Sick {
            gpu: [ailment].into(),
            ..Sick::default()
        });
        world
            .health
            .sick
            .extend(sick.map(|sick| (gpu.clone(), sick)));
    }
    let status = world.status();
    let lingering = status.troubles.iter().filter(|t| t.kind == "lingering");
    let remedies: Vec<&str> = lingering.map(|t| t.remedy.as_str()).collect();
    let process = "find out why the process runs (`cat /proc/PID/cgroup` shows its pod) and end it; the device is free within seconds";
    assert_eq!(
        remedies,
        [
            "the GPU fell off the bus: reset the GPU or reboot the node (docs/maintenance.md); if it stays lost, check the board",
            "the GPU needs recovery: reset: drain the node, then reset the GPU or reboot (docs/maintenance.md)",
            process,
            process,
        ]
    );
}

#[test]
fn a_gpu_with_failing_events_requires_action_and_without_none() {
    let (mut world, gpus) = World::new(3);
    let unheard = |why: &str, for_good| Unmonitored {
        why: why.to_owned(),
        for_good,
    };
    world
        .health
        .unmonitored
        .insert(gpus[0].clone(), unheard("NOT_SUPPORTED (3)", true));
    world
        .health
        .unmonitored
        .insert(gpus[1].clone(), unheard("UNKNOWN (999)", false));
    // A GPU that is gone is reported as gone alone.
    world
        .health
        .unmonitored
        .insert(gpus[2].clone(), unheard("UNKNOWN (999)", false));
    world.inventory.as_mut().unwrap().gpus.remove(&gpus[2]);
    world.health.removed.insert(gpus[2].clone());
    assert_eq!(
        lines(&world),
        [
            "! unmonitored | gpu-1 |  |  | the plugin receives no events (Xids) of it, so that only polls detect faults: UNKNOWN (999)",
            "! gpu-removed | gpu-2 |  |  | the driver no longer lists the GPU, which was there before",
            "  unmonitored | gpu-0 |  |  | the plugin receives no events (Xids) of it, so that only polls detect faults: NOT_SUPPORTED (3)",
        ]
    );
    assert_eq!(
        world.status().summary.trouble,
        "gpu-1 unmonitored, gpu-2 gpu-removed"
    );
    world.driver = Some("the NVIDIA driver is not loaded".to_owned());
    assert_eq!(
        world.status().summary.trouble,
        "driver-down, gpu-2 gpu-removed"
    );
}

#[test]
fn a_driver_that_was_never_there_is_reported_with_known_gpus() {
    let (mut world, gpus) = World::new(2);
    world.inventory = None;
    world.driver = Some("libnvidia-ml.so.1 is not there".to_owned());
    world.hold("running", &gpus[1], Phase::Prepared);
    let status = world.status();
    let summary = (
        status.summary.gpus,
        status.summary.free,
        status.summary.claims,
    );
    assert_eq!(
        (summary, status.summary.trouble.as_str()),
        ((2, 0, 1), "driver-down")
    );
    // Requested: no action is needed.
    world.released = Some("the node is drained".to_owned());
    let status = world.status();
    assert_eq!(
        (
            status.summary.trouble.as_str(),
            status.troubles[0].kind.as_str()
        ),
        ("", "driver-released")
    );
}

#[test]
fn the_summary_names_the_first_and_last_of_equal_gpus() {
    let (mut world, gpus) = World::new(8);
    let without = [0, 1, 2, 3, 5, 6].map(|n| gpus[n].clone());
    for gpu in &without {
        world.inventory.as_mut().unwrap().gpus.remove(gpu);
        world.health.removed.insert(gpu.clone());
    }
    assert_eq!(
        world.status().summary.trouble,
        "gpu-0 to gpu-3 gpu-removed, gpu-5 gpu-removed, gpu-6 gpu-removed"
    );
    world.driver = Some("the NVIDIA driver is not loaded".to_owned());
    let why = || "events".to_owned();
    let unheard = Unmonitored {
        why: why(),
        for_good: false,
    };
    world.health.removed.remove(&gpus[1]);
    world.health.unmonitored.insert(gpus[1].clone(), unheard);
    assert_eq!(
        world.status().summary.trouble,
        "driver-down, gpu-0 gpu-removed, gpu-1 lost, gpu-2 gpu-removed, gpu-3 gpu-removed, gpu-5 gpu-removed, gpu-6 gpu-removed"
    );
}
