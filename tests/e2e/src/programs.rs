//! The programs under test, built from this checkout.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::images;
use crate::oci::Image;
use crate::target::Target;

/// The profile of what nodes run; cargo's folder for it has the same name.
const NODE: &str = "node";
/// The profile of tests and its folder: most of what it makes is there already.
const DEV: (&str, &str) = ("dev", "debug");

/// Packages of the stand-ins for NVIDIA's library and programs.
const OF_TESTS: [&str; 4] = [
    "--package",
    "divvy-nvml-mock",
    "--package",
    "divvy-mps-stand-in",
];

/// Built programs. Images and nodes get copies of these.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The node plugin.
    pub plugin: PathBuf,
    /// The program that CDI files call, a static one: containers' files must not reach it.
    pub hook: PathBuf,
    /// The cluster controller.
    pub controller: PathBuf,
    /// The supervisor of MPS daemons.
    pub supervisor: PathBuf,
    /// The stand-in for NVIDIA's programs for MPS; may be missing in a folder of ready programs.
    pub mps: PathBuf,
    /// NVML over simulated GPUs.
    pub mock: PathBuf,
    /// `divvy`, for the image and for the cases that ask it; may be missing in a folder of ready
    /// programs.
    pub cli: PathBuf,
}

impl Programs {
    /// Builds them as they are shipped (`--profile node`).
    pub fn build() -> Result<Self> {
        Target::HOST.build(&[&["--profile", NODE][..], &OfNode::PACKAGES, &OF_TESTS].concat())?;
        let hook = built(Target::HOST, &Target::HOST.musl(), "divvy-cdi-hook")?;
        // The demo has no place on a node.
        let plain = ["--no-default-features"];
        let cli = built_with(Target::HOST, &Target::HOST.musl(), "divvy", &plain)?;
        Self::at(&target_dir().join(NODE), hook, cli)
    }

    /// Builds them for a cluster to look at: with the profile of tests, which links nothing at once
    /// and optimises nothing, and `divvy` as this machine runs it, without the demo.
    pub fn quick() -> Result<Self> {
        let (profile, folder) = DEV;
        let of_host = [
            &["--profile", profile, "--package", "divvy"][..],
            &["--no-default-features"],
            &OfNode::PACKAGES,
            &OF_TESTS,
        ];
        Target::HOST.build(&of_host.concat())?;
        let triple = Target::HOST.musl();
        let hook = "divvy-cdi-hook";
        Target::HOST.build(&["--profile", profile, "--package", hook, "--target", &triple])?;
        let hook = target_dir().join(triple).join(folder).join(hook);
        let folder = target_dir().join(folder);
        Self::at(&folder, hook, folder.join("divvy"))
    }

    /// The driver's image with these programs.
    pub fn image(&self, name: &str) -> Result<Image> {
        let Self {
            plugin,
            hook,
            controller,
            supervisor,
            cli,
            ..
        } = self.clone();
        OfNode {
            target: Target::HOST,
            plugin,
            hook,
            controller,
            supervisor,
            cli,
        }
        .image(name)
    }

    /// Takes the programs in one folder.
    pub fn in_folder(folder: &Path) -> Result<Self> {
        Self::at(folder, folder.join("divvy-cdi-hook"), folder.join("divvy"))
    }

    fn at(folder: &Path, hook: PathBuf, cli: PathBuf) -> Result<Self> {
        let [plugin, controller, supervisor, mock] = [
            "divvy-kubelet-plugin",
            "divvy-cluster-controller",
            "divvy-mps-supervisor",
            "libnvidia_ml.so",
        ]
        .map(|name| folder.join(name));
        for file in [&plugin, &hook, &controller, &supervisor, &mock] {
            ensure!(file.exists(), "{} is not there", file.display());
        }
        Ok(Self {
            plugin,
            hook,
            controller,
            supervisor,
            mps: folder.join("divvy-mps-stand-in"),
            mock,
            cli,
        })
    }
}

/// Programs of the image, built for an architecture as they are shipped.
#[derive(Debug, Clone)]
pub struct OfNode {
    pub target: Target,
    pub plugin: PathBuf,
    pub hook: PathBuf,
    pub controller: PathBuf,
    pub supervisor: PathBuf,
    /// `divvy`, a static program, for administrators without a copy; left out where it is missing.
    pub cli: PathBuf,
}

impl OfNode {
    /// The plugin loads NVIDIA's library, so it links libc as that does; the controller and the
    /// supervisor are built with it.
    const PACKAGES: [&str; 6] = [
        "--package",
        "divvy-kubelet-plugin",
        "--package",
        "divvy-cluster-controller",
        "--package",
        "divvy-mps-supervisor",
    ];

    pub fn build(target: Target) -> Result<Self> {
        let dynamic = [&["--profile", NODE][..], &Self::PACKAGES].concat();
        let folder = if target == Target::HOST {
            target.build(&dynamic)?;
            target_dir().join(NODE)
        } else {
            target.build(&[&dynamic[..], &["--target", &target.gnu()]].concat())?;
            target_dir().join(target.gnu()).join(NODE)
        };
        let [plugin, controller, supervisor] = [
            "divvy-kubelet-plugin",
            "divvy-cluster-controller",
            "divvy-mps-supervisor",
        ]
        .map(|name| folder.join(name));
        Ok(Self {
            target,
            plugin,
            hook: built(target, &target.musl(), "divvy-cdi-hook")?,
            controller,
            supervisor,
            cli: command_line(target)?,
        })
    }

    /// The driver's image of this name.
    pub fn image(&self, name: &str) -> Result<Image> {
        let mut programs: Vec<&Path> =
            vec![&self.plugin, &self.hook, &self.controller, &self.supervisor];
        if self.cli.exists() {
            programs.push(&self.cli);
        }
        images::driver(name, self.target, &programs)
    }
}

/// Builds `divvy` for an architecture, as a static program, with its demo: people get it, too.
fn command_line(target: Target) -> Result<PathBuf> {
    built(target, &target.musl(), "divvy")
}

fn built(target: Target, triple: &str, package: &str) -> Result<PathBuf> {
    built_with(target, triple, package, &[])
}

fn built_with(target: Target, triple: &str, package: &str, more: &[&str]) -> Result<PathBuf> {
    let args = ["--profile", NODE, "--package", package, "--target", triple];
    target.build(&[&args[..], more].concat())?;
    Ok(target_dir().join(triple).join(NODE).join(package))
}

fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
