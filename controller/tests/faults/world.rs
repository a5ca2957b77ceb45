//! A publisher of a node, and its fake API server.

use std::sync::Arc;
use std::time::Duration;

use divvy_controller::{
    ANSWER, PublishStatus, Publisher, PublisherConfig, ServerClock, slice_name, spawn,
    with_deadline,
};
use divvy_fake_cluster::FakeApi;
use divvy_fake_cluster::build::mk_node;
use divvy_offer::{Device, Pool, Slice};
use k8s_openapi::api::resource::v1::ResourceSlice;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

pub(crate) const DRIVER: &str = "gpu.divvy.dev";
pub(crate) const NODE: &str = "node-1";
pub(crate) const SLICES: &str = "resourceslices";
pub(crate) const PATIENCE: Duration = Duration::from_mins(5);

/// A pool with one slice for each list of device names.
pub(crate) fn pool(slices: &[&[&str]]) -> Pool {
    let device = |name: &&str| Device::new(name.parse().unwrap());
    let slice = |names: &&[&str]| Slice {
        devices: names.iter().map(device).collect(),
        counter_sets: vec![],
    };
    Pool {
        name: "node-1/divvy".into(),
        slices: slices.iter().map(slice).collect(),
    }
}

pub(crate) struct World {
    pub(crate) api: FakeApi,
    pub(crate) desired: watch::Sender<Option<Arc<Pool>>>,
    pub(crate) status: watch::Receiver<PublishStatus>,
    pub(crate) publisher: Publisher,
    pub(crate) stop: CancellationToken,
}

pub(crate) fn start(api: &FakeApi, desired: Option<Pool>) -> World {
    let (desired, receiver) = watch::channel(desired.map(Arc::new));
    let stop = CancellationToken::new();
    let config = PublisherConfig {
        driver: DRIVER.into(),
        node_name: NODE.into(),
    };
    let clock = ServerClock::default();
    let publisher = spawn(
        with_deadline(api.client(), ANSWER, clock.clone()),
        config,
        receiver,
        clock,
        stop.clone(),
    );
    World {
        api: api.clone(),
        desired,
        status: publisher.status(),
        publisher,
        stop,
    }
}

pub(crate) fn server() -> FakeApi {
    let api = FakeApi::new();
    api.put(&mk_node(NODE)).unwrap();
    api
}

impl World {
    pub(crate) async fn until(
        &mut self,
        condition: impl FnMut(&PublishStatus) -> bool,
    ) -> PublishStatus {
        let seen = timeout(PATIENCE, self.status.wait_for(condition))
            .await
            .map(|seen| seen.unwrap().clone());
        seen.unwrap_or_else(|_| {
            unreachable!("not within {PATIENCE:?}: {:?}", *self.status.borrow())
        })
    }

    pub(crate) async fn published(&mut self, pool: &Pool) -> PublishStatus {
        self.until(|status| status.in_sync && status.published.as_deref() == Some(pool))
            .await
    }

    /// Waits until the server has exactly this pool and the publisher is content.
    pub(crate) async fn stored(&mut self, pool: &Pool) -> PublishStatus {
        let wanted: Vec<Vec<String>> = pool
            .slices
            .iter()
            .map(|s| s.devices.iter().map(|d| d.name.to_string()).collect())
            .collect();
        self.api
            .wait_until(|view| devices(&view.list()) == wanted, PATIENCE)
            .await
            .unwrap();
        self.published(pool).await
    }

    pub(crate) fn slices(&self) -> Vec<ResourceSlice> {
        self.api.list()
    }
}

pub(crate) fn devices(slices: &[ResourceSlice]) -> Vec<Vec<String>> {
    let names = |slice: &ResourceSlice| {
        slice
            .spec
            .devices
            .iter()
            .flatten()
            .map(|d| d.name.clone())
            .collect()
    };
    slices.iter().map(names).collect()
}

pub(crate) fn name(index: usize) -> String {
    slice_name(index, DRIVER, NODE)
}
