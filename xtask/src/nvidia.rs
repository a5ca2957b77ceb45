//! `cargo xtask nvidia`: what is said about NVIDIA's own programs, asked of these. They are fetched
//! by name from Debian's non-free component into a cache outside the checkout. Nothing of them is
//! installed, committed or shipped: their licence.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use divvy_mps_stand_in::{DRIVERS, golden, golden_file, transcript};

use crate::programs::succeeds;

mod library;
mod packages;

use packages::{Fetched, Had};

/// Arguments of `cargo xtask nvidia`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write what the programs have answered into the tree instead of comparing it
    #[arg(long)]
    write: bool,
    /// The unpacked packages: this process has a `/dev` of its own already
    #[arg(long, hide = true)]
    unpacked: Option<PathBuf>,
}

/// Tests of the supervisor that hold with the daemon of a driver: only from R555 on there is a
/// server for programs of all users.
const OVER_DAEMONS: [(u32, &str); 3] = [
    (535, "programs::one_user"),
    (550, "programs::one_user"),
    (555, "programs::all_users"),
];

/// NVIDIA's libraries make device files, as root: they get a folder of their own for these.
const IN_PRIVATE_DEV: &str = "mount -t tmpfs dev /dev
mknod -m 666 /dev/null c 1 3
mknod -m 666 /dev/zero c 1 5
mknod -m 666 /dev/random c 1 8
mknod -m 666 /dev/urandom c 1 9
mkdir /dev/shm
ln -s /proc/self/fd /dev/fd
exec \"$0\" \"$@\"";

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    if let Some(unpacked) = &args.unpacked {
        return compare(unpacked, args.write);
    }
    let begun = Instant::now();
    let cache = divvy_e2e::parts::cache_dir()?.join("nvidia");
    let fetched = match packages::fetch(&cache)? {
        Had::All(fetched) => fetched,
        Had::None(why) => return skipped(&cache, &why),
    };
    crate::say(&format!(
        "nvidia: {} packages in {:.1} s",
        fetched.len(),
        begun.elapsed().as_secs_f64()
    ));
    let unpacked = tempfile::tempdir().context("a folder for the packages")?;
    for one in &fetched {
        one.unpack(unpacked.path())?;
    }
    let symbols = library::compare(unpacked.path(), &fetched)?;
    // Before there is nothing but these devices.
    succeeds(test_command().args(["--no-run", "--quiet"]))?;
    let own = std::env::current_exe()?;
    let mut inside = Command::new("unshare");
    inside
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-ec",
            IN_PRIVATE_DEV,
        ])
        .arg(own)
        .args(["nvidia", "--unpacked"])
        .arg(unpacked.path())
        .args(args.write.then_some("--write"))
        .current_dir(root);
    succeeds(&mut inside)?;
    crate::say(&symbols);
    crate::say(&format!(
        "nvidia: run on {}; {:.1} s in all",
        fetched
            .iter()
            .map(Fetched::name)
            .collect::<Vec<_>>()
            .join(", "),
        begun.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Says that nothing was run. On the machine of CI that is right only where Debian cannot be
/// reached at all.
fn skipped(cache: &Path, why: &str) -> Result<()> {
    crate::say(&format!("nvidia: skipped, nothing was run: {why}"));
    let is_ci = std::env::var("CI").is_ok_and(|set| set == "true");
    ensure!(
        !is_ci || !packages::answers(cache)?,
        "in CI it is not skipped while Debian's archive answers"
    );
    Ok(())
}

/// Runs the script over the daemon of each driver, and compares what it has answered with what is
/// in the tree, which the stand-in answers.
fn compare(unpacked: &Path, write: bool) -> Result<()> {
    let server = divvy_mps_stand_in::program();
    let mut different = Vec::new();
    for (branch, _) in DRIVERS {
        let begun = Instant::now();
        // Short: the daemon's sockets are in it, and another user reaches them.
        let dir = tempfile::Builder::new().prefix("n").tempdir_in("/tmp")?;
        let bin = dir.path().join("bin");
        fs_err::create_dir(&bin)?;
        let control = packages::control(unpacked, branch)?;
        fs_err::copy(control, bin.join("nvidia-cuda-mps-control"))?;
        fs_err::copy(server, bin.join("nvidia-cuda-mps-server"))?;
        let seen = transcript(&bin, dir.path(), &[])
            .with_context(|| format!("the script over the daemon of R{branch}"))?;
        if write {
            fs_err::write(golden_file(branch), &seen)?;
        }
        let lines = difference(&golden(branch)?, &seen);
        crate::say(&format!(
            "nvidia: R{branch}: {} lines, {} differ from those of the stand-in ({:.1} s)",
            seen.lines().count(),
            lines.len(),
            begun.elapsed().as_secs_f64()
        ));
        for line in &lines {
            crate::say(&format!("  {line}"));
        }
        if !lines.is_empty() {
            different.push(branch);
        }
    }
    if !different.is_empty() {
        bail!("the programs of {different:?} answer otherwise (`--write` takes that over)");
    }
    for (branch, tests) in OVER_DAEMONS {
        crate::say(&over_daemon(
            &packages::control(unpacked, branch)?,
            branch,
            tests,
        )?);
    }
    Ok(())
}

/// Runs tests of the supervisor over the daemon of a driver.
fn over_daemon(control: &Path, branch: u32, tests: &str) -> Result<String> {
    let begun = Instant::now();
    let done = test_command()
        .arg(tests)
        .env("DIVVY_MPS_CONTROL", control)
        .output()
        .context("running cargo")?;
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let passed = passed(&said);
    ensure!(
        done.status.success() && passed > 0,
        "the supervisor over the daemon of R{branch}, {tests}:\n{said}{}",
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(format!(
        "nvidia: R{branch}: the supervisor over its daemon: {passed} tests of {tests} passed ({:.1} s)",
        begun.elapsed().as_secs_f64()
    ))
}

fn test_command() -> Command {
    let mut cargo = Command::new("cargo");
    cargo.args([
        "test",
        "--locked",
        "--package",
        "divvy-mps-supervisor",
        "--test",
        "supervisor",
    ]);
    // As in `programs::succeeds`.
    cargo.env_remove("CARGO_MANIFEST_DIR");
    cargo
}

/// Returns how many tests have passed, by the last line of the program that runs them.
fn passed(said: &str) -> u32 {
    let line = said
        .lines()
        .find_map(|line| line.strip_prefix("test result: ok. "));
    let number = line.and_then(|line| line.split(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Returns the lines that are in only one of two texts, each with its side.
fn difference(golden: &str, seen: &str) -> Vec<String> {
    let (mut golden, mut seen): (Vec<_>, Vec<_>) =
        (golden.lines().collect(), seen.lines().collect());
    while !golden.is_empty() && golden.first() == seen.first() {
        golden.remove(0);
        seen.remove(0);
    }
    while !golden.is_empty() && golden.last() == seen.last() {
        golden.pop();
        seen.pop();
    }
    let of = |mark: &'static str, lines: Vec<&str>| {
        let marked = lines.into_iter().map(move |line| format!("{mark} {line}"));
        marked.collect::<Vec<_>>()
    };
    [of("-", golden), of("+", seen)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_have_passed_are_counted() {
        let said = "running 8 tests\n\ntest result: ok. 8 passed; 0 failed; 0 ignored\n";
        assert_eq!(passed(said), 8);
        assert_eq!(passed("test result: FAILED. 7 passed; 1 failed"), 0);
    }

    #[test]
    fn lines_that_differ_are_listed_with_their_side() {
        assert_eq!(difference("a\nb\nc\n", "a\nb\nc\n"), Vec::<String>::new());
        assert_eq!(difference("a\nb\nc\n", "a\nx\nc\n"), ["- b", "+ x"]);
        assert_eq!(difference("a\n", "a\na\n"), ["+ a"]);
    }
}
