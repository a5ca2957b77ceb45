//! The kubelet's health service, v1 and v1alpha1: reports the health of every device that a claim holds, at once, after
//! each change, and often enough that it does not expire. The protocol's types are used in this file only.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use divvy_proto::health::{v1, v1alpha1};
use futures::Stream;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use divvy_offer::sentence;

use crate::node::Holdings;

/// How long a report is valid, as announced to the kubelet, and the interval of reports.
const LEASE: Duration = Duration::from_secs(30);
const REPEAT: Duration = Duration::from_secs(10);
/// Longest message, in bytes.
const LONGEST: usize = 1024;

/// Serves both versions of the protocol.
#[derive(Clone)]
pub(crate) struct HealthServer {
    pub(crate) pool: String,
    /// What claims hold, and how it is.
    pub(crate) holdings: watch::Receiver<Holdings>,
    /// Ends the streams: a server does not stop before.
    pub(crate) stop: CancellationToken,
}

type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl v1::dra_resource_health_server::DraResourceHealth for HealthServer {
    type NodeWatchResourcesStream = Messages<v1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<v1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let messages = self.messages().map(|devices| {
            let devices = devices.into_iter().map(|device| v1::DeviceHealth {
                device: Some(v1::DeviceIdentifier { pool_name: device.pool, device_name: device.name }),
                health: if device.problem.is_none() {
                    v1::HealthStatus::Healthy.into()
                } else {
                    v1::HealthStatus::Unhealthy.into()
                },
                last_updated_time: device.at,
                health_check_timeout_seconds: seconds(LEASE),
                message: device.problem.unwrap_or_default(),
            });
            Ok(v1::NodeWatchResourcesResponse { devices: devices.collect() })
        });
        Ok(Response::new(Box::pin(messages)))
    }
}

#[tonic::async_trait]
impl v1alpha1::dra_resource_health_server::DraResourceHealth for HealthServer {
    type NodeWatchResourcesStream = Messages<v1alpha1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<v1alpha1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let messages = self.messages().map(|devices| {
            let devices = devices.into_iter().map(|device| v1alpha1::DeviceHealth {
                device: Some(v1alpha1::DeviceIdentifier { pool_name: device.pool, device_name: device.name }),
                health: if device.problem.is_none() {
                    v1alpha1::HealthStatus::Healthy.into()
                } else {
                    v1alpha1::HealthStatus::Unhealthy.into()
                },
                last_updated_time: device.at,
                health_check_timeout_seconds: seconds(LEASE),
                message: device.problem.unwrap_or_default(),
            });
            Ok(v1alpha1::NodeWatchResourcesResponse { devices: devices.collect() })
        });
        Ok(Response::new(Box::pin(messages)))
    }
}

/// A device and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct DeviceReport {
    pool: String,
    name: String,
    problem: Option<String>,
    at: i64,
}

impl HealthServer {
    /// One list of all held devices after another, until the kubelet hangs up or the plugin stops.
    fn messages(&self) -> impl Stream<Item = Vec<DeviceReport>> + use<> {
        let (send, reports) = mpsc::channel(1);
        let mut server = self.clone();
        tokio::spawn(async move {
            loop {
                let now = server.now();
                if send.send(now).await.is_err() {
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
        ReceiverStream::new(reports)
    }

    fn now(&mut self) -> Vec<DeviceReport> {
        let Holdings { devices, health } = self.holdings.borrow_and_update().clone();
        let at = seconds(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        // Shares of one device are one to the kubelet.
        let all: BTreeSet<DeviceReport> = devices
            .held
            .iter()
            .map(|held| DeviceReport {
                pool: self.pool.clone(),
                name: held.hold.device.to_string(),
                problem: sentence(&health.of(&held.hold)).map(|text| crate::events::cut(&text, LONGEST)),
                at,
            })
            .collect();
        all.into_iter().collect()
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}
