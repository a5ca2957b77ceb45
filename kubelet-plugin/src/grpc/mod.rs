//! gRPC adapters: the protocol's types go no further than here.

pub(crate) mod dra;
pub(crate) mod health;
pub(crate) mod pod_resources;
pub(crate) mod registration;
pub(crate) mod serve;
