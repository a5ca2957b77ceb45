//! Layouts of a pod: which field of an object is which of a pod, there and back.

use super::super::notes::under;
use crate::yaml::{Map, Node};

/// Places of a pod's fields in an object.
#[derive(Debug)]
pub(in super::super) struct Layout {
    /// Path of the pod's `spec`; empty where its fields stand in the object itself.
    spec: &'static [&'static str],
    metadata: Metadata,
    /// Containers that have fields of their own.
    mains: &'static [Main],
    pub(in super::super) claims: Claims,
}

/// Place of a pod's annotations and labels.
#[derive(Debug)]
enum Metadata {
    /// Nowhere that is known.
    None,
    /// Fields of the object itself.
    Own,
    At(&'static [&'static str]),
}

/// Way in which a kind takes claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Claims {
    /// The way of pods.
    Pod,
    /// The same, with the number of GPUs for Ray beside it.
    Ray,
    /// `draResources`, for the only container.
    Nim,
    /// Not at all, with the reason.
    None(&'static str),
}

/// A container with fields of its own.
#[derive(Debug)]
struct Main {
    /// Name, unless the object gives one.
    name: &'static str,
    /// Field of the spec with the container; empty for none.
    field: &'static str,
    /// Field of the object with its resources, if they stand apart.
    resources: Option<Apart>,
}

/// Resources that stand apart.
#[derive(Debug)]
struct Apart {
    field: &'static str,
    /// Makes of them what a container has.
    read: fn(&Node) -> Node,
}

const fn main(name: &'static str, field: &'static str) -> Main {
    Main {
        name,
        field,
        resources: None,
    }
}

const fn apart(
    name: &'static str,
    field: &'static str,
    resources: &'static str,
    read: fn(&Node) -> Node,
) -> Main {
    let apart = Apart {
        field: resources,
        read,
    };
    Main {
        name,
        field,
        resources: Some(apart),
    }
}

/// Name of the container that KServe makes of a model.
const KSERVE: &str = "kserve-container";

impl Layout {
    /// `metadata` and `spec`, as in a Deployment.
    pub(in super::super) const TEMPLATE: Self = Self {
        spec: &["spec"],
        metadata: Metadata::At(&["metadata"]),
        mains: &[],
        claims: Claims::Pod,
    };
    /// The fields of a spec alone.
    pub(in super::super) const SPEC: Self = Self {
        spec: &[],
        metadata: Metadata::None,
        mains: &[],
        claims: Claims::Pod,
    };
    /// Component of KServe: a spec, in which a model is a container.
    pub(super) const MODEL: Self = Self {
        spec: &[],
        metadata: Metadata::Own,
        mains: &[
            main(KSERVE, "model"),
            main(KSERVE, "huggingface"),
            main(KSERVE, "lightgbm"),
            main(KSERVE, "onnx"),
            main(KSERVE, "paddle"),
            main(KSERVE, "pmml"),
            main(KSERVE, "pytorch"),
            main(KSERVE, "sklearn"),
            main(KSERVE, "tensorflow"),
            main(KSERVE, "triton"),
            main(KSERVE, "xgboost"),
        ],
        claims: Claims::Pod,
    };
    /// Runtime of KServe: a spec with its annotations.
    pub(super) const RUNTIME: Self = Self {
        spec: &[],
        metadata: Metadata::Own,
        mains: &[],
        claims: Claims::Pod,
    };
    /// Group of Ray.
    pub(super) const RAY: Self = Self {
        spec: &["template", "spec"],
        metadata: Metadata::At(&["template", "metadata"]),
        mains: &[],
        claims: Claims::Ray,
    };
    /// `NIMService`: pod and container in one.
    pub(super) const NIM: Self = Self {
        spec: &[],
        metadata: Metadata::Own,
        mains: &[apart("nim", "", "resources", Node::clone)],
        claims: Claims::Nim,
    };
    /// The same without claims.
    pub(super) const NEMO: Self = Self {
        spec: &[],
        metadata: Metadata::Own,
        mains: &[apart("main", "", "resources", Node::clone)],
        claims: Claims::None("the kind has no field for claims"),
    };
    /// Component of Dynamo: `extraPodSpec`, its main container with resources beside it.
    pub(super) const DYNAMO: Self = Self {
        spec: &["extraPodSpec"],
        metadata: Metadata::At(&["extraPodMetadata"]),
        mains: &[apart("main", "mainContainer", "resources", of_dynamo)],
        claims: Claims::Pod,
    };
    /// Template of Knative.
    pub(super) const KNATIVE: Self = Self {
        spec: &["spec"],
        metadata: Metadata::At(&["metadata"]),
        mains: &[],
        claims: Claims::None("Knative refuses claims (knative/serving#15332)"),
    };
    /// Template of Argo Workflows: one container, or a script.
    pub(super) const STEP: Self = Self {
        spec: &[],
        metadata: Metadata::At(&["metadata"]),
        mains: &[main("main", "container"), main("main", "script")],
        claims: Claims::None("Argo Workflows takes claims in podSpecPatch only"),
    };
    /// Trainer of a `TrainJob`.
    pub(super) const TRAINER: Self = Self {
        spec: &[],
        metadata: Metadata::None,
        mains: &[apart("trainer", "", "resourcesPerNode", Node::clone)],
        claims: Claims::None(
            "a TrainJob has no field for claims; the pods of its training runtime have",
        ),
    };
    /// Driver or executors of Spark.
    pub(super) const SPARK: Self = Self {
        spec: &[],
        metadata: Metadata::None,
        mains: &[apart("spark", "", "gpu", of_spark)],
        claims: Claims::None("Spark's operator has no field for claims but in template"),
    };

    /// Says whether fields of this layout are there.
    pub(super) fn is_in(&self, host: &Map) -> bool {
        let has_list = self.spec_of(host).is_some_and(|spec| {
            let containers = spec.get("containers").map(Node::items);
            containers.is_some_and(|all| !all.is_empty())
        });
        has_list || self.mains_of(host).next().is_some()
    }

    /// Returns why there can be no claims.
    pub(super) fn claimless(&self) -> Option<&'static str> {
        match self.claims {
            Claims::None(why) => Some(why),
            _ => None,
        }
    }

    fn spec_of<'o>(&self, host: &'o Map) -> Option<&'o Map> {
        below(host, self.spec)
    }

    fn mains_of<'o>(&'o self, host: &'o Map) -> impl Iterator<Item = &'static Main> + use<'o> {
        let spec = self.spec_of(host);
        let has = |map: Option<&Map>, field: &str| map.is_some_and(|map| map.get(field).is_some());
        self.mains.iter().filter(move |main| {
            let apart = main.resources.as_ref();
            has(spec, main.field) || apart.is_some_and(|apart| has(Some(host), apart.field))
        })
    }

    /// Returns the pod, with `metadata` and `spec`. Other fields stay where they are.
    pub(super) fn template(&self, host: &Map) -> Map {
        let mut template = Map::default();
        let mut metadata = Map::default();
        match self.metadata {
            Metadata::None => {}
            Metadata::Own => {
                for field in ["annotations", "labels"] {
                    if let Some(value) = host.get(field) {
                        metadata.set(field, value.clone());
                    }
                }
            }
            Metadata::At(path) => metadata = below(host, path).cloned().unwrap_or_default(),
        }
        if !metadata.is_empty() {
            template.set("metadata", metadata);
        }
        let mut spec = self.spec_of(host).cloned().unwrap_or_default();
        let mains: Vec<Node> = self
            .mains_of(host)
            .map(|main| main.read(host, &spec).into())
            .collect();
        if self.spec.is_empty() {
            for apart in self.mains.iter().filter_map(|main| main.resources.as_ref()) {
                spec.remove(apart.field);
            }
        }
        if !mains.is_empty() {
            let others = spec.get("containers").map(Node::items).unwrap_or_default();
            let all: Vec<Node> = mains.into_iter().chain(others.iter().cloned()).collect();
            spec.set("containers", Node::List(all));
        }
        if self.claims == Claims::Nim {
            nim::read(host, &mut spec);
        }
        template.set("spec", spec);
        template
    }

    /// Writes a converted pod back.
    pub(in super::super) fn put(&self, host: &mut Map, mut template: Map) {
        let mains: Vec<&Main> = self.mains_of(host).collect();
        let had_list = self
            .spec_of(host)
            .is_some_and(|spec| spec.get("containers").is_some());
        let old = host.clone();
        let metadata = template.remove("metadata");
        let metadata = metadata.as_ref().and_then(Node::map);
        let Some(Node::Map(mut spec)) = template.remove("spec") else {
            return;
        };
        let mut containers = match spec.get("containers") {
            Some(Node::List(all)) => all.clone(),
            _ => Vec::new(),
        };
        let others = containers.split_off(mains.len().min(containers.len()));
        if had_list {
            spec.set("containers", Node::List(others));
        } else {
            spec.remove("containers");
        }
        if self.claims == Claims::Nim {
            nim::write(&old, &mut spec);
        }
        let mut apart: Vec<(&str, Node)> = Vec::new();
        for (main, container) in mains.iter().zip(containers) {
            let Node::Map(mut container) = container else {
                continue;
            };
            if let Some(of) = &main.resources
                && let Some(mut resources) = container.remove("resources")
            {
                if self.claims == Claims::Nim
                    && let Some(resources) = resources.map_mut()
                {
                    // The operator links the claims to its container by itself.
                    resources.remove("claims");
                }
                apart.push((of.field, resources));
            }
            if main.field.is_empty() {
                continue;
            }
            let had_name = spec.get(main.field).and_then(|main| main.at(&["name"]));
            if had_name.is_none() {
                container.remove("name");
            }
            if spec.get(main.field).is_some() || !container.is_empty() {
                spec.set(main.field, container);
            }
        }
        set_below(host, self.spec, spec);
        match self.metadata {
            Metadata::None => {}
            Metadata::Own => {
                for field in ["annotations", "labels"] {
                    match metadata.and_then(|new| new.get(field)) {
                        Some(value) => host.set(field, value.clone()),
                        None => drop(host.remove(field)),
                    }
                }
            }
            Metadata::At(path) => {
                if let Some(metadata) = metadata {
                    set_below(host, path, metadata.clone());
                }
            }
        }
        for (field, value) in apart {
            host.set(field, value);
            host.remove_if_empty(field);
        }
    }

    /// Returns the path in the object of a field in the pod.
    pub(in super::super) fn field(&self, host: &Map, at: &str, field: &str) -> String {
        let spec = self.spec.iter().fold(at.to_owned(), |at, f| under(&at, f));
        for (number, main) in self.mains_of(host).enumerate() {
            let Some(rest) = field.strip_prefix(&format!("spec.containers[{number}]")) else {
                continue;
            };
            let of_resources = rest.strip_prefix(".resources");
            return match (&main.resources, of_resources) {
                (Some(apart), Some(rest)) => under(at, apart.field) + rest,
                _ if main.field.is_empty() => under(at, rest.trim_start_matches('.')),
                _ => under(&spec, main.field) + rest,
            };
        }
        if let Some(rest) = field.strip_prefix("metadata") {
            let rest = rest.trim_start_matches('.');
            let at = match self.metadata {
                Metadata::At(path) => path.iter().fold(at.to_owned(), |at, f| under(&at, f)),
                Metadata::Own | Metadata::None => at.to_owned(),
            };
            return if rest.is_empty() {
                at
            } else {
                under(&at, rest)
            };
        }
        let rest = field.strip_prefix("spec").unwrap_or(field);
        match rest.strip_prefix('.') {
            Some(rest) => under(&spec, rest),
            None => spec,
        }
    }
}

impl Main {
    /// Reads the container.
    fn read(&self, host: &Map, spec: &Map) -> Map {
        let own = spec.get(self.field).and_then(Node::map).cloned();
        let mut container = own.unwrap_or_default();
        if container.get("name").is_none() {
            container.set("name", self.name);
        }
        if let Some(apart) = &self.resources
            && let Some(resources) = host.get(apart.field)
        {
            container.set("resources", (apart.read)(resources));
        }
        container
    }
}

fn below<'o>(map: &'o Map, path: &[&str]) -> Option<&'o Map> {
    path.iter()
        .try_fold(map, |map, field| map.get(field)?.map())
}

/// Sets the fields below a path.
fn set_below(map: &mut Map, path: &[&str], value: Map) {
    let Some((first, rest)) = path.split_first() else {
        *map = value;
        return;
    };
    if map.get(first).and_then(Node::map).is_none() {
        map.set(first, Map::default());
    }
    if let Some(next) = map.get_mut(first).and_then(Node::map_mut) {
        set_below(next, rest, value);
    }
}

/// Reads resources of Dynamo, where `gpu` is `nvidia.com/gpu` and other names are below `custom`.
fn of_dynamo(resources: &Node) -> Node {
    let Some(all) = resources.map() else {
        return resources.clone();
    };
    let mut new = all.clone();
    for list in ["limits", "requests"] {
        let Some(amounts) = new.get_mut(list).and_then(Node::map_mut) else {
            continue;
        };
        let kind = amounts.remove("gpuType");
        let kind = kind.and_then(|kind| kind.scalar());
        if let Some(gpus) = amounts.remove("gpu") {
            amounts.set(kind.as_deref().unwrap_or("nvidia.com/gpu"), gpus);
        }
        if let Some(Node::Map(custom)) = amounts.remove("custom") {
            for (name, amount) in custom.iter() {
                amounts.set(name, amount.clone());
            }
        }
    }
    new.into()
}

/// Reads the number of GPUs of Spark.
fn of_spark(gpu: &Node) -> Node {
    let name = gpu.text_at(&["name"]).unwrap_or("nvidia.com/gpu");
    let quantity = gpu.at(&["quantity"]).cloned().unwrap_or(Node::Null);
    Node::from([("limits", Map::from([(name, quantity)]).into())])
}

/// Claims of a `NIMService`.
mod nim {
    use super::{Map, Node};

    const FIELD: &str = "draResources";
    /// Beginning of the names of claims that are there already.
    const NAME: &str = "dra-";
    const SOURCES: [&str; 2] = ["resourceClaimTemplateName", "resourceClaimName"];

    /// Shows the claims as a pod has them.
    pub(super) fn read(host: &Map, spec: &mut Map) {
        let all = host.get(FIELD).map(Node::items).unwrap_or_default();
        let (mut entries, mut used) = (Vec::new(), Vec::new());
        for (number, resource) in all.iter().enumerate() {
            let name = format!("{NAME}{number}");
            let source = SOURCES
                .iter()
                .find_map(|field| Some((*field, resource.at(&[field])?)));
            let Some((field, source)) = source else {
                continue;
            };
            entries.push(Node::from([
                ("name", name.as_str().into()),
                (field, source.clone()),
            ]));
            let requests = resource.at(&["requests"]).map(Node::items);
            let requests = requests.unwrap_or_default();
            used.extend(requests.iter().map(|request| {
                Node::from([("name", name.as_str().into()), ("request", request.clone())])
            }));
            if requests.is_empty() {
                used.push(Node::from([("name", name.as_str().into())]));
            }
        }
        if entries.is_empty() {
            return;
        }
        if spec.get("containers").is_none() {
            let container = Map::from([("name", "nim".into())]);
            spec.set("containers", vec![Node::Map(container)]);
        }
        spec.set("resourceClaims", entries);
        let container = spec.get_mut("containers").and_then(Node::items_mut);
        let container = container.and_then(|all| all.first_mut()?.map_mut());
        if let Some(container) = container {
            if container.get("resources").is_none() {
                container.set("resources", Map::default());
            }
            if let Some(resources) = container.get_mut("resources").and_then(Node::map_mut) {
                resources.set("claims", used);
            }
        }
    }

    /// Writes the claims that are new, behind those that are there.
    pub(super) fn write(host: &Map, spec: &mut Map) {
        let claims = spec.remove("resourceClaims");
        let mut all = host
            .get(FIELD)
            .map(Node::items)
            .unwrap_or_default()
            .to_vec();
        for claim in claims.iter().flat_map(Node::items) {
            let name = claim.text_at(&["name"]).unwrap_or_default();
            if name.starts_with(NAME) {
                continue;
            }
            for field in SOURCES {
                if let Some(source) = claim.at(&[field]) {
                    all.push(Node::from([(field, source.clone())]));
                }
            }
        }
        if !all.is_empty() {
            spec.set(FIELD, all);
        }
    }
}
