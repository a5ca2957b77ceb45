//! `cargo xtask soak nvidia`: whole library sets of Debian's drivers, installed with Debian's
//! alternatives into a copy of this root that is thrown away, and the list of what a container gets
//! of each, by divvy's own code.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use divvy_host::{DriverFiles, HostRoot, driver_files, find_driver};

use super::packages::{self, Set};
use super::{difference, lines};
use crate::programs::succeeds;

/// Arguments of `cargo xtask soak nvidia`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only these sets: r535, r550, tesla-535
    names: Vec<String>,
    /// Write what was found into the tree instead of comparing it
    #[arg(long)]
    write: bool,
    /// A root with one of them: this process is in its mount namespace already
    #[arg(long, hide = true)]
    installed: Option<PathBuf>,
}

const SETS: [Set; 3] = [
    Set {
        name: "r535",
        branch: 535,
        package: "nvidia-driver-full",
    },
    Set {
        name: "r550",
        branch: 550,
        package: "nvidia-driver-full",
    },
    Set {
        name: "tesla-535",
        branch: 535,
        package: "nvidia-tesla-535-driver-full",
    },
];

/// Installs the packages in a folder ($1) over this root, with changes in another ($2). Leaves
/// out their kernel modules and dependencies that are not NVIDIA's. Nothing reaches the disk.
const INSTALL: &str = r#"packages=$1 scratch=$2; shift 2
mkdir -p "$scratch/upper" "$scratch/work" "$scratch/root"
options="lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work"
mount -t overlay -o "$options,volatile" set "$scratch/root"
mkdir -p "$scratch/root/packages" "$scratch/root/dev"
mount --bind "$packages" "$scratch/root/packages"
mount -t tmpfs dev "$scratch/root/dev"
mknod -m 666 "$scratch/root/dev/null" c 1 3
DEBIAN_FRONTEND=noninteractive chroot "$scratch/root" sh -c \
    'dpkg --force-depends --force-confnew --force-unsafe-io --install /packages/*.deb' > "$scratch/dpkg.log" 2>&1 \
    || { tail -n 30 "$scratch/dpkg.log"; exit 1; }
umount "$scratch/root/packages" "$scratch/root/dev"
exec "$@" --installed "$scratch/root""#;

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let is_wanted = |set: &&Set| args.names.is_empty() || args.names.iter().any(|n| n == set.name);
    let sets: Vec<&Set> = SETS.iter().filter(is_wanted).collect();
    ensure!(
        sets.len() == args.names.len() || args.names.is_empty(),
        "there are the sets r535, r550 and tesla-535"
    );
    if let Some(installed) = &args.installed {
        let [set] = sets[..] else {
            bail!("one set is installed in a root");
        };
        return compare(root, set, installed, args.write);
    }
    let cache = divvy_e2e::parts::cache_dir()?.join("nvidia-sets");
    let mut said = Vec::new();
    let begun = Instant::now();
    let fetched = packages::fetch_sets(&cache, &sets)?;
    said.push(format!(
        "fetched by one call in {:.0} s",
        begun.elapsed().as_secs_f64()
    ));
    for (set, (version, files)) in sets.into_iter().zip(fetched) {
        let begun = Instant::now();
        let folder = tempfile::tempdir_in(&cache).context("a folder for the packages")?;
        for file in &files {
            let name = file.file_name().context("a package has a name")?;
            fs_err::hard_link(file, folder.path().join(name))?;
        }
        let scratch = tempfile::tempdir().context("a folder for the root")?;
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-ec",
                INSTALL,
                "sh",
            ])
            .args([folder.path(), scratch.path()])
            .arg(std::env::current_exe()?)
            .args(["soak", "nvidia", set.name])
            .args(args.write.then_some("--write"))
            .current_dir(root);
        succeeds(&mut command)?;
        said.push(format!(
            "{}: {version}, {} packages installed and compared in {:.0} s",
            set.name,
            files.len(),
            begun.elapsed().as_secs_f64()
        ));
    }
    crate::say(&format!(
        "\nnvidia: library sets\n{}",
        lines(&said).trim_end()
    ));
    Ok(())
}

/// Compares what a container gets of a driver with what is in the tree.
fn compare(root: &Path, set: &Set, installed: &Path, write: bool) -> Result<()> {
    let host = HostRoot::under(installed);
    let driver = find_driver(&host, None)?;
    ensure!(
        driver.version.starts_with(&format!("{}.", set.branch)),
        "the driver found is {}",
        driver.version
    );
    let given = driver_files(&host, &driver)?;
    let text = list(installed, &given, &driver.version)?;
    let golden = root
        .join("xtask/src/nvidia/sets")
        .join(format!("{}.txt", set.name));
    if write {
        fs_err::create_dir_all(golden.parent().context("a folder")?)?;
        fs_err::write(&golden, &text)?;
    }
    let differ = difference(&fs_err::read_to_string(&golden)?, &text);
    ensure!(
        differ.is_empty(),
        "a container gets other files of {} {}:\n{}",
        set.name,
        driver.version,
        differ.join("\n")
    );
    crate::say(&format!(
        "nvidia: {}: {} lines, as in {}",
        set.name,
        text.lines().count(),
        golden.display()
    ));
    Ok(())
}

/// Lists what a container gets, and the driver's libraries that it does not get.
fn list(root: &Path, given: &DriverFiles, version: &str) -> Result<String> {
    let mut all = BTreeSet::new();
    let mut mounted = BTreeSet::new();
    for library in &given.libraries {
        let file = &library.file;
        let soname = library.soname.as_deref().unwrap_or("-");
        all.insert(format!(
            "library {} -> {} {soname}",
            file.host, file.container
        ));
        mounted.insert(file.host.clone());
    }
    for link in &given.symlinks {
        all.insert(format!("link {} -> {}", link.link, link.target));
    }
    for (kind, files) in [
        ("program", &given.binaries),
        ("config", &given.configs),
        ("firmware", &given.firmware),
        ("socket", &given.sockets),
    ] {
        for file in files {
            all.insert(format!("{kind} {} -> {}", file.host, file.container));
        }
    }
    let end = format!(".so.{version}");
    let mut folders = vec![root.join("usr/lib")];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder)? {
            let (path, is) = entry.and_then(|one| Ok((one.path(), one.file_type()?)))?;
            let inside = Path::new("/").join(path.strip_prefix(root)?);
            let inside = inside.display().to_string();
            if is.is_file() && inside.ends_with(&end) && !mounted.contains(&inside) {
                all.insert(format!("not given {inside}"));
            }
            folders.extend(is.is_dir().then_some(path));
        }
    }
    let mut text = String::new();
    for line in all {
        writeln!(text, "{}", line.replace(version, "VERSION"))?;
    }
    Ok(text)
}
