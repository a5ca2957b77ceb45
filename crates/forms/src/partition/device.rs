//! The partitions of a GPU, each for one claim: what all of them say, and what those of a profile
//! have.

use std::borrow::Cow;

use divvy_api::names::{attributes as attr, capacity as cap, counters as names};
use divvy_model::mig::{GpuInstanceProfile, ProfileName};
use divvy_model::{Form, Gpu, GpuUuid, Sharing, SystemFacts, TargetKind};

use crate::builder::Builder;
use crate::{Amount, Capacity, Device, whole};

/// Resources that are counted by number: the counter and the capacity of a device that says the
/// same.
pub const RESOURCES: [(&str, &str); 7] = [
    (names::COPY_ENGINES, cap::COPY_ENGINES),
    (names::DECODERS, cap::DECODERS),
    (names::ENCODERS, cap::ENCODERS),
    (names::JPEG_ENGINES, cap::JPEG_ENGINES),
    (names::MEMORY, cap::MEMORY),
    (names::MULTIPROCESSORS, cap::MULTIPROCESSORS),
    (names::OFA_ENGINES, cap::OFA_ENGINES),
];

/// Returns what an instance of a profile has, in the order of [`RESOURCES`].
pub fn amounts(profile: &GpuInstanceProfile) -> [Amount; 7] {
    let engines = profile.engines;
    let count = |n: u32| Amount::Count(n.into());
    [
        count(engines.copy),
        count(engines.decoders),
        count(engines.encoders),
        count(engines.jpeg),
        Amount::Bytes(profile.memory_bytes()),
        count(profile.multiprocessors),
        count(engines.ofa),
    ]
}

/// Writes what all partitions of a GPU say. No `uuid`, which there is only once it lives, and no
/// NVLink, which partitions cannot use.
pub fn describe(to: &mut Builder<'_>, uuid: &GpuUuid, gpu: &Gpu, system: &SystemFacts) {
    identify(to, uuid);
    whole::describe(to, gpu, system);
}

pub fn identify(to: &mut Builder<'_>, gpu: &GpuUuid) {
    to.string(attr::TYPE, Some(Form::PARTITIONS.device_type()));
    to.string(attr::PARENT_UUID, Some(gpu.as_str()));
    to.string(attr::GPU_UUID, Some(gpu.as_str()));
    to.string(attr::SHARING, Some(Sharing::Exclusive.attribute()));
    to.limits(TargetKind::Partition, Sharing::Exclusive);
}

/// Returns what all partitions of a profile say.
pub fn of_profile(
    template: &Device,
    profile: &GpuInstanceProfile,
    name: Option<&ProfileName>,
) -> Device {
    let mut nothing = Vec::new();
    let mut to = Builder {
        device: template.clone(),
        left_out: &mut nothing,
    };
    to.string(attr::PROFILE, name.map(ToString::to_string).as_deref());
    for ((_, capacity), amount) in RESOURCES.iter().zip(amounts(profile)) {
        // Memory that is the host's is not the partition's; of engines, none is an answer.
        let shared = *capacity == cap::MEMORY && amount.value() == 0;
        to.capacity(capacity, (!shared).then_some(amount));
    }
    to.device
}

/// The engines of a whole GPU, which NVML reports only for its profiles.
pub fn engines(largest: [Amount; 7]) -> Vec<(Cow<'static, str>, Capacity)> {
    RESOURCES
        .iter()
        .zip(largest)
        .filter(|((_, capacity), _)| ![cap::MEMORY, cap::MULTIPROCESSORS].contains(capacity))
        .map(|((_, capacity), amount)| (Cow::Borrowed(*capacity), Capacity::whole(amount)))
        .collect()
}
