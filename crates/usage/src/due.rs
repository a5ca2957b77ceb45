//! Claims whose pods are to be evicted, where the policy of a GPU says so: shares that use so much that others cannot get
//! what they were granted, and claims that are idle for too long.

use std::time::Duration;

use divvy_claims::ClaimRef;
use divvy_model::DeviceName;

use crate::attribute::GpuUsage;
use crate::groups::Group;
use crate::watch::margin;

/// A share harms others for so long before its pods are to go.
const HARM: Duration = Duration::from_mins(1);

/// What the policy of a GPU says of the use of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsagePolicy {
    /// After so long without any use a claim is idle, if not after the default.
    pub idle_after: Option<Duration>,
    /// Whether shares that harm others are to go.
    pub evict: bool,
    /// Claims are to go that are idle for so long more.
    pub reclaim: Option<Duration>,
}

/// Why the pods of a claim are to be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// A share uses more than it was granted, and others cannot get what they were.
    Overuse,
    /// The claim is idle.
    Idle,
}

/// The shares of a GPU that harm others, since when.
#[derive(Debug, Clone)]
pub(crate) struct Harm {
    shares: Vec<(ClaimRef, DeviceName)>,
    since: Duration,
    number: u64,
}

impl Harm {
    /// What is so after the latest reading, and since when.
    pub(crate) fn after(
        before: Option<Self>,
        gpu: &GpuUsage,
        over: impl Fn(&ClaimRef, &DeviceName) -> bool,
        now: Duration,
    ) -> Option<Self> {
        let shares = harmful(gpu, over)?.shares.clone();
        let same = before.filter(|before| before.shares == shares);
        Some(same.unwrap_or(Self { shares, since: now, number: gpu.number }))
    }

    /// The shares whose pods are to go: another reading has said the same, a while later.
    pub(crate) fn due(&self, gpu: &GpuUsage, now: Duration) -> &[(ClaimRef, DeviceName)] {
        let is_due = gpu.number > self.number && now.saturating_sub(self.since) >= HARM;
        if is_due { &self.shares } else { &[] }
    }
}

/// Of the shares over their grants those with the largest excess, if less memory is free than the other shares may still
/// take. Nothing is said of a GPU of which a figure is not known.
fn harmful(gpu: &GpuUsage, over: impl Fn(&ClaimRef, &DeviceName) -> bool) -> Option<&Group> {
    let memory = gpu.memory.ok()?;
    gpu.unattributed.ok()?;
    let known = |group| -> Option<(&Group, u64, u64)> {
        let group: &Group = group;
        Some((group, group.used.ok()?, group.granted.ok()?))
    };
    let known: Vec<_> = gpu.groups.iter().map(known).collect::<Option<_>>()?;
    // What was reported is two readings behind: a share that is within its grant again does no harm.
    let is_over = |group: &Group, used: u64, granted: u64| {
        used > granted.saturating_add(margin(granted))
            && group.shares.iter().any(|(claim, device)| over(claim, device))
    };
    let candidates = known.iter().filter(|(group, used, granted)| is_over(group, *used, *granted));
    let (worst, ..) = candidates.max_by_key(|(_, used, granted)| used.saturating_sub(*granted))?;
    let others = known.iter().filter(|(group, ..)| group != worst);
    let lacking: u64 = others.map(|(_, used, granted)| granted.saturating_sub(*used)).sum();
    let free = memory.total.saturating_sub(memory.used).saturating_sub(memory.reserved);
    (free < lacking).then_some(*worst)
}
