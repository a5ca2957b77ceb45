//! A claim as the driver sees it: values taken out of the API object by the kubelet plugin.

use std::collections::BTreeMap;
use std::fmt;

use divvy_model::{ClaimUid, DeviceName};
use serde::{Deserialize, Serialize};

/// An allocated device of ours (`status.allocation.devices.results[]`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedDevice {
    /// The request it was allocated for: `main`, or `main/sub` for a subrequest.
    pub request: String,
    pub pool: String,
    /// Name of the device in the pool.
    pub device: DeviceName,
    /// ID of the share, for a device that may be allocated several times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// True for admin access: the device may be in use by others, who must not notice.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub admin_access: bool,
    /// Capacity this share was granted, by its name as divvy has it; quantities as text.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub consumed_capacity: BTreeMap<String, String>,
}

/// The identity of an allocation. A claim with the same UID can be allocated anew, so a prepare is
/// the same one only if results and time agree too.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    /// `status.allocation.allocationTimestamp` as RFC 3339 text; older API servers have none. Two
    /// texts may be the same time: [`Allocation::same_time`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated_at: Option<String>,
    /// Our devices, in the API's order.
    pub results: Vec<AllocatedDevice>,
}

impl Allocation {
    /// Returns true if two texts name the same time, however they are written: the record may be
    /// older than the program that reads it.
    pub(crate) fn same_time(one: Option<&str>, other: Option<&str>) -> bool {
        // A text that does not parse as a time is equal only to itself.
        let instant = |text: Option<&str>| text?.parse::<jiff::Timestamp>().ok();
        one == other || instant(one).is_some_and(|one| Some(one) == instant(other))
    }
}

/// Source of a config entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigSource {
    /// In the DeviceClass.
    Class,
    /// In the claim.
    Claim,
}

/// An entry of `status.allocation.devices.config[]`, of any driver.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigEntry {
    /// Source, which decides its rank: entries of the claim win over those of the class.
    pub source: ConfigSource,
    /// Requests it is for; empty means all.
    pub requests: Vec<String>,
    /// `opaque.driver`: entries of other drivers are not ours to read.
    pub driver: String,
    /// `opaque.parameters`.
    pub parameters: serde_json::Value,
}

/// A pod a claim is reserved for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    /// Name, in the claim's namespace.
    pub name: String,
    pub uid: String,
}

/// Names a claim in messages and look-ups.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClaimRef {
    pub uid: ClaimUid,
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} (UID {})", self.namespace, self.name, self.uid)
    }
}

/// A claim that another one is refused for. Its names are for its own namespace: refusals are
/// Events and conditions that the tenant of the refused claim reads. Elsewhere its UID has to do,
/// by which an administrator finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherClaim {
    claim: ClaimRef,
    is_near: bool,
}

impl OtherClaim {
    /// Makes the view of `claim` that a tenant of `namespace` may have.
    pub fn seen_from(namespace: &str, claim: &ClaimRef) -> Self {
        Self {
            claim: claim.clone(),
            is_near: claim.namespace == namespace,
        }
    }

    /// Returns the claim, for texts that administrators read.
    pub fn claim(&self) -> &ClaimRef {
        &self.claim
    }
}

impl fmt::Display for OtherClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_near {
            write!(f, "claim {}", self.claim)
        } else {
            write!(f, "a claim of another namespace (UID {})", self.claim.uid)
        }
    }
}

/// Times of a claim, in seconds since the Unix epoch. `None`: not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// Creation of the object, by the API server's clock.
    pub made: Option<i64>,
    /// Write of the allocation, where Kubernetes notes it, by the scheduler's clock.
    pub allocated: Option<i64>,
}

impl Times {
    /// Returns the times as far as they can be believed at a second of the API server's clock. The
    /// scheduler notes an allocation by its own: one that is far ahead says nothing.
    #[must_use]
    pub fn believed(self, now: Option<i64>) -> Self {
        /// Seconds by which clocks may differ.
        const AHEAD: i64 = 30;
        let is_likely = |at: &i64| now.is_none_or(|now| *at <= now.saturating_add(AHEAD));
        Self {
            allocated: self.allocated.filter(is_likely),
            ..self
        }
    }
}

/// An allocated claim: UID checked, only our driver's results kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    pub uid: ClaimUid,
    pub namespace: String,
    pub name: String,
    /// Its name in its pod, if it was made from a template and the API server says so.
    pub pod_claim_name: Option<String>,
    /// Our devices and when they were allocated.
    pub allocation: Allocation,
    /// DeviceClass of each request and subrequest, by its name in results.
    pub classes: BTreeMap<String, String>,
    /// Config entries of all drivers, in the API's order (class entries first).
    pub configs: Vec<ConfigEntry>,
    /// Times by which it is known what its devices were chosen by.
    pub times: Times,
    /// Pods in `status.reservedFor`.
    pub pods: Vec<PodRef>,
}

impl Claim {
    /// Returns the claim's names.
    pub fn reference(&self) -> ClaimRef {
        ClaimRef {
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }

    /// Returns true if the claim has this device allocated.
    pub fn allocates(&self, device: &DeviceName) -> bool {
        self.allocation.results.iter().any(|r| r.device == *device)
    }
}

/// Returns the request's name without a subrequest, as the kubelet and containers know it.
pub fn base_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}
