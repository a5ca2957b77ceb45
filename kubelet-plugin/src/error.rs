//! Why the plugin cannot start, or stopped by itself.

use std::io;

/// Why the plugin could not start, or stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The boot id cannot be read.
    #[error("failed to read the node's boot ID (check --host-root)")]
    Boot(#[source] divvy_host::HostFileError),
    /// The boot id is none.
    #[error("the node's boot ID is invalid (check --host-root)")]
    BadBoot(#[source] divvy_model::IdError),
    /// A folder or socket cannot be used.
    #[error("{what} cannot be used")]
    Io {
        /// Which, and the flag that names it.
        what: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The table of device nodes cannot be used.
    #[error("the table of --device-nodes cannot be used")]
    DeviceNodes(#[source] divvy_host::NodeError),
    /// There is no hook program.
    #[error(
        "there is no CDI hook program: --hook-path is not given, and divvy-cdi-hook is not beside this program; with \
         --library-delivery mounts (chart value libraryDelivery) none is needed, and images lose their own LD_LIBRARY_PATH"
    )]
    NoHook,
    /// The hook program cannot be installed.
    #[error("the CDI hook cannot be installed")]
    Hook(#[source] divvy_host::InstallError),
    /// A part of the plugin that should run for ever ended.
    #[error("{0} ended unexpectedly (a bug in divvy); the plugin exits and is restarted")]
    Ended(&'static str),
    /// A socket's server failed.
    #[error("the server of the {0} socket failed")]
    Server(&'static str, #[source] tonic::transport::Error),
}

pub(crate) fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> RunError {
    let what = what.into();
    move |source| RunError::Io { what, source }
}
