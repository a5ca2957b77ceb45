//! Pure: what a node offers. Facts in, one at a time; the pool to publish, the taints, what is
//! withdrawn, reported and asked out ([`step`]).
//!
//! The node plugin calls [`step`] with everything that its sources observe, and hands the [`Pool`]
//! to the publisher (`divvy-controller`), the only place that turns it into ResourceSlices. No
//! clock, files, async or Kubernetes client.
//!
//! [`carve`] is the part that makes a pool: each GPU as everything that its [`GpuRules`] allow, as
//! a whole, in MIG partitions, in time-sliced shares, and beside them for admins; all of them draw
//! on one set of counters, so that the first claim decides what the GPU becomes. `divvy demo` and
//! `divvy inventory` call it too.

mod asking;
mod attributes;
mod carve;
mod conflicts;
mod counters;
mod features;
mod finding;
mod granting;
mod health;
mod held;
mod layout;
mod lean;
mod meter;
mod modes;
mod neighbour;
mod partition;
mod policy;
mod pool;
mod readable;
mod settle;
mod step;
mod taints;
mod validate;
mod version;
mod withdrawal;
mod world;

pub use attributes::attributes;
pub use carve::{Carved, Input, carve, pool_name};
pub use divvy_forms::{
    Allowed, Amount, Capacity, CounterUse, Device, GpuRules, Instances, ModeLock, Modes,
    PlacementOrder, RequestPolicy, Rules, ShareRules, Taint, TaintEffect, UsageRules,
};
pub use divvy_model::AttributeValue;
pub use features::{Feature, NoPartitions, OneMode, ServerFeatures};
pub use finding::{Event, Finding, News, Object, Severity, Shown, news};
pub use health::{HealthView, Sick, Unmonitored, sentence, taint};
pub use neighbour::{Use, Uses};
pub use policy::{NodeFacts, PolicyProblem, Resolved, RuleRef, fits_node, is_like, resolve};
pub use pool::{CounterSet, Pool, Slice};
pub use step::{Outputs, step};
pub use validate::{Limit, LimitError, validate};
pub use version::KubeVersion;
pub use world::{
    Answer, Ask, Claimant, Fact, Held, ModeConflict, Published, Records, Settings, World,
};
