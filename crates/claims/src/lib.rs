//! Decisions about claims and GPUs, made without touching anything.
//!
//! A [`Claim`] (values taken from the API object) and a [`Snapshot`] (inventory, ordinals, records,
//! GPU states, hardware) go into [`decide`]; out comes a [`Decision`]: the answer is ready, the
//! claim is to hold devices, a holder is to be waited for, or the claim is refused with a
//! [`Refusal`]. [`holds_on`] lists the uses of a GPU by claims, of which `divvy_gpu` works out what
//! the GPU is to be. The module `record` holds what is kept on disk about a claim, `gpu_file` how a
//! GPU's state is written, and `stored` the form of both: versioned, with a checksum over the
//! stored bytes.
//!
//! Pure: no clock, files, async or Kubernetes client. `divvy-executor` takes the snapshot, calls
//! [`decide`] and makes the changes; the kubelet plugin turns API objects into [`Claim`]s.

#![expect(
    clippy::result_large_err,
    reason = "refusals are rare and made once; boxes would only hide them"
)]

mod answer;
mod claim;
mod config;
mod decide;
mod gpu_file;
mod granted;
mod holds;
mod metadata;
mod numbers;
mod promise;
mod rebuild;
mod record;
mod refusal;
mod stored;

pub use answer::{
    Prepared, PreparedDevice, cdi_device_name, cdi_file_name, cdi_kind, claim_of_cdi_file,
};
pub use claim::{
    AllocatedDevice, Allocation, Claim, ClaimRef, ConfigEntry, ConfigSource, OtherClaim, PodRef,
    Times, base_request,
};
pub use divvy_gpu::{
    Cause, ChangeError, Fence, Filling, GpuSeen, GpuState, Granted, Instance, Life, Living, Made,
    MpsNote, Retry, Unwell,
};
pub use divvy_model::TimeSlice;

pub use config::{resolve, resolve_entry};
pub use decide::{
    Clash, Decision, Holder, Holders, ProcessOnGpu, Snapshot, decide, fit_after_boot,
    resolve_devices,
};
pub use gpu_file::{decode_gpu_state, encode_gpu_state};
pub use granted::{ShareAmounts, share_env};
pub use holds::{Caller, holds_on, uses_of};
pub use metadata::{Attributes, Metadata, MetadataFile, is_label, metadata_files};
pub use numbers::{decode_ordinals, encode_ordinals};
pub use promise::{decode_promise, encode_promise};
pub use rebuild::{MadeFor, rebuild};
pub use record::{Leaving, MpsSlot, Phase, Record, RecordedDevice};
pub use refusal::{EntryAt, Refusal, Why};
pub use stored::{Head, Stored};
