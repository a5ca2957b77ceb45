//! Extra nodes, numbers that are not known yet, slots of a known size, and whole GPUs on nodes
//! whose driver keeps caps of groups that are gone.

use divvy_model::{MemoryCaps, MpsAbility, MpsProtocol, MpsServer};
use serde_json::json;

use super::shares::share;
use super::*;
use crate::{ConfigEntry, ConfigSource, uses_of};

/// A claim of a whole GPU that asks for these nodes of the host.
fn asking(nodes: &[&str]) -> Claim {
    let parameters = json!({
        "apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig", "extraNodes": nodes,
    });
    let entry = ConfigEntry {
        source: ConfigSource::Claim,
        requests: Vec::new(),
        driver: "gpu.divvy.dev".to_owned(),
        parameters,
    };
    Claim {
        configs: vec![entry],
        ..claim("a", vec![result("main", "gpu-0")])
    }
}

#[test]
fn extra_nodes_are_given_only_if_the_node_offers_all_of_them() {
    let mut world = World::new();
    world.extra_nodes = ["/dev/gdrdrv", "/dev/fuse"].map(str::to_owned).into();
    let devices = plan(world.decide(&asking(&["/dev/fuse"]))).devices;
    assert_eq!(devices[0].extra_nodes, ["/dev/fuse"]);
    let (category, text) = world.refusal(&asking(&["/dev/fuse", "/dev/kvm"]));
    assert_eq!(category, "extra-node");
    let offer = "/dev/kvm (extraNodes), but this node offers only /dev/gdrdrv, /dev/fuse to claims";
    assert!(text.contains(offer), "{text}");
    let (_, text) = World::new().refusal(&asking(&["/dev/kvm"]));
    assert!(text.contains("this node offers none to claims"), "{text}");
}

/// Before the driver has answered, and while the file of numbers is lost, a number may only be
/// late.
#[test]
fn a_number_is_unknown_for_good_once_the_gpus_have_numbers() {
    let device = claim("a", vec![result("main", "gpu-9")]);
    let mut world = World::new();
    assert_eq!(world.refusal(&device).0, "unknown-device");
    world.ordinals = Ordinals::default();
    assert_eq!(world.refusal(&device).0, "no-driver");
    let world = World::new();
    let mut seen = world.seen();
    seen.inventory = None;
    let Decision::Refuse(refusal) = decide(&device, &seen) else {
        panic!("it is served")
    };
    assert_eq!(refusal.category(), "no-driver");
}

#[test]
fn the_memory_of_a_slot_is_noted_in_bytes() {
    let mut world = World::new();
    world.inventory.system.mps = MpsAbility::Available(MpsProtocol::V2);
    let mut state = GpuState::default().in_boot(&world.boot);
    state.grant.mps = MpsServer::equal(4, Some(80 << 10));
    world.gpus.insert(gpu(0), Arc::new(Stored::Fine(state)));
    let devices = plan(world.decide(&claim("a", vec![share("main", "gpu-0-mps", "s1")]))).devices;
    assert_eq!(devices[0].share_memory, Some(20 << 30));
}

#[test]
fn caps_are_cleared_for_a_whole_gpu_where_the_driver_keeps_them() {
    let clears = |device, lingers| {
        let mut world = World::new();
        world.inventory.system.memory_caps = MemoryCaps::Available;
        world.inventory.system.caps_linger = lingers;
        world.grant_all();
        let mut result = share("main", device, "s1");
        let memory = ("memory".to_owned(), "10Gi".to_owned());
        result.consumed_capacity = [memory].into();
        let devices = plan(world.decide(&claim("a", vec![result]))).devices;
        devices[0].clears_caps
    };
    assert!(clears("gpu-0", true));
    assert!(!clears("gpu-0", false));
    assert!(!clears("gpu-0-ts", true));
    assert!(!clears("gpu-2-mig-1g10gb-19-0", true));
}

/// After the file of a GPU was lost, something may be where a record without its instance says.
#[test]
fn the_place_of_a_record_is_held_and_unsure_in_its_boot_on_its_gpu() {
    let mut world = World::new();
    world.grant_all();
    let c = claim("a", vec![result("main", "gpu-2-mig-1g10gb-19-3")]);
    let record = world.record(&c, Phase::Preparing);
    let unsure = |of, boot: &BootId| {
        let mut state = GpuState::default().in_boot(boot);
        state.add_unsure(&uses_of(&record, &gpu(of), boot));
        let places = state.instances.into_iter();
        let places = places.map(|(place, one)| (place, one.life, one.doubt.is_some()));
        places.collect::<Vec<_>>()
    };
    let boot = world.boot.clone();
    assert_eq!(unsure(2, &boot), [(small(3), Life::Begun, true)]);
    assert_eq!(unsure(1, &boot), []);
    assert_eq!(unsure(2, &"boot-0".parse().unwrap()), []);
    world.keep(record.clone());
    let held = |of, start| is_held(&gpu(of), small(start), &world.records);
    assert!(held(2, 3) && !held(1, 3) && !held(2, 2));
}

/// The record of the claim that an instance was made for was lost.
#[test]
fn an_instance_without_its_record_is_in_the_way_where_it_is() {
    let wanted = claim("b", vec![result("main", "gpu-2-mig-1g10gb-19-3")]);
    let found = |made_for: &str, start, change: &dyn Fn(&mut World)| {
        let mut world = World::new();
        world.grant_all();
        let mut state = world.gpus[&gpu(2)].fine().unwrap().clone();
        let instance = Instance {
            made_for: made_for.parse().unwrap(),
            life: Life::Whole(made(7, "MIG-1")),
            doubt: None,
        };
        state.boot = Some(world.boot.clone());
        state.instances.insert(small(start), instance);
        world.gpus.insert(gpu(2), Arc::new(Stored::Fine(state)));
        change(&mut world);
        matches!(world.decide(&wanted), Decision::Wait(_))
    };
    let nothing = |_: &mut World| {};
    assert!(found("a", 3, &nothing));
    assert!(!found("a", 4, &nothing), "beside it");
    // Another claim is known to hold the place, or its own claim has a record, which says where it
    // is.
    let other = |name, device| {
        move |world: &mut World| {
            let record = world.record(&claim(name, vec![result("main", device)]), Phase::Prepared);
            world.keep(record);
        }
    };
    assert!(!found("a", 3, &other("a", "gpu-2-mig-1g10gb-19-5")));
}

/// Nothing joins a claim that is being undone, where it is.
#[test]
fn a_claim_that_is_undone_is_in_the_way_on_its_part_of_its_gpu_only() {
    let waits = |holder: Claim, wanted: Claim| {
        let mut world = World::new();
        world.grant_all();
        let leaving = Phase::Leaving(Leaving {
            reason: "process 1".to_owned(),
            undoing: true,
        });
        let record = world.record(&holder, leaving);
        world.keep(record);
        matches!(world.decide(&wanted), Decision::Wait(_))
    };
    let shared = |name, device| claim(name, vec![share("main", device, name)]);
    assert!(waits(shared("a", "gpu-0-ts"), shared("b", "gpu-0-ts")));
    assert!(!waits(shared("a", "gpu-0-ts"), shared("b", "gpu-1-ts")));
    let watcher = |name| claim(name, vec![admin(result("see", "gpu-0"))]);
    assert!(!waits(watcher("a"), shared("b", "gpu-0-ts")));
    assert!(!waits(shared("a", "gpu-0-ts"), watcher("b")));
}
