//! Known NVIDIA boards: names, facts, MIG profiles, and how a server has them. Pure tables, which
//! the simulator makes GPUs of, and by which the command line knows what a board could be.

mod catalogue;
mod mig_tables;
mod profile;

pub use catalogue::{profile, profiles};
pub use mig_tables::{MIG_BOARDS, compute_profiles, mig_capabilities};
pub use profile::{Chassis, Make, NvLinkPort, Profile, cores_per_multiprocessor};
