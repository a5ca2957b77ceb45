//! The driver's files that a container needs, each with its place on the host and in the container.
//!
//! All libraries go to one folder of our own in the container, whatever distribution the host and
//! the image have: nothing in the image is covered, and NVIDIA's CUDA images look there even when
//! no hook has run.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use crate::driver::{Driver, PROGRAM_DIRS};
use crate::elf::{Elf, ElfError};
use crate::root::HostRoot;

/// The libraries' folder in a container.
pub const LIBRARY_DIR: &str = "/usr/local/nvidia/lib64";
/// The programs' folder in a container: on every image's `PATH`.
pub const BINARY_DIR: &str = "/usr/bin";

const PROGRAMS: [&str; 7] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
];
/// The last is for GKE, which has Vulkan's files at the top of the driver's root.
const CONFIG_DIRS: [&str; 4] = ["etc", "usr/local/share", "usr/share", ""];
const CONFIGS: [&str; 13] = [
    "OpenCL/vendors/nvidia.icd",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "glvnd/egl_vendor.d/10_nvidia.json",
    "nvidia/nvoptix.bin",
    "vulkan/icd.d/nvidia_icd.aarch64.json",
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_icd.x86_64.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
];
/// NVIDIA's MPS pipe is omitted deliberately: a container must not become the client of a daemon
/// outside its claim.
const SOCKETS: [&str; 2] = ["nvidia-persistenced/socket", "nvidia-fabricmanager/socket"];
/// Libraries of the driver whose names carry a version of their own.
const OTHER_LIBRARIES: [&str; 4] = [
    "libnvidia-egl-",
    "libnvidia-nvvm70.so.",
    "libnvidia-api.so.",
    "libnvidia-vulkan-producer.so.",
];
/// Names that programs open and that need not exist on the host: link, what it leads to.
const WELL_KNOWN_LINKS: [(&str, &str); 3] = [
    ("libcuda.so", "libcuda.so.1"),
    ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    ("libnvidia-ml.so", "libnvidia-ml.so.1"),
];

/// A file of the driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverFile {
    /// Path on the host.
    pub host: String,
    /// Path in the container.
    pub container: String,
}

/// A shared library of the driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Library {
    pub file: DriverFile,
    /// The name by which programs ask for it, if it has one.
    pub soname: Option<String>,
}

/// A link in the container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Symlink {
    pub link: String,
    /// Its content, relative to its folder.
    pub target: String,
}

/// Files of the driver that a container needs. All lists are sorted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverFiles {
    pub version: String,
    pub libraries: Vec<Library>,
    /// The names under which the libraries are asked for.
    pub symlinks: Vec<Symlink>,
    pub binaries: Vec<DriverFile>,
    /// Configuration files and data.
    pub configs: Vec<DriverFile>,
    pub firmware: Vec<DriverFile>,
    /// Sockets of the host's daemons.
    pub sockets: Vec<DriverFile>,
}

/// The driver's files cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum DriverFilesError {
    /// A folder or file cannot be read.
    #[error("cannot list the driver's {what}")]
    Read {
        /// The kind of file.
        what: &'static str,
        /// The failed operation, with its path.
        #[source]
        source: io::Error,
    },
    /// A library that is cut off: the driver is being installed or replaced right now.
    #[error("library {} is damaged (the driver may still be installing)", path.display())]
    Library {
        path: PathBuf,
        /// The fault.
        #[source]
        source: ElfError,
    },
}

/// Lists the driver's files. A file that the driver does not have is left out; libraries exist, or
/// it would not be a [`Driver`].
pub fn driver_files(host: &HostRoot, driver: &Driver) -> Result<DriverFiles, DriverFilesError> {
    let search = Search { host, driver };
    let (libraries, symlinks) = search.libraries()?;
    Ok(DriverFiles {
        version: driver.version.clone(),
        libraries,
        symlinks,
        binaries: search.binaries().map_err(|source| DriverFilesError::Read {
            what: "programs",
            source,
        })?,
        configs: search.configs().map_err(|source| DriverFilesError::Read {
            what: "configuration",
            source,
        })?,
        firmware: search.firmware().map_err(|source| DriverFilesError::Read {
            what: "firmware",
            source,
        })?,
        sockets: search.sockets(),
    })
}

struct Search<'a> {
    host: &'a HostRoot,
    driver: &'a Driver,
}

impl Search<'_> {
    fn file(&self, inside: &Path, container: impl Into<String>) -> DriverFile {
        DriverFile {
            host: self
                .driver
                .root
                .host_path(inside)
                .to_string_lossy()
                .into_owned(),
            container: container.into(),
        }
    }

    fn libraries(&self) -> Result<(Vec<Library>, Vec<Symlink>), DriverFilesError> {
        let failed = |source| DriverFilesError::Read {
            what: "libraries",
            source,
        };
        // Phase 1: each real file that is a library of ours, and each link to one. The first folder
        // counts for files with one name.
        let mut libraries = BTreeMap::new();
        let mut links: BTreeMap<String, String> = BTreeMap::new();
        for dir in &self.driver.library_dirs {
            for below in ["", "vdpau"] {
                let Some(dir) = self.driver.root.resolve(&dir.join(below)).map_err(failed)? else {
                    continue;
                };
                for name in self.names(&dir).map_err(failed)? {
                    let key = Path::new(below).join(&name).to_string_lossy().into_owned();
                    let path = dir.join(&name);
                    let Some(real) = self.driver.root.resolve(&path).map_err(failed)? else {
                        continue;
                    };
                    // A link: it counts by the name of the file behind it, which is listed by
                    // itself.
                    if real != path {
                        if let Some(target) = real
                            .file_name()
                            .and_then(|n| n.to_str())
                            .filter(|n| self.is_ours(n))
                        {
                            links.entry(key).or_insert_with(|| target.to_owned());
                        }
                        continue;
                    }
                    if !self.is_ours(&name) || libraries.contains_key(&key) {
                        continue;
                    }
                    let seen = self.driver.root.see(&path);
                    // A folder may have the name of a library.
                    if !seen.is_file() {
                        continue;
                    }
                    let elf = match Elf::read(&seen) {
                        Ok(elf) => elf,
                        // 32-bit libraries, text files of the linker.
                        Err(ElfError::NotElf) => continue,
                        Err(source) => {
                            return Err(DriverFilesError::Library { path: seen, source });
                        }
                    };
                    // The hook must be able to lead the name by which it is asked for elsewhere, so
                    // that is always a link.
                    let named_only =
                        !name.ends_with(&self.driver.version) && elf.soname == Some(name);
                    let key = if named_only {
                        format!("{key}.{}", self.driver.version)
                    } else {
                        key
                    };
                    let file = self.file(&path, format!("{LIBRARY_DIR}/{key}"));
                    libraries.insert(
                        key,
                        Library {
                            file,
                            soname: elf.soname,
                        },
                    );
                }
            }
        }
        // A link counts only if what it leads to is mounted.
        let version = &self.driver.version;
        let mounted = |path: String| {
            libraries.contains_key(&path) || libraries.contains_key(&format!("{path}.{version}"))
        };
        links.retain(|link, target| mounted(sibling(link, target)));
        // Phase 2: the name that is in the file itself, which programs are linked against. It wins
        // over a link of the host, and not every host has one.
        for (name, library) in &libraries {
            let Some(soname) = &library.soname else {
                continue;
            };
            let link = sibling(name, soname);
            if !libraries.contains_key(&link) {
                let target = name.rsplit('/').next().unwrap_or(name);
                links.insert(link, target.to_owned());
            }
        }
        // Phase 3: names that are in no library. Programs open the first ones, libglvnd the one of
        // GLX for indirect rendering, and libgbm its backend, in a folder below.
        for (link, target) in WELL_KNOWN_LINKS {
            if links.contains_key(target) {
                links.insert(link.to_owned(), target.to_owned());
            }
        }
        let glx = format!("libGLX_nvidia.so.{}", self.driver.version);
        if libraries.contains_key(&glx) {
            links.insert("libGLX_indirect.so.0".to_owned(), glx);
        }
        if links.contains_key("libnvidia-allocator.so.1") {
            links.insert(
                "gbm/nvidia-drm_gbm.so".to_owned(),
                "../libnvidia-allocator.so.1".to_owned(),
            );
        }
        // A library that is also linked under its own whole name is mounted in that place.
        links.retain(|link, _| !libraries.contains_key(link));
        let symlinks = links
            .into_iter()
            .map(|(link, target)| Symlink {
                link: format!("{LIBRARY_DIR}/{link}"),
                target,
            })
            .collect();
        Ok((libraries.into_values().collect(), symlinks))
    }

    /// Returns whether a real file's name is that of a library of this driver.
    fn is_ours(&self, name: &str) -> bool {
        let versioned = name
            .strip_suffix(self.driver.version.as_str())
            .is_some_and(|rest| rest.ends_with(".so."));
        versioned
            || OTHER_LIBRARIES
                .iter()
                .any(|start| name.starts_with(start) && name.contains(".so."))
    }

    fn names(&self, dir: &Path) -> io::Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for entry in fs_err::read_dir(self.driver.root.see(dir))? {
            if let Ok(name) = entry?.file_name().into_string()
                && name.contains(".so")
            {
                names.insert(name);
            }
        }
        Ok(names)
    }

    fn binaries(&self) -> io::Result<Vec<DriverFile>> {
        let mut found = Vec::new();
        for name in PROGRAMS {
            if let Some(path) = self.driver.root.find(&PROGRAM_DIRS, name)? {
                found.push(self.file(&path, format!("{BINARY_DIR}/{name}")));
            }
        }
        found.sort();
        Ok(found)
    }

    fn configs(&self) -> io::Result<Vec<DriverFile>> {
        let mut found = Vec::new();
        for name in CONFIGS {
            // The first folder that has the file wins, `/etc` before what the driver came with.
            for dir in CONFIG_DIRS {
                let place = Path::new(dir).join(name);
                let Some(path) = self.driver.root.resolve(&place)? else {
                    continue;
                };
                if self.driver.root.see(&path).is_file() {
                    found.push(self.file(&path, format!("/{}/{name}", config_dir(name, dir))));
                    break;
                }
            }
        }
        found.sort();
        Ok(found)
    }

    fn firmware(&self) -> io::Result<Vec<DriverFile>> {
        let release =
            fs_err::read_to_string(self.host.proc("sys/kernel/osrelease")).unwrap_or_default();
        let release = release.trim();
        // The kernel's own order (`fw_path` in drivers/base/firmware_loader/main.c). The first
        // folder that has a file wins.
        let dirs = [
            format!("lib/firmware/updates/{release}"),
            "lib/firmware/updates".to_owned(),
            format!("lib/firmware/{release}"),
            "lib/firmware".to_owned(),
        ];
        let mut found: BTreeMap<String, DriverFile> = BTreeMap::new();
        for dir in dirs {
            let dir = Path::new(&dir).join("nvidia").join(&self.driver.version);
            let Some(real) = self.driver.root.resolve(&dir)? else {
                continue;
            };
            for entry in fs_err::read_dir(self.driver.root.see(&real))? {
                let Ok(name) = entry?.file_name().into_string() else {
                    continue;
                };
                let is_firmware = name.starts_with("gsp")
                    && Path::new(&name).extension().is_some_and(|e| e == "bin");
                let place = real.join(&name);
                if is_firmware
                    && !found.contains_key(&name)
                    && self.driver.root.see(&place).is_file()
                {
                    let container = format!("/lib/firmware/nvidia/{}/{name}", self.driver.version);
                    found.insert(name.clone(), self.file(&place, container));
                }
            }
        }
        Ok(found.into_values().collect())
    }

    /// In the driver's root for a driver container, else in the host's. A socket that cannot be
    /// looked at is left out: the programs that use one work without it.
    fn sockets(&self) -> Vec<DriverFile> {
        let mut found = Vec::new();
        for name in SOCKETS {
            let inside = Path::new("run").join(name);
            let container = format!("/run/{name}");
            if let Ok(Some(path)) = self.driver.root.resolve(&inside) {
                found.push(self.file(&path, container));
            } else if self.host.see(&inside).exists() {
                found.push(DriverFile {
                    host: container.clone(),
                    container,
                });
            }
        }
        found.sort();
        found
    }
}

/// Where a container's libraries look for a file that the host has in `dir`: Vulkan's and OpenCL's
/// loaders in `/etc`, in every image; glvnd and others in `/etc` and `/usr/share`, and nowhere
/// else.
fn config_dir(name: &str, dir: &str) -> &'static str {
    let of_loader = ["vulkan/", "OpenCL/"]
        .iter()
        .any(|start| name.starts_with(start));
    if of_loader || dir == "etc" {
        "etc"
    } else {
        "usr/share"
    }
}

/// `name` in the folder of `of`.
fn sibling(of: &str, name: &str) -> String {
    match of.rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/{name}"),
        None => name.to_owned(),
    }
}
