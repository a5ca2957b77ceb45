//! Fields that stand in another place than where they are often written: those of earlier versions,
//! of a level above or below, and of other systems. Pure.

/// Fields that a type does not have.
struct Moved {
    /// Name of the type in code.
    of: &'static str,
    fields: &'static [&'static str],
    /// Place where it belongs.
    says: &'static str,
}

/// Fields of a request that v1beta1 has beside its name.
const EXACTLY: &[&str] = &[
    "deviceClassName",
    "selectors",
    "allocationMode",
    "count",
    "adminAccess",
    "tolerations",
    "capacity",
];
/// Capacities of shares.
const AMOUNTS: &[&str] = &["memory", "cores", "slots", "percent"];
const SAYS_AMOUNTS: &str = "amounts are in capacity.requests";
const SAYS_SELECTORS: &str = "write selectors: [{cel: {expression: …}}]";

const ALL: &[Moved] = &[
    Moved {
        of: "PodResourceClaim",
        fields: &["source"],
        says: "since Kubernetes 1.31 resourceClaimName or resourceClaimTemplateName stands in the entry itself; divvy convert does it",
    },
    Moved {
        of: "PodResourceClaim",
        fields: &["deviceClassName", "devices", "requests", "exactly", "spec"],
        says: "a pod names a claim by resourceClaimTemplateName or resourceClaimName; divvy claim prints template and pod",
    },
    Moved {
        of: "PodSpec",
        fields: &["claims", "limits"],
        says: "it belongs in a container's resources",
    },
    Moved {
        of: "PodSpec",
        fields: &["resourceClaimName", "resourceClaimTemplateName"],
        says: "it belongs in an entry of resourceClaims, beside its name",
    },
    Moved {
        of: "Container",
        fields: &[
            "affinity",
            "nodeSelector",
            "resourceClaims",
            "runtimeClassName",
            "schedulerName",
            "serviceAccountName",
            "tolerations",
            "volumes",
        ],
        says: "it belongs in the pod's spec",
    },
    Moved {
        of: "Container",
        fields: &["limits", "requests", "claims"],
        says: "it belongs in resources",
    },
    Moved {
        of: "ResourceRequirements",
        fields: &["resourceClaims"],
        says: "the pod's spec has resourceClaims, and a container names them in claims",
    },
    Moved {
        of: "ResourceClaimTemplateSpec",
        fields: &["devices"],
        says: "a ResourceClaimTemplate has spec.spec.devices; divvy convert does it",
    },
    Moved {
        of: "ResourceClaimSpec",
        fields: &["spec"],
        says: "only a ResourceClaimTemplate has a second spec",
    },
    Moved {
        of: "ResourceClaimSpec",
        fields: &["requests", "constraints", "config"],
        says: "it belongs in devices",
    },
    Moved {
        of: "DeviceRequest",
        fields: EXACTLY,
        says: "in resource.k8s.io/v1 it is inside exactly: {…}; divvy convert does it",
    },
    Moved {
        of: "DeviceRequest",
        fields: &["config", "constraints"],
        says: "it belongs in devices, beside requests",
    },
    Moved {
        of: "ExactDeviceRequest",
        fields: &["config", "constraints"],
        says: "it belongs in devices, beside requests",
    },
    Moved {
        of: "ExactDeviceRequest",
        fields: AMOUNTS,
        says: SAYS_AMOUNTS,
    },
    Moved {
        of: "ExactDeviceRequest",
        fields: &["requests", "limits", "resources"],
        says: SAYS_AMOUNTS,
    },
    Moved {
        of: "ExactDeviceRequest",
        fields: &["cel", "expression", "profile", "product", "productName"],
        says: SAYS_SELECTORS,
    },
    Moved {
        of: "DeviceSubRequest",
        fields: AMOUNTS,
        says: SAYS_AMOUNTS,
    },
    Moved {
        of: "DeviceSubRequest",
        fields: &["cel", "expression", "profile", "product", "productName"],
        says: SAYS_SELECTORS,
    },
    Moved {
        of: "DeviceSubRequest",
        fields: &["adminAccess"],
        says: "only exactly has it",
    },
    Moved {
        of: "CapacityRequirements",
        fields: AMOUNTS,
        says: SAYS_AMOUNTS,
    },
    Moved {
        of: "CapacityRequirements",
        fields: &["limits"],
        says: "a claim has requests only; a limit of a share's memory is limits.memory of a ShareConfig",
    },
    Moved {
        of: "DeviceSelector",
        fields: &["expression"],
        says: "write cel: {expression: …}",
    },
    Moved {
        of: "DeviceClaimConfiguration",
        fields: &["driver", "parameters"],
        says: "it belongs in opaque",
    },
    Moved {
        of: "GpuPolicySpec",
        fields: &["gpus", "modes", "mig", "shares", "health", "usage"],
        says: "it belongs in an entry of rules",
    },
    Moved {
        of: "PolicyRule",
        fields: &["products", "uuids", "ordinals", "pciAddresses"],
        says: "it belongs in gpus",
    },
    Moved {
        of: "PolicyRule",
        fields: &["slots", "unit", "timeSlice", "burst"],
        says: "it belongs in shares",
    },
    Moved {
        of: "PolicyRule",
        fields: &["profiles", "sharing"],
        says: "it belongs in mig",
    },
    Moved {
        of: "PolicyRule",
        fields: &["replicas"],
        says: "replicas of the device plugin are shares: {slots: …} here",
    },
    Moved {
        of: "ShareSettings",
        fields: &["replicas"],
        says: "replicas of the device plugin are slots here",
    },
    Moved {
        of: "GpuMatch",
        fields: &["index", "indices", "indexes"],
        says: "numbers of GPUs are ordinals: [0]",
    },
    Moved {
        of: "GpuMatch",
        fields: &["matchLabels", "selector"],
        says: "labels are of nodes: nodes: {selector: …}",
    },
    Moved {
        of: "NodeMatch",
        fields: &["matchLabels", "matchExpressions"],
        says: "it belongs in selector",
    },
];

/// Returns the place of a field that a type does not have, as ` (it belongs in resources)`.
pub(super) fn hint(of: &str, field: &str) -> Option<String> {
    if of == "ResourceRequirements" && field.contains('/') {
        return Some(" (it belongs in limits)".to_owned());
    }
    let is_it = |moved: &&Moved| moved.of == of && moved.fields.contains(&field);
    let moved = ALL.iter().find(is_it)?;
    Some(format!(" ({})", moved.says))
}
