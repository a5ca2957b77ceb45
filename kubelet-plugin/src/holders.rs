//! Who holds what: which devices must stay published although they are not offered any more. Claims in the API are
//! listed only when something is withdrawn, or may have been while the plugin was away.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_api::names::taints as keys;
use divvy_executor::HeldDevice;
use divvy_model::mig::MigCapabilities;
use divvy_model::{DeviceKind, DeviceName, GpuUuid, HoldKind, Inventory, Ordinals};
use divvy_offer::{Pool, pool_name};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::Api;
use kube::api::ListParams;
use tokio::time::Instant;

use crate::publish::Carver;

/// How long the question who holds what may take: GPUs may fall ill meanwhile.
const ANSWER: Duration = Duration::from_secs(10);

/// How often it is asked at the start before something is published without an answer.
const ASK_FIRST: u32 = 5;

/// What is remembered of holders from one look to the next.
#[derive(Default)]
pub(crate) struct Holders {
    /// Devices that are published and not offered any more, since when.
    leaving: BTreeMap<DeviceName, Instant>,
    /// Whether the API has told once who holds what.
    pub(crate) asked: bool,
    /// How often it has not answered.
    unanswered: u32,
    /// Devices that claims in the API hold; as of when.
    pub(crate) held: Option<(Instant, BTreeSet<DeviceName>)>,
}

impl Holders {
    /// Notes what is leaving; those that are so fresh that the scheduler may not have seen their taint yet. A list of
    /// claims from before it had counts for nothing.
    pub(crate) fn leave(
        &mut self,
        leaving: BTreeSet<DeviceName>,
        now: Instant,
        lasts: Duration,
    ) -> BTreeSet<DeviceName> {
        self.leaving.retain(|device, _| leaving.contains(device));
        for device in leaving {
            self.leaving.entry(device).or_insert(now);
        }
        let seen_by_all = |since: &Instant| *since + lasts;
        let settled = self.leaving.values().map(seen_by_all).filter(|at| *at <= now).max();
        if let (Some(settled), Some((asked, _))) = (settled, &self.held)
            && *asked < settled
        {
            self.held = None;
        }
        let fresh = self.leaving.iter().filter(|(_, since)| seen_by_all(since) > now);
        fresh.map(|(device, _)| device.clone()).collect()
    }

    /// Whether the slices that the process before this one left are better than any that could be made without knowing of
    /// a claim. Not for ever: the right to ask may be missing.
    pub(crate) fn asks_first(&self) -> bool {
        !self.asked && self.unanswered < ASK_FIRST
    }

    /// The API has not answered.
    pub(crate) fn unanswered(&mut self) {
        self.unanswered += 1;
    }

    /// Everything that is leaving.
    pub(crate) fn all_leaving(&self) -> BTreeSet<DeviceName> {
        self.leaving.keys().cloned().collect()
    }
}

/// Devices in use by what is recorded on the node. Admin access is no use.
pub(crate) fn recorded(records: &[HeldDevice]) -> BTreeSet<DeviceName> {
    let uses = records.iter().filter(|record| record.hold.kind != HoldKind::Admin);
    uses.map(|record| record.hold.device.clone()).collect()
}

impl Carver {
    /// Devices that an earlier process has begun to withdraw. `None` without an answer.
    pub(crate) async fn begun_to_leave(&self) -> Option<BTreeSet<DeviceName>> {
        let ours = format!("spec.driver={},spec.nodeName={}", self.driver, self.node);
        let slices = Api::<ResourceSlice>::all(self.claims.client.clone());
        let selected = ListParams::default().fields(&ours);
        let answer = match tokio::time::timeout(ANSWER, slices.list(&selected)).await {
            Ok(answer) => answer.map_err(|error| crate::chain(&error)),
            Err(_) => Err("no answer in time".to_owned()),
        };
        match answer {
            Ok(slices) => {
                let devices = slices.items.into_iter().filter_map(|slice| slice.spec.devices).flatten();
                let leaves =
                    |device: &Device| device.taints.iter().flatten().any(|t| t.key == keys::WITHDRAWN);
                Some(devices.filter(leaves).filter_map(|device| device.name.parse().ok()).collect())
            }
            Err(error) => {
                tracing::warn!(error, "it is not known yet what an earlier process was withdrawing");
                None
            }
        }
    }

    /// Devices of our pool that claims in the API have allocated. `None` without an answer. `vanished` are those that are
    /// known and not offered any more, `recorded` those that are in use by what is recorded on the node.
    pub(crate) async fn held(
        &self,
        holders: &mut Holders,
        now: Instant,
        vanished: &BTreeSet<DeviceName>,
        recorded: &BTreeSet<DeviceName>,
    ) -> Option<BTreeSet<DeviceName>> {
        if let Some((at, held)) = &holders.held {
            if at.elapsed() < self.timing.withdrawn {
                return Some(held.clone());
            }
            // As long as they are in use here by the claims that were found to hold them, nobody need be asked: all nodes
            // that a policy has changed would list all claims of the cluster again and again while their pods run.
            let in_use = |device: &DeviceName| held.contains(device) && recorded.contains(device);
            if !vanished.is_empty() && vanished.iter().all(in_use) {
                return Some(vanished.clone());
            }
        }
        let answer = match tokio::time::timeout(ANSWER, self.claims.list()).await {
            Ok(answer) => answer.map_err(|error| crate::chain(&error)),
            Err(_) => Err("no answer in time".to_owned()),
        };
        match answer {
            Ok(claims) => {
                let pool = pool_name(&self.node);
                let results = claims
                    .into_iter()
                    .filter_map(|claim| claim.status?.allocation?.devices?.results)
                    .flatten()
                    .filter(|result| result.driver == self.driver && result.pool == pool)
                    // Admin access takes nothing from anybody, and is served by name.
                    .filter(|result| result.admin_access != Some(true));
                let held: BTreeSet<DeviceName> =
                    results.filter_map(|result| result.device.parse().ok()).collect();
                holders.held = Some((now, held.clone()));
                holders.asked = true;
                Some(held)
            }
            Err(error) => {
                holders.unanswered();
                tracing::warn!(
                    error,
                    "claims not listed: devices that vanished stay published until it is known who holds them"
                );
                None
            }
        }
    }
}

/// Numbered GPUs that NVML does not list and that have no device in the pool.
pub(crate) fn gone(ordinals: &Ordinals, inventory: &Inventory, pool: &Pool) -> BTreeSet<GpuUuid> {
    let listed = |gpu: &GpuUuid| {
        inventory.gpus.contains_key(gpu) || inventory.problems.iter().any(|problem| problem.gpu == *gpu)
    };
    let published: BTreeSet<u32> =
        pool.devices().filter_map(|d| Some(DeviceKind::parse(&d.name).ok()?.ordinal())).collect();
    let all = ordinals.iter().filter(|(gpu, ordinal)| !listed(gpu) && !published.contains(ordinal));
    all.map(|(gpu, _)| gpu.clone()).collect()
}

/// Published devices of GPUs that are there, which are not offered any more: a policy has changed, say. They are tainted
/// for a while before it is asked who holds them, so that the scheduler cannot give one out between the answer and their
/// end.
pub(crate) fn leaving(
    published: &BTreeSet<DeviceName>,
    offered: &Pool,
    ordinals: &Ordinals,
    inventory: &Inventory,
) -> BTreeSet<DeviceName> {
    let is_there = |device: &DeviceName| {
        let kind = DeviceKind::parse(device).ok().filter(|kind| !matches!(kind, DeviceKind::Admin { .. }));
        let gpu = kind.and_then(|kind| ordinals.gpu(kind.ordinal()));
        gpu.is_some_and(|gpu| inventory.gpus.contains_key(gpu))
    };
    published.iter().filter(|name| offered.device(name).is_none() && is_there(name)).cloned().collect()
}

/// Whether a numbered GPU is not offered as all that it may have been offered as. It may be held as such from before this
/// process began.
pub(crate) fn offers_less_than_it_may(
    ordinals: &Ordinals,
    capabilities: &BTreeMap<GpuUuid, MigCapabilities>,
    pool: &Pool,
) -> bool {
    let kinds: BTreeSet<_> = pool.devices().filter_map(|d| DeviceKind::parse(&d.name).ok()).collect();
    let partitions: BTreeSet<_> = kinds
        .iter()
        .filter_map(|kind| match kind {
            DeviceKind::Partition(name) => Some((name.ordinal, name.profile, name.start)),
            DeviceKind::Whole { .. } | DeviceKind::Share { .. } | DeviceKind::Admin { .. } => None,
        })
        .collect();
    // Each of them: a policy may have left out profiles only.
    let cut = |gpu: &GpuUuid, ordinal: u32| {
        let profiles = capabilities.get(gpu).into_iter().flat_map(MigCapabilities::profiles);
        let mut places = profiles.flat_map(|p| p.placements.iter().map(|place| (p.id, place.start)));
        places.all(|(profile, start)| partitions.contains(&(ordinal, profile, start)))
    };
    ordinals.iter().any(|(gpu, ordinal)| {
        !kinds.contains(&DeviceKind::Whole { ordinal })
            || !kinds.contains(&DeviceKind::Share { ordinal })
            || !cut(gpu, ordinal)
    })
}
