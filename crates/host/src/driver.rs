//! Finding the driver: which folder of the host holds NVIDIA's user-space files.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use crate::elf::Elf;
use crate::kernel::{HostFileError, is_driver_version, nvidia_module};
use crate::root::{HostRoot, below};

/// Where drivers are found on known platforms, in the order of trial.
pub const DEFAULT_DRIVER_ROOTS: [&str; 5] = [
    "/",                  // packages of the distribution, NVIDIA's installer, Talos, Bottlerocket
    "/run/nvidia/driver", // the GPU Operator's driver container, also on OpenShift
    "/home/kubernetes/bin/nvidia", // GKE, both node images
    "/opt/nvidia/current", // Flatcar
    "/var/lib/nvidia",    // Container-Optimized OS outside GKE
];

/// Library folders below a driver root; after them, those that the root's loader cache names.
pub(crate) const LIBRARY_DIRS: [&str; 17] = [
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
    "usr/local/lib",         // Talos from 1.13 on
    "run/opengl-driver/lib", // NixOS
    "usr/lib",
    "lib",
];

/// Program folders below a driver root.
pub(crate) const PROGRAM_DIRS: [&str; 9] = [
    "usr/bin",
    "bin",
    "usr/sbin",
    "sbin",
    "opt/bin",       // Flatcar
    "usr/local/bin", // Talos
    "usr/local/nvidia/bin",
    "usr/libexec/nvidia/tesla/bin", // Bottlerocket
    "run/current-system/sw/bin",    // NixOS
];

const NVML: &str = "libnvidia-ml.so.1";
const CUDA: &str = "libcuda.so.1";
/// The loader's cache of a root: where its libraries are, whatever distribution it is.
const LOADER_CACHE: &str = "etc/ld.so.cache";
/// Far above the cache of any distribution.
const MOST_CACHE: u64 = 16 << 20;
/// The kernel's limit for links in one path.
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
        Self {
            seen: seen.into(),
            host: host.into(),
        }
    }

    /// The folder's name on the host.
    pub fn host(&self) -> &Path {
        &self.host
    }

    /// Returns the path by which this process opens a path inside the root.
    pub fn see(&self, inside: &Path) -> PathBuf {
        below(&self.seen, inside)
    }

    /// Returns the host's name of a path inside the root.
    pub fn host_path(&self, inside: &Path) -> PathBuf {
        below(&self.host, inside)
    }

    /// Follows all links of a path inside the root, absolute ones from the root's top, as a process
    /// with this root would; those that name the root by its place on the host, from there. `None`
    /// if the path leads nowhere. The outcome is relative to the root and free of links.
    pub fn resolve(&self, inside: &Path) -> io::Result<Option<PathBuf>> {
        // A stack of paths that are still to be walked: the target of a link comes on top of what
        // followed the link.
        let mut todo: Vec<PathBuf> = vec![inside.to_owned()];
        let mut done = PathBuf::new();
        let mut links = 0;
        while let Some(path) = todo.pop() {
            let mut parts = path.components();
            let Some(part) = parts.next() else { continue };
            todo.push(parts.as_path().to_owned());
            match part {
                // The top of the driver's root, never of the root that this process has.
                Component::RootDir => done.clear(),
                // At the top `..` stays there, as in the kernel.
                Component::ParentDir => drop(done.pop()),
                Component::CurDir | Component::Prefix(_) => {}
                Component::Normal(name) => {
                    let next = done.join(name);
                    let meta = match fs_err::symlink_metadata(self.seen.join(&next)) {
                        Ok(meta) => meta,
                        Err(error)
                            if matches!(
                                error.kind(),
                                ErrorKind::NotFound | ErrorKind::NotADirectory
                            ) =>
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
                        let target = fs_err::read_link(self.seen.join(&next))?;
                        todo.push(self.inside(target));
                    } else {
                        done = next;
                    }
                }
            }
        }
        Ok(Some(done))
    }

    /// Takes the root's own name on the host off a link's target: installers on the host write
    /// `/opt/nvidia/current/lib/…` into the folder itself.
    fn inside(&self, target: PathBuf) -> PathBuf {
        match target.strip_prefix(&self.host) {
            // Only if the root itself has no such path: then the link means that one.
            Ok(rest) if !self.seen.join(below(Path::new(""), &target)).exists() => {
                Path::new("/").join(rest)
            }
            Ok(_) | Err(_) => target,
        }
    }

    /// Finds a library: in the known folders, else where the root's loader finds it, else in a
    /// folder of Debian for one of several drivers. Files that are no 64-bit libraries are passed
    /// over outside of the known folders.
    fn find_library(&self, name: &str) -> io::Result<Option<PathBuf>> {
        if let Some(found) = self.find(&LIBRARY_DIRS, name)? {
            return Ok(Some(found));
        }
        let by_flavour = LIBRARY_DIRS.iter().flat_map(|dir| {
            let flavours = self.flavours(Path::new(dir));
            flavours.into_iter().map(|folder| folder.join(name))
        });
        for path in self.cached(name).into_iter().chain(by_flavour) {
            if let Some(found) = self.resolve(&path)?
                && self.seen.join(&found).is_file()
                && Elf::read(&self.seen.join(&found)).is_ok()
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Lists the folders of Debian's drivers below a library folder, each of a version or branch:
    /// `nvidia/current`, `nvidia/tesla-535`, `nvidia/legacy-390xx`. None if it cannot be read.
    fn flavours(&self, dir: &Path) -> Vec<PathBuf> {
        let folder = dir.join(OF_FLAVOURS);
        let entries = fs_err::read_dir(self.see(&folder)).into_iter().flatten();
        let names = entries.flatten().map(|entry| entry.file_name());
        let mut names: Vec<_> = names.filter(|name| is_flavour(name)).collect();
        names.sort();
        names.into_iter().map(|name| folder.join(name)).collect()
    }

    /// Lists the paths under which the root's loader cache has a library. The cache (ldconfig, of
    /// glibc) ends in a table of texts with a NUL after each; the paths among them are all that is
    /// needed. A cache that cannot be read names none.
    fn cached(&self, name: &str) -> Vec<PathBuf> {
        let Ok(Some(cache)) = self.resolve(Path::new(LOADER_CACHE)) else {
            return Vec::new();
        };
        let mut bytes = Vec::new();
        let read = fs_err::File::open(self.seen.join(cache))
            .and_then(|file| file.take(MOST_CACHE).read_to_end(&mut bytes));
        if read.is_err() {
            return Vec::new();
        }
        let texts = bytes.split(|byte| *byte == 0);
        let paths = texts.filter(|text| text.starts_with(b"/") && text.ends_with(name.as_bytes()));
        let paths = paths.map(|text| PathBuf::from(OsStr::from_bytes(text)));
        paths
            .filter(|path| path.file_name() == Some(OsStr::new(name)))
            .collect()
    }

    /// Finds a program by its name; the path is inside the root.
    pub fn find_program(&self, name: &str) -> io::Result<Option<PathBuf>> {
        self.find(&PROGRAM_DIRS, name)
    }

    /// Returns the first of `dirs` that holds the file `name`, links followed.
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

/// Where to look for the driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverAt {
    /// The folder as this process sees it.
    pub seen: Option<PathBuf>,
    /// The folder as the host names it.
    pub host: Option<PathBuf>,
}

impl DriverAt {
    /// Finds the driver; one folder given stands for both views, none for the folders known to hold
    /// drivers.
    pub fn find(&self, host: &HostRoot) -> Result<Driver, DriverRootError> {
        match (&self.seen, &self.host) {
            (Some(seen), named) => {
                let named = named.as_ref().unwrap_or(seen);
                find_driver_at(host, DriverRoot::new(seen, named))
            }
            (None, named) => find_driver(host, named.as_deref()),
        }
    }
}

/// A driver that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// Where it is.
    pub root: DriverRoot,
    /// Version of its libraries, such as `580.95.05`; the same as the loaded kernel module's, if
    /// that says one.
    pub version: String,
    /// NVML, to be loaded by this process.
    pub nvml_library: PathBuf,
    /// `nvidia-smi` as this process sees it; not every root has it, and only setting a time slice
    /// needs it.
    pub nvidia_smi: Option<PathBuf>,
    /// Folders (inside the root) of the driver's libraries, links resolved.
    pub(crate) library_dirs: Vec<PathBuf>,
}

/// Why a folder is not a usable driver root.
#[derive(Debug)]
#[non_exhaustive]
pub enum RootReason {
    /// The path is relative: nothing says to which folder.
    Relative,
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
        /// Version of the libraries.
        libraries: String,
        /// Version of the module.
        module: String,
    },
    /// It holds a driver of a platform that is not supported.
    Unsupported(&'static str),
    /// It could not be searched.
    Unreadable(io::Error),
}

impl fmt::Display for RootReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Relative => {
                f.write_str("the path is not absolute (give it from /, as the host names it)")
            }
            Self::Absent => f.write_str("the folder does not exist"),
            Self::Unsupported(platform) => write!(
                f,
                "it holds the driver of {platform}, which divvy does not support (docs/install/README.md)"
            ),
            Self::Empty => {
                f.write_str("the folder is empty (a driver container may still be installing)")
            }
            Self::NoLibrary(name) => write!(f, "no library folder has {name}"),
            Self::NoVersion(path) => {
                write!(
                    f,
                    "{} does not lead to a file whose name ends in a driver version",
                    path.display()
                )
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
        /// The folder was given, not guessed.
        set_by_user: bool,
    },
    /// The loaded module's version cannot be read.
    #[error("cannot determine the version of the loaded driver")]
    Module(#[source] HostFileError),
}

fn explain(tried: &[(PathBuf, RootReason)], set_by_user: bool) -> String {
    let reasons: Vec<String> = tried
        .iter()
        .map(|(root, reason)| format!(" {}: {reason};", root.display()))
        .collect();
    let mut text = format!("no usable NVIDIA driver found:{}", reasons.concat());
    if tried
        .iter()
        .any(|(_, reason)| matches!(reason, RootReason::NoLibrary(_)))
    {
        text.push_str(" library folders looked in, below each: ");
        text.push_str(&LIBRARY_DIRS.join(", "));
        text.push_str(", and those in its etc/ld.so.cache;");
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

/// Finds the driver: at `root` if one is given (a path of the host), else in the first of
/// [`DEFAULT_DRIVER_ROOTS`] that has libraries of the loaded kernel module's version. While no
/// module is loaded, any version fits: whether the driver is up is for [`nvidia_module`] to say.
pub fn find_driver(host: &HostRoot, root: Option<&Path>) -> Result<Driver, DriverRootError> {
    let roots: Vec<PathBuf> = match root {
        Some(root) => vec![root.to_owned()],
        None => DEFAULT_DRIVER_ROOTS.iter().map(PathBuf::from).collect(),
    };
    if let Some(root) = root.filter(|root| root.is_relative()) {
        return Err(DriverRootError::NoneFits {
            tried: vec![(root.to_owned(), RootReason::Relative)],
            set_by_user: true,
        });
    }
    let candidates = roots.into_iter().map(|root| on_host(host, root)).collect();
    first_fit(host, candidates, root.is_some())
}

/// Follows the links by which the host names a driver root: an absolute one leads elsewhere on the
/// host, also where the host is seen below another folder. A link that leads nowhere keeps its
/// name.
fn on_host(host: &HostRoot, named: PathBuf) -> DriverRoot {
    let top = Path::new("/");
    let whole = DriverRoot::new(host.see(top), top);
    let real = match whole.resolve(&named) {
        Ok(Some(real)) => top.join(real),
        Ok(None) | Err(_) => named,
    };
    DriverRoot::new(host.see(&real), real)
}

/// Looks for the driver in one folder only, for a pod that mounts the driver's folder apart from
/// the host's root.
pub fn find_driver_at(host: &HostRoot, root: DriverRoot) -> Result<Driver, DriverRootError> {
    first_fit(host, vec![root], true)
}

fn first_fit(
    host: &HostRoot,
    roots: Vec<DriverRoot>,
    set_by_user: bool,
) -> Result<Driver, DriverRootError> {
    let module = nvidia_module(host)
        .map_err(DriverRootError::Module)?
        .and_then(|module| module.version);
    let mut tried = Vec::new();
    for root in roots {
        match fit(root.clone(), module.as_deref()) {
            Ok(driver) => return Ok(driver),
            Err(reason) => {
                // The mark of a platform explains why a root does not fit. It does not refuse a
                // root that fits.
                let why = unsupported(&root).map_or(reason, RootReason::Unsupported);
                tried.push((root.host, why));
            }
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
        let found = root.find_library(name).map_err(RootReason::Unreadable)?;
        found.ok_or(RootReason::NoLibrary(name))
    };
    // Both: with NVML alone GPUs could be listed, and no container could use one.
    let (nvml, cuda) = (library(NVML)?, library(CUDA)?);
    // The version is in the name of the file that a library's link leads to. The name of either
    // will do.
    let version = [&nvml, &cuda].into_iter().find_map(|path| version_of(path));
    let version = version.ok_or_else(|| RootReason::NoVersion(root.host_path(&nvml)))?;
    // The kernel module serves libraries of its own version only; NVML would answer
    // `LIB_RM_VERSION_MISMATCH`.
    if let Some(module) = module.filter(|module| *module != version) {
        return Err(RootReason::OtherVersion {
            libraries: version,
            module: module.to_owned(),
        });
    }
    let smi = root
        .find(&PROGRAM_DIRS, "nvidia-smi")
        .map_err(RootReason::Unreadable)?;
    // The order counts: of two files with one name `driver_files` takes that of the first folder.
    let mut library_dirs = Vec::new();
    for path in [&cuda, &nvml] {
        if let Some(dir) = path.parent() {
            library_dirs.extend(with_debian_sibling(&root, dir));
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

/// Names a platform whose driver does not answer as divvy needs it: by a file that only it has, or
/// by what its loader cache names. A container on such a machine may have the libraries in another
/// folder than the machine, and no other mark.
fn unsupported(root: &DriverRoot) -> Option<&'static str> {
    const WSL2: &str = "WSL2";
    const JETSON: &str = "NVIDIA Jetson";
    const MARKS: [(&str, &str); 2] = [
        ("usr/lib/wsl/lib/libnvidia-ml.so.1", WSL2),
        ("etc/nv_tegra_release", JETSON),
    ];
    // Libraries that NVIDIA ships for this platform only, or its folder for those of all platforms.
    const CACHED: [(&str, Option<&str>, &str); 6] = [
        ("libdxcore.so", None, WSL2),
        (NVML, Some("wsl"), WSL2),
        (CUDA, Some("wsl"), WSL2),
        ("libnvrm_gpu.so", None, JETSON),
        (NVML, Some("tegra"), JETSON),
        (CUDA, Some("tegra"), JETSON),
    ];
    let has = |path: &Path| matches!(root.resolve(path), Ok(Some(_)));
    let in_folder = |path: &Path, folder: Option<&str>| {
        folder.is_none_or(|folder| path.iter().any(|part| part == folder))
    };
    let marked = MARKS.into_iter().find(|(mark, _)| has(Path::new(mark)));
    let by_mark = marked.map(|(_, platform)| platform);
    by_mark.or_else(|| {
        let cached = CACHED.into_iter().find(|(name, folder, _)| {
            let mut paths = root.cached(name).into_iter();
            paths.any(|path| in_folder(&path, *folder) && has(&path))
        });
        cached.map(|(_, _, platform)| platform)
    })
}

/// Folder with a folder for each driver of Debian.
const OF_FLAVOURS: &str = "nvidia";

/// Returns whether a folder has the name of one of Debian's drivers.
fn is_flavour(name: &OsStr) -> bool {
    let name = name.to_str().unwrap_or_default();
    ["current", "tesla", "legacy"]
        .iter()
        .any(|flavour| name == *flavour || name.starts_with(&format!("{flavour}-")))
}

/// Adds the other folders of Debian, whose alternatives split the driver's libraries between a
/// folder and one of its driver below it: `nvidia/current`, `nvidia/tesla-535`.
fn with_debian_sibling(root: &DriverRoot, dir: &Path) -> Vec<PathBuf> {
    let above = dir.parent().filter(|above| above.ends_with(OF_FLAVOURS));
    match above.and_then(Path::parent) {
        Some(above) if dir.file_name().is_some_and(is_flavour) => {
            vec![dir.to_owned(), above.to_owned()]
        }
        _ => std::iter::once(dir.to_owned())
            .chain(root.flavours(dir))
            .collect(),
    }
}

/// Returns the version in a library's name: `libnvidia-ml.so.580.95.05` → `580.95.05`.
fn version_of(path: &Path) -> Option<String> {
    let (_, version) = path.file_name()?.to_str()?.split_once(".so.")?;
    is_driver_version(version).then(|| version.to_owned())
}
