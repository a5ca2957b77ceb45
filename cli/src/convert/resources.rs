//! Extended resources of a container, of the device plugin, HAMi and gpu-manager, as requests of a
//! claim.

use std::collections::BTreeSet;

use divvy_model::Quantity;

use super::dra::HAMI;
use super::hints::Hints;
use super::notes::{Notes, under};
use crate::claim::template::Request;
use crate::yaml::{Map, Node};

/// Resource by which a class of NVIDIA's DRA driver can be asked for.
const BY_CLASS: &str = "deviceclass.resource.kubernetes.io/";
/// Domains of gpu-manager and of its relative, each with the size of its pieces of memory in MiB.
const VCUDA: [(&str, u64); 2] = [("tencent.com", 256), ("nvidia.com", 1)];
/// More memory than any GPU has, in MiB: the unit is not the one that was meant.
const TOO_MUCH: u64 = 512 << 10;

/// Resources by which HAMi and gpu-manager give out parts of a GPU. They stand for no devices.
const AMOUNTS: [&str; 8] = [
    "nvidia.com/gpumem",
    "nvidia.com/gpumem-percentage",
    "nvidia.com/gpucores",
    "nvidia.com/priority",
    "nvidia.com/vcuda-core",
    "nvidia.com/vcuda-memory",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-memory",
];

/// Says whether the resource is an amount of a GPU, which no class can stand for.
pub(super) fn is_amount(resource: &str) -> bool {
    AMOUNTS.contains(&resource)
}

/// Says whether a class of divvy's chart stands for the resource.
pub(super) fn stands(resource: &str) -> bool {
    resource == "nvidia.com/gpu" || profile(resource).is_some_and(|(_, is_shared)| !is_shared)
}

/// Says whether the resource is one of a system that gives out GPUs of NVIDIA.
pub(super) fn is_foreign(resource: &str) -> bool {
    if let Some(class) = resource.strip_prefix(BY_CLASS) {
        return class.ends_with(".nvidia.com") || class == HAMI;
    }
    let Some((domain, name)) = resource.split_once('/') else {
        return false;
    };
    match domain {
        // Network cards have resources of this domain, too.
        "nvidia.com" => !["hostdev", "rdma"].iter().any(|net| name.starts_with(net)),
        "tencent.com" | "tke.cloud.tencent.com" | "hami.io" => true,
        "volcano.sh" | "koordinator.sh" | "aliyun.com" => name.contains("gpu"),
        _ => false,
    }
}

/// A container's request, and a word for its kind.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Ask {
    pub(super) request: Request,
    /// Such as `gpu`, `share` and `mig-1g-10gb`.
    pub(super) form: String,
    /// True if a class of the chart stands for the resource that it was.
    pub(super) stands: bool,
    /// Parts that it had, where one number was made of them.
    pub(super) part: Option<Part>,
}

/// Percent of the memory and of the compute of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) memory: u64,
    pub(super) cores: u64,
}

impl Ask {
    pub(super) fn new(form: &str, request: Request) -> Self {
        let form = form.replace(['.', '+', '_'], "-").to_lowercase();
        Self {
            request,
            form,
            stands: false,
            part: None,
        }
    }
}

impl Ask {
    /// Marks what a class of the chart stands for.
    fn standing(mut self) -> Self {
        self.stands = true;
        self
    }
}

/// An amount of a resource, with the path of its field.
struct Amount {
    at: String,
    quantity: Quantity,
    text: String,
}

impl Amount {
    /// Returns a whole number that is not negative; anything else is refused.
    fn whole(&self, notes: &mut Notes) -> Option<u64> {
        let whole = self.quantity.to_u64();
        if whole.is_none() {
            let text = format!("{}: Kubernetes takes whole numbers only", self.text);
            notes.refuse(&self.at, text);
        }
        whole
    }
}

/// Amounts of the foreign resources of a container, taken out of its `resources`.
struct Amounts(Vec<(String, Amount)>);

impl Amounts {
    /// Takes the resources out. The limit counts before the request, as for Kubernetes, which
    /// wants both alike.
    fn take(resources: &mut Map, at: &str, notes: &mut Notes) -> Self {
        let mut all: Vec<(String, Amount)> = Vec::new();
        for list in ["limits", "requests"] {
            let Some(amounts) = resources.get_mut(list).and_then(Node::map_mut) else {
                continue;
            };
            let names: Vec<String> = amounts
                .iter()
                .map(|(name, _)| name.to_owned())
                .filter(|name| is_foreign(name))
                .collect();
            for name in names {
                let at = format!("{at}.{list}[{name}]");
                if !is_known(&name) {
                    notes.refuse(&at, unknown(&name));
                    continue;
                }
                let value = amounts.remove(&name).unwrap_or(Node::Null);
                let text = value.scalar().unwrap_or_default();
                let Ok(quantity) = text.parse::<Quantity>() else {
                    notes.refuse(&at, format!("{text:?} is not a quantity: write a number"));
                    continue;
                };
                match all.iter().find(|(other, _)| *other == name) {
                    Some((_, limit)) if limit.quantity == quantity => {}
                    Some((_, limit)) => {
                        let text = format!(
                            "{text} is not the limit, and Kubernetes refuses the pod: the limit, {}, is converted",
                            limit.text
                        );
                        notes.note(&at, text);
                    }
                    None => {
                        if list == "requests" {
                            notes.note(
                                &at,
                                "there is no limit, and Kubernetes refuses the pod: the request is converted",
                            );
                        }
                        all.push((name, Amount { at, quantity, text }));
                    }
                }
            }
            resources.remove_if_empty(list);
        }
        Self(all)
    }

    /// Returns an amount that is not 0. A 0 is noted, and counts as not set.
    fn positive(&mut self, name: &str, notes: &mut Notes) -> Option<Amount> {
        let place = self.0.iter().position(|(other, _)| other == name)?;
        let (_, amount) = self.0.remove(place);
        match amount.quantity.signum() {
            1 => Some(amount),
            0 => {
                notes.note(&amount.at, "0 asks for nothing: removed");
                None
            }
            _ => {
                notes.refuse(
                    &amount.at,
                    format!("{} is negative: write the number of devices", amount.text),
                );
                None
            }
        }
    }

    /// The same as a whole number.
    fn number(&mut self, name: &str, notes: &mut Notes) -> Option<(u64, String)> {
        let amount = self.positive(name, notes)?;
        Some((amount.whole(notes)?, amount.at))
    }

    /// The same in percent.
    fn percent(&mut self, name: &str, notes: &mut Notes) -> Option<(u64, String)> {
        let (percent, at) = self.number(name, notes)?;
        if percent > 100 {
            notes.refuse(&at, format!("{percent} is more than 100 percent of a GPU"));
            return None;
        }
        Some((percent, at))
    }
}

/// Says whether there is a rule for the resource.
fn is_known(resource: &str) -> bool {
    is_amount(resource)
        || ["nvidia.com/gpu", "nvidia.com/gpu.shared"].contains(&resource)
        || profile(resource).is_some()
        || ["gpu.nvidia.com", "mig.nvidia.com"]
            .iter()
            .any(|class| resource.strip_prefix(BY_CLASS) == Some(*class))
}

/// Returns the foreign resources that a pod has as a whole.
pub(super) fn of_pod(spec: &Map) -> BTreeSet<String> {
    let lists = ["limits", "requests"].iter();
    let amounts = lists.filter_map(|list| spec.get("resources")?.at(&[list])?.map());
    let names = amounts.flat_map(Map::iter).map(|(name, _)| name);
    names
        .filter(|name| is_foreign(name))
        .map(str::to_owned)
        .collect()
}

/// Returns the resources of a pod that stand for devices, by which nodes with them are tainted.
pub(super) fn of_devices(spec: &Map) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for list in ["initContainers", "containers"] {
        for container in spec.get(list).map(Node::items).unwrap_or_default() {
            let limits = container.at(&["resources", "limits"]).and_then(Node::map);
            let requests = container.at(&["resources", "requests"]).and_then(Node::map);
            let amounts = limits.into_iter().chain(requests).flat_map(Map::iter);
            let asked = amounts.filter(|(_, amount)| amount.scalar().is_some_and(|n| n != "0"));
            let names = asked.map(|(name, _)| name);
            let of_devices =
                |name: &&str| is_known(name) && !is_amount(name) && !name.starts_with(BY_CLASS);
            all.extend(names.filter(of_devices).map(str::to_owned));
        }
    }
    all
}

/// Returns what to do about a resource without a rule.
fn unknown(resource: &str) -> String {
    let by_amount = ["volcano.sh/", "koordinator.sh/", "aliyun.com/", "tke."];
    if by_amount.iter().any(|domain| resource.starts_with(domain)) {
        "there is no rule for this system: write the claim with divvy claim share --memory AMOUNT --cores PERCENT".to_owned()
    } else {
        "there is no rule for this resource: if it stands for a GPU, write the claim with divvy claim gpu, mig or share, and \
         remove it"
            .to_owned()
    }
}

/// Returns the MIG profile of a resource of the device plugin, in whose names `+` is a dot, and
/// whether it is shared.
fn profile(resource: &str) -> Option<(String, bool)> {
    let name = resource.strip_prefix("nvidia.com/mig-")?;
    let (name, is_shared) = match name.strip_suffix(".shared") {
        Some(name) => (name, true),
        None => (name, false),
    };
    Some((profile_of(name)?, is_shared))
}

/// Reads the name of a MIG profile in which `+` is a dot.
pub(super) fn profile_of(name: &str) -> Option<String> {
    let (slices, rest) = name.split_once("g.")?;
    let (memory, more) = rest.split_once("gb").map(|(m, more)| (m, Some(more)))?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let more = more.unwrap_or_default();
    let attributes = match more.strip_prefix('.') {
        Some(attributes) => format!("+{attributes}"),
        None => more.to_owned(),
    };
    let is_profile = is_number(slices) && is_number(memory);
    is_profile.then(|| format!("{slices}g.{memory}gb{attributes}"))
}

/// Takes the foreign resources out of a container and returns the requests that they are.
pub(super) fn take(container: &mut Map, at: &str, hints: &Hints, notes: &mut Notes) -> Vec<Ask> {
    let at = under(at, "resources");
    let Some(resources) = container.get_mut("resources").and_then(Node::map_mut) else {
        return Vec::new();
    };
    let profiles: Vec<String> = ["limits", "requests"]
        .iter()
        .filter_map(|list| resources.get(list)?.map())
        .flat_map(Map::iter)
        .map(|(name, _)| name.to_owned())
        .filter(|name| profile(name).is_some())
        .collect();
    let mut amounts = Amounts::take(resources, &at, notes);
    let mut asks: Vec<Ask> = nvidia(&mut amounts, hints, notes).into_iter().collect();
    if let Some((count, at)) = amounts.number("nvidia.com/gpu.shared", notes) {
        if count > 1 {
            notes.note(
                &at,
                format!(
                    "{count} are shares of {count} different GPUs; the device plugin does not say of how many"
                ),
            );
        }
        asks.push(Ask::new("share", Request::shares(count, None, None)));
    }
    for name in profiles {
        let Some((count, at)) = amounts.number(&name, notes) else {
            continue;
        };
        match profile(&name) {
            Some((profile, true)) => asks.push(share_of(&profile, count, &at, notes)),
            Some((profile, false)) => {
                let request = Request::of_profile(divvy_api::names::DRIVER, &profile, count);
                asks.push(Ask::new(&format!("mig-{profile}"), request).standing());
            }
            None => {}
        }
    }
    for domain in VCUDA {
        asks.extend(gpu_manager(&mut amounts, domain, hints, notes));
    }
    if let Some((count, _)) = amounts.number(&format!("{BY_CLASS}gpu.nvidia.com"), notes) {
        asks.push(Ask::new("gpu", Request::gpus(count)));
    }
    if let Some((count, _)) = amounts.number(&format!("{BY_CLASS}mig.nvidia.com"), notes) {
        asks.push(Ask::new("mig", Request::partitions(count)));
    }
    asks
}

/// Asks for shares of partitions of a profile.
fn share_of(profile: &str, count: u64, at: &str, notes: &mut Notes) -> Ask {
    if count > 1 {
        let what = format!(
            "{count} are shares of {count} different partitions; the device plugin does not say of how many"
        );
        notes.note(at, what);
    }
    let form = format!("mig-share-{profile}");
    Ask::new(&form, Request::shares_of_profile(profile, count))
}

/// Reads what the device plugin and HAMi have: GPUs by number, and with HAMi an amount of each.
fn nvidia(amounts: &mut Amounts, hints: &Hints, notes: &mut Notes) -> Option<Ask> {
    let gpus = amounts.positive("nvidia.com/gpu", notes);
    let memory = amounts.number("nvidia.com/gpumem", notes);
    let percent = amounts.percent("nvidia.com/gpumem-percentage", notes);
    let cores = amounts.percent("nvidia.com/gpucores", notes);
    if let Some((_, at)) = amounts.number("nvidia.com/priority", notes) {
        notes.note(
            &at,
            "programs on a shared GPU run in turns, without priorities: removed",
        );
    }
    let is_part = memory.is_some() || percent.is_some() || cores.is_some();
    let count = match &gpus {
        Some(gpus) if gpus.quantity.to_u64().is_none() && !is_part => {
            return fraction(&gpus.text, &gpus.at, hints, notes);
        }
        Some(gpus) => gpus.whole(notes)?,
        // HAMi adds a GPU where only an amount is asked for.
        None if is_part => 1,
        None => return None,
    };
    let whole = || Some(hints.labels.ask(count));
    if !is_part {
        let ask = hints.labels.ask(count);
        return Some(if hints.labels.read.is_empty() {
            ask.standing()
        } else {
            ask
        });
    }
    if cores.as_ref().is_some_and(|(cores, _)| *cores == 100) {
        if let Some((_, at)) = memory.as_ref().or(percent.as_ref()) {
            notes.note(
                at,
                "gpucores: 100 is a whole GPU, which has all of its memory: removed",
            );
        }
        return whole();
    }
    if let Some((mebibytes, at)) = memory {
        if let Some((_, at)) = &percent {
            notes.note(at, "gpumem counts, as with HAMi: removed");
        }
        if mebibytes >= TOO_MUCH {
            notes.refuse(
                &at,
                format!(
                    "{mebibytes} MiB are more than a GPU has: gpumem is a number of MiB, so write 10240 for 10 GiB"
                ),
            );
            return None;
        }
        if hints.partitions {
            if let Some((_, at)) = &cores {
                notes.note(at, "a partition has the compute of its profile: removed");
            }
            return Some(partition(mebibytes, count, &at, notes));
        }
        notes.note(&at, ACCOUNTED);
        let memory = memory_text(mebibytes);
        let request = Request::shares(count, Some(&memory), cores.map(|(cores, _)| cores));
        return Some(Ask::new("share", request));
    }
    if let Some((_, at)) = percent.as_ref().filter(|_| hints.partitions) {
        let what = "a partition has no percentage: write nvidia.com/gpumem, in MiB";
        notes.refuse(at, what);
        return None;
    }
    if let Some((percent, at)) = percent.filter(|(percent, _)| *percent < 100) {
        let cores_at = cores.clone();
        let compute = cores.as_ref().map(|(cores, _)| *cores);
        let mut ask = hints.part(count, percent, compute);
        if hints.gpu_memory.is_none() {
            let cores = compute.unwrap_or(0);
            let memory = percent;
            ask.part = Some(Part { memory, cores });
            let most = memory.max(cores);
            if let Some((cores, at)) = cores_at.filter(|(cores, _)| *cores != percent) {
                notes.note(
                    &at,
                    format!("one number is for memory and compute: {most} percent of both, not {cores} of the compute"),
                );
            }
        }
        notes.note(&at, ACCOUNTED);
        return Some(ask);
    }
    if let Some((_, at)) = &cores {
        notes.note(
            at,
            "with HAMi, a pod without gpumem has all memory of the GPU, so no other pod fits beside it: a whole GPU (for a \
             share, add gpumem or gpumem-percentage)",
        );
    }
    whole()
}

/// Says how a share differs from what HAMi and gpu-manager promise.
pub(super) const ACCOUNTED: &str = "the scheduler counts the share; drivers from R615 on keep programs to it where memory caps are on (docs/memory-caps.md), elsewhere \
     nothing does (docs/usage.md#overuse, also for what a GpuPolicy does about overuse)";

/// Reads a number of GPUs that is not whole.
fn fraction(text: &str, at: &str, hints: &Hints, notes: &mut Notes) -> Option<Ask> {
    let percent = percent_of(text).filter(|percent| *percent < 100);
    let Some(percent) = percent else {
        notes.refuse(
            at,
            format!("{text}: Kubernetes takes whole numbers only, and a claim has whole GPUs or parts of single ones: write a whole number"),
        );
        return None;
    };
    notes.note(
        at,
        format!(
            "{text}: Kubernetes takes whole numbers only: {percent} percent of a GPU, as a share"
        ),
    );
    Some(hints.part(1, percent, None))
}

/// Returns a fraction in percent, rounded up.
pub(super) fn percent_of(text: &str) -> Option<u64> {
    let nanos = text.parse::<Quantity>().ok()?.nanos();
    let percent = nanos.checked_mul(100)?.checked_add(999_999_999)? / 1_000_000_000;
    u64::try_from(percent).ok().filter(|percent| *percent > 0)
}

/// Asks for partitions with this much memory.
fn partition(mebibytes: u64, count: u64, at: &str, notes: &mut Notes) -> Ask {
    // A profile of 10 GB has 9.8 GiB, while HAMi counts it as 10 GiB.
    let least = mebibytes * 95 / 100;
    notes.note(
        at,
        format!(
            "a partition with at least {least}Mi, 5 percent less: profiles have less memory than their names say; for one size, \
             divvy claim mig --profile PROFILE"
        ),
    );
    let mut request = Request::partitions(count);
    request.select(format!(
        "device.capacity[\"{}\"].memory.compareTo(quantity(\"{least}Mi\")) >= 0",
        divvy_api::names::DRIVER
    ));
    Ask::new("mig", request)
}

/// Writes MiB as people do.
pub(super) fn memory_text(mebibytes: u64) -> String {
    if mebibytes.is_multiple_of(1024) {
        format!("{}Gi", mebibytes / 1024)
    } else {
        format!("{mebibytes}Mi")
    }
}

/// Reads what gpu-manager has: hundredths of a GPU, and memory in pieces.
fn gpu_manager(
    amounts: &mut Amounts,
    (domain, piece): (&str, u64),
    hints: &Hints,
    notes: &mut Notes,
) -> Option<Ask> {
    let cores = amounts.number(&format!("{domain}/vcuda-core"), notes);
    let memory = amounts.number(&format!("{domain}/vcuda-memory"), notes);
    let cores = match cores {
        None if memory.is_none() => return None,
        Some((cores, at)) if cores >= 100 => {
            if cores % 100 != 0 {
                notes.refuse(
                    &at,
                    format!("{cores}: gpu-manager takes 1 to 99, or hundreds for whole GPUs: write one of them"),
                );
                return None;
            }
            if let Some((_, at)) = &memory {
                notes.note(at, "a whole GPU has all of its memory: removed");
            }
            return Some(Ask::new("gpu", Request::gpus(cores / 100)));
        }
        cores => cores.map(|(cores, _)| cores),
    };
    let memory = match memory {
        Some((pieces, at)) => {
            let mebibytes = pieces.saturating_mul(piece);
            if mebibytes >= TOO_MUCH {
                let what = format!(
                    "{pieces} pieces of {piece} MiB are {}, more than a GPU has: if {pieces} MiB were meant, write {}",
                    memory_text(mebibytes),
                    pieces.div_ceil(piece)
                );
                notes.refuse(&at, what);
                return None;
            }
            notes.note(&at, ACCOUNTED);
            Some(memory_text(mebibytes))
        }
        None => None,
    };
    let mut request = Request::shares(1, memory.as_deref(), cores);
    let Some((limit, at)) = &hints.core_limit else {
        return Some(Ask::new("share", request));
    };
    if cores.is_some_and(|cores| cores > *limit) {
        notes.refuse(
            at,
            format!("{limit} is below vcuda-core: write at least that"),
        );
    }
    let what = "only MPS limits compute: a share with limits.cores of class mps.divvy.dev, whose shares have a size with drivers from R615 on \
                (docs/mps.md)";
    notes.note(at, what);
    request.class = divvy_api::names::CLASS_MPS;
    request
        .limits
        .push((divvy_api::names::capacity::CORES, (*limit).into()));
    Some(Ask::new("mps", request))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_read_from_names_of_the_device_plugin() {
        for (resource, expected) in [
            ("nvidia.com/mig-1g.10gb", Some(("1g.10gb", false))),
            ("nvidia.com/mig-1g.10gb.me", Some(("1g.10gb+me", false))),
            (
                "nvidia.com/mig-1g.24gb.me.all",
                Some(("1g.24gb+me.all", false)),
            ),
            ("nvidia.com/mig-1g.10gb-me", Some(("1g.10gb-me", false))),
            ("nvidia.com/mig-1g.10gb.shared", Some(("1g.10gb", true))),
            (
                "nvidia.com/mig-1g.10gb.me.shared",
                Some(("1g.10gb+me", true)),
            ),
            ("nvidia.com/mig-.shared", None),
            ("nvidia.com/mig-1c.2g.10gb", None),
            ("nvidia.com/gpu", None),
        ] {
            let found = profile(resource);
            let found = found
                .as_ref()
                .map(|(name, shared)| (name.as_str(), *shared));
            assert_eq!(found, expected, "{resource}");
        }
    }

    #[test]
    fn fractions_are_rounded_up_to_whole_percents() {
        for (text, percent) in [
            ("0.5", Some(50)),
            ("500m", Some(50)),
            ("0.333", Some(34)),
            ("0.001", Some(1)),
            ("1", Some(100)),
            ("1.5", Some(150)),
            ("0", None),
            ("-0.5", None),
            ("half", None),
        ] {
            assert_eq!(percent_of(text), percent, "{text}");
        }
    }

    #[test]
    fn resources_of_network_cards_and_other_vendors_are_let_be() {
        for (resource, foreign) in [
            ("nvidia.com/gpu", true),
            ("nvidia.com/GA102GL_A10", true),
            ("nvidia.com/hostdev", false),
            ("volcano.sh/vgpu-memory", true),
            ("volcano.sh/other", false),
            ("deviceclass.resource.kubernetes.io/gpu.nvidia.com", true),
            ("deviceclass.resource.kubernetes.io/gpu.divvy.dev", false),
            ("amd.com/gpu", false),
            ("cpu", false),
        ] {
            assert_eq!(is_foreign(resource), foreign, "{resource}");
        }
    }
}
