//! Sharing of a GPU by MPS: the ability of a node, and the server of a GPU.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Architecture, ClaimUid, DeviceName, GpuTarget, Target, fnv1a};

/// Protocol between a daemon and its servers, and so the commands that it takes.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "camelCase")]
pub enum MpsProtocol {
    /// A server has limits, the same for all of its clients.
    #[default]
    V2,
    /// A server has namespaces, each with limits of its own.
    V3,
}

impl MpsProtocol {
    /// First branch of the driver with protocol v3.
    const V3_DRIVER: u32 = 615;

    /// Returns the protocol for a driver of this branch.
    pub fn of_branch(branch: u32) -> Self {
        if branch >= Self::V3_DRIVER {
            Self::V3
        } else {
            Self::V2
        }
    }

    /// Returns its number.
    pub fn number(self) -> u32 {
        match self {
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }

    /// Reads a number back.
    pub fn of_number(number: u32) -> Option<Self> {
        [Self::V2, Self::V3]
            .into_iter()
            .find(|protocol| protocol.number() == number)
    }

    /// Returns the protocol for the servers of a target on a node with this one. A partition has
    /// the one of equal slots in any case: namespaces of partitions are not documented.
    #[must_use]
    pub fn of_target(self, target: Target) -> Self {
        match target {
            Target::Gpu => self,
            Target::Partition(_) => Self::V2,
        }
    }

    /// Returns the folder of sockets of a target's daemon, within the supervisor's folder. It is
    /// short for protocol v3, where namespaces are below it, and for partitions, which have a long
    /// name: a daemon fails with long paths.
    pub fn pipe(self, target: &GpuTarget) -> PathBuf {
        match (self, target.target) {
            (Self::V2, Target::Gpu) => Path::new(target.gpu.as_str()).join("pipe"),
            (Self::V3, _) | (_, Target::Partition(_)) => {
                format!("{:016x}", fnv1a(target.to_string().bytes())).into()
            }
        }
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
    const fn is_v2(&self) -> bool {
        matches!(self, Self::V2)
    }
}

/// Ability of a node to share GPUs by MPS: in equal slots before R615 (ADR 18), and with a
/// namespace for each claim since (ADR 21).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MpsAbility {
    /// The driver has its programs for MPS, and a supervisor runs them with this protocol.
    Available(MpsProtocol),
    /// An administrator has not switched MPS on (`mps.enabled=false`).
    #[default]
    SwitchedOff,
    /// The driver is older than R535.
    OldDriver,
    /// The driver root has no programs for MPS.
    NoProgram,
    /// A server serves programs of one user alone, so that pods of others end it.
    OneUser,
}

impl MpsAbility {
    /// First branch of the driver whose servers take limits for their clients as divvy sets them.
    const FIRST_DRIVER: u32 = 535;
    /// First branch of those tried whose servers serve programs of all users: R535 and R550 have
    /// none.
    const FIRST_FOR_ALL: u32 = 555;

    /// Returns the ability of a node with a driver of this version. `switched_on` says that the
    /// administrator wants MPS, `has_programs` that the driver root has both programs, and
    /// `for_all_users` what was found by trying them; `None`: not known yet.
    pub fn of_node(
        driver_version: &str,
        switched_on: bool,
        has_programs: bool,
        for_all_users: Option<bool>,
    ) -> Self {
        let branch = driver_version.split('.').next();
        let branch: Option<u32> = branch.and_then(|branch| branch.parse().ok());
        match branch.filter(|branch| *branch >= Self::FIRST_DRIVER) {
            _ if !switched_on => Self::SwitchedOff,
            None => Self::OldDriver,
            Some(_) if !has_programs => Self::NoProgram,
            Some(branch) => match MpsProtocol::of_branch(branch) {
                MpsProtocol::V2 if !for_all_users.unwrap_or(branch >= Self::FIRST_FOR_ALL) => {
                    Self::OneUser
                }
                // Servers with namespaces serve all users.
                protocol => Self::Available(protocol),
            },
        }
    }

    /// Returns what was known of the users that a server of protocol v2 serves; `None`: nothing, or
    /// it does not count.
    pub fn for_all_users(self) -> Option<bool> {
        match self {
            Self::OneUser => Some(false),
            Self::Available(MpsProtocol::V2) => Some(true),
            Self::Available(MpsProtocol::V3)
            | Self::SwitchedOff
            | Self::OldDriver
            | Self::NoProgram => None,
        }
    }

    /// Returns the protocol of its servers; `None` if it has none.
    pub fn protocol(self) -> Option<MpsProtocol> {
        match self {
            Self::Available(protocol) => Some(protocol),
            Self::SwitchedOff | Self::OldDriver | Self::NoProgram | Self::OneUser => None,
        }
    }

    /// Returns what a GPU of this architecture or its node lacks for an MPS server; `None` if they
    /// lack nothing.
    pub fn lack_for(self, architecture: Architecture) -> Option<&'static str> {
        match architecture {
            Architecture::Kepler | Architecture::Maxwell | Architecture::Pascal => {
                Some("it is older than Volta, so that an MPS server sets no limits")
            }
            _ => self.lack(),
        }
    }

    /// Returns what the node lacks, for people; `None` if it lacks nothing.
    pub fn lack(self) -> Option<&'static str> {
        match self {
            Self::Available(_) => None,
            Self::SwitchedOff => Some("MPS is switched off in divvy's chart (mps.enabled=false)"),
            Self::OldDriver => Some("its NVIDIA driver is older than R535"),
            Self::OneUser => Some(
                "the MPS of its NVIDIA driver serves programs of one user alone (as that of R535 and R550)",
            ),
            Self::NoProgram => Some(
                "its driver root lacks nvidia-cuda-mps-control or nvidia-cuda-mps-server (install the driver's compute utilities)",
            ),
        }
    }
}

/// The MPS server of a GPU: limits that it sets for every client, the same for all, since a server
/// of protocol v2 has one limit. A server of protocol v3 has none; its namespaces have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsServer {
    /// Number of equal slots, for as many claims. `None`: the server of a claim that has the GPU
    /// alone, with the limits of its config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// Part of the GPU's threads that a client can use, in percent.
    pub cores: u32,
    /// Memory in MiB that a client can allocate. `None`: all of it, or the board has none of its
    /// own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Protocol that it is run with.
    #[serde(default, skip_serializing_if = "MpsProtocol::is_v2")]
    pub protocol: MpsProtocol,
}

impl MpsServer {
    /// Returns the folder of the memory that the server of a target shares with its clients, within
    /// the supervisor's folder.
    pub fn memory(target: &GpuTarget) -> PathBuf {
        Path::new(&target.to_string()).join("shm")
    }

    /// The server of a GPU whose clients are in namespaces.
    pub const NAMESPACES: Self = Self {
        slots: None,
        cores: 100,
        memory_mib: None,
        protocol: MpsProtocol::V3,
    };

    /// Number of clients that a server takes on all drivers that divvy uses MPS with: more slots
    /// would be published than can be used.
    pub const MOST_SLOTS: u32 = 48;

    /// Returns the server of a GPU with this memory for shares, cut into equal slots. `None` if
    /// nothing of the memory is left for a slot.
    pub fn equal(slots: u32, memory_mib: Option<u64>) -> Option<Self> {
        let slots = slots.clamp(1, Self::MOST_SLOTS);
        let memory_mib = match memory_mib {
            Some(mib) => Some(Some(mib / u64::from(slots)).filter(|mib| *mib > 0)?),
            None => None,
        };
        Some(Self {
            slots: Some(slots),
            cores: 100 / slots,
            memory_mib,
            protocol: MpsProtocol::V2,
        })
    }

    /// Returns the server of a partition with this memory, cut into equal slots. A partition
    /// without memory of its own has 0 MiB.
    pub fn of_partition(slots: u32, memory_mib: u64) -> Option<Self> {
        Self::equal(slots, Some(memory_mib).filter(|mib| *mib > 0))
    }

    /// Returns the server of a claim that has the GPU alone: without a limit of threads its clients
    /// can use all, and so with memory, here in bytes.
    pub fn of_claim(cores: Option<u32>, memory: Option<u64>) -> Self {
        Self {
            slots: None,
            cores: cores.unwrap_or(100),
            memory_mib: memory.map(|bytes| bytes >> 20),
            protocol: MpsProtocol::V2,
        }
    }

    /// Returns whether each claim has a namespace of its own, so that claims can have parts of
    /// different sizes.
    pub fn has_namespaces(self) -> bool {
        self.protocol == MpsProtocol::V3
    }

    /// Returns the number of claims that it is for.
    pub fn places(self) -> u32 {
        self.slots.unwrap_or(1)
    }
}

/// Name of a namespace of ours: a claim's part of a server of protocol v3. It is worked out from
/// that part, so that no name is ever stored to be found again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct MpsNamespaceName(u64);

impl MpsNamespaceName {
    /// Returns the name for all that a claim has of a device. Claims of a GPU are few, and no user
    /// chooses the UID of a claim, so that 64 bits are enough.
    pub fn of(claim: &ClaimUid, device: &DeviceName) -> Self {
        // A byte that is in none of the parts keeps them apart.
        let parts = [claim.as_str(), device.as_str()];
        Self(fnv1a(parts.join("\0").bytes()))
    }

    /// Returns the folder of its sockets, within the folder of sockets of its daemon.
    pub fn folder(self) -> PathBuf {
        Path::new(Self::SERVER).join(self.to_string())
    }

    /// Returns a folder as long as any.
    pub fn longest_folder() -> PathBuf {
        Self(u64::MAX).folder()
    }

    /// Name of the one server of a daemon: short, since it is in the path of each namespace.
    pub const SERVER: &str = "s";
}

impl fmt::Display for MpsNamespaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Small letters, digits and underscores, 64 at most, is all that a daemon takes.
        write!(f, "c_{:016x}", self.0)
    }
}

impl From<MpsNamespaceName> for String {
    fn from(name: MpsNamespaceName) -> Self {
        name.to_string()
    }
}

impl TryFrom<String> for MpsNamespaceName {
    type Error = NotOurNamespace;

    fn try_from(text: String) -> Result<Self, NotOurNamespace> {
        text.parse()
    }
}

impl FromStr for MpsNamespaceName {
    type Err = NotOurNamespace;

    fn from_str(text: &str) -> Result<Self, NotOurNamespace> {
        let digits = text.strip_prefix("c_");
        let name = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        let name = name.map(Self).filter(|name| name.to_string() == text);
        name.ok_or_else(|| NotOurNamespace(text.to_owned()))
    }
}

/// A name that is not one of our namespaces.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no namespace of divvy's, which are c_ and 16 hexadecimal digits")]
pub struct NotOurNamespace(String);

/// A namespace of a server of protocol v3: the limits of the clients that reach it through the
/// namespace's sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsNamespace {
    pub name: MpsNamespaceName,
    /// Part of the GPU's threads that a client can use, in percent. 0: it was only begun.
    pub cores: u32,
    /// Memory in MiB that a client can allocate. `None`: all of it, or the board has none of its
    /// own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
}

/// Fault of an MPS server because of which no program can become its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MpsFault {
    /// It is in the state FAULT: a client had a fatal error, which all clients got, and it waits
    /// until every one of them has ended.
    Fault,
    /// Its daemon does not answer.
    NoAnswer,
    /// Its daemon does not answer, since it waits for a process that has connected to its socket
    /// and says nothing. It serves again once that process has ended.
    Held,
}

/// A process that holds up the daemon of an MPS server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct MpsHolder {
    /// Number on the node.
    pub pid: u32,
    /// UID of its pod. `None`: it is in no pod, or that is not known.
    pub pod: Option<String>,
}

impl fmt::Display for MpsHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)?;
        match &self.pod {
            Some(pod) => write!(f, " of the pod with UID {pod}"),
            None => Ok(()),
        }
    }
}

impl MpsFault {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Fault, Self::NoAnswer, Self::Held];

    /// Returns its name, which can be the value of a taint.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fault => "fault",
            Self::NoAnswer => "no-answer",
            Self::Held => "held",
        }
    }

    /// Reads a name back.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|fault| fault.name() == name)
    }
}

impl fmt::Display for MpsFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fault => "is in the state FAULT",
            Self::NoAnswer => "does not answer",
            Self::Held => "is held up by a process that holds the daemon's control connection",
        })
    }
}

/// Priority of the programs of an MPS client beside those of others: a hint to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MpsPriority {
    /// The priority of a program that sets none.
    Normal,
    /// After the others.
    BelowNormal,
}

impl MpsPriority {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::Normal, Self::BelowNormal];

    /// Returns it as people write and read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::BelowNormal => "BelowNormal",
        }
    }

    /// Returns the number that `CUDA_MPS_CLIENT_PRIORITY` takes.
    pub fn number(self) -> u32 {
        match self {
            Self::Normal => 0,
            Self::BelowNormal => 1,
        }
    }

    /// Reads a name back.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|priority| priority.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_shares_by_mps_only_if_nothing_is_lacking() {
        let available = MpsAbility::Available;
        for (driver, on, programs, expected) in [
            ("555.58.02", true, true, available(MpsProtocol::V2)),
            ("550.163.01", true, true, MpsAbility::OneUser),
            ("535.54.03", true, true, MpsAbility::OneUser),
            ("610.43", true, true, available(MpsProtocol::V2)),
            ("580.95.05", true, false, MpsAbility::NoProgram),
            ("580.95.05", false, true, MpsAbility::SwitchedOff),
            ("525.147.05", true, true, MpsAbility::OldDriver),
            ("odd", true, true, MpsAbility::OldDriver),
            ("615.71.09", true, true, available(MpsProtocol::V3)),
            ("620.1", true, false, MpsAbility::NoProgram),
        ] {
            let found = MpsAbility::of_node(driver, on, programs, None);
            assert_eq!(found, expected, "{driver} {on} {programs}");
            assert_eq!(found.lack().is_none(), found.protocol().is_some());
        }
    }

    #[test]
    fn what_was_found_by_trying_wins_over_the_version_of_the_driver() {
        let v2 = MpsAbility::Available(MpsProtocol::V2);
        let v3 = MpsAbility::Available(MpsProtocol::V3);
        for (driver, for_all, expected) in [
            ("550.163.01", true, v2),
            ("580.95.05", true, v2),
            ("580.95.05", false, MpsAbility::OneUser),
            // Namespaces are of another protocol.
            ("615.71.09", false, v3),
            ("525.147.05", true, MpsAbility::OldDriver),
        ] {
            let found = MpsAbility::of_node(driver, true, true, Some(for_all));
            assert_eq!(found, expected, "{driver} {for_all}");
            // While no supervisor says it any more, it is as it was.
            let known = found.for_all_users();
            assert_eq!(MpsAbility::of_node(driver, true, true, known), expected);
        }
    }

    fn gpu(number: u32) -> GpuTarget {
        let uuid = format!("GPU-12345678-1234-1234-1234-12345678000{number}");
        GpuTarget::whole(uuid.parse().unwrap())
    }

    #[test]
    fn a_namespace_has_a_name_that_daemons_take_and_that_reads_back() {
        let claim = |n: u32| -> ClaimUid {
            let uid = format!("0b5a4a3e-9b1f-4a8e-b3f1-00000000000{n}");
            uid.parse().unwrap()
        };
        let device = |name: &str| -> DeviceName { name.parse().unwrap() };
        let names = [
            MpsNamespaceName::of(&claim(1), &device("gpu-0-mps")),
            MpsNamespaceName::of(&claim(1), &device("gpu-1-mps")),
            MpsNamespaceName::of(&claim(2), &device("gpu-0-mps")),
        ];
        for (at, name) in names.iter().enumerate() {
            let text = name.to_string();
            assert_eq!(text.parse(), Ok(*name));
            assert!(text.len() <= 64, "{text}");
            let takes = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(text.chars().all(takes), "{text}");
            assert!(!names.iter().skip(at + 1).any(|other| other == name));
        }
        for text in [
            "default",
            "c_",
            "c_1",
            "c_00000000000000AA",
            "../c_0000000000000001",
        ] {
            assert!(text.parse::<MpsNamespaceName>().is_err(), "{text}");
        }
    }

    /// A daemon fails without a word with a longer path.
    #[test]
    fn the_sockets_of_a_namespace_have_a_path_that_daemons_take() {
        let name = MpsNamespaceName(u64::MAX).folder();
        let dir = Path::new("/run/divvy/gpu.divvy.dev/mps");
        let path = dir.join(MpsProtocol::V3.pipe(&gpu(1))).join(name);
        assert!(path.as_os_str().len() <= 83, "{}", path.display());
        let pipes = [1, 2].map(|n| MpsProtocol::V3.pipe(&gpu(n)));
        assert_ne!(pipes[0], pipes[1]);
        let longest = Target::Partition("4294967295@8+8".parse().unwrap());
        let partition = GpuTarget {
            target: longest,
            ..gpu(1)
        };
        let path = dir.join(MpsProtocol::V2.pipe(&partition));
        assert!(path.as_os_str().len() <= 83, "{}", path.display());
        assert_ne!(
            MpsProtocol::V2.pipe(&partition),
            MpsProtocol::V2.pipe(&gpu(1))
        );
    }

    #[test]
    fn the_protocol_follows_from_the_branch_of_the_driver() {
        for (branch, expected) in [
            (535, MpsProtocol::V2),
            (610, MpsProtocol::V2),
            (615, MpsProtocol::V3),
            (620, MpsProtocol::V3),
        ] {
            let found = MpsProtocol::of_branch(branch);
            assert_eq!(found, expected, "{branch}");
            assert_eq!(MpsProtocol::of_number(found.number()), Some(found));
        }
    }

    #[test]
    fn equal_slots_are_never_more_than_the_gpu_together() {
        for slots in [0, 1, 3, 7, 16, 48, 49, 1024] {
            let server = MpsServer::equal(slots, Some(81_559)).unwrap();
            assert!((1..=MpsServer::MOST_SLOTS).contains(&server.places()));
            assert!(server.places() * server.cores <= 100, "{server:?}");
            assert!(server.cores > 0, "{server:?}");
            let together = u64::from(server.places()) * server.memory_mib.unwrap();
            assert!(together <= 81_559, "{server:?}");
        }
        assert_eq!(MpsServer::equal(4, Some(3)), None);
        assert_eq!(MpsServer::equal(4, None).unwrap().memory_mib, None);
    }
}
