//! Delivery of the driver's libraries to containers.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use crate::node::{DRIVER, Node, POOL, plain, wait, with_config};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_hook_the_plugin_starts_only_where_mounts_are_chosen() {
    let node = Node::new("h100x1");
    let ended = node
        .start_with(node.config(&["--library-delivery", "hook"]))
        .ended()
        .await;
    assert!(
        ended.starts_with("there is no CDI hook program: --hook-path is not given"),
        "{ended}"
    );
    assert!(
        ended.contains("--library-delivery mounts (chart value libraryDelivery)"),
        "{ended}"
    );
    let plugin = node.start_with(node.config(&["--library-delivery", "mounts"]));
    plugin.wait_ready().await;
    plugin.stop().await;
}

/// The hook that every container's CDI file names must be reached by a user to whom only what is
/// open to all is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hook_is_where_a_user_of_a_namespace_can_call_it() {
    let node = Node::new("h100x1");
    let program = node.dir.path().join("hook");
    fs_err::write(&program, "#!/bin/sh\nexit 0\n").unwrap();
    let folder = node.dir.path().join("opt/divvy");
    let (path, dir) = (program.display().to_string(), folder.display().to_string());
    let flags = [
        "--library-delivery",
        "hook",
        "--hook-path",
        &path,
        "--hook-dir",
        &dir,
    ];
    let plugin = node.start_with(node.config(&flags));
    plugin.wait_ready().await;
    wait("slices", || {
        (node.published() == plain(&["gpu-0"])).then_some(())
    })
    .await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let installed = folder.join("divvy-cdi-hook");
    let text = node.cdi_files().into_values().next().unwrap().to_string();
    assert!(
        text.contains(&format!("\"path\":\"{}\"", installed.display())),
        "{text}"
    );
    for open in [&folder, &installed] {
        assert_eq!(
            fs_err::metadata(open).unwrap().permissions().mode() & 0o777,
            0o755
        );
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_for_graphics_have_drm_nodes_and_others_have_none() {
    let node = Node::new("rtx-pro-6000x1");
    let plugin = node.start_with(node.config(&["--offer", "everything", "--mig-profiles", "+gfx"]));
    plugin.wait_ready().await;
    wait("partitions", || {
        node.published()
            .iter()
            .any(|(name, _)| name.contains("gfx"))
            .then_some(())
    })
    .await;
    for (device, drm) in [
        ("gpu-0-mig-1g24gb-gfx-47-0", 2),
        ("gpu-0-mig-1g24gb-14-3", 0),
    ] {
        let claim = node.claim(device, &[device]);
        node.prepare(&claim).await.unwrap();
        let file = node
            .cdi_files()
            .into_values()
            .find(|file| file.to_string().contains(device))
            .unwrap();
        assert_eq!(file.to_string().matches("/dev/dri/").count(), drm, "{file}");
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extra_nodes_are_for_claims_that_ask_and_of_those_that_are_offered() {
    let node = Node::new("h100x1");
    let table = node.host.node_table.display().to_string();
    let known = fs_err::read_to_string(&table).unwrap();
    fs_err::write(
        &table,
        format!("{known}/dev/gdrdrv 240 0 666 0\n/dev/nvidia-fs0 241 0 666 0\n"),
    )
    .unwrap();
    let offered = "/dev/gdrdrv,/dev/nvidia-fs*,/dev/nvidia-caps-imex-channels/channel0";
    let plugin = node.start_with(node.config(&["--extra-nodes", offered]));
    plugin.wait_ready().await;
    wait("slices", || {
        (node.published() == plain(&["gpu-0"])).then_some(())
    })
    .await;
    let claim = |name: &str, extra: &[&str]| {
        let whole = allocated(
            mk_claim("default", name, DRIVER, 1),
            vec![mk_result("gpu", DRIVER, POOL, "gpu-0")],
        );
        node.put(with_config(
            whole,
            json!({ "kind": "GpuConfig", "extraNodes": extra }),
        ))
    };
    let extra = || {
        let file = node.cdi_files().into_values().next().unwrap().to_string();
        ["/dev/gdrdrv", "/dev/nvidia-fs0"].map(|path| file.matches(path).count())
    };

    for (name, asks, gets) in [
        ("none", &[][..], [0, 0]),
        ("some", &["/dev/gdrdrv", "/dev/nvidia-fs*"][..], [1, 1]),
    ] {
        let claim = claim(name, asks);
        node.prepare(&claim).await.unwrap();
        assert_eq!(extra(), gets, "{name}");
        node.unprepare(&claim).await.unwrap();
        node.api.delete::<ResourceClaim>("default", name).unwrap();
    }
    let refused = node
        .prepare(&claim("more", &["/dev/kvm"]))
        .await
        .unwrap_err();
    assert!(
        refused.contains(
            "requests /dev/kvm (extraNodes), but this node offers only /dev/gdrdrv, /dev/nvidia-fs*, /dev/nvidia-caps-imex-channels/channel0 to claims (remove /dev/kvm from the config, or let an administrator add it to the chart value extraNodes)"
        ),
        "{refused}"
    );
    let absent = ["/dev/nvidia-caps-imex-channels/channel0"];
    let refused = node.prepare(&claim("absent", &absent)).await.unwrap_err();
    assert!(
        refused.contains("the node has no /dev/nvidia-caps-imex-channels/channel0"),
        "{refused}"
    );
    assert_eq!(node.cdi_files().len(), 0);
    plugin.stop().await;
}

#[test]
fn a_folder_for_the_hook_that_is_mounted_noexec_is_refused() {
    let allowed = Command::new("unshare")
        .args(["-Urm", "true"])
        .status()
        .is_ok_and(|done| done.success());
    if !allowed {
        return; // user namespaces are not allowed here
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (node, kubeconfig) = runtime.block_on(async {
        let node = Node::new("h100x1");
        let server = node.api.serve_http().await.unwrap();
        (node, server.kubeconfig())
    });
    let dir = node.dir.path();
    let (config, folder) = (dir.join("kubeconfig"), dir.join("noexec"));
    fs_err::write(&config, kubeconfig).unwrap();
    fs_err::create_dir(&folder).unwrap();
    let script = format!(
        "mount -t tmpfs -o noexec none {folder} && exec {plugin} --node-name n1 --kubeconfig {config} \
         --plugin-dir {dir}/p --registry-dir {dir}/r --cdi-dir {dir}/c --host-root {dir}/host \
         --hook-path /bin/true --hook-dir {folder}",
        folder = folder.display(),
        plugin = env!("CARGO_BIN_EXE_divvy-kubelet-plugin"),
        config = config.display(),
        dir = dir.display(),
    );
    let out = Command::new("unshare")
        .args(["-Urm", "sh", "-c", &script])
        .output()
        .unwrap();
    assert!(!out.status.success());
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(
        text.contains("chart value hookDir: a writable folder of the host"),
        "{text}"
    );
    assert!(text.contains("it is mounted noexec"), "{text}");
}
