//! The inventory as tables of 80 columns: the GPUs, and what to select by. Pure.

use std::collections::BTreeSet;

use divvy_api::names::{self, attributes};
use divvy_model::MemoryCaps;

use super::shown::{Gpu, Group, Shown, selector};
use crate::format::{bytes, shortened};
use crate::table::{Table, or_dash};
use divvy_why::driver::plain;

/// Columns of a terminal that a line should fit.
const WIDTH: usize = 80;

/// Characters of a product's name in the table of GPUs; the other table has it in full.
const PRODUCT: usize = 38;

/// The inventory for people; `wide` has addresses, UUIDs and every device.
pub(super) fn table(shown: &Shown, wide: bool) -> String {
    let unknown = || "-".to_owned();
    let mut blocks = vec![format!(
        "driver {}, CUDA {}, NVML {}",
        shown.driver_version,
        shown.cuda_version.clone().unwrap_or_else(unknown),
        shown.nvml_version.clone().unwrap_or_else(unknown)
    )];
    blocks.push(gpus(&shown.gpus, wide));
    let cut = shown.gpus.iter().filter(|gpu| gpu.mig == "on");
    for picture in cut.filter_map(|gpu| gpu.picture.as_ref()) {
        blocks.push(picture.lines().join("\n"));
    }
    let decided: Vec<String> = shown
        .gpus
        .iter()
        .filter_map(|gpu| {
            let (name, by) = (gpu.name.as_ref()?, gpu.decided_by.as_ref()?);
            Some(format!("{name} by {by}"))
        })
        .collect();
    if !decided.is_empty() {
        blocks.push(decided.join("\n"));
    }
    let products: BTreeSet<&str> = shown
        .forms
        .iter()
        .map(|form| form.product_name.as_str())
        .collect();
    for product in &products {
        let of_product: Vec<&Group> = shown
            .forms
            .iter()
            .filter(|form| form.product_name == *product)
            .collect();
        for gpus in alike(&of_product) {
            blocks.push(offered(product, &gpus, &of_product));
        }
    }
    if shown.forms.is_empty() {
        blocks.push("Nothing would be published.".to_owned());
    } else {
        blocks.push(how(shown.driver_name, &shown.forms));
        blocks.extend(limits(&shown.forms, shown.memory_caps));
    }
    if wide {
        blocks.push(format!("published: {}", shown.devices.join(" ")));
    }
    let lines = |what: &str, lines: &[String]| {
        lines
            .iter()
            .map(|line| format!("{what}: {line}"))
            .collect::<Vec<_>>()
    };
    let rest = [
        lines("left out", &shown.notes),
        lines("problem", &shown.problems),
    ]
    .concat();
    if !rest.is_empty() {
        blocks.push(rest.join("\n"));
    }
    blocks.join("\n\n")
}

fn gpus(gpus: &[Gpu], wide: bool) -> String {
    let mut table = Table::new(["GPU", "PRODUCT", "MEMORY", "SMS", "MIG", "NUMA", "NVLINK"]);
    if wide {
        table.widen(&["PCI", "UUID"]);
    }
    for gpu in gpus {
        let number = |n: Option<u32>| n.map_or("-".to_owned(), |n| n.to_string());
        let product = gpu
            .product_name
            .strip_prefix("NVIDIA ")
            .unwrap_or(&gpu.product_name);
        let mut cells = vec![
            or_dash(gpu.name.as_deref().unwrap_or_default()),
            if wide {
                product.to_owned()
            } else {
                shortened(product, PRODUCT)
            },
            gpu.memory_bytes.map_or("-".to_owned(), bytes),
            number(gpu.multiprocessors),
            if gpu.mig == "unsupported" {
                "-"
            } else {
                gpu.mig
            }
            .to_owned(),
            number(gpu.numa_node),
            match gpu.nvlink.as_deref() {
                Some("1") => "1 peer".to_owned(),
                Some("switch") => "switch".to_owned(),
                Some(peers) => format!("{peers} peers"),
                None => "-".to_owned(),
            },
        ];
        if wide {
            cells.extend([gpu.pci_address.clone(), gpu.uuid.clone()]);
        }
        table.cells(cells);
    }
    table.render(0)
}

/// The classes of MPS shares.
const MPS: [&str; 2] = [names::CLASS_MPS, names::CLASS_MIG_MPS];

/// Groups GPUs that have the same forms, in the order of their names.
fn alike(forms: &[&Group]) -> Vec<Vec<String>> {
    let number = |name: &str| name.rsplit('-').next().and_then(|n| n.parse::<u32>().ok());
    let mut gpus: Vec<&String> = forms.iter().flat_map(|form| &form.gpus).collect();
    gpus.sort_by_key(|name| (number(name), (*name).clone()));
    gpus.dedup();
    let mut groups: Vec<(Vec<usize>, Vec<String>)> = Vec::new();
    for gpu in gpus {
        let has = |(_, form): &(usize, &&Group)| form.gpus.contains(gpu);
        let own: Vec<usize> = forms
            .iter()
            .enumerate()
            .filter(has)
            .map(|(n, _)| n)
            .collect();
        match groups.iter_mut().find(|(of, _)| *of == own) {
            Some((_, there)) => there.push(gpu.clone()),
            None => groups.push((own, vec![gpu.clone()])),
        }
    }
    groups.into_iter().map(|(_, gpus)| gpus).collect()
}

/// The forms of GPUs of one product, which all of them have.
fn offered(product: &str, gpus: &[String], forms: &[&Group]) -> String {
    let mut table = Table::new(["FORM", "CLASS", "DEVICES", "MEMORY", "SELECT WITH"]);
    let have = |form: &&&Group| gpus.iter().all(|gpu| form.gpus.contains(gpu));
    for form in forms.iter().filter(have) {
        let select = match (&form.selector, form.requests.is_empty()) {
            (Some(_), _) => format!("{} == \"{}\"", attributes::PROFILE, form.name),
            (None, false) => {
                let names = form.requests.iter().map(|name| plain(name));
                format!("capacity {}", names.collect::<Vec<_>>().join(", "))
            }
            (None, true) if MPS.contains(&form.class) => {
                format!(
                    "{}, {}",
                    attributes::SLOT_MEMORY_MIB,
                    attributes::SLOT_CORES
                )
            }
            (None, true) if form.name == "admin" => "adminAccess: true".to_owned(),
            (None, true) => "the class".to_owned(),
        };
        table.cells(vec![
            form.name.clone(),
            form.class.to_owned(),
            devices(form),
            form.memory_bytes.map_or("-".to_owned(), bytes),
            select,
        ]);
    }
    let names = names_of(gpus);
    let mut title = format!("{product} ({names}), published as");
    if title.chars().count() > WIDTH {
        title = format!("{product}\n({names}), published as");
    }
    format!("{title}\n{}", table.render(0))
}

/// Names GPUs; more than four in a row are written as first and last.
fn names_of(gpus: &[String]) -> String {
    let number = |name: &str| name.rsplit('-').next().and_then(|n| n.parse::<u32>().ok());
    let mut runs: Vec<Vec<&str>> = Vec::new();
    for gpu in gpus {
        let next = number(gpu);
        match runs.last_mut() {
            Some(run) if run.last().and_then(|last| number(last)?.checked_add(1)) == next => {
                run.push(gpu);
            }
            _ => runs.push(vec![gpu]),
        }
    }
    let shown: Vec<String> = runs
        .iter()
        .map(|run| match run.as_slice() {
            [first, .., last] if run.len() > 4 => format!("{first} … {last}"),
            names => names.join(", "),
        })
        .collect();
    shown.join(", ")
}

/// Returns the number of devices of a GPU, with the claims that share each.
fn devices(form: &Group) -> String {
    match (form.slots, form.devices_per_gpu) {
        (Some(slots), 0 | 1) => format!("{slots} slots"),
        // Each of the places of a partition has these slots.
        (Some(slots), places) => format!("{places} x {slots} slots"),
        (None, devices) => format!("{devices} per GPU"),
    }
}

/// Says what is kept within its amounts, where something is not.
fn limits(forms: &[Group], caps: MemoryCaps) -> Option<String> {
    let most = forms
        .iter()
        .filter_map(|form| form.memory_limit_max_percent);
    let most = most.max().filter(|most| *most > 100);
    let burst = most.map_or_else(String::new, |most| {
        format!("\nA claim can limit it to up to {most} % of its request.")
    });
    let by_mps = forms.iter().find(|form| MPS.contains(&form.class));
    let by_mps = by_mps.map(|form| match (form.requests.is_empty(), caps) {
        (true, _) => {
            "MPS shares: the MPS server keeps each process to its part of the threads; its\n\
             limit of memory is set, and a program can make it drop that."
        }
        (false, MemoryCaps::Available) => {
            "MPS shares: the MPS server keeps each claim to its part of the threads; memory\n\
             is capped as that of other shares."
        }
        (false, _) => {
            "MPS shares: the MPS server keeps each claim to its part of the threads; its\n\
             limit of memory is set, and a program can make it drop that."
        }
    });
    if !forms.iter().any(|form| !form.requests.is_empty()) {
        return by_mps.map(str::to_owned);
    }
    let shares = match caps {
        MemoryCaps::Available => {
            "Shares: memory is capped by the driver, where the node's control groups let\n\
             it; compute is counted, and nothing enforces it."
        }
        MemoryCaps::OldDriver
        | MemoryCaps::NoCalls
        | MemoryCaps::GroupsUnreadable
        | MemoryCaps::NoCgroup2
        | MemoryCaps::NoController
        | MemoryCaps::SwitchedOff
        | MemoryCaps::NoHook => {
            "Shares: memory and compute are counted, and nothing enforces them."
        }
    };
    let by_mps = by_mps.map_or_else(String::new, |text| format!("\n{text}"));
    Some(format!(
        "{shares} Whole GPUs\nand partitions are limited by the hardware.{burst}{by_mps}"
    ))
}

/// Says how a row of the table is written in a claim.
fn how(driver: &str, forms: &[Group]) -> String {
    let profile = forms.iter().find_map(|form| form.selector.clone());
    let product = || {
        let form = forms.first()?;
        Some(selector(
            driver,
            attributes::PRODUCT_NAME,
            &form.product_name,
        ))
    };
    let expression = profile.or_else(product).unwrap_or_default();
    let mut text = format!("A selector in full:\n  {expression}");
    // As a stand-in for NVIDIA's driver publishes what that one does not have.
    let mut capacities = forms.iter().flat_map(|form| &form.requests);
    if let Some(capacity) = capacities.find(|name| name.contains('/')) {
        text += &format!("\nA capacity in full:\n  {capacity}");
    }
    text
}
