//! From the state on stdin to the container's process and root.

use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::HookError;
use crate::rootfs::RootFs;

/// Bound on the state; longer input is not from a container runtime.
const MOST_BYTES: u64 = 16 << 20;

/// State of a container, which a runtime passes to its hooks on stdin.
#[derive(Debug)]
pub(crate) struct State(Value);

impl State {
    /// Reads the state.
    pub(crate) fn read(input: impl Read) -> Result<Self, HookError> {
        let mut text = Vec::new();
        input
            // A byte more than is permitted, so that a longer state is refused and not cut off.
            .take(MOST_BYTES + 1)
            .read_to_end(&mut text)
            .map_err(HookError::State)?;
        if text.len() as u64 > MOST_BYTES {
            return Err(HookError::State(std::io::Error::other(
                "longer than 16 MiB",
            )));
        }
        serde_json::from_slice(&text)
            .map(Self)
            .map_err(HookError::StateForm)
    }

    /// Returns the process that becomes the container, as the runtime counts processes.
    pub(crate) fn pid(&self) -> Result<u64, HookError> {
        let pid = self.0.get("pid").and_then(Value::as_u64);
        pid.filter(|pid| *pid > 0).ok_or(HookError::Field {
            what: "the container's state",
            field: "pid",
        })
    }

    /// Returns the container's name; empty if there is none.
    pub(crate) fn id(&self) -> &str {
        self.0.get("id").and_then(Value::as_str).unwrap_or_default()
    }

    /// Reads the bundle's `config.json`, and opens the root it names.
    pub(crate) fn container(&self) -> Result<Container, HookError> {
        let bundle = self.0.get("bundle").and_then(Value::as_str);
        let bundle = bundle.ok_or(HookError::Field {
            what: "the container's state",
            field: "bundle",
        })?;
        let path = Path::new(bundle).join("config.json");
        let text = fs_err::read(&path).map_err(HookError::Config)?;
        let config: Value = serde_json::from_slice(&text)
            .map_err(|source| HookError::ConfigForm { path, source })?;
        let root = config.pointer("/root/path").and_then(Value::as_str);
        let root = root.ok_or(HookError::Field {
            what: "the container's config.json",
            field: "root.path",
        })?;
        Ok(Container {
            // A relative root is relative to the bundle.
            root: RootFs::open(&Path::new(bundle).join(root))?,
            library_path: library_path(&config),
        })
    }
}

/// Container that is being made.
#[derive(Debug)]
pub(crate) struct Container {
    pub(crate) root: RootFs,
    /// Folders of its `LD_LIBRARY_PATH`.
    library_path: Vec<String>,
}

impl Container {
    /// Returns `true` if its programs search these folders without the loader's cache.
    pub(crate) fn searches(&self, folders: &[String]) -> bool {
        let is_named = |folder| self.library_path.iter().any(|named| named == folder);
        folders.iter().all(is_named)
    }
}

/// Returns the folders of the variable `LD_LIBRARY_PATH` of the container's first process.
fn library_path(config: &Value) -> Vec<String> {
    let env = config.pointer("/process/env").and_then(Value::as_array);
    let variables = env.into_iter().flatten().filter_map(Value::as_str);
    let mut paths = variables.filter_map(|variable| variable.strip_prefix("LD_LIBRARY_PATH="));
    let folders = paths.next_back().unwrap_or_default().split([':', ';']);
    let folders = folders.map(|folder| folder.trim_end_matches('/').to_owned());
    folders.collect()
}
