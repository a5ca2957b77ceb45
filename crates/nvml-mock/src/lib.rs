//! A loadable `libnvidia-ml.so.1` over the simulator: NVML's C ABI on a [`divvy_gpu_sim::Engine`]
//! whose state lives in a locked file, so that a plugin killed with `-9` finds its GPUs as it left
//! them.
//!
//! The file is `$DIVVY_MOCK_STATE`, else `<library>.json` beside the library (so that copies of the
//! library, one per test, have states of their own); if it is absent it is made from
//! `$DIVVY_MOCK_GPUS` (`h100x2`). Changes to the file act from the next call on. Tests change it
//! through [`MockState`], scripts through the program `mock-gpus`.
//!
//! The tests of `divvy-nvml`, of the executor and of the kubelet plugin and the end-to-end tests
//! load the library; nothing else uses this crate.

mod abi;
mod asked;
mod bridge;
mod exports;
mod generations;
mod loaded;
mod state;
mod trial;

pub use asked::{BRANCHES, golden_file, without_a_driver};
pub use exports::{ALSO, symbols};
pub use generations::{GENERATIONS, Generation, without_symbols};
pub use loaded::Loaded;
pub use state::{MockState, StateError};
