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
mod sets;
mod smi;

use packages::{Fetched, Had};

pub(crate) use sets::{Args as LibrarySets, run as library_sets};

/// File in the folder of the packages that says what was run, a line each.
const SUMMARY: &str = "summary";

/// Arguments of `cargo xtask nvidia`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write what the programs have answered into the tree instead of comparing it
    #[arg(long)]
    write: bool,
    /// Fail where it is skipped although Debian's archive answers, as in CI
    #[arg(long)]
    must: bool,
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
        return inside(root, unpacked, args.write);
    }
    let begun = Instant::now();
    let cache = divvy_e2e::parts::cache_dir()?.join("nvidia");
    let fetched = match packages::fetch(&cache)? {
        Had::All(fetched) => fetched,
        Had::None(why) => return skipped(&cache, &why, args.must),
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
    let names: Vec<String> = fetched.iter().map(Fetched::name).collect();
    crate::say(&format!(
        "\nnvidia: run on {}:\n{}nvidia: {:.1} s in all",
        names.join(", "),
        fs_err::read_to_string(unpacked.path().join(SUMMARY))?,
        begun.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Says that nothing was run. Where it must be run that is right only if Debian cannot be reached
/// at all.
fn skipped(cache: &Path, why: &str, must: bool) -> Result<()> {
    crate::say(&format!("nvidia: SKIPPED, nothing was run: {why}"));
    ensure!(
        may_skip(must, || packages::answers(cache))?,
        "in CI it is not skipped while Debian's archive answers"
    );
    Ok(())
}

fn may_skip(must: bool, answers: impl FnOnce() -> Result<bool>) -> Result<bool> {
    Ok(!must || !answers()?)
}

/// Runs everything, with devices of its own.
fn inside(root: &Path, unpacked: &Path, write: bool) -> Result<()> {
    let mut said = String::new();
    let mut timed = |part: &dyn Fn() -> Result<String>| -> Result<()> {
        let begun = Instant::now();
        let text = part()?;
        let took = begun.elapsed().as_secs_f64();
        let text = format!("{}  ({took:.1} s)\n", text.trim_end());
        crate::say(text.trim_end());
        said += &text;
        Ok(())
    };
    timed(&|| library::compare(unpacked, write))?;
    timed(&|| smi::ask(unpacked, root))?;
    timed(&|| transcripts(unpacked, write))?;
    for (branch, tests) in OVER_DAEMONS {
        timed(&|| over_daemon(&packages::control(unpacked, branch)?, branch, tests))?;
    }
    Ok(fs_err::write(unpacked.join(SUMMARY), said)?)
}

fn lines(all: &[String]) -> String {
    let lines = all.iter().map(|line| format!("  {line}\n"));
    lines.collect::<Vec<_>>().concat()
}

/// Runs the script over the daemon of each driver, and compares what it has answered with what is
/// in the tree, which the stand-in answers.
fn transcripts(unpacked: &Path, write: bool) -> Result<String> {
    let server = divvy_mps_stand_in::program();
    let (mut different, mut said) = (Vec::new(), Vec::new());
    for (branch, _) in DRIVERS {
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
        let differ = difference(&golden(branch)?, &seen);
        said.push(format!(
            "nvidia-cuda-mps-control of R{branch}: {} lines, {} differ from those of the stand-in",
            seen.lines().count(),
            differ.len()
        ));
        for line in &differ {
            crate::say(&format!("  {line}"));
        }
        if !differ.is_empty() {
            different.push(branch);
        }
    }
    if !different.is_empty() {
        bail!("the programs of {different:?} answer otherwise (`--write` takes that over)");
    }
    Ok(lines(&said))
}

/// Runs tests of the supervisor over the daemon of a driver.
fn over_daemon(control: &Path, branch: u32, tests: &str) -> Result<String> {
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
        "  the supervisor over the daemon of R{branch}: {passed} tests of {tests} passed\n"
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
    fn what_must_be_run_is_skipped_only_where_debian_cannot_be_reached() {
        for (must, answers, expected) in [
            (false, true, true),
            (false, false, true),
            (true, false, true),
            (true, true, false),
        ] {
            assert_eq!(may_skip(must, || Ok(answers)).unwrap(), expected);
        }
        assert!(may_skip(true, || bail!("no apt-get that works")).is_err());
    }

    #[test]
    fn lines_that_differ_are_listed_with_their_side() {
        assert_eq!(difference("a\nb\nc\n", "a\nb\nc\n"), Vec::<String>::new());
        assert_eq!(difference("a\nb\nc\n", "a\nx\nc\n"), ["- b", "+ x"]);
        assert_eq!(difference("a\n", "a\na\n"), ["+ a"]);
    }
}
