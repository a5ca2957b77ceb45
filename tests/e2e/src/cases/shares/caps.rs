//! The memory of shares, capped by the driver from R615 on: the hook of a CDI file, called by the
//! real runtime, and the plugin that it asks. The kernel's part, control groups with the controller
//! `misc`, is a twin of each group (see `runtime-with-groups.sh`), and the driver's is the mock
//! library.

use std::convert::identity;

use anyhow::{Context, Result, ensure};
use fs_err as fs;
use serde_json::json;

use super::groups::{CAPPING, Groups, Runtimes, exchange};
use super::{Policy, h100, share, wait_for_modes};
use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::config::Layout;
use crate::gpus::CONTROLLERS;
use crate::objects::{Pod, SAY_AND_STAY, claim_for};
use crate::process::{Signal, say};
use crate::wait::{poll, wait_for};

pub(in crate::cases) fn caps(env: &Env) -> Result<()> {
    let first = env.driver.gpus().driver_version();
    exchange(env, CAPPING, &["memoryCaps=true"])?;
    let outcome = Runtimes::create(env).and_then(|runtimes| {
        let sharing = Sharing::new(env)?;
        sharing.all(&runtimes)
    });
    exchange(env, first, &[])?;
    outcome
}

const NO_CONTROLLER: &str = "the controller misc is not switched on for";

/// A time-sliced GPU whose shares are capped.
struct Sharing<'a> {
    env: &'a Env<'a>,
    gpu: &'a str,
    groups: Groups<'a>,
    _policy: Policy<'a>,
}

/// A pod with a claim for each amount in GiB: the claims' names and UIDs.
type Claims = Vec<(String, String)>;

impl<'a> Sharing<'a> {
    fn new(env: &'a Env<'a>) -> Result<Self> {
        let gpu = h100(env, 0)?;
        let rule = json!({"gpus": {"uuids": [gpu]}, "modes": ["TimeSlicing"]});
        let policy = Policy::create(env, &env.namespace, &json!({"rules": [rule]}))?;
        wait_for_modes(env, &[gpu], &["TimeSlicing"])?;
        poll("shares whose memory is capped", PATIENCE, || {
            let devices = env.driver.devices()?;
            let mut of_gpu = devices.iter().filter(|device| {
                at(device, "attributes.gpuUUID.string") == gpu
                    && at(device, "attributes.type.string") == "gpu-share"
            });
            Ok(of_gpu.any(|device| at(device, "attributes.memoryEnforcement.string") == "cgroup"))
        })?;
        Ok(Self {
            env,
            gpu,
            groups: Groups { env, gpu },
            _policy: policy,
        })
    }

    fn all(&self, runtimes: &Runtimes) -> Result<()> {
        let mut pods = self.of_different_sizes()?;
        pods.extend(self.of_several()?);
        self.forgotten("small", 4)?;
        self.plugin_away("small", 4)?;
        pods.extend([self.plugin_killed()?, self.refused()?]);
        if runtimes.has(Layout::CRUN_WITH_GROUPS) {
            pods.push(self.by_crun()?);
        } else {
            say("crun is not installed, so that no pod was started by it");
        }
        for (pod, claims) in pods {
            self.end(&pod, claims)?;
        }
        self.groups.wait_until_forgotten()
    }

    /// Runs four pods with shares of different sizes, and one in a user namespace. A program that
    /// takes more than its pod's share is out of memory; the others get theirs.
    fn of_different_sizes(&self) -> Result<Vec<(String, Claims)>> {
        let mut pods = Vec::new();
        for (name, gib) in [("small", 4), ("medium", 8), ("large", 16), ("larger", 20)] {
            pods.push((
                name.to_owned(),
                self.run(name, &[gib], &["main"], identity)?,
            ));
            self.groups.capped(name, gib)?;
        }
        pods.push((
            "mapped".to_owned(),
            self.run("mapped", &[4], &["main"], Pod::in_user_namespace)?,
        ));
        self.groups.capped("mapped", 4)?;
        let small = self.groups.only_container("small")?;
        ensure!(self.groups.allocates(&small, 3)?, "3 of 4 GiB are refused");
        // Another process of the same container.
        ensure!(!self.groups.allocates(&small, 2)?, "5 of 4 GiB are given");
        ensure!(self.groups.allocates(&small, 1)?, "4 of 4 GiB are refused");
        for (name, gib) in [("medium", 8), ("large", 16), ("larger", 20)] {
            let container = self.groups.only_container(name)?;
            ensure!(
                self.groups.allocates(&container, gib)?,
                "{name} pays for another"
            );
        }
        Ok(pods)
    }

    /// Runs a pod whose containers have one claim together, and one with two claims: each pod has
    /// the sum of its shares, whatever its containers are.
    fn of_several(&self) -> Result<Vec<(String, Claims)>> {
        let shared = self.run("shared", &[4], &["one", "two"], identity)?;
        self.groups.capped("shared", 4)?;
        let containers = self.groups.containers("shared")?;
        let [one, two] = &containers[..] else {
            anyhow::bail!("the containers of pod shared: {containers:?}");
        };
        ensure!(self.groups.allocates(one, 3)?, "3 of 4 GiB are refused");
        ensure!(
            !self.groups.allocates(two, 2)?,
            "two containers have more than their pod"
        );
        let both = self.run("both", &[2, 3], &["main"], identity)?;
        self.groups.capped("both", 5)?;
        let container = self.groups.only_container("both")?;
        ensure!(
            self.groups.allocates(&container, 5)?,
            "two shares are not added"
        );
        ensure!(
            !self.groups.allocates(&container, 1)?,
            "6 of 5 GiB are given"
        );
        Ok(vec![
            ("shared".to_owned(), shared),
            ("both".to_owned(), both),
        ])
    }

    /// Has the driver forget its caps, as it does when it is loaded anew: they are set again.
    fn forgotten(&self, pod: &str, gib: u64) -> Result<()> {
        self.groups.forget()?;
        self.groups.wait_until_capped_again(pod, gib)?;
        let claim = format!("{pod}-0");
        wait_for("Event of the cap that was set again", PATIENCE, || {
            let said = self.env.messages(&claim);
            Ok(said.into_iter().find(|text| text.contains("had forgotten")))
        })
        .map(drop)
    }

    /// Restarts a container while no plugin runs: it waits, fails with words, and starts once one
    /// is back.
    fn plugin_away(&self, pod: &str, gib: u64) -> Result<()> {
        let before = self.groups.only_container(pod)?;
        self.env.driver.stop()?;
        let failed = self
            .env
            .cluster
            .send(self.groups.process_of(&before)?, Signal::Kill);
        let said = failed.and_then(|()| {
            wait_for("words of a container without its cap", PATIENCE, || {
                let said = self.env.messages(pod);
                Ok(said
                    .into_iter()
                    .find(|text| text.contains("exit status 70")))
            })
        });
        self.env.driver.start()?;
        let said = said?;
        ensure!(
            said.contains("divvy's node plugin"),
            "the Event does not say who is missing: {said}"
        );
        poll("container that starts with its cap", PATIENCE * 2, || {
            let now = self.groups.containers(pod)?;
            Ok(now.iter().any(|container| *container != before))
        })?;
        self.env.wait_until_running(pod)?;
        self.groups.capped(pod, gib)
    }

    /// Kills the plugin while a pod starts.
    fn plugin_killed(&self) -> Result<(String, Claims)> {
        let mut claims = Vec::new();
        self.env.driver.kill_and(|| {
            claims = self.create("late", &[2], &["main"], identity)?;
            Ok(())
        })?;
        self.env.nudge("late")?;
        self.env.wait_until_running("late")?;
        self.groups.capped("late", 2)?;
        Ok(("late".to_owned(), claims))
    }

    /// Starts a pod where the kernel has switched the controller off for it: its Events say why.
    fn refused(&self) -> Result<(String, Claims)> {
        let (claims, said) = self.mended("bare", identity, "exit status 71")?;
        ensure!(said.contains(NO_CONTROLLER), "{said}");
        Ok(("bare".to_owned(), claims))
    }

    /// Does the same by another runtime, whose hooks get the same of it: of what they say it passes
    /// on the exit status alone.
    fn by_crun(&self) -> Result<(String, Claims)> {
        let of = |pod: Pod| pod.runtime_class(Layout::CRUN_WITH_GROUPS);
        let (claims, _) = self.mended("crun", of, "exit code: 71")?;
        let container = self.groups.only_container("crun")?;
        ensure!(
            self.groups.allocates(&container, 2)?,
            "2 of 2 GiB are refused"
        );
        ensure!(
            !self.groups.allocates(&container, 1)?,
            "3 of 2 GiB are given"
        );
        Ok(("crun".to_owned(), claims))
    }

    /// Creates a pod without the controller: it does not start until that is mended. Returns also
    /// the Event of the pod with these words of its runtime.
    fn mended(
        &self,
        name: &str,
        so: impl FnOnce(Pod) -> Pod,
        words: &str,
    ) -> Result<(Claims, String)> {
        let gpus = self.env.driver.gpus();
        gpus.set_controllers_of_pods("cpu\n")?;
        let claims = self.create(name, &[2], &["main"], so);
        let said = claims.and_then(|claims| {
            let said = wait_for("words of a pod without the controller", PATIENCE, || {
                let said = self.env.messages(name);
                Ok(said.into_iter().find(|text| text.contains(words)))
            });
            Ok((claims, said?))
        });
        gpus.set_controllers_of_pods("cpu misc\n")?;
        let said = said?;
        wait_for("Event of the claim", PATIENCE, || {
            let said = self.env.messages(&format!("{name}-0"));
            let is_it = |text: &String| {
                text.starts_with("A container does not start") && text.contains(NO_CONTROLLER)
            };
            Ok(said.into_iter().find(is_it))
        })?;
        let pod = self.groups.of_pod(name)?;
        fs::write(pod.join(CONTROLLERS), "cpu misc\n")?;
        self.env.wait_until_running(name)?;
        self.groups.capped(name, 2)?;
        Ok(said)
    }

    /// Creates a pod with a claim for a share of each size, used by all of these containers, and
    /// otherwise as `so` makes it.
    fn create(
        &self,
        name: &str,
        gib: &[u64],
        containers: &[&str],
        so: impl FnOnce(Pod) -> Pod,
    ) -> Result<Claims> {
        let mut claims = Vec::new();
        let mut pod = Pod::new(name).runtime_class(Layout::RUNTIME_WITH_GROUPS);
        for (index, gib) in gib.iter().enumerate() {
            let claim = format!("{name}-{index}");
            let memory = format!("{gib}Gi");
            let request = share("gpu", &[self.gpu], &[("memory", &memory)]);
            let spec = json!({"devices": {"requests": [request]}});
            let uid = Env::uid(&self.env.create(&claim_for(&claim, &spec))?)?;
            pod = pod.claim(&claim);
            claims.push((claim, uid));
        }
        let names: Vec<&str> = claims.iter().map(|(name, _)| &**name).collect();
        for container in containers {
            pod = pod.container_running(container, &names, SAY_AND_STAY);
        }
        self.env.create(&so(pod).build())?;
        Ok(claims)
    }

    fn run(
        &self,
        name: &str,
        gib: &[u64],
        containers: &[&str],
        so: impl FnOnce(Pod) -> Pod,
    ) -> Result<Claims> {
        let claims = self.create(name, gib, containers, so)?;
        self.env.wait_until_running(name)?;
        Ok(claims)
    }

    /// Ends a pod with its claims, and its control group with it, as the kubelet does.
    fn end(&self, pod: &str, claims: Claims) -> Result<()> {
        let group = self.groups.of_pod(pod)?;
        let mut claims = claims.into_iter();
        let (first, uid) = claims.next().context("a pod without claims")?;
        self.env.end(pod, &uid)?;
        fs::remove_dir_all(group)?;
        self.env.delete("ResourceClaim", &first)?;
        for (claim, uid) in claims {
            self.env.driver.wait_until_unprepared(&uid)?;
            self.env.delete("ResourceClaim", &claim)?;
        }
        Ok(())
    }
}
