//! Answers of the fake server when it refuses.

use serde_json::{Value, json};

/// A refusal, as the API server words it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason} ({code}): {message}")]
pub struct ApiError {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable reason, e.g. `Conflict`.
    pub reason: String,
    /// Message that names object and field.
    pub message: String,
}

impl ApiError {
    pub(crate) fn new(code: u16, message: impl Into<String>) -> Self {
        let reason = match code {
            400 => "BadRequest",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "NotFound",
            405 => "MethodNotAllowed",
            409 => "Conflict",
            410 => "Expired",
            415 => "UnsupportedMediaType",
            422 => "Invalid",
            429 => "TooManyRequests",
            500 => "InternalError",
            503 => "ServiceUnavailable",
            504 => "Timeout",
            _ => "Unknown",
        };
        Self {
            code,
            reason: reason.into(),
            message: message.into(),
        }
    }

    pub(crate) fn exists(what: &str, name: &str) -> Self {
        Self {
            reason: "AlreadyExists".into(),
            ..Self::new(409, format!("{what} \"{name}\" already exists"))
        }
    }

    pub(crate) fn not_found(what: &str, name: &str) -> Self {
        Self::new(404, format!("{what} \"{name}\" not found"))
    }

    /// The `Status` object of the answer.
    pub(crate) fn status(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        })
    }
}

/// Returns the `Status` with which the API server refuses an eviction that a PodDisruptionBudget
/// forbids (`createTooManyRequestsError` in pkg/registry/core/pod/storage/eviction.go).
pub(crate) fn forbidden_by_budget() -> Value {
    let message = "Cannot evict pod as it would violate the pod's disruption budget.";
    let mut status = ApiError::new(429, message).status();
    let cause = "The disruption budget b needs 1 healthy pods and has 1 currently";
    let details = json!({"causes": [{"reason": "DisruptionBudget", "message": cause}]});
    if let Some(fields) = status.as_object_mut() {
        fields.insert("details".to_owned(), details);
    }
    status
}
