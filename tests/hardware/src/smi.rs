//! `nvidia-smi -q -x`: what the driver's own program says of the GPUs, and where that is not what
//! divvy read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use divvy_host::Driver;
use divvy_model::{GpuFacts, Inventory, MigMode};

/// Its output about one GPU, unchanged: values by field.
type Said = BTreeMap<&'static str, String>;

/// Where each field is: the elements that lead to it.
const FIELDS: [(&str, &[&str]); 10] = [
    ("name", &["product_name"]),
    ("UUID", &["uuid"]),
    ("minor", &["minor_number"]),
    ("PCI address", &["pci", "pci_bus_id"]),
    ("PCI device id", &["pci", "pci_device_id"]),
    ("memory", &["fb_memory_usage", "total"]),
    ("MIG mode", &["mig_mode", "current_mig"]),
    ("compute mode", &["compute_mode"]),
    ("addressing mode", &["addressing_mode"]),
    ("C2C mode", &["c2c_mode"]),
];

/// Runs it, where the driver's programs run: in the driver root if that is a whole file system,
/// else on the host, which this process sees at `prefix`.
pub(crate) fn ask(driver: &Driver, prefix: &Path) -> Result<String> {
    let program = driver
        .nvidia_smi
        .as_ref()
        .context("the driver comes without nvidia-smi")?;
    let seen = driver.root.see(Path::new("/"));
    // Links lead where they do in that root.
    let has = |path: &str| {
        driver
            .root
            .resolve(Path::new(path))
            .is_ok_and(|found| found.is_some())
    };
    let whole = has("dev/nvidiactl") && has("bin/sh");
    let root = if whole { seen.as_path() } else { prefix };
    let inside = Path::new("/").join(program.strip_prefix(root).unwrap_or(program));
    let mut command = Command::new(std::env::current_exe()?);
    // `divvy_host::become_other`, with which `main` begins.
    command
        .arg("run-as-other")
        .arg(root)
        .arg(inside)
        .args(["-q", "-x"])
        .env_clear();
    if !whole && driver.root.host() != Path::new("/") {
        let library = Path::new("/").join(
            driver
                .nvml_library
                .strip_prefix(root)
                .unwrap_or(&driver.nvml_library),
        );
        command.env(
            "LD_LIBRARY_PATH",
            library.parent().context("a library without a folder")?,
        );
    }
    let out = command.output().context("nvidia-smi cannot be started")?;
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    ensure!(
        out.status.success(),
        "nvidia-smi -q -x ends with {}: {} {}",
        out.status,
        said.trim(),
        String::from_utf8_lossy(&out.stderr).trim()
    );
    Ok(said)
}

/// The text between an element's tags, the first of that name.
fn element<'a>(xml: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (inside, _) = rest.split_once(&format!("</{name}>"))?;
    Some(inside)
}

/// Without an element: its like may be nested in it.
fn without(xml: &str, name: &str) -> String {
    match (
        xml.split_once(&format!("<{name}>")),
        xml.split_once(&format!("</{name}>")),
    ) {
        (Some((before, _)), Some((_, after))) => format!("{before}{after}"),
        _ => xml.to_owned(),
    }
}

/// Version of the driver, of CUDA, and the GPUs.
fn read(xml: &str) -> Result<(String, Option<String>, Vec<Said>)> {
    let version =
        element(xml, "driver_version").context("nvidia-smi -q -x names no driver_version")?;
    let gpus = xml.split("<gpu id=").skip(1).map(|gpu| {
        // Partitions have memory, and processes ids, of their own.
        let gpu = without(&without(gpu, "mig_devices"), "processes");
        let value = |path: &[&str]| {
            path.iter()
                .try_fold(gpu.as_str(), |xml, name| element(xml, name))
        };
        FIELDS
            .iter()
            .filter_map(|(field, path)| Some((*field, value(path)?.trim().to_owned())))
            .collect()
    });
    let cuda = element(xml, "cuda_version").map(|text| text.trim().to_owned());
    Ok((version.trim().to_owned(), cuda, gpus.collect()))
}

/// Where it says other things than divvy reads. A field that this version of nvidia-smi does not
/// have says nothing.
pub(crate) fn differences(xml: &str, inventory: &Inventory) -> Result<Vec<String>> {
    let (version, cuda, gpus) = read(xml)?;
    let mut all = Vec::new();
    let mut compare = |what: &str, ours: &str, theirs: &str| {
        if !ours.eq_ignore_ascii_case(theirs) {
            all.push(format!(
                "{what}: divvy reads {ours}, nvidia-smi says {theirs}"
            ));
        }
    };
    compare("driver", &inventory.system.driver_version, &version);
    if let Some(cuda) = cuda {
        let ours = inventory
            .system
            .cuda_version
            .map_or_else(|| "none".to_owned(), |ours| ours.to_string());
        compare("CUDA", &ours, &cuda);
    }
    compare(
        "number of GPUs",
        &inventory.gpus.len().to_string(),
        &gpus.len().to_string(),
    );
    for (uuid, gpu) in &inventory.gpus {
        let Some(said) = gpus
            .iter()
            .find(|said| said.get("UUID").is_some_and(|said| said == uuid.as_str()))
        else {
            compare(uuid.as_str(), "it", "nothing");
            continue;
        };
        for (field, ours) in facts(&gpu.facts) {
            if let Some(theirs) = said.get(field) {
                compare(&format!("{uuid}, {field}"), &ours, &plain(field, theirs));
            }
        }
    }
    Ok(all)
}

/// Returns divvy's readings in the form of nvidia-smi.
fn facts(facts: &GpuFacts) -> Vec<(&'static str, String)> {
    let known = |value: Option<String>| value.unwrap_or_else(|| "N/A".to_owned());
    let on = |on: bool| if on { "Enabled" } else { "Disabled" }.to_owned();
    let mig = match facts.mig_mode {
        MigMode::Unsupported => None,
        MigMode::Supported { current, .. } => Some(on(current)),
    };
    vec![
        ("name", facts.product_name.clone()),
        ("minor", known(facts.minor.map(|minor| minor.to_string()))),
        ("PCI address", facts.pci_address.to_string()),
        ("PCI device id", format!("{:08X}", facts.pci_device_id)),
        (
            "memory",
            known(
                facts
                    .memory_bytes
                    .map(|bytes| format!("{} MiB", bytes >> 20)),
            ),
        ),
        ("MIG mode", known(mig)),
        (
            "compute mode",
            known(facts.compute_mode.map(|mode| mode.to_string())),
        ),
        ("addressing mode", known(facts.addressing_mode.clone())),
        ("C2C mode", known(facts.c2c.map(on))),
    ]
}

/// Without what only the form differs in.
fn plain(field: &str, theirs: &str) -> String {
    match field {
        "PCI address" => theirs
            .strip_prefix("0000")
            .filter(|rest| rest.len() == 12)
            .unwrap_or(theirs)
            .to_owned(),
        "PCI device id" => theirs.trim_start_matches("0x").to_owned(),
        _ => theirs.to_owned(),
    }
}

/// Where a file of the host is seen.
pub(crate) fn see(prefix: &Path, host: &Path) -> PathBuf {
    let seen = prefix.join(host.strip_prefix("/").unwrap_or(host));
    if seen.exists() { seen } else { host.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{inventory, xml};

    #[test]
    fn what_nvidia_smi_says_of_the_same_gpus_is_no_difference() {
        for spec in ["h100x2", "gb200x2", "gb10", "l40,v100"] {
            let inventory = inventory(spec);
            assert_eq!(
                differences(&xml(&inventory), &inventory).unwrap(),
                [""; 0],
                "{spec}"
            );
        }
    }

    #[test]
    fn every_field_that_differs_is_named() {
        let inventory = inventory("h100x1");
        let good = xml(&inventory);
        for (was, is, named) in [
            (
                "81559 MiB",
                "81920 MiB",
                "memory: divvy reads 81559 MiB, nvidia-smi says 81920 MiB",
            ),
            (
                "00000000:1A:00.0",
                "00000000:1B:00.0",
                "PCI address: divvy reads 0000:1a:00.0",
            ),
            (
                "233010DE",
                "233110DE",
                "PCI device id: divvy reads 233010DE",
            ),
            (
                "<minor_number>0<",
                "<minor_number>1<",
                "minor: divvy reads 0",
            ),
            ("NVIDIA H100 80GB HBM3", "NVIDIA H100", "name: divvy reads"),
            (
                "<current_mig>Disabled",
                "<current_mig>Enabled",
                "MIG mode: divvy reads Disabled",
            ),
            (
                "<c2c_mode>Disabled",
                "<c2c_mode>N/A",
                "C2C mode: divvy reads Disabled",
            ),
            (
                ">Default<",
                ">Exclusive_Process<",
                "compute mode: divvy reads DEFAULT",
            ),
            (">HMM<", ">ATS<", "addressing mode: divvy reads HMM"),
            ("580.95.05", "580.95.06", "driver: divvy reads 580.95.05"),
            (
                "<cuda_version>13.0",
                "<cuda_version>12.9",
                "CUDA: divvy reads 13.0",
            ),
            (
                "<uuid>GPU-1",
                "<uuid>GPU-2",
                "divvy reads it, nvidia-smi says nothing",
            ),
        ] {
            let found = differences(&good.replace(was, is), &inventory).unwrap();
            assert!(
                found.len() == 1 && found[0].contains(named),
                "{was}: {found:?}"
            );
        }
        assert!(differences("nvidia-smi has failed", &inventory).is_err());
        let old = good.replace("<addressing_mode>HMM</addressing_mode>", "");
        assert_eq!(
            differences(&old, &inventory).unwrap(),
            [""; 0],
            "a field that it does not have says nothing"
        );
    }

    #[test]
    fn memory_of_partitions_and_ids_of_processes_are_not_taken_for_the_gpus() {
        let inventory = inventory("h100x1");
        let devices = "<mig_devices><mig_device><fb_memory_usage><total>9984 MiB</total></fb_memory_usage></mig_device></mig_devices>";
        let with = xml(&inventory).replace("<mig_devices>None</mig_devices>", devices);
        assert!(with.contains("9984 MiB"));
        assert_eq!(differences(&with, &inventory).unwrap(), [""; 0]);
    }
}
