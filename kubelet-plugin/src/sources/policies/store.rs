//! The last readable versions of the policies, in a file: a node that restarts while a policy is bad or the API server
//! is away goes on as before.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use divvy_api::policy::GpuPolicy;
use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    version: u32,
    policies: Vec<GpuPolicy>,
}

/// The file.
#[derive(Debug)]
pub(super) struct Store(PathBuf);

impl Store {
    pub(super) fn new(plugin_dir: &Path) -> Self {
        Self(plugin_dir.join("policies.json"))
    }

    /// What was saved last; nothing, and why in the log, if that cannot be read. The API has the truth.
    pub(super) fn load(&self) -> Vec<GpuPolicy> {
        let problem = match fs_err::read(&self.0) {
            Ok(bytes) => match serde_json::from_slice::<Stored>(&bytes) {
                Ok(Stored { version: VERSION, policies }) => return policies,
                Ok(Stored { version, .. }) => {
                    format!("its format is version {version}, this plugin reads {VERSION}")
                }
                Err(error) => error.to_string(),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => error.to_string(),
        };
        tracing::warn!(file = %self.0.display(), problem, "failed to read the stored policies");
        Vec::new()
    }

    /// Replaces what was saved.
    pub(super) fn save(&self, policies: &[GpuPolicy]) -> io::Result<()> {
        let stored = Stored { version: VERSION, policies: policies.to_vec() };
        replace(&self.0, &stored)
    }
}

/// Replaces a file as a whole; on disk when this returns.
pub(crate) fn replace(file: &Path, content: &impl Serialize) -> io::Result<()> {
    // Two instances of a rolling update may save at once, each as process 1 of its container.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let temporary = file.with_extension(format!("json.{}.{}", std::process::id(), now.as_nanos()));
    let write = || {
        fs_err::write(&temporary, serde_json::to_vec(content)?)?;
        fs_err::File::open(&temporary)?.sync_all()?;
        fs_err::rename(&temporary, file)
    };
    write().inspect_err(|_| drop(fs_err::remove_file(&temporary)))?;
    file.parent().map_or(Ok(()), |folder| fs_err::File::open(folder)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_as_they_were_saved_and_a_broken_or_newer_file_is_no_policies() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        assert_eq!(store.load(), []);
        let policy = GpuPolicy {
            name: "a".to_owned(),
            uid: Some("1".to_owned()),
            generation: Some(2),
            spec: serde_json::from_str(r#"{"rules":[{"modes":["Whole"],"mig":null}]}"#).unwrap(),
        };
        store.save(std::slice::from_ref(&policy)).unwrap();
        assert_eq!(store.load(), [policy]);
        for broken in ["{", r#"{"version":2,"policies":[]}"#] {
            fs_err::write(&store.0, broken).unwrap();
            assert_eq!(store.load(), []);
        }
    }
}
