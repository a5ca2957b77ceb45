//! Pure: what people should know about the node: the findings of the offer, and those of the facts
//! that do not decide about it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_claims::{ClaimRef, Phase};
use divvy_executor::HeldDevice;
use divvy_model::health::Ailment;
use divvy_model::{ClaimUid, DeviceKind, GpuUuid, Inventory};
use divvy_offer::{Device, Finding, HealthView, Pool, Severity};

use super::facts::{Effective, Recorded, SupervisorAway};

/// Everything that is known of the node.
pub(crate) struct Known<'a> {
    /// `None` where the driver has not answered since the plugin started.
    pub(crate) inventory: Option<&'a Inventory>,
    /// Numbers, records and fences.
    pub(crate) recorded: &'a Recorded,
    pub(crate) pool: Option<&'a Pool>,
    pub(crate) effective: Option<&'a Effective>,
    pub(crate) health: &'a HealthView,
    /// Findings of the offer.
    pub(crate) offer: &'a BTreeSet<Finding>,
    /// Why the driver cannot be used now.
    pub(crate) driver: Option<&'a str>,
    /// The request to release the driver, in words, while it is released.
    pub(crate) released: Option<&'a str>,
    /// The API server's version.
    pub(crate) kubernetes: String,
    /// GPUs whose grant cannot be stored, and why.
    pub(crate) ungranted: &'a BTreeMap<GpuUuid, String>,
    /// Why the plugin's folder takes nothing.
    pub(crate) unwritable: Option<&'a str>,
    /// True while NVIDIA's plugin serves the node.
    pub(crate) nvidia_serves: bool,
    /// The MPS supervisor, while it does not answer.
    pub(crate) supervisor_away: Option<&'a SupervisorAway>,
}

impl Known<'_> {
    pub(crate) fn devices(&self) -> impl Iterator<Item = (&Device, DeviceKind)> {
        let all = self.pool.into_iter().flat_map(Pool::devices);
        all.filter_map(|device| Some((device, DeviceKind::parse(&device.name).ok()?)))
    }

    /// Returns the devices of a GPU that claims to come may be given, tainted or not: without those
    /// for admins, and without those that stay only for their holders.
    pub(crate) fn offered(&self, ordinal: u32) -> impl Iterator<Item = &Device> {
        self.devices()
            .filter(move |(device, kind)| {
                kind.ordinal() == ordinal && kind.sharing.holds() && !device.is_withdrawn()
            })
            .map(|(device, _)| device)
    }

    fn is_sick(&self, gpu: &GpuUuid) -> bool {
        self.health.sick.contains_key(gpu)
    }

    fn is_numbered(&self, gpu: &GpuUuid) -> bool {
        self.recorded.ordinals.of(gpu).is_some()
    }
}

/// Returns everything that people should know.
pub(crate) fn findings(known: &Known<'_>) -> BTreeSet<Finding> {
    let mut all = known.offer.clone();
    all.extend(known.nvidia_serves.then_some(Finding::NvidiaServes));
    all.extend(known.supervisor_away.cloned().map(of_supervisor));
    all.extend(of_driver(known));
    all.extend(of_policies(known));
    all.extend(ill(known));
    all.extend(unmonitored(known));
    all.extend(uncertain(known));
    all.extend(lingering(known));
    all.extend(wedged(known));
    all.extend(gone(known));
    all.extend(unstored(known));
    // Last: it asks whether any of the others explains a GPU that is out of use.
    let unexplained = out_of_use(known, &all);
    all.extend(unexplained);
    all
}

fn of_supervisor(away: SupervisorAway) -> Finding {
    let SupervisorAway { socket, other } = away;
    Finding::SupervisorAway { socket, other }
}

/// Returns the state of the driver. A driver that is released is away on request, and only the
/// request is reported.
fn of_driver(known: &Known<'_>) -> Option<Finding> {
    match (known.released, known.driver) {
        (Some(asked), _) => Some(Finding::DriverReleased {
            asked: asked.to_owned(),
        }),
        (None, Some(why)) => Some(Finding::DriverDown {
            why: why.to_owned(),
        }),
        (None, None) => None,
    }
}

fn of_policies(known: &Known<'_>) -> impl Iterator<Item = Finding> {
    let bad = known.effective.into_iter().flat_map(|it| &it.known.bad);
    bad.map(|(policy, why)| Finding::BadPolicy {
        policy: policy.clone(),
        why: why.clone(),
    })
}

/// Returns faults of GPUs and partitions, and GPUs that cannot be read or are not there.
fn ill(known: &Known<'_>) -> Vec<Finding> {
    let mut all = Vec::new();
    for (gpu, sick) in &known.health.sick {
        let whole = sick.gpu.iter().map(|ailment| (None, *ailment));
        let parts = sick
            .partitions
            .iter()
            .flat_map(|(place, ailments)| ailments.iter().map(|ailment| (Some(*place), *ailment)));
        all.extend(whole.chain(parts).map(|(place, ailment)| Finding::Ill {
            gpu: gpu.clone(),
            place,
            ailment,
        }));
    }
    // Health polls at intervals. Until it has found out, the inventory speaks.
    let Some(inventory) = known.inventory else {
        return all;
    };
    let problems = inventory.problems.iter();
    let problems = problems.filter(|problem| !known.is_sick(&problem.gpu));
    all.extend(problems.map(|problem| Finding::Silent {
        gpu: problem.gpu.clone(),
        error: crate::chain(&problem.error),
    }));
    for (gpu, _) in known.recorded.ordinals.iter() {
        let listed =
            inventory.gpus.contains_key(gpu) || inventory.problems.iter().any(|p| p.gpu == *gpu);
        if !listed && !known.is_sick(gpu) && !known.health.removed.contains(gpu) {
            all.push(Finding::Unlisted { gpu: gpu.clone() });
        }
    }
    all
}

/// Returns GPUs that are there and whose events are not received.
fn unmonitored(known: &Known<'_>) -> Vec<Finding> {
    // A driver that is away has no events either, which is reported as the driver's absence.
    let usable = known.driver.is_none() && known.released.is_none();
    let Some(inventory) = known.inventory.filter(|_| usable) else {
        return Vec::new();
    };
    let all = known.health.unmonitored.iter();
    all.filter(|(gpu, _)| inventory.gpus.contains_key(*gpu))
        .map(|(gpu, unmonitored)| Finding::Unmonitored {
            gpu: gpu.clone(),
            why: unmonitored.why.clone(),
            for_good: unmonitored.for_good,
        })
        .collect()
}

/// Returns GPUs about whose state something is not certain.
fn uncertain(known: &Known<'_>) -> Vec<Finding> {
    let held = &known.recorded.held;
    let claim_of = |uid: &ClaimUid| held.iter().find(|held| held.claim.uid == *uid);
    let mut all = Vec::new();
    for (gpu, fences) in &known.recorded.fences {
        all.extend(fences.iter().map(|fence| {
            Finding::Uncertain {
                gpu: gpu.clone(),
                claim: fence
                    .claim
                    .as_ref()
                    .and_then(&claim_of)
                    .map_or_else(String::new, |held| full_name(&held.claim)),
                reason: fence.reason.clone(),
            }
        }));
    }
    for (uid, head) in &known.recorded.newer {
        all.extend(head.gpus.iter().map(|gpu| Finding::NewerRecord {
            gpu: gpu.clone(),
            claim: head.claim.as_ref().map_or_else(String::new, full_name),
            uid: uid.clone(),
        }));
    }
    all
}

/// Returns claims that were released and hold something all the same.
fn lingering(known: &Known<'_>) -> Vec<Finding> {
    let held = known.recorded.held.iter();
    held.filter(|held| known.recorded.lingering.contains(&held.claim.uid))
        .filter_map(|held| {
            let Phase::Leaving(leaving) = &held.phase else {
                return None;
            };
            Some(Finding::Lingering {
                gpu: held.hold.gpu.clone(),
                device: held.hold.device.clone(),
                claim: full_name(&held.claim),
                reason: leaving.reason.clone(),
                blind: blinding(known, &held.hold.gpu),
            })
        })
        .collect()
}

/// Returns the MPS servers that serve no new program.
fn wedged(known: &Known<'_>) -> impl Iterator<Item = Finding> {
    let servers = known.recorded.mps_servers.iter();
    servers.filter_map(|(of, noted)| {
        let fault = noted.wedged?;
        let is_on_it =
            |held: &&HeldDevice| held.hold.gpu == of.gpu && held.hold.target == of.target;
        let users = known.recorded.held.iter().filter(is_on_it);
        let users: BTreeSet<String> = users.map(|held| full_name(&held.claim)).collect();
        Some(Finding::MpsWedged {
            gpu: of.gpu.clone(),
            place: of.target.place().map(|place| place.placement),
            fault,
            claims: users.into_iter().collect(),
        })
    })
}

/// Returns the fault because of which the processes of a GPU cannot be listed.
fn blinding(known: &Known<'_>, gpu: &GpuUuid) -> Option<Ailment> {
    let sick = known.health.sick.get(gpu)?;
    sick.gpu.iter().copied().find(|ailment| {
        matches!(
            ailment,
            Ailment::Lost | Ailment::Silent | Ailment::Recovery(_)
        )
    })
}

/// Returns what is not in the machine any more: GPUs, and devices that claims hold.
fn gone(known: &Known<'_>) -> Vec<Finding> {
    let removed = known.health.removed.iter();
    // Numbers are soon free again, and a node without one of its GPUs stays trouble.
    let removed =
        removed.filter(|gpu| known.is_numbered(gpu) || known.health.missing.contains(*gpu));
    let removed = removed.map(|gpu| Finding::Removed { gpu: gpu.clone() });
    let held = known.recorded.held.iter().filter_map(|held| {
        let why = known.health.gone_under(&held.hold)?;
        Some(Finding::GoneUnderClaim {
            gpu: held.hold.gpu.clone(),
            device: held.hold.device.clone(),
            claim: full_name(&held.claim),
            why: why.to_owned(),
        })
    });
    removed.chain(held).collect()
}

/// Returns what the plugin cannot write down, so that GPUs or claims have to wait.
fn unstored(known: &Known<'_>) -> impl Iterator<Item = Finding> {
    let all = known.unwritable.map(|why| Finding::NotStored {
        why: why.to_owned(),
    });
    let grants = known.ungranted.iter();
    all.into_iter()
        .chain(grants.map(|(gpu, why)| Finding::GrantNotStored {
            gpu: gpu.clone(),
            why: why.clone(),
        }))
}

/// Returns GPUs of which nothing is offered although no other finding says why: nothing may be out
/// of use without a reason that people can read.
fn out_of_use(known: &Known<'_>, others: &BTreeSet<Finding>) -> Vec<Finding> {
    let (Some(inventory), Some(_), Some(effective)) =
        (known.inventory, known.pool, known.effective)
    else {
        return Vec::new();
    };
    let ordinals = &known.recorded.ordinals;
    // Only a trouble explains a GPU that is out of use: a notice says that nothing is to be done.
    let explains = |other: &Finding, device: &str| {
        let shown = other.shown();
        shown.in_status
            && shown.severity == Severity::Trouble
            && other.object().name(ordinals) == device
    };
    let all = inventory.gpus.keys().filter_map(|gpu| {
        let ordinal = ordinals.of(gpu)?;
        let device = DeviceKind::whole(ordinal).to_string();
        let is_held = |held: &HeldDevice| held.hold.gpu == *gpu;
        if others.iter().any(|other| explains(other, &device))
            || known.offered(ordinal).next().is_some()
            || known.recorded.held.iter().any(is_held)
        {
            return None;
        }
        // The rule first, then what came of it.
        let problems = effective.resolved.problems.iter();
        let problems = problems.filter(|problem| problem.gpu == *gpu);
        let of_pool = known.offer.iter().filter(|one| one.leaves_out(gpu));
        let reasons = problems
            .map(|problem| problem.problem.clone())
            .chain(of_pool.map(ToString::to_string));
        Some(Finding::OutOfUse {
            gpu: gpu.clone(),
            by: effective.resolved.by.get(gpu).cloned(),
            reasons: reasons.collect(),
        })
    });
    all.collect()
}

fn full_name(claim: &ClaimRef) -> String {
    format!("{}/{}", claim.namespace, claim.name)
}
