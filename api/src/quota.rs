//! `GpuQuota`: how much GPU memory the claims of a namespace may have together. Written by
//! administrators; the cluster controller keeps it, and the API server refuses an allocation
//! without its grant (`docs/quota.md`).

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::policy::MemorySize;

/// `kind` of quotas.
pub const KIND: &str = "GpuQuota";
/// The only name that a quota may have: a namespace has one.
pub const NAME: &str = "default";

/// The limits of the namespace.
#[derive(
    CustomResource, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "divvy.dev",
    version = "v1beta1",
    kind = "GpuQuota",
    plural = "gpuquotas",
    shortname = "gpuq",
    category = "divvy",
    namespaced,
    status = "GpuQuotaStatus",
    crates(kube_core = "kube_core"),
    doc = "A GpuQuota limits how much GPU memory the ResourceClaims of its namespace have together, as whole GPUs, MIG partitions \
           and shares. It needs the cluster controller of divvy with clusterController.quota.",
    printcolumn(
        name = "Used",
        type_ = "string",
        json_path = ".status.used.memory",
        description = "GPU memory that claims have or may take"
    ),
    printcolumn(
        name = "Limit",
        type_ = "string",
        json_path = ".spec.limits.memory",
        description = "GPU memory that claims may have"
    ),
    printcolumn(
        name = "Used %",
        type_ = "string",
        json_path = ".status.used.percent",
        description = "The same in percent of a GPU: 200 are two GPUs"
    ),
    printcolumn(
        name = "Limit %",
        type_ = "integer",
        json_path = ".spec.limits.percent",
        description = "Percent of a GPU that claims may have"
    ),
    printcolumn(
        name = "Waiting",
        type_ = "integer",
        json_path = ".status.waiting",
        description = "Claims that wait for the quota"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp",
        description = "Time since the quota was created"
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuQuotaSpec {
    /// The limits of all claims of the namespace together.
    pub limits: GpuLimits,
}

/// The limits of all claims of the namespace together. At least one is set; each of them holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("minProperties" = 1))]
pub struct GpuLimits {
    /// The GPU memory that claims may have, as 160Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemorySize>,
    /// The percent of a GPU that claims may have: a whole GPU is 100, a half is 50, two are 200.
    #[schemars(range(min = 0, max = 100_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent: Option<u32>,
}

/// The state that the cluster controller last wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuQuotaStatus {
    /// The amount that claims have, or may take at any time.
    pub used: GpuAmount,
    /// The number of claims that have it.
    pub claims: u32,
    /// The number of claims that wait for the quota.
    pub waiting: u32,
    /// The reason why no claim is let through, if it is not that the quota is used up.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// An amount of GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuAmount {
    /// GPU memory, such as 79.6Gi.
    pub memory: String,
    /// Percent of a GPU, such as 112.5.
    pub percent: String,
}

/// A quota that cannot be kept: the field, and its fault with the fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct QuotaError {
    /// The field, as spec.limits.memory.
    pub field: String,
    /// The fault and the fix.
    pub problem: String,
}

/// Reads the spec of a quota of this name as it was written, also where the definition that checks
/// it is another one.
pub fn decode(name: &str, spec: &Value) -> Result<GpuQuotaSpec, QuotaError> {
    let wrong = |field: &str, problem: String| QuotaError {
        field: field.to_owned(),
        problem,
    };
    if name != NAME {
        let problem = format!("a namespace has one GpuQuota, named {NAME}: delete this one");
        return Err(wrong("metadata.name", problem));
    }
    let decoded: Result<GpuQuotaSpec, _> = serde_path_to_error::deserialize(spec);
    let decoded = decoded.map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." {
            "spec"
        } else {
            &format!("spec.{path}")
        };
        let cause = error.into_inner();
        wrong(
            field,
            format!("{cause} (write memory as 160Gi, percent as 200; neither is negative)"),
        )
    })?;
    if decoded.limits == GpuLimits::default() {
        let problem = "sets no limit (write memory, as 160Gi, or percent, as 200)".to_owned();
        return Err(wrong("spec.limits", problem));
    }
    Ok(decoded)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_bad_quota_names_its_field_and_the_fix() {
        let words = |name: &str, spec: &Value| decode(name, spec).unwrap_err().to_string();
        let negative = words(NAME, &json!({"limits": {"memory": "-5Gi"}}));
        assert!(
            negative.starts_with("spec.limits.memory: \"-5Gi\" is no amount"),
            "{negative}"
        );
        assert!(negative.contains("160Gi"), "{negative}");
        let percent = words(NAME, &json!({"limits": {"percent": -1}}));
        assert!(percent.starts_with("spec.limits.percent: "), "{percent}");
        assert!(percent.contains("neither is negative"), "{percent}");
        let unit = words(NAME, &json!({"limits": {"memory": "160"}}));
        assert!(unit.contains("did you mean \"160Mi\"?"), "{unit}");
        let unknown = words(NAME, &json!({"limits": {"gpus": 2}}));
        assert!(unknown.contains("unknown field `gpus`"), "{unknown}");
        assert!(words(NAME, &json!({"limits": {}})).starts_with("spec.limits: sets no limit"));
        assert!(words(NAME, &json!({})).contains("missing field `limits`"));
        let second = words("other", &json!({"limits": {"percent": 1}}));
        assert!(second.contains("delete this one"), "{second}");
        let good = decode(NAME, &json!({"limits": {"memory": "160Gi", "percent": 0}}));
        assert_eq!(good.unwrap().limits.memory.unwrap().bytes, 160 << 30);
    }
}
