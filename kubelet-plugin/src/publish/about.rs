//! What people are told of the node, beside what is published: the report that becomes its GpuNode.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_claims::{Fence, Head};
use divvy_executor::HeldDevice;
use divvy_model::{ClaimUid, GpuUuid, Inventory, Ordinals};

use super::{Carver, Memory};
use crate::gpu_node::{Facts, report};
use crate::occupied::Places;

/// What the node's report is made of, beside what is published.
pub(super) struct About {
    /// `None` where the driver has not answered since the plugin started.
    pub(super) inventory: Option<Arc<Inventory>>,
    pub(super) ordinals: Ordinals,
    pub(super) records: Vec<HeldDevice>,
    pub(super) lingering: BTreeSet<ClaimUid>,
    pub(super) fences: BTreeMap<GpuUuid, Vec<Fence>>,
    pub(super) newer: BTreeMap<ClaimUid, Head>,
    pub(super) foreign: Places,
    pub(super) kubernetes: String,
}

impl Carver {
    /// What people are told of the node.
    pub(super) fn report(&self, memory: &Memory) {
        let Some(about) = &memory.about else { return };
        let (seen, pool) = (self.seen.borrow().clone(), self.desired.borrow().clone());
        let (effective, health) = (self.effective.borrow().clone(), self.health.borrow().clone());
        // Half a picture is none, except where the driver is why it stays one.
        let whole = about.inventory.is_some() && pool.is_some() && effective.is_some() && health.is_some();
        if !whole && seen.problem.is_none() {
            return;
        }
        let facts = Facts {
            inventory: about.inventory.as_deref(),
            ordinals: &about.ordinals,
            records: &about.records,
            lingering: &about.lingering,
            fences: &about.fences,
            newer: &about.newer,
            pool: pool.as_ref(),
            effective: effective.as_ref(),
            health: &health.unwrap_or_default(),
            neighbours: &self.neighbours.borrow().clone(),
            foreign: &about.foreign,
            notes: &memory.notes,
            one_mode: memory.one_mode.as_ref(),
            driver: seen.down.as_deref().or(seen.problem.as_deref()),
            released: seen.released.as_deref(),
            kubernetes: about.kubernetes.clone(),
        };
        let report = report(&facts);
        self.reports.send_if_modified(|now| {
            let changed = now.as_ref() != Some(&report);
            *now = Some(report);
            changed
        });
    }
}
