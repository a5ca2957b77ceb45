//! Use of GPUs by claims and pods.
//!
//! [`attribute`] takes what was read of a GPU, which pods its processes belong to and which claims
//! hold it, and says what each claim and pod uses, and what belongs to none. [`Watch`] follows that
//! over time: which claims are over their grant, which are idle, and whose pods are to be evicted.
//! A figure that is not known is an [`Unknown`] with its reason, never 0.
//!
//! Pure: no clock, files, async or driver.

mod attribute;
mod cgroup;
mod due;
mod groups;
mod mean;
mod pace;
mod reading;
mod samples;
mod time;
mod watch;
mod words;

pub use attribute::{
    DeviceUsage, GpuUsage, Measured, PodUsage, Source, attribute, pod_utilization,
};
pub use cgroup::{pod_of_cgroup, pods_of_cgroup};
pub use due::{Due, UsagePolicy};
pub use groups::Group;
pub use mean::Mean;
pub use pace::Pace;
pub use reading::{Figure, GpuReading, Granted, Holding, PartReading, Unknown};
pub use samples::computed;
pub use time::{Amounts, HeldTime, HoldKey, Ledger, Moment, Series, Sums, WHOLE};
pub use watch::{Change, Verdicts, Watch, margin};
pub use words::Said;

#[cfg(test)]
mod tests;
