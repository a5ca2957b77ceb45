//! Pure: the forms in which GPUs are published, a folder for each.

mod admin;
mod builder;
mod device;
mod form;
mod mps;
mod rules;
mod share;

pub mod partition;
pub mod whole;

pub use builder::{Builder, LeftOut};
pub use device::{
    Allowed, Amount, Capacity, CounterUse, Device, MAX_INTEGER, MAX_STRING, RequestPolicy, Taint,
    TaintEffect,
};
pub use divvy_model::AttributeValue;
pub use form::{Definition, FORMS, Said, Source, definition};
pub use rules::{
    GpuRules, Instances, ModeLock, Modes, PlacementOrder, Rules, ShareRules, UsageRules,
};
