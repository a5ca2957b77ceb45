//! The notes that helm prints after an installation, by values and version of Kubernetes.

use std::process::Command;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::{Helm, find, objects, text};

/// Values, version of Kubernetes, and what the notes that helm prints after an installation say and
/// do not say: the next step for these values, and warnings where they are due.
const CASES: &[(&str, &str, &str, &str)] = &[
    (
        "{}",
        "1.37.1",
        "kubectl label node NODE divvy.dev/gpu=true",
        "divvy.dev/gpu=false",
    ),
    ("{}", "1.37.1", "divvy", "WARNING"),
    (
        "{admissionPolicy: {enabled: false}}",
        "1.37.1",
        "WARNING: without admissionPolicy.enabled",
        "and as shares",
    ),
    (
        "{image: {repository: r/d}, nodeSelection: discovered}",
        "1.37.1",
        "kubectl label node NODE divvy.dev/gpu=false",
        "WARNING",
    ),
    (
        "{profile: everything, fullnameOverride: cards}",
        "1.37.1",
        "daemonset/cards-node",
        "by their MIG mode",
    ),
    (
        "{profile: shared, slots: 4}",
        "1.37.1",
        "Request a share: `resources: {limits: {nvidia.com/gpu: 1}}`",
        "class gpu.divvy.dev",
    ),
    (
        "{profile: shared}",
        "1.35.8",
        "a ResourceClaimTemplate of class share.divvy.dev",
        "in `limits`: 1",
    ),
    (
        "profile: partitions",
        "1.37.1",
        "a ResourceClaimTemplate of class mig.divvy.dev",
        "Request a GPU",
    ),
    (
        "{}",
        "1.37.1",
        "Who may view any namespace may view GpuNodes, too",
        "driverName is",
    ),
    (
        "{viewRole: {aggregate: false}, driverName: gpu.example.com}",
        "1.37.1",
        "WARNING: driverName is gpu.example.com: claims and configs keep this name",
        "Who may view any namespace",
    ),
    (
        "driverName: gpu.nvidia.com",
        "1.37.1",
        "divvy stands in for NVIDIA's DRA driver",
        "gpu.divvy.dev",
    ),
    (
        "{}",
        "1.36.1",
        "No partitions: any user's claim with `allocationMode: All` would end the scheduler of Kubernetes v1.36.1",
        "partitions and shares",
    ),
    (
        "modeLock: 'on'",
        "1.35.5",
        "modeLock is on: where partitions or several modes are offered",
        "No partitions",
    ),
    (
        "modeLock: 'on'",
        "1.35.6",
        "partitions (DRAPartitionableDevices)",
        "the scheduler",
    ),
    (
        "{}",
        "1.35.5",
        "No partitions: any user's claim",
        "DRAPartitionableDevices",
    ),
    (
        "{}",
        "1.36.2",
        "Kubernetes v1.36.2: whole GPUs",
        "the scheduler",
    ),
    (
        "{}",
        "1.36.2",
        "Kubernetes v1.36.2: whole GPUs, partitions and shares, several modes of one GPU at once",
        "in one mode",
    ),
    (
        "{}",
        "1.36.2-gke.1001000",
        "several modes of one GPU at once, and GPUs in `limits`.",
        "in one mode",
    ),
    (
        "{}",
        "1.36.1",
        "A GPU is offered in one mode: several at once need 1.36.2.",
        "feature gate",
    ),
    (
        "{}",
        "1.35.8",
        "Only with feature gates, which 1.36 has on: partitions (DRAPartitionableDevices), shares",
        "resources: {limits",
    ),
    (
        "{}",
        "1.34.0",
        "GPUs in `limits` only with the feature gate DRAExtendedResource.",
        "resources: {limits",
    ),
    (
        "{}",
        "1.36.0",
        "`resources: {limits: {nvidia.com/gpu: 1}}`",
        "a ResourceClaimTemplate of class",
    ),
    (
        "{deviceClass: {extendedResourceNames: {gpu: ''}}}",
        "1.37.1",
        "a ResourceClaimTemplate of class gpu.divvy.dev",
        "resources: {limits",
    ),
];

/// Checks [`CASES`]. `helm template`, which takes a version, prints no notes: a copy of the chart
/// has them as an object.
pub(super) fn check(helm: &Helm) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let copy = Helm {
        program: helm.program.clone(),
        chart: folder.path().join("divvy"),
    };
    let status = Command::new("cp")
        .arg("-r")
        .args([&helm.chart, &copy.chart])
        .status()?;
    ensure!(
        status.success(),
        "{} cannot be copied",
        helm.chart.display()
    );
    let text = fs_err::read_to_string(copy.chart.join("templates/NOTES.txt"))?;
    let object = "kind: Notes\nmetadata: {name: notes}\ntext: {{ include \"notes\" . | toJson }}\n";
    fs_err::write(
        copy.chart.join("templates/notes.yaml"),
        format!("{{{{- define \"notes\" }}}}{text}{{{{ end }}}}{object}"),
    )?;
    for (values, version, says, silent) in CASES {
        let flags = [
            format!("--kube-version={version}"),
            "--show-only=templates/notes.yaml".to_owned(),
        ];
        let made = objects(&copy.template(values, &[&flags[0], &flags[1]])?)?;
        let notes = rendered(&made)?;
        ensure!(
            notes.contains(says) && !notes.contains(silent),
            "the notes with {values} on {version} are: {notes}"
        );
    }
    let warning = "WARNING: the release is in namespace default";
    for (namespace, warns) in [("default", true), ("gpus", false)] {
        let flags = [
            format!("--namespace={namespace}"),
            "--show-only=templates/notes.yaml".to_owned(),
        ];
        let made = objects(&copy.template("{}", &[&flags[0], &flags[1]])?)?;
        ensure!(
            rendered(&made)?.contains(warning) == warns,
            "the warning of namespace {namespace}"
        );
    }
    Ok(())
}

fn rendered(objects: &[Value]) -> Result<&str> {
    Ok(text(
        find(objects, |object| text(object, "/kind") == "Notes")?,
        "/text",
    ))
}
