use divvy_fake_cluster::build::{
    allocated, mk_claim, mk_class, mk_device, mk_node, mk_pod, mk_result, mk_slice, reserved,
};
use divvy_fake_cluster::{FakeApi, Fault};
use divvy_fleet::{Job, Nodes, Settings, simulate};
use kube::api::ListParams;

use super::*;

const DRIVER: &str = "gpu.divvy.dev";

/// Two nodes with two GPUs each: of the first one GPU is held, and a pod for two GPUs waits.
fn cluster() -> FakeApi {
    let api = FakeApi::new();
    api.put(&mk_class(DRIVER, DRIVER)).unwrap();
    for name in ["n1", "n2"] {
        api.put(&mk_node(name)).unwrap();
        let devices = vec![mk_device("gpu-0"), mk_device("gpu-1")];
        api.put(&mk_slice(&format!("{name}-0"), DRIVER, name, devices))
            .unwrap();
    }
    let held = allocated(
        mk_claim("ns", "a-gpu", DRIVER, 1),
        vec![mk_result("gpu", DRIVER, "n1", "gpu-0")],
    );
    api.put(&reserved(held, "a", "uid-a")).unwrap();
    let mut running = mk_pod("ns", "a", Some("n1"), &["a-gpu"]);
    for container in running
        .spec
        .iter_mut()
        .flat_map(|spec| &mut spec.containers)
    {
        let resources = container.resources.get_or_insert_default();
        let cpu = k8s_openapi::apimachinery::pkg::api::resource::Quantity("2".to_owned());
        resources.requests = Some([("cpu".to_owned(), cpu)].into());
    }
    api.put(&running).unwrap();
    api.put(&mk_claim("ns", "b-gpu", DRIVER, 2)).unwrap();
    api.put(&mk_pod("ns", "b", None, &["b-gpu"])).unwrap();
    // Its claim is not there.
    api.put(&mk_pod("ns", "c", None, &["none"])).unwrap();
    api
}

/// Returns the node on which the pod that waits is placed first.
fn placed(seen: &Seen) -> Vec<(usize, Vec<String>)> {
    let kinds = seen.kinds();
    let (waiting, _) = seen.waiting();
    let shapes: Vec<Shape> = waiting.into_iter().map(|of| of.shape).collect();
    let jobs: Vec<Job> = (0..shapes.len())
        .map(|shape| Job {
            at: 0,
            name: String::new(),
            shape,
            duration: None,
            priority: 0,
        })
        .collect();
    let fleet = Nodes {
        kinds: &kinds,
        classes: seen.classes.as_deref().unwrap(),
    };
    let (_, placed) = simulate(fleet, &shapes, &jobs, Settings::default());
    let names = |of: divvy_fleet::Placed| {
        let names = of.devices.into_iter().map(|device| device.name);
        (of.node, names.collect())
    };
    placed.into_iter().map(names).collect()
}

#[tokio::test]
async fn a_run_begins_with_what_the_cluster_holds_and_waits_for() {
    let api = cluster();
    let seen = Seen::of_cluster(&api.client()).await.unwrap();
    let kinds = seen.kinds();
    let held: Vec<(&str, usize, Vec<[u64; 2]>)> = kinds
        .iter()
        .map(|kind| (kind.name.as_str(), kind.held.len(), kind.used.clone()))
        .collect();
    assert_eq!(held, [("n1", 1, vec![[2_000, 0]]), ("n2", 0, vec![])]);
    let (waiting, note) = seen.waiting();
    assert_eq!(waiting.len(), 1);
    assert_eq!(
        note.unwrap(),
        "a pod that waits is left out: claim ns/none does not exist"
    );
    let both = vec!["gpu-0".to_owned(), "gpu-1".to_owned()];
    assert_eq!(placed(&seen), [(1, both)]);
    assert!(seen.notes.is_empty(), "{:?}", seen.notes);
}

/// A list that is refused is no empty list.
#[tokio::test]
async fn what_may_not_be_read_of_a_cluster_is_said_and_not_taken_for_none() {
    for (resource, says) in [
        (
            "resourceclaims",
            "resourceclaims: you may not list them: what is held now is not known",
        ),
        (
            "pods",
            "pods: you may not list them: processor time and memory in use",
        ),
        (
            "deviceclasses",
            "deviceclasses: you may not list them: the classes of divvy's chart",
        ),
        (
            "devicetaintrules",
            "devicetaintrules: you may not list them: taints by administrators",
        ),
    ] {
        let api = cluster();
        api.fail_next(1, "list", resource, Fault::Status(403));
        let seen = Seen::of_cluster(&api.client()).await.unwrap();
        assert_eq!(seen.notes.len(), 1, "{:?}", seen.notes);
        assert!(seen.notes[0].starts_with(says), "{:?}", seen.notes);
    }
    for resource in ["nodes", "resourceslices"] {
        let api = cluster();
        api.fail_next(1, "list", resource, Fault::Status(403));
        let error = Seen::of_cluster(&api.client()).await.unwrap_err();
        assert!(format!("{error:#}").contains(resource), "{error:#}");
    }
    // Neither is one that fails.
    let api = cluster();
    api.fail_next(1, "list", "resourceclaims", Fault::Status(500));
    assert!(Seen::of_cluster(&api.client()).await.is_err());
}

/// Writes a bundle's objects as `divvy bundle` does, into a folder.
async fn bundle(api: &FakeApi, plurals: &[&str], missing: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let objects = folder.path().join("objects");
    fs_err::create_dir(&objects).unwrap();
    let client = api.client();
    for plural in plurals {
        let text = match *plural {
            "nodes" => listed::<Node>(&client).await,
            "resourceslices" => listed::<ResourceSlice>(&client).await,
            "resourceclaims" => listed::<ResourceClaim>(&client).await,
            _ => listed::<DeviceClass>(&client).await,
        };
        fs_err::write(objects.join(format!("{plural}.json")), text).unwrap();
    }
    let readme = format!("divvy\n\nNot in it:\n- {missing}\n");
    fs_err::write(folder.path().join("README.txt"), readme).unwrap();
    folder
}

async fn listed<K>(client: &Client) -> String
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize,
{
    let api = kube::Api::<K>::all(client.clone());
    let found = api.list(&ListParams::default()).await.unwrap();
    serde_json::to_string(&found.items).unwrap()
}

#[tokio::test]
async fn a_bundle_is_a_cluster_without_pods_and_names_what_it_lacks() {
    let api = cluster();
    let all = ["nodes", "resourceslices", "resourceclaims", "deviceclasses"];
    let missing = "resourceclaims of namespaces other than ns";
    let folder = bundle(&api, &all, missing).await;
    let seen = Seen::of_bundle(folder.path()).unwrap();
    let held: Vec<usize> = seen.kinds().iter().map(|kind| kind.held.len()).collect();
    assert_eq!(held, [1, 0]);
    let notes = seen.notes.join("\n");
    for part in [
        "pods: a bundle has none of workloads: processor time",
        "devicetaintrules: not in the bundle: taints",
        "not in the bundle: resourceclaims of namespaces other than ns",
    ] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    let folder = bundle(&api, &all[..2], missing).await;
    let notes = Seen::of_bundle(folder.path()).unwrap().notes.join("\n");
    assert!(notes.contains("resourceclaims: not in the bundle: what is held now"));
    let folder = bundle(&api, &all[..1], missing).await;
    let error = Seen::of_bundle(folder.path()).unwrap_err().to_string();
    assert!(error.contains("it has no resourceslices"), "{error}");
}
