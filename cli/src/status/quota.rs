//! Quotas: what the claims of a namespace have of GPUs, what they may have, and who has it. Sums
//! are those by which the cluster controller lets claims through; of Kubernetes' own quotas those
//! that count devices by class are shown.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use divvy_api::quota::{self, GpuQuota, GpuQuotaSpec, QuotaError, decode};
use divvy_quota::{Amount, Catalogue, Limits, State, look, spec_limits};
use k8s_openapi::api::core::v1::ResourceQuota;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Client};
use serde::Serialize;
use serde_json::Value;

use super::read::{Kind, Lists};
use super::snapshot::{Snapshot, name, namespace};
use crate::table::Table;

/// End of a key of a ResourceQuota that counts the devices of a class.
const OF_CLASS: &str = ".deviceclass.resource.k8s.io/devices";
/// Beginning of a key that counts what pods ask for in `limits`.
const EXTENDED: &str = "requests.nvidia.com/";

const QUOTAS: Kind = Kind {
    name: "GpuQuotas",
    resource: "gpuquotas.divvy.dev",
    missing: "what namespaces may have of GPUs",
    remedy: "a ClusterRoleBinding to divvy-view, or choose a namespace that you may read (-n)",
};
const RESOURCE_QUOTAS: Kind = Kind {
    name: "ResourceQuotas",
    resource: "resourcequotas",
    missing: "how many devices of a class namespaces may have",
    remedy: "a ClusterRoleBinding to view, or choose a namespace that you may read (-n)",
};

/// The quotas of the cluster, as they were read.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    gpu: Vec<DynamicObject>,
    resource: Vec<ResourceQuota>,
    /// Kinds that could not be read.
    unread: Vec<String>,
}

/// Reads quotas of all namespaces, or of the one, where others cannot be read.
pub(crate) async fn read(client: &Client, inside: &str) -> Result<Quotas> {
    let mut lists = Lists::new(inside);
    let kind = ApiResource::erase::<GpuQuota>(&());
    let all = Api::<DynamicObject>::all_with(client.clone(), &kind);
    let own = Api::<DynamicObject>::namespaced_with(client.clone(), inside, &kind);
    let gpu = lists.list(&QUOTAS, &all, &own).await?;
    let (all, own) = (
        Api::all(client.clone()),
        Api::namespaced(client.clone(), inside),
    );
    let resource = lists.list(&RESOURCE_QUOTAS, &all, &own).await?;
    Ok(Quotas {
        gpu,
        resource,
        unread: lists.unread(),
    })
}

/// Quotas, and who uses them.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct QuotaReport {
    /// Need for action by an administrator.
    pub(crate) needs_person: bool,
    /// GpuQuotas, by namespace.
    quotas: Vec<QuotaLine>,
    /// Quotas of Kubernetes that count devices, by namespace.
    classes: Vec<ClassLine>,
    problems: Vec<String>,
    /// Kinds that could not be read.
    unread: Vec<String>,
}

/// A GpuQuota.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct QuotaLine {
    namespace: String,
    used: AmountText,
    limit: LimitText,
    claims: Vec<ClaimLine>,
}

/// An amount for people.
#[derive(Debug, Serialize)]
struct AmountText {
    memory: String,
    percent: String,
}

/// Limits for people; absent where there is none.
#[derive(Debug, Serialize)]
struct LimitText {
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    percent: Option<String>,
}

/// A claim that uses a quota or waits for it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ClaimLine {
    claim: String,
    /// `has`, `may take` or `waits`.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    amount: Option<AmountText>,
    pods: Vec<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    why: String,
}

/// A count of devices by a ResourceQuota.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ClassLine {
    namespace: String,
    quota: String,
    class: String,
    used: String,
    limit: String,
}

/// Reports on the quotas of all namespaces, or of one.
pub(crate) fn quotas(snapshot: &Snapshot, quotas: &Quotas, wanted: Option<&str>) -> QuotaReport {
    let mut catalogue = Catalogue::new(&snapshot.driver);
    snapshot
        .slices
        .iter()
        .for_each(|slice| catalogue.put(slice));
    for (node, status) in &snapshot.reports {
        catalogue.report(node, Some(status));
    }
    let mut report = QuotaReport {
        unread: snapshot.unread.clone(),
        ..QuotaReport::default()
    };
    report.unread.extend(quotas.unread.iter().cloned());
    let is_wanted = |inside: &str| wanted.is_none_or(|wanted| wanted == inside);
    for quota in &quotas.gpu {
        let inside = namespace(&quota.metadata);
        if !is_wanted(inside) {
            continue;
        }
        match spec(quota) {
            Ok(spec) => {
                let line = line(
                    snapshot,
                    inside,
                    &spec,
                    &mut catalogue,
                    &mut report.problems,
                );
                report.quotas.push(line);
            }
            Err(error) => {
                let name = name(&quota.metadata);
                report
                    .problems
                    .push(format!("GpuQuota {inside}/{name}: {error}"));
            }
        }
    }
    for quota in &quotas.resource {
        if is_wanted(namespace(&quota.metadata)) {
            counted(snapshot, quota, &mut report);
        }
    }
    report.needs_person = !report.problems.is_empty();
    report
}

fn spec(quota: &DynamicObject) -> Result<GpuQuotaSpec, QuotaError> {
    let spec = quota.data.get("spec").unwrap_or(&Value::Null);
    decode(name(&quota.metadata), spec)
}

fn line(
    snapshot: &Snapshot,
    inside: &str,
    spec: &GpuQuotaSpec,
    catalogue: &mut Catalogue,
    problems: &mut Vec<String>,
) -> QuotaLine {
    let own: BTreeMap<&str, &ResourceClaim> = snapshot
        .claims
        .iter()
        .filter(|claim| namespace(&claim.metadata) == inside)
        .map(|claim| (name(&claim.metadata), claim))
        .collect();
    let classes: BTreeMap<_, _> = snapshot
        .classes
        .iter()
        .map(|class| (name(&class.metadata).to_owned(), class.clone()))
        .collect();
    let limits = spec_limits(spec);
    let found = look(limits, own.values().copied(), &classes, catalogue);
    let own_name = format!("GpuQuota {inside}/{}", quota::NAME);
    problems.extend(found.blocked.iter().map(|why| format!("{own_name}: {why}")));
    // What has the annotation is let through; what would be is for the controller to let through.
    let through: BTreeSet<_> = found.grants.iter().map(|grant| &grant.claim).collect();
    let used = found
        .claims
        .iter()
        .filter(|line| !matches!(line.state, State::Waits(_)) && !through.contains(&line.claim));
    let used: Amount = used.filter_map(|line| line.amount).sum();
    if !limits.hold(used) {
        problems.push(format!(
            "{own_name}: claims have more than its limits, as from before it was set: delete pods or raise spec.limits"
        ));
    }
    let lines = found.claims.iter().map(|line| {
        let (state, why) = match &line.state {
            _ if through.contains(&line.claim) => (
                "waits",
                "fits, and is let through by the cluster controller (clusterController.quota)",
            ),
            State::Has => ("has", ""),
            State::MayTake => ("may take", ""),
            State::Waits(why) => ("waits", why.as_str()),
        };
        ClaimLine {
            claim: line.claim.clone(),
            state,
            amount: line.amount.map(text),
            pods: own
                .get(&*line.claim)
                .map_or_else(Vec::new, |claim| pods(claim)),
            why: why.to_owned(),
        }
    });
    QuotaLine {
        namespace: inside.to_owned(),
        used: text(used),
        limit: limit(limits),
        claims: lines.collect(),
    }
}

fn text(amount: Amount) -> AmountText {
    AmountText {
        memory: amount.memory_text(),
        percent: amount.percent_text(),
    }
}

fn limit(limits: Limits) -> LimitText {
    let whole = text(Amount {
        memory: limits.memory.unwrap_or(0),
        percent: limits.percent.unwrap_or(0),
    });
    LimitText {
        memory: limits.memory.map(|_| whole.memory),
        percent: limits.percent.map(|_| whole.percent),
    }
}

fn pods(claim: &ResourceClaim) -> Vec<String> {
    let users = claim
        .status
        .iter()
        .filter_map(|status| status.reserved_for.as_ref());
    users.flatten().map(|user| user.name.clone()).collect()
}

/// Adds what a quota of Kubernetes counts of devices.
fn counted(snapshot: &Snapshot, quota: &ResourceQuota, report: &mut QuotaReport) {
    let (inside, own) = (namespace(&quota.metadata), name(&quota.metadata));
    let hard = quota.spec.iter().filter_map(|spec| spec.hard.as_ref());
    let used = quota
        .status
        .as_ref()
        .and_then(|status| status.used.as_ref());
    for (key, limit) in hard.flatten() {
        let class = key.strip_suffix(OF_CLASS);
        if class.is_none() && !key.starts_with(EXTENDED) {
            continue;
        }
        let is_there = |class: &str| {
            let mut all = snapshot.classes.iter();
            all.any(|known| name(&known.metadata) == class)
        };
        if let Some(class) = class.filter(|class| !is_there(class))
            && !snapshot.lacks(&super::read::CLASSES)
        {
            report.problems.push(format!(
                "ResourceQuota {inside}/{own}: spec.hard[{key}] counts nothing, since there is no DeviceClass {class}: \
                 write one of `kubectl get deviceclasses`"
            ));
        }
        report.classes.push(ClassLine {
            namespace: inside.to_owned(),
            quota: own.to_owned(),
            class: class.unwrap_or(key).to_owned(),
            used: used
                .and_then(|used| used.get(key))
                .map_or_else(|| "?".to_owned(), |used| used.0.clone()),
            limit: limit.0.clone(),
        });
    }
}

/// Draws the report.
pub(crate) fn render(report: &QuotaReport) -> String {
    let mut parts = Vec::new();
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    if report.quotas.is_empty() && report.classes.is_empty() {
        parts.push("No quota counts GPUs.".to_owned());
    }
    if !report.quotas.is_empty() {
        let mut table = Table::new(["NAMESPACE", "USED", "LIMIT", "USED %", "LIMIT %", "WAITING"]);
        for quota in &report.quotas {
            let waiting = quota.claims.iter().filter(|claim| claim.state == "waits");
            table.row([
                quota.namespace.clone(),
                quota.used.memory.clone(),
                or_dash(&quota.limit.memory),
                quota.used.percent.clone(),
                or_dash(&quota.limit.percent),
                waiting.count().to_string(),
            ]);
        }
        parts.push(table.render(0));
        let mut table = Table::new(["NAMESPACE", "CLAIM", "STATE", "MEMORY", "%", "PODS", "WHY"]);
        let mut rows = 0;
        for quota in &report.quotas {
            for claim in &quota.claims {
                rows += 1;
                let amount = claim.amount.as_ref();
                table.row([
                    quota.namespace.clone(),
                    claim.claim.clone(),
                    claim.state.to_owned(),
                    amount.map_or_else(|| "?".to_owned(), |amount| amount.memory.clone()),
                    amount.map_or_else(|| "?".to_owned(), |amount| amount.percent.clone()),
                    if claim.pods.is_empty() {
                        "-".to_owned()
                    } else {
                        claim.pods.join(",")
                    },
                    claim.why.clone(),
                ]);
            }
        }
        if rows > 0 {
            parts.push(table.render(0));
        }
    }
    if !report.classes.is_empty() {
        let mut table = Table::new(["NAMESPACE", "RESOURCEQUOTA", "CLASS", "USED", "LIMIT"]);
        for line in &report.classes {
            let cells = [
                &line.namespace,
                &line.quota,
                &line.class,
                &line.used,
                &line.limit,
            ];
            table.row(cells.map(Clone::clone));
        }
        parts.push(table.render(0));
    }
    let said = [
        ("action required", &report.problems),
        ("unknown", &report.unread),
    ];
    for (head, lines) in said.into_iter().filter(|(_, lines)| !lines.is_empty()) {
        parts.push(format!("{head}:\n  {}", lines.join("\n  ")));
    }
    parts.join("\n\n")
}

#[cfg(test)]
mod tests;
