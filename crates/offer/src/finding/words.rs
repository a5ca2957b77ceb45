//! The words of a finding: the object that it is about, why, and what to do.

use divvy_model::health::Ailment;
use divvy_model::mig::Placement;
use divvy_model::{DeviceKind, DeviceName, GpuUuid, MpsFault, Ordinals};

use crate::{Finding, RuleRef, Use, taint};

/// Remedy for a folder that takes nothing.
const STORE: &str = "free some space on the disk of --plugin-dir (by default /var/lib/kubelet/plugins), or mount it writable; divvy retries by itself";

/// The thing that a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object<'a> {
    Node,
    Gpu(&'a GpuUuid),
    /// A GPU by the number in its devices' names.
    Number(u32),
}

impl Object<'_> {
    /// Returns `gpu-3`, the UUID of a GPU that has no number, or nothing for the node.
    pub fn name(self, ordinals: &Ordinals) -> String {
        let ordinal = match self {
            Self::Node => return String::new(),
            Self::Number(ordinal) => ordinal,
            Self::Gpu(gpu) => match ordinals.of(gpu) {
                Some(ordinal) => ordinal,
                None => return gpu.to_string(),
            },
        };
        DeviceKind::whole(ordinal).to_string()
    }

    fn of_device(device: &DeviceName) -> Self {
        DeviceKind::parse(device).map_or(Self::Node, |kind| Self::Number(kind.ordinal()))
    }
}

impl Finding {
    /// Returns the object that it is about.
    pub fn object(&self) -> Object<'_> {
        match self {
            Self::OverLimit { .. }
            | Self::NvidiaServes
            | Self::SupervisorAway { .. }
            | Self::NodeLeft { .. }
            | Self::OneModeForEach { .. }
            | Self::BadPolicy { .. }
            | Self::DriverReleased { .. }
            | Self::DriverDown { .. }
            | Self::NotStored { .. }
            | Self::HeldUnknown { .. } => Object::Node,
            Self::RuleWithoutEffect(problem) => Object::Gpu(&problem.gpu),
            Self::GivenTwice { gpu, .. } => Object::Number(*gpu),
            Self::ValueLeftOut { device, .. }
            | Self::HeldAndGone { device, .. }
            | Self::HeldAndWithdrawn { device, .. } => Object::of_device(device),
            Self::RuleDecides { gpu, .. }
            | Self::Ill { gpu, .. }
            | Self::Silent { gpu, .. }
            | Self::Unlisted { gpu }
            | Self::Removed { gpu }
            | Self::PartitionGone { gpu, .. }
            | Self::GoneUnderClaim { gpu, .. }
            | Self::Unmonitored { gpu, .. }
            | Self::Uncertain { gpu, .. }
            | Self::NewerRecord { gpu, .. }
            | Self::Lingering { gpu, .. }
            | Self::MpsWedged { gpu, .. }
            | Self::Neighbour { gpu, .. }
            | Self::ForeignInstance { gpu, .. }
            | Self::GrantNotStored { gpu, .. }
            | Self::OutOfUse { gpu, .. }
            | Self::MigModeOn { gpu }
            | Self::Unreadable { gpu, .. }
            | Self::TaintsDropped { gpu, .. }
            | Self::OneMode { gpu, .. }
            | Self::NeedsReset { gpu }
            | Self::NotPersistent { gpu }
            | Self::NothingOffered { gpu }
            | Self::NoShares { gpu }
            | Self::NoMps { gpu, .. }
            | Self::NothingToShare { gpu }
            | Self::NotOneComputeInstance { gpu, .. }
            | Self::NoCounters { gpu, .. }
            | Self::TooManySlices { gpu, .. }
            | Self::UnknownProfile { gpu, .. }
            | Self::CounterDropped { gpu, .. } => Object::Gpu(gpu),
        }
    }

    /// Returns whether it says why something of a GPU is not offered, or not as it could be.
    pub fn leaves_out(&self, gpu: &GpuUuid) -> bool {
        // Findings that are about the GPU, and not about the pool.
        let is_other = matches!(
            self,
            Self::NotPersistent { .. }
                | Self::RuleDecides { .. }
                | Self::RuleWithoutEffect(_)
                | Self::ForeignInstance { .. }
                | Self::Neighbour { .. }
        );
        !is_other && self.object() == Object::Gpu(gpu)
    }

    /// Returns the part of the object that is concerned, or what distinguishes it from others of
    /// its kind about the same object. It does not change while the finding lasts.
    pub fn subject(&self) -> String {
        match self {
            Self::BadPolicy { policy, .. } => policy.clone(),
            Self::RuleWithoutEffect(problem) => problem.rule.to_string(),
            Self::OneModeForEach { why } => why.name().to_owned(),
            Self::ForeignInstance { at, .. } | Self::PartitionGone { at, .. } => slices(*at),
            Self::Ill {
                place: Some(place), ..
            }
            | Self::MpsWedged {
                place: Some(place), ..
            } => slices(*place),
            // Each Xid, recovery and state of the fabric has a time of its own.
            Self::Ill {
                ailment: ailment @ (Ailment::Xid(_) | Ailment::Recovery(_) | Ailment::Fabric(_)),
                ..
            } => taint(*ailment, false).value.unwrap_or_default(),
            Self::NewerRecord { uid, .. } => format!("record {uid}"),
            Self::Neighbour { used, .. } => match used {
                Use::DevicePlugin { resource, to } => format!("{resource} of {to}"),
                Use::Driver { name, to } | Use::OtherName { name, to } => format!("{name} of {to}"),
                Use::NvidiaPlugin { to } => format!("NVIDIA's plugin of {to}"),
                // Their ids come and go.
                Use::Processes { .. } => "processes".to_owned(),
            },
            Self::GoneUnderClaim { device, .. }
            | Self::Lingering { device, .. }
            | Self::HeldUnknown { device }
            | Self::HeldAndGone { device, .. }
            | Self::HeldAndWithdrawn { device, .. }
            | Self::ValueLeftOut { device, .. } => device.to_string(),
            _ => String::new(),
        }
    }

    /// Returns the claim concerned, as `namespace/name`; nothing where none is known.
    pub fn claim(&self) -> &str {
        match self {
            Self::GoneUnderClaim { claim, .. }
            | Self::Uncertain { claim, .. }
            | Self::NewerRecord { claim, .. }
            | Self::Lingering { claim, .. } => claim,
            _ => "",
        }
    }

    /// Returns the cause, for a place that names the object and the remedy beside it.
    pub fn why(&self) -> String {
        match self {
            Self::RuleWithoutEffect(problem) => problem.problem.clone(),
            Self::Neighbour { used, .. } => used.to_string(),
            Self::ForeignInstance { .. } => {
                "the GPU has a MIG instance that divvy did not create".to_owned()
            }
            other => other.to_string(),
        }
    }

    /// Returns what to do about it; nothing where its words say it already, or nothing helps.
    pub fn remedy(&self) -> String {
        let fixed = match self {
            Self::BadPolicy { policy, .. } => {
                return format!(
                    "correct it with `kubectl edit gpupolicy {policy}`; until then, its last readable version stays in force"
                );
            }
            Self::RuleWithoutEffect(problem) => {
                return format!(
                    "check the rule with `kubectl edit gpupolicy {}`",
                    problem.rule.policy
                );
            }
            Self::OutOfUse { by: Some(rule), .. } => {
                return format!(
                    "correct the rule with `kubectl edit gpupolicy {}`",
                    rule.policy
                );
            }
            Self::ForeignInstance { gpu, .. } => return removal_of_foreign(gpu),
            // The GPU comes first: its processes cannot be listed.
            Self::Lingering {
                blind: Some(ailment),
                ..
            } => return format!("the GPU {ailment}: {}", ailment.remedy()),
            Self::Ill { ailment, .. } => ailment.remedy(),
            Self::Silent { .. } => Ailment::Silent.remedy(),
            Self::Unlisted { .. } => Ailment::Lost.remedy(),
            Self::NodeLeft { claims: 0 } => {
                "delete the GpuNode of this node if it is not to come back to divvy"
            }
            Self::NodeLeft { .. } => {
                "set the label again (divvy.dev/gpu by default) until these claims are released: their pods cannot end without the plugin"
            }
            Self::NvidiaServes => {
                "a node has one of the two drivers: keep NVIDIA's plugin off this node (affinity of its DaemonSet), or remove the label divvy.dev/gpu; divvy goes on a few seconds after that plugin has ended"
            }
            Self::SupervisorAway { other: Some(_), .. } => {
                "end the pods that still use MPS shares of that name, then delete the supervisor's pod on this node (label app.kubernetes.io/component=mps-supervisor): an upgrade of the chart does not replace it (docs/upgrade.md)"
            }
            Self::SupervisorAway { other: None, .. } => {
                "check the supervisor's pod on this node (label app.kubernetes.io/component=mps-supervisor); one of before an upgrade of the chart is replaced when it is deleted (docs/upgrade.md)"
            }
            Self::DriverReleased { .. } => "divvy uses the driver again when the request ends",
            Self::DriverDown { .. } => {
                "install or repair the NVIDIA driver (check `nvidia-smi`, the driver's pod, and --driver-root); divvy continues when the driver answers"
            }
            Self::OneModeForEach { .. } => {
                "see docs/versions.md for the requirements of several modes per GPU"
            }
            Self::Unmonitored {
                for_good: false, ..
            } => {
                "check the driver's messages (`dmesg | grep NVRM`); the plugin retries every few seconds; if this does not end, restart the plugin's pod on this node"
            }
            Self::Uncertain { .. } => {
                "this ends when the GPU is empty and can be read; otherwise end its pods and remove MIG instances that no claim holds, or reboot the node (docs/runbooks/gpu-fenced.md)"
            }
            Self::NewerRecord { .. } => "run that version until the claim is released",
            Self::Lingering { blind: None, .. } => {
                "find out why the process runs (`cat /proc/PID/cgroup` shows its pod) and end it; the device is free within seconds"
            }
            Self::MpsWedged { fault, .. } => end_of_fault(*fault),
            Self::Neighbour {
                used: Use::Processes { .. },
                ..
            } => "end the process, or remove the label divvy.dev/gpu from this node",
            Self::Neighbour {
                used: used @ (Use::NvidiaPlugin { .. } | Use::OtherName { .. }),
                ..
            } => end_of_use(used),
            Self::Neighbour { .. } => {
                "a GPU belongs to one driver: remove the label divvy.dev/gpu or the other driver from this node"
            }
            Self::Removed { .. } => {
                "check the board and the kernel's messages (`dmesg | grep -i nvrm`) and reboot the node; if it was taken out on purpose, delete the GpuNode of this node (`kubectl delete gpunode NODE`): divvy writes it again without the GPU"
            }
            Self::GoneUnderClaim { .. } => "delete the pods of the claim",
            Self::NotStored { .. } | Self::GrantNotStored { .. } => STORE,
            Self::OutOfUse { by: None, .. } => "offer it by a GpuPolicy (docs/policy.md)",
            Self::GivenTwice { .. } => "end the pods of one of these claims",
            Self::HeldUnknown { .. } => "delete the claim and its pods",
            Self::HeldAndGone { .. } => "delete the pod that uses it",
            Self::NothingOffered { .. } => "check the rule of its GpuPolicy",
            _ => "",
        };
        fixed.to_owned()
    }

    /// Returns the words for the log when it is over, for a finding that nothing else says the end
    /// of.
    pub fn ended(&self) -> Option<String> {
        match self {
            Self::RuleDecides { gpu, .. } => Some(format!("no policy selects {gpu} any more")),
            Self::NvidiaServes => {
                Some("NVIDIA's plugin has ended on this node; divvy serves it".to_owned())
            }
            Self::SupervisorAway { .. } => Some("the MPS supervisor answers again".to_owned()),
            Self::OneModeForEach { .. } => Some("GPUs can be offered in several modes".to_owned()),
            _ => None,
        }
    }
}

/// Returns what ends a use of a GPU by others, for all that is known of it.
pub(super) fn end_of_use(used: &Use) -> &'static str {
    match used {
        Use::NvidiaPlugin { .. } => {
            "it is free when its pods have ended; delete them, so that they are scheduled anew"
        }
        Use::OtherName { .. } => {
            "it is free when its pods have ended; delete them. Where no plugin of that name runs any more they stay in Terminating until the chart is installed under it again (docs/upgrade.md)"
        }
        Use::DevicePlugin { .. } | Use::Driver { .. } | Use::Processes { .. } => {
            "a GPU belongs to one driver: remove the label divvy.dev/gpu or the other driver from this node, or end the process"
        }
    }
}

/// Names the driver of another supervisor, as the middle of a sentence.
pub(super) fn other_supervisor(driver: Option<&str>) -> String {
    driver.map_or_else(String::new, |driver| {
        format!(", while one for the driver name {driver} runs on the node")
    })
}

/// Names the claims that use an MPS server, as the end of a sentence.
pub(super) fn users(claims: &[String]) -> String {
    match claims {
        [] => String::new(),
        [one] => format!("; claim {one} uses it"),
        several => format!("; claims {} use it", several.join(", ")),
    }
}

/// Names a place on a GPU.
pub(super) fn slices(at: Placement) -> String {
    let last = at.end().saturating_sub(1);
    format!("memory slices {}..{last}", at.start)
}

/// Returns what is left of a node without a plugin, as the end of a sentence.
pub(super) fn still_held(claims: usize) -> String {
    match claims {
        0 => String::new(),
        1 => "; 1 claim still holds GPUs".to_owned(),
        several => format!("; {several} claims still hold GPUs"),
    }
}

/// Returns how an instance that others made is removed. By its id: without it, nvidia-smi removes
/// all that are idle, those of claims too.
pub(super) fn removal_of_foreign(gpu: &GpuUuid) -> String {
    format!(
        "if it is not needed, find its instance ID with `nvidia-smi mig -i {gpu} -lgi` and remove that one with `nvidia-smi mig -i {gpu} -gi ID -dci && nvidia-smi mig -i {gpu} -gi ID -dgi`"
    )
}

/// Returns why nothing of a GPU is offered, as the end of a sentence.
pub(super) fn nothing_offered(by: Option<&RuleRef>, reasons: &[String]) -> String {
    let by = by.map_or_else(
        || "the node's default rules".to_owned(),
        |rule| format!("rule {rule}"),
    );
    if reasons.is_empty() {
        format!(": nothing of what {by} asks for can be offered")
    } else {
        format!(" ({by}): {}", reasons.join("; "))
    }
}

/// Returns what ends the fault of an MPS server that serves no new program.
fn end_of_fault(fault: MpsFault) -> &'static str {
    match fault {
        MpsFault::Fault => {
            "restart the containers of these claims, or delete their pods: the server serves again, or divvy restarts it, once the last program has ended; health.restartWedgedMps in the GpuPolicy has it restarted under them (docs/runbooks/mps-wedged.md)"
        }
        MpsFault::NoAnswer => {
            "delete the pods of these claims: the server ends with the last of them; health.restartWedgedMps in the GpuPolicy has it restarted under them (docs/runbooks/mps-wedged.md)"
        }
        MpsFault::Held => {
            "delete the pod of the process, which the Event MpsServerWedged of these claims names: the server serves again at once (docs/runbooks/mps-wedged.md)"
        }
    }
}
