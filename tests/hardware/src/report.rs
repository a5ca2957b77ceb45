//! The checks, their results, and the exit status that follows from them.

use std::collections::BTreeMap;
use std::io::Write;

use clap::ValueEnum;
use serde::Serialize;

/// Everything that this program tries, in this order. The names are part of its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Check {
    /// It runs in a root like that of the plugin's image, with the host below a prefix.
    AsTheImage,
    /// Every GPU can be read.
    Inventory,
    /// The driver keeps the contract of the simulator.
    Conformance,
    /// The names that divvy works out for MIG profiles are the driver's own.
    ProfileNames,
    /// `nvidia-smi -q -x` says the same.
    NvidiaSmi,
    /// sysfs and /proc/driver/nvidia say the same.
    Sysfs,
    /// The output of `nvidia-smi compute-policy --list` is understood.
    TimeSliceIsRead,
    /// NVML has the calls that limit memory, if the driver is new enough, and by which controller.
    MemoryCaps,
    /// The node plugin prepares a claim of a whole GPU.
    Claim,
    /// The claim's hooks run on a root without any file of the driver.
    Hook,
    /// libcuda is loaded from where the claim put it.
    Libcuda,
    /// A kernel from PTX runs.
    Cuda,
    /// CUDA says the same of the GPU as NVML.
    CudaAgrees,
    /// No other GPU can be reached.
    Isolation,
    /// NVML lists the process, under its id.
    Processes,
    /// The claim is let go, and nothing is left.
    LetGo,
    /// NVIDIA's program for MPS starts and ends servers as the supervisor asks it to.
    Mps,
    /// A program is a client of the server, on the part of the GPU that the server allows.
    MpsClient,
    /// A client can allocate no more than the server allows.
    MpsMemory,
    /// A program of another user is a client of the same server.
    MpsUsers,
    /// With the GPU's compute mode that of one process, there are the server's clients alone.
    MpsAlone,
    /// A program in a control group can allocate no more than the group's limit.
    MemoryLimit,
    /// MIG mode is switched on, and off again.
    MigMode,
    /// A partition of each profile is made and destroyed.
    Partitions,
    /// The node plugin prepares a claim of a partition, and a kernel runs in it.
    PartitionClaim,
    /// Every time slice can be set, and the one that was found is set again.
    TimeSlice,
}

/// Exit status: there is no GPU, or no driver, on this machine.
const NO_GPU: u8 = 3;

/// Things that this program does beyond reading, each only if it is allowed by this name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Allow {
    /// Runs a small CUDA program on an idle GPU, by a claim that the node plugin prepares
    Program,
    /// Starts MPS servers on an idle GPU, with programs as their clients
    Mps,
    /// Sets the compute mode of an idle GPU, and sets it back
    ComputeMode,
    /// Makes a control group, limits its memory on an idle GPU, and removes both
    MemoryLimit,
    /// Sets the time slice of an idle GPU, and sets it back
    TimeSlice,
    /// Switches MIG mode of an idle GPU on and off, with partitions in between
    Mig,
}

impl Allow {
    /// Returns its name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value()
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default()
    }

    /// Returns the effect of it, for people.
    fn effect(self) -> String {
        let value = self.to_possible_value();
        let help = value.and_then(|value| value.get_help().map(ToString::to_string));
        help.unwrap_or_default()
    }
}

/// Questions about a GPU that are not asked here, and why.
pub(crate) const NEVER_ASKED: [(&str, &str); 6] = [
    (
        "an MPS server in the state FAULT, and its end",
        "a program would have to break the GPU's context on purpose",
    ),
    (
        "MPS in partitions",
        "it needs MIG mode and MPS at once, and more than a minute",
    ),
    (
        "the effect of time slices on programs that compete",
        "it is a measurement, which other programs disturb",
    ),
    (
        "Xid events, recovery actions and resets",
        "nothing brings them about without harm",
    ),
    (
        "MIG mode that needs a reset",
        "a reset ends what others run on GPUs that are linked",
    ),
    (
        "the chart, the kubelet and a container runtime",
        "there is neither a network nor a Kubernetes here",
    ),
];

impl Check {
    /// Returns the permission that it needs; `None` of one that only reads.
    pub(crate) fn needs(self) -> Option<Allow> {
        match self {
            Self::AsTheImage
            | Self::Inventory
            | Self::Conformance
            | Self::ProfileNames
            | Self::NvidiaSmi
            | Self::Sysfs
            | Self::TimeSliceIsRead
            | Self::MemoryCaps => None,
            Self::Claim
            | Self::Hook
            | Self::Libcuda
            | Self::Cuda
            | Self::CudaAgrees
            | Self::Isolation
            | Self::Processes
            | Self::LetGo => Some(Allow::Program),
            Self::Mps | Self::MpsClient | Self::MpsMemory | Self::MpsUsers => Some(Allow::Mps),
            Self::MpsAlone => Some(Allow::ComputeMode),
            Self::MemoryLimit => Some(Allow::MemoryLimit),
            Self::MigMode | Self::Partitions | Self::PartitionClaim => Some(Allow::Mig),
            Self::TimeSlice => Some(Allow::TimeSlice),
        }
    }

    /// Lists the checks that need a permission.
    pub(crate) fn that_need(allow: Allow) -> impl Iterator<Item = Self> {
        let all = Self::value_variants().iter().copied();
        all.filter(move |check| check.needs() == Some(allow))
    }

    /// Returns its name in JSON.
    pub(crate) fn name(self) -> String {
        self.to_possible_value()
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default()
    }
}

/// Result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome", content = "detail")]
pub(crate) enum Outcome {
    /// It is so: what was seen.
    Ok(String),
    /// It is not so.
    Failed(String),
    /// It could not be tried here.
    NotTried(String),
}

impl Outcome {
    /// Fine if nothing is wrong.
    pub(crate) fn of(problems: &[String], fine: impl Into<String>) -> Self {
        if problems.is_empty() {
            Self::Ok(fine.into())
        } else {
            Self::Failed(problems.join("; "))
        }
    }
}

impl From<anyhow::Result<Outcome>> for Outcome {
    fn from(result: anyhow::Result<Outcome>) -> Self {
        result.unwrap_or_else(|error| Self::Failed(format!("{error:#}")))
    }
}

/// A line of the list.
#[derive(Debug, Serialize)]
struct Line<'a> {
    check: Check,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

/// Results of the checks so far. Each is printed when it is known.
#[derive(Debug, Default)]
pub(crate) struct Report {
    outcomes: BTreeMap<Check, Outcome>,
    json: bool,
    /// Text by its title: facts of the machine, and answers of its programs.
    pub(crate) parts: BTreeMap<String, String>,
}

impl Report {
    /// Returns what came of each check.
    pub(crate) fn outcomes(&self) -> &BTreeMap<Check, Outcome> {
        &self.outcomes
    }

    /// Form of the output: text, or a JSON object per check.
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            ..Self::default()
        }
    }

    /// Notes what came of a check. A failure stays.
    pub(crate) fn note(&mut self, check: Check, outcome: impl Into<Outcome>) {
        if self.outcomes.contains_key(&check) {
            return;
        }
        let outcome = outcome.into();
        self.print(check, &outcome);
        self.outcomes.insert(check, outcome);
    }

    fn print(&self, check: Check, outcome: &Outcome) {
        let json = |value: &Line<'_>| serde_json::to_string(value).unwrap_or_default();
        let line = match outcome {
            _ if self.json => json(&Line { check, outcome }),
            Outcome::Ok(text) => format!("ok         {}: {text}", check.name()),
            Outcome::Failed(text) => format!("FAILED     {}: {text}", check.name()),
            Outcome::NotTried(text) => format!("NOT TRIED  {}: {text}", check.name()),
        };
        // With a closed stdout there is still the exit status.
        let _written = writeln!(std::io::stdout(), "{line}");
    }

    /// Returns true if nothing has failed so far.
    pub(crate) fn is_well(&self) -> bool {
        !self
            .outcomes
            .values()
            .any(|outcome| matches!(outcome, Outcome::Failed(_)))
    }

    /// Notes for `checks` that they were not tried, where nothing else is known.
    pub(crate) fn not_tried(&mut self, checks: &[Check], why: &str) {
        for check in checks {
            self.note(*check, Outcome::NotTried(why.to_owned()));
        }
    }

    /// Notes for all checks that need more than is allowed that they were not tried.
    pub(crate) fn only(&mut self, allowed: &[Allow]) {
        for check in Check::value_variants() {
            if let Some(needs) = check.needs().filter(|needs| !allowed.contains(needs)) {
                let (name, effect) = (needs.name(), needs.effect());
                self.not_tried(
                    &[*check],
                    &format!("not allowed (--allow {name}: {effect})"),
                );
            }
        }
    }

    /// The whole list, in order; what was not come to is not tried.
    pub(crate) fn finish(&mut self) -> u8 {
        self.not_tried(Check::value_variants(), "an earlier check ended the run");
        self.exit_status()
    }

    /// The list where there is nothing to look at.
    pub(crate) fn no_gpu(&mut self, why: &str) -> u8 {
        if self.json {
            self.not_tried(Check::value_variants(), why);
        } else {
            let _written = writeln!(std::io::stdout(), "{why}");
        }
        NO_GPU
    }

    fn exit_status(&self) -> u8 {
        let all_tried = !self
            .outcomes
            .values()
            .any(|outcome| matches!(outcome, Outcome::NotTried(_)));
        match (self.is_well(), all_tried) {
            (false, _) => 1,
            (true, false) => 4,
            (true, true) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(outcomes: &[(Check, Outcome)]) -> u8 {
        let mut report = Report::new(true);
        for (check, outcome) in outcomes {
            report.note(*check, outcome.clone());
        }
        report.finish()
    }

    #[test]
    fn the_exit_status_says_whether_all_was_tried_and_well() {
        let fine = || Outcome::Ok("seen".to_owned());
        let mut all: Vec<_> = Check::value_variants()
            .iter()
            .map(|check| (*check, fine()))
            .collect();
        assert_eq!(status(&all), 0);
        assert_eq!(status(&all[1..]), 4, "one was not come to");
        all[18].1 = Outcome::NotTried("no rights".to_owned());
        assert_eq!(status(&all), 4);
        all[3].1 = Outcome::Failed("a name".to_owned());
        assert_eq!(status(&all), 1, "a failure counts for more");
        let twice = [
            (Check::Cuda, Outcome::Failed("no".to_owned())),
            (Check::Cuda, fine()),
        ];
        assert_eq!(status(&twice), 1, "a failure stays");
    }

    #[test]
    fn each_check_is_in_the_list_once_under_a_name_of_its_own() {
        let mut names: Vec<_> = Check::value_variants()
            .iter()
            .map(|check| check.name())
            .collect();
        assert_eq!(names[0], "as-the-image");
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Check::value_variants().len());
        let line = Line {
            check: Check::Cuda,
            outcome: &Outcome::NotTried("busy".to_owned()),
        };
        let json = r#"{"check":"cuda","outcome":"not-tried","detail":"busy"}"#;
        assert_eq!(serde_json::to_string(&line).unwrap(), json);
    }
}
