//! Objects that the controllers of a cluster make of manifests: claims from templates and from
//! extended
//! resources, and who uses which claim. Pure.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim, PodSpec};
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceClass, ResourceClaim, ResourceClaimSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::expect::{self, Expected};
use divvy_cli::manifests::{Manifests, namespace};
use divvy_cli::{advice, extended};
use divvy_why::spelling::did_you_mean;

/// Users of one claim at most.
const MOST_USERS: usize = 256;

/// A user of claims: a pod, or none (a claim on its own).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Consumer {
    /// Pod name; `None` for a claim that no pod names.
    pub(crate) pod: Option<String>,
    /// Namespace of the pod and its claims.
    pub(crate) namespace: String,
    /// Names of its claims, in the pod's order.
    pub(crate) claims: Vec<String>,
    /// Expected end.
    pub(crate) expected: Expected,
    /// The round after which it ends.
    pub(crate) ends: Option<u32>,
}

impl Consumer {
    /// Returns its name for messages.
    pub(crate) fn name(&self) -> String {
        match (&self.pod, self.claims.first()) {
            (Some(pod), _) => format!("pod {}/{pod}", self.namespace),
            (None, Some(claim)) => format!("claim {}/{claim}", self.namespace),
            (None, None) => "a pod without claims".to_owned(),
        }
    }
}

/// Everything to allocate: the claims, and their consumers in the order in which they arrive.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Workload {
    pub(crate) claims: Vec<ResourceClaim>,
    pub(crate) consumers: Vec<Consumer>,
    /// Pods that never start, each with the reason.
    pub(crate) stuck: Vec<String>,
}

/// Expands manifests as the ResourceClaim controller and the scheduler would. UIDs are the API
/// server's to give. `products` are those of the node's GPUs.
pub(crate) fn expand(
    manifests: &Manifests,
    classes: &[DeviceClass],
    products: &BTreeSet<String>,
) -> Result<Workload> {
    let mut workload = Workload {
        claims: manifests.claims.clone(),
        ..Workload::default()
    };
    for claim in &mut workload.claims {
        claim.metadata.namespace = Some(namespace(&claim.metadata));
        // Of an object that was read from a cluster the API server takes neither.
        claim.metadata.uid = None;
        claim.status = None;
    }
    for pod in &manifests.all_pods() {
        let consumer = consumer(pod, manifests, (classes, products), &mut workload)?;
        if !consumer.claims.is_empty() {
            workload.consumers.push(consumer);
        }
    }
    hold_back(&mut workload);
    for claim in &workload.claims {
        let (namespace, name) = (
            namespace(&claim.metadata),
            claim.metadata.name.clone().unwrap_or_default(),
        );
        let used = workload
            .consumers
            .iter()
            .any(|c| c.namespace == namespace && c.claims.contains(&name));
        if !used {
            let (expected, ends) = expect::read(&claim.metadata)
                .with_context(|| format!("claim {namespace}/{name}"))?;
            workload.consumers.push(Consumer {
                pod: None,
                namespace,
                claims: vec![name],
                expected,
                ends,
            });
        }
    }
    Ok(workload)
}

/// Takes their claims from the pods that come too late for a claim: it has so many users at most,
/// and the scheduler lets others wait.
fn hold_back(workload: &mut Workload) {
    let mut users: BTreeMap<(String, String), usize> = BTreeMap::new();
    for consumer in workload.consumers.iter_mut().filter(|c| c.ends.is_none()) {
        let key = |claim: &String| (consumer.namespace.clone(), claim.clone());
        let full = consumer.claims.iter().find(|claim| {
            users
                .get(&key(claim))
                .is_some_and(|users| *users >= MOST_USERS)
        });
        if let Some(claim) = full.cloned() {
            if consumer.expected != Expected::Pending {
                workload.stuck.push(format!(
                    "{} waits for claim {}/{claim}, which has {MOST_USERS} users, the most that Kubernetes allows: give it a claim of its \
                     own, by a ResourceClaimTemplate",
                    consumer.name(),
                    consumer.namespace
                ));
            }
            consumer.claims.clear();
            continue;
        }
        for claim in &consumer.claims {
            *users.entry(key(claim)).or_default() += 1;
        }
    }
    workload
        .consumers
        .retain(|consumer| !consumer.claims.is_empty());
}

/// Returns the requests of the claim of a pod's entry, if the manifests have the claim or its
/// template.
pub(super) fn devices_of<'m>(
    entry: &PodResourceClaim,
    pod: &ObjectMeta,
    manifests: &'m Manifests,
) -> Option<&'m DeviceClaim> {
    let is = |meta: &ObjectMeta, name: &Option<String>| {
        name.is_some() && meta.name == *name && namespace(meta) == namespace(pod)
    };
    let spec = if entry.resource_claim_name.is_some() {
        let mut claims = manifests.claims.iter();
        claims
            .find(|claim| is(&claim.metadata, &entry.resource_claim_name))?
            .spec
            .as_ref()
    } else {
        let mut templates = manifests.templates.iter();
        let found = templates.find(|t| is(&t.metadata, &entry.resource_claim_template_name))?;
        found.spec.as_ref()?.spec.as_ref()
    };
    spec?.devices.as_ref()
}

fn consumer(
    pod: &Pod,
    manifests: &Manifests,
    (classes, products): (&[DeviceClass], &BTreeSet<String>),
    workload: &mut Workload,
) -> Result<Consumer> {
    let name = pod
        .metadata
        .name
        .clone()
        .context("a Pod has no metadata.name")?;
    let namespace = namespace(&pod.metadata);
    let called = format!("pod {namespace}/{name}");
    let entries = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.resource_claims.as_deref())
        .unwrap_or_default();
    let mut claims = Vec::new();
    let extended = pod
        .spec
        .as_ref()
        .map(|spec| extended::requests(spec, classes))
        .unwrap_or_default();
    let asks = !entries.is_empty() || !extended.requests.is_empty();
    // A pod that waits for one thing for ever gets nothing else, either.
    let never = || pod.spec.as_ref().and_then(never_placed).filter(|_| asks);
    let away = || placed_elsewhere(pod.spec.as_ref()?, products).filter(|_| asks);
    let mut stuck: Vec<String> = never().or_else(away).into_iter().collect();
    match advice::foreign(pod, &extended.without_class) {
        Some(what) => stuck.push(what),
        None => stuck.extend((extended.without_class.iter()).map(|r| advice::without_class(r))),
    }
    if !stuck.is_empty() {
        let (expected, ends) = expect::read(&pod.metadata).with_context(|| called.clone())?;
        if expected != Expected::Pending {
            let stuck = stuck.iter().map(|reason| format!("{called} {reason}"));
            workload.stuck.extend(stuck);
        }
        return Ok(Consumer {
            pod: Some(name),
            namespace,
            claims,
            expected,
            ends,
        });
    }
    for entry in entries {
        if let Some(claim) = &entry.resource_claim_name {
            if devices_of(entry, &pod.metadata, manifests).is_none() {
                bail!(
                    "{called}: resourceClaimName {claim:?}: there is no such ResourceClaim in the manifests{}",
                    instead(claim, CLAIM, &namespace, manifests)
                );
            }
            claims.push(claim.clone());
            continue;
        }
        let Some(devices) = devices_of(entry, &pod.metadata, manifests) else {
            let template = entry
                .resource_claim_template_name
                .as_deref()
                .unwrap_or_default();
            bail!(
                "{called}: resourceClaimTemplateName {template:?}: there is no such ResourceClaimTemplate in the manifests{}",
                instead(template, TEMPLATE, &namespace, manifests)
            );
        };
        let annotation = ("resource.kubernetes.io/pod-claim-name", entry.name.as_str());
        let made = made(
            &format!("{name}-{}", entry.name),
            &namespace,
            annotation,
            devices.clone(),
        );
        claims.extend(made.metadata.name.clone());
        workload.claims.push(made);
    }
    if !extended.requests.is_empty() {
        let devices = DeviceClaim {
            requests: Some(extended.requests),
            ..DeviceClaim::default()
        };
        let annotation = ("resource.kubernetes.io/extended-resource-claim", "true");
        let made = made(
            &format!("{name}-extended-resources"),
            &namespace,
            annotation,
            devices,
        );
        claims.extend(made.metadata.name.clone());
        workload.claims.push(made);
    }
    let (expected, ends) = expect::read(&pod.metadata).context(called)?;
    Ok(Consumer {
        pod: Some(name),
        namespace,
        claims,
        expected,
        ends,
    })
}

const CLAIM: &str = "ResourceClaim";
const TEMPLATE: &str = "ResourceClaimTemplate";

/// Says what is there in the place of a claim or template that a pod of the namespace names: an
/// object of the other kind, of another namespace, or with a name that is spelt alike.
fn instead(name: &str, kind: &str, namespace: &str, manifests: &Manifests) -> String {
    let claims: Vec<&ObjectMeta> = manifests.claims.iter().map(|of| &of.metadata).collect();
    let templates: Vec<&ObjectMeta> = manifests.templates.iter().map(|of| &of.metadata).collect();
    let (own, others, other, field) = if kind == CLAIM {
        (claims, templates, TEMPLATE, "resourceClaimTemplateName")
    } else {
        (templates, claims, CLAIM, "resourceClaimName")
    };
    let is_here = |meta: &&&ObjectMeta| divvy_cli::manifests::namespace(meta) == namespace;
    let is_it = |meta: &&&ObjectMeta| meta.name.as_deref() == Some(name);
    if others.iter().filter(is_here).any(|meta| is_it(&meta)) {
        return format!(": {name} is a {other}: write {field}");
    }
    if let Some(elsewhere) = own.iter().find(is_it) {
        return format!(
            ": {name} is in namespace {}, and the pod in {namespace}: a {kind} serves the pods of its own namespace",
            divvy_cli::manifests::namespace(elsewhere)
        );
    }
    let near = own.iter().filter(is_here);
    did_you_mean(name, near.filter_map(|meta| meta.name.as_deref()))
}

/// Label of NVIDIA's feature discovery with the product of a node's GPUs.
const PRODUCT: &str = "nvidia.com/gpu.product";

/// Returns the products that a pod wants of its node.
pub(super) fn products_of(spec: &PodSpec) -> Vec<String> {
    let selected = spec
        .node_selector
        .iter()
        .filter_map(|labels| labels.get(PRODUCT));
    let affinity = spec.affinity.as_ref();
    let required = affinity.and_then(|affinity| {
        let node = affinity.node_affinity.as_ref()?;
        node.required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let terms = required.into_iter().flat_map(|r| &r.node_selector_terms);
    let expressions = terms.flat_map(|term| term.match_expressions.iter().flatten());
    let listed = expressions
        .filter(|expression| expression.key == PRODUCT && expression.operator == "In")
        .flat_map(|expression| expression.values.iter().flatten());
    selected.chain(listed).cloned().collect()
}

/// Returns what NVIDIA's device plugin adds to the product for GPUs that it divides: `-MIG-1g.5gb`
/// and `-SHARED`. Nodes of divvy have no such label.
fn divided(label: &str) -> Option<(&str, &str)> {
    let at = label.find("-MIG-").or_else(|| label.find("-SHARED"))?;
    label.split_at_checked(at)
}

/// Says whether a product is the one of a label, in which dashes stand for spaces: all words of the
/// one are in the other.
fn is_board(product: &str, label: &str) -> bool {
    let plain = |text: &str| {
        let text = text.to_lowercase().replace(['-', '_'], " ");
        let words = text
            .split(' ')
            .filter(|word| !word.is_empty() && *word != "nvidia");
        words.map(str::to_owned).collect::<Vec<_>>()
    };
    let label = divided(label).map_or(label, |(product, _)| product);
    let (product, label) = (plain(product), plain(label));
    let has = |long: &[String], short: &[String]| {
        !short.is_empty() && long.windows(short.len()).any(|part| part == short)
    };
    has(&product, &label) || has(&label, &product)
}

/// Says why no node with these products is one that the pod wants.
fn placed_elsewhere(spec: &PodSpec, products: &BTreeSet<String>) -> Option<String> {
    let wanted = products_of(spec);
    let is_here = |label: &String| {
        divided(label).is_none() && products.iter().any(|has| is_board(has, label))
    };
    if products.is_empty() || wanted.is_empty() || wanted.iter().any(is_here) {
        return None;
    }
    if let Some((_, form)) = wanted.iter().find_map(|label| divided(label)) {
        return Some(format!(
            "is for nodes with {} by its nodeSelector or affinity, and no node of divvy has this label: {form} is how NVIDIA's device \
             plugin names what it divides (remove it, and claim a partition with divvy claim mig, or a share with divvy claim share; \
             divvy itself selects by device.attributes[\"gpu.divvy.dev\"].productName)",
            wanted.join(", "),
        ));
    }
    let there: Vec<&str> = products.iter().map(String::as_str).collect();
    let mut boards = divvy_gpu_sim::profiles().iter();
    let board = boards.find(|board| wanted.iter().any(|w| is_board(board.product_name, w)));
    let sim = board.map_or("with that board".to_owned(), |board| {
        format!("{}x1", board.key)
    });
    Some(format!(
        "is for nodes with {} by its nodeSelector or affinity, and this node has {}: a cluster places it elsewhere, or nowhere \
         (try --sim {sim}; divvy itself selects by device.attributes[\"gpu.divvy.dev\"].productName)",
        wanted.join(", "),
        there.join(", ")
    ))
}

/// Says why the scheduler never allocates the claims of a pod as it is written.
fn never_placed(spec: &PodSpec) -> Option<String> {
    let gates: Vec<&str> = spec
        .scheduling_gates
        .iter()
        .flatten()
        .map(|gate| gate.name.as_str())
        .collect();
    if !gates.is_empty() {
        let gates = gates.join(", ");
        return Some(format!(
            "has schedulingGates ({gates}): it waits until their owner removes them"
        ));
    }
    let node = spec.node_name.as_deref().filter(|node| !node.is_empty())?;
    Some(format!(
        "has nodeName {node}, which passes the scheduler by, and only the scheduler allocates claims: its containers never \
         start (write nodeSelector: {{kubernetes.io/hostname: {node}}} instead)"
    ))
}

/// Makes a claim for a pod.
fn made(
    name: &str,
    in_namespace: &str,
    annotation: (&str, &str),
    devices: DeviceClaim,
) -> ResourceClaim {
    let (key, value) = annotation;
    ResourceClaim {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(in_namespace.to_owned()),
            annotations: Some(BTreeMap::from([(key.to_owned(), value.to_owned())])),
            ..ObjectMeta::default()
        },
        spec: Some(ResourceClaimSpec {
            devices: Some(devices),
        }),
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expand_text(text: &str) -> Result<Workload> {
        let manifests = Manifests::parse("test", text)?;
        expand(&manifests, &manifests.classes, &BTreeSet::new())
    }

    #[test]
    fn replicas_get_claims_of_their_own_and_shared_claims_stay_one() {
        let text = include_str!("../../examples/deployment/manifests.yaml");
        let workload = expand_text(text).unwrap();
        let names: Vec<_> = workload
            .claims
            .iter()
            .filter_map(|c| c.metadata.name.as_deref())
            .collect();
        assert_eq!(names, ["replicas-0-gpu", "replicas-1-gpu"]);
        assert!(workload.claims.iter().all(|claim| claim.spec.is_some()));

        let text = include_str!("../../examples/shared-claim/manifests.yaml");
        let workload = expand_text(text).unwrap();
        assert_eq!(workload.claims.len(), 1);
        let pods: Vec<_> = workload
            .consumers
            .iter()
            .map(|c| (c.pod.as_deref(), c.claims.clone()))
            .collect();
        assert_eq!(
            pods,
            [
                (Some("reader"), vec!["shared".to_owned()]),
                (Some("writer"), vec!["shared".to_owned()])
            ]
        );
    }

    #[test]
    fn extended_resources_become_a_claim_as_the_scheduler_makes_it() {
        let text = include_str!("../../examples/extended-resource/manifests.yaml");
        let manifests = Manifests::parse("test", text).unwrap();
        let workload = expand(
            &manifests,
            &crate::world::classes(divvy_api::names::DRIVER).unwrap(),
            &BTreeSet::new(),
        )
        .unwrap();
        let claim = workload
            .claims
            .iter()
            .find(|c| c.metadata.name.as_deref() == Some("legacy-0-extended-resources"));
        let requests = claim
            .and_then(|c| c.spec.clone()?.devices?.requests)
            .unwrap();
        let asked = requests.iter().map(|request| {
            let exact = request.exactly.clone().unwrap();
            (request.name.as_str(), exact.device_class_name, exact.count)
        });
        assert_eq!(
            asked.collect::<Vec<_>>(),
            [("container-0-request-0", "gpu.divvy.dev".to_owned(), Some(1))]
        );
    }

    #[test]
    fn a_claim_of_another_cluster_is_allocated_here() {
        let text = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c, uid: a}\nstatus: {allocation: {devices: {results: [{device: gpu-7, driver: d, pool: p, request: r}]}}}\n";
        let claim = expand_text(text).unwrap().claims.remove(0);
        assert_eq!((claim.metadata.uid, claim.status), (None, None));
    }

    #[test]
    fn a_bare_claim_is_a_consumer_and_a_missing_one_is_named() {
        let text = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c}\n";
        assert_eq!(expand_text(text).unwrap().consumers[0].pod, None);
        let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers: []\n  resourceClaims: [{name: g, resourceClaimName: absent}]\n";
        assert_eq!(
            format!("{:#}", expand_text(text).unwrap_err()),
            "pod default/p: resourceClaimName \"absent\": there is no such ResourceClaim in the manifests"
        );
    }

    #[test]
    fn a_claim_has_no_more_users_than_kubernetes_allows() {
        let claim = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: one}\n\
                     spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.divvy.dev}}]}}\n";
        let pods = |count: usize| {
            let pod = |number| {
                format!(
                    "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: p{number}}}\nspec: {{resourceClaims: [{{name: g, resourceClaimName: one}}], \
                     containers: [{{name: c, image: x, resources: {{claims: [{{name: g}}]}}}}]}}\n"
                )
            };
            let workload =
                expand_text(&(claim.to_owned() + &(0..count).map(pod).collect::<String>()));
            let workload = workload.unwrap();
            (workload.consumers.len(), workload.stuck)
        };
        assert_eq!(pods(256), (256, Vec::new()));
        let (users, stuck) = pods(257);
        assert_eq!((users, stuck.len()), (256, 1));
        assert!(
            stuck[0]
                .starts_with("pod default/p256 waits for claim default/one, which has 256 users")
        );
    }
}
