//! The rounds: what was noted is compared with what the driver says, and with who uses the GPUs.

use std::collections::{BTreeMap, BTreeSet};

use divvy_claims::ClaimRef;
use divvy_model::{GpuErrorCode, GpuUuid, lock};

use super::cap::{Capper, Trouble};
use super::claims::Held;
use super::ledger::Noted;
use super::note::PodCaps;
use super::rebuild::find_pod;

/// A fault that a round has put right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repair {
    /// The driver had forgotten the cap: it was loaded anew, or no program had the GPU open.
    Restored,
    /// A container ran without its cap: its runtime has not called the hook.
    Late,
    /// A limit that an earlier group left hid the cap from programs of a container.
    Hidden,
    /// The note of the pod could not be read, and was made again.
    Rebuilt,
}

impl Repair {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::Restored, Self::Late, Self::Hidden, Self::Rebuilt];

    /// Returns the reason of its Event.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Restored => "limit-restored",
            Self::Late => "memory-capped-late",
            Self::Hidden => "memory-cap-hidden",
            Self::Rebuilt => "limits-rebuilt",
        }
    }

    /// Returns it for the people whose claim it is about.
    pub(crate) fn note(self, bytes: u64) -> String {
        let mib = bytes >> 20;
        match self {
            Self::Restored => format!(
                "The driver had forgotten that the memory of a pod of this claim is capped at {mib} MiB (it was loaded again, or no program had the GPU open); it is capped again. What was allocated meanwhile is not counted"
            ),
            Self::Late => format!(
                "A container of this claim ran without a cap of its memory, since its container runtime had not called divvy's program (is CDI switched on in the runtime?); the pod is capped at {mib} MiB now. What it allocated before is not counted"
            ),
            Self::Hidden => format!(
                "Programs of a container of this claim ran in a control group at whose address the driver had kept the limit of an earlier one; the pod is capped at {mib} MiB again"
            ),
            Self::Rebuilt => format!(
                "The node plugin's note of the shares of a pod of this claim could not be read and was made again; the pod stays capped at {mib} MiB"
            ),
        }
    }
}

/// A cap that a round has set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Repaired {
    pub(crate) what: Repair,
    pub(crate) pod: String,
    pub(crate) gpu: GpuUuid,
    pub(crate) bytes: u64,
    /// The claims whose shares it is of.
    pub(crate) claims: Vec<ClaimRef>,
}

/// The results of a round.
#[derive(Debug, Default)]
pub(crate) struct Round {
    pub(crate) repaired: Vec<Repaired>,
    pub(crate) errors: Vec<String>,
}

/// The capped shares that claims have.
pub(super) struct Shares(Vec<(Held, u64)>);

impl Shares {
    pub(super) fn of_pod<'s>(&'s self, pod: &'s str) -> impl Iterator<Item = &'s (Held, u64)> {
        let has = move |held: &Held| held.pods.iter().any(|of| of.uid == pod);
        self.0.iter().filter(move |(held, _)| has(held))
    }

    /// Returns a pod's note with the shares that records say it has.
    pub(super) fn added_to(&self, caps: PodCaps, pod: &str) -> PodCaps {
        self.of_pod(pod).fold(caps, |caps, (held, bytes)| {
            caps.with(&held.gpu, held.name(), *bytes)
        })
    }

    pub(super) fn repaired(
        &self,
        what: Repair,
        pod: &str,
        caps: &PodCaps,
        gpu: &GpuUuid,
    ) -> Repaired {
        Repaired {
            what,
            pod: pod.to_owned(),
            gpu: gpu.clone(),
            bytes: caps.sum(gpu),
            claims: self.claims(caps, gpu),
        }
    }

    /// Returns the claims that a pod's note names.
    fn claims(&self, caps: &PodCaps, gpu: &GpuUuid) -> Vec<ClaimRef> {
        let noted: BTreeSet<&str> = caps.claims(gpu).collect();
        let of = |(held, _): &(Held, u64)| {
            let claim = &held.claim;
            noted.contains(claim.uid.as_str()).then(|| claim.clone())
        };
        let found: BTreeSet<ClaimRef> = self.0.iter().filter_map(of).collect();
        found.into_iter().collect()
    }
}

impl Capper {
    pub(super) fn shares(&self) -> Result<Shares, Trouble> {
        let held = self.claims.held().map_err(Trouble::Claims)?.into_iter();
        let capped = held.filter_map(|held| {
            let bytes = held.bytes?;
            Some((held, bytes))
        });
        Ok(Shares(capped.collect()))
    }

    /// Returns whether any claim here calls for a cap, or any pod is noted.
    pub(crate) fn is_needed(&self) -> bool {
        // A record that cannot be read may be of such a claim.
        self.claims.held().map_or(true, |held| !held.is_empty())
            || self.ledger.pods().map_or(true, |pods| !pods.is_empty())
    }

    /// Sets caps again that the driver has forgotten, sets those that a container has not called
    /// for or that an earlier limit hides, and forgets pods that are gone. Stops where `is_there`
    /// says that the driver is not there any more.
    pub(crate) fn round(&self, is_there: &(dyn Fn() -> bool + Sync)) -> Round {
        let mut round = Round::default();
        let shares = self.shares().unwrap_or_else(|error| {
            round.errors.push(error.to_string());
            Shares(Vec::new())
        });
        // Phase 1: the notes, without a call of the driver.
        let pods = self.ledger.pods().unwrap_or_else(|error| {
            round.errors.push(crate::chain(&error));
            Vec::new()
        });
        let mut noted = BTreeMap::new();
        let mut gpus: BTreeSet<GpuUuid> =
            shares.0.iter().map(|(held, _)| held.gpu.clone()).collect();
        for pod in pods {
            match self.tidy(&pod, &shares) {
                Ok(Some((caps, what))) => {
                    gpus.extend(caps.sums().map(|(gpu, _)| gpu.clone()));
                    noted.insert(pod, what);
                }
                Ok(None) => {}
                Err(error) => round
                    .errors
                    .push(format!("pod {pod}: {}", crate::chain(&error))),
            }
        }
        // Phase 2: the driver's limits. A GPU that hangs keeps no other from its caps.
        let (noted, shares) = (&noted, &shares);
        let found = std::thread::scope(|scope| {
            let of_gpu = |gpu| scope.spawn(move || self.round_of(gpu, noted, shares, is_there));
            let threads: Vec<_> = gpus.iter().map(of_gpu).collect();
            threads
                .into_iter()
                .map(std::thread::ScopedJoinHandle::join)
                .collect::<Vec<_>>()
        });
        for found in found {
            match found {
                Ok(of_gpu) => {
                    round.repaired.extend(of_gpu.repaired);
                    round.errors.extend(of_gpu.errors);
                }
                Err(_) => round.errors.push("a round of a GPU died".to_owned()),
            }
        }
        round.repaired.append(&mut lock(&self.rebuilt));
        round
    }

    /// Brings a pod's note up to date. Returns it, and the fault that a cap which is missing then
    /// stands for; `None` for a pod that is gone, whose note is removed.
    fn tidy(&self, pod: &str, shares: &Shares) -> Result<Option<(PodCaps, Repair)>, Trouble> {
        let _alone = self.ledger.lock()?;
        let caps = match self.ledger.read(pod)? {
            Noted::Nothing => return Ok(None),
            Noted::Shares(caps) => caps,
            Noted::Torn(why) => match find_pod(&self.groups, pod) {
                Some(group) => self.rebuild(pod, &group, &why)?,
                None => PodCaps::default(),
            },
        };
        if caps.group.is_empty() || !self.groups.join(&caps.group).exists() {
            self.ledger.remove(pod)?;
            return Ok(None);
        }
        if !caps.of_records {
            return Ok(Some((caps, Repair::Restored)));
        }
        // A note that was made again lacks what records did not say then.
        let known = shares.added_to(caps.clone(), pod);
        if known == caps {
            return Ok(Some((caps, Repair::Restored)));
        }
        self.ledger.write(pod, &known)?;
        Ok(Some((known, Repair::Rebuilt)))
    }

    /// Looks after the caps of one GPU.
    fn round_of(
        &self,
        gpu: &GpuUuid,
        noted: &BTreeMap<String, Repair>,
        shares: &Shares,
        is_there: &(dyn Fn() -> bool + Sync),
    ) -> Round {
        let mut round = Round::default();
        // Phase 1: what is noted, pod by pod. Each under the lock for itself: a hook waits for it.
        for (pod, what) in noted.iter().take_while(|_| is_there()) {
            match self.keep(gpu, pod, *what, shares) {
                Ok(repaired) => round.repaired.extend(repaired),
                Err(error) => {
                    round
                        .errors
                        .push(format!("pod {pod}: {}", crate::chain(&error)));
                    // The next call would wait as long.
                    if is_silent(&error) {
                        return round;
                    }
                }
            }
        }
        // Phase 2: who uses the GPU, and is noted nowhere or kept from its pod's cap.
        if is_there() {
            self.cap_late(gpu, shares, &mut round);
        }
        round
    }

    /// Sets the limits of a noted pod unless they are there. Returns what was put right.
    fn keep(
        &self,
        gpu: &GpuUuid,
        pod: &str,
        what: Repair,
        shares: &Shares,
    ) -> Result<Option<Repaired>, Trouble> {
        let _alone = self.ledger.lock_gpu(gpu)?;
        let Noted::Shares(caps) = self.ledger.read(pod)? else {
            return Ok(None);
        };
        let caps = self.settled(gpu, pod, caps)?;
        if !caps.has(gpu) {
            return Ok(None);
        }
        let (caps, has_gone) = self.without_gone(gpu, caps);
        if has_gone {
            self.edit(pod, &caps.group, |noted| self.without_gone(gpu, noted).0)?;
        }
        let entries = self.set_entries(gpu, &caps, false)?;
        // What a pod has is divided again when containers end or free memory.
        let is_divided = has_gone || !caps.parts(gpu).apart.is_empty();
        let is_fault = entries.changed && (entries.missed || !is_divided);
        Ok(is_fault.then(|| shares.repaired(what, pod, &caps, gpu)))
    }
}

/// Returns whether a GPU has not answered in time.
pub(super) fn is_silent(trouble: &Trouble) -> bool {
    match trouble {
        Trouble::Gpu(error) => error.code == GpuErrorCode::TIMEOUT,
        Trouble::Notes(error) => error.kind() == std::io::ErrorKind::TimedOut,
        Trouble::Claims(_) | Trouble::Hidden { .. } => false,
    }
}
