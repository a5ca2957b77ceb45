//! Keeps the MPS daemons of a node: starts them with `nvidia-cuda-mps-control`, finds its own again
//! after a restart, and ends them with all that they have started. The node plugin decides
//! what is to run, and asks over a Unix socket; nothing is kept here but the daemons, and beside
//! each a note that says which process it is.
//!
//! [`plan`] is pure and says what follows from what was found; [`Supervisor`] does it, by way of
//! [`control`] (the program) and [`process`] (`/proc`). Protocol v2 has a server with one size for
//! all (ADR 18), v3 one with a namespace for each claim (ADR 21).

mod cgroup;
pub mod control;
mod holder;
mod memory;
pub mod note;
pub mod plan;
pub mod process;
mod serve;
mod shared;
pub mod socket;
mod supervisor;

pub use memory::Size;
pub use serve::serve;
pub use supervisor::{Settings, State, Supervisor, SupervisorError, Unwell};
