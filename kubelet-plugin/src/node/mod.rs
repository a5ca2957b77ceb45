//! One task that knows the node and decides what it offers: facts in over one channel, outputs out over one watch each.
//! The decision itself is pure ([`divvy_offer::step`]); nothing is awaited between a fact and its outputs.

mod brain;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_claims::{Fence, Head};
use divvy_executor::HeldDevice;
use divvy_model::health::HealthChange;
use divvy_model::mig::Placement;
use divvy_model::{ClaimUid, GpuUuid, Ordinals};
use divvy_offer::{Answer, Feature, HealthView, KubeVersion, ModeConflict};
use tokio::sync::mpsc;

use crate::neighbours::Uses;
use crate::sources::health;
use crate::sources::inventory::GpusSeen;
use crate::sources::policies::KnownPolicies;

pub(crate) use brain::{Brain, Followed, Offer, Outlets};
pub(crate) use world::{Holdings, State};

/// What a source has observed.
#[derive(Debug)]
pub(crate) enum Fact {
    /// The GPUs were read, or could not be.
    Gpus(GpusSeen),
    /// How the GPUs are.
    Health(Health),
    /// Policies or the node's labels have changed.
    Policies(Arc<KnownPolicies>),
    /// Which GPUs others use.
    Neighbours(Uses),
    /// What the records say.
    Records(Recorded),
    /// The API server answered: its version, and what it lost in a dry run, if one was made.
    Server { version: KubeVersion, dropped: Option<BTreeSet<Feature>> },
    /// Fields of these features were sent and did not come back.
    Dropped(BTreeSet<Feature>),
    /// The answer to what was asked; `None` if there was none.
    Answer(Option<Answer>),
    /// A prepare was refused because the GPU is in use in another mode.
    Conflict(ModeConflict),
}

/// Where sources send what they observe.
pub(crate) type Facts = mpsc::UnboundedSender<Fact>;

/// How the GPUs are.
#[derive(Debug)]
pub(crate) struct Health {
    /// What is wrong now.
    pub(crate) view: Arc<HealthView>,
    /// All of it, for metrics and the debug page.
    pub(crate) book: Arc<health::HealthState>,
    /// What has become so or is over, and where on the GPU.
    pub(crate) changes: Vec<(HealthChange, Option<Placement>)>,
}

/// What the numbers, records and GPU states of the node say.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorded {
    /// The numbers in device names.
    pub(crate) ordinals: Ordinals,
    /// By claim.
    pub(crate) held: Vec<HeldDevice>,
    /// Claims that were released, still hold something, and are not being worked on.
    pub(crate) lingering: BTreeSet<ClaimUid>,
    /// GPUs about whose state something is not certain.
    pub(crate) fences: BTreeMap<GpuUuid, Vec<Fence>>,
    /// Records of a later version.
    pub(crate) newer: BTreeMap<ClaimUid, Head>,
    /// MIG instances that no record accounts for.
    pub(crate) foreign: Vec<(GpuUuid, Placement)>,
}
