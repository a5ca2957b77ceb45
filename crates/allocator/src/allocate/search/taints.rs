//! Taints of devices and the tolerations of requests.

use k8s_openapi::api::resource::v1::{DeviceTaint, DeviceToleration};

/// The first taint that none of the tolerations covers.
pub(super) fn untolerated<'t>(
    taints: &'t [DeviceTaint],
    tolerations: &[DeviceToleration],
) -> Option<&'t DeviceTaint> {
    // Other effects do not keep anyone away: None by definition, unknown ones because they are
    // unknown.
    let keeps_away = |t: &&DeviceTaint| matches!(t.effect.as_str(), "NoSchedule" | "NoExecute");
    taints
        .iter()
        .filter(keeps_away)
        .find(|taint| !tolerations.iter().any(|t| tolerates(t, taint)))
}

/// Says whether a toleration covers a taint; an empty key or effect covers all of them.
fn tolerates(toleration: &DeviceToleration, taint: &DeviceTaint) -> bool {
    let key = toleration.key.as_deref().unwrap_or_default();
    let effect = toleration.effect.as_deref().unwrap_or_default();
    if !(key.is_empty() || key == taint.key) || !(effect.is_empty() || effect == taint.effect) {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "Exists" => true,
        "" | "Equal" => {
            toleration.value.as_deref().unwrap_or_default()
                == taint.value.as_deref().unwrap_or_default()
        }
        _ => false,
    }
}
