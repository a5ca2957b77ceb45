//! Carries out what `divvy-claims` decides: [`Executor::prepare`], [`Executor::unprepare`], and
//! [`Executor::reconcile`], which squares what is on disk, on the GPUs and in the CDI folder with
//! the API server and the kubelet.
//!
//! Synchronous, one thread per claim; no Kubernetes client, no gRPC. Everything it touches is
//! behind a seam of its own ([`Parts`]): the [`Store`] of records and GPU states, the [`Locks`],
//! the [`CdiDir`], the GPUs, the processes on them, the API ([`ClaimsApi`]), the inventory and the
//! [`Clock`]. The kubelet plugin fills the seams and calls in; tests fill them
//! with fakes that crash, lose what was not synced, and answer late.
//!
//! Rooms, from the ground up; calls go down only:
//! - `context` (settings, ports, locks), `state` and `store` (files as values), `records`
//!   (questions about all of them), `locked`, `locks`, `marks`, `owned` (against other drivers of
//!   ours);
//! - `hardware` (what GPUs show, and single changes), `gpus` (their files), `files` (what
//!   containers get), `snapshot` (what a prepare is decided on);
//! - `bring`: the one place where a GPU is changed: what `divvy-claims` says it is to be, what that
//!   takes, and how each change is noted;
//! - `hold` and `release`: a claim gets its devices, or lets them go; `lost`: its files are
//!   withdrawn while a partition of it is gone; `rebuild` where its record was lost;
//! - `prepare` with `handover`, `unprepare`, `restore`, `reconcile`: the calls; `executor` is the
//!   door.

#![expect(
    clippy::result_large_err,
    reason = "refusals are rare and made once; boxes would only hide them"
)]

mod bring;
mod cdi_dir;
mod clock;
mod context;
mod error;
mod executor;
mod files;
mod gpus;
mod handover;
mod hardware;
mod hold;
mod locked;
mod locks;
mod lost;
mod marks;
mod metadata;
mod numbers;
mod owned;
mod ports;
mod prepare;
mod rebuild;
mod reconcile;
mod records;
mod release;
mod report;
mod restore;
mod servers;
mod snapshot;
mod state;
mod store;
mod unprepare;

pub use cdi_dir::{CdiDir, FileCdiDir};
pub use clock::{Call, Cancel, Clock, SystemClock};
pub use divvy_claims::ProcessOnGpu;
pub use divvy_model::chain;
pub use error::{
    CdiError, EditsError, LockError, PrepareCause, PrepareError, StoreError, UnprepareCause,
    UnprepareError,
};
pub use executor::{CappedShare, Executor, ExecutorConfig, HeldDevice, Parts, Timing};
pub use files::Refresh;
pub use gpus::Instances;
pub use hardware::{
    Hardware, ListedServers, MpsServers, NoMps, RunningServer, ServerStart, TimeSliceError,
    TimeSlices,
};
pub use locked::Locked;
pub use locks::{FileLocks, LockGuard, LockName, Locks};
pub use marks::FileMarks;
pub use metadata::{FileMetadataDir, MetadataDir};
pub use numbers::NumberError;
pub use ports::{ClaimsApi, DeviceEdits, DriverProcesses, InventorySource, Lookup, ProcessSource};
pub use reconcile::{ClusterView, RunningDevice};
pub use report::{Event, Report};
pub use store::{Durability, Entry, FileStore, Folder, Stamp, Store};
pub use unprepare::Unprepared;
