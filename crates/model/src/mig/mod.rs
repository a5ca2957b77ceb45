//! MIG: what a GPU can be cut into, and what it is cut into now.
//!
//! Three things that are easily taken for each other have three types: a [`Partition`] is a
//! possibility (a profile at a placement, there whether or not anything lives in it); a
//! [`GpuInstance`] with its [`ComputeInstance`] lives on the hardware, with ids and a UUID that are
//! new at every creation; a [`PartitionName`] is what is published.
//!
//! Nothing here knows a board: profiles and placements come from the driver.

mod capabilities;
mod device;
mod instance;
mod name;
mod profile;

pub use capabilities::MigCapabilities;
pub use device::{ParsePartitionNameError, PartitionName};
pub use instance::{ComputeInstance, ComputeInstanceId, GpuInstance, GpuInstanceId, Partition};
pub(crate) use name::number;
pub use name::{ParseProfileNameError, ProfileName};
pub use profile::{
    ComputeInstanceProfile, ComputeInstanceProfileId, ComputeInstanceProfileIndex, Engines,
    GpuInstanceProfile, GpuInstanceProfileId, GpuInstanceProfileIndex, Placement, ProfileVariant,
};
