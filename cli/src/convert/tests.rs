use super::*;

mod corpus;
mod kinds;
mod lacks;

/// Inputs in fixtures/convert/in; true if all of it can be converted.
pub(crate) const INPUTS: [(&str, bool); 11] = [
    ("device-plugin", true),
    ("gpu-manager", true),
    ("hami", true),
    ("kai", true),
    ("kai-fraction", true),
    ("nvidia-dra", true),
    ("list", true),
    ("gke", true),
    ("hami-dra", true),
    ("mig-shared", true),
    ("refused", false),
];

/// Converts an input.
pub(crate) fn converted(name: &str) -> Converted {
    let path = format!(
        "{}/fixtures/convert/in/{name}.yaml",
        env!("CARGO_MANIFEST_DIR")
    );
    of(&fs_err::read_to_string(path).unwrap())
}

fn of(text: &str) -> Converted {
    convert(yaml::documents("x", text).unwrap(), Settings::default())
}

#[test]
fn each_input_becomes_its_golden_file() {
    for (name, complete) in INPUTS {
        let converted = converted(name);
        let text = converted.yaml(true).unwrap();
        crate::golden::same(&format!("convert/out/{name}.yaml"), text.trim_end());
        assert_eq!(converted.is_complete(), complete, "{name}");
        assert!(converted.found_any, "{name}");
    }
}

#[test]
fn what_is_converted_is_not_converted_again() {
    for (name, _) in INPUTS {
        let first = converted(name).yaml(true).unwrap();
        let again = of(&first);
        let nodes: Vec<Node> = again.documents.into_iter().map(|d| d.node).collect();
        assert_eq!(nodes, yaml::documents("x", &first).unwrap(), "{name}");
    }
}

/// A pod with two init containers, a sidecar between them, and two containers, with these numbers
/// of GPUs.
fn pod_with(gpus: [u32; 5]) -> String {
    let limits = |gpus: u32| format!("resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}");
    let [first, sidecar, second, main, other] = gpus.map(limits);
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  initContainers:
  - {{name: first, {first}}}
  - {{name: sidecar, restartPolicy: Always, {sidecar}}}
  - {{name: second, {second}}}
  containers:
  - {{name: main, {main}}}
  - {{name: other, {other}}}
"
    )
}

/// Returns the requests of the template, and for each container the requests that it uses.
fn links(converted: &Converted) -> (Vec<String>, Vec<String>) {
    let at =
        |node: &Node, path: &[&str]| node.at(path).map(Node::items).unwrap_or_default().to_vec();
    let mut requests = Vec::new();
    let mut users = Vec::new();
    for Document { node, .. } in &converted.documents {
        for request in at(node, &["spec", "spec", "devices", "requests"]) {
            let count = request.at(&["exactly", "count"]).and_then(Node::scalar);
            let name = request.text_at(&["name"]).unwrap();
            requests.push(format!("{name} {}", count.unwrap_or("1".to_owned())));
        }
        for list in ["initContainers", "containers"] {
            for container in at(node, &["spec", list]) {
                let used = at(&container, &["resources", "claims"]);
                let used = used
                    .iter()
                    .map(|claim| claim.text_at(&["request"]).unwrap_or("all"));
                let name = container.text_at(&["name"]).unwrap();
                users.extend(used.map(|used| format!("{name} {used}")));
            }
        }
    }
    (requests, users)
}

#[test]
fn init_containers_use_the_devices_of_later_ones_where_they_are_enough() {
    for (gpus, requests, users) in [
        ([0, 0, 0, 1, 0], &["gpu 1"][..], &["main all"][..]),
        ([1, 0, 0, 1, 0], &["gpu 1"], &["first all", "main all"]),
        (
            [1, 0, 1, 2, 1],
            &["main 2", "other 1"],
            &["first main", "second main", "main main", "other other"],
        ),
        // Of two that need more, the smaller one uses what the bigger one has.
        (
            [2, 0, 3, 1, 0],
            &["main 1", "second 3"],
            &["first second", "second second", "main main"],
        ),
        // A sidecar goes on, with its own.
        (
            [1, 1, 0, 0, 0],
            &["sidecar 1", "first 1"],
            &["first first", "sidecar sidecar"],
        ),
        ([0, 0, 0, 0, 0], &[], &[]),
    ] {
        let converted = of(&pod_with(gpus));
        assert!(converted.is_complete());
        let (made, used) = links(&converted);
        assert_eq!(made, requests, "{gpus:?}");
        assert_eq!(used, users, "{gpus:?}");
    }
}

#[test]
fn a_claim_has_no_more_devices_than_kubernetes_takes() {
    let converted = of(&pod_with([0, 0, 0, 17, 16]));
    let notes: Vec<String> = converted.all_notes().map(Note::to_string).collect();
    assert_eq!(
        notes,
        [
            "not converted: Pod default/p: spec.containers: 33 devices: a claim has 32 at most; spread them over several pods"
        ]
    );
}

#[test]
fn names_that_are_taken_are_not_used_twice() {
    let template =
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: p-gpu}\n";
    let pod = "apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  resourceClaims: [{name: gpu, resourceClaimTemplateName: p-gpu}]
  containers:
  - {name: main, resources: {claims: [{name: gpu}], limits: {nvidia.com/gpu: 1}}}
";
    let converted = of(&format!("{template}---\n{pod}"));
    let text = converted.yaml(true).unwrap();
    assert!(text.contains("name: p-pod-gpu\n"), "{text}");
    assert!(
        text.contains("- name: gpu-2\n    resourceClaimTemplateName: p-pod-gpu\n"),
        "{text}"
    );
    assert!(
        text.contains("claims:\n      - name: gpu\n      - name: gpu-2\n"),
        "{text}"
    );
}

#[test]
fn other_manifests_stay_as_they_are() {
    let text = "# Nothing of GPUs.
apiVersion: v1
kind: Pod
metadata:
  name: p
spec:
  containers:
  - name: c
    image: x
    resources:
      limits:
        cpu: 1
        example.com/gpu: 1
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata:
  name: nic
spec:
  devices:
    requests:
    - name: nic
      exactly:
        deviceClassName: nic.example.com
";
    let converted = of(text);
    assert!(!converted.found_any && converted.is_complete());
    assert_eq!(
        format!("# Nothing of GPUs.\n{}", converted.yaml(true).unwrap()),
        text
    );
}

#[test]
fn a_sandboxed_runtime_is_no_place_for_a_converted_pod() {
    let text = |class: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n  runtimeClassName: {class}\n  containers: [{{name: c, resources: {{limits: {{nvidia.com/gpu: 1}}}}}}]\n"
        )
    };
    for (class, expected) in [
        (
            "gvisor",
            "not converted: Pod default/p: spec.runtimeClassName: \"gvisor\" runs the pod in gVisor",
        ),
        (
            "kata-clh",
            "which is not supported: the claim's limits may not hold",
        ),
    ] {
        let notes: Vec<String> = of(&text(class)).all_notes().map(Note::to_string).collect();
        let is_said = notes.iter().any(|note| note.contains(expected));
        assert!(is_said, "{class}: {notes:?}");
    }
    let notes: Vec<String> = of(&text("nvidia"))
        .all_notes()
        .map(Note::to_string)
        .collect();
    let is_said = notes.iter().any(|note| note.contains("runtimeClassName"));
    assert!(!is_said, "{notes:?}");
}

/// Each line of annotations with what is said of it.
#[test]
fn no_annotation_is_dropped_in_silence() {
    let pod = |annotation: &str, gpus: u32| {
        format!(
            "apiVersion: v1
kind: Pod
metadata: {{name: p, annotations: {{{annotation}}}}}
spec: {{containers: [{{name: c, resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}}}]}}
"
        )
    };
    for (annotation, gpus, says) in [
        ("nvidia.com/use-gputype: ''", 1, "is empty: removed"),
        (
            "nvidia.com/use-gputype: A100",
            0,
            "no container asks for a GPU",
        ),
        ("nvidia.com/numa-bind: 'true'", 1, "one NUMA node anyway"),
        (
            "nvidia.com/numa-bind: 'false'",
            2,
            "a claim is so without it",
        ),
        (
            "nvidia.com/vgpu-mode: hami-core",
            1,
            "a claim is so without it",
        ),
        ("nvidia.com/vgpu-mode: mps", 1, "equal slots by a policy"),
        (
            "gpu-fraction-num-devices: '2'",
            1,
            "means nothing without gpu-fraction",
        ),
        (
            "gpu-fraction-container-name: c",
            1,
            "means nothing without gpu-fraction",
        ),
        (
            "hami.io/vgpu-node: n1",
            1,
            "was written when the pod was placed",
        ),
        ("kai.scheduler/topology: t", 1, "it stays, without effect"),
        (
            "hami.io/other: x",
            1,
            "there is no rule for this annotation",
        ),
    ] {
        let converted = of(&pod(annotation, gpus));
        let notes: Vec<String> = converted.all_notes().map(Note::to_string).collect();
        let key = annotation.split(": ").next().unwrap();
        let found = notes.iter().find(|note| note.contains(key));
        assert!(
            found.is_some_and(|note| note.contains(says)),
            "{annotation}: {notes:?}"
        );
    }
    let two = of(&pod("nvidia.com/numa-bind: 'true'", 2))
        .yaml(true)
        .unwrap();
    assert!(
        two.contains("- matchAttribute: resource.kubernetes.io/numaNode"),
        "{two}"
    );
}

#[test]
fn amounts_of_partitions_have_a_unit() {
    let text = "apiVersion: v1
kind: Pod
metadata: {name: p, annotations: {nvidia.com/vgpu-mode: mig}}
spec: {containers: [{name: c, resources: {limits: {nvidia.com/gpumem-percentage: 50}}}]}
";
    let converted = of(text);
    let said = converted
        .all_notes()
        .map(Note::to_string)
        .collect::<String>();
    assert!(
        said.contains("a partition has no percentage: write nvidia.com/gpumem"),
        "{said}"
    );
}

/// A pod whose containers have these names and limits.
fn pod_of(containers: &[(&str, &str)]) -> String {
    let line = |(name, limits): &(&str, &str)| {
        format!("  - {{name: {name}, image: i, resources: {{limits: {{{limits}}}}}}}\n")
    };
    let lines: String = containers.iter().map(line).collect();
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n  containers:\n{lines}")
}

#[test]
fn no_claim_has_two_requests_of_one_name() {
    let long = "x".repeat(60);
    let two = "nvidia.com/gpu: 1, nvidia.com/mig-1g.10gb: 1";
    let one = "nvidia.com/gpu: 1";
    for (containers, expected) in [
        (
            &[("a", two), ("a-gpu", one)][..],
            &["a-gpu-2", "a-mig-1g-10gb", "a-gpu"][..],
        ),
        (
            &[("request-0", one), (&long, two)],
            &["request-0", "request-1", "request-2"],
        ),
        (
            &[("request-1", one), (&long, two)],
            &["request-1", "request-0", "request-2"],
        ),
        // Two resources of one kind, and two kinds that are written alike.
        (
            &[(
                "a",
                "nvidia.com/gpu: 1, deviceclass.resource.kubernetes.io/gpu.nvidia.com: 1",
            )],
            &["a-gpu", "a-gpu-2"],
        ),
        (
            &[(
                "a",
                "nvidia.com/mig-1g.10gb.me: 1, nvidia.com/mig-1g.10gb-me: 1",
            )],
            &["a-mig-1g-10gb-me", "a-mig-1g-10gb-me-2"],
        ),
    ] {
        let (requests, users) = links(&of(&pod_of(containers)));
        let mut names: Vec<&str> = requests
            .iter()
            .filter_map(|request| request.split(' ').next())
            .collect();
        assert_eq!(names, expected, "{containers:?}");
        let used = users.iter().filter_map(|user| user.split(' ').nth(1));
        assert!(used.eq(names.iter().copied()), "{users:?}");
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), expected.len(), "{containers:?}");
    }
}

#[test]
fn more_devices_than_any_number_are_too_many() {
    for each in ["18446744073709551615", "\"9223372036854775808\""] {
        let limits = format!("nvidia.com/gpu: {each}");
        let converted = of(&pod_of(&[("a", &limits), ("b", &limits)]));
        let said: Vec<String> = converted.all_notes().map(Note::to_string).collect();
        assert!(
            said.iter()
                .any(|note| note.contains("a claim has 32 at most")),
            "{each}: {said:?}"
        );
        assert!(!converted.is_complete());
    }
    // The requests that a config is for are counted, too.
    let request = |name: &str| {
        format!(
            "{{name: {name}, exactly: {{deviceClassName: gpu.nvidia.com, count: 9223372036854775808}}}}"
        )
    };
    let converted = of(&format!(
        "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: c}}
spec:
  devices:
    requests: [{}, {}]
    config: [{{opaque: {{driver: gpu.nvidia.com, parameters: {{kind: GpuConfig, sharing: {{strategy: MPS}}}}}}}}]
",
        request("a"),
        request("b")
    ));
    let said: String = converted.all_notes().map(Note::to_string).collect();
    assert!(said.contains("MPS of one GPU or partition"), "{said}");
}

/// Returns what is said of an input.
fn said(text: &str) -> (Vec<String>, bool) {
    let converted = of(text);
    let notes = converted.all_notes().map(Note::to_string).collect();
    (notes, converted.is_complete())
}

#[track_caller]
fn refuses(text: &str, why: &str) {
    let (notes, complete) = said(text);
    let refused = |note: &String| note.starts_with("not converted: ") && note.contains(why);
    assert!(!complete && notes.iter().any(refused), "{text}: {notes:?}");
}

#[test]
fn a_request_by_gkes_labels_is_never_a_whole_gpu() {
    let pod = |spec: &str| {
        format!(
            "apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  {spec}
  containers: [{{name: c, resources: {{limits: {{nvidia.com/gpu: 1}}}}}}]
"
        )
    };
    let by_affinity = |operator: &str| {
        let key = "cloud.google.com/gke-gpu-partition-size";
        pod(&format!(
            "affinity: {{nodeAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: {{nodeSelectorTerms: [{{matchExpressions: \
             [{{key: {key}, operator: {operator}, values: [1g.5gb]}}]}}]}}}}}}"
        ))
    };
    refuses(&by_affinity("Exists"), "is a request on GKE");
    let two = by_affinity("In").replace("[1g.5gb]", "[1g.5gb, 2g.10gb]");
    refuses(&two, "is a request on GKE");
    // One value of all nodes is the same as a node selector.
    let text = of(&by_affinity("In")).yaml(true).unwrap();
    assert!(text.contains("profile == \"1g.5gb\""), "{text}");
    assert!(!text.contains("affinity:"), "{text}");
    assert!(said(&by_affinity("NotIn")).1);
    let selector = |label: &str| {
        pod(&format!(
            "nodeSelector: {{cloud.google.com/gke-gpu-{label}}}"
        ))
    };
    refuses(&selector("partition-size: small"), "is not a MIG profile");
    refuses(&selector("sharing-strategy: none"), "is not a strategy");
    let text = of(&selector("sharing-strategy: time-sharing"))
        .yaml(true)
        .unwrap();
    assert!(text.contains("deviceClassName: share.divvy.dev"), "{text}");
    // A pod that asks for no GPU loses the labels, with a word.
    let none = selector("sharing-strategy: mps").replace("gpu: 1", "gpu: 0");
    let (notes, complete) = said(&none);
    let of_none = notes
        .iter()
        .any(|note| note.contains("no container asks for a GPU"));
    assert!(complete && of_none, "{notes:?}");
}

#[test]
fn taints_that_extended_resources_tolerated_are_tolerated() {
    let pod = |tolerations: &str, limits: &str| {
        let pod = pod_of(&[("c", limits)]);
        pod.replace(
            "spec:\n",
            &format!("spec:\n  tolerations: [{tolerations}]\n"),
        )
    };
    let gpu = "key: nvidia.com/gpu\n    operator: Exists\n    effect: NoSchedule";
    for (tolerations, limits, added) in [
        ("", "nvidia.com/gpu: 1", Some(gpu)),
        (
            "",
            "nvidia.com/mig-1g.10gb: 1",
            Some("key: nvidia.com/mig-1g.10gb\n"),
        ),
        (
            "{key: other, operator: Exists}",
            "nvidia.com/gpu: 1",
            Some(gpu),
        ),
        (
            "{key: nvidia.com/gpu, value: \"true\"}",
            "nvidia.com/gpu: 1",
            Some(gpu),
        ),
        (
            "{operator: Exists, effect: NoExecute}",
            "nvidia.com/gpu: 1",
            Some(gpu),
        ),
        ("{operator: Exists}", "nvidia.com/gpu: 1", None),
        (
            "{key: nvidia.com/gpu, operator: Exists}",
            "nvidia.com/gpu: 1",
            None,
        ),
        ("", "nvidia.com/gpumem: 1024", None),
        ("", "nvidia.com/gpu: 0", None),
    ] {
        let input = pod(tolerations, limits);
        let converted = of(&input);
        let text = converted.yaml(true).unwrap();
        let noted = text.contains("ExtendedResourceToleration");
        assert_eq!(noted, added.is_some(), "{text}");
        assert!(added.is_none_or(|added| text.contains(added)), "{text}");
        assert!(converted.is_complete());
    }
}

/// A claim of this class, with fields beside it.
fn claim_of(class: &str, more: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: c}}
spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: {class}{more}}}}}]}}}}
"
    )
}

fn selecting(expression: &str) -> String {
    let expression = serde_json::to_string(expression).unwrap();
    format!(", selectors: [{{cel: {{expression: {expression}}}}}]")
}

#[test]
fn a_class_of_gpus_without_a_rule_is_not_passed_over() {
    for class in [
        "vgpu.example.com",
        "team-gpu",
        "mig.example.com",
        "gpu.hami.io",
    ] {
        refuses(&claim_of(class, ""), "there is no rule for class");
    }
    for class in ["gpu.amd.com", "gpu.intel.com"] {
        let (notes, complete) = said(&claim_of(class, ""));
        assert!(complete && notes.len() == 1, "{notes:?}");
    }
    for class in ["nic.example.com", "gpu.divvy.dev", "1g-10gb.mig.divvy.dev"] {
        assert!(!of(&claim_of(class, "")).found_any, "{class}");
    }
    let class =
        "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: team-gpu}\n---\n";
    let (notes, complete) = said(&format!("{class}{}", claim_of("team-gpu", "")));
    assert!(complete && notes.is_empty(), "{notes:?}");
    // Of HAMi's, what has no counterpart.
    let hami = "hami-core-gpu.project-hami.io";
    let attribute = format!("device.attributes[\"{hami}\"].type == \"A100\"");
    refuses(
        &claim_of(hami, &selecting(&attribute)),
        "what HAMi's driver publishes",
    );
    refuses(
        &claim_of(hami, ", capacity: {requests: {slots: 1}}"),
        "has memory and cores",
    );
}

#[test]
fn attributes_that_cannot_be_followed_are_refused() {
    let bound = "cel.bind(a, device.attributes[\"gpu.nvidia.com\"], a.index < 4)";
    let made = "device.attributes[\"gpu\" + \".nvidia.com\"].index < 4";
    for (class, expression) in [
        ("gpu.nvidia.com", bound),
        ("gpu.nvidia.com", made),
        ("other.example.com", bound),
    ] {
        refuses(
            &claim_of(class, &selecting(expression)),
            "convert cannot follow",
        );
    }
    // Not of NVIDIA's devices, as far as is known.
    assert!(!of(&claim_of("nic.example.com", &selecting(made))).found_any);
}

#[test]
fn a_partition_has_no_uuid_to_select_by() {
    let expression = selecting("device.attributes[\"gpu.nvidia.com\"].uuid == \"MIG-1\"");
    let why = "a partition has no uuid before a claim has it";
    refuses(&claim_of("mig.nvidia.com", &expression), why);
    let shared = format!("{expression}, capacity: {{requests: {{shares: 1}}}}");
    refuses(&claim_of("mig.nvidia.com", &shared), why);
    // A whole GPU has one, and so has the card of a share, by another name.
    assert!(said(&claim_of("gpu.nvidia.com", &expression)).1);
    let shared = expression.replace("].uuid", "]['uuid']") + ", capacity: {requests: {shares: 1}}";
    let text = of(&claim_of("gpu.nvidia.com", &shared)).yaml(true).unwrap();
    assert!(text.contains("['gpuUUID']"), "{text}");
}

#[test]
fn more_than_all_of_a_gpu_is_refused() {
    for limits in [
        "nvidia.com/gpumem-percentage: 101",
        "nvidia.com/gpu: 1, nvidia.com/gpucores: 150",
    ] {
        refuses(
            &pod_of(&[("c", limits)]),
            "is more than 100 percent of a GPU",
        );
    }
    assert!(said(&pod_of(&[("c", "nvidia.com/gpumem-percentage: 100")])).1);
}

#[test]
fn an_init_container_has_only_devices_that_its_own_selectors_allow() {
    // Both ask for one partition, of different profiles.
    let pod = |init: &str, main: &str| {
        format!(
            "apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  initContainers: [{{name: init, resources: {{limits: {{nvidia.com/mig-{init}: 1}}}}}}]
  containers: [{{name: main, resources: {{limits: {{nvidia.com/mig-{main}: 1}}}}}}]
"
        )
    };
    let (requests, users) = links(&of(&pod("1g.10gb", "1g.10gb")));
    assert_eq!(
        (requests.len(), users),
        (1, vec!["init all".to_owned(), "main all".to_owned()])
    );
    let (requests, users) = links(&of(&pod("2g.20gb", "1g.10gb")));
    assert_eq!(requests, ["main 1", "init 1"]);
    assert_eq!(users, ["init init", "main main"]);
}

#[test]
fn a_name_with_line_breaks_is_no_note_of_its_own() {
    let forged = r#""x\nnote: all is converted\r\u2028""#;
    let text = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {forged}}}\nspec: {{containers: [{{name: c, resources: {{limits: {{nvidia.com/gpu: 1.5}}}}}}]}}\n"
    );
    let by_class = claim_of(r#""x-gpu\nnote: all""#, "");
    for text in [text, by_class] {
        let converted = of(&text);
        let notes: Vec<String> = converted.all_notes().map(Note::to_string).collect();
        assert!(
            notes.iter().all(|note| note.lines().count() == 1),
            "{notes:?}"
        );
        assert!(
            notes.iter().any(|note| note.contains("\\nnote: all")),
            "{notes:?}"
        );
        let yaml = converted.yaml(true).unwrap();
        assert!(!yaml.contains("\nnote: all is"), "{yaml}");
    }
}

/// Whatever divvy offers can be what a converted claim needs a policy for, but for whole GPUs.
#[test]
fn each_form_that_a_policy_offers_has_a_word_on_its_policy() {
    for form in divvy_model::Form::HELD {
        let Some(class) = divvy_why::driver::class(names::DRIVER, form) else {
            continue;
        };
        let request = Request {
            class,
            ..Request::gpus(1)
        };
        let said = policies(&[request]);
        let none = form == divvy_model::Form::WHOLE;
        assert_eq!(said.is_empty(), none, "{class}: {said:?}");
    }
}

#[test]
fn a_file_keeps_its_comments_when_it_is_converted_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let pod = "# Trains.
apiVersion: v1
kind: Pod
metadata:
  name: train # nightly
spec:
  containers:
  - name: main
    image: registry.example.com/app:1
    resources:
      limits:
        # Two for the pipeline.
        nvidia.com/gpu: 2
        cpu: 4 # enough
";
    let other = "# Untouched, as it is written.\nkind: ConfigMap\ndata: {a: b}\n";
    fs_err::write(path("a.yaml"), pod).unwrap();
    fs_err::write(path("b.yaml"), other).unwrap();
    let args = Args {
        recursive: false,
        files: vec![folder.path().to_owned()],
        output: Output::Yaml,
        in_place: true,
        gpu_memory: None,
    };
    run(&args).unwrap();
    let text = fs_err::read_to_string(path("a.yaml")).unwrap();
    for line in [
        "# Trains.",
        "  name: train # nightly",
        "      # Two for the pipeline.",
        "        cpu: 4 # enough",
        "      - name: gpu",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert!(
        text.starts_with("apiVersion: resource.k8s.io/v1\n"),
        "{text}"
    );
    assert_eq!(fs_err::read_to_string(path("b.yaml")).unwrap(), other);
    let standard = Args {
        files: vec![PathBuf::from("-")],
        ..args
    };
    assert!(run(&standard).is_err());
}
