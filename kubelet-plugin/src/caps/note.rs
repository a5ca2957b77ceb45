//! The note of a pod: the shares whose memory it was given, and the groups whose programs use them.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::GpuUuid;
use serde::{Deserialize, Serialize};

/// The shares that containers of a pod have started with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodCaps {
    /// Path of the pod's control group below the root of the hierarchy.
    pub(crate) group: String,
    /// True if it was made again, of records. These learn late of a pod that comes to a claim which
    /// others use, so that a share may be missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) of_records: bool,
    gpus: BTreeMap<GpuUuid, OfGpu>,
}

/// The shares of one GPU that a pod has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OfGpu {
    /// Bytes of each share, by claim and device.
    shares: BTreeMap<String, u64>,
    /// The groups whose programs use them, by path below the root of the hierarchy. Empty where no
    /// limit can hide the pod's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    users: BTreeMap<String, User>,
    /// True if the driver was asked what the pod is held to, of a note that was made again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    settled: bool,
}

/// A group whose programs use shares.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct User {
    /// True if a limit at its address, or between it and the pod's group, comes before the pod's.
    pub(crate) hides: bool,
    /// Names of the shares.
    pub(crate) shares: BTreeSet<String>,
}

/// Division of what a pod has of a GPU: each limit counts for itself, and together they are no more
/// than the pod's shares.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Bytes of the pod's own group, which all others of its groups have together.
    pub(crate) pod: u64,
    /// Bytes of each group whose limit hides the pod's, by path.
    pub(crate) apart: BTreeMap<String, u64>,
}

impl PodCaps {
    /// Returns the same with a share of a GPU. It is not counted twice: each container of a claim,
    /// and each restart, asks for it. An amount that stood for it until it was known again falls by
    /// as much.
    pub(crate) fn with(mut self, gpu: &GpuUuid, share: String, bytes: u64) -> Self {
        let shares = &mut self.gpus.entry(gpu.clone()).or_default().shares;
        if !shares.contains_key(&share)
            && let Some(unknown) = shares.remove(UNKNOWN)
            && unknown > bytes
        {
            shares.insert(UNKNOWN.to_owned(), unknown - bytes);
        }
        shares.insert(share, bytes);
        self
    }

    /// Returns the same with shares of a GPU of which only the sum is known, by the driver's limit.
    pub(crate) fn with_unknown(mut self, gpu: &GpuUuid, bytes: u64) -> Self {
        let shares = &mut self.gpus.entry(gpu.clone()).or_default().shares;
        shares.insert(UNKNOWN.to_owned(), bytes);
        self
    }

    /// Returns whether the driver is to be asked what the pod is held to on a GPU.
    pub(crate) fn is_unsettled(&self, gpu: &GpuUuid) -> bool {
        self.of_records && !self.gpus.get(gpu).is_some_and(|of| of.settled)
    }

    /// Notes that the driver was asked.
    pub(crate) fn settle(&mut self, gpu: &GpuUuid) {
        self.gpus.entry(gpu.clone()).or_default().settled = true;
    }

    /// Returns the group of this path as a user of shares of a GPU.
    pub(crate) fn user(&self, gpu: &GpuUuid, path: &str) -> Option<&User> {
        self.gpus.get(gpu)?.users.get(path)
    }

    /// Notes that the programs of a group use these shares besides others that they have.
    pub(crate) fn add_user(&mut self, gpu: &GpuUuid, path: &str, user: User) {
        let users = &mut self.gpus.entry(gpu.clone()).or_default().users;
        let known = users.entry(path.to_owned()).or_default();
        known.hides |= user.hides;
        known.shares.extend(user.shares);
    }

    /// Forgets users of a GPU that are gone. Returns whether there were any.
    pub(crate) fn retain_users(&mut self, gpu: &GpuUuid, is_there: impl Fn(&str) -> bool) -> bool {
        let Some(of) = self.gpus.get_mut(gpu) else {
            return false;
        };
        let before = of.users.len();
        of.users.retain(|path, _| is_there(path));
        of.users.len() < before
    }

    /// Returns the shares of the nearest user that a group lies within, or all shares.
    pub(crate) fn shares_of(&self, gpu: &GpuUuid, path: &str) -> (BTreeSet<String>, bool) {
        let Some(of) = self.gpus.get(gpu) else {
            return (BTreeSet::new(), false);
        };
        let lies_within = |above: &str| {
            let below = path.strip_prefix(above);
            below.is_some_and(|below| below.starts_with('/'))
        };
        let above = of.users.iter().rev().find(|(above, _)| lies_within(above));
        match above {
            Some((_, user)) => (user.shares.clone(), true),
            None => (of.shares.keys().cloned().collect(), false),
        }
    }

    /// Divides the pod's shares of a GPU. A limit that hides the pod's makes a group count apart
    /// from the others, and cannot be removed: a share that such a group uses with others is
    /// divided evenly, and the pod's own group keeps all the rest.
    pub(crate) fn parts(&self, gpu: &GpuUuid) -> Parts {
        let mut parts = Parts::default();
        let Some(of) = self.gpus.get(gpu) else {
            return parts;
        };
        for (path, user) in &of.users {
            if user.hides {
                parts.apart.insert(path.clone(), 0);
            }
        }
        for (name, bytes) in &of.shares {
            let uses = |(_, user): &(&String, &User)| user.shares.contains(name);
            let (apart, together): (Vec<_>, Vec<_>) =
                (of.users.iter().filter(uses)).partition(|(_, user)| user.hides);
            let ways = apart.len() + usize::from(!together.is_empty());
            let each = bytes
                .checked_div(u64::try_from(ways).unwrap_or(u64::MAX))
                .unwrap_or(0);
            let mut rest = *bytes;
            for (path, _) in apart {
                rest = rest.saturating_sub(each);
                if let Some(part) = parts.apart.get_mut(path) {
                    *part = part.saturating_add(each);
                }
            }
            parts.pod = parts.pod.saturating_add(rest);
        }
        parts
    }

    /// Returns whether the pod has shares of a GPU.
    pub(crate) fn has(&self, gpu: &GpuUuid) -> bool {
        self.gpus.get(gpu).is_some_and(|of| !of.shares.is_empty())
    }

    /// Returns the UIDs of the claims of the pod's shares of a GPU.
    pub(crate) fn claims(&self, gpu: &GpuUuid) -> impl Iterator<Item = &str> {
        let shares = self
            .gpus
            .get(gpu)
            .into_iter()
            .flat_map(|of| of.shares.keys());
        shares.map(|name| name.split_once('/').map_or(name.as_str(), |(uid, _)| uid))
    }

    /// Returns the sums of the pod's shares, by GPU.
    pub(crate) fn sums(&self) -> impl Iterator<Item = (&GpuUuid, u64)> {
        let sum = |of: &OfGpu| {
            of.shares
                .values()
                .fold(0_u64, |sum, bytes| sum.saturating_add(*bytes))
        };
        self.gpus.iter().map(move |(gpu, of)| (gpu, sum(of)))
    }

    /// Returns the sum of the pod's shares of a GPU.
    pub(crate) fn sum(&self, gpu: &GpuUuid) -> u64 {
        let mut sums = self.sums();
        sums.find(|(of, _)| *of == gpu).map_or(0, |(_, sum)| sum)
    }
}

/// Name of shares that are not known any more.
const UNKNOWN: &str = "earlier";
