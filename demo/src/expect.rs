//! Expectations of a manifest for its own pods, in annotations that only the demo reads: that one
//! stays
//! pending, or runs when others have ended.

use anyhow::{Result, bail};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Expected end of the pod: `Running`, `Pending` or `PendingThenRunning`.
pub(crate) const EXPECT: &str = "demo.divvy.dev/expect";
/// A number from 1: the pod ends after that round. Then those that are pending get another turn,
/// which is the next.
pub(crate) const ENDS: &str = "demo.divvy.dev/ends-after";

/// Expected end of a pod, or of a claim on its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Expected {
    /// It gets its devices.
    #[default]
    Running,
    /// It never does.
    Pending,
    /// It may have to wait until the last of the pods that end have ended.
    PendingThenRunning,
}

impl Expected {
    /// Says whether it may be pending: in the last round, or before.
    pub(crate) fn may_wait(self, last: bool) -> bool {
        match self {
            Self::Running => false,
            Self::Pending => true,
            Self::PendingThenRunning => !last,
        }
    }
}

/// Reads the annotations of a pod or claim.
pub(crate) fn read(meta: &ObjectMeta) -> Result<(Expected, Option<u32>)> {
    let value = |name: &str| {
        meta.annotations
            .as_ref()
            .and_then(|all| all.get(name))
            .map(String::as_str)
    };
    let expected = match value(EXPECT) {
        None | Some("Running") => Expected::Running,
        Some("Pending") => Expected::Pending,
        Some("PendingThenRunning") => Expected::PendingThenRunning,
        Some(other) => {
            bail!("annotation {EXPECT}: {other:?} is not Running, Pending or PendingThenRunning")
        }
    };
    let ends = match value(ENDS) {
        None => None,
        Some(text) => match text.parse() {
            Ok(round @ 1..) => Some(round),
            _ => bail!("annotation {ENDS}: {text:?} is not the number of a round, from 1"),
        },
    };
    Ok((expected, ends))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_of(annotations: &[(&str, &str)]) -> Result<(Expected, Option<u32>), String> {
        let annotations = annotations
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        let meta = ObjectMeta {
            annotations: Some(annotations),
            ..ObjectMeta::default()
        };
        read(&meta).map_err(|error| error.to_string())
    }

    #[test]
    fn annotations_are_read_strictly() {
        assert_eq!(read_of(&[]), Ok((Expected::Running, None)));
        assert_eq!(
            read_of(&[(EXPECT, "Pending")]),
            Ok((Expected::Pending, None))
        );
        assert_eq!(
            read_of(&[(EXPECT, "PendingThenRunning"), (ENDS, "2")]),
            Ok((Expected::PendingThenRunning, Some(2)))
        );
        assert_eq!(
            read_of(&[(EXPECT, "pending")]),
            Err(
                "annotation demo.divvy.dev/expect: \"pending\" is not Running, Pending or PendingThenRunning"
                    .to_owned()
            )
        );
        assert!(read_of(&[(ENDS, "0")]).is_err());
    }
}
