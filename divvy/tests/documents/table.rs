//! Commands of the README and of `docs/` that are not run beside this file, and how each is tried.
//! The commands of [`How::Cluster`] are run by the end-to-end case
//! `the_commands_of_the_readme_work`, in the order of this table.

/// The means by which a command of a document is tried.
#[derive(Debug, Clone, Copy)]
pub(crate) enum How {
    /// The end-to-end case runs it on a real Kubernetes, and finds this text in its output.
    Cluster(&'static str),
    /// The test or the end-to-end case of this name does the same.
    By(&'static str),
    /// It is not run, for this reason.
    No(&'static str),
}

use How::{By, Cluster, No};

const SUITE: &str = "the end-to-end suite begins with it (`Driver::install`)";
const HARDWARE: &str = "a program of the node, which needs a real GPU";
const PLATFORM: &str = "needs this platform";
const DRAINED: &str = "the_driver_is_let_go_while_the_node_is_drained";
pub(crate) const EXAMPLES: &str = "every_example_runs_as_it_is";
const MIGRATED: &str = "nodes_move_from_the_device_plugin_one_by_one";
const MEASURES: &str = "measures for minutes to hours; that xtask has the command is checked";
const DEVELOPS: &str = "builds and tests for minutes; that xtask has the command is checked";
const SUITE_CLUSTER: &str = "the end-to-end suite starts its clusters with the same code";
const UNINSTALLED: &str = "an_uninstalled_release_leaves_what_its_page_says";

/// Commands as they are printed, without comments and with single spaces.
pub(crate) const TABLE: &[(&str, How)] = &[
    // The quick start, the README, and what people on call type, in an order in which they work.
    ("kubectl version", Cluster("Server Version")),
    (
        r#"kubectl get node NODE -o jsonpath='{.status.nodeInfo.containerRuntimeVersion}{"\n"}'"#,
        Cluster("containerd://"),
    ),
    (
        r#"kubectl get node NODE -o jsonpath='{.status.allocatable.nvidia\.com/gpu}{"\n"}'"#,
        Cluster(""),
    ),
    (
        "kubectl api-resources --api-group=resource.k8s.io",
        Cluster("resource.k8s.io/v1"),
    ),
    (
        "kubectl label namespace divvy pod-security.kubernetes.io/enforce=privileged",
        Cluster("namespace/divvy"),
    ),
    (
        "kubectl label node NODE divvy.dev/gpu=true",
        Cluster("node/"),
    ),
    (
        "kubectl --namespace divvy rollout status daemonset/divvy-node",
        Cluster("successfully rolled out"),
    ),
    (
        "kubectl get nodes,pods,pdb,deviceclasses,resourceslices,resourceclaims -A -o yaml > cluster.yaml",
        By("a_printed_cluster_gives_the_plan_of_the_page"),
    ),
    (
        "divvy defrag --plan --want '8*gpu' --priority 100",
        By("a_printed_cluster_gives_the_plan_of_the_page"),
    ),
    (
        "divvy defrag --plan --waiting",
        By("a_pod_is_moved_so_that_a_large_claim_fits"),
    ),
    (
        "divvy defrag --plan --want '2*gpu' --priority 100 --objects cluster.yaml",
        By("a_printed_cluster_gives_the_plan_of_the_page"),
    ),
    (
        "divvy explain team-a/train-0",
        By("a_pod_that_waits_is_explained_with_all_its_claims"),
    ),
    (
        "divvy explain --want '2*gpu'",
        By("a_printed_cluster_gives_the_ways_of_the_page"),
    ),
    ("kubectl get gpunodes", Cluster("GPUS")),
    ("kubectl get gpunodes NODE", Cluster("GPUS")),
    (
        r#"kubectl get gpunode NODE -o jsonpath='{.status.troubles[*].kind}{"\n"}'"#,
        Cluster(""),
    ),
    (
        "kubectl get resourceslices --field-selector spec.nodeName=NODE",
        Cluster("gpu.divvy.dev"),
    ),
    (
        "kubectl apply -f examples/one-gpu/manifests.yaml",
        Cluster("pod/one-gpu created"),
    ),
    (
        "kubectl -n divvy-one-gpu wait --for=condition=Ready pod/one-gpu --timeout=2m",
        Cluster("condition met"),
    ),
    (
        "kubectl -n divvy-one-gpu logs one-gpu",
        Cluster("nvidia-smi of driver"),
    ),
    (
        "kubectl apply -f examples/share-small/manifests.yaml",
        Cluster("pod/tenth created"),
    ),
    (
        "kubectl -n divvy-share-small wait --for=condition=Ready pod/tenth --timeout=2m",
        Cluster("condition met"),
    ),
    (
        "kubectl apply -f examples/mig-partitions/manifests.yaml",
        Cluster("pod/first-1g created"),
    ),
    ("kubectl divvy status", Cluster("NODE")),
    ("divvy status", Cluster("NODE")),
    ("kubectl divvy status node NODE", Cluster("gpu-0")),
    ("divvy status node NODE", Cluster("gpu-0")),
    ("kubectl divvy status gpu NODE/gpu-0", Cluster("gpu-0")),
    ("divvy status gpu NODE/gpu-0", Cluster("gpu-0")),
    (
        "kubectl divvy slices --node NODE",
        By("the_template_of_a_nodes_kind_is_what_the_node_publishes"),
    ),
    (
        "kubectl divvy slices --diff NODE",
        By("a_sick_node_is_compared_with_a_healthy_one_of_its_kind"),
    ),
    (
        "kubectl divvy slices --sim h100x8 --policy group.yaml --diff NODE",
        By("every_board_publishes_its_template_under_every_policy"),
    ),
    ("divvy status policy", Cluster("action required")),
    (
        "divvy status policy NAME",
        By("policies_show_what_they_decide_then_what_has_no_effect"),
    ),
    (
        "kubectl divvy status pod NAMESPACE/NAME",
        Cluster("pod divvy-one-gpu/one-gpu"),
    ),
    (
        "divvy status pod NAMESPACE/NAME",
        Cluster("pod divvy-one-gpu/one-gpu"),
    ),
    (
        "kubectl divvy status claim NAMESPACE/NAME",
        Cluster("divvy-one-gpu/one-gpu"),
    ),
    (
        "divvy status claim NAMESPACE/NAME",
        Cluster("divvy-one-gpu/one-gpu"),
    ),
    ("kubectl divvy status -n NAMESPACE", Cluster("NODE")),
    (
        "kubectl -n NAMESPACE describe resourceclaim CLAIM",
        Cluster("gpu.divvy.dev"),
    ),
    ("kubectl divvy top", Cluster("")),
    ("divvy top", Cluster("")),
    ("divvy top gpus", Cluster("")),
    ("kubectl divvy top -n NAMESPACE", Cluster("")),
    (
        "divvy top namespaces --since 7d --prometheus http://localhost:9090",
        By("sums_are_in_hours_with_the_most_first"),
    ),
    (
        "divvy top namespaces --since 7d --prometheus http://localhost:9090 -o wide",
        By("sums_are_in_hours_with_the_most_first"),
    ),
    ("kubectl describe node NODE", Cluster("Name:")),
    (
        "kubectl -n divvy get pod -o wide -l app.kubernetes.io/component=node --field-selector spec.nodeName=NODE",
        Cluster("divvy-node"),
    ),
    (
        "kubectl -n divvy logs $(kubectl -n divvy get pod -o name -l app.kubernetes.io/component=node --field-selector spec.nodeName=NODE) --since=1h",
        Cluster(""),
    ),
    (
        "kubectl get pods -A -o wide --field-selector spec.nodeName=NODE",
        Cluster("one-gpu"),
    ),
    (
        "kubectl create role divvy-usage --namespace NAMESPACE --verb=get --resource=pods/proxy",
        Cluster("created"),
    ),
    (
        "kubectl create rolebinding divvy-usage --namespace NAMESPACE --role=divvy-usage --group=GROUP",
        Cluster("created"),
    ),
    (
        r#"kubectl get resourceslices --field-selector spec.driver=gpu.divvy.dev,spec.nodeName=node-1 -o jsonpath='{range .items[*].spec.devices[?(@.attributes.gpuUUID.string=="GPU-…")]}{.name}{"\n"}{end}'"#,
        Cluster(""),
    ),
    ("kubectl get resourceslices -o yaml", Cluster("gpuUUID")),
    ("kubectl get gpunodes -o yaml", Cluster("kind: GpuNode")),
    (
        "kubectl create clusterrolebinding gpu-readers --clusterrole=divvy-view --group=GROUP",
        Cluster("gpu-readers created"),
    ),
    (
        "kubectl delete --ignore-not-found -f examples/mig-partitions/manifests.yaml -f examples/share-small/manifests.yaml -f examples/one-gpu/manifests.yaml",
        Cluster("deleted"),
    ),
    // What other cases and tests do.
    ("kubectl label node NODE divvy.dev/try=true", By(EXAMPLES)),
    ("kubectl label node NODE divvy.dev/try-", By(EXAMPLES)),
    ("kubectl apply -f examples/all-modes.yaml", By(EXAMPLES)),
    ("kubectl delete -f examples/all-modes.yaml", By(EXAMPLES)),
    (
        "kubectl apply -f fleet.yaml",
        By("every_policy_in_the_documents_is_read"),
    ),
    (
        "kubectl drain NODE --ignore-daemonsets --delete-emptydir-data",
        By(DRAINED),
    ),
    ("kubectl uncordon NODE", By(DRAINED)),
    (
        "touch /var/lib/kubelet/plugins/gpu.divvy.dev/release-driver",
        By("while_a_drain_asks_an_unheld_driver_is_let_go"),
    ),
    (
        "rm /var/lib/kubelet/plugins/gpu.divvy.dev/release-driver",
        By("while_a_drain_asks_an_unheld_driver_is_let_go"),
    ),
    (
        "kubectl wait --for=condition=Ready pod --namespace divvy --selector app.kubernetes.io/component=node --field-selector spec.nodeName=NODE",
        By(MIGRATED),
    ),
    (
        "kubectl wait --for=delete pod --namespace divvy --selector app.kubernetes.io/component=node --field-selector spec.nodeName=NODE",
        By(MIGRATED),
    ),
    ("kubectl label node NODE divvy.dev/gpu-", By(MIGRATED)),
    (
        "cargo run -p divvy -- demo",
        By("readme_shows_what_the_demo_prints"),
    ),
    (
        "cargo install --path divvy && ln -sf divvy ~/.cargo/bin/kubectl-divvy",
        By("usage_calls_the_program_as_its_user_does"),
    ),
    (
        "kubectl exec my-pod -- cat /var/run/kubernetes.io/dra-device-attributes/resourceclaims/my-claim/gpu/gpu.divvy.dev-metadata.json",
        By("a_pod_reads_what_its_gpus_are_also_after_a_killed_plugin_has_lost_the_files"),
    ),
    ("kubectl label nodes --all divvy.dev/gpu-", By(MIGRATED)),
    (
        "kubectl wait --for=delete pod --namespace divvy --selector app.kubernetes.io/component=node --timeout=2m",
        By(MIGRATED),
    ),
    ("helm uninstall divvy --namespace divvy", By(UNINSTALLED)),
    // What is not run.
    (
        "kubectl --namespace divvy port-forward daemonset/divvy-node 9441",
        No("runs until Ctrl-C"),
    ),
    (
        "sed 's/NODE/node-1/' examples/device-taint/taint.yaml | kubectl apply -f -",
        No("taints a GPU that other cases use; \
             `a_taint_rule_of_an_admin_keeps_claims_off_its_gpu_unless_they_tolerate_it` makes such a rule"),
    ),
    (
        "kubectl delete --ignore-not-found -f examples/device-taint/taint.yaml",
        No("deletes what the line above makes"),
    ),
    (
        "cargo test --workspace",
        No("runs this test; CI does, by `cargo xtask ci`"),
    ),
    ("cargo xtask ci", No(DEVELOPS)),
    ("cargo xtask e2e", No(DEVELOPS)),
    ("cargo xtask dist", No(DEVELOPS)),
    ("cargo xtask book", No(DEVELOPS)),
    ("cargo xtask cluster up --driver", No(SUITE_CLUSTER)),
    ("cargo xtask cluster down", No(SUITE_CLUSTER)),
    (
        "cargo xtask cluster exec kubectl apply -f examples/share-small/manifests.yaml",
        No(SUITE_CLUSTER),
    ),
    (
        "cargo xtask cluster exec kubectl -n divvy-share-small get pods",
        No(SUITE_CLUSTER),
    ),
    ("cargo xtask cluster exec divvy status", No(SUITE_CLUSTER)),
    ("cargo xtask bench scheduler", No(MEASURES)),
    ("cargo xtask bench scheduler --profiles", No(MEASURES)),
    (
        "cargo xtask bench scheduler --nodes 100 --gpus h100x8 --pods 300 --json FILE",
        No(MEASURES),
    ),
    ("cargo xtask bench -- --only placement", No(MEASURES)),
    ("cargo xtask bench -- --only mps", No(MEASURES)),
    (
        "cargo build --release -p divvy-hardware -p divvy-cdi-hook",
        No("CI builds all programs in another profile"),
    ),
    (
        "sudo ./divvy-hardware --report report.txt --allow program,mps,compute-mode,memory-limit",
        No(HARDWARE),
    ),
    (
        "divvy ui",
        No("serves a page until Ctrl-C; the arguments are checked"),
    ),
    (
        "divvy demo --ui",
        No("serves a page until Ctrl-C; the arguments are checked"),
    ),
    ("kubectl create namespace divvy", No(SUITE)),
    (
        "helm install divvy deploy/chart/divvy --namespace divvy --set image.repository=REGISTRY/divvy",
        No(SUITE),
    ),
    (
        "helm install divvy deploy/chart/divvy --namespace divvy --set image.repository=REGISTRY/divvy --values values.yaml",
        No(SUITE),
    ),
    (
        "helm install divvy deploy/chart/divvy --namespace divvy --set image.repository=REGISTRY/divvy --set profile=shared --set slots=8",
        By("profile_shared_makes_the_name_of_gpus_stand_for_shares"),
    ),
    (
        "cargo xtask image",
        No("the end-to-end suite runs the driver from this image"),
    ),
    (
        "skopeo copy oci:target/image docker://REGISTRY/divvy:0.1.0",
        No("needs a registry"),
    ),
    (
        "skopeo copy oci:target/image oci-archive:divvy-0.1.0.tar",
        No("needs the image, which the end-to-end suite alone builds"),
    ),
    (
        "skopeo copy oci-archive:divvy-0.1.0.tar docker://REGISTRY/divvy:0.1.0",
        No("needs a registry"),
    ),
    (
        "skopeo inspect --format '{{.Digest}}' docker://REGISTRY/divvy:0.1.0",
        No("needs a registry"),
    ),
    (
        "helm upgrade divvy deploy/chart/divvy --namespace divvy --values values.yaml",
        By("an_update_hands_over_and_a_driver_root_can_be_set"),
    ),
    (
        "kubectl --namespace divvy delete pod --selector app.kubernetes.io/component=mps-supervisor --field-selector spec.nodeName=NODE",
        No(
            "ends the MPS servers of a node; the state before it is that of `a_supervisor_of_another_driver_name_is_a_trouble_with_a_remedy`",
        ),
    ),
    (
        "kubectl --namespace divvy create serviceaccount divvy-oncall",
        Cluster("serviceaccount/divvy-oncall"),
    ),
    (
        "kubectl create clusterrolebinding divvy-oncall --clusterrole=view --serviceaccount=divvy:divvy-oncall",
        Cluster("clusterrolebinding.rbac.authorization.k8s.io/divvy-oncall"),
    ),
    (
        r#"kubectl --namespace divvy run oncall --rm --stdin --tty --restart Never --image REGISTRY/divvy:0.1.0 --command --overrides '{"spec": {"serviceAccountName": "divvy-oncall"}}' -- /usr/bin/divvy status"#,
        No("needs a terminal and a registry"),
    ),
    (
        "helm rollback divvy --namespace divvy",
        No(
            "an upgrade to the chart of before, for Helm as for the plugins (`no_claim_fails_in_rolling_updates`)",
        ),
    ),
    (
        "kubectl get deviceclasses -o custom-columns=NAME:.metadata.name,RESOURCE:.spec.extendedResourceName",
        Cluster("gpu.divvy.dev"),
    ),
    (
        "helm upgrade divvy deploy/chart/divvy --namespace divvy --reset-then-reuse-values --set podMonitor.enabled=true --set prometheusRule.enabled=true --set dashboards.enabled=true",
        No("needs the Prometheus Operator; `cargo xtask chart` renders these values"),
    ),
    (
        "helm upgrade divvy deploy/chart/divvy --namespace divvy --values values.yaml --take-ownership",
        No("needs the release of NVIDIA's driver; `cargo xtask chart` renders these values"),
    ),
    (
        "kubectl -n divvy port-forward $(kubectl -n divvy get pod -o name -l app.kubernetes.io/component=node --field-selector spec.nodeName=NODE) 9441",
        No("runs until Ctrl-C"),
    ),
    (
        "curl -s localhost:9441/debug/state",
        No("needs the port-forward; a case of the suite reads the same address inside the pod"),
    ),
    (
        "kubectl label node NODE --overwrite nvidia.com/gpu.deploy.dcgm=false nvidia.com/gpu.deploy.dcgm-exporter=false",
        No("for the GPU Operator"),
    ),
    (
        "kubectl label node NODE --overwrite nvidia.com/gpu.deploy.dcgm=true nvidia.com/gpu.deploy.dcgm-exporter=true",
        No("for the GPU Operator"),
    ),
    (
        "kubectl label node NODE --overwrite nvidia.com/gpu.deploy.device-plugin=false nvidia.com/gpu.deploy.mig-manager=false",
        No("for the GPU Operator"),
    ),
    (
        "helm upgrade gpu-operator nvidia/gpu-operator --namespace gpu-operator --reuse-values --set devicePlugin.enabled=false --set migManager.enabled=false",
        No("for the GPU Operator"),
    ),
    (
        "kubectl get pods -n gpu-operator --field-selector spec.nodeName=NODE",
        No("for the GPU Operator"),
    ),
    (
        "kubectl annotate deviceclass gpu.divvy.dev example.com/touched=1",
        Cluster("annotated"),
    ),
    (
        "kubectl label node NODE example.com/device-plugin=off",
        No("for NVIDIA's device plugin"),
    ),
    (
        r#"kubectl --namespace NAMESPACE patch daemonset nvidia-device-plugin-daemonset --type merge --patch '{"spec": {"template": {"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "example.com/device-plugin", "operator": "NotIn", "values": ["off"]}]}]}}}}}}}'"#,
        No("for NVIDIA's device plugin"),
    ),
    (
        "systemctl stop nvidia-dcgm nvidia-persistenced",
        No(HARDWARE),
    ),
    (
        "systemctl start nvidia-persistenced nvidia-dcgm",
        No(HARDWARE),
    ),
    ("nvidia-smi", No(HARDWARE)),
    ("nvidia-smi -pm 0", No(HARDWARE)),
    ("nvidia-smi --gpu-reset -i UUID", No(HARDWARE)),
    ("nvidia-smi -i UUID -mig 1", No(HARDWARE)),
    (
        "nvidia-smi -i UUID --query-gpu=mig.mode.current --format=csv",
        No(HARDWARE),
    ),
    (
        "nvidia-smi -i UUID --query-gpu=name,mig.mode.current --format=csv",
        No(HARDWARE),
    ),
    ("nvidia-smi mig -lgi", No(HARDWARE)),
    ("nvidia-smi mig -lci", No(HARDWARE)),
    ("fuser -v /dev/nvidia*", No(HARDWARE)),
    ("lsmod | grep nvidia", No(HARDWARE)),
    ("dmesg | grep -i -e nvrm -e nvidia | tail", No(HARDWARE)),
    ("cat /proc/PID/cgroup", No("of the process that lingers")),
    (
        "kubectl -n NAMESPACE delete pod POD",
        No("of a claim whose MPS server is wedged"),
    ),
    ("dmesg | grep -i xid", No(HARDWARE)),
    (
        "tail /run/divvy/gpu.divvy.dev/mps/GPU-*/log/server.log",
        No("on a node with an MPS server"),
    ),
    (
        "ps -o pid,stat,wchan,cmd -p PID",
        No("of the process that lingers"),
    ),
    (
        "eksctl create nodegroup --cluster CLUSTER --node-type p5.48xlarge --node-labels divvy.dev/gpu=true",
        No(PLATFORM),
    ),
    (
        "gcloud container node-pools create gpus --cluster CLUSTER --machine-type a3-highgpu-8g --accelerator type=nvidia-h100-80gb,count=8,gpu-driver-version=disabled --node-labels gke-no-default-nvidia-gpu-device-plugin=true,divvy.dev/gpu=true",
        No(PLATFORM),
    ),
    (
        r#"kubectl label node "$(hostname)" divvy.dev/gpu=true"#,
        No(PLATFORM),
    ),
    ("nvkind cluster create --name gpus", No(PLATFORM)),
    (
        "skopeo copy oci:target/image docker-daemon:divvy:dev",
        No(PLATFORM),
    ),
    ("kind load docker-image divvy:dev --name gpus", No(PLATFORM)),
    (
        "helm install divvy deploy/chart/divvy --namespace divvy --values values.yaml",
        No(PLATFORM),
    ),
    ("oc new-project divvy", No(PLATFORM)),
    (
        "oc label namespace divvy pod-security.kubernetes.io/enforce=privileged security.openshift.io/scc.podSecurityLabelSync=false --overwrite",
        No(PLATFORM),
    ),
];
