//! The vocabulary every other crate shares: identifiers, facts about GPUs, modes and holds, and the
//! [`GpuDriver`] trait that the real library, the simulator and the mock implement.
//!
//! Pure: values and functions of values. No clock, files, async or Kubernetes client. Its users:
//! `carve` turns an [`Inventory`] into devices, `claims` decides over [`Hold`]s and [`Mode`]s,
//! `nvml` and `gpu-sim` implement [`GpuDriver`], `host` fills [`HostTopology`].

mod attribute;
mod burst;
mod chain;
mod device;
mod driver;
mod driver_error;
mod enforcement;
mod gpu;
mod hash;
pub mod health;
mod hold;
mod hook;
mod ids;
mod inventory;
mod lock;
mod memory_limit;
pub mod mig;
mod mode;
mod mps;
mod offer;
mod ordinals;
mod peculiarities;
mod quantity;
mod sharing;
mod target;
mod usage;
mod version;

pub use attribute::AttributeValue;
pub use burst::{Burst, BurstError};
pub use chain::{Chain, chain};
pub use device::{DeviceKind, NamedTarget, ParseDeviceNameError};
pub use driver::{CallMarks, GpuDriver, MigActivation};
pub use driver_error::{GpuError, GpuErrorCode, GpuOp};
pub use enforcement::{Enforcement, Limits};
pub use gpu::{
    Architecture, Brand, ComputeCapability, ComputeMode, CudaVersion, FabricFacts, GpuFacts,
    GpuProcess, MigMode, NvLinkPeer, SystemFacts,
};
pub use hash::fnv1a;
pub use hold::Hold;
pub use hook::HookFailure;
pub use ids::{BootId, ClaimUid, DeviceName, GpuUuid, IdError, MigUuid, PciAddress};
pub use inventory::{Gpu, GpuMig, GpuProblem, HostTopology, Inventory};
pub use lock::lock;
pub use memory_limit::{MemoryCaps, MemoryLimit};
pub use mode::{CapsPromise, Grant, Mode, TimeSlice};
pub use mps::{
    MpsAbility, MpsFault, MpsHolder, MpsNamespace, MpsNamespaceName, MpsPriority, MpsProtocol,
    MpsServer, NotOurNamespace,
};
pub use offer::Offer;
pub use ordinals::Ordinals;
pub use peculiarities::peculiarities;
pub use quantity::{Format, Quantity, QuantityError};
pub use sharing::{Form, ShareUnit, Sharing};
pub use target::{GpuTarget, ParseGpuTargetError, ParsePlaceError, Place, Target, TargetKind};
pub use usage::{GpuMemory, MigDevice, ProcessSample};
pub use version::normalise_version;
