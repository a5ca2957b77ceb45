//! The programs under test, built from this checkout.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::process::run;

/// Built programs. What an image or a node gets is a copy of these.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The node plugin.
    pub plugin: PathBuf,
    /// What CDI files call, a static program: containers' files must not reach it.
    pub hook: PathBuf,
    /// NVML over simulated GPUs.
    pub mock: PathBuf,
    /// `divvy`, for the cases that ask it; may be missing in a folder of ready programs.
    pub cli: PathBuf,
}

impl Programs {
    /// Builds them as they are released (`--release`).
    pub fn build() -> Result<Self> {
        let target =
            env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from);
        let is_static = format!("{}-unknown-linux-musl", env::consts::ARCH);
        cargo(&["--package", "divvy-kubelet-plugin", "--package", "divvy-nvml-mock", "--package", "divvy"])?;
        cargo(&["--package", "divvy-cdi-hook", "--target", &is_static])?;
        let (own, hooks) = (target.join("release"), target.join(is_static).join("release"));
        Self::at(&own, hooks.join("divvy-cdi-hook"))
    }

    /// Those in one folder.
    pub fn in_folder(folder: &Path) -> Result<Self> {
        Self::at(folder, folder.join("divvy-cdi-hook"))
    }

    fn at(folder: &Path, hook: PathBuf) -> Result<Self> {
        let (plugin, mock) = (folder.join("divvy-kubelet-plugin"), folder.join("libnvidia_ml.so"));
        for file in [&plugin, &hook, &mock] {
            ensure!(file.exists(), "{} is not there", file.display());
        }
        Ok(Self { plugin, hook, mock, cli: folder.join("divvy") })
    }
}

/// This checkout.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn cargo(args: &[&str]) -> Result<()> {
    run(Command::new("cargo").args(["build", "--release", "--locked"]).args(args).current_dir(workspace()))
}
