//! What the version before kept of its policies for prepares (`rights.json`), so that an update carries on: which GPUs may
//! change their MIG mode. Since then each GPU's own file says so.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use divvy_executor::Executor;
use divvy_model::{GpuUuid, Grant};
use serde::Deserialize;

const FILE: &str = "rights.json";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Earlier {
    version: u32,
    toggle_mig: BTreeSet<GpuUuid>,
    static_gpus: BTreeSet<GpuUuid>,
}

/// Grants what the version before had written down, and removes its file. Should that version run again, it makes it anew.
pub(crate) fn take_over(plugin_dir: &Path, executor: &Executor) {
    let file = plugin_dir.join(FILE);
    let problem = match fs_err::read(&file).map(|bytes| serde_json::from_slice::<Earlier>(&bytes)) {
        Ok(Ok(Earlier { version: 1, toggle_mig, static_gpus })) => {
            let grant = Grant { may_change_mode: Some(true), share_time_slice: None };
            let may: BTreeMap<_, _> =
                toggle_mig.difference(&static_gpus).map(|gpu| (gpu.clone(), grant)).collect();
            match executor.grant(&may) {
                Ok(()) => None,
                Err(error) => Some(crate::chain(&error)),
            }
        }
        Ok(Ok(Earlier { version, .. })) => {
            Some(format!("its format is version {version}, this plugin reads 1"))
        }
        Ok(Err(error)) => Some(error.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => Some(error.to_string()),
    };
    if let Some(problem) = problem {
        tracing::warn!(file = %file.display(), problem, "failed to read what the policies allowed last");
    }
    drop(fs_err::remove_file(&file));
}
