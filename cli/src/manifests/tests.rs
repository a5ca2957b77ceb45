use super::Manifests;

fn refused(text: &str) -> String {
    format!("{:#}", Manifests::parse("x.yaml", text).unwrap_err())
}

#[test]
fn documents_are_sorted_by_kind_and_other_kinds_are_passed_over() {
    let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n---\n# nothing\n---\napiVersion: v1\nkind: List\nitems:\n- {apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c}}\n- {apiVersion: v1, kind: Service, metadata: {name: s}}\n";
    let read = Manifests::parse("x.yaml", text).unwrap();
    assert_eq!((read.pods.len(), read.claims.len()), (1, 1));
    assert_eq!(read.passed_over, ["Service s"]);
    let old = "apiVersion: resource.k8s.io/v1beta1\nkind: ResourceClaim\n";
    assert!(
        refused(old).contains("write resource.k8s.io/v1"),
        "{}",
        refused(old)
    );
    assert!(refused("kind: Pod\n").contains("apiVersion and kind must be set"));
    assert!(refused("---\n").ends_with("no objects in it"));
}

/// A file that asks for a GPU is run, or named as one that is not.
#[test]
fn pods_of_other_kinds_run_and_the_rest_that_asks_is_named() {
    let gpu = "resources: {limits: {nvidia.com/gpu: 1}}";
    let object = |version: &str, kind: &str, spec: &str| {
        format!(
            "apiVersion: {version}\nkind: {kind}\nmetadata: {{name: m, namespace: t}}\n{spec}\n"
        )
    };
    for (version, kind, spec, pods) in [
        (
            "serving.kserve.io/v1alpha1",
            "LLMInferenceService",
            format!("spec: {{template: {{containers: [{{name: main, {gpu}}}]}}}}"),
            1,
        ),
        (
            "apps.nvidia.com/v1alpha1",
            "NIMService",
            format!("spec: {{{gpu}}}"),
            1,
        ),
        (
            "serving.kserve.io/v1beta1",
            "InferenceService",
            format!("spec: {{predictor: {{model: {{{gpu}}}}}}}"),
            1,
        ),
        (
            "example.com/v1",
            "Fleet",
            format!("spec: {{a: {{containers: [{{name: c, image: i, {gpu}}}]}}, b: {{containers: [{{name: c, image: i}}]}}}}"),
            2,
        ),
        (
            "example.com/v1",
            "Vertex",
            format!("spec: {{container: {{image: i, {gpu}}}}}"),
            0,
        ),
        (
            "v1",
            "ConfigMap",
            "data: {c: \"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\"}"
                .to_owned(),
            0,
        ),
        (
            "kustomize.config.k8s.io/v1beta1",
            "Kustomization",
            "resources: [a.yaml]".to_owned(),
            0,
        ),
    ] {
        let read = Manifests::parse("x", &object(version, kind, &spec)).unwrap();
        assert_eq!(read.pods.len(), pods, "{kind}: {read:?}");
        assert_eq!(read.not_run.is_empty(), pods > 0, "{kind}: {read:?}");
        assert!(read.passed_over.is_empty(), "{kind}: {read:?}");
        if let Some(pod) = read.pods.first() {
            let spec = pod.spec.as_ref().unwrap();
            assert!(spec.containers[0].resources.is_some(), "{kind}: {pod:?}");
            assert_eq!(pod.metadata.namespace.as_deref(), Some("t"));
        }
    }
    let plain = object("v1", "ConfigMap", "data: {a: b}");
    let read = Manifests::parse("x", &plain).unwrap();
    assert_eq!(read.passed_over, ["ConfigMap m"]);
}

#[test]
fn workloads_become_the_pods_of_their_controllers() {
    let template = "template: {spec: {containers: []}}";
    for (version, kind, spec, pods) in [
        (
            "apps/v1",
            "Deployment",
            format!("replicas: 2, {template}"),
            2,
        ),
        ("apps/v1", "ReplicaSet", template.to_owned(), 1),
        (
            "apps/v1",
            "StatefulSet",
            format!("replicas: 3, {template}"),
            3,
        ),
        ("apps/v1", "DaemonSet", template.to_owned(), 1),
        (
            "batch/v1",
            "Job",
            format!("parallelism: 2, completions: 5, {template}"),
            2,
        ),
        (
            "batch/v1",
            "Job",
            format!("parallelism: 5, completions: 2, {template}"),
            2,
        ),
        ("batch/v1", "Job", format!("completions: 5, {template}"), 1),
        (
            "batch/v1",
            "CronJob",
            format!("schedule: '@daily', jobTemplate: {{spec: {{{template}}}}}"),
            1,
        ),
        (
            "apps/v1",
            "Deployment",
            format!("replicas: 0, {template}"),
            0,
        ),
    ] {
        let text = format!(
            "{{apiVersion: {version}, kind: {kind}, metadata: {{name: w, namespace: ns}}, spec: {{{spec}}}}}"
        );
        let read = Manifests::parse("x", &text).unwrap();
        let all = read.all_pods();
        assert_eq!(all.len(), pods, "{kind}");
        if let Some(pod) = all.last() {
            assert_eq!(pod.metadata.name, Some(format!("w-{}", pods - 1)));
            assert_eq!(pod.metadata.namespace.as_deref(), Some("ns"));
        }
    }
    let text = "{apiVersion: batch/v1, kind: Job, metadata: {name: w}, spec: {template: {spec: {container: []}}}}";
    assert_eq!(
        refused(text),
        "x.yaml, document 1: Job w: unknown field \"spec.template.spec.container\" (did you mean \"containers\"?)"
    );
}

fn names(text: &str) -> Vec<String> {
    let pods = Manifests::parse("x", text).unwrap().all_pods();
    pods.into_iter()
        .filter_map(|pod| pod.metadata.name)
        .collect()
}

/// A document with a kind, its metadata and its spec.
fn document(kind: &str, meta: &str, spec: &str) -> String {
    let version = match kind {
        "Job" => "batch/v1",
        "Pod" => "v1",
        "ResourceClaim" => "resource.k8s.io/v1",
        _ => "apps/v1",
    };
    format!(
        "{{apiVersion: {version}, kind: {kind}, metadata: {{{meta}}}, spec: {{{spec}}}}}\n---\n"
    )
}

#[test]
fn generated_names_make_objects_of_their_own() {
    let job = document(
        "Job",
        "generateName: train-",
        "template: {spec: {containers: []}}",
    );
    let pod = document("Pod", "generateName: train-", "containers: []");
    let all = names(&[job.clone(), job, pod].concat());
    assert_eq!(all, ["train-bbbbb-0", "train-bbbbc-0", "train-bbbbd"]);
}

#[test]
fn a_pod_is_known_by_the_kind_and_namespace_of_its_owner() {
    let spec = "template: {spec: {containers: []}}";
    let [job, set, other] = [
        ("Job", "name: w"),
        ("StatefulSet", "name: w"),
        ("Job", "name: w, namespace: other"),
    ]
    .map(|(kind, meta)| document(kind, meta, spec));
    let pod = document("Pod", "name: w-0, namespace: other", "containers: []");
    let read = Manifests::parse("x", &[job, set, other, pod].concat()).unwrap();
    let all = read.all_pods();
    let all: Vec<_> = all
        .iter()
        .map(|pod| {
            (
                super::namespace(&pod.metadata),
                pod.metadata.name.clone().unwrap(),
            )
        })
        .collect();
    let expected = [
        ("default", "w-job-0"),
        ("default", "w-0"),
        ("other", "w-job-0"),
        ("other", "w-0"),
    ];
    assert_eq!(all, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
}

#[test]
fn an_object_that_is_applied_again_is_changed_or_refused() {
    let deployment = |replicas: u32, app: &str| {
        let spec = format!(
            "replicas: {replicas}, selector: {{matchLabels: {{app: {app}}}}}, template: {{spec: {{containers: []}}}}"
        );
        document("Deployment", "name: w", &spec)
    };
    let read =
        |first: String, second: String| Manifests::parse("x", &[first, second].concat()).unwrap();
    let changed = read(deployment(1, "a"), deployment(3, "a"));
    assert_eq!((changed.all_pods().len(), changed.refused.len()), (3, 0));
    let selector = read(deployment(1, "a"), deployment(1, "b"));
    assert_eq!(
        selector.refused,
        ["Deployment default/w: spec.selector: Invalid value: field is immutable"]
    );
    let claim = |spec: &str| document("ResourceClaim", "name: c", spec);
    assert_eq!(read(claim(""), claim("")).claims.len(), 1);
    let refused = read(claim(""), claim("devices: {requests: [{name: a}]}")).refused;
    assert!(
        refused[0].starts_with("ResourceClaim default/c: spec: Invalid value: field is immutable"),
        "{refused:?}"
    );
    let pod = |image: &str| {
        document(
            "Pod",
            "name: p",
            &format!("containers: [{{name: c, image: {image}}}]"),
        )
    };
    assert_eq!(read(pod("a"), pod("b")).refused.len(), 1);
}

#[test]
fn workloads_that_wait_make_no_pods_but_those_of_a_queue() {
    let job = |labels: &str| {
        let meta = format!("name: w, labels: {{{labels}}}");
        document(
            "Job",
            &meta,
            "suspend: true, template: {spec: {containers: []}}",
        )
    };
    assert_eq!(names(&job("")), Vec::<String>::new());
    assert_eq!(names(&job("kueue.x-k8s.io/queue-name: q")), ["w-0"]);
    let paused = "paused: true, template: {spec: {containers: []}}";
    assert_eq!(
        names(&document("Deployment", "name: w", paused)),
        Vec::<String>::new()
    );
}
