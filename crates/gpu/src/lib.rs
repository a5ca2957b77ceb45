//! A GPU as a row of parts, without touching anything: what each part is to be, and what has to be
//! changed for it.
//!
//! A part is a file: its note on disk, its reading, its want, its changes, its words and its tests.
//! [`Goal`], [`GpuSeen`] and [`GpuState`] are products of the parts. [`Holds`] are the uses of a
//! GPU and the call that is made; [`diff`] lists the [`Change`]s of all parts in the order of the
//! table in `order`, as far as [`Scope`] permits them: nothing that another claim holds is ever
//! removed, stopped or set otherwise, whatever was seen.
//!
//! Pure: no clock, files, async or Kubernetes client.

mod change;
mod compute_mode;
mod diff;
mod goal;
mod granted;
mod holds;
mod instances;
mod mig_mode;
mod namespaces;
mod order;
mod scope;
mod seen;
mod servers;
mod setting;
mod state;
mod time_slice;

pub use change::{Cause, Change, ChangeError, Retry, Stuck};
pub use diff::diff;
pub use goal::Goal;
pub use granted::Granted;
pub use holds::{Holds, Since, Standing, Use, Whose};
pub use instances::{Fence, Filling, Instance, Life, Living, Made, Observed};
pub use order::needs;
pub use scope::Scope;
pub use seen::{Ask, AskedMode, GpuSeen};
pub use servers::{MpsNote, MpsSeen, Unwell};
pub use setting::{Changed, Moment, Want};
pub use state::{GpuState, Setting};
