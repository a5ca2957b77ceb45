//! The objects that cases make, as short as the cases want to be read.

use divvy_api::names;
use serde_json::{Value, json};

use crate::images::BUSYBOX;

/// The line after which a test container has said everything.
pub const SAID: &str = "that is all";

/// The command of test containers: prints the visible GPUs and partitions, then runs until SIGTERM.
pub const SAY_AND_STAY: &str = "trap 'exit 0' TERM; ls -d /dev/nvidia[0-9]* 2>&1; \
                            ls -d /dev/nvidia-caps/* 2>/dev/null; env | grep ^DIVVY_; \
                            echo NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES; echo that is all; \
                            while :; do sleep 1000 & wait $!; done";

/// A pod being described.
#[derive(Debug, Clone)]
pub struct Pod {
    name: String,
    claims: Vec<Value>,
    containers: Vec<Value>,
    grace: u32,
    host_users: bool,
    runtime_class: Option<String>,
}

impl Pod {
    /// A pod without claims and containers; with no container added it gets one that uses all
    /// claims.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            claims: Vec::new(),
            containers: Vec::new(),
            grace: 5,
            host_users: true,
            runtime_class: None,
        }
    }

    /// Uses an existing claim, under its own name.
    #[must_use]
    pub fn claim(mut self, claim: &str) -> Self {
        self.claims
            .push(json!({"name": claim, "resourceClaimName": claim}));
        self
    }

    /// Gets a claim from a template, under the template's name.
    #[must_use]
    pub fn template(mut self, template: &str) -> Self {
        self.claims
            .push(json!({"name": template, "resourceClaimTemplateName": template}));
        self
    }

    /// Adds a container that uses these claims (`claim/request`: that request of it alone).
    #[must_use]
    pub fn container(self, name: &str, claims: &[&str]) -> Self {
        self.container_running(name, claims, SAY_AND_STAY)
    }

    /// Adds a container that runs this script.
    #[must_use]
    pub fn container_running(mut self, name: &str, claims: &[&str], script: &str) -> Self {
        let claims: Vec<Value> = claims.iter().map(|claim| used(claim)).collect();
        self.containers.push(json!({
            "name": name,
            "image": BUSYBOX,
            "command": ["/bin/sh", "-c", script],
            "resources": {"claims": claims},
        }));
        self
    }

    /// Sets the time that containers may take to end after SIGTERM, in seconds.
    #[must_use]
    pub fn grace(mut self, seconds: u32) -> Self {
        self.grace = seconds;
        self
    }

    /// Its root is none of the node's users.
    #[must_use]
    pub fn in_user_namespace(mut self) -> Self {
        self.host_users = false;
        self
    }

    /// Its containers are run by the runtime of this RuntimeClass.
    #[must_use]
    pub fn runtime_class(mut self, name: &str) -> Self {
        self.runtime_class = Some(name.to_owned());
        self
    }

    /// The pod's spec.
    pub fn spec(&self) -> Value {
        let names: Vec<&str> = self
            .claims
            .iter()
            .filter_map(|claim| claim.get("name")?.as_str())
            .collect();
        let containers = if self.containers.is_empty() {
            self.clone().container("main", &names).containers
        } else {
            self.containers.clone()
        };
        json!({
            "terminationGracePeriodSeconds": self.grace,
            "resourceClaims": self.claims,
            "containers": containers,
            "automountServiceAccountToken": false,
            "hostUsers": self.host_users,
            "runtimeClassName": self.runtime_class,
        })
    }

    pub fn build(&self) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self.name}, "spec": self.spec()})
    }
}

fn used(claim: &str) -> Value {
    claim.split_once('/').map_or_else(
        || json!({"name": claim}),
        |(name, request)| json!({"name": name, "request": request}),
    )
}

/// A claim for one GPU that a CEL expression selects.
pub fn claim(name: &str, cel: &str) -> Value {
    claim_for(name, &request(cel, 1))
}

/// A claim with this spec.
pub fn claim_for(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec})
}

/// A template for claims with this spec.
pub fn template(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": spec},
    })
}

/// A Deployment of a pod.
pub fn deployment(name: &str, replicas: u32, pod: &Pod) -> Value {
    let labels = json!({"app": name});
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod.spec()},
        },
    })
}

/// The spec of a claim for some GPUs that a CEL expression selects.
pub fn request(cel: &str, count: usize) -> Value {
    json!({"devices": {"requests": [{
        "name": "gpu",
        "exactly": {
            "deviceClassName": names::CLASS_GPU,
            "count": count,
            "selectors": [{"cel": {"expression": cel}}],
        },
    }]}})
}

/// CEL that selects a product.
pub fn product(name: &str) -> String {
    format!(
        "device.attributes['{}'].productName == '{name}'",
        names::DRIVER
    )
}

/// The collection that objects of a kind are in.
pub fn collection(kind: &str, namespace: &str) -> Option<String> {
    let (group, plural) = match kind {
        "Pod" => ("/api/v1", "pods"),
        "Event" => ("/api/v1", "events"),
        "Deployment" => ("/apis/apps/v1", "deployments"),
        "ConfigMap" => ("/api/v1", "configmaps"),
        "ResourceClaim" => ("/apis/resource.k8s.io/v1", "resourceclaims"),
        "ResourceClaimTemplate" => ("/apis/resource.k8s.io/v1", "resourceclaimtemplates"),
        _ => return None,
    };
    Some(format!("{group}/namespaces/{namespace}/{plural}"))
}
