//! The programs of a cluster, built from pinned Go modules under `tests/e2e/parts/`.
//!
//! The first build takes about ten minutes of two cores, so what it makes is kept under
//! `$XDG_CACHE_HOME/divvy` in a folder named after the hash of everything that goes into it: a
//! second run and a fresh clone find it there.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;
use sha2::{Digest, Sha256};

use crate::process::{output, run};

/// The version whose module and sums are checked in.
pub const DEFAULT_VERSION: &str = "1.37.1";

/// A Go module of ours and what is built from it.
struct Part {
    name: &'static str,
    packages: &'static [&'static str],
    tags: Option<&'static str>,
}

const KUBERNETES: Part = Part {
    name: "kubernetes",
    packages: &["."],
    tags: None,
};
const HELM: Part = Part {
    name: "helm",
    packages: &["helm.sh/helm/v4/cmd/helm"],
    tags: None,
};
/// Without service discovery: its configuration names what it scrapes. To update it, use `go mod
/// edit -require` and then `go build -mod=mod -tags remove_all_sd` there: `go get` wants a module
/// of a discovery that the module proxy refuses.
const PROMETHEUS: Part = Part {
    name: "prometheus",
    packages: &["github.com/prometheus/prometheus/cmd/prometheus"],
    tags: Some("remove_all_sd"),
};
const OTHERS: &[Part] = &[
    Part {
        name: "pause",
        packages: &["."],
        tags: None,
    },
    Part {
        name: "etcd",
        packages: &["go.etcd.io/etcd/server/v3"],
        tags: None,
    },
    Part {
        name: "containerd",
        packages: &[
            "github.com/containerd/containerd/v2/cmd/containerd",
            "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
            "github.com/containerd/containerd/v2/cmd/ctr",
        ],
        tags: None,
    },
    Part {
        name: "cni",
        packages: &[
            "github.com/containernetworking/plugins/plugins/main/ptp",
            "github.com/containernetworking/plugins/plugins/main/loopback",
            "github.com/containernetworking/plugins/plugins/ipam/host-local",
        ],
        tags: None,
    },
    // Without seccomp every pod sandbox fails.
    Part {
        name: "runc",
        packages: &["github.com/opencontainers/runc"],
        tags: Some(SECCOMP),
    },
];
/// The one tag that needs a C library.
const SECCOMP: &str = "seccomp";

/// The programs that the one Kubernetes binary is, by the name it is called by.
const KUBERNETES_NAMES: &[&str] = &[
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
];

/// Where the programs of a cluster are.
#[derive(Debug, Clone)]
pub struct Parts {
    version: String,
    dirs: BTreeMap<&'static str, PathBuf>,
}

impl Parts {
    /// Finds every program of a cluster of this Kubernetes version, building what is not there yet.
    pub fn ensure(version: &str) -> Result<Self> {
        let mut dirs = BTreeMap::new();
        dirs.insert(KUBERNETES.name, kubernetes(version)?);
        for part in OTHERS {
            dirs.insert(part.name, build(part, &module_dir(part), &[])?);
        }
        Ok(Self {
            version: version.to_owned(),
            dirs,
        })
    }

    /// The Kubernetes version, without a leading `v`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The path of a program, as `kubelet` or `runc`.
    pub fn bin(&self, name: &str) -> Result<PathBuf> {
        let found = self
            .dirs
            .values()
            .map(|dir| dir.join(name))
            .find(|path| path.exists());
        found.with_context(|| format!("no part provides a program named {name}"))
    }

    /// The folder of the network plugins.
    pub fn cni_dir(&self) -> &Path {
        self.dirs
            .get("cni")
            .map_or(Path::new("/nonexistent"), PathBuf::as_path)
    }

    /// A `PATH` with every part in front of what the caller has.
    pub fn path_env(&self) -> OsString {
        let own = env::var_os("PATH").unwrap_or_default();
        let all = self.dirs.values().cloned().chain(env::split_paths(&own));
        env::join_paths(all).unwrap_or(own)
    }
}

/// The Kubernetes version to test with: `$DIVVY_K8S_VERSION`, else the default.
pub fn version_setting() -> String {
    let set = env::var("DIVVY_K8S_VERSION")
        .ok()
        .filter(|set| !set.is_empty());
    set.map_or_else(
        || DEFAULT_VERSION.to_owned(),
        |set| set.trim_start_matches('v').to_owned(),
    )
}

/// Major, minor and patch of a version as `1.37.1`.
pub fn numbers(version: &str) -> Option<(u32, u32, u32)> {
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    let found = (numbers.next()??, numbers.next()??, numbers.next()??);
    numbers.next().is_none().then_some(found)
}

/// Finds helm, building it if it is not there yet.
pub fn helm() -> Result<PathBuf> {
    Ok(build(&HELM, &module_dir(&HELM), &[])?.join("helm"))
}

/// Finds Prometheus, building it if it is not there yet.
pub fn prometheus() -> Result<PathBuf> {
    Ok(build(&PROMETHEUS, &module_dir(&PROMETHEUS), &[])?.join("prometheus"))
}

/// The cache of everything expensive: `$XDG_CACHE_HOME/divvy`.
pub fn cache_dir() -> Result<PathBuf> {
    let base = match env::var_os("XDG_CACHE_HOME").filter(|set| !set.is_empty()) {
        Some(set) => PathBuf::from(set),
        None => {
            PathBuf::from(env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?)
                .join(".cache")
        }
    };
    Ok(base.join("divvy"))
}

fn module_dir(part: &Part) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("parts")
        .join(part.name)
}

/// Builds Kubernetes of any version: the checked-in module is the default's, others are derived
/// from it.
fn kubernetes(version: &str) -> Result<PathBuf> {
    let numbers: Vec<&str> = version.split('.').collect();
    let &[major, minor, patch] = numbers.as_slice() else {
        bail!(
            "Kubernetes version {version:?} is not of the form 1.37.1 (DIVVY_K8S_VERSION or --version)"
        );
    };
    let module = if version == DEFAULT_VERSION {
        module_dir(&KUBERNETES)
    } else {
        derived_module(version, &format!("0.{minor}.{patch}"))?
    };
    // Without these the server says v0.0.0-master, and what reads the server's version (the driver
    // does) is misled.
    let package = "k8s.io/component-base/version";
    let flags = [
        format!("-X {package}.gitVersion=v{version}"),
        format!("-X {package}.gitMajor={major}"),
        format!("-X {package}.gitMinor={minor}"),
    ];
    build(&KUBERNETES, &module, &flags)
}

/// The module for another version: same program, other numbers, sums taken from Go's checksum
/// database.
fn derived_module(version: &str, libraries: &str) -> Result<PathBuf> {
    let dir = cache_dir()?
        .join("modules")
        .join(format!("kubernetes-{version}"));
    if dir.join("go.sum").exists() {
        return Ok(dir);
    }
    fs::create_dir_all(&dir)?;
    let ours = module_dir(&KUBERNETES);
    fs::copy(ours.join("main.go"), dir.join("main.go"))?;
    let default_libraries = format!("v0.{}", DEFAULT_VERSION.trim_start_matches("1."));
    let mut text = String::new();
    for line in fs::read_to_string(ours.join("go.mod"))?.lines() {
        // Indirect requirements belong to the default version: `go mod tidy` finds those of this
        // one.
        if line.ends_with("// indirect") || line.starts_with("\tgithub.com/") {
            continue;
        }
        let line = line
            .replace(&default_libraries, &format!("v{libraries}"))
            .replace(&format!("v{DEFAULT_VERSION}"), &format!("v{version}"));
        text.push_str(&line);
        text.push('\n');
    }
    fs::write(dir.join("go.mod"), text)?;
    run(Command::new("go")
        .args(["mod", "tidy"])
        .env("GONOSUMDB", without_sums())
        .current_dir(&dir))
    .with_context(|| format!("no module graph for Kubernetes {version}"))?;
    Ok(dir)
}

/// Modules that are not looked up in Go's checksum database: those of the caller, and two of
/// Kubernetes 1.34.9 that the database does not know (404).
fn without_sums() -> OsString {
    let mut all = env::var_os("GONOSUMDB")
        .filter(|set| !set.is_empty())
        .unwrap_or_default();
    if !all.is_empty() {
        all.push(",");
    }
    all.push("k8s.io/externaljwt,k8s.io/kube-proxy");
    all
}

/// Builds a part unless the cache has it; returns the folder of its programs.
fn build(part: &Part, module: &Path, ldflags: &[String]) -> Result<PathBuf> {
    let ldflags = format!("-s -w {}", ldflags.join(" "));
    let parts = cache_dir()?.join("parts");
    let dir = parts.join(format!("{}-{}", part.name, hash(part, module, &ldflags)?));
    if dir.exists() {
        return Ok(dir);
    }
    fs::create_dir_all(&parts)?;
    // Two runs at once: the second waits here and then finds what the first has built.
    let lock = fs::File::create(parts.join(format!("{}.lock", part.name)))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
    if dir.exists() {
        return Ok(dir);
    }
    crate::process::say(&format!(
        "building {} (once; the first build of Kubernetes takes minutes)",
        part.name
    ));
    let fresh = parts.join(format!(".{}.new", part.name));
    if fresh.exists() {
        fs::remove_dir_all(&fresh)?;
    }
    fs::create_dir_all(&fresh)?;
    for package in part.packages {
        let mut go = Command::new("nice");
        go.args([
            "go",
            "build",
            "-trimpath",
            "-buildvcs=false",
            "-mod=readonly",
            "-ldflags",
            &ldflags,
        ]);
        if let Some(tags) = part.tags {
            go.args(["-tags", tags]);
        }
        go.arg("-o")
            .arg(fresh.join(program_name(part, package)))
            .arg(package);
        go.env(
            "CGO_ENABLED",
            if part.tags == Some(SECCOMP) { "1" } else { "0" },
        )
        .env("GOWORK", "off");
        run(go.current_dir(module)).with_context(|| format!("building {package} failed"))?;
    }
    if part.name == KUBERNETES.name {
        for name in KUBERNETES_NAMES {
            fs::os::unix::fs::symlink(part.name, fresh.join(name))?;
        }
    }
    fs::rename(&fresh, &dir)?;
    Ok(dir)
}

/// Returns the name of the program that a package is built into.
fn program_name<'a>(part: &'a Part, package: &'a str) -> &'a str {
    if package == "." || part.packages.len() == 1 {
        return part.name;
    }
    package.rsplit('/').next().unwrap_or(package)
}

/// The hash of everything that decides what a build gives.
fn hash(part: &Part, module: &Path, ldflags: &str) -> Result<String> {
    let go = output(Command::new("go").arg("version"))
        .context("Go 1.26 or later is needed to build the cluster")?;
    let mut hash = Sha256::new();
    for text in [
        go.as_str(),
        ldflags,
        part.tags.unwrap_or_default(),
        &part.packages.join(" "),
    ] {
        hash.update(text.as_bytes());
        hash.update([0]);
    }
    let mut files: Vec<PathBuf> = fs::read_dir(module)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.sort();
    ensure!(!files.is_empty(), "{} has no module", module.display());
    for file in files {
        hash.update(fs::read(&file)?);
        hash.update([0]);
    }
    Ok(crate::oci::hex(&hash.finalize()).chars().take(16).collect())
}
