//! Kinds whose pods are not recognised by containers alone, or which take claims in ways of their
//! own.

use super::layout::Layout;

/// Pods of a kind.
pub(super) struct Known {
    /// API group, such as `serving.kserve.io`.
    group: &'static str,
    kinds: &'static [&'static str],
    /// Path of the fields that make a pod; `*` stands for each field or item.
    pub(super) path: &'static str,
    pub(super) layout: &'static Layout,
}

const INFERENCE: &[&str] = &["InferenceService"];
const LLM: &[&str] = &["LLMInferenceService", "LLMInferenceServiceConfig"];
const RUNTIME: &[&str] = &["ServingRuntime", "ClusterServingRuntime"];
const WORKFLOW: &[&str] = &["Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate"];
const KNATIVE: &[&str] = &["Service", "Configuration"];
const DISAGGREGATED: &[&str] = &["DisaggregatedSet"];
const RUNTIMES: &[&str] = &["TrainingRuntime", "ClusterTrainingRuntime"];

const fn known(
    group: &'static str,
    kinds: &'static [&'static str],
    path: &'static str,
    layout: &'static Layout,
) -> Known {
    Known {
        group,
        kinds,
        path,
        layout,
    }
}

/// Paths from the Go types of each project.
static ALL: [Known; 46] = [
    known(
        "serving.kserve.io",
        INFERENCE,
        "spec.predictor",
        &Layout::MODEL,
    ),
    known(
        "serving.kserve.io",
        INFERENCE,
        "spec.predictor.workerSpec",
        &Layout::SPEC,
    ),
    known(
        "serving.kserve.io",
        INFERENCE,
        "spec.transformer",
        &Layout::MODEL,
    ),
    known(
        "serving.kserve.io",
        INFERENCE,
        "spec.explainer",
        &Layout::MODEL,
    ),
    known("serving.kserve.io", LLM, "spec.template", &Layout::SPEC),
    known("serving.kserve.io", LLM, "spec.worker", &Layout::SPEC),
    known(
        "serving.kserve.io",
        LLM,
        "spec.prefill.template",
        &Layout::SPEC,
    ),
    known(
        "serving.kserve.io",
        LLM,
        "spec.prefill.worker",
        &Layout::SPEC,
    ),
    known("serving.kserve.io", RUNTIME, "spec", &Layout::RUNTIME),
    known(
        "serving.kserve.io",
        RUNTIME,
        "spec.workerSpec",
        &Layout::SPEC,
    ),
    known(
        "ray.io",
        &["RayCluster"],
        "spec.headGroupSpec",
        &Layout::RAY,
    ),
    known(
        "ray.io",
        &["RayCluster"],
        "spec.workerGroupSpecs.*",
        &Layout::RAY,
    ),
    known(
        "ray.io",
        &["RayJob"],
        "spec.rayClusterSpec.headGroupSpec",
        &Layout::RAY,
    ),
    known(
        "ray.io",
        &["RayJob"],
        "spec.rayClusterSpec.workerGroupSpecs.*",
        &Layout::RAY,
    ),
    known(
        "ray.io",
        &["RayService"],
        "spec.rayClusterConfig.headGroupSpec",
        &Layout::RAY,
    ),
    known(
        "ray.io",
        &["RayService"],
        "spec.rayClusterConfig.workerGroupSpecs.*",
        &Layout::RAY,
    ),
    known(
        "ray.io",
        &["RayCronJob"],
        "spec.jobTemplate.rayClusterSpec.headGroupSpec",
        &Layout::RAY,
    ),
    known(
        "ray.io",
        &["RayCronJob"],
        "spec.jobTemplate.rayClusterSpec.workerGroupSpecs.*",
        &Layout::RAY,
    ),
    known("apps.nvidia.com", &["NIMService"], "spec", &Layout::NIM),
    known(
        "apps.nvidia.com",
        &["NIMPipeline"],
        "spec.services.*.spec",
        &Layout::NIM,
    ),
    known(
        "apps.nvidia.com",
        &["NemoCustomizer", "NIMCache", "NIMBuild"],
        "spec",
        &Layout::NEMO,
    ),
    known(
        "nvidia.com",
        &["DynamoGraphDeployment"],
        "spec.services.*",
        &Layout::DYNAMO,
    ),
    known(
        "nvidia.com",
        &["DynamoComponentDeployment"],
        "spec",
        &Layout::DYNAMO,
    ),
    known(
        "kubeflow.org",
        &["Notebook"],
        "spec.template",
        &Layout::TEMPLATE,
    ),
    known(
        "kubeflow.org",
        &["PyTorchJob"],
        "spec.pytorchReplicaSpecs.*.template",
        &Layout::TEMPLATE,
    ),
    known(
        "kubeflow.org",
        &["TFJob"],
        "spec.tfReplicaSpecs.*.template",
        &Layout::TEMPLATE,
    ),
    known(
        "kubeflow.org",
        &["XGBoostJob"],
        "spec.xgbReplicaSpecs.*.template",
        &Layout::TEMPLATE,
    ),
    known(
        "kubeflow.org",
        &["MPIJob"],
        "spec.mpiReplicaSpecs.*.template",
        &Layout::TEMPLATE,
    ),
    known(
        "kubeflow.org",
        &["PaddleJob"],
        "spec.paddleReplicaSpecs.*.template",
        &Layout::TEMPLATE,
    ),
    known(
        "kubeflow.org",
        &["JAXJob"],
        "spec.jaxReplicaSpecs.*.template",
        &Layout::TEMPLATE,
    ),
    known(
        "trainer.kubeflow.org",
        RUNTIMES,
        "spec.template.spec.replicatedJobs.*.template.spec.template",
        &Layout::TEMPLATE,
    ),
    known(
        "jobset.x-k8s.io",
        &["JobSet"],
        "spec.replicatedJobs.*.template.spec.template",
        &Layout::TEMPLATE,
    ),
    known(
        "leaderworkerset.x-k8s.io",
        &["LeaderWorkerSet"],
        "spec.leaderWorkerTemplate.leaderTemplate",
        &Layout::TEMPLATE,
    ),
    known(
        "leaderworkerset.x-k8s.io",
        &["LeaderWorkerSet"],
        "spec.leaderWorkerTemplate.workerTemplate",
        &Layout::TEMPLATE,
    ),
    known(
        "disaggregatedset.x-k8s.io",
        DISAGGREGATED,
        "spec.roles.*.spec.leaderWorkerTemplate.leaderTemplate",
        &Layout::TEMPLATE,
    ),
    known(
        "disaggregatedset.x-k8s.io",
        DISAGGREGATED,
        "spec.roles.*.spec.leaderWorkerTemplate.workerTemplate",
        &Layout::TEMPLATE,
    ),
    known(
        "batch.volcano.sh",
        &["Job"],
        "spec.tasks.*.template",
        &Layout::TEMPLATE,
    ),
    known(
        "nvidia.com",
        &["DynamoGraphDeployment"],
        "spec.components.*.podTemplate",
        &Layout::TEMPLATE,
    ),
    known(
        "nvidia.com",
        &["DynamoComponentDeployment"],
        "spec.podTemplate",
        &Layout::TEMPLATE,
    ),
    known(
        "serving.knative.dev",
        KNATIVE,
        "spec.template",
        &Layout::KNATIVE,
    ),
    known("argoproj.io", WORKFLOW, "spec.templates.*", &Layout::STEP),
    known(
        "argoproj.io",
        WORKFLOW,
        "spec.templateDefaults",
        &Layout::STEP,
    ),
    known(
        "argoproj.io",
        &["CronWorkflow"],
        "spec.workflowSpec.templates.*",
        &Layout::STEP,
    ),
    known(
        "trainer.kubeflow.org",
        &["TrainJob"],
        "spec.trainer",
        &Layout::TRAINER,
    ),
    known(
        "sparkoperator.k8s.io",
        &["SparkApplication"],
        "spec.executor",
        &Layout::SPARK,
    ),
    known(
        "sparkoperator.k8s.io",
        &["SparkApplication"],
        "spec.driver",
        &Layout::SPARK,
    ),
];

/// Returns what is known of a kind.
pub(super) fn of(version: &str, kind: &str) -> impl Iterator<Item = &'static Known> {
    let group = version.split_once('/').map_or("", |(group, _)| group);
    ALL.iter()
        .filter(move |known| known.group == group && known.kinds.contains(&kind))
}

/// Returns why the pods of a kind cannot have claims.
pub(in super::super) fn claimless(version: &str, kind: &str) -> Option<&'static str> {
    of(version, kind).find_map(|known| known.layout.claimless())
}
