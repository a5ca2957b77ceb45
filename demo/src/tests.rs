use clap::Parser;

use super::*;

mod asks;
mod cases;
mod converted;
mod limits;
mod mistakes;
mod mps;
mod notes;
mod slices;
mod stand_in;

/// The demo's arguments, as they are written.
#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

pub(crate) fn gpus(line: &str) -> Gpus {
    Line::try_parse_from(["demo", "--sim"].into_iter().chain(line.split_whitespace()))
        .unwrap()
        .args
        .gpus
}

/// Returns the demo's report of a manifest; without a policy of its own it is as with the chart's
/// defaults.
async fn of(line: &str, text: &str) -> Report {
    let example = Example::parse("m", text).unwrap();
    let policies = example.manifests.policies.clone();
    let stay = Stay {
        policies,
        examples: vec![example],
        ..Stay::default()
    };
    perform(&gpus(line), &[stay], &Show::default())
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_example_does_what_it_says() {
    let report = perform(
        &gpus("h100x2"),
        &examples::stays(None).unwrap(),
        &Show::default(),
    )
    .await
    .unwrap();
    assert_eq!(report.problems(), Vec::<String>::new());
    assert_eq!(report.scenarios.len(), examples::EXAMPLES.len());
    let skipped: Vec<_> = report
        .scenarios
        .iter()
        .filter_map(|s| s.skipped.as_ref().map(|why| (&s.name, why)))
        .collect();
    assert_eq!(skipped, []);
}

/// Boards of every ability (all that can be simulated if `DIVVY_ALL_BOARDS` is set), and nodes with
/// one GPU, in MIG mode and in trouble: an example runs or says what it lacks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_ends_well() {
    const KINDS: [&str; 9] = [
        "h200",
        "h100-nvl",
        "a100-40",
        "a30",
        "rtx-pro-6000",
        "rtx-pro-5000",
        "t4",
        "v100",
        "gb10",
    ];
    let all = std::env::var_os("DIVVY_ALL_BOARDS").is_some();
    let boards = divvy_gpu_sim::profiles()
        .iter()
        .filter(|profile| all || KINDS.contains(&profile.key));
    let boards = boards.map(|profile| format!("{}x2", profile.key));
    let others = [
        "h100x1",
        "h100x2 --mig-on all",
        "h100x3 --foreign-mig 0 --sick 1",
        "a100-80x2 --mig-on all",
        "a30x1,l4x1",
    ];
    let mut nodes = tokio::task::JoinSet::new();
    for line in boards.chain(others.map(str::to_owned)) {
        nodes.spawn(async move {
            let report = perform(
                &gpus(&line),
                &examples::stays(None).unwrap(),
                &Show::default(),
            )
            .await
            .unwrap();
            assert_eq!(report.problems(), Vec::<String>::new(), "--sim {line}");
            let ran = report
                .scenarios
                .iter()
                .filter(|scenario| scenario.skipped.is_none())
                .count();
            assert!(ran > 4, "--sim {line}: only {ran} examples ran");
        });
        // As many at a time as make each wait for what it must, not for the others.
        if nodes.len() > 3 {
            nodes.join_next().await.unwrap().unwrap();
        }
    }
    while let Some(node) = nodes.join_next().await {
        node.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_runs_although_it_was_to_wait_is_a_problem() {
    let text = "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: c, annotations: {demo.divvy.dev/expect: Pending}}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.divvy.dev}}]}}
";
    let report = of("h100x1", text).await;
    assert_eq!(
        report.problems(),
        ["m: claim default/c was expected to stay pending and does not"]
    );
}

/// A policy for shares.
const SHARES: &str = "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {name: p}\nspec: {rules: [{modes: [TimeSlicing]}]}\n---\n";

/// A claim with one request, and more fields.
fn with_request(request: &str, more: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: c}}
spec: {{devices: {{requests: [{{name: gpu, {request}}}]{more}}}}}
"
    )
}

fn exactly(fields: &str) -> String {
    with_request(
        &format!("exactly: {{deviceClassName: gpu.divvy.dev, {fields}}}"),
        "",
    )
}

fn share(capacity: &str) -> String {
    with_request(
        &format!(
            "exactly: {{deviceClassName: share.divvy.dev, capacity: {{requests: {{{capacity}}}}}}}"
        ),
        "",
    )
}

fn claim_with(more: &str) -> String {
    with_request(
        "exactly: {deviceClassName: gpu.divvy.dev}",
        &format!(", {more}"),
    )
}

fn pod(spec: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {{{spec}}}\n")
}

fn limits(resource: &str, amount: &str) -> String {
    pod(&format!(
        "containers: [{{name: c, image: x, resources: {{limits: {{{resource}: {amount}}}}}}}]"
    ))
}

fn uses(claim: &str) -> String {
    let pod = pod(&format!(
        "resourceClaims: [{{name: a, resourceClaimName: c}}], containers: [{{name: m, image: x, resources: {{claims: [{claim}]}}}}]"
    ));
    format!("{pod}---\n{}", exactly(""))
}

/// Manifests that passed the demo although a cluster refuses it, or runs it as its writer did not
/// mean it (`features.md` sections 3 and 6 of the review): each is refused or is a problem now,
/// with the place and what to write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
async fn what_a_cluster_refuses_is_refused() {
    let policy = "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {name: p}\nspec: {nodes: {names: ['gpu-*']}}\n---\n";
    let shares = SHARES;
    let many = vec!["{requests: [gpu], opaque: {driver: x, parameters: {}}}"; 40].join(", ");
    for (text, expected) in [
        (
            limits("nvidia.com/gpu", "0.5"),
            "limits[nvidia.com/gpu]: Invalid value: \"0.5\": must be an integer",
        ),
        (
            limits("example.com/gpu", "1"),
            "asks for example.com/gpu, which no DeviceClass stands for",
        ),
        (
            limits("deviceclass.resource.kubernetes.io/gpu.divvy.dev", "1k"),
            "1000 are asked for",
        ),
        (
            exactly("adminAccess: true"),
            "exactly.adminAccess: Forbidden: admin access to devices requires the label",
        ),
        (
            claim_with(
                "config: [{requests: [gpus], opaque: {driver: gpu.divvy.dev, parameters: {}}}]",
            ),
            "config[0].requests[0]: Invalid value: \"gpus\": must be the name of a request",
        ),
        (
            claim_with("constraints: [{requests: [gup], matchAttribute: gpu.divvy.dev/gpuUUID}]"),
            "constraints[0].requests[0]: Invalid value: \"gup\": must be the name of a request",
        ),
        (
            pod("resources: {limits: {nvidia.com/gpu: 1}}, containers: [{name: c, image: x}]"),
            "spec.resources.limits[nvidia.com/gpu]: Unsupported value: \"nvidia.com/gpu\": supported values: \"cpu\"",
        ),
        (
            pod("resources: {claims: [{name: g}]}, containers: [{name: c, image: x}]"),
            "spec.resources.claims: Forbidden",
        ),
        (
            pod("containers: [{name: c, image: x, resources: {requests: {nvidia.com/gpu: 1}}}]"),
            "spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources",
        ),
        (
            pod(
                "nodeSelector: {nvidia.com/gpu.product: NVIDIA-A100-SXM4-40GB}, containers: [{name: c, image: x, resources: {limits: {nvidia.com/gpu: 1}}}]",
            ),
            "try --sim a100-40x1",
        ),
        (
            pod(
                "nodeSelector: {nvidia.com/gpu.product: NVIDIA-A100-SXM4-40GB-MIG-1g.5gb}, containers: [{name: c, image: x, resources: {limits: {nvidia.com/gpu: 1}}}]",
            ),
            "no node of divvy has this label: -MIG-1g.5gb is how NVIDIA's device plugin names what it divides",
        ),
        (
            format!("{shares}{}", share("memory: 500Ki")),
            "requests[memory]: 500Ki is less than 1Mi: write 1Mi or more",
        ),
        (
            claim_with("constraints: [{matchAttribute: gpuUUID}]"),
            "must include a domain (did you mean \"gpu.divvy.dev/gpuUUID\"?)",
        ),
        (
            claim_with(&format!("config: [{many}]")),
            "spec.devices.config: Too many: 40: must have at most 32 items",
        ),
        (
            exactly("tolerations: [{key: k, operator: Equals, value: v}]"),
            "tolerations[0].operator: Unsupported value: \"Equals\"",
        ),
        (
            format!("{shares}{}", share("memory: 2048")),
            "requests[memory]: 2048 is less than 1Mi, most likely a number without",
        ),
        (
            format!("{shares}{}", share("memory: -1Gi")),
            "requests[memory]: -1Gi is less than 1Mi",
        ),
        (
            format!("{shares}{}", share("cores: -10")),
            "cores, slots and percent of a request cannot be negative",
        ),
        (
            with_request("exactly: {deviceClassName: admin.divvy.dev}", ""),
            "is for requests with adminAccess: true only",
        ),
        (
            claim_with(
                "config: [{requests: [gpu], opaque: {driver: gpu.divvy.dev, parameters: {apiVersion: divvy.dev/v1beta1, kind: ShareConfig}}}]",
            ),
            "a ShareConfig for a request of class gpu.divvy.dev, which takes a GpuConfig",
        ),
        (
            claim_with(
                "config: [{opaque: {driver: gpu.divvy.dev, parameters: {apiVersion: divvy.dev/v1beta1, kind: GpuConfig, timeSlicng: {}}}}]",
            ),
            "did you mean \"timeSlicing\"?",
        ),
        (
            exactly("selectors: [{cel: {expression: 'device.driver = \"x\"'}}]"),
            "exactly.selectors[0].cel.expression: Invalid value: compilation failed: ",
        ),
        (
            exactly("count: -1"),
            "exactly.count: Invalid value: must be greater than zero",
        ),
        (
            exactly("allocationMode: All, count: 2"),
            "must not be specified when allocationMode is All",
        ),
        (
            exactly("allocationMode: Every"),
            "allocationMode: Unsupported value: \"Every\"",
        ),
        (
            with_request("exactly: {}", ""),
            "exactly.deviceClassName: Required value",
        ),
        (
            with_request("", ""),
            "exactly one of `exactly` or `firstAvailable`",
        ),
        (
            uses("{name: aa}"),
            "claims[0].name: Not found: \"aa\" is not among the pod's resourceClaims",
        ),
        (
            uses("{name: a, request: gup}"),
            "the claim has no request \"gup\" (did you mean \"gpu\"?)",
        ),
        (
            format!("{policy}{}", exactly("")),
            "nodes.names: Invalid value: \"gpu-*\"",
        ),
    ] {
        let report = of("h100x2", &text).await;
        let problems = report.problems().join("\n");
        assert!(
            problems.contains(expected),
            "{text}\nexpected {expected}\ngot {problems}"
        );
    }
}

/// Names, and what must be there once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_refused_as_a_cluster_refuses_them() {
    let one = "{name: gpu, exactly: {deviceClassName: gpu.divvy.dev}}";
    let claim = |requests: &str| {
        format!(
            "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: c}}\nspec: {{devices: {{requests: [{requests}]}}}}\n"
        )
    };
    let any = |name: &str| format!("{{name: {name}, deviceClassName: gpu.divvy.dev}}");
    let any_of =
        |all: &[String]| with_request(&format!("firstAvailable: [{}]", all.join(", ")), "");
    let alternatives = any_of(&[any("a"), any("b")]);
    let container = |claims: &str, claim: &str| {
        let containers =
            format!("containers: [{{name: m, image: x, resources: {{claims: [{claims}]}}}}]");
        let pod = pod(&format!(
            "resourceClaims: [{{name: a, resourceClaimName: c}}], {containers}"
        ));
        format!("{pod}---\n{claim}")
    };
    let twice = pod(
        "containers: [], resourceClaims: [{name: a, resourceClaimName: c}, {name: a, resourceClaimName: c}]",
    );
    for (text, expected) in [
        (
            claim(&format!("{one}, {one}")),
            "requests[1].name: Duplicate value: \"gpu\"",
        ),
        (
            claim(&one.replace("gpu,", "GPU_1,")),
            "requests[0].name: Invalid value: \"GPU_1\": a lowercase RFC 1123 label",
        ),
        (
            claim("{exactly: {deviceClassName: gpu.divvy.dev}}"),
            "requests[0].name: Required value",
        ),
        (
            claim(one).replace("{name: c}", "{name: My_Claim}"),
            "metadata.name: Invalid value: \"My_Claim\": a lowercase",
        ),
        (
            any_of(&[any("a"), any("a")]),
            "requests[0].firstAvailable[1].name: Duplicate value: \"a\"",
        ),
        (
            any_of(
                &('a'..='i')
                    .map(|name| any(&name.to_string()))
                    .collect::<Vec<_>>(),
            ),
            "requests[0].firstAvailable: Too many: 9: must have at most 8 items",
        ),
        (
            claim_with(
                "constraints: [{requests: [gpu, gpu], matchAttribute: gpu.divvy.dev/gpuUUID}]",
            ),
            "constraints[0].requests[1]: Duplicate value: \"gpu\"",
        ),
        (
            exactly("selectors: [{}]"),
            "exactly.selectors[0].cel: Required value",
        ),
        (
            claim_with("config: [{opaque: {parameters: {}}}]"),
            "config[0].opaque.driver: Required value",
        ),
        (
            format!("{twice}---\n{}", exactly("")),
            "spec.resourceClaims[1].name: Duplicate value: \"a\"",
        ),
        (
            container("{name: a}, {name: a}", &exactly("")),
            "resources.claims[1]: Duplicate value: \"a\"",
        ),
        (
            container("{name: a, request: gpu}, {name: a}", &exactly("")),
            "claims[1]: Duplicate value: \"a\"",
        ),
        (
            container("{name: a, request: gpu/b}", &alternatives),
            "no request \"gpu/b\" (write \"gpu\": a container",
        ),
    ] {
        let problems = of("h100x1", &text).await.problems().join("\n");
        assert!(
            problems.contains(expected),
            "{text}\nexpected {expected}\ngot {problems}"
        );
    }
}

/// A manifest that looks wrong and is taken by the API server (its defaults and its validation,
/// 1.37) runs here, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_cluster_takes_is_taken() {
    let class =
        "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: any}\nspec: {}\n---\n";
    for text in [
        format!("{class}{class}{}", exactly("")),
        exactly("count: 0"),
        exactly("allocationMode: All, count: 0"),
        exactly("tolerations: [{value: v}, {key: k, operator: Exists, effect: None}]"),
    ] {
        let report = of("h100x1", &text).await;
        assert_eq!(report.problems(), Vec::<String>::new(), "{text}");
    }
}

/// Fields that no type has never reach the demo.
#[test]
fn misspelt_fields_are_refused_with_the_field_that_was_meant() {
    for (text, expected) in [
        (
            exactly("cuont: 2"),
            "unknown field \"spec.devices.requests[0].exactly.cuont\" (did you mean \"count\"?)",
        ),
        (
            with_request("exactly: {deviceClasName: gpu.divvy.dev}", ""),
            "unknown field \"spec.devices.requests[0].exactly.deviceClasName\" (did you mean \"deviceClassName\"?)",
        ),
        (
            exactly("capacity: {request: {memory: 1Gi}}"),
            "unknown field \"spec.devices.requests[0].exactly.capacity.request\" (did you mean \"requests\"?)",
        ),
        (
            pod("containers: [], resourceClaim: []"),
            "unknown field \"spec.resourceClaim\" (did you mean \"resourceClaims\"?)",
        ),
        (
            exactly("count: '2'"),
            "exactly.count: invalid type: string \"2\", expected a whole number",
        ),
    ] {
        let refused = format!("{:#}", Example::parse("m", &text).unwrap_err());
        assert!(
            refused.contains(expected),
            "{text}\nexpected {expected}\ngot {refused}"
        );
    }
}

/// A Deployment of one pod with these fields of its spec, and this limit.
fn deployment(fields: &str, limit: &str) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: d}}
spec:
  {fields}
  selector: {{matchLabels: {{app: d}}}}
  template:
    metadata: {{labels: {{app: d}}}}
    spec: {{containers: [{{name: c, image: x, resources: {{limits: {{{limit}}}}}}}]}}
"
    )
}

/// Manifests that a cluster takes, and does otherwise than its writer probably thinks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_probably_not_meant_is_noted() {
    let shares = SHARES;
    let unknown = claim_with("constraints: [{matchAttribute: gpu.divvy.dev/nvlinkDomian}]");
    for (text, expected) in [
        (format!("{shares}{}", share("cores: 0")), "0 is not more than nothing"),
        (format!("{shares}{}", share("cores: 12.5")), "12.5 is rounded up to 13"),
        (format!("{shares}{}", share("cores: 500m")), "500m is rounded up to 1"),
        (format!("{shares}{}", share("memroy: 1Gi")), "no capacity \"memroy\" (did you mean \"memory\"?)"),
        (unknown, "no device has attribute \"gpu.divvy.dev/nvlinkDomian\" (did you mean \"gpu.divvy.dev/nvlinkDomain\"?)"),
        (
            with_request("exactly: {deviceClassName: gpu.divy.dev}", ""),
            "class \"gpu.divy.dev\" does not exist (did you mean \"gpu.divvy.dev\"?)",
        ),
        (
            exactly(
                "selectors: [{cel: {expression: 'device.attributes[\"gpu.divvy.dev\"].prodctName == \"x\"'}}]",
            ),
            "no device has attribute \"prodctName\" of \"gpu.divvy.dev\" (did you mean \"productName\"?)",
        ),
        (
            claim_with("config: [{opaque: {driver: gpu.divy.dev, parameters: {}}}]"),
            "opaque.driver: this config is for driver \"gpu.divy.dev\" (did you mean \"gpu.divvy.dev\"?) and has no effect",
        ),
        (pod("nodeSelector: {a: b}, containers: [{name: c, image: x}]"), "nodeSelector and affinity are not looked at here"),
        (
            format!("{}---\n{}", exactly(""), "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n"),
            "Service s is passed over",
        ),
        (
            "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {name: p}\nspec: {rules: [{modes: [Mig], mig: {profiles: [1g.5gb]}}]}\n---\n"
                .to_owned() + &exactly(""),
            "1g.5gb",
        ),
        (
            exactly("capacity: {requests: {memory: 8Gi}}"),
            "8Gi only selects a device that has as much, and the request gets all of it: for a part of a GPU, class share.divvy.dev",
        ),
        (
            deployment("", "nvidia.com/gpu: 1"),
            "Deployment default/d: spec.strategy: an update makes a new pod before it ends an old one",
        ),
        (
            pod("containers: [{name: c, image: x, env: [{name: CUDA_VISIBLE_DEVICES, value: '3'}], resources: {limits: {nvidia.com/gpu: 1}}}]"),
            "spec.containers[0].env[0]: there is no GPU 3",
        ),
    ] {
        let report = of("h100x2", &text).await;
        // A problem takes the place of a note in the same words.
        let notes = report.scenarios[0].notes.iter().chain(&report.notes).cloned().chain(report.problems());
        let notes = notes.collect::<Vec<_>>().join("\n");
        assert!(notes.contains(expected), "{text}\nexpected {expected}\ngot {notes}");
    }
}

/// A container's own memory is replaced by that of its MPS server, without a word of Kubernetes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_in_the_place_of_mps_memory_is_noted() {
    let manifest = |class: &str, path: &str| {
        format!(
            "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {{name: mps}}\n\
             spec: {{rules: [{{modes: [Mps, Whole], shares: {{slots: 4}}}}]}}\n---\n\
             apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {{name: slot}}\n\
             spec: {{spec: {{devices: {{requests: [{{name: gpu, exactly: {{deviceClassName: {class}}}}}]}}}}}}\n---\n\
             apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: serve}}\n\
             spec: {{replicas: 2, selector: {{matchLabels: {{app: a}}}}, template: {{metadata: {{labels: {{app: a}}}}, spec: {{\
             resourceClaims: [{{name: gpu, resourceClaimTemplateName: slot}}],\
             containers: [{{name: main, image: x, resources: {{claims: [{{name: gpu}}]}},\
             volumeMounts: [{{name: shm, mountPath: {path}}}]}}],\
             volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: 16Gi}}}}]}}}}}}\n"
        )
    };
    let own = "---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: own}\nspec:\n  \
               extendedResourceName: example.com/slot\n  selectors: [{cel: {expression: \"device.driver == 'gpu.divvy.dev' && \
               device.attributes['gpu.divvy.dev'].type == 'gpu-mps'\"}}]\n";
    let by_config = "---\napiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: own}\nspec:\n  \
                     selectors: [{cel: {expression: \"device.driver == 'gpu.divvy.dev' && \
                     device.attributes['gpu.divvy.dev'].type == 'gpu'\"}}]\n  config: [{opaque: {driver: gpu.divvy.dev, \
                     parameters: {apiVersion: divvy.dev/v1beta1, kind: GpuConfig, mps: {}}}}]\n";
    let extended = |text: String| {
        let text = text.replace(
            "resources: {claims: [{name: gpu}]}",
            "resources: {limits: {example.com/slot: 1}}",
        );
        text.replace(
            "resourceClaims: [{name: gpu, resourceClaimTemplateName: slot}],",
            "",
        )
    };
    let of_other = |text: String| {
        text.replace("containers: [{name: main,", "containers: [{name: other, image: x, volumeMounts: [{name: shm, mountPath: /dev/shm}]}, {name: main,")
    };
    let at = |class: &str, path: &str| manifest(class, path);
    for (text, noted) in [
        (at("mps.divvy.dev", "/dev/shm"), 1),
        (at("mps.divvy.dev", "/dev/shm/"), 1),
        (at("mps.divvy.dev", "/dev//shm/."), 1),
        (at("mps.divvy.dev", "/cache"), 0),
        (at("gpu.divvy.dev", "/dev/shm"), 0),
        (at("own", "/dev/shm") + own, 1),
        (at("own", "/cache") + own, 0),
        (at("own", "/dev/shm") + by_config, 1),
        (extended(at("own", "/dev/shm")) + own, 1),
        (extended(of_other(at("own", "/cache"))) + own, 0),
        (of_other(at("mps.divvy.dev", "/cache")), 0),
    ] {
        let report = of("h100x2", &text).await;
        assert_eq!(report.problems(), Vec::<String>::new(), "{text}");
        let notes = report.scenarios[0].notes.join("\n");
        let expected =
            "containers[0].volumeMounts[0]: the memory of the MPS server takes the place";
        assert_eq!(notes.matches(expected).count(), noted, "{text}\n{notes}");
    }
    // With R615 a share has a namespace, and no memory of others.
    let newer = "h100x2 --driver-version 615.71.09";
    let report = of(newer, &at("mps.divvy.dev", "/dev/shm")).await;
    assert!(
        !report.scenarios[0]
            .notes
            .join("\n")
            .contains("takes the place")
    );
}

/// Manifests as articles have them run as they are, with the chart's classes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_of_the_device_plugin_run_as_they_are() {
    for (line, resource, amount, devices) in [
        ("h100x2", "nvidia.com/gpu", "2", "gpu-1 gpu-0"),
        (
            "a100-80x1 --mig-on all",
            "nvidia.com/mig-1g.10gb",
            "3",
            "1g10gb 1g10gb 1g10gb",
        ),
        (
            "h200x1 --mig-on all",
            "nvidia.com/mig-3g.71gb",
            "1",
            "3g71gb",
        ),
    ] {
        let report = of(line, &limits(resource, amount)).await;
        assert_eq!(report.problems(), Vec::<String>::new(), "{line} {resource}");
        let served = cases::served(&report);
        let kind = |device: &str| {
            let profile = device
                .split("-mig-")
                .nth(1)
                .and_then(|rest| rest.split('-').next());
            profile.unwrap_or(device).to_owned()
        };
        let kinds: Vec<String> = cases::devices(&served).into_iter().map(kind).collect();
        let mut expected: Vec<&str> = devices.split(' ').collect();
        expected.sort_unstable();
        assert_eq!(kinds, expected, "{line} {resource}");
    }
}

/// The chart's classes have the names that the rest of the program knows, and cover each plain
/// profile of the boards that values.yaml promises.
#[test]
fn the_charts_classes_cover_all_simulated_boards() {
    let classes = world::classes(divvy_api::names::DRIVER).unwrap();
    let named: Vec<&str> = classes
        .iter()
        .filter_map(|class| class.metadata.name.as_deref())
        .collect();
    for class in [
        divvy_api::names::CLASS_GPU,
        divvy_api::names::CLASS_MIG,
        divvy_api::names::CLASS_SHARE,
        divvy_api::names::CLASS_ADMIN,
    ] {
        assert!(named.contains(&class), "{class}");
    }
    let mut profiles = 0;
    for board in divvy_gpu_sim::MIG_BOARDS {
        let capabilities = divvy_gpu_sim::mig_capabilities(board).unwrap();
        for profile in capabilities.profiles() {
            let profile = capabilities.name(profile).unwrap().to_string();
            if profile.contains(['+', '-']) {
                continue;
            }
            profiles += 1;
            let class = divvy_why::driver::class_of(&profile);
            let resource = format!("nvidia.com/mig-{profile}");
            assert!(named.contains(&class.as_str()), "{board}: {class}");
            let stands_for = divvy_cli::extended::class_of(&resource, &classes);
            assert_eq!(stands_for, Some(class));
        }
    }
    assert!(profiles > 80, "{profiles}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_init_container_uses_the_gpu_of_the_container_after_it() {
    let limits = "image: x, resources: {limits: {example.com/gpu: 1}}";
    let pod = pod(&format!(
        "initContainers: [{{name: i, {limits}}}], containers: [{{name: m, {limits}}}]"
    ));
    let class = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: legacy}\nspec: {extendedResourceName: example.com/gpu, selectors: [{cel: {expression: 'device.driver == \"gpu.divvy.dev\"'}}]}\n---\n";
    let report = of("h100x1", &format!("{class}{pod}")).await;
    assert_eq!(report.problems(), Vec::<String>::new());
}

/// A manifest that passes the chart's defaults here passes them on a cluster: shares and partitions
/// must be asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_policy_it_is_as_with_the_charts_defaults() {
    let report = of("h100x1", &share("memory: 1Gi")).await;
    assert!(
        report.problems().concat().contains("stays pending"),
        "{:?}",
        report.problems()
    );
    let names: Vec<&str> = report
        .published
        .iter()
        .map(|device| device.name.as_str())
        .collect();
    assert_eq!(names, ["gpu-0"]);
}

/// The text that the program prints fits in 80 columns and two screens, and README shows one
/// example whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readme_shows_what_the_demo_prints() {
    let print = async |board: &str, only: Option<&str>| {
        let report = perform(
            &gpus(board),
            &examples::stays(only).unwrap(),
            &Show::default(),
        )
        .await
        .unwrap();
        render::render(
            &report,
            Look {
                colour: false,
                wide: false,
                all: false,
            },
        )
    };
    let all = print("h100x2", None).await;
    for line in all.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert!(all.lines().count() <= 100, "{all}");
    let printed = print("h100x1", Some("mig-partitions")).await;
    assert!(
        !printed.contains("more lines"),
        "README shows it whole: {printed}"
    );
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let readme = fs_err::read_to_string(path).unwrap();
    let start = "```text\n$ divvy demo --only mig-partitions --sim h100x1\n";
    let (before, rest) = readme.split_once(start).unwrap();
    let (shown, after) = rest.split_once("\n```\n").unwrap();
    if std::env::var_os("DIVVY_BLESS").is_some() {
        fs_err::write(path, format!("{before}{start}{printed}\n```\n{after}")).unwrap();
    } else {
        assert_eq!(
            shown, printed,
            "DIVVY_BLESS=1 cargo test -p divvy-demo readme_shows puts it into README"
        );
    }
}
