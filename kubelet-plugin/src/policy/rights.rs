//! What the rules let prepare do to single GPUs, kept in a file: a plugin that restarts is asked to prepare before it
//! has read a policy, and what was allocated under an earlier policy is served under the next.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use divvy_carve::{Instances, Modes, Rules};
use divvy_claims::Rights;
use divvy_model::GpuUuid;
use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    version: u32,
    toggle_mig: BTreeSet<GpuUuid>,
    static_gpus: BTreeSet<GpuUuid>,
}

/// The rights that rules give. `still` says of which GPUs devices are published, or may be held, that are not offered any
/// more: whoever has one may need what was allowed `before`.
pub(crate) fn rights_of(rules: &Rules, before: &Rights, still: impl Fn(&GpuUuid) -> bool) -> Rights {
    let of = |fits: &dyn Fn(&divvy_carve::GpuRules) -> bool| -> BTreeSet<GpuUuid> {
        rules.iter().filter(|(_, rules)| fits(rules)).map(|(gpu, _)| gpu.clone()).collect()
    };
    let mut toggle_mig = of(&|rules| matches!(rules.modes, Modes::Only(_)));
    toggle_mig.extend(before.toggle_mig.iter().filter(|gpu| still(gpu)).cloned());
    Rights { toggle_mig, static_gpus: of(&|rules| rules.instances == Instances::Static) }
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
                Ok(Stored { version: VERSION, toggle_mig, static_gpus }) => {
                    return Some(Rights { toggle_mig, static_gpus });
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
        let Rights { toggle_mig, static_gpus } = rights.clone();
        super::store::replace(&self.0, &Stored { version: VERSION, toggle_mig, static_gpus })
    }
}

#[cfg(test)]
mod tests {
    use divvy_carve::GpuRules;

    use super::*;

    fn gpu(n: u32) -> GpuUuid {
        format!("GPU-12345678-1234-1234-1234-{n:012}").parse().unwrap()
    }

    #[test]
    fn a_right_outlasts_its_rule_while_something_allocated_under_it_is_held() {
        let rules = |modes: Modes| Rules::from([(gpu(1), GpuRules { modes, ..GpuRules::default() })]);
        let given = rights_of(&rules(Modes::everything()), &Rights::default(), |_| false);
        assert_eq!(given, Rights { toggle_mig: [gpu(1)].into(), static_gpus: BTreeSet::new() });
        assert_eq!(rights_of(&rules(Modes::AsIs), &given, |_| true), given);
        assert_eq!(rights_of(&rules(Modes::AsIs), &given, |_| false), Rights::default());
        let fixed = GpuRules { instances: Instances::Static, ..GpuRules::default() };
        let fixed = rights_of(&Rules::from([(gpu(2), fixed)]), &Rights::default(), |_| false);
        assert_eq!(fixed, Rights { toggle_mig: BTreeSet::new(), static_gpus: [gpu(2)].into() });
    }

    #[test]
    fn rights_are_read_as_they_were_saved_and_a_broken_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = RightsFile::new(dir.path());
        assert_eq!(file.load(), None);
        let rights = Rights { toggle_mig: [gpu(1)].into(), static_gpus: [gpu(2)].into() };
        file.save(&rights).unwrap();
        assert_eq!(file.load(), Some(rights));
        fs_err::write(&file.0, "{").unwrap();
        assert_eq!(file.load(), None);
    }
}
