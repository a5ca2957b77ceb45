//! Simulated GPUs: faithful facts, topology and faults on demand; implements GpuDriver.
