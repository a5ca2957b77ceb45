//! Pure: inventory and rules in, the pool of devices to publish out, every API limit checked.
//!
//! The node plugin calls [`carve`] whenever the inventory, the health, the holds or the server's features change,
//! and hands the [`Pool`] to the publisher (`divvy-controller`), the only place that turns it into ResourceSlices.
//! `divvy demo` and `divvy inventory` call it too. No clock, files, async or Kubernetes client.
//!
//! [`carve_partitions`] publishes each GPU as everything that its [`GpuRules`] allow: as a whole, in MIG partitions, in
//! time-sliced shares, and beside them for admins; all of them draw on one set of counters, so that the first claim
//! decides what the GPU becomes. [`carve`] knows whole GPUs only.

mod admin;
mod carve;
mod counters;
mod features;
mod held;
mod layout;
mod lean;
mod leave;
mod modes;
mod note;
mod partition;
mod policy;
mod pool;
mod rules;
mod settle;
mod share;
mod validate;
mod version;
mod whole;

pub use carve::{Carved, Input, carve, carve_partitions, pool_name};
pub use features::{Feature, OneMode, ServerFeatures};
pub use leave::taint_leaving;
pub use note::Note;
pub use partition::Partitioning;
pub use policy::{NodeFacts, PolicyProblem, Resolved, RuleRef, resolve};
pub use pool::{
    Allowed, Amount, AttributeValue, Capacity, CounterSet, CounterUse, Device, Pool, RequestPolicy, Slice,
    Taint, TaintEffect,
};
pub use rules::{GpuRules, Instances, ModeLock, Modes, OfferedMode, PlacementOrder, Rules, ShareRules};
pub use validate::{Limit, LimitError, validate};
pub use version::KubeVersion;
