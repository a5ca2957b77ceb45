//! What the policies make of the GPUs: what is offered of each, and what prepare may do to it.

use std::collections::BTreeSet;
use std::sync::Arc;

use divvy_model::{DeviceKind, DeviceName, Inventory, Ordinals};
use divvy_offer::Resolved;

use super::{Carver, Memory};
use crate::policy::{Effective, Known, Still, rights_of};

impl Carver {
    /// Tells the executor what it may do to which GPU, and remembers it for a restart.
    pub(super) fn grant(
        &self,
        memory: &mut Memory,
        resolved: &Resolved,
        inventory: &Inventory,
        ordinals: &Ordinals,
        leaving: &BTreeSet<DeviceName>,
    ) {
        let known = memory.rights.take().or_else(|| {
            memory.rights_saved = self.rights.load();
            memory.rights_saved.clone()
        });
        let before = known.clone().unwrap_or_default();
        let of_gpu = |device: &DeviceName| {
            let kind = DeviceKind::parse(device).ok()?;
            Some((ordinals.gpu(kind.ordinal())?.clone(), device.clone()))
        };
        let devices = leaving.iter().chain(&memory.withdrawn).filter_map(of_gpu).collect();
        let still = Still { devices, unsure: !memory.holders.asked };
        let rights = rights_of(&resolved.rules, &before, &still, inventory);
        if memory.rights_saved.as_ref() != Some(&rights) {
            match self.rights.save(&rights) {
                Ok(()) => memory.rights_saved = Some(rights.clone()),
                Err(error) => {
                    tracing::warn!(%error, "what the policies allow is not remembered for a restart; tried again");
                }
            }
        }
        self.executor.set_rights(rights.clone());
        memory.rights = Some(rights);
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
