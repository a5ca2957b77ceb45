//! Decisions about claims and GPUs, made without touching anything.
//!
//! A [`Claim`] (values taken from the API object) and a [`Snapshot`] (inventory, ordinals, records,
//! GPU states, hardware) go into [`decide`]; out comes a [`Decision`]: the answer is ready, the
//! claim is to hold devices, a holder is to be waited for, or the claim is refused with a
//! [`Refusal`]. [`Holds`] on a GPU and its permissions give its [`goal`]; [`diff`] lists the
//! [`Change`]s that bring it there. The module `record` holds what is kept on disk about a claim,
//! `gpu_state` what is kept about a GPU, and `stored` how both are written: versioned, with a
//! checksum over the stored bytes.
//!
//! Pure: no clock, files, async or Kubernetes client. `divvy-executor` takes the snapshot, calls
//! [`decide`] and makes the changes; the kubelet plugin turns API objects into [`Claim`]s.

#![expect(
    clippy::result_large_err,
    reason = "refusals are rare and made once; boxes would only hide them"
)]

mod answer;
mod change;
mod claim;
mod config;
mod decide;
mod diff;
mod goal;
mod gpu_state;
mod granted;
mod holds;
mod metadata;
mod numbers;
mod rebuild;
mod record;
mod refusal;
mod seen;
mod stored;

pub use answer::{
    Prepared, PreparedDevice, cdi_device_name, cdi_file_name, cdi_kind, claim_of_cdi_file,
};
pub use change::{Cause, Change, ChangeError, Made, Observed, Stuck};
pub use claim::{
    AllocatedDevice, Allocation, Claim, ClaimRef, ConfigEntry, ConfigSource, OtherClaim, PodRef,
    Times, base_request,
};
pub use divvy_model::TimeSlice;

pub use config::{resolve, resolve_entry};
pub use decide::{
    Clash, Decision, Holder, Holders, ProcessOnGpu, Snapshot, decide, fit_after_boot, may_set_mig,
    resolve_devices,
};
pub use diff::diff;
pub use goal::{GpuGoal, Need, Want, goal};
pub use gpu_state::{Changed, Fence, GpuState, Granted, Instance, Life, Moment, MpsNote, Setting};
pub use granted::{ShareAmounts, share_env};
pub use holds::{Ends, Holds, Own};
pub use metadata::{Attributes, Metadata, MetadataFile, is_label, metadata_files};
pub use numbers::{decode_ordinals, encode_ordinals};
pub use rebuild::{MadeFor, rebuild};
pub use record::{Leaving, MpsSlot, Phase, Record, RecordedDevice};
pub use refusal::{EntryAt, Refusal, Retry, Why};
pub use seen::{Filling, GpuSeen, Living, MpsSeen, Unwell};
pub use stored::{Head, Stored};
