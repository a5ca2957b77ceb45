//! Figures of the use of each generation of GPUs in each mode, and the effect on them when a
//! call fails.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_claims::{ClaimRef, PodRef};
use divvy_gpu_sim::{Fault, SimNode};
use divvy_host::HostRoot;
use divvy_model::mig::GpuInstanceId;
use divvy_model::{
    Form, GpuDriver, GpuErrorCode, GpuOp, GpuUuid, MigDevice, MigMode, ProcessSample,
};
use divvy_telemetry::{Durations, MetricsRegistry};
use divvy_usage::{Figure, GpuUsage, Granted, Holding, Measured, Unknown, attribute};
use tempfile::TempDir;

use super::gpu::OnGpu;
use crate::app::config::Timing;

const GIB: u64 = 1 << 30;
const POD: &str = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";

/// A GPU that a claim of one pod holds, and process 7 of the pod on it: 3 GiB, half of the time.
struct World {
    sim: SimNode,
    gpu: GpuUuid,
    holding: Holding,
    /// The host's files.
    dir: TempDir,
    seconds: Durations,
    state: OnGpu,
}

/// Makes an instance of the smallest profile at the first slice.
fn cut(sim: &SimNode, gpu: &GpuUuid) -> MigDevice {
    let smallest = sim.edit(|e| {
        let on = MigMode::Supported {
            current: true,
            pending: true,
        };
        e.gpu(gpu).unwrap().facts.mig_mode = on;
        let all = e.mig_capabilities(gpu).unwrap();
        all.profiles()
            .iter()
            .min_by_key(|p| (p.memory_mib, p.id))
            .unwrap()
            .clone()
    });
    let made = sim.make_foreign_instance(gpu, smallest.id, 0).unwrap();
    MigDevice {
        gpu_instance: made.gpu_instance,
        uuid: made.uuid,
    }
}

impl World {
    fn new(board: &str, kind: Form) -> Self {
        let sim = SimNode::parse(board).unwrap();
        let gpu = sim.uuids().remove(0);
        let part = (kind == Form::PARTITIONS).then(|| cut(&sim, &gpu));
        let uid = "0b5a4a3e-9b1f-4a8e-b3f1-00000000000c".parse().unwrap();
        let holding = Holding {
            claim: ClaimRef {
                uid,
                namespace: "ns".to_owned(),
                name: "c".to_owned(),
            },
            device: "gpu-0".parse().unwrap(),
            kind,
            pods: vec![PodRef {
                name: "pod".to_owned(),
                uid: POD.to_owned(),
            }],
            part,
            granted: Granted {
                memory: Some(4 * GIB),
                limit: None,
                cores: Some(25),
            },
        };
        let timing = Timing {
            usage: Duration::ZERO,
            usage_lists: Duration::ZERO,
            ..Timing::default()
        };
        let seconds = MetricsRegistry::new().durations("x", "X", "call", &[], &[]);
        let dir = tempfile::tempdir().unwrap();
        let world = Self {
            sim,
            gpu,
            holding,
            dir,
            seconds,
            state: OnGpu::new(&timing),
        };
        world.start(7, Some(3 * GIB), 50);
        world
    }

    /// A process of the pod.
    fn start(&self, pid: u32, memory: Option<u64>, percent: u32) {
        let folder = self.dir.path().join(format!("proc/{pid}"));
        fs_err::create_dir_all(&folder).unwrap();
        fs_err::write(folder.join("cgroup"), format!("0::/kubepods/pod{POD}/4f1c")).unwrap();
        match &self.holding.part {
            Some(part) => self.sim.start_process_in(&self.gpu, part.gpu_instance, pid),
            None => self.sim.start_process(&self.gpu, pid),
        };
        self.sim.set_usage(&self.gpu, pid, memory, percent);
    }

    /// Reads once.
    fn read(&mut self) -> GpuUsage {
        let holdings = [self.holding.clone()];
        let (due, before) = self
            .state
            .begin(&holdings)
            .expect("everything is due all the time");
        assert!(
            self.state.begin(&holdings).is_none(),
            "a reading is under way"
        );
        let host = HostRoot::under(self.dir.path());
        self.state = before.read(&self.sim, &host, &self.gpu, due, &self.seconds);
        attribute(&self.state.reading, &self.state.pods, &holdings)
    }

    /// Reads until there is something to compare with.
    fn look(&mut self) -> String {
        self.read();
        said(&self.read())
    }
}

fn said(usage: &GpuUsage) -> String {
    let [device] = usage.devices.as_slice() else {
        panic!("{usage:?}")
    };
    let [pod] = device.pods.as_slice() else {
        panic!("{usage:?}")
    };
    let gib =
        |bytes: Figure<u64>| bytes.map_or_else(|why| format!("{why:?}"), |b| (b / GIB).to_string());
    let time = |used: Figure<Measured>| match used {
        Ok(used) => format!("{:.0}% {}", used.ratio * 100.0, used.source.name()),
        Err(why) => format!("{why:?}"),
    };
    let quiet = device
        .quiet
        .map_or_else(|why| format!("{why:?}"), |quiet| quiet.to_string());
    format!(
        "{} of {}, {}, quiet {quiet}",
        gib(pod.memory),
        gib(device.limit),
        time(pod.utilization)
    )
}

const PARTITION: Form = Form::PARTITIONS;

/// The table of docs/usage.md.
#[test]
fn each_mode_of_each_generation_has_the_figures_that_its_driver_measures() {
    let table = [
        (
            "t4",
            Form::WHOLE,
            "3 of 15, 50% device, quiet false",
            "0 of 15, 0% device, quiet true",
        ),
        (
            "a100-40",
            Form::WHOLE,
            "3 of 40, 50% device, quiet false",
            "0 of 40, 0% device, quiet true",
        ),
        (
            "l4",
            Form::WHOLE,
            "3 of 22, 50% device, quiet false",
            "0 of 22, 0% device, quiet true",
        ),
        (
            "h100",
            Form::WHOLE,
            "3 of 79, 50% gpm, quiet false",
            "0 of 79, 0% gpm, quiet true",
        ),
        (
            "b200",
            Form::WHOLE,
            "3 of 179, 50% gpm, quiet false",
            "0 of 179, 0% gpm, quiet true",
        ),
        (
            "t4",
            Form::TIME_SLICED,
            "3 of 4, 50% process, quiet false",
            "0 of 4, 0% process, quiet true",
        ),
        (
            "a100-40",
            Form::TIME_SLICED,
            "3 of 4, 50% process, quiet false",
            "0 of 4, 0% process, quiet true",
        ),
        (
            "l4",
            Form::TIME_SLICED,
            "3 of 4, 50% process, quiet false",
            "0 of 4, 0% process, quiet true",
        ),
        (
            "h100",
            Form::TIME_SLICED,
            "3 of 4, 50% process, quiet false",
            "0 of 4, 0% process, quiet true",
        ),
        (
            "b200",
            Form::TIME_SLICED,
            "3 of 4, 50% process, quiet false",
            "0 of 4, 0% process, quiet true",
        ),
        // No process is sampled in MIG mode, and performance monitors come with Hopper: only that
        // nothing runs is known.
        (
            "a100-40",
            PARTITION,
            "3 of 4, NotSupported, quiet NotSupported",
            "0 of 4, NotSupported, quiet true",
        ),
        (
            "h100",
            PARTITION,
            "3 of 9, 50% gpm, quiet false",
            "0 of 9, 0% gpm, quiet true",
        ),
        (
            "b200",
            PARTITION,
            "3 of 22, 50% gpm, quiet false",
            "0 of 22, 0% gpm, quiet true",
        ),
        (
            "h100",
            Form::ADMIN,
            "3 of NoGrant, 50% process, quiet false",
            "0 of NoGrant, 0% process, quiet true",
        ),
    ];
    for (board, kind, busy, ended) in table {
        let mut world = World::new(board, kind);
        assert_eq!(world.look(), busy, "{board} {kind:?}");
        world.sim.end_process(7);
        assert_eq!(world.look(), ended, "{board} {kind:?} without a process");
    }
}

#[test]
fn a_call_that_fails_costs_its_own_figure() {
    let failing = |board: &str, kind, op| {
        let mut world = World::new(board, kind);
        world.look();
        world.sim.fault(Fault::fail(GpuErrorCode::UNKNOWN).of(op));
        said(&world.read())
    };
    let (whole, share) = (Form::WHOLE, Form::TIME_SLICED);
    let cases = [
        (
            failing("l4", whole, GpuOp::Processes),
            "3 of 22, 50% device, quiet false",
        ),
        (
            failing("l4", whole, GpuOp::Memory),
            "3 of Failed, 50% device, quiet false",
        ),
        (
            failing("l4", whole, GpuOp::Utilization),
            "3 of 22, Failed, quiet Failed",
        ),
        (
            failing("h100", whole, GpuOp::SmUtilization),
            "3 of 79, NotRead, quiet NotRead",
        ),
        (
            failing("l4", share, GpuOp::Processes),
            "Failed of 4, Failed, quiet Failed",
        ),
        (
            failing("l4", share, GpuOp::ProcessUtilization),
            "3 of 4, Failed, quiet Failed",
        ),
        (
            failing("h100", PARTITION, GpuOp::Memory),
            "Failed of Failed, 50% gpm, quiet false",
        ),
        (
            failing("h100", PARTITION, GpuOp::Processes),
            "3 of 9, 50% gpm, quiet false",
        ),
        (
            failing("h100", PARTITION, GpuOp::SmUtilization),
            "3 of 9, Failed, quiet Failed",
        ),
    ];
    for (found, expected) in cases {
        assert_eq!(found, expected);
    }
}

#[test]
fn memory_that_the_driver_does_not_report_is_unknown() {
    let mut world = World::new("l4", Form::TIME_SLICED);
    world.start(8, None, 0);
    assert_eq!(
        world.look(),
        "MemoryOfProcess of 4, 50% process, quiet false"
    );
}

#[test]
fn another_partition_with_the_same_number_begins_anew() {
    let mut world = World::new("h100", PARTITION);
    assert_eq!(world.look(), "3 of 9, 50% gpm, quiet false");
    world.sim.end_process(7);
    let old = world.holding.part.clone().unwrap();
    let (sim, gpu) = (&world.sim, &world.gpu);
    sim.destroy_compute_instance(
        gpu,
        old.gpu_instance,
        divvy_model::mig::ComputeInstanceId(0),
    )
    .unwrap();
    sim.destroy_gpu_instance(gpu, old.gpu_instance).unwrap();
    let new = cut(sim, gpu);
    assert_eq!(
        (new.gpu_instance, new.uuid != old.uuid),
        (GpuInstanceId(old.gpu_instance.0), true)
    );
    // The record knows it before anything was read of it: nothing of the old one is said.
    let before = &world.state;
    let holding = Holding {
        part: Some(new),
        ..world.holding.clone()
    };
    let stale = attribute(
        &before.reading,
        &BTreeMap::new(),
        std::slice::from_ref(&holding),
    );
    assert_eq!(said(&stale), "NotRead of NotRead, NotRead, quiet NotRead");
    world.holding = holding;
    assert_eq!(said(&world.read()), "0 of 9, NotRead, quiet true");
    assert_eq!(said(&world.read()), "0 of 9, 0% gpm, quiet true");
    let read: Vec<_> = world.state.reading.parts.keys().cloned().collect();
    let there = world.holding.part.as_ref().map(|part| part.uuid.clone());
    assert_eq!(
        read,
        Vec::from_iter(there),
        "of the old one nothing is kept"
    );
}

/// Readings after which `look` is the answer again, of at most 20.
fn readings_until(world: &mut World, look: &str) -> usize {
    (1..=20)
        .find(|_| said(&world.read()) == look)
        .unwrap_or(usize::MAX)
}

#[test]
fn one_refusal_of_the_monitors_ends_them_for_a_minute_only() {
    for code in [
        GpuErrorCode::NO_PERMISSION,
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::FUNCTION_NOT_FOUND,
    ] {
        for (kind, figures) in [
            (PARTITION, "3 of 9, 50% gpm, quiet false"),
            (Form::WHOLE, "3 of 79, 50% gpm, quiet false"),
        ] {
            let mut world = World::new("h100", kind);
            assert_eq!(world.look(), figures);
            let refusal = Fault::fail(code).of(GpuOp::SmUtilization).times(1);
            world.sim.fault(refusal);
            world.read();
            let before = world.sim.calls(GpuOp::SmUtilization);
            assert_eq!(readings_until(&mut world, figures), 12, "{code:?} {kind:?}");
            assert_eq!(world.sim.calls(GpuOp::SmUtilization), before + 1);
        }
    }
}

#[test]
fn a_refusal_of_one_partition_is_none_of_another() {
    let mut world = World::new("h100", PARTITION);
    let profile = world.sim.edit(|e| {
        let all = e.mig_capabilities(&world.gpu).unwrap();
        let smallest = all.profiles().iter().min_by_key(|p| (p.memory_mib, p.id));
        smallest.unwrap().id
    });
    let made = world
        .sim
        .make_foreign_instance(&world.gpu, profile, 1)
        .unwrap();
    let second = MigDevice {
        gpu_instance: made.gpu_instance,
        uuid: made.uuid,
    };
    let first = world.holding.part.clone().unwrap();
    let holdings = [&first, &second].map(|part| Holding {
        part: Some(part.clone()),
        ..world.holding.clone()
    });
    let read = |world: &mut World| {
        let (due, before) = world.state.begin(&holdings).unwrap();
        let host = HostRoot::under(world.dir.path());
        world.state = before.read(&world.sim, &host, &world.gpu, due, &world.seconds);
        [&first, &second].map(|part| world.state.reading.parts[&part.uuid].sm)
    };
    let _first = read(&mut world);
    let refusal = Fault::fail(GpuErrorCode::NO_PERMISSION).of(GpuOp::SmUtilization);
    world.sim.fault(refusal.times(1));
    assert_eq!(read(&mut world), [Err(Unknown::NotSupported), Ok(0.0)]);
    assert_eq!(read(&mut world), [Err(Unknown::NotSupported), Ok(0.0)]);
}

#[test]
fn samples_are_asked_for_once_and_a_process_that_has_ended_keeps_its_pod() {
    let mut world = World::new("l4", Form::TIME_SLICED);
    let sample = |at, percent| ProcessSample {
        pid: 7,
        at,
        percent,
    };
    let with = |samples: Vec<ProcessSample>| {
        world
            .sim
            .edit(|e| e.gpu(&world.gpu).unwrap().usage.samples = samples);
        world.sim.set_usage(&world.gpu, 7, Some(3 * GIB), 0);
    };
    with(vec![sample(1000, 20), sample(2000, 40), sample(1500, 4711)]);
    assert_eq!(said(&world.read()), "3 of 4, 30% process, quiet false");
    assert_eq!(
        said(&world.read()),
        "3 of 4, 0% process, quiet true",
        "nothing new"
    );
    // A zombie: the driver still has its memory, /proc nothing.
    fs_err::remove_dir_all(world.dir.path().join("proc/7")).unwrap();
    assert_eq!(said(&world.read()), "3 of 4, 0% process, quiet true");
    world.sim.end_process(7);
    assert_eq!(said(&world.read()), "0 of 4, 0% process, quiet true");
    // A process of the host with the same number.
    world.sim.start_process(&world.gpu, 7);
    world.sim.set_usage(&world.gpu, 7, Some(3 * GIB), 10);
    let usage = world.read();
    assert_eq!(
        (said(&usage), usage.unattributed),
        ("0 of 4, 0% process, quiet true".to_owned(), Ok(3 * GIB))
    );
}

/// Seconds of the driver's samples of the process that computes half of the time, one list for each
/// reading: what is said of it after each.
fn sampled(readings: &[&[u64]]) -> Vec<String> {
    let mut world = World::new("l4", Form::TIME_SLICED);
    world.sim.set_usage(&world.gpu, 7, Some(3 * GIB), 0);
    let read = |seconds: &&[u64]| {
        let sample = |at: &u64| ProcessSample {
            pid: 7,
            at: at * 1_000_000,
            percent: 50,
        };
        let samples = seconds.iter().map(sample).collect();
        let usage = |sim: &SimNode| {
            sim.edit(|e| e.gpu(&world.gpu).unwrap().usage.samples = samples);
        };
        usage(&world.sim);
        let said = said(&world.read());
        said.strip_prefix("3 of 4, ").unwrap_or(&said).to_owned()
    };
    readings.iter().map(read).collect()
}

#[test]
fn after_the_clock_was_set_back_use_is_unknown_and_not_zero() {
    let (busy, zero) = ("50% process, quiet false", "0% process, quiet true");
    let unknown = "NotRead, quiet NotRead";
    assert_eq!(
        sampled(&[&[100], &[100, 105], &[100, 105], &[], &[110]]),
        [busy, busy, zero, zero, busy],
        "the clock goes right"
    );
    assert_eq!(
        sampled(&[&[160], &[105], &[105, 110], &[110]]),
        [busy, unknown, busy, zero],
        "it was set back by a minute"
    );
    // The year 2100: the driver keeps a sample of it for a while.
    let ahead = 4_102_444_800;
    assert_eq!(
        sampled(&[&[ahead], &[ahead], &[105, ahead], &[110, 105], &[115, 110]]),
        [busy, unknown, unknown, unknown, busy]
    );
}

#[test]
fn the_driver_is_asked_no_more_than_is_needed() {
    let calls = |board: &str, kind| {
        let mut world = World::new(board, kind);
        world.look();
        let ops = [
            GpuOp::Processes,
            GpuOp::Memory,
            GpuOp::Utilization,
            GpuOp::ProcessUtilization,
            GpuOp::SmUtilization,
        ];
        ops.map(|op| world.sim.calls(op))
    };
    // Two readings each.
    assert_eq!(
        calls("l4", Form::WHOLE),
        [2, 2, 2, 0, 1],
        "what is not supported is asked for once"
    );
    assert_eq!(calls("h100", Form::WHOLE), [2, 2, 0, 0, 2]);
    assert_eq!(calls("h100", Form::TIME_SLICED), [2, 2, 0, 2, 0]);
    assert_eq!(calls("h100", PARTITION), [2, 4, 0, 0, 2]);
}
