//! Pure: the forms in which GPUs are published, a folder for each.

mod builder;
mod device;
mod rules;

pub mod admin;
pub mod mps;
pub mod partition;
pub mod share;
pub mod whole;

pub use builder::{Builder, LeftOut};
pub use device::{
    Allowed, Amount, Capacity, CounterUse, Device, MAX_INTEGER, MAX_STRING, RequestPolicy, Taint,
    TaintEffect,
};
pub use divvy_model::AttributeValue;
pub use rules::{
    GpuRules, Instances, ModeLock, Modes, PlacementOrder, Rules, ShareRules, UsageRules,
};
