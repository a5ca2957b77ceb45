//! [`divvy_model::GpuDriver`] over the real NVML library, and what sits above any such driver:
//! [`Session`], which gives each call a thread and a deadline and reopens NVML when it must,
//! [`wait_for_driver`] and [`read_inventory`].
//!
//! The node plugin and `divvy inventory` open an [`NvmlDriver`] inside a [`Session`]; tests and the
//! demo put a simulated node there. All `unsafe` of the product is in the module `ffi`.

mod driver;
mod facts;
mod ffi;
mod gpm;
mod health;
mod inventory;
mod kept;
mod mig;
mod session;
mod wait;
mod workers;

#[cfg(test)]
mod driver_tests;
#[cfg(test)]
mod health_tests;
#[cfg(test)]
mod limits_tests;
#[cfg(test)]
mod matrix_tests;
#[cfg(test)]
mod mig_tests;
#[cfg(test)]
mod missing_tests;
#[cfg(test)]
mod odd_tests;
#[cfg(test)]
mod session_tests;
#[cfg(test)]
mod test_library;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod usage_tests;

pub use driver::{DEFAULT_LIBRARY, NvmlDriver};
pub use inventory::{read_inventory, read_inventory_after};
pub use session::{Hanging, Session, SessionConfig};
pub use wait::wait_for_driver;
