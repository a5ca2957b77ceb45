//! Output of `cargo metadata`, as far as it is read here.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// The packages and what each needs.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) resolve: Resolve,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    /// None for those of this repository.
    pub(crate) source: Option<String>,
    pub(crate) manifest_path: PathBuf,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Resolve {
    pub(crate) nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Node {
    pub(crate) id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Debug, Deserialize)]
struct DependencyKind {
    /// None for what is linked.
    kind: Option<String>,
}

impl Node {
    /// Returns the packages that it links.
    pub(crate) fn linked(&self) -> Vec<&str> {
        let linked = self
            .deps
            .iter()
            .filter(|dep| dep.dep_kinds.iter().any(|kind| kind.kind.is_none()));
        linked.map(|dep| dep.pkg.as_str()).collect()
    }
}

/// Reads it, with further flags.
pub(crate) fn read(root: &Path, flags: &[String]) -> Result<Metadata> {
    let mut cargo = Command::new("cargo");
    cargo
        .args(["metadata", "--format-version=1", "--locked"])
        .args(flags)
        .current_dir(root);
    let done = cargo.output().context("cargo cannot be started")?;
    ensure!(
        done.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(serde_json::from_slice(&done.stdout)?)
}
