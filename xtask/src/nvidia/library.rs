//! The functions of NVIDIA's libraries for NVML against those of the mock library.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nvidia_ml::Generation;

use super::packages::Fetched;

/// Oldest driver of the mock library.
const OLDEST: u32 = 525;

/// Compares the functions that divvy looks for: those that a library lacks are those that the mock
/// library lacks as that of the same driver. Returns what was compared, for people.
pub(super) fn compare(unpacked: &Path, fetched: &[Fetched]) -> Result<String> {
    let mut wanted = exported(&mock()?)?;
    wanted.retain(|name| name.starts_with("nvml"));
    let mut lines = Vec::new();
    let mut wrong = Vec::new();
    for one in fetched.iter().filter(|one| one.is_library()) {
        let has = exported(&file(&one.folder(unpacked))?)?;
        let lacks: BTreeSet<&str> = wanted
            .iter()
            .filter(|name| !has.contains(*name))
            .map(String::as_str)
            .collect();
        let version = &one.version;
        if one.branch < OLDEST {
            // The mock library is none of these; the next reader sees what they lack.
            lines.push(format!("nvidia: NVML of {version} lacks {}", list(&lacks)));
            continue;
        }
        let of_mock: BTreeSet<&str> = Generation::of(version).lacks().into_iter().collect();
        if lacks != of_mock {
            wrong.push(format!(
                "NVML of {version} lacks {}, and the mock library as that of R{} {}",
                list(&lacks),
                one.branch,
                list(&of_mock)
            ));
        }
        lines.push(format!(
            "nvidia: NVML of {version}: {} of {} functions, as in the mock library",
            wanted.len() - lacks.len(),
            wanted.len()
        ));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(
        !wanted.is_empty() && !lines.is_empty(),
        "nothing was compared"
    );
    Ok(lines.join("\n"))
}

fn list(names: &BTreeSet<&str>) -> String {
    names.iter().copied().collect::<Vec<_>>().join(", ")
}

/// Returns the mock library, which cargo builds for this program.
fn mock() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().context("a program is in a folder")?;
    Ok(folder.join("deps/libnvidia_ml.so"))
}

/// Finds the library in a folder of packages.
fn file(folder: &Path) -> Result<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else if name.to_string_lossy().starts_with("libnvidia-ml.so.") {
                // The file and the link to it are the same library.
                return Ok(entry.path());
            }
        }
    }
    Err(anyhow::anyhow!("{} has no libnvidia-ml", folder.display()))
}

/// Returns the functions that a library exports.
fn exported(library: &Path) -> Result<BTreeSet<String>> {
    let mut nm = Command::new("nm");
    let done = nm.args(["-D", "--defined-only"]).arg(library).output();
    let done = done.context("running nm")?;
    ensure!(done.status.success(), "nm of {}", library.display());
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let names = text.lines().filter_map(|line| line.split(' ').next_back());
    // A version of the symbol may follow.
    let names = names.map(|name| name.split('@').next().unwrap_or(name).to_owned());
    Ok(names.collect())
}
