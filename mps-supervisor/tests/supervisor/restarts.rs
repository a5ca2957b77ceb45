//! A supervisor that is killed, and the next one, asked over its socket.

use super::*;

#[tokio::test]
async fn a_supervisor_that_was_killed_finds_its_daemons_again() {
    let node = Node::new();
    let program = Program::start(&node);
    let mut asks = client(&node).await;
    let target = gpu(1).to_string();
    let start = StartRequest {
        target: target.clone(),
        limits: Some(limits()),
        partition_uuid: String::new(),
        anew: false,
    };
    asks.start(start.clone()).await.unwrap();
    // That of a claim with the GPU alone has no slots.
    let own = Limits {
        slots: 0,
        cores: 50,
        memory_mib: 0,
        protocol: 2,
    };
    let start_own = StartRequest {
        target: gpu(2).to_string(),
        limits: Some(own),
        partition_uuid: String::new(),
        anew: false,
    };
    asks.start(start_own).await.unwrap();
    let before = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(before.daemons.len(), 2);
    assert_eq!(before.daemons[0].limits, Some(limits()));
    assert_eq!(before.daemons[1].limits, Some(own));
    drop(program);
    assert_eq!(node.processes().len(), 4, "daemons and servers live on");
    let _program = Program::start(&node);
    let mut asks = client(&node).await;
    let after = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(after, before);
    asks.start(start).await.unwrap();
    asks.stop(StopRequest { target }).await.unwrap();
    let target = gpu(2).to_string();
    asks.stop(StopRequest { target }).await.unwrap();
    node.has_no_process();
    for odd in ["gpu-0", &format!("{}:19", gpu(1))] {
        let refused = asks
            .stop(StopRequest {
                target: odd.to_owned(),
            })
            .await;
        assert_eq!(refused.unwrap_err().code(), tonic::Code::InvalidArgument);
    }
}

/// A partition needs its UUID, and a whole GPU has none.
#[tokio::test]
async fn a_server_of_a_partition_is_asked_for_by_its_place_and_uuid() {
    let node = Node::new();
    let _program = Program::start(&node);
    let mut asks = client(&node).await;
    let start = |target: &GpuTarget, uuid: &str| StartRequest {
        anew: false,
        target: target.to_string(),
        limits: Some(limits()),
        partition_uuid: uuid.to_owned(),
    };
    for (target, uuid) in [
        (gpu(1), "MIG-1"),
        (partition(0), ""),
        (partition(0), "GPU-1"),
    ] {
        let refused = asks.start(start(&target, uuid)).await;
        assert_eq!(refused.unwrap_err().code(), tonic::Code::InvalidArgument);
    }
    asks.start(start(&partition(0), "MIG-1")).await.unwrap();
    let state = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(state.daemons[0].target, partition(0).to_string());
    assert_eq!(state.daemons[0].partition_uuid, "MIG-1");
    let target = partition(0).to_string();
    asks.stop(StopRequest { target }).await.unwrap();
    node.has_no_process();
}

#[tokio::test]
async fn a_killed_supervisor_finds_namespaces_again_and_takes_ours_only() {
    let node = Node::new();
    let program = Program::start(&node);
    let mut asks = client(&node).await;
    let target = gpu(1).to_string();
    let unlimited = Limits {
        slots: 0,
        cores: 100,
        memory_mib: 0,
        protocol: 3,
    };
    let start = |limits| StartRequest {
        target: gpu(1).to_string(),
        limits: Some(limits),
        partition_uuid: String::new(),
        anew: false,
    };
    asks.start(start(unlimited)).await.unwrap();
    let put = |name: &str, cores| PutNamespaceRequest {
        target: gpu(1).to_string(),
        namespace: Some(Namespace {
            name: name.to_owned(),
            cores,
            memory_mib: 1044,
        }),
    };
    let ours = name(7).to_string();
    asks.put_namespace(put(&ours, 30)).await.unwrap();
    let before = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(before.daemons[0].namespaces.len(), 1);
    drop(program);
    let _program = Program::start(&node);
    let mut asks = client(&node).await;
    let after = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(after, before);
    let limited = Limits {
        cores: 50,
        ..unlimited
    };
    let odd = Limits {
        protocol: 4,
        ..unlimited
    };
    for refused in [
        asks.put_namespace(put("../default", 30)).await.map(drop),
        asks.put_namespace(put("default", 30)).await.map(drop),
        asks.put_namespace(put(&ours, 0)).await.map(drop),
        asks.start(start(limited)).await.map(drop),
        asks.start(start(odd)).await.map(drop),
    ] {
        assert_eq!(refused.unwrap_err().code(), tonic::Code::InvalidArgument);
    }
    let end = RemoveNamespaceRequest {
        target: target.clone(),
        name: ours,
    };
    asks.remove_namespace(end).await.unwrap();
    let after = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(after.daemons[0].namespaces, []);
    asks.stop(StopRequest { target }).await.unwrap();
    node.has_no_process();
}

/// Kills the supervisor at any moment of a start or a stop: the next process ends what is left.
#[tokio::test]
async fn a_supervisor_that_is_killed_at_work_leaves_no_orphan() {
    let node = Arc::new(Node::new());
    for round in 0..8_u64 {
        let program = Program::start(&node);
        let mut asks = client(&node).await;
        let target = gpu(1).to_string();
        let start = StartRequest {
            target: target.clone(),
            limits: Some(limits()),
            partition_uuid: String::new(),
            anew: false,
        };
        let works = tokio::spawn(async move {
            drop(asks.start(start).await);
            drop(asks.stop(StopRequest { target }).await);
        });
        // A moment that depends on the round: the number of processes that are there by then.
        let seen = (round % 3).try_into().unwrap_or(0);
        let until = Instant::now() + Duration::from_millis(300);
        while node.processes().len() < seen && Instant::now() < until {
            tokio::task::yield_now().await;
        }
        drop(program);
        drop(works.await);
        let _program = Program::start(&node);
        let mut asks = client(&node).await;
        let target = gpu(1).to_string();
        asks.stop(StopRequest { target }).await.unwrap();
        node.wait_for("all have ended", || node.processes().is_empty());
    }
}

/// At any moment between the commands for a namespace: the next process makes it as it is asked
/// for, and ends it.
#[tokio::test]
async fn a_supervisor_that_is_killed_amid_namespaces_leaves_none_half_made() {
    let node = Arc::new(Node::new());
    let target = gpu(1).to_string();
    let unlimited = Limits {
        slots: 0,
        cores: 100,
        memory_mib: 0,
        protocol: 3,
    };
    let start = StartRequest {
        target: target.clone(),
        partition_uuid: String::new(),
        anew: false,
        limits: Some(unlimited),
    };
    let of = |cores| Namespace {
        name: name(7).to_string(),
        cores,
        memory_mib: 1044,
    };
    let put = |cores| PutNamespaceRequest {
        target: gpu(1).to_string(),
        namespace: Some(of(cores)),
    };
    let end = || RemoveNamespaceRequest {
        target: gpu(1).to_string(),
        name: name(7).to_string(),
    };
    for round in 0..9_u32 {
        let program = Program::start(&node);
        let mut asks = client(&node).await;
        asks.start(start.clone()).await.unwrap();
        let requests = (put(30), end(), put(20));
        let works = tokio::spawn(async move {
            let (first, ends, second) = requests;
            drop(asks.put_namespace(first).await);
            drop(asks.remove_namespace(ends).await);
            drop(asks.put_namespace(second).await);
        });
        // A moment that depends on the round: before there is anything, once it is there, and once
        // it is gone.
        for is_there in [true, false].into_iter().take((round % 3) as usize) {
            let until = Instant::now() + Duration::from_secs(1);
            while sockets(&node, 7).exists() != is_there && Instant::now() < until {
                tokio::task::yield_now().await;
            }
        }
        drop(program);
        drop(works.await);
        let _program = Program::start(&node);
        let mut asks = client(&node).await;
        asks.put_namespace(put(20)).await.unwrap();
        let state = asks
            .state(StateRequest::default())
            .await
            .unwrap()
            .into_inner();
        assert_eq!(state.daemons[0].namespaces, [of(20)], "round {round}");
        asks.remove_namespace(end()).await.unwrap();
        let state = asks
            .state(StateRequest::default())
            .await
            .unwrap()
            .into_inner();
        assert_eq!(state.daemons[0].namespaces, [], "round {round}");
        assert!(!sockets(&node, 7).exists(), "round {round}");
    }
    let _program = Program::start(&node);
    let mut asks = client(&node).await;
    asks.stop(StopRequest { target }).await.unwrap();
    node.has_no_process();
}
