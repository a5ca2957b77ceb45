//! A claim that has the GPU alone and whose users share it by MPS.

use divvy_model::{Architecture, ComputeMode, MpsAbility, MpsProtocol, MpsServer};
use serde_json::{Value, json};

use super::*;
use crate::{ConfigEntry, ConfigSource};

fn served(config: &Value) -> Claim {
    let entry = ConfigEntry {
        source: ConfigSource::Claim,
        requests: Vec::new(),
        driver: "gpu.divvy.dev".to_owned(),
        parameters: json!({"apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig", "mps": config}),
    };
    Claim {
        configs: vec![entry],
        ..claim("a", vec![result("main", "gpu-0")])
    }
}

fn able() -> World {
    let mut world = World::new();
    world.inventory.system.mps = MpsAbility::Available(MpsProtocol::V2);
    let board = world.inventory.gpus.get_mut(&gpu(0)).unwrap();
    board.facts.compute_mode = Some(ComputeMode::Default);
    world
}

#[test]
fn the_limits_of_a_config_are_those_of_the_server_and_no_grant() {
    for (config, cores, memory_mib) in [
        (json!({}), 100, None),
        (json!({"limits": {}}), 100, None),
        (json!({"limits": {"cores": 30}}), 30, None),
        (json!({"limits": {"memory": "10Gi"}}), 100, Some(10_240)),
        // Whole MiB, and never more than was asked for.
        (json!({"limits": {"memory": "1100Ki"}}), 100, Some(1)),
    ] {
        let claim = served(&config);
        let device = plan(able().decide(&claim)).devices.remove(0);
        let server = MpsServer {
            slots: None,
            cores,
            memory_mib,
            protocol: MpsProtocol::V2,
        };
        assert_eq!(
            device.mps.map(|place| place.server),
            Some(server),
            "{config}"
        );
        assert_eq!(device.hold(&claim.uid).mps, Some(server));
        // The claim has all of the GPU: no amounts of a share.
        assert_eq!(device.amounts(), crate::ShareAmounts::default());
        assert_eq!(
            crate::share_env(std::slice::from_ref(&device), &device),
            [""; 0]
        );
        let changes = able().changes(&claim, 0);
        assert_eq!(
            changes,
            [
                Change::SetComputeMode(ComputeMode::ExclusiveProcess),
                Change::StartMps(Target::Gpu, server)
            ]
        );
    }
}

#[test]
fn a_server_that_cannot_be_had_is_refused_before_anything_is_done() {
    let claim = served(&json!({}));
    let refused = |world: World, words: &str| {
        let (category, text) = world.refusal(&claim);
        assert_eq!(category, "mps-unavailable", "{text}");
        assert!(text.contains(words), "{text}");
    };
    refused(World::new(), "mps.enabled=false");
    for old in [Architecture::Maxwell, Architecture::Pascal] {
        let mut world = able();
        let board = world.inventory.gpus.get_mut(&gpu(0)).unwrap();
        board.facts.architecture = old;
        refused(world, "it is older than Volta");
    }
    let plain = claim_of_admin();
    let devices = plan(World::new().decide(&plain)).devices;
    assert_eq!(devices[0].mps, None, "admin access has no server");
}

/// A claim with admin access whose class has a config with `mps`.
fn claim_of_admin() -> Claim {
    Claim {
        configs: served(&json!({})).configs,
        ..claim("a", vec![admin(result("main", "gpu-0"))])
    }
}

/// The file of a GPU can name another server: a claim's record was lost, or a crash came before the
/// note.
#[test]
fn a_claim_keeps_its_own_server_whatever_the_gpus_file_says() {
    let world = able();
    let slots = MpsServer::equal(4, Some(1 << 14)).unwrap();
    let own = MpsServer::of_claim(Some(50), None);
    for (kept, noted, expected) in [
        (own, slots, own),
        (own, MpsServer::of_claim(None, None), own),
        (slots, own, slots),
        // Slots are those of the server that runs.
        (
            slots,
            MpsServer::equal(2, None).unwrap(),
            MpsServer::equal(2, None).unwrap(),
        ),
    ] {
        let claim = served(&json!({}));
        let mut devices = plan(world.decide(&claim)).devices;
        devices[0].mps = devices[0].mps.map(|place| crate::MpsSlot {
            server: kept,
            ..place
        });
        let record = Record::new(&claim, &world.boot, devices, Phase::Prepared);
        let records = [(claim.uid.clone(), Arc::new(Stored::Fine(record)))].into();
        let mut state = GpuState::default().in_boot(&world.boot);
        state.note_server(Target::Gpu, noted, true);
        let holds = crate::holds_on(&gpu(0), crate::Caller::Round, &records, &world.boot);
        let scope = divvy_gpu::Scope::new(holds, state.grant, &state.instances);
        let goal = divvy_gpu::Goal::of(&scope, &state.mps);
        let found = goal.servers.get(&Target::Gpu);
        assert_eq!(found, Some(&expected), "{kept:?} {noted:?}");
    }
}
