//! The devices of running pods, from the kubelet's PodResources socket.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use divvy_executor::RunningDevice;
use divvy_proto::podresources::v1::pod_resources_lister_client::PodResourcesListerClient;
use divvy_proto::podresources::v1::{DynamicResource, ListPodResourcesRequest, PodResources};
use tonic::transport::Endpoint;

use crate::app::config::Config;
use crate::node::facts::PodsOfClaims;

const TIMEOUT: Duration = Duration::from_secs(5);

/// Why the kubelet could not be asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PodResourcesError {
    /// The socket does not answer.
    #[error(
        "the kubelet does not answer on {path} (check that it runs, and --pod-resources-socket)"
    )]
    Connect {
        path: String,
        #[source]
        source: tonic::transport::Error,
    },
    /// It answered with an error.
    #[error("the kubelet refused to list pod resources on {path}")]
    List {
        path: String,
        #[source]
        source: Box<tonic::Status>,
    },
}

/// Returns the pods of each claim for devices of ours, and their containers that use it.
pub(crate) fn claims(pods: &[PodResources], config: &Config) -> PodsOfClaims {
    let mut claims = PodsOfClaims::new();
    for pod in pods {
        for container in &pod.containers {
            let ours = |dynamic: &&DynamicResource| {
                dynamic
                    .claim_resources
                    .iter()
                    .any(|used| config.owns(&used.driver_name, &used.pool_name))
            };
            for dynamic in container.dynamic_resources.iter().filter(ours) {
                let claim = (dynamic.claim_namespace.clone(), dynamic.claim_name.clone());
                let containers = claims
                    .entry(claim)
                    .or_default()
                    .entry(pod.name.clone())
                    .or_default();
                containers.insert(container.name.clone());
            }
        }
    }
    claims
}

/// Asks the kubelet for the devices that all pods of the node hold.
pub(crate) async fn pods(socket: &Path) -> Result<Vec<PodResources>, PodResourcesError> {
    let path = socket.display().to_string();
    let connect = |source| PodResourcesError::Connect {
        path: path.clone(),
        source,
    };
    let endpoint = Endpoint::from_shared(format!("unix:{path}")).map_err(connect)?;
    // A connection for each question: a kubelet that was restarted has another socket under the
    // same path.
    let channel = endpoint
        .connect_timeout(TIMEOUT)
        .timeout(TIMEOUT)
        .connect()
        .await
        .map_err(connect)?;
    let answer = PodResourcesListerClient::new(channel)
        .list(ListPodResourcesRequest {})
        .await;
    let answer = answer.map_err(|source| PodResourcesError::List {
        path: path.clone(),
        source: Box::new(source),
    })?;
    Ok(answer.into_inner().pod_resources)
}

/// All devices of ours that containers of running pods hold.
pub(crate) fn held(pods: &[PodResources], config: &Config) -> BTreeSet<RunningDevice> {
    let mut held = BTreeSet::new();
    for pod in pods {
        for dynamic in pod
            .containers
            .iter()
            .flat_map(|container| &container.dynamic_resources)
        {
            for used in dynamic
                .claim_resources
                .iter()
                .filter(|used| config.owns(&used.driver_name, &used.pool_name))
            {
                if let Ok(device) = used.device_name.parse() {
                    held.insert(RunningDevice {
                        namespace: dynamic.claim_namespace.clone(),
                        claim: dynamic.claim_name.clone(),
                        device,
                    });
                }
            }
        }
    }
    held
}
