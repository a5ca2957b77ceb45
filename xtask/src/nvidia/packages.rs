//! NVIDIA's packages from Debian, by `apt-get` with sources of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};

use crate::programs::succeeds;

/// Where there is nothing else in the machine's own sources.
const ARCHIVE: &str = "http://deb.debian.org/debian";
const SECURITY: &str = "http://deb.debian.org/debian-security";
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Suites that have the packages; of the oldest, what may be gone one day.
const SUITES: &str = "bookworm trixie experimental";
const OLD_SUITE: &str = "bullseye";

/// Content of a package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The programs for MPS.
    Mps,
    /// The library for NVML.
    Library,
    Smi,
}

/// A package of one branch of drivers.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) branch: u32,
    pub(crate) kind: Kind,
    pub(crate) name: &'static str,
    /// False: one day there may be none.
    is_needed: bool,
}

const fn needed(branch: u32, kind: Kind, name: &'static str) -> Package {
    Package {
        branch,
        kind,
        name,
        is_needed: true,
    }
}

const fn old(branch: u32, kind: Kind, name: &'static str) -> Package {
    Package {
        branch,
        kind,
        name,
        is_needed: false,
    }
}

pub(crate) const PACKAGES: &[Package] = &[
    needed(535, Kind::Mps, "nvidia-cuda-mps"),
    needed(550, Kind::Mps, "nvidia-cuda-mps"),
    needed(555, Kind::Mps, "nvidia-cuda-mps"),
    needed(525, Kind::Library, "libnvidia-tesla-ml1"),
    needed(535, Kind::Library, "libnvidia-tesla-535-ml1"),
    needed(535, Kind::Library, "libnvidia-ml1"),
    needed(550, Kind::Library, "libnvidia-ml1"),
    needed(555, Kind::Library, "libnvidia-ml1"),
    needed(525, Kind::Smi, "nvidia-tesla-smi"),
    needed(535, Kind::Smi, "nvidia-tesla-535-smi"),
    needed(535, Kind::Smi, "nvidia-smi"),
    needed(550, Kind::Smi, "nvidia-smi"),
    needed(555, Kind::Smi, "nvidia-smi"),
    old(418, Kind::Library, "libnvidia-tesla-418-ml1"),
    old(450, Kind::Library, "libnvidia-tesla-450-ml1"),
    old(460, Kind::Library, "libnvidia-tesla-460-ml1"),
    old(470, Kind::Library, "libnvidia-tesla-470-ml1"),
    old(450, Kind::Smi, "nvidia-tesla-450-smi"),
    old(470, Kind::Smi, "nvidia-tesla-470-smi"),
];

/// Packages that were found.
pub(crate) enum Had {
    All(Vec<Fetched>),
    /// Nothing, and why.
    None(String),
}

/// A package in the cache.
pub(crate) struct Fetched {
    package: &'static Package,
    /// Version of the driver.
    version: String,
    file: PathBuf,
}

impl Fetched {
    /// Returns it for people.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.package.name, self.version)
    }

    pub(crate) fn unpack(&self, unpacked: &Path) -> Result<()> {
        let folder = unpacked.join(self.package.folder()).join(&self.version);
        unpack(&self.file, &folder)
    }
}

/// Unpacks a package into a folder.
pub(crate) fn unpack(file: &Path, folder: &Path) -> Result<()> {
    fs_err::create_dir_all(folder)?;
    succeeds(Command::new("dpkg-deb").arg("-x").arg(file).arg(folder))
}

impl Package {
    fn folder(&self) -> PathBuf {
        PathBuf::from(format!("r{}", self.branch)).join(self.name)
    }
}

/// A package that was unpacked.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pub(crate) branch: u32,
    /// Version of the driver.
    pub(crate) version: String,
    /// Its program or library.
    pub(crate) file: PathBuf,
}

/// Lists the packages of a kind that were unpacked, oldest first.
pub(crate) fn of_kind(unpacked: &Path, kind: Kind) -> Result<Vec<Unpacked>> {
    let mut all = Vec::new();
    for package in PACKAGES.iter().filter(|package| package.kind == kind) {
        let folder = unpacked.join(package.folder());
        if !folder.exists() {
            ensure!(!package.is_needed, "{} is not there", folder.display());
            continue;
        }
        for entry in fs_err::read_dir(&folder)? {
            let entry = entry?;
            let version = entry.file_name().to_string_lossy().into_owned();
            all.push(Unpacked {
                branch: package.branch,
                file: find(&entry.path(), kind, &version)?,
                version,
            });
        }
    }
    all.sort_by(|one, other| (one.branch, &one.version).cmp(&(other.branch, &other.version)));
    Ok(all)
}

/// Finds the program or library of a package.
fn find(folder: &Path, kind: Kind, version: &str) -> Result<PathBuf> {
    let wanted = match kind {
        Kind::Mps => "nvidia-cuda-mps-control".to_owned(),
        Kind::Library => format!("libnvidia-ml.so.{version}"),
        Kind::Smi => "nvidia-smi".to_owned(),
    };
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder)? {
            let (path, is) = entry.and_then(|one| Ok((one.path(), one.file_type()?)))?;
            if is.is_file() && path.ends_with(&wanted) {
                return Ok(path);
            }
            // Documents and rules of packages have files of these names, too.
            folders.extend((is.is_dir() && !path.ends_with("usr/share")).then_some(path));
        }
    }
    Err(anyhow::anyhow!("{} has no {wanted}", folder.display()))
}

/// Returns the control program of a branch.
pub(crate) fn control(unpacked: &Path, branch: u32) -> Result<PathBuf> {
    let mut all = of_kind(unpacked, Kind::Mps)?.into_iter();
    let found = all.find(|one| one.branch == branch);
    let found = found.with_context(|| format!("there is no control program of R{branch}"))?;
    Ok(found.file)
}

/// `apt-get` and `apt-cache` with lists, keys and cache of their own.
struct Apt<'a> {
    cache: &'a Path,
}

impl Apt<'_> {
    fn run(&self, program: &str, args: &[&str]) -> Result<Output> {
        let mut command = Command::new(program);
        for (name, value) in [
            ("Dir::Etc::sourcelist", PathBuf::from("/dev/null")),
            ("Dir::Etc::sourceparts", self.cache.join("parts")),
            ("Dir::State::lists", self.cache.join("lists")),
            ("Dir::Cache", self.cache.join("apt")),
            ("APT::Update::Error-Mode", "any".into()),
            // The cache is root's, as this process is.
            ("APT::Sandbox::User", "root".into()),
        ] {
            command.arg("-o").arg(format!("{name}={}", value.display()));
        }
        let debs = self.cache.join("debs");
        fs_err::create_dir_all(&debs)?;
        let command = command.args(args).current_dir(debs);
        command
            .output()
            .with_context(|| format!("running {program}"))
    }

    /// Reads the lists of these suites. Returns why that is not possible, if it is not.
    fn update(&self, suites: &str, components: &str) -> Result<Option<String>> {
        for dir in ["parts", "lists/partial", "apt/archives/partial"] {
            fs_err::create_dir_all(self.cache.join(dir))?;
        }
        let (archive, security) = mirrors();
        let of = |mirror: &str, suites: &str| {
            format!(
                "Types: deb\nURIs: {mirror}\nSuites: {suites}\nComponents: {components}\nSigned-By: {KEYS}\n\n"
            )
        };
        let security = of(&security, "bookworm-security trixie-security");
        let text = of(&archive, suites) + &security;
        fs_err::write(self.cache.join("parts/nvidia.sources"), text)?;
        let done = self.run("apt-get", &["-q", "update"])?;
        if done.status.success() {
            return Ok(None);
        }
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        let line = said.lines().find(|line| line.starts_with("E:"));
        Ok(Some(line.unwrap_or("apt-get update failed").to_owned()))
    }

    /// Returns the newest version of a package of a branch of drivers; `None` if there is none.
    fn newest_of(&self, branch: u32, package: &str) -> Result<Option<String>> {
        Ok(self.versions(package)?.into_iter().find(of_branch(branch)))
    }

    /// Lists the versions of a package, the newest first.
    fn versions(&self, package: &str) -> Result<Vec<String>> {
        let listed = self.run("apt-cache", &["madison", package])?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let versions = listed.lines().filter_map(|line| line.split('|').nth(1));
        Ok(versions.map(|version| version.trim().to_owned()).collect())
    }

    fn newest(&self, package: &str) -> Result<Option<String>> {
        Ok(self.versions(package)?.into_iter().next())
    }

    /// Returns what these packages need, by name and version; unknown names are left out.
    fn needs(&self, packages: &[String]) -> Result<Needs> {
        let mut args = vec!["show", "--all-versions"];
        args.extend(packages.iter().map(String::as_str));
        // It says of unknown names that they are, and fails if there is no other.
        let shown = self.run("apt-cache", &args)?;
        Ok(needs_of(&String::from_utf8_lossy(&shown.stdout)))
    }

    /// Fetches versions of packages in one call. Returns their files. A package in the cache is not
    /// fetched again: `apt-get` compares its hash.
    fn download(&self, wanted: &BTreeSet<Version>) -> Result<BTreeMap<Version, PathBuf>> {
        let named = wanted
            .iter()
            .map(|(name, version)| format!("{name}={version}"));
        let named: Vec<String> = named.collect();
        let mut args = vec!["-q", "download"];
        args.extend(named.iter().map(String::as_str));
        let done = self.run("apt-get", &args)?;
        ensure!(
            done.status.success(),
            "fetching {}: {}",
            named.join(" "),
            String::from_utf8_lossy(&done.stderr).trim()
        );
        let there = fs_err::read_dir(self.cache.join("debs"))?;
        let there: Vec<PathBuf> = there.filter_map(|one| Some(one.ok()?.path())).collect();
        let file = |wanted: &Version| {
            let (name, version) = wanted;
            // Its colon is written as another character.
            let begin = format!("{name}_{}_", version.replace(':', "%3a"));
            let is = |path: &&PathBuf| {
                let name = path.file_name().unwrap_or_default();
                name.to_string_lossy().starts_with(&begin)
            };
            let found = there.iter().find(is);
            let found = found.with_context(|| format!("{begin}… was fetched, and is not there"))?;
            Ok((wanted.clone(), found.clone()))
        };
        wanted.iter().map(file).collect()
    }
}

/// A package and its full version.
type Version = (String, String);
/// Names of packages that a version of a package needs or recommends.
type Needs = BTreeMap<Version, Vec<String>>;

/// Reads the output of `apt-cache show`.
fn needs_of(shown: &str) -> Needs {
    let package = |paragraph: &str| {
        let field = |name: &str| {
            let mut lines = paragraph.lines();
            lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        };
        let version = (field("Package")?.to_owned(), field("Version")?.to_owned());
        let lists = ["Depends", "Pre-Depends", "Recommends"]
            .into_iter()
            .filter_map(field);
        let names = lists
            .flat_map(|list| list.split([',', '|']))
            .filter_map(|one| {
                let name = one.split_whitespace().next()?;
                Some(name.split(':').next().unwrap_or(name).to_owned())
            });
        Some((version, names.collect()))
    };
    shown.split("\n\n").filter_map(package).collect()
}

fn of_branch(branch: u32) -> impl Fn(&String) -> bool {
    move |version| version.starts_with(&format!("{branch}."))
}

/// Fetches the packages into the cache.
pub(crate) fn fetch(cache: &Path) -> Result<Had> {
    if let Some(why) = lacks() {
        return Ok(Had::None(why));
    }
    let apt = Apt { cache };
    // The oldest suite, if it is there still.
    let all = format!("{SUITES} {OLD_SUITE}");
    if apt.update(&all, "non-free")?.is_some()
        && let Some(why) = apt.update(SUITES, "non-free")?
    {
        return Ok(Had::None(why));
    }
    let mut listed = Vec::new();
    for package in PACKAGES {
        match apt.newest_of(package.branch, package.name)? {
            Some(full) => listed.push((package, (package.name.to_owned(), full))),
            None if package.is_needed => {
                let why = format!("there is no {} of R{}", package.name, package.branch);
                return Ok(Had::None(why));
            }
            None => crate::say(&format!("nvidia: there is no {} any more", package.name)),
        }
    }
    let files = apt.download(&listed.iter().map(|(_, wanted)| wanted.clone()).collect())?;
    let fetched = listed.into_iter().filter_map(|(package, wanted)| {
        Some(Fetched {
            package,
            version: of_driver(&wanted.1),
            file: files.get(&wanted)?.clone(),
        })
    });
    Ok(Had::All(fetched.collect()))
}

/// Returns the version of the driver in that of a package.
fn of_driver(full: &str) -> String {
    full.split('-').next().unwrap_or(full).to_owned()
}

/// A metapackage of a whole driver.
#[derive(Debug)]
pub(crate) struct Set {
    pub(crate) name: &'static str,
    pub(crate) branch: u32,
    pub(crate) package: &'static str,
}

/// Packages of a driver that are not NVIDIA's, in which Debian has its alternatives and links.
const BESIDE: [&str; 4] = [
    "glx-alternative-nvidia",
    "nvidia-persistenced",
    "libnvidia-egl-gbm1",
    "libnvidia-egl-wayland1",
];

/// Fetches all packages of drivers, in one call. Returns the version and the files of each.
pub(crate) fn fetch_sets(cache: &Path, sets: &[&Set]) -> Result<Vec<(String, Vec<PathBuf>)>> {
    if let Some(why) = lacks() {
        anyhow::bail!("{why}");
    }
    let apt = Apt { cache };
    if let Some(why) = apt.update("bookworm trixie", "main contrib non-free")? {
        anyhow::bail!("Debian's lists of packages: {why}");
    }
    let mut beside = BTreeSet::new();
    for name in BESIDE {
        let newest = apt.newest(name)?;
        let newest = newest.with_context(|| format!("there is no {name}"))?;
        beside.insert((name.to_owned(), newest));
    }
    let mut all = Vec::new();
    for set in sets {
        let full = apt.newest_of(set.branch, set.package)?;
        let full =
            full.with_context(|| format!("there is no {} of R{}", set.package, set.branch))?;
        let mut wanted = beside.clone();
        wanted.extend(members(set.package, &full, |names| apt.needs(names))?);
        all.push((of_driver(&full), wanted));
    }
    let files = apt.download(&all.iter().flat_map(|(_, wanted)| wanted.clone()).collect())?;
    let found = all.into_iter().map(|(version, wanted)| {
        let of_set = wanted
            .iter()
            .filter_map(|wanted| files.get(wanted).cloned());
        (version, of_set.collect())
    });
    Ok(found.collect())
}

/// Returns the packages that one of a driver needs, and those that these need. Only what is of the
/// driver itself has its version; the kernel's modules are not its.
fn members(
    package: &str,
    full: &str,
    needs: impl Fn(&[String]) -> Result<Needs>,
) -> Result<BTreeSet<Version>> {
    let mut found = BTreeSet::new();
    let mut asked = BTreeSet::new();
    let mut next = vec![package.to_owned()];
    while !next.is_empty() {
        asked.extend(next.iter().cloned());
        let of_driver = needs(&next)?
            .into_iter()
            .filter(|((_, version), _)| version == full);
        next.clear();
        for (member, names) in of_driver {
            found.insert(member);
            next.extend(names);
        }
        next.retain(|name| {
            let is_kernel = name.ends_with("-dkms") || name.ends_with("-kernel-source");
            !is_kernel && !asked.contains(name)
        });
        next.sort();
        next.dedup();
    }
    Ok(found)
}

/// Returns what the machine lacks.
fn lacks() -> Option<String> {
    let may = |program: &str, args: &[&str]| {
        let done = Command::new(program).args(args).output();
        done.is_ok_and(|done| done.status.success())
    };
    if !may("apt-get", &["--version"]) || !may("dpkg-deb", &["--version"]) {
        return Some("there is no apt-get or no dpkg-deb".to_owned());
    }
    if !may("unshare", &["--mount", "true"]) {
        return Some("this user may have no mount namespace of its own".to_owned());
    }
    None
}

/// Returns whether Debian's archive answers, whatever is in it.
pub(crate) fn answers(cache: &Path) -> Result<bool> {
    // A machine of another distribution has no packages of Debian.
    let has_apt = Command::new("apt-get").arg("--version").output().is_ok();
    Ok(has_apt && Apt { cache }.update("bookworm", "main")?.is_none())
}

/// Returns the mirrors of this machine for packages and for those of security.
fn mirrors() -> (String, String) {
    let folder = fs_err::read_dir("/etc/apt/sources.list.d");
    let files = folder.into_iter().flatten().flatten();
    let texts = files.filter_map(|file| fs_err::read_to_string(file.path()).ok());
    let all: String = texts.collect();
    of_sources(&all)
}

/// Reads the mirrors from sources in the form of deb822.
fn of_sources(text: &str) -> (String, String) {
    let uris = text.lines().filter_map(|line| line.strip_prefix("URIs:"));
    let uris = uris.filter_map(|uris| uris.split_whitespace().next());
    let uris: Vec<&str> = uris.collect();
    let find = |suffix: &str, other: &str| {
        let mut found = uris.iter().map(|uri| uri.trim_end_matches('/'));
        let found = found.find(|uri| uri.ends_with(suffix));
        found.unwrap_or(other).to_owned()
    };
    (find("/debian", ARCHIVE), find("-security", SECURITY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirrors_are_those_of_the_machine() {
        let own = "Types: deb\nURIs: http://mirror/debian/\nSuites: bookworm\n\nURIs: http://mirror/debian-security\n";
        let expected = ["http://mirror/debian", "http://mirror/debian-security"];
        let (archive, security) = of_sources(own);
        assert_eq!([archive.as_str(), security.as_str()], expected);
        let (archive, security) = of_sources("URIs: http://elsewhere/ubuntu\n");
        assert_eq!([archive.as_str(), security.as_str()], [ARCHIVE, SECURITY]);
    }

    const SHOWN: &str = "Package: driver\nVersion: 535.1-1\nPre-Depends: driver-common (= 535.1-1)\nDepends: libcuda1 (= 535.1-1) | libcuda-any,\n\n\
        Package: driver\nVersion: 550.1-1\nDepends: libother\n\n\
        Package: driver-common\nVersion: 535.1-1\nDepends: driver, libc6:amd64 (>= 2)\nRecommends: driver-dkms | driver-module\n\n\
        Package: driver-module\nVersion: 535.1-1\nDescription: Depends: nothing\n\n\
        Package: libcuda1\nVersion: 535.1-1\n\nPackage: libc6\nVersion: 2.36\n\nPackage: broken\n";

    #[test]
    fn a_driver_has_the_packages_of_its_version_that_its_members_need() {
        let of = |package: &str, full: &str| {
            let all = needs_of(SHOWN);
            let rounds = std::cell::Cell::new(0);
            let found = members(package, full, |names| {
                rounds.set(rounds.get() + 1);
                let of_names = all.iter().filter(|((name, _), _)| names.contains(name));
                Ok(of_names
                    .map(|(version, needs)| (version.clone(), needs.clone()))
                    .collect())
            });
            let names = found.unwrap().into_iter().map(|(name, version)| {
                assert_eq!(version, full);
                name
            });
            (names.collect::<Vec<_>>(), rounds.get())
        };
        let (names, rounds) = of("driver", "535.1-1");
        assert_eq!(
            names,
            ["driver", "driver-common", "driver-module", "libcuda1"]
        );
        assert!(rounds <= 3, "{rounds}");
        assert_eq!(of("driver", "550.1-1").0, ["driver"]);
        assert_eq!(of("absent", "1").0, Vec::<String>::new());
    }
}
