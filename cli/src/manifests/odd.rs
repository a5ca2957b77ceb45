//! Files that are no manifests yet, or of another system: templates of charts, values, and
//! configurations. Pure.

use serde_json::Value;

use crate::{Usage, convert};

/// Way to run what a kustomization builds.
pub(super) const KUSTOMIZE: &str = "is not built here: kubectl kustomize DIR | divvy demo -f -";
/// Way to run what a configuration of another system becomes.
pub(super) const CONFIGURES: &str =
    "configures another system: divvy convert -f FILE makes GpuPolicies of it";

/// Words of Helm's templates between `{{` and `}}`. Other programs have braces, too.
const OF_HELM: [&str; 7] = [
    ".Values",
    ".Release",
    ".Chart",
    "include ",
    "template ",
    "toYaml",
    "define ",
];
/// Fields of a kustomization, which may leave out its kind.
const OF_KUSTOMIZE: [&str; 6] = [
    "namePrefix",
    "nameSuffix",
    "patches",
    "patchesStrategicMerge",
    "configMapGenerator",
    "images",
];

/// Says whether a text is a template of a Helm chart.
pub(super) fn is_template(text: &str) -> bool {
    let mut actions = text.split("{{").skip(1);
    actions.any(|rest| {
        let action = rest.split_once("}}").map_or("", |(action, _)| action);
        OF_HELM.iter().any(|word| action.contains(word))
    })
}

/// Returns the error for a template that is not rendered.
pub(super) fn template(name: &str) -> anyhow::Error {
    Usage(format!(
        "{name} is a template, not YAML: render it first: helm template CHART | divvy demo -f -"
    ))
    .into()
}

/// Says what a document without a kind probably is, and what to do with it.
pub(super) fn no_object(document: &Value) -> String {
    let without = "apiVersion and kind must be set: this is no Kubernetes object";
    if convert::is_configuration(document) {
        return format!("this file {CONFIGURES}");
    }
    let is_text = |value: &Value| value.is_string();
    let resources = document.get("resources").and_then(Value::as_array);
    let files = resources.is_some_and(|all| !all.is_empty() && all.iter().all(is_text));
    if files || OF_KUSTOMIZE.iter().any(|key| document.get(key).is_some()) {
        return format!("a kustomization {KUSTOMIZE}");
    }
    match asks(document, "") {
        Some((path, resource)) => {
            let hub = ["singleuser", "hub", "jupyterhub", "kubespawner_override"];
            let hub = hub
                .iter()
                .any(|word| path.contains(word) || document.get(word).is_some());
            let page = if hub {
                " (JupyterHub: docs/ecosystem.md#jupyterhub)"
            } else {
                ""
            };
            format!(
                "{without}, and {path} asks for {resource}: values of a chart are rendered first: helm template CHART -f FILE | divvy demo -f \
                 -{page}"
            )
        }
        None => format!("{without} (the values of a Helm chart are for helm install -f)"),
    }
}

/// Returns the first resource of GPUs in a document, with the path of what asks for it.
fn asks(value: &Value, path: &str) -> Option<(String, String)> {
    match value {
        Value::Object(fields) => fields.iter().find_map(|(name, value)| {
            if name.starts_with("nvidia.com/") {
                return Some((path.to_owned(), name.clone()));
            }
            let dot = if path.is_empty() { "" } else { "." };
            asks(value, &format!("{path}{dot}{name}"))
        }),
        Value::Array(items) => (items.iter().enumerate())
            .find_map(|(number, item)| asks(item, &format!("{path}[{number}]"))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_known_by_the_words_of_helm() {
        for (text, expected) in [
            ("image: \"{{ .Values.image }}\"", true),
            ("name: {{ include \"x.name\" . }}", true),
            ("args: [\"{{workflow.parameters.message}}\"]", false),
            ("text: a template of include files", false),
        ] {
            assert_eq!(is_template(text), expected, "{text}");
        }
    }

    #[test]
    fn a_document_without_a_kind_is_named_as_what_it_is() {
        for (document, expected) in [
            (
                serde_json::json!({"version": "v1", "mig-configs": {"all": [{"devices": "all", "mig-enabled": true, "mig-devices": {"1g.10gb": 7}}]}}),
                "this file configures another system: divvy convert",
            ),
            (
                serde_json::json!({"resources": ["pod.yaml"]}),
                "kubectl kustomize DIR",
            ),
            (
                serde_json::json!({"namePrefix": "x-"}),
                "kubectl kustomize DIR",
            ),
            (
                serde_json::json!({"singleuser": {"profileList": [{"kubespawner_override": {"extra_resource_limits": {"nvidia.com/mig-1g.10gb": "1"}}}]}}),
                "singleuser.profileList[0].kubespawner_override.extra_resource_limits asks for nvidia.com/mig-1g.10gb: values of a chart are \
                 rendered first: helm template CHART -f FILE | divvy demo -f - (JupyterHub: docs/ecosystem.md#jupyterhub)",
            ),
            (
                serde_json::json!({"resources": {"limits": {"nvidia.com/gpu": 1}}}),
                "resources.limits asks for nvidia.com/gpu",
            ),
            (
                serde_json::json!({"replicaCount": 1}),
                "for helm install -f",
            ),
        ] {
            let said = no_object(&document);
            assert!(said.contains(expected), "{said}");
        }
    }
}
