//! The cases.

use divvy_offer::{Device, Feature, Slice};

use crate::build::{
    bigger, case, counters, device, driver_version, drops, existing, expected, gpu, indexed, of,
    partition, pool, refused, shared, shared_as_dropped, tainted,
};
use crate::model::{Case, Existing, Expect, Expected, Fate, Name};

const OTHER_POOL: &str = "corpus/old";
const TIME: &str = "2026-01-02T03:04:05Z";

/// All cases.
pub(crate) fn cases() -> Vec<Case> {
    let mut all = one_slice();
    all.extend(several_slices());
    all.extend(dropped_fields());
    all.extend(invalid_pools());
    all.extend(names());
    all.extend(ours());
    all
}

fn one_slice() -> Vec<Case> {
    use Fate::{Created, Kept, Updated};
    let timed = |mut existing: Vec<Existing>| {
        for slice in &mut existing {
            slice.tainted_at = Some(TIME);
        }
        existing
    };
    let two = |a: Device, b: Device| of([a, b]);
    let many = |n: usize| {
        of((0..n)
            .map(|i| device(&format!("gpu-{i}")))
            .collect::<Vec<_>>())
    };
    vec![
        case(
            "create-slice",
            vec![],
            pool([gpu(0)]),
            [expected(1, Created, gpu(0))],
        ),
        case(
            "keep-slice-unchanged",
            indexed(1, [gpu(0)]),
            pool([gpu(0)]),
            [expected(1, Kept, gpu(0))],
        ),
        case(
            "keep-taint-unchanged",
            timed(indexed(1, [of([tainted("gpu-0")])])),
            pool([of([tainted("gpu-0")])]),
            [Expected {
                tainted_at: Some(TIME),
                ..expected(1, Kept, of([tainted("gpu-0")]))
            }],
        ),
        case(
            "add-taints",
            indexed(1, [gpu(0)]),
            pool([of([tainted("gpu-0")])]),
            [expected(1, Updated, of([tainted("gpu-0")]))],
        ),
        case(
            "an-update-keeps-the-time-of-a-taint-that-stays",
            timed(indexed(1, [two(tainted("gpu-0"), device("gpu-1"))])),
            pool([two(tainted("gpu-0"), bigger("gpu-1"))]),
            [Expected {
                tainted_at: Some(TIME),
                ..expected(1, Updated, two(tainted("gpu-0"), bigger("gpu-1")))
            }],
        ),
        case(
            "one-existing-and-one-desired-slice-should-be-updated-inplace",
            indexed(3, [gpu(0)]),
            pool([gpu(1)]),
            [expected(3, Updated, gpu(1))],
        ),
        case(
            "update-slice",
            indexed(1, [two(device("gpu-0"), device("gpu-1"))]),
            pool([two(device("gpu-0"), bigger("gpu-1"))]),
            [expected(1, Updated, two(device("gpu-0"), bigger("gpu-1")))],
        ),
        case(
            "update-slice-many-devices",
            indexed(1, [many(1)]),
            pool([many(128)]),
            [expected(1, Updated, many(128))],
        ),
        case(
            "the-last-device-goes-and-an-empty-slice-stays",
            indexed(1, [gpu(0)]),
            pool([]),
            [expected(1, Updated, Slice::default())],
        ),
        case(
            "an-empty-pool-is-one-empty-slice",
            vec![],
            pool([]),
            [expected(1, Created, Slice::default())],
        ),
        case(
            "an-empty-pool-stays",
            indexed(2, [Slice::default()]),
            pool([]),
            [expected(2, Kept, Slice::default())],
        ),
    ]
}

fn several_slices() -> Vec<Case> {
    use Fate::{Created, Kept, Updated};
    let two = || indexed(1, [gpu(0), gpu(1)]);
    vec![
        case(
            "update-slice-when-more-than-one-existing-or-desired-slice",
            indexed(1, [gpu(0)]),
            pool([gpu(1), gpu(2)]),
            [expected(2, Updated, gpu(1)), expected(2, Created, gpu(2))],
        ),
        case(
            "delete-redundant-slice",
            two(),
            pool([gpu(0)]),
            [expected(2, Updated, gpu(0))],
        ),
        case(
            "multiple-resourceslices-existing-no-changes",
            two(),
            pool([gpu(0), gpu(1)]),
            [expected(1, Kept, gpu(0)), expected(1, Kept, gpu(1))],
        ),
        case(
            "multiple-resourceslices-existing-with-different-resource-pool-generation",
            vec![
                existing(Name::Index(0), 3, 3, gpu(0)),
                existing(Name::Index(1), 2, 3, gpu(1)),
                existing(Name::Index(2), 1, 3, gpu(2)),
            ],
            pool([gpu(0), gpu(1), gpu(2)]),
            [
                expected(4, Updated, gpu(0)),
                expected(4, Updated, gpu(1)),
                expected(4, Updated, gpu(2)),
            ],
        ),
        case(
            "a-roll-that-stopped-before-its-last-slice-is-finished",
            vec![
                existing(Name::Index(0), 2, 2, gpu(0)),
                existing(Name::Index(1), 1, 2, gpu(1)),
            ],
            pool([gpu(0), gpu(1)]),
            [expected(2, Kept, gpu(0)), expected(2, Updated, gpu(1))],
        ),
        case(
            "multiple-resourceslices-existing-one-changed",
            two(),
            pool([gpu(0), of([bigger("gpu-1")])]),
            [
                expected(1, Kept, gpu(0)),
                expected(1, Updated, of([bigger("gpu-1")])),
            ],
        ),
        case(
            "multiple-resourceslices-existing-two-changed",
            indexed(1, [gpu(0), gpu(1), gpu(2)]),
            pool([of([bigger("gpu-0")]), of([bigger("gpu-1")]), gpu(2)]),
            [
                expected(2, Updated, of([bigger("gpu-0")])),
                expected(2, Updated, of([bigger("gpu-1")])),
                expected(2, Updated, gpu(2)),
            ],
        ),
        case(
            "multiple-resourceslices-existing-one-removed",
            indexed(1, [gpu(0), gpu(1), gpu(2)]),
            pool([gpu(0), gpu(1)]),
            [expected(2, Updated, gpu(0)), expected(2, Updated, gpu(1))],
        ),
        case(
            "multiple-resourceslices-existing-one-added",
            two(),
            pool([gpu(0), gpu(1), gpu(2)]),
            [
                expected(2, Updated, gpu(0)),
                expected(2, Updated, gpu(1)),
                expected(2, Created, gpu(2)),
            ],
        ),
        case(
            "create-partitionable-devices",
            vec![],
            pool([
                of([partition("gpu-0", "set-0", "memory-slice-0")]),
                counters("set-0"),
            ]),
            [
                expected(
                    1,
                    Created,
                    of([partition("gpu-0", "set-0", "memory-slice-0")]),
                ),
                expected(1, Created, counters("set-0")),
            ],
        ),
    ]
}

fn dropped_fields() -> Vec<Case> {
    let bare = || of([device("gpu-0")]);
    let mut again = drops(
        "drop-taints-and-a-change-later",
        Feature::Taints,
        vec![],
        vec![],
    );
    // The first pool loses its taint; the second differs from what was sent by a capacity only.
    again.before = Some(pool([of([tainted("gpu-0")])]));
    again.desired = pool([Slice {
        devices: vec![Device {
            taints: tainted("gpu-0").taints,
            ..bigger("gpu-0")
        }],
        ..of([])
    }]);
    again.expect = Expect::Slices(
        vec![expected(1, Fate::Created, of([bigger("gpu-0")]))],
        vec![Feature::Taints],
    );
    vec![
        drops(
            "drop-taints",
            Feature::Taints,
            vec![of([tainted("gpu-0")])],
            vec![bare()],
        ),
        again,
        drops(
            "drop-consumable-capacity-field",
            Feature::Shares,
            vec![of([shared("gpu-0-ts")])],
            vec![of([shared_as_dropped("gpu-0-ts")])],
        ),
        drops(
            "drop-partitionable-devices",
            Feature::Partitions,
            vec![
                of([partition("gpu-0", "set-0", "memory-slice-0")]),
                counters("set-0"),
            ],
            vec![bare(), Slice::default()],
        ),
    ]
}

fn invalid_pools() -> Vec<Case> {
    let partitioned = |set: &str, counter: &str| {
        pool([of([partition("gpu-0", set, counter)]), counters("set-0")])
    };
    vec![
        refused(
            "detect-resource-pools-with-duplicate-counter-sets",
            pool([counters("set-0"), counters("set-0")]),
            "the counter set \"set-0\" is there twice",
        ),
        refused(
            "detect-duplicate-devices",
            pool([gpu(0), gpu(0)]),
            "the device \"gpu-0\" is there twice",
        ),
        refused(
            "detect-device-referencing-unknown-counter-set",
            partitioned("set-9", "memory-slice-0"),
            "the counter set \"set-9\" is not in the pool",
        ),
        refused(
            "detect-device-referencing-unknown-counter-in-counter-set",
            partitioned("set-0", "memory-slice-9"),
            "the counter \"memory-slice-9\" is not in the pool",
        ),
    ]
}

fn names() -> Vec<Case> {
    use Fate::{Created, Updated};
    let random =
        |name, generation, count, slice| existing(Name::Other(name), generation, count, slice);
    vec![
        case(
            "migration-from-random-naming-to-index-based-naming",
            vec![random("x7k2p", 4, 2, gpu(0)), random("b9q4z", 4, 2, gpu(1))],
            pool([gpu(0), gpu(1)]),
            [expected(5, Created, gpu(0)), expected(5, Created, gpu(1))],
        ),
        case(
            "migration-mixed-naming",
            vec![
                existing(Name::Index(0), 4, 2, gpu(0)),
                random("b9q4z", 4, 2, gpu(1)),
            ],
            pool([gpu(0), gpu(1)]),
            [expected(5, Updated, gpu(0)), expected(5, Created, gpu(1))],
        ),
        case(
            "an-old-random-name-of-an-older-generation-is-only-deleted",
            vec![
                existing(Name::Index(0), 4, 1, gpu(0)),
                random("b9q4z", 3, 1, gpu(0)),
            ],
            pool([gpu(0)]),
            [expected(4, Fate::Kept, gpu(0))],
        ),
        case(
            "remove-pool",
            vec![Existing {
                pool: OTHER_POOL,
                ..existing(Name::Index(0), 7, 1, gpu(0))
            }],
            pool([gpu(0)]),
            [expected(1, Created, gpu(0))],
        ),
        case(
            "remove-pool-beside-one-that-stays",
            vec![
                Existing {
                    pool: OTHER_POOL,
                    ..existing(Name::Other("old"), 7, 1, gpu(5))
                },
                existing(Name::Index(0), 2, 1, gpu(0)),
            ],
            pool([gpu(0)]),
            [expected(2, Fate::Kept, gpu(0))],
        ),
    ]
}

/// Cases that upstream does not have: soft changes, missing slices, owners.
fn ours() -> Vec<Case> {
    use Fate::{Created, Kept, Updated};
    let versions =
        |version: &str| [0, 1, 2].map(|n| of([driver_version(&format!("gpu-{n}"), version)]));
    let mut orphan = existing(Name::Index(0), 2, 1, gpu(0));
    orphan.owned = false;
    vec![
        case(
            "taints-and-attributes-of-all-slices-change-and-the-generation-stays",
            indexed(6, versions("580.95.5")),
            pool(versions("595.1.0")),
            versions("595.1.0").map(|slice| expected(6, Updated, slice)),
        ),
        case(
            "one-slice-changes-hard-and-another-softly-and-the-generation-stays",
            indexed(6, [gpu(0), gpu(1)]),
            pool([of([bigger("gpu-0")]), of([tainted("gpu-1")])]),
            [
                expected(6, Updated, of([bigger("gpu-0")])),
                expected(6, Updated, of([tainted("gpu-1")])),
            ],
        ),
        case(
            "a-device-that-moves-to-another-slice-is-a-new-generation",
            indexed(6, [of([device("gpu-0"), device("gpu-1")]), gpu(2)]),
            pool([gpu(0), of([device("gpu-1"), device("gpu-2")])]),
            [
                expected(7, Updated, gpu(0)),
                expected(7, Updated, of([device("gpu-1"), device("gpu-2")])),
            ],
        ),
        case(
            "one-missing-slice-comes-back-with-its-generation",
            vec![existing(Name::Index(0), 6, 2, gpu(0))],
            pool([gpu(0), gpu(1)]),
            [expected(6, Kept, gpu(0)), expected(6, Created, gpu(1))],
        ),
        case(
            "two-missing-slices-are-a-new-generation",
            vec![existing(Name::Index(1), 6, 3, gpu(1))],
            pool([gpu(0), gpu(1), gpu(2)]),
            [
                expected(7, Created, gpu(0)),
                expected(7, Updated, gpu(1)),
                expected(7, Created, gpu(2)),
            ],
        ),
        case(
            "a-slice-without-its-owner-gets-it",
            vec![orphan],
            pool([gpu(0)]),
            [expected(2, Updated, gpu(0))],
        ),
        case(
            "devices-in-another-order-are-a-change",
            indexed(2, [of([device("gpu-1"), device("gpu-0")])]),
            pool([of([device("gpu-0"), device("gpu-1")])]),
            [expected(2, Updated, of([device("gpu-0"), device("gpu-1")]))],
        ),
    ]
}
