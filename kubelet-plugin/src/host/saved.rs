//! Files in the plugin's folder with which a task goes on after a restart: JSON with a version. A
//! file that is lost or cannot be read costs only what can be observed again.

use std::io;
use std::path::Path;
use std::time::SystemTime;

use divvy_files::{Durability, Replace};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Saved<T> {
    version: u32,
    #[serde(flatten)]
    content: T,
}

/// Reads what was saved last; `None` if there is nothing, with the reason in the log if it cannot
/// be read.
pub(crate) fn load<T: DeserializeOwned>(file: &Path) -> Option<T> {
    let problem =
        match fs_err::read(file).map(|bytes| serde_json::from_slice::<Saved<Value>>(&bytes)) {
            Ok(Ok(Saved {
                version: VERSION,
                content,
            })) => match serde_json::from_value(content) {
                Ok(content) => return Some(content),
                Err(error) => error.to_string(),
            },
            Ok(Ok(Saved { version, .. })) => {
                format!("its format is version {version}, this plugin reads {VERSION}")
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => error.to_string(),
        };
    tracing::warn!(file = %file.display(), problem, "failed to read what was saved before the restart");
    None
}

/// Replaces the file as a whole; on disk when this returns.
pub(crate) fn save(file: &Path, content: &impl Serialize) -> io::Result<()> {
    // Two instances of a rolling update may save at once.
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let temporary = file.with_extension(format!("json.{}.{}", std::process::id(), now.as_nanos()));
    let bytes = serde_json::to_vec(&Saved {
        version: VERSION,
        content,
    })?;
    Replace::new(file, temporary, Durability::Synced)
        .write(&bytes)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn what_was_saved_is_read_and_a_missing_broken_or_newer_file_is_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("some.json");
        let read = || load::<BTreeMap<String, u32>>(&file);
        assert_eq!(read(), None);
        let content = BTreeMap::from([("a".to_owned(), 1)]);
        save(&file, &content).unwrap();
        assert_eq!(read(), Some(content));
        assert_eq!(
            fs_err::read_dir(dir.path()).unwrap().count(),
            1,
            "no temporary file stays"
        );
        for broken in [
            "",
            "{",
            r#"{"a":1}"#,
            r#"{"version":2,"a":1}"#,
            r#"{"version":1,"a":"x"}"#,
        ] {
            fs_err::write(&file, broken).unwrap();
            assert_eq!(read(), None, "{broken}");
        }
    }
}
