//! The file of GPU numbers, when it is lost.

use divvy_executor::{Executor, Folder};
use divvy_model::{GpuUuid, Ordinals};

use crate::world::{World, claim};

const FILE: &str = "ordinals.json";

/// Four GPUs numbered against the order of their addresses; the claim `a` of `gpu-2`, prepared.
fn setup() -> (World, Vec<GpuUuid>) {
    let world = World::new("h100x4", 1);
    let gpus: Vec<_> = (0..4).rev().map(|n| world.gpu(n)).collect();
    let numbers: Ordinals = gpus.iter().cloned().zip(0..).collect();
    let bytes = divvy_claims::encode_ordinals(&numbers);
    world.lock().put(Folder::Node, FILE, Some(&bytes));
    let a = claim("a", &[2], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.prepare(&world.start(), &a).unwrap();
    (world, gpus)
}

fn numbers(executor: &Executor) -> Vec<(u32, GpuUuid)> {
    let mut all: Vec<_> = executor
        .ordinals()
        .unwrap()
        .iter()
        .map(|(gpu, number)| (number, gpu.clone()))
        .collect();
    all.sort();
    all
}

/// Numbers that were lost are those of records slices and allocations and a broken file is kept.
#[test]
fn lost_numbers_come_from_records_slices_and_allocations() {
    for broken in [None, Some(b"{\"GPU-".as_slice())] {
        let (world, gpus) = setup();
        world.lock().published = vec![(0, gpus[0].clone()), (1, gpus[1].clone())];
        // Allocated and not prepared, and its slice is wiped: which GPU it means is not known.
        let b = claim("b", &[3], "t1");
        world.lock().api.insert(b.uid.clone(), b.clone());
        world.lock().put(Folder::Node, FILE, broken);
        let executor = world.start();
        let again = numbers(&executor);
        let known: Vec<_> = (0..3).zip(gpus.iter().cloned()).collect();
        assert_eq!(again[..3], known, "{broken:?}");
        assert_eq!(
            again[4],
            (4, gpus[3].clone()),
            "not the number that may mean another GPU"
        );
        let kept = world.lock().files(Folder::Corrupt);
        assert_eq!(kept.into_values().next().as_deref(), broken);

        let a = claim("a", &[2], "t1");
        let cdi = world.prepare(&executor, &a).unwrap();
        assert_eq!(world.prepare(&world.start(), &a).unwrap(), cdi);
        assert_eq!(
            world.prepare(&executor, &b).unwrap_err().category(),
            "device-gone"
        );
        // It is not allocated any more.
        let present = again[..3]
            .iter()
            .chain(&again[4..])
            .map(|(_, gpu)| (gpu.clone(), address()))
            .collect::<Vec<_>>();
        executor.number_gpus(&present, &|_, _| false).unwrap();
        assert_eq!(numbers(&executor).len(), 4);
    }
}

/// A folder that was emptied beside published slices: every GPU has its number from the slices, so
/// none is assigned anew, and prepare reads the numbers from the file.
#[test]
fn numbers_that_are_all_known_from_slices_are_written_again() {
    let world = World::new("h100x4", 1);
    let gpus: Vec<_> = (0..4).rev().map(|n| world.gpu(n)).collect();
    world.lock().published = (0..).zip(gpus.iter().cloned()).collect();
    let expected: Vec<_> = (0..).zip(gpus.iter().cloned()).collect();
    for process in 0..3 {
        let executor = world.start();
        let file = world.lock().files(Folder::Node).remove(FILE);
        let written = divvy_claims::decode_ordinals(&file.expect("the file was written again"));
        let numbered: Ordinals = gpus.iter().cloned().zip(0..).collect();
        assert_eq!(written.fine(), Some(&numbered));
        assert_eq!(numbers(&executor), expected);
        for device in 0..4 {
            let name = format!("c{process}-{device}");
            let claim = claim(&name, &[device], "t1");
            world.prepare(&executor, &claim).unwrap();
            world.unprepare(&executor, &claim.uid).unwrap();
        }
    }
}

/// The same with nothing but a record, which names the only GPU of its node.
#[test]
fn a_number_that_is_known_from_a_record_is_written_again() {
    let world = World::new("h100x1", 1);
    let a = claim("a", &[0], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    let cdi = world.prepare(&world.start(), &a).unwrap();
    world.lock().put(Folder::Node, FILE, None);
    let executor = world.start();
    assert!(world.lock().files(Folder::Node).contains_key(FILE));
    assert_eq!(world.prepare(&executor, &a).unwrap(), cdi);
}

/// Only a node without a file, records and slices is a fresh one, whose first GPU is `gpu-0`.
#[test]
fn slices_or_a_broken_file_alone_keep_numbers_in_use() {
    for (broken, published) in [(None, true), (Some(b"{\"GPU-".as_slice()), false)] {
        let world = World::new("h100x2", 1);
        world.lock().put(Folder::Node, FILE, broken);
        if published {
            world.lock().published = vec![(0, world.gpu(1))];
        }
        // Allocated, and not prepared on this node yet.
        let a = claim("a", &[0], "t1");
        world.lock().api.insert(a.uid.clone(), a);
        let again = numbers(&world.start());
        let first = again
            .iter()
            .find(|(number, _)| *number == 0)
            .map(|(_, gpu)| gpu.clone());
        assert_ne!(
            first,
            Some(world.gpu(0)),
            "the claim was given another GPU: {again:?}"
        );
    }
}

fn address() -> divvy_model::PciAddress {
    divvy_model::PciAddress {
        domain: 0,
        bus: 0,
        device: 0,
        function: 0,
    }
}

#[test]
fn nothing_is_numbered_while_the_api_cannot_say_what_numbers_are_in_use() {
    let (world, _) = setup();
    let executor = world.start();
    world.lock().put(Folder::Node, FILE, Some(b""));
    world.lock().api_down = true;
    let error = executor
        .number_gpus(&[(world.gpu(0), address())], &|_, _| true)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("the numbers in use cannot be read from the API server: connection refused"),
        "{error}"
    );
    assert_eq!(world.lock().files(Folder::Node)[FILE], b"");
    let c = claim("c", &[0], "t1");
    assert_eq!(
        world.prepare(&executor, &c).unwrap_err().category(),
        "store"
    );
}
