//! Sets of values that cannot work, and what helm must say about them.

/// Values as YAML, and a part of the message.
pub(super) const CASES: &[(&str, &str)] = &[
    (
        "{mps: {enabled: true}, driverName: a-name-that-is-too-long.example.com}",
        "an MPS daemon starts with 83 at most",
    ),
    ("mps: {sharedMemory: 4G}", "'4G' does not match pattern"),
    (
        "{driverName: gpu.nvidia.com, nvidiaDeviceClasses: {enabled: true}}",
        "nvidiaDeviceClasses is superfluous with driverName gpu.nvidia.com",
    ),
    (
        "{driverName: gpu.nvidia.com, extraDeviceClasses: [{name: vfio.gpu.nvidia.com, mode: gpu}]}",
        "extraDeviceClasses cannot have vfio.gpu.nvidia.com",
    ),
    ("nodeSelector: null", "nodeSelector"),
    (
        "nodeSelector: {divvy.dev/gpu: null}",
        "minProperties: got 0, want 1",
    ),
    (
        "nodeSelector: {nvidia.com/gpu.present: true}",
        "got boolean, want string",
    ),
    (
        "nodeSelection: everywhere",
        "must be one of 'label', 'discovered'",
    ),
    (
        "{nodeSelection: discovered, affinity: {nodeAffinity: {}}}",
        "affinity.nodeAffinity cannot be set",
    ),
    (
        "drivername: gpu.divvy.dev",
        "additional properties 'drivername' not allowed",
    ),
    ("driverName: GPU", "'GPU' does not match pattern"),
    (
        "driverName: a-name-that-is-as-long-as-a-name-may-be.but-not-on-unix.example.com",
        "driverName",
    ),
    (
        "kubeletDir: var/lib/kubelet",
        "'var/lib/kubelet' does not match pattern",
    ),
    (
        "kubeletDir: /a/folder/whose/name/is/even/longer/than/the/one/of/microk8s",
        "the limit is 107; shorten driverName",
    ),
    (
        "{driverRoot: /run/nvidia/driver, nvmlLibrary: /usr/lib/libnvidia-ml.so.1}",
        "is not below driverRoot",
    ),
    (
        "driverRoot: opt/driver",
        "'opt/driver' does not match pattern",
    ),
    (
        "debugAddress: localhost",
        "'localhost' does not match pattern",
    ),
    ("log: {level: verbose}", "'verbose' does not match pattern"),
    ("log: {level: 'info,h2=loud'}", "does not match pattern"),
    ("log: {format: yaml}", "'json', 'plain'"),
    (
        "image: {digest: 'sha256:abc'}",
        "'sha256:abc' does not match pattern",
    ),
    (
        "image: {preloaded: false}",
        "push the image to a registry and set image.repository=REGISTRY/divvy",
    ),
    (
        "image: {repository: localhost/mine, preloaded: false}",
        "image.repository is localhost/mine, which no node can pull",
    ),
    ("image: {preloaded: 'yes'}", "got string, want boolean"),
    (
        "image: {repository: 'r/divvy@sha256:abc'}",
        "does not match pattern",
    ),
    ("image: {tag: 'a tag'}", "'a tag' does not match pattern"),
    (
        "image: {pullPolicy: Sometimes}",
        "'Always', 'IfNotPresent', 'Never'",
    ),
    (
        "clusterController: {evictionsPerMinute: 0}",
        "minimum: got 0, want 1",
    ),
    (
        "defragmentation: {maxEvictions: 0}",
        "minimum: got 0, want 1",
    ),
    (
        "defragmentation: {schedule: ''}",
        "minLength: got 0, want 1",
    ),
    (
        "clusterController: {nodeLabels: all}",
        "got string, want boolean",
    ),
    (
        "clusterController: {quota: 160Gi}",
        "got string, want boolean",
    ),
    (
        "clusterController: {dryrun: false}",
        "additional properties 'dryrun' not allowed",
    ),
    ("updateStrategy: {type: Foo}", "'RollingUpdate', 'OnDelete'"),
    ("podAnnotations: {a: 1}", "got number, want string"),
    ("podLabels: {app.kubernetes.io/name: hijack}", "podLabels"),
    (
        "podMonitor: {enabled: true, labels: {helm.sh/chart: x}}",
        "labels",
    ),
    ("dashboards: {labels: {helm.sh/chart: x}}", "labels"),
    (
        "dashboards: {namespace: 'Not a name'}",
        "'Not a name' does not match pattern",
    ),
    (
        "podMonitor: {interval: often}",
        "'often' does not match pattern",
    ),
    (
        "serviceAccount: {create: false}",
        "minLength: got 0, want 1",
    ),
    ("openshift: {scc: maybe}", "/openshift/scc"),
    (
        "resourceQuota: {pods: many}",
        "'many' does not match pattern",
    ),
    (
        "networkPolicy: {enabled: true, from: [{}]}",
        "minProperties: got 0, want 1",
    ),
    (
        "tolerations: [{key: a, effect: NoRun}]",
        "'NoSchedule', 'PreferNoSchedule', 'NoExecute'",
    ),
    (
        "adminAccess: {namespaces: ['Not a name']}",
        "'Not a name' does not match pattern",
    ),
    ("extraDeviceClasses: [{name: a}]", "missing property 'mode'"),
    (
        "extraDeviceClasses: [{name: a, mode: half}]",
        "'gpu', 'mig', 'share', 'mig-share', 'mps', 'mig-mps', 'admin'",
    ),
    (
        "extraDeviceClasses: [{name: a, mode: gpu, config: {kind: MigConfig}}]",
        "/extraDeviceClasses/0/config",
    ),
    (
        "extraDeviceClasses: [{name: a, mode: share, config: {timeSlicing: {interval: Long}}}]",
        "/extraDeviceClasses/0/config/timeSlicing",
    ),
    (
        "extraDeviceClasses: [{name: a, mode: gpu, config: {timeSlicing: {interval: long}}}]",
        "'Default', 'Short', 'Medium', 'Long'",
    ),
    (
        "extraDeviceClasses: [{name: gpu.divvy.dev, mode: gpu}]",
        "two DeviceClasses have one name",
    ),
    (
        "{deviceClass: {extendedResourceNames: {gpu: a.io/b}}, extraDeviceClasses: [{name: x, mode: gpu, extendedResourceName: a.io/b}]}",
        "two DeviceClasses have one extendedResourceName",
    ),
    (
        "nvidiaDeviceClasses: {enabled: true, extendedResourceName: nvidia.com/gpu}",
        "nvidia.com/gpu stands for gpu.divvy.dev and for gpu.nvidia.com; set deviceClass.extendedResourceNames.gpu to \"\"",
    ),
    (
        "deviceClass: {extendedResourceNames: {mig: nvidia.com/gpu}}",
        "two DeviceClasses have one extendedResourceName",
    ),
    (
        "extraDeviceClasses: [{name: x, mode: mig, extendedResourceName: nvidia.com/mig-1g.10gb}]",
        "take 1g.10gb out of migClasses, or take extendedResourceName out of extraDeviceClasses, x",
    ),
    (
        "extraDeviceClasses: [{name: mig-1g.10gb.divvy.dev, mode: mig}]",
        "two DeviceClasses have one name, mig-1g.10gb.divvy.dev",
    ),
    ("migClasses: [1g.10GB]", "'1g.10GB' does not match pattern"),
    ("migClasses: ['10gb']", "'10gb' does not match pattern"),
    (
        "migClasses: ['1c.2g.20gb']",
        "'1c.2g.20gb' does not match pattern",
    ),
    (
        "migClasses: ['1g.10gb+mee']",
        "'1g.10gb+mee' does not match pattern",
    ),
    (
        "migClasses: [1g.10gb, 1g.10gb]",
        "items at 0 and 1 are equal",
    ),
    (
        "claimTemplates: {namespaces: [a]}",
        "claimTemplates.namespaces has no effect without claimTemplates.templates",
    ),
    (
        "claimTemplates: {templates: {half: {memory: 10Gi, percent: 50}}}",
        "claimTemplates.templates.half has percent beside memory",
    ),
    (
        "claimTemplates: {templates: {half: {slots: 2, percent: 50}}}",
        "percent beside slots",
    ),
    (
        "{mps: {enabled: true}, driverRoot: /run/nvidia/driver}",
        "mps.enabled needs a driver on the host",
    ),
    (
        "updateStrategy: {rollingUpdate: {maxUnavailable: 1}}",
        "has maxSurge 1 and maxUnavailable 1",
    ),
    (
        "updateStrategy: {rollingUpdate: {maxSurge: 10%, maxUnavailable: 10%}}",
        "the API server takes one of them",
    ),
    (
        "resources: {limits: {memory: 64}}",
        "at '/resources/limits/memory': got number, want string",
    ),
    (
        "clusterController: {resources: {requests: {memory: '64'}}}",
        "'64' does not match pattern",
    ),
    (
        "driverName: gpu.amd.com",
        "driverName gpu.amd.com is that of another driver",
    ),
    ("migClasses: all", "value must be 'auto'"),
    (
        "claimTemplates: {templates: {tenth: {}}}",
        "minProperties: got 0, want 1",
    ),
    (
        "claimTemplates: {templates: {tenth: {mem: 10Gi}}}",
        "additional properties 'mem' not allowed",
    ),
    (
        "claimTemplates: {templates: {tenth: {memory: 10GB}}}",
        "'10GB' does not match pattern",
    ),
    (
        "claimTemplates: {templates: {tenth: {cores: 0.1}}}",
        "got number, want integer",
    ),
    (
        "claimTemplates: {templates: {Tenth: {cores: 10}}}",
        "'Tenth' does not match pattern",
    ),
    (
        "claimTemplates: {namespaces: ['Not a name']}",
        "'Not a name' does not match pattern",
    ),
    (
        "commonLabels: {app.kubernetes.io/name: hijack}",
        "commonLabels",
    ),
    ("extraObjects: [{}]", "minProperties: got 0, want 1"),
    (
        "prometheusRule: {runbookUrl: docs/runbooks}",
        "'docs/runbooks' does not match pattern",
    ),
    (
        "deviceClass: {extendedResourceNames: {gpu: gpu}}",
        "'gpu' does not match pattern",
    ),
    (
        "deviceClass: {extendedResourceNames: {admin: a.io/b}}",
        "additional properties 'admin' not allowed",
    ),
    (
        "nvidiaDeviceClasses: {bothDrivers: true}",
        "no effect without nvidiaDeviceClasses.enabled",
    ),
    ("httpPort: 0", "minimum: got 0, want 1"),
    (
        "profile: all",
        "'auto', 'whole', 'partitions', 'shared', 'everything'",
    ),
    ("slots: 0", "minimum: got 0, want 1"),
    ("extraEnv: [{value: x}]", "missing property 'name'"),
    ("extraNodes: [/etc/passwd]", "does not match pattern"),
    ("fullnameOverride: Cards", "'Cards' does not match pattern"),
];

/// The same with further flags of `helm template`.
pub(super) const FLAGGED: &[(&str, &[&str], &str)] = &[(
    "{}",
    &["--kube-version=1.33.0"],
    "incompatible with Kubernetes v1.33.0",
)];
