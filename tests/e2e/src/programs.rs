//! The programs under test, built from this checkout.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::images;
use crate::oci::Image;
use crate::process::{output, run};
use crate::target::Target;

/// The profile of what nodes run; cargo's folder for it has the same name.
const NODE: &str = "node";

/// Built programs. What an image or a node gets is a copy of these.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The node plugin.
    pub plugin: PathBuf,
    /// What CDI files call, a static program: containers' files must not reach it.
    pub hook: PathBuf,
    /// The cluster controller.
    pub controller: PathBuf,
    /// NVML over simulated GPUs.
    pub mock: PathBuf,
    /// `divvy`, for the cases that ask it; may be missing in a folder of ready programs.
    pub cli: PathBuf,
}

impl Programs {
    /// Builds them: what nodes run as it is shipped (`--profile node`), the tools as tests do.
    pub fn build() -> Result<Self> {
        Target::HOST.build(&[&OfNode::DYNAMIC[..], &["--package", "divvy-nvml-mock"]].concat())?;
        let hook = built(Target::HOST, &Target::HOST.musl(), "divvy-cdi-hook")?;
        Target::HOST.build(&["--package", "divvy"])?;
        Self::at(&target_dir().join(NODE), hook, target_dir().join("debug/divvy"))
    }

    /// The driver's image with these programs.
    pub fn image(&self, name: &str) -> Result<Image> {
        let Self { plugin, hook, controller, .. } = self.clone();
        OfNode { target: Target::HOST, plugin, hook, controller }.image(name)
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
            // Older commits shipped what cargo calls release.
            let has_profile = fs_err::read_to_string(sources.join("Cargo.toml"))?.contains("[profile.node]");
            let profile = if has_profile { NODE } else { "release" };
            let build = |args: &[&str]| {
                let mut cargo = Command::new("cargo");
                cargo.args(["build", "--locked", "--profile", profile]).args(args).current_dir(&sources);
                run(cargo.env("CARGO_TARGET_DIR", &target))
            };
            build(&["--package", "divvy-kubelet-plugin"])?;
            build(&["--package", "divvy-cdi-hook", "--target", &Target::HOST.musl()])?;
            let program = target.join(Target::HOST.musl()).join(profile).join("divvy-cdi-hook");
            fs_err::copy(program, &hook)?;
            // Last: it says that all is there.
            fs_err::copy(target.join(profile).join("divvy-kubelet-plugin"), &plugin)?;
            fs_err::remove_dir_all(target)?;
            fs_err::remove_dir_all(sources)?;
            fs_err::remove_file(archive)?;
        }
        Ok(Self { plugin, hook, ..self.clone() })
    }

    /// Those in one folder.
    pub fn in_folder(folder: &Path) -> Result<Self> {
        Self::at(folder, folder.join("divvy-cdi-hook"), folder.join("divvy"))
    }

    fn at(folder: &Path, hook: PathBuf, cli: PathBuf) -> Result<Self> {
        let [plugin, controller, mock] =
            ["divvy-kubelet-plugin", "divvy-cluster-controller", "libnvidia_ml.so"]
                .map(|name| folder.join(name));
        for file in [&plugin, &hook, &controller, &mock] {
            ensure!(file.exists(), "{} is not there", file.display());
        }
        Ok(Self { plugin, hook, controller, mock, cli })
    }
}

/// What the image has, built for an architecture as it is shipped.
#[derive(Debug, Clone)]
pub struct OfNode {
    pub target: Target,
    pub plugin: PathBuf,
    pub hook: PathBuf,
    pub controller: PathBuf,
}

impl OfNode {
    /// The plugin loads NVIDIA's library, so it links libc as that does; the controller is built with it.
    const DYNAMIC: [&str; 6] =
        ["--profile", NODE, "--package", "divvy-kubelet-plugin", "--package", "divvy-cluster-controller"];

    pub fn build(target: Target) -> Result<Self> {
        let folder = if target == Target::HOST {
            target.build(&Self::DYNAMIC)?;
            target_dir().join(NODE)
        } else {
            target.build(&[&Self::DYNAMIC[..], &["--target", &target.gnu()]].concat())?;
            target_dir().join(target.gnu()).join(NODE)
        };
        let [plugin, controller] =
            ["divvy-kubelet-plugin", "divvy-cluster-controller"].map(|name| folder.join(name));
        Ok(Self { target, plugin, hook: built(target, &target.musl(), "divvy-cdi-hook")?, controller })
    }

    /// The driver's image of this name.
    pub fn image(&self, name: &str) -> Result<Image> {
        images::driver(name, self.target, [&self.plugin, &self.hook, &self.controller])
    }
}

/// `divvy` for an architecture, as a static program.
pub fn command_line(target: Target) -> Result<PathBuf> {
    built(target, &target.musl(), "divvy")
}

fn built(target: Target, triple: &str, package: &str) -> Result<PathBuf> {
    target.build(&["--profile", NODE, "--package", package, "--target", triple])?;
    Ok(target_dir().join(triple).join(NODE).join(package))
}

fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

fn git(args: &[&str]) -> Command {
    let mut git = Command::new("git");
    git.args(args).current_dir(workspace());
    git
}

pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
