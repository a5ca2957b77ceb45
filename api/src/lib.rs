//! Types that users write and read: the opaque device configs in claims and classes, decoded
//! strictly, the policies of administrators ([`policy`]) with their definitions ([`crd`]), and
//! every name that appears in the Kubernetes API ([`names`]), in one place.
//!
//! Pure: text or JSON in, a config or an error with a hint out. Called by `claims` (the config
//! entries of an allocation), by `carve`, `controller` and the node plugin (names), and by the
//! command line tool.

#![warn(missing_docs)] // a library for others, too
#![allow(
    clippy::duplicated_attributes,
    reason = "columns of one type, in the attributes of CustomResource"
)]

mod config;
pub mod crd;
mod error;
mod fields;
mod limits;
mod mps;
pub mod names;
mod naming;
pub mod node;
mod nvidia;
pub mod policy;
pub mod quota;

pub use config::{ConfigKind, DEVICE_NODE, DeviceConfig, decode, decode_for, is_device_node};
pub use error::ConfigError;
pub use limits::MemoryBound;
pub use mps::{MpsLimits, MpsOptions};
