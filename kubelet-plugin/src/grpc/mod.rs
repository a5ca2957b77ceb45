//! gRPC adapters: the protocol's types go no further than here.

pub(crate) mod health;
