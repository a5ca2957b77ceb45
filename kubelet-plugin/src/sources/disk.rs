//! Finds out when the plugin's folder takes files again, after claims could not be prepared because
//! it took none. Nothing is written while nothing has failed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::node::facts::{Facts, Report};

/// The task that tries.
pub(crate) struct DiskSource {
    pub(crate) folder: PathBuf,
    /// Notified when a record could not be written.
    pub(crate) failed: Arc<Notify>,
    /// The pause between two attempts.
    pub(crate) retry: Duration,
    pub(crate) facts: Facts,
}

impl DiskSource {
    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut is_failing = false;
        loop {
            tokio::select! {
                () = self.failed.notified() => {}
                () = tokio::time::sleep(self.retry), if is_failing => {}
                () = stop.cancelled() => return,
            }
            // Try with a file of one's own: records are written only when a claim needs one.
            let folder = self.folder.clone();
            let tried = tokio::task::spawn_blocking(move || write_something(&folder)).await;
            let why = tried.unwrap_or_else(|died| Some(died.to_string()));
            is_failing = why.is_some();
            if self.facts.send(Report::Unwritable(why).into()).is_err() {
                return;
            }
        }
    }
}

/// Writes and removes a file as large as a record; returns the error, if there is one.
fn write_something(folder: &Path) -> Option<String> {
    let file = folder.join(format!(".writable.{}", std::process::id()));
    let written = fs_err::write(&file, [0; 4096])
        .and_then(|()| fs_err::File::open(&file)?.sync_all())
        .err();
    // A file that was not made is not there.
    drop(fs_err::remove_file(&file));
    written.map(|error| crate::chain(&error))
}
