//! The control groups of pods whose memory the driver caps, and what it says of them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use divvy_gpu_sim::SimGroup;
use fs_err as fs;
use serde_json::json;

use crate::case::{Env, PATIENCE};
use crate::config::Layout;
use crate::wait::poll;

const GIB: u64 = 1 << 30;
/// A driver that caps memory, and whose MPS servers have namespaces.
pub(super) const CAPPING: &str = "615.71.09";
const RUNTIME_CLASSES: &str = "/apis/node.k8s.io/v1/runtimeclasses";

/// Exchanges the driver while no plugin runs, and gives the chart these values.
pub(super) fn exchange(env: &Env, version: &str, values: &[&str]) -> Result<()> {
    env.driver.stop()?;
    env.driver.gpus().remove_driver()?;
    env.driver.gpus().install_driver(version)?;
    env.driver.change(values)?;
    env.driver.start()
}

/// The runtimes that make twins of control groups, until it is dropped.
pub(in crate::cases) struct Runtimes<'a> {
    env: &'a Env<'a>,
    classes: Vec<&'static str>,
}

impl<'a> Runtimes<'a> {
    /// Makes a RuntimeClass for each that the node has.
    pub(in crate::cases) fn create(env: &'a Env<'a>) -> Result<Self> {
        let mut made = Self {
            env,
            classes: Vec::new(),
        };
        for class in Layout::runtimes_with_groups() {
            let object = json!({"metadata": {"name": class}, "handler": class});
            env.api().create(RUNTIME_CLASSES, &object)?;
            made.classes.push(class);
        }
        Ok(made)
    }

    /// Returns whether the node has the runtime of this class.
    pub(in crate::cases) fn has(&self, class: &str) -> bool {
        self.classes.contains(&class)
    }
}

impl Drop for Runtimes<'_> {
    fn drop(&mut self) {
        for class in &self.classes {
            let path = format!("{RUNTIME_CLASSES}/{class}");
            if let Err(error) = self.env.api().delete(&path, &json!({})) {
                crate::process::say(&format!("RuntimeClass {class} is left: {error:#}"));
            }
        }
    }
}

/// The groups of pods, as seen by the driver of one GPU.
#[derive(Clone, Copy)]
pub(super) struct Groups<'a> {
    pub(super) env: &'a Env<'a>,
    pub(super) gpu: &'a str,
}

impl Groups<'_> {
    /// Fails unless pod and containers are capped at so many GiB.
    pub(super) fn capped(&self, pod: &str, gib: u64) -> Result<()> {
        let containers = self.containers(pod)?;
        ensure!(!containers.is_empty(), "pod {pod} has no container");
        for group in containers.iter().chain([&self.of_pod(pod)?]) {
            let found = self.limit(group)?;
            ensure!(
                found == Some(gib * GIB),
                "{} is capped at {found:?} bytes, not at {gib} GiB",
                group.display()
            );
        }
        Ok(())
    }

    /// Waits until a pod is capped again that was.
    pub(super) fn wait_until_capped_again(&self, pod: &str, gib: u64) -> Result<()> {
        let group = self.of_pod(pod)?;
        let what = format!("cap of pod {pod} that is set again");
        poll(&what, PATIENCE, || {
            Ok(self.limit(&group)? == Some(gib * GIB))
        })
    }

    /// Returns the limit of a group, as the driver says it.
    pub(super) fn limit(&self, group: &Path) -> Result<Option<u64>> {
        let groups = SimGroup::chain(group)?;
        let gpus = self.env.driver.gpus();
        let limit = gpus.edit(self.gpu, |engine, gpu| engine.memory_limit(gpu, &groups))?;
        Ok(limit.ok().and_then(|limit| limit.hard))
    }

    /// Allocates memory as a program of a group does. Returns false if it is out of memory.
    pub(super) fn allocates(&self, group: &Path, gib: u64) -> Result<bool> {
        let groups = SimGroup::chain(group)?;
        let gpus = self.env.driver.gpus();
        let done = gpus.edit(self.gpu, |engine, gpu| {
            engine.allocate(gpu, &groups, gib * GIB)
        })?;
        Ok(done.is_ok())
    }

    /// Has the driver forget all caps, as it does when it is loaded anew.
    pub(super) fn forget(&self) -> Result<()> {
        let gpus = self.env.driver.gpus();
        gpus.edit(self.gpu, |engine, _| engine.forget_limits())
    }

    /// Returns the twin of a pod's group.
    pub(super) fn of_pod(&self, pod: &str) -> Result<PathBuf> {
        let object = self.env.api().get(&self.env.path("Pod", pod)?)?;
        let uid = Env::uid(&object.with_context(|| format!("pod {pod} is gone"))?)?;
        let name = format!("pod{uid}");
        let mut folders = vec![self.env.driver.gpus().groups()];
        while let Some(folder) = folders.pop() {
            if folder.ends_with(&name) {
                return Ok(folder);
            }
            folders.extend(below(&folder)?);
        }
        anyhow::bail!("pod {pod} has no control group {name}")
    }

    /// Returns the twins of the groups of a pod's containers that run.
    pub(super) fn containers(&self, pod: &str) -> Result<Vec<PathBuf>> {
        below(&self.of_pod(pod)?)
    }

    pub(super) fn only_container(&self, pod: &str) -> Result<PathBuf> {
        let mut found = self.containers(pod)?;
        ensure!(found.len() == 1, "the containers of pod {pod}: {found:?}");
        found.pop().context("no container")
    }

    /// Returns the first process of a container.
    pub(super) fn process_of(&self, group: &Path) -> Result<u32> {
        let gpus = self.env.driver.gpus();
        let leaf = group.strip_prefix(gpus.groups())?;
        let expected = format!("0::/{}", leaf.display());
        for process in below(&gpus.root().join("proc"))? {
            let cgroup = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
            let pid = process
                .file_name()
                .and_then(|name| name.to_str()?.parse().ok());
            if let Some(pid) = pid
                && cgroup.trim() == expected
            {
                return Ok(pid);
            }
        }
        anyhow::bail!("no process is in {}", group.display())
    }

    /// Waits until the plugin has no note of a pod: they are gone with their pods.
    pub(super) fn wait_until_forgotten(&self) -> Result<()> {
        poll(
            "notes of caps that are gone with their pods",
            PATIENCE,
            || Ok(self.notes()?.is_empty()),
        )
    }

    /// Returns the plugin's notes about pods.
    fn notes(&self) -> Result<Vec<String>> {
        let folder = format!("/run/divvy/{}/caps", names::DRIVER);
        let mut names = Vec::new();
        for entry in fs::read_dir(self.env.cluster.node_path(folder))? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "json") {
                names.push(path.display().to_string());
            }
        }
        Ok(names)
    }
}

/// Returns the folders in a folder.
fn below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}
