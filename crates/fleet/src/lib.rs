//! A fleet of nodes under a workload: which pods get devices, when, where, and what is left over.
//!
//! Pure. The offline allocator says whether a pod fits a node; the choice between nodes is
//! the stock scheduler's as far as it is defined ([`NOT_MODELLED`] says how far). Nodes that
//! publish the same share one world, and nodes of one kind that hold the same share every answer.
//!
//! * [`Kind`]: nodes that publish the same.
//! * [`Job`]: a pod of the workload, from a [`trace`] or a [`generator`](generate).
//! * [`advice::advise`]: what would make a waiting pod fit.
//! * [`defrag::plan`]: which pods to evict so that another fits.
//! * [`picture`]: how full each GPU is over the time of a run.
//! * [`Model`]: the fleet at a moment, for who decides between equal nodes otherwise.
//! * [`waiting`]: what a pod that waits asks for.
//! * [`simulate`]: the run. The same fleet, jobs and settings give the same [`Report`].

pub mod advice;
pub mod defrag;
pub mod generate;
pub mod pod;
pub mod request;
pub mod trace;
pub mod waiting;

mod cluster;
mod device;
mod model;
mod picture;
mod queue;
mod random;
mod reach;
mod report;
mod run;
mod score;
mod worlds;

#[cfg(test)]
mod tests;

pub use cluster::Cluster;
pub use model::{Holding, Model};
pub use picture::{Moment, Picture, node_names, picture};
pub use random::Random;
pub use report::{Form, Report, Waiting};
pub use run::{Given, Job, Nodes, Placed, Settings, Strategy, Weights, simulate};
pub use worlds::{Kind, Shape};

/// Parts of a cluster that a run leaves out, each in a sentence.
pub const NOT_MODELLED: [&str; 6] = [
    "an attempt to schedule takes no time, and a device is free at the moment at which its pod ends",
    "no preemption, no gangs: each pod is placed by itself",
    "scores are those of NodeResourcesFit, NodeResourcesBalancedAllocation and of firstAvailable in DynamicResources; \
     preferred affinity, topology spread, images and inter-pod affinity have none",
    "nodes come in the order in which they are given, without zones",
    "what nodes publish does not change: no health, no policy by ordinal while claims come and go",
    "claims are not shared between pods",
];
