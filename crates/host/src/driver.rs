//! Finding the driver: which folder of the host holds NVIDIA's user-space files.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

use crate::kernel::{HostFileError, is_driver_version, nvidia_module};
use crate::root::{HostRoot, below};

/// Where drivers are found on known platforms, in the order of trial.
pub const DEFAULT_DRIVER_ROOTS: [&str; 5] = [
    "/",                           // packages of the distribution, NVIDIA's installer, Talos, Bottlerocket
    "/run/nvidia/driver",          // the GPU Operator's driver container, also on OpenShift
    "/home/kubernetes/bin/nvidia", // GKE, both node images
    "/opt/nvidia/current",         // Flatcar
    "/var/lib/nvidia",             // Container-Optimized OS outside GKE
];

/// Library folders below a driver root.
pub(crate) const LIBRARY_DIRS: [&str; 15] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current", // Debian
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib64/nvidia",
    "usr/lib/nvidia/tesla", // Bottlerocket
    "usr/local/nvidia/lib64",
    "usr/local/glibc/usr/lib", // Talos before 1.13
    "usr/local/glibc/lib",
    "usr/lib",
    "lib",
];

/// Program folders below a driver root.
pub(crate) const PROGRAM_DIRS: [&str; 8] = [
    "usr/bin",
    "bin",
    "usr/sbin",
    "sbin",
    "opt/bin",       // Flatcar
    "usr/local/bin", // Talos
    "usr/local/nvidia/bin",
    "usr/libexec/nvidia/tesla/bin", // Bottlerocket
];

const NVML: &str = "libnvidia-ml.so.1";
const CUDA: &str = "libcuda.so.1";
/// As the kernel has it for links in one path.
const MOST_LINKS: usize = 40;

/// A folder that is laid out like a root file system and holds a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverRoot {
    seen: PathBuf,
    host: PathBuf,
}

impl DriverRoot {
    /// The folder as this process sees it, and the same folder as the host names it.
    pub fn new(seen: impl Into<PathBuf>, host: impl Into<PathBuf>) -> Self {
        Self { seen: seen.into(), host: host.into() }
    }

    /// The folder's name on the host.
    pub fn host(&self) -> &Path {
        &self.host
    }

    /// How this process opens a path inside the root.
    pub fn see(&self, inside: &Path) -> PathBuf {
        below(&self.seen, inside)
    }

    /// What the host calls a path inside the root.
    pub fn host_path(&self, inside: &Path) -> PathBuf {
        below(&self.host, inside)
    }

    /// Follows all links of a path inside the root, absolute ones from the root's top, as a process with this root would.
    /// `None` if it leads nowhere. The outcome is relative to the root and free of links.
    pub fn resolve(&self, inside: &Path) -> io::Result<Option<PathBuf>> {
        let mut todo: Vec<PathBuf> = vec![inside.to_owned()];
        let mut done = PathBuf::new();
        let mut links = 0;
        while let Some(path) = todo.pop() {
            let mut parts = path.components();
            let Some(part) = parts.next() else { continue };
            todo.push(parts.as_path().to_owned());
            match part {
                Component::RootDir => done.clear(),
                Component::ParentDir => drop(done.pop()),
                Component::CurDir | Component::Prefix(_) => {}
                Component::Normal(name) => {
                    let next = done.join(name);
                    let meta = match fs_err::symlink_metadata(self.seen.join(&next)) {
                        Ok(meta) => meta,
                        Err(error)
                            if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
                        {
                            return Ok(None);
                        }
                        Err(error) => return Err(error),
                    };
                    if meta.is_symlink() {
                        links += 1;
                        if links > MOST_LINKS {
                            return Ok(None);
                        }
                        todo.push(fs_err::read_link(self.seen.join(&next))?);
                    } else {
                        done = next;
                    }
                }
            }
        }
        Ok(Some(done))
    }

    /// The first of `dirs` that holds `name`, links followed.
    pub(crate) fn find(&self, dirs: &[&str], name: &str) -> io::Result<Option<PathBuf>> {
        for dir in dirs {
            if let Some(found) = self.resolve(&Path::new(dir).join(name))?
                && self.seen.join(&found).is_file()
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

/// A driver that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// Where it is.
    pub root: DriverRoot,
    /// Version of its libraries, such as `580.95.05`; the same as the loaded kernel module's, if that says one.
    pub version: String,
    /// NVML, to be loaded by this process.
    pub nvml_library: PathBuf,
    /// `nvidia-smi` as this process sees it; not every root has it, and only setting a time slice needs it.
    pub nvidia_smi: Option<PathBuf>,
    /// Folders (inside the root) of the driver's libraries, links resolved.
    pub(crate) library_dirs: Vec<PathBuf>,
}

/// Why a folder is not a usable driver root.
#[derive(Debug)]
#[non_exhaustive]
pub enum RootReason {
    /// The folder is not there.
    Absent,
    /// The folder is there and empty: a driver container that has not mounted its files yet.
    Empty,
    /// A library is in none of the known folders.
    NoLibrary(&'static str),
    /// The library's file name does not end in a version.
    NoVersion(PathBuf),
    /// The libraries are of another version than the loaded kernel module.
    OtherVersion {
        /// Of the libraries.
        libraries: String,
        /// Of the module.
        module: String,
    },
    /// It could not be searched.
    Unreadable(io::Error),
}

impl fmt::Display for RootReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("the folder does not exist"),
            Self::Empty => f.write_str("the folder is empty (a driver container may still be installing)"),
            Self::NoLibrary(name) => write!(f, "no library folder has {name}"),
            Self::NoVersion(path) => {
                write!(f, "{} does not lead to a file whose name ends in a driver version", path.display())
            }
            Self::OtherVersion { libraries, module } => write!(
                f,
                "its libraries are of version {libraries}, but the loaded kernel module is {module} (reload the module or reboot)"
            ),
            Self::Unreadable(error) => write!(f, "cannot be searched: {error}"),
        }
    }
}

/// No driver was found.
#[derive(Debug, thiserror::Error)]
pub enum DriverRootError {
    /// None of the folders fits. Says of each why, and what to set.
    #[error("{}", explain(tried, *set_by_user))]
    NoneFits {
        /// The folders, as the host names them, and the reason of each.
        tried: Vec<(PathBuf, RootReason)>,
        /// Whether the folder was given, not guessed.
        set_by_user: bool,
    },
    /// The loaded module's version cannot be read.
    #[error("cannot determine the version of the loaded driver")]
    Module(#[source] HostFileError),
}

fn explain(tried: &[(PathBuf, RootReason)], set_by_user: bool) -> String {
    let reasons: Vec<String> =
        tried.iter().map(|(root, reason)| format!(" {}: {reason};", root.display())).collect();
    let mut text = format!("no usable NVIDIA driver found:{}", reasons.concat());
    if tried.iter().any(|(_, reason)| matches!(reason, RootReason::NoLibrary(_))) {
        text.push_str(" library folders looked in, below each: ");
        text.push_str(&LIBRARY_DIRS.join(", "));
        text.push(';');
    }
    text.push_str(if set_by_user {
        " correct --driver-root (chart value driverRoot), or leave it empty to try"
    } else {
        " set --driver-root (chart value driverRoot) to the folder that holds the driver; known ones are"
    });
    text.push_str(
        " / (installed on the host), /run/nvidia/driver (GPU Operator), /home/kubernetes/bin/nvidia (GKE), /opt/nvidia/current (Flatcar)",
    );
    text
}

/// Finds the driver: at `root` if one is given (a path of the host), else in the first of [`DEFAULT_DRIVER_ROOTS`] that has
/// libraries of the loaded kernel module's version. While no module is loaded, any version fits: whether the driver is up
/// is for [`nvidia_module`] to say.
pub fn find_driver(host: &HostRoot, root: Option<&Path>) -> Result<Driver, DriverRootError> {
    let roots: Vec<PathBuf> = match root {
        Some(root) => vec![root.to_owned()],
        None => DEFAULT_DRIVER_ROOTS.iter().map(PathBuf::from).collect(),
    };
    let candidates = roots.into_iter().map(|root| DriverRoot::new(host.see(&root), root)).collect();
    first_fit(host, candidates, root.is_some())
}

/// Looks for the driver in one folder only, for a pod that mounts the driver's folder apart from the host's root.
pub fn find_driver_at(host: &HostRoot, root: DriverRoot) -> Result<Driver, DriverRootError> {
    first_fit(host, vec![root], true)
}

fn first_fit(host: &HostRoot, roots: Vec<DriverRoot>, set_by_user: bool) -> Result<Driver, DriverRootError> {
    let module = nvidia_module(host).map_err(DriverRootError::Module)?.and_then(|module| module.version);
    let mut tried = Vec::new();
    for root in roots {
        let name = root.host.clone();
        match fit(root, module.as_deref()) {
            Ok(driver) => return Ok(driver),
            Err(reason) => tried.push((name, reason)),
        }
    }
    Err(DriverRootError::NoneFits { tried, set_by_user })
}

fn fit(root: DriverRoot, module: Option<&str>) -> Result<Driver, RootReason> {
    match fs_err::read_dir(&root.seen) {
        Ok(mut entries) => {
            if entries.next().is_none() {
                return Err(RootReason::Empty);
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(RootReason::Absent),
        Err(error) => return Err(RootReason::Unreadable(error)),
    }
    let library = |name| {
        let found = root.find(&LIBRARY_DIRS, name).map_err(RootReason::Unreadable)?;
        found.ok_or(RootReason::NoLibrary(name))
    };
    let (nvml, cuda) = (library(NVML)?, library(CUDA)?);
    let version = [&nvml, &cuda].into_iter().find_map(|path| version_of(path));
    let version = version.ok_or_else(|| RootReason::NoVersion(root.host_path(&nvml)))?;
    if let Some(module) = module.filter(|module| *module != version) {
        return Err(RootReason::OtherVersion { libraries: version, module: module.to_owned() });
    }
    let smi = root.find(&PROGRAM_DIRS, "nvidia-smi").map_err(RootReason::Unreadable)?;
    let mut library_dirs = Vec::new();
    for path in [&cuda, &nvml] {
        if let Some(dir) = path.parent() {
            library_dirs.extend(with_debian_sibling(dir));
        }
    }
    let mut known = std::collections::BTreeSet::new();
    library_dirs.retain(|dir| known.insert(dir.clone()));
    Ok(Driver {
        version,
        nvml_library: root.see(&nvml),
        nvidia_smi: smi.map(|smi| root.see(&smi)),
        library_dirs,
        root,
    })
}

/// Debian splits the driver's libraries between a folder and its `nvidia/current`.
fn with_debian_sibling(dir: &Path) -> Vec<PathBuf> {
    const BELOW: &str = "nvidia/current";
    if dir.ends_with(BELOW) {
        let above = dir.parent().and_then(Path::parent).map(Path::to_path_buf);
        std::iter::once(dir.to_owned()).chain(above).collect()
    } else {
        vec![dir.to_owned(), dir.join(BELOW)]
    }
}

/// `libnvidia-ml.so.580.95.05` → `580.95.05`.
fn version_of(path: &Path) -> Option<String> {
    let (_, version) = path.file_name()?.to_str()?.split_once(".so.")?;
    is_driver_version(version).then(|| version.to_owned())
}
