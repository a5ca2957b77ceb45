//! Attribution of the use of a GPU to the claims and pods on it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_claims::{ClaimRef, PodRef};
use divvy_model::{DeviceName, Form, GpuMemory, GpuProcess, MigDevice, Sharing, TargetKind};

use crate::groups::{self, Group};
use crate::reading::{Figure, GpuReading, Granted, Holding, Unknown};

/// Source of a share of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Performance monitors: use of the multiprocessors, of the GPU or of the partition.
    Gpm,
    /// The GPU's own value: whether anything computed.
    Device,
    /// Samples of processes: whether they computed.
    Process,
}

impl Source {
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpm => "gpm",
            Self::Device => "device",
            Self::Process => "process",
        }
    }
}

/// A share of time from 0 to 1, of the GPU or of the partition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    pub ratio: f64,
    pub source: Source,
}

/// Makes a share of time from 0 to 1 of a driver's figure, which may be more. A figure that is not
/// a finite number is none: the driver divides counters, and nothing by nothing is NaN.
fn measured(ratio: f64, source: Source) -> Figure<Measured> {
    if !ratio.is_finite() {
        return Err(Unknown::Failed);
    }
    let ratio = ratio.clamp(0.0, 1.0);
    Ok(Measured { ratio, source })
}

/// Use of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuUsage {
    /// See [`GpuReading::number`].
    pub number: u64,
    pub memory: Figure<GpuMemory>,
    /// Bytes in use that belong to no claim: of the driver, of processes outside of pods, of such
    /// whose pod is not known.
    pub unattributed: Figure<u64>,
    /// By claim and device.
    pub devices: Vec<DeviceUsage>,
    /// Shares whose memory is compared with what was granted: each claim by itself, or several with
    /// pods in common.
    pub groups: Vec<Group>,
}

/// Use of a device by a claim.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceUsage {
    pub claim: ClaimRef,
    pub device: DeviceName,
    pub kind: Form,
    pub part: Option<MigDevice>,
    pub granted: Granted,
    /// Bytes that the claim may use: of the GPU, the partition or the share.
    pub limit: Figure<u64>,
    /// Use by all its pods together.
    pub utilization: Figure<Measured>,
    /// `true` if nothing of the claim runs, or nothing of it computes.
    pub quiet: Figure<bool>,
    /// The pods of the claim, as far as they are known.
    pub holders: Vec<PodRef>,
    /// Each of its pods; one without a name where none is known.
    pub pods: Vec<PodUsage>,
}

/// Use of a claim's device by a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct PodUsage {
    pub name: String,
    /// Bytes.
    pub memory: Figure<u64>,
    pub utilization: Figure<Measured>,
}

/// Attributes what was read of a GPU. `pods` has the pod UIDs of processes, of those that are in a
/// pod.
pub fn attribute(
    reading: &GpuReading,
    pods: &BTreeMap<u32, String>,
    holdings: &[Holding],
) -> GpuUsage {
    let holdings = merged(holdings);
    let on = OnGpu {
        reading,
        pods,
        holdings: &holdings,
    };
    GpuUsage {
        number: reading.number,
        memory: reading.memory,
        unattributed: on.unattributed(),
        devices: holdings.iter().map(|holding| on.device(holding)).collect(),
        groups: groups::of(&holdings, |pod| on.memory_of(|p| on.is_of(p, pod))),
    }
}

/// Merges several shares of one claim on one GPU into one.
fn merged(holdings: &[Holding]) -> Vec<Holding> {
    let mut merged: Vec<Holding> = Vec::new();
    for more in holdings {
        let same =
            |known: &&mut Holding| known.claim.uid == more.claim.uid && known.device == more.device;
        let Some(known) = merged.iter_mut().find(same) else {
            merged.push(more.clone());
            continue;
        };
        // An unknown amount makes the sum unknown: a part of it would look like a smaller grant.
        let sum = |one: Option<u64>, other: Option<u64>| one?.checked_add(other?);
        known.granted = Granted {
            memory: sum(known.granted.memory, more.granted.memory),
            limit: sum(known.granted.limit, more.granted.limit),
            cores: sum(known.granted.cores, more.granted.cores),
        };
    }
    merged
}

struct OnGpu<'a> {
    reading: &'a GpuReading,
    pods: &'a BTreeMap<u32, String>,
    holdings: &'a [Holding],
}

impl OnGpu<'_> {
    fn is_of(&self, process: &GpuProcess, pod: &PodRef) -> bool {
        self.pods
            .get(&process.pid)
            .is_some_and(|uid| *uid == pod.uid)
    }

    /// Returns the sum over processes, in bytes, if all of them are known.
    fn memory_of(&self, counts: impl Fn(&GpuProcess) -> bool) -> Figure<u64> {
        let all = self
            .reading
            .processes
            .as_ref()
            .map_err(|why| *why)?
            .iter()
            .filter(|p| counts(p));
        // The first process without a figure makes the sum unknown: a part of it would pass for
        // all.
        all.map(|p| p.memory_bytes.ok_or(Unknown::MemoryOfProcess))
            .sum()
    }

    fn computed_by(&self, counts: impl Fn(&GpuProcess) -> bool) -> Figure<Measured> {
        let processes = self.reading.processes.as_ref().map_err(|why| *why)?;
        // A process that is listed twice has computed once.
        let pids: BTreeSet<u32> = processes
            .iter()
            .filter(|p| counts(p))
            .map(|p| p.pid)
            .collect();
        // Known without samples: no process has computed nothing.
        if pids.is_empty() {
            return measured(0.0, Source::Process);
        }
        let computed = self.reading.computed.as_ref().map_err(|why| *why)?;
        // Not `sum`, which is -0 of nothing.
        let sum = pids
            .iter()
            .filter_map(|pid| computed.get(pid))
            .fold(0.0, |sum, more| sum + more);
        measured(sum, Source::Process)
    }

    /// Returns whether a process uses the claim's device, as far as the device says it.
    fn is_in(process: &GpuProcess, holding: &Holding) -> bool {
        match &holding.part {
            Some(part) => process.gpu_instance == Some(part.gpu_instance.0),
            None => process.gpu_instance.is_none(),
        }
    }

    /// Returns whether the pod has other claims on the same device, so that its processes may be
    /// theirs.
    fn has_others(&self, pod: &PodRef, holding: &Holding) -> bool {
        let has = |other: &&Holding| other.pods.iter().any(|p| p.uid == pod.uid);
        let beside = |other: &&Holding| match (holding.kind.target, holding.kind.sharing) {
            // Use without a claim of the pod's own is use with admin access.
            (_, Sharing::Admin) => true,
            (TargetKind::Partition, Sharing::Exclusive) => false,
            _ => other.kind.sharing.holds() && other.part == holding.part,
        };
        self.holdings
            .iter()
            .filter(|other| *other != holding)
            .filter(beside)
            .any(|other| has(&other))
    }

    fn device(&self, holding: &Holding) -> DeviceUsage {
        let of_device = self.of_device(holding);
        let pods = match holding.pods.as_slice() {
            [] => vec![self.alone(holding, "")],
            [pod] if is_exclusive(holding) => vec![self.alone(holding, &pod.name)],
            pods => pods.iter().map(|pod| self.pod(holding, pod)).collect(),
        };
        DeviceUsage {
            claim: holding.claim.clone(),
            device: holding.device.clone(),
            kind: holding.kind,
            part: holding.part.clone(),
            granted: holding.granted,
            limit: self.limit(holding),
            quiet: self.quiet(holding, of_device),
            holders: holding.pods.clone(),
            utilization: of_device,
            pods,
        }
    }

    fn limit(&self, holding: &Holding) -> Figure<u64> {
        match (holding.kind.target, holding.kind.sharing) {
            (TargetKind::Gpu, Sharing::Exclusive) => self.reading.memory.map(|memory| memory.total),
            (TargetKind::Partition, Sharing::Exclusive) => self
                .part(holding)
                .and_then(|part| part.memory)
                .map(|m| m.total),
            (_, Sharing::Admin) => Err(Unknown::NoGrant),
            _ => holding.granted.memory.ok_or(Unknown::NoGrant),
        }
    }

    fn part(&self, holding: &Holding) -> Figure<&crate::PartReading> {
        let part = holding.part.as_ref().ok_or(Unknown::NotRead)?;
        self.reading.parts.get(&part.uuid).ok_or(Unknown::NotRead)
    }

    /// Returns the utilisation by all pods of the claim together.
    fn of_device(&self, holding: &Holding) -> Figure<Measured> {
        let monitors = |ratio: f64| measured(ratio, Source::Gpm);
        match (holding.kind.target, holding.kind.sharing) {
            (TargetKind::Gpu, Sharing::Exclusive) => self
                .reading
                .sm
                .and_then(monitors)
                .or_else(|_| measured(self.reading.busy?, Source::Device)),
            // In MIG mode only performance monitors measure: the GPU has no utilisation of its own
            // then, and processes are not sampled.
            (TargetKind::Partition, Sharing::Exclusive) => {
                self.part(holding)?.sm.and_then(monitors)
            }
            _ if holding.pods.is_empty() => Err(Unknown::NoPods),
            _ => {
                let mut sum = 0.0;
                for pod in &holding.pods {
                    sum += self.pod(holding, pod).utilization?.ratio;
                }
                measured(sum, Source::Process)
            }
        }
    }

    /// Returns the use by a claim with one pod, or with none that is known.
    fn alone(&self, holding: &Holding, name: &str) -> PodUsage {
        let memory = match (holding.kind.target, holding.kind.sharing) {
            (TargetKind::Gpu, Sharing::Exclusive) => {
                // Processes first, since memory in use includes what the driver takes. Where they
                // cannot be listed all of it counts: no other claim may use the GPU.
                let own = holding
                    .pods
                    .first()
                    .map(|pod| self.memory_of(|p| self.is_of(p, pod)));
                let all = self.reading.memory.map(|memory| memory.used);
                own.unwrap_or(Err(Unknown::NoPods)).or(all)
            }
            (TargetKind::Partition, Sharing::Exclusive) => self
                .part(holding)
                .and_then(|part| part.memory)
                .map(|m| m.used),
            _ => Err(Unknown::NoPods),
        };
        PodUsage {
            name: name.to_owned(),
            memory,
            utilization: self.of_device(holding),
        }
    }

    /// Returns the use by one of several pods of a claim, or by a pod of several claims on the GPU.
    fn pod(&self, holding: &Holding, pod: &PodRef) -> PodUsage {
        let own = |p: &GpuProcess| self.is_of(p, pod) && Self::is_in(p, holding);
        let (mut memory, mut utilization) = (self.memory_of(own), self.computed_by(own));
        if holding.part.is_some() && memory != Ok(0) {
            // Processes are not sampled in MIG mode.
            utilization = Err(Unknown::Together);
        }
        // A zero is right for each claim of the pod. Any other figure cannot be divided between
        // them.
        if self.has_others(pod, holding) {
            memory = memory.and_then(|bytes| {
                if bytes == 0 {
                    Ok(0)
                } else {
                    Err(Unknown::Together)
                }
            });
            utilization = utilization.and_then(|used| {
                if used.ratio > 0.0 {
                    Err(Unknown::Together)
                } else {
                    Ok(used)
                }
            });
        }
        PodUsage {
            name: pod.name.clone(),
            memory,
            utilization,
        }
    }

    fn quiet(&self, holding: &Holding, utilization: Figure<Measured>) -> Figure<bool> {
        let mine = |p: &&GpuProcess| {
            Self::is_in(p, holding)
                && (is_exclusive(holding) || holding.pods.iter().any(|pod| self.is_of(p, pod)))
        };
        let pods_known = is_exclusive(holding) || !holding.pods.is_empty();
        match &self.reading.processes {
            // Processes that only do graphics are not listed: the utilisation of a device of its
            // own says more.
            Ok(processes) if pods_known && !processes.iter().any(|p| mine(&p)) => {
                Ok(!is_exclusive(holding) || utilization.map_or(true, |used| used.ratio <= 0.0))
            }
            _ => utilization.map(|used| used.ratio <= 0.0),
        }
    }

    fn unattributed(&self) -> Figure<u64> {
        let used = self.reading.memory?.used;
        let of_pods = |p: &GpuProcess| {
            // Processes in partitions are counted with the partition's memory below.
            p.gpu_instance.is_none() && {
                let mut pods = self.holdings.iter().flat_map(|holding| &holding.pods);
                pods.any(|pod| self.is_of(p, pod))
            }
        };
        // Several claims may have shares of one partition.
        let mut parts = BTreeMap::new();
        for holding in self.holdings {
            if let Some(part) = &holding.part {
                parts.insert(&part.uuid, self.part(holding)?.memory?.used);
            }
        }
        let of_parts: u64 = parts.into_values().sum();
        Ok(used
            .saturating_sub(self.memory_of(of_pods)?)
            .saturating_sub(of_parts))
    }
}

/// Returns whether no other claim may use the device.
fn is_exclusive(holding: &Holding) -> bool {
    holding.kind.sharing == Sharing::Exclusive
}

/// Returns the utilisation by each pod, by namespace and name: the mean over its devices, relative
/// to the granted compute of shares (more than 1 is possible there).
pub fn pod_utilization<'a>(
    gpus: impl IntoIterator<Item = &'a GpuUsage>,
) -> BTreeMap<(String, String), Figure<f64>> {
    let mut all = BTreeMap::<_, Vec<Figure<f64>>>::new();
    for device in gpus.into_iter().flat_map(|gpu| &gpu.devices) {
        if !device.kind.sharing.holds() {
            continue;
        }
        let granted = device
            .granted
            .cores
            .filter(|cores| *cores > 0 && device.kind.sharing.is_shared());
        let granted = granted
            .and_then(|cores| u32::try_from(cores).ok())
            .map_or(1.0, |c| f64::from(c) / 100.0);
        for pod in device.pods.iter().filter(|pod| !pod.name.is_empty()) {
            let of_granted = pod.utilization.map(|used| used.ratio / granted);
            all.entry((device.claim.namespace.clone(), pod.name.clone()))
                .or_default()
                .push(of_granted);
        }
    }
    let mean = |figures: Vec<Figure<f64>>| {
        let count = u32::try_from(figures.len()).unwrap_or(u32::MAX).max(1);
        // A device whose use is not known makes the pod's mean unknown.
        let known: Figure<Vec<f64>> = figures.into_iter().collect();
        known.map(|known| known.iter().sum::<f64>() / f64::from(count))
    };
    all.into_iter()
        .map(|(pod, figures)| (pod, mean(figures)))
        .collect()
}
