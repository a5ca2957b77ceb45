//! Options of a cluster to bring up: its version, how much of it, its feature gates.

use crate::components::Component;
use crate::parts;

/// Options of a cluster to bring up.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its name; clusters of different names do not touch each other.
    pub name: String,
    /// The Kubernetes version, as `1.37.1`.
    pub version: String,
    /// True if it ends with the value returned and with this process; else `Cluster::down` ends it.
    pub owned: bool,
    /// Parts of it to bring up.
    pub extent: Extent,
    pub gates: Gates,
}

/// Feature gates of all its programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Gates {
    /// Gates as the version has them.
    #[default]
    Default,
    /// Gates of partitions and shares that are on, too: before 1.36 they are off by default.
    Sharing,
    /// The scheduler asks which pods an event concerns before it wakes them: alpha in 1.37.
    PreQueueingHints,
}

impl Gates {
    /// Returns the name that people use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default gates",
            Self::Sharing => "gates of sharing",
            Self::PreQueueingHints => "hints before queueing",
        }
    }

    /// The value of `--feature-gates`, if it is needed.
    pub(crate) fn flag(self) -> Option<&'static str> {
        match self {
            Self::Default => None,
            Self::PreQueueingHints => Some("--feature-gates=SchedulerPreQueueingHints=true"),
            Self::Sharing => {
                Some("--feature-gates=DRAPartitionableDevices=true,DRAConsumableCapacity=true")
            }
        }
    }
}

/// Parts of a cluster that are brought up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Extent {
    /// All of it, with a node that runs pods.
    #[default]
    Whole,
    /// Another node of a cluster that is up: see
    /// [`Cluster::second_node`](crate::Cluster::second_node).
    Node,
    /// API server and scheduler: nodes are objects without a kubelet, and no pod ever runs.
    Scheduling,
    /// The same with a scheduler that packs, as docs/packing.md configures it.
    Packing,
}

impl Extent {
    /// Returns true if no pod ever runs.
    pub(crate) fn is_scheduling(self) -> bool {
        matches!(self, Self::Scheduling | Self::Packing)
    }

    /// Returns the components that run, in the order they are started.
    pub(crate) fn components(self) -> &'static [Component] {
        match self {
            Self::Whole => &Component::ALL,
            Self::Node => &[
                Component::Containerd,
                Component::Kubelet,
                Component::KubeProxy,
            ],
            Self::Scheduling | Self::Packing => &[
                Component::Etcd,
                Component::ApiServer,
                Component::ApiProxy,
                Component::Scheduler,
            ],
        }
    }
}

impl Options {
    /// A cluster for a test: of the version set, ending with the test.
    pub fn for_test(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            version: parts::version_setting(),
            owned: true,
            extent: Extent::Whole,
            gates: Gates::Default,
        }
    }
}
