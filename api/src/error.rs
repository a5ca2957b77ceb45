//! Why a config is refused, in words for the person who wrote it.

/// A device config that cannot be used. Each names the field and what to write instead; the caller
/// adds where the config stands (claim or class, and which entry).
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A field that must be there is not.
    #[error("{} is missing ({hint})", field(path))]
    Missing {
        /// Path of the field.
        path: String,
        /// The remedy.
        hint: String,
    },
    /// A value of another type than the field has.
    #[error("{} is {found}, expected {expected}", field(path))]
    WrongType {
        /// Path of the field; empty for the config itself.
        path: String,
        /// The kind of value that the field takes.
        expected: &'static str,
        /// The text as written.
        found: &'static str,
    },
    /// An `apiVersion` that is not ours.
    #[error(
        "apiVersion {found:?} is not one this driver reads (expected {}){}",
        known.iter().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(" or "),
        version_hint(found, known)
    )]
    ApiVersion {
        /// The text as written.
        found: String,
        /// The versions that are read.
        known: &'static [&'static str],
    },
    /// A `kind` that we don't have.
    #[error("kind {found:?} is not one this driver reads (expected {}){}", known.join(" or "), nearest(near.as_deref()))]
    Kind {
        /// The text as written.
        found: String,
        /// The names that there are.
        known: Vec<&'static str>,
        /// A kind with nearly the same name.
        near: Option<String>,
    },
    /// A field that the kind does not have.
    #[error("unknown {} ({}{kind} has {})", field(path), near.as_ref().map(|n| format!("did you mean {n:?}? ")).unwrap_or_default(), list(known))]
    UnknownField {
        /// Path of the field.
        path: String,
        /// The kind it was written in.
        kind: &'static str,
        /// The fields that there are at this place.
        known: Vec<&'static str>,
        /// A field with nearly the same name.
        near: Option<String>,
    },
    /// A text that is not one of those the field takes.
    #[error("{} is {found:?}, expected {}{}", field(path), known.join(" or "), nearest(near.as_deref()))]
    Value {
        /// Path of the field.
        path: String,
        /// The text as written.
        found: String,
        /// The names that there are.
        known: Vec<&'static str>,
        /// A name that is nearly the same.
        near: Option<String>,
    },
    /// A kind of NVIDIA's drivers that divvy does not serve in their place.
    #[error("kind {kind:?} is not served: {why}")]
    NotServed {
        /// The kind.
        kind: &'static str,
        /// The reason, and the remedy.
        why: &'static str,
    },
    /// A field of a config of NVIDIA's driver that cannot be kept in its place.
    #[error("{} cannot be kept: {why}", field(path))]
    NotKept {
        /// Path of the field.
        path: String,
        /// The reason, and the remedy.
        why: &'static str,
    },
    /// A setting of a GPU that its shares have in common.
    #[error(
        "{} cannot be set by a claim that shares its GPU: an administrator sets shares.timeSlice in a GpuPolicy, and a claim \
         selects shares by their attribute timeSlice",
        field(path)
    )]
    OfThePolicy {
        /// Path of the field.
        path: String,
    },
    /// A setting that only whole GPUs have.
    #[error(
        "{} is for a claim that has its GPU or partition alone (GpuConfig, MigConfig); a class for MPS \
         shares of a GPU is mps.divvy.dev",
        field(path)
    )]
    NotOfShares {
        /// Path of the field.
        path: String,
    },
    /// Two fields that exclude each other.
    #[error(
        "{} and {} exclude each other (leave out the one that is not meant)",
        field(path),
        field(other)
    )]
    NotTogether {
        /// Path of the field.
        path: String,
        /// Path of the other field.
        other: String,
    },
}

impl ConfigError {
    /// A short stable name, for metrics and conditions.
    pub fn category(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "missing-field",
            Self::WrongType { .. } => "wrong-type",
            Self::ApiVersion { .. } => "api-version",
            Self::Kind { .. } => "kind",
            Self::UnknownField { .. } => "unknown-field",
            Self::Value { .. } => "value",
            Self::NotServed { .. } => "not-served",
            Self::NotKept { .. } => "not-kept",
            Self::OfThePolicy { .. } => "of-the-policy",
            Self::NotOfShares { .. } => "not-of-shares",
            Self::NotTogether { .. } => "not-together",
        }
    }
}

fn field(path: &str) -> String {
    if path.is_empty() {
        "config".to_owned()
    } else {
        format!("field {path:?}")
    }
}

fn list(known: &[&str]) -> String {
    known
        .iter()
        .map(|k| format!("{k:?}"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn nearest(near: Option<&str>) -> String {
    near.map(|n| format!("; did you mean {n:?}?"))
        .unwrap_or_default()
}

fn version_hint(found: &str, known: &[&str]) -> &'static str {
    let is_theirs =
        found.starts_with("resource.nvidia.com/") || found.starts_with("gpu.nvidia.com/");
    if is_theirs && !known.contains(&crate::names::NVIDIA_API_VERSION) {
        "; this is a config of NVIDIA's driver, with other fields (`divvy convert` rewrites it)"
    } else {
        ""
    }
}
