//! Reads `/metrics` of every node plugin through the API server, with the rights of the user.

use std::time::Duration;

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};

use super::Usage;
use crate::status::plugins::PLUGINS;
use crate::status::snapshot::{name, namespace};
use divvy_why::some;

/// Part of the answer that is not known without them.
const UNKNOWN: &str = "unknown: what claims really use";
/// Longest time of a plugin's answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Plugins that are asked at once.
const AT_ONCE: usize = 16;

/// Reads all. Every source that is not permitted or does not answer is named in the result, which
/// has the rest.
pub async fn read(client: &Client) -> Usage {
    let mut usage = Usage::default();
    let pods = Api::<Pod>::all(client.clone())
        .list(&ListParams::default().labels(PLUGINS))
        .await;
    let pods = match pods {
        Ok(pods) => pods.items,
        Err(error) => {
            usage.unread.push(format!(
                "the node plugins cannot be found; {UNKNOWN} ({})",
                why(&error, "list pods", "")
            ));
            return usage;
        }
    };
    let running = |pod: &Pod| {
        pod.status
            .as_ref()
            .is_some_and(|status| status.phase.as_deref() == Some("Running"))
    };
    let asked = pods.iter().filter(|pod| running(pod)).filter_map(|pod| {
        let (inside, name) = (namespace(&pod.metadata), name(&pod.metadata));
        let path = format!(
            "/api/v1/namespaces/{inside}/pods/{name}:{}/proxy/metrics",
            port(pod)?
        );
        let client = client.clone();
        Some(async move {
            let answer = tokio::time::timeout(PATIENCE, get(&client, &path)).await;
            match answer {
                Ok(Ok(text)) => Ok(text),
                Ok(Err(error)) => Err((name.to_owned(), why(&error, "get pods/proxy", inside))),
                Err(_) => Err((
                    name.to_owned(),
                    format!("no answer in {} s", PATIENCE.as_secs()),
                )),
            }
        })
    });
    let answers: Vec<_> = stream::iter(asked.collect::<Vec<_>>())
        .buffered(AT_ONCE)
        .collect()
        .await;
    if answers.is_empty() {
        usage.unread.push(format!(
            "no node plugin runs (pods with the labels {PLUGINS}); {UNKNOWN}"
        ));
    }
    let mut silent: Vec<(String, Vec<String>)> = Vec::new();
    for answer in answers {
        match answer {
            Ok(text) => usage.add(&text),
            Err((pod, why)) => match silent.iter_mut().find(|(other, _)| *other == why) {
                Some((_, pods)) => pods.push(pod),
                None => silent.push((why, vec![pod])),
            },
        }
    }
    usage.unread.extend(silent.into_iter().map(|(why, pods)| {
        format!(
            "/metrics of {} cannot be read; {UNKNOWN} on their nodes ({why})",
            some(pods.iter())
        )
    }));
    usage
}

async fn get(client: &Client, path: &str) -> Result<String, kube::Error> {
    let request = http::Request::get(path)
        .body(Vec::new())
        .map_err(kube::Error::HttpError)?;
    client.request_text(request).await
}

/// The port of `/metrics`.
fn port(pod: &Pod) -> Option<i32> {
    let ports = pod
        .spec
        .as_ref()?
        .containers
        .iter()
        .flat_map(|container| container.ports.iter().flatten());
    ports
        .into_iter()
        .find(|port| port.name.as_deref() == Some("http"))
        .map(|port| port.container_port)
}

/// The missing right, or what the server says.
fn why(error: &kube::Error, right: &str, namespace: &str) -> String {
    let place = if namespace.is_empty() {
        "in the whole cluster".to_owned()
    } else {
        format!("in namespace {namespace}")
    };
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            format!(
                "you may not {right} {place}; ask a cluster admin for a role that grants it, see docs/ui.md"
            )
        }
        kube::Error::Api(status) => format!("{}, status {}", status.message, status.code),
        other => divvy_telemetry::Chain(other).to_string(),
    }
}
