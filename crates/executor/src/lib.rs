//! Carries out what `divvy-claims` decides: [`Executor::prepare`], [`Executor::unprepare`], and [`Executor::reconcile`],
//! which squares what is on disk, on the GPUs and in the CDI folder with the API server and the kubelet.
//!
//! Synchronous, one thread per claim; no Kubernetes client, no gRPC. Everything it touches is behind a seam of its own
//! ([`Parts`]): the [`Store`] of records and GPU states, the [`Locks`], the [`CdiDir`], hardware [`Steps`], the
//! processes on a GPU, the API ([`ClaimsApi`]), the inventory and the [`Clock`]. The kubelet plugin fills the seams and
//! calls in; tests fill them with fakes that crash, lose what was not synced, and answer late.
//!
//! How a prepare reads: `prepare.rs` takes the locks and a snapshot and calls `decide`; `run.rs` carries a plan out,
//! `unwind.rs` takes it back; `unprepare.rs` lets a claim go and finishes those that linger; `reconcile.rs` does the rest
//! of a claim's life, `rebuild.rs` where its record was lost. `state.rs` turns typed values into files of the [`Store`].

#![expect(clippy::result_large_err, reason = "refusals are rare and made once; boxes would only hide them")]

mod cdi_dir;
mod clock;
mod compute_mode;
mod document;
mod error;
mod executor;
mod gpus;
mod locks;
mod marks;
mod metadata;
mod mig;
mod numbers;
mod owned;
mod partitions;
mod ports;
mod prepare;
mod rebuild;
mod reconcile;
mod report;
mod restore;
mod run;
mod state;
mod store;
mod time_slices;
mod unprepare;
mod unwind;
mod waiting;

pub use cdi_dir::{CdiDir, FileCdiDir};
pub use clock::{Call, Cancel, Clock, SystemClock};
pub use divvy_claims::ProcessOnGpu;
pub use error::{
    CdiError, EditsError, LockError, PrepareCause, PrepareError, StoreError, UnprepareCause, UnprepareError,
    chain,
};
pub use executor::{Executor, ExecutorConfig, HeldDevice, Parts, Timing};
pub use locks::{FileLocks, LockGuard, LockName, Locks};
pub use marks::FileMarks;
pub use metadata::{FileMetadataDir, MetadataDir};
pub use mig::MigSteps;
pub use numbers::NumberError;
pub use partitions::Instances;
pub use ports::{ClaimsApi, DeviceEdits, DriverProcesses, InventorySource, Lookup, ProcessSource, Steps};
pub use reconcile::{ClusterView, RunningDevice};
pub use report::{Event, Report};
pub use restore::Refresh;
pub use store::{Durability, Entry, FileStore, Folder, Stamp, Store};
pub use time_slices::{TimeSliceError, TimeSlices};
pub use unprepare::Unprepared;
