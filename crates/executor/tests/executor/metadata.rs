//! The files with the metadata of devices: there before the CDI file that mounts them, whole or not
//! at all, made again from the record, and gone with the claim.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Duration;

use divvy_claims::{Record, Stored};
use divvy_executor::{Event, FileMetadataDir, Folder, MetadataDir, Refresh, chain};
use divvy_model::ClaimUid;
use fs_err as fs;

use crate::mig_world::{claim_of_halves, mig_world};
use crate::world::{Moment, Place, World, claim, final_state, result};

type Files = BTreeMap<(ClaimUid, String), Vec<u8>>;

fn files(world: &World) -> Files {
    world.lock().metadata.clone()
}

#[test]
fn every_request_has_a_file_that_its_first_device_mounts_read_only() {
    let world = World::new("h100x3", 1);
    let executor = world.start();
    let mut a = claim("a", &[0, 1, 2], "t1");
    a.pod_claim_name = Some("gpu".to_owned());
    a.allocation.results[2].request = "other/sub".to_owned();
    world.prepare(&executor, &a).unwrap();
    let names: Vec<_> = files(&world)
        .into_keys()
        .map(|(_, request)| request)
        .collect();
    assert_eq!(names, ["main", "other"]);
    let cdi = final_state(&world)
        .cdi
        .remove("gpu.divvy.dev-claim_uid-a.json")
        .unwrap();
    let spec: divvy_cdi::Spec = serde_json::from_str(&cdi).unwrap();
    let mounts = spec.devices.iter().map(|device| {
        let mounts = device.container_edits.mounts.iter();
        mounts
            .map(|m| {
                (
                    m.host_path.as_str(),
                    m.container_path.as_str(),
                    m.options.join(","),
                )
            })
            .collect()
    });
    let there = |request: &str| {
        format!(
            "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpu/{request}/gpu.divvy.dev-metadata.json"
        )
    };
    let (main, other) = (there("main"), there("other"));
    let options = "ro,bind".to_owned();
    assert_eq!(
        mounts.collect::<Vec<Vec<_>>>(),
        [
            vec![("/plugin/metadata/uid-a/main.json", &*main, options.clone())],
            vec![],
            vec![("/plugin/metadata/uid-a/other.json", &*other, options)],
        ]
    );
    let pci = |file: &[u8]| {
        std::str::from_utf8(file)
            .unwrap()
            .matches("pciBusID")
            .count()
    };
    assert_eq!(
        files(&world)
            .values()
            .map(|file| pci(file))
            .collect::<Vec<_>>(),
        [4, 2],
        "in each version"
    );
}

#[test]
fn a_file_that_cannot_be_written_fails_the_prepare_and_nothing_is_left() {
    let world = mig_world("h100x1", 1);
    let executor = world.start();
    let a = claim_of_halves("a", &[0], "t1");
    world.lock().write_error = Some((Place::Metadata, ErrorKind::StorageFull));
    let error = world.prepare(&executor, &a).unwrap_err();
    assert_eq!(
        chain(&error),
        "claim ns/a (UID uid-a) cannot be prepared: the device metadata /plugin/metadata/uid-a/main.json cannot be written (the node's disk is full: free some space): no storage space"
    );
    assert!(!error.is_permanent(), "the kubelet's next call may succeed");
    let left = final_state(&world);
    assert_eq!(
        (
            left.records.len(),
            left.cdi.len(),
            left.instances.len(),
            left.metadata.len()
        ),
        (0, 0, 0, 0)
    );
    world.lock().write_error = None;
    world.prepare(&executor, &a).unwrap();
    assert_eq!(files(&world).len(), 1);
}

#[test]
fn lost_or_torn_files_are_made_again_and_right_ones_left_alone() {
    let world = World::new("h100x1", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let whole = files(&world);
    // Nothing may be written where all is as it should be.
    world.lock().crash_at = Some(("write metadata", Moment::Before));
    world.prepare(&executor, &a).unwrap();
    assert_eq!(executor.restore_cdi(Refresh::All).events, []);
    world.lock().crash_at = None;

    let restored = [Event::CdiRestored {
        claim: a.uid.clone(),
    }];
    let damages: [fn(&mut Files); 2] = [Files::clear, |files| {
        files.values_mut().for_each(Vec::clear);
    }];
    for damage in damages {
        damage(&mut world.lock().metadata);
        assert_eq!(executor.restore_cdi(Refresh::Missing).events, restored);
        assert_eq!(files(&world), whole);
        damage(&mut world.lock().metadata);
        world.prepare(&executor, &a).unwrap();
        assert_eq!(files(&world), whole);
    }
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.reboot();
    world.start().restore_cdi(Refresh::All);
    assert_eq!(files(&world), whole, "after a reboot too");
    // It says what was so when the claim was prepared; after a reboot, when it was carried out
    // again.
    let mut inventory = world.lock().inventory.as_deref().cloned().unwrap();
    for gpu in inventory.gpus.values_mut() {
        gpu.facts.pci_address.bus += 1;
    }
    world.lock().inventory = Some(inventory.into());
    world.start().restore_cdi(Refresh::All);
    assert_eq!(files(&world), whole);
    world.reboot();
    world.start().restore_cdi(Refresh::All);
    assert_ne!(files(&world), whole);
}

#[test]
fn files_go_with_their_claim_and_unaccounted_ones_are_swept() {
    let world = World::new("h100x1", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let stray = files(&world);
    world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(files(&world), Files::new());
    world.lock().metadata = stray.clone();
    executor.reconcile(&world.view());
    assert_eq!(files(&world), stray, "not before its grace period is over");
    world.pass(Duration::from_mins(3));
    executor.reconcile(&world.view());
    assert_eq!(files(&world), Files::new());
}

#[test]
fn a_record_of_a_version_without_metadata_is_carried_on_without_it() {
    let world = World::new("h100x1", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let Stored::Fine(record) = world.lock().records().remove(&a.uid).unwrap() else {
        panic!("unreadable")
    };
    let old = Record {
        metadata: None,
        ..record
    };
    world
        .lock()
        .put(Folder::Claims, "uid-a.json", Some(&old.encode()));
    world.lock().metadata.clear();
    world.lock().cdi.clear();
    let after = world.start();
    after.restore_cdi(Refresh::All);
    world.prepare(&after, &a).unwrap();
    assert_eq!((files(&world).len(), final_state(&world).cdi.len()), (0, 1));
}

#[test]
fn a_lost_record_is_made_again_with_the_same_files() {
    let world = World::new("h100x1", 1);
    let executor = world.start();
    let mut a = claim("a", &[0], "t1");
    a.allocation.results = vec![result(0, false)];
    world.prepare(&executor, &a).unwrap();
    world.lock().api.insert(a.uid.clone(), a.clone());
    let whole = files(&world);
    world
        .lock()
        .put(Folder::Claims, "uid-a.json", Some(b"torn"));
    executor.reconcile(&world.view());
    assert_eq!(files(&world), whole);
    assert!(
        world.lock().records()[&a.uid]
            .fine()
            .unwrap()
            .metadata
            .is_some()
    );
}

#[test]
fn files_are_whole_readable_by_everyone_and_replaced_by_inode() {
    let dir = tempfile::tempdir().unwrap();
    let files = FileMetadataDir::new(dir.path().join("metadata"));
    let uid: ClaimUid = "uid-a".parse().unwrap();
    assert_eq!(files.claims().unwrap(), []);
    assert_eq!(files.read(&uid, "main").unwrap(), None);
    files.remove(&uid).unwrap();
    files.write(&uid, "main", b"one\n").unwrap();
    files.write(&uid, "other", b"two\n").unwrap();
    assert_eq!(files.claims().unwrap(), std::slice::from_ref(&uid));
    assert_eq!(files.read(&uid, "main").unwrap().unwrap(), b"one\n");
    let path = files.path(&uid, "main");
    let meta = fs::metadata(&path).unwrap();
    assert_eq!(meta.permissions().mode() & 0o777, 0o644);
    assert_eq!(
        fs::metadata(path.parent().unwrap())
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o755
    );
    // A container that has the old one keeps it: never half of each.
    let held = fs::read_to_string(&path).unwrap();
    // What a killed process with another mask has left.
    let left = path.with_extension("tmp");
    fs::write(&left, b"one longer still, and torn").unwrap();
    fs::set_permissions(&left, PermissionsExt::from_mode(0o600)).unwrap();
    files.write(&uid, "main", b"longer than before\n").unwrap();
    let replaced = fs::metadata(&path).unwrap();
    assert_ne!(replaced.ino(), meta.ino());
    assert_eq!(replaced.permissions().mode() & 0o777, 0o644);
    assert_eq!(fs::read(&path).unwrap(), b"longer than before\n");
    assert_eq!(held, "one\n");
    let mut names: Vec<_> = fs::read_dir(path.parent().unwrap())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["main.json", "other.json"], "no temporary file");
    files.remove(&uid).unwrap();
    assert_eq!(files.claims().unwrap(), []);
    // Something is in the way.
    fs::write(dir.path().join("metadata/uid-b"), b"").unwrap();
    files
        .write(&"uid-b".parse().unwrap(), "main", b"x")
        .unwrap_err();
}
