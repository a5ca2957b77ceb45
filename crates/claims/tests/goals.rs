//! Goals and differences over a model of the hardware: random stories of claims that come and go on
//! one GPU, of calls that fail, lie and land late, of crashes between any two writes, reboots,
//! reloads and administrators. Whatever happens, the GPU ends at its goal, what others have stays
//! as it is, nothing is leaked and nothing is given back too early.
//!
//! The executor's `bring` is modelled here by the same pure transitions ([`GpuState`]); its own
//! stories run the real one.
//! `DIVVY_GOAL_STORIES=1000000 cargo test --release -p divvy-claims --test goals` runs a million of
//! them; the first seed is `DIVVY_GOAL_SEED`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::maybe_infinite_iter,
    reason = "a model for tests; a failure is a panic"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_claims::{
    AllocatedDevice, Allocation, Caller, Claim, Leaving, MpsSlot, Phase, Record, RecordedDevice,
    Stored, TimeSlice, holds_on, uses_of,
};
use divvy_gpu::{
    Ask, Change, Goal, GpuSeen, GpuState, Granted, Instance, Life, Living, Moment, MpsSeen,
    Observed, Scope, Setting, Unwell, Want, diff, needs,
};
use divvy_model::mig::{
    ComputeInstance, ComputeInstanceId, ComputeInstanceProfileId, GpuInstance, GpuInstanceId,
    GpuInstanceProfileId, Placement,
};
use divvy_model::{
    BootId, ClaimUid, ComputeMode, GpuError, GpuErrorCode, GpuOp, GpuUuid, MigMode, MpsFault,
    MpsNamespace, MpsNamespaceName, MpsServer, Place, Sharing, Target,
};

#[path = "goals/story.rs"]
mod story;

use story::Story;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn any_story_ends_at_the_goal_with_nothing_leaked_and_nothing_taken() {
    let (first, stories) = (
        number("DIVVY_GOAL_SEED", 1),
        number("DIVVY_GOAL_STORIES", 2_000),
    );
    let mut changes = 0;
    for seed in first..first + stories {
        let mut story = Story::new(seed);
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| story.run()));
        assert!(ended.is_ok(), "story {seed}:\n{}", story.log.join("\n"));
        changes += story.changes;
    }
    assert!(changes > stories, "{changes} changes in {stories} stories");
}

/// Every kind of change comes up, so that the stories say something about each.
#[test]
fn the_stories_make_every_kind_of_change() {
    let mut kinds = BTreeSet::new();
    for seed in 1..400 {
        let mut story = Story::new(seed);
        story.run();
        kinds.extend(story.kinds);
    }
    let all = [
        "compute",
        "create",
        "end",
        "forget",
        "mig",
        "odd",
        "put",
        "remove",
        "restart",
        "slice",
        "start",
        "start in a partition",
        "stop",
    ];
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), all);
}
