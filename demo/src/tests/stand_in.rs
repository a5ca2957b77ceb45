//! divvy in the place of NVIDIA's driver: manifests of the forms that its demos and test suites
//! have (`fixtures/stand-in`, in words of our own), and its slices beside those of NVIDIA's driver.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};

use super::*;
use divvy_why::device::text;
use divvy_why::driver::NVIDIA;

/// End of a manifest.
enum End {
    /// So many claims are prepared, and nothing is wrong.
    Runs(usize),
    /// So many are prepared, and what is said contains this.
    Says(usize, &'static str),
}
use End::{Runs, Says};

/// Manifest, GPUs, whether every mode is offered, and its end.
const FORMS: &[(&str, &str, bool, End)] = &[
    ("one-gpu", "h100x2", false, Runs(2)),
    ("two-containers", "h100x1", false, Runs(1)),
    ("shared-claim", "h100x1", false, Runs(1)),
    ("two-claims", "h100x2", false, Runs(2)),
    ("two-gpus", "h100x2", false, Runs(1)),
    ("deployment", "h100x2", false, Runs(2)),
    ("job", "h100x1", false, Runs(1)),
    ("extended-resource", "h100x1", false, Runs(1)),
    ("class-of-a-profile", "h100x1", true, Runs(1)),
    ("by-product", "h100x1", false, Runs(1)),
    ("by-driver-version", "h100x1", false, Runs(1)),
    ("by-memory", "h100x1", false, Runs(1)),
    ("no-such-product", "h100x1", false, Runs(0)),
    ("partitions-of-one-gpu", "h100x2", true, Runs(2)),
    ("any-partition", "h100x1", true, Runs(1)),
    ("partitions-by-size", "h100x1", true, Runs(1)),
    ("first-available", "h100x1", true, Runs(1)),
    (
        "passthrough",
        "h100x1",
        false,
        Says(
            0,
            "class vfio.gpu.nvidia.com is passthrough to virtual machines, which divvy does not have",
        ),
    ),
    (
        "fabric-partition",
        "h100x2",
        false,
        Says(0, "no device has attribute \"gpu.nvidia.com/partition2\""),
    ),
    // NVIDIA's driver with --consumable-shares=memory would give one GPU to both.
    ("memory-of-a-whole-gpu", "h100x2", false, Runs(2)),
    (
        "shares-of-a-whole-gpu",
        "h100x1",
        false,
        Says(0, "no capacity \"shares\""),
    ),
    ("share-of-divvy", "h100x1", true, Runs(2)),
    ("time-slicing", "h100x1", false, Runs(1)),
    ("time-slicing-default", "h100x2", false, Runs(1)),
    ("time-slicing-of-a-partition", "h100x1", true, Runs(1)),
    ("mps", "h100x1", false, Runs(1)),
    ("two-strategies", "h100x2", false, Runs(1)),
    ("unknown-field", "h100x1", false, Says(0, "unexpected")),
    (
        "strategy-and-other-config",
        "h100x1",
        false,
        Says(0, "mpsConfig"),
    ),
    (
        "passthrough-config",
        "h100x1",
        false,
        Says(0, "VfioDeviceConfig"),
    ),
];

fn fixture(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/stand-in");
    fs_err::read_to_string(format!("{folder}/{name}.yaml")).unwrap()
}

/// Returns the report of a manifest. Its names alone make divvy stand in, unless it has none.
async fn of_fixture(name: &str, line: &str, in_all_modes: bool) -> Report {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.yaml");
    fs_err::write(&file, fixture(name)).unwrap();
    let said = ["extended-resource", "class-of-a-profile", "share-of-divvy"].contains(&name);
    let mut stay = examples::of_files(&[file], false, said.then_some(NVIDIA)).unwrap();
    assert_eq!(stay.driver, NVIDIA, "{name}");
    if in_all_modes {
        stay.policies = examples::all_modes().unwrap();
    }
    perform(&gpus(line), &[stay], &Show::default())
        .await
        .unwrap()
}

fn prepared(report: &Report) -> usize {
    let claims = report.scenarios[0].rounds.iter().take(1);
    let claims = claims.flat_map(|round| &round.claims);
    let is_prepared = |state: &report::State| matches!(state, report::State::Prepared { .. });
    claims.filter(|claim| is_prepared(&claim.state)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn manifests_for_nvidias_driver_run_or_say_what_is_missing() {
    for (name, line, in_all_modes, end) in FORMS {
        let report = of_fixture(name, line, *in_all_modes).await;
        let problems = report.problems();
        let said = format!(
            "{}\n{}",
            report.scenarios[0].notes.join("\n"),
            problems.join("\n")
        );
        match end {
            Runs(claims) => {
                assert_eq!(problems, Vec::<String>::new(), "{name}");
                assert_eq!(prepared(&report), *claims, "{name}");
            }
            Says(claims, part) => {
                assert!(said.contains(part), "{name}: {said}");
                assert_eq!(prepared(&report), *claims, "{name}");
            }
        }
    }
}

/// Capacities of shares have divvy's domain in the API, and none in what people read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_of_a_stand_in_are_shown_like_any() {
    let report = of_fixture("share-of-divvy", "h100x1", true).await;
    let round = &report.scenarios[0].rounds[0];
    let picture = round.gpus[0].lines().join("\n");
    assert!(picture.contains("compute 20 of 100 %"), "{picture}");
    assert!(picture.contains("memory 16 GiB of"), "{picture}");
    let report::State::Prepared { devices, .. } = &round.claims[0].state else {
        panic!("{:?}", round.claims[0])
    };
    let names: Vec<&str> = devices[0].consumed.keys().map(String::as_str).collect();
    assert_eq!(names, ["cores", "memory", "slots"]);
}

#[test]
fn every_manifest_for_nvidias_driver_is_in_the_table() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/stand-in");
    let entries = fs_err::read_dir(folder).unwrap().map(Result::unwrap);
    let there: BTreeSet<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().replace(".yaml", ""))
        .collect();
    let named: BTreeSet<String> = FORMS.iter().map(|(name, ..)| (*name).to_owned()).collect();
    assert_eq!(there, named);
}

/// Manifests that use a name of divvy's are for divvy under its own name.
#[test]
fn only_manifests_with_names_of_nvidia_alone_make_a_stand_in() {
    let claim = |class: &str, driver: &str| {
        format!(
            "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: c}}\nspec: {{devices: {{requests: [{{name: a, \
             exactly: {{deviceClassName: {class}}}}}], config: [{{opaque: {{driver: {driver}, parameters: {{}}}}}}]}}}}\n"
        )
    };
    for (class, driver, expected) in [
        ("gpu.nvidia.com", "gpu.nvidia.com", true),
        ("mig.nvidia.com", "gpu.nvidia.com", true),
        ("vfio.gpu.nvidia.com", "gpu.nvidia.com", true),
        ("team-a", "gpu.nvidia.com", true),
        ("gpu.divvy.dev", "gpu.nvidia.com", false),
        ("gpu.nvidia.com", "gpu.divvy.dev", false),
        ("gpu.divvy.dev", "gpu.divvy.dev", false),
        (
            "compute-domain-daemon.nvidia.com",
            "compute-domain.nvidia.com",
            false,
        ),
    ] {
        let manifests = divvy_cli::manifests::Manifests::parse("m", &claim(class, driver)).unwrap();
        assert_eq!(manifests.is_for_nvidia(), expected, "{class} {driver}");
    }
}

/// Value of an attribute or capacity as NVIDIA's driver publishes it (its commit 95932046): the
/// field of the attribute and its value, or a form where the simulation chooses the value.
#[derive(Debug, Clone, Copy)]
enum Theirs {
    /// The field, and the value.
    Is(&'static str, &'static str),
    /// The field, and how the value begins.
    Begins(&'static str, &'static str),
    /// An amount in bytes or pieces.
    Amount(u64),
    /// The same, where divvy's differs, with the reason.
    Differs(#[expect(dead_code, reason = "for readers")] &'static str),
    /// Not published by divvy, with the reason.
    Lacks(#[expect(dead_code, reason = "for readers")] &'static str),
}
use Theirs::{Amount, Begins, Differs, Is, Lacks};

const STRING: &str = "string";
const VERSION: &str = "version";
const STATIC: &str = "partitions are made when a claim arrives: as with NVIDIA's dynamic ones, there is no UUID before";

/// Attributes of NVIDIA's driver for every GPU and every partition of a board.
fn common(
    product: &'static str,
    architecture: &'static str,
    capability: &'static str,
) -> Vec<(&'static str, Theirs)> {
    vec![
        ("productName", Is(STRING, product)),
        ("brand", Is(STRING, "Nvidia")),
        ("architecture", Is(STRING, architecture)),
        ("cudaComputeCapability", Is(VERSION, capability)),
        // The simulated driver is 580.95.05, which is no semantic version.
        ("driverVersion", Is(VERSION, "580.95.5")),
        ("cudaDriverVersion", Is(VERSION, "13.0.0")),
        ("addressingMode", Is(STRING, "HMM")),
        ("resource.kubernetes.io/pciBusID", Begins(STRING, "0000:")),
        (
            "resource.kubernetes.io/pcieRoot",
            Begins(STRING, "pci0000:"),
        ),
        ("resource.kubernetes.io/numaNode", Is("int", "0")),
    ]
}

fn of_gpu(common: Vec<(&'static str, Theirs)>) -> Vec<(&'static str, Theirs)> {
    let own = [
        ("type", Is(STRING, "gpu")),
        ("uuid", Begins(STRING, "GPU-")),
    ];
    let gated = "behind NVIDIA's gate FabricManagerPartitioning; divvy publishes gpu.divvy.dev/nvlinkDomain";
    let fabric = [
        "gpuModuleID",
        "partition1",
        "partition2",
        "partition4",
        "partition8",
    ];
    let fabric = fabric.map(|name| (name, Lacks(gated)));
    own.into_iter().chain(common).chain(fabric).collect()
}

fn of_partition(
    common: Vec<(&'static str, Theirs)>,
    profile: &'static str,
) -> Vec<(&'static str, Theirs)> {
    let own = [
        ("type", Is(STRING, "mig")),
        ("parentUUID", Begins(STRING, "GPU-")),
        ("profile", Is(STRING, profile)),
        ("uuid", Lacks(STATIC)),
    ];
    own.into_iter().chain(common).collect()
}

/// Memory of a whole GPU is what NVML reports. NVIDIA's driver has the same, and with `DynamicMIG`
/// on a GPU with MIG the memory of the largest profile.
const ENGINES: [&str; 6] = [
    "multiprocessors",
    "copyEngines",
    "decoders",
    "encoders",
    "jpegEngines",
    "ofaEngines",
];

fn capacities(memory: Theirs, engines: [u64; 6]) -> Vec<(&'static str, Theirs)> {
    let engines = ENGINES.into_iter().zip(engines.map(Amount));
    [("memory", memory)].into_iter().chain(engines).collect()
}

fn value(attribute: &DeviceAttribute, field: &str) -> Option<String> {
    match field {
        STRING => attribute.string.clone(),
        VERSION => attribute.version.clone(),
        "int" => attribute.int.map(|int| int.to_string()),
        _ => None,
    }
}

/// Compares a device with what NVIDIA's driver has; returns what is not listed.
fn compare(
    device: &Device,
    attributes: &[(&'static str, Theirs)],
    capacities: &[(&'static str, Theirs)],
) -> Vec<String> {
    let mut unlisted = Vec::new();
    let there = device.attributes.clone().unwrap_or_default();
    for (name, theirs) in attributes {
        let ours = there.get(*name);
        let found = |field: &str| ours.and_then(|ours| value(ours, field));
        let fine = match theirs {
            Is(field, wanted) => found(field).as_deref() == Some(*wanted),
            Begins(field, wanted) => found(field).is_some_and(|value| value.starts_with(wanted)),
            Lacks(_) => ours.is_none(),
            Amount(_) | Differs(_) => false,
        };
        if !fine {
            unlisted.push(format!(
                "{}: {name} is {ours:?}, NVIDIA's {theirs:?}",
                device.name
            ));
        }
    }
    let there_capacity = device.capacity.clone().unwrap_or_default();
    for (name, theirs) in capacities {
        let ours = there_capacity.get(*name);
        let amount = ours.and_then(|ours| divvy_why::device::amount(&ours.value.0));
        let fine = match theirs {
            Amount(wanted) => amount == Some(*wanted),
            Differs(_) => ours.is_some(),
            Lacks(_) => ours.is_none(),
            Is(..) | Begins(..) => false,
        };
        if !fine {
            unlisted.push(format!(
                "{}: capacity {name} is {ours:?}, NVIDIA's {theirs:?}",
                device.name
            ));
        }
    }
    // Names that NVIDIA's driver does not have are in divvy's domain.
    let known = |names: &[(&'static str, Theirs)], name: &String| {
        names.iter().any(|(known, _)| known == name)
    };
    let odd = |name: &&String| !name.starts_with("gpu.divvy.dev/");
    let more = there
        .keys()
        .filter(|name| !known(attributes, name))
        .filter(odd);
    let more = more.chain(
        there_capacity
            .keys()
            .filter(|name| !known(capacities, name))
            .filter(odd),
    );
    unlisted.extend(
        more.map(|name| format!("{}: {name} is not NVIDIA's and has no domain", device.name)),
    );
    unlisted
}

async fn published(line: &str, in_all_modes: bool) -> Vec<Device> {
    let (sim, _) = gpus(line).start().unwrap();
    let policies = if in_all_modes {
        examples::all_modes().unwrap()
    } else {
        Vec::new()
    };
    let world = world::World::start(&sim, &[], &policies, NVIDIA, &[])
        .await
        .unwrap();
    let slices = world.api.list::<ResourceSlice>();
    assert!(slices.iter().all(|slice| slice.spec.driver == NVIDIA));
    assert_eq!(world.stop().await.unwrap(), Vec::<String>::new());
    let devices = slices.into_iter().filter_map(|slice| slice.spec.devices);
    devices.flatten().collect()
}

fn find<'d>(devices: &'d [Device], kind: &str, profile: &str) -> &'d Device {
    let is = |device: &&Device| {
        text(device, "type") == Some(kind) && text(device, "profile").unwrap_or_default() == profile
    };
    devices.iter().find(is).unwrap()
}

/// Every attribute and capacity that NVIDIA's driver publishes for these boards is compared: with
/// `DynamicMIG`, where the board has MIG.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_have_what_nvidias_driver_publishes_for_the_same_boards() {
    let largest = Differs(
        "NVML's total; NVIDIA's driver has the memory of the largest profile with DynamicMIG, and NVML's total without",
    );
    let none = "NVIDIA's driver has it on GPUs without MIG neither: memory alone";
    let h100 = common("NVIDIA H100 80GB HBM3", "Hopper", "9.0.0");
    let devices = published("h100x1", true).await;
    let mut unlisted = compare(
        find(&devices, "gpu", ""),
        &of_gpu(h100.clone()),
        &capacities(largest, [132, 8, 7, 0, 7, 1]),
    );
    unlisted.extend(compare(
        find(&devices, "mig", "1g.10gb"),
        &of_partition(h100.clone(), "1g.10gb"),
        &capacities(Amount(9984 << 20), [16, 1, 1, 0, 1, 0]),
    ));
    unlisted.extend(compare(
        find(&devices, "mig", "3g.40gb"),
        &of_partition(h100, "3g.40gb"),
        &capacities(Amount(40448 << 20), [60, 3, 3, 0, 3, 0]),
    ));
    // Ampere: the whole GPU while MIG mode is off, partitions alone while it is on.
    let a100 = common("NVIDIA A100-SXM4-40GB", "Ampere", "8.0.0");
    let devices = published("a100-40x1", false).await;
    assert_eq!(devices.len(), 1);
    let of_all = Differs(
        "those of the whole GPU, without MIG; NVIDIA's driver has none there, and with DynamicMIG those of the largest profile",
    );
    let mut whole = vec![("memory", Amount(40 << 30))];
    whole.extend(ENGINES.map(|name| (name, of_all)));
    unlisted.extend(compare(
        find(&devices, "gpu", ""),
        &of_gpu(a100.clone()),
        &whole,
    ));
    let devices = published("a100-40x1 --mig-on all", false).await;
    assert!(
        devices
            .iter()
            .all(|device| text(device, "type") != Some("gpu"))
    );
    unlisted.extend(compare(
        find(&devices, "mig", "2g.10gb"),
        &of_partition(a100, "2g.10gb"),
        &capacities(Amount(9856 << 20), [28, 2, 1, 0, 0, 0]),
    ));
    // A board without MIG has memory alone.
    let devices = published("l4x1", false).await;
    let mut alone = vec![
        ("memory", Amount(23034 << 20)),
        ("multiprocessors", Differs("divvy has it on every GPU")),
    ];
    alone.extend(ENGINES[1..].iter().map(|name| (*name, Lacks(none))));
    let l4 = common("NVIDIA L4", "Ada Lovelace", "8.9.0");
    unlisted.extend(compare(find(&devices, "gpu", ""), &of_gpu(l4), &alone));
    assert_eq!(unlisted, Vec::<String>::new());
}

/// Reads a device as dcgm-exporter does (`internal/pkg/transformation/dra.go`): by the slices of
/// `gpu.nvidia.com` of the newest whole generation of a pool, by the name of the device, and four
/// attributes without a domain, all text. Returns the UUID of the GPU, and for partitions the
/// profile.
fn as_dcgm_exporter(
    slices: &[ResourceSlice],
    pool: &str,
    device: &str,
) -> Option<(String, Option<String>)> {
    let of_pool = || slices.iter().map(|slice| &slice.spec);
    let of_pool =
        || of_pool().filter(|spec| spec.driver == "gpu.nvidia.com" && spec.pool.name == pool);
    let newest = of_pool().map(|spec| spec.pool.generation).max()?;
    let of_newest = || of_pool().filter(|spec| spec.pool.generation == newest);
    let count = of_newest().next()?.pool.resource_slice_count;
    if of_newest().count() < usize::try_from(count).ok()? {
        return None;
    }
    let mut devices = of_newest().flat_map(|spec| spec.devices.iter().flatten());
    let found = devices.find(|found| found.name == device)?;
    let text = |name: &str| found.attributes.as_ref()?.get(name)?.string.clone();
    match text("type")?.as_str() {
        "gpu" => Some((text("uuid")?, None)),
        "mig" => Some((text("parentUUID")?, text("profile"))),
        _ => None,
    }
}

/// dcgm-exporter's finds GPUs and partitions, and no shares. The name of a partition that is made
/// on demand says its profile and place to it; the number in it is taken for the minor number of
/// the GPU.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dcgm_exporter_finds_gpus_and_partitions() {
    let (sim, _) = gpus("h100x1").start().unwrap();
    let policies = examples::all_modes().unwrap();
    let world = world::World::start(&sim, &[], &policies, NVIDIA, &[])
        .await
        .unwrap();
    let slices = world.api.list::<ResourceSlice>();
    world.stop().await.unwrap();
    let pool = "demo-node/divvy";
    let uuid = "GPU-12345678-1234-1234-0000-123456780000".to_owned();
    for (device, expected) in [
        ("gpu-0", Some((uuid.clone(), None))),
        (
            "gpu-0-mig-1g10gb-19-0",
            Some((uuid, Some("1g.10gb".to_owned()))),
        ),
        ("gpu-0-ts", None),
        ("gpu-0-admin", None),
    ] {
        assert_eq!(
            as_dcgm_exporter(&slices, pool, device),
            expected,
            "{device}"
        );
    }
    // One of three slices is not there yet.
    assert_eq!(as_dcgm_exporter(&slices[1..], pool, "gpu-0"), None);
    let parts: Vec<&str> = "gpu-0-mig-1g10gb-19-0".split('-').collect();
    let [_, minor, "mig", _, profile, start] = parts.as_slice() else {
        panic!("{parts:?}")
    };
    assert!(
        [minor, profile, start]
            .iter()
            .all(|part| part.parse::<u32>().is_ok())
    );
}

/// KAI counts the devices of claims whose class has `gpu` in its name, and reads no slice for it
/// (`pkg/common/resources/dra.go`).
#[test]
fn kai_counts_whole_gpus_alone() {
    let is_counted = |class: &str| class.to_lowercase().contains("gpu");
    let classes = world::classes(NVIDIA).unwrap();
    let names = classes
        .iter()
        .filter_map(|class| class.metadata.name.as_deref());
    let counted: Vec<&str> = names.filter(|name| is_counted(name)).collect();
    assert_eq!(counted, ["gpu.nvidia.com"]);
}
