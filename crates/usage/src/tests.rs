//! Attribution, and what follows from it over time. Every case is a GPU with its holders and what
//! was read of it.

mod due;

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_claims::{ClaimRef, PodRef};
use divvy_model::mig::GpuInstanceId;
use divvy_model::{Form, GpuMemory, GpuProcess, GpuUuid, MigDevice};

use crate::{
    Change, Figure, GpuReading, GpuUsage, Granted, Holding, Measured, PartReading, Source, Unknown,
    UsagePolicy, Watch, attribute, margin, pod_utilization,
};

const GIB: u64 = 1 << 30;

fn claim(name: &str) -> ClaimRef {
    let uid = format!("00000000-0000-0000-0000-{name:0>12}")
        .parse()
        .unwrap();
    ClaimRef {
        uid,
        namespace: "ns".to_owned(),
        name: name.to_owned(),
    }
}

fn hold(claim_name: &str, kind: Form, pods: &[&str]) -> Holding {
    let device = if kind.sharing.is_shared() {
        "gpu-0-ts"
    } else {
        "gpu-0"
    };
    let pods = pods.iter().map(|pod| PodRef {
        name: (*pod).to_owned(),
        uid: format!("uid-{pod}"),
    });
    Holding {
        claim: claim(claim_name),
        device: device.parse().unwrap(),
        kind,
        pods: pods.collect(),
        part: None,
        granted: Granted::default(),
    }
}

fn share(claim_name: &str, gib: u64, pods: &[&str]) -> Holding {
    let granted = Granted {
        memory: Some(gib * GIB),
        limit: None,
        cores: Some(25),
    };
    Holding {
        granted,
        ..hold(claim_name, Form::TIME_SLICED, pods)
    }
}

fn partition(claim_name: &str, id: u32, pods: &[&str]) -> Holding {
    let kind = Form::PARTITIONS;
    let uuid = format!("MIG-00000000-0000-0000-0000-{id:012}")
        .parse()
        .unwrap();
    let device = format!("gpu-0-{id}").parse().unwrap();
    let part = Some(MigDevice {
        gpu_instance: GpuInstanceId(id),
        uuid,
    });
    Holding {
        device,
        part,
        ..hold(claim_name, kind, pods)
    }
}

/// Processes: pid, pod, GiB, percent.
fn reading(processes: &[(u32, &str, u64, u32)]) -> (GpuReading, BTreeMap<u32, String>) {
    let process = |(pid, _, gib, _): &(u32, &str, u64, u32)| GpuProcess {
        memory_bytes: Some(gib * GIB),
        ..GpuProcess::new(*pid, None)
    };
    let used = processes
        .iter()
        .map(|(_, _, gib, _)| gib * GIB)
        .sum::<u64>()
        + GIB;
    let computed = processes
        .iter()
        .filter(|p| p.3 > 0)
        .map(|p| (p.0, f64::from(p.3) / 100.0));
    let busy = processes.iter().map(|p| p.3).sum::<u32>().min(100);
    let reading = GpuReading {
        number: 1,
        processes: Ok(processes.iter().map(process).collect()),
        memory: Ok(GpuMemory {
            total: 80 * GIB,
            used,
            reserved: GIB,
        }),
        busy: Ok(f64::from(busy) / 100.0),
        sm: Err(Unknown::NotSupported),
        computed: Ok(computed.collect()),
        parts: BTreeMap::new(),
    };
    let pods = processes
        .iter()
        .filter(|p| !p.1.is_empty())
        .map(|p| (p.0, format!("uid-{}", p.1)));
    (reading, pods.collect())
}

/// Claim, pod, GiB, percent and source, in short.
fn table(usage: &GpuUsage) -> Vec<String> {
    let gib =
        |bytes: Figure<u64>| bytes.map_or_else(|why| format!("{why:?}"), |b| (b / GIB).to_string());
    let time = |used: Figure<Measured>| match used {
        Ok(used) => format!("{:.0}% {}", used.ratio * 100.0, used.source.name()),
        Err(why) => format!("{why:?}"),
    };
    let row = |device: &crate::DeviceUsage| -> Vec<String> {
        let pod = |pod: &crate::PodUsage| {
            format!(
                "{} {} {} {}",
                device.claim.name,
                pod.name,
                gib(pod.memory),
                time(pod.utilization)
            )
        };
        device.pods.iter().map(pod).collect()
    };
    let unattributed = format!("rest {}", gib(usage.unattributed));
    usage
        .devices
        .iter()
        .flat_map(row)
        .chain([unattributed])
        .collect()
}

fn of(read: &(GpuReading, BTreeMap<u32, String>), holdings: &[Holding]) -> Vec<String> {
    table(&attribute(&read.0, &read.1, holdings))
}

#[test]
fn a_whole_gpu_is_its_pods() {
    let read = reading(&[(1, "a", 10, 30), (2, "a", 5, 20), (3, "", 2, 0)]);
    assert_eq!(
        of(&read, &[hold("c", Form::WHOLE, &["a"])]),
        ["c a 15 50% device", "rest 3"]
    );
    // Where the driver does not say what processes have, the GPU's value is the claim's: no other
    // claim may use it.
    let (mut unknown, pods) = read.clone();
    unknown.processes.as_mut().unwrap()[0].memory_bytes = None;
    unknown.sm = Ok(0.25);
    assert_eq!(
        of(&(unknown, pods), &[hold("c", Form::WHOLE, &["a"])]),
        ["c a 18 25% gpm", "rest MemoryOfProcess"]
    );
    // The pods of a claim that is shared differ by their processes.
    let read = reading(&[(1, "a", 10, 30), (2, "b", 5, 20)]);
    assert_eq!(
        of(&read, &[hold("c", Form::WHOLE, &["a", "b"])]),
        ["c a 10 30% process", "c b 5 20% process", "rest 1"]
    );
    let none = hold("c", Form::WHOLE, &[]);
    assert_eq!(
        of(&read, &[none])[0],
        "c  16 50% device",
        "no pod is known: a claim of a PodGroup"
    );
}

#[test]
fn shares_differ_by_their_processes() {
    let holdings = [
        share("c", 10, &["a"]),
        share("d", 10, &["b"]),
        share("e", 10, &["x"]),
    ];
    let read = reading(&[
        (1, "a", 10, 30),
        (2, "a", 1, 0),
        (3, "b", 5, 90),
        (4, "stranger", 2, 40),
    ]);
    assert_eq!(
        of(&read, &holdings),
        [
            "c a 11 30% process",
            "d b 5 90% process",
            "e x 0 0% process",
            "rest 3"
        ]
    );
    let (mut failed, pods) = read.clone();
    failed.computed = Err(Unknown::Failed);
    let known_only_where_nothing_runs = of(&(failed, pods), &holdings);
    assert_eq!(
        known_only_where_nothing_runs[..3],
        ["c a 11 Failed", "d b 5 Failed", "e x 0 0% process"]
    );
    let (mut failed, pods) = read;
    failed.processes = Err(Unknown::Failed);
    assert_eq!(
        of(&(failed, pods), &holdings),
        [
            "c a Failed Failed",
            "d b Failed Failed",
            "e x Failed Failed",
            "rest Failed"
        ]
    );
}

#[test]
fn what_claims_use_together_is_no_claims_own() {
    // Two claims of one pod.
    let holdings = [share("c", 10, &["a"]), share("d", 5, &["a"])];
    let usage =
        |read: &(GpuReading, BTreeMap<u32, String>), h: &[Holding]| attribute(&read.0, &read.1, h);
    let read = reading(&[(1, "a", 12, 30)]);
    assert_eq!(
        of(&read, &holdings),
        ["c a Together Together", "d a Together Together", "rest 1"]
    );
    let groups = usage(&read, &holdings).groups;
    assert_eq!(
        (groups.len(), groups[0].used, groups[0].granted),
        (1, Ok(12 * GIB), Ok(15 * GIB))
    );
    // Nothing used is known of each.
    assert_eq!(
        of(&reading(&[]), &holdings)[..2],
        ["c a 0 0% process", "d a 0 0% process"]
    );
    // Two shares of one claim are one device, granted twice.
    let twice = [share("c", 10, &["a"]), share("c", 5, &["a"])];
    assert_eq!(of(&read, &twice), ["c a 12 30% process", "rest 1"]);
    assert_eq!(usage(&read, &twice).groups[0].granted, Ok(15 * GIB));
    // A claim of two pods: each pod its own, the grant is the claim's.
    let shared = [share("c", 10, &["a", "b"]), share("d", 5, &["x"])];
    let read = reading(&[(1, "a", 4, 10), (2, "b", 5, 20), (3, "x", 6, 30)]);
    assert_eq!(
        of(&read, &shared),
        [
            "c a 4 10% process",
            "c b 5 20% process",
            "d x 6 30% process",
            "rest 1"
        ]
    );
    let groups = usage(&read, &shared).groups;
    assert_eq!(
        groups.iter().map(|g| g.used).collect::<Vec<_>>(),
        [Ok(9 * GIB), Ok(6 * GIB)]
    );
    // A chain: c and d have pod b in common.
    let chain = [share("c", 10, &["a", "b"]), share("d", 5, &["b"])];
    let read = reading(&[(1, "a", 4, 10), (2, "b", 5, 20)]);
    assert_eq!(
        of(&read, &chain),
        [
            "c a 4 10% process",
            "c b Together Together",
            "d b Together Together",
            "rest 1"
        ]
    );
    assert_eq!(usage(&read, &chain).groups[0].used, Ok(9 * GIB));
}

#[test]
fn admin_access_counts_only_what_the_pod_has_no_claim_for() {
    let monitor = hold("m", Form::ADMIN, &["a", "mon"]);
    let read = reading(&[(1, "a", 10, 30), (2, "mon", 1, 5)]);
    assert_eq!(
        of(&read, &[share("c", 20, &["a"]), monitor.clone()]),
        [
            "c a 10 30% process",
            "m a Together Together",
            "m mon 1 5% process",
            "rest 1"
        ]
    );
    let usage = attribute(&read.0, &read.1, &[monitor]);
    assert_eq!(usage.devices[0].limit, Err(Unknown::NoGrant));
    assert_eq!(usage.groups, [], "nothing to compare with");
    assert!(pod_utilization([&usage]).is_empty());
}

#[test]
fn partitions_are_measured_by_the_hardware() {
    let mut read = reading(&[(1, "a", 3, 0), (2, "b", 4, 0), (3, "b2", 1, 0)]);
    for (process, instance) in read.0.processes.as_mut().unwrap().iter_mut().zip([1, 2, 2]) {
        process.gpu_instance = Some(instance);
    }
    let part = |gib, sm| PartReading {
        memory: Ok(GpuMemory {
            total: 10 * GIB,
            used: gib * GIB,
            reserved: 0,
        }),
        sm,
    };
    let uuid = |id: u32| {
        format!("MIG-00000000-0000-0000-0000-{id:012}")
            .parse()
            .unwrap()
    };
    read.0.parts = BTreeMap::from([
        (uuid(1), part(4, Ok(1.4))),
        (uuid(2), part(5, Err(Unknown::NotSupported))),
        (uuid(3), part(0, Err(Unknown::NotSupported))),
    ]);
    let holdings = [
        partition("c", 1, &["a"]),
        partition("d", 2, &["b", "b2"]),
        partition("e", 3, &["x"]),
    ];
    assert_eq!(
        of(&read, &holdings),
        [
            "c a 4 100% gpm",
            "d b 4 Together",
            "d b2 1 Together",
            "e x 0 NotSupported",
            "rest 0"
        ],
        "with contexts of the driver; more than all of the time is all of it"
    );
    let usage = attribute(&read.0, &read.1, &holdings);
    let quiet: Vec<_> = usage.devices.iter().map(|device| device.quiet).collect();
    assert_eq!(
        quiet,
        [Ok(false), Err(Unknown::NotSupported), Ok(true)],
        "nothing runs in the third"
    );
    assert_eq!(usage.devices[0].limit, Ok(10 * GIB));
    // A partition that was not read yet, and one that is not known to have been made.
    read.0.parts.clear();
    assert_eq!(of(&read, &holdings)[0], "c a NotRead NotRead");
    let unmade = Holding {
        part: None,
        ..partition("c", 1, &["a"])
    };
    assert_eq!(of(&read, &[unmade])[0], "c a NotRead NotRead");
}

#[test]
fn a_pods_utilisation_is_of_what_it_was_granted() {
    let (read, pods) = reading(&[(1, "a", 1, 50), (2, "b", 1, 10)]);
    let shares = attribute(
        &read,
        &pods,
        &[share("c", 10, &["a"]), share("d", 10, &["b"])],
    );
    let whole = attribute(&read, &pods, &[hold("w", Form::WHOLE, &["b"])]);
    let found = pod_utilization([&shares, &whole]);
    let of = |pod: &str| found[&("ns".to_owned(), pod.to_owned())].unwrap();
    assert!(
        (of("a") - 2.0).abs() < 1e-9,
        "half of the GPU of a quarter granted"
    );
    assert!(
        (of("b") - f64::midpoint(0.4, 0.6)).abs() < 1e-9,
        "the mean over its devices"
    );
    let unread = attribute(
        &GpuReading::default(),
        &pods,
        &[hold("w", Form::WHOLE, &["b"])],
    );
    let found = pod_utilization([&shares, &unread]);
    assert_eq!(
        found[&("ns".to_owned(), "b".to_owned())],
        Err(Unknown::NotRead),
        "one is not known: none is"
    );
}

const AFTER: Duration = Duration::from_hours(1);

fn gpus(usage: GpuUsage) -> BTreeMap<GpuUuid, GpuUsage> {
    BTreeMap::from([(
        "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap(),
        usage,
    )])
}

/// Returns the changes after each reading of the MiB that a share of 10 GiB uses (`None`: not
/// known).
fn overuse(used: &[Option<u64>]) -> Vec<String> {
    let mut watch = Watch::new(AFTER);
    let mut said = Vec::new();
    for (at, mib) in used.iter().enumerate() {
        let (mut read, pods) = reading(&[(1, "a", 0, 0)]);
        read.number = at as u64 + 1;
        read.processes.as_mut().unwrap()[0].memory_bytes = mib.map(|mib| mib << 20);
        let usage = gpus(attribute(&read, &pods, &[share("c", 10, &["a"])]));
        // The same reading again says nothing new.
        for _ in 0..3 {
            for change in watch.step(&usage, &BTreeMap::new(), Duration::from_secs(at as u64)) {
                let Change::Overuse {
                    over,
                    used,
                    allowed,
                    ..
                } = change
                else {
                    panic!("{change:?}")
                };
                said.push(format!("{at}: {over} {} {}", used >> 20, allowed >> 20));
            }
        }
        let known = watch.verdicts(Duration::ZERO).over.len();
        assert_eq!(
            known,
            usize::from(mib.is_some()),
            "nothing is said of what is not known"
        );
    }
    said
}

#[test]
fn a_share_is_over_its_grant_after_two_readings_above_the_margin() {
    let (fine, over) = (Some(10 * 1024 + 512), Some(10 * 1024 + 513));
    assert_eq!(overuse(&[fine, fine, fine, fine]), [""; 0]);
    assert_eq!(overuse(&[over, fine, over, fine]), [""; 0]);
    assert_eq!(overuse(&[over, over, over]), ["1: true 10753 10240"]);
    assert_eq!(
        overuse(&[over, over, fine, over, fine, fine]),
        ["1: true 10753 10240", "5: false 10752 10240"]
    );
    // A figure that is not known neither begins nor ends it.
    assert_eq!(overuse(&[over, None, over]), [""; 0]);
    assert_eq!(
        overuse(&[over, over, None, None, None, fine]),
        ["1: true 10753 10240"]
    );
    assert_eq!(overuse(&[None, None, None]), [""; 0]);
    assert_eq!((margin(GIB), margin(100 * GIB)), (256 << 20, 5 * GIB));
}

/// A share with this limit in GiB, if it has one.
fn limited(claim_name: &str, gib: u64, limit: Option<u64>, pods: &[&str]) -> Holding {
    let mut holding = share(claim_name, gib, pods);
    holding.granted.limit = limit.map(|gib| gib * GIB);
    holding
}

#[test]
fn a_share_with_a_limit_is_over_it_and_not_over_its_request() {
    // Used, limit, and what is said after two readings: allowed, and whether it is capped.
    for (used, limit, expected) in [
        (14, Some(16), None),
        (16, Some(16), None),
        (18, Some(16), Some((16, true))),
        (14, None, Some((10, false))),
    ] {
        let mut watch = Watch::new(AFTER);
        let mut said = Vec::new();
        for number in 1..=2 {
            let (read, pods) = reading(&[(1, "a", used, 0)]);
            let read = GpuReading { number, ..read };
            let usage = gpus(attribute(&read, &pods, &[limited("c", 10, limit, &["a"])]));
            said = watch.step(&usage, &BTreeMap::new(), Duration::ZERO);
        }
        let found = said.into_iter().find_map(|change| match change {
            Change::Overuse {
                allowed, capped, ..
            } => Some((allowed / GIB, capped)),
            _ => None,
        });
        assert_eq!(found, expected, "{used} {limit:?}");
    }
}

/// A pod with one share that is limited and one that is not is not held to a limit.
#[test]
fn shares_of_a_pod_are_capped_only_if_each_is() {
    let (read, pods) = reading(&[(1, "a", 1, 0)]);
    let both = |other| {
        [
            limited("c", 10, Some(16), &["a"]),
            limited("d", 5, other, &["a"]),
        ]
    };
    for (other, allowed, capped) in [(Some(6), 22, true), (None, 21, false)] {
        let usage = attribute(&read, &pods, &both(other));
        let group = &usage.groups[0];
        assert_eq!(
            (group.granted, group.allowed, group.capped),
            (Ok(15 * GIB), Ok(allowed * GIB), capped)
        );
    }
}

#[test]
fn claims_that_use_a_gpu_together_are_over_their_grants_together() {
    let mut watch = Watch::new(AFTER);
    let mut over = 0;
    for number in 1..=2 {
        let (read, pods) = reading(&[(1, "a", 16, 0)]);
        let read = GpuReading { number, ..read };
        let holdings = [
            share("c", 10, &["a"]),
            share("d", 5, &["a"]),
            share("e", 1, &["b"]),
        ];
        over = watch
            .step(
                &gpus(attribute(&read, &pods, &holdings)),
                &BTreeMap::new(),
                Duration::ZERO,
            )
            .len();
    }
    assert_eq!(over, 2);
    let verdicts = watch.verdicts(Duration::ZERO).over;
    assert_eq!(
        verdicts.values().copied().collect::<Vec<_>>(),
        [true, true, false]
    );
    // A claim that is gone is forgotten.
    let (read, pods) = reading(&[]);
    assert_eq!(
        watch.step(
            &gpus(attribute(&read, &pods, &[])),
            &BTreeMap::new(),
            Duration::ZERO
        ),
        []
    );
    assert!(watch.verdicts(Duration::ZERO).over.is_empty());
}

/// Minutes with what is computed (`None`: not known): what is said when.
fn idle(minutes: &[(u64, Option<u32>)]) -> Vec<(u64, bool)> {
    let mut watch = Watch::new(AFTER);
    let mut said = Vec::new();
    for (minute, percent) in minutes {
        let (mut read, pods) = reading(&[(1, "a", 1, percent.unwrap_or(0))]);
        if percent.is_none() {
            read.busy = Err(Unknown::Failed);
        }
        let usage = gpus(attribute(&read, &pods, &[hold("c", Form::WHOLE, &["a"])]));
        let changes = watch.step(&usage, &BTreeMap::new(), Duration::from_secs(minute * 60));
        said.extend(changes.into_iter().map(|change| match &change {
            Change::Idle { idle, .. } => (*minute, *idle),
            _ => panic!("{change:?}"),
        }));
        let known = watch.verdicts(Duration::from_secs(minute * 60)).idle.len();
        assert_eq!(known, usize::from(percent.is_some()));
    }
    said
}

#[test]
fn a_claim_is_idle_after_a_whole_window_of_known_zero() {
    let zero = |minutes: &[u64]| minutes.iter().map(|m| (*m, Some(0))).collect::<Vec<_>>();
    assert_eq!(idle(&zero(&[0, 30, 59, 60, 61])), [(60, true)]);
    assert_eq!(
        idle(&[
            (0, Some(0)),
            (30, Some(1)),
            (60, Some(0)),
            (89, Some(0)),
            (120, Some(0))
        ]),
        [(120, true)]
    );
    assert_eq!(
        idle(&[
            (0, Some(0)),
            (30, None),
            (61, Some(0)),
            (120, Some(0)),
            (121, Some(0))
        ]),
        [(121, true)]
    );
    assert_eq!(idle(&[(0, None), (60, None), (120, None)]), []);
    // Reported until use is seen.
    let ends = [
        (0, Some(0)),
        (60, Some(0)),
        (61, None),
        (62, Some(0)),
        (63, Some(5)),
        (64, Some(0)),
    ];
    assert_eq!(idle(&ends), [(60, true), (63, false)]);
}

#[test]
fn a_claim_on_two_gpus_is_idle_only_where_both_are() {
    let mut watch = Watch::new(AFTER);
    let usage = |percent, pods: &[&str]| {
        let (read, of) = reading(&[(1, "a", 1, percent)]);
        attribute(&read, &of, &[hold("c", Form::WHOLE, pods)])
    };
    let mut both = gpus(usage(0, &["a"]));
    both.insert(
        "GPU-12345678-1234-1234-1234-123456780002".parse().unwrap(),
        usage(10, &["a"]),
    );
    for minute in [0, 60] {
        assert_eq!(
            watch.step(&both, &BTreeMap::new(), Duration::from_secs(minute * 60)),
            []
        );
    }
    let now = Duration::from_hours(1);
    assert_eq!(
        watch.verdicts(now).idle.into_values().collect::<Vec<_>>(),
        [Duration::ZERO]
    );
}

#[test]
fn a_whole_gpu_that_computes_is_not_quiet_though_no_process_is_listed() {
    let quiet = |percent, busy: Figure<f64>| {
        let (mut read, pods) = reading(&[]);
        (read.busy, read.sm) = (busy, percent);
        attribute(&read, &pods, &[hold("c", Form::WHOLE, &["a"])]).devices[0].quiet
    };
    let none = Err(Unknown::NotSupported);
    assert_eq!(
        quiet(none, Ok(0.4)),
        Ok(false),
        "graphics: the driver lists such processes elsewhere"
    );
    assert_eq!(quiet(Ok(0.4), Err(Unknown::NotRead)), Ok(false));
    assert_eq!(quiet(none, Ok(0.0)), Ok(true));
    assert_eq!(quiet(none, Err(Unknown::Failed)), Ok(true), "nothing runs");
}

#[test]
fn sources_have_stable_names() {
    assert_eq!(
        [Source::Gpm, Source::Device, Source::Process].map(Source::name),
        ["gpm", "device", "process"]
    );
}
