//! The GPUs of this machine, read by its NVIDIA driver.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use divvy_host::{DriverRootError, HostRoot, RootReason};
use divvy_model::Inventory;

use super::Args;

/// Reads the GPUs of this machine; a GPU that does not even say its UUID is a line of its own.
pub(super) fn read(args: &Args, otherwise: &str) -> Result<(Inventory, Vec<String>)> {
    let host = HostRoot::default();
    let library = if let Some(path) = &args.nvml_library {
        path.clone()
    } else {
        // Else it would be looked for below the root of the host.
        let root = args.driver_root.as_deref().map(std::path::absolute);
        let root = root.transpose().context("--driver-root")?;
        match divvy_host::find_driver(&host, root.as_deref()) {
            Ok(driver) => driver.nvml_library,
            Err(error) => bail!("{}", no_driver(root.as_deref(), &error, otherwise)),
        }
    };
    let driver = divvy_nvml::NvmlDriver::open(Some(&library))
        .with_context(|| format!("failed to open NVML{otherwise}"))?;
    let topology = |address| divvy_host::topology(&host, address).unwrap_or_default();
    let inventory = divvy_nvml::read_inventory(&driver, &topology)?;
    let left_out = driver.left_out().into_iter();
    let left_out = left_out.map(|(index, code)| {
        format!("GPU at index {index}: {code}: it is left out, and the numbers of the GPUs after it may differ from the node's")
    });
    Ok((inventory, left_out.collect()))
}

/// Says that there is no driver, without the places that were looked in, which fill a page, but
/// with the platform if one of them is of a platform that is not supported.
pub(super) fn no_driver(root: Option<&Path>, error: &DriverRootError, otherwise: &str) -> String {
    let tried = match error {
        DriverRootError::NoneFits { tried, .. } => tried.as_slice(),
        DriverRootError::Module(_) => &[],
    };
    let is_other =
        |(_, reason): &&(PathBuf, RootReason)| matches!(reason, RootReason::Unsupported(_));
    if let Some((folder, reason)) = tried.iter().find(is_other) {
        let option = if root.is_some() { "--driver-root " } else { "" };
        return format!("{option}{}: {reason}", folder.display());
    }
    match root {
        Some(root) => format!(
            "--driver-root {}: no NVIDIA driver in it (a library folder with libnvidia-ml.so.1)",
            root.display()
        ),
        None => format!(
            "this machine has no NVIDIA driver in the known places: --driver-root says where one is{otherwise}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_the_error_is_short() {
        for root in [None, Some(Path::new("/nowhere"))] {
            let error = DriverRootError::NoneFits {
                tried: vec![(PathBuf::from("/nowhere"), RootReason::Absent)],
                set_by_user: root.is_some(),
            };
            let said = no_driver(root, &error, "");
            assert!(said.len() < 160 && !said.contains('\n'), "{said}");
        }
    }
}
