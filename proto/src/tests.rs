//! The contracts as the kubelet sees them: service paths and field numbers.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use crate::{dra, podresources, registration};
use prost::Message;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Context, Poll, Service};

/// A transport that answers nothing and remembers the paths asked for.
#[derive(Clone, Default)]
struct Paths(Arc<Mutex<Vec<String>>>);

impl Service<Request<Body>> for Paths {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0.lock().unwrap().push(request.uri().path().to_owned());
        Box::pin(async { Ok(tonic::Status::unimplemented("path recorded").into_http()) })
    }
}

#[tokio::test]
async fn service_paths_are_those_of_the_kubelet() {
    let paths = Paths::default();
    let mut registration =
        registration::registration_client::RegistrationClient::new(paths.clone());
    registration
        .get_info(registration::InfoRequest {})
        .await
        .unwrap_err();
    let verdict = registration::RegistrationStatus::default();
    registration
        .notify_registration_status(verdict)
        .await
        .unwrap_err();
    let mut v1 = dra::v1::dra_plugin_client::DraPluginClient::new(paths.clone());
    v1.node_prepare_resources(dra::v1::NodePrepareResourcesRequest::default())
        .await
        .unwrap_err();
    v1.node_unprepare_resources(dra::v1::NodeUnprepareResourcesRequest::default())
        .await
        .unwrap_err();
    let mut pods =
        podresources::v1::pod_resources_lister_client::PodResourcesListerClient::new(paths.clone());
    pods.list(podresources::v1::ListPodResourcesRequest {})
        .await
        .unwrap_err();
    pods.get(podresources::v1::GetPodResourcesRequest::default())
        .await
        .unwrap_err();

    let mut health =
        crate::health::v1::dra_resource_health_client::DraResourceHealthClient::new(paths.clone());
    health
        .node_watch_resources(crate::health::v1::NodeWatchResourcesRequest {})
        .await
        .unwrap_err();
    let mut alpha =
        crate::health::v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(
            paths.clone(),
        );
    alpha
        .node_watch_resources(crate::health::v1::NodeWatchResourcesRequest {})
        .await
        .unwrap_err();

    let seen = paths.0.lock().unwrap().clone();
    assert_eq!(
        seen,
        [
            "/pluginregistration.Registration/GetInfo",
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            "/v1.PodResourcesLister/List",
            "/v1.PodResourcesLister/Get",
            "/v1.DRAResourceHealth/NodeWatchResources",
            "/v1alpha1.DRAResourceHealth/NodeWatchResources",
        ]
    );
}

/// Field numbers and strings of a message, read as bare protobuf; nested messages stay raw.
fn strings(mut bytes: &[u8]) -> Vec<(u8, String)> {
    let mut out = Vec::new();
    while let [tag, len, rest @ ..] = bytes {
        assert_eq!(tag & 7, 2, "length-delimited fields only");
        let (value, rest) = rest.split_at(usize::from(*len));
        out.push((tag >> 3, String::from_utf8(value.to_vec()).unwrap()));
        bytes = rest;
    }
    out
}

#[test]
fn a_claim_has_its_uid_before_its_name_on_the_wire() {
    let claim = dra::v1::Claim {
        namespace: "ns".into(),
        uid: "u-1".into(),
        name: "c".into(),
    };
    assert_eq!(
        strings(&claim.encode_to_vec()),
        [(1, "ns".into()), (2, "u-1".into()), (3, "c".into())]
    );
}

#[test]
fn a_device_carries_its_share_in_field_five_and_only_when_it_has_one() {
    let mut device = dra::v1::Device {
        request_names: vec!["r".into()],
        pool_name: "p".into(),
        device_name: "d".into(),
        cdi_device_ids: vec!["v/c=d".into()],
        share_id: None,
    };
    let plain = vec![
        (1, "r".into()),
        (2, "p".into()),
        (3, "d".into()),
        (4, "v/c=d".into()),
    ];
    assert_eq!(strings(&device.encode_to_vec()), plain);
    device.share_id = Some("s".into());
    assert_eq!(
        strings(&device.encode_to_vec()).last(),
        Some(&(5, "s".into()))
    );
}

#[test]
fn plugin_info_and_pod_resources_use_the_kubelets_field_numbers() {
    let info = registration::PluginInfo {
        r#type: dra::PLUGIN_TYPE.into(),
        name: "gpu.divvy.dev".into(),
        endpoint: "/dra.sock".into(),
        supported_versions: vec![dra::SERVICE.to_owned()],
    };
    assert_eq!(
        strings(&info.encode_to_vec()),
        [
            (1, "DRAPlugin".into()),
            (2, "gpu.divvy.dev".into()),
            (3, "/dra.sock".into()),
            (4, "v1.DRAPlugin".into()),
        ]
    );
    let used = podresources::v1::ClaimResource {
        cdi_devices: vec![],
        driver_name: "d".into(),
        pool_name: "p".into(),
        device_name: "g".into(),
        share_id: None,
    };
    assert_eq!(
        strings(&used.encode_to_vec()),
        [(2, "d".into()), (3, "p".into()), (4, "g".into())]
    );
}

#[test]
fn the_health_of_a_device_uses_the_kubelets_field_numbers() {
    use crate::health::v1::{DeviceHealth, DeviceIdentifier, HealthStatus};
    let health = DeviceHealth {
        device: Some(DeviceIdentifier {
            pool_name: "p".into(),
            device_name: "d".into(),
        }),
        health: HealthStatus::Unhealthy.into(),
        last_updated_time: 7,
        health_check_timeout_seconds: 30,
        message: "m".into(),
    };
    let expected = b"\x0a\x06\x0a\x01p\x12\x01d\x10\x02\x18\x07\x20\x1e\x2a\x01m";
    assert_eq!(health.encode_to_vec(), expected);
}
