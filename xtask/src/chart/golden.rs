//! Golden renders: each file of `golden/` holds what a set of values makes different from the
//! defaults, object by object. `DIVVY_BLESS=1 cargo xtask chart` writes the files again.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{Helm, consistent, name, objects};

/// A name, values as YAML, and further flags of `helm template`. The first is compared with
/// nothing, so that its file is the whole render.
pub(super) const CASES: &[(&str, &str, &[&str])] = &[
    ("defaults", "{}", &[]),
    (
        "cluster-controller",
        "{clusterController: {enabled: true}, podMonitor: {enabled: true}, networkPolicy: {enabled: true}}",
        &[],
    ),
    (
        "node-labels",
        "{clusterController: {enabled: true, nodeLabels: true}}",
        &[],
    ),
    (
        "quota",
        "{clusterController: {enabled: true, quota: true}}",
        &[],
    ),
    (
        "defragmentation",
        "{defragmentation: {enabled: true, dryRun: false, preemption: {enabled: true}}}",
        &[],
    ),
    (
        "openshift",
        "clusterController: {enabled: true, dryRun: false, evictionsPerMinute: 1}",
        &["--api-versions=security.openshift.io/v1/SecurityContextConstraints"],
    ),
    ("mps", "{mps: {enabled: true, sharedMemory: 512Mi}, podLabels: {a: b}}", &[]),
    ("gke", "{}", &["--kube-version=1.35.2-gke.1001000"]),
    (
        "image-and-account",
        "{image: {repository: registry.example.com/divvy, tag: v2, pullPolicy: Always}, imagePullSecrets: [{name: pull}],
          serviceAccount: {name: own, annotations: {eks.amazonaws.com/role-arn: 'arn:x'}}}",
        &[],
    ),
    (
        "image-by-digest",
        "{image: {repository: r/divvy, tag: v2, digest: 'sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef'},
          serviceAccount: {create: false, name: own}}",
        &[],
    ),
    (
        "nodes-by-label",
        "{nodeSelector: {divvy.dev/gpu: null, pool: gpus}, affinity: {nodeAffinity: {}}, tolerations: [{operator: Exists}]}",
        &[],
    ),
    (
        "nodes-discovered",
        "{nodeSelection: discovered, nodeSelector: {pool: a}, affinity: {podAntiAffinity: {}}}",
        &[],
    ),
    ("mig-classes-auto", "migClasses: auto", &[]),
    // The socket's path fits because the plugin shortens the pod's UID.
    (
        "folders",
        "{kubeletDir: /var/snap/microk8s/common/var/lib/kubelet, hookDir: /home/kubernetes/bin/divvy, cdiDir: /etc/cdi,
          driverRoot: /opt/driver}",
        &[],
    ),
    (
        "delivery",
        "{deviceMetadata: false, memoryCaps: true, libraryDelivery: mounts, profile: everything, modeLock: 'on', migProfiles: ['+me'],
          ignoredXids: [94, 95], recoverAfter: 0, log: {level: 'info,divvy_executor=debug', format: plain}}",
        &[],
    ),
    (
        "monitoring",
        "{networkPolicy: {enabled: true, from: [{namespaceSelector: {matchLabels: {a: b}}}]}, httpPort: 9100,
          service: {enabled: true, annotations: {a: b}}, podMonitor: {enabled: true, labels: {release: prom}, interval: 30s},
          prometheusRule: {enabled: true, labels: {release: prom}},
          dashboards: {enabled: true, namespace: grafana, labels: {board: a}, annotations: {grafana_folder: GPUs}}}",
        &[],
    ),
    ("dashboards", "dashboards: {enabled: true}", &[]),
    ("profile-shared", "{profile: shared, slots: 4}", &[]),
    (
        "profile-shared-names",
        "{profile: shared, deviceClass: {extendedResourceNames: {share: nvidia.com/gpu.shared}}}",
        &[],
    ),
    (
        "classes",
        "{deviceClass: {extendedResourceNames: {share: nvidia.com/gpu.shared}}, migClasses: ['1g.10gb', '1g.10gb+me', '1g.24gb-me'],
          extraDeviceClasses: [{name: s, mode: share}, {name: big, mode: gpu, selectors: ['\"a\" == \"a\"'],
          config: {timeSlicing: {interval: Long}}, extendedResourceName: example.com/big}], nvidiaDeviceClasses: {enabled: true}}",
        &[],
    ),
    (
        "classes-of-both-drivers",
        "{deviceClass: {enabled: false}, extraDeviceClasses: [{name: gpu.divvy.dev, mode: gpu}],
          nvidiaDeviceClasses: {enabled: true, bothDrivers: true, extendedResourceName: nvidia.com/gpu}}",
        &[],
    ),
    (
        "stand-in",
        "{driverName: gpu.nvidia.com, migClasses: [1g.10gb], extraDeviceClasses: [{name: s, mode: share}],
          claimTemplates: {namespaces: [ml], templates: {tenth: {memory: 8Gi, cores: 10}}}}",
        &[],
    ),
    (
        "claim-templates",
        "claimTemplates: {namespaces: [ml, web], templates: {tenth: {memory: 8Gi, cores: 10}, half: {percent: 50}, one: {slots: 1}}}",
        &[],
    ),
    (
        "common-labels",
        "{commonLabels: {team: gpus}, clusterController: {enabled: true, replicas: 2},
          extraObjects: [{apiVersion: v1, kind: ConfigMap, metadata: {name: a, namespace: '{{ .Release.Namespace }}', labels: {app.kubernetes.io/name: a,
          app.kubernetes.io/instance: a, app.kubernetes.io/version: a, app.kubernetes.io/managed-by: a, app.kubernetes.io/part-of: a}}},
          \"apiVersion: v1\\nkind: ConfigMap\\nmetadata:\\n  name: {{ .Release.Name }}-b\\n  labels: {{- include \\\"divvy.labels\\\" . | nindent 4 }}\"]}",
        &[],
    ),
    (
        "policies",
        "{adminAccess: {namespaces: [monitoring, gpu-admins]}, viewRole: {aggregate: false}, resourceQuota: {enabled: true, pods: 40}}",
        &[],
    ),
    (
        "without",
        "{admissionPolicy: {enabled: false}, claimPolicy: {enabled: false}, viewRole: {enabled: false}, crds: {install: false},
          resourceQuota: {enabled: true}, priorityClassName: '', tolerations: null, resources: null, affinity: null}",
        &[],
    ),
    (
        "pod",
        "{podLabels: {team: a}, podAnnotations: {b: c}, updateStrategy: {type: OnDelete, rollingUpdate: null},
          resources: {limits: {memory: 1Gi}}, extraEnv: [{name: A, value: b}], extraVolumes: [{name: v, emptyDir: {}}],
          extraVolumeMounts: [{name: v, mountPath: /v}]}",
        &[],
    ),
];

/// Folder of the golden files.
const FOLDER: &str = "xtask/src/chart/golden";

/// Compares each case with its file, or writes it.
pub(super) fn check(root: &Path, helm: &Helm) -> Result<()> {
    let folder = root.join(FOLDER);
    let bless = std::env::var_os("DIVVY_BLESS").is_some();
    fs_err::create_dir_all(&folder)?;
    let mut defaults = BTreeMap::new();
    for (case, values, flags) in CASES {
        let check = || -> Result<BTreeMap<String, String>> {
            let rendered = helm.template(values, flags)?;
            consistent(&objects(&rendered)?)?;
            let rendered = by_name(&rendered)?;
            let text = format!(
                "# Values: {values}\n# Flags: {}\n{}",
                flags.join(" "),
                differences(&defaults, &rendered)?
            );
            let file = folder.join(format!("{case}.txt"));
            if bless {
                fs_err::write(&file, text)?;
            } else if fs_err::read_to_string(&file).unwrap_or_default() != text {
                let seen = diff(&fs_err::read_to_string(&file).unwrap_or_default(), &text)?;
                bail!(
                    "not what {} says (to accept it: DIVVY_BLESS=1 cargo xtask chart):\n{seen}",
                    file.display()
                );
            }
            Ok(rendered)
        };
        let rendered = check().with_context(|| format!("golden render {case}"))?;
        if defaults.is_empty() {
            demo_classes(root, &rendered, bless)?;
            defaults = rendered;
        }
    }
    standing_in(
        root,
        &by_name(&helm.template("driverName: gpu.nvidia.com", &[])?)?,
    )
}

/// Checks that the classes of `divvy demo --driver-name gpu.nvidia.com` are the chart's: these
/// names are all that it makes different (`classes` in `demo/src/world.rs`).
fn standing_in(root: &Path, rendered: &BTreeMap<String, String>) -> Result<()> {
    let demo = fs_err::read_to_string(root.join(DEMO))?;
    let demo = [
        ("'gpu.divvy.dev'", "'gpu.nvidia.com'"),
        ("  name: gpu.divvy.dev\n", "  name: gpu.nvidia.com\n"),
        ("  name: mig.divvy.dev\n", "  name: mig.nvidia.com\n"),
    ]
    .iter()
    .fold(demo, |text, (ours, theirs)| text.replace(ours, theirs));
    let mut demo: Vec<&str> = demo.split("---\n").skip(1).collect();
    demo.sort_unstable();
    let chart = classes(rendered);
    let mut chart: Vec<&str> = chart.split("---\n").skip(1).collect();
    chart.sort_unstable();
    ensure!(
        demo == chart,
        "the demo's classes with --driver-name gpu.nvidia.com are not the chart's: {demo:?} and {chart:?}"
    );
    Ok(())
}

/// DeviceClasses of `divvy demo`.
const DEMO: &str = "demo/src/classes.yaml";

/// Compares the classes of `divvy demo` with those of the chart's defaults, or writes them.
fn demo_classes(root: &Path, rendered: &BTreeMap<String, String>, bless: bool) -> Result<()> {
    let text = format!(
        "# The chart's DeviceClasses, written by `DIVVY_BLESS=1 cargo xtask chart`.\n{}",
        classes(rendered)
    );
    let file = root.join(DEMO);
    if bless {
        fs_err::write(&file, text)?;
    } else {
        let there = fs_err::read_to_string(&file).unwrap_or_default();
        ensure!(
            there == text,
            "{DEMO} does not have the chart's classes (to write it: DIVVY_BLESS=1 cargo xtask chart):\n{}",
            diff(&there, &text)?
        );
    }
    Ok(())
}

/// Returns the DeviceClasses of a render, without their labels.
fn classes(rendered: &BTreeMap<String, String>) -> String {
    let mut text = String::new();
    for class in rendered
        .iter()
        .filter_map(|(name, text)| name.starts_with("DeviceClass/").then_some(text))
    {
        text += "---\n";
        let mut in_labels = false;
        for line in class.lines() {
            in_labels = line.starts_with("  labels:") || in_labels && line.starts_with("    ");
            if !in_labels {
                text += &format!("{line}\n");
            }
        }
    }
    text
}

/// Returns the text of each object. Contents that are files of their own are cut.
fn by_name(rendered: &str) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for document in rendered.split("---\n# Source: ").skip(1) {
        let (_, text) = document
            .split_once('\n')
            .context("an object without text")?;
        let object: Value = serde_saphyr::from_str(text)?;
        if object.is_null() {
            continue;
        }
        let cut = match object.pointer("/kind").and_then(Value::as_str) {
            Some("CustomResourceDefinition" | "PrometheusRule") => "\nspec:\n",
            Some("ConfigMap") => "\ndata:\n",
            _ => "\n---\n",
        };
        let text = text.split(cut).next().unwrap_or_default().trim_end();
        all.insert(name(&object), format!("{text}\n"));
    }
    ensure!(!all.is_empty(), "helm printed no object");
    Ok(all)
}

/// Writes the objects that were added, removed and changed.
fn differences(
    before: &BTreeMap<String, String>,
    after: &BTreeMap<String, String>,
) -> Result<String> {
    let mut text = String::new();
    for gone in before.keys().filter(|name| !after.contains_key(*name)) {
        text += &format!("\nremoved: {gone}\n");
    }
    for (name, new) in after {
        match before.get(name) {
            None => text += &format!("\nadded: {name}\n{new}"),
            Some(old) if old != new => text += &format!("\nchanged: {name}\n{}", diff(old, new)?),
            Some(_) => {}
        }
    }
    Ok(text)
}

/// Returns the lines that differ, each change with the line before and after it.
fn diff(before: &str, after: &str) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let files = [folder.path().join("before"), folder.path().join("after")];
    fs_err::write(&files[0], before)?;
    fs_err::write(&files[1], after)?;
    let mut git = Command::new("git");
    git.args([
        "diff",
        "--no-index",
        "--no-color",
        "--no-ext-diff",
        "--unified=1",
    ]);
    let out = git.args(&files).output().context("git cannot be started")?;
    let text = String::from_utf8(out.stdout)?;
    let hunks = text.split_once("\n@@").map_or("", |(_, hunks)| hunks);
    let lines = format!("@@{hunks}");
    // The numbers of lines would change with any line above.
    let lines = lines
        .lines()
        .map(|line| if line.starts_with("@@") { "…" } else { line });
    let mut shown = lines.collect::<Vec<_>>().join("\n");
    shown.push('\n');
    Ok(shown)
}
