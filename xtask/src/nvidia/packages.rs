//! NVIDIA's packages from Debian, by `apt-get` with sources of its own.

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

    /// Fetches the newest package of a branch of drivers. Returns its version and its file; `None`
    /// if there is none. A package in the cache is not fetched again: `apt-get` compares its hash.
    fn download(&self, branch: u32, package: &str) -> Result<Option<(String, PathBuf)>> {
        let Some(full) = self.versions(package)?.into_iter().find(of_branch(branch)) else {
            return Ok(None);
        };
        let file = self.download_exactly(package, &full)?;
        let file = file.with_context(|| format!("{package} {full} is listed, and not there"))?;
        let version = full.split('-').next().unwrap_or(&full).to_owned();
        Ok(Some((version, file)))
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

    /// Fetches one version of a package. Returns its file; `None` if there is no such version.
    fn download_exactly(&self, package: &str, full: &str) -> Result<Option<PathBuf>> {
        if !self.versions(package)?.iter().any(|one| one == full) {
            return Ok(None);
        }
        let done = self.run("apt-get", &["-q", "download", &format!("{package}={full}")])?;
        ensure!(
            done.status.success(),
            "fetching {package} {full}: {}",
            String::from_utf8_lossy(&done.stderr).trim()
        );
        // Its colon is written as another character.
        let name = format!("{package}_{}_", full.replace(':', "%3a"));
        let mut files = fs_err::read_dir(self.cache.join("debs"))?.filter_map(Result::ok);
        let file = files
            .find(|file| file.file_name().to_string_lossy().starts_with(&name))
            .with_context(|| format!("{name}… was fetched, and is not there"))?;
        Ok(Some(file.path()))
    }
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
    let mut fetched = Vec::new();
    for package in PACKAGES {
        match apt.download(package.branch, package.name)? {
            Some((version, file)) => fetched.push(Fetched {
                package,
                version,
                file,
            }),
            None if package.is_needed => {
                let why = format!("there is no {} of R{}", package.name, package.branch);
                return Ok(Had::None(why));
            }
            None => crate::say(&format!("nvidia: there is no {} any more", package.name)),
        }
    }
    Ok(Had::All(fetched))
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

/// Fetches all packages of a driver. Returns its version and the files.
pub(crate) fn fetch_set(cache: &Path, set: &Set) -> Result<(String, Vec<PathBuf>)> {
    if let Some(why) = lacks() {
        anyhow::bail!("{why}");
    }
    let apt = Apt { cache };
    if let Some(why) = apt.update("bookworm trixie", "main contrib non-free")? {
        anyhow::bail!("Debian's lists of packages: {why}");
    }
    let (version, first) = apt
        .download(set.branch, set.package)?
        .with_context(|| format!("there is no {} of R{}", set.package, set.branch))?;
    let full = field_of(&first, "Version")?;
    let mut files = vec![first];
    let mut known = std::collections::BTreeSet::from([set.package.to_owned()]);
    let mut at = 0;
    while let Some(file) = files.get(at) {
        at += 1;
        // Only what is of the driver itself has its version; the kernel's modules are not its.
        let needs = ["Depends", "Recommends"].map(|name| field_of(file, name));
        let needs = needs.into_iter().collect::<Result<Vec<_>>>()?.join(",");
        let names = needs.split([',', '|']).filter_map(|one| {
            let name = one.split_whitespace().next()?;
            Some(name.split(':').next().unwrap_or(name).to_owned())
        });
        for name in names.collect::<Vec<_>>() {
            let is_kernel = name.ends_with("-dkms") || name.ends_with("-kernel-source");
            if !is_kernel && known.insert(name.clone()) {
                files.extend(apt.download_exactly(&name, &full)?);
            }
        }
    }
    for name in BESIDE {
        let newest = apt.newest(name)?;
        let newest = newest.with_context(|| format!("there is no {name}"))?;
        files.extend(apt.download_exactly(name, &newest)?);
    }
    Ok((version, files))
}

fn field_of(file: &Path, name: &str) -> Result<String> {
    let done = Command::new("dpkg-deb")
        .arg("-f")
        .arg(file)
        .arg(name)
        .output()?;
    ensure!(done.status.success(), "{} has no fields", file.display());
    Ok(String::from_utf8_lossy(&done.stdout).trim().to_owned())
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
}
