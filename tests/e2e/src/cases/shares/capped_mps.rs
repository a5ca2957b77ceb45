//! Shares by MPS of a driver that caps memory: each has its namespace at the GPU's server and, as
//! the time-sliced shares of another GPU, a cap in its pod's control group.

use anyhow::{Result, ensure};
use divvy_api::names;
use divvy_model::ComputeMode;
use serde_json::json;

use super::groups::{CAPPING, Groups, Runtimes, exchange};
use super::mps::{
    client, compute_mode, namespaces, only_daemon, reaches_its_server, runs_with, sizes_of,
};
use super::{Policy, end, h100, part, share, wait_for_modes};
use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::config::Layout;
use crate::objects::{Pod, SAY_AND_STAY, claim_for};
use crate::wait::poll;

pub(in crate::cases) fn capped_mps(env: &Env) -> Result<()> {
    let first = env.driver.gpus().driver_version();
    env.driver.stop()?;
    env.driver.gpus().remove_driver()?;
    env.driver.gpus().install_driver(CAPPING)?;
    env.driver.install_mps()?;
    env.driver
        .change(&["mps.enabled=true", "memoryCaps=true"])?;
    env.driver.start()?;
    let outcome = Runtimes::create(env).and_then(|_runtimes| Node::new(env)?.all());
    exchange(env, first, &[])?;
    outcome
}

/// A GPU in MPS shares, and one in time-sliced shares.
struct Node<'a> {
    env: &'a Env<'a>,
    by_mps: Groups<'a>,
    sliced: Groups<'a>,
    _policy: Policy<'a>,
}

impl<'a> Node<'a> {
    fn new(env: &'a Env<'a>) -> Result<Self> {
        let [by_mps, sliced] = [h100(env, 0)?, h100(env, 1)?];
        let slots = json!({"slots": 16});
        let rules = json!({"rules": [
            {"gpus": {"uuids": [by_mps]}, "modes": ["Mps"], "shares": slots},
            {"gpus": {"uuids": [sliced]}, "modes": ["TimeSlicing"]},
        ]});
        let policy = Policy::create(env, &env.namespace, &rules)?;
        wait_for_modes(env, &[by_mps], &["Mps"])?;
        wait_for_modes(env, &[sliced], &["TimeSlicing"])?;
        let [by_mps, sliced] = [by_mps, sliced].map(|gpu| Groups { env, gpu });
        Ok(Self {
            env,
            by_mps,
            sliced,
            _policy: policy,
        })
    }

    fn all(&self) -> Result<()> {
        self.says("gpu-mps", &self.by_mps, ["cgroup", "mps-server"])?;
        self.says("gpu-share", &self.sliced, ["cgroup", "none"])?;

        let large = self.run_by_mps("large", "large", Some((50, 20)))?;
        let small = self.run_by_mps("small", "small", Some((20, 8)))?;
        let request = share("gpu", &[self.sliced.gpu], &[("memory", "4Gi")]);
        let sliced = self.claim("sliced", &request)?;
        self.run("sliced", "sliced", SAY_AND_STAY)?;
        // A pod that comes later to a claim that is in use.
        self.run_by_mps("later", "small", None)?;
        let daemon = only_daemon(self.env)?;
        let expected = ["1.00", "20.00", "50.00"];
        let found = namespaces(self.env, daemon)?;
        ensure!(sizes_of(&found) == expected, "{found:?}");
        self.capped()?;

        let of = |pod: &str| self.by_mps.only_container(pod);
        let takes = |pod: &str, gib: u64| self.by_mps.allocates(&of(pod)?, gib);
        ensure!(takes("small", 8)?, "8 of 8 GiB are refused");
        ensure!(!takes("small", 1)?, "9 of 8 GiB are given");
        ensure!(takes("large", 20)?, "a pod pays for another");
        ensure!(!takes("large", 1)?, "21 of 20 GiB are given");

        // What the driver has forgotten, the plugin sets again: for each pod of a claim.
        self.by_mps.forget()?;
        for (groups, pod, gib) in self.pods() {
            groups.wait_until_capped_again(pod, gib)?;
        }
        // Also a plugin that knows nothing yet.
        self.env.driver.stop()?;
        self.by_mps.forget()?;
        self.env.driver.start()?;
        for (groups, pod, gib) in self.pods() {
            groups.wait_until_capped_again(pod, gib)?;
        }
        ensure!(
            namespaces(self.env, daemon)? == found,
            "namespaces have changed: {found:?}"
        );

        // The namespace of a claim is there until its last pod is gone.
        self.leave("later")?;
        ensure!(
            namespaces(self.env, daemon)? == found,
            "a pod that remains has lost its namespace"
        );
        self.by_mps.capped("small", 8)?;
        self.end("small", &small)?;
        let left = namespaces(self.env, daemon)?;
        ensure!(sizes_of(&left) == ["1.00", "50.00"], "{left:?}");
        self.by_mps.capped("large", 20)?;
        self.end("large", &large)?;
        poll("end of the MPS daemon", PATIENCE, || {
            Ok(self.env.driver.mps_daemons()?.is_empty())
        })?;
        ensure!(
            compute_mode(self.env, self.by_mps.gpu)? == ComputeMode::Default,
            "the compute mode is not back"
        );
        self.sliced.capped("sliced", 4)?;
        self.end("sliced", &sliced)?;
        self.sliced.wait_until_forgotten()
    }

    /// Returns the pods with their caps in GiB.
    fn pods(&self) -> [(&Groups<'a>, &'static str, u64); 4] {
        [
            (&self.by_mps, "large", 20),
            (&self.by_mps, "small", 8),
            (&self.by_mps, "later", 8),
            (&self.sliced, "sliced", 4),
        ]
    }

    fn capped(&self) -> Result<()> {
        let mut pods = self.pods().into_iter();
        pods.try_for_each(|(groups, pod, gib)| groups.capped(pod, gib))
    }

    /// Waits until a GPU's device of a type says who enforces memory and compute.
    fn says(&self, kind: &str, of: &Groups, expected: [&str; 2]) -> Result<()> {
        let mut last = None;
        let what = format!("a {kind} with enforcement by {expected:?}");
        let done = poll(&what, PATIENCE, || {
            let devices = self.env.driver.devices()?;
            let found = devices.iter().find(|device| {
                at(device, "attributes.gpuUUID.string") == of.gpu
                    && at(device, "attributes.type.string") == kind
            });
            last = found.map(|device| {
                ["memoryEnforcement", "computeEnforcement"].map(|name| {
                    let path = format!("attributes.{name}.string");
                    at(device, &path).as_str().unwrap_or_default().to_owned()
                })
            });
            Ok(last.as_ref().is_some_and(|last| *last == expected))
        });
        done.map_err(|error| error.context(format!("it says {last:?}")))
    }

    fn claim(&self, name: &str, request: &serde_json::Value) -> Result<String> {
        let spec = json!({"devices": {"requests": [request]}});
        Env::uid(&self.env.create(&claim_for(name, &spec))?)
    }

    /// Runs a pod with an MPS share of so many percent and GiB, or with that of a claim that is
    /// there.
    fn run_by_mps(&self, pod: &str, claim: &str, size: Option<(u32, u64)>) -> Result<String> {
        let mut uid = String::new();
        if let Some((cores, gib)) = size {
            let (cores, memory) = (cores.to_string(), format!("{gib}Gi"));
            let amounts = [("cores", &*cores), ("memory", &*memory)];
            let request = part(("gpu", names::CLASS_MPS), &[self.by_mps.gpu], &amounts);
            uid = self.claim(claim, &request)?;
        }
        self.run(pod, claim, &client())?;
        reaches_its_server(self.env, pod, "main")?;
        Ok(uid)
    }

    fn run(&self, pod: &str, claim: &str, script: &str) -> Result<()> {
        let object = Pod::new(pod)
            .runtime_class(Layout::RUNTIME_WITH_GROUPS)
            .claim(claim)
            .container_running("main", &[claim], script);
        self.env.create(&object.build())?;
        runs_with(self.env, pod, claim)
    }

    /// Ends a pod whose claim others use.
    fn leave(&self, pod: &str) -> Result<()> {
        let group = self.by_mps.of_pod(pod)?;
        self.env.delete("Pod", pod)?;
        self.env.wait_until_gone("Pod", pod)?;
        Ok(fs_err::remove_dir_all(group)?)
    }

    /// Ends a pod with its claim, and its control group with it, as the kubelet does.
    fn end(&self, pod: &str, uid: &str) -> Result<()> {
        let group = self.by_mps.of_pod(pod)?;
        end(self.env, pod, uid)?;
        Ok(fs_err::remove_dir_all(group)?)
    }
}
