//! `divvy demo -f` on manifests as people write them: the exit status and the sentence that says
//! what is wrong or remarkable, for each.

use std::path::Path;
use std::process::Command;

/// Every form of every GPU.
const ALL: &str = "-f ../examples/all-modes.yaml";

/// File, options, exit status, and the words that the user must find.
const OWN: &[(&str, &str, i32, &str)] = &[
    (
        "notebook",
        "",
        1,
        "notebook is pending: no GPU of this node is offered in shares. A GpuPolicy with modes: [TimeSlicing] offers them: \
         add -f examples/all-modes.yaml",
    ),
    ("notebook", ALL, 0, "A 10 GiB 10 % notebook-gpu"),
    (
        "deployment",
        "",
        1,
        "server-0, server-1, server-2 are pending: no GPU of this node is offered in partitions. A GpuPolicy with modes: \
         [Mig] offers them",
    ),
    (
        "deployment",
        "--sim a100-80x2",
        1,
        "MIG mode of NVIDIA A100-SXM4-80GB is off, and changes only with a reset. --mig-on all starts the demo with MIG \
         mode on",
    ),
    (
        "deployment",
        "--sim a30x2 -f ../examples/all-modes.yaml",
        1,
        "no profile 1g.10gb here; there are 1g.6gb, 2g.12gb, 4g.24gb. --mig-on all starts the demo with MIG mode on",
    ),
    (
        "deployment",
        "--sim l40sx2",
        1,
        "no GPU of this node can be partitioned: NVIDIA L40S has no MIG. Claim a share (class share.divvy.dev, which needs a \
         GpuPolicy with modes: [TimeSlicing])",
    ),
    (
        "deployment",
        "--sim l40sx2 -f ../examples/all-modes.yaml",
        1,
        "Claim a share (class share.divvy.dev), or use a node",
    ),
    (
        "deployment",
        "--sim a30x2 -f ../examples/all-modes.yaml",
        1,
        "note: gpu-0 is offered only in its current MIG mode",
    ),
    ("deployment", ALL, 0, "C 1g.10gb server-2-gpu"),
    (
        "extended",
        "",
        1,
        "seed-mig is pending: no GPU of this node is offered in partitions. A GpuPolicy with modes: [Mig] offers them",
    ),
    (
        "extended",
        ALL,
        1,
        "seed-mig waits: gpu-0 is whole for seed; gpu-1 is whole for seed: it starts when there is room for 3 partitions 1g.10gb",
    ),
    ("extended-with-classes", ALL, 0, "all as expected"),
    (
        "extended-with-classes",
        "",
        1,
        "seed-mig is pending: no GPU of this node is offered in partitions",
    ),
    (
        "half",
        "",
        1,
        "must be an integer (for half a GPU claim a share, class share.divvy.dev: divvy convert -f FILE writes the claim)",
    ),
    (
        "vcuda-annotation",
        "",
        1,
        "invalid type: integer `50`, expected a string (write \"50\")",
    ),
    (
        "vcuda",
        "",
        1,
        "pod default/vcuda asks for tencent.com/vcuda-core, tencent.com/vcuda-memory, by which other projects give out parts \
         of a GPU: 2048 pieces of 256 MiB are 512Gi, more than a GPU has: if 2048 MiB were meant, write 8",
    ),
    // The pod gets no GPU while it waits for the rest.
    (
        "hami",
        "",
        1,
        "hami.yaml pod default/hami asks for nvidia.com/gpumem, by which other projects give out parts of a GPU: the claim \
         that is meant: class share.divvy.dev, capacity.requests {memory: 10Gi} (which needs a GpuPolicy with modes: \
         [TimeSlicing]); divvy convert -f FILE writes it 1 manifest, 0 claims, 1 problem.",
    ),
    (
        "affinity",
        "",
        1,
        "pod default/volta is for nodes with Tesla-V100-SXM2-32GB by its nodeSelector or affinity, and this node has NVIDIA \
         H100 80GB HBM3: a cluster places it elsewhere, or nowhere (try --sim v100x1;",
    ),
    ("affinity", "--sim v100x1", 0, "volta-gpu volta gpu-0"),
    (
        "toleration-in-container",
        "",
        1,
        "unknown field \"spec.containers[0].tolerations\" (it belongs in the pod's spec)",
    ),
    ("class-field", "", 1, "(did you mean \"deviceClassName\"?)"),
    ("count-field", "", 1, "(did you mean \"count\"?)"),
    (
        "class-name",
        ALL,
        1,
        "notebook is pending: class \"shares.divvy.dev\" does not exist (did you mean \"share.divvy.dev\"?) gpu-0, gpu-1 idle 1 manifest",
    ),
    ("memory-without-unit", ALL, 1, "write 10Gi or 10Mi"),
    (
        "memory-gb",
        ALL,
        1,
        "\"10GB\": not a quantity (write 10G or 10Gi)",
    ),
    (
        "cores-fraction",
        ALL,
        0,
        "cores are percent of a GPU: 10 is a tenth of it",
    ),
    ("cores-alone", ALL, 0, "50 % notebook-gpu"),
    (
        "cores-alone",
        ALL,
        0,
        "cores: 50 is compute only, and memory stays the default, the part of one slot: request memory, too, or for half of a \
         GPU percent: 50 alone, which needs a GpuPolicy with shares: {unit: Percent}",
    ),
    ("slots-alone", ALL, 0, "slots 8 of 16"),
    (
        "slots-alone",
        ALL,
        0,
        "slots: 8 only keeps places from others, and memory and cores stay the default, the part of one slot",
    ),
    (
        "memory-too-much",
        "",
        1,
        "notebook is pending: it asks for 200Gi of memory, and a device of this node gives at most 79.6 GiB",
    ),
    (
        "memory-too-much",
        ALL,
        1,
        "notebook is pending: it asks for 200Gi of memory, and a device of this node gives at most 79.6 GiB",
    ),
    (
        "mem",
        ALL,
        1,
        "no capacity \"mem\"; there are memory, cores, slots",
    ),
    (
        "mem",
        "",
        1,
        "no capacity \"mem\"; there are memory, cores, slots",
    ),
    (
        "profile-of-another-board",
        ALL,
        1,
        "small is pending: no profile 1g.5gb here; there are 1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb",
    ),
    (
        "profile-of-another-board",
        "--sim a100-40x1 --mig-on all",
        0,
        "A 1g.5gb small-gpu",
    ),
    (
        "profile-of-another-board",
        "",
        1,
        "small is pending: no profile 1g.5gb here; there are 1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb. A GpuPolicy \
         with modes: [Mig] offers them",
    ),
    (
        "profile-in-capitals",
        "",
        1,
        "small is pending: no profile 1g.10GB here (did you mean 1g.10gb?). A GpuPolicy with modes: [Mig] offers them",
    ),
    (
        "profile-in-capitals",
        ALL,
        1,
        "small is pending: no profile 1g.10GB here (did you mean 1g.10gb?) gpu-0, gpu-1 idle 1 manifest",
    ),
    (
        "domain-of-nvidia",
        ALL,
        1,
        "small is pending: its selector fails: divvy's domain is gpu.divvy.dev: write \
         device.attributes[\"gpu.divvy.dev\"].profile",
    ),
    (
        "domain-of-nvidia",
        "",
        1,
        "divvy's domain is gpu.divvy.dev: write device.attributes[\"gpu.divvy.dev\"].profile",
    ),
    (
        "partition-by-size",
        ALL,
        0,
        "memory of at least 10Gi leaves out what is called so: 1g.10gb has 9.8 GiB; write 9Gi to include it",
    ),
    (
        "unused-claim",
        ALL,
        1,
        "no container has \"gpu\" in resources.claims",
    ),
    (
        "values",
        "",
        1,
        "apiVersion and kind must be set: this is no Kubernetes object (the values of a Helm chart are for helm install -f)",
    ),
    (
        "mode-name",
        "",
        1,
        "unknown value \"MIG\" (did you mean \"Mig\"?); there are Whole, Mig, TimeSlicing",
    ),
    ("no-gpu", "", 0, "nothing here asks for a GPU"),
];

/// Runs the demo on a file of `fixtures/own`; returns its exit status, and what it says in one
/// line.
fn demo(file: &str, options: &str) -> std::io::Result<(Option<i32>, String)> {
    let file = format!("../demo/fixtures/own/{file}.yaml");
    run(
        &format!("demo -f {file} {options}"),
        env!("CARGO_MANIFEST_DIR").as_ref(),
    )
}

/// Runs `divvy` with these words in a folder.
fn run(words: &str, folder: &Path) -> std::io::Result<(Option<i32>, String)> {
    let output = Command::new(env!("CARGO_BIN_EXE_divvy"))
        .args(words.split_whitespace())
        .current_dir(folder)
        .output()?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let words: Vec<&str> = said.split_whitespace().collect();
    Ok((output.status.code(), words.join(" ")))
}

/// Half of a GPU, from `nvidia.com/gpu: 0.5` to a pod that has it, by the hints alone: where no
/// checkout of divvy is.
#[test]
fn half_of_a_gpu_is_reached_by_the_hints_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let half = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../demo/fixtures/own/half.yaml"
    );
    let (_, said) = run(&format!("demo -f {half}"), path).unwrap();
    assert!(
        said.contains("divvy convert -f FILE writes the claim"),
        "{said}"
    );
    let converted = Command::new(env!("CARGO_BIN_EXE_divvy"))
        .args(["convert", "-f", half])
        .output()
        .unwrap();
    let notes = String::from_utf8_lossy(&converted.stderr);
    assert!(notes.contains("shares: {unit: Percent}"), "{notes}");
    fs_err::write(path.join("half.yaml"), &converted.stdout).unwrap();
    // Without a policy, and under one that gives out amounts, the hint names the same file.
    for (options, hint) in [
        (
            "",
            "A GpuPolicy with modes: [TimeSlicing], shares: {unit: Percent} offers them: add -f examples/by-percent.yaml",
        ),
        (
            "-f examples/all-modes.yaml",
            "no capacity percent: gpu-0, gpu-1 are shared by amounts. A GpuPolicy with shares: {unit: Percent} gives GPUs out by \
             percent: -f examples/by-percent.yaml in place of the policy",
        ),
    ] {
        let (code, said) = run(&format!("demo -f half.yaml {options}"), path).unwrap();
        assert!(said.contains(hint) && code == Some(1), "{said}");
    }
    let (code, said) = run("demo -f half.yaml -f examples/by-percent.yaml", path).unwrap();
    assert!(said.contains("50 %") && code == Some(0), "{said}");
    // The other way round.
    let share = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../demo/fixtures/own/notebook.yaml"
    );
    let by_percent = format!("demo -f {share} -f examples/by-percent.yaml");
    let (_, said) = run(&by_percent, path).unwrap();
    assert!(said.contains("-f examples/all-modes.yaml"), "{said}");
    let (code, said) = run(&format!("demo -f {share} -f examples/all-modes.yaml"), path).unwrap();
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn claims_of_shares_are_printed_with_the_policy_that_they_need() {
    let path = env!("CARGO_MANIFEST_DIR").as_ref();
    for (words, note) in [
        ("claim share --percent 50", "shares: {unit: Percent}"),
        ("claim share --memory 10Gi", "shares need a GpuPolicy"),
        ("claim mig --profile 1g.10gb", "partitions need MIG mode"),
    ] {
        let (code, said) = run(words, path).unwrap();
        assert!(said.contains(note) && code == Some(0), "{said}");
    }
    let (_, said) = run("claim gpu", path).unwrap();
    assert!(!said.contains("note:"), "{said}");
}

/// Notes are the way out of what waits, and each refusal is a problem.
#[test]
fn notes_are_not_cut_and_each_refusal_is_counted() {
    let path = env!("CARGO_MANIFEST_DIR").as_ref();
    let (_, said) = run("demo -f ../demo/fixtures/cases/other-domains.yaml", path).unwrap();
    for words in [
        "c is pending: its selector fails: no device has attribute \"prodctName\"",
        "(did you mean \"resource.kubernetes.io/numaNode\"?)",
    ] {
        assert!(said.contains(words), "{words}\n{said}");
    }
    assert!(
        !said.contains("more notes") && !said.contains("no such key"),
        "{said}"
    );
    let (_, said) = run(
        "demo -f ../demo/fixtures/cases/refused-workloads.yaml",
        path,
    )
    .unwrap();
    assert_eq!(
        said.matches("the API server refuses it: ").count(),
        4,
        "{said}"
    );
    assert!(
        said.ends_with("1 manifest, 0 claims, 4 problems."),
        "{said}"
    );
}

/// A right class is no false alarm where the form that it selects is not offered, and a long list
/// of classes hides the one that is meant.
#[test]
fn nothing_is_said_that_is_wrong_or_hides_the_rest() {
    let (_, said) = demo("extended-with-classes", "").unwrap();
    assert!(!said.contains("no device has attribute"), "{said}");
    let (_, said) = demo("class-name", ALL).unwrap();
    assert!(
        !said.contains("kubectl") && !said.contains("1g.10gb"),
        "{said}"
    );
    let (_, said) = demo("hami", "").unwrap();
    assert!(!said.contains("hami-extended-resources"), "{said}");
    let (_, said) = demo("deployment", "--sim a30x2 -f ../examples/all-modes.yaml").unwrap();
    assert!(!said.contains("GPU-1234"), "{said}");
}

#[test]
fn own_manifests_end_with_a_status_and_a_sentence_that_names_the_cause() {
    for (file, options, status, words) in OWN {
        let (code, said) = demo(file, options).unwrap();
        assert!(
            said.contains(words) && code == Some(*status),
            "{file} {options}: expected {status} and {words}\ngot {code:?} and {said}"
        );
    }
}

#[test]
fn expressions_counters_and_counts_are_for_wide_output() {
    for (file, options) in [
        ("notebook", ""),
        ("profile-of-another-board", ALL),
        ("memory-too-much", ALL),
    ] {
        let (_, said) = demo(file, options).unwrap();
        let (_, wide) = demo(file, &format!("{options} -o wide")).unwrap();
        for words in ["not selected by", "counter set", "more lines", " available"] {
            assert!(!said.contains(words), "{file} {options}: {words}\n{said}");
        }
        assert!(wide.contains("not selected by"), "{wide}");
    }
}

#[test]
fn every_own_manifest_is_in_the_table() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../demo/fixtures/own");
    let mut files: Vec<String> = fs_err::read_dir(folder)
        .unwrap()
        .map(|entry| {
            entry
                .unwrap()
                .path()
                .file_stem()
                .unwrap()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    files.sort();
    let mut named: Vec<&str> = OWN.iter().map(|(file, ..)| *file).collect();
    named.sort_unstable();
    named.dedup();
    assert_eq!(files, named);
}
