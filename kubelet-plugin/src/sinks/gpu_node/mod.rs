//! This node's `GpuNode`: what its GPUs are now, who holds them, what is wrong. Worked out with
//! each step of the brain, written by a task of its own, at a limited rate; nothing waits for it.

mod report;
mod since;
mod troubles;
mod writer;

pub(crate) use report::{last_report, report};
pub(crate) use writer::{Target, Writer};
