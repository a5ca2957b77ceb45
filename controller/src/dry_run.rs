//! Fields of ResourceSlices that a server keeps, found out before any is stored. A device without
//! the fields that limit its use must not be seen by a scheduler: a share without them looks like a
//! GPU that is free.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{DeviceKind, Sharing};
use divvy_offer::{
    Allowed, Amount, Capacity, CounterSet, Device, Feature, Pool, RequestPolicy, Slice, Taint,
};
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, PostParams};

use crate::content::{comparable_spec, dropped, specs};
use crate::{PublishError, PublisherConfig};

/// The features whose fields the server drops, from dry runs: nothing is stored.
///
/// # Errors
/// If a dry run is not answered, or refused, as some webhooks do.
pub async fn dropped_features(
    client: &kube::Client,
    config: &PublisherConfig,
    pool: &str,
) -> Result<BTreeSet<Feature>, PublishError> {
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let mut all = BTreeSet::new();
    for spec in specs(&config.driver, &config.node_name, &with_all_features(pool)) {
        let metadata = ObjectMeta {
            // A dry run under the slice's own name would be refused where that slice exists.
            generate_name: Some("dry-run-".to_owned()),
            ..ObjectMeta::default()
        };
        let tried = slices
            .create(
                &dry_run,
                &ResourceSlice {
                    metadata,
                    spec: spec.clone(),
                },
            )
            .await;
        let stored = tried.map_err(PublishError::of("create", "a ResourceSlice in a dry run"))?;
        all.append(&mut dropped(
            &comparable_spec(&spec),
            &comparable_spec(&stored.spec),
        ));
    }
    Ok(all)
}

/// A pool that uses every feature. Counter sets have a slice of their own, as API servers want it
/// since 1.35.
fn with_all_features(name: &str) -> Pool {
    let slot = Amount::Count(1);
    let policy = RequestPolicy {
        default: slot,
        allowed: Allowed::Range {
            min: slot,
            max: None,
            step: Some(slot),
        },
    };
    let capacity = Capacity {
        value: Amount::Count(2),
        policy: Some(policy),
    };
    let device = Device {
        taints: vec![Taint::no_schedule("gpu.divvy.dev/dry-run", None)],
        capacity: BTreeMap::from([("slots".into(), capacity)]),
        allow_multiple: true,
        ..Device::new(DeviceKind::of_gpu(0, Sharing::TimeSliced).device_name())
    };
    let counters = BTreeMap::from([("slots".into(), slot)]);
    let counter_sets = vec![CounterSet {
        name: "dry-run".into(),
        counters,
    }];
    let slices = vec![
        Slice {
            devices: vec![device],
            ..Slice::default()
        },
        Slice {
            counter_sets,
            ..Slice::default()
        },
    ];
    Pool {
        name: name.to_owned(),
        slices,
    }
}
