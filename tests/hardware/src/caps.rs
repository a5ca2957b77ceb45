//! The questions about caps of memory that can be asked without a change: whether NVML has the
//! calls, by which controller the kernel module would cap, and what it says of a group without a
//! limit.

use std::path::Path;

use divvy_host::HostRoot;
use divvy_model::{GpuDriver, GpuError, GpuUuid, MemoryCaps, MemoryLimit, SystemFacts};

use crate::report::Outcome;

/// Answers of a machine.
struct Seen<'a> {
    system: &'a SystemFacts,
    /// Controllers at the root of its control groups; none of groups of version 1.
    controllers: Option<String>,
    /// Content of `dmem.capacity` there.
    dmem: Option<String>,
    /// NVML's answer about the group of this process.
    limit: Option<Result<MemoryLimit, GpuError>>,
}

/// Asks.
pub(crate) fn outcome(
    host: &HostRoot,
    nvml: &dyn GpuDriver,
    system: &SystemFacts,
    gpu: Option<&GpuUuid>,
) -> Outcome {
    let root = host.see(Path::new("/sys/fs/cgroup"));
    let read = |name: &str| fs_err::read_to_string(root.join(name)).ok();
    let own = fs_err::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    let limit = own.zip(gpu).map(|(group, gpu)| {
        let group = root.join(group);
        nvml.memory_limit(gpu, &group)
    });
    judge(&Seen {
        system,
        controllers: read("cgroup.controllers"),
        dmem: read("dmem.capacity"),
        limit,
    })
}

fn judge(seen: &Seen<'_>) -> Outcome {
    let version = &seen.system.driver_version;
    match seen.system.memory_caps {
        MemoryCaps::OldDriver => {
            return Outcome::NotTried(format!("driver {version} is older than R615"));
        }
        MemoryCaps::NoCalls => {
            return Outcome::Failed(format!(
                "driver {version} is R615 or later, and its libnvidia-ml.so.1 has no nvmlDeviceSetMemoryLimits_v1"
            ));
        }
        _ => {}
    }
    let has = |name: &str| {
        let list = seen.controllers.as_deref().unwrap_or_default();
        list.split_whitespace().any(|has| has == name)
    };
    let region = seen.dmem.as_deref().unwrap_or_default();
    let regions: Vec<&str> = region
        .lines()
        .filter(|line| line.starts_with("nvidia/"))
        .collect();
    let backend = match (&seen.controllers, regions.as_slice()) {
        (None, _) => "control groups of version 1: nothing can be capped".to_owned(),
        (Some(_), [first, ..]) if has("dmem") => format!("by dmem ({first})"),
        (Some(_), _) if has("misc") => "by misc".to_owned(),
        (Some(list), _) => format!("by no controller (there are {})", list.trim()),
    };
    let limit = match &seen.limit {
        None => "no group of this process to ask about".to_owned(),
        Some(Ok(limit)) => format!("the group of this process has the limit {:?}", limit.hard),
        // As of an entry that was never made.
        Some(Err(error)) => format!("of the group of this process NVML says {}", error.code),
    };
    Outcome::Ok(format!("NVML has the calls; {backend}; {limit}"))
}

#[cfg(test)]
mod tests {
    use divvy_model::{GpuErrorCode, GpuOp};

    use super::*;

    #[test]
    fn an_older_driver_is_not_tried_and_a_later_one_says_its_controller() {
        let gpu: GpuUuid = "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap();
        let text = |caps, controllers: Option<&str>, dmem: Option<&str>| {
            let system = SystemFacts {
                driver_version: "615.71.09".to_owned(),
                nvml_version: None,
                cuda_version: None,
                memory_caps: caps,
                mps: divvy_model::MpsAbility::default(),
                caps_linger: false,
            };
            let none = GpuErrorCode::NOT_SUPPORTED;
            let limit = Err(GpuError::on_gpu(GpuOp::MemoryLimit, none, &gpu));
            let outcome = judge(&Seen {
                system: &system,
                controllers: controllers.map(str::to_owned),
                dmem: dmem.map(str::to_owned),
                limit: Some(limit),
            });
            format!("{outcome:?}")
        };
        let region = Some("drm/card0/vram0 7\nnvidia/0000:06:00.0/vidmem 85899345920\n");
        let available = MemoryCaps::Available;
        for (caps, controllers, dmem, expected) in [
            (MemoryCaps::OldDriver, Some("misc"), None, "NotTried"),
            (
                MemoryCaps::NoCalls,
                Some("misc"),
                None,
                "has no nvmlDeviceSetMemoryLimits_v1",
            ),
            (
                available,
                Some("cpu dmem misc\n"),
                region,
                "by dmem (nvidia/0000:06:00.0/vidmem 85899345920)",
            ),
            (available, Some("cpu dmem misc\n"), None, "by misc"),
            (
                available,
                Some("cpu io\n"),
                None,
                "by no controller (there are cpu io)",
            ),
            (available, None, None, "control groups of version 1"),
        ] {
            let found = text(caps, controllers, dmem);
            assert!(found.contains(expected), "{expected}: {found}");
        }
    }
}
