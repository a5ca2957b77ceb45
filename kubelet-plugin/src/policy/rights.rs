//! What the rules let prepare do to single GPUs, kept in a file: a plugin that restarts is asked to prepare before it
//! has read a policy, and what was allocated under an earlier policy is served under the next.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use divvy_claims::Rights;
use divvy_model::{DeviceName, GpuUuid, Inventory, MigUuid};
use divvy_offer::{Instances, Modes, Rules};
use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    version: u32,
    toggle_mig: BTreeSet<GpuUuid>,
    static_gpus: BTreeSet<GpuUuid>,
    #[serde(default)]
    static_instances: BTreeMap<GpuUuid, BTreeSet<MigUuid>>,
    #[serde(default)]
    on_demand: BTreeSet<DeviceName>,
}

/// What may still be held of what was offered earlier.
#[derive(Debug, Default)]
pub(crate) struct Still {
    /// Devices that are published, or may be held, and are not offered any more, with their GPUs.
    pub(crate) devices: BTreeSet<(GpuUuid, DeviceName)>,
    /// Nobody has been asked yet: anything may be held.
    pub(crate) unsure: bool,
}

impl Still {
    fn on(&self, gpu: &GpuUuid) -> bool {
        self.unsure || self.devices.iter().any(|(of, _)| of == gpu)
    }
}

/// The rights that rules give. Whoever has something of what is `still` held may need what was allowed `before`.
pub(crate) fn rights_of(rules: &Rules, before: &Rights, still: &Still, inventory: &Inventory) -> Rights {
    let of = |fits: &dyn Fn(&divvy_offer::GpuRules) -> bool| -> BTreeSet<GpuUuid> {
        rules.iter().filter(|(_, rules)| fits(rules)).map(|(gpu, _)| gpu.clone()).collect()
    };
    let mut toggle_mig = of(&|rules| matches!(rules.modes, Modes::Only(_)));
    toggle_mig.extend(before.toggle_mig.iter().filter(|gpu| still.on(gpu)).cloned());
    let static_gpus = of(&|rules| rules.instances == Instances::Static);
    let static_instances = static_instances(&static_gpus, before, inventory);
    let given = still.devices.iter().filter(|(gpu, device)| {
        static_gpus.contains(gpu) && (!before.static_gpus.contains(gpu) || before.on_demand.contains(device))
    });
    let mut on_demand: BTreeSet<_> = given.map(|(_, device)| device.clone()).collect();
    if still.unsure {
        on_demand.extend(before.on_demand.iter().cloned());
    }
    Rights { toggle_mig, static_gpus, static_instances, on_demand }
}

/// MIG devices of GPUs whose instances are others', and of those whose instances were, as long as they live. What a GPU
/// that does not answer has is as it was.
fn static_instances(
    static_gpus: &BTreeSet<GpuUuid>,
    before: &Rights,
    inventory: &Inventory,
) -> BTreeMap<GpuUuid, BTreeSet<MigUuid>> {
    let earlier = &before.static_instances;
    let mut known = BTreeMap::new();
    for gpu in static_gpus.iter().chain(earlier.keys()) {
        let was = earlier.get(gpu).cloned().unwrap_or_default();
        let now: BTreeSet<MigUuid> = match inventory.gpus.get(gpu) {
            None => was,
            Some(found) => {
                let living = found.mig.iter().flat_map(|mig| mig.uuids.values());
                living.filter(|uuid| static_gpus.contains(gpu) || was.contains(*uuid)).cloned().collect()
            }
        };
        if !now.is_empty() {
            known.insert(gpu.clone(), now);
        }
    }
    known
}

/// The file.
#[derive(Debug)]
pub(crate) struct RightsFile(PathBuf);

impl RightsFile {
    pub(crate) fn new(plugin_dir: &Path) -> Self {
        Self(plugin_dir.join("rights.json"))
    }

    /// What was saved last; `None` if nothing was, or, and then why in the log, if it cannot be read.
    pub(crate) fn load(&self) -> Option<Rights> {
        let problem = match fs_err::read(&self.0) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(Stored { version: VERSION, toggle_mig, static_gpus, static_instances, on_demand }) => {
                    return Some(Rights { toggle_mig, static_gpus, static_instances, on_demand });
                }
                Ok(Stored { version, .. }) => format!("it has version {version}, this divvy reads {VERSION}"),
                Err(error) => error.to_string(),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => error.to_string(),
        };
        tracing::warn!(file = %self.0.display(), problem, "what the policies allowed last is not known");
        None
    }

    /// Replaces what was saved.
    pub(crate) fn save(&self, rights: &Rights) -> io::Result<()> {
        let Rights { toggle_mig, static_gpus, static_instances, on_demand } = rights.clone();
        let stored = Stored { version: VERSION, toggle_mig, static_gpus, static_instances, on_demand };
        super::store::replace(&self.0, &stored)
    }
}

#[cfg(test)]
mod tests {
    use divvy_model::mig::GpuInstanceProfileId;
    use divvy_offer::GpuRules;

    use super::*;

    fn gpu(n: u32) -> GpuUuid {
        format!("GPU-12345678-1234-1234-1234-{n:012}").parse().unwrap()
    }

    fn still(devices: &[(u32, &str)]) -> Still {
        let devices = devices.iter().map(|(n, device)| (gpu(*n), device.parse().unwrap()));
        Still { devices: devices.collect(), unsure: false }
    }

    fn nothing() -> Inventory {
        let mut inventory = divvy_gpu_sim::SimNode::parse("l4x1").unwrap().inventory();
        inventory.gpus.clear();
        inventory
    }

    #[test]
    fn a_right_outlasts_its_rule_while_something_allocated_under_it_is_held() {
        let rules = |modes: Modes| Rules::from([(gpu(1), GpuRules { modes, ..GpuRules::default() })]);
        let free = Still::default();
        let given = rights_of(&rules(Modes::everything()), &Rights::default(), &free, &nothing());
        assert_eq!(given, Rights { toggle_mig: [gpu(1)].into(), ..Rights::default() });
        let held = still(&[(1, "gpu-0")]);
        assert_eq!(rights_of(&rules(Modes::AsIs), &given, &held, &nothing()), given);
        let unsure = Still { unsure: true, ..Still::default() };
        assert_eq!(rights_of(&rules(Modes::AsIs), &given, &unsure, &nothing()), given);
        assert_eq!(rights_of(&rules(Modes::AsIs), &given, &free, &nothing()), Rights::default());
        let fixed = GpuRules { instances: Instances::Static, ..GpuRules::default() };
        let fixed = rights_of(&Rules::from([(gpu(2), fixed)]), &Rights::default(), &free, &nothing());
        assert_eq!(fixed, Rights { static_gpus: [gpu(2)].into(), ..Rights::default() });
    }

    #[test]
    fn partitions_that_were_given_out_as_ours_are_made_on_a_gpu_that_has_become_static_and_no_others() {
        let fixed = GpuRules { instances: Instances::Static, ..GpuRules::default() };
        let rules = Rules::from([(gpu(1), fixed)]);
        let (given, other) = ("gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1");
        let becomes = rights_of(&rules, &Rights::default(), &still(&[(1, given), (1, other)]), &nothing());
        assert_eq!(becomes.on_demand.len(), 2);
        let held = rights_of(&rules, &becomes, &still(&[(1, given)]), &nothing());
        assert_eq!(held.on_demand, [given.parse().unwrap()].into());
        // What somebody has removed from a static GPU is not made anew.
        let removed = rights_of(&rules, &held, &still(&[(1, other)]), &nothing());
        assert_eq!(removed.on_demand, BTreeSet::new());
    }

    #[test]
    fn what_others_had_made_is_remembered_after_the_rule_as_long_as_it_lives() {
        let sim = divvy_gpu_sim::SimNode::parse("h100x1").unwrap();
        let uuid = sim.uuids()[0].clone();
        drop(sim.edit(|e| e.set_mig_mode(&uuid, true)));
        let first = sim.make_foreign_instance(&uuid, GpuInstanceProfileId(9), 4).unwrap();
        let fixed = GpuRules { instances: Instances::Static, ..GpuRules::default() };
        let rules = Rules::from([(uuid.clone(), fixed)]);
        let free = Still::default();
        let fixed = rights_of(&rules, &Rights::default(), &free, &sim.inventory());
        let known = BTreeMap::from([(uuid.clone(), BTreeSet::from([first.uuid.clone()]))]);
        assert_eq!(fixed.static_instances, known);
        sim.make_foreign_instance(&uuid, GpuInstanceProfileId(19), 0).unwrap();
        let later = rights_of(&Rules::new(), &fixed, &free, &sim.inventory());
        assert_eq!(later.static_instances, known, "and nothing that came after");
        assert_eq!(rights_of(&Rules::new(), &later, &free, &nothing()).static_instances, known, "lost");
        sim.edit(|e| {
            e.destroy_compute_instance(&uuid, first.gpu_instance, first.id).unwrap();
            e.destroy_gpu_instance(&uuid, first.gpu_instance).unwrap();
        });
        let gone = rights_of(&Rules::new(), &later, &free, &sim.inventory());
        assert_eq!(gone.static_instances, BTreeMap::new());
    }

    #[test]
    fn rights_are_read_as_they_were_saved_and_a_broken_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = RightsFile::new(dir.path());
        assert_eq!(file.load(), None);
        let rights = Rights {
            toggle_mig: [gpu(1)].into(),
            static_gpus: [gpu(2)].into(),
            static_instances: [(gpu(2), ["MIG-1".parse().unwrap()].into())].into(),
            on_demand: ["gpu-0".parse().unwrap()].into(),
        };
        file.save(&rights).unwrap();
        assert_eq!(file.load(), Some(rights));
        // As an earlier version has saved them.
        fs_err::write(&file.0, r#"{"version":1,"toggleMig":[],"staticGpus":[]}"#).unwrap();
        assert_eq!(file.load(), Some(Rights::default()));
        fs_err::write(&file.0, "{").unwrap();
        assert_eq!(file.load(), None);
    }
}
