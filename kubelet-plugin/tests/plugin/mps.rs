//! A claim whose pods share its GPU by MPS: what their containers find, and what they learn of a
//! server that has died.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use divvy_api::node::GpuNodeStatus;
use divvy_claims::Unwell;
use divvy_executor::ListedServers;
use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use divvy_fake_cluster::{GpuNode, GpuPolicy};
use divvy_model::{ComputeMode, GpuDriver, MpsFault, MpsServer};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::json;

use crate::alerts::{MPS_WEDGED, fires};
use crate::node::{DRIVER, Node, POOL, wait, with_config};

/// Returns the servers that run.
fn running(servers: &ListedServers) -> Vec<MpsServer> {
    let all = servers.all().into_values();
    all.map(|running| running.server).collect()
}

/// Returns what the CDI files of a node say of MPS: variables, and mounts with their paths in
/// containers.
fn edits(node: &Node) -> Vec<String> {
    let specs = node
        .cdi_files()
        .into_values()
        .map(serde_json::from_value::<divvy_cdi::Spec>);
    let devices = specs.flat_map(|spec| spec.unwrap().devices);
    let found = devices.flat_map(|device| {
        let edits = device.container_edits;
        let env = edits
            .env
            .into_iter()
            .filter(|line| line.starts_with("CUDA_MPS"));
        let mounts = edits.mounts.into_iter();
        let mounts = mounts.filter(|mount| !mount.container_path.contains("kubernetes"));
        env.chain(mounts.map(|mount| mount.container_path))
            .collect::<Vec<_>>()
    });
    found.collect()
}

/// With R615 a share is a namespace of the server, and its containers get the sockets of that
/// namespace alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_r615_a_share_has_a_namespace_and_a_cap_of_its_memory() {
    let mut node = Node::new("h100x1");
    node.fixture.mps = true;
    node.host = node.fixture.build(&node.dir.path().join("host")).unwrap();
    let capped = crate::limits::able(&node, "any");
    let dir = node.dir.path().join("mps").display().to_string();
    let mut flags: Vec<_> = capped.iter().map(String::as_str).collect();
    flags.extend(["--mps-dir", &dir]);
    let config = node.config(&flags);
    let rule = json!({"modes": ["Whole", "Mps"], "shares": {"slots": 4}});
    node.api
        .put(&GpuPolicy::new("shares", json!({"rules": [rule]})))
        .unwrap();
    let servers = Arc::new(ListedServers::default());
    let plugin = node.start_by(config, Arc::new(node.sim.clone()), Some(servers.clone()));
    plugin.wait_ready().await;
    wait("MPS shares", || {
        let published = node.published();
        published
            .iter()
            .any(|(name, _)| name == "gpu-0-mps")
            .then_some(())
    })
    .await;
    let mut result = mk_result("gpu", DRIVER, POOL, "gpu-0-mps");
    result.share_id = Some("5c6e0000-0000-0000-0000-000000000001".to_owned());
    let granted = [("cores", "30"), ("memory", "10Gi"), ("slots", "1")];
    let granted = granted.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned())));
    result.consumed_capacity = Some(granted.into());
    let claim = allocated(mk_claim("default", "part", DRIVER, 1), vec![result]);
    let claim = node.put(claim);
    node.prepare(&claim).await.unwrap();
    assert_eq!(running(&servers), [MpsServer::NAMESPACES]);
    let all = servers.all().into_values();
    let namespaces: Vec<_> = all.flat_map(|one| one.namespaces.into_values()).collect();
    let [namespace] = namespaces[..] else {
        panic!("{namespaces:?}")
    };
    assert_eq!((namespace.cores, namespace.memory_mib), (30, Some(10_240)));
    // Nothing that a program could change, and no memory that it shares with others.
    assert_eq!(
        edits(&node),
        ["CUDA_MPS_PIPE_DIRECTORY=/run/divvy/mps", "/run/divvy/mps"]
    );
    let specs = node.cdi_files().into_values();
    let devices = specs.flat_map(|spec| {
        serde_json::from_value::<divvy_cdi::Spec>(spec)
            .unwrap()
            .devices
    });
    let edits = devices.map(|device| device.container_edits);
    for edits in edits {
        let from: Vec<_> = edits.mounts.iter().map(|mount| &mount.host_path).collect();
        let folder = namespace.name.folder().display().to_string();
        assert!(from.iter().any(|path| path.ends_with(&folder)), "{from:?}");
        let caps = |hook: &divvy_cdi::Hook| hook.args.iter().any(|arg| arg == "limits");
        assert!(edits.hooks.iter().any(caps), "its memory is not capped");
    }
    node.unprepare(&claim).await.unwrap();
    assert_eq!(running(&servers), []);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_has_a_server_and_an_event_says_when_it_began_again() {
    let mut node = Node::new("h100x1");
    node.fixture.mps = true;
    node.host = node.fixture.build(&node.dir.path().join("host")).unwrap();
    let dir = node.dir.path().join("mps").display().to_string();
    let mut config = node.config(&["--mps-dir", &dir]);
    config.timing.mps = Duration::from_millis(50);
    let servers = Arc::new(ListedServers::default());
    let sim = Arc::new(node.sim.clone());
    let plugin = node.start_by(config, sim.clone(), Some(servers.clone()));
    plugin.wait_ready().await;
    let claim = allocated(
        mk_claim("default", "served", DRIVER, 1),
        vec![mk_result("gpu", DRIVER, POOL, "gpu-0")],
    );
    let limits = json!({"kind": "GpuConfig", "mps": {"limits": {"cores": 50, "memory": "10Gi"}}});
    let claim = node.put(with_config(claim, limits));
    node.prepare(&claim).await.unwrap();
    let server = MpsServer::of_claim(Some(50), Some(10 << 30));
    assert_eq!(running(&servers), [server]);
    assert_eq!(
        edits(&node),
        [
            "CUDA_MPS_PIPE_DIRECTORY=/run/divvy/mps",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M",
            "/run/divvy/mps",
            "/dev/shm",
        ]
    );
    // The pool says what it said.
    assert!(node.published().iter().all(|(name, _)| name != "gpu-0-mps"));

    servers.die();
    let text = wait("an Event on the claim", || {
        let mut events = node.api.list::<Event>().into_iter();
        let about = |event: &Event| event.regarding.as_ref()?.name.clone();
        let found = events.find(|event| {
            event.reason.as_deref() == Some("MpsServerRestarted")
                && about(event).as_deref() == Some("served")
        });
        found?.note
    })
    .await;
    assert!(text.contains("and was started again"), "{text}");
    assert_eq!(running(&servers), [server]);
    node.unprepare(&claim).await.unwrap();
    assert_eq!(running(&servers), []);
    let gpu = node.sim.inventory().gpus.keys().next().unwrap().clone();
    let mode = sim.facts(&gpu).unwrap().compute_mode;
    assert_eq!(mode, Some(ComputeMode::Default));
    plugin.stop().await;
}

/// A server that serves no program any more is seen by all whom it concerns, and is started anew
/// once its programs have ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wedged_server_is_tainted_and_reported_until_it_is_another() {
    let mut node = Node::new("h100x1");
    node.fixture.mps = true;
    node.host = node.fixture.build(&node.dir.path().join("host")).unwrap();
    let dir = node.dir.path().join("mps").display().to_string();
    let mut config = node.config(&["--mps-dir", &dir]);
    config.timing.mps = Duration::from_millis(50);
    let rule = json!({"modes": ["Whole", "Mps"], "shares": {"slots": 4}});
    node.api
        .put(&GpuPolicy::new("shares", json!({"rules": [rule]})))
        .unwrap();
    let servers = Arc::new(ListedServers::default());
    let plugin = node.start_by(config, Arc::new(node.sim.clone()), Some(servers.clone()));
    plugin.wait_ready().await;
    let has = |name: &str| node.published().iter().any(|(one, _)| one == name);
    wait("MPS shares", || has("gpu-0-mps").then_some(())).await;
    let share = |name: &str, id: u32| {
        let mut result = mk_result("gpu", DRIVER, POOL, "gpu-0-mps");
        result.share_id = Some(format!("5c6e0000-0000-0000-0000-00000000000{id}"));
        let one = ("slots".to_owned(), Quantity("1".to_owned()));
        result.consumed_capacity = Some([one].into());
        node.put(allocated(
            mk_claim("default", name, DRIVER, 1),
            vec![result],
        ))
    };
    let (a, b, late) = (share("a", 1), share("b", 2), share("late", 3));
    node.prepare(&a).await.unwrap();
    node.prepare(&b).await.unwrap();
    fires(&plugin.metrics, &[]).await;

    let target = servers.all().into_keys().next().unwrap();
    let wedged = |is_idle| {
        let fault = MpsFault::Fault;
        Some(Unwell {
            fault,
            is_idle,
            is_lasting: true,
        })
    };
    servers.wedge(&target, wedged(false));
    let taint = "gpu.divvy.dev/mps=fault:NoSchedule".to_owned();
    wait("the taint", || {
        node.taints()["gpu-0-mps"].contains(&taint).then_some(())
    })
    .await;
    let trouble = wait("the trouble", || {
        let object = node.api.get::<GpuNode>("", "n1")?;
        let status: GpuNodeStatus = serde_json::from_value(object.status).ok()?;
        let mut troubles = status.troubles.into_iter();
        troubles.find(|trouble| trouble.kind == "mps-wedged")
    })
    .await;
    for part in [
        "is in the state FAULT",
        "claims default/a, default/b use it",
    ] {
        assert!(trouble.why.contains(part), "{trouble:?}");
    }
    wait("Events on both claims", || {
        let events = node.api.list::<Event>().into_iter();
        let of_claims = events.filter(|event| {
            event.reason.as_deref() == Some("MpsServerWedged")
                && event.regarding.as_ref().unwrap().kind.as_deref() == Some("ResourceClaim")
        });
        (of_claims.count() == 2).then_some(())
    })
    .await;
    fires(&plugin.metrics, &[MPS_WEDGED]).await;
    let error = node.prepare(&late).await.unwrap_err();
    assert!(error.contains("no program can connect to it"), "{error}");

    // The programs of both have ended, and their containers start others.
    servers.wedge(&target, wedged(true));
    wait("no taint", || {
        let taints = node.taints();
        (!taints["gpu-0-mps"].contains(&taint)).then_some(())
    })
    .await;
    let again = servers.all().into_values().next().unwrap();
    assert_eq!(again.unwell, None, "another server");
    node.prepare(&late).await.unwrap();
    plugin.stop().await;
}

/// After a change of the driver's name the supervisor of before still has the folder of that name,
/// since its pod is not replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_supervisor_of_another_driver_name_is_a_trouble_with_a_remedy() {
    let node = Node::new("h100x1");
    let run = node.dir.path().join("run");
    let folder = |driver: &str| {
        let folder = run.join(driver).join("mps");
        fs_err::create_dir_all(&folder).unwrap();
        folder
    };
    let socket = folder(DRIVER).join("supervisor.sock");
    let mut config = node.config(&["--mps-dir", &folder(DRIVER).display().to_string()]);
    config.timing.mps = Duration::from_millis(20);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let trouble = || {
        let found = node.api.get::<GpuNode>("", "n1")?;
        let status: GpuNodeStatus = serde_json::from_value(found.status).ok()?;
        let is_it = |kind: &str| kind == "mps-supervisor-away";
        Some(status.troubles.into_iter().find(|one| is_it(&one.kind)))
    };
    let generic = wait("the trouble", || trouble().flatten()).await;
    assert!(!generic.notice);
    assert!(generic.remedy.starts_with("check the supervisor's pod"));
    assert!(
        generic
            .why
            .contains(&format!("on {}: MPS", socket.display()))
    );

    // A file that a supervisor has left is no supervisor.
    drop(UnixListener::bind(folder("a.divvy.dev").join("supervisor.sock")).unwrap());
    let _before = UnixListener::bind(folder("gpu.nvidia.com").join("supervisor.sock")).unwrap();
    wait("the other name", || {
        let other = trouble().flatten()?;
        let is_named = other.why.contains("one for the driver name gpu.nvidia.com");
        (is_named && other.remedy.contains("then delete the supervisor's pod")).then_some(())
    })
    .await;
    wait("the Event", || {
        let mut events = node.api.list::<Event>().into_iter();
        events
            .any(|event| event.reason.as_deref() == Some("MpsSupervisorAway"))
            .then_some(())
    })
    .await;

    let _answers = UnixListener::bind(&socket).unwrap();
    wait("the end of the trouble", || {
        trouble().is_some_and(|one| one.is_none()).then_some(())
    })
    .await;
    plugin.stop().await;
}

/// The scheduler must not send claims where no server can be started for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mps_shares_are_tainted_while_no_supervisor_answers() {
    let mut node = Node::new("h100x1");
    node.fixture.mps = true;
    node.host = node.fixture.build(&node.dir.path().join("host")).unwrap();
    let dir = node.dir.path().join("mps");
    fs_err::create_dir_all(&dir).unwrap();
    let mut config = node.config(&["--mps-dir", &dir.display().to_string()]);
    config.timing.mps = Duration::from_millis(20);
    let rule = json!({"modes": ["Whole", "TimeSlicing", "Mps"], "shares": {"slots": 4}});
    node.api
        .put(&GpuPolicy::new("shares", json!({"rules": [rule]})))
        .unwrap();
    let servers = Arc::new(ListedServers::default());
    let plugin = node.start_by(config, Arc::new(node.sim.clone()), Some(servers));
    plugin.wait_ready().await;
    let taint = "gpu.divvy.dev/mps=supervisor-away:NoSchedule".to_owned();
    let is_tainted = |name: &str| Some(node.taints().get(name)?.contains(&taint));
    let socket = dir.join("supervisor.sock");
    for _ in 0..2 {
        wait("the taint", || is_tainted("gpu-0-mps").filter(|is| *is)).await;
        assert_eq!(is_tainted("gpu-0-ts"), Some(false), "needs no supervisor");
        assert_eq!(is_tainted("gpu-0"), Some(false));
        let answers = UnixListener::bind(&socket).unwrap();
        wait("its end", || is_tainted("gpu-0-mps").filter(|is| !*is)).await;
        drop(answers);
        fs_err::remove_file(&socket).unwrap();
    }
    plugin.stop().await;
}
