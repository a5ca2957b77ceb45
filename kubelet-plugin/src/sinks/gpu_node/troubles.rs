//! Pure: what is wrong with a node and its GPUs, why, and what to do about it.

use std::collections::BTreeSet;

use divvy_api::node::Trouble;
use divvy_claims::Phase;
use divvy_model::health::Ailment;
use divvy_model::mig::Placement;
use divvy_model::{ClaimUid, DeviceKind, GpuUuid};
use divvy_offer::{Note, removal_of_foreign, taint};

use super::Facts;
use crate::neighbours::Use;

/// Everything that is wrong, then what is only worth knowing: with the node first, then by GPU.
pub(super) fn troubles(facts: &Facts<'_>) -> Vec<Trouble> {
    let mut all = of_node(facts);
    all.extend(ill(facts));
    all.extend(unheard(facts));
    all.extend(uncertain(facts));
    all.extend(lingering(facts));
    all.extend(others(facts));
    all.extend(noted(facts));
    all.sort_by_cached_key(|one| {
        (one.notice, ordinal(&one.gpu), one.kind.clone(), one.subject.clone(), one.claim.clone())
    });
    all
}

fn ordinal(gpu: &str) -> Option<u32> {
    let kind = DeviceKind::parse(&gpu.parse().ok()?).ok()?;
    Some(kind.ordinal())
}

/// `gpu-3`, or the UUID of a GPU that has no number.
fn name(facts: &Facts<'_>, gpu: &GpuUuid) -> String {
    facts
        .recorded
        .ordinals
        .of(gpu)
        .map_or_else(|| gpu.to_string(), |ordinal| DeviceKind::Whole { ordinal }.to_string())
}

fn slices(at: Placement) -> String {
    format!("memory slices {}..{}", at.start, at.end().saturating_sub(1))
}

fn of_node(facts: &Facts<'_>) -> Vec<Trouble> {
    let mut all = Vec::new();
    match (facts.released, facts.driver) {
        (Some(asked), _) => all.push(Trouble {
            kind: "driver-released".to_owned(),
            notice: true,
            why: format!("the NVIDIA driver is released on request: {asked}"),
            remedy: "divvy uses the driver again when the request ends".to_owned(),
            ..Trouble::default()
        }),
        (None, Some(why)) => all.push(Trouble {
            kind: "driver-down".to_owned(),
            why: why.to_owned(),
            remedy: "install or repair the NVIDIA driver (check `nvidia-smi`, the driver's pod, and --driver-root); divvy continues when the driver answers".to_owned(),
            ..Trouble::default()
        }),
        (None, None) => {}
    }
    if let Some(effective) = facts.effective {
        all.extend(effective.known.bad.iter().map(|(policy, why)| Trouble {
            kind: "bad-policy".to_owned(),
            subject: policy.clone(),
            why: why.clone(),
            remedy: format!(
                "correct it with `kubectl edit gpupolicy {policy}`; until then, its last readable version stays in force"
            ),
            ..Trouble::default()
        }));
        all.extend(effective.resolved.problems.iter().map(|problem| Trouble {
            kind: "rule-without-effect".to_owned(),
            notice: true,
            gpu: name(facts, &problem.gpu),
            subject: problem.rule.to_string(),
            why: problem.problem.clone(),
            remedy: format!("check the rule with `kubectl edit gpupolicy {}`", problem.rule.policy),
            ..Trouble::default()
        }));
    }
    all.extend(facts.one_mode.map(|why| Trouble {
        kind: "one-mode".to_owned(),
        notice: true,
        subject: why.name().to_owned(),
        why: format!("each GPU is offered in one mode instead of several: {why}"),
        remedy: "see docs/sharing.md for the requirements of several modes per GPU".to_owned(),
        ..Trouble::default()
    }));
    all
}

/// What the health of GPUs and partitions says, and GPUs that cannot be read or are not there.
fn ill(facts: &Facts<'_>) -> Vec<Trouble> {
    let trouble = |gpu: &GpuUuid, ailment: Ailment, place: Option<Placement>| {
        let taint = taint(ailment, false);
        let subject = match (place, ailment) {
            (Some(place), _) => slices(place),
            // Each Xid and each recovery has a time of its own.
            (None, Ailment::Xid(_) | Ailment::Recovery(_)) => taint.value.clone().unwrap_or_default(),
            (None, _) => String::new(),
        };
        let part = if place.is_some() { "a partition of the GPU" } else { "the GPU" };
        Trouble {
            kind: taint.key.rsplit('/').next().unwrap_or(&taint.key).to_owned(),
            gpu: name(facts, gpu),
            subject,
            why: format!("{part} {ailment}"),
            remedy: ailment.remedy().to_owned(),
            ..Trouble::default()
        }
    };
    let mut all = Vec::new();
    for (gpu, sick) in &facts.health.sick {
        all.extend(sick.gpu.iter().map(|ailment| trouble(gpu, *ailment, None)));
        for (place, ailments) in &sick.partitions {
            all.extend(ailments.iter().map(|ailment| trouble(gpu, *ailment, Some(*place))));
        }
    }
    let Some(inventory) = facts.inventory else { return all };
    let is_sick = |gpu: &GpuUuid| facts.health.sick.contains_key(gpu);
    for problem in inventory.problems.iter().filter(|problem| !is_sick(&problem.gpu)) {
        let mut unreadable = trouble(&problem.gpu, Ailment::Silent, None);
        unreadable.why = format!("the GPU cannot be read: {}", crate::chain(&problem.error));
        all.push(unreadable);
    }
    for (gpu, _) in facts.recorded.ordinals.iter() {
        let listed = inventory.gpus.contains_key(gpu) || inventory.problems.iter().any(|p| p.gpu == *gpu);
        if !listed && !is_sick(gpu) && !facts.health.removed.contains(gpu) {
            let mut lost = trouble(gpu, Ailment::Lost, None);
            "the driver no longer lists the GPU".clone_into(&mut lost.why);
            all.push(lost);
        }
    }
    all
}

/// GPUs that are there and whose events are not heard.
fn unheard(facts: &Facts<'_>) -> Vec<Trouble> {
    let usable = facts.driver.is_none() && facts.released.is_none();
    let Some(inventory) = facts.inventory.filter(|_| usable) else { return Vec::new() };
    let there = facts.health.unmonitored.iter().filter(|(gpu, _)| inventory.gpus.contains_key(*gpu));
    let all = there.map(|(gpu, unheard)| Trouble {
        kind: "unmonitored".to_owned(),
        notice: unheard.for_good,
        gpu: name(facts, gpu),
        why: format!("the plugin receives no events (Xids) of it, so that only polls detect faults: {}", unheard.why),
        remedy: if unheard.for_good {
            String::new()
        } else {
            "check the driver's messages (`dmesg | grep NVRM`); the plugin retries every few seconds; if this does not end, restart the plugin's pod on this node".to_owned()
        },
        ..Trouble::default()
    });
    all.collect()
}

fn uncertain(facts: &Facts<'_>) -> Vec<Trouble> {
    let claim_of = |uid: &ClaimUid| facts.recorded.held.iter().find(|held| held.claim.uid == *uid);
    let of_steps = facts.recorded.fences.iter().flat_map(|(gpu, fences)| fences.iter().map(move |fence| (gpu, fence))).map(|(gpu, fence)| Trouble {
        kind: "fenced".to_owned(),
        gpu: name(facts, gpu),
        claim: fence.claim.as_ref().and_then(&claim_of).map_or_else(String::new, |held| full_name(&held.claim)),
        why: format!("the state of the GPU is uncertain: {}", fence.reason),
        remedy: "this ends when the GPU is empty and can be read; otherwise let its pods end and remove MIG instances that no claim holds (`nvidia-smi mig -lgi`), or reboot the node".to_owned(),
        ..Trouble::default()
    });
    let of_later = facts.recorded.newer.iter().flat_map(|(uid, head)| {
        head.gpus.iter().map(move |gpu| Trouble {
            kind: "fenced".to_owned(),
            gpu: name(facts, gpu),
            subject: format!("record {uid}"),
            claim: head.claim.as_ref().map_or_else(String::new, full_name),
            why: "the record of a claim on it was written by a later version of divvy".to_owned(),
            remedy: "run that version until the claim is released".to_owned(),
            ..Trouble::default()
        })
    });
    of_steps.chain(of_later).collect()
}

fn lingering(facts: &Facts<'_>) -> Vec<Trouble> {
    let mut listed = BTreeSet::new();
    let held = facts.recorded.held.iter().filter(|held| facts.recorded.lingering.contains(&held.claim.uid));
    let all = held.filter_map(|held| {
        let Phase::Leaving(leaving) = &held.phase else { return None };
        let subject = held.hold.device.to_string();
        listed.insert((subject.clone(), held.claim.uid.clone())).then(|| Trouble {
            kind: "lingering".to_owned(),
            gpu: name(facts, &held.hold.gpu),
            subject,
            claim: full_name(&held.claim),
            why: format!("the claim was released but still holds it: {}", leaving.reason),
            remedy: "find out why the process runs (`cat /proc/PID/cgroup` shows its pod) and end it; the device is free within seconds".to_owned(),
            ..Trouble::default()
        })
    });
    all.collect()
}

fn others(facts: &Facts<'_>) -> Vec<Trouble> {
    let uses = facts.neighbours.iter().flat_map(|(gpu, uses)| {
        uses.iter().map(move |used| Trouble {
            kind: "neighbour".to_owned(),
            gpu: name(facts, gpu),
            subject: match used {
                Use::DevicePlugin { resource, to } => format!("{resource} of {to}"),
                Use::Driver { name, to } => format!("{name} of {to}"),
                // Their ids come and go.
                Use::Processes { .. } => "processes".to_owned(),
            },
            why: used.to_string(),
            remedy: match used {
                Use::Processes { .. } => "end the process, or remove the label divvy.dev/gpu from this node".to_owned(),
                Use::DevicePlugin { .. } | Use::Driver { .. } => {
                    "a GPU belongs to one driver: remove the label divvy.dev/gpu or the other driver from this node".to_owned()
                }
            },
            ..Trouble::default()
        })
    });
    let instances = facts.foreign.iter().map(|(gpu, at)| Trouble {
        kind: "foreign".to_owned(),
        gpu: name(facts, gpu),
        subject: slices(*at),
        why: "the GPU has a MIG instance that divvy did not create".to_owned(),
        remedy: removal_of_foreign(gpu),
        ..Trouble::default()
    });
    uses.chain(instances).collect()
}

/// Notes of the offer that no other trouble reports.
fn noted(facts: &Facts<'_>) -> Vec<Trouble> {
    let all = facts.notes.iter().filter_map(|note| {
        let (kind, gpu, subject, notice) = match note {
            Note::GivenTwice { gpu, .. } => ("given-twice", format!("gpu-{gpu}"), String::new(), false),
            Note::HeldUnknown { device } => ("unknown-device", String::new(), device.to_string(), false),
            Note::HeldAndGone { device } => {
                let kind = DeviceKind::parse(device).ok()?;
                ("held-and-gone", format!("gpu-{}", kind.ordinal()), device.to_string(), false)
            }
            Note::NothingOffered { gpu } => ("not-offered", name(facts, gpu), String::new(), false),
            Note::NeedsReset { gpu } => ("needs-reset", name(facts, gpu), String::new(), true),
            Note::MigModeOn { gpu } => ("mig-mode-on", name(facts, gpu), String::new(), true),
            Note::NoShares { gpu } => ("no-shares", name(facts, gpu), String::new(), true),
            Note::NoCounters { gpu } => ("no-partitions", name(facts, gpu), String::new(), true),
            _ => return None,
        };
        let remedy = match note {
            Note::GivenTwice { .. } => "end the pods of one of these claims",
            Note::HeldUnknown { .. } => "delete the claim and its pods",
            Note::HeldAndGone { .. } => "delete the pod that uses it",
            Note::NothingOffered { .. } => "check the rule of its GpuPolicy",
            _ => "",
        };
        Some(Trouble {
            kind: kind.to_owned(),
            notice,
            gpu,
            subject,
            why: note.to_string(),
            remedy: remedy.to_owned(),
            ..Trouble::default()
        })
    });
    all.collect()
}

fn full_name(claim: &divvy_claims::ClaimRef) -> String {
    format!("{}/{}", claim.namespace, claim.name)
}

#[cfg(test)]
mod tests;
