//! Errors, in words that make sense in a pod's event.

use std::io;
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
