//! Faults of a claim or a node, and exactly what the user sees of them.

use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use divvy_fake_cluster::{ClaimRef, Fault, GpuPolicy};
use divvy_gpu_sim::Fault as GpuFault;
use divvy_model::GpuErrorCode;
use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, OpaqueDeviceConfiguration, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use serde_json::{Value, json};

use crate::node::{DRIVER, Node, POOL, device, wait};

fn config(claim: &mut ResourceClaim, driver: &str, requests: &[&str], parameters: Value) {
    let opaque = OpaqueDeviceConfiguration {
        driver: driver.into(),
        parameters: RawExtension(parameters),
    };
    let entry = DeviceAllocationConfiguration {
        source: "FromClaim".into(),
        requests: (!requests.is_empty())
            .then(|| requests.iter().map(|r| (*r).to_owned()).collect()),
        opaque: Some(opaque),
    };
    let devices = claim
        .status
        .as_mut()
        .unwrap()
        .allocation
        .as_mut()
        .unwrap()
        .devices
        .as_mut()
        .unwrap();
    devices.config.get_or_insert_default().push(entry);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_that_are_not_what_the_kubelet_means_are_refused_in_words() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);

    let other = ClaimRef::new("default", "c", "11111111-2222-3333-4444-555555555555");
    assert_eq!(
        node.prepare(&other).await.unwrap_err(),
        format!(
            "claim default/c (UID {}) does not match the claim in the API, which has UID {}: the claim was deleted and created again under the same name (delete the pod so that it gets the new claim)",
            other.uid, claim.uid
        )
    );
    let missing = ClaimRef::new("default", "missing", "11111111-2222-3333-4444-555555555555");
    assert_eq!(
        node.prepare(&missing).await.unwrap_err(),
        "claim default/missing (UID 11111111-2222-3333-4444-555555555555) does not exist in the API: it was deleted (the kubelet retries for a pod that still needs it)"
    );
    let unallocated = node.put(mk_claim("default", "u", DRIVER, 1));
    assert_eq!(
        node.prepare(&unallocated).await.unwrap_err(),
        format!(
            "claim default/u (UID {}) has no allocation (the scheduler has not allocated it, or it was deallocated again)",
            unallocated.uid
        )
    );
    let strange = node.claim("strange", &["gpu-0-vgpu"]);
    assert_eq!(
        node.prepare(&strange).await.unwrap_err(),
        format!(
            "device gpu-0-vgpu of claim default/strange (UID {}): this driver publishes no such device (delete the pod and the claim, so that they are scheduled again): device name \"gpu-0-vgpu\" is not one this driver publishes (expected gpu-<number>, gpu-<number>-ts, gpu-<number>-mps, gpu-<number>-admin, gpu-<number>-mig-<profile>-<profile id>-<start> or the same with -ts)",
            strange.uid
        )
    );
    let absent = node.claim("absent", &["gpu-7"]);
    assert_eq!(
        node.prepare(&absent).await.unwrap_err(),
        format!(
            "device gpu-7 of claim default/absent (UID {}): no GPU of this node has this number any more (delete the pod and the claim, so that they are scheduled again)",
            absent.uid
        )
    );
    assert_eq!((node.records().len(), node.cdi_files().len()), (0, 0));
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_drivers_results_and_configs_of_a_claim_are_left_alone() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let results = vec![
        mk_result("nic", "nic.example.com", "n1", "nic-0"),
        mk_result("gpu", DRIVER, POOL, "gpu-0"),
    ];
    let mut claim = allocated(mk_claim("default", "c", DRIVER, 1), results);
    config(
        &mut claim,
        "nic.example.com",
        &[],
        json!({ "apiVersion": "nic.example.com/v1", "kind": "Nic" }),
    );
    config(
        &mut claim,
        DRIVER,
        &["gpu"],
        json!({ "apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig" }),
    );
    let claim = node.put(claim);
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-0")])
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_field_in_a_config_fails_its_claim_with_its_place() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let mut bad = allocated(
        mk_claim("default", "bad", DRIVER, 1),
        vec![mk_result("gpu", DRIVER, POOL, "gpu-0")],
    );
    config(
        &mut bad,
        DRIVER,
        &[],
        json!({ "apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig", "shareing": {} }),
    );
    let (bad, good) = (node.put(bad), node.claim("good", &["gpu-1"]));
    let mut answers = node
        .kubelet
        .prepare(DRIVER, &[bad.clone(), good.clone()])
        .await
        .unwrap();
    assert_eq!(
        answers.remove(&good.uid).unwrap(),
        Ok(vec![device(&good, "gpu", "gpu-1")])
    );
    assert_eq!(
        answers.remove(&bad.uid).unwrap().unwrap_err(),
        format!(
            "device gpu-0 ({}) of claim default/bad (UID {}): config entry 0 of the claim for this driver is invalid (correct spec.devices.config of the claim or its template; a claim's spec is immutable, so create a new claim): unknown field \"shareing\" (GpuConfig has \"apiVersion\", \"kind\", \"timeSlicing\", \"mps\", \"extraNodes\")",
            node.sim.uuids()[0],
            bad.uid
        )
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_is_away_for_a_while_is_waited_for_inside_the_call() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.api
        .fail_next(2, "get", "resourceclaims", Fault::Status(500));
    node.api
        .fail_next(1, "get", "resourceclaims", Fault::DropBefore);
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-0")])
    );

    let late = node.claim("late", &["gpu-0"]);
    node.unprepare(&claim).await.unwrap();
    node.api
        .fail_next(1, "get", "resourceclaims", Fault::Status(403));
    let refused = node.prepare(&late).await.unwrap_err();
    let expected = format!(
        "reading claim default/late (UID {}) is forbidden: the plugin's ServiceAccount needs \"get\" on resourceclaims.resource.k8s.io: ",
        late.uid
    );
    assert!(refused.starts_with(&expected), "{refused}");
    plugin.stop().await;

    let mut config = node.config(&[]);
    config.timing.call = std::time::Duration::from_millis(300);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    node.api
        .fail_next(1000, "get", "resourceclaims", Fault::Status(503));
    let error = node.prepare(&late).await.unwrap_err();
    // How many seconds that were depends on how busy the machine is.
    let expected = format!(
        "failed to read claim default/late (UID {}) from the API within ",
        late.uid
    );
    assert!(error.starts_with(&expected), "{error}");
    node.api.clear_faults();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_nvml_the_plugin_registers_says_why_and_catches_up() {
    let node = Node::new("h100x1");
    let old = node.claim("old", &["gpu-0"]);
    node.sim
        .fault(GpuFault::fail(GpuErrorCode::LIBRARY_NOT_FOUND));
    let plugin = node.start_with(node.config(&[]));
    node.kubelet
        .wait_registered(DRIVER, crate::node::PATIENCE)
        .await
        .unwrap();
    let missing = wait("the driver's absence", || {
        let missing = plugin.readiness.missing();
        missing
            .iter()
            .any(|m| m.starts_with("inventory: NVML"))
            .then_some(missing)
    })
    .await;
    assert!(
        missing.iter().any(|m| m.starts_with("inventory: NVML ")
            && m.ends_with(
                "failed: LIBRARY_NOT_FOUND (12) (check --driver-root and --nvml-library)"
            )),
        "{missing:?}"
    );
    assert_eq!(
        node.unprepare(&old).await,
        Ok(()),
        "unprepare is served without a driver"
    );
    assert_eq!(
        node.prepare(&old).await.unwrap_err(),
        format!(
            "device gpu-0 of claim default/{} (UID {}): the NVIDIA driver of this node does not answer yet (check the node plugin's log, and that nvidia-smi works on the node)",
            old.name, old.uid
        )
    );
    node.sim.clear_faults();
    plugin.wait_ready().await;
    assert_eq!(
        node.prepare(&old).await,
        Ok(vec![device(&old, "gpu", "gpu-0")])
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unmounted_cdi_folder_fails_the_claim_with_the_flag() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    fs_err::remove_dir_all(node.dir.path().join("run")).unwrap();
    let claim = node.claim("c", &["gpu-0"]);
    let error = node.prepare(&claim).await.unwrap_err();
    let expected = format!(
        "claim default/c (UID {uid}) cannot be prepared: CDI file {DRIVER}-claim_{uid}.json in {dir} cannot be written (its parent folder does not exist: mount the host's CDI folder into the plugin, at the path of --cdi-dir)",
        uid = claim.uid,
        dir = node.cdi_dir().display()
    );
    assert!(error.starts_with(&expected), "{error}");
    assert_eq!(
        node.records(),
        Vec::<String>::new(),
        "nothing is left behind"
    );
    fs_err::create_dir_all(node.dir.path().join("run")).unwrap();
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-0")]),
        "the folder itself is made"
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unusable_folder_ends_the_start_with_its_flag() {
    let node = Node::new("h100x1");
    let plugin_dir = node.kubelet.config().plugin_dir(DRIVER);
    fs_err::create_dir_all(plugin_dir.parent().unwrap()).unwrap();
    fs_err::write(&plugin_dir, "not a folder").unwrap();
    let ended = node.start_with(node.config(&[])).ended().await;
    let expected = format!("--plugin-dir {} cannot be used: ", plugin_dir.display());
    assert!(ended.starts_with(&expected), "{ended}");
}

/// A tenant may write any parameters: of its own claims, which are refused in words, and so deep
/// that no parser follows them, which keeps no other claim from its reader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_tenant_writes_into_a_config_ends_at_its_claim() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let nested = |level: fn(Value) -> Value| (0..400).fold(json!(1), |inner, _| level(inner));
    let of = |kind: &str, rest: Value| {
        let mut all = json!({ "apiVersion": "divvy.dev/v1beta1", "kind": kind });
        let fields = rest.as_object().unwrap().clone();
        all.as_object_mut().unwrap().extend(fields);
        all
    };
    let gpu = |rest: Value| of("GpuConfig", rest);
    let hostile = [
        gpu(json!({ "extraNodes": ["/dev/../etc/shadow"] })),
        gpu(json!({ "extraNodes": ["/dev/nvidia3"] })),
        gpu(json!({ "extraNodes": ["/dev/sda", "/dev//sda", "/dev/./sda"] })),
        gpu(json!({ "mps": { "limits": { "cores": 1e308 } } })),
        gpu(json!({ "mps": { "limits": { "memory": "99999999999999999999Ti" } } })),
        of("ShareConfig", json!({ "limits": { "memory": "-5Gi" } })),
        of("ShareConfig", json!({ "limits": { "memory": "1Gi\nX=1" } })),
        of("GpuConfig\n\u{1b}[31m", json!({})),
        of("MpsConfig", json!({ "priority": "BelowNormal; quit" })),
        gpu(json!({ "x".repeat(9900): 1 })),
        json!([1, 2, 3]),
        json!("text"),
        json!(null),
        gpu(json!({ "timeSlicing": nested(|inner| json!({ "a": inner })) })),
        gpu(json!({ "timeSlicing": nested(|inner| json!([inner])) })),
    ];
    for (number, parameters) in hostile.into_iter().enumerate() {
        let name = format!("hostile-{number}");
        let results = vec![mk_result("gpu", DRIVER, POOL, "gpu-0")];
        let mut claim = allocated(mk_claim("default", &name, DRIVER, 1), results);
        config(&mut claim, DRIVER, &[], parameters);
        let hostile = node.put(claim);
        let refused = node.prepare(&hostile).await.unwrap_err();
        // The API takes parameters of 10 KiB.
        assert!(refused.len() < 12_000, "{name}: {} bytes", refused.len());
        let is_plain = |c: char| !c.is_control() || c == '\n';
        assert!(
            refused.chars().all(is_plain) && !refused.contains("recursion"),
            "{name}: {refused}"
        );
        let good = node.claim(&format!("good-{number}"), &["gpu-1"]);
        node.prepare(&good).await.unwrap();
        node.unprepare(&good).await.unwrap();
    }
    assert_eq!((node.records().len(), node.cdi_files().len()), (0, 0));
    // All of them are listed for a device that is to be withdrawn.
    let rules = json!({ "rules": [{ "modes": ["TimeSlicing"] }] });
    node.api.put(&GpuPolicy::new("shares", rules)).unwrap();
    let has_shares = || node.published().iter().any(|(name, _)| name == "gpu-0-ts");
    wait("shares", || has_shares().then_some(())).await;
    node.api.delete::<GpuPolicy>("", "shares").unwrap();
    wait("their end", || (!has_shares()).then_some(())).await;
    plugin.stop().await;
}
