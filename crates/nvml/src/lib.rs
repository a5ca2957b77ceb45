//! GpuDriver over the real NVML library.
