//! Commands of the READMEs in `examples/`: their names are those of the example's manifests. The
//! end-to-end case [`EXAMPLES`] applies the same files.

use serde_json::Value;

use crate::table::{EXAMPLES, How};

/// The manifests of an example.
pub(crate) struct Example {
    /// Name of its folder.
    pub(crate) name: String,
    manifests: Vec<Value>,
}

const NO: How = How::No("the case reads the API; the names are those of the manifests");

impl Example {
    pub(crate) fn new(name: &str, manifests: &str) -> Self {
        let manifests = manifests
            .split("\n---\n")
            .map(|text| serde_saphyr::from_str(text).unwrap())
            .collect();
        Self {
            name: name.to_owned(),
            manifests,
        }
    }

    /// Returns how a command is tried, or what is wrong with it; `None` for a command that is not
    /// about the example's own objects.
    pub(crate) fn how(&self, words: &[&str]) -> Option<Result<How, String>> {
        let file = format!("examples/{}/manifests.yaml", self.name);
        match words {
            ["kubectl", "apply", "-f", path]
            | ["kubectl", "delete", "--ignore-not-found", "-f", path]
                if *path == file =>
            {
                Some(Ok(How::By(EXAMPLES)))
            }
            ["kubectl", "-n", namespace, rest @ ..] => {
                Some(if *namespace == format!("divvy-{}", self.name) {
                    self.inside(rest)
                } else {
                    Err(format!("{namespace} is not the example's namespace"))
                })
            }
            _ => None,
        }
    }

    /// Decides on a command in the namespace of the example.
    fn inside(&self, words: &[&str]) -> Result<How, String> {
        match words {
            // The case waits for all pods and Jobs, and reads the logs of their containers.
            ["get", "pods"] => Ok(How::By(EXAMPLES)),
            ["wait", "--for=condition=complete", job] => self.has(job).map(|()| How::By(EXAMPLES)),
            ["logs", "-l", label, "--prefix"] => {
                let (key, value) = label.split_once('=').unwrap_or_default();
                if self
                    .pods()
                    .any(|pod| *at(pod, &format!("/metadata/labels/{key}")) == *value)
                {
                    Ok(How::By(EXAMPLES))
                } else {
                    Err(format!("no pod of the example has the label {label}"))
                }
            }
            ["logs", of, "-c", container] => {
                let is_there = self.pods().any(|pod| {
                    let all = at(pod, "/spec/containers").as_array();
                    all.is_some_and(|all| all.iter().any(|one| *at(one, "/name") == *container))
                });
                if is_there {
                    self.has(of).map(|()| How::By(EXAMPLES))
                } else {
                    Err(format!("no pod of the example has a container {container}"))
                }
            }
            ["logs", of] => self.has(of).map(|()| How::By(EXAMPLES)),
            ["get", "resourceclaims", ..] => Ok(NO),
            ["describe", kind, name] => self.has(&format!("{kind}/{name}")).map(|()| NO),
            ["delete", "pod", names @ ..] => names
                .iter()
                .try_for_each(|name| self.has(name))
                .map(|()| NO),
            other => Err(format!(
                "{other:?} is in no rule of divvy/tests/documents/example.rs"
            )),
        }
    }

    /// Checks that the manifests have an object, written `KIND/NAME`, or the name of a pod.
    fn has(&self, written: &str) -> Result<(), String> {
        let (kind, name) = written.split_once('/').unwrap_or(("pod", written));
        let found = self.manifests.iter().any(|object| {
            let of_kind = at(object, "/kind").as_str().unwrap_or_default();
            of_kind.eq_ignore_ascii_case(kind) && *at(object, "/metadata/name") == name
        });
        found
            .then_some(())
            .ok_or_else(|| format!("the example has no {kind} {name}"))
    }

    /// Pods and templates of pods.
    fn pods(&self) -> impl Iterator<Item = &Value> {
        self.manifests.iter().map(|object| {
            if *at(object, "/kind") == "Pod" {
                object
            } else {
                at(object, "/spec/template")
            }
        })
    }
}

/// Returns the value at a place; null if nothing is there.
fn at<'v>(value: &'v Value, place: &str) -> &'v Value {
    value.pointer(place).unwrap_or(&Value::Null)
}

#[test]
fn commands_with_names_that_an_example_lacks_are_found() {
    let example = Example::new(
        "x",
        "kind: Pod\nmetadata: {name: a, labels: {app: p}}\nspec: {containers: [{name: c}]}\n",
    );
    for (line, wrong) in [
        ("kubectl apply -f examples/x/manifests.yaml", ""),
        ("kubectl -n divvy-x logs a", ""),
        ("kubectl -n divvy-x logs a -c c", ""),
        ("kubectl -n divvy-x logs -l app=p --prefix", ""),
        ("kubectl -n divvy-y logs a", "divvy-y"),
        ("kubectl -n divvy-x logs b", "no pod b"),
        ("kubectl -n divvy-x logs a -c d", "container d"),
        ("kubectl -n divvy-x logs -l app=q --prefix", "app=q"),
        (
            "kubectl -n divvy-x describe resourcequota a",
            "no resourcequota a",
        ),
        ("kubectl -n divvy-x explode", "no rule"),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        let said = example.how(&words).unwrap().err().unwrap_or_default();
        assert!(
            said.is_empty() == wrong.is_empty() && said.contains(wrong),
            "{line}: {said:?}"
        );
    }
    assert!(
        example
            .how(&["kubectl", "apply", "-f", "examples/y/manifests.yaml"])
            .is_none()
    );
}
