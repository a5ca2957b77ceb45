//! The whole GPU, for one claim.

pub mod device;
