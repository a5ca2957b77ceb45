//! Requests of a pod outside of its containers: annotations of HAMi, KAI and gpu-manager, their
//! schedulers and labels.

use divvy_api::names::{DRIVER, attributes};

use super::notes::{Notes, under};
use super::resources::{Ask, memory_text, percent_of};
use super::{Settings, gke, nvfractions};
use crate::claim::template::{Request, attribute};
use crate::yaml::{Map, Node};

/// Annotations of KAI that ask for a part of a GPU.
const KAI: [&str; 4] = [
    "gpu-fraction",
    "gpu-memory",
    "gpu-fraction-num-devices",
    "gpu-fraction-container-name",
];

/// Beginnings of the annotations and labels of these systems.
const DOMAINS: [&str; 5] = [
    "nvidia.com/",
    "hami.io/",
    "tencent.com/",
    "kai.scheduler/",
    "runai/",
];

/// Annotations in which a scheduler or device plugin of these systems keeps what it decided.
const STATE: [&str; 13] = [
    "nvidia.com/gpu-assigned",
    "nvidia.com/predicate-",
    "nvidia.com/vcuda-device",
    "hami.io/vgpu-",
    "hami.io/bind-",
    "hami.io/devices-",
    "tencent.com/gpu-assigned",
    "tencent.com/predicate-",
    "nvidia.com/vgpu-devices",
    "received-resource-type",
    "runai-gpu-group",
    "runai-gpu",
    "kai.scheduler/gpu-group",
];

/// Environment variables of HAMi's library.
const LIBRARY: [&str; 10] = [
    "CUDA_DEVICE_MEMORY_LIMIT",
    "CUDA_DEVICE_SM_LIMIT",
    "CUDA_DEVICE_MEMORY_SHARED_CACHE",
    "CUDA_TASK_PRIORITY",
    "CUDA_OVERSUBSCRIBE",
    "CUDA_DISABLE_CONTROL",
    "GPU_CORE_UTILIZATION_POLICY",
    "ACTIVE_OOM_KILLER",
    "LIBCUDA_LOG_LEVEL",
    "CUDA_MPS_",
];

/// Requests and conditions of a pod as a whole.
#[derive(Debug, Default)]
pub(super) struct Hints {
    /// CEL expressions for each device.
    pub(super) selectors: Vec<String>,
    /// Attributes that all devices have in common.
    pub(super) same: Vec<String>,
    /// HAMi makes partitions of what is asked for.
    pub(super) partitions: bool,
    /// Requests of containers, for which KAI has annotations: the container's name, or the first
    /// container, and the path of the annotation.
    pub(super) parts: Vec<(Option<String>, Ask, String)>,
    /// Memory of the GPUs in MiB, if it is known.
    pub(super) gpu_memory: Option<u64>,
    /// Upper limit of compute in percent, with its path.
    pub(super) core_limit: Option<(u64, String)>,
    /// Meaning of GKE's labels of nodes for a GPU.
    pub(super) labels: gke::Labels,
    /// Paths of the annotations that make the conditions.
    pub(super) read: Vec<String>,
}

/// Says whether a pod with this annotation asks KAI for a part of a GPU.
pub(super) fn asks_for_part(annotation: &str) -> bool {
    matches!(annotation, "gpu-fraction" | "gpu-memory") || nvfractions::is_request(annotation)
}

/// Takes out of a pod (or a template of pods) what these systems read of it.
pub(super) fn take(template: &mut Map, settings: Settings, notes: &mut Notes) -> Hints {
    let mut hints = Hints {
        gpu_memory: settings.gpu_memory,
        ..Hints::default()
    };
    let metadata = "metadata";
    if let Some(meta) = template.get_mut("metadata").and_then(Node::map_mut) {
        if let Some(all) = meta.get_mut("annotations").and_then(Node::map_mut) {
            hints.kai(all, metadata, notes);
            hints.annotations(all, metadata, notes);
        }
        meta.remove_if_empty("annotations");
        labels(meta, metadata, notes);
    }
    if let Some(spec) = template.get_mut("spec").and_then(Node::map_mut) {
        hints.labels = gke::take(spec, "spec", notes);
    }
    hints
}

impl Hints {
    /// Asks for parts of GPUs by percent, or by amounts where the size of the GPUs is known.
    pub(super) fn part(&self, count: u64, memory: u64, cores: Option<u64>) -> Ask {
        let Some(size) = self.gpu_memory else {
            let percent = cores.map_or(memory, |cores| memory.max(cores));
            return Ask::new("share", Request::fractions(count, percent));
        };
        let mebibytes = size.saturating_mul(memory) / 100;
        let request = Request::shares(count, Some(&memory_text(mebibytes)), cores);
        Ask::new("share", request)
    }

    fn select(&mut self, at: &str, expression: String) {
        self.selectors.push(expression);
        self.read.push(at.to_owned());
    }

    /// Reads KAI's annotations for a part of a GPU.
    fn kai(&mut self, all: &mut Map, metadata: &str, notes: &mut Notes) {
        let [fraction, memory, count, container] = KAI.map(|name| {
            let at = format!("{metadata}.annotations[{name}]");
            let value = all.remove(name)?.scalar().unwrap_or_default();
            Some((value, at))
        });
        let has_new = all.iter().any(|(name, _)| nvfractions::is_request(name));
        let count = count.and_then(|(text, at)| {
            let number = text.parse::<u64>().ok().filter(|number| *number > 0);
            if number.is_none() {
                notes.refuse(
                    &at,
                    format!("{text:?} is not a number of GPUs: write 1 or more"),
                );
            } else if fraction.is_none() && memory.is_none() && !has_new {
                notes.note(
                    &at,
                    "means nothing without gpu-fraction or gpu-memory: removed",
                );
            }
            number
        });
        let count = count.unwrap_or(1);
        for new in nvfractions::take(all, metadata, count, notes) {
            self.parts.push((Some(new.container), new.ask, new.at));
        }
        if !self.parts.is_empty() {
            for (_, at) in [&fraction, &memory, &container].into_iter().flatten() {
                notes.note(
                    at,
                    "KAI reads the annotations of the container instead: removed",
                );
            }
            return;
        }
        let (request, at) = match (fraction, memory) {
            (None, None) => {
                if let Some((_, at)) = &container {
                    notes.note(
                        at,
                        "means nothing without gpu-fraction or gpu-memory: removed",
                    );
                }
                return;
            }
            (Some(_), Some((_, at))) => {
                return notes.refuse(
                    &at,
                    "KAI refuses it beside gpu-fraction: remove one of the two",
                );
            }
            (Some((text, at)), None) => match percent_of(&text) {
                Some(100) => (Ask::new("gpu", Request::gpus(count)), at),
                Some(percent) if percent < 100 => {
                    if !is_whole_percent(&text) {
                        notes.note(&at, format!("{text} is rounded up to {percent} percent"));
                    }
                    (self.part(count, percent, None), at)
                }
                _ => {
                    let what = format!(
                        "{text:?} is not a part of a GPU: write a number between 0 and 1, and the number of GPUs in \
                         gpu-fraction-num-devices"
                    );
                    return notes.refuse(&at, what);
                }
            },
            (None, Some((text, at))) => match text.parse::<u64>() {
                Ok(mebibytes) if mebibytes > 0 => {
                    let memory = memory_text(mebibytes);
                    (
                        Ask::new("share", Request::shares(count, Some(&memory), None)),
                        at,
                    )
                }
                _ => {
                    let what = format!(
                        "{text:?} is not an amount: write the number of MiB, such as \"2048\""
                    );
                    return notes.refuse(&at, what);
                }
            },
        };
        self.parts
            .push((container.map(|(name, _)| name), request, at));
    }

    /// Reads HAMi's annotations, and notes those of the others.
    fn annotations(&mut self, all: &mut Map, metadata: &str, notes: &mut Notes) {
        let names: Vec<String> = all.iter().map(|(name, _)| name.to_owned()).collect();
        for name in names {
            let at = &format!("{metadata}.annotations[{name}]");
            let value = all.get(&name).and_then(Node::scalar).unwrap_or_default();
            let words: Vec<&str> = value
                .split(',')
                .map(str::trim)
                .filter(|word| !word.is_empty())
                .collect();
            match name.as_str() {
                "nvidia.com/use-gputype"
                | "nvidia.com/nouse-gputype"
                | "nvidia.com/use-gpuuuid"
                | "nvidia.com/nouse-gpuuuid"
                    if words.is_empty() =>
                {
                    notes.note(at, "is empty: removed");
                }
                "nvidia.com/use-gputype" => self.select(at, product(&words)),
                "nvidia.com/nouse-gputype" => self.select(at, format!("!({})", product(&words))),
                "nvidia.com/use-gpuuuid" => self.select(at, among(&words)),
                "nvidia.com/nouse-gpuuuid" => self.select(at, format!("!({})", among(&words))),
                "nvidia.com/numa-bind" if value == "true" => {
                    self.same.push(attributes::NUMA_NODE.to_owned());
                    self.read.push(at.clone());
                }
                "nvidia.com/vgpu-mode" if value == "mig" => {
                    self.partitions = true;
                    self.read.push(at.clone());
                }
                "nvidia.com/vgpu-mode" if value == "mps" => {
                    notes.note(
                        at,
                        "divvy's MPS has equal slots by a policy (docs/mps.md), so programs run in turns: removed",
                    );
                }
                "nvidia.com/numa-bind" | "nvidia.com/vgpu-mode" => {
                    notes.note(at, format!("{value}: a claim is so without it: removed"));
                }
                "hami.io/gpu-scheduler-policy" => notes.note(at, placement(&value)),
                "hami.io/node-scheduler-policy" => notes.note(
                    at,
                    format!("{value}: nodes are the scheduler's choice (its scoring strategy, or pod affinity): removed"),
                ),
                "tencent.com/vcuda-core-limit" | "nvidia.com/vcuda-core-limit" => {
                    match value.parse::<u64>() {
                        Ok(limit) if (1..=100).contains(&limit) => {
                            self.core_limit = Some((limit, at.clone()));
                        }
                        _ => {
                            let what = format!("{value:?} is not a percentage: write 1 to 100");
                            notes.refuse(at, what);
                        }
                    }
                }
                _ if STATE.iter().any(|state| name.starts_with(state)) => {
                    notes.note(at, "was written when the pod was placed: removed");
                }
                _ if name.starts_with("kai.scheduler/") => {
                    notes.note(at, "the standard scheduler does not read it: it stays, without effect");
                    continue;
                }
                _ if is_of_domains(&name) => {
                    notes.unknown(at, "there is no rule for this annotation: it stays, and divvy does not read it");
                    continue;
                }
                _ => continue,
            }
            all.remove(&name);
        }
    }
}

/// Says whether the name is in a domain of these systems.
pub(super) fn is_of_domains(name: &str) -> bool {
    DOMAINS.iter().any(|domain| name.starts_with(domain)) || KAI.contains(&name)
}

/// Says whether a fraction is a whole number of percents.
fn is_whole_percent(text: &str) -> bool {
    let nanos = text.parse::<divvy_model::Quantity>().map(|q| q.nanos());
    nanos.is_ok_and(|nanos| nanos % 10_000_000 == 0)
}

/// Selects products as HAMi does: by a part of the name, in any case.
fn product(words: &[&str]) -> String {
    let name = attribute(DRIVER, attributes::PRODUCT_NAME);
    let one = |word: &&str| {
        // HAMi's types begin with the vendor; names of products do not.
        let word = word.to_lowercase();
        let word = word.strip_prefix("nvidia-").unwrap_or(&word);
        format!("{name}.lowerAscii().contains({word:?})")
    };
    words.iter().map(one).collect::<Vec<_>>().join(" || ")
}

/// Selects devices of these cards.
fn among(uuids: &[&str]) -> String {
    let list: Vec<String> = uuids.iter().map(|uuid| format!("{uuid:?}")).collect();
    format!(
        "{} in [{}]",
        attribute(DRIVER, attributes::GPU_UUID),
        list.join(", ")
    )
}

/// Returns the counterpart of HAMi's policy for the choice among the GPUs of a node.
fn placement(policy: &str) -> String {
    match policy {
        "binpack" => "binpack: the scheduler takes the first device that fits, so one GPU is filled before the next: removed".to_owned(),
        "topology-aware" => "topology-aware: removed; for GPUs that reach each other over NVLink, add the constraint that \
                             divvy claim gpu --count 2 --same nvlink prints"
            .to_owned(),
        other => format!("{other}: the scheduler takes the first device that fits; a claim can only keep its own devices apart \
                          (docs/sharing.md): removed"),
    }
}

/// Notes labels of these systems.
fn labels(meta: &Map, metadata: &str, notes: &mut Notes) {
    for (name, _) in meta
        .get("labels")
        .and_then(Node::map)
        .into_iter()
        .flat_map(Map::iter)
    {
        let at = format!("{metadata}.labels[{name}]");
        if name.ends_with("/queue") && is_of_domains(name) {
            notes.note(
                &at,
                "queues are KAI's: the label stays, without effect; for a quota of claims, a ResourceQuota counts those of a \
                 class (docs/sharing.md)",
            );
        } else if is_of_domains(name) {
            notes.note(&at, "divvy does not read it: it stays, without effect");
        }
    }
}

/// Hands the pod to the standard scheduler, which allocates claims.
pub(super) fn scheduler(spec: &mut Map, at: &str, notes: &mut Notes) {
    let name = spec.get("schedulerName").and_then(Node::text);
    let lost = match name {
        // The last is of the gpu-manager that counts in nvidia.com/vcuda-core.
        Some("hami-scheduler" | "gpu-scheduler") => {
            "the standard scheduler allocates claims: removed"
        }
        Some("kai-scheduler") => {
            "the standard scheduler allocates claims: removed, and with it KAI's queues, gangs, preemption and reclaim"
        }
        None | Some("" | "default-scheduler") => return,
        Some(other) => {
            let what = format!(
                "{other} must allocate claims, as the standard scheduler does: else remove it"
            );
            return notes.note(&under(at, "schedulerName"), what);
        }
    };
    notes.note(&under(at, "schedulerName"), lost);
    spec.remove("schedulerName");
}

/// Notes what of a pod that now claims its GPUs has lost its effect.
pub(super) fn notes_on_rest(spec: &Map, at: &str, notes: &mut Notes) {
    let selector = spec.get("nodeSelector").and_then(Node::map);
    for (label, value) in selector.into_iter().flat_map(Map::iter) {
        let at = format!("{at}.nodeSelector[{label}]");
        label_of_node(label, &value.scalar().unwrap_or_default(), &at, notes);
    }
    let required = [
        "nodeAffinity",
        "requiredDuringSchedulingIgnoredDuringExecution",
        "nodeSelectorTerms",
    ];
    let terms = spec
        .get("affinity")
        .and_then(|affinity| affinity.at(&required));
    for term in terms.map(Node::items).unwrap_or_default() {
        for expression in term
            .at(&["matchExpressions"])
            .map(Node::items)
            .unwrap_or_default()
        {
            let label = expression.text_at(&["key"]).unwrap_or_default();
            let operator = expression.text_at(&["operator"]).unwrap_or_default();
            let values: Vec<String> = expression
                .at(&["values"])
                .map(Node::items)
                .unwrap_or_default()
                .iter()
                .filter_map(Node::scalar)
                .collect();
            let at = format!("{at}.affinity.nodeAffinity[{label}]");
            if gke::is_request(label) && ["In", "Exists", "Gt", "Lt"].contains(&operator) {
                let what = "is a request on GKE, and no node of divvy has the label: write it as a nodeSelector, of which convert \
                            makes the claim, or write the claim and remove it";
                notes.refuse(&at, what);
                continue;
            }
            label_of_node(label, &values.join(","), &at, notes);
        }
    }
    for list in ["initContainers", "containers"] {
        let containers = spec.get(list).map(Node::items).unwrap_or_default();
        for (number, container) in containers.iter().enumerate() {
            environment(container, &format!("{at}.{list}[{number}]"), notes);
        }
    }
}

fn label_of_node(label: &str, value: &str, at: &str, notes: &mut Notes) {
    if gke::is_of_nodes(label) {
        let what = "stays, and the nodes of divvy need the label, which GKE sets by their pool; a selector of the claim does without \
                    (productName, docs/reference/attributes.md)";
        notes.note(at, what);
    } else if label == "gpu" && value == "on" {
        notes.note(
            at,
            "HAMi's label for its nodes stays: label divvy's nodes so, too, or remove it",
        );
    } else if label.starts_with("nvidia.com/")
        && (value.contains("-SHARED") || value.contains("-MIG-"))
    {
        notes.note(
            at,
            format!("{value} is a label for the device plugin's configuration, which divvy's nodes do not have: select by attribute \
                     instead (docs/reference/attributes.md), and remove it"),
        );
    } else if label.starts_with("nvidia.com/") {
        notes.note(
            at,
            "stays, for as long as GPU Feature Discovery labels the nodes; a selector of the claim does without (productName, \
             docs/reference/attributes.md)",
        );
    }
}

fn environment(container: &Node, at: &str, notes: &mut Notes) {
    for variable in container.at(&["env"]).map(Node::items).unwrap_or_default() {
        let name = variable.text_at(&["name"]).unwrap_or_default();
        let at = format!("{at}.env[{name}]");
        if name == "NVIDIA_VISIBLE_DEVICES" {
            notes.note(
                &at,
                "chooses no GPUs: the container sees those of its claim (docs/containers.md)",
            );
        } else if LIBRARY.iter().any(|known| name.starts_with(known)) {
            notes.note(&at, "is read by HAMi's library or by MPS, which are not there: it stays, without effect");
        }
    }
}
