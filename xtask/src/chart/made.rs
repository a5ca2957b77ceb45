//! Sets of values that change most objects, or nothing: a few facts about each say more than its
//! render. Renders of the others are in `golden.rs`.

use super::Expected;
use super::Expected::{Absent, Is, Says, There};

const SELECTOR: &str = "/spec/selectors/0/cel/expression";

/// Values as YAML, and what comes of them.
pub(super) const CASES: &[(&str, &[Expected])] = &[
    (
        "nameOverride: gpus",
        &[
            Is(
                "DaemonSet/divvy-gpus-node",
                "/spec/selector/matchLabels/app.kubernetes.io~1name",
                r#""gpus""#,
            ),
            There("ServiceAccount/divvy-gpus-node"),
        ],
    ),
    (
        "nameOverride: div",
        &[
            There("DaemonSet/divvy-node"),
            There("ClusterRole/divvy-view"),
        ],
    ),
    (
        "fullnameOverride: cards",
        &[
            Is(
                "DaemonSet/cards-node",
                "/spec/selector/matchLabels/app.kubernetes.io~1name",
                r#""divvy""#,
            ),
            There("ValidatingAdmissionPolicy/cards-configs"),
            Absent("DaemonSet/divvy-node"),
        ],
    ),
    (
        "{fullnameOverride: a, nameOverride: b}",
        &[There("DaemonSet/a-node")],
    ),
    (
        "driverName: gpu.example.com",
        &[
            There("DeviceClass/mig.example.com"),
            Says(
                "DeviceClass/share.example.com",
                SELECTOR,
                "device.attributes['gpu.example.com'].type == 'gpu-share'",
            ),
            Absent("DeviceClass/gpu.divvy.dev"),
            Is(
                "ClusterRole/divvy-node",
                "/rules/3/resourceNames",
                r#"["gpu.example.com"]"#,
            ),
        ],
    ),
    (
        "driverName: cards.example.com",
        &[
            There("DeviceClass/cards.example.com"),
            There("DeviceClass/mig.cards.example.com"),
        ],
    ),
    (
        "dashboards: {enabled: true}",
        // A template of Grafana, not of helm.
        &[Says(
            "ConfigMap/divvy-dashboard-namespace",
            "/data/divvy-namespace.json",
            "{{claim}}",
        )],
    ),
    (
        "migClasses: ['1g.10gb+me.all']",
        &[
            Is(
                "DeviceClass/mig-1g.10gb.me.all.divvy.dev",
                "/spec/extendedResourceName",
                r#""nvidia.com/mig-1g.10gb.me.all""#,
            ),
            Says(
                "DeviceClass/mig-1g.10gb.me.all.divvy.dev",
                SELECTOR,
                ".profile == '1g.10gb+me.all'",
            ),
            Absent("DeviceClass/mig-1g.10gb.divvy.dev"),
        ],
    ),
    (
        "deviceClass: {enabled: false}",
        &[
            Absent("DeviceClass/gpu.divvy.dev"),
            Absent("DeviceClass/mig-1g.10gb.divvy.dev"),
        ],
    ),
    (
        "{driverName: gpu.nvidia.com, migClasses: [1g.10gb]}",
        &[
            There("DeviceClass/mig.nvidia.com"),
            There("DeviceClass/mig-1g.10gb.divvy.dev"),
            There("DeviceClass/share.divvy.dev"),
            There("DeviceClass/mig-share.divvy.dev"),
            There("DeviceClass/mps.divvy.dev"),
            There("DeviceClass/mig-mps.divvy.dev"),
            There("DeviceClass/admin.divvy.dev"),
            Absent("DeviceClass/gpu.divvy.dev"),
            Absent("DeviceClass/share.nvidia.com"),
            Absent("DeviceClass/vfio.gpu.nvidia.com"),
            Is(
                "DeviceClass/gpu.nvidia.com",
                "/spec/extendedResourceName",
                r#""nvidia.com/gpu""#,
            ),
        ],
    ),
    (
        "{prometheusRule: {enabled: true, runbookUrl: 'https://git.example.com/divvy/runbooks/'}}",
        &[
            Is(
                "PrometheusRule/divvy",
                "/spec/groups/0/rules/0/annotations/runbook_url",
                r#""https://git.example.com/divvy/runbooks/gpu-unhealthy.md""#,
            ),
            Is(
                "PrometheusRule/divvy",
                "/spec/groups/0/rules/0/annotations/runbook",
                r#""docs/runbooks/gpu-unhealthy.md""#,
            ),
        ],
    ),
    (
        "prometheusRule: {enabled: true}",
        &[Is(
            "PrometheusRule/divvy",
            "/spec/groups/0/rules/0/annotations",
            r#"{"summary": "{{ $labels.UUID }} ({{ $labels.device }}) on {{ $labels.instance }} is unhealthy or gone and gets no new pods", "runbook": "docs/runbooks/gpu-unhealthy.md"}"#,
        )],
    ),
    (
        "clusterController: {enabled: true}",
        &[
            There("Deployment/divvy-controller"),
            Absent("PodDisruptionBudget/divvy-controller"),
        ],
    ),
    (
        "openshift: {scc: true}",
        &[There("RoleBinding/divvy-scc-privileged")],
    ),
];

/// The same with further flags of `helm template`.
pub(super) const FLAGGED: &[(&str, &[&str], &[Expected])] = &[
    (
        "{}",
        &["--name-template=other"],
        &[
            There("DaemonSet/other-divvy-node"),
            Is(
                "DaemonSet/other-divvy-node",
                "/metadata/labels/app.kubernetes.io~1instance",
                r#""other""#,
            ),
        ],
    ),
    (
        "openshift: {scc: false}",
        &["--api-versions=security.openshift.io/v1/SecurityContextConstraints"],
        &[Absent("RoleBinding/divvy-scc-privileged")],
    ),
    (
        "resourceQuota: {enabled: false}",
        &["--kube-version=1.35.2-gke.1001000"],
        &[Absent("ResourceQuota/divvy-critical-pods")],
    ),
    (
        "{}",
        &["--kube-version=1.34.0-eks-1234567"],
        &[Absent("ResourceQuota/divvy-critical-pods")],
    ),
];
