//! Records that are not as they were written.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_claims::{decode_ordinals, encode_ordinals};
use divvy_fake_cluster::GpuPolicy;
use divvy_model::Ordinals;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::node::{DRIVER, Node, device, wait};

pub(crate) fn record(node: &Node, uid: &str) -> std::path::PathBuf {
    node.kubelet
        .config()
        .plugin_dir(DRIVER)
        .join("claims")
        .join(format!("{uid}.json"))
}

/// The same record as a later version would have written it.
pub(crate) fn make_newer(path: &std::path::Path) {
    let text = fs_err::read_to_string(path).unwrap();
    let (_, body) = text.trim_end().split_once("\"body\":").unwrap();
    let body = body
        .strip_suffix('}')
        .unwrap()
        .replace("\"version\":1}", "\"version\":99}");
    assert!(body.contains("\"version\":99"), "{body}");
    let sum = Sha256::digest(body.as_bytes())
        .iter()
        .fold(String::new(), |sum, b| format!("{sum}{b:02x}"));
    fs_err::write(path, format!("{{\"checksum\":\"{sum}\",\"body\":{body}}}")).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncated_record_is_rebuilt_and_the_claim_keeps_its_device() {
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
    wait("the record", || {
        (body(&fs_err::read(&path).ok()?) == whole).then_some(())
    })
    .await;
    assert_eq!(node.prepare(&claim).await, answer);
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    assert_eq!(node.records(), Vec::<String>::new());
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_of_a_later_version_stays_and_keeps_its_gpu() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    plugin.stop().await;
    let path = record(&node, &claim.uid);
    make_newer(&path);
    let text = fs_err::read(&path).unwrap();

    let plugin = node.start().await;
    let expected = vec![
        ("gpu-1".to_owned(), vec![]),
        ("gpu-0".to_owned(), vec!["gpu.divvy.dev/fenced".to_owned()]),
    ];
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
    assert_eq!(
        node.unprepare(&claim).await,
        Ok(()),
        "its pod must be able to end"
    );
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
    devices
        .filter_map(|device| Some((device.name.clone(), uuid(&device)?)))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_file_of_gpu_numbers_is_made_again_with_the_same_names() {
    let node = Node::new("h100x3");
    let file = node
        .kubelet
        .config()
        .plugin_dir(DRIVER)
        .join("node/ordinals.json");
    // Against the order of the addresses, in which a fresh node would count.
    let numbers: Ordinals = node.sim.uuids().into_iter().rev().zip(0..).collect();
    fs_err::create_dir_all(file.parent().unwrap()).unwrap();
    fs_err::write(&file, encode_ordinals(&numbers)).unwrap();
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-2"]);
    let answer = node.prepare(&claim).await.unwrap();
    let named = numbered(&node);
    assert_eq!(named["gpu-2"], node.sim.uuids()[0].to_string());
    plugin.stop().await;

    fs_err::write(&file, b"{\"GPU").unwrap();
    let plugin = node.start().await;
    wait("the count", || {
        plugin
            .metrics
            .encode()
            .contains("gpu_numbers_lost_total 1")
            .then_some(())
    })
    .await;
    assert_eq!(numbered(&node), named);
    assert_eq!(node.prepare(&claim).await, Ok(answer));
    let again = decode_ordinals(&fs_err::read(&file).unwrap());
    assert_eq!(again.fine(), Some(&numbers));
    plugin.stop().await;
}

impl Node {
    fn plugin_dir(&self) -> std::path::PathBuf {
        self.kubelet.config().plugin_dir(DRIVER)
    }

    /// Removes everything from the plugin's folder.
    fn empty_plugin_dir(&self) {
        let dir = self.plugin_dir();
        fs_err::remove_dir_all(&dir).unwrap();
        fs_err::create_dir_all(&dir).unwrap();
    }
}

/// Prepares and unprepares a new claim of each of these devices.
async fn serve_each(node: &Node, devices: &[&str]) {
    for name in devices {
        let claim = node.claim("new", &[name]);
        let answer = node.prepare(&claim).await;
        assert_eq!(answer, Ok(vec![device(&claim, "gpu", name)]));
        assert_eq!(node.unprepare(&claim).await, Ok(()));
        node.api.delete::<ResourceClaim>("default", "new").unwrap();
    }
}

/// A node whose folder was emptied while its slices stayed: numbers come from the slices and are
/// written, and every claim is served, also by the plugin after the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_emptied_folder_beside_published_slices_is_filled_again() {
    let node = Node::new("h100x3");
    let file = node.plugin_dir().join("node/ordinals.json");
    // Against the order of the addresses, in which a fresh node would count.
    let numbers: Ordinals = node.sim.uuids().into_iter().rev().zip(0..).collect();
    fs_err::create_dir_all(file.parent().unwrap()).unwrap();
    fs_err::write(&file, encode_ordinals(&numbers)).unwrap();
    let plugin = node.start().await;
    let held = node.claim("held", &["gpu-2"]);
    let answer = node.prepare(&held).await;
    answer.clone().unwrap();
    let named = numbered(&node);
    assert_eq!(named["gpu-2"], node.sim.uuids()[0].to_string());
    plugin.stop().await;

    node.empty_plugin_dir();
    for _ in 0..2 {
        let plugin = node.start().await;
        serve_each(&node, &["gpu-0", "gpu-1"]).await;
        let written = decode_ordinals(&fs_err::read(&file).unwrap());
        assert_eq!(written.fine(), Some(&numbers));
        assert_eq!(numbered(&node), named);
        assert_eq!(node.prepare(&held).await, answer);
        let other = node.claim("other", &["gpu-2"]);
        let refused = node.prepare(&other).await.unwrap_err();
        assert!(refused.contains("default/held"), "{refused}");
        node.api
            .delete::<ResourceClaim>("default", "other")
            .unwrap();
        plugin.stop().await;
    }
    let plugin = node.start().await;
    assert_eq!(node.unprepare(&held).await, Ok(()));
    assert_eq!(node.records(), Vec::<String>::new());
    plugin.stop().await;
}

/// Each file and folder of the plugin is lost in turn, beside slices and claims that still name
/// what it had: nothing of the pool is written again, and claims keep what they have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_single_file_that_is_lost_costs_no_claim_its_device() {
    let node = Node::new("h100x3");
    let policy = json!({ "rules": [{ "modes": ["Whole", "Mig"] }] });
    node.api.put(&GpuPolicy::new("p", policy)).unwrap();
    let plugin = node.start().await;
    wait("partitions", || {
        node.published()
            .iter()
            .any(|(name, _)| name.contains("-mig-"))
            .then_some(())
    })
    .await;
    let (whole, part) = (
        node.claim("whole", &["gpu-0"]),
        node.claim("part", &["gpu-1-mig-1g10gb-19-3"]),
    );
    let answers = [node.prepare(&whole).await, node.prepare(&part).await];
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    plugin.stop().await;
    let slices = || {
        let slices = node.api.list::<ResourceSlice>().into_iter();
        let mut all: Vec<_> = slices.map(|s| (s.metadata.name, s.spec)).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    };
    let before = slices();
    let living = || node.sim.engine().gpus()[1].instances.clone();
    let made = living();
    assert_eq!(made.len(), 1);

    for lost in [
        "node",
        "policies.json",
        "health.json",
        "publisher.lock",
        "publisher.wish",
        "locks",
        "claims",
        "gpus",
    ] {
        let path = node.plugin_dir().join(lost);
        if path.is_dir() {
            fs_err::remove_dir_all(&path).unwrap();
        } else if path.exists() {
            fs_err::remove_file(&path).unwrap();
        }
        let plugin = node.start().await;
        assert_eq!(node.prepare(&whole).await, answers[0], "{lost}");
        assert_eq!(node.prepare(&part).await, answers[1], "{lost}");
        serve_each(&node, &["gpu-2", "gpu-2-mig-1g10gb-19-0"]).await;
        assert_eq!(living(), made, "{lost}");
        assert_eq!(slices(), before, "{lost}");
        plugin.stop().await;
    }
    let plugin = node.start().await;
    for claim in [&whole, &part] {
        assert_eq!(node.unprepare(claim).await, Ok(()));
    }
    assert_eq!(
        (node.records(), living()),
        (Vec::<String>::new(), Vec::new())
    );
    plugin.stop().await;
}

/// Without its record and its GPU's file nothing says whose a partition is: no claim gets it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_of_an_emptied_folder_goes_to_no_claim() {
    let node = Node::new("h100x1");
    let everything = ["--offer", "everything"];
    let plugin = node.start_with(node.config(&everything));
    plugin.wait_ready().await;
    let held = node.claim("held", &["gpu-0-mig-1g10gb-19-3"]);
    node.prepare(&held).await.unwrap();
    plugin.stop().await;
    node.empty_plugin_dir();
    let plugin = node.start_with(node.config(&everything));
    plugin.wait_ready().await;
    let tainted = |name: &str| {
        let published = node.published();
        let taints = published.iter().find(|(device, _)| device == name);
        taints.is_some_and(|(_, taints)| *taints == ["gpu.divvy.dev/foreign"])
    };
    wait("the taints", || {
        (tainted("gpu-0") && tainted("gpu-0-mig-1g10gb-19-3")).then_some(())
    })
    .await;
    for device in ["gpu-0", "gpu-0-mig-1g10gb-19-3", "gpu-0-mig-7g80gb-0-0"] {
        let other = node.claim("other", &[device]);
        node.prepare(&other).await.unwrap_err();
        node.api
            .delete::<ResourceClaim>("default", "other")
            .unwrap();
    }
    serve_each(&node, &["gpu-0-mig-1g10gb-19-0"]).await;
    assert_eq!(node.unprepare(&held).await, Ok(()), "its pod can end");
    assert_eq!(node.sim.engine().gpus()[0].instances.len(), 1);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_known_from_its_gpus_file_only_keeps_its_partition() {
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
    wait("the record", || {
        (node.records() == [format!("{}.json", claim.uid)]).then_some(())
    })
    .await;
    assert_eq!(node.sim.engine().gpus()[0].instances.len(), 1);
    assert_eq!(node.prepare(&claim).await, answer);
    plugin.stop().await;
}
