//! Claims that use more memory than they were granted, and claims that are idle: what has become
//! so, and is over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_claims::{ClaimRef, PodRef};
use divvy_model::{ClaimUid, DeviceName, GpuUuid};

use crate::attribute::{DeviceUsage, GpuUsage};
use crate::due::{Due, Harm, UsagePolicy};
use crate::groups::Group;
use crate::reading::{Figure, Unknown};

/// Readings in a row that count: a single one may be of a moment in which a claim changed.
const READINGS: u32 = 2;

/// Returns the bytes by which a claim may be above what it may use. The contexts of its processes
/// count as used, and are some hundred MiB each.
pub fn margin(allowed: u64) -> u64 {
    const LEAST: u64 = 256 << 20;
    (allowed / 20).max(LEAST)
}

/// A change of a claim's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A share is over its grant, or no longer.
    Overuse {
        claim: ClaimRef,
        device: DeviceName,
        over: bool,
        /// Bytes, of all claims that use the GPU together with this one.
        used: u64,
        /// Bytes that they may use.
        allowed: u64,
        /// True if the driver keeps that limit.
        capped: bool,
    },
    /// A claim is idle, or no longer.
    Idle {
        claim: ClaimRef,
        idle: bool,
        /// After so long without any use.
        after: Duration,
        /// Its pods are to go if it is idle for so long more.
        reclaim: Option<Duration>,
    },
    /// The pods of a claim are to be evicted, because of its use of a device, or no longer.
    Due {
        claim: ClaimRef,
        device: DeviceName,
        due: Option<Due>,
    },
}

/// State of all claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdicts {
    /// Shares by claim and device, `true` for those over their grants.
    pub over: BTreeMap<(ClaimUid, DeviceName), bool>,
    /// Time for which claims have been idle; claims of which that is not known are left out.
    pub idle: BTreeMap<ClaimUid, Duration>,
}

/// Follows claims.
#[derive(Debug, Clone)]
pub struct Watch {
    /// A claim is idle after so long without any use, where no policy says otherwise.
    idle_after: Duration,
    shares: BTreeMap<(ClaimUid, DeviceName), Share>,
    claims: BTreeMap<ClaimUid, Claim>,
    harms: BTreeMap<GpuUuid, Harm>,
    due: BTreeMap<(ClaimRef, DeviceName), Due>,
}

/// A claim with everything that it holds.
struct Held {
    claim: ClaimRef,
    devices: Vec<DeviceName>,
    pods: BTreeSet<PodRef>,
    quiet: Figure<bool>,
    after: Duration,
    reclaim: Option<Duration>,
}

impl Held {
    fn add(&mut self, device: &DeviceUsage, after: Duration, policy: UsagePolicy) {
        self.devices.push(device.device.clone());
        self.pods.extend(device.holders.iter().cloned());
        self.quiet = all_quiet(self.quiet, device.quiet);
        self.after = self.after.max(after);
        let reclaim = policy.reclaim.filter(|_| device.kind.sharing.holds());
        // All devices must allow it, and the longest grace counts: evicting a pod takes all of its
        // devices away.
        self.reclaim = self.reclaim.zip(reclaim).map(|(one, other)| one.max(other));
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Share {
    /// The reported state.
    over: bool,
    /// Number of readings in a row that say otherwise.
    against: u32,
    /// The last reading.
    number: u64,
    /// The last reading said something of it.
    known: bool,
}

#[derive(Debug, Clone, Default)]
struct Claim {
    /// Time since when nothing of it computes.
    quiet: Option<Duration>,
    /// The pods that had it then.
    pods: BTreeSet<PodRef>,
    known: bool,
    idle: bool,
}

impl Watch {
    /// A claim is idle after so long without any use, where no policy says otherwise.
    pub fn new(idle_after: Duration) -> Self {
        Self {
            idle_after,
            shares: BTreeMap::new(),
            claims: BTreeMap::new(),
            harms: BTreeMap::new(),
            due: BTreeMap::new(),
        }
    }

    /// Learns what is used on all GPUs, and what is said of them; `now` is any time that only
    /// grows. Claims that are not there any more are forgotten.
    pub fn step(
        &mut self,
        gpus: &BTreeMap<GpuUuid, GpuUsage>,
        policies: &BTreeMap<GpuUuid, UsagePolicy>,
        now: Duration,
    ) -> Vec<Change> {
        let policy = |gpu: &GpuUuid| policies.get(gpu).copied().unwrap_or_default();
        // Phase 1: the claims that are there now, with everything that each holds.
        let there = self.there(gpus, policy);
        // Phase 2: memory of shares against their grants.
        let mut changes = self.learn_shares(gpus);
        // Phase 3: time without use, for each claim as a whole. A claim that went and came back
        // starts anew.
        self.claims.retain(|uid, _| there.contains_key(uid));
        for (uid, held) in &there {
            let state = self.claims.entry(uid.clone()).or_default();
            let before = state.idle;
            // Pods before figures: with a new pod the time without use begins anew, from this
            // reading.
            state.come(&held.pods);
            state.learn(held.after, held.quiet, now);
            if state.idle != before {
                let (claim, idle) = (held.claim.clone(), state.idle);
                changes.push(Change::Idle {
                    claim,
                    idle,
                    after: held.after,
                    reclaim: held.reclaim,
                });
            }
        }
        // Phase 4: pods to be evicted. It looks at the states that were learnt above, so it comes
        // last.
        let due = self.due_now(gpus, policy, &there, now);
        // A claim that is gone needs no report that it is no longer due.
        let gone = self
            .due
            .keys()
            .filter(|key| !due.contains_key(key) && there.contains_key(&key.0.uid));
        let gone = gone.map(|key| (key, None));
        let news = due
            .iter()
            .filter(|(key, why)| self.due.get(key) != Some(why));
        for ((claim, device), due) in gone.chain(news.map(|(key, why)| (key, Some(*why)))) {
            changes.push(Change::Due {
                claim: claim.clone(),
                device: device.clone(),
                due,
            });
        }
        self.due = due;
        changes
    }

    fn there(
        &self,
        gpus: &BTreeMap<GpuUuid, GpuUsage>,
        policy: impl Fn(&GpuUuid) -> UsagePolicy,
    ) -> BTreeMap<ClaimUid, Held> {
        let mut there = BTreeMap::<ClaimUid, Held>::new();
        for (uuid, device) in gpus
            .iter()
            .flat_map(|(uuid, gpu)| gpu.devices.iter().map(move |d| (uuid, d)))
        {
            let policy = policy(uuid);
            let after = policy.idle_after.unwrap_or(self.idle_after);
            let held = there
                .entry(device.claim.uid.clone())
                .or_insert_with(|| Held {
                    claim: device.claim.clone(),
                    devices: Vec::new(),
                    pods: BTreeSet::new(),
                    quiet: Ok(true),
                    after,
                    // Neutral: `add` takes the longest grace, and drops it for good at a device
                    // that has none.
                    reclaim: Some(Duration::ZERO),
                });
            held.add(device, after, policy);
        }
        there
    }

    /// Returns the claims whose pods are to go: because of overuse, if of both.
    fn due_now(
        &mut self,
        gpus: &BTreeMap<GpuUuid, GpuUsage>,
        policy: impl Fn(&GpuUuid) -> UsagePolicy,
        there: &BTreeMap<ClaimUid, Held>,
        now: Duration,
    ) -> BTreeMap<(ClaimRef, DeviceName), Due> {
        let mut due = BTreeMap::new();
        for held in there.values() {
            let state = self
                .claims
                .get(&held.claim.uid)
                .filter(|state| state.idle && state.known);
            let quiet = state
                .and_then(|state| state.quiet)
                .map(|since| now.saturating_sub(since));
            if quiet
                .zip(held.reclaim)
                .is_some_and(|(quiet, grace)| quiet >= held.after + grace)
            {
                due.extend(
                    held.devices
                        .iter()
                        .map(|device| ((held.claim.clone(), device.clone()), Due::Idle)),
                );
            }
        }
        // Built anew in each step: a GPU whose policy no longer evicts loses its memory of harm.
        let mut harms = BTreeMap::new();
        for (uuid, gpu) in gpus.iter().filter(|(uuid, _)| policy(uuid).evict) {
            let over = |claim: &ClaimRef, device: &DeviceName| {
                self.shares
                    .get(&(claim.uid.clone(), device.clone()))
                    .is_some_and(|share| share.over)
            };
            let Some(harm) = Harm::after(self.harms.remove(uuid), gpu, over, now) else {
                continue;
            };
            due.extend(harm.due().iter().map(|share| (share.clone(), Due::Overuse)));
            harms.insert(uuid.clone(), harm);
        }
        self.harms = harms;
        due
    }

    fn learn_shares(&mut self, gpus: &BTreeMap<GpuUuid, GpuUsage>) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut shares = BTreeMap::new();
        for gpu in gpus.values() {
            for group in &gpu.groups {
                for (claim, device) in &group.shares {
                    let key = (claim.uid.clone(), device.clone());
                    let mut state = self.shares.get(&key).copied().unwrap_or_default();
                    let change = state.learn(gpu.number, group);
                    shares.insert(key, state);
                    changes.extend(change.map(|(over, used, allowed)| Change::Overuse {
                        claim: claim.clone(),
                        device: device.clone(),
                        over,
                        used,
                        allowed,
                        capped: group.capped,
                    }));
                }
            }
        }
        self.shares = shares;
        changes
    }

    /// A share was reported as over its grant before this began.
    pub fn was_over(&mut self, claim: &ClaimUid, device: &DeviceName) {
        self.shares
            .entry((claim.clone(), device.clone()))
            .or_default()
            .over = true;
    }

    /// A claim was reported as idle before this began.
    pub fn was_idle(&mut self, claim: &ClaimUid) {
        let new = Claim {
            idle: true,
            ..Claim::default()
        };
        self.claims.insert(claim.clone(), new);
    }

    /// Returns the state after the last step.
    pub fn verdicts(&self, now: Duration) -> Verdicts {
        let over = self.shares.iter().filter(|(_, share)| share.known);
        let idle = self.claims.iter().filter(|(_, claim)| claim.known);
        let for_so_long = |claim: &Claim| {
            claim
                .quiet
                .map_or(Duration::ZERO, |since| now.saturating_sub(since))
        };
        Verdicts {
            over: over.map(|(key, share)| (key.clone(), share.over)).collect(),
            idle: idle
                .map(|(uid, claim)| (uid.clone(), for_so_long(claim)))
                .collect(),
        }
    }
}

/// Combines two devices: one in use decides, whatever is not known of the other.
fn all_quiet(one: Figure<bool>, other: Figure<bool>) -> Figure<bool> {
    match (one, other) {
        (Ok(false), _) | (_, Ok(false)) => Ok(false),
        (Ok(true), Ok(true)) => Ok(true),
        (Err(why), _) | (_, Err(why)) => Err(why),
    }
}

impl Share {
    /// Returns the new state with the bytes used and allowed, if it is another.
    fn learn(&mut self, number: u64, group: &Group) -> Option<(bool, u64, u64)> {
        // The same reading again is no second witness.
        if number == self.number {
            return None;
        }
        self.number = number;
        let (used, allowed): (Result<u64, Unknown>, _) = (group.used, group.allowed);
        self.known = used.is_ok() && allowed.is_ok();
        // A gap in the readings starts the count again, and leaves the reported state as it is.
        let (Ok(used), Ok(allowed)) = (used, allowed) else {
            self.against = 0;
            return None;
        };
        let over = used > allowed.saturating_add(margin(allowed));
        self.against = if over == self.over {
            0
        } else {
            self.against + 1
        };
        // A single reading may catch a short peak: report only what lasts.
        if self.against < READINGS {
            return None;
        }
        (self.over, self.against) = (over, 0);
        Some((over, used, allowed))
    }
}

impl Claim {
    /// Learns the pods that have it now. A pod that was not there before has all of the time, not
    /// what the others left of it.
    fn come(&mut self, pods: &BTreeSet<PodRef>) {
        if !pods.is_subset(&self.pods) {
            self.quiet = None;
        }
        self.pods.clone_from(pods);
    }

    fn learn(&mut self, after: Duration, quiet: Figure<bool>, now: Duration) {
        self.known = quiet.is_ok();
        match quiet {
            Ok(true) => {
                let since = *self.quiet.get_or_insert(now);
                self.idle |= now.saturating_sub(since) >= after;
            }
            Ok(false) => (self.quiet, self.idle) = (None, false),
            // There may have been use that was not seen; a report stays until use is seen.
            Err(_) => self.quiet = None,
        }
    }
}
