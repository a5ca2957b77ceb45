//! [`KubeVersion`]: the version of an API server.

use std::fmt;

use serde::Serialize;

/// A version of Kubernetes. A pre-release counts as the release before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct KubeVersion {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl KubeVersion {
    /// A version by its numbers.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// From `gitVersion` of `/version`: `v1.37.1`, `v1.36.4-eks-1a2b3c`, `v1.36.2-rc.1`. `None` for
    /// anything else.
    pub fn parse(git_version: &str) -> Option<Self> {
        let text = git_version.strip_prefix('v')?;
        let end = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (numbers, rest) = text.split_at_checked(end)?;
        let mut parts = numbers.split('.').map(str::parse);
        let mut next = || parts.next()?.ok();
        let (major, minor, patch) = (next()?, next()?, next()?);
        // A pre-release lacks what its release has, so it counts as the release before.
        // Other suffixes are of vendors (`-eks-…`, `+k3s1`) and mean the release itself.
        let pre = ["-alpha", "-beta", "-rc"]
            .iter()
            .any(|tag| rest.starts_with(tag));
        Some(match (pre, patch) {
            (false, _) => Self {
                major,
                minor,
                patch,
            },
            (true, 1..) => Self {
                major,
                minor,
                patch: patch - 1,
            },
            (true, 0) => Self {
                major,
                minor: minor.saturating_sub(1),
                patch: u32::MAX,
            },
        })
    }
}

impl fmt::Display for KubeVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Read from a pre-release of the next.
            Self {
                major,
                minor,
                patch: u32::MAX,
            } => write!(f, "{major}.{}.0-pre", minor.saturating_add(1)),
            Self {
                major,
                minor,
                patch,
            } => write!(f, "{major}.{minor}.{patch}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: fn(u32, u32, u32) -> KubeVersion = KubeVersion::new;

    #[test]
    fn versions_are_read_and_a_pre_release_counts_as_the_release_before() {
        assert_eq!(KubeVersion::parse("v1.37.1"), Some(V(1, 37, 1)));
        assert_eq!(KubeVersion::parse("v1.36.4-eks-1a2b3c"), Some(V(1, 36, 4)));
        assert_eq!(KubeVersion::parse("v1.36.2+k3s1"), Some(V(1, 36, 2)));
        assert_eq!(KubeVersion::parse("v1.36.2-rc.1"), Some(V(1, 36, 1)));
        assert!(
            KubeVersion::parse("v1.36.0-beta.0")
                .is_some_and(|v| v > V(1, 35, 9) && v < V(1, 36, 0))
        );
        for (git_version, shown) in [("v1.37.1", "1.37.1"), ("v1.37.0-rc.1", "1.37.0-pre")] {
            assert_eq!(KubeVersion::parse(git_version).unwrap().to_string(), shown);
        }
        for bad in ["", "1.37.1", "v1.37", "v1..1", "va.b.c", "v1.99999999999.1"] {
            assert_eq!(KubeVersion::parse(bad), None, "{bad}");
        }
    }
}
