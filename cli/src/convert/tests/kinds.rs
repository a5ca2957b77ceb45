//! Pods in objects of other projects.

use super::*;

/// Returns the last object of what an input becomes, with all that is said.
fn last(text: &str) -> (Node, String) {
    let converted = of(text);
    let said: Vec<String> = converted.all_notes().map(Note::to_string).collect();
    let said = said.join(
        "
",
    );
    (
        converted.documents.into_iter().next_back().unwrap().node,
        said,
    )
}

const GPU: &str = "{limits: {nvidia.com/gpu: \"2\"}}";

#[test]
fn a_spec_of_a_pod_is_found_without_a_template_around_it() {
    for (kind, path) in [
        ("LLMInferenceService", &["spec", "template"][..]),
        ("LLMInferenceService", &["spec", "prefill", "worker"]),
        // A kind and a field without a rule.
        ("Workload", &["spec", "group", "pods"]),
    ] {
        let mut text = format!(
            "apiVersion: serving.kserve.io/v1alpha1\nkind: {kind}\nmetadata: {{name: m}}\n"
        );
        for (depth, field) in path.iter().enumerate() {
            text += &format!("{}{field}:\n", "  ".repeat(depth));
        }
        let indent = "  ".repeat(path.len());
        text += &format!("{indent}containers: [{{name: c, image: i, resources: {GPU}}}]\n");
        let (object, said) = last(&text);
        let spec = object.at(path).unwrap();
        let claim = spec.at(&["resourceClaims"]).unwrap().items();
        assert_eq!(
            claim[0].text_at(&["resourceClaimTemplateName"]),
            Some("m-gpu")
        );
        let container = &spec.at(&["containers"]).unwrap().items()[0];
        assert_eq!(container.at(&["resources", "limits"]), None, "{said}");
        assert!(!said.contains("not converted"), "{said}");
        assert_eq!(said.contains("see that the kind takes"), kind == "Workload");
    }
}

#[test]
fn a_model_of_kserve_is_a_container() {
    let (object, said) = last(&format!(
        "apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {{name: m}}
spec: {{predictor: {{model: {{modelFormat: {{name: huggingface}}, resources: {GPU}}}}}}}
"
    ));
    let predictor = object.at(&["spec", "predictor"]).unwrap();
    assert!(predictor.at(&["resourceClaims"]).is_some(), "{said}");
    let model = predictor.at(&["model"]).unwrap();
    let claims = model.at(&["resources", "claims"]).unwrap().items();
    assert_eq!(claims.len(), 1);
    assert_eq!(model.at(&["name"]), None);
    assert_eq!(predictor.at(&["containers"]), None);
}

#[test]
fn a_nim_service_takes_its_claims_as_dra_resources() {
    let (object, said) = last(&format!(
        "apiVersion: apps.nvidia.com/v1alpha1
kind: NIMService
metadata: {{name: m}}
spec: {{authSecret: s, resources: {GPU}}}
"
    ));
    let spec = object.at(&["spec"]).unwrap();
    let claims = spec.at(&["draResources"]).unwrap().items();
    assert_eq!(
        claims[0].text_at(&["resourceClaimTemplateName"]),
        Some("m-gpu")
    );
    for gone in ["resources", "resourceClaims", "containers"] {
        assert_eq!(spec.at(&[gone]), None, "{said}");
    }
    assert!(
        said.contains("spec.tolerations: nvidia.com/gpu is tolerated"),
        "{said}"
    );
}

#[test]
fn claims_that_an_operator_makes_have_classes_of_divvy() {
    let devices = |fields: &str| {
        format!(
            "apiVersion: apps.nvidia.com/v1alpha1
kind: NIMService
metadata: {{name: m}}
spec: {{draResources: [{{claimCreationSpec: {{devices: [{{name: gpu, {fields}}}]}}}}]}}
"
        )
    };
    // The operator's default is a class of NVIDIA's.
    for fields in ["count: 1", "deviceClassName: gpu.nvidia.com"] {
        let text = of(&devices(fields)).yaml(true).unwrap();
        assert!(text.contains("deviceClassName: gpu.divvy.dev"), "{text}");
        assert!(text.contains("driverName: gpu.divvy.dev"), "{text}");
    }
    let by_index = devices("attributeSelectors: [{key: index, op: Equal, value: {intValue: 0}}]");
    refuses(&by_index, "no device of divvy has index");
    assert!(!of(&by_index).yaml(true).unwrap().contains("divvy.dev"));
}

/// KubeRay derives the number from extended resources, and not from claims.
#[test]
fn ray_gets_the_number_of_gpus_that_claims_have() {
    let group = |parameters: &str, limits: &str| {
        format!(
            "apiVersion: ray.io/v1
kind: RayCluster
metadata: {{name: m}}
spec:
  workerGroupSpecs:
  - {{groupName: w, {parameters}template: {{spec: {{containers: [{{name: c, resources: {{limits: {{{limits}}}}}}}]}}}}}}
"
        )
    };
    for (parameters, limits, expected) in [
        ("", "nvidia.com/gpu: 4", Some("4")),
        ("rayStartParams: {}, ", "nvidia.com/gpu: \"1\"", Some("1")),
        (
            "rayStartParams: {num-gpus: \"8\"}, ",
            "nvidia.com/gpu: 4",
            Some("8"),
        ),
        ("resources: {GPU: \"2\"}, ", "nvidia.com/gpu: 4", None),
        ("", "nvidia.com/mig-1g.5gb: 2", Some("2")),
        ("", "nvidia.com/gpu.shared: 2", None),
    ] {
        let (object, said) = last(&group(parameters, limits));
        let group = &object.at(&["spec", "workerGroupSpecs"]).unwrap().items()[0];
        let number = group.at(&["rayStartParams", "num-gpus"]);
        assert_eq!(number.and_then(Node::text), expected, "{limits}: {said}");
        assert!(
            group.at(&["template", "spec", "resourceClaims"]).is_some(),
            "{said}"
        );
    }
}

#[test]
fn the_first_line_says_that_whole_gpus_need_no_conversion() {
    let first = |text: &str| {
        let notes: Vec<String> = of(text).all_notes().map(Note::to_string).collect();
        notes.first().cloned().unwrap_or_default()
    };
    let pod = |limits: &str| pod_of(&[("c", limits)]);
    let all = "on Kubernetes 1.36 and later nothing here has to be converted";
    let some = "on Kubernetes 1.36 and later nothing has to be converted that asks for";
    for (text, expected) in [
        (pod("nvidia.com/gpu: 1"), Some(all)),
        (pod("nvidia.com/mig-1g.10gb: 1"), Some(all)),
        (
            pod("nvidia.com/gpu: 1").replace(
                "name: p}",
                "name: p, annotations: {nvidia.com/use-gputype: A100}}",
            ),
            None,
        ),
        (pod("nvidia.com/gpumem: 1024"), None),
        (
            pod("nvidia.com/gpu: 1") + "---\n" + &pod("nvidia.com/gpumem: 1024"),
            Some(some),
        ),
    ] {
        let said = first(&text);
        assert_eq!(said.contains("1.36"), expected.is_some(), "{said}");
        assert!(
            expected.is_none_or(|expected| said.contains(expected)),
            "{said}"
        );
    }
}

/// Their pods go on to ask by resource, which is not a failure for whole GPUs.
#[test]
fn kinds_without_claims_stay_whole_and_say_why() {
    let service = |limits: &str| {
        format!(
            "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: m}}
spec: {{template: {{spec: {{containers: [{{image: i, resources: {{limits: {{{limits}}}}}}}]}}}}}}
"
        )
    };
    let (whole, part) = (
        service("nvidia.com/gpu: 1"),
        service("nvidia.com/gpumem: 1024"),
    );
    let (said, complete) = said(&whole);
    assert!(
        complete && said[0].contains("Knative refuses claims"),
        "{said:?}"
    );
    refuses(&part, "Knative refuses claims");
    for text in [whole, part] {
        let nodes: Vec<Node> = of(&text).documents.into_iter().map(|d| d.node).collect();
        assert_eq!(nodes, yaml::documents("x", &text).unwrap());
    }
}

/// A pod that is not converted for its devices keeps its scheduler.
#[test]
fn what_is_not_converted_stays_whole() {
    for limits in [
        "volcano.sh/vgpu-number: 1",
        "nvidia.com/gpu: 1, nvidia.com/GA102GL_A10: 1",
        "nvidia.com/gpu: 1.5",
        "cpu: 1",
    ] {
        let text =
            pod_of(&[("c", limits)]).replace("spec:\n", "spec:\n  schedulerName: hami-scheduler\n");
        let nodes: Vec<Node> = of(&text).documents.into_iter().map(|d| d.node).collect();
        assert_eq!(nodes, yaml::documents("x", &text).unwrap(), "{limits}");
    }
}

#[test]
fn parts_that_no_longer_fit_together_are_noted_or_become_amounts() {
    let pod = |name: &str, memory: u64, cores: u64| {
        pod_of(&[(
            "c",
            &format!("nvidia.com/gpumem-percentage: {memory}, nvidia.com/gpucores: {cores}"),
        )])
        .replace("name: p}", &format!("name: {name}}}"))
    };
    let both = pod("a", 40, 60) + "---\n" + &pod("b", 60, 40);
    let (notes, complete) = said(&both);
    assert!(
        complete && notes.iter().any(|note| note.contains("(60 + 60 > 100)")),
        "{notes:?}"
    );
    let settings = Settings {
        gpu_memory: Some(80 << 10),
    };
    let converted = convert(yaml::documents("x", &both).unwrap(), settings);
    let text = converted.yaml(true).unwrap();
    assert!(
        text.contains("memory: 32Gi\n              cores: 60"),
        "{text}"
    );
    assert!(
        text.contains("memory: 48Gi\n              cores: 40"),
        "{text}"
    );
    assert!(!text.contains("percent:"), "{text}");
}
