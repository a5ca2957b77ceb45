//! Errors, in words that make sense in a pod's event.

use std::io::{self, Write};
use std::path::PathBuf;

use rustix::io::Errno;

/// Reason for which a call of the hook failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("{0}; see divvy-cdi-hook --help")]
    Usage(String),
    #[error(
        "cannot read the container's state from stdin; this program is called by container runtimes, from a CDI file"
    )]
    State(#[source] io::Error),
    #[error("the container's state on stdin is not JSON")]
    StateForm(#[source] serde_json::Error),
    #[error("{what} has no {field}")]
    Field {
        what: &'static str,
        field: &'static str,
    },
    #[error("cannot read the container's configuration")]
    Config(#[source] io::Error),
    #[error("{} is not JSON", path.display())]
    ConfigForm {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("cannot open the container's root {}", path.display())]
    Root {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the container's root {} is the host's own", path.display())]
    HostsRoot { path: PathBuf },
    /// No answer in time, since nothing listens.
    #[error(
        "the memory of this share cannot be capped: divvy's node plugin does not answer at {socket} (is its pod running on this node?); the container is started again by the kubelet"
    )]
    LimitsAway {
        socket: String,
        #[source]
        source: io::Error,
    },
    /// No answer in time, although something listens.
    #[error(
        "the memory of this share cannot be capped: divvy's node plugin took too long to answer at {socket}; the container is started again by the kubelet"
    )]
    LimitsSilent {
        socket: String,
        #[source]
        source: io::Error,
    },
    #[error("the memory of this share is not capped: {0}")]
    LimitsRefused(String),
    #[error("failed to cap the memory of this share: {0}")]
    LimitsFailed(String),
    #[error("a volume of the pod is at /etc or at a file of the loader in it")]
    Covered,
    /// Step inside the container's root.
    #[error("cannot {action} {path} in the container{}", hint(source))]
    Inside {
        action: &'static str,
        path: String,
        #[source]
        source: io::Error,
    },
}

impl HookError {
    pub(crate) fn inside(action: &'static str, path: &str, source: impl Into<io::Error>) -> Self {
        Self::Inside {
            action,
            path: path.to_owned(),
            source: source.into(),
        }
    }

    /// Returns the exit status. Some runtimes show it in the pod's event and nothing else of a
    /// hook: each reason that a user can do something about has one of its own, all of them in
    /// `docs/troubleshoot.md`.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::LimitsAway { .. } => 70,
            Self::LimitsRefused(_) => 71,
            Self::LimitsFailed(_) => 72,
            Self::LimitsSilent { .. } => 73,
            Self::Inside { source, .. } => match errno(source) {
                Some(Errno::ROFS) => 74,
                Some(Errno::XDEV | Errno::BUSY) => 75,
                Some(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => 77,
                // The image's own files: links in circles, pipes, files without end.
                Some(Errno::LOOP | Errno::NOENT | Errno::NOTDIR | Errno::ISDIR) | None => 76,
                Some(_) => 1,
            },
            Self::Usage(_)
            | Self::State(_)
            | Self::StateForm(_)
            | Self::Field { .. }
            | Self::Config(_)
            | Self::ConfigForm { .. }
            | Self::Root { .. }
            | Self::Covered
            | Self::HostsRoot { .. } => 1,
        }
    }

    /// Returns `true` if the reason is that a path does not exist.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Inside { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Returns `true` if the reason is that a path leads out of the image's own file system.
    pub(crate) fn is_outside(&self) -> bool {
        matches!(self, Self::Inside { source, .. } if errno(source) == Some(Errno::XDEV))
    }
}

fn errno(source: &io::Error) -> Option<Errno> {
    source.raw_os_error().map(Errno::from_raw_os_error)
}

/// Returns the usual cause of an error and its remedy, in brackets; nothing if there is none.
fn hint(source: &io::Error) -> &'static str {
    match errno(source) {
        Some(Errno::XDEV) => {
            " (a volume is mounted there, or a link of the image leads into a mount; mount the pod's volume elsewhere, repair the image, or set libraryDelivery=mounts in divvy's chart)"
        }
        Some(Errno::ROFS) => {
            " (the image's file system is read-only; set libraryDelivery=mounts in divvy's chart)"
        }
        Some(Errno::BUSY) => " (a file of the pod is mounted there; mount it elsewhere)",
        Some(Errno::LOOP) => {
            " (a link of the image leads in circles or stands where none may; repair the image)"
        }
        Some(Errno::NOSYS) => " (the kernel is older than 5.6)",
        Some(Errno::PERM | Errno::ACCESS) => {
            " (the container runtime's hooks lack rights, or a security module forbids it)"
        }
        _ => "",
    }
}

/// Ends a step that a container can do without for its GPU: a failure is said and keeps nothing
/// from starting. `without` is the consequence.
pub(crate) fn left_out(step: Result<(), HookError>, without: &str) {
    if let Err(error) = step {
        let text = chain(&error);
        // A closed stderr is no reason either.
        let _ = writeln!(io::stderr(), "divvy-cdi-hook: left out: {text}; {without}");
    }
}

/// Joins an error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runtimes that show nothing else, as crun, send people to that page.
    #[test]
    fn each_reason_has_an_exit_status_and_a_row_of_the_page() {
        let page = include_str!("../../docs/troubleshoot.md");
        for (errno, status) in [
            (Errno::NOSPC, 1),
            (Errno::ROFS, 74),
            (Errno::XDEV, 75),
            (Errno::BUSY, 75),
            (Errno::LOOP, 76),
            (Errno::NOENT, 76),
            (Errno::NOTDIR, 76),
            (Errno::ISDIR, 76),
            (Errno::NOSYS, 77),
            (Errno::PERM, 77),
            (Errno::ACCESS, 77),
        ] {
            let error = HookError::inside("write", "/etc/x", errno);
            assert_eq!(error.exit_code(), status, "{error}");
            assert!(page.contains(&format!("\n| {status} | ")), "{status}");
        }
        let not_a_file = io::Error::other("not a regular file");
        assert_eq!(
            HookError::inside("read", "/etc/x", not_a_file).exit_code(),
            76
        );
        assert_eq!(HookError::Usage(String::new()).exit_code(), 1);
        assert!(page.contains("\n| 70, 71, 72, 73 | "));
    }
}
