//! The vocabulary every other crate shares: identifiers, facts about GPUs, modes and holds, and the
//! [`GpuDriver`] trait that the real library, the simulator and the mock implement.
//!
//! Pure: values and functions of values. No clock, files, async or Kubernetes client. Who uses it: `carve` turns
//! an [`Inventory`] into devices, `claims` decides over [`Hold`]s and [`Mode`]s, `nvml` and `gpu-sim` implement
//! [`GpuDriver`], `host` fills [`HostTopology`].

mod attribute;
mod device;
mod driver;
mod driver_error;
mod gpu;
pub mod health;
mod ids;
mod inventory;
pub mod mig;
mod mode;
mod ordinals;
mod peculiarities;
mod quantity;
mod usage;
mod version;

pub use attribute::AttributeValue;
pub use device::{DeviceKind, ParseDeviceNameError};
pub use driver::{CallMarks, GpuDriver, MigActivation};
pub use driver_error::{GpuError, GpuErrorCode, GpuOp};
pub use gpu::{
    Architecture, Brand, ComputeCapability, ComputeMode, CudaVersion, FabricFacts, GpuFacts, GpuProcess,
    MigMode, NvLinkPeer, SystemFacts,
};
pub use ids::{BootId, ClaimUid, DeviceName, GpuUuid, IdError, MigUuid, PciAddress};
pub use inventory::{Gpu, GpuMig, GpuProblem, HostTopology, Inventory};
pub use mode::{Grant, Hold, HoldKind, Mode, TimeSlice};
pub use ordinals::Ordinals;
pub use peculiarities::peculiarities;
pub use quantity::{Format, Quantity, QuantityError};
pub use usage::{GpuMemory, MigDevice, ProcessSample};
pub use version::normalise_version;
