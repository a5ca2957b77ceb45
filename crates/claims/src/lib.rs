//! What a claim gets, decided without touching anything.
//!
//! A [`Claim`] (values taken from the API object) and a [`Snapshot`] (inventory, ordinals, records, GPU states) go
//! into [`decide`]; out comes a [`Decision`]: the answer is ready, a [`Plan`] is to be run, a holder is to be waited
//! for, or the claim is refused with a [`Refusal`]. The module `record` holds what is kept on disk about a claim,
//! `gpu_state` what is kept about a GPU, and `stored` how both are written: versioned, with a checksum over the
//! stored bytes.
//!
//! Pure: no clock, files, async or Kubernetes client. `divvy-executor` takes the snapshot, calls [`decide`] and
//! carries plans out; the kubelet plugin turns API objects into [`Claim`]s.

#![expect(clippy::result_large_err, reason = "refusals are rare and made once; boxes would only hide them")]

mod claim;
mod config;
mod decide;
mod gpu_state;
mod granted;
mod metadata;
mod numbers;
mod plan;
mod rebuild;
mod record;
mod refusal;
mod step;
mod stored;

pub use claim::{
    AllocatedDevice, Allocation, Claim, ClaimRef, ConfigEntry, ConfigSource, OtherClaim, PodRef, base_request,
};
pub use divvy_model::TimeSlice;

pub use config::resolve;
pub use decide::{Clash, Decision, Holder, Holders, Living, ProcessOnGpu, Snapshot, decide, resolve_devices};
pub use gpu_state::{Fence, FoundComputeMode, GpuState, OwnedInstance, Setting, wanted_time_slice};
pub use granted::share_env;
pub use metadata::{Attributes, Metadata, MetadataFile, is_label, metadata_files};
pub use numbers::{decode_ordinals, encode_ordinals};
pub use plan::{Plan, Prepared, PreparedDevice, cdi_device_name, cdi_file_name, cdi_kind, claim_of_cdi_file};
pub use rebuild::{accounts_for, rebuild};
pub use record::{Leaving, MadePartition, Phase, Record, RecordedDevice, StepState};
pub use refusal::{EntryAt, Refusal, Retry, Why};
pub use step::{Cause, Observed, Outcome, Progress, Step, StepError};
pub use stored::{Head, Stored};
