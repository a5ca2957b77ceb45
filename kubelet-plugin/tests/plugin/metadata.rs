//! Metadata that containers can read about their devices.

use std::collections::BTreeMap;

use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use serde_json::Value;

use crate::node::{DRIVER, Node, POOL, wait};

const FOLDER: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// Returns what a container finds there: the newest object of each file that CDI files mount, by
/// the path in the container.
fn seen(node: &Node) -> BTreeMap<String, Value> {
    let specs = node
        .cdi_files()
        .into_values()
        .map(serde_json::from_value::<divvy_cdi::Spec>);
    let devices = specs.flat_map(|spec| spec.unwrap().devices);
    let mut seen = BTreeMap::new();
    for mount in devices.flat_map(|device| device.container_edits.mounts) {
        let path = mount.container_path;
        assert!(path.starts_with(FOLDER), "{path}");
        assert_eq!(mount.options, ["ro", "bind"]);
        let text = fs_err::read_to_string(&mount.host_path).unwrap();
        let object = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert!(seen.insert(path, object).is_none());
    }
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_reads_its_devices_attributes_and_files_come_and_go() {
    let node = Node::new("h100x2");
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    let partition = "gpu-0-mig-1g10gb-19-2";
    let results = vec![
        mk_result("one/mig", DRIVER, POOL, partition),
        mk_result("other", DRIVER, POOL, "gpu-1"),
    ];
    let mut object = allocated(mk_claim("default", "pod-gpu-x7k2p", DRIVER, 2), results);
    let annotation = (
        "resource.kubernetes.io/pod-claim-name".to_owned(),
        "gpu".to_owned(),
    );
    object.metadata.annotations = Some([annotation].into());
    let claim = node.put(object);
    node.prepare(&claim).await.unwrap();
    let whole = seen(&node);
    let at = |request: &str| {
        format!("{FOLDER}/resourceclaimtemplates/gpu/{request}/{DRIVER}-metadata.json")
    };
    assert_eq!(
        whole.keys().cloned().collect::<Vec<_>>(),
        [at("one"), at("other")]
    );
    let one = &whole[&at("one")];
    assert_eq!(one["podClaimName"], "gpu");
    assert_eq!(one["metadata"]["uid"], claim.uid);
    assert_eq!(one["requests"][0]["name"], "one/mig");
    let device = &one["requests"][0]["devices"][0];
    assert_eq!(
        (&device["name"], &device["pool"]),
        (&partition.into(), &POOL.into())
    );
    let attributes = &device["attributes"];
    assert_eq!(attributes["profile"]["string"], "1g.10gb", "{attributes:#}");
    assert!(
        attributes["resource.kubernetes.io/pciBusID"]["string"].is_string(),
        "{attributes:#}"
    );
    // The MIG device that the claim got, as its environment says too.
    let text = node.cdi_files().into_values().next().unwrap().to_string();
    let uuid = attributes["uuid"]["string"].as_str().unwrap();
    assert!(
        text.contains(&format!("DIVVY_MIG_UUID_GPU_0_MIG_1G10GB_19_2={uuid}")),
        "{text}"
    );

    // After a restart without them they are there again before the kubelet can call.
    plugin.stop().await;
    let folder = node.metadata_dir();
    fs_err::remove_dir_all(&folder).unwrap();
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    assert_eq!(seen(&node), whole);
    // While it runs, the next look finds that they are gone.
    fs_err::remove_dir_all(folder.join(&claim.uid)).unwrap();
    wait("the files", || {
        folder
            .join(&claim.uid)
            .join("other.json")
            .exists()
            .then_some(())
    })
    .await;

    node.unprepare(&claim).await.unwrap();
    assert_eq!(fs_err::read_dir(&folder).unwrap().count(), 0);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_note_on_a_claim_leads_to_no_path_and_no_file_means_no_mount() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let annotated = |name: &str, device: &str| {
        let mut object = allocated(
            mk_claim("default", name, DRIVER, 1),
            vec![mk_result("gpu", DRIVER, POOL, device)],
        );
        let annotation = (
            "resource.kubernetes.io/pod-claim-name".to_owned(),
            "../../../etc".to_owned(),
        );
        object.metadata.annotations = Some([annotation].into());
        node.put(object)
    };
    let claim = annotated("mine", "gpu-0");
    node.prepare(&claim).await.unwrap();
    let paths: Vec<_> = seen(&node).into_keys().collect();
    assert_eq!(
        paths,
        [format!(
            "{FOLDER}/resourceclaims/mine/gpu/{DRIVER}-metadata.json"
        )]
    );
    plugin.stop().await;

    // Turned off: claims that have files keep them.
    let plugin = node.start_with(node.config(&["--device-metadata", "false"]));
    plugin.wait_ready().await;
    node.prepare(&annotated("without", "gpu-1")).await.unwrap();
    assert_eq!(seen(&node).into_keys().collect::<Vec<_>>(), paths);
    assert_eq!(node.cdi_files().len(), 2);
    plugin.stop().await;
}
