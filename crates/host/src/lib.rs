//! The host as files: what NVML does not say about a node.
//!
//! Everything is read below a [`HostRoot`], so tests, the demo and a plugin in a container that
//! sees the host elsewhere use the same code. Nothing here changes the host, except
//! [`install_hook`], [`make_nodes`], [`load_module`] and [`Smi::set_time_slice`].
//!
//! Callers are the inventory ([`topology`]), the node plugin's start ([`find_driver`],
//! [`boot_id`], [`nvidia_module`]), and the executor, which turns [`driver_edits`] and
//! [`gpu_edits`] into a claim's CDI file. [`fixture`] builds a host that does not exist, for tests
//! and the demo.
//!
//! Two views of one path: *seen* is how this process opens a file, *host* is what a CDI file must
//! say, because the container runtime reads it in the host's namespace. [`DriverRoot`] knows both.

mod driver;
mod edits;
mod elf;
mod files;
pub mod fixture;
mod install;
mod kernel;
mod make_nodes;
mod mig;
mod modules;
mod nodes;
mod root;
mod smi;
mod topology;

pub use driver::{
    DEFAULT_DRIVER_ROOTS, Driver, DriverAt, DriverRoot, DriverRootError, RootReason, find_driver,
    find_driver_at,
};
pub use edits::{HookProgram, LibraryDelivery, cap, driver_edits, gpu_edits, partition_edits};
pub use elf::{Elf, ElfError};
pub use files::{
    BINARY_DIR, DriverFile, DriverFiles, DriverFilesError, LIBRARY_DIR, Library, Symlink,
    driver_files,
};
pub use install::{InstallError, install_hook};
pub use kernel::{HostFileError, NvidiaModule, boot_id, char_majors, nvidia_module, nvidia_params};
pub use make_nodes::make_nodes;
pub use mig::{MigNodes, capability_minor, mig_nodes};
pub use modules::load_module;
pub use nodes::{
    ControlNodes, DeviceNode, DeviceNodes, GpuNodes, MissingNode, NodeError, NodeInfo,
    control_nodes, extra_nodes, gpu_nodes,
};
pub use root::HostRoot;
pub use smi::{Smi, SmiError, become_other, start_program, wait_while};
pub use topology::{DrmNode, drm_nodes, topology};

#[cfg(test)]
mod tests;
