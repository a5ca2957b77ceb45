//! Promises of the simulator: real boards' facts and layout, and each fault.

use std::thread;
use std::time::Duration;

use divvy_conformance::{Expect, conformance};
use divvy_model::{
    Architecture, CudaVersion, Gpu, GpuDriver, GpuErrorCode, GpuOp, GpuProcess, GpuUuid,
    HostTopology, MigMode, NvLinkPeer,
};

use crate::{Engine, Fault, SimNode, SimSpec, profile, profiles};

const SOON: Duration = Duration::from_secs(10);

fn node(spec: &str) -> SimNode {
    SimNode::parse(spec).unwrap()
}

fn buses(node: &SimNode) -> Vec<u8> {
    node.engine()
        .gpus()
        .iter()
        .map(|g| g.facts.pci_address.bus)
        .collect()
}

#[test]
fn every_model_in_every_number_passes_the_conformance_checks() {
    for p in profiles() {
        for count in [1, 2, 3, 4, 8, 16] {
            let node = node(&format!("{}x{count}", p.key));
            let expect = Expect {
                gpus: Some(count),
                driver_version: Some("580.95.05".to_owned()),
                product_names: Some(vec![p.product_name.to_owned(); count]),
            };
            assert_eq!(conformance(&node, &expect), [], "{} x {count}", p.key);
        }
    }
    assert_eq!(
        conformance(
            &node("a100-40x4,l4x2,t4x2,h100x8"),
            &Expect {
                gpus: Some(16),
                ..Expect::default()
            }
        ),
        []
    );
    assert_eq!(
        conformance(
            &node("none"),
            &Expect {
                gpus: Some(0),
                ..Expect::default()
            }
        ),
        []
    );
}

#[test]
fn a_spec_reads_back_and_a_bad_one_says_what_is_known() {
    for good in ["h100x2", "a100-40x4,l4x2", "none", "h100-pciex1"] {
        assert_eq!(good.parse::<SimSpec>().unwrap().to_string(), good);
    }
    assert_eq!(
        "l40s, h100-sxmx8".parse::<SimSpec>().unwrap().to_string(),
        "l40sx1,h100x8"
    );
    let error = |text: &str| text.parse::<SimSpec>().unwrap_err().to_string();
    assert_eq!(
        error("h1000x2"),
        "unknown simulated GPU model \"h1000\"; known models: a10, a100-40, a100-80, a100-pcie-40, \
         a100-pcie-80, a30, b200, b300, gb10, gb200, gb300, gh200-96, gh200-144, h100, h100-nvl, h100-pcie, h20, h200, \
         h200-nvl, l20, l4, l40, l40s, rtx-pro-5000, rtx-pro-6000, rtx-pro-6000-maxq, rtx-pro-6000-ws, t4, v100, v100-16; write MODELxCOUNT, such as h100x2 or a100-40x4,l4x2"
    );
    assert_eq!(
        error("h100x0"),
        "simulated GPUs \"h100x0\" are not MODELxCOUNT with a count from 1 to 16, such as h100x2 or \
         a100-40x4,l4x2 (or none)"
    );
    assert_eq!(
        error("h100x9,l4x8"),
        "17 simulated GPUs are too many for one node: at most 16"
    );
    for bad in ["", "h100x", "h100x-1", ",", "x2", "h100x2,"] {
        assert!(bad.parse::<SimSpec>().is_err(), "{bad}");
    }
}

#[test]
fn gpus_beside_arm_processors_have_a_pci_segment_each_and_coherent_memory() {
    let places = |spec: &str| -> Vec<String> {
        let node = node(spec);
        let gpus = node.engine().gpus().to_vec();
        gpus.iter()
            .map(|g| {
                let HostTopology {
                    numa_node,
                    pcie_root,
                } = &g.topology;
                format!(
                    "{} {} {}",
                    g.facts.pci_address,
                    numa_node.unwrap(),
                    pcie_root.as_deref().unwrap()
                )
            })
            .collect()
    };
    assert_eq!(
        places("gh200-96x2"),
        ["0009:01:00.0 0 pci0009:00", "0019:01:00.0 1 pci0019:00"]
    );
    assert_eq!(
        places("gb200x4"),
        [
            "0008:01:00.0 0 pci0008:00",
            "0009:01:00.0 0 pci0009:00",
            "0018:01:00.0 1 pci0018:00",
            "0019:01:00.0 1 pci0019:00",
        ]
    );
    assert_eq!(places("gb10"), ["000f:01:00.0 0 pci000f:00"]);
    let facts = |spec: &str| node(spec).engine().gpus()[0].facts.clone();
    for (board, mode, c2c) in [
        ("gh200-144", "ATS", Some(true)),
        ("gb300", "ATS", Some(true)),
        ("gb10", "ATS", Some(true)),
        ("h100", "HMM", Some(false)),
        ("l40", "HMM", None),
        ("v100", "None", None),
    ] {
        let facts = facts(board);
        assert_eq!(
            (facts.addressing_mode.as_deref(), facts.c2c),
            (Some(mode), c2c),
            "{board}"
        );
    }
    let spark = facts("gb10");
    assert_eq!(
        (spark.memory_bytes, spark.mig_mode),
        (None, MigMode::Unsupported)
    );
    let rack = node("gb200x4").engine();
    assert_eq!(
        rack.facts_of(&rack.gpus()[3]).nvlinks,
        [NvLinkPeer::Switch; 18],
        "not a mesh of four"
    );
}

#[test]
fn an_h100_says_what_the_real_one_says() {
    let node = node("h100x8");
    assert_eq!(
        buses(&node),
        [0x1a, 0x1b, 0x4a, 0x4b, 0x8a, 0x8b, 0xca, 0xcb]
    );
    let gpu = node.engine().gpus()[4].clone();
    let facts = node.facts(&gpu.facts.uuid).unwrap();
    assert_eq!(
        serde_json::to_value(&facts).unwrap(),
        serde_json::json!({
            "uuid": "GPU-12345678-1234-1234-0000-123456780004", "minor": 4,
            "product_name": "NVIDIA H100 80GB HBM3", "brand": 14, "architecture": "Hopper",
            "compute_capability": {"major": 9, "minor": 0}, "memory_bytes": 85_520_809_984_u64, "memory_reserved_bytes": 0,
            "multiprocessors": 132, "pci_address": "0000:8a:00.0", "pci_device_id": 0x2330_10de,
            "mig_mode": {"Supported": {"current": false, "pending": false}}, "compute_mode": "Default", "persistence": true, "addressing_mode": "HMM", "c2c": false,
            "module_id": 5, "nvlinks": vec!["Switch"; 18], "fabric": null,
        })
    );
    assert_eq!(gpu.cores(), profile("h100").unwrap().cores());
    assert_eq!(
        node.topology(facts.pci_address),
        HostTopology {
            numa_node: Some(1),
            pcie_root: Some("pci0000:80".to_owned())
        }
    );
}

#[test]
fn nvlinks_have_the_shape_of_the_board() {
    let links = |spec: &str| -> Vec<(usize, usize)> {
        let inventory = node(spec).inventory();
        inventory
            .gpus
            .values()
            .map(|g| {
                let mut peers = g.facts.nvlinks.clone();
                peers.dedup();
                (g.facts.nvlinks.len(), peers.len())
            })
            .collect()
    };
    assert_eq!(
        links("a100-40x4"),
        [(12, 3); 4],
        "a baseboard of four is a mesh"
    );
    assert_eq!(
        links("a100-40x8"),
        [(12, 1); 8],
        "a baseboard of eight has switches"
    );
    assert_eq!(
        links("h100-nvlx3"),
        [(12, 1), (12, 1), (0, 0)],
        "the third has no partner"
    );
    assert_eq!(links("l4x2,t4x1"), [(0, 0); 3]);
    let pairs = node("h100-nvlx4").inventory();
    let pairs: Vec<_> = pairs.nvlink_pairs().into_values().collect();
    assert_eq!(
        (
            pairs[0] == pairs[1],
            pairs[1] == pairs[2],
            pairs[2] == pairs[3]
        ),
        (true, false, true)
    );
    assert_eq!(node("h100x8,l4x2").inventory().nvlink_domains().len(), 8);

    let bridged = node("a30x2");
    let uuids = bridged.uuids();
    assert!(bridged.lose_gpu(&uuids[1]));
    assert_eq!(
        bridged.facts(&uuids[0]).unwrap().nvlinks,
        [],
        "links to a lost GPU are down"
    );
}

#[test]
fn more_gpus_than_slots_go_to_another_pci_segment() {
    let topology = node("h100x16").engine().topology();
    let roots: std::collections::BTreeSet<_> = topology
        .values()
        .filter_map(|t| t.pcie_root.clone())
        .collect();
    let numa: std::collections::BTreeSet<_> =
        topology.values().filter_map(|t| t.numa_node).collect();
    assert_eq!((topology.len(), roots.len()), (16, 8));
    assert_eq!(numa, [0, 1, 2, 3].into());
}

#[test]
fn uuids_differ_between_nodes() {
    let on = |n| SimNode::new(&"h100x1".parse::<SimSpec>().unwrap().on_node(n)).uuids();
    assert_ne!(on(1), on(2));
}

#[test]
fn a_fault_meets_the_calls_it_names_and_no_others() {
    let node = node("h100x2");
    let [a, b] = node.uuids().try_into().unwrap();
    node.fault(
        Fault::fail(GpuErrorCode::UNKNOWN)
            .of(GpuOp::Facts)
            .on(&a)
            .after(1)
            .times(2),
    );
    let seen: Vec<_> = (0..4)
        .map(|_| node.facts(&a).map_err(|e| e.code).err())
        .collect();
    assert_eq!(
        seen,
        [
            None,
            Some(GpuErrorCode::UNKNOWN),
            Some(GpuErrorCode::UNKNOWN),
            None
        ]
    );
    assert!(node.facts(&b).is_ok() && node.mig_mode(&a).is_ok());
    assert_eq!(
        (node.calls(GpuOp::Facts), node.calls(GpuOp::MigMode)),
        (5, 1)
    );

    node.fault(Fault::fail(GpuErrorCode::NO_PERMISSION));
    assert_eq!(node.system().unwrap_err().code, GpuErrorCode::NO_PERMISSION);
    assert_eq!(node.facts(&a).unwrap_err().gpu, Some(a.clone()));
    node.clear_faults();
    assert!(node.system().is_ok());
}

#[test]
fn a_hanging_call_blocks_no_other_call_and_continues_when_released() {
    let node = node("h100x2");
    let [a, b] = node.uuids().try_into().unwrap();
    let then_works = node.fault(Fault::hang().of(GpuOp::Facts).on(&a));
    let then_fails =
        node.fault(Fault::hang_then_fail(GpuErrorCode::GPU_IS_LOST).of(GpuOp::MigMode));
    thread::scope(|scope| {
        let facts = scope.spawn(|| node.facts(&a));
        let mig = scope.spawn(|| node.mig_mode(&b));
        assert!(node.wait_until_hanging(2, SOON));
        assert!(node.facts(&b).is_ok() && node.list().is_ok());
        node.release(then_works);
        assert_eq!(facts.join().unwrap().unwrap().uuid, a);
        node.release(then_fails);
        assert_eq!(
            mig.join().unwrap().unwrap_err().code,
            GpuErrorCode::GPU_IS_LOST
        );
    });
    assert!(
        node.facts(&a).is_ok(),
        "a released fault holds no later call"
    );
}

#[test]
fn a_lost_gpu_is_there_but_answers_nothing_and_a_removed_one_is_unknown() {
    let node = node("h100-nvlx4");
    let uuids = node.uuids();
    assert!(node.lose_gpu(&uuids[1]));
    assert_eq!(
        node.list().unwrap(),
        [uuids[0].clone(), uuids[2].clone(), uuids[3].clone()]
    );
    assert_eq!(
        node.facts(&uuids[1]).unwrap_err().code,
        GpuErrorCode::GPU_IS_LOST
    );
    assert!(node.restore_gpu(&uuids[1]));
    assert!(node.facts(&uuids[1]).is_ok());

    let removed = node.remove_gpu(&uuids[1]).unwrap();
    assert_eq!(
        node.processes(&uuids[1]).unwrap_err().code,
        GpuErrorCode::NOT_FOUND
    );
    let added = node.add_gpu(profile("h100-nvl").unwrap()).unwrap();
    assert!(!uuids.contains(&added), "a new card has a new UUID");
    let new = node.facts(&added).unwrap();
    assert_eq!(
        (new.pci_address, new.minor),
        (removed.facts.pci_address, removed.facts.minor),
        "in the free slot"
    );
    assert_eq!(
        new.nvlinks.first(),
        Some(&NvLinkPeer::Gpu(node.facts(&uuids[0]).unwrap().pci_address))
    );
    assert_eq!(
        conformance(
            &node,
            &Expect {
                gpus: Some(4),
                ..Expect::default()
            }
        ),
        []
    );
}

#[test]
fn nothing_answers_while_the_driver_is_not_loaded() {
    let node = node("h100x1");
    let uuid = node.uuids().remove(0);
    node.edit(|e| e.set_driver_loaded(false));
    let codes = [
        node.open().unwrap_err().code,
        node.system().unwrap_err().code,
        node.list().unwrap_err().code,
        node.facts(&uuid).unwrap_err().code,
    ];
    assert_eq!(codes, [GpuErrorCode::DRIVER_NOT_LOADED; 4]);
    node.edit(|e| e.set_driver_loaded(true));
    node.fault(
        Fault::fail(GpuErrorCode::LIB_RM_VERSION_MISMATCH)
            .of(GpuOp::Init)
            .times(1),
    );
    assert_eq!(
        node.open().unwrap_err().code,
        GpuErrorCode::LIB_RM_VERSION_MISMATCH
    );
    assert!(node.open().is_ok());
}

#[test]
fn a_reboot_forgets_what_the_hardware_forgets() {
    let node = node("a100-40x1,h100x1");
    let uuids = node.uuids();
    let before = node.engine().boot_id();
    node.edit(|e| {
        for uuid in &uuids {
            e.gpu(uuid).unwrap().facts.mig_mode = MigMode::Supported {
                current: true,
                pending: true,
            };
        }
    });
    node.start_process(&uuids[0], 42);
    assert_eq!(
        node.processes(&uuids[0]).unwrap(),
        [GpuProcess::new(42, None)]
    );
    node.lose_gpu(&uuids[1]);
    node.edit(Engine::reboot);
    assert_ne!(node.engine().boot_id(), before);
    assert_eq!(node.processes(&uuids[0]).unwrap(), []);
    assert!(
        node.mig_mode(&uuids[0]).unwrap().is_on(),
        "Ampere keeps MIG mode"
    );
    assert!(
        !node.mig_mode(&uuids[1]).unwrap().is_on(),
        "Hopper does not"
    );
}

#[test]
fn the_whole_state_survives_as_text_and_any_fact_can_be_changed() {
    let node = node("h100x2,l4x1");
    let a = node.uuids().remove(0);
    node.edit(|e| {
        e.gpu(&a).unwrap().facts.architecture = Architecture::from_nvml(11);
        e.set_driver_version(
            "535.161.08",
            CudaVersion {
                major: 12,
                minor: 2,
            },
        );
    });
    node.fault(
        Fault::fail(GpuErrorCode(4711))
            .of(GpuOp::List)
            .on(&a)
            .times(3),
    );
    node.start_process(&a, 7);
    node.end_process(8);
    let text = serde_json::to_string(&node.engine()).unwrap();
    let back: Engine = serde_json::from_str(&text).unwrap();
    assert_eq!(back, node.engine());
    let again = SimNode::from_engine(back);
    assert_eq!(
        again.facts(&a).unwrap().architecture,
        Architecture::Unknown(11)
    );
    assert_eq!(
        again.system().unwrap().nvml_version.as_deref(),
        Some("12.535.161.08")
    );
    again.end_process(7);
    assert_eq!(again.processes(&a).unwrap(), []);
}

/// Read on an H200 by `divvy-hardware --capture`.
#[test]
fn the_simulated_h200_is_what_was_read_on_a_real_one() {
    let text = include_str!("../fixtures/h200-580.159.04.json");
    let captured: serde_json::Value = serde_json::from_str(text).unwrap();
    let gpus: std::collections::BTreeMap<GpuUuid, Gpu> =
        serde_json::from_value(captured["gpus"].clone()).unwrap();
    let real = gpus.into_values().next().unwrap();
    let ours = node("h200x1")
        .inventory()
        .gpus
        .into_values()
        .next()
        .unwrap();
    let of = |gpu: &Gpu| {
        let facts = &gpu.facts;
        (
            facts.product_name.clone(),
            (facts.brand, facts.architecture, facts.compute_capability),
            (facts.memory_bytes, facts.multiprocessors, facts.minor),
            (facts.pci_device_id, facts.mig_mode, facts.c2c),
        )
    };
    assert_eq!(of(&ours), of(&real));
    let profiles = |gpu: &Gpu| gpu.mig.as_ref().unwrap().capabilities.profiles().to_vec();
    let (ours, real) = (profiles(&ours), profiles(&real));
    assert_eq!(ours.len(), real.len());
    for (mut ours, real) in ours.into_iter().zip(real) {
        // Drivers differ by some 256 MiB, and in the names they give: this one gave none.
        let apart = ours.memory_mib.abs_diff(real.memory_mib);
        assert!(apart * 100 <= real.memory_mib, "{ours:?} {real:?}");
        ours.memory_mib = real.memory_mib;
        ours.driver_name.clone_from(&real.driver_name);
        assert_eq!(ours, real);
    }
}
