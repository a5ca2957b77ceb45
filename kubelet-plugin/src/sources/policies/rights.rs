//! What the version before kept of its policies for prepares (`rights.json`), so that an update carries on: which GPUs may
//! change their MIG mode. Since then each GPU's own file says so.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use divvy_executor::Executor;
use divvy_model::{GpuUuid, Grant};
use serde::Deserialize;

use crate::saved;

const FILE: &str = "rights.json";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Earlier {
    toggle_mig: BTreeSet<GpuUuid>,
    static_gpus: BTreeSet<GpuUuid>,
}

/// Grants what the version before had written down, and removes its file. Should that version run again, it makes it anew.
pub(crate) fn take_over(plugin_dir: &Path, executor: &Executor) {
    let file = plugin_dir.join(FILE);
    if let Some(Earlier { toggle_mig, static_gpus }) = saved::load(&file) {
        let grant = Grant { may_change_mode: Some(true), share_time_slice: None };
        let may: BTreeMap<_, _> =
            toggle_mig.difference(&static_gpus).map(|gpu| (gpu.clone(), grant)).collect();
        if let Err(error) = executor.grant(&may) {
            let error = crate::chain(&error);
            tracing::warn!(file = %file.display(), error, "failed to take over what the policies allowed last");
        }
    }
    drop(fs_err::remove_file(&file));
}
