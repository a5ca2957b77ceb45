//! The eviction of a pod by the Eviction API, which respects PodDisruptionBudgets.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    DeleteOptions, ObjectMeta, Preconditions, Status,
};
use kube::Api;
use kube::api::PostParams;

const TOO_MANY_REQUESTS: u16 = 429;
/// Cause of a refusal by a PodDisruptionBudget (`DisruptionBudgetCause` in k8s.io/api/policy/v1).
/// An API server that has too much to do answers with the same status code, without it.
const DISRUPTION_BUDGET: &str = "DisruptionBudget";

/// Returns the words of the PodDisruptionBudget that forbids an eviction, where one does.
pub fn budget(status: &kube::core::Status) -> Option<&str> {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    let cause = causes.find(|cause| cause.reason == DISRUPTION_BUDGET)?;
    (status.code == TOO_MANY_REQUESTS).then_some(cause.message.as_str())
}

/// Evicts the pod with this UID, and no other one of its name.
///
/// `Api::evict` of kube 5.0 sends its options in a field that the API server does not know, and
/// drops without a word.
pub async fn evict(pods: &Api<Pod>, name: &str, uid: &str) -> Result<(), kube::Error> {
    let must = Preconditions {
        uid: Some(uid.to_owned()),
        resource_version: None,
    };
    let eviction = Eviction {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        delete_options: Some(DeleteOptions {
            preconditions: Some(must),
            ..DeleteOptions::default()
        }),
    };
    let to = PostParams::default();
    pods.create_subresource::<_, Status>("eviction", name, &to, &eviction)
        .await?;
    Ok(())
}
