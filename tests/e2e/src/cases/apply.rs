//! Claims that cannot be meant are refused when they are applied, by the policy that the chart
//! installs.

use anyhow::{Result, bail, ensure};
use divvy_api::names;
use serde_json::{Value, json};

use crate::case::{Env, PATIENCE};
use crate::objects::collection;
use crate::wait::poll;

/// Claims with names that the API server cannot show: a text says what is wrong, and not the rule's
/// expression.
fn unshowable() -> Vec<(Value, &'static str)> {
    let gpu = |fields: Value| with_config(request(names::CLASS_GPU, json!({})), &[], fields);
    let fields = "denied request: config[].opaque.parameters has unknown fields";
    vec![
        (gpu(json!({"kind": "GpuConfig", "shar\nring": {}})), fields),
        (
            gpu(json!({"kind": "GpuConfig", ("s".repeat(9000)): {}})),
            fields,
        ),
        (
            gpu(json!({"kind": "Gpu\nConfig"})),
            "denied request: config[].opaque.parameters.kind is none of GpuConfig",
        ),
    ]
}

/// The expected message for each wrong claim. The request is named `gpu`.
fn wrong() -> Vec<(Value, &'static str)> {
    let of = |class: &str| request(class, json!({}));
    let asks = |class: &str, name: &str, amount: &str| {
        request(class, json!({"capacity": {"requests": {name: amount}}}))
    };
    let own = |class: &str, fields: Value| with_config(of(class), &["gpu"], fields);
    let gpu = |fields: Value| with_config(of(names::CLASS_GPU), &[], fields);
    let alternatives = json!([
        {"name": "a", "deviceClassName": names::CLASS_MIG},
        {"name": "b", "deviceClassName": names::CLASS_SHARE, "capacity": {"requests": {"memory": "2048"}}},
    ]);
    vec![
        (
            gpu(json!({"kind": "GpuConfig", "sharring": {}})),
            "has unknown fields: GpuConfig has sharring",
        ),
        (
            gpu(json!({"kind": "MigConfig", "timeSlicing": {"interval": "Long"}})),
            "MigConfig has timeSlicing",
        ),
        (
            own(
                names::CLASS_SHARE,
                json!({"kind": "ShareConfig", "timeSlicing": {"interval": "Long"}}),
            ),
            "the time slice of shares is that of the GpuPolicy",
        ),
        (
            gpu(json!({"kind": "GpuConfg"})),
            "kind is GpuConfg, and gpu.divvy.dev reads GpuConfig, MigConfig, ShareConfig and MpsConfig",
        ),
        (
            gpu(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"})),
            "apiVersion is resource.nvidia.com/v1beta1",
        ),
        (
            gpu(json!({"kind": "GpuConfig", "timeSlicing": {"interval": "long"}})),
            "interval, which is Default, Short, Medium or Long",
        ),
        (
            gpu(json!({"kind": "GpuConfig", "timeSlicing": {}})),
            "interval, which is Default, Short, Medium or Long",
        ),
        (
            gpu(json!({"kind": "GpuConfig", "extraNodes": ["gdrdrv"]})),
            "lists paths below /dev",
        ),
        (
            gpu(json!({"kind": "GpuConfig", "extraNodes": ["/dev/../etc/shadow"]})),
            "without `..`",
        ),
        (
            gpu(json!({"kind": "GpuConfig", "extraNodes": ["/dev/gdrdrv", "/dev/nvidia0"]})),
            "without the nodes of GPUs",
        ),
        (
            own(names::CLASS_SHARE, json!({"kind": "GpuConfig"})),
            "request gpu of class share.divvy.dev takes a ShareConfig",
        ),
        (
            json!({"devices": {"requests": [
                {"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": names::CLASS_ADMIN}]},
            ]}}),
            "cannot be an alternative",
        ),
        (
            of(names::CLASS_ADMIN),
            "is for requests with adminAccess: true only",
        ),
        (
            request(names::CLASS_SHARE, json!({"adminAccess": true})),
            "use class admin.divvy.dev with it",
        ),
        (
            asks(names::CLASS_SHARE, "memory", "2048"),
            "write 2048Mi instead of 2048",
        ),
        (
            asks(names::CLASS_SHARE, "memory", "-1Gi"),
            "write 2048Mi instead of 2048",
        ),
        (
            asks(names::CLASS_SHARE, "gpu.divvy.dev/memory", "2048"),
            "write 2048Mi instead of 2048",
        ),
        (
            asks(names::CLASS_SHARE, "cores", "-10"),
            "cannot be negative",
        ),
        (
            json!({"devices": {"requests": [{"name": "gpu", "firstAvailable": alternatives}]}}),
            "write 2048Mi instead of 2048",
        ),
    ]
}

/// The expected message for each wrong limit.
fn wrong_limits() -> Vec<(Value, &'static str)> {
    let asks = |class: &str, name: &str, amount: &str| {
        request(class, json!({"capacity": {"requests": {name: amount}}}))
    };
    let gpu = |fields: Value| with_config(request(names::CLASS_GPU, json!({})), &[], fields);
    let limited = |name: &str, amount: &str, limit: Value| {
        let limits = json!({"kind": "ShareConfig", "limits": {"memory": limit}});
        with_config(asks(names::CLASS_SHARE, name, amount), &["gpu"], limits)
    };
    let mps = |limits: Value| {
        let config = json!({"kind": "MpsConfig", "limits": limits});
        with_config(request(names::CLASS_MPS, json!({})), &["gpu"], config)
    };
    vec![
        (
            limited("memory", "10Gi", json!("9Gi")),
            "below the memory that a request asks for",
        ),
        (
            limited("gpu.divvy.dev/memory", "10Gi", json!("9Gi")),
            "below the memory that a request asks for",
        ),
        (
            limited("percent", "50", json!("40%")),
            "below the percent that a request asks for",
        ),
        (
            limited("memory", "10Gi", json!("16")),
            "limits has one field, memory, which is an amount with a unit",
        ),
        (
            limited("memory", "10Gi", json!(16)),
            "limits has one field, memory, which is an amount with a unit",
        ),
        (
            limited("memory", "10Gi", json!("512Ki")),
            "limits has one field, memory, which is an amount with a unit",
        ),
        (
            gpu(json!({"kind": "GpuConfig", "limits": {"memory": "16Gi"}})),
            "GpuConfig has limits",
        ),
        (
            mps(json!({"cores": 0})),
            "limits has cores, a whole number from 1 to 100",
        ),
        (mps(json!({"memory": 10})), "an amount with its unit"),
        (
            gpu(json!({"kind": "GpuConfig", "mps": {"limits": {"cores": 101}}})),
            "mps has limits, with cores, a whole number from 1 to 100",
        ),
        (
            gpu(json!({"kind": "GpuConfig", "mps": {"cores": 50}})),
            "mps has limits, with cores",
        ),
        (
            gpu(json!({"kind": "GpuConfig", "mps": {}, "timeSlicing": {"interval": "Short"}})),
            "has either mps or timeSlicing",
        ),
        (
            gpu(json!({"kind": "ShareConfig", "mps": {}})),
            "ShareConfig has mps",
        ),
    ]
}

/// Claims that are fine, and those of other drivers, whatever they say.
fn right() -> Vec<Value> {
    let of = |class: &str| request(class, json!({}));
    let share = json!({"capacity": {"requests": {"memory": "2Gi", "cores": "10"}}});
    let nodes = json!({"kind": "ShareConfig", "extraNodes": ["/dev/gdrdrv"]});
    let theirs = json!([{"opaque": {"driver": "gpu.example.com", "parameters": {"any": "thing"}}}]);
    let mut other = request(
        "gpu.example.com",
        json!({"capacity": {"requests": {"memory": "1"}}}),
    );
    insert(&mut other, theirs);
    let limited = |name: &str, amount: &str, limit: &str| {
        let share = json!({"capacity": {"requests": {name: amount}}});
        let limits = json!({"kind": "ShareConfig", "limits": {"memory": limit}});
        with_config(request(names::CLASS_SHARE, share), &["gpu"], limits)
    };
    vec![
        limited("memory", "10Gi", "10Gi"),
        limited("memory", "10Gi", "16G"),
        limited("percent", "50", "75%"),
        limited("memory", "10Gi", "75%"),
        of(names::CLASS_GPU),
        with_config(
            of(names::CLASS_GPU),
            &["gpu"],
            json!({"kind": "GpuConfig", "mps": {}}),
        ),
        with_config(
            of(names::CLASS_GPU),
            &["gpu"],
            json!({"kind": "GpuConfig", "mps": {"limits": {"cores": 50, "memory": "10Gi"}}}),
        ),
        request(names::CLASS_ADMIN, json!({"adminAccess": true})),
        with_config(request(names::CLASS_SHARE, share), &["gpu"], nodes),
        with_config(of(names::CLASS_MIG), &[], json!({"kind": "MigConfig"})),
        // For devices of its kind, of which this claim has none.
        with_config(of(names::CLASS_GPU), &[], json!({"kind": "ShareConfig"})),
        other,
    ]
}

pub(super) fn wrong_claims(env: &Env) -> Result<()> {
    let api = env.api();
    // What the API server asks of a namespace with admin access.
    let labels = json!({"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}});
    api.patch(&format!("/api/v1/namespaces/{}", env.namespace), &labels)?;
    let apply = |kind: &str, spec: Value| -> Result<Value> {
        let Some(path) = collection(kind, &env.namespace) else {
            bail!("no kind {kind}")
        };
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": "c"}, "spec": spec,
        });
        api.create(&format!("{path}?dryRun=All"), &object)
    };
    let claim = |spec: &Value| apply("ResourceClaim", spec.clone());
    let template = |spec: &Value| apply("ResourceClaimTemplate", json!({"spec": spec}));
    poll("the policy in force", PATIENCE, || {
        Ok(wrong()
            .first()
            .is_some_and(|(spec, _)| claim(spec).is_err()))
    })?;
    let all = [wrong(), wrong_limits(), unshowable()].concat();
    for (spec, words) in all {
        for refused in [claim(&spec), template(&spec)] {
            match refused {
                // Releases without shares drop the amount before any policy sees it.
                Ok(taken) if asks_for_amount(&spec) && !asks_for_amount(&taken) => {}
                Ok(_) => bail!("accepted, expected {words:?}: {spec}"),
                Err(error) => ensure!(
                    format!("{error:#}").contains(words),
                    "{error:#}, expected {words:?}"
                ),
            }
        }
    }
    for spec in right() {
        claim(&spec)?;
        template(&spec)?;
    }
    let class = |fields: Value| {
        let parameters = with_version(fields);
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "team.example.com"},
            "spec": {"config": [{"opaque": {"driver": names::DRIVER, "parameters": parameters}}]},
        });
        api.create("/apis/resource.k8s.io/v1/deviceclasses?dryRun=All", &object)
            .map(drop)
    };
    class(json!({"kind": "GpuConfig", "timeSlicing": {"interval": "Short"}}))?;
    ensure!(
        class(json!({"kind": "ShareConfig", "interval": "Short"})).is_err(),
        "a class with an unknown field"
    );
    Ok(())
}

fn asks_for_amount(object: &Value) -> bool {
    object.to_string().contains("\"capacity\"")
}

fn request(class: &str, fields: Value) -> Value {
    let mut exactly = fields;
    if let Some(fields) = exactly.as_object_mut() {
        fields.insert("deviceClassName".to_owned(), json!(class));
    }
    json!({"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}})
}

fn with_config(mut spec: Value, requests: &[&str], fields: Value) -> Value {
    let entry = json!({"requests": requests, "opaque": {"driver": names::DRIVER, "parameters": with_version(fields)}});
    insert(&mut spec, json!([entry]));
    spec
}

fn insert(spec: &mut Value, config: Value) {
    if let Some(devices) = spec.get_mut("devices").and_then(Value::as_object_mut) {
        devices.insert("config".to_owned(), config);
    }
}

fn with_version(mut fields: Value) -> Value {
    if let Some(fields) = fields.as_object_mut() {
        fields
            .entry("apiVersion")
            .or_insert_with(|| json!(names::API_VERSION));
    }
    fields
}
