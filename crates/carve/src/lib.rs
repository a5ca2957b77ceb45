//! Pure: inventory and rules in, the pool of devices to publish out, every API limit checked.
//!
//! The node plugin calls [`carve`] whenever the inventory, the health, the holds or the server's features change,
//! and hands the [`Pool`] to the publisher (`divvy-controller`), the only place that turns it into ResourceSlices.
//! `divvy demo` and `divvy inventory` call it too. No clock, files, async or Kubernetes client.
//!
//! [`carve`] gives every GPU one alternative, the whole GPU; [`carve_partitions`] adds what MIG can cut it into. The
//! types have room for shares: `allow_multiple` and [`RequestPolicy`].

mod carve;
mod counters;
mod features;
mod layout;
mod note;
mod partition;
mod policy;
mod pool;
mod rules;
mod validate;
mod whole;

pub use carve::{Carved, Input, carve, pool_name};
pub use features::{Feature, KubeVersion, ServerFeatures};
pub use note::Note;
pub use partition::{Partitioning, carve_partitions};
pub use policy::{NodeFacts, PolicyProblem, Resolved, RuleRef, resolve};
pub use pool::{
    Allowed, Amount, AttributeValue, Capacity, CounterSet, CounterUse, Device, Pool, RequestPolicy, Slice,
    Taint, TaintEffect,
};
pub use rules::{GpuRules, Instances, ModeLock, Modes, OfferedMode, PlacementOrder, Rules, ShareRules};
pub use validate::{Limit, LimitError, validate};
