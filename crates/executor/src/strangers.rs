//! Before the first hold on a GPU: does somebody compute there who is not ours? The device plugin may have given it to
//! him, or he took it from the host. NVIDIA's driver would let both in, to each other's harm.

use divvy_claims::{Claim, Plan, Refusal};
use divvy_model::HoldKind;

use crate::state::Records;
use crate::{Executor, ProcessOnGpu};

impl Executor {
    /// Who is in the way of a plan, if somebody is. A GPU that does not tell its processes is taken for free, as ever.
    pub(crate) fn strangers(&self, claim: &Claim, plan: &Plan, records: &Records) -> Option<Refusal> {
        let wanted = plan.devices.iter().filter(|device| device.kind.needs().is_some());
        wanted.into_iter().find_map(|device| {
            let on_it = |kind: HoldKind| kind.needs().is_some();
            let is_first = !Self::others(records, &claim.uid)
                .any(|record| record.holds().any(|hold| hold.gpu == device.gpu && on_it(hold.kind)));
            if !is_first {
                return None;
            }
            let found = self.parts.processes.on_gpu(&device.gpu).unwrap_or_default();
            if found.is_empty() {
                return None;
            }
            let mut known = Self::pods_on(records, &claim.uid, &device.gpu);
            known.extend(claim.pods.iter().map(|pod| pod.uid.as_str()));
            // In another's partition: what overlaps it was not to be had, and the rest is none of his business.
            let elsewhere = |p: &ProcessOnGpu| {
                p.gpu_instance.is_some() && matches!(device.kind, HoldKind::Partition { .. })
            };
            let strangers: Vec<String> = found
                .iter()
                .filter(|p| !elsewhere(p) && !p.pod.as_deref().is_some_and(|pod| known.contains(pod)))
                .map(|p| match &p.pod {
                    Some(pod) => format!("{} (of the pod with UID {pod})", p.pid),
                    None => p.pid.to_string(),
                })
                .collect();
            (!strangers.is_empty()).then(|| Refusal::Strangers {
                claim: claim.reference(),
                device: device.allocated.device.clone(),
                gpu: device.gpu.clone(),
                processes: strangers.join(", "),
            })
        })
    }
}
