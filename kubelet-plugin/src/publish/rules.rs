//! What the policies make of the GPUs: what is offered of each, and what prepare may do to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_carve::{Instances, Modes, Resolved};
use divvy_model::{DeviceKind, DeviceName, GpuUuid, Inventory, Ordinals};

use super::{Carver, Memory};
use crate::policy::{Effective, Known};

impl Carver {
    /// Tells the executor of which GPUs it may change the MIG mode. A right ends only when nothing is left of what was
    /// offered under it.
    pub(super) fn grant(
        &self,
        memory: &mut Memory,
        resolved: &Resolved,
        ordinals: &Ordinals,
        leaving: &BTreeSet<DeviceName>,
    ) {
        let gpu_of = |device: &DeviceName| ordinals.gpu(DeviceKind::parse(device).ok()?.ordinal()).cloned();
        let still: BTreeSet<_> = leaving.iter().chain(&memory.withdrawn).filter_map(gpu_of).collect();
        let before = self.executor.granted().unwrap_or_default();
        let may = |gpu: &GpuUuid| {
            let rules = resolved.rules.get(gpu);
            let kept = before.contains(gpu) && (!memory.holders.asked || still.contains(gpu));
            let is_static = rules.is_some_and(|rules| rules.instances == Instances::Static);
            !is_static && (kept || rules.is_some_and(|rules| matches!(rules.modes, Modes::Only(_))))
        };
        let rights: BTreeMap<_, _> = ordinals.iter().map(|(gpu, _)| (gpu.clone(), may(gpu))).collect();
        if let Err(error) = self.executor.grant(&rights) {
            tracing::warn!(error = %crate::chain(&error), "what the policies allow is not written down; tried again");
        }
    }

    /// What the policies make of the GPUs; told where it is new.
    pub(super) fn resolved(
        &self,
        known: Arc<Known>,
        inventory: &Inventory,
        ordinals: &Ordinals,
    ) -> Arc<Resolved> {
        let before = self.effective.borrow().clone().map(|effective| effective.resolved);
        let resolved = known.resolve(&self.node, inventory, ordinals, &self.rules, before.as_deref());
        let resolved = Arc::new(resolved);
        let nothing = Resolved::default();
        let before = before.as_deref().unwrap_or(&nothing);
        for (gpu, by) in resolved.by.iter().filter(|(gpu, by)| before.by.get(*gpu) != Some(*by)) {
            tracing::info!(%gpu, rule = %by, "a policy decides what this GPU may become");
        }
        for gpu in before.by.keys().filter(|gpu| !resolved.by.contains_key(*gpu)) {
            tracing::info!(%gpu, "no policy speaks of this GPU any more");
        }
        for problem in resolved.problems.iter().filter(|problem| !before.problems.contains(problem)) {
            tracing::warn!(%problem, "a policy does not do what was probably meant");
            let (teller, policy) = (self.teller.clone(), known.reference(&problem.rule.policy));
            let (what, note) = (problem.to_string(), format!("node {}: {problem}", self.node));
            self.told.spawn(async move {
                teller.warn_policy(&policy, "rule-without-effect", &what, &note).await;
            });
        }
        let effective = Effective { known, resolved: resolved.clone() };
        self.effective.send_if_modified(|now| {
            let changed = now.as_ref() != Some(&effective);
            *now = Some(effective);
            changed
        });
        resolved
    }
}
