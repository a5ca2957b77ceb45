//! MIG partitions, each for one claim.

pub mod device;
