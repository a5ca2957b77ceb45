//! The kubelet's health service, v1 and v1alpha1: reports the health of every device that a claim
//! holds, at once, after each change, and often enough that it does not expire. The protocol's
//! types are used in this file only.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use divvy_proto::health::v1::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest,
    NodeWatchResourcesResponse,
};
use divvy_proto::health::{v1, v1alpha1};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::node::Holdings;

/// The time for which a report is valid, as announced to the kubelet, and the interval of reports.
const LEASE: Duration = Duration::from_secs(30);
const REPEAT: Duration = Duration::from_secs(10);
/// Longest message, in bytes.
const LONGEST: usize = 1024;

/// Serves both versions of the protocol.
#[derive(Clone)]
pub(crate) struct HealthServer {
    pub(crate) pool: String,
    /// The devices that claims hold, and their health.
    pub(crate) holdings: watch::Receiver<Holdings>,
    /// Ends the streams: a server does not stop before.
    pub(crate) stop: CancellationToken,
}

/// Lists of all held devices, one after another.
type Messages = ReceiverStream<Result<NodeWatchResourcesResponse, Status>>;

#[tonic::async_trait]
impl v1::dra_resource_health_server::DraResourceHealth for HealthServer {
    type NodeWatchResourcesStream = Messages;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Messages>, Status> {
        Ok(self.watch())
    }
}

#[tonic::async_trait]
impl v1alpha1::dra_resource_health_server::DraResourceHealth for HealthServer {
    type NodeWatchResourcesStream = Messages;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Messages>, Status> {
        Ok(self.watch())
    }
}

impl HealthServer {
    /// Begins to send, until the kubelet hangs up or the plugin stops.
    fn watch(&self) -> Response<Messages> {
        // Room for one: a kubelet that reads slowly gets the newest state next, and not a backlog.
        let (send, reports) = mpsc::channel(1);
        let mut server = self.clone();
        tokio::spawn(async move {
            loop {
                let now = server.now();
                if send.send(Ok(now)).await.is_err() {
                    return;
                }
                tokio::select! {
                    Ok(()) = server.holdings.changed() => {}
                    () = tokio::time::sleep(REPEAT) => {}
                    () = send.closed() => return,
                    () = server.stop.cancelled() => return,
                }
            }
        });
        Response::new(ReceiverStream::new(reports))
    }

    fn now(&mut self) -> NodeWatchResourcesResponse {
        // Read and mark as seen at once: a change meanwhile is the next answer.
        let Holdings { devices, health } = self.holdings.borrow_and_update().clone();
        let at = seconds(
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
        );
        // Shares of one device are one to the kubelet.
        let all: BTreeSet<(String, Option<String>)> = devices
            .held
            .iter()
            .map(|held| {
                let problem = health.problem(&held.hold);
                (
                    held.hold.device.to_string(),
                    problem.map(|text| crate::sinks::notifier::cut(&text, LONGEST)),
                )
            })
            .collect();
        let devices = all.into_iter().map(|(device_name, problem)| DeviceHealth {
            device: Some(DeviceIdentifier {
                pool_name: self.pool.clone(),
                device_name,
            }),
            health: if problem.is_none() {
                HealthStatus::Healthy
            } else {
                HealthStatus::Unhealthy
            }
            .into(),
            last_updated_time: at,
            // Three reports fit into a lease, so that a late one does not make the device unknown.
            health_check_timeout_seconds: seconds(LEASE),
            message: problem.unwrap_or_default(),
        });
        NodeWatchResourcesResponse {
            devices: devices.collect(),
        }
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}
