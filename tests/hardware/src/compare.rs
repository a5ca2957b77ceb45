//! Compares facts of a GPU from sysfs, /proc and CUDA with those that divvy read, and divvy's names
//! of MIG profiles with the driver's.

use std::path::{Path, PathBuf};

use divvy_host::HostRoot;
use divvy_model::mig::MigCapabilities;
use divvy_model::{GpuFacts, Inventory};

use crate::cuda::Seen;

/// Where what is written about the GPUs in sysfs and /proc/driver/nvidia is not what divvy read.
pub(crate) fn with_files(host: &HostRoot, inventory: &Inventory) -> Vec<String> {
    let mut all = Vec::new();
    for (uuid, gpu) in &inventory.gpus {
        let facts = &gpu.facts;
        let pci = facts.pci_address.to_string();
        let read = |path: PathBuf| {
            fs_err::read_to_string(host.see(&path)).map_err(|error| error.to_string())
        };
        let device = Path::new("/sys/bus/pci/devices").join(&pci);
        let number = |name: &str| {
            let text = read(device.join(name))?;
            let digits = text.trim().trim_start_matches("0x");
            u32::from_str_radix(digits, 16).map_err(|error| format!("{name} is {text:?}: {error}"))
        };
        let id = number("vendor").and_then(|vendor| Ok(number("device")? << 16 | vendor));
        let information = read(
            Path::new("/proc/driver/nvidia/gpus")
                .join(&pci)
                .join("information"),
        );
        let said = |name: &str| {
            let text = information.as_ref().map_err(Clone::clone)?;
            let mut lines = text.lines().filter_map(|line| line.split_once(':'));
            let value = lines
                .find(|(key, _)| key.trim() == name)
                .map(|(_, value)| value.trim().to_owned());
            value.ok_or_else(|| format!("/proc/driver/nvidia/gpus/{pci}/information has no {name}"))
        };
        let mut compare = |what: &str, ours: String, theirs: Result<String, String>| match theirs {
            Ok(theirs) if theirs == ours => {}
            Ok(theirs) => all.push(format!(
                "{uuid}, {what}: divvy reads {ours}, the kernel says {theirs}"
            )),
            Err(why) => all.push(format!("{uuid}, {what}: {why}")),
        };
        compare(
            "PCI id",
            format!("{:#010x}", facts.pci_device_id),
            id.map(|id| format!("{id:#010x}")),
        );
        compare("UUID", uuid.to_string(), said("GPU UUID"));
        if let Some(minor) = facts.minor {
            compare("minor", minor.to_string(), said("Device Minor"));
        }
        if gpu.topology.pcie_root.is_none() {
            all.push(format!("{uuid}: its PCIe root is not known"));
        }
    }
    all
}

/// Where CUDA says other things of the one GPU that it sees.
pub(crate) fn with_cuda(seen: &Seen, facts: &GpuFacts) -> Vec<String> {
    let mut all = Vec::new();
    let mut compare = |what: &str, ours: String, theirs: String| {
        if ours != theirs {
            all.push(format!("{what}: divvy reads {ours}, CUDA says {theirs}"));
        }
    };
    compare("UUID", facts.uuid.to_string(), seen.uuid.clone());
    compare(
        "PCI address",
        facts.pci_address.to_string(),
        seen.bus_id.to_lowercase(),
    );
    compare("name", facts.product_name.clone(), seen.name.clone());
    let (major, minor) = seen.capability;
    compare(
        "compute capability",
        facts.compute_capability.to_string(),
        format!("{major}.{minor}"),
    );
    if let Some(ours) = facts.multiprocessors {
        compare(
            "multiprocessors",
            ours.to_string(),
            seen.multiprocessors.to_string(),
        );
    }
    // CUDA leaves out what the driver keeps for itself: it was less than a tenth on every board
    // that we know of.
    if let Some(ours) = facts.memory_bytes
        && !(ours / 10 * 9..=ours).contains(&seen.memory_bytes)
    {
        all.push(format!(
            "memory: divvy reads {ours} bytes, CUDA says {}",
            seen.memory_bytes
        ));
    }
    all
}

/// Where the driver calls a MIG profile something else than divvy does; `None` if it calls them
/// nothing.
pub(crate) fn names(capabilities: &MigCapabilities) -> Option<Vec<String>> {
    let named: Vec<_> = capabilities
        .profiles()
        .iter()
        .filter_map(|p| Some((p, p.driver_name.as_deref()?)))
        .collect();
    let differs = |(profile, theirs): &(&divvy_model::mig::GpuInstanceProfile, &str)| {
        let theirs = theirs.strip_prefix("MIG ").unwrap_or(theirs);
        let ours = capabilities
            .name(profile)
            .map_or_else(|| "nothing".to_owned(), |name| name.to_string());
        (ours != theirs).then(|| {
            format!(
                "profile {}: divvy says {ours}, the driver {theirs}",
                profile.id
            )
        })
    };
    (!named.is_empty()).then(|| named.iter().filter_map(differs).collect())
}

/// The libcuda that a process has loaded, from its `/proc/self/maps`.
pub(crate) fn libcuda(maps: &str) -> Option<PathBuf> {
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').and_then(|at| line.get(at..)));
    let is_it = |path: &&str| {
        Path::new(path)
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("libcuda.so"))
    };
    paths.map(str::trim_end).find(is_it).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use divvy_gpu_sim::mig_capabilities;

    use super::*;
    use crate::testing::inventory;

    #[test]
    fn what_the_kernel_says_is_compared() {
        let folder = tempfile::tempdir().unwrap();
        let host = HostRoot::under(folder.path());
        let mut inventory = inventory("h100x1");
        let gpu = inventory.gpus.values().next().unwrap().clone();
        let missing = with_files(&host, &inventory);
        assert_eq!(missing.len(), 3, "{missing:?}");
        crate::testing::kernel_files(folder.path(), &inventory);
        assert_eq!(with_files(&host, &inventory), [""; 0]);
        let facts = &mut inventory.gpus.get_mut(&gpu.facts.uuid).unwrap().facts;
        (facts.minor, facts.pci_device_id) = (Some(5), 0x2331_10de);
        let found = with_files(&host, &inventory);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].ends_with("PCI id: divvy reads 0x233110de, the kernel says 0x233010de"),
            "{found:?}"
        );
        assert!(
            found[1].ends_with("minor: divvy reads 5, the kernel says 0"),
            "{found:?}"
        );
    }

    #[test]
    fn what_cuda_says_is_compared() {
        let facts = inventory("h100x1").gpus.into_values().next().unwrap().facts;
        let good = Seen {
            count: 1,
            name: facts.product_name.clone(),
            uuid: facts.uuid.to_string(),
            bus_id: facts.pci_address.to_string().to_uppercase(),
            multiprocessors: 132,
            memory_bytes: 84_900_000_000,
            capability: (9, 0),
            library: None,
        };
        assert_eq!(with_cuda(&good, &facts), [""; 0]);
        let with = |change: fn(&mut Seen)| {
            let mut seen = good.clone();
            change(&mut seen);
            with_cuda(&seen, &facts).join("; ")
        };
        assert!(with(|s| s.uuid = "GPU-0".to_owned()).starts_with("UUID: "));
        assert!(with(|s| s.bus_id = "0000:1B:00.0".to_owned()).ends_with("CUDA says 0000:1b:00.0"));
        assert!(with(|s| s.multiprocessors = 114).ends_with("divvy reads 132, CUDA says 114"));
        assert!(with(|s| s.capability = (8, 0)).ends_with("divvy reads 9.0, CUDA says 8.0"));
        assert!(with(|s| s.name = "NVIDIA H100 PCIe".to_owned()).starts_with("name: "));
        assert!(with(|s| s.memory_bytes /= 2).starts_with("memory: "));
        assert!(with(|s| s.memory_bytes *= 2).starts_with("memory: "));
    }

    #[test]
    fn a_profile_that_the_driver_calls_otherwise_is_named() {
        let caps = mig_capabilities("h100").unwrap();
        assert_eq!(names(&caps), None);
        let called = |name: &str| {
            let mut profiles = caps.profiles().to_vec();
            profiles[0].driver_name = Some(name.to_owned());
            names(&MigCapabilities::new(caps.memory_bytes, profiles))
        };
        assert_eq!(called("MIG 1g.10gb"), Some(Vec::new()));
        let wrong = "profile 19: divvy says 1g.10gb, the driver 1g.11gb".to_owned();
        assert_eq!(called("MIG 1g.11gb"), Some(vec![wrong]));
    }

    #[test]
    fn the_library_that_was_loaded_is_found_among_the_maps() {
        let maps = "7f00-7f01 r--p 00000000 00:2a 1 /usr/lib/libc.so.6\n\
                    7f02-7f03 r-xp 00001000 00:2b 2                  /usr/local/nvidia/lib64/libcuda.so.580.95.05\n\
                    7f04-7f05 rw-p 00000000 00:00 0 [heap]\n";
        assert_eq!(
            libcuda(maps),
            Some("/usr/local/nvidia/lib64/libcuda.so.580.95.05".into())
        );
        assert_eq!(
            libcuda("7f00-7f01 r--p 0 00:2a 1 /usr/lib/libcudart.so.12\n"),
            None
        );
    }
}
