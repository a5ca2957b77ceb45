use std::collections::BTreeMap;

use divvy_claims::{AllocatedDevice, ClaimRef, Phase, ShareAmounts};
use divvy_model::{GpuUuid, Hold, Target};
use divvy_usage::{GpuUsage, Granted, Measured, PodUsage, Source, Unknown};

use super::*;

const GIB: u64 = 1 << 30;

fn held(claim: &str, gpu: &GpuUuid, form: Form, target: Target) -> HeldDevice {
    let device = "gpu-0".parse().unwrap();
    HeldDevice {
        claim: ClaimRef {
            uid: claim.parse().unwrap(),
            namespace: "ns".to_owned(),
            name: claim.to_owned(),
        },
        hold: Hold {
            claim: claim.parse().unwrap(),
            gpu: gpu.clone(),
            device: "gpu-0".parse().unwrap(),
            target,
            sharing: form.sharing,
            theirs: false,
            time_slice: None,
            mps: None,
        },
        phase: Phase::Prepared,
        pods: Vec::new(),
        allocated_at: Some("1970-01-01T00:00:01.5Z".to_owned()),
        allocated: AllocatedDevice {
            request: "main".to_owned(),
            pool: "node-1".to_owned(),
            device,
            share_id: None,
            admin_access: false,
            consumed_capacity: BTreeMap::new(),
        },
        class: Some("gpus".to_owned()),
        amounts: ShareAmounts::default(),
        calls_for_caps: false,
        made: None,
    }
}

fn usage(claim: &str, memory: u64, ratio: f64) -> DeviceUsage {
    let measured = || {
        Ok(Measured {
            ratio,
            source: Source::Gpm,
        })
    };
    let pod = |memory| PodUsage {
        name: "pod".to_owned(),
        memory,
        utilization: measured(),
    };
    DeviceUsage {
        claim: held(claim, &uuid(), Form::WHOLE, Target::Gpu).claim,
        device: "gpu-0".parse().unwrap(),
        kind: Form::WHOLE,
        part: None,
        granted: Granted::default(),
        limit: Err(Unknown::Failed),
        utilization: measured(),
        quiet: Ok(false),
        holders: Vec::new(),
        pods: vec![pod(Ok(memory)), pod(Err(Unknown::Failed))],
    }
}

fn uuid() -> GpuUuid {
    inventory().gpus.keys().next().unwrap().clone()
}

fn inventory() -> Inventory {
    divvy_gpu_sim::SimNode::parse("h100x1").unwrap().inventory()
}

fn used(devices: Vec<DeviceUsage>) -> Used {
    let of_gpu = GpuUsage {
        number: 1,
        memory: Err(Unknown::Failed),
        unattributed: Err(Unknown::Failed),
        devices,
        groups: Vec::new(),
    };
    Used {
        gpus: [(uuid(), of_gpu)].into(),
        about: BTreeMap::new(),
    }
}

#[test]
fn a_device_counts_as_the_part_of_its_gpu_that_its_memory_is() {
    let (inventory, gpu) = (inventory(), uuid());
    let total = inventory.gpus[&gpu].facts.memory_bytes.unwrap();
    let mut share = held("b", &gpu, Form::TIME_SLICED, Target::Gpu);
    share.amounts.memory = Some(20 * GIB);
    let mut slot = held("c", &gpu, Form::MPS, Target::Gpu);
    slot.amounts.cores = Some(25);
    let half = inventory.gpus[&gpu].mig.as_ref().unwrap();
    let (profile, placement) = half.capabilities.placements().next().unwrap();
    let place = divvy_model::Place {
        profile: profile.id,
        placement,
    };
    let part = held("d", &gpu, Form::PARTITIONS, Target::Partition(place));
    let away = "GPU-00000000-0000-0000-0000-000000000000".parse().unwrap();
    let all = [
        held("a", &gpu, Form::WHOLE, Target::Gpu),
        share,
        slot,
        part,
        held("e", &away, Form::WHOLE, Target::Gpu),
        held("f", &gpu, Form::ADMIN, Target::Gpu),
    ];
    let times = times(&all, &inventory, &Used::default());
    let found: Vec<_> = times
        .iter()
        .map(|one| (&*one.series.form, one.has.part, one.has.memory))
        .collect();
    let of_profile = profile.memory_bytes();
    assert_eq!(
        found,
        [
            ("whole", WHOLE, total / MIB),
            ("time-sliced", 20 * GIB * WHOLE / total, 20 * 1024),
            ("mps", WHOLE / 4, 0),
            ("partition", of_profile * WHOLE / total, of_profile / MIB),
            ("whole", WHOLE, 0),
        ],
        "admin access keeps nothing from others"
    );
    assert_eq!(times[0].series.product, "NVIDIA H100 80GB HBM3");
    assert_eq!(times[4].series.product, UNKNOWN);
    assert_eq!(
        (&*times[0].series.class, times[0].allocated),
        ("gpus", Some(1500))
    );
}

#[test]
fn use_counts_once_for_all_shares_that_a_claim_has_of_a_device() {
    let (inventory, gpu) = (inventory(), uuid());
    let share = |id: &str| {
        let mut share = held("a", &gpu, Form::TIME_SLICED, Target::Gpu);
        share.allocated.share_id = Some(id.to_owned());
        share.amounts.memory = Some(8 * GIB);
        share
    };
    let all = [
        share("1"),
        share("2"),
        held("b", &gpu, Form::TIME_SLICED, Target::Gpu),
    ];
    let used = used(vec![usage("a", 3 * GIB, 0.25)]);
    let found: Vec<_> = times(&all, &inventory, &used)
        .iter()
        .map(|one| (one.uses.part, one.uses.memory))
        .collect();
    assert_eq!(found, [(WHOLE / 4, 3 * 1024), (0, 0), (0, 0)]);
}
