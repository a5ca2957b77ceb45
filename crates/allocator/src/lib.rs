//! The scheduler's structured allocator and its CEL environment, offline and with reasons.
//!
//! Pure: values of `resource.k8s.io/v1` in, allocation results or reasons out; no client, file or
//! clock. The demo uses it as its scheduler, `divvy status` asks it what would fit where and why
//! not, and validation asks [`cel`] whether a selector compiles.
//!
//! * [`cel`]: compiles and evaluates device selectors as Kubernetes does.
//! * [`Slices`]: the published ResourceSlices, indexed by node, from which the pools of a node are
//!   gathered.
//! * [`AllocatedState`]: what existing claims hold.
//! * [`Allocator`]: the search. First fit in the scheduler's order: driver and pool name, slice
//!   name, device index; with shared counters, constraints and consumable capacity. It does **not**
//!   know derived attributes (alpha) and says so ([`AllocError::Unsupported`]) rather than ignore
//!   them.
//! * [`Explanation`]: for each request, why each device was not good enough.
//!
//! ```
//! use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Outcome, Slices};
//! # use k8s_openapi::api::{core::v1::Node, resource::v1::{DeviceClass, ResourceClaim, ResourceSlice}};
//! # fn place(slices: &[ResourceSlice], classes: &[DeviceClass], existing: &[ResourceClaim], nodes: &[Node], claim: &ResourceClaim) -> Result<(), divvy_allocator::AllocError> {
//! let allocator = Allocator::new(Features::default());
//! let (slices, allocated) = (Slices::new(slices), AllocatedState::from_claims(existing));
//! for node in nodes {
//!     let inputs = Inputs { slices: &slices, classes, allocated: &allocated, node };
//!     match allocator.allocate(&inputs, &[claim])? {
//!         Outcome::Fits(allocated) => println!("{:?}", allocated.results),
//!         Outcome::DoesNotFit(why) => println!("{why:?}"),
//!     }
//! }
//! # Ok(())
//! # }
//! ```

#![warn(missing_docs)] // a library for others, too

mod allocate;
mod allocated;
mod cel;
mod explain;
mod features;
mod nodes;
mod pools;
mod semver;

/// Checks that the API server takes a device selector, in its words: length, types, cost. A part
/// that cannot be evaluated offline is [`CelError::Offline`] and may be right.
pub fn check_selector(expression: &str) -> Result<(), CelError> {
    cel::check(expression)
}

/// Says whether a device of a driver satisfies a selector, or a part of one.
pub fn evaluate(
    expression: &str,
    driver: &str,
    device: &k8s_openapi::api::resource::v1::Device,
) -> Result<bool, CelError> {
    cel::eval(&cel::compile(expression)?, driver, device, true)
}

/// Returns what a request takes of the capacities of a device that many claims have, as the
/// scheduler rounds it. `None` if the device can never satisfy it.
pub fn consumption(
    wanted: Option<&k8s_openapi::api::resource::v1::CapacityRequirements>,
    device: &k8s_openapi::api::resource::v1::Device,
) -> Option<std::collections::BTreeMap<String, divvy_model::Quantity>> {
    let demands = allocate::demands(wanted, device, true).ok()?.ok()?;
    let named = demands
        .into_iter()
        .map(|demand| (demand.capacity.to_owned(), demand.amount));
    Some(named.collect())
}

pub use allocate::{AllocError, Allocated, Allocator, Inputs, MAX_RESULTS, Outcome, SelectorError};
pub use allocated::{AllocatedState, DeviceId, Holder};
pub use cel::CelError;
pub use explain::{ConstraintReason, DeviceReason, Explanation, Reason, RequestReason};
pub use features::Features;
pub use nodes::{NodeSelectorError, matches as selects_node};
pub use pools::Slices;
pub use semver::{ParseError as SemverParseError, Semver, SemverError};
