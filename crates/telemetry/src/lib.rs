//! Logs, metrics registry and health endpoints: the shell all binaries share.
