//! The objects read from the API server, as one value: reports are functions of it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::node::GpuNodeStatus;
use divvy_api::policy::{GpuPolicy, PolicyError};
use divvy_offer::pool_name;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;

use super::plugins::Plugins;
use super::read::Kind;

/// Policies by name, or what is wrong with them.
pub type Policies = BTreeMap<String, Result<GpuPolicy, PolicyError>>;

/// The cluster at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// The time of reading.
    pub now: Timestamp,
    /// The name of our driver.
    pub driver: String,
    /// Minor version of the API server.
    pub minor: u32,
    pub nodes: Vec<Node>,
    /// Reports of the nodes' plugins, by node.
    pub reports: BTreeMap<String, GpuNodeStatus>,
    /// The policies, or why they cannot be read, by name; empty unless they are asked about.
    pub policies: Policies,
    /// Published devices of all drivers, with the taints of the rules.
    pub slices: Vec<ResourceSlice>,
    /// Nodes with slices of our driver, where not all slices were read.
    pub published: Option<BTreeSet<String>>,
    /// Rules by which administrators taint devices.
    pub taint_rules: Vec<DeviceTaintRule>,
    pub claims: Vec<ResourceClaim>,
    pub classes: Vec<DeviceClass>,
    /// Pods that have not started.
    pub pods: Vec<Pod>,
    /// Pods of any state whose name is or begins as the one that is asked about.
    pub named: Vec<Pod>,
    /// Failures to prepare claims that kubelets report, where one claim or pod is asked about, and
    /// all warnings about the pod.
    pub events: Vec<Event>,
    /// The plugin's DaemonSet, where a node that is to have its pod reports nothing.
    pub plugins: Option<Plugins>,
    /// Kinds that could not be read, and what remains unknown.
    pub unread: Vec<String>,
}

impl Snapshot {
    /// Says whether objects of this kind could not be read, all or some of them.
    pub fn lacks(&self, kind: &Kind) -> bool {
        self.unread
            .iter()
            .any(|unread| unread.starts_with(kind.name))
    }

    /// Says whether a node has slices of our driver.
    pub fn publishes(&self, node: &str) -> bool {
        if let Some(published) = &self.published {
            return published.contains(node);
        }
        let pool = pool_name(node);
        let mut slices = self.slices.iter().map(|slice| &slice.spec);
        slices.any(|spec| spec.driver == self.driver && spec.pool.name == pool)
    }

    /// The node of one of our pools.
    pub fn node_of(&self, pool: &str) -> Option<&str> {
        self.reports
            .keys()
            .map(String::as_str)
            .chain(self.nodes.iter().map(|node| name(&node.metadata)))
            .find(|node| pool_name(node) == pool)
    }

    /// Returns the time since then.
    pub fn age(&self, since: &str) -> Option<String> {
        let since: Timestamp = since.parse().ok()?;
        Some(span(self.now.as_second().saturating_sub(since.as_second())))
    }

    /// `12m (since 2026-11-21T20:31:00Z)`.
    pub fn since(&self, since: &str) -> String {
        self.age(since)
            .map_or_else(|| since.to_owned(), |age| format!("{age} (since {since})"))
    }
}

/// Seconds as kubectl writes them: two units at most.
pub fn span(seconds: i64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match seconds {
        ..0 => "0s".to_owned(),
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h{minutes}m", seconds / 3600),
        _ => format!("{days}d{hours}h"),
    }
}

/// A time of the API as text, in whole seconds.
pub fn time(time: &Time) -> String {
    Timestamp::from_second(time.0.as_second())
        .unwrap_or(time.0)
        .to_string()
}

/// An object's name.
pub fn name(meta: &ObjectMeta) -> &str {
    meta.name.as_deref().unwrap_or_default()
}

/// An object's namespace.
pub fn namespace(meta: &ObjectMeta) -> &str {
    meta.namespace.as_deref().unwrap_or_default()
}

/// `namespace/name`.
pub fn full_name(meta: &ObjectMeta) -> String {
    format!("{}/{}", namespace(meta), name(meta))
}

#[cfg(test)]
mod tests {
    use super::span;

    #[test]
    fn spans_have_two_units_at_most() {
        let all = [-3, 5, 119, 120, 7199, 7200, 172_799, 172_800, 1_000_000];
        assert_eq!(
            all.map(span),
            [
                "0s", "5s", "119s", "2m", "119m", "2h0m", "47h59m", "2d0h", "11d13h"
            ]
        );
    }
}
