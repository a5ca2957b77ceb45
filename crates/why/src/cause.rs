//! Why claims wait on a node, in words for those who wrote them: who has the GPUs that would do, or
//! what of it is not offered there at all. The demo, `divvy status` and the page say the same.
//! Pure.

mod find;
mod scene;
#[cfg(test)]
mod tests;

use std::error::Error;

use divvy_allocator::AllocError;
use divvy_api::names::{self, capacity};
use divvy_model::{Form, Quantity};
use k8s_openapi::api::resource::v1::DeviceClass;

pub use self::find::of;
pub use self::scene::{Mig, Scene, mig};
use crate::device::bytes;
use crate::driver::{NO_PASSTHROUGH, NVIDIA_VFIO, plain};
use crate::selector::{FalsePart, overload};
use crate::spelling::nearest;
use crate::{classes, lookup};

/// GPUs, nodes and names that are written out; the rest is counted.
const NAMED: usize = 4;

/// Reason why claims get no devices on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// GPUs that would do are held by others.
    Held(Held),
    /// The node offers no GPU in the form that is asked for.
    NotOffered(Form, Obstacle),
    /// The node has fewer devices than are asked for, held or not.
    TooFew {
        /// Number of devices that are asked for.
        wanted: usize,
        /// Number of devices that the class and the claim select.
        has: usize,
        /// Such devices, as `whole GPUs`.
        what: String,
        /// True if `limits` of a container ask for them.
        by_limits: bool,
    },
    /// No device has so much of a capacity.
    TooMuch {
        capacity: String,
        wanted: String,
        /// The most that one request can have.
        most: Option<String>,
    },
    /// No device has a capacity of this name; others are there.
    NoCapacity {
        capacity: String,
        there: Vec<String>,
    },
    /// GPUs are given out in shares of another unit than that of the claim.
    OtherUnit {
        gpus: Vec<String>,
        /// The capacity that the claim asks for: `percent`, or one of an amount.
        wanted: String,
    },
    /// No partition has the profile that the claim names; others are there, or would be.
    NoProfile {
        profile: String,
        there: Vec<String>,
        /// Obstacle to partitions where none are offered.
        obstacle: Option<Obstacle>,
    },
    /// Devices of the class are there, and the claim selects none of them.
    NotSelected {
        class: String,
        /// Number of the devices.
        devices: usize,
        /// Names in its selectors that no device has, each with the one that was meant.
        unknown: Vec<String>,
        /// Part of them that no device satisfies.
        part: Option<FalsePart>,
    },
    /// Taints keep claims off the GPUs that would do.
    Tainted {
        gpus: Vec<String>,
        taint: String,
        /// DeviceTaintRules that set it, each in a sentence.
        rules: Vec<String>,
    },
    /// Another reason, with the advice there is.
    Other { text: String, hint: Option<String> },
}

/// Says in a sentence why an allocation failed, without the expression that did, which is what the
/// reader wrote.
pub fn of_error(
    error: &AllocError,
    scene: &Scene<'_>,
    classes: &[DeviceClass],
    reader: Reader,
) -> String {
    let selector = match error {
        AllocError::NoClass { class, .. } => return no_class(class, classes, reader),
        AllocError::Selector(selector) => selector,
        other => return chain(other),
    };
    let Some(device) = &selector.device else {
        return chain(error);
    };
    let names = scene.names();
    let unknown = lookup::unknown(&selector.expression, &names.attributes, &names.capacities);
    let of_class = selector.origin.strip_prefix("class ");
    let whose = of_class.map_or_else(|| "its".to_owned(), |class| format!("class {class}'s"));
    if !unknown.is_empty() {
        return format!("{whose} selector fails: {}", unknown.join("; "));
    }
    let text = selector.source.to_string();
    if let Some(instead) = overload(&selector.expression, &text) {
        return format!("{whose} selector fails on {}: {instead}", device.device);
    }
    match text.split_once("no such key: ") {
        Some((_, key)) => format!(
            "{whose} selector reads {key}, which {} does not have: write has(….{key}) && … before it",
            device.device
        ),
        None => format!("{whose} selector fails on {}: {text}", device.device),
    }
}

/// Says that a class does not exist, with the one that was probably meant.
fn no_class(class: &str, classes: &[DeviceClass], reader: Reader) -> String {
    if class == NVIDIA_VFIO {
        return NO_PASSTHROUGH.to_owned();
    }
    let there: Vec<&str> = classes
        .iter()
        .filter_map(|class| class.metadata.name.as_deref())
        .collect();
    let instead = classes::instead(class, there.iter().copied());
    // A cluster may have many.
    let instead = match reader {
        Reader::Cluster if instead.starts_with(';') => {
            "; `kubectl get deviceclasses` lists those that do".to_owned()
        }
        _ => instead,
    };
    format!("class {class:?} does not exist{instead}")
}

/// Returns an error with its causes.
pub fn chain(error: &AllocError) -> String {
    let causes = std::iter::successors(Error::source(error), |&error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// GPUs that would do and are held.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// Each of them: its name, and what it is now.
    gpus: Vec<(String, String)>,
    /// Change that lets the claims start.
    need: Need,
}

/// Change for which claims wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    /// So many GPUs become free.
    Gpus(usize),
    /// Some users of a GPU end; others may stay.
    Part,
    /// There is room for these devices, such as `3 partitions 1g.10gb`.
    Room(String),
}

impl Default for Need {
    fn default() -> Self {
        Self::Gpus(0)
    }
}

impl Need {
    /// Returns the lesser need of two nodes: a claim is served by one of them.
    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Gpus(0), other) | (other, Self::Gpus(0)) => other,
            (Self::Part, _) | (_, Self::Part) => Self::Part,
            (Self::Gpus(one), Self::Gpus(other)) => Self::Gpus(one.min(other)),
            (first, _) => first,
        }
    }

    /// Returns it as what follows `it starts when`; `apart` if the GPUs are of several nodes.
    fn text(&self, gpus: &[(String, String)], apart: bool) -> String {
        let place = if apart { " on one node" } else { "" };
        match (self, gpus) {
            (Self::Part, _) => "enough is released".to_owned(),
            (Self::Room(what), _) => format!("there is room for {what}{place}"),
            (Self::Gpus(0 | 1), [(gpu, _)]) => format!("{gpu} is free"),
            (Self::Gpus(0 | 1), _) => "one is free".to_owned(),
            (Self::Gpus(missing), _) => format!("{missing} are free{place}"),
        }
    }
}

/// Reason why a form is not offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// No policy asks for it.
    Policy,
    /// No policy asks for shares, and the claim wants them by percent.
    PolicyByPercent,
    /// The MIG mode would have to change, which takes a reset of GPUs of this product.
    Reset {
        product: String,
        /// State of the MIG mode.
        on: bool,
    },
    /// GPUs of this product cannot be partitioned.
    NoMig {
        product: String,
        /// True if GPUs are offered in shares instead.
        shared: bool,
    },
}

/// Reader of the advice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// A user who runs the demo and can add files and options.
    Demo,
    /// A user or administrator of a cluster.
    Cluster,
}

impl Cause {
    /// Says whether the claims may get devices when others end.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Held(_))
    }

    /// Adds the DeviceTaintRules behind a taint.
    #[must_use]
    pub fn set_by(mut self, behind: impl IntoIterator<Item = String>) -> Self {
        if let Self::Tainted { rules, .. } = &mut self {
            rules.extend(behind);
        }
        self
    }

    /// Returns the reason as the rest of a sentence that begins with the pod: without a capital and
    /// without a stop at the end. `place` is the node, as `this node`; `several` pods wait alike.
    pub fn text(&self, place: &str, several: bool) -> String {
        match self {
            Self::Held(held) => held.text(several, false),
            Self::NotOffered(form, obstacle) => not_offered(*form, obstacle, place),
            Self::TooFew {
                wanted, has, what, ..
            } => {
                let there = match has {
                    0 => "there is none".to_owned(),
                    1 => "there is 1".to_owned(),
                    n => format!("there are {n}"),
                };
                let each = if place.starts_with("nodes ") {
                    "each of "
                } else {
                    ""
                };
                format!("it asks for {wanted} {what}, and {there} on {each}{place}")
            }
            Self::TooMuch {
                capacity,
                wanted,
                most,
            } => {
                let most = most.as_deref().map_or_else(
                    || format!("no device of {place} gives so much to one request"),
                    |most| {
                        format!(
                            "a device of {place} gives at most {} to one request",
                            in_words(capacity, most)
                        )
                    },
                );
                format!("it asks for {wanted} of {capacity}, and {most}")
            }
            Self::NoCapacity { capacity, there } => {
                format!("no capacity {capacity:?}; there are {}", there.join(", "))
            }
            Self::OtherUnit { gpus, wanted } => {
                let be = if gpus.len() == 1 { "is" } else { "are" };
                let by = if wanted == capacity::PERCENT {
                    "amounts"
                } else {
                    "percent"
                };
                format!("no capacity {wanted}: {} {be} shared by {by}", named(gpus))
            }
            Self::NoProfile { profile, there, .. } => {
                // Sizes differ by a digit and are no slip: only letters and signs are.
                let near = nearest(profile, there.iter().map(String::as_str));
                let hint = near
                    .filter(|near| letters(near) == letters(profile))
                    .map_or_else(
                        || format!("; there are {}", there.join(", ")),
                        |near| format!(" (did you mean {near}?)"),
                    );
                format!("no profile {profile} here{hint}")
            }
            Self::NotSelected { unknown, .. } if !unknown.is_empty() => {
                format!("its selector selects nothing: {}", unknown.join("; "))
            }
            Self::NotSelected {
                class,
                devices,
                part,
                ..
            } => {
                let which = if *devices == 1 {
                    format!("the one device of class {class} on {place} is not")
                } else {
                    format!("none of the {devices} devices of class {class} on {place} is")
                };
                let part = part.as_ref();
                let part = part.map_or_else(String::new, |part| format!(": {}", part.text));
                format!("{which} as the claim's selector wants{part}")
            }
            Self::Tainted { gpus, taint, rules } => {
                let be = if gpus.len() == 1 { "is" } else { "are" };
                let by: Vec<String> = rules.iter().map(|rule| format!(", and {rule}")).collect();
                format!("{} {be} tainted with {taint}{}", named(gpus), by.concat())
            }
            Self::Other { text, .. } => text.clone(),
        }
    }

    /// Returns the way out, as a sentence without a stop, where there is one beside waiting.
    pub fn hint(&self, reader: Reader) -> Option<String> {
        match self {
            Self::Held(_) | Self::NoProfile { obstacle: None, .. } => None,
            // A form other than that of the class has it.
            Self::NoCapacity { capacity, .. } => [capacity::CORES, capacity::SLOTS, capacity::PERCENT]
                .contains(&plain(capacity))
                .then(|| format!("A share has {capacity}: class {}", names::CLASS_SHARE)),
            // The sentence has the name that was meant.
            Self::NotSelected { unknown, .. } if !unknown.is_empty() => None,
            Self::NoProfile { obstacle: Some(obstacle), .. } => {
                Some(way_out(Form::PARTITIONS, obstacle, reader))
            }
            Self::OtherUnit { wanted, .. } => Some(other_unit(wanted, reader)),
            Self::NotOffered(form, obstacle) => Some(way_out(*form, obstacle, reader)),
            Self::TooFew { by_limits, .. } => {
                let count = if *by_limits {
                    "the number in the container's limits"
                } else {
                    "count in spec.devices.requests"
                };
                Some(format!("Ask for fewer ({count}), or use a node with more"))
            }
            Self::TooMuch { .. } => {
                Some("Ask for less, or use GPUs that have more".to_owned())
            }
            Self::NotSelected {
                part: Some(part), ..
            } => part.of_nvidia.then(|| match reader {
                Reader::Demo => {
                    "--driver-name gpu.nvidia.com runs it as with driverName: gpu.nvidia.com".to_owned()
                }
                Reader::Cluster => {
                    "With driverName: gpu.nvidia.com divvy has that name (docs/migrate/stand-in.md)"
                        .to_owned()
                }
            }),
            Self::NotSelected { .. } => Some(match reader {
                Reader::Demo => "divvy inventory shows what there is to select by".to_owned(),
                Reader::Cluster => {
                    "Compare with what there is to select by: kubectl get resourceslices -o yaml"
                        .to_owned()
                }
            }),
            Self::Tainted { rules, .. } if !rules.is_empty() => Some(
                "Delete the rule when its reason is gone, or tolerate its taint in the claim"
                    .to_owned(),
            ),
            Self::Tainted { .. } => Some(
                "The taint goes when its cause is gone; a toleration is for monitoring and repair only"
                    .to_owned(),
            ),
            Self::Other { hint, .. } => hint.clone(),
        }
    }

    /// Returns reason and way out.
    pub fn full(&self, place: &str, several: bool, reader: Reader) -> String {
        let text = self.text(place, several);
        match self.hint(reader) {
            Some(hint) => format!("{text}. {hint}"),
            None => text,
        }
    }
}

/// Says in one sentence why claims wait on several nodes: what may pass comes first and alone.
pub fn over_nodes(causes: &[(String, Cause)], several: bool) -> String {
    let (mut all, mut nodes) = (Held::default(), 0_usize);
    for (node, cause) in causes {
        if let Cause::Held(held) = cause {
            let at = |(gpu, state): &(String, String)| (format!("{node} {gpu}"), state.clone());
            all.gpus.extend(held.gpus.iter().map(at));
            all.need = all.need.or(held.need.clone());
            nodes += usize::from(!held.gpus.is_empty());
        }
    }
    let waits = !all.gpus.is_empty();
    let mut alike: Vec<(&Cause, Vec<String>)> = Vec::new();
    for (node, cause) in causes {
        // A taint may go, too, and sooner.
        if waits && !matches!(cause, Cause::Tainted { .. }) {
            continue;
        }
        match alike.iter_mut().find(|(other, _)| *other == cause) {
            Some((_, nodes)) => nodes.push(node.clone()),
            None => alike.push((cause, vec![node.clone()])),
        }
    }
    let texts = alike.iter().map(|(cause, nodes)| {
        let word = if nodes.len() == 1 { "node" } else { "nodes" };
        let place = format!("{word} {}", named(nodes));
        let text = cause.text(&place, several);
        if matches!(cause, Cause::Tainted { .. }) {
            format!("on {place} {text}")
        } else {
            text
        }
    });
    let held = waits.then(|| all.text(several, nodes > 1));
    held.into_iter().chain(texts).collect::<Vec<_>>().join("; ")
}

impl Held {
    fn text(&self, several: bool, apart: bool) -> String {
        let mut states: Vec<String> = self
            .gpus
            .iter()
            .take(NAMED)
            .map(|(gpu, state)| format!("{gpu} {state}"))
            .collect();
        let more = self.gpus.len().saturating_sub(NAMED);
        if more > 0 {
            states.push(format!("{more} more GPUs are in use"));
        }
        let who = if several { "each" } else { "it" };
        let when = self.need.text(&self.gpus, apart);
        format!("{}: {who} starts when {when}", states.join("; "))
    }
}

fn not_offered(form: Form, obstacle: &Obstacle, place: &str) -> String {
    let offered = match form {
        Form::WHOLE => "whole",
        Form::PARTITIONS => "in partitions",
        Form::TIME_SLICED => "in shares",
        Form::SHARED_PARTITIONS => "in shares of partitions",
        Form::MPS => "in MPS shares",
        Form::MPS_PARTITIONS => "in MPS shares of partitions",
        _ => "for admin access",
    };
    match obstacle {
        Obstacle::Policy | Obstacle::PolicyByPercent => {
            format!("no GPU of {place} is offered {offered}")
        }
        Obstacle::Reset { product, on } => {
            let state = if *on { "on" } else { "off" };
            format!(
                "no GPU of {place} is offered {offered}: MIG mode of {product} is {state}, and changes only with a reset"
            )
        }
        Obstacle::NoMig { product, .. } => {
            format!("no GPU of {place} can be partitioned: {product} has no MIG")
        }
    }
}

/// Says how a form is offered that is not.
fn way_out(form: Form, obstacle: &Obstacle, reader: Reader) -> String {
    match (obstacle, reader) {
        (Obstacle::Policy, reader) => policy(
            match form {
                Form::WHOLE => "modes: [Whole]",
                Form::PARTITIONS => "modes: [Mig]",
                Form::SHARED_PARTITIONS => "modes: [Mig], mig: {sharing: [TimeSlicing]}",
                Form::MPS => "modes: [Mps]",
                Form::MPS_PARTITIONS => "modes: [Mig], mig: {sharing: [Mps]}",
                _ => "modes: [TimeSlicing]",
            },
            match form {
                Form::MPS => WITH_MPS,
                Form::SHARED_PARTITIONS => IN_PARTITIONS,
                Form::MPS_PARTITIONS => MPS_IN_PARTITIONS,
                _ => ALL_MODES,
            },
            reader,
        ),
        (Obstacle::PolicyByPercent, reader) => policy(
            "modes: [TimeSlicing], shares: {unit: Percent}",
            BY_PERCENT,
            reader,
        ),
        (Obstacle::Reset { on: false, .. }, Reader::Demo) => {
            "--mig-on all starts the demo with MIG mode on".to_owned()
        }
        (Obstacle::Reset { on: true, .. }, Reader::Demo) => {
            "Without --mig-on, MIG mode is off".to_owned()
        }
        (Obstacle::Reset { on, .. }, Reader::Cluster) => {
            let to = u8::from(!on);
            format!(
                "An administrator sets it on an idle GPU: nvidia-smi -i GPU -mig {to}, then a reset"
            )
        }
        (Obstacle::NoMig { shared, .. }, _) => {
            let needs = if *shared {
                ""
            } else {
                ", which needs a GpuPolicy with modes: [TimeSlicing]"
            };
            format!(
                "Claim a share (class share.divvy.dev{needs}), or use a node whose GPUs have MIG"
            )
        }
    }
}

/// The policy of every form, which the program has in it.
pub const ALL_MODES: &str = "examples/all-modes.yaml";
/// A policy of MPS shares.
pub const WITH_MPS: &str = "examples/mps-share/manifests.yaml";
/// A policy of shares inside partitions.
pub const IN_PARTITIONS: &str = "examples/mig-share/manifests.yaml";
/// The file with a policy that offers MPS shares of partitions.
const MPS_IN_PARTITIONS: &str = "examples/mig-mps/manifests.yaml";
/// The policy of every form with shares by percent.
pub const BY_PERCENT: &str = "examples/by-percent.yaml";

/// Names the lines of a policy, and for the demo a file with them.
fn policy(rule: &str, file: &str, reader: Reader) -> String {
    match reader {
        Reader::Demo => format!("A GpuPolicy with {rule} offers them: add -f {file}"),
        Reader::Cluster => {
            format!("A GpuPolicy with spec: {{rules: [{{{rule}}}]}} offers them (docs/policy.md)")
        }
    }
}

/// Says how a claim and the unit of shares come together.
fn other_unit(wanted: &str, reader: Reader) -> String {
    let add = |file: &str| match reader {
        Reader::Demo => format!(": -f {file} in place of the policy"),
        Reader::Cluster => " (docs/sharing.md)".to_owned(),
    };
    if wanted == capacity::PERCENT {
        format!(
            "A GpuPolicy with shares: {{unit: Percent}} gives GPUs out by percent{}. Or request amounts, such as \
             capacity.requests {{memory: 10Gi, cores: 10}}",
            add(BY_PERCENT)
        )
    } else {
        format!(
            "Request percent alone, such as capacity.requests {{percent: \"50\"}} for half of any GPU. Or a GpuPolicy without \
             shares: {{unit: Percent}} gives GPUs out by amounts{}",
            add(ALL_MODES)
        )
    }
}

/// Returns what is left of a profile's name without case and signs: `1g.10GB` and `1g-10gb` are
/// one.
fn letters(profile: &str) -> String {
    let plain = profile.chars().filter(char::is_ascii_alphanumeric);
    plain.map(|c| c.to_ascii_lowercase()).collect()
}

/// An amount of a capacity; memory in GiB, as tables and programs of NVIDIA have it.
fn in_words(of: &str, amount: &str) -> String {
    let units = amount.parse::<Quantity>().ok().map(|q| q.rounded_up());
    let of = plain(of);
    match units.and_then(|units| u64::try_from(units).ok()) {
        Some(units) if of == capacity::MEMORY => format!("{} ({amount})", bytes(units)),
        Some(units) if of == capacity::CORES => format!("{units} % of the cores"),
        Some(units) if of == capacity::PERCENT => format!("{units} %"),
        _ => format!("{amount} {of}"),
    }
}

/// A list that stays short.
pub fn named<T: AsRef<str>>(names: &[T]) -> String {
    let first: Vec<&str> = names.iter().take(NAMED).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(NAMED) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}
