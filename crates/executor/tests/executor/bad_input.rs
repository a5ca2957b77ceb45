//! Whole messages that a user or an admin reads when something is wrong.

use std::io::ErrorKind;
use std::time::Duration;

use divvy_claims::Stored;
use divvy_executor::{Event, Folder, Unprepared, chain};

use crate::world::{Place, World, claim, final_state};

#[test]
fn a_result_for_a_device_that_is_gone_is_refused_by_name() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let gone = world.gpu(1);
    let left = divvy_gpu_sim::SimNode::parse("h100x2").unwrap();
    left.remove_gpu(&gone).unwrap();
    world.lock().inventory = Some(std::sync::Arc::new(left.inventory()));
    let error = world
        .prepare(&executor, &claim("a", &[1], "t1"))
        .unwrap_err();
    assert_eq!(error.category(), "device-gone");
    assert_eq!(
        chain(&error),
        format!(
            "device gpu-1 ({gone}) of claim ns/a (UID uid-a): its GPU does not answer on this node (delete the pod and the claim, so that they are scheduled again, or restore the GPU)"
        )
    );
}

#[test]
fn an_unknown_field_in_the_config_is_refused_with_entry_field_and_fix() {
    let world = World::new("h100x2", 1);
    let mut a = claim("a", &[0], "t1");
    a.configs.push(divvy_claims::ConfigEntry {
        source: divvy_claims::ConfigSource::Claim,
        requests: Vec::new(),
        driver: crate::world::DRIVER.to_owned(),
        parameters: serde_json::json!({"apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig", "sharing": {}}),
    });
    let error = world.prepare(&world.start(), &a).unwrap_err();
    assert!(error.is_permanent());
    let text = chain(&error);
    let expected = "config entry 0 of the claim for this driver is invalid (correct spec.devices.config of the claim or its template; a claim's spec is immutable, so create a new claim): unknown field \"sharing\"";
    let of = format!(
        "device gpu-0 ({}) of claim ns/a (UID uid-a): ",
        world.gpu(0)
    );
    assert!(text.starts_with(&(of + expected)), "{text}");
}

#[test]
fn without_a_driver_a_prepare_waits_for_it_and_then_says_so() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    let inventory = world.lock().inventory.take();
    let error = world
        .prepare(&executor, &claim("a", &[0], "t1"))
        .unwrap_err();
    assert_eq!(
        chain(&error),
        format!(
            "device gpu-0 ({gpu}) of claim ns/a (UID uid-a): the NVIDIA driver of this node does not answer yet (check the node plugin's log, and that nvidia-smi works on the node)"
        )
    );
    let machine = world.clone();
    world.later(Duration::from_secs(5), move || {
        machine.lock().inventory = inventory;
    });
    world.prepare(&executor, &claim("a", &[0], "t1")).unwrap();
}

#[test]
fn missing_driver_files_are_waited_for_then_named_and_leave_nothing() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.lock().edits_missing = true;
    let began = world.lock().now;
    let writes = world.lock().writes;
    let error = world
        .prepare(&executor, &claim("a", &[0], "t1"))
        .unwrap_err();
    assert!(
        world.lock().now > began + Duration::from_secs(30),
        "they may be on their way"
    );
    assert_eq!(
        world.lock().writes,
        writes,
        "nothing is written before the files are found"
    );
    assert_eq!(
        chain(&error),
        "claim ns/a (UID uid-a) cannot be prepared: the container edits of device (all) cannot be determined: libcuda.so is not below the driver root (is the driver installed? see --driver-root)"
    );
    assert_eq!(final_state(&world).records.len(), 0);
    // A partition is made before its device nodes can be looked for.
    let (world, executor, a, _) = crate::mig_world::setup();
    world.lock().edits_missing = true;
    world.prepare(&executor, &a).unwrap_err();
    assert!(crate::mig_world::is_clean(&world));
}

/// The API is asked before a claim gets something after a wait. Where it does not answer, the cause
/// of the wait is still said.
#[test]
fn a_cause_is_named_also_where_the_api_does_not_answer_after_a_wait() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    {
        let mut machine = world.lock();
        machine.edits_missing = true;
        machine.api_down = true;
    }
    let error = world
        .prepare(&executor, &claim("a", &[0], "t1"))
        .unwrap_err();
    let text = chain(&error);
    for part in [
        "the API server could not be asked: connection refused",
        "the attempt before failed: the container edits of device (all) cannot be determined",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_full_or_read_only_disk_fails_the_prepare_and_leaves_nothing() {
    let tried = |place, kind| {
        let world = World::new("h100x2", 1);
        let executor = world.start();
        world.lock().write_error = Some((place, kind));
        let error = world
            .prepare(&executor, &claim("a", &[0], "t1"))
            .unwrap_err();
        world.lock().write_error = None;
        let state = final_state(&world);
        assert_eq!(state.records.len() + state.cdi.len(), 0);
        world.prepare(&executor, &claim("a", &[0], "t1")).unwrap();
        chain(&error)
    };
    let record = "claim ns/a (UID uid-a) cannot be prepared: the record of claim UID uid-a cannot be written";
    let undone = "(undoing it failed too: the record of claim UID uid-a cannot be removed";
    let text = tried(Place::Store, ErrorKind::StorageFull);
    let full = "(the node's disk is full: free some space): no storage space";
    assert_eq!(text, format!("{record} {full}"), "removing works");
    let text = tried(Place::Store, ErrorKind::ReadOnlyFilesystem);
    let read_only = "(it is mounted read-only: the plugin's hostPath mounts must be writable): read-only filesystem or storage medium";
    assert_eq!(text, format!("{record} {read_only} {undone} {read_only})"));
}

#[test]
fn an_unwritable_cdi_folder_is_named_and_the_record_is_taken_back() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.lock().write_error = Some((Place::Cdi, ErrorKind::ReadOnlyFilesystem));
    let error = world
        .prepare(&executor, &claim("a", &[0], "t1"))
        .unwrap_err();
    let why = "CDI file gpu.divvy.dev-claim_uid-a.json in /var/run/cdi cannot be";
    let advice = "(it is mounted read-only: the plugin's hostPath mounts must be writable): read-only filesystem or storage medium";
    assert_eq!(
        chain(&error),
        format!(
            "claim ns/a (UID uid-a) cannot be prepared: {why} written {advice} (undoing it failed too: {why} removed {advice})"
        )
    );
    // The record stays until the file can be removed: the claim is still to be unprepared.
    world.lock().write_error = None;
    assert_eq!(
        world
            .unprepare(&executor, &"uid-a".parse().unwrap())
            .unwrap(),
        Unprepared::Done
    );
    assert_eq!(final_state(&world).records.len(), 0);
}

/// An unreadable record of another claim is rebuilt from the API before its GPU is given away.
#[test]
fn an_unreadable_record_of_another_claim_is_rebuilt_from_the_api() {
    for bytes in [b"".as_slice(), b"{\"checksum\":\"", b"\xff\xfe not json"] {
        let world = World::new("h100x2", 1);
        let executor = world.start();
        let a = claim("a", &[0], "t1");
        world.prepare(&executor, &a).unwrap();
        let whole = final_state(&world);
        world.lock().api.insert(a.uid.clone(), a.clone());
        world.lock().put(Folder::Claims, "uid-a.json", Some(bytes));
        // Another GPU: waits only until the record is known again.
        world.prepare(&executor, &claim("b", &[1], "t2")).unwrap();
        world
            .unprepare(&executor, &"uid-b".parse().unwrap())
            .unwrap();
        assert_eq!(final_state(&world), whole);
        let kept: Vec<_> = world.lock().files(Folder::Corrupt).into_values().collect();
        assert_eq!(
            kept,
            [bytes.to_vec()],
            "the unreadable bytes are kept for people"
        );
        // The same GPU: it is held.
        let error = world
            .prepare(&executor, &claim("b", &[0], "t2"))
            .unwrap_err();
        assert_eq!(error.category(), "conflict");
    }
}

#[test]
fn an_unreadable_record_is_named_and_does_not_stop_unprepare() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.lock().put(Folder::Claims, "uid-x.json", Some(b""));
    world.lock().api_down = true;
    let error = world
        .prepare(&executor, &claim("a", &[0], "t1"))
        .unwrap_err();
    assert_eq!(
        chain(&error),
        format!(
            "device gpu-0 ({}) of claim ns/a (UID uid-a): the record of claim UID uid-x cannot be read, and it may hold its GPU: the file is empty (the record is rebuilt when the API server answers)",
            world.gpu(0)
        )
    );
    let x = "uid-x".parse().unwrap();
    let lingering = "its record cannot be read: the file is empty".to_owned();
    assert_eq!(
        world.unprepare(&executor, &x).unwrap(),
        Unprepared::Lingering(lingering)
    );
    world.lock().api_down = false;
    let events = executor.reconcile(&world.view()).events;
    assert!(
        events.contains(&Event::SetAside {
            claim: x,
            reason: "the file is empty".to_owned()
        }),
        "{events:?}"
    );
    world.prepare(&executor, &claim("a", &[0], "t1")).unwrap();
}

#[test]
fn a_record_of_a_later_version_keeps_its_gpus_and_is_left_untouched() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.prepare(&executor, &claim("a", &[0], "t1")).unwrap();
    let newer = newer_record(&world, "uid-a.json");
    world.lock().put(Folder::Claims, "uid-a.json", Some(&newer));
    assert_eq!(
        chain(
            &world
                .prepare(&executor, &claim("b", &[0], "t2"))
                .unwrap_err()
        ),
        format!(
            "device gpu-0 ({}) of claim ns/b (UID uid-b): its GPU is held by claim UID uid-a, whose record was written by a later version of divvy (format 99) (run that version again, or delete the holding claim and its pod)",
            world.gpu(0)
        )
    );
    assert_eq!(
        chain(
            &world
                .prepare(&executor, &claim("a", &[0], "t1"))
                .unwrap_err()
        ),
        "claim ns/a (UID uid-a): its record was written by a later version of divvy (format 99) and is left unchanged (run that version again, or delete the pod and the claim)"
    );
    world.prepare(&executor, &claim("b", &[1], "t2")).unwrap();
    let a = "uid-a".parse().unwrap();
    assert_eq!(
        world.unprepare(&executor, &a).unwrap(),
        Unprepared::LeftToNewer { version: 99 }
    );
    executor.reconcile(&world.view());
    assert_eq!(world.lock().file(Folder::Claims, "uid-a.json"), Some(newer));
    assert_eq!(
        executor
            .fenced_by_newer()
            .unwrap()
            .keys()
            .collect::<Vec<_>>(),
        [&a]
    );
}

/// The record as a later divvy would have written it: same envelope and head, another body.
pub(crate) fn newer_record(world: &World, file: &str) -> Vec<u8> {
    let bytes = world.lock().file(Folder::Claims, file).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let body = text
        .split_once("\"body\":")
        .unwrap()
        .1
        .trim_end()
        .strip_suffix('}')
        .unwrap();
    let mut body: serde_json::Value = serde_json::from_str(body).unwrap();
    body["version"] = 99.into();
    body["phase"] = "something new".into();
    let body = body.to_string();
    let newer = format!(
        "{{\"checksum\":\"{}\",\"body\":{body}}}\n",
        crate::files::sha256(&body)
    )
    .into_bytes();
    assert!(matches!(
        divvy_claims::Record::decode(&newer),
        Stored::Newer { version: 99, .. }
    ));
    newer
}
