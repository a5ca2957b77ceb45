//! Objects of a cluster: listed from its API server, or as `kubectl get … -o yaml` has printed
//! them.

use std::fmt::Debug;
use std::path::Path;

use anyhow::{Context, Result};
use kube::api::ListParams;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::manifests;

/// Objects in one answer of the server.
const PAGE: u32 = 500;

/// Lists the objects of a kind, of all namespaces, page by page.
pub async fn all<K>(client: &Client) -> Result<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::all(client.clone());
    let (mut found, mut params) = (Vec::new(), ListParams::default().limit(PAGE));
    loop {
        let page = api.list(&params).await;
        let page = page.with_context(|| K::plural(&()).into_owned())?;
        found.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(found),
        }
    }
}

/// The most values in a file of objects.
const MOST: usize = 1 << 32;

/// Objects of files, those of lists one by one.
#[derive(Debug, Default)]
pub struct Printed(Vec<Value>);

impl Printed {
    /// Reads a file, those of a folder, or standard input (`-`).
    pub fn read(path: &Path) -> Result<Self> {
        let mut all = Vec::new();
        for (name, text) in manifests::texts(path, false)? {
            let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(&text, large())
                .with_context(|| format!("{name} is not YAML"))?;
            for object in documents {
                add(object, &mut all);
            }
        }
        Ok(Self(all))
    }

    /// Returns the objects of a kind, in the order of the files.
    pub fn of<K: DeserializeOwned>(&self, kind: &str) -> Result<Vec<K>> {
        let is = |object: &&Value| object.get("kind").and_then(Value::as_str) == Some(kind);
        let read = |object: &Value| {
            let name = object.pointer("/metadata/name").and_then(Value::as_str);
            serde_json::from_value(object.clone())
                .with_context(|| format!("{kind} {}", name.unwrap_or("(no name)")))
        };
        self.0.iter().filter(is).map(read).collect()
    }
}

/// Returns settings for the objects of a cluster, whose slices have a hundred thousand values for
/// five nodes. The limits on aliases stay: a short text never stands for a long one.
fn large() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_nodes: MOST,
            max_events: MOST,
            max_documents: MOST,
            max_total_scalar_bytes: MOST,
        },
    }
}

fn add(mut object: Value, all: &mut Vec<Value>) {
    let is_list = object
        .get("kind")
        .and_then(Value::as_str)
        .is_some_and(|kind| kind.ends_with("List"));
    if !is_list {
        return all.push(object);
    }
    if let Some(Value::Array(items)) = object.get_mut("items").map(Value::take) {
        for item in items {
            add(item, all);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use k8s_openapi::api::core::v1::Node;

    use super::*;

    /// A dozen nodes that offer everything were more than the reader's own limit of values.
    #[test]
    fn the_objects_of_a_large_cluster_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cluster.yaml");
        let mut text = "kind: List\nitems:\n".to_owned();
        for number in 0..60_000 {
            writeln!(text, "- {{kind: Node, metadata: {{name: n{number}}}}}").unwrap();
        }
        fs_err::write(&file, text).unwrap();
        let nodes: Vec<Node> = Printed::read(&file).unwrap().of("Node").unwrap();
        assert_eq!(nodes.len(), 60_000);
    }
}
