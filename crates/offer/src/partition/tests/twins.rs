//! Time-sliced shares of partitions, beside the partitions.

use divvy_api::names::capacity as cap;
use divvy_model::ShareUnit;

use super::*;

const TWINS: [Alternative; 2] = [Alternative::PARTITIONS, Alternative::SHARED_PARTITIONS];
const PLAIN: &str = "gpu-0-mig-3g40gb-9-4";
const TWIN: &str = "gpu-0-mig-3g40gb-9-4-ts";

fn twins(spec: &str) -> Node {
    Node::only(spec, &TWINS).mig_on()
}

#[test]
fn the_shares_of_a_partition_are_it_for_many_claims() {
    let mut node = twins("h100x1");
    node.rule(|rules| rules.shares.slots = 4);
    let pool = node.carve(None).pool;
    let (plain, twin) = (device(&pool, PLAIN), device(&pool, TWIN));
    let mut expected = plain.attributes.clone();
    for (name, value) in [
        ("type", "mig-share"),
        ("sharing", "time-slicing"),
        ("isolation", "none"),
        ("memoryEnforcement", "none"),
        ("computeEnforcement", "none"),
        ("faultDomain", "partition"),
    ] {
        expected.insert(name.into(), AttributeValue::String(value.to_owned()));
    }
    expected.insert("memoryLimitMaxPercent".into(), AttributeValue::Int(0));
    assert_eq!(twin.attributes, expected);
    assert!(twin.allow_multiple && !plain.allow_multiple);
    // Both draw the same, so that only one of them is had.
    assert!(!plain.consumes.is_empty());
    assert_eq!(twin.consumes, plain.consumes);
    let totals: Vec<_> = twin
        .capacity
        .iter()
        .map(|(name, capacity)| (name.as_ref(), capacity.value))
        .collect();
    let memory = plain.capacity[cap::MEMORY].value;
    assert_eq!(
        totals,
        [
            (cap::CORES, Amount::Count(100)),
            (cap::MEMORY, memory),
            (cap::SLOTS, Amount::Count(4))
        ]
    );
    assert!(twin.capacity.values().all(|part| part.policy.is_some()));
}

#[test]
fn by_percent_the_memory_is_that_of_the_partition() {
    let mut node = twins("h100x1");
    // Memory that is reserved on the GPU is not taken from each of its partitions.
    node.rule(|rules| {
        rules.shares.unit = ShareUnit::Percent;
        rules.held_back_mib = 79_000;
    });
    let pool = node.carve(None).pool;
    let (plain, twin) = (device(&pool, PLAIN), device(&pool, TWIN));
    let mib = i64::try_from(plain.capacity[cap::MEMORY].value.value() >> 20).unwrap();
    assert_eq!(twin.attributes["memoryMiB"], AttributeValue::Int(mib));
    let given: Vec<_> = twin.capacity.keys().map(AsRef::as_ref).collect();
    assert_eq!(given, [cap::PERCENT]);
}

#[test]
fn eight_gpus_with_shares_of_all_partitions_fit_the_api() {
    let mut modes = Alternative::OFFERED.to_vec();
    modes.push(Alternative::SHARED_PARTITIONS);
    let pool = Node::only("h100x8", &modes).carve(None).pool;
    assert_eq!(crate::validate(&pool), Ok(()));
    let all = names(&pool);
    let is_twin = |name: &&str| name.contains("-mig-") && name.ends_with("-ts");
    let is_plain = |name: &&str| name.contains("-mig-") && !name.ends_with("-ts");
    assert_eq!(all.iter().copied().filter(|n| is_twin(n)).count(), 8 * 18);
    // A claim for a partition passes none of the shares.
    let last_plain = all.iter().rposition(is_plain);
    let first_twin = all.iter().position(is_twin);
    assert!(last_plain < first_twin);
}

#[test]
fn shares_of_a_partition_stay_for_their_holder_when_the_rule_goes() {
    let mut node = twins("h100x1");
    node.hold(TWIN);
    let before = node.carve(None).pool;
    assert_eq!(blocked(&before), [""; 0]);
    node.rule(|rules| rules.modes = Modes::Only([Alternative::PARTITIONS].into()));
    let carved = node.carve(Some(&before));
    assert_eq!(blocked(&carved.pool), [TWIN]);
    assert_eq!(
        device(&carved.pool, TWIN).consumes,
        device(&carved.pool, PLAIN).consumes
    );
    let is_twin = |name: &&str| name.ends_with("-ts");
    assert_eq!(names(&carved.pool).into_iter().filter(is_twin).count(), 1);
}

#[test]
fn where_the_scheduler_is_old_partitions_have_no_shares() {
    let carved = twins("h100x1").server(36, 1).carve(None);
    assert!(
        names(&carved.pool)
            .iter()
            .all(|name| !name.ends_with("-ts"))
    );
    assert!(carved.pool.device(&PLAIN.parse().unwrap()).is_some());
    assert_eq!(findings(&carved).len(), 1, "{:?}", findings(&carved));
}
