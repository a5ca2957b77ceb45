//! Functions that drivers of each generation have: the library behaves as that of the driver whose
//! version the state has.
//!
//! From the change log of NVIDIA's NVML reference (R510 to R615) and nvml.h of CUDA 12.0, 12.4,
//! 13.0 and 13.3; R535's lists of processes from go-nvml#75 and nvitop#79 and #89; symbols, words
//! and calls without a session from the libraries of 525, 535, 550 and 555 themselves. The library
//! that a test loads also has to lack the functions ([`Generation::lacks`]): here they are there in
//! every library.

use divvy_model::CudaVersion;

/// A driver of each generation, and of R535 one of each kind.
pub const GENERATIONS: &[Generation] = &[
    Generation::new(525, 147, "525.147.05", (12, 0)),
    Generation::new(535, 54, "535.54.03", (12, 2)),
    Generation::new(535, 98, "535.98", (12, 2)),
    Generation::new(535, 161, "535.161.08", (12, 2)),
    Generation::new(550, 163, "550.163.01", (12, 4)),
    Generation::new(560, 35, "560.35.03", (12, 6)),
    Generation::new(570, 172, "570.172.08", (12, 8)),
    Generation::new(580, 95, "580.95.05", (13, 0)),
    Generation::new(595, 71, "595.71.05", (13, 2)),
    // The numbers after the first are made up, but for those of R615.
    Generation::new(610, 10, "610.10.01", (13, 3)),
    Generation::new(615, 71, "615.71.09", (13, 4)),
    Generation::new(620, 10, "620.10.01", (13, 5)),
];

/// Boards of each generation with MIG and of those without, and the first branch of drivers that
/// knows each.
const BOARDS: [(&str, u32); 7] = [
    ("t4", 410),
    ("a100-40", 450),
    ("a30", 460),
    ("h100", 525),
    ("l4", 525),
    ("b200", 570),
    ("rtx-pro-6000", 575),
];

/// Functions by the first generation that has them.
const SINCE: &[(u32, &str)] = &[
    (535, "nvmlDeviceGetModuleId"),
    (550, "nvmlDeviceGetC2cModeInfoV"),
    (550, "nvmlDeviceGetGpuFabricInfoV"),
    (580, "nvmlDeviceGetAddressingMode"),
    (615, "nvmlDeviceGetMemoryLimits_v1"),
    (615, "nvmlDeviceSetMemoryLimits_v1"),
];

/// Functions that 535.98 took back before 535.104 had them again.
const NOT_IN_535_98: [&str; 2] = [
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
];

/// A driver, by the first two numbers of its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generation {
    major: u32,
    minor: u32,
    pub version: &'static str,
    /// The CUDA version it comes with.
    pub cuda: CudaVersion,
}

impl Generation {
    const fn new(
        major: u32,
        minor: u32,
        version: &'static str,
        (cuda, minor_cuda): (u32, u32),
    ) -> Self {
        Self {
            major,
            minor,
            version,
            cuda: CudaVersion {
                major: cuda,
                minor: minor_cuda,
            },
        }
    }

    /// The last generation that is not newer than a version; the oldest for one that cannot be
    /// read.
    pub fn of(version: &str) -> Self {
        let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
        let asked = (numbers.next().flatten(), numbers.next().flatten());
        let found = GENERATIONS
            .iter()
            .take_while(|g| (Some(g.major), Some(g.minor)) <= asked);
        let oldest = Self::new(0, 0, "", (0, 0));
        found.last().copied().unwrap_or(oldest)
    }

    /// Lists one of each of the boards that the tables of drivers have and that it knows.
    pub fn boards(self) -> String {
        let known = BOARDS.iter().filter(|(_, since)| self.major >= *since);
        known
            .map(|(board, _)| format!("{board}x1"))
            .collect::<Vec<_>>()
            .join(",")
    }

    /// Functions that its library does not have.
    pub fn lacks(self) -> Vec<&'static str> {
        let later = SINCE
            .iter()
            .filter(|(since, _)| self.major < *since)
            .map(|(_, name)| *name);
        let taken = (self.major, self.minor) == (535, 98);
        later
            .chain(NOT_IN_535_98.into_iter().filter(|_| taken))
            .collect()
    }

    /// Returns whether the library's version can be asked for without a session.
    pub(crate) fn has_version_beside_sessions(self) -> bool {
        self.major >= 535
    }

    /// Returns the last code that has words.
    pub(crate) fn last_code_with_words(self) -> u32 {
        match self.major {
            ..535 => 26,
            535..550 => 27,
            550.. => 29,
        }
    }

    /// Returns whether lists of processes of version 3 have the longer entries.
    pub(crate) fn has_long_processes(self) -> bool {
        self.major == 535 && self.minor < 98
    }

    /// Returns whether version 3 of the structs of MIG profiles is known.
    pub(crate) fn has_profile_v3(self) -> bool {
        self.major >= 545
    }

    /// Returns the number after the highest of a profile of GPU instances: graphics came with R570,
    /// all or no media with R575.
    pub(crate) fn gpu_instance_profiles(self) -> u32 {
        match self.major {
            ..570 => 0x0a,
            570..575 => 0x0d,
            575.. => 0x12,
        }
    }

    /// Returns whether version 3 of the struct of the fabric is known.
    pub(crate) fn has_fabric_v3(self) -> bool {
        self.major >= 580
    }

    /// Returns whether a recovery action is reported, and that it became another.
    pub(crate) fn reports_recovery(self) -> bool {
        self.major >= 565
    }

    /// Returns whether an event reports that memory could not be replaced.
    pub(crate) fn reports_retirement(self) -> bool {
        self.major >= 560
    }

    /// Returns the number after the highest of an NVLink.
    pub(crate) fn links(self) -> u32 {
        if self.major >= 590 { 36 } else { 18 }
    }
}

/// Makes the built library one that lacks functions: overwrites the first letter of their names in
/// its symbol table, so that the loader finds nothing under them. Returns those that were not
/// there.
pub fn without_symbols<'a>(library: &mut [u8], symbols: &[&'a str]) -> Vec<&'a str> {
    let mut left = symbols.to_vec();
    // Names lie between zeroes; where each begins.
    let mut places = Vec::new();
    let mut at = 0;
    for name in library.split(|byte| *byte == 0) {
        if let Some(found) = symbols.iter().find(|symbol| symbol.as_bytes() == name) {
            left.retain(|other| other != found);
            places.push(at);
        }
        at += name.len() + 1;
    }
    for at in places {
        if let Some(letter) = library.get_mut(at) {
            *letter = b'x';
        }
    }
    left
}
