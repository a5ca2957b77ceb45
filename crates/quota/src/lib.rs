//! Charges of claims for GPUs, and the claims of a namespace that its quota lets through.
//!
//! Pure: slices, claims and classes in, amounts and grants out. The cluster controller keeps quotas
//! with it, and `divvy status quota` shows by it who uses what.
//!
//! * [`Catalogue`]: the published devices, reduced to what decides about an amount.
//! * [`charge`]: the amount that a claim was given.
//! * [`price`]: the most that a claim may be given, before the scheduler has chosen.
//! * [`look`]: the sum of a namespace, and which waiting claims fit.

mod amount;
mod catalogue;
mod charge;
mod look;
mod price;
mod selector;
#[cfg(test)]
mod tests;

pub use amount::{Amount, Limits};
pub use catalogue::Catalogue;
pub use charge::{Uncharged, charge};
pub use look::{Grant, Line, Look, State, look, spec_limits};
pub use price::{Unpriced, price};
