//! From the state on stdin to the container's root.

use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::HookError;
use crate::rootfs::RootFs;

/// Longer input is not from a container runtime.
const MOST_BYTES: u64 = 16 << 20;

/// Reads the state, then the bundle's `config.json`, and opens the root it names.
pub(crate) fn open_root(state: impl Read) -> Result<RootFs, HookError> {
    let mut text = Vec::new();
    state.take(MOST_BYTES).read_to_end(&mut text).map_err(HookError::State)?;
    let state: Value = serde_json::from_slice(&text).map_err(HookError::StateForm)?;
    let bundle = state.get("bundle").and_then(Value::as_str);
    let bundle = bundle.ok_or(HookError::Field { what: "the container's state", field: "bundle" })?;
    let path = Path::new(bundle).join("config.json");
    let text = fs_err::read(&path).map_err(HookError::Config)?;
    let config: Value =
        serde_json::from_slice(&text).map_err(|source| HookError::ConfigForm { path, source })?;
    let root = config.pointer("/root/path").and_then(Value::as_str);
    let root = root.ok_or(HookError::Field { what: "the container's config.json", field: "root.path" })?;
    // A relative root is relative to the bundle.
    RootFs::open(&Path::new(bundle).join(root))
}
