//! Every GPU as a picture: what it is now, and who has what of it.

use std::collections::BTreeMap;

use divvy_api::names::capacity;
use divvy_model::mig::{GpuInstance, MigCapabilities};
use divvy_model::{DeviceKind, Form, Inventory, Ordinals, Sharing};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use serde::Serialize;

use super::report::{ClaimReport, DeviceReport, State};
use divvy_cli::slices::{Picture, boxes, letter};
use divvy_why::device::{amount, kind, memory};

/// State of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GpuPicture {
    /// The GPU, as its device is named.
    pub(crate) gpu: String,
    #[serde(flatten)]
    pub(crate) mode: Mode,
    /// Claims that look on with admin access.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) admins: Vec<String>,
}

/// The mode of a GPU, with its users.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "mode", rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Not held by any claim.
    Idle,
    /// Held whole by a claim.
    Whole {
        /// The claim.
        holder: String,
    },
    /// In MIG partitions.
    Partitioned {
        /// Its memory slices.
        #[serde(flatten)]
        picture: Picture,
    },
    /// In time-sliced shares.
    TimeSliced(Shares),
    /// In MPS shares.
    Mps(Shares),
}

/// The shares of a GPU. Memory is in bytes, cores in percent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Shares {
    /// By what the device gives out: `memory`, `cores`, `slots`; or `percent`, with the `memory`
    /// that they are of.
    pub(crate) total: BTreeMap<String, u64>,
    /// The shares, in the order of their claims.
    pub(crate) shares: Vec<Share>,
}

/// A claim's share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Share {
    pub(crate) holder: String,
    /// Amounts that it was granted, as the total.
    pub(crate) granted: BTreeMap<String, u64>,
    /// Bytes that the driver caps its memory to, where it caps any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) limit: Option<u64>,
}

impl Shares {
    /// Returns how much of a capacity all shares have together.
    pub(crate) fn used(&self, of: &str) -> u64 {
        self.shares
            .iter()
            .filter_map(|share| share.granted.get(of))
            .sum()
    }
}

/// The GPUs while these claims are prepared.
pub(crate) fn pictures(
    inventory: &Inventory,
    slices: &[ResourceSlice],
    reports: &[ClaimReport],
) -> Vec<GpuPicture> {
    let mut ordinals = Ordinals::default();
    ordinals.assign(
        inventory
            .gpus
            .iter()
            .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
    );
    let mut gpus: Vec<(u32, GpuPicture)> = inventory
        .gpus
        .iter()
        .filter_map(|(uuid, gpu)| {
            let ordinal = ordinals.of(uuid)?;
            let mig = gpu.mig.as_ref().map(|mig| {
                (
                    &mig.capabilities,
                    mig.instances.as_deref().unwrap_or_default(),
                )
            });
            Some((ordinal, picture(ordinal, mig, slices, reports)))
        })
        .collect();
    gpus.sort_by_key(|(ordinal, _)| *ordinal);
    gpus.into_iter().map(|(_, picture)| picture).collect()
}

fn picture(
    ordinal: u32,
    mig: Option<(&MigCapabilities, &[GpuInstance])>,
    slices: &[ResourceSlice],
    reports: &[ClaimReport],
) -> GpuPicture {
    let gpu = format!("gpu-{ordinal}");
    let held: Vec<(DeviceKind, &ClaimReport, &DeviceReport)> = reports
        .iter()
        .flat_map(|report| devices(report).iter().map(move |device| (report, device)))
        .filter_map(|(report, device)| Some((kind(&device.device)?, report, device)))
        .filter(|(kind, ..)| kind.ordinal() == ordinal)
        .collect();
    let who = |wanted: &dyn Fn(&DeviceKind) -> bool| {
        let holders = held
            .iter()
            .filter(|(kind, _, device)| wanted(kind) && !device.admin);
        holders
            .map(|(_, report, device)| (report.claim.clone(), *device))
            .collect::<Vec<_>>()
    };
    let admins = held
        .iter()
        .filter(|(kind, _, device)| device.admin || !kind.sharing.holds());
    let admins = admins.map(|(_, report, _)| report.claim.clone()).collect();
    let whole = who(&|kind| kind.form() == Form::WHOLE);
    let shares = who(&|kind| kind.partition().is_none() && kind.sharing.is_shared());
    let mode = if let Some((capabilities, instances)) =
        mig.filter(|(_, instances)| !instances.is_empty())
    {
        let holders = |instance: &GpuInstance| {
            let is_it = |kind: &DeviceKind| {
                kind.partition().is_some_and(|name| {
                    (name.profile, name.start) == (instance.profile, instance.placement.start)
                })
            };
            let is_shared = |kind: &DeviceKind| is_it(kind) && kind.sharing.is_shared();
            let claims = who(&is_it).into_iter().map(|(claim, _)| claim).collect();
            (claims, !who(&is_shared).is_empty())
        };
        Mode::Partitioned {
            picture: Picture::of(gpu.clone(), capabilities, instances, holders),
        }
    } else if !shares.is_empty() {
        let by_mps = held.iter().any(|(kind, _, _)| kind.form() == Form::MPS);
        let (sharing, mode) = if by_mps {
            (Sharing::Mps, Mode::Mps as fn(Shares) -> Mode)
        } else {
            (Sharing::TimeSliced, Mode::TimeSliced as fn(Shares) -> Mode)
        };
        let name = DeviceKind::of_gpu(ordinal, sharing).to_string();
        let published = find(&name, slices);
        let slot = published.map(slot).unwrap_or_default();
        let shares = shares
            .into_iter()
            .map(|(holder, device)| Share {
                holder,
                granted: granted(device).into_iter().chain(slot.clone()).collect(),
                limit: device.memory_limit,
            })
            .collect();
        mode(Shares {
            total: published.map(total).unwrap_or_default(),
            shares,
        })
    } else if let Some((holder, _)) = whole.into_iter().next() {
        Mode::Whole { holder }
    } else {
        Mode::Idle
    };
    GpuPicture { gpu, mode, admins }
}

fn devices(report: &ClaimReport) -> &[DeviceReport] {
    match &report.state {
        State::Prepared { devices, .. } => devices,
        State::Pending { .. } | State::Failed { .. } => &[],
    }
}

/// Returns the amounts that a share was granted, with the memory that its percent are.
fn granted(device: &DeviceReport) -> BTreeMap<String, u64> {
    let mut granted = amounts(device.consumed.iter().map(|(k, v)| (k, v.as_str())));
    let memory = device.memory_of_percent;
    granted.extend(memory.map(|bytes| (capacity::MEMORY.to_owned(), bytes)));
    granted
}

/// Returns the amounts that a share device gives out, with the memory that its percent are of.
fn total(found: &Device) -> BTreeMap<String, u64> {
    let capacity = found.capacity.iter().flatten();
    let mut total = amounts(capacity.map(|(name, capacity)| (name, capacity.value.0.as_str())));
    total.extend(memory(found).map(|bytes| (capacity::MEMORY.to_owned(), bytes)));
    let slots = total.get(capacity::SLOTS).copied().unwrap_or(0);
    let of_slots = slot(found).into_iter();
    total.extend(of_slots.map(|(name, each)| (name, each.saturating_mul(slots))));
    total
}

fn find<'s>(device: &str, slices: &'s [ResourceSlice]) -> Option<&'s Device> {
    let mut devices = slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten());
    devices.find(|found| found.name == device)
}

/// Returns what a slot of MPS shares has; nothing of other devices.
fn slot(found: &Device) -> BTreeMap<String, u64> {
    let (memory, cores) = divvy_why::device::slot(found);
    let memory = memory.map(|memory| (capacity::MEMORY, memory));
    let cores = cores.map(|cores| (capacity::CORES, cores));
    let parts = memory.into_iter().chain(cores);
    parts
        .map(|(name, amount)| (name.to_owned(), amount))
        .collect()
}

fn amounts<'a>(of: impl Iterator<Item = (&'a String, &'a str)>) -> BTreeMap<String, u64> {
    of.filter_map(|(name, text)| Some((divvy_why::driver::plain(name).to_owned(), amount(text)?)))
        .collect()
}

/// Characters of a bar.
const WIDTH: usize = 71;

impl GpuPicture {
    /// Says whether the picture shows more than the holder of the GPU.
    pub(crate) fn is_divided(&self) -> bool {
        matches!(
            self.mode,
            Mode::Partitioned { .. } | Mode::TimeSliced(_) | Mode::Mps(_)
        )
    }

    /// Says whether no claim has anything of the GPU.
    pub(crate) fn is_idle(&self) -> bool {
        self.mode == Mode::Idle && self.admins.is_empty()
    }

    /// The picture, lines without an indent.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = match &self.mode {
            Mode::Idle => boxed(&self.gpu, "idle"),
            Mode::Whole { holder } => {
                let mut lines = boxed(&self.gpu, "A whole");
                lines.push(format!("        A  whole  {holder}"));
                lines
            }
            Mode::Partitioned { picture } => picture.lines(),
            Mode::TimeSliced(shares) => self.shared("shared", shares),
            Mode::Mps(shares) => self.shared("shared by MPS", shares),
        };
        lines.extend(
            self.admins
                .iter()
                .map(|admin| format!("        +  admin access  {admin}")),
        );
        lines
    }

    /// A bar of memory: each share as long as what it has of it, at least one character.
    fn shared(&self, how: &str, shares: &Shares) -> Vec<String> {
        let known = [capacity::MEMORY, capacity::PERCENT, capacity::CORES];
        let mut known = known.into_iter();
        // MPS shares have slots alone.
        let of = known.find(|name| shares.total.contains_key(*name));
        let of = of.unwrap_or(capacity::SLOTS);
        let all = shares.total.get(of).copied().unwrap_or(0).max(1);
        let mut bar = String::new();
        let mut used = 0;
        for (number, share) in shares.shares.iter().enumerate() {
            used += share.granted.get(of).copied().unwrap_or(0);
            let end = usize::try_from(u128::from(used) * WIDTH as u128 / u128::from(all))
                .unwrap_or(WIDTH);
            let length = bar.chars().count();
            bar.extend(std::iter::repeat_n(
                letter(number),
                end.max(length + 1) - length,
            ));
        }
        let length = bar.chars().count();
        bar.extend(std::iter::repeat_n('·', WIDTH.saturating_sub(length)));
        let mut lines = boxed(&self.gpu, &bar.chars().take(WIDTH).collect::<String>());
        let part_of = |name: &str| {
            let total = *shares.total.get(name)?;
            let used = shares.used(name);
            Some(match name {
                capacity::MEMORY => {
                    format!(
                        "memory {} of {}",
                        divvy_why::device::bytes(used),
                        divvy_why::device::bytes(total)
                    )
                }
                capacity::CORES => format!("compute {used} of {total} %"),
                capacity::PERCENT => format!("{used} of {total} %"),
                _ => format!("{name} {used} of {total}"),
            })
        };
        let parts: Vec<String> = [
            capacity::PERCENT,
            capacity::MEMORY,
            capacity::CORES,
            capacity::SLOTS,
        ]
        .into_iter()
        .filter_map(part_of)
        .collect();
        lines.push(format!("        {how}: {}", parts.join(", ")));
        for (number, share) in shares.shares.iter().enumerate() {
            let part = |name: &str| share.granted.get(name).copied().unwrap_or(0);
            let percent = part(capacity::CORES) + part(capacity::PERCENT);
            let memory = part(capacity::MEMORY);
            let limit = share.limit.filter(|limit| *limit > memory);
            let limit = limit.map_or_else(String::new, |limit| {
                format!(", limit {}", divvy_why::device::bytes(limit))
            });
            lines.push(format!(
                "        {}  {:>8}  {:>3} %  {}{limit}",
                letter(number),
                divvy_why::device::bytes(memory),
                percent,
                share.holder
            ));
        }
        lines
    }
}

/// Draws a box over the whole width.
fn boxed(gpu: &str, text: &str) -> Vec<String> {
    boxes(gpu, &[(text.to_owned(), WIDTH)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(claim: &str, device: &str, consumed: &[(&str, &str)]) -> ClaimReport {
        let consumed = consumed
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        let device = DeviceReport {
            device: device.to_owned(),
            consumed,
            ..DeviceReport::default()
        };
        ClaimReport {
            claim: claim.to_owned(),
            pods: Vec::new(),
            state: State::Prepared {
                devices: vec![device],
                prepare_us: 0,
            },
            cdi: None,
        }
    }

    fn slices() -> Vec<ResourceSlice> {
        let slice = serde_json::json!({"spec": {"driver": "d", "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0-ts", "capacity": {"memory": {"value": "80Gi"}, "cores": {"value": "100"}, "slots": {"value": "16"}}}]}});
        vec![serde_json::from_value(slice).unwrap()]
    }

    #[test]
    fn shares_are_as_long_as_their_memory_and_the_smallest_is_seen() {
        let reports = [
            report(
                "default/a",
                "gpu-0-ts",
                &[("memory", "40Gi"), ("cores", "50"), ("slots", "1")],
            ),
            report(
                "default/b",
                "gpu-0-ts",
                &[("memory", "100Mi"), ("cores", "10"), ("slots", "1")],
            ),
            report("default/c", "gpu-1", &[]),
        ];
        let inventory = divvy_gpu_sim::SimNode::parse("h100x2").unwrap().inventory();
        let lines: Vec<String> = pictures(&inventory, &slices(), &reports)
            .iter()
            .flat_map(GpuPicture::lines)
            .collect();
        let line = "─".repeat(WIDTH);
        let expected = [
            format!("       ┌{line}┐"),
            format!("gpu-0  │{}B{}│", "A".repeat(35), "·".repeat(35)),
            format!("       └{line}┘"),
            "        shared: memory 40.1 GiB of 80 GiB, compute 60 of 100 %, slots 2 of 16"
                .to_owned(),
            "        A    40 GiB   50 %  default/a".to_owned(),
            "        B   100 MiB   10 %  default/b".to_owned(),
            format!("       ┌{line}┐"),
            format!("gpu-1  │A whole{}│", " ".repeat(WIDTH - 7)),
            format!("       └{line}┘"),
            "        A  whole  default/c".to_owned(),
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn shares_by_percent_are_shown_with_the_memory_that_they_are() {
        let mut slices = slices();
        let device = &mut slices[0].spec.devices.as_mut().unwrap()[0];
        *device = serde_json::from_value(serde_json::json!({"name": "gpu-0-ts",
            "attributes": {"memoryMiB": {"int": 81920}}, "capacity": {"percent": {"value": "100"}}}))
        .unwrap();
        let mut half = report("default/a", "gpu-0-ts", &[("percent", "50")]);
        if let State::Prepared { devices, .. } = &mut half.state {
            devices[0].memory_of_percent = Some(40 << 30);
        }
        let inventory = divvy_gpu_sim::SimNode::parse("h100x1").unwrap().inventory();
        let lines: Vec<String> = pictures(&inventory, &slices, &[half])
            .iter()
            .flat_map(GpuPicture::lines)
            .collect();
        let expected = [
            format!("gpu-0  │{}{}│", "A".repeat(35), "·".repeat(36)),
            "        shared: 50 of 100 %, memory 40 GiB of 80 GiB".to_owned(),
            "        A    40 GiB   50 %  default/a".to_owned(),
        ];
        assert_eq!([&lines[1], &lines[3], &lines[4]], expected.each_ref());
    }

    #[test]
    fn an_idle_gpu_has_no_holder_and_admins_are_named_beside_its_user() {
        let mut monitor = report("m/monitor", "gpu-0-admin", &[]);
        if let State::Prepared { devices, .. } = &mut monitor.state {
            devices[0].admin = true;
        }
        let inventory = divvy_gpu_sim::SimNode::parse("h100x1").unwrap().inventory();
        let pictures = pictures(&inventory, &[], &[monitor]);
        let expected = GpuPicture {
            gpu: "gpu-0".to_owned(),
            mode: Mode::Idle,
            admins: vec!["m/monitor".to_owned()],
        };
        assert_eq!(pictures, [expected]);
    }
}
