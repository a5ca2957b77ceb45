mod plain;

use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Slices};
use k8s_openapi::api::core::v1::{NodeSpec, NodeStatus, Taint, Toleration};
use k8s_openapi::api::resource::v1::{
    DeviceClass, ResourceClaim, ResourceClaimStatus, ResourceSlice,
};
use serde_json::{Value, json};

use crate::random::Random;
use crate::run::Placed;
use crate::{
    Job, Kind, Nodes, Report, Settings, Shape, Strategy, Weights, generate, request, simulate,
    trace,
};

/// A node with GPUs of 80 GiB, each whole, as two halves, or as shares.
pub(crate) fn kind(name: &str, count: usize, gpus: usize) -> Kind {
    let counters = |amount: usize, gpu: usize| json!([{"counterSet": format!("gpu-{gpu}"), "counters": {"halves": {"value": amount.to_string()}}}]);
    let device = |gpu: usize, suffix: &str, kind: &str, memory: &str, takes: usize| {
        json!({
            "name": format!("gpu-{gpu}{suffix}"),
            "attributes": {"type": {"string": kind}, "profile": {"string": "half"}},
            "capacity": {"memory": {"value": memory}, "multiprocessors": {"value": "100"}},
            "consumesCounters": counters(takes, gpu),
        })
    };
    let mut devices: Vec<Value> = Vec::new();
    for gpu in 0..gpus {
        devices.push(device(gpu, "", "gpu", "80Gi", 2));
        let mut share = device(gpu, "-ts", "share", "80Gi", 2);
        share["allowMultipleAllocations"] = json!(true);
        share["capacity"] = json!({
            "memory": {"value": "80Gi", "requestPolicy": {"default": "8Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}},
            "cores": {"value": "100", "requestPolicy": {"default": "10", "validRange": {"min": "0", "step": "1"}}},
        });
        devices.push(share);
        devices.push(device(gpu, "-mig-half-0", "mig", "40Gi", 1));
        devices.push(device(gpu, "-mig-half-1", "mig", "40Gi", 1));
    }
    let sets = (0..gpus)
        .map(|gpu| json!({"name": format!("gpu-{gpu}"), "counters": {"halves": {"value": "2"}}}));
    let sets: Vec<Value> = sets.collect();
    let slice = |number: usize, content: Value| -> ResourceSlice {
        let mut spec = json!({
            "driver": "gpu.divvy.dev", "nodeName": "node",
            "pool": {"name": "node", "generation": 1, "resourceSliceCount": 2},
        });
        spec.as_object_mut()
            .unwrap()
            .extend(content.as_object().unwrap().clone());
        serde_json::from_value(
            json!({"metadata": {"name": format!("slice-{number}")}, "spec": spec}),
        )
        .unwrap()
    };
    Kind {
        name: name.to_owned(),
        count,
        node: serde_json::from_value(
            json!({"metadata": {"name": "node", "labels": {"kind": name}}}),
        )
        .unwrap(),
        slices: vec![
            slice(0, json!({"devices": devices})),
            slice(1, json!({"sharedCounters": sets})),
        ],
        ..Kind::default()
    }
}

pub(crate) fn classes() -> Vec<DeviceClass> {
    [("gpu.divvy.dev", "gpu"), ("mig.divvy.dev", "mig"), ("share.divvy.dev", "share")]
        .map(|(name, kind)| {
            let expression = format!("device.attributes['gpu.divvy.dev'].type == '{kind}'");
            let class = json!({"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}});
            serde_json::from_value(class).unwrap()
        })
        .to_vec()
}

fn job(at: u64, shape: usize, duration: Option<u64>, priority: i32) -> Job {
    Job {
        at,
        name: format!("at-{at}"),
        shape,
        duration,
        priority,
    }
}

fn run(
    kinds: &[Kind],
    requests: &[&str],
    jobs: &[Job],
    settings: Settings,
) -> (Report, Vec<Placed>) {
    let shapes: Vec<Shape> = requests
        .iter()
        .map(|text| request::shape(text).unwrap())
        .collect();
    let classes = classes();
    let fleet = Nodes {
        kinds,
        classes: &classes,
    };
    simulate(fleet, &shapes, jobs, settings)
}

/// Nodes one by one, without any sharing of answers.
struct Brute {
    kinds: Vec<Kind>,
    held: Vec<Vec<ResourceClaim>>,
    allocator: Allocator,
    classes: Vec<DeviceClass>,
}

impl Brute {
    fn new(kinds: &[Kind]) -> Self {
        let kinds: Vec<Kind> = kinds
            .iter()
            .flat_map(|kind| vec![kind.clone(); kind.count])
            .collect();
        Self {
            held: vec![Vec::new(); kinds.len()],
            kinds,
            allocator: Allocator::new(Features::of_kubernetes(37)),
            classes: classes(),
        }
    }

    fn place(&self, node: usize, text: &str) -> Option<ResourceClaim> {
        self.place_shape(node, &request::shape(text).unwrap())
    }

    /// Places a pod with one claim.
    fn place_shape(&self, node: usize, shape: &Shape) -> Option<ResourceClaim> {
        let slices = Slices::new(&self.kinds[node].slices);
        let allocated = AllocatedState::from_claims(&self.held[node]);
        let inputs = Inputs {
            slices: &slices,
            classes: &self.classes,
            allocated: &allocated,
            node: &self.kinds[node].node,
        };
        let mut claim = shape.claims[0].clone();
        claim.metadata.name = Some(format!("{}", self.held[node].len()));
        let found = self.allocator.fit(&inputs, &[&claim]).unwrap()?;
        claim.status = Some(ResourceClaimStatus {
            allocation: Some(found.results[0].clone()),
            ..ResourceClaimStatus::default()
        });
        Some(claim)
    }

    fn fits_somewhere(&self, text: &str) -> bool {
        (0..self.held.len()).any(|node| self.place(node, text).is_some())
    }
}

pub(crate) const REQUESTS: [&str; 6] = [
    "gpu",
    "2*gpu",
    "mig:half",
    "share:8Gi",
    "share:30Gi",
    "2*mig:half",
];

/// Pods that stay: each gets a node exactly where the allocator finds one on any node.
#[test]
fn a_pod_waits_exactly_where_no_node_fits() {
    let mut random = Random::new(7);
    let (mut waited, mut accepted) = (0, 0);
    for seed in 0..60 {
        let kinds = [
            kind("a", 1 + random.below(2), 2),
            kind("b", random.below(3), 1),
        ];
        let jobs: Vec<Job> = (0..12)
            .map(|at| job(at * 1000, random.below(REQUESTS.len()), None, 0))
            .collect();
        let (report, placed) = run(
            &kinds,
            &REQUESTS,
            &jobs,
            Settings {
                seed,
                ..Settings::default()
            },
        );
        let mut brute = Brute::new(&kinds);
        let mut placed = placed.iter().peekable();
        for (number, job) in jobs.iter().enumerate() {
            let text = REQUESTS[job.shape];
            if let Some(placed) = placed.next_if(|placed| placed.job == number) {
                let claim = brute.place(placed.node, text);
                let claim = claim.expect("the node that was chosen fits");
                brute.held[placed.node].push(claim);
                accepted += 1;
            } else {
                let fits = brute.fits_somewhere(text);
                assert!(!fits, "seed {seed}: {text} would have fitted");
                waited += 1;
            }
        }
        assert_eq!(
            report.accepted + report.waiting.iter().map(|of| of.pods).sum::<usize>(),
            jobs.len()
        );
    }
    assert!(waited > 100 && accepted > 100, "{waited} {accepted}");
}

/// Pods that come and go: what is placed fits at its time, and what waits at the end fits nowhere.
#[test]
fn places_hold_while_pods_come_and_go() {
    let mut random = Random::new(11);
    for seed in 0..60 {
        let kinds = [kind("a", 2, 2), kind("b", 1, 1)];
        let jobs: Vec<Job> = (0..20)
            .map(|at| {
                let duration = (random.below(3) > 0).then(|| 1 + random.below(20_000) as u64);
                job(
                    at * 700,
                    random.below(REQUESTS.len()),
                    duration,
                    i32::try_from(random.below(2)).unwrap(),
                )
            })
            .collect();
        let (report, placed) = run(
            &kinds,
            &REQUESTS,
            &jobs,
            Settings {
                seed,
                ..Settings::default()
            },
        );
        let mut brute = Brute::new(&kinds);
        let mut running: Vec<(u64, usize, ResourceClaim)> = Vec::new();
        for of in &placed {
            let (over, on): (Vec<_>, Vec<_>) =
                running.into_iter().partition(|(ends, _, _)| *ends <= of.at);
            running = on;
            for (_, node, claim) in over {
                let place = brute.held[node].iter().position(|held| {
                    held.status == claim.status && held.metadata == claim.metadata
                });
                brute.held[node].remove(place.unwrap());
            }
            let job = &jobs[of.job];
            let mut claim = brute
                .place(of.node, REQUESTS[job.shape])
                .expect("what was placed fits");
            claim.metadata.name = Some(format!("job-{}", of.job));
            brute.held[of.node].push(claim.clone());
            if let Some(duration) = job.duration {
                running.push((of.at + duration, of.node, claim));
            }
        }
        for (_, node, claim) in running {
            brute.held[node].retain(|held| held.metadata != claim.metadata);
        }
        for waiting in &report.waiting {
            assert!(
                !brute.fits_somewhere(&waiting.request),
                "seed {seed}: {} waits and fits",
                waiting.request
            );
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_one_another() {
    let kinds = [kind("a", 30, 4), kind("b", 20, 2)];
    let jobs: Vec<Job> = (0..200_usize)
        .map(|at| (at, u64::try_from(at).unwrap()))
        .map(|(number, at)| job(at * 100, number % 6, Some(9_000 + at * 10), 0))
        .collect();
    let with = |seed: u64| {
        run(
            &kinds,
            &REQUESTS,
            &jobs,
            Settings {
                seed,
                ..Settings::default()
            },
        )
    };
    assert_eq!(with(1), with(1));
    assert_ne!(with(1).1, with(2).1);
}

#[test]
fn a_pod_comes_back_after_its_back_off_and_the_important_one_first() {
    let kinds = [kind("a", 1, 1)];
    // The first pod holds the GPU for 0.5 s; the others fail at 0 s and 0.1 s, and may try again
    // after 1 s.
    let jobs = [
        job(0, 0, Some(500), 0),
        job(0, 0, Some(10), 0),
        job(100, 0, Some(10), 5),
    ];
    let (report, placed) = run(&kinds, &["gpu"], &jobs, Settings::default());
    let when: Vec<(usize, u64)> = placed
        .iter()
        .map(|placed| (placed.job, placed.at))
        .collect();
    assert_eq!(when, [(0, 0), (1, 1_000), (2, 1_100)]);
    assert_eq!(report.accepted, 3);
    // Both are ready when the GPU is free: the one of higher priority comes first.
    let jobs = [
        job(0, 0, Some(5_000), 0),
        job(0, 0, Some(10), 0),
        job(100, 0, Some(10), 5),
    ];
    let (_, placed) = run(&kinds, &["gpu"], &jobs, Settings::default());
    let when: Vec<(usize, u64)> = placed
        .iter()
        .map(|placed| (placed.job, placed.at))
        .collect();
    // The other one fails at 5 s, waits 2 s more, and the GPU is free again at 5.01 s.
    assert_eq!(when, [(0, 0), (2, 5_000), (1, 7_000)]);
}

#[test]
fn what_waits_says_why_in_one_sentence() {
    let kinds = [kind("a", 2, 1)];
    let jobs = [
        job(0, 1, None, 0),
        job(1, 0, None, 0),
        job(2, 2, None, 0),
        job(3, 0, None, 0),
        job(4, 3, None, 0),
    ];
    let (report, _) = run(
        &kinds,
        &["gpu", "2*gpu", "mig:half", "gpu"],
        &jobs[..3],
        Settings::default(),
    );
    assert_eq!(
        report.waiting[0].reason,
        "no node has it, even when all is free"
    );
    let (report, _) = run(
        &kinds,
        &["gpu", "2*gpu", "mig:half", "share:8Gi"],
        &jobs,
        Settings::default(),
    );
    let reasons: Vec<(&str, &str)> = report
        .waiting
        .iter()
        .map(|of| (of.request.as_str(), of.reason.as_str()))
        .collect();
    let partly = "all 2 nodes that can hold it are in use so that it does not fit, although 40 GiB of them are free";
    assert_eq!(
        reasons,
        [
            ("gpu", partly),
            ("2*gpu", "no node has it, even when all is free"),
            ("share:8Gi", partly)
        ]
    );
    let (report, _) = run(&kinds, &["mig:none"], &jobs[1..2], Settings::default());
    assert_eq!(
        report.waiting[0].reason,
        "no node has it, even when all is free"
    );
}

#[test]
fn free_memory_that_a_form_cannot_use_is_stranded() {
    let kinds = [kind("a", 1, 2)];
    // A half on the first GPU: the other half is of no use to whole GPUs.
    let (report, _) = run(
        &kinds,
        &["mig:half", "gpu"],
        &[job(0, 0, None, 0)],
        Settings::default(),
    );
    assert!((report.free_gib - 120.0).abs() < 0.01, "{report:?}");
    let left: Vec<(&str, u64, f64, f64)> = report
        .stranded
        .iter()
        .map(|of| {
            (
                of.request.as_str(),
                of.fits,
                of.stranded_gib,
                of.stranded_cores,
            )
        })
        .collect();
    assert_eq!(left, [("mig:half", 3, 0.0, 0.0), ("gpu", 1, 40.0, 0.0)]);
    // A share has its part of the multiprocessors of its GPU: 80 of 100 are free beside two.
    let jobs = [job(0, 0, None, 0), job(0, 0, None, 0)];
    let (report, _) = run(&kinds, &["share:10Gi", "2*gpu"], &jobs, Settings::default());
    let left: Vec<(u64, f64, f64)> = report
        .stranded
        .iter()
        .map(|of| (of.fits, of.stranded_gib, of.stranded_cores))
        .collect();
    assert_eq!(left, [(14, 0.0, 40.0), (0, 140.0, 180.0)]);
    assert!((report.peak_percent - 12.5).abs() < 0.01, "{report:?}");
}

#[test]
fn a_picture_shows_each_gpu_at_each_moment() {
    let mut of = kind("a", 2, 2);
    of.held = Vec::new();
    let jobs = [
        job(0, 0, Some(5_000), 0),
        job(0, 1, Some(3_000), 0),
        job(0, 2, None, 0),
        job(0, 2, None, 0),
        job(9_500, 1, None, 0),
    ];
    let requests = ["mig:half", "2*gpu", "2*gpu"];
    let (_, placed) = run(&[of.clone()], &requests, &jobs, Settings::default());
    let drawn = crate::picture(&[of.clone()], &jobs, &placed);
    assert_eq!((drawn.all_nodes, drawn.moments.len()), (2, 96));
    assert_eq!(drawn.nodes, ["a-0", "a-1"]);
    assert_eq!(drawn.gpus[0], ["gpu-0", "gpu-1"]);
    let at = |seconds: f64| {
        let moment = drawn
            .moments
            .iter()
            .rfind(|moment| moment.at <= seconds)
            .unwrap();
        let mut held = moment.held.clone();
        held.sort();
        (held, moment.running, moment.waiting)
    };
    let texts = |all: [&str; 2]| all.map(str::to_owned).to_vec();
    // A half and two GPUs; then one of those that wait has the two; then both wait for nothing.
    assert_eq!(at(0.0), (texts(["50", "aa"]), 2, 2));
    assert_eq!(at(4.5), (texts(["50", "aa"]), 2, 1));
    assert_eq!(at(9.4), (texts(["aa", "aa"]), 2, 0));
    assert_eq!(at(9.5), (texts(["aa", "aa"]), 2, 1));
    // What runs at the beginning is drawn, too; and all at one moment is one moment.
    let brute = Brute::new(std::slice::from_ref(&of));
    of.count = 1;
    of.held = vec![brute.place(0, "share:8Gi").unwrap()];
    let (_, placed) = run(
        &[of.clone()],
        &["gpu"],
        &[job(0, 0, None, 0)],
        Settings::default(),
    );
    let drawn = crate::picture(&[of], &[job(0, 0, None, 0)], &placed);
    assert_eq!(drawn.moments.len(), 1);
    assert_eq!(drawn.moments[0].held, ["1a"]);
}

/// Claims and requests of a cluster as it is: the run goes on from there.
#[test]
fn what_is_held_at_the_beginning_is_held_and_counts() {
    let mut of = with_resources(kind("a", 1, 2));
    let brute = Brute::new(std::slice::from_ref(&of));
    of.held = vec![
        brute.place(0, "mig:half").unwrap(),
        ResourceClaim::default(), // waits
    ];
    of.used = vec![[4_000, 0], [3_000, 0]];
    let jobs = [job(0, 0, None, 0), job(1, 0, None, 0)];
    let (report, placed) = run(&[of.clone()], &["gpu"], &jobs, Settings::default());
    let devices: Vec<&str> = placed
        .iter()
        .flat_map(|of| &of.devices)
        .map(|of| of.name.as_str())
        .collect();
    assert_eq!(devices, ["gpu-1"]);
    assert_eq!(report.accepted, 1);
    assert!((report.peak_percent - 75.0).abs() < 0.01, "{report:?}");
    // Of 8 cores, 7 are requested already.
    let mut shape = request::shape("gpu").unwrap();
    shape.resources = [2_000, 0];
    let classes = classes();
    let kinds = [of];
    let fleet = Nodes {
        kinds: &kinds,
        classes: &classes,
    };
    let (report, _) = simulate(fleet, &[shape], &jobs[..1], Settings::default());
    assert_eq!(report.accepted, 0);
}

fn with_resources(mut kind: Kind) -> Kind {
    let allocatable = [("cpu", "8"), ("memory", "64Gi")];
    kind.node.status = Some(NodeStatus {
        allocatable: Some(
            allocatable
                .map(|(name, amount)| {
                    (
                        name.to_owned(),
                        k8s_openapi::apimachinery::pkg::api::resource::Quantity(amount.to_owned()),
                    )
                })
                .into(),
        ),
        ..NodeStatus::default()
    });
    kind
}

#[test]
fn processor_time_and_memory_of_nodes_count_and_the_strategy_packs() {
    let kinds = [with_resources(kind("a", 4, 4))];
    let mut shape = request::shape("gpu").unwrap();
    shape.resources = [3_000, 8 << 30];
    let classes = classes();
    let jobs: Vec<Job> = (0..4).map(|at| job(at, 0, None, 0)).collect();
    let nodes = |strategy| {
        let fleet = Nodes {
            kinds: &kinds,
            classes: &classes,
        };
        let settings = Settings {
            strategy,
            ..Settings::default()
        };
        let (_, placed) = simulate(fleet, &[shape.clone()], &jobs, settings);
        let mut nodes: Vec<usize> = placed.iter().map(|placed| placed.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.len()
    };
    assert_eq!(nodes(Strategy::LeastAllocated), 4);
    // Two pods of 3 cores fit a node of 8, whatever GPUs are left.
    assert_eq!(nodes(Strategy::MostAllocated), 2);
    let fleet = Nodes {
        kinds: &kinds[..1],
        classes: &classes,
    };
    let many: Vec<Job> = (0..9).map(|at| job(at, 0, None, 0)).collect();
    let (report, _) = simulate(fleet, &[shape.clone()], &many, Settings::default());
    assert_eq!(report.accepted, 8);
    assert_eq!(
        report.waiting[0].reason,
        "4 nodes have its devices, and none of them the processor time and memory that it requests"
    );
}

/// Pods come and go with a whole GPU each: with the weight they go where GPUs are in use.
#[test]
fn devices_of_an_extended_resource_pack_where_they_have_a_weight() {
    let kinds = [kind("a", 4, 4)];
    let mut shape = request::shape("gpu").unwrap();
    let classes = classes();
    let jobs: Vec<Job> = (0..4).map(|at| job(at, 0, None, 0)).collect();
    let fleet = Nodes {
        kinds: &kinds,
        classes: &classes,
    };
    let nodes = |shape: &Shape, strategy, devices| {
        let weights = Weights {
            devices,
            ..Weights::default()
        };
        let settings = Settings {
            strategy,
            weights,
            ..Settings::default()
        };
        let (_, placed) = simulate(fleet, std::slice::from_ref(shape), &jobs, settings);
        let nodes: std::collections::BTreeSet<usize> = placed.iter().map(|of| of.node).collect();
        nodes.len()
    };
    // A claim has no score, whatever the weight.
    assert!(nodes(&shape, Strategy::MostAllocated, 5) > 1);
    shape.extended = [("gpu.divvy.dev".to_owned(), 1)].into();
    assert_eq!(nodes(&shape, Strategy::MostAllocated, 5), 1);
    assert_eq!(nodes(&shape, Strategy::LeastAllocated, 5), 4);
    assert!(nodes(&shape, Strategy::MostAllocated, 0) > 1);
    // A class that is not there has no devices: nothing is scored.
    shape.extended = [("other".to_owned(), 1)].into();
    assert!(nodes(&shape, Strategy::MostAllocated, 5) > 1);
}

#[test]
fn labels_and_taints_of_nodes_decide() {
    let mut tainted = kind("b", 1, 1);
    tainted.node.spec = Some(NodeSpec {
        taints: Some(vec![Taint {
            key: "team".to_owned(),
            value: Some("x".to_owned()),
            effect: "NoSchedule".to_owned(),
            time_added: None,
        }]),
        ..NodeSpec::default()
    });
    let kinds = [kind("a", 1, 1), tainted];
    let classes = classes();
    let fleet = Nodes {
        kinds: &kinds,
        classes: &classes,
    };
    let node_of = |shape: Shape| {
        let (_, placed) = simulate(
            fleet,
            &[shape],
            &[job(0, 0, None, 0), job(1, 0, None, 0)],
            Settings::default(),
        );
        placed.iter().map(|placed| placed.node).collect::<Vec<_>>()
    };
    let plain = request::shape("gpu").unwrap();
    assert_eq!(node_of(plain.clone()), [0]);
    let mut bears = plain.clone();
    bears.tolerations = vec![Toleration {
        key: Some("team".to_owned()),
        operator: Some("Exists".to_owned()),
        ..Toleration::default()
    }];
    assert_eq!(node_of(bears.clone()).len(), 2);
    bears.selector = Some(serde_json::from_value(json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "kind", "operator": "In", "values": ["b"]}]}]})).unwrap());
    assert_eq!(node_of(bears), [1]);
}

#[test]
fn the_first_alternative_counts_among_nodes() {
    let kinds = [kind("a", 1, 1), kind("b", 1, 1)];
    let mut shape = request::shape("gpu").unwrap();
    let request = json!([{"name": "gpu", "firstAvailable": [
        {"name": "whole", "deviceClassName": "gpu.divvy.dev"}, {"name": "half", "deviceClassName": "mig.divvy.dev"}]}]);
    let devices = shape.claims[0]
        .spec
        .as_mut()
        .unwrap()
        .devices
        .as_mut()
        .unwrap();
    devices.requests = Some(serde_json::from_value(request).unwrap());
    let classes = classes();
    let half = request::shape("mig:half").unwrap();
    for seed in 0..8 {
        let fleet = Nodes {
            kinds: &kinds,
            classes: &classes,
        };
        let jobs = [job(0, 0, None, 0), job(1, 1, None, 0)];
        let settings = Settings {
            seed,
            ..Settings::default()
        };
        let (_, placed) = simulate(fleet, &[half.clone(), shape.clone()], &jobs, settings);
        assert_ne!(
            placed[0].node, placed[1].node,
            "the node with a whole GPU is left"
        );
    }
}

#[test]
fn requests_in_words_are_claims_or_say_how_to_write_them() {
    let shape = request::shape("2*mig:half").unwrap();
    let devices = shape.claims[0]
        .spec
        .as_ref()
        .unwrap()
        .devices
        .as_ref()
        .unwrap();
    let exactly = devices.requests.as_ref().unwrap()[0]
        .exactly
        .as_ref()
        .unwrap();
    assert_eq!(
        (exactly.device_class_name.as_str(), exactly.count),
        ("mig.divvy.dev", Some(2))
    );
    for wrong in [
        "",
        "gpus",
        "0*gpu",
        "33*gpu",
        "mig",
        "mig:'",
        "share:",
        "share:10Gib",
        "share:-1Gi",
        "gpu:1",
    ] {
        let error = request::shape(wrong).unwrap_err().to_string();
        assert!(error.contains("write gpu, 4*gpu"), "{wrong}: {error}");
    }
}

#[test]
fn traces_are_csv_or_json_lines_and_errors_name_the_line() {
    let csv = "time,namespace,request,duration,priority\n0,a,gpu,60,\n1.5,b,share:4Gi,,7\n";
    let json = "{\"time\":0,\"namespace\":\"a\",\"request\":\"gpu\",\"duration\":60}\n\
                {\"time\":1.5,\"namespace\":\"b\",\"request\":\"share:4Gi\",\"priority\":7}\n";
    let (csv, json) = (trace::read(csv).unwrap(), trace::read(json).unwrap());
    assert_eq!(csv, json);
    assert_eq!(trace::milliseconds(csv[1].time), 1_500);
    for (wrong, says) in [
        ("", "the trace is empty"),
        ("time,reqest\n", "line 1: \"reqest\" is no column"),
        ("time,request\nx,gpu\n", "line 2: time: \"x\" is no number"),
        ("time,request\n1\n", "line 2: request is missing"),
        (
            "time,request\n-1,gpu\n",
            "line 2: time: it must be 0 or more",
        ),
        ("time,request\n1,\"gpu\"\n", "quoted values are not read"),
        ("{\"time\":0}\n", "line 1: missing field `namespace`"),
        (
            "{\"time\":0,\"namespace\":\"a\",\"request\":\"gpu\",\"durration\":1}\n",
            "unknown field `durration`",
        ),
    ] {
        let error = trace::read(wrong).unwrap_err().to_string();
        assert!(error.contains(says), "{wrong}: {error}");
    }
}

#[test]
fn mixes_are_drawn_as_stated() {
    for mix in generate::MIXES {
        assert_eq!(
            mix.requests.iter().map(|(_, share)| share).sum::<usize>(),
            100,
            "{}",
            mix.name
        );
        let lines = generate::draw(&mix, 4_000, 24.0, 3);
        assert_eq!(lines, generate::draw(&mix, 4_000, 24.0, 3));
        assert_ne!(lines, generate::draw(&mix, 4_000, 24.0, 4));
        for (request, share) in mix.requests {
            let count = lines.iter().filter(|line| line.request == *request).count();
            let expected = 4_000 * share / 100;
            assert!(
                count.abs_diff(expected) < 150,
                "{request}: {count}, not {expected}"
            );
            request::shape(request).unwrap();
        }
        let mut hours: Vec<f64> = lines
            .iter()
            .map(|line| line.duration.unwrap() / 3600.0)
            .collect();
        hours.sort_by(f64::total_cmp);
        let median = hours[2_000] / mix.median_hours;
        assert!((0.9..1.1).contains(&median), "{}: {median}", mix.name);
        assert!(
            lines
                .iter()
                .all(|line| (0.0..=86_400.0).contains(&line.time))
        );
    }
}
