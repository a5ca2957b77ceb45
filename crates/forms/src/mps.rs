//! MPS shares of GPUs and partitions.

pub mod device;
