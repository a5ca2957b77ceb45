//! Attribution, and what follows from it over time. Every case is a GPU with its holders and what was read of it.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_claims::{ClaimRef, PodRef};
use divvy_model::mig::{GpuInstanceId, GpuInstanceProfileId, Placement};
use divvy_model::{GpuMemory, GpuProcess, GpuUuid, HoldKind, MigDevice};

use crate::{
    Change, Figure, GpuReading, GpuUsage, Granted, Holding, Measured, PartReading, Source, Unknown,
    UsagePolicy, Watch, attribute, margin, pod_utilization,
};

const GIB: u64 = 1 << 30;

fn claim(name: &str) -> ClaimRef {
    let uid = format!("00000000-0000-0000-0000-{name:0>12}").parse().unwrap();
    ClaimRef { uid, namespace: "ns".to_owned(), name: name.to_owned() }
}

fn hold(claim_name: &str, kind: HoldKind, pods: &[&str]) -> Holding {
    let device = if kind == HoldKind::Share { "gpu-0-ts" } else { "gpu-0" };
    let pods = pods.iter().map(|pod| PodRef { name: (*pod).to_owned(), uid: format!("uid-{pod}") });
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
    let granted = Granted { memory: Some(gib * GIB), cores: Some(25) };
    Holding { granted, ..hold(claim_name, HoldKind::Share, pods) }
}

fn partition(claim_name: &str, id: u32, pods: &[&str]) -> Holding {
    let placement = Placement { start: id, size: 1 };
    let kind = HoldKind::Partition { profile: GpuInstanceProfileId(19), placement };
    let uuid = format!("MIG-00000000-0000-0000-0000-{id:012}").parse().unwrap();
    let device = format!("gpu-0-{id}").parse().unwrap();
    let part = Some(MigDevice { gpu_instance: GpuInstanceId(id), uuid });
    Holding { device, part, ..hold(claim_name, kind, pods) }
}

/// Processes: pid, pod, GiB, percent.
fn reading(processes: &[(u32, &str, u64, u32)]) -> (GpuReading, BTreeMap<u32, String>) {
    let process = |(pid, _, gib, _): &(u32, &str, u64, u32)| GpuProcess {
        memory_bytes: Some(gib * GIB),
        ..GpuProcess::new(*pid, None)
    };
    let used = processes.iter().map(|(_, _, gib, _)| gib * GIB).sum::<u64>() + GIB;
    let computed = processes.iter().filter(|p| p.3 > 0).map(|p| (p.0, f64::from(p.3) / 100.0));
    let busy = processes.iter().map(|p| p.3).sum::<u32>().min(100);
    let reading = GpuReading {
        number: 1,
        processes: Ok(processes.iter().map(process).collect()),
        memory: Ok(GpuMemory { total: 80 * GIB, used, reserved: GIB }),
        busy: Ok(f64::from(busy) / 100.0),
        sm: Err(Unknown::NotSupported),
        computed: Ok(computed.collect()),
        parts: BTreeMap::new(),
    };
    let pods = processes.iter().filter(|p| !p.1.is_empty()).map(|p| (p.0, format!("uid-{}", p.1)));
    (reading, pods.collect())
}

/// Claim, pod, GiB, percent and source, in short.
fn table(usage: &GpuUsage) -> Vec<String> {
    let gib = |bytes: Figure<u64>| bytes.map_or_else(|why| format!("{why:?}"), |b| (b / GIB).to_string());
    let time = |used: Figure<Measured>| match used {
        Ok(used) => format!("{:.0}% {}", used.ratio * 100.0, used.source.name()),
        Err(why) => format!("{why:?}"),
    };
    let row = |device: &crate::DeviceUsage| -> Vec<String> {
        let pod = |pod: &crate::PodUsage| {
            format!("{} {} {} {}", device.claim.name, pod.name, gib(pod.memory), time(pod.utilization))
        };
        device.pods.iter().map(pod).collect()
    };
    let unattributed = format!("rest {}", gib(usage.unattributed));
    usage.devices.iter().flat_map(row).chain([unattributed]).collect()
}

fn of(read: &(GpuReading, BTreeMap<u32, String>), holdings: &[Holding]) -> Vec<String> {
    table(&attribute(&read.0, &read.1, holdings))
}

#[test]
fn a_whole_gpu_is_its_pods() {
    let read = reading(&[(1, "a", 10, 30), (2, "a", 5, 20), (3, "", 2, 0)]);
    assert_eq!(of(&read, &[hold("c", HoldKind::Whole, &["a"])]), ["c a 15 50% device", "rest 3"]);
    // Where the driver does not say what processes have, the GPU's value is the claim's: no other claim may use it.
    let (mut unknown, pods) = read.clone();
    unknown.processes.as_mut().unwrap()[0].memory_bytes = None;
    unknown.sm = Ok(0.25);
    assert_eq!(
        of(&(unknown, pods), &[hold("c", HoldKind::Whole, &["a"])]),
        ["c a 18 25% gpm", "rest MemoryOfProcess"]
    );
    // The pods of a claim that is shared differ by their processes.
    let read = reading(&[(1, "a", 10, 30), (2, "b", 5, 20)]);
    assert_eq!(
        of(&read, &[hold("c", HoldKind::Whole, &["a", "b"])]),
        ["c a 10 30% process", "c b 5 20% process", "rest 1"]
    );
    let none = hold("c", HoldKind::Whole, &[]);
    assert_eq!(of(&read, &[none])[0], "c  16 50% device", "no pod is known: a claim of a PodGroup");
}

#[test]
fn shares_differ_by_their_processes() {
    let holdings = [share("c", 10, &["a"]), share("d", 10, &["b"]), share("e", 10, &["x"])];
    let read = reading(&[(1, "a", 10, 30), (2, "a", 1, 0), (3, "b", 5, 90), (4, "stranger", 2, 40)]);
    assert_eq!(
        of(&read, &holdings),
        ["c a 11 30% process", "d b 5 90% process", "e x 0 0% process", "rest 3"]
    );
    let (mut failed, pods) = read.clone();
    failed.computed = Err(Unknown::Failed);
    let known_only_where_nothing_runs = of(&(failed, pods), &holdings);
    assert_eq!(known_only_where_nothing_runs[..3], ["c a 11 Failed", "d b 5 Failed", "e x 0 0% process"]);
    let (mut failed, pods) = read;
    failed.processes = Err(Unknown::Failed);
    assert_eq!(
        of(&(failed, pods), &holdings),
        ["c a Failed Failed", "d b Failed Failed", "e x Failed Failed", "rest Failed"]
    );
}

#[test]
fn what_claims_use_together_is_no_claims_own() {
    // Two claims of one pod.
    let holdings = [share("c", 10, &["a"]), share("d", 5, &["a"])];
    let usage = |read: &(GpuReading, BTreeMap<u32, String>), h: &[Holding]| attribute(&read.0, &read.1, h);
    let read = reading(&[(1, "a", 12, 30)]);
    assert_eq!(of(&read, &holdings), ["c a Together Together", "d a Together Together", "rest 1"]);
    let groups = usage(&read, &holdings).groups;
    assert_eq!((groups.len(), groups[0].used, groups[0].granted), (1, Ok(12 * GIB), Ok(15 * GIB)));
    // Nothing used is known of each.
    assert_eq!(of(&reading(&[]), &holdings)[..2], ["c a 0 0% process", "d a 0 0% process"]);
    // Two shares of one claim are one device, granted twice.
    let twice = [share("c", 10, &["a"]), share("c", 5, &["a"])];
    assert_eq!(of(&read, &twice), ["c a 12 30% process", "rest 1"]);
    assert_eq!(usage(&read, &twice).groups[0].granted, Ok(15 * GIB));
    // One claim of two pods: each pod its own, the grant is the claim's.
    let shared = [share("c", 10, &["a", "b"]), share("d", 5, &["x"])];
    let read = reading(&[(1, "a", 4, 10), (2, "b", 5, 20), (3, "x", 6, 30)]);
    assert_eq!(of(&read, &shared), ["c a 4 10% process", "c b 5 20% process", "d x 6 30% process", "rest 1"]);
    let groups = usage(&read, &shared).groups;
    assert_eq!(groups.iter().map(|g| g.used).collect::<Vec<_>>(), [Ok(9 * GIB), Ok(6 * GIB)]);
    // A chain: c and d have pod b in common.
    let chain = [share("c", 10, &["a", "b"]), share("d", 5, &["b"])];
    let read = reading(&[(1, "a", 4, 10), (2, "b", 5, 20)]);
    assert_eq!(
        of(&read, &chain),
        ["c a 4 10% process", "c b Together Together", "d b Together Together", "rest 1"]
    );
    assert_eq!(usage(&read, &chain).groups[0].used, Ok(9 * GIB));
}

#[test]
fn admin_access_counts_only_what_the_pod_has_no_claim_for() {
    let monitor = hold("m", HoldKind::Admin, &["a", "mon"]);
    let read = reading(&[(1, "a", 10, 30), (2, "mon", 1, 5)]);
    assert_eq!(
        of(&read, &[share("c", 20, &["a"]), monitor.clone()]),
        ["c a 10 30% process", "m a Together Together", "m mon 1 5% process", "rest 1"]
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
    let part =
        |gib, sm| PartReading { memory: Ok(GpuMemory { total: 10 * GIB, used: gib * GIB, reserved: 0 }), sm };
    let uuid = |id: u32| format!("MIG-00000000-0000-0000-0000-{id:012}").parse().unwrap();
    read.0.parts = BTreeMap::from([
        (uuid(1), part(4, Ok(1.4))),
        (uuid(2), part(5, Err(Unknown::NotSupported))),
        (uuid(3), part(0, Err(Unknown::NotSupported))),
    ]);
    let holdings = [partition("c", 1, &["a"]), partition("d", 2, &["b", "b2"]), partition("e", 3, &["x"])];
    assert_eq!(
        of(&read, &holdings),
        ["c a 4 100% gpm", "d b 4 Together", "d b2 1 Together", "e x 0 NotSupported", "rest 0"],
        "with contexts of the driver; more than all of the time is all of it"
    );
    let usage = attribute(&read.0, &read.1, &holdings);
    let quiet: Vec<_> = usage.devices.iter().map(|device| device.quiet).collect();
    assert_eq!(quiet, [Ok(false), Err(Unknown::NotSupported), Ok(true)], "nothing runs in the third");
    assert_eq!(usage.devices[0].limit, Ok(10 * GIB));
    // A partition that was not read yet, and one that is not known to have been made.
    read.0.parts.clear();
    assert_eq!(of(&read, &holdings)[0], "c a NotRead NotRead");
    let unmade = Holding { part: None, ..partition("c", 1, &["a"]) };
    assert_eq!(of(&read, &[unmade])[0], "c a NotRead NotRead");
}

#[test]
fn a_pods_utilisation_is_of_what_it_was_granted() {
    let (read, pods) = reading(&[(1, "a", 1, 50), (2, "b", 1, 10)]);
    let shares = attribute(&read, &pods, &[share("c", 10, &["a"]), share("d", 10, &["b"])]);
    let whole = attribute(&read, &pods, &[hold("w", HoldKind::Whole, &["b"])]);
    let found = pod_utilization([&shares, &whole]);
    let of = |pod: &str| found[&("ns".to_owned(), pod.to_owned())].unwrap();
    assert!((of("a") - 2.0).abs() < 1e-9, "half of the GPU of a quarter granted");
    assert!((of("b") - f64::midpoint(0.4, 0.6)).abs() < 1e-9, "the mean over its devices");
    let unread = attribute(&GpuReading::default(), &pods, &[hold("w", HoldKind::Whole, &["b"])]);
    let found = pod_utilization([&shares, &unread]);
    assert_eq!(found[&("ns".to_owned(), "b".to_owned())], Err(Unknown::NotRead), "one is not known: none is");
}

const AFTER: Duration = Duration::from_hours(1);

fn gpus(usage: GpuUsage) -> BTreeMap<GpuUuid, GpuUsage> {
    BTreeMap::from([("GPU-12345678-1234-1234-1234-123456780001".parse().unwrap(), usage)])
}

/// What of each reading becomes known: GiB used by a share of 10 GiB, or nothing.
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
                let Change::Overuse { over, used, granted, .. } = change else { panic!("{change:?}") };
                said.push(format!("{at}: {over} {} {}", used >> 20, granted >> 20));
            }
        }
        let known = watch.verdicts(Duration::ZERO).over.len();
        assert_eq!(known, usize::from(mib.is_some()), "nothing is said of what is not known");
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
    // What is not known neither begins nor ends it.
    assert_eq!(overuse(&[over, None, over]), [""; 0]);
    assert_eq!(overuse(&[over, over, None, None, None, fine]), ["1: true 10753 10240"]);
    assert_eq!(overuse(&[None, None, None]), [""; 0]);
    assert_eq!((margin(GIB), margin(100 * GIB)), (256 << 20, 5 * GIB));
}

#[test]
fn claims_that_use_a_gpu_together_are_over_their_grants_together() {
    let mut watch = Watch::new(AFTER);
    let mut over = 0;
    for number in 1..=2 {
        let (read, pods) = reading(&[(1, "a", 16, 0)]);
        let read = GpuReading { number, ..read };
        let holdings = [share("c", 10, &["a"]), share("d", 5, &["a"]), share("e", 1, &["b"])];
        over = watch.step(&gpus(attribute(&read, &pods, &holdings)), &BTreeMap::new(), Duration::ZERO).len();
    }
    assert_eq!(over, 2);
    let verdicts = watch.verdicts(Duration::ZERO).over;
    assert_eq!(verdicts.values().copied().collect::<Vec<_>>(), [true, true, false]);
    // A claim that is gone is forgotten.
    let (read, pods) = reading(&[]);
    assert_eq!(watch.step(&gpus(attribute(&read, &pods, &[])), &BTreeMap::new(), Duration::ZERO), []);
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
        let usage = gpus(attribute(&read, &pods, &[hold("c", HoldKind::Whole, &["a"])]));
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
        idle(&[(0, Some(0)), (30, Some(1)), (60, Some(0)), (89, Some(0)), (120, Some(0))]),
        [(120, true)]
    );
    assert_eq!(
        idle(&[(0, Some(0)), (30, None), (61, Some(0)), (120, Some(0)), (121, Some(0))]),
        [(121, true)]
    );
    assert_eq!(idle(&[(0, None), (60, None), (120, None)]), []);
    // Reported until use is seen.
    let ends = [(0, Some(0)), (60, Some(0)), (61, None), (62, Some(0)), (63, Some(5)), (64, Some(0))];
    assert_eq!(idle(&ends), [(60, true), (63, false)]);
}

#[test]
fn a_claim_on_two_gpus_is_idle_only_where_both_are() {
    let mut watch = Watch::new(AFTER);
    let usage = |percent, pods: &[&str]| {
        let (read, of) = reading(&[(1, "a", 1, percent)]);
        attribute(&read, &of, &[hold("c", HoldKind::Whole, pods)])
    };
    let mut both = gpus(usage(0, &["a"]));
    both.insert("GPU-12345678-1234-1234-1234-123456780002".parse().unwrap(), usage(10, &["a"]));
    for minute in [0, 60] {
        assert_eq!(watch.step(&both, &BTreeMap::new(), Duration::from_secs(minute * 60)), []);
    }
    let now = Duration::from_hours(1);
    assert_eq!(watch.verdicts(now).idle.into_values().collect::<Vec<_>>(), [Duration::ZERO]);
}

#[test]
fn a_whole_gpu_that_computes_is_not_quiet_though_no_process_is_listed() {
    let quiet = |percent, busy: Figure<f64>| {
        let (mut read, pods) = reading(&[]);
        (read.busy, read.sm) = (busy, percent);
        attribute(&read, &pods, &[hold("c", HoldKind::Whole, &["a"])]).devices[0].quiet
    };
    let none = Err(Unknown::NotSupported);
    assert_eq!(quiet(none, Ok(0.4)), Ok(false), "graphics: the driver lists such processes elsewhere");
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

const EVICTS: UsagePolicy = UsagePolicy { idle_after: None, evict: true, reclaim: None };

/// Seconds with GiB used by shares of 40, 30 and 1 GiB of a GPU with 78 (`None`: not known): whose pods are to go.
fn harm(policy: UsagePolicy, readings: &[(u64, [Option<u64>; 3])]) -> Vec<String> {
    let mut watch = Watch::new(AFTER);
    let mut said = Vec::new();
    for (at, (second, used)) in readings.iter().enumerate() {
        let [a, b, c] = used.map(Option::unwrap_or_default);
        let (mut read, pods) = reading(&[(1, "a", a, 9), (2, "b", b, 9), (3, "c", c, 9)]);
        read.number = at as u64 + 1;
        let known = used.map(|used| used.map(|gib| gib * GIB));
        for (process, known) in read.processes.as_mut().unwrap().iter_mut().zip(known) {
            process.memory_bytes = known;
        }
        let usage = gpus(attribute(
            &read,
            &pods,
            &[share("c", 40, &["a"]), share("d", 30, &["b"]), share("e", 1, &["c"])],
        ));
        let policies = usage.keys().map(|gpu| (gpu.clone(), policy)).collect();
        for change in watch.step(&usage, &policies, Duration::from_secs(*second)) {
            if let Change::Due { claim, due, .. } = change {
                said.push(format!("{second}: {} {due:?}", claim.name));
            }
        }
    }
    said
}

#[test]
fn a_share_is_to_go_only_if_it_harms_others_for_a_minute_and_the_policy_says_so() {
    // Free: 78 less all that is used, 1 of it by no process. What the others may still take: 30 and 1.
    let [harms, barely] = [[Some(50), Some(1), Some(0)], [Some(48), Some(0), Some(0)]];
    let constant = |used, until| (0..=until).map(|at| (at * 15, used)).collect::<Vec<_>>();
    assert_eq!(harm(EVICTS, &constant(harms, 6)), ["75: c Some(Overuse)"], "two readings, then a minute");
    assert_eq!(harm(UsagePolicy::default(), &constant(harms, 9)), [""; 0]);
    let within = [Some(40), Some(30), Some(1)];
    assert_eq!(harm(EVICTS, &constant(within, 9)), [""; 0]);
    let harmless = [Some(47), Some(0), Some(0)];
    assert_eq!(harm(EVICTS, &constant(harmless, 9)), [""; 0], "over its grant, with enough for all");
    assert_eq!(harm(EVICTS, &constant(barely, 6)), ["75: c Some(Overuse)"], "one GiB too much");
    // Nothing is said once anything of the GPU is not known.
    let blind = [Some(50), Some(1), None];
    assert_eq!(harm(EVICTS, &constant(blind, 9)), [""; 0]);
    let mut then_blind = constant(harms, 5);
    then_blind.extend([(90, blind), (105, harms), (150, harms), (165, harms)]);
    assert_eq!(harm(EVICTS, &then_blind), ["75: c Some(Overuse)", "90: c None", "165: c Some(Overuse)"]);
    // Of several the one with the largest excess, and after it the next.
    let [two, next] = [[Some(44), Some(0), Some(6)], [Some(0), Some(0), Some(6)]];
    assert_eq!(harm(EVICTS, &constant(two, 6)), ["75: e Some(Overuse)"]);
    assert_eq!(harm(EVICTS, &[&constant(two, 5)[..], &[(90, next)]].concat())[1..], ["90: e None"]);
    let other = [Some(50), Some(0), Some(6)];
    let changes = [&constant(two, 5)[..], &[(90, other), (149, other), (150, other)]].concat();
    let expected = ["75: e Some(Overuse)", "90: e None", "150: c Some(Overuse)"];
    assert_eq!(harm(EVICTS, &changes), expected, "a minute of its own");
}

#[test]
fn nothing_is_to_go_while_a_pod_with_admin_access_has_an_unknown_amount() {
    let mut watch = Watch::new(AFTER);
    for number in 1..=8 {
        let (mut read, pods) = reading(&[(1, "a", 60, 9), (2, "b", 0, 9), (3, "mon", 1, 9)]);
        read.number = number;
        read.processes.as_mut().unwrap()[2].memory_bytes = None;
        let monitor = hold("m", HoldKind::Admin, &["mon"]);
        let usage = gpus(attribute(&read, &pods, &[share("c", 10, &["a"]), share("d", 30, &["b"]), monitor]));
        let policies = usage.keys().map(|gpu| (gpu.clone(), EVICTS)).collect();
        let changes = watch.step(&usage, &policies, Duration::from_secs(number * 15));
        assert!(!changes.iter().any(|change| matches!(change, Change::Due { .. })), "{changes:?}");
    }
}

#[test]
fn a_share_that_is_within_its_grant_again_is_not_to_go_while_others_take_the_memory() {
    let mut watch = Watch::new(AFTER);
    let mut said = Vec::new();
    // 10 GiB of a process that is in no pod, and a share of 40 GiB beside one of 30.
    for (at, gib) in [50, 50, 50, 50, 50, 50, 40, 40].into_iter().enumerate() {
        let (read, pods) = reading(&[(1, "a", gib, 9), (2, "b", 1, 9), (3, "", 10, 9)]);
        let read = GpuReading { number: at as u64 + 1, ..read };
        let usage = gpus(attribute(&read, &pods, &[share("c", 40, &["a"]), share("d", 30, &["b"])]));
        let policies = usage.keys().map(|gpu| (gpu.clone(), EVICTS)).collect();
        for change in watch.step(&usage, &policies, Duration::from_secs(at as u64 * 15)) {
            if let Change::Due { due, .. } = change {
                said.push((at, due.is_some()));
            }
        }
    }
    assert_eq!(said, [(5, true), (6, false)], "with the first reading that says so");
}

#[test]
fn one_reading_looked_at_again_and_again_proves_no_harm() {
    let mut watch = Watch::new(AFTER);
    let mut step = |number, second| {
        let (read, pods) = reading(&[(1, "a", 60, 0), (2, "b", 0, 0)]);
        let read = GpuReading { number, ..read };
        let usage = gpus(attribute(&read, &pods, &[share("c", 10, &["a"]), share("d", 30, &["b"])]));
        let policies = usage.keys().map(|gpu| (gpu.clone(), EVICTS)).collect();
        let changes = watch.step(&usage, &policies, Duration::from_secs(second));
        changes.iter().filter(|change| matches!(change, Change::Due { .. })).count()
    };
    let due: Vec<usize> = [(1, 0), (2, 15), (2, 80), (2, 200), (3, 215)].map(|(n, at)| step(n, at)).into();
    assert_eq!(due, [0, 0, 0, 0, 1]);
}

/// Minutes with what is computed on two GPUs of one claim: whether it is to go when.
fn reclaims(policies: [UsagePolicy; 2], kind: HoldKind, minutes: &[(u64, Option<u32>)]) -> Vec<(u64, bool)> {
    let mut watch = Watch::new(AFTER);
    let mut said = Vec::new();
    for (minute, percent) in minutes {
        let (mut read, pods) = reading(&[(1, "a", 1, percent.unwrap_or(0))]);
        if percent.is_none() {
            (read.busy, read.computed) = (Err(Unknown::Failed), Err(Unknown::Failed));
        }
        let usage = attribute(&read, &pods, &[hold("c", kind, &["a"])]);
        let mut both = gpus(usage.clone());
        both.insert("GPU-12345678-1234-1234-1234-123456780002".parse().unwrap(), usage);
        let policies = both.keys().cloned().zip(policies).collect();
        let changes = watch.step(&both, &policies, Duration::from_secs(minute * 60));
        said.extend(changes.iter().filter_map(|change| match change {
            Change::Due { due, .. } => Some((*minute, due.is_some())),
            _ => None,
        }));
    }
    said
}

#[test]
fn an_idle_claim_is_to_go_after_its_grace_if_the_policies_of_all_its_gpus_say_so() {
    let reclaim =
        |minutes| UsagePolicy { reclaim: Some(Duration::from_mins(minutes)), ..UsagePolicy::default() };
    let zero = |minutes: &[u64]| minutes.iter().map(|m| (*m, Some(0))).collect::<Vec<_>>();
    let hour = zero(&[0, 59, 60, 69, 70, 71]);
    assert_eq!(
        reclaims([reclaim(10), reclaim(5)], HoldKind::Whole, &hour),
        [(70, true)],
        "the longest grace"
    );
    assert_eq!(reclaims([reclaim(10), UsagePolicy::default()], HoldKind::Whole, &hour), []);
    assert_eq!(reclaims([reclaim(10); 2], HoldKind::Admin, &hour), [], "never with admin access");
    let soon = UsagePolicy { idle_after: Some(Duration::from_mins(20)), ..reclaim(0) };
    assert_eq!(reclaims([soon; 2], HoldKind::Whole, &hour), [(59, true)]);
    assert_eq!(reclaims([soon, reclaim(0)], HoldKind::Whole, &hour), [(60, true)], "the longest time");
    let ends = [(0, Some(0)), (75, Some(0)), (76, Some(5))];
    assert_eq!(reclaims([reclaim(10); 2], HoldKind::Whole, &ends), [(75, true), (76, false)]);
    let blind = [(0, Some(0)), (75, Some(0)), (76, None), (77, Some(0)), (146, Some(0)), (147, Some(0))];
    assert_eq!(
        reclaims([reclaim(10); 2], HoldKind::Whole, &blind),
        [(75, true), (76, false), (147, true)],
        "what was not seen may have been use"
    );
}

#[test]
fn another_pod_of_an_idle_claim_has_all_of_the_time() {
    let mut watch = Watch::new(AFTER);
    let reclaim = UsagePolicy { reclaim: Some(Duration::from_mins(10)), ..UsagePolicy::default() };
    let mut said = Vec::new();
    let minutes: [(u64, &[&str]); 7] = [
        (0, &["a"]),
        (70, &["a"]),
        (75, &["a", "b"]),
        (80, &["b"]),
        (144, &["b"]),
        (145, &["b"]),
        (146, &["c"]),
    ];
    for (minute, pods) in minutes {
        let (read, of) = reading(&[]);
        let usage = gpus(attribute(&read, &of, &[hold("c", HoldKind::Whole, pods)]));
        let policies = usage.keys().map(|gpu| (gpu.clone(), reclaim)).collect();
        for change in watch.step(&usage, &policies, Duration::from_mins(minute)) {
            if let Change::Due { due, .. } = change {
                said.push((minute, due.is_some()));
            }
        }
    }
    assert_eq!(said, [(70, true), (75, false), (145, true), (146, false)]);
}
