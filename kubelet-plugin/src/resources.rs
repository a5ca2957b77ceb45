//! The custom resources of `divvy_api` as kube asks for them.

use divvy_api::names::{API_VERSION, GROUP, VERSION};
use divvy_api::{node, policy};
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Client};

/// What nodes tell of their GPUs: the `GpuNode`s, all of them.
pub fn gpu_nodes(client: &Client) -> Api<DynamicObject> {
    all(client, node::KIND, node::PLURAL)
}

/// What administrators allow: the `GpuPolicy`s, all of them.
pub(crate) fn gpu_policies(client: &Client) -> Api<DynamicObject> {
    all(client, policy::KIND, policy::PLURAL)
}

fn all(client: &Client, kind: &str, plural: &str) -> Api<DynamicObject> {
    let resource = ApiResource {
        group: GROUP.to_owned(),
        version: VERSION.to_owned(),
        api_version: API_VERSION.to_owned(),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    };
    Api::all_with(client.clone(), &resource)
}
