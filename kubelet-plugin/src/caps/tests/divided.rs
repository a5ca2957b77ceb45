//! Limits that earlier groups left at addresses of a pod's groups (`misc`): each counts for itself,
//! so what the pod has is divided.

use super::*;

/// Leaves of a pod, by place.
fn leaf(pod: usize, name: &str) -> String {
    format!("{}/{name}", pod_path(pod))
}

/// A container at an address with this limit of an earlier group.
fn stale(world: &mut World, name: &str, bytes: Option<u64>) -> u32 {
    let pid = world.container(0, name);
    world.leave(&leaf(0, name), bytes);
    pid
}

#[test]
fn containers_of_a_pod_have_its_shares_together_beside_a_stale_limit() {
    for left in [None, Some(64 * MIB), Some(1024 * MIB), Some(2048 * MIB)] {
        let mut world = World::new(LimitBackend::Misc);
        world.prepare(1, 0, Some(1024));
        let first = stale(&mut world, "a", left);
        world.ask(1, first).unwrap();
        let (a, b) = (leaf(0, "a"), leaf(0, "b"));
        // Alone it has all.
        assert_eq!(world.limit(&a), Some(1024 * MIB), "{left:?}");
        let second = world.container(0, "b");
        world.ask(1, second).unwrap();
        let both = [a.clone(), b.clone()];
        assert_eq!(world.could_allocate(&both, 2048 * MIB), 1024 * MIB);
        for path in [a, b] {
            let own = world.could_allocate(std::slice::from_ref(&path), 2048 * MIB);
            assert_eq!(own, 512 * MIB, "{left:?}: {path}");
        }
        // The first ends: no other needs its part.
        fs_err::remove_dir_all(world.groups().join(leaf(0, "a"))).unwrap();
        assert_eq!(world.round().repaired, [], "no fault");
        let own = world.could_allocate(&both[1..], 2048 * MIB);
        assert_eq!(own, 1024 * MIB);
    }
}

/// A second claim of a pod, and a driver that is loaded again.
#[test]
fn each_container_beside_a_stale_limit_has_the_shares_of_its_own_claims() {
    let mut world = World::new(LimitBackend::Misc);
    for (claim, mib) in [(1, 64), (2, 128), (3, 256)] {
        world.prepare(claim, 0, Some(mib));
    }
    let a = stale(&mut world, "a", Some(1024 * MIB));
    let b = stale(&mut world, "b", None);
    let c = world.container(0, "c");
    for (claim, pid) in [(1, a), (2, b), (3, c)] {
        world.ask(claim, pid).unwrap();
    }
    let limits = |world: &World| ["a", "b", "c"].map(|name| world.limit(&leaf(0, name)));
    let expected = [64, 128, 256].map(|mib| Some(mib * MIB));
    assert_eq!(limits(&world), expected);
    world.sim.edit(divvy_gpu_sim::Engine::forget_limits);
    let repairs: Vec<_> = world.round().repaired.iter().map(|r| r.what).collect();
    assert_eq!(repairs, [Repair::Restored]);
    assert_eq!(limits(&world), expected);
}

/// The driver does not lower a limit below what is in use.
#[test]
fn what_a_container_has_allocated_is_not_given_to_another() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(1024));
    let first = stale(&mut world, "a", Some(64 * MIB));
    world.ask(1, first).unwrap();
    let (a, b) = (leaf(0, "a"), leaf(0, "b"));
    assert!(world.allocate(&a, 800 * MIB));
    let second = world.container(0, "b");
    world.ask(1, second).unwrap();
    assert_eq!(
        [&a, &b].map(|path| world.limit(path)),
        [800, 224].map(|mib| Some(mib * MIB))
    );
    for _ in 0..2 {
        assert_eq!(world.round().repaired, []);
    }
    // The same where the others have the memory, and the one beside them comes later.
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(1024));
    let first = world.container(0, "b");
    world.ask(1, first).unwrap();
    assert!(world.allocate(&b, 800 * MIB));
    let second = stale(&mut world, "a", Some(64 * MIB));
    world.ask(1, second).unwrap();
    assert_eq!(
        [&a, &b].map(|path| world.limit(path)),
        [224, 800].map(|mib| Some(mib * MIB))
    );
}

#[test]
fn a_container_that_called_no_hook_is_capped_beside_one_that_did() {
    for left in [None, Some(32 * MIB), Some(64 * MIB), Some(128 * MIB)] {
        let mut world = World::new(LimitBackend::Misc);
        world.prepare(1, 0, Some(64));
        let first = world.container(0, "a");
        world.ask(1, first).unwrap();
        let second = stale(&mut world, "b", left);
        assert!(world.sim.start_process(&world.gpu, second));
        let round = world.round();
        let found: Vec<_> = round.repaired.iter().map(|r| (r.what, r.bytes)).collect();
        assert_eq!(found, [(Repair::Late, 64 * MIB)], "{left:?}");
        assert_eq!(round.repaired[0].claims[0].name, "c1");
        let both = ["a", "b"].map(|name| leaf(0, name));
        assert_eq!(
            world.could_allocate(&both, 2048 * MIB),
            64 * MIB,
            "{left:?}"
        );
        assert_eq!(world.round().repaired, [], "once");
    }
}

/// A container without a limit in its way, whose runtime has called no hook, is under the cap of
/// its pod; a limit that comes later (of another program, say) is noticed.
#[test]
fn a_limit_that_comes_to_a_known_group_is_noticed() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    let first = world.container(0, "a");
    world.ask(1, first).unwrap();
    assert!(world.sim.start_process(&world.gpu, first));
    assert_eq!(world.round().repaired, []);
    world.leave(&leaf(0, "a"), Some(2048 * MIB));
    let repairs: Vec<_> = world.round().repaired.iter().map(|r| r.what).collect();
    assert_eq!(repairs, [Repair::Hidden]);
    assert_eq!(world.could_allocate(&[leaf(0, "a")], 2048 * MIB), 64 * MIB);
}

/// A container that may write its own groups makes one where an earlier group was.
#[test]
fn a_group_that_a_container_makes_escapes_no_cap() {
    for (name, left) in [
        ("a/x", Some(2048 * MIB)),
        ("a/x/y", None),
        ("a/x", Some(64 * MIB)),
    ] {
        let mut world = World::new(LimitBackend::Misc);
        world.prepare(1, 0, Some(64));
        let first = world.container(0, "a");
        world.ask(1, first).unwrap();
        world.group(&leaf(0, "a/x"));
        let second = stale(&mut world, name, left);
        assert!(world.sim.start_process(&world.gpu, second));
        let repairs: Vec<_> = world.round().repaired.iter().map(|r| r.what).collect();
        assert_eq!(repairs, [Repair::Hidden], "{name} {left:?}");
        let both = ["a", name].map(|name| leaf(0, name));
        assert_eq!(
            world.could_allocate(&both, 2048 * MIB),
            64 * MIB,
            "{name} {left:?}"
        );
        assert_eq!(world.round().repaired, [], "once");
    }
}

/// A container names a group of its own after another pod, so as not to be looked for.
#[test]
fn a_group_that_is_named_after_another_pod_is_of_the_one_around_it() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    world.prepare(2, 1, Some(512));
    for pod in 0..2 {
        let logs = format!("host/var/log/pods/ns_p{pod}_{}", pod_uid(pod));
        fs_err::create_dir_all(world.dir.path().join(logs)).unwrap();
    }
    let first = world.container(0, "a");
    world.ask(1, first).unwrap();
    let name = format!("a/pod{}", pod_uid(1));
    let second = stale(&mut world, &name, Some(2048 * MIB));
    assert!(world.sim.start_process(&world.gpu, second));
    let repairs: Vec<_> = world.round().repaired.iter().map(|r| r.what).collect();
    assert_eq!(repairs, [Repair::Hidden]);
    let both = ["a", &name].map(|name| leaf(0, name));
    assert_eq!(world.could_allocate(&both, 2048 * MIB), 64 * MIB);
}

/// Groups without a limit are found again as well, so that no part is given twice.
#[test]
fn a_note_that_is_made_again_knows_the_groups_beside_the_pod() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(1024));
    let first = stale(&mut world, "a", Some(64 * MIB));
    let second = world.container(0, "b");
    for pid in [first, second] {
        world.ask(1, pid).unwrap();
    }
    let file = world.ledger().join(format!("{}.json", pod_uid(0)));
    fs_err::write(&file, "{").unwrap();
    world.round();
    let both = ["a", "b"].map(|name| leaf(0, name));
    assert_eq!(world.could_allocate(&both, 2048 * MIB), 1024 * MIB);
    assert_eq!(both.map(|path| world.limit(&path)), [Some(512 * MIB); 2]);
}

/// The looks that stand for the pod's limit must not be what an earlier group has left.
#[test]
fn a_stale_limit_that_equals_the_probes_is_distinguished() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    let first = stale(&mut world, "a", Some(72 * MIB));
    world.ask(1, first).unwrap();
    assert_eq!(world.could_allocate(&[leaf(0, "a")], 2048 * MIB), 64 * MIB);
}
