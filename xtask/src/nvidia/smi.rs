//! NVIDIA's `nvidia-smi`: what divvy asks it, by divvy's own code, and the options that the
//! documents name. Without a driver it ends before it reads most options, so that it is asked a
//! second time with a library that says that there is a driver and no GPU, and is NVIDIA's for the
//! rest.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use divvy_host::fixture::Fixture;
use divvy_host::{Driver, Smi, SmiError, find_driver_at};
use divvy_model::TimeSlice;

use super::lines;
use super::packages::{Kind, Unpacked, of_kind};
use crate::programs::succeeds;

const WITHIN: Duration = Duration::from_secs(20);
/// First branch whose program sets time slices.
const SETS_TIME_SLICES: u32 = 460;
/// Exit statuses of the program where it has understood its arguments: it has nothing to do, or
/// finds no GPU.
const UNDERSTOOD: [i32; 2] = [0, 6];
/// Functions by which a library says that there is a driver, and no GPU.
const NO_GPUS: &str = "int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
int nvmlDeviceGetCount(unsigned *count) { *count = 0; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 0; return 0; }
int nvmlShutdown(void) { return 0; }
";

/// Asks the program of each driver. Returns what was asked, for people.
pub(super) fn ask(unpacked: &Path, root: &Path) -> Result<String> {
    let libraries = of_kind(unpacked, Kind::Library)?;
    let documented = documented(root)?;
    ensure!(documented.len() > 5, "the documents name {documented:?}");
    let mut said = Vec::new();
    for program in of_kind(unpacked, Kind::Smi)? {
        let library = libraries.iter().find(|one| one.version == program.version);
        let library =
            library.with_context(|| format!("there is no NVML of {}", program.version))?;
        let of = || format!("nvidia-smi {}", program.version);
        time_slices(&program, library).with_context(of)?;
        let understood = options(&program, library, &documented).with_context(of)?;
        said.push(format!("{}: {understood}", of()));
    }
    ensure!(!said.is_empty(), "no program was asked");
    Ok(lines(&said))
}

/// A driver in a folder of its own.
struct Node {
    dir: tempfile::TempDir,
    driver: Driver,
}

impl Node {
    fn new(program: &Unpacked) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let fixture = Fixture {
            driver_version: program.version.clone(),
            ..Fixture::new(Vec::new())
        };
        let made = fixture.build(dir.path())?;
        let smi = dir.path().join("usr/bin/nvidia-smi");
        fs_err::remove_file(&smi)?;
        fs_err::copy(&program.file, smi)?;
        let driver = find_driver_at(&made.host, made.driver_root)?;
        Ok(Self { dir, driver })
    }

    /// Gives it NVIDIA's library.
    fn with(self, library: &Unpacked) -> Result<Self> {
        fs_err::copy(&library.file, &self.driver.nvml_library)?;
        Ok(self)
    }

    /// Gives it a library that has no GPUs and is NVIDIA's for the rest.
    fn with_no_gpus(self, library: &Unpacked) -> Result<Self> {
        let dir = self.dir.path();
        let real = dir.join("nvidias.so");
        fs_err::copy(&library.file, &real)?;
        let cc = |name: &str, text: &str| -> Result<Command> {
            let source = dir.join(format!("{name}.c"));
            fs_err::write(&source, text)?;
            let mut cc = Command::new("cc");
            cc.args(["-shared", "-fPIC", "-Wl,--no-as-needed"]);
            cc.arg(source);
            Ok(cc)
        };
        // NVIDIA's has the name of the library itself. By its path it is another for the loader.
        let by_path = dir.join("by-path.so");
        let name = format!("-Wl,-soname,{}", real.display());
        succeeds(cc("by-path", "")?.arg(name).arg("-o").arg(&by_path))?;
        fs_err::remove_file(&self.driver.nvml_library)?;
        let mut own = cc("no-gpus", NO_GPUS)?;
        own.arg("-Wl,-soname,no-gpus.so").arg(by_path);
        succeeds(own.arg("-o").arg(&self.driver.nvml_library))?;
        Ok(self)
    }

    /// Gives the program arguments. Returns its status and its first line.
    fn run(&self, args: &[&str]) -> Result<(Option<i32>, String)> {
        let program = self.driver.nvidia_smi.as_ref().context("no nvidia-smi")?;
        let libraries = self.driver.nvml_library.parent().context("a folder")?;
        let done = Command::new(program)
            .args(args)
            .env("LD_LIBRARY_PATH", libraries)
            .stdin(Stdio::null())
            .output()?;
        let said = [done.stdout, done.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        let first = said.lines().next().unwrap_or_default().to_owned();
        Ok((done.status.code(), first))
    }
}

/// Asks for the time slice and sets each, by divvy's own code: without a library, without a driver,
/// and without a GPU.
fn time_slices(program: &Unpacked, library: &Unpacked) -> Result<()> {
    let no_library = Node::new(program)?;
    fs_err::remove_file(&no_library.driver.nvml_library)?;
    let no_driver = Node::new(program)?.with(library)?;
    let no_gpu = Node::new(program)?.with_no_gpus(library)?;
    let gpu = "GPU-12345678-1234-1234-1234-123456780001".parse()?;
    for (node, is_expected) in [
        (&no_library, is_no_library as fn(&SmiError) -> bool),
        (&no_driver, |error| matches!(error, SmiError::NoDriver(_))),
        (
            &no_gpu,
            if program.branch < SETS_TIME_SLICES {
                is_not_understood
            } else {
                is_no_gpu
            },
        ),
    ] {
        let smi = Smi::new();
        let mut errors = vec![smi.time_slice(&node.driver, &gpu, WITHIN).map(drop)];
        for slice in TimeSlice::ALL {
            errors.push(smi.set_time_slice(&node.driver, &gpu, slice, WITHIN));
        }
        for done in errors {
            match done {
                Err(error) if is_expected(&error) => {}
                other => bail!("a time slice: {other:?}"),
            }
        }
    }
    Ok(())
}

fn is_no_library(error: &SmiError) -> bool {
    matches!(error, SmiError::Refused { why, .. } if why.contains("does not find libnvidia-ml"))
}

fn is_no_gpu(error: &SmiError) -> bool {
    matches!(error, SmiError::Refused { why, .. } if why.contains("does not find the GPU"))
}

fn is_not_understood(error: &SmiError) -> bool {
    matches!(error, SmiError::Refused { why, .. } if why.contains("does not know the arguments"))
}

/// Gives the program the arguments that the documents name, and some that there are not. Returns
/// how many it has understood, for people.
fn options(
    program: &Unpacked,
    library: &Unpacked,
    documented: &BTreeSet<String>,
) -> Result<String> {
    let node = Node::new(program)?.with_no_gpus(library)?;
    for unknown in [
        "compute-policy --no-such-option",
        "no-such-command",
        "--no-such-option",
    ] {
        let args: Vec<&str> = unknown.split(' ').collect();
        let (status, said) = node.run(&args)?;
        ensure!(
            status.is_some_and(|status| status == 2 || status == 255),
            "{unknown} ended with {status:?}: {said}"
        );
    }
    let mut not_understood = Vec::new();
    for line in documented {
        let args: Vec<&str> = line.split(' ').collect();
        let (status, said) = node.run(&args)?;
        if !status.is_some_and(|status| UNDERSTOOD.contains(&status)) {
            not_understood.push(format!("`{line}` ends with {status:?}: {said}"));
        }
    }
    // What an older program does not know, the documents say.
    let is_old = program.branch < SETS_TIME_SLICES;
    ensure!(
        not_understood.is_empty() || is_old,
        "{}",
        not_understood.join("\n")
    );
    let understood = documented.len() - not_understood.len();
    Ok(format!(
        "time slices and {understood} of {} options of the documents understood",
        documented.len()
    ))
}

/// Lists the arguments of `nvidia-smi` in the documents and in what a node runs.
fn documented(root: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ext| ext == "md") {
                found.extend(arguments(&fs_err::read_to_string(path)?));
            }
        }
    }
    Ok(found)
}

/// Reads the arguments of `nvidia-smi` from a document: those in backquotes or in a block, up to a
/// comment or a pipe.
fn arguments(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, name) in text.match_indices("nvidia-smi ") {
        // A command, and no sentence about the program.
        let before = text.get(..at).unwrap_or_default();
        let starts = before.is_empty() || before.ends_with(['`', '\n', ' ', '(']);
        let rest = text.get(at + name.len()..).unwrap_or_default();
        let end = rest.find(['`', '\n', '#', '|', ';', ')', '…', '>', '&']);
        let line = rest.get(..end.unwrap_or(rest.len())).unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_command = words
            .first()
            .is_some_and(|word| word.starts_with('-') || SUB_COMMANDS.contains(word));
        if starts && is_command {
            found.push(words.join(" ").replace("UUID", UUID));
        }
    }
    found
}

const SUB_COMMANDS: [&str; 4] = ["compute-policy", "mig", "nvlink", "topo"];
const UUID: &str = "GPU-12345678-1234-1234-1234-123456780001";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_documents_are_found_and_sentences_are_not() {
        let text = "`nvidia-smi -L`, then\n\n    nvidia-smi -i UUID -mig 1   # on\n\nand nvidia-smi does it; `nvidia-smi compute-policy`";
        let mig = format!("-i {UUID} -mig 1");
        assert_eq!(arguments(text), ["-L", &mig, "compute-policy"]);
    }
}
