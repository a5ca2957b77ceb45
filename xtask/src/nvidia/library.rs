//! NVIDIA's libraries for NVML against the mock library: their functions, and what they answer
//! without a driver.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nvidia_ml::{BRANCHES, Generation, golden_file, without_a_driver};

use super::packages::{Kind, Unpacked, of_kind};
use super::{difference, lines};

/// Compares the functions that divvy looks for, and the answers without a driver. Returns what was
/// compared, for people.
pub(super) fn compare(unpacked: &Path, write: bool) -> Result<String> {
    let mut wanted = exported(&mock()?)?;
    wanted.retain(|name| name.starts_with("nvml"));
    ensure!(!wanted.is_empty(), "the mock library has no functions");
    let mut said = Vec::new();
    let mut wrong = Vec::new();
    for one in of_kind(unpacked, Kind::Library)? {
        let functions = functions(&one, &wanted)?;
        let answers = without_a_driver(&one.file, &one.version)
            .with_context(|| format!("asking {}", one.file.display()))?;
        let asked = answers.lines().count();
        if !BRANCHES.contains(&one.branch) {
            // The mock library is none of these; a session begins with none of them either.
            ensure!(
                answers.contains("\n9 nvmlInit_v2\n"),
                "NVML of {}: {answers}",
                one.version
            );
            said.push(format!(
                "NVML of {}: {functions}; asked without a driver",
                one.version
            ));
            continue;
        }
        let file = golden_file(one.branch);
        if write {
            fs_err::write(&file, &answers)?;
        }
        let differ = difference(&fs_err::read_to_string(&file)?, &answers);
        said.push(format!(
            "NVML of {}: {functions}; {asked} answers without a driver, {} differ from those of the mock library",
            one.version,
            differ.len()
        ));
        wrong.extend(differ);
        wrong.extend(other_functions(&one, &wanted)?);
    }
    ensure!(!said.is_empty(), "no library was asked");
    ensure!(
        wrong.is_empty(),
        "{}\n{}",
        said.join("\n"),
        wrong.join("\n")
    );
    Ok(lines(&said))
}

/// Returns what a library has of these functions, for people.
fn functions(one: &Unpacked, wanted: &BTreeSet<String>) -> Result<String> {
    let lacks = lacks(one, wanted)?;
    let has = wanted.len() - lacks.len();
    Ok(format!("{has} of {} functions", wanted.len()))
}

fn lacks<'a>(one: &Unpacked, wanted: &'a BTreeSet<String>) -> Result<BTreeSet<&'a str>> {
    let has = exported(&one.file)?;
    let lacks = wanted.iter().filter(|name| !has.contains(*name));
    Ok(lacks.map(String::as_str).collect())
}

/// Returns how the functions are others than those of the mock library as that of this driver.
fn other_functions(one: &Unpacked, wanted: &BTreeSet<String>) -> Result<Option<String>> {
    let lacks = lacks(one, wanted)?;
    let of_mock: BTreeSet<&str> = Generation::of(&one.version).lacks().into_iter().collect();
    let list = |names: &BTreeSet<&str>| names.iter().copied().collect::<Vec<_>>().join(", ");
    Ok((lacks != of_mock).then(|| {
        format!(
            "NVML of {} lacks {}, and the mock library as that of R{} {}",
            one.version,
            list(&lacks),
            one.branch,
            list(&of_mock)
        )
    }))
}

/// Returns the mock library, which cargo builds for this program.
fn mock() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().context("a program is in a folder")?;
    Ok(folder.join("deps/libnvidia_ml.so"))
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
