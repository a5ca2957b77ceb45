//! Time-sliced shares of GPUs and partitions.

pub mod device;
