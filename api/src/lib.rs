//! What users write and read: the opaque device configs in claims and classes, decoded strictly, and every name
//! that appears in the Kubernetes API ([`names`]), in one place.
//!
//! Pure: text or JSON in, a config or an error with a hint out. Called by `claims` (the config entries of an
//! allocation), by `carve`, `controller` and the node plugin (names), and by the command line tool.

mod config;
mod error;
mod fields;
pub mod names;
mod tree;

pub use config::{DeviceConfig, GpuConfig, KINDS, MigConfig, ShareConfig, decode, decode_slice};
pub use error::ConfigError;
