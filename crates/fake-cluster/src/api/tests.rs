//! The server as its users meet it: through a kube client.

mod objects;
mod trouble;
mod watching;

use std::time::Duration;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Api;

use super::*;
use crate::build::{mk_claim, mk_device, mk_slice};

const SOON: Duration = Duration::from_secs(10);

fn slices(api: &FakeApi) -> Api<ResourceSlice> {
    Api::all(api.client())
}

fn claims(api: &FakeApi) -> Api<ResourceClaim> {
    Api::namespaced(api.client(), "ns")
}

fn slice(name: &str, node: &str) -> ResourceSlice {
    mk_slice(name, "gpu.divvy.dev", node, vec![mk_device("gpu-0")])
}

/// The refusal of a call that must fail: code and message.
fn refusal<T: std::fmt::Debug>(result: Result<T, kube::Error>) -> (u16, String) {
    match result.unwrap_err() {
        kube::Error::Api(status) => (status.code, status.message),
        other => panic!("not a refusal: {other}"),
    }
}
