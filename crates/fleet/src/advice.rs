//! Ways in which a pod that waits would fit: for less, in another form, or when another pod ends.
//!
//! Pure. Each way is proven: the allocator places the pod on the node that is named, in the cluster
//! as it is but for that one change.

use std::collections::BTreeMap;

use divvy_allocator::{AllocError, Allocator, Features, Slices};
use divvy_api::names::{self, attributes, capacity};
use divvy_model::Quantity;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, Device, DeviceSelector, ExactDeviceRequest,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Raw;
use serde::Serialize;

use crate::cluster::{Cluster, World};
use crate::defrag::Wanted;
use crate::request;
use crate::worlds::Shape;

/// Pods that are named of those whose end makes room.
const NAMED: usize = 3;
/// Pods that are tried: the end of one is asked about at a time.
const TRIED: usize = 2_000;
/// Bytes of a GiB.
const GIB: i128 = 1 << 30;

/// A way in which a pod fits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "way", rename_all = "camelCase")]
pub enum Way {
    /// No change: the pod fits a node as it is.
    Now { node: String },
    /// Less of what a request asks for: the most that fits.
    Less {
        /// Name of the request.
        request: String,
        /// Count, a capacity by its name, or `profile`.
        what: String,
        asked: String,
        fits: String,
        node: String,
    },
    /// Another form.
    Form {
        /// Name of the request.
        request: String,
        /// Its words, as `share:40Gi`.
        fits: String,
        node: String,
    },
    /// The end of one of these pods.
    Wait {
        /// `namespace/name` of the first of them.
        pods: Vec<String>,
        /// Number of the others.
        more: usize,
        /// Node of the first.
        node: String,
    },
}

/// Finds ways in which a pod would fit on a release of Kubernetes, 1.`kubernetes`: the cheapest
/// kind first.
pub fn advise(cluster: &Cluster, wanted: &Wanted, kubernetes: u32) -> Result<Vec<Way>, AllocError> {
    let allocator = Allocator::new(Features::of_kubernetes(kubernetes));
    let slices = Slices::new(&cluster.slices);
    let look = Look {
        world: World::new(cluster, &allocator, &slices),
        cluster,
        wanted: &wanted.shape,
        profiles: profiles(cluster),
    };
    // An error of the claims themselves is the caller's: no change of an amount mends it.
    for node in 0..cluster.nodes.len() {
        if look.world.fits(look.wanted, node, &[])?.is_some() {
            let node = look.name(node);
            return Ok(vec![Way::Now { node }]);
        }
    }
    let mut ways = look.less();
    ways.extend(look.forms());
    ways.extend(look.wait());
    Ok(ways)
}

/// Returns the memory of each profile that is published, in bytes.
fn profiles(cluster: &Cluster) -> BTreeMap<String, i128> {
    let devices = cluster.slices.iter().flat_map(|slice| &slice.spec.devices);
    let of = |device: &Device| {
        let attributes = device.attributes.as_ref()?;
        let profile = attributes.get(attributes::PROFILE)?.string.clone()?;
        let memory = device.capacity.as_ref()?.get(capacity::MEMORY)?;
        Some((profile, bytes(&memory.value.0)?))
    };
    devices.flatten().filter_map(of).collect()
}

fn bytes(text: &str) -> Option<i128> {
    let amount: Quantity = text.parse().ok()?;
    Some(amount.nanos() / 1_000_000_000)
}

struct Look<'l> {
    world: World<'l>,
    cluster: &'l Cluster,
    wanted: &'l Shape,
    profiles: BTreeMap<String, i128>,
}

impl Look<'_> {
    fn name(&self, node: usize) -> String {
        let node = self.cluster.nodes.get(node);
        node.and_then(|node| node.metadata.name.clone())
            .unwrap_or_default()
    }

    /// Returns a node on which a changed pod fits. A change that cannot be evaluated does not.
    fn anywhere(&self, shape: &Shape) -> Option<String> {
        let mut nodes = 0..self.cluster.nodes.len();
        let fits = |node: &usize| {
            let found = self.world.fits(shape, *node, &[]);
            found.is_ok_and(|found| found.is_some())
        };
        nodes.find(fits).map(|node| self.name(node))
    }

    /// Returns the pod with a change to one of its requests.
    fn with(&self, at: (usize, usize), change: impl FnOnce(&mut ExactDeviceRequest)) -> Shape {
        let mut shape = self.wanted.clone();
        let claim = shape.claims.get_mut(at.0);
        let devices = claim.and_then(|claim| claim.spec.as_mut()?.devices.as_mut());
        let requests = devices.and_then(|devices| devices.requests.as_mut());
        let request = requests.and_then(|requests| requests.get_mut(at.1)?.exactly.as_mut());
        if let Some(request) = request {
            change(request);
        }
        shape
    }

    /// Returns the pod's requests without alternatives: places, name, content.
    fn requests(&self) -> Vec<((usize, usize), String, ExactDeviceRequest)> {
        let mut all = Vec::new();
        for (number, claim) in self.wanted.claims.iter().enumerate() {
            let devices = claim.spec.iter().flat_map(|spec| &spec.devices);
            let requests = devices.flat_map(|devices| &devices.requests).flatten();
            for (place, request) in requests.enumerate() {
                if let Some(exactly) = &request.exactly {
                    all.push(((number, place), request.name.clone(), exactly.clone()));
                }
            }
        }
        all
    }

    /// Finds the most that fits, for each amount of each request by itself.
    fn less(&self) -> Vec<Way> {
        let mut ways = Vec::new();
        for (at, name, request) in self.requests() {
            let mut add = |what: &str, asked: String, found: Option<(String, String)>| {
                ways.extend(found.map(|(fits, node)| Way::Less {
                    request: name.clone(),
                    what: what.to_owned(),
                    asked,
                    fits,
                    node,
                }));
            };
            let count = request.count.unwrap_or(1);
            let found = largest(i128::from(count) - 1, |fewer| {
                let fewer = i64::try_from(fewer).ok();
                self.anywhere(&self.with(at, |request| request.count = fewer))
            });
            let found = found.map(|(fewer, node)| (fewer.to_string(), node));
            add("count", count.to_string(), found);
            let amounts = request.capacity.iter().flat_map(|of| &of.requests);
            for (what, asked) in amounts.flatten() {
                let found = self.amount(at, what, &asked.0);
                add(what, asked.0.clone(), found);
            }
            if let Some(asked) = profile(&request) {
                let found = self.profile(at, &asked);
                add(attributes::PROFILE, asked, found);
            }
        }
        ways
    }

    fn amount(&self, at: (usize, usize), what: &str, asked: &str) -> Option<(String, String)> {
        let is_memory = what.rsplit('/').next() == Some(capacity::MEMORY);
        let (unit, suffix) = if is_memory { (GIB, "Gi") } else { (1, "") };
        let below = (bytes(asked)? - 1) / unit;
        let text = |amount: i128| format!("{amount}{suffix}");
        let found = largest(below, |amount| {
            let shape = self.with(at, |request| {
                let requests = request
                    .capacity
                    .as_mut()
                    .and_then(|of| of.requests.as_mut());
                if let Some(requests) = requests {
                    requests.insert(what.to_owned(), Raw(text(amount)));
                }
            });
            self.anywhere(&shape)
        });
        found.map(|(amount, node)| (text(amount), node))
    }

    /// Finds the largest smaller profile that fits.
    fn profile(&self, at: (usize, usize), asked: &str) -> Option<(String, String)> {
        let most = self.profiles.get(asked).copied().unwrap_or(i128::MAX);
        let mut smaller: Vec<(&String, i128)> = self
            .profiles
            .iter()
            .map(|(name, memory)| (name, *memory))
            .filter(|(_, memory)| *memory < most)
            .collect();
        smaller.sort_by_key(|(_, memory)| -memory);
        smaller.into_iter().find_map(|(name, _)| {
            let shape = self.with(at, |request| {
                for selector in request.selectors.iter_mut().flatten() {
                    if let Some(cel) = &mut selector.cel {
                        for quote in ['\'', '"'] {
                            let (from, to) = (
                                format!("{quote}{asked}{quote}"),
                                format!("{quote}{name}{quote}"),
                            );
                            cel.expression = cel.expression.replace(&from, &to);
                        }
                    }
                }
            });
            Some((name.clone(), self.anywhere(&shape)?))
        })
    }

    /// Finds other forms of at least the memory that the only request asks for. For a whole GPU,
    /// the largest part that fits.
    fn forms(&self) -> Vec<Way> {
        let requests = self.requests();
        let [(_, name, request)] = requests.as_slice() else {
            return Vec::new();
        };
        let only_one = self.wanted.claims.len() == 1 && request.count.unwrap_or(1) == 1;
        let class = request.device_class_name.as_str();
        let ours = [
            names::CLASS_GPU,
            names::CLASS_MIG,
            names::CLASS_SHARE,
            names::CLASS_MPS,
        ];
        if !only_one || !ours.contains(&class) {
            return Vec::new();
        }
        let is_whole = class == names::CLASS_GPU;
        let memory = match profile(request) {
            Some(profile) => self.profiles.get(&profile).copied(),
            None => memory_of(request),
        };
        // Without an amount there is nothing to compare.
        if memory.is_none() && !is_whole {
            return Vec::new();
        }
        let found = |words: String| {
            let node = self.anywhere(&self.as_words(&words, request)?)?;
            Some((words, node))
        };
        let gib = |bytes: i128| (bytes + GIB - 1) / GIB;
        let part = |kind: &str| match memory {
            Some(memory) => found(format!("{kind}:{}Gi", gib(memory))),
            None => largest(self.largest_part(), |amount| {
                found(format!("{kind}:{amount}Gi"))
            })
            .map(|(_, found)| found),
        };
        let partition = || {
            let mut fitting: Vec<(&String, i128)> = self
                .profiles
                .iter()
                .map(|(name, of)| (name, *of))
                .filter(|(_, of)| memory.is_none_or(|memory| *of >= memory))
                .collect();
            // The smallest that does, and of what is less than asked for the largest.
            fitting.sort_by_key(|(_, of)| if is_whole { -of } else { *of });
            fitting
                .into_iter()
                .find_map(|(name, _)| found(format!("mig:{name}")))
        };
        let has_class = |class: &str| {
            let mut classes = self.cluster.classes.iter();
            classes.any(|of| of.metadata.name.as_deref() == Some(class))
        };
        let mut ways = Vec::new();
        for other in ours {
            if other == class || !has_class(other) {
                continue;
            }
            let way = match other {
                names::CLASS_MIG => partition(),
                names::CLASS_SHARE => part("share"),
                names::CLASS_MPS => part("mps"),
                _ => found("gpu".to_owned()),
            };
            ways.extend(way.map(|(fits, node)| Way::Form {
                request: name.clone(),
                fits,
                node,
            }));
        }
        ways
    }

    /// Returns the most memory of a device, in GiB.
    fn largest_part(&self) -> i128 {
        let slices = self.cluster.slices.iter();
        let devices = slices.flat_map(|slice| &slice.spec.devices).flatten();
        let memory = devices.filter_map(|device| {
            let memory = device.capacity.as_ref()?.get(capacity::MEMORY)?;
            bytes(&memory.value.0)
        });
        memory.max().unwrap_or(0) / GIB
    }

    /// Returns the pod with its only request in other words; its selectors stay, but for those of a
    /// profile. A whole GPU has at least the memory that was asked for.
    fn as_words(&self, words: &str, request: &ExactDeviceRequest) -> Option<Shape> {
        let mut shape = Shape {
            claims: request::shape(words).ok()?.claims,
            ..self.wanted.clone()
        };
        let kept = request.selectors.iter().flatten().filter(|selector| {
            let cel = selector.cel.as_ref();
            cel.is_none_or(|cel| !cel.expression.contains(attributes::PROFILE))
        });
        let claim = shape.claims.first_mut()?;
        let requests = claim.spec.as_mut()?.devices.as_mut()?.requests.as_mut()?;
        let exactly = requests.first_mut()?.exactly.as_mut()?;
        let selectors = exactly.selectors.get_or_insert_default();
        selectors.extend(kept.cloned());
        exactly.tolerations.clone_from(&request.tolerations);
        if let Some(memory) = memory_of(request).filter(|_| words == "gpu") {
            let expression = format!(
                "device.capacity['{}'].{}.compareTo(quantity('{memory}')) >= 0",
                names::DRIVER,
                capacity::MEMORY
            );
            let cel = Some(CELDeviceSelector { expression });
            selectors.push(DeviceSelector { cel });
        }
        Some(shape)
    }

    /// Finds pods of which the end of one makes room.
    fn wait(&self) -> Option<Way> {
        let (mut pods, mut more, mut first) = (Vec::new(), 0, None);
        let mut tried = 0;
        for (node, all) in self.world.pods_of.iter().enumerate() {
            let holders: Vec<usize> = all
                .iter()
                .copied()
                .filter(|pod| self.world.claims_of.contains_key(pod))
                .collect();
            let fits = |gone: &[usize]| {
                let found = self.world.fits(self.wanted, node, gone);
                found.is_ok_and(|found| found.is_some())
            };
            if holders.is_empty() || !fits(&holders) {
                continue;
            }
            for pod in holders {
                tried += 1;
                if tried > TRIED || !fits(&[pod]) {
                    continue;
                }
                first.get_or_insert_with(|| self.name(node));
                if pods.len() < NAMED {
                    pods.extend(self.world.pod(pod).map(pod_name));
                } else {
                    more += 1;
                }
            }
        }
        first.map(|node| Way::Wait { pods, more, node })
    }
}

fn pod_name(pod: &Pod) -> String {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    format!("{}/{}", of(&pod.metadata.namespace), of(&pod.metadata.name))
}

/// Returns the memory that a share asks for, in bytes.
fn memory_of(request: &ExactDeviceRequest) -> Option<i128> {
    let requests = request.capacity.as_ref()?.requests.as_ref()?;
    bytes(&requests.get(capacity::MEMORY)?.0)
}

/// Returns the profile that a request selects, if it names one.
fn profile(request: &ExactDeviceRequest) -> Option<String> {
    let selectors = request.selectors.iter().flatten();
    let mut expressions = selectors.filter_map(|selector| Some(&selector.cel.as_ref()?.expression));
    expressions.find_map(|expression| {
        let (_, after) = expression.split_once(&format!(".{}", attributes::PROFILE))?;
        let value = after.trim_start().strip_prefix("==")?.trim_start();
        let quote = value.chars().next().filter(|c| ['\'', '"'].contains(c))?;
        let (name, _) = value.get(1..)?.split_once(quote)?;
        Some(name.to_owned())
    })
}

/// Finds the largest number from 1 to `most` that has an answer, where less has one if more has.
fn largest<T>(most: i128, mut ask: impl FnMut(i128) -> Option<T>) -> Option<(i128, T)> {
    let (mut low, mut high, mut best) = (1, most, None);
    while low <= high {
        let middle = low + (high - low) / 2;
        match ask(middle) {
            Some(found) => {
                best = Some((middle, found));
                low = middle + 1;
            }
            None => high = middle - 1,
        }
    }
    best
}

#[cfg(test)]
mod tests;
