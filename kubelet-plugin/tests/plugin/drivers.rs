//! Every generation of drivers with a few boards, MIG mode off and on: what is published, and what
//! preparing and unpreparing a claim of each kind of device comes to, through NVML's C ABI. The
//! table is `drivers.txt` (`UPDATE_FIXTURES=1` writes it anew).

use std::path::Path;
use std::sync::Arc;

use divvy_model::{GpuDriver, MigMode};
use divvy_nvml::NvmlDriver;
use futures::future::join_all;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use nvidia_ml::{GENERATIONS, Generation, MockState, without_symbols};

use crate::binary::library;
use crate::node::{Node, wait};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_are_prepared_with_every_generation_of_drivers() {
    let mut table = format!(
        "{:<11} MIG {:<13} {:<9} {:<9} PARTITION\n",
        "DRIVER", "BOARD", "WHOLE", "SHARE"
    );
    // Some at a time: two dozen plugins at once wait for each other's readiness on a busy machine.
    for some in GENERATIONS.chunks(4) {
        let nodes = some
            .iter()
            .flat_map(|driver| [rows(*driver, false), rows(*driver, true)]);
        table += &join_all(nodes).await.concat();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plugin/drivers.txt");
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        fs_err::write(&path, &table).unwrap();
    }
    assert_eq!(table, fs_err::read_to_string(&path).unwrap());
}

/// The mock library as the driver's, below the node's folder, with the node's GPUs; MIG mode of
/// those that have it is set.
fn nvml(node: &Node, driver: Generation, gpus: &str, mig: bool) -> NvmlDriver {
    let mut bytes = fs_err::read(library()).unwrap();
    assert!(without_symbols(&mut bytes, &driver.lacks()).is_empty());
    let path = node.dir.path().join("libnvidia-ml.so.1");
    fs_err::write(&path, bytes).unwrap();
    let state = MockState::open_or_create(
        node.dir.path().join("libnvidia-ml.so.1.json"),
        &gpus.parse().unwrap(),
    );
    state
        .unwrap()
        .edit(|engine| {
            engine.set_driver_version(driver.version, driver.cuda);
            for uuid in node.sim.uuids() {
                let mode = &mut engine.gpu(&uuid).unwrap().facts.mig_mode;
                if *mode != MigMode::Unsupported {
                    *mode = MigMode::Supported {
                        current: mig,
                        pending: mig,
                    };
                }
            }
        })
        .unwrap();
    NvmlDriver::open(Some(&path)).unwrap()
}

/// A row for each board; with MIG mode on only for those that have it.
async fn rows(driver: Generation, mig: bool) -> String {
    let gpus = driver.boards();
    let node = Node::new(&gpus);
    let plugin = node.start_on(
        node.config(&["--offer", "everything"]),
        Arc::new(nvml(&node, driver, &gpus, mig)),
    );
    plugin.wait_ready().await;
    let published = wait("all GPUs", || {
        let names: Vec<_> = node.published().into_iter().map(|(name, _)| name).collect();
        (0..node.sim.uuids().len())
            .all(|n| names.iter().any(|name| of_gpu(name, n)))
            .then_some(names)
    })
    .await;
    let mut text = String::new();
    for (number, board) in numbered(&node, mig) {
        let mut kinds = Vec::new();
        for kind in ["", "-ts", "-mig-"] {
            let wanted = format!("gpu-{number}{kind}");
            let fits = |name: &&String| {
                if kind == "-mig-" {
                    name.starts_with(&wanted)
                } else {
                    **name == wanted
                }
            };
            let outcome = match published.iter().find(fits) {
                Some(device) => prepared_and_undone(&node, device).await,
                None => "-".to_owned(),
            };
            kinds.push(outcome);
        }
        let on = if mig { "on" } else { "off" };
        let [whole, share, partition] = &kinds[..] else {
            unreachable!("three kinds")
        };
        text += &format!(
            "{:<11} {on:<3} {board:<13} {whole:<9} {share:<9} {partition}\n",
            driver.version
        );
    }
    plugin.stop().await;
    text
}

/// The GPUs by number, with the names of their boards; with MIG mode on only those that have it.
fn numbered(node: &Node, mig: bool) -> Vec<(usize, String)> {
    let slices = node.api.list::<ResourceSlice>();
    let devices: Vec<_> = slices
        .into_iter()
        .filter_map(|slice| slice.spec.devices)
        .flatten()
        .collect();
    let board = |number: usize| {
        let device = devices.iter().find(|device| of_gpu(&device.name, number))?;
        let uuid = device
            .attributes
            .as_ref()?
            .get("gpuUUID")?
            .string
            .as_ref()?
            .parse()
            .ok()?;
        let mig_mode = node.sim.facts(&uuid).unwrap().mig_mode;
        let model = node
            .sim
            .edit(|engine| engine.gpu(&uuid).unwrap().model.clone());
        (!mig || mig_mode != MigMode::Unsupported).then_some((number, model))
    };
    (0..node.sim.uuids().len()).filter_map(board).collect()
}

fn of_gpu(device: &str, number: usize) -> bool {
    let gpu = format!("gpu-{number}");
    device
        .strip_prefix(&gpu)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Prepares a claim that has a device allocated and undoes it. Returns `ok`, or the refusal.
async fn prepared_and_undone(node: &Node, device: &str) -> String {
    let claim = node.claim("c", &[device]);
    let outcome = match node.prepare(&claim).await {
        Ok(_) => {
            assert_eq!(node.cdi_files().len(), 1, "{device}");
            "ok".to_owned()
        }
        Err(refused) => refused,
    };
    node.unprepare(&claim).await.unwrap();
    assert_eq!(node.records(), [""; 0], "{device}");
    node.api.delete::<ResourceClaim>("default", "c").unwrap();
    outcome
}
