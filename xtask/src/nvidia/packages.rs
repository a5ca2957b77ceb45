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

const PROGRAMS: &str = "nvidia-cuda-mps";
/// Packages by the branch of the driver; of the last ones there may be none.
const WANTED: [(u32, &str); 6] = [
    (535, PROGRAMS),
    (550, PROGRAMS),
    (555, PROGRAMS),
    (535, LIBRARY),
    (550, LIBRARY),
    (555, LIBRARY),
];
const LIBRARY: &str = "libnvidia-ml1";
const OLD_LIBRARIES: [(u32, &str); 2] = [
    (450, "libnvidia-tesla-450-ml1"),
    (470, "libnvidia-tesla-470-ml1"),
];

/// Packages that were found.
pub(crate) enum Had {
    All(Vec<Fetched>),
    /// Nothing, and why.
    None(String),
}

/// A package in the cache.
pub(crate) struct Fetched {
    pub(crate) branch: u32,
    package: &'static str,
    /// Version of the driver.
    pub(crate) version: String,
    file: PathBuf,
}

impl Fetched {
    /// Returns it for people.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.package, self.version)
    }

    pub(crate) fn is_library(&self) -> bool {
        self.package != PROGRAMS
    }

    /// Returns the folder of its branch.
    pub(crate) fn folder(&self, unpacked: &Path) -> PathBuf {
        unpacked.join(format!("r{}", self.branch))
    }

    pub(crate) fn unpack(&self, unpacked: &Path) -> Result<()> {
        let mut command = Command::new("dpkg-deb");
        command.arg("-x").arg(&self.file).arg(self.folder(unpacked));
        succeeds(&mut command)
    }
}

/// Returns the control program of a branch.
pub(crate) fn control(unpacked: &Path, branch: u32) -> Result<PathBuf> {
    let program = unpacked.join(format!("r{branch}/usr/bin/nvidia-cuda-mps-control"));
    ensure!(program.exists(), "{} is not there", program.display());
    Ok(program)
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

    /// Fetches the newest package of a branch; `None` if there is none. A package in the cache is
    /// not fetched again: `apt-get` compares its hash.
    fn download(&self, branch: u32, package: &'static str) -> Result<Option<Fetched>> {
        let listed = self.run("apt-cache", &["madison", package])?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let mut versions = listed.lines().filter_map(|line| line.split('|').nth(1));
        let Some(full) = versions
            .find(|version| version.trim().starts_with(&format!("{branch}.")))
            .map(str::trim)
        else {
            return Ok(None);
        };
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
        Ok(Some(Fetched {
            branch,
            package,
            version: full.split('-').next().unwrap_or(full).to_owned(),
            file: file.path(),
        }))
    }
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
    for (branch, package) in WANTED {
        let Some(one) = apt.download(branch, package)? else {
            return Ok(Had::None(format!("there is no {package} of R{branch}")));
        };
        fetched.push(one);
    }
    for (branch, package) in OLD_LIBRARIES {
        fetched.extend(apt.download(branch, package)?);
    }
    Ok(Had::All(fetched))
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
    Ok(Apt { cache }.update("bookworm", "main")?.is_none())
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
