//! A real Kubernetes on this machine, the driver, and pods.
//!
//! [`Cluster::up`] starts unmodified Kubernetes programs in namespaces of their own
//! ([`namespaces`]), from binaries that [`parts`] builds once and keeps outside the checkout.
//! [`components`] says how each program is called, [`config`] writes the files they read,
//! [`process`] starts, stops and kills them, [`images`] makes the container images they run (there
//! is no container engine and no registry), [`api`] reads objects, [`logs`] collects what a failed
//! case leaves behind. `cargo xtask cluster` is the same thing for people.
//!
//! Nothing here leaves the machine, and killing the first process of the namespaces ends
//! everything.

pub mod api;
pub mod case;
pub mod cases;
mod cgroups;
pub mod cluster;
pub mod components;
pub mod config;
pub mod device_plugin;
pub mod dra_plugin;
pub mod driver;
pub mod gpus;
pub mod images;
pub mod logs;
pub mod namespaces;
pub mod objects;
pub mod oci;
pub mod options;
pub mod parts;
pub mod process;
pub mod programs;
pub mod prometheus;
pub mod runner;
pub mod soak;
pub mod target;
mod wait;

pub use cluster::Cluster;
pub use components::Component;
pub use options::{Extent, Gates, Options};
pub use wait::{poll, wait_for};
