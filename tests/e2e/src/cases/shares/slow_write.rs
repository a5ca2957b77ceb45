//! The scheduler has picked a GPU and its write of the allocation takes long; meanwhile a policy
//! makes the GPU something else. Devices that may still be allocated stay published, so that the
//! GPU is not given out a second time.

use super::{
    Context, Env, Policy, Result, create, end, ensure, h100, json, offered, poll, share, spec,
    whole,
};
use crate::api::at;
use crate::case::PATIENCE;

/// Seconds that the write is held: longer than any write takes on a healthy cluster, less than the
/// longest webhook (30 s).
const HELD: u32 = 20;

pub(in crate::cases) fn slow_write(env: &Env) -> Result<()> {
    let (gpu, other) = (h100(env, 4)?, h100(env, 5)?);
    let policy = Policy::modes(env, &[gpu], &["Whole"])?;
    let others = offered(env, other)?;
    let write = SlowWrites::of(env, "slow")?;
    let slow = create(env, "slow", &[whole(&[gpu])])?;
    poll("a write of the allocation that is held", PATIENCE, || {
        Ok(write.held()? > 0)
    })?;

    policy.change(&spec(&[gpu], &["TimeSlicing"]))?;
    let next = create(env, "next", &[share("gpu", &[gpu], &[("memory", "1Gi")])])?;
    super::check(env, "slow", "main", "slow")?;
    let waits = env
        .api()
        .get(&env.path("Pod", "next")?)?
        .context("the next pod is gone")?;
    ensure!(
        at(&waits, "spec.nodeName").is_null(),
        "the GPU was given out a second time"
    );
    ensure!(
        offered(env, other)? == others,
        "another GPU lost a mode: {:?}",
        offered(env, other)?
    );
    end(env, "slow", &slow)?;
    super::check(env, "next", "main", "next")?;
    end(env, "next", &next)
}

/// An admission webhook that never answers, for writes of one claim's allocation, until dropped:
/// the API server waits for it and then goes on without it. It has no server: its packets are
/// dropped.
struct SlowWrites<'a> {
    env: &'a Env<'a>,
}

/// The firewall's table, and its rule that counts and drops.
const TABLE: &str = "e2e-slow-writes";
const PORT: &str = "9443";
const WEBHOOKS: &str = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";

impl<'a> SlowWrites<'a> {
    fn of(env: &'a Env<'a>, claim: &str) -> Result<Self> {
        let address = env.cluster.layout().address();
        let created = Self { env };
        created.nft("add table inet", "")?;
        created.nft(
            "add chain inet",
            "out { type filter hook output priority 0; }",
        )?;
        // Counted and refused: the API server goes on at once.
        created.nft(
            "add rule inet",
            &format!("out tcp dport {PORT} counter reject with tcp reset"),
        )?;
        let allocates = format!(
            "request.name == 'armed' || (request.name == '{claim}' && has(object.status.allocation) \
             && !has(oldObject.status.allocation))"
        );
        let webhook = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": TABLE},
            "webhooks": [{
                "name": "slow.e2e.divvy.dev",
                "timeoutSeconds": HELD,
                "failurePolicy": "Ignore",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "clientConfig": {"url": format!("https://{address}:{PORT}/")},
                "rules": [{
                    "apiGroups": ["resource.k8s.io"], "apiVersions": ["*"],
                    "operations": ["UPDATE"], "resources": ["resourceclaims/status"],
                }],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": env.namespace}},
                "matchConditions": [{"name": "allocates", "expression": allocates}],
            }],
        });
        env.api().create(WEBHOOKS, &webhook)?;
        let spec = json!({"devices": {"requests": [whole(&[])]}});
        env.create(&super::claim_for("armed", &spec))?;
        let status = format!("{}/status", env.path("ResourceClaim", "armed")?);
        poll("an API server that asks the webhook", PATIENCE, || {
            env.api().patch(&status, &json!({"status": {}}))?;
            Ok(created.held()? > 0)
        })?;
        created.nft("flush chain inet", "out")?;
        created.nft(
            "add rule inet",
            &format!("out tcp dport {PORT} counter drop"),
        )?;
        Ok(created)
    }

    /// Returns the number of packets to the webhook so far.
    fn held(&self) -> Result<u64> {
        let said = self.nft("list chain inet", "out")?;
        let count = said
            .split("counter packets ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next());
        Ok(count.context("the rule has no counter")?.parse()?)
    }

    fn nft(&self, what: &str, more: &str) -> Result<String> {
        let mut args: Vec<&str> = what.split(' ').collect();
        args.extend([TABLE, more]);
        crate::process::output(&mut self.env.cluster.command("nft", &args))
    }
}

impl Drop for SlowWrites<'_> {
    fn drop(&mut self) {
        let webhook = self
            .env
            .api()
            .delete(&format!("{WEBHOOKS}/{TABLE}"), &json!({}));
        if let Err(error) = webhook.and_then(|()| self.nft("delete table inet", "").map(drop)) {
            crate::process::say(&format!("webhook {TABLE} is left: {error:#}"));
        }
    }
}
