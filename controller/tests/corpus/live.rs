//! Cases against an API server, with the whole publisher.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_offer::{Feature, Pool};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Client, ResourceExt};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::model::{Case, Expect};
use crate::pure::{compare, fixture, owner, refused};
use divvy_controller::{PublishStatus, PublisherConfig, ServerClock, spawn};

const PATIENCE: Duration = Duration::from_secs(30);

/// Outcome of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The expected outcome.
    Passed,
    /// The server's feature gates are not as the case needs them.
    Skipped,
}

/// Runs a case with a publisher of its own, against any API server. `scope` keeps runs apart: it
/// becomes part of the names of a driver and a Node that are made for the case and deleted
/// afterwards. `off` are the features whose gate is off in this server. The client may create and
/// delete Nodes and ResourceSlices. `Err` says what differs.
pub(crate) async fn run(
    client: &Client,
    case: &Case,
    scope: &str,
    off: &BTreeSet<Feature>,
) -> Result<Outcome, String> {
    if case.gates_off.iter().copied().collect::<BTreeSet<_>>() != *off {
        return Ok(Outcome::Skipped);
    }
    let world = World::make(client, scope).await?;
    let result = world.play(client, case).await;
    world.clear().await?;
    result.map(|()| Outcome::Passed)
}

struct World {
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    driver: String,
    node: String,
    owner: OwnerReference,
}

fn failed(what: &str) -> impl Fn(kube::Error) -> String + use<'_> {
    move |error| format!("cannot {what}: {error}")
}

impl World {
    async fn make(client: &Client, scope: &str) -> Result<Self, String> {
        let (slices, nodes) = (Api::all(client.clone()), Api::<Node>::all(client.clone()));
        let (driver, name) = (
            format!("{scope}.corpus.divvy.dev"),
            format!("corpus-{scope}"),
        );
        let metadata = ObjectMeta {
            name: Some(name.clone()),
            ..ObjectMeta::default()
        };
        let node = Node {
            metadata,
            ..Node::default()
        };
        let made = nodes
            .create(&PostParams::default(), &node)
            .await
            .map_err(failed("create the Node"))?;
        let owner = owner(&name, &made.uid().unwrap_or_default());
        Ok(Self {
            slices,
            nodes,
            driver,
            node: name,
            owner,
        })
    }

    async fn play(&self, client: &Client, case: &Case) -> Result<(), String> {
        let mut before = BTreeMap::new();
        for existing in &case.existing {
            let slice = fixture(existing, &self.driver, &self.node, &self.owner);
            let stored = self
                .slices
                .create(&PostParams::default(), &slice)
                .await
                .map_err(failed("create a fixture"))?;
            before.insert(stored.name_any(), stored);
        }
        let (desired, receiver) = watch::channel(Some(Arc::new(
            case.before.as_ref().unwrap_or(&case.desired).clone(),
        )));
        let config = PublisherConfig {
            driver: self.driver.clone(),
            node_name: self.node.clone(),
        };
        let stop = CancellationToken::new();
        let publisher = spawn(
            client.clone(),
            config,
            receiver,
            ServerClock::default(),
            stop.clone(),
        );
        let mut status = publisher.status();
        let result = async {
            if let Some(first) = &case.before {
                published(&mut status, first, 0).await?;
                desired.send_replace(Some(Arc::new(case.desired.clone())));
            }
            self.judge(case, &mut status, &desired, &before).await
        }
        .await;
        stop.cancel();
        publisher.stopped().await;
        result
    }

    async fn judge(
        &self,
        case: &Case,
        status: &mut watch::Receiver<PublishStatus>,
        desired: &watch::Sender<Option<Arc<Pool>>>,
        before: &BTreeMap<String, ResourceSlice>,
    ) -> Result<(), String> {
        if let Expect::Error(_) = case.expect {
            let seen = until(status, |status| {
                status.last_error.is_some() || status.in_sync
            })
            .await?;
            self.list()
                .await?
                .is_empty()
                .then_some(())
                .ok_or("slices were written")?;
            return refused(case, &seen.last_error.unwrap_or_default());
        }
        let first = published(status, &case.desired, 0).await?;
        let after = self.list().await?;
        compare(case, &self.driver, &self.node, &self.owner, before, &after)?;
        if let Expect::Slices(_, dropped) = &case.expect
            && first.dropped != dropped.iter().copied().collect()
        {
            return Err(format!(
                "dropped features are {:?}, not {dropped:?}",
                first.dropped
            ));
        }
        // Once more: the same pool must not be written again.
        desired.send_replace(Some(Arc::new(case.desired.clone())));
        let second = published(status, &case.desired, first.rounds).await?;
        if second.writes != first.writes || self.list().await? != after {
            return Err(format!(
                "a second round writes again: {:?}, before {:?}",
                second.writes, first.writes
            ));
        }
        Ok(())
    }

    async fn list(&self) -> Result<Vec<ResourceSlice>, String> {
        let selector = format!("spec.driver={},spec.nodeName={}", self.driver, self.node);
        let selected = ListParams::default().fields(&selector);
        let mut slices = self
            .slices
            .list(&selected)
            .await
            .map_err(failed("list ResourceSlices"))?
            .items;
        slices.sort_by_key(ResourceExt::name_any);
        Ok(slices)
    }

    async fn clear(&self) -> Result<(), String> {
        for slice in self.list().await? {
            let gone = self
                .slices
                .delete(&slice.name_any(), &DeleteParams::default())
                .await;
            gone.map_err(failed("delete a slice"))?;
        }
        self.nodes
            .delete(&self.node, &DeleteParams::default())
            .await
            .map_err(failed("delete the Node"))?;
        Ok(())
    }
}

async fn until(
    status: &mut watch::Receiver<PublishStatus>,
    condition: impl FnMut(&PublishStatus) -> bool,
) -> Result<PublishStatus, String> {
    let seen = timeout(PATIENCE, status.wait_for(condition))
        .await
        .map(|seen| seen.map(|status| status.clone()));
    match seen {
        Ok(Ok(seen)) => Ok(seen),
        Ok(Err(_)) => Err("the publisher is gone".to_owned()),
        Err(_) => Err(format!(
            "nothing came of it in {PATIENCE:?}: {:?}",
            *status.borrow()
        )),
    }
}

async fn published(
    status: &mut watch::Receiver<PublishStatus>,
    pool: &Pool,
    after_round: u64,
) -> Result<PublishStatus, String> {
    let done = |status: &PublishStatus| {
        status.in_sync && status.rounds > after_round && status.published.as_deref() == Some(pool)
    };
    until(status, done).await
}
