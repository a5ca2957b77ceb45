//! Questions about what claims hold, for other rooms of the plugin.

use divvy_claims::{Leaving, Phase, Record, RecordedDevice};
use divvy_executor::{Executor, Refresh};
use divvy_model::ClaimUid;

use crate::bad_input::newer_record;
use crate::mig_world::{HALF, claim_of, mig_world, setup};
use crate::world::World;
use crate::world::accessors::{made, tear};

const SHARE: &str = "gpu-1-ts";

/// A claim of a partition and a share, prepared.
fn prepared() -> (World, Executor, ClaimUid) {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let mut claim = claim_of("a", &[HALF, SHARE], "t1");
    claim.allocation.results[1].share_id = Some("s1".to_owned());
    world.prepare(&executor, &claim).unwrap();
    (world, executor, claim.uid)
}

/// Changes the record of a claim on disk.
fn edit(world: &World, claim: &ClaimUid, change: impl Fn(&mut Record)) {
    let mut record = world.lock().records()[claim].fine().unwrap().clone();
    change(&mut record);
    tear(world, claim, &record.encode());
}

fn share(record: &mut Record) -> &mut RecordedDevice {
    &mut record.devices[1]
}

#[test]
fn a_share_with_a_cap_is_found_by_its_name_in_the_cdi_file() {
    let (world, executor, uid) = prepared();
    let name = format!("{uid}-{SHARE}-s1");
    let found = || executor.capped_share(&uid, &name).unwrap();
    assert_eq!(found(), None, "it has no cap");

    edit(&world, &uid, |record| {
        share(record).memory_cap = Some(1 << 30);
    });
    let capped = found().unwrap();
    assert_eq!(
        (capped.claim.uid, capped.gpu, capped.bytes),
        (uid.clone(), world.gpu(1), Some(1 << 30))
    );
    for other in [format!("{uid}-{HALF}"), format!("{uid}-{SHARE}-s2")] {
        assert_eq!(executor.capped_share(&uid, &other).unwrap(), None);
    }
    let other = "uid-b".parse().unwrap();
    assert_eq!(executor.capped_share(&other, &name).unwrap(), None);
    edit(&world, &uid, |record| {
        record.boot = "boot-0".parse().unwrap();
    });
    assert_eq!(found(), None, "it is not prepared in this boot");
    edit(&world, &uid, |record| {
        record.boot = "boot-1".parse().unwrap();
    });

    edit(&world, &uid, |record| {
        (share(record).memory_cap, share(record).clears_caps) = (None, true);
    });
    assert_eq!(found().unwrap().bytes, None, "a cap of before is cleared");
}

#[test]
fn a_leaving_share_has_no_cap_and_a_torn_record_an_unknown_one() {
    let (world, executor, uid) = prepared();
    let name = format!("{uid}-{SHARE}-s1");
    edit(&world, &uid, |record| {
        share(record).memory_cap = Some(1 << 30);
        record.phase = Phase::Leaving(Leaving {
            reason: "process 7".to_owned(),
            undoing: false,
        });
    });
    assert_eq!(executor.capped_share(&uid, &name).unwrap(), None);
    tear(&world, &uid, b"rubbish");
    let error = executor.capped_share(&uid, &name).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the record of claim UID uid-a cannot be read"
    );
}

#[test]
fn containers_call_for_a_cap_where_one_is_to_be_set_or_cleared() {
    let (world, executor, uid) = prepared();
    let calls = || {
        executor.restore_cdi(Refresh::All);
        let files: Vec<_> = world.lock().cdi.values().cloned().collect();
        let text = String::from_utf8(files.concat()).unwrap();
        text.contains(&format!(r#"["limits","{uid}","{uid}-{SHARE}-s1"]"#))
    };
    assert!(!calls());
    edit(&world, &uid, |record| share(record).clears_caps = true);
    assert!(calls());
    edit(&world, &uid, |record| {
        (share(record).memory_cap, share(record).clears_caps) = (Some(1 << 30), false);
    });
    assert!(calls());
}

#[test]
fn holds_say_whether_a_cap_is_to_be_set_or_cleared() {
    let (world, executor, uid) = prepared();
    let calls = || {
        let held = executor.held().unwrap().into_iter();
        held.map(|held| held.calls_for_caps).collect::<Vec<_>>()
    };
    assert_eq!(calls(), [false, false]);
    edit(&world, &uid, |record| share(record).memory_cap = Some(1));
    assert_eq!(calls(), [false, true]);
    edit(&world, &uid, |record| {
        (share(record).memory_cap, share(record).clears_caps) = (None, true);
    });
    assert_eq!(calls(), [false, true]);
}

/// Its condition, its health and its figures are those of a claim without devices until then.
#[test]
fn a_claim_is_prepared_in_a_boot_when_it_is_carried_out_again() {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    let phases = |executor: &Executor| {
        let held = executor.held().unwrap().into_iter();
        held.map(|held| held.phase).collect::<Vec<_>>()
    };
    assert_eq!(phases(&executor), [Phase::Prepared]);
    world.reboot();
    let executor = world.start();
    assert_eq!(phases(&executor), [Phase::Preparing]);
    executor.restore_cdi(Refresh::All);
    assert_eq!(phases(&executor), [Phase::Prepared]);
}

#[test]
fn partitions_are_said_by_device_and_only_of_their_claim() {
    let (world, executor, uid) = prepared();
    let (_, whole) = made(&world, &uid).remove(0);
    let given: Vec<_> = executor.partitions(&uid).unwrap().into_iter().collect();
    let [(device, partition)] = &given[..] else {
        panic!("{given:?}")
    };
    assert_eq!((device.as_str(), &partition.uuid), (HALF, &whole.uuid));
    let other = "uid-b".parse().unwrap();
    assert!(executor.partitions(&other).unwrap().is_empty());
}

#[test]
fn the_state_for_debugging_has_records_in_every_condition() {
    let (world, executor, uid) = prepared();
    let newer = claim_of("n", &["gpu-1-ts"], "t1");
    world.prepare(&executor, &newer).unwrap();
    tear(&world, &"uid-t".parse().unwrap(), b"rubbish");
    let bytes = newer_record(&world, "uid-n.json");
    tear(&world, &newer.uid, &bytes);
    let state = executor.debug_state();
    let claims = &state["claims"];
    assert_eq!(claims[uid.as_str()]["phase"]["is"], "prepared");
    assert_eq!(
        claims[uid.as_str()]["devices"][1]["allocated"]["device"],
        SHARE
    );
    assert!(claims["uid-t"]["corrupt"].is_string(), "{state:#}");
    assert!(claims["uid-n"]["newer"].is_u64(), "{state:#}");
    assert!(
        state["ordinals"].is_object() && state["fences"].is_object(),
        "{state:#}"
    );
    assert_eq!(state["boot"], "boot-1");

    let newer = executor.fenced_by_newer().unwrap();
    let uids: Vec<_> = newer.keys().map(ClaimUid::as_str).collect();
    assert_eq!(uids, ["uid-n"]);
}
