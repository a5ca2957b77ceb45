//! Intervals and time limits.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// Intervals and limits. The defaults are what production uses; tests shorten them.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Time limit of one prepare or unprepare in all. The kubelet gives up after 45 s, and a
    /// failed prepare costs the pod 60 to 90 s, so that anything transient is retried up to here.
    pub call: Duration,
    /// Time limit for the API server to begin an answer.
    pub answer: Duration,
    /// Interval at which the list of GPUs is asked for.
    pub list: Duration,
    /// Interval at which all facts about GPUs are read again.
    pub refresh: Duration,
    /// Interval at which neighbours are looked for: devices that others gave to pods, and processes
    /// that no claim accounts for.
    pub neighbours: Duration,
    /// Interval at which the utilisation of GPUs that claims hold is read.
    pub usage: Duration,
    /// The same for their memory and processes: those calls hold up others.
    pub usage_lists: Duration,
    /// Interval at which it is confirmed that the pods of a claim are to be evicted.
    pub usage_confirm: Duration,
    /// Interval at which other drivers' devices and allocations are asked for; at once when a pod
    /// holds one that is not known.
    pub neighbour_drivers: Duration,
    /// Interval at which all claims of the cluster are asked for where another driver publishes one
    /// of our GPUs.
    pub neighbour_claims: Duration,
    /// Time for which a driver may be away before an Event on the node reports it: after a boot it
    /// may take a while to load.
    pub driver_away: Duration,
    /// Longest pause between attempts to reach a driver that is not there.
    pub driver_retry: Duration,
    /// Interval at which caps of memory are looked after.
    pub caps: Duration,
    /// Interval of health polls.
    pub health: Duration,
    /// The same while one is not well.
    pub health_busy: Duration,
    /// Interval at which records are compared with the API, the kubelet and the GPUs.
    pub reconcile: Duration,
    /// The same while something is left to finish (a lingering claim, an orphan in its grace
    /// period).
    pub reconcile_busy: Duration,
    /// Interval at which a withdrawn device that is still held is looked for in the API.
    pub withdrawn: Duration,
    /// Time for which a device that is not offered any more is tainted before the API is asked who
    /// holds it: a write of the scheduler, which may have chosen the device before it saw the
    /// taint, must have arrived by then.
    pub leave: Duration,
    /// Pause between the loss of a CDI file and its restoration: the plugin removes files itself.
    pub cdi_settle: Duration,
    /// Interval at which the CDI folder is looked at even if nothing was reported.
    pub cdi_check: Duration,
    /// Interval at which another instance's wish to publish is looked for.
    pub publisher_poll: Duration,
    /// Interval at which NVIDIA's plugin is looked for, in whose place divvy stands.
    pub nvidia_plugin: Duration,
    /// Interval at which MPS servers are looked for that have died under their claims, and at which
    /// the supervisor is looked for.
    pub mps: Duration,
    /// Time without service after which an MPS server counts as wedged: one that waits for its
    /// clients to end after a fault serves again by itself once they have.
    pub mps_wedged: Duration,
    /// Time limits of the executor.
    pub executor: divvy_executor::Timing,
    /// Time for which policies may stay unknown at the start before the node goes on with what it
    /// remembers of them.
    pub policy_wait: Duration,
    /// Interval at which a definition of policies that is not there, or a right to them that is
    /// missing, is asked for again.
    pub policy_retry: Duration,
    /// Least time between two writes of the node's GpuNode.
    pub gpu_node: Duration,
    /// Interval at which the GpuNode is looked for, which may have been deleted.
    pub gpu_node_look: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(40),
            answer: divvy_controller::ANSWER,
            list: Duration::from_secs(5),
            refresh: Duration::from_mins(1),
            neighbours: Duration::from_secs(15),
            usage: Duration::from_secs(5),
            usage_lists: Duration::from_secs(15),
            usage_confirm: Duration::from_mins(5),
            neighbour_drivers: Duration::from_mins(10),
            neighbour_claims: Duration::from_hours(1),
            driver_away: Duration::from_mins(1),
            driver_retry: Duration::from_secs(5),
            caps: Duration::from_secs(10),
            health: Duration::from_secs(30),
            health_busy: Duration::from_secs(5),
            reconcile: Duration::from_mins(10),
            reconcile_busy: Duration::from_secs(5),
            withdrawn: Duration::from_secs(30),
            leave: Duration::from_mins(1),
            cdi_settle: Duration::from_secs(1),
            cdi_check: Duration::from_mins(5),
            publisher_poll: Duration::from_secs(2),
            nvidia_plugin: Duration::from_secs(2),
            mps: Duration::from_secs(10),
            mps_wedged: Duration::from_secs(30),
            executor: divvy_executor::Timing::default(),
            gpu_node: Duration::from_secs(5),
            gpu_node_look: Duration::from_secs(30),
            policy_wait: crate::sources::policies::WAIT,
            policy_retry: crate::sources::policies::RETRY,
        }
    }
}

impl Timing {
    /// A policy changes for all nodes at once, and each then asks who holds what it withdraws: they
    /// take turns.
    pub(super) fn of_node(name: &str) -> Self {
        let timing = Self::default();
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        // Up to half of the time more, the same at each start of a node.
        let turn = timing.leave / 2000 * u32::try_from(hasher.finish() % 1000).unwrap_or(0);
        Self {
            leave: timing.leave + turn,
            ..timing
        }
    }
}
