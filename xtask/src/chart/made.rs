//! Sets of values, and what the chart makes of them.

use super::Expected;
use super::Expected::{Absent, Env, Folder, Is, Lacks, Says, There};

const PLUGIN: &str = "DaemonSet/divvy-node";
const CONTROLLER: &str = "Deployment/divvy-controller";
const IMAGE: &str = "/spec/template/spec/containers/0/image";
const SELECTOR: &str = "/spec/selectors/0/cel/expression";

/// Values as YAML, and what comes of them.
pub(super) const CASES: &[(&str, &[Expected])] = &[
    (
        "{}",
        &[
            Absent("ConfigMap/divvy-dashboard-fleet"),
            // Labels of a DaemonSet's selector cannot change: an upgrade from 0.1.0 must find these.
            Is(
                PLUGIN,
                "/spec/selector/matchLabels",
                r#"{"app.kubernetes.io/name": "divvy", "app.kubernetes.io/instance": "divvy", "app.kubernetes.io/component": "node"}"#,
            ),
            Is(PLUGIN, "/spec/template/spec/nodeSelector", r#"{"divvy.dev/gpu": "true"}"#),
            Is(PLUGIN, IMAGE, r#""localhost/divvy:0.1.0""#),
            There("ServiceAccount/divvy-node"),
            There("ClusterRole/divvy-node"),
            There("ClusterRole/divvy-view"),
            There("ValidatingAdmissionPolicy/divvy-slices"),
            There("ValidatingAdmissionPolicy/divvy-configs"),
            There("DeviceClass/gpu.divvy.dev"),
            Lacks("DeviceClass/gpu.divvy.dev", "/spec/extendedResourceName"),
            There("CustomResourceDefinition/gpupolicies.divvy.dev"),
            Absent("ValidatingAdmissionPolicy/divvy-admin-access"),
            Absent("RoleBinding/divvy-scc-privileged"),
            Absent("ResourceQuota/divvy-critical-pods"),
            Absent("NetworkPolicy/divvy-node"),
            Absent("Service/divvy-node"),
            Absent("PodMonitor/divvy-node"),
            Absent("PrometheusRule/divvy"),
            Absent("DeviceClass/gpu.nvidia.com"),
        ],
    ),
    (
        "clusterController: {enabled: true}",
        &[
            Is(CONTROLLER, "/spec/replicas", "1"),
            Is(
                CONTROLLER,
                "/spec/selector/matchLabels/app.kubernetes.io~1component",
                r#""cluster-controller""#,
            ),
            Is(CONTROLLER, "/spec/template/spec/securityContext/runAsUser", "65532"),
            Is(CONTROLLER, "/spec/template/spec/containers/0/env/4/value", r#""true""#),
            There("ServiceAccount/divvy-controller"),
            There("Role/divvy-controller"),
            Absent("NetworkPolicy/divvy-controller"),
        ],
    ),
    (
        "{clusterController: {enabled: true, dryRun: false, evictionsPerMinute: 1}, networkPolicy: {enabled: true}, \
         podMonitor: {enabled: true}, openshift: {scc: true}}",
        &[
            Is(CONTROLLER, "/spec/template/spec/containers/0/env/4/value", r#""false""#),
            Is(CONTROLLER, "/spec/template/spec/containers/0/env/5/value", r#""1""#),
            Lacks(CONTROLLER, "/spec/template/spec/securityContext/runAsUser"),
            There("NetworkPolicy/divvy-controller"),
            There("PodMonitor/divvy-controller"),
        ],
    ),
    // Names.
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
    ("nameOverride: div", &[There("DaemonSet/divvy-node"), There("ClusterRole/divvy-view")]),
    (
        "fullnameOverride: cards",
        &[
            Is("DaemonSet/cards-node", "/spec/selector/matchLabels/app.kubernetes.io~1name", r#""divvy""#),
            There("ValidatingAdmissionPolicy/cards-configs"),
            Absent("DaemonSet/divvy-node"),
        ],
    ),
    ("{fullnameOverride: a, nameOverride: b}", &[There("DaemonSet/a-node")]),
    // Image and account.
    (
        "image: {repository: registry.example.com/divvy, tag: v2}",
        &[Is(PLUGIN, IMAGE, r#""registry.example.com/divvy:v2""#)],
    ),
    (
        "image: {repository: registry.example.com/divvy, tag: v2, digest: 'sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef'}",
        &[Is(
            PLUGIN,
            IMAGE,
            r#""registry.example.com/divvy@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef""#,
        )],
    ),
    (
        "{image: {pullPolicy: Always}, imagePullSecrets: [{name: pull}]}",
        &[
            Is(PLUGIN, "/spec/template/spec/imagePullSecrets", r#"[{"name": "pull"}]"#),
            Is(PLUGIN, "/spec/template/spec/containers/0/imagePullPolicy", r#""Always""#),
        ],
    ),
    (
        "serviceAccount: {name: own}",
        &[
            There("ServiceAccount/own"),
            Says(
                "ValidatingAdmissionPolicy/divvy-slices",
                "/spec/matchConditions/0/expression",
                ":gpus:own'",
            ),
        ],
    ),
    (
        "serviceAccount: {create: false, name: own}",
        &[Absent("ServiceAccount/own"), Is("ClusterRoleBinding/divvy-node", "/subjects/0/name", r#""own""#)],
    ),
    (
        "serviceAccount: {annotations: {eks.amazonaws.com/role-arn: 'arn:x'}}",
        &[Is(
            "ServiceAccount/divvy-node",
            "/metadata/annotations",
            r#"{"eks.amazonaws.com/role-arn": "arn:x"}"#,
        )],
    ),
    // Nodes.
    (
        "nodeSelector: {divvy.dev/gpu: null, pool: gpus}",
        &[Is(PLUGIN, "/spec/template/spec/nodeSelector", r#"{"pool": "gpus"}"#)],
    ),
    (
        "nodeSelector: {pool: gpus}",
        &[Is(PLUGIN, "/spec/template/spec/nodeSelector", r#"{"pool": "gpus", "divvy.dev/gpu": "true"}"#)],
    ),
    (
        "nodeSelection: discovered",
        &[
            Lacks(PLUGIN, "/spec/template/spec/nodeSelector"),
            Is(
                PLUGIN,
                "/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchExpressions",
                r#"[{"key": "nvidia.com/gpu.present", "operator": "In", "values": ["true"]}, {"key": "divvy.dev/gpu", "operator": "NotIn", "values": ["false"]}]"#,
            ),
            Is(
                PLUGIN,
                "/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/3/matchExpressions/0/key",
                r#""feature.node.kubernetes.io/pci-0300_10de.present""#,
            ),
        ],
    ),
    (
        "{nodeSelection: discovered, nodeSelector: {pool: a}, affinity: {podAntiAffinity: {}}}",
        &[
            Is(PLUGIN, "/spec/template/spec/nodeSelector", r#"{"pool": "a"}"#),
            Is(PLUGIN, "/spec/template/spec/affinity/podAntiAffinity", "{}"),
        ],
    ),
    (
        "affinity: {nodeAffinity: {}}",
        &[Is(PLUGIN, "/spec/template/spec/affinity", r#"{"nodeAffinity": {}}"#)],
    ),
    (
        "tolerations: [{operator: Exists}]",
        &[Is(PLUGIN, "/spec/template/spec/tolerations", r#"[{"operator": "Exists"}]"#)],
    ),
    // Folders.
    // The socket's path fits because the plugin shortens the pod's UID.
    (
        "kubeletDir: /var/snap/microk8s/common/var/lib/kubelet",
        &[Folder("registry", "/var/snap/microk8s/common/var/lib/kubelet/plugins_registry")],
    ),
    (
        "{hookDir: /home/kubernetes/bin/divvy, cdiDir: /etc/cdi}",
        &[Folder("cdi", "/etc/cdi"), Folder("hook", "/home/kubernetes/bin/divvy/gpu.divvy.dev")],
    ),
    ("deviceMetadata: false", &[Env("DEVICE_METADATA", "false")]),
    ("libraryDelivery: mounts", &[Is(PLUGIN, "/spec/template/spec/volumes/5/name", r#""host""#)]),
    (
        "driverRoot: /opt/driver",
        &[Env("DRIVER_ROOT", "/host/opt/driver"), Env("HOST_DRIVER_ROOT", "/opt/driver")],
    ),
    // Another driver name has everything of its own.
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
            Is("ClusterRole/divvy-node", "/rules/3/resourceNames", r#"["gpu.example.com"]"#),
        ],
    ),
    (
        "driverName: cards.example.com",
        &[There("DeviceClass/cards.example.com"), There("DeviceClass/mig.cards.example.com")],
    ),
    // Platforms.
    ("openshift: {scc: true}", &[There("RoleBinding/divvy-scc-privileged")]),
    (
        "resourceQuota: {enabled: true, pods: 40}",
        &[Is("ResourceQuota/divvy-critical-pods", "/spec/hard/pods", r#""40""#)],
    ),
    (
        "{resourceQuota: {enabled: true}, priorityClassName: ''}",
        &[
            Absent("ResourceQuota/divvy-critical-pods"),
            Lacks(PLUGIN, "/spec/template/spec/priorityClassName"),
        ],
    ),
    // Monitoring.
    (
        "networkPolicy: {enabled: true}",
        &[
            Is(
                "NetworkPolicy/divvy-node",
                "/spec/ingress",
                r#"[{"ports": [{"protocol": "TCP", "port": "http"}]}]"#,
            ),
            Is("NetworkPolicy/divvy-node", "/spec/policyTypes", r#"["Ingress"]"#),
        ],
    ),
    (
        "networkPolicy: {enabled: true, from: [{namespaceSelector: {matchLabels: {a: b}}}]}",
        &[Is(
            "NetworkPolicy/divvy-node",
            "/spec/ingress/0/from/0/namespaceSelector/matchLabels",
            r#"{"a": "b"}"#,
        )],
    ),
    (
        "{service: {enabled: true, annotations: {a: b}}, httpPort: 9100}",
        &[
            Is("Service/divvy-node", "/spec/ports/0/port", "9100"),
            Is("Service/divvy-node", "/spec/clusterIP", r#""None""#),
            Is("Service/divvy-node", "/metadata/annotations", r#"{"a": "b"}"#),
            Is(PLUGIN, "/spec/template/spec/containers/0/ports/0/containerPort", "9100"),
        ],
    ),
    (
        "podMonitor: {enabled: true, labels: {release: prom}, interval: 30s}",
        &[
            Is("PodMonitor/divvy-node", "/spec/podMetricsEndpoints/0/honorLabels", "true"),
            Is("PodMonitor/divvy-node", "/spec/podMetricsEndpoints/0/relabelings/0/targetLabel", r#""node""#),
            Is("PodMonitor/divvy-node", "/spec/podMetricsEndpoints/0/interval", r#""30s""#),
            Is("PodMonitor/divvy-node", "/metadata/labels/release", r#""prom""#),
        ],
    ),
    (
        "podMonitor: {enabled: true}",
        &[Lacks("PodMonitor/divvy-node", "/spec/podMetricsEndpoints/0/interval")],
    ),
    (
        "prometheusRule: {enabled: true, labels: {release: prom}}",
        &[Is("PrometheusRule/divvy", "/metadata/labels/release", r#""prom""#)],
    ),
    (
        "dashboards: {enabled: true}",
        &[
            Is("ConfigMap/divvy-dashboard-fleet", "/metadata/labels/grafana_dashboard", r#""1""#),
            Is("ConfigMap/divvy-dashboard-claim", "/metadata/namespace", r#""gpus""#),
            Lacks("ConfigMap/divvy-dashboard-claim", "/metadata/annotations"),
            Says("ConfigMap/divvy-dashboard-namespace", "/data/divvy-namespace.json", "{{claim}}"),
        ],
    ),
    (
        "dashboards: {enabled: true, namespace: grafana, labels: {board: a}, annotations: {grafana_folder: GPUs}}",
        &[
            Is("ConfigMap/divvy-dashboard-fleet", "/metadata/namespace", r#""grafana""#),
            Is("ConfigMap/divvy-dashboard-fleet", "/metadata/labels/board", r#""a""#),
            Is("ConfigMap/divvy-dashboard-fleet", "/metadata/annotations", r#"{"grafana_folder": "GPUs"}"#),
        ],
    ),
    // Classes.
    (
        "deviceClass: {extendedResourceNames: {gpu: nvidia.com/gpu, share: nvidia.com/gpu.shared}}",
        &[
            Is("DeviceClass/gpu.divvy.dev", "/spec/extendedResourceName", r#""nvidia.com/gpu""#),
            Is("DeviceClass/share.divvy.dev", "/spec/extendedResourceName", r#""nvidia.com/gpu.shared""#),
            Lacks("DeviceClass/mig.divvy.dev", "/spec/extendedResourceName"),
        ],
    ),
    ("deviceClass: {enabled: false}", &[Absent("DeviceClass/gpu.divvy.dev")]),
    (
        "extraDeviceClasses: [{name: big, mode: gpu, selectors: ['\"a\" == \"a\"'], config: {timeSlicing: {interval: Long}}, extendedResourceName: example.com/big}]",
        &[
            Says("DeviceClass/big", SELECTOR, "device.attributes['gpu.divvy.dev'].type == 'gpu'"),
            Is("DeviceClass/big", "/spec/selectors/1/cel/expression", r#""\"a\" == \"a\"""#),
            Is(
                "DeviceClass/big",
                "/spec/config/0/opaque",
                r#"{"driver": "gpu.divvy.dev", "parameters": {"apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig", "timeSlicing": {"interval": "Long"}}}"#,
            ),
            Is("DeviceClass/big", "/spec/extendedResourceName", r#""example.com/big""#),
            Says(
                "ValidatingAdmissionPolicy/divvy-configs",
                "/spec/variables/6/expression",
                r#""big":"GpuConfig""#,
            ),
        ],
    ),
    (
        "{deviceClass: {enabled: false}, extraDeviceClasses: [{name: gpu.divvy.dev, mode: gpu}, {name: s, mode: share}]}",
        &[
            There("DeviceClass/gpu.divvy.dev"),
            Says("DeviceClass/s", SELECTOR, "'gpu-share'"),
            Lacks("DeviceClass/s", "/spec/config"),
            Absent("DeviceClass/mig.divvy.dev"),
        ],
    ),
    (
        "nvidiaDeviceClasses: {enabled: true}",
        &[
            Is(
                "DeviceClass/gpu.nvidia.com",
                SELECTOR,
                r#""device.driver == 'gpu.divvy.dev' && device.attributes['gpu.divvy.dev'].type == 'gpu'""#,
            ),
            Says("DeviceClass/mig.nvidia.com", SELECTOR, "'mig'"),
        ],
    ),
    (
        "nvidiaDeviceClasses: {enabled: true, bothDrivers: true, extendedResourceName: nvidia.com/gpu}",
        &[
            Is("DeviceClass/gpu.nvidia.com", "/spec/extendedResourceName", r#""nvidia.com/gpu""#),
            Lacks("DeviceClass/mig.nvidia.com", "/spec/extendedResourceName"),
            Says(
                "DeviceClass/mig.nvidia.com",
                SELECTOR,
                "|| device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'",
            ),
        ],
    ),
    // Policies.
    (
        "adminAccess: {namespaces: [monitoring, gpu-admins]}",
        &[
            Is(
                "ValidatingAdmissionPolicy/divvy-admin-access",
                "/spec/validations/0/expression",
                r#""request.namespace in [\"monitoring\",\"gpu-admins\"]""#,
            ),
            Is(
                "ValidatingAdmissionPolicyBinding/divvy-admin-access",
                "/spec/validationActions",
                r#"["Deny"]"#,
            ),
        ],
    ),
    (
        "{admissionPolicy: {enabled: false}, claimPolicy: {enabled: false}}",
        &[
            Absent("ValidatingAdmissionPolicy/divvy-slices"),
            Absent("ValidatingAdmissionPolicy/divvy-configs"),
            There(PLUGIN),
        ],
    ),
    (
        "{viewRole: {aggregate: false}, crds: {install: false}}",
        &[
            Lacks("ClusterRole/divvy-view", "/metadata/labels/rbac.authorization.k8s.io~1aggregate-to-view"),
            Absent("CustomResourceDefinition/gpupolicies.divvy.dev"),
        ],
    ),
    ("viewRole: {enabled: false}", &[Absent("ClusterRole/divvy-view")]),
    // The pod.
    (
        "{podLabels: {team: a}, podAnnotations: {b: c}}",
        &[
            Is(PLUGIN, "/spec/template/metadata/labels/team", r#""a""#),
            Is(PLUGIN, "/spec/template/metadata/annotations", r#"{"b": "c"}"#),
        ],
    ),
    (
        "{updateStrategy: {type: OnDelete, rollingUpdate: null}, resources: {limits: {memory: 1Gi}}}",
        &[
            Is(PLUGIN, "/spec/updateStrategy", r#"{"type": "OnDelete"}"#),
            Is(PLUGIN, "/spec/template/spec/containers/0/resources/limits/memory", r#""1Gi""#),
        ],
    ),
    (
        "{extraEnv: [{name: A, value: b}], extraVolumes: [{name: v, emptyDir: {}}], extraVolumeMounts: [{name: v, mountPath: /v}]}",
        &[
            Says(PLUGIN, "/spec/template/spec/volumes/8/name", "v"),
            Is(
                PLUGIN,
                "/spec/template/spec/containers/0/volumeMounts/8",
                r#"{"name": "v", "mountPath": "/v"}"#,
            ),
        ],
    ),
    (
        "log: {level: 'info,divvy_executor=debug', format: plain}",
        &[Env("LOG_LEVEL", "info,divvy_executor=debug")],
    ),
    (
        "{offer: everything, modeLock: 'on', migProfiles: ['+me'], ignoredXids: [94, 95], recoverAfter: 0}",
        &[Env("OFFER", "everything"), Env("IGNORED_XIDS", "94,95"), Env("RECOVER_AFTER", "0")],
    ),
    ("{tolerations: null, resources: null, affinity: null}", &[There(PLUGIN)]),
];

/// The same with further flags of `helm template`.
pub(super) const FLAGGED: &[(&str, &[&str], &[Expected])] = &[
    (
        "{}",
        &["--name-template=other"],
        &[
            There("DaemonSet/other-divvy-node"),
            Is("DaemonSet/other-divvy-node", "/metadata/labels/app.kubernetes.io~1instance", r#""other""#),
        ],
    ),
    (
        "{}",
        &["--api-versions=security.openshift.io/v1/SecurityContextConstraints"],
        &[
            Is("RoleBinding/divvy-scc-privileged", "/roleRef/name", r#""system:openshift:scc:privileged""#),
            Is("RoleBinding/divvy-scc-privileged", "/metadata/namespace", r#""gpus""#),
        ],
    ),
    (
        "openshift: {scc: false}",
        &["--api-versions=security.openshift.io/v1/SecurityContextConstraints"],
        &[Absent("RoleBinding/divvy-scc-privileged")],
    ),
    (
        "{}",
        &["--kube-version=1.35.2-gke.1001000"],
        &[
            Is("ResourceQuota/divvy-critical-pods", "/spec/hard/pods", r#""1G""#),
            Is(
                "ResourceQuota/divvy-critical-pods",
                "/spec/scopeSelector/matchExpressions/0/values",
                r#"["system-node-critical"]"#,
            ),
        ],
    ),
    (
        "resourceQuota: {enabled: false}",
        &["--kube-version=1.35.2-gke.1001000"],
        &[Absent("ResourceQuota/divvy-critical-pods")],
    ),
    (
        "{}",
        &["--kube-version=1.34.0-eks-1234567"],
        &[There(PLUGIN), Absent("ResourceQuota/divvy-critical-pods")],
    ),
];
