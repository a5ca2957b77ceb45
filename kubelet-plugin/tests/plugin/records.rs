//! Records that are not as they were written.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use sha2::{Digest, Sha256};

use crate::node::{DRIVER, Node, device, wait};

pub(crate) fn record(node: &Node, uid: &str) -> std::path::PathBuf {
    node.kubelet.config().plugin_dir(DRIVER).join("claims").join(format!("{uid}.json"))
}

/// The same record as a later version would have written it.
pub(crate) fn make_newer(path: &std::path::Path) {
    let text = fs_err::read_to_string(path).unwrap();
    let (_, body) = text.trim_end().split_once("\"body\":").unwrap();
    let body = body.strip_suffix('}').unwrap().replace("\"version\":3}", "\"version\":99}");
    assert!(body.contains("\"version\":99"), "{body}");
    let sum = Sha256::digest(body.as_bytes()).iter().fold(String::new(), |sum, b| format!("{sum}{b:02x}"));
    fs_err::write(path, format!("{{\"checksum\":\"{sum}\",\"body\":{body}}}")).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncated_record_is_rebuilt_from_the_api_and_the_claim_keeps_its_device() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    let answer = node.prepare(&claim).await;
    plugin.stop().await;
    let path = record(&node, &claim.uid);
    let text = fs_err::read(&path).unwrap();
    fs_err::write(&path, &text[..text.len() / 2]).unwrap();

    let plugin = node.start().await;
    // All but when its prepare came is there again.
    let body = |bytes: &[u8]| {
        let mut file: serde_json::Value = serde_json::from_slice(bytes).ok()?;
        file["body"].as_object_mut()?.remove("received");
        Some(file["body"].clone())
    };
    let whole = body(&text);
    assert!(whole.is_some());
    wait("the record", || (body(&fs_err::read(&path).ok()?) == whole).then_some(())).await;
    assert_eq!(node.prepare(&claim).await, answer);
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    assert_eq!(node.records(), Vec::<String>::new());
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_of_a_later_version_keeps_its_gpu_off_limits_and_is_left_as_it_is() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    plugin.stop().await;
    let path = record(&node, &claim.uid);
    make_newer(&path);
    let text = fs_err::read(&path).unwrap();

    let plugin = node.start().await;
    let expected =
        vec![("gpu-1".to_owned(), vec![]), ("gpu-0".to_owned(), vec!["gpu.divvy.dev/fenced".to_owned()])];
    wait("the taint", || (node.published() == expected).then_some(())).await;
    assert_eq!(
        node.prepare(&claim).await.unwrap_err(),
        format!(
            "claim default/c (UID {}): its record was written by a later version of divvy (format 99) and is left unchanged (run that version again, or delete the pod and the claim)",
            claim.uid
        )
    );
    let other = node.claim("other", &["gpu-0"]);
    let uuid = &node.sim.uuids()[0];
    assert_eq!(
        node.prepare(&other).await.unwrap_err(),
        format!(
            "device gpu-0 ({uuid}) of claim default/other (UID {}): its GPU is held by claim UID {}, whose record was written by a later version of divvy (format 99) (run that version again, or delete the holding claim and its pod)",
            other.uid, claim.uid
        )
    );
    assert_eq!(node.unprepare(&claim).await, Ok(()), "its pod must be able to end");
    assert_eq!(fs_err::read(&path).unwrap(), text);
    let free = node.claim("free", &["gpu-1"]);
    assert_eq!(
        node.prepare(&free).await,
        Ok(vec![device(&free, "gpu", "gpu-1")]),
        "the other GPU is not concerned"
    );
    plugin.stop().await;
}

/// `gpu-<n>` of the slices, and the UUID it is published with.
fn numbered(node: &Node) -> BTreeMap<String, String> {
    let slices = node.api.list::<ResourceSlice>().into_iter();
    let devices = slices.flat_map(|slice| slice.spec.devices.unwrap_or_default());
    let uuid = |device: &Device| device.attributes.as_ref()?.get("gpuUUID")?.string.clone();
    devices.filter_map(|device| Some((device.name.clone(), uuid(&device)?))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_file_of_gpu_numbers_is_made_again_and_no_gpu_changes_its_name() {
    let node = Node::new("h100x3");
    let file = node.kubelet.config().plugin_dir(DRIVER).join("node/ordinals.json");
    // Against the order of the addresses, in which a fresh node would count.
    let numbers: BTreeMap<_, _> = node.sim.uuids().into_iter().rev().zip(0..).collect();
    fs_err::create_dir_all(file.parent().unwrap()).unwrap();
    fs_err::write(&file, serde_json::to_vec(&numbers).unwrap()).unwrap();
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-2"]);
    let answer = node.prepare(&claim).await.unwrap();
    let named = numbered(&node);
    assert_eq!(named["gpu-2"], node.sim.uuids()[0].to_string());
    plugin.stop().await;

    fs_err::write(&file, b"{\"GPU").unwrap();
    let plugin = node.start().await;
    wait("the count", || plugin.metrics.encode().contains("gpu_numbers_lost_total 1").then_some(())).await;
    assert_eq!(numbered(&node), named);
    assert_eq!(node.prepare(&claim).await, Ok(answer));
    let again: BTreeMap<_, _> = serde_json::from_slice(&fs_err::read(&file).unwrap()).unwrap();
    assert_eq!(numbers, again);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_which_only_its_gpus_file_knows_gets_its_record_back_and_keeps_its_partition() {
    let node = Node::new("h100x1");
    let config = || {
        let mut config = node.config(&["--offer", "everything"]);
        config.timing.executor.orphan_grace = Duration::from_millis(100);
        config.timing.reconcile = Duration::from_millis(50);
        config
    };
    let plugin = node.start_with(config());
    plugin.wait_ready().await;
    let claim = node.claim("c", &["gpu-0-mig-1g10gb-19-0"]);
    let answer = node.prepare(&claim).await;
    answer.clone().unwrap();
    plugin.stop().await;
    fs_err::remove_file(record(&node, &claim.uid)).unwrap();
    for file in node.cdi_files().keys() {
        fs_err::remove_file(node.cdi_dir().join(file)).unwrap();
    }
    fs_err::remove_dir_all(node.metadata_dir()).unwrap();
    let plugin = node.start_with(config());
    plugin.wait_ready().await;
    wait("the record", || (node.records() == [format!("{}.json", claim.uid)]).then_some(())).await;
    assert_eq!(node.sim.engine().gpus()[0].instances.len(), 1);
    assert_eq!(node.prepare(&claim).await, answer);
    plugin.stop().await;
}
