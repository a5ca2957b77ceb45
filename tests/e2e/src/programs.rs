//! The programs under test, built from this checkout.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::process::{output, run};

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
        let is_static = static_target();
        cargo(&["--package", "divvy-kubelet-plugin", "--package", "divvy-nvml-mock", "--package", "divvy"])?;
        cargo(&["--package", "divvy-cdi-hook", "--target", &is_static])?;
        let (own, hooks) = (target.join("release"), target.join(is_static).join("release"));
        Self::at(&own, hooks.join("divvy-cdi-hook"))
    }

    /// Those of an older commit of this checkout's repository, built once and kept by its number. The mock library is the
    /// one of these programs: it is part of the machine, not of what is updated.
    pub fn of_commit(&self, commit: &str) -> Result<Self> {
        let full = output(&mut git(&["rev-parse", "--verify", &format!("{commit}^{{commit}}")]))?;
        let kept = crate::parts::cache_dir()?.join("programs").join(full.trim());
        let sources = kept.join("sources");
        let (plugin, hook) = (kept.join("divvy-kubelet-plugin"), kept.join("divvy-cdi-hook"));
        if !plugin.exists() || !hook.exists() {
            fs_err::create_dir_all(&sources)?;
            let archive = sources.with_extension("tar").display().to_string();
            output(&mut git(&["archive", "--output", &archive, full.trim()]))?;
            tar::Archive::new(fs_err::File::open(&archive)?).unpack(&sources)?;
            let target = kept.join("target");
            let build = |args: &[&str]| {
                let mut cargo = Command::new("cargo");
                cargo.args(["build", "--release", "--locked"]).args(args).current_dir(&sources);
                run(cargo.env("CARGO_TARGET_DIR", &target))
            };
            build(&["--package", "divvy-kubelet-plugin"])?;
            build(&["--package", "divvy-cdi-hook", "--target", &static_target()])?;
            let program = target.join(static_target()).join("release/divvy-cdi-hook");
            fs_err::copy(program, &hook)?;
            // Last: it says that all is there.
            fs_err::copy(target.join("release/divvy-kubelet-plugin"), &plugin)?;
            fs_err::remove_dir_all(target)?;
            fs_err::remove_dir_all(sources)?;
            fs_err::remove_file(archive)?;
        }
        Ok(Self { plugin, hook, ..self.clone() })
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

fn static_target() -> String {
    format!("{}-unknown-linux-musl", env::consts::ARCH)
}

fn git(args: &[&str]) -> Command {
    let mut git = Command::new("git");
    git.args(args).current_dir(workspace());
    git
}

/// This checkout.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn cargo(args: &[&str]) -> Result<()> {
    run(Command::new("cargo").args(["build", "--release", "--locked"]).args(args).current_dir(workspace()))
}
