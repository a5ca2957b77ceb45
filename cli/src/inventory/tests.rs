use clap::Parser;
use divvy_gpu_sim::SimNode;

use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[arg(long)]
    sim: String,
    /// Numbers of the GPUs in MIG mode.
    #[arg(long)]
    mig_on: Vec<usize>,
    #[command(flatten)]
    args: Args,
}

fn of(line: &str) -> Shown {
    let words = std::iter::once("inventory").chain(line.split_whitespace());
    let line = Line::try_parse_from(words).unwrap();
    let node = SimNode::parse(&line.sim).unwrap();
    for number in line.mig_on {
        let uuid = &node.uuids()[number];
        node.edit(|engine| {
            engine.set_mig_mode(uuid, true).unwrap();
            if !engine.facts(uuid).unwrap().mig_mode.is_on() {
                engine.reset_gpu(uuid).unwrap();
            }
        });
    }
    shown(&node.inventory(), &line.args).unwrap()
}

#[test]
fn the_table_says_what_to_select_by_in_80_columns() {
    let text = text::table(&of("--sim h100x2 --offer everything"), false);
    for line in [
        "gpu-0  H100 80GB HBM3  79.6 GiB  132  off  0     switch",
        "NVIDIA H100 80GB HBM3 (gpu-0, gpu-1), published as",
        "whole    gpu.divvy.dev    1 per GPU  79.6 GiB  the class",
        "1g.10gb  mig.divvy.dev    7 per GPU  9.8 GiB   profile == \"1g.10gb\"",
        "share    share.divvy.dev  16 slots   79.6 GiB  capacity memory, cores, slots",
        "  device.attributes[\"gpu.divvy.dev\"].profile == \"1g.10gb\"",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

#[test]
fn gpus_with_other_forms_are_not_one_group() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    let text = "apiVersion: divvy.dev/v1beta1
kind: GpuPolicy
metadata: {name: first-shared}
spec: {rules: [{gpus: {ordinals: [0]}, modes: [TimeSlicing]}]}
";
    fs_err::write(&policy, text).unwrap();
    let line = format!("--sim l40sx4 --policy {}", policy.display());
    let text = text::table(&of(&line), false);
    let block = |title: &str| {
        let start = text
            .find(title)
            .unwrap_or_else(|| panic!("{title}\n{text}"));
        let rest = text.get(start..).unwrap();
        rest.split("\n\n").next().unwrap().to_owned()
    };
    let shared = block("NVIDIA L40S (gpu-0), published as");
    assert!(
        shared.contains("share.divvy.dev") && !shared.contains("whole"),
        "{shared}"
    );
    let whole = block("NVIDIA L40S (gpu-1, gpu-2, gpu-3), published as");
    assert!(
        whole.contains("gpu.divvy.dev") && !whole.contains("share"),
        "{whole}"
    );
}

#[test]
fn slots_are_those_of_gpus_without_a_policy() {
    for (line, devices) in [
        ("--sim l4x1 --offer shared --slots 4", "4 slots"),
        ("--sim l4x1 --offer shared", "16 slots"),
    ] {
        let text = text::table(&of(line), false);
        assert!(text.contains(devices), "{line}\n{text}");
    }
}

#[test]
fn a_file_without_a_policy_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pod.yaml");
    fs_err::write(
        &file,
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n",
    )
    .unwrap();
    let line = format!("inventory --sim h100x1 --policy {}", file.display());
    let args = Line::try_parse_from(line.split_whitespace()).unwrap().args;
    let inventory = SimNode::parse("h100x1").unwrap().inventory();
    let error = shown(&inventory, &args).unwrap_err();
    assert!(error.is::<crate::Usage>(), "{error:#}");
    assert_eq!(
        error.to_string(),
        format!("--policy: no GpuPolicy in {}", file.display())
    );
}

/// In the place of NVIDIA's driver, names that it does not have are in divvy's domain.
#[test]
fn classes_and_selectors_follow_from_the_drivers_name() {
    let of = |driver: &str| {
        let line = format!("--sim h100x1 --offer everything --driver-name {driver}");
        text::table(&of(&line), false)
    };
    let (own, stand_in) = (of("gpu.divvy.dev"), of("gpu.nvidia.com"));
    for (text, lines) in [
        (
            &own,
            [
                "gpu.divvy.dev ",
                "mig.divvy.dev ",
                "capacity memory, cores, slots",
                "device.attributes[\"gpu.divvy.dev\"].profile == \"1g.10gb\"",
            ],
        ),
        (
            &stand_in,
            [
                "gpu.nvidia.com ",
                "mig.nvidia.com ",
                "\n  gpu.divvy.dev/cores\n",
                "device.attributes[\"gpu.nvidia.com\"].profile == \"1g.10gb\"",
            ],
        ),
    ] {
        for line in lines {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
    assert!(!stand_in.contains("mig.divvy.dev"), "{stand_in}");
    assert!(stand_in.lines().all(|line| line.chars().count() <= 80));
}

/// Servers of R615 have a namespace for each claim, so that a claim names amounts.
#[test]
fn mps_shares_are_asked_for_by_amounts_where_the_driver_can() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    let text = "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {name: p}\nspec: {rules: [{modes: [Mps]}]}\n";
    fs_err::write(&policy, text).unwrap();
    let line = format!("inventory --sim h100x1 --policy {}", policy.display());
    let args = Line::try_parse_from(line.split_whitespace()).unwrap().args;
    let node = SimNode::parse("h100x1").unwrap();
    for (driver, asked, limits) in [
        ("580.95.05", "slotMemoryMiB, slotCores", "each process"),
        ("615.71.09", "capacity memory, cores, slots", "each claim"),
    ] {
        let cuda = divvy_model::CudaVersion {
            major: 13,
            minor: 0,
        };
        node.edit(|engine| engine.set_driver_version(driver, cuda));
        let text = text::table(&shown(&node.inventory(), &args).unwrap(), false);
        assert!(text.contains(asked), "{asked}\n{text}");
        assert!(text.contains(limits), "{limits}\n{text}");
    }
}

/// Four slots are of each place of a partition: a profile with several has more in all.
#[test]
fn shares_of_partitions_have_their_slots_at_each_place() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    let rule = "modes: [Mig], mig: {sharing: [TimeSlicing]}, shares: {slots: 4}";
    let text = format!(
        "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {{name: p}}\nspec: {{rules: [{{{rule}}}]}}\n"
    );
    fs_err::write(&policy, text).unwrap();
    let shown = of(&format!("--sim h100x2 --policy {}", policy.display()));
    let text = text::table(&shown, false);
    for (class, profile, devices) in [
        ("mig.divvy.dev", "1g.10gb", "7 per GPU"),
        ("mig-share.divvy.dev", "1g.10gb", "7 x 4 slots"),
        ("mig-share.divvy.dev", "3g.40gb", "2 x 4 slots"),
        ("mig-share.divvy.dev", "7g.80gb", "4 slots"),
    ] {
        let is_row = |line: &&str| {
            let mut words = line.split_whitespace();
            words.next() == Some(profile) && words.next() == Some(class)
        };
        let row = text.lines().find(is_row).unwrap_or_default();
        assert!(row.contains(devices), "{profile} {class} {devices}\n{text}");
    }
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
}

#[test]
fn the_table_says_that_nothing_enforces_shares_where_there_are_any() {
    let warns = |line: &str| text::table(&of(line), false).contains("nothing enforces them");
    assert!(warns("--sim l4x1 --offer everything"));
    assert!(
        !warns("--sim h100x1 --mig-on 0"),
        "whole GPUs and partitions"
    );
    let mut capped = of("--sim l4x1 --offer everything");
    capped.memory_caps = divvy_model::MemoryCaps::Available;
    let text = text::table(&capped, false);
    assert!(text.contains("memory is capped by the driver"), "{text}");
    assert!(!text.contains("limit it to"), "{text}");
    for form in &mut capped.forms {
        form.memory_limit_max_percent = form.memory_limit_max_percent.map(|_| 150);
    }
    let text = text::table(&capped, false);
    assert!(
        text.contains("\nA claim can limit it to up to 150 % of its request."),
        "{text}"
    );
}

#[test]
fn the_table_of_every_board_fits_80_columns() {
    for board in divvy_gpu_sim::profiles() {
        for more in ["", "--offer everything"] {
            let shown = of(&format!("--sim {}x8 {more}", board.key));
            for line in text::table(&shown, false).lines() {
                // Neither an expression nor a reason is broken.
                let is_note = line.starts_with("left out: ") || line.starts_with("  device.");
                assert!(
                    is_note || line.chars().count() <= 80,
                    "{}: {line}",
                    board.key
                );
            }
        }
    }
}

#[test]
fn gpus_in_mig_mode_are_published_as_partitions() {
    let shown = of("--sim a100-80x2 --mig-on 0");
    let modes: Vec<&str> = shown.gpus.iter().map(|gpu| gpu.mig).collect();
    assert_eq!(modes, ["on", "off"]);
    let of_gpu = |gpu: &str| {
        let has = |form: &&shown::Group| form.gpus.iter().any(|name| name == gpu);
        let forms = shown.forms.iter().filter(has);
        forms
            .map(|form| form.class)
            .collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(of_gpu("gpu-0"), ["admin.divvy.dev", "mig.divvy.dev"].into());
    assert_eq!(of_gpu("gpu-1"), ["gpu.divvy.dev"].into());
}

/// Programs get one case of letters, and no dump of Rust's enums.
#[test]
fn json_is_in_camel_case_throughout() {
    fn names(value: &serde_json::Value, all: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(fields) => {
                for (name, value) in fields {
                    all.push(name.clone());
                    names(value, all);
                }
            }
            serde_json::Value::Array(items) => items.iter().for_each(|item| names(item, all)),
            _ => {}
        }
    }
    let value =
        serde_json::to_value(of("--sim h100x1,a100-40x1 --mig-on 1 --offer everything")).unwrap();
    let mut all = Vec::new();
    names(&value, &mut all);
    let odd = |name: &&String| {
        !name.starts_with(|c: char| c.is_ascii_lowercase()) || name.contains(['_', '-'])
    };
    assert_eq!(
        all.iter().filter(odd).collect::<Vec<_>>(),
        Vec::<&String>::new()
    );
    let gpu = &value["gpus"][0];
    assert_eq!(gpu["brand"], "Nvidia");
    assert!(gpu["mig"] == "off" || gpu["mig"] == "on", "{gpu}");
    assert!(gpu["computeCapability"].is_string(), "{gpu}");
}
