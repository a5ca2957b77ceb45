//! A stand-in for the driver's `nvidia-smi compute-policy`, which keeps each GPU's time slice where
//! the kernel module would. The driver's root gets a shell and looks like a whole root file system,
//! as that of a driver container does, so that the plugin runs the program inside it.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use divvy_model::TimeSlice;
use fs_err as fs;

/// Below the driver's root.
const KEPT: &str = "run/nvidia-timeslices";
const CALLS: &str = "calls";
/// The files by which the plugin knows that programs can run with the driver's root as theirs.
const WHOLE: [&str; 2] = ["lib64/ld-linux-x86-64.so.2", "dev/nvidiactl"];

const PROGRAM: &str = r#"#!/bin/sh
# In a container: that the driver's programs are there, and which GPUs.
if [ "$1" = -L ]; then
    echo "nvidia-smi of driver"
    exec ls /dev/nvidia[0-9]*
fi
kept=/run/nvidia-timeslices
echo "$*" >>"$kept/calls"
[ "$1 $2" = "compute-policy -i" ] || exit 2
case "$4" in
--list)
    slice=0
    [ -e "$kept/$3" ] && read -r slice <"$kept/$3"
    case "$slice" in 0) slice=Default ;; 1) slice=Short ;; 2) slice=Medium ;; 3) slice=Long ;; esac
    echo "| 0 Timeslice $slice |" ;;
--set-timeslice)
    case "$5" in [0-3]) echo "$5" >"$kept/$3" ;; *) exit 2 ;; esac ;;
*) exit 2 ;;
esac
"#;

/// Puts the program and its shell into a driver's root.
pub(super) fn install(driver: &Path) -> Result<()> {
    let write = |name: &str, bytes: &[u8]| -> Result<()> {
        let file = driver.join(name);
        fs::create_dir_all(file.parent().context("a file without a folder")?)?;
        fs::write(&file, bytes)?;
        Ok(fs::set_permissions(&file, Permissions::from_mode(0o755))?)
    };
    fs::create_dir_all(driver.join(KEPT))?;
    let shell = crate::images::busybox_program()?;
    write("bin/sh", &fs::read(shell)?)?;
    for file in WHOLE {
        write(file, b"")?;
    }
    write("usr/bin/nvidia-smi", PROGRAM.as_bytes())
}

fn kept(driver: &Path, name: &str) -> PathBuf {
    driver.join(KEPT).join(name)
}

pub(super) fn time_slice(driver: &Path, uuid: &str) -> Result<TimeSlice> {
    let file = kept(driver, uuid);
    let text = if file.exists() {
        fs::read_to_string(file)?
    } else {
        "0".to_owned()
    };
    let found = TimeSlice::ALL
        .into_iter()
        .find(|slice| slice.number().to_string() == text.trim());
    found.with_context(|| format!("{text:?} is no time slice"))
}

pub(super) fn calls(driver: &Path, uuid: &str) -> Result<Vec<String>> {
    let file = kept(driver, CALLS);
    let text = if file.exists() {
        fs::read_to_string(file)?
    } else {
        String::new()
    };
    Ok(text
        .lines()
        .filter(|line| line.contains(uuid))
        .map(str::to_owned)
        .collect())
}
