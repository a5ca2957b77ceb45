//! Resolution of config entries: a device gets the last applicable entry of its kind as a whole,
//! claim over class. Entries are never merged field by field.

use divvy_api::names::{NVIDIA_API_VERSION, NVIDIA_MIG_CONFIG};
use divvy_api::{ConfigKind, DeviceConfig};
use divvy_model::{DeviceKind, NamedTarget, Sharing};

use crate::refusal::EntryAt;
use crate::{Claim, ConfigEntry, ConfigSource, Why, base_request};

/// Reach of an entry within a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Applies {
    /// Applies to the devices of its kind: it lists no requests, or a request whose alternatives
    /// may differ in kind, or it is of a class, whose devices may.
    ToItsKind,
    /// Applies to all devices: its author named the request. A device of another kind is a mistake.
    ByName,
}

fn applies(entry: &ConfigEntry, request: &str) -> Option<Applies> {
    let names = |name: &str| entry.requests.iter().any(|r| r == name);
    // Not for entries of a class: there the scheduler has filled in the requests that use the
    // class, which their author did not know.
    if entry.source == ConfigSource::Claim && names(request) {
        Some(Applies::ByName)
    } else if entry.requests.is_empty() || names(request) || names(base_request(request)) {
        Some(Applies::ToItsKind)
    } else {
        None
    }
}

/// Returns class entries before claim entries, each in the order written. Later ones win.
fn in_order(configs: &[ConfigEntry]) -> Vec<(EntryAt, &ConfigEntry)> {
    // The index is that within the source, as the author counts the entries of the object in hand.
    let of = |source: ConfigSource| {
        let own = configs.iter().filter(move |e| e.source == source);
        own.enumerate()
            .map(move |(index, e)| (EntryAt { source, index }, e))
    };
    of(ConfigSource::Class)
        .chain(of(ConfigSource::Claim))
        .collect()
}

/// Returns the config of a result's request; the default of its kind when no entry applies. Entries
/// of other drivers are not looked at, and entries of ours that name none of this request are not
/// decoded: a subrequest that was not chosen may have a config this version cannot read.
pub fn resolve(
    claim: &Claim,
    driver: &str,
    request: &str,
    device: &DeviceKind,
) -> Result<DeviceConfig, Why> {
    resolve_entry(&claim.configs, driver, request, device)
}

/// Returns the same, of these entries.
pub fn resolve_entry(
    configs: &[ConfigEntry],
    driver: &str,
    request: &str,
    device: &DeviceKind,
) -> Result<DeviceConfig, Why> {
    // The kind follows from the device that was allocated, not from the request: alternatives of a
    // request may differ in kind.
    let wanted = match (&device.target, device.sharing) {
        (_, Sharing::TimeSliced) => ConfigKind::Share,
        (_, Sharing::Mps) => ConfigKind::Mps,
        (NamedTarget::Gpu { .. }, Sharing::Exclusive | Sharing::Admin) => ConfigKind::Gpu,
        (NamedTarget::Partition(_), Sharing::Exclusive | Sharing::Admin) => ConfigKind::Mig,
    };
    // Decode all entries that apply, also those that a later one overrides: a mistake in any of
    // them is reported where it stands, whatever wins.
    let mut candidates = Vec::new();
    for (at, entry) in in_order(configs)
        .into_iter()
        .filter(|(_, entry)| entry.driver == driver)
    {
        if let Some(how) = applies(entry, request) {
            let config = divvy_api::decode_for(driver, &entry.parameters)
                .map_err(|source| Why::BadConfig { at, source })?;
            candidates.push((at, how, config, &entry.parameters));
        }
    }
    let is_wanted = |config: &DeviceConfig| config.kind == wanted;
    // An entry that names this very request cannot be meant for another device. To ignore it would
    // start the pod without what its author asked for.
    let wrong = candidates
        .iter()
        .find(|(_, how, config, _)| *how == Applies::ByName && !is_wanted(config));
    if let Some((at, _, _, written)) = wrong {
        // In the words of the API in which it is written.
        let (request, found) = (request.to_owned(), written["kind"].as_str());
        let found = found.unwrap_or_default().to_owned();
        let is_theirs = written["apiVersion"] == NVIDIA_API_VERSION;
        let wanted = if is_theirs && wanted == ConfigKind::Mig {
            NVIDIA_MIG_CONFIG
        } else {
            wanted.name()
        };
        return Err(Why::WrongConfigKind {
            at: *at,
            request,
            found,
            wanted,
        });
    }
    let chosen = candidates
        .into_iter()
        .map(|(_, _, config, _)| config)
        .rfind(is_wanted);
    Ok(chosen.unwrap_or_else(|| DeviceConfig::empty(wanted)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{Allocation, Times};
    use divvy_model::TimeSlice;
    use serde_json::json;

    const GPU_0: DeviceKind = DeviceKind::whole(0);

    fn entry(
        source: ConfigSource,
        requests: &[&str],
        driver: &str,
        parameters: serde_json::Value,
    ) -> ConfigEntry {
        let requests = requests.iter().map(|r| (*r).to_owned()).collect();
        ConfigEntry {
            source,
            requests,
            driver: driver.to_owned(),
            parameters,
        }
    }

    fn claim(configs: Vec<ConfigEntry>) -> Claim {
        Claim {
            uid: "c0ffee".parse().unwrap(),
            namespace: "ns".to_owned(),
            name: "train".to_owned(),
            pod_claim_name: None,
            classes: BTreeMap::new(),
            times: Times::default(),
            allocation: Allocation::default(),
            configs,
            pods: Vec::new(),
        }
    }

    fn gpu_config() -> serde_json::Value {
        json!({"apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig"})
    }

    #[test]
    fn the_last_entry_of_a_kind_wins_and_the_claim_stands_over_the_class() {
        let gpu = |interval: &str| {
            let mut config = gpu_config();
            config["timeSlicing"] = json!({ "interval": interval });
            config
        };
        let mig = || json!({"apiVersion": "divvy.dev/v1beta1", "kind": "MigConfig"});
        let slice = |entries: &[(&[&str], serde_json::Value)]| {
            let entries = entries
                .iter()
                .map(|(for_, is)| entry(ConfigSource::Claim, for_, "d", is.clone()));
            resolve(&claim(entries.collect()), "d", "main", &GPU_0).map(|config| config.time_slice)
        };
        let (all, main): (&[&str], &[&str]) = (&[], &["main"]);
        let last = slice(&[
            (all, gpu("Short")),
            (main, gpu("Medium")),
            (all, gpu("Long")),
        ]);
        assert_eq!(last.unwrap(), Some(TimeSlice::Long));
        let other_kind = slice(&[(all, gpu("Short")), (all, mig())]);
        assert_eq!(
            other_kind.unwrap(),
            Some(TimeSlice::Short),
            "a whole kind is skipped"
        );
        assert_eq!(slice(&[(all, mig())]).unwrap(), None);
        let named = slice(&[(main, mig()), (all, gpu("Short"))]).unwrap_err();
        assert!(matches!(
            named,
            Why::WrongConfigKind {
                at: EntryAt { index: 0, .. },
                ref found,
                ..
            } if found == "MigConfig"
        ));
        let class_last = [
            entry(ConfigSource::Claim, &[], "d", json!(1)),
            entry(ConfigSource::Class, &[], "d", json!(2)),
            entry(ConfigSource::Claim, &[], "d", json!(3)),
        ];
        let order: Vec<_> = in_order(&class_last)
            .into_iter()
            .map(|(_, e)| e.parameters.clone())
            .collect();
        assert_eq!(order, [json!(2), json!(1), json!(3)]);
    }

    /// An entry for a request applies to its subrequests of its kind and not the other way round.
    #[test]
    fn an_entry_for_a_request_applies_to_its_subrequests() {
        let for_main = entry(ConfigSource::Claim, &["main"], "d", json!({}));
        let for_sub = entry(ConfigSource::Claim, &["main/big"], "d", json!({}));
        assert_eq!(applies(&for_main, "main"), Some(Applies::ByName));
        assert_eq!(applies(&for_main, "main/big"), Some(Applies::ToItsKind));
        let of_class = entry(ConfigSource::Class, &["main"], "d", json!({}));
        assert_eq!(
            applies(&of_class, "main"),
            Some(Applies::ToItsKind),
            "one class may have devices of several kinds"
        );
        assert_eq!(applies(&for_sub, "main/big"), Some(Applies::ByName));
        assert_eq!(applies(&for_sub, "main/small"), None);
        assert_eq!(applies(&for_sub, "main"), None);
        assert_eq!(applies(&for_main, "mainland"), None);
        assert_eq!(
            applies(&entry(ConfigSource::Class, &[], "d", json!({})), "main"),
            Some(Applies::ToItsKind)
        );
    }

    #[test]
    fn entries_of_other_drivers_and_of_other_requests_are_not_read() {
        let nonsense = json!({"kind": 7});
        let c = claim(vec![
            entry(
                ConfigSource::Claim,
                &[],
                "other.example.com",
                nonsense.clone(),
            ),
            entry(ConfigSource::Claim, &["net"], "gpu.divvy.dev", nonsense),
            entry(
                ConfigSource::Claim,
                &["main"],
                "gpu.divvy.dev",
                gpu_config(),
            ),
        ]);
        let found = resolve(&c, "gpu.divvy.dev", "main/big", &GPU_0).unwrap();
        assert_eq!(found, DeviceConfig::empty(ConfigKind::Gpu));
    }

    #[test]
    fn a_config_with_an_unknown_field_is_refused_with_its_place() {
        let mut typo = gpu_config();
        typo["sharing"] = json!({"strategy": "TimeSlicing"});
        let c = claim(vec![
            entry(ConfigSource::Class, &[], "gpu.divvy.dev", gpu_config()),
            entry(ConfigSource::Claim, &[], "gpu.divvy.dev", typo),
        ]);
        let refusal = resolve(&c, "gpu.divvy.dev", "main", &GPU_0).unwrap_err();
        assert_eq!(refusal.kind().0, "bad-config");
        assert_eq!(
            refusal.to_string(),
            "config entry 0 of the claim for this driver is invalid"
        );
        let cause = std::error::Error::source(&refusal).unwrap().to_string();
        assert!(cause.starts_with("unknown field \"sharing\""), "{cause}");
    }
    /// In the place of NVIDIA's driver, entries of both APIs stand beside each other.
    #[test]
    fn entries_of_both_apis_count_in_the_place_of_nvidia() {
        let slicing = |kind: &str| {
            let sharing = json!({"strategy": "TimeSlicing"});
            json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "sharing": sharing})
        };
        let mut long = gpu_config();
        long["timeSlicing"] = json!({"interval": "Long"});
        let of = |driver: &str, entries: [serde_json::Value; 2]| {
            let entries = entries.map(|of| entry(ConfigSource::Claim, &[], driver, of));
            resolve(&claim(entries.into()), driver, "main", &GPU_0).map(|found| found.time_slice)
        };
        let theirs_last = of("gpu.nvidia.com", [long.clone(), slicing("GpuConfig")]);
        assert_eq!(theirs_last.unwrap(), Some(TimeSlice::Default));
        let ours_last = of("gpu.nvidia.com", [slicing("GpuConfig"), long.clone()]);
        assert_eq!(ours_last.unwrap(), Some(TimeSlice::Long));
        let of_partitions = of("gpu.nvidia.com", [long.clone(), slicing("MigDeviceConfig")]);
        assert_eq!(of_partitions.unwrap(), Some(TimeSlice::Long));
        let elsewhere = of("gpu.divvy.dev", [long, slicing("GpuConfig")]).unwrap_err();
        assert_eq!(elsewhere.kind().0, "bad-config");
    }

    #[test]
    fn the_missing_kind_is_named_in_the_api_of_the_entry_that_is_there() {
        let partition = DeviceKind::parse(&"gpu-0-mig-1g10gb-19-0".parse().unwrap()).unwrap();
        for (api, found, device, wanted) in [
            (
                NVIDIA_API_VERSION,
                "GpuConfig",
                &partition,
                "MigDeviceConfig",
            ),
            (NVIDIA_API_VERSION, "MigDeviceConfig", &GPU_0, "GpuConfig"),
            ("divvy.dev/v1beta1", "GpuConfig", &partition, "MigConfig"),
            ("divvy.dev/v1beta1", "MigConfig", &GPU_0, "GpuConfig"),
        ] {
            let parameters = json!({"apiVersion": api, "kind": found});
            let driver = "gpu.nvidia.com";
            let named = entry(ConfigSource::Claim, &["main"], driver, parameters);
            let wrong = resolve(&claim(vec![named]), driver, "main", device);
            let expected = format!(
                "config entry 0 of the claim is a {found}, but request \"main\" was allocated this device, which takes a {wanted}"
            );
            assert_eq!(wrong.unwrap_err().to_string(), expected);
        }
    }

    /// A partition takes a MIG config and an entry of another kind that names it is refused.
    #[test]
    fn a_partition_takes_a_mig_config_and_no_entry_of_another_kind() {
        let partition = DeviceKind::parse(&"gpu-0-mig-1g10gb-19-0".parse().unwrap()).unwrap();
        let mig = json!({"apiVersion": "divvy.dev/v1beta1", "kind": "MigConfig"});
        let c = claim(vec![
            entry(ConfigSource::Class, &[], "gpu.divvy.dev", gpu_config()),
            entry(ConfigSource::Claim, &["main"], "gpu.divvy.dev", mig),
        ]);
        let found = |request, device| resolve(&c, "gpu.divvy.dev", request, device);
        assert_eq!(
            found("main", &partition).unwrap(),
            DeviceConfig::empty(ConfigKind::Mig)
        );
        assert_eq!(
            found("other", &partition).unwrap(),
            DeviceConfig::empty(ConfigKind::Mig)
        );
        assert_eq!(
            found("main", &GPU_0).unwrap_err().to_string(),
            "config entry 0 of the claim is a MigConfig, but request \"main\" was allocated this device, which takes a GpuConfig"
        );
    }
}
