//! Instances, processes and clients of others on a GPU: what is published then, and what is
//! reported.

use divvy_model::mig::GpuInstanceProfileId;

use super::{named, wait_prepared};
use crate::node::{DRIVER, Node, wait};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_instance_is_left_alone_and_taints_devices_that_it_overlaps() {
    let node = Node::new("h100x1");
    node.turn_mig_on(0);
    let foreign = node
        .sim
        .make_foreign_instance(&node.gpu(0), GpuInstanceProfileId(19), 1)
        .unwrap();
    let plugin = node.start_with_everything().await;
    let published = node.published();
    let taints = |name: &str| {
        published
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, taints)| taints.clone())
    };
    let tainted = Some(vec![format!("{DRIVER}/foreign")]);
    for name in [
        "gpu-0",
        "gpu-0-mig-1g10gb-19-1",
        "gpu-0-mig-2g20gb-14-0",
        "gpu-0-mig-4g40gb-5-0",
        "gpu-0-mig-7g80gb-0-0",
    ] {
        assert_eq!(taints(name), tainted, "{name}");
    }
    for name in [
        "gpu-0-mig-1g10gb-19-0",
        "gpu-0-mig-2g20gb-14-2",
        "gpu-0-mig-3g40gb-9-4",
    ] {
        assert_eq!(taints(name), Some(vec![]), "{name}");
    }
    wait("an Event", || {
        let events = node.api.list::<k8s_openapi::api::events::v1::Event>();
        events
            .iter()
            .any(|e| e.reason.as_deref() == Some("ForeignMigInstance"))
            .then_some(())
    })
    .await;
    let beside = node.claim("beside", &["gpu-0-mig-3g40gb-9-4"]);
    assert_eq!(
        node.prepare(&beside).await,
        named(&beside, "gpu-0-mig-3g40gb-9-4")
    );
    assert_eq!(node.unprepare(&beside).await, Ok(()));
    assert_eq!(node.instances(0), [(19, 1, 1)]);
    assert_eq!(node.sim.engine().gpus()[0].instances[0].compute, [foreign]);

    // Its owner removes it; the next look finds the GPU free again.
    let gpu = node.gpu(0);
    node.sim
        .edit(|engine| engine.gpu(&gpu).unwrap().instances.clear());
    wait("no taint", || {
        node.published()
            .iter()
            .all(|(_, taints)| taints.is_empty())
            .then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lingers_in_a_partition_taints_only_what_overlaps_it() {
    let node = Node::new("h100x1");
    let plugin = node.start_with_everything().await;
    let claim = node.claim("c", &["gpu-0-mig-1g10gb-19-2"]);
    node.prepare(&claim).await.unwrap();
    let gi = node.sim.engine().gpus()[0].instances[0].instance.id;
    assert!(node.sim.start_process_in(&node.gpu(0), gi, 4242));
    assert_eq!(
        node.unprepare(&claim).await,
        Ok(()),
        "the pod must not hang"
    );
    let taints = |name: &str| {
        node.published()
            .into_iter()
            .find(|(n, _)| n == name)
            .map(|(_, taints)| taints)
            .unwrap_or_default()
    };
    wait("the taint", || {
        (!taints("gpu-0-mig-1g10gb-19-2").is_empty()).then_some(())
    })
    .await;
    assert_eq!(taints("gpu-0"), [format!("{DRIVER}/lingering")]);
    assert_eq!(taints("gpu-0-mig-1g10gb-19-3"), Vec::<String>::new());
    assert_eq!(node.instances(0), [(19, 2, 1)]);
    node.sim.end_process(4242);
    wait("the end of it", || {
        node.instances(0).is_empty().then_some(())
    })
    .await;
    wait("no taint", || {
        taints("gpu-0-mig-1g10gb-19-2").is_empty().then_some(())
    })
    .await;
    node.nothing_is_left();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_opened_by_a_process_keeps_its_mode_and_names_it() {
    let node = Node::new("h100x1");
    let plugin = node.start_with_everything().await;
    let gpu = node.gpu(0);
    node.sim
        .edit(|engine| engine.gpu(&gpu).unwrap().clients.insert("dcgm".to_owned()));
    let claim = node.claim("c", &["gpu-0-mig-1g10gb-19-0"]);
    let refused = node.prepare(&claim).await.unwrap_err();
    let why = "cannot be turned on while the GPU is in use: no process computes on it, so a process has it open (such as DCGM";
    assert!(refused.contains(why), "{refused}");
    let reported = |kind: &str| {
        let events = node.api.list::<k8s_openapi::api::events::v1::Event>();
        events.iter().any(|e| {
            e.regarding.as_ref().and_then(|about| about.kind.as_deref()) == Some(kind)
                && e.note.as_deref().is_some_and(|note| note.contains(why))
        })
    };
    wait("an Event", || reported("ResourceClaim").then_some(())).await;
    node.sim
        .edit(|engine| engine.gpu(&gpu).unwrap().clients.clear());
    assert_eq!(wait_prepared(&node, &claim).await.len(), 1);
    assert!(node.mig_is_on(0));
    plugin.stop().await;
}
