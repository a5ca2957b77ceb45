//! Ends of divvy's hook, the program that container runtimes call: what its exit status means.

/// Kind of a failure of the hook, which keeps a container from starting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HookFailure {
    /// The call itself.
    Call,
    /// The node plugin gave no answer about a share's memory.
    CapUnanswered,
    /// A share's memory is not capped; the node plugin knows why.
    CapRefused,
    /// The root is read-only for good.
    ReadOnlyRoot,
    /// A volume of the pod lies where the hook writes.
    VolumeInTheWay,
    /// A file of the image lies there.
    ImageInTheWay,
    /// The hook may not do it on this node.
    NoRights,
}

impl HookFailure {
    /// Returns the failure that an exit status stands for.
    pub fn of_status(status: u8) -> Self {
        match status {
            70 | 73 => Self::CapUnanswered,
            71 | 72 => Self::CapRefused,
            74 => Self::ReadOnlyRoot,
            75 => Self::VolumeInTheWay,
            76 => Self::ImageInTheWay,
            77 => Self::NoRights,
            _ => Self::Call,
        }
    }

    /// Returns its name, as the category of an Event.
    pub fn name(self) -> &'static str {
        match self {
            Self::Call => "hook-failed",
            Self::CapUnanswered => "memory-cap-unanswered",
            Self::CapRefused => "memory-not-capped",
            Self::ReadOnlyRoot => "root-read-only",
            Self::VolumeInTheWay => "volume-in-the-way",
            Self::ImageInTheWay => "image-in-the-way",
            Self::NoRights => "hook-without-rights",
        }
    }

    /// Returns what it means, and what to do.
    pub fn text(self) -> &'static str {
        match self {
            Self::Call => "see the journal of the node's container runtime",
            Self::CapUnanswered => {
                "the memory of a share is not capped: divvy's node plugin did not answer"
            }
            Self::CapRefused => "the memory of a share is not capped: see the Events of the claim",
            Self::ReadOnlyRoot => {
                "the container's root is read-only for good: set libraryDelivery=mounts"
            }
            Self::VolumeInTheWay => {
                "volumes of the pod cover the folders of the driver's names and of the loader: mount them elsewhere"
            }
            Self::ImageInTheWay => {
                "a file of the image is in the way of the loader's cache or the driver's names: repair the image"
            }
            Self::NoRights => {
                "the hook lacks rights on the node, or the kernel is older than 5.6: see the node's audit log"
            }
        }
    }
}
