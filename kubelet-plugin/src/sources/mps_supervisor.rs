//! Finds out whether the node's MPS supervisor answers. It is in a pod of its own that an upgrade
//! of the chart does not replace: after a change of the driver's name it still has the folder of
//! the name before.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::nvidia_plugin::{Seen, see};
use crate::node::facts::{Facts, Report, SupervisorAway};

/// Looks in a row that find none before it counts as away: its pod is restarted in less.
const PATIENCE: u32 = 3;
/// Name of its socket in its folder.
pub(crate) const SOCKET: &str = "supervisor.sock";
/// Folders of other drivers that are looked at: there is seldom more than one.
const OTHERS: usize = 16;

/// The task that looks.
pub(crate) struct SupervisorWatch {
    /// The supervisor's folder; `None` where MPS is switched off, so that nothing is looked for.
    pub(crate) folder: Option<PathBuf>,
    pub(crate) every: Duration,
    pub(crate) facts: Facts,
}

impl SupervisorWatch {
    /// Looks at intervals until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let Some(folder) = self.folder else {
            // A task that ends would end the plugin.
            return stop.cancelled().await;
        };
        let (mut missed, mut known) = (0_u32, None);
        loop {
            missed = if listens(&folder).await {
                0
            } else {
                missed.saturating_add(1)
            };
            let now = if missed >= PATIENCE {
                Some(SupervisorAway {
                    socket: folder.join(SOCKET).display().to_string(),
                    other: other_name(&folder).await,
                })
            } else {
                None
            };
            if now != known {
                known.clone_from(&now);
                if self.facts.send(Report::SupervisorAway(now).into()).is_err() {
                    return;
                }
            }
            tokio::select! {
                () = tokio::time::sleep(self.every) => {}
                () = stop.cancelled() => return,
            }
        }
    }
}

/// Returns whether a supervisor with this folder listens.
async fn listens(folder: &Path) -> bool {
    see(&folder.join(SOCKET)).await == Seen::Listens
}

/// Returns the name of another driver on this node whose supervisor listens. The chart gives each
/// name a folder of its own: `/run/divvy/<name>/mps`.
async fn other_name(folder: &Path) -> Option<String> {
    let (of_name, last) = (folder.parent()?, folder.file_name()?);
    let own = of_name.file_name()?;
    // Folders that cannot be listed say nothing about another name.
    let all = fs_err::read_dir(of_name.parent()?).ok()?.flatten();
    let mut others: Vec<_> = all.map(|entry| entry.file_name()).collect();
    others.retain(|name| name != own);
    others.sort();
    for name in others.into_iter().take(OTHERS) {
        if listens(&of_name.with_file_name(&name).join(last)).await {
            return name.into_string().ok();
        }
    }
    None
}
