//! Claims whose pods are to be evicted, where the policy of a GPU says so: shares that use so much
//! that others cannot get what they were granted, and claims that are idle for too long.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use divvy_claims::ClaimRef;
use divvy_model::DeviceName;

use crate::attribute::GpuUsage;
use crate::groups::Group;
use crate::watch::margin;

/// Time for which a share harms others before its pods are to go.
const HARM: Duration = Duration::from_mins(1);

/// The rules of a GPU's policy about its use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsagePolicy {
    /// Time without any use after which a claim is idle; `None` for the default.
    pub idle_after: Option<Duration>,
    /// Evict shares that harm others.
    pub evict: bool,
    /// Evict claims that stay idle for so long more.
    pub reclaim: Option<Duration>,
}

/// Reason to evict the pods of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// A share uses more than it was granted, and others cannot get what they were.
    Overuse,
    /// The claim is idle.
    Idle,
}

/// Shares of one GPU that count as one: see [`Group`].
type Shares = Vec<(ClaimRef, DeviceName)>;

/// The shares of a GPU that are over their grants while others cannot get theirs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Harm {
    /// Each of them, since when without a pause.
    over: BTreeMap<Shares, Since>,
    /// The one with the largest excess of those that are long in `over`, since when it is that.
    worst: Option<(Shares, Since)>,
    /// The one whose pods are to go.
    marked: Option<Shares>,
}

/// A time, and the reading that was the latest then.
#[derive(Debug, Clone, Copy)]
struct Since {
    at: Duration,
    number: u64,
}

impl Since {
    /// Returns whether another reading has said the same, [`HARM`] later.
    fn is_long(self, gpu: &GpuUsage, now: Duration) -> bool {
        gpu.number > self.number && now.saturating_sub(self.at) >= HARM
    }
}

impl Harm {
    /// Learns the latest reading; `None` if no share harms others, or if that is not known.
    ///
    /// A share is marked after it was over its grant, and others were harmed, for [`HARM`]. The
    /// time does not begin anew when another share gets the larger excess: of two that take turns,
    /// one must go. The marked share stays the same until it is within its grant, or until another
    /// one has had the larger excess for [`HARM`]: a mark that changes with each reading would be
    /// written, and taken back, every few seconds.
    pub(crate) fn after(
        before: Option<Self>,
        gpu: &GpuUsage,
        over: impl Fn(&ClaimRef, &DeviceName) -> bool,
        now: Duration,
    ) -> Option<Self> {
        let before = before.unwrap_or_default();
        let harmful = harmful(gpu, over)?;
        let began = Since {
            at: now,
            number: gpu.number,
        };
        // Phase 1: the shares that do harm, each with the time since when it has done so without a
        // pause. Shares that are missing now are forgotten.
        let since = |shares: &Shares| before.over.get(shares).copied().unwrap_or(began);
        let over: BTreeMap<Shares, Since> = harmful
            .iter()
            .map(|group| (group.shares.clone(), since(&group.shares)))
            .collect();
        let is_long = |shares: &Shares| over.get(shares).is_some_and(|s| s.is_long(gpu, now));
        // Phase 2: of those that have done it for long enough, the one with the largest excess, and
        // since when it is that one. The list is sorted by excess.
        let worst = harmful
            .iter()
            .map(|group| &group.shares)
            .find(|shares| is_long(shares));
        let worst = worst.map(|shares| match before.worst {
            Some((known, since)) if known == *shares => (known, since),
            _ => (shares.clone(), began),
        });
        // Phase 3: the mark. It moves to the worst share only once that has been the worst for
        // long, or where the marked one does no harm any more.
        let kept = before.marked.filter(|shares| is_long(shares));
        let marked = match (&worst, kept) {
            (Some((_, since)), Some(kept)) if !since.is_long(gpu, now) => Some(kept),
            (worst, _) => worst.as_ref().map(|(shares, _)| shares.clone()),
        };
        Some(Self {
            over,
            worst,
            marked,
        })
    }

    /// Returns the shares whose pods are to go.
    pub(crate) fn due(&self) -> &[(ClaimRef, DeviceName)] {
        self.marked.as_deref().unwrap_or_default()
    }
}

/// Returns the shares over their grants, those with the largest excess first, if less memory is
/// free than the others may still take. `None` is also the answer for a GPU of which a figure is
/// not known.
fn harmful(gpu: &GpuUsage, over: impl Fn(&ClaimRef, &DeviceName) -> bool) -> Option<Vec<&Group>> {
    let memory = gpu.memory.ok()?;
    gpu.unattributed.ok()?;
    let known = |group| -> Option<(&Group, u64, u64)> {
        let group: &Group = group;
        group.granted.ok()?;
        Some((group, group.used.ok()?, group.allowed.ok()?))
    };
    let known: Vec<_> = gpu.groups.iter().map(known).collect::<Option<_>>()?;
    // Reports are two readings behind: a share that is within its grant again does no harm.
    let is_over = |group: &Group, used: u64, allowed: u64| {
        used > allowed.saturating_add(margin(allowed))
            && group
                .shares
                .iter()
                .any(|(claim, device)| over(claim, device))
    };
    let mut found: Vec<_> = known
        .iter()
        .filter(|(group, used, allowed)| is_over(group, *used, *allowed))
        .collect();
    found.sort_by_key(|(_, used, allowed)| Reverse(used.saturating_sub(*allowed)));
    // What was granted is lacking, not what a limit allows beyond it. A share over its grant lacks
    // nothing, so that it adds nothing here.
    let lacking: u64 = known
        .iter()
        .map(|(group, used, _)| group.granted.unwrap_or(0).saturating_sub(*used))
        .sum();
    let free = memory
        .total
        .saturating_sub(memory.used)
        .saturating_sub(memory.reserved);
    let are_harmed = free < lacking && !found.is_empty();
    are_harmed.then(|| found.into_iter().map(|(group, ..)| *group).collect())
}
