//! Metrics of use. A figure that is not known has no series.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use divvy_model::{DeviceName, GpuUuid};
use divvy_telemetry::{Counter, Durations, Labels, MetricsRegistry};
use divvy_usage::{DeviceUsage, Verdicts};

use super::{ERROR, Info, OK};
use crate::node::facts::{PodsOfClaims, Used};

/// The calls that are timed.
const CALLS: [&str; 5] = [
    "processes",
    "memory",
    "utilization",
    "process_utilization",
    "sm_utilization",
];

type Series = Info<f64, AtomicU64>;

/// Handles to them.
#[derive(Clone)]
pub(crate) struct UsageMetrics {
    pub(crate) read_seconds: Durations,
    used: Series,
    granted: Series,
    limit: Series,
    utilization: Series,
    idle: Series,
    over: Series,
    gpu_used: Series,
    gpu_reserved: Series,
    gpu_unattributed: Series,
    age: Series,
    pods: Series,
    pub(crate) overuses: Counter,
    pub(crate) idles: Counter,
}

impl UsageMetrics {
    pub(crate) fn new(registry: &MetricsRegistry) -> Self {
        let series = |name: &str, help: &str| Series::new(registry.real_gauges(name, help));
        Self {
            read_seconds: registry.durations(
                "usage_read_seconds",
                "Time of one call that reads the use of a GPU",
                "call",
                &CALLS,
                &[OK, ERROR],
            ),
            used: series(
                "claim_memory_used_bytes",
                "GPU memory that a pod of a claim uses",
            ),
            granted: series(
                "claim_memory_granted_bytes",
                "GPU memory that a claim may use",
            ),
            limit: series(
                "claim_memory_limit_bytes",
                "Limit of the GPU memory of a share, where the driver keeps one",
            ),
            utilization: series(
                "claim_utilization_ratio",
                "Share of the time in which a pod of a claim used the GPU or partition",
            ),
            idle: series(
                "claim_idle_seconds",
                "Time since anything was seen to use a device of the claim",
            ),
            over: series(
                "claim_overuse",
                "1 if the pods of a share use more memory than it may use",
            ),
            gpu_used: series(
                "gpu_memory_used_bytes",
                "Memory in use on a GPU that claims hold",
            ),
            gpu_reserved: series(
                "gpu_memory_reserved_bytes",
                "Memory that the driver keeps back",
            ),
            gpu_unattributed: series(
                "gpu_memory_unattributed_bytes",
                "Memory in use on a GPU that belongs to no claim",
            ),
            age: series(
                "usage_age_seconds",
                "Age of the oldest figure about the use of a GPU",
            ),
            pods: series(
                "pod_gpu_utilization_ratio",
                "Utilisation of a pod's devices relative to what it was granted, mean of a minute",
            ),
            overuses: registry.counter("overuse", "Times that a share went over its grant"),
            idles: registry.counter("idle", "Times that a claim became idle"),
        }
    }

    /// Sets everything.
    pub(crate) fn show(
        &self,
        used: &Used,
        verdicts: &Verdicts,
        pods: &BTreeMap<(String, String), f64>,
        listed: &PodsOfClaims,
    ) {
        // Collected first, and set as a whole: series of claims that are gone go in the same step.
        let mut by_claim = ByClaim::default();
        for (gpu, usage) in &used.gpus {
            for device in &usage.devices {
                by_claim.add(gpu, device, verdicts, listed);
            }
        }
        self.used.set(by_claim.used);
        self.granted.set(by_claim.granted);
        self.limit.set(by_claim.limit);
        self.utilization.set(by_claim.utilization);
        self.idle.set(by_claim.idle);
        self.over.set(by_claim.over);
        let of_gpus = |figure: &dyn Fn(&GpuUuid) -> Option<f64>| -> BTreeMap<Labels, f64> {
            let series = |(gpu, (device, _)): (&GpuUuid, &(String, Duration))| {
                let labels = vec![("UUID", gpu.to_string()), ("device", device.clone())];
                Some((labels, figure(gpu)?))
            };
            used.about.iter().filter_map(series).collect()
        };
        let memory = |gpu: &GpuUuid| used.gpus.get(gpu).and_then(|usage| usage.memory.ok());
        self.gpu_used
            .set(of_gpus(&|gpu| memory(gpu).map(|memory| real(memory.used))));
        self.gpu_reserved.set(of_gpus(&|gpu| {
            memory(gpu).map(|memory| real(memory.reserved))
        }));
        let unattributed =
            |gpu: &GpuUuid| used.gpus.get(gpu).and_then(|usage| usage.unattributed.ok());
        self.gpu_unattributed
            .set(of_gpus(&|gpu| unattributed(gpu).map(real)));
        self.age.set(of_gpus(&|gpu| {
            used.about.get(gpu).map(|(_, age)| age.as_secs_f64())
        }));
        let of_pod = |((namespace, pod), ratio): (&(String, String), &f64)| {
            (
                vec![("namespace", namespace.clone()), ("pod", pod.clone())],
                *ratio,
            )
        };
        self.pods.set(pods.iter().map(of_pod).collect());
    }
}

/// Series of claims, with the labels of `divvy_claim_device_info`.
#[derive(Default)]
struct ByClaim {
    used: BTreeMap<Labels, f64>,
    granted: BTreeMap<Labels, f64>,
    limit: BTreeMap<Labels, f64>,
    utilization: BTreeMap<Labels, f64>,
    idle: BTreeMap<Labels, f64>,
    over: BTreeMap<Labels, f64>,
}

impl ByClaim {
    fn add(
        &mut self,
        gpu: &GpuUuid,
        device: &DeviceUsage,
        verdicts: &Verdicts,
        listed: &PodsOfClaims,
    ) {
        let key: (_, DeviceName) = (device.claim.uid.clone(), device.device.clone());
        let (over, idle) = (
            verdicts.over.get(&key),
            verdicts.idle.get(&device.claim.uid),
        );
        let claim = (device.claim.namespace.clone(), device.claim.name.clone());
        let listed = listed.get(&claim);
        for pod in &device.pods {
            let mut labels: Labels = vec![
                ("namespace", device.claim.namespace.clone()),
                ("claim", device.claim.name.clone()),
                ("device", device.device.to_string()),
                ("UUID", gpu.to_string()),
            ];
            if let Some(part) = &device.part {
                labels.push(("GPU_I_ID", part.gpu_instance.0.to_string()));
            }
            labels.push(("pod", pod.name.clone()));
            // If several containers of the pod have the claim, it is not known which one uses the
            // device.
            let containers = listed
                .and_then(|pods| pods.get(&pod.name))
                .filter(|all| all.len() == 1);
            labels.extend(
                containers
                    .into_iter()
                    .flatten()
                    .map(|name| ("container", name.clone())),
            );
            if let Ok(measured) = pod.utilization {
                let mut labels = labels.clone();
                labels.push(("source", measured.source.name().to_owned()));
                self.utilization.insert(labels, measured.ratio);
            }
            let put = |series: &mut BTreeMap<Labels, f64>, value: Option<f64>| {
                if let Some(value) = value {
                    series.insert(labels.clone(), value);
                }
            };
            put(&mut self.used, pod.memory.ok().map(real));
            put(&mut self.granted, device.limit.ok().map(real));
            put(&mut self.limit, device.granted.limit.map(real));
            put(&mut self.idle, idle.map(Duration::as_secs_f64));
            put(&mut self.over, over.map(|over| f64::from(u8::from(*over))));
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes are exact up to 8 PiB")]
fn real(bytes: u64) -> f64 {
    bytes as f64
}
