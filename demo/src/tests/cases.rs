//! Manifests of public bug reports (`demo/fixtures/cases`, in own words), each with the answer that
//! a cluster gives.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::*;
use crate::render::render;
use crate::report::State;

/// Runs one of the files.
async fn case(line: &str, name: &str) -> Report {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/cases");
    let text = fs_err::read_to_string(format!("{folder}/{name}.yaml")).unwrap();
    of(line, &text).await
}

/// Returns claims and the devices that they got.
pub(super) fn served(report: &Report) -> Vec<(String, Vec<String>)> {
    let rounds = report
        .scenarios
        .iter()
        .flat_map(|scenario| &scenario.rounds);
    let claims = rounds.flat_map(|round| &round.claims);
    let mut all: Vec<_> = claims
        .map(|claim| match &claim.state {
            report::State::Prepared { devices, .. } => {
                let devices = devices.iter().map(|device| device.device.clone());
                (claim.claim.clone(), devices.collect())
            }
            _ => (claim.claim.clone(), Vec::new()),
        })
        .collect();
    all.sort();
    all
}

/// Returns the notes, and the problems, which take the place of notes in the same words.
fn notes(report: &Report) -> String {
    let notes = report.scenarios[0].notes.iter().cloned();
    let all: Vec<String> = notes.chain(report.problems()).collect();
    all.join("\n")
}

pub(super) fn devices(served: &[(String, Vec<String>)]) -> Vec<&str> {
    let mut all: Vec<&str> = served
        .iter()
        .flat_map(|(_, devices)| devices)
        .map(String::as_str)
        .collect();
    all.sort_unstable();
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_jobs_with_generate_name_are_two() {
    let report = case("h100x4", "jobs-with-generate-name").await;
    assert_eq!(report.problems(), Vec::<String>::new());
    let served = served(&report);
    let names: Vec<&str> = served.iter().map(|(claim, _)| claim.as_str()).collect();
    assert_eq!(
        names,
        ["default/serve-bbbbc-0-gpu", "default/train-bbbbb-0-gpu"]
    );
    let devices = devices(&served);
    assert!(
        devices.len() == 2 && devices[0] != devices[1],
        "{devices:?}"
    );
    // A node of one GPU is not enough.
    let small = case("h100x1", "jobs-with-generate-name").await;
    assert!(
        small.problems().concat().contains("stays pending"),
        "{:?}",
        small.problems()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_with_generate_name_runs_and_is_for_kubectl_create() {
    let report = case("h100x4", "pod-with-generate-name").await;
    assert_eq!(report.problems(), Vec::<String>::new());
    assert_eq!(served(&report).len(), 1);
    assert!(
        notes(&report).contains("kubectl create makes it"),
        "{}",
        notes(&report)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_classes_of_one_extended_resource_the_newest_counts() {
    let report = case("a100-40x1,l4x1", "two-classes-of-one-name").await;
    assert_eq!(report.problems(), Vec::<String>::new());
    assert_eq!(devices(&served(&report)), ["gpu-1"], "the L4");
    let expected = "DeviceClasses z-first-in-file, a-second-in-file all have extendedResourceName example.com/gpu";
    assert!(notes(&report).contains(expected), "{}", notes(&report));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hint_names_the_attribute_in_its_own_domain() {
    let report = case("h100x4", "other-domains").await;
    let notes = notes(&report);
    for expected in [
        "no device has attribute \"pciBusID\" of \"gpu.divvy.dev\" (did you mean device.attributes[\"resource.kubernetes.io\"].pciBusID?)",
        "no device has attribute \"string\" of \"type\": write device.attributes[\"gpu.divvy.dev\"].type",
        "leave out \".string\" behind device.attributes[\"gpu.divvy.dev\"].productName",
        "\"prodctName\" of \"gpu.divvy.dev\" (did you mean \"productName\"?)",
        "no device has attribute \"gpu.divvy.dev/numaNode\" (did you mean \"resource.kubernetes.io/numaNode\"?)",
    ] {
        assert!(notes.contains(expected), "expected {expected}\ngot {notes}");
    }
    for (text, expected) in [
        (
            exactly(
                "selectors: [{cel: {expression: 'device.attributes[\"dra.net\"].numaNode == 0'}}]",
            ),
            "(did you mean device.attributes[\"resource.kubernetes.io\"].numaNode?)",
        ),
        (
            exactly(
                "selectors: [{cel: {expression: 'device.attributes[\"gpu.nvidia.com\"].productName == \"x\"'}}]",
            ),
            "divvy's domain is gpu.divvy.dev: write device.attributes[\"gpu.divvy.dev\"].productName",
        ),
        (
            exactly(
                "selectors: [{cel: {expression: 'device.capacity[\"gpu.nvidia.com\"].memory.isGreaterThan(quantity(\"1Gi\"))'}}]",
            ),
            "divvy's domain is gpu.divvy.dev: write device.capacity[\"gpu.divvy.dev\"].memory",
        ),
        (
            claim_with("constraints: [{matchAttribute: gpu.divvy.dev/pcieRoot}]"),
            "(did you mean \"resource.kubernetes.io/pcieRoot\"?)",
        ),
        (
            claim_with("constraints: [{matchAttribute: numaNode}]"),
            "must include a domain (did you mean \"resource.kubernetes.io/numaNode\"?)",
        ),
    ] {
        let report = of("h100x2", &text).await;
        let said = [report.problems().join("\n"), super::cases::notes(&report)].concat();
        assert!(
            said.contains(expected),
            "{text}\nexpected {expected}\ngot {said}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workloads_that_the_api_server_refuses_do_not_run() {
    let report = case("h100x4", "refused-workloads").await;
    let problems = report.problems().join("\n");
    for expected in [
        "Deployment default/no-selector: spec.selector: Required value",
        "Deployment default/other-labels: spec.template.metadata.labels: Invalid value: {\"app\":\"a\"}: `selector` does not match template `labels`",
        "Job default/no-restart-policy: spec.template.spec.restartPolicy: Required value: valid values: \"OnFailure\", \"Never\"",
        "Deployment default/never: spec.template.spec.restartPolicy: Unsupported value: \"Never\": supported values: \"Always\"",
    ] {
        assert!(
            problems.contains(expected),
            "expected {expected}\ngot {problems}"
        );
    }
    assert_eq!(served(&report), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_a_group_have_claims_of_their_own_and_a_note_names_the_gate() {
    let report = case("h100x4", "pod-group").await;
    assert_eq!(report.problems(), Vec::<String>::new());
    assert_eq!(served(&report).len(), 2);
    let notes = notes(&report);
    assert!(
        notes.contains("PodGroup g1 is passed over") && notes.contains("DRAWorkloadResourceClaims"),
        "{notes}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_taint_rule_keeps_claims_off_the_devices_that_it_selects() {
    let report = case("h100x4", "taint-rule").await;
    let problems = report.problems().join("\n");
    let expected =
        "gpu-0, gpu-1, gpu-2, gpu-3 are tainted with example.com/service=true:NoSchedule";
    assert!(problems.contains(expected), "{problems}");
    let expected = "the taint example.com/service is of DeviceTaintRule service";
    assert!(problems.contains(expected), "{problems}");
    let rule = "apiVersion: resource.k8s.io/v1\nkind: DeviceTaintRule\nmetadata: {name: service}\nspec: {deviceSelector: {SELECTOR}, taint: {key: a, effect: NoSchedule}}\n---\n";
    let rule = |selector: &str| format!("{}{}", rule.replace("SELECTOR", selector), exactly(""));
    // One GPU of two; then a pool that is called otherwise.
    let one = of("h100x2", &rule("device: gpu-1")).await;
    assert_eq!(
        (one.problems(), devices(&served(&one))),
        (Vec::new(), vec!["gpu-0"])
    );
    let none = of("h100x1", &rule("pool: demo-node")).await;
    assert_eq!(none.problems(), Vec::<String>::new());
    let expected = "spec.deviceSelector.pool: \"demo-node\" is none of demo-node/divvy";
    assert!(
        super::cases::notes(&none).contains(expected),
        "{}",
        super::cases::notes(&none)
    );
    let old = rule("").replace(
        "resource.k8s.io/v1\nkind: DeviceTaintRule",
        "resource.k8s.io/v1beta2\nkind: DeviceTaintRule",
    );
    let refused = format!("{:#}", Example::parse("m", &old).unwrap_err());
    assert!(
        refused.contains("write resource.k8s.io/v1 (served since Kubernetes 1.37)"),
        "{refused}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sidecars_partitions_and_selectors_of_others_are_served() {
    for (line, name, claims, devices) in [
        ("h100x4", "sidecars", 1, 3),
        ("h100x4", "evict-extended", 1, 1),
        ("a100-40x1 --mig-on all", "full-partition", 1, 1),
        ("gb200x4", "selectors-of-operators", 4, 4),
    ] {
        let report = case(line, name).await;
        assert_eq!(report.problems(), Vec::<String>::new(), "{name}");
        let served = served(&report);
        assert_eq!(
            (served.len(), super::cases::devices(&served).len()),
            (claims, devices),
            "{name}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn templates_alone_ask_for_nothing() {
    let template = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: t}\nspec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.divvy.dev}}]}}}\n";
    let plain = pod("containers: [{name: c, image: x}]");
    for (text, expected) in [
        (
            template,
            "a ResourceClaimTemplate makes a claim for each pod that names it, and no pod does",
        ),
        (plain.as_str(), "no pod names a claim"),
    ] {
        let report = of("h100x1", text).await;
        assert!(notes(&report).contains(expected), "{}", notes(&report));
        let look = Look {
            colour: false,
            wide: false,
            all: true,
        };
        let text = render::render(&report, look);
        assert!(
            text.contains("1 manifest, 0 claims: nothing asks for a GPU."),
            "{text}"
        );
    }
}

/// Checks of pods and of the objects around them, each with the API server's place and words.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
async fn pods_are_refused_as_a_cluster_refuses_them() {
    let of_kind = |kind: &str, version: &str, spec: &str| {
        format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: w}}\nspec: {{{spec}}}\n")
    };
    let class = |name: &str| {
        of_kind(
            "DeviceClass",
            "resource.k8s.io/v1",
            &format!("extendedResourceName: {name}"),
        )
    };
    let container = |fields: &str| pod(&format!("containers: [{{name: c, image: x, {fields}}}]"));
    let template =
        "template: {metadata: {labels: {app: a}}, spec: {containers: [{name: c, image: x}]}}";
    let never = "template: {spec: {restartPolicy: Never, containers: [{name: c, image: x}]}}";
    for (text, expected) in [
        (pod(""), "Pod default/p: spec.containers: Required value"),
        (
            pod("containers: [{name: c}]"),
            "spec.containers[0].image: Required value",
        ),
        (
            pod("containers: [{name: c, image: ' x'}]"),
            "must not have leading or trailing whitespace",
        ),
        (
            pod("initContainers: [{name: c, image: x}], containers: [{name: c, image: x}]"),
            "spec.containers[0].name: Duplicate value: \"c\"",
        ),
        (
            pod("containers: [{name: C_1, image: x}]"),
            "containers[0].name: Invalid value: \"C_1\"",
        ),
        (
            pod("restartPolicy: Sometimes, containers: []"),
            "restartPolicy: Unsupported value: \"Sometimes\"",
        ),
        (
            container("resources: {limits: {gpu: 1}}"),
            "limits[gpu]: Invalid value: \"gpu\": must be a standard resource",
        ),
        (
            container("resources: {limits: {cpu: 1}, requests: {cpu: 2}}"),
            "requests[cpu]: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
        ),
        (
            container("resources: {limits: {memory: -1Gi}}"),
            "must be greater than or equal to 0",
        ),
        (
            container("resources: {limits: {memory: 1GB}}"),
            "limits[memory]: Invalid value: \"1GB\": not a quantity",
        ),
        (
            container("volumeMounts: [{name: dat, mountPath: /data}]"),
            "volumeMounts[0].name: Not found: \"dat\"",
        ),
        (
            container("ports: [{containerPort: 70000}]"),
            "must be between 1 and 65535",
        ),
        (
            container("imagePullPolicy: always"),
            "imagePullPolicy: Unsupported value: \"always\"",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p, labels: {app: 'a b'}}\nspec: {containers: [{name: c, image: x}]}\n".to_string(),
            "metadata.labels: Invalid value: \"a b\": a valid label",
        ),
        (
            of_kind(
                "Deployment",
                "apps/v1",
                &format!("selector: {{}}, {template}"),
            ),
            "empty selector is invalid for deployment",
        ),
        (
            of_kind(
                "DaemonSet",
                "apps/v1",
                &format!("selector: {{matchLabels: {{app: b}}}}, {template}"),
            ),
            "DaemonSet default/w: spec.template.metadata.labels",
        ),
        (
            of_kind(
                "StatefulSet",
                "apps/v1",
                &format!("replicas: -1, selector: {{matchLabels: {{app: a}}}}, {template}"),
            ),
            "spec.replicas: Invalid value: -1",
        ),
        (
            of_kind(
                "Job",
                "batch/v1",
                &format!("selector: {{matchLabels: {{app: a}}}}, {never}"),
            ),
            "`selector` not auto-generated",
        ),
        (
            of_kind(
                "CronJob",
                "batch/v1",
                &format!("jobTemplate: {{spec: {{{never}}}}}"),
            ),
            "spec.schedule: Required value",
        ),
        (
            of_kind(
                "CronJob",
                "batch/v1",
                &format!("schedule: daily, jobTemplate: {{spec: {{{never}}}}}"),
            ),
            "expected exactly 5 fields, found 1",
        ),
        (
            of_kind(
                "Deployment",
                "apps/v1",
                &format!("selector: {{matchLabels: {{app: a}}}}, {template}"),
            )
            .replace("{name: w}", "{}"),
            "Deployment default/(no name): metadata.name: Required value: name or generateName is required",
        ),
        (
            class("gpu"),
            "DeviceClass w: spec.extendedResourceName: Invalid value: \"gpu\": a name must be a domain-prefixed path",
        ),
        (
            class("requests.nvidia.com/gpu"),
            "must not have \"requests.\" prefix",
        ),
        (class("nvidia.com/gpu_a100!"), "name part must consist of"),
        (
            with_request("exactly: {deviceClassName: My_Class}", ""),
            "deviceClassName: Invalid value: \"My_Class\"",
        ),
        (
            exactly("tolerations: [{key: 'a b', operator: Exists}]"),
            "tolerations[0].key: Invalid value: \"a b\"",
        ),
        (
            share("memory: 1Gi, cores: 10"),
            "no GPU of this node is offered in shares. A GpuPolicy with modes: [TimeSlicing] offers them",
        ),
        (
            limits("nvidia.com/gpumem", "10240"),
            "asks for nvidia.com/gpumem, by which other projects give out parts of a GPU: the claim that is meant: class \
             share.divvy.dev, capacity.requests {memory: 10Gi} (which needs a GpuPolicy with modes: [TimeSlicing]); divvy \
             convert -f FILE writes it",
        ),
        (
            limits("tencent.com/vcuda-memory", "2048"),
            "asks for tencent.com/vcuda-memory, by which other projects give out parts of a GPU: 2048 pieces of 256 MiB are 512Gi, \
             more than a GPU has: if 2048 MiB were meant, write 8",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p, annotations: {gpu-fraction: '0.5'}}\nspec: {containers: [{name: c, image: x}]}\n"
                .to_owned(),
            "the claim that is meant: class share.divvy.dev, capacity.requests {percent: 50}",
        ),
        (
            format!("{SHARES}{}", share("memory: 10GB")),
            "Invalid value: \"10GB\": not a quantity (write 10G or 10Gi)",
        ),
        (
            pod(
                "schedulingGates: [{name: example.com/quota}], containers: [{name: c, image: x, resources: {claims: [{name: a}]}}], resourceClaims: [{name: a, resourceClaimName: c}]",
            ) + "---\n"
                + &exactly(""),
            "pod default/p has schedulingGates (example.com/quota)",
        ),
        (
            pod(
                "nodeName: n1, containers: [{name: c, image: x, resources: {claims: [{name: a}]}}], resourceClaims: [{name: a, resourceClaimName: c}]",
            ) + "---\n"
                + &exactly(""),
            "pod default/p has nodeName n1, which passes the scheduler by",
        ),
    ] {
        let problems = of("h100x1", &text).await.problems().join("\n");
        assert!(
            problems.contains(expected),
            "{text}\nexpected {expected}\ngot {problems}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_that_a_cluster_decides_otherwise_are_noted() {
    let custom = "apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: {name: r}\nspec: {headGroupSpec: {template: {spec: {containers: [{name: c, image: x}]}}}}\n";
    for (text, expected) in [
        (
            custom.to_owned(),
            "RayCluster r: its controller does not run here: the pod of spec.headGroupSpec.template.spec runs, once",
        ),
        (
            pod("runtimeClassName: nvidia, containers: [{name: c, image: x}]"),
            "is not needed for GPUs of divvy",
        ),
        (
            pod("runtimeClassName: gvisor, containers: [{name: c, image: x}]"),
            "\"gvisor\" runs the pod in gVisor, which is not supported: the claim's limits may not hold",
        ),
        (
            format!(
                "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {{name: safe}}\nhandler: kata-qemu\n---\n{}",
                pod("runtimeClassName: safe, containers: [{name: c, image: x}]")
            ),
            "\"safe\" runs the pod in Kata Containers, which is not supported",
        ),
        (
            pod("schedulerName: volcano, containers: [{name: c, image: x}]"),
            "\"volcano\" places the pod on a cluster",
        ),
        (
            format!("{SHARES}{}", share("cores: 0.1")),
            "0.1 is rounded up to 1; cores are percent of a GPU: 10 is a tenth",
        ),
        (
            format!("{PERCENT}---\n{}", share("percent: 0.5")),
            "0.5 is rounded up to 1; percent are of a GPU: 50 is half of it",
        ),
        (
            format!("{SHARES}{}", share("mem: 1Gi")),
            "no capacity \"mem\"; there are memory, cores, slots",
        ),
        (
            "apiVersion: v1\nkind: ResourceQuota\nmetadata: {name: q}\n".to_owned(),
            "ResourceQuota q is passed over: quotas and limits of a namespace are not counted here",
        ),
    ] {
        let notes = notes(&of("h100x1", &text).await);
        assert!(
            notes.contains(expected),
            "{text}\nexpected {expected}\ngot {notes}"
        );
    }
}

/// Shares by percent of every GPU.
pub(super) const PERCENT: &str = "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {name: percent}\nspec: {rules: [{modes: [TimeSlicing], shares: {unit: Percent, slots: 4}}]}\n";

pub(super) const WIDE: Look = Look {
    colour: false,
    wide: true,
    all: true,
};

/// A pod with a claim of its own for a share with these requests, in flow style.
pub(super) fn pod_with_share(name: &str, requests: &str) -> String {
    format!(
        "---\napiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: {name}}}\n\
         spec: {{devices: {{requests: [{{name: gpu, exactly: {{deviceClassName: share.divvy.dev, capacity: {{requests: {{{requests}}}}}}}}}]}}}}\n\
         ---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\n\
         spec: {{containers: [{{name: c, image: x, resources: {{claims: [{{name: gpu}}]}}}}], resourceClaims: [{{name: gpu, resourceClaimName: {name}}}]}}\n"
    )
}

/// Returns the claims of a report by name: the memory that each has in MiB, as the container sees
/// it, or why it waits.
fn memory_of_shares(report: &Report) -> BTreeMap<String, Result<u64, String>> {
    let rounds = report.scenarios[0].rounds.iter();
    let claims = rounds.flat_map(|round| &round.claims);
    claims
        .map(|claim| {
            let found = match &claim.state {
                State::Prepared { devices, .. } => {
                    let cdi = claim.cdi.as_ref().unwrap().to_string();
                    let (_, granted) = cdi.split_once("DIVVY_MEMORY_GPU_0_TS=").unwrap();
                    let (granted, _) = granted.split_once('"').unwrap();
                    let granted: u64 = granted.parse().unwrap();
                    let of_percent = devices[0].memory_of_percent;
                    assert!(of_percent.is_none_or(|shown| shown == granted));
                    Ok(granted >> 20)
                }
                State::Pending { reason, .. } | State::Failed { reason } => Err(reason.clone()),
            };
            (claim.claim.trim_start_matches("default/").to_owned(), found)
        })
        .collect()
}

/// The same claim is half of an L4 and half of an H200, and two halves are all there is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_of_any_gpu_is_one_claim_and_three_halves_do_not_fit() {
    for (line, all, gib) in [("l4x1", 23034, "11.2 GiB"), ("h200x1", 143_771, "70.2 GiB")] {
        let half = |name: &str| pod_with_share(name, "percent: \"50\"");
        let text = PERCENT.to_owned() + &half("a") + &half("b") + &half("c");
        let report = of(line, &text).await;
        let found = memory_of_shares(&report);
        assert_eq!(found["a"], Ok(all / 2), "{line}");
        assert_eq!(found["b"], Ok(all / 2), "{line}");
        let waits = found["c"].clone().unwrap_err();
        assert!(
            waits.contains("with 0 % left, and 50 % asked for"),
            "{waits}"
        );
        let granted: u64 = found.values().filter_map(|of| of.as_ref().ok()).sum();
        assert!(granted <= all, "{line}");
        let text = render(&report, WIDE);
        assert!(text.contains(&format!("(50 %, {gib})")), "{text}");
        assert!(text.contains("shared: 100 of 100 %, memory "), "{text}");
    }
    // Without a request, a quarter by `slots: 4`; less than the least is the least.
    let text = PERCENT.to_owned()
        + &pod_with_share("quarter", "")
        + &pod_with_share("little", "percent: \"1\"");
    let found = memory_of_shares(&of("l4x1", &text).await);
    assert_eq!(found["quarter"], Ok(23034 / 4));
    assert_eq!(found["little"], Ok(23034 * 2 / 100));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_in_the_other_unit_gets_a_hint_with_the_one_there_is() {
    let waits = async |policy: &str, requests: &str| {
        let text = policy.to_owned() + &pod_with_share("a", requests);
        let found = memory_of_shares(&of("l4x1", &text).await);
        found["a"].clone().unwrap_err()
    };
    let found = waits(PERCENT, "memory: 10Gi").await;
    let says = "no capacity memory: gpu-0 is shared by percent. Request percent alone";
    assert!(found.contains(says), "{found}");
    let found = waits(SHARES, "percent: \"50\"").await;
    let says =
        "no capacity percent: gpu-0 is shared by amounts. A GpuPolicy with shares: {unit: Percent}";
    assert!(found.contains(says), "{found}");
    // Another class has it.
    let whole = SHARES.replace("[TimeSlicing]", "[Whole, TimeSlicing]")
        + &pod_with_share("a", "cores: \"10\"").replace("share.divvy.dev", "gpu.divvy.dev");
    let found = memory_of_shares(&of("l4x1", &whole).await)["a"]
        .clone()
        .unwrap_err();
    assert!(
        found.contains("A share has cores: class share.divvy.dev"),
        "{found}"
    );
    // The hint is all: what the GPUs have instead is no second one before it.
    for (policy, requests) in [(PERCENT, "memory: 10Gi"), (SHARES, "percent: \"50\"")] {
        let text = policy.to_owned() + &pod_with_share("a", requests);
        let notes = of("l4x1", &text).await.scenarios[0].notes.join("\n");
        assert!(!notes.contains("no capacity"), "{notes}");
    }
    let both = PERCENT.to_owned() + &pod_with_share("a", "percent: \"50\", memory: 1Gi");
    let notes = notes(&of("l4x1", &both).await);
    assert!(
        notes.contains("memory and percent: no GPU is shared by both"),
        "{notes}"
    );
}

/// Each output of `divvy convert` is a manifest that runs, under the policy that its notes name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn converted_manifests_are_served() {
    let all_modes = include_str!("../../../examples/all-modes.yaml");
    let by_percent = include_str!("../../../examples/by-percent.yaml");
    let expected = [
        ("device-plugin", 8),
        ("hami-dra", 2),
        ("gpu-manager", 4),
        ("hami", 5),
        ("kai", 4),
        ("kai-fraction", 4),
        ("nvidia-dra", 8),
        ("list", 4),
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/fixtures/convert/out");
    let all = fs_err::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let all: BTreeMap<String, String> = all
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, fs_err::read_to_string(path).unwrap())
        })
        .collect();
    // Two need other policies, which their notes name; one cannot be converted.
    let other = ["gke", "mig-shared", "refused"];
    let complete: BTreeSet<&str> = all
        .keys()
        .map(String::as_str)
        .filter(|name| !other.contains(name))
        .collect();
    assert_eq!(complete, expected.iter().map(|(name, _)| *name).collect());
    for (name, devices) in expected {
        let text = &all[name];
        let (policy, other) = if text.contains("by-percent.yaml") {
            (by_percent, all_modes)
        } else {
            (all_modes, by_percent)
        };
        let report = of("h100x8", &format!("{policy}---\n{text}")).await;
        assert_eq!(report.problems(), Vec::<String>::new(), "{name}");
        let served = served(&report);
        assert_eq!(super::cases::devices(&served).len(), devices, "{name}");
        // Under the other policy what is asked for in a unit waits.
        if text.contains("capacity:") {
            let report = of("h100x8", &format!("{other}---\n{text}")).await;
            assert!(!report.problems().is_empty(), "{name}");
        }
    }
}

/// A class as an extended resource, and pods that ask for one of it.
fn by_resource(class: &str, resource: &str, pods: &[&str]) -> String {
    let class = format!(
        "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {{name: {class}}}\nspec: {{extendedResourceName: {resource}, \
         selectors: [{{cel: {{expression: 'device.driver == \"gpu.divvy.dev\" && device.attributes[\"gpu.divvy.dev\"].sharing == \"time-slicing\"'}}}}]}}\n"
    );
    let pods = pods.iter().map(|pod| {
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {pod}}}\n\
             spec: {{containers: [{{name: c, image: x, resources: {{limits: {{{resource}: 1}}}}}}]}}\n"
        )
    });
    class + &pods.collect::<String>()
}

/// An extended resource names no amount: `slots: 2` makes each of them half of its GPU, in both
/// units.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_of_a_gpu_is_an_extended_resource_by_the_policy() {
    let resources = by_resource("half", "example.com/half-gpu", &["a", "b", "c"]);
    for (unit, percent) in [("Percent", "(50 %, "), ("Amounts", "  50 %  ")] {
        let policy = format!(
            "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {{name: halves}}\n\
             spec: {{rules: [{{modes: [TimeSlicing], shares: {{unit: {unit}, slots: 2}}}}]}}\n---\n"
        );
        for (line, all) in [("l4x1", 23034), ("h200x1", 143_771)] {
            let report = of(line, &format!("{policy}{resources}")).await;
            let found = memory_of_shares(&report);
            let found: Vec<u64> = found.into_values().filter_map(Result::ok).collect();
            assert_eq!(found, [all / 2, all / 2], "{line} {unit}");
            let text = render(&report, WIDE);
            assert!(text.contains(percent), "{text}");
        }
    }
}

/// Each output of `divvy claim` is a manifest that runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn manifests_of_divvy_claim_are_served() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/fixtures/claim");
    let all_modes = include_str!("../../../examples/all-modes.yaml");
    // The policies of the examples are for nodes with this label, which the demo's node has.
    for (line, claim, devices) in [
        ("h100x1", "gpu", 1),
        ("h100x2", "gpus-by-nvlink", 2),
        ("h100x1", "mig", 1),
        ("h100x2", "mig-pair", 2),
        ("h100x1", "share", 1),
        ("h100x1", "share-by-default", 1),
    ] {
        let file = folder.join(format!("{claim}.yaml"));
        let text = format!("{all_modes}---\n{}", fs_err::read_to_string(file).unwrap());
        let report = of(line, &text).await;
        assert_eq!(report.problems(), Vec::<String>::new(), "{claim}");
        // One container has all that is claimed, of which a program uses one partition.
        let several = claim == "mig-pair";
        let notes = &report.scenarios[0].notes;
        assert_eq!(notes.len(), usize::from(several), "{claim}: {notes:?}");
        assert_eq!(
            super::cases::devices(&served(&report)).len(),
            devices,
            "{claim}"
        );
    }
}
