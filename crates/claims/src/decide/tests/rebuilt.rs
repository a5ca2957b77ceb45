//! Records that were lost, made again: only where all that is known agrees.

use super::*;
use crate::rebuild::rebuild;
use crate::{Instance, Made, MadeFor};

const PART: &str = "gpu-2-mig-1g10gb-19-1";

/// Instances that were made for a claim, by the number of their GPU.
fn noted(all: &[(u32, Place, &Made)]) -> MadeFor {
    let instance = |made: &Made| Instance {
        made_for: "a".parse().unwrap(),
        life: Life::Whole(made.clone()),
        doubt: None,
    };
    let all = all.iter();
    all.map(|(number, place, made)| ((gpu(*number), *place), instance(made)))
        .collect()
}

/// Returns the partition in the record that is made again, if one is.
fn rebuilt(world: &World, device: &str, made: &MadeFor) -> Option<Made> {
    let claim = claim("a", vec![result("main", device)]);
    let record = rebuild(&claim, &world.seen(), made).unwrap()?;
    assert_eq!((&record.uid, &record.phase), (&claim.uid, &Phase::Prepared));
    let [device] = record.devices.try_into().unwrap();
    Some(device.given.expect("a partition is given"))
}

/// A node on which a partition lives.
fn node(living: &Made) -> World {
    let mut world = World::new();
    world.grant_all();
    world.lives(2, small(1), Ok(Some(living)));
    world
}

#[test]
fn a_record_is_made_again_with_the_very_partition_that_was_made_for_it() {
    let ours = made(7, "MIG-1");
    let world = node(&ours);
    let known = noted(&[(2, small(1), &ours)]);
    assert_eq!(rebuilt(&world, PART, &known), Some(ours.clone()));
    // Ids are given out again and UUIDs are not.
    let earlier = noted(&[(2, small(1), &made(7, "MIG-0"))]);
    assert_eq!(rebuilt(&world, PART, &earlier), None);
    assert_eq!(rebuilt(&world, PART, &MadeFor::new()), None);
    // Its owner has made it, and no note names it.
    let theirs = "gpu-2-mig-static-1g10gb-19-1";
    assert_eq!(rebuilt(&world, theirs, &MadeFor::new()), Some(ours));
}

#[test]
fn an_instance_beside_the_allocation_shows_that_another_one_was_lost() {
    let ours = made(7, "MIG-1");
    let world = node(&ours);
    for (number, place) in [(2, small(3)), (1, small(1))] {
        let known = noted(&[(2, small(1), &ours), (number, place, &made(8, "MIG-2"))]);
        assert_eq!(rebuilt(&world, PART, &known), None, "{number} {place:?}");
    }
}

#[test]
fn no_record_is_made_of_a_partition_that_is_gone_unread_or_anothers() {
    let ours = made(7, "MIG-1");
    let known = noted(&[(2, small(1), &ours)]);
    let mut world = node(&ours);
    world.lives(2, small(1), Ok(None));
    assert_eq!(rebuilt(&world, PART, &known), None);
    world.lives(2, small(1), Err(GpuErrorCode::UNKNOWN));
    let wanted = claim("a", vec![result("main", PART)]);
    let refusal = rebuild(&wanted, &world.seen(), &known).unwrap_err();
    assert_eq!(refusal.category(), "gpu-unreadable");

    let mut world = node(&ours);
    let other = world.record(&claim("b", vec![result("main", PART)]), Phase::Prepared);
    world.keep(other);
    assert_eq!(rebuilt(&world, PART, &known), None);
}
